"""Averages of gradients in full precision: of one param group in step(), and of a plain loop's gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.ddp_hook import HasPlan
from hf_compressopt.collectives.gradient_round import GradientRound
from hf_compressopt.collectives.slots import Slot, require_same_slots
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.flat import FlatLayout

_BUCKET_BYTES = 25 * 2**20


def average_gradients(
    optimizer_or_params: HasPlan | Iterable[Tensor],
    process_group: dist.ProcessGroup | None = None,
    *,
    loss_scale: float | None = None,
) -> None:
    """Average ``p.grad`` over the ranks, in place, for a training loop without DDP. All ranks call.

    Call it between ``backward()`` and ``step()``. Given a compressed optimizer, it does what the optimizer's plan says,
    in the form that its ``warmup_bits`` say: in steps that need local gradients it does nothing. A parameter without a
    gradient on some of the ranks counts as zero there; one without a gradient on any rank stays without.

    Args:
        optimizer_or_params: A compressed optimizer, or parameters, alike on all ranks.
        process_group: The ranks, for parameters; None is the default group. An optimizer knows its own.
        loss_scale: Factor that the gradients carry, such as a ``GradScaler.get_scale()``, for an optimizer. Without it
            a hf_compressopt.GradScaler tells the optimizer after each step.

    Raises:
        TypeError: If a gradient is sparse.
        ValueError: If a process_group is given with an optimizer, and if the ranks differ in the gradients that they
            average, or in how.
    """
    slots: list[Slot] = []
    if isinstance(optimizer_or_params, Iterable):
        params = [p for p in optimizer_or_params if p.requires_grad]
        device = params[0].device if params else None
        communicator: Communicator = TorchCommunicator(process_group, device=device)
    else:
        if process_group is not None:
            raise ValueError("process_group belongs to parameters: an optimizer knows its own ranks")
        if not optimizer_or_params.plan.reduce_grads:
            return
        own = {id(p) for p in optimizer_or_params.own_parameters()}  # step() averages these over their own ranks
        params = [p for p in optimizer_or_params.trainable_parameters if id(p) not in own]
        communicator, form = optimizer_or_params.communicator, optimizer_or_params.warmup_gradients
        if communicator.world_size > 1 and form.bits < 32:
            slots = form.slots(loss_scale)[::-1]
            form.checked = require_same_slots(slots, communicator, form.checked)
    if communicator.world_size > 1 and params:
        with torch.no_grad():
            _average(params, communicator, slots)


def _average(params: Sequence[Tensor], communicator: Communicator, slots: Sequence[Slot]) -> None:
    sparse = any(p.grad is not None and p.grad.layout != torch.strided for p in params)
    present = torch.tensor(
        [float(p.grad is not None) for p in params] + [2.0 * sparse], dtype=torch.float32, device=communicator.device
    )
    communicator.all_reduce(present, op="max").wait()
    *has_grad, any_sparse = present.tolist()
    if any_sparse:
        raise TypeError("sparse gradients are not supported: make the embedding with sparse=False")
    rows = [p for p, found in zip(params, has_grad, strict=True) if found]
    for p in rows:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if slots:
        current = GradientRound(slots)
        for p in reversed(params):
            current.add(p, p.grad)
        current.finish()
        return
    for bucket in _buckets([p.grad for p in rows if p.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])  # [numel of the bucket]
        flat.mul_(1.0 / communicator.world_size)
        communicator.all_reduce(flat).wait()
        for grad, part in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view(grad.shape))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype and device, up to 25 MiB together."""
    bucket: list[Tensor] = []
    nbytes = 0
    for grad in grads:
        full = bucket and nbytes + grad.nbytes > _BUCKET_BYTES
        if full or (bucket and (grad.dtype, grad.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(grad)
        nbytes += grad.nbytes
    if bucket:
        yield bucket


def average_group(
    grads: Sequence[Tensor | None], layout: FlatLayout, shapes: Sequence[torch.Size], communicator: Communicator
) -> list[Tensor | None]:
    """Average one param group's local gradients over the ranks, bucket by bucket. All ranks call.

    Args:
        grads: One local gradient per parameter; None if this rank has none.
        layout: Layout of the group.
        shapes: Shapes of the parameters.
        communicator: The ranks.

    Returns:
        The averages, new float32 tensors; None for a parameter without a gradient on any rank.
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
