"""DistributedDataParallel's communication hook: average a bucket of gradients, or leave it local, as the plan says."""

# No postponed annotations here: DDP compares those of a hook with the types themselves.

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.gradient_round import BucketRounds, GradientRound, as_it_is
from hf_compressopt.collectives.slots import Slot, plain_slots, require_same_slots
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.schedules import StepPlan


class HasSlots(Protocol):
    """The part of an optimizer that says how averaged gradients travel.

    Attributes:
        bits: Bits per element: 4, 8, 16 or 32.
        checked: What the ranks have compared for :func:`~hf_compressopt.average_gradients`.
    """

    bits: int
    checked: str

    def slots(
        self, loss_scale: float | None = None, *, owner: int = 0, present: Collection[Tensor] | None = None
    ) -> list[Slot]:
        """Return the slots in which the gradients of a round travel.

        Args:
            loss_scale: Factor that the gradients carry; None for the one that a gradient scaler has found before.
            owner: Number of the optimizer.
            present: The parameters whose gradients come in the round; None for all.
        """
        ...


class HasEarlySlots(Protocol):
    """The part of an optimizer whose messages may leave during backward."""

    def due(self, plan: StepPlan, before: StepPlan) -> bool:
        """Return whether they leave in the coming backward pass, by its step's plan and by that of the step before."""
        ...

    def slots(
        self, loss_scale: float | None = None, *, owner: int = 0, present: Collection[Tensor] | None = None
    ) -> list[Slot]:
        """Return the slots in which they leave; see :meth:`HasSlots.slots`."""
        ...

    def note_gradients(self) -> None:
        """Take note of the gradients that a backward pass has left behind."""
        ...


class HasPlan(Protocol):
    """An optimizer that says whether the coming step needs averaged gradients, and how they travel then."""

    communicator: Communicator
    traffic: Traffic
    warmup_gradients: HasSlots
    early_messages: HasEarlySlots
    zero_stage: int

    def label_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Use these names of parameters in messages."""
        ...

    @property
    def last_plan(self) -> StepPlan:
        """The plan of the last step."""
        ...

    @property
    def plan(self) -> StepPlan:
        """The plan of the coming step."""
        ...

    @property
    def trainable_parameters(self) -> Sequence[Tensor]:
        """The parameters that the optimizer updates."""
        ...

    def own_parameters(self) -> Sequence[Tensor]:
        """The parameters of param groups with a process group of their own."""
        ...


class GradientSync:
    """State of :func:`ddp_hook` on one DistributedDataParallel model.

    Without an optimizer the hook does what DDP does without a hook.

    Attributes:
        optimizers: The optimizers that own the model's parameters.
        communicator: The ranks that DDP averages over.
        params: The parameters that DDP averages.
        loss_scale: Returns the factor that gradients carry; None leaves it to the optimizers.
    """

    def __init__(
        self, communicator: TorchCommunicator, optimizers: Sequence[HasPlan] = (), params: Sequence[Tensor] = ()
    ) -> None:
        """Bind the hook to a communicator and to the optimizers that own the model's parameters."""
        self.communicator = communicator
        self.optimizers, self.params = tuple(optimizers), tuple(params)
        self.loss_scale: Callable[[], float] | None = None
        self._buckets, self._checked = BucketRounds(), ""

    @property
    def reduce_grads(self) -> bool:
        """True if the coming step needs averaged gradients."""
        return not self.optimizers or any(optimizer.plan.reduce_grads for optimizer in self.optimizers)

    def bind(self, optimizers: Sequence[HasPlan], loss_scale: Callable[[], float] | None = None) -> None:
        """Follow the plans of these optimizers, and count the bytes of the hook as the first one's."""
        self.optimizers, self.loss_scale = tuple(optimizers), loss_scale
        self.communicator.traffic = optimizers[0].traffic if optimizers else Traffic()

    def average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Take a bucket of DDP's, and return the future of its averages; :func:`ddp_hook` calls it."""
        if self._has_slots():
            future = self._buckets.add(bucket, self._start)
            if bucket.is_last() and any(map(_sends_early, self.optimizers)):
                _after_backward(self._note_gradients)
            return future
        buffer = bucket.buffer()
        if not self.reduce_grads:
            return as_it_is(buffer)
        buffer.mul_(1.0 / self.communicator.world_size)
        return self.communicator.all_reduce_future(buffer)

    def _note_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.early_messages.note_gradients()

    def _has_slots(self) -> bool:
        """Return whether some gradients travel otherwise than others, or otherwise than by DDP, or in messages."""
        reduced = [optimizer for optimizer in self.optimizers if optimizer.plan.reduce_grads]
        low = any(optimizer.warmup_gradients.bits < 32 for optimizer in reduced)
        early = any(map(_sends_early, self.optimizers))
        return self.communicator.world_size > 1 and (early or low or 0 < len(reduced) < len(self.optimizers))

    def _start(self) -> GradientRound:
        """Start the round of a backward pass. All ranks call.

        Slots leave in the order in which backward brings their last gradient, if it goes through the model's
        parameters from the last to the first.
        """
        scale = None if self.loss_scale is None else float(self.loss_scale())
        owned, slots = set(), []
        for number, optimizer in enumerate(self.optimizers):
            owned |= set(optimizer.trainable_parameters)
            if optimizer.plan.reduce_grads:
                slots += optimizer.warmup_gradients.slots(scale, owner=number, present=self.params)
            elif _sends_early(optimizer):
                slots += optimizer.early_messages.slots(scale, owner=number, present=self.params)
        averaged = self.params if self.reduce_grads else ()
        others = [param for param in averaged if param.requires_grad and param not in owned]
        slots += plain_slots(others, self.communicator, len(self.optimizers))
        position = {param: number for number, param in enumerate(self.params)}
        slots.sort(key=lambda slot: min(position[param] for param in slot.members()), reverse=True)
        self._checked = require_same_slots(slots, self.communicator, self._checked)
        return GradientRound(slots)


def _after_backward(act: Callable[[], None]) -> None:
    """Call a function after this backward pass, when DDP has written all gradients. It must start no collective.

    DDP writes them in a callback at the end of the pass, which it queues behind those that its hooks have queued. What
    a callback queues comes behind both.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(act))


def _sends_early(optimizer: HasPlan) -> bool:
    return optimizer.early_messages.due(optimizer.plan, optimizer.last_plan)


def ddp_hook(
    state: GradientSync,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the ranks, or leave it local, as the optimizers' plan says.

    With ``warmup_bits=32`` the average has the bits of DDP's own: times 1/W first, then the all-reduce.

    Args:
        state: The optimizers and the ranks.
        bucket: DDP's bucket; its buffer is [numel], of the gradients' dtype.

    Returns:
        The buffer, as DDP expects it: the average or this rank's own gradients.

    Raises:
        TypeError: If the bucket holds a sparse gradient.
        ValueError: If the ranks differ in the gradients that they average, or in how, on all ranks.
    """
    if bucket.buffer().is_sparse:
        raise TypeError("sparse gradients are not supported: make the embedding with sparse=False")
    return state.average(bucket)


def attach_ddp(
    model: DistributedDataParallel, *optimizers: HasPlan, loss_scale: Callable[[], float] | None = None
) -> GradientSync:
    """Register :func:`ddp_hook` on a DDP model, for a training loop of your own. Call it before the first step.

    A model that has the hook already follows the new optimizers from now on. Trainer and CompressOptAccelerator
    register the hook themselves.

    Args:
        model: The model, wrapped in DistributedDataParallel.
        *optimizers: The compressed optimizers that own the model's parameters.
        loss_scale: Returns the factor that the gradients of the coming step carry, such as a
            ``GradScaler.get_scale``. Without it a hf_compressopt.GradScaler tells the optimizers after each step.

    Returns:
        The state of the hook.

    Raises:
        TypeError: If the model is no DistributedDataParallel, or an optimizer has no plan.
        ValueError: If the hook cannot work: the model has another hook, averages over other ranks than an optimizer,
            or averages parameters that an optimizer averages by itself.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model must be a DistributedDataParallel, got {type(model).__name__}")
    for optimizer in optimizers:
        if not hasattr(type(optimizer), "plan"):
            raise TypeError(
                f"optimizers must be compressed optimizers, such as OnebitAdam, got {type(optimizer).__name__}: DDP "
                "averages the gradients of any other by itself"
            )
    check_owners(model, optimizers)
    sync = find_sync(model)
    if sync is None:
        device = next(model.parameters()).device  # that of an optimizer may be where its model was before
        named, ignored = model.module.named_parameters(), model.parameters_to_ignore
        averaged = [param for name, param in named if name not in ignored]
        sync = GradientSync(TorchCommunicator(model.process_group, device=device), params=averaged)
        _register(model, sync)
    sync.bind(optimizers, loss_scale)
    for optimizer in optimizers:
        optimizer.label_parameters(model.module.named_parameters())
    return sync


def find_sync(model: DistributedDataParallel) -> GradientSync | None:
    """The state of the model's :func:`ddp_hook`, or None if the model has none."""
    registered: Iterable[tuple[Any, Any]] = model._comm_hooks
    return next((state for hook, state in registered if hook is ddp_hook), None)


def _register(model: DistributedDataParallel, sync: GradientSync) -> None:
    try:
        model.register_comm_hook(sync, ddp_hook)
    except RuntimeError as error:
        raise ValueError(
            "a compressed optimizer needs DDP's communication hook for itself, but the model has one already: remove "
            f"your own comm_hook ({error})"
        ) from error


def check_owners(model: DistributedDataParallel, optimizers: Sequence[HasPlan]) -> None:
    """Check that DDP and the optimizers can share the averaging of the model's gradients.

    Raises:
        ValueError: If they cannot.
    """
    if any(optimizer.zero_stage == 2 for optimizer in optimizers):
        raise ValueError(
            "zero_stage=2 frees gradients while backward runs, and the buckets of DistributedDataParallel hold them: "
            "do not wrap the model, or give zero_stage=1; in Accelerate give model and optimizer to one "
            "prepare(model, optimizer)"
        )
    own = {id(p) for optimizer in optimizers for p in optimizer.own_parameters()}
    ignored = model.parameters_to_ignore
    averaged = [name for name, p in model.module.named_parameters() if id(p) in own and name not in ignored]
    if averaged:
        raise ValueError(
            f"{averaged[0]} is in a param group with a process_group of its own, over which the optimizer averages "
            "its gradient, but DistributedDataParallel averages it over all ranks: before the model is prepared, "
            "call DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)"
        )
    world_size = dist.get_world_size(model.process_group)
    if any(optimizer.communicator.world_size != world_size for optimizer in optimizers):
        raise ValueError(
            f"the model averages over {world_size} ranks, its optimizer over "
            f"{[optimizer.communicator.world_size for optimizer in optimizers]}: make the optimizer after the process "
            "group"
        )
