"""Where gradients meet the wire: DDP's communication hook, and what step() itself sends of gradients."""

# No postponed annotations here: DDP compares those of a hook with the types themselves.

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.flat import FlatLayout
from hf_compressopt.stages import StepPlan


class HasPlan(Protocol):
    """An optimizer that says whether the coming step wants averaged gradients."""

    @property
    def plan(self) -> StepPlan:
        """What the coming step does."""
        ...


class GradientSync:
    """State of :func:`ddp_hook` on one DistributedDataParallel model.

    With no optimizer bound the hook does what DDP does without a hook.

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
        """True where the coming step expects averaged gradients."""
        return not self.optimizers or any(optimizer.plan.reduce_grads for optimizer in self.optimizers)


def ddp_hook(
    state: GradientSync,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """DDP communication hook: average a bucket of gradients over the ranks, or leave it local, as the plan says.

    The average has the bits of DDP's own: times 1/W first, then the all-reduce.

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


def average_gradients(
    grads: Sequence[Tensor | None], layout: FlatLayout, shapes: Sequence[torch.Size], communicator: Communicator
) -> list[Tensor | None]:
    """Average one group's local gradients over the ranks, bucket by bucket. All ranks call.

    Args:
        grads: One local gradient per parameter; None where this rank has none.
        layout: Layout of the group.
        shapes: Shapes of the parameters.
        communicator: The ranks.

    Returns:
        The averages, new float32 tensors; None where no rank has a gradient.
    """
    device = communicator.device
    present = torch.tensor([float(grad is not None) for grad in grads], dtype=torch.float32, device=device)
    flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)  # [numel]
    for grad, start, numel in zip(grads, layout.starts, layout.numels, strict=True):
        if grad is not None:
            flat[start : start + numel] = grad.reshape(-1)
    flat.mul_(1.0 / communicator.world_size)
    handles = [communicator.all_reduce(present, op="max")]
    handles += [communicator.all_reduce(flat[bucket.start : bucket.stop]) for bucket in layout.buckets]
    for handle in handles:
        handle.wait()
    views = [flat[start : start + numel] for start, numel in zip(layout.starts, layout.numels, strict=True)]
    rows = zip(views, shapes, present.tolist(), strict=True)
    return [view.view(shape) if has_grad else None for view, shape, has_grad in rows]
