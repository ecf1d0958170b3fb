"""DistributedDataParallel's communication hook: average a bucket of gradients, or leave it local, as the plan says."""

# No postponed annotations here: DDP compares those of a hook with the types themselves.

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.schedules import StepPlan


class HasPlan(Protocol):
    """An optimizer that says whether the coming step needs averaged gradients."""

    communicator: Communicator
    traffic: Traffic

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
    """

    def __init__(self, communicator: TorchCommunicator, optimizers: Sequence[HasPlan] = ()) -> None:
        """Bind the hook to a communicator and to the optimizers that own the model's parameters."""
        self.communicator = communicator
        self.optimizers = tuple(optimizers)

    @property
    def reduce_grads(self) -> bool:
        """True if the coming step needs averaged gradients."""
        return not self.optimizers or any(optimizer.plan.reduce_grads for optimizer in self.optimizers)

    def bind(self, optimizers: Sequence[HasPlan]) -> None:
        """Follow the plans of these optimizers, and count the bytes of the hook as the first one's."""
        self.optimizers = tuple(optimizers)
        self.communicator.traffic = optimizers[0].traffic if optimizers else Traffic()


def ddp_hook(
    state: GradientSync,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the ranks, or leave it local, as the optimizers' plan says.

    The average has the bits of DDP's own: times 1/W first, then the all-reduce.

    Args:
        state: The optimizers and the ranks.
        bucket: DDP's bucket; its buffer is [numel], of the gradients' dtype.

    Returns:
        The buffer, as DDP expects it: the average or this rank's own gradients.

    Raises:
        TypeError: If the bucket holds a sparse gradient.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise TypeError("sparse gradients are not supported: make the embedding with sparse=False")
    if state.reduce_grads:
        buffer.mul_(1.0 / state.communicator.world_size)
        return state.communicator.all_reduce_future(buffer)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def attach_ddp(model: DistributedDataParallel, *optimizers: HasPlan) -> GradientSync:
    """Register :func:`ddp_hook` on a DDP model, for a training loop of your own. Call it before the first step.

    A model that has the hook already follows the new optimizers from now on. Trainer and CompressOptAccelerator
    register the hook themselves.

    Args:
        model: The model, wrapped in DistributedDataParallel.
        *optimizers: The compressed optimizers that own the model's parameters.

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
        device = optimizers[0].communicator.device if optimizers else next(model.parameters()).device
        sync = GradientSync(TorchCommunicator(model.process_group, device=device))
        _register(model, sync)
    sync.bind(optimizers)
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
