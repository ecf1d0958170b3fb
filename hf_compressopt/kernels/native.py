"""The native kernels: calls of the C interface, ``csrc/compressopt.h``.

The functions implement :class:`hf_compressopt.kernels.protocol.Kernels`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from hf_compressopt.kernels.c_operands import (
    DTYPES,
    Operands,
    block_argument,
    descent_record,
    lamb_record,
    mark_written,
    pointer_to,
)
from hf_compressopt.kernels.errors import Errors, keep_errors_, like_errors, tensor_of, values_of_errors
from hf_compressopt.kernels.library import call, has
from hf_compressopt.kernels.memory import dense_values
from hf_compressopt.kernels.messages import chunk_message_nbytes, message_nbytes
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.updates import AdamUpdate, LambMoments, LambOptions, LocalUpdate, ParameterSync
from hf_compressopt.kernels.variance import Variance


def compress_(z: Combination, error: Errors, messages: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.compress_`."""
    use, n, block = Operands(error.device, z.numel), z.numel, block_argument(scale_block)
    nbytes = sum(chunk_message_nbytes(n, world_size, scale_block))
    out = pointer_to("messages", messages, use.device, torch.uint8, nbytes)
    arguments = use.combination(z), use.errors("error", error, world_size), out, n, block, world_size
    call("co_compress", use.device, *arguments)
    mark_written([tensor_of(error), messages])


def compress_only_(z: Combination, error: Errors, messages: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.compress_only_`."""
    if not has("co_compress_only", error.device):  # the kernel that writes errors gets a copy
        copy = like_errors(error)
        tensor_of(copy).copy_(tensor_of(error))
        return compress_(z, copy, messages, world_size, scale_block)
    use, n, block = Operands(error.device, z.numel), z.numel, block_argument(scale_block)
    nbytes = sum(chunk_message_nbytes(n, world_size, scale_block))
    out = pointer_to("messages", messages, use.device, torch.uint8, nbytes)
    errors = use.errors("error", error, world_size, written=False)
    call("co_compress_only", use.device, use.combination(z), errors, out, n, block, world_size)
    mark_written([messages])


def commit_(z: Combination, error: Errors, own: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.commit_`."""
    if not has("co_commit", error.device):
        return _composed_commit_(z, error, own, world_size, scale_block)
    use, n, block = Operands(error.device, z.numel), z.numel, block_argument(scale_block)
    sent = use.read("own", own, torch.uint8, sum(chunk_message_nbytes(n, world_size, scale_block)))
    errors = use.errors("error", error, world_size)
    call("co_commit", use.device, use.combination(z), errors, sent, n, block, world_size)
    mark_written([tensor_of(error)])


def _composed_commit_(z: Combination, error: Errors, own: Tensor, world_size: int, scale_block: int | None) -> None:
    """Commit by other kernels, and by torch."""
    if z.numel == 0:
        return
    u, sent = (torch.empty(z.numel, dtype=torch.float32, device=error.device) for _ in range(2))
    combine_(z, u)
    u += values_of_errors(error)
    stride = chunk_message_nbytes(z.numel, world_size, scale_block)[0]  # of all chunks but the last that has elements
    decompress_(Average(z.numel, None, own, world_size, scale_block, stride), sent)
    keep_errors_(error, u.sub_(sent))


def average_compress_(messages: Tensor, error: Errors, out: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.average_compress_`."""
    use, n, block = Operands(error.device, error.numel()), error.numel(), block_argument(scale_block)
    nbytes = message_nbytes(n, scale_block)
    received = use.read("messages", messages, torch.uint8, world_size * nbytes)
    sent = pointer_to("out", out, use.device, torch.uint8, nbytes)
    arguments = received, use.errors("error", error, 1), sent, n, block, world_size
    call("co_average_compress", use.device, *arguments)
    mark_written([tensor_of(error), out])


def decompress_(y: Average, out: Tensor) -> None:
    """See :meth:`Kernels.decompress_`."""
    use = Operands(out.device, y.numel)
    call("co_decompress", use.device, use.average(y), use.floats("out", out))
    mark_written([out])


def combine_(z: Combination, out: Tensor) -> None:
    """See :meth:`Kernels.combine_`."""
    use = Operands(out.device, z.numel)
    call("co_combine", use.device, use.combination(z), use.floats("out", out), z.numel)
    mark_written([out])


def apply_adam_(update: AdamUpdate) -> None:
    """See :meth:`Kernels.apply_adam_`."""
    m, v = update.exp_avg, update.exp_avg_sq
    use = Operands((v if isinstance(v, Tensor) else v.codes).device, update.y.numel)
    if m is None and update.beta != 1:
        raise ValueError(f"beta must be 1 without exp_avg, got {update.beta}")
    table = use.segments("parameters", update.params)
    moments = None if m is None else use.floats("exp_avg", m), use.variance(v, table)
    given = update.corrections
    corrections = None if given is None else use.per_tensor("corrections", given, table, 2)
    rest = corrections, update.beta, descent_record(update.descent)
    call("co_apply_adam", use.device, use.average(update.y), *moments, table.address, table.count, *rest)
    mark_written([] if m is None else [m], update.params)


def local_step_(update: LocalUpdate) -> None:
    """See :meth:`Kernels.local_step_`."""
    use = Operands(update.exp_avg.device, update.exp_avg.numel())
    table = use.segments("parameters", update.params)
    if update.grads is not None and len(update.grads) != table.count:
        counts = f"{len(update.grads)} and {table.count}"
        raise ValueError(f"gradients and parameters must have the same segments, got {counts}")
    moments = use.floats("exp_avg", update.exp_avg), use.variance(update.exp_avg_sq, table)
    local_update = use.floats("local_update", update.local_update)
    grads = None if update.grads is None else use.segments("gradients", update.grads, written=False).address
    rest = use.numel, update.beta1, 1 - update.beta1, descent_record(update.descent)
    call("co_local_step", use.device, *moments, local_update, grads, table.address, table.count, *rest)
    mark_written([update.exp_avg, update.local_update], update.params)


def sync_parameters_(sync: ParameterSync) -> None:
    """See :meth:`Kernels.sync_parameters_`."""
    use = Operands(sync.exp_avg.device, sync.y.numel)
    table = use.segments("parameters", sync.params)
    written = use.floats("exp_avg", sync.exp_avg), use.floats("anchor", sync.anchor)
    variance = use.variance(sync.exp_avg_sq, table)
    flats = *written, variance, use.floats("local_update", sync.local_update)
    rest = sync.lr_sum, descent_record(sync.descent)
    call("co_sync_parameters", use.device, use.average(sync.y), *flats, table.address, table.count, *rest)
    mark_written([sync.exp_avg, sync.anchor, sync.local_update], sync.params)


def lamb_moments_(moments: LambMoments) -> None:
    """See :meth:`Kernels.lamb_moments_`."""
    use = Operands(moments.exp_avg.device, moments.y.numel)
    table = use.segments("parameters", moments.params, written=False)
    fresh = use.floats("exp_avg_sq_fresh", moments.exp_avg_sq_fresh)
    frozen = use.variance(moments.exp_avg_sq, table)
    flats = use.floats("exp_avg", moments.exp_avg), fresh, frozen
    factors = use.per_tensor("factors", moments.factors, table)
    rest = factors, use.per_tensor("sums", moments.sums, table, 3), lamb_record(moments.options)
    call("co_lamb_moments", use.device, use.average(moments.y), *flats, table.address, table.count, *rest)
    mark_written([moments.exp_avg, moments.exp_avg_sq_fresh, moments.sums])


def lamb_apply_(
    exp_avg: Tensor, exp_avg_sq: Variance, params: Sequence[Segment], rates: Tensor, options: LambOptions
) -> None:
    """See :meth:`Kernels.lamb_apply_`."""
    use = Operands(exp_avg.device, exp_avg.numel())
    table = use.segments("parameters", params)
    read = use.floats("exp_avg", exp_avg, written=False), use.variance(exp_avg_sq, table)
    rest = use.numel, use.per_tensor("rates", rates, table), lamb_record(options)
    call("co_lamb_apply", use.device, *read, table.address, table.count, *rest)
    mark_written([], params)


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """See :meth:`Kernels.sum_of_squares`."""
    flats = [dense_values("a tensor", t) for t in tensors]
    for flat in flats:
        if flat.device != device or flat.dtype not in DTYPES:
            raise ValueError(
                f"tensors must be float32, bfloat16 or float16 on {device}, got {flat.dtype} on {flat.device}"
            )
    rows = ((flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], 0) for flat in flats)
    table = array("q", chain.from_iterable(rows))
    sums = torch.zeros(len(flats), dtype=torch.float64, device=device)
    call("co_square_sums", device, table.buffer_info()[0], len(flats), sums.data_ptr())
    return sums.sum()


def copy_(out: Tensor, source: Tensor) -> None:
    """See :func:`hf_compressopt.kernels.copy_`."""
    device, numel = source.device, source.numel()
    read, written = (pointer_to(*named, device, torch.float32, numel) for named in (("source", source), ("out", out)))
    call("co_copy", device, read, written, numel)
    mark_written([out])
