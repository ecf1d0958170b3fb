"""The communication hook of DistributedDataParallel, which follows the plans of compressed optimizers."""

# No postponed annotations here: DDP compares those of a hook with the types themselves.

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt.collectives.apart import may_be_apart, warn_of_reads
from hf_compressopt.collectives.communicator import Traffic
from hf_compressopt.collectives.feedback import after_backward
from hf_compressopt.collectives.gradients import (
    GradientBucket,
    GradientRounds,
    OverlapForms,
    PlannedOptimizer,
    plain_buckets,
)
from hf_compressopt.collectives.sender import SendRecord, StepPasses, as_it_is, check_bucket, note_sent
from hf_compressopt.collectives.torch_dist import TorchCommunicator

logger = logging.getLogger(__name__)


class GradientSync:
    """State of :func:`ddp_hook` on one DistributedDataParallel model.

    Without an optimizer the hook does what DDP does without a hook.

    Attributes:
        optimizers: The compressed optimizers that own the model's parameters.
        communicator: The ranks that DDP averages over.
        params: The parameters that DDP averages.
        loss_scale: Returns the factor that gradients carry; None leaves it to the optimizers.
    """

    def __init__(
        self,
        communicator: TorchCommunicator,
        optimizers: Sequence[PlannedOptimizer] = (),
        params: Sequence[Tensor] = (),
    ) -> None:
        """Bind the hook to a communicator and to the optimizers that own the model's parameters."""
        self.communicator = communicator
        self.optimizers, self.params = tuple(optimizers), tuple(params)
        self.loss_scale: Callable[[], float] | None = None
        self._rounds = GradientRounds()
        self._record = SendRecord("attach_ddp")
        self._groups = 0  # param groups that the record knows
        self._unowned: list[Tensor] = []  # parameters of the model that none of the optimizers has
        self._told_of_unowned = False
        self._others: tuple[list[Tensor], list[GradientBucket]] = ([], [])
        self._overlaps: list[OverlapForms | None] = []  # of each optimizer, what sends in the pass under way
        self._sends = self._reduces = self._hands_out = False  # in it
        self._compared = True  # the ranks have compared the optimizers that they bound last
        self.reads_are_watched = False  # the model warns where it is read while ranks are apart

    def bind(self, optimizers: Sequence[PlannedOptimizer], loss_scale: Callable[[], float] | None = None) -> None:
        """Follow the plans of these optimizers, and count the bytes of the hook as the first one's."""
        self.optimizers, self.loss_scale = tuple(optimizers), loss_scale
        self._compared = not optimizers or self.communicator.world_size == 1
        self.communicator.count_in(optimizers[0].traffic if optimizers else Traffic())
        self._record.close()
        self._record = SendRecord(" and ".join(sorted({type(each).__name__ for each in optimizers})))
        self._answer()

    def close_passes(self, doing: str) -> None:
        """Raise an error on all ranks if one is still in a backward pass. All ranks call."""
        for optimizer in self.optimizers:
            optimizer.passes.close(doing)

    def _answer(self) -> None:
        """Answer for the gradients of the optimizers' parameters, in this model or not."""
        self._groups = sum(len(optimizer.param_groups) for optimizer in self.optimizers)
        owned = {param for optimizer in self.optimizers for param in optimizer.trainable_parameters}
        self._unowned = [param for param in self.params if param not in owned]
        if self.communicator.world_size > 1:
            shared = [optimizer.shared_parameters() for optimizer in self.optimizers]
            for named in shared:
                self._record.add(named)
            for optimizer in self.optimizers[:1]:
                optimizer.passes.note_members(sum(map(len, shared)))

    def average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Take a bucket of DDP's, and return the future of its averages; :func:`ddp_hook` calls it."""
        if bucket.index() == 0:
            self._begin_pass()
        if self._sends:
            future = self._rounds.add_ddp_bucket(bucket, self._start)
            if bucket.is_last() and self._hands_out:
                after_backward(self._note_gradients)
            return future
        buffer = bucket.buffer()
        if not self._reduces:
            return as_it_is(buffer)
        note_sent(bucket.parameters())
        buffer.mul_(1.0 / self.communicator.world_size)
        return self.communicator.all_reduce_future(buffer)

    def _begin_pass(self) -> None:
        """Decide how the gradients of the pass travel: by DDP's own all-reduce, otherwise, or not at all.

        The ranks compare how many passes there were, before messages that may meet those of a step. With local
        gradients they do so in the step.
        """
        if not self._compared:  # before a message that a rank with other options would not understand
            for optimizer in self.optimizers:
                optimizer.require_same_options()
            self._compared = True
        if self._groups != sum(len(optimizer.param_groups) for optimizer in self.optimizers):
            self._answer()
        reduced = [optimizer for optimizer in self.optimizers if optimizer.plan.reduce_grads]
        self._overlaps = [_due_overlap(optimizer) for optimizer in self.optimizers]
        beside = any(param.requires_grad for param in self._unowned)
        self._reduces = not self.optimizers or bool(reduced) or beside
        low = any(optimizer.warmup_gradients.bits < 32 for optimizer in reduced)
        self._hands_out = low or any(overlap is not None for overlap in self._overlaps)
        unlike = self._reduces and len(reduced) < len(self.optimizers)
        self._sends = self.communicator.world_size > 1 and (self._hands_out or unlike)
        if beside and self.optimizers and not self._told_of_unowned:
            self._tell_of_unowned()
        if self._reduces and self.optimizers and self.communicator.world_size > 1:
            self._note_what_is_alike(self.optimizers[0].passes)
        ranks = [self.communicator] if self._reduces else []  # the first one compares for all that are averaged
        for optimizer, overlap in zip(self.optimizers, self._overlaps, strict=True):
            if optimizer.overlap is not None:
                optimizer.overlap.forget_clipping()  # also if it does not send in this pass
            if overlap is not None:
                overlap.sent_by_hook()
                ranks = [self.communicator]
            optimizer.passes.begin(*ranks)
            ranks = []

    def _note_what_is_alike(self, passes: StepPasses) -> None:
        """Note for the comparison of a pass how many parameters are trained, and by which hyperparameters."""
        shared = [param for each in self.optimizers for _, param in each.shared_parameters()]
        passes.note_members(sum(param.requires_grad for param in shared))
        passes.note_hyperparameters([optimizer.hyperparameters() for optimizer in self.optimizers])

    def _tell_of_unowned(self) -> None:
        self._told_of_unowned = True
        if self.communicator.rank == 0 and self.communicator.world_size > 1:
            logger.warning(
                "%d trainable parameter tensors of the DistributedDataParallel model belong to no optimizer that "
                "attach_ddp knows: their gradients are averaged in full precision in every step. Set "
                "requires_grad_(False) for those that nobody trains",
                sum(param.requires_grad for param in self._unowned),
            )

    def _note_gradients(self) -> None:
        for optimizer in self.optimizers:
            if optimizer.overlap is not None:
                optimizer.overlap.note_gradients()
            optimizer.warmup_gradients.hand_out(self._rounds.before)

    def _start(self) -> None:
        """Start the round of a backward pass, in the order of last gradients if backward goes from last to first."""
        scale = None if self.loss_scale is None else float(self.loss_scale())
        buckets: list[GradientBucket] = []
        for number, (optimizer, overlap) in enumerate(zip(self.optimizers, self._overlaps, strict=True)):
            if optimizer.plan.reduce_grads:
                buckets += optimizer.warmup_gradients.buckets(scale, owner=number, present=self.params)
            elif overlap is not None:
                buckets += overlap.buckets(scale, owner=number, present=self.params)
        others = [param for param in self._unowned if param.requires_grad]
        if len(others) != len(self._others[0]) or any(a is not b for a, b in zip(others, self._others[0], strict=True)):
            self._others = others, plain_buckets(others, self.communicator, len(self.optimizers))
        buckets += self._others[1]
        position = {param: number for number, param in enumerate(self.params)}
        buckets.sort(key=lambda bucket: min(position[param] for param in bucket.members()), reverse=True)
        self._rounds.begin(buckets, self.communicator)


def _due_overlap(optimizer: PlannedOptimizer) -> OverlapForms | None:
    """Return what sends the messages of the coming step during backward; None if they leave in the step."""
    overlap = optimizer.overlap
    return overlap if overlap is not None and overlap.due(optimizer.plan, optimizer.last_plan) else None


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
    check_bucket(bucket)
    return state.average(bucket)


def attach_ddp(
    model: DistributedDataParallel, *optimizers: PlannedOptimizer, loss_scale: Callable[[], float] | None = None
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
        try:
            model.register_comm_hook(sync, ddp_hook)
        except RuntimeError as error:
            raise ValueError(
                "a compressed optimizer needs DDP's communication hook for itself, but the model has one already: "
                f"remove your own comm_hook ({error})"
            ) from error
        model.join_hook = partial(_join_hook, model.join_hook, sync)  # type: ignore[method-assign]
    for optimizer in optimizers:
        optimizer.label_parameters(model.module.named_parameters())
    if not sync.reads_are_watched and any(map(may_be_apart, optimizers)):
        sync.reads_are_watched = True
        warn_of_reads(model.module, partial(_optimizers_of, ref(sync)))
    sync.bind(optimizers, loss_scale)
    return sync


def _optimizers_of(sync: Callable[[], GradientSync | None]) -> Sequence[PlannedOptimizer]:
    """The optimizers of a hook while it lives: the hooks of a module, which outlives its wrapper, keep none alive."""
    alive = sync()
    return () if alive is None else alive.optimizers


def _join_hook(original: Callable[..., Any], sync: GradientSync, **kwargs: Any) -> Any:
    """Refuse torch's Join context while the model's optimizer is one that all ranks must step together."""
    for optimizer in sync.optimizers:
        optimizer.join_hook()
    return original(**kwargs)


def find_sync(model: DistributedDataParallel) -> GradientSync | None:
    """The state of the model's :func:`ddp_hook`, or None if the model has none."""
    registered: Iterable[tuple[Any, Any]] = model._comm_hooks
    return next((state for hook, state in registered if hook is ddp_hook), None)


def check_owners(model: DistributedDataParallel, optimizers: Sequence[PlannedOptimizer]) -> None:
    """Check that DDP and the optimizers can share the averaging of the model's gradients."""
    if any(optimizer.zero_stage == 2 for optimizer in optimizers):
        raise ValueError(
            "zero_stage=2 frees gradients while backward runs, and the buckets of DistributedDataParallel hold them: "
            "do not wrap the model, or give zero_stage=1; in Accelerate give model and optimizer to one "
            "prepare(model, optimizer)"
        )
    if optimizers and dist.get_world_size(model.process_group) > 1:
        refuse_gradient_readers(model.module, type(optimizers[0]).__name__)
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


def refuse_gradient_readers(model: torch.nn.Module, name: str) -> None:
    """Raise for a model whose own code reads averaged gradients after a step, of which an optimizer leaves none."""
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        kinds = [getattr(each, "peft_type", "") for each in adapters.values()] if isinstance(adapters, dict) else []
        if any(str(getattr(kind, "value", kind)) == "ADALORA" for kind in kinds):
            raise ValueError(
                f"AdaLoRA prunes by p.grad after each step (update_and_allocate), and {name} leaves no averaged "
                "gradients there: the ranks would prune differently. Use grad_compression='int4' or 'int8' with an "
                "ordinary optimizer, whose gradients are averaged, or LoRA"
            )
