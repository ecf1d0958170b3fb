"""The native kernels: calls of the C interface, ``csrc/compressopt.h``.

The functions are those of :mod:`hf_compressopt.kernels.reference`, whose contracts hold for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels.c_abi import DTYPES, Operands, address, bytes_of, mark_written
from hf_compressopt.kernels.errors import Errors, like_errors
from hf_compressopt.kernels.library import call
from hf_compressopt.kernels.memory import dense_values
from hf_compressopt.kernels.messages import AnyCode, IntegerCode
from hf_compressopt.kernels.operands import (
    AdamUpdate,
    Average,
    Combination,
    IntegerAverage,
    LambMoments,
    LambOptions,
    LocalUpdate,
    ParameterSync,
    Segment,
)
from hf_compressopt.kernels.variance import Variance


def compress_(
    code: AnyCode,
    z: Combination,
    error: Errors,
    messages: Tensor,
    world_size: int,
    new_error: Errors | None = None,
) -> None:
    """See the reference."""
    use = Operands(_tensor(error).device, z.numel)
    written = address("messages", messages, use.device, torch.uint8, bytes_of(code, z.numel, world_size))
    values = use.combination(z)
    if isinstance(code, IntegerCode):
        old = use.errors("error", error, world_size, written=False)
        new = None if new_error is None else use.errors("new_error", new_error, world_size)
        call("co_compress_integers", use.device, values, old, new, written, z.numel, code.bits, world_size)
    else:
        place = like_errors(error) if new_error is None else new_error  # alive until the call has been made
        new = _updated(use, error, place, world_size)
        call("co_compress", use.device, values, new, written, z.numel, code.scale_block or 0, world_size)
    mark_written([messages] if new_error is None else [messages, _tensor(new_error)])


def average_compress_(
    code: AnyCode, messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int
) -> None:
    """See the reference."""
    numel = error.numel() if isinstance(error, Tensor) else error.count
    use, nbytes = Operands(_tensor(error).device, numel), bytes_of(code, numel)
    received = use.read("messages", messages, torch.uint8, world_size * nbytes)
    sent = address("out", out, use.device, torch.uint8, nbytes)
    if isinstance(code, IntegerCode):
        old, new = use.errors("error", error, 1, written=False), use.errors("new_error", new_error, 1)
        call("co_average_integers", use.device, received, old, new, sent, numel, code.bits, world_size)
    else:
        new = _updated(use, error, new_error, 1)
        call("co_average_compress", use.device, received, new, sent, numel, code.scale_block or 0, world_size)
    mark_written([_tensor(new_error), out])


def _updated(use: Operands, error: Errors, new_error: Errors, world_size: int) -> Any:
    """Return the errors that kernels of signs update in place: the new ones, which begin as the old ones."""
    new = use.errors("new_error", new_error, world_size)
    if _tensor(new_error) is not _tensor(error):
        use.errors("error", error, world_size, written=False)
        _tensor(new_error).copy_(_tensor(error))
    return new


def _tensor(error: Errors) -> Tensor:
    return error if isinstance(error, Tensor) else error.messages


def mean_(code: IntegerCode, messages: Tensor, out: Tensor, world_size: int, factor: float) -> None:
    """See the reference."""
    use = Operands(out.device, out.numel())
    received = use.read("messages", messages, torch.uint8, world_size * code.nbytes(use.numel))
    call("co_mean_integers", use.device, received, use.floats("out", out), use.numel, code.bits, world_size, factor)
    mark_written([out])


def add_(y: IntegerAverage, outputs: Sequence[Segment], decay: float, scale: float) -> None:
    """See the reference."""
    use = Operands(y.messages.device, y.numel)
    table, count, _ = use.segments("outputs", outputs)
    call("co_add_integers", use.device, use.average(y), table, count, decay, scale)
    mark_written([], outputs)


def decompress_(y: Average | IntegerAverage, out: Tensor) -> None:
    """See the reference."""
    use = Operands(out.device, y.numel)
    name = "co_decode_integers" if isinstance(y, IntegerAverage) else "co_decompress"
    call(name, use.device, use.average(y), use.floats("out", out))
    mark_written([out])


def any_nan(*averages: IntegerAverage) -> Tensor:
    """See the reference."""
    device = averages[0].messages.device
    found = torch.empty(len(averages), dtype=torch.bool, device=device)
    for number, y in enumerate(averages):
        call("co_any_nan", device, Operands(device, y.numel).average(y), found.data_ptr() + number)
    return found.any() if len(averages) > 1 else found[0]


def combine_(z: Combination, out: Tensor) -> None:
    """See the reference."""
    use = Operands(out.device, z.numel)
    call("co_combine", use.device, use.combination(z), use.floats("out", out), z.numel)
    mark_written([out])


def apply_adam_(update: AdamUpdate) -> None:
    """See the reference."""
    m, v, given = update.exp_avg, update.exp_avg_sq, update.corrections
    use = Operands((v if isinstance(v, Tensor) else v.codes).device, update.y.numel)
    if m is None and update.beta != 1:
        raise ValueError(f"beta must be 1 without exp_avg, got {update.beta}")
    table, count, tensors = use.segments("parameters", update.params)
    moments = None if m is None else use.floats("exp_avg", m), use.variance(v, tensors)
    corrections = None if given is None else use.per_tensor("corrections", given, 2 * tensors)
    rest = table, count, corrections, update.beta, use.descent(update.descent)
    call("co_apply_adam", use.device, use.average(update.y), *moments, *rest)
    mark_written([] if m is None else [m], update.params)


def local_step_(update: LocalUpdate) -> None:
    """See the reference."""
    use = Operands(update.exp_avg.device, update.exp_avg.numel())
    table, count, tensors = use.segments("parameters", update.params)
    grads = None
    if update.grads is not None:
        grads, given, _ = use.segments("gradients", update.grads, written=False)
        if given != count:
            raise ValueError(f"gradients and parameters must have the same segments, got {given} and {count}")
    moments = use.floats("exp_avg", update.exp_avg), use.variance(update.exp_avg_sq, tensors)
    local_update = use.floats("local_update", update.local_update)
    rest = table, count, use.numel, update.beta1, 1 - update.beta1, use.descent(update.descent)
    call("co_local_step", use.device, *moments, local_update, grads, *rest)
    mark_written([update.exp_avg, update.local_update], update.params)


def sync_parameters_(sync: ParameterSync) -> None:
    """See the reference."""
    use = Operands(sync.exp_avg.device, sync.y.numel)
    table, count, tensors = use.segments("parameters", sync.params)
    written = use.floats("exp_avg", sync.exp_avg), use.floats("anchor", sync.anchor)
    flats = *written, use.variance(sync.exp_avg_sq, tensors), use.floats("local_update", sync.local_update)
    rest = table, count, sync.lr_sum, use.descent(sync.descent)
    call("co_sync_parameters", use.device, use.average(sync.y), *flats, *rest)
    mark_written([sync.exp_avg, sync.anchor, sync.local_update], sync.params)


def lamb_moments_(moments: LambMoments) -> None:
    """See the reference."""
    use = Operands(moments.exp_avg.device, moments.y.numel)
    table, count, tensors = use.segments("parameters", moments.params, written=False)
    flats = use.floats("exp_avg", moments.exp_avg), use.floats("exp_avg_sq_fresh", moments.exp_avg_sq_fresh)
    frozen = use.variance(moments.exp_avg_sq, tensors)
    factors = use.per_tensor("factors", moments.factors, tensors)
    if moments.sums.numel() < 3 * tensors:
        raise ValueError(f"sums must have {3 * tensors} entries or more, got {moments.sums.numel()}")
    sums = address("sums", moments.sums, use.device, torch.float64)
    rest = table, count, factors, sums, use.lamb(moments.options)
    call("co_lamb_moments", use.device, use.average(moments.y), *flats, frozen, *rest)
    mark_written([moments.exp_avg, moments.exp_avg_sq_fresh, moments.sums])


def lamb_apply_(
    exp_avg: Tensor, exp_avg_sq: Variance, params: Sequence[Segment], rates: Tensor, options: LambOptions
) -> None:
    """See the reference."""
    use = Operands(exp_avg.device, exp_avg.numel())
    table, count, tensors = use.segments("parameters", params)
    read = use.floats("exp_avg", exp_avg, written=False), use.variance(exp_avg_sq, tensors)
    rest = table, count, use.numel, use.per_tensor("rates", rates, tensors), use.lamb(options)
    call("co_lamb_apply", use.device, *read, *rest)
    mark_written([], params)


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """See the reference."""
    flats = [dense_values("a tensor", t) for t in tensors]
    for flat in flats:
        if flat.device != device or flat.dtype not in DTYPES:
            raise ValueError(
                f"tensors must be float32, bfloat16 or float16 on {device}, got {flat.dtype} on {flat.device}"
            )
    table = array("q", chain.from_iterable((flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], 0) for flat in flats))
    sums = torch.zeros(len(flats), dtype=torch.float64, device=device)
    call("co_square_sums", device, table.buffer_info()[0], len(flats), sums.data_ptr())
    return sums.sum()


def copy_(out: Tensor, source: Tensor) -> None:
    """Copy a large tensor past the caches. Both: [n] float32 on the CPU."""
    device, numel = source.device, source.numel()
    read, written = (address(*named, device, torch.float32, numel) for named in (("source", source), ("out", out)))
    call("co_copy", device, read, written, numel)
    mark_written([out])
