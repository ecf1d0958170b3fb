"""The native kernels of b-bit integers: calls of the C interface, ``csrc/compressopt.h``.

The functions implement :class:`hf_compressopt.kernels.integer_protocol.IntegerKernels`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels.c_operands import Operands, mark_written, pointer_to
from hf_compressopt.kernels.commit import Commit
from hf_compressopt.kernels.errors import Errors, tensor_of
from hf_compressopt.kernels.integer_messages import IntegerAverage, chunk_integer_message_nbytes, integer_message_nbytes
from hf_compressopt.kernels.library import call
from hf_compressopt.kernels.operands import Combination, Segment


class IntegersRecord(ctypes.Structure):
    """``co_integers``."""

    _fields_ = [
        ("messages", c_void_p),
        ("numel", c_int64),
        ("stride", c_int64),
        ("world_size", c_int32),
        ("bits", c_int32),
    ]


def _average(use: Operands, y: IntegerAverage) -> Any:
    """Return a ``co_integers`` by reference."""
    nbytes = chunk_integer_message_nbytes(y.numel, y.world_size, y.bits)
    if max(nbytes) > y.stride and y.world_size > 1:
        raise ValueError(f"stride must be at least {max(nbytes)}, the length of a message, got {y.stride}")
    last = max((rank for rank, size in enumerate(nbytes) if size), default=0)
    needed = last * y.stride + nbytes[last]
    if y.messages.numel() < needed:
        raise ValueError(f"messages must have {needed} bytes or more, got {y.messages.numel()}")
    pointer = use.read("messages", y.messages, torch.uint8)
    return ctypes.byref(IntegersRecord(pointer, y.numel, y.stride, y.world_size, y.bits))


def compress_(
    z: Combination, error: Errors, messages: Tensor, world_size: int, bits: int, new_error: Errors | None = None
) -> None:
    """See :meth:`IntegerKernels.compress_`."""
    use, nbytes = Operands(error.device, z.numel), sum(chunk_integer_message_nbytes(z.numel, world_size, bits))
    out = pointer_to("messages", messages, use.device, torch.uint8, nbytes)
    arguments = (
        use.combination(z),
        use.errors("error", error, world_size, written=False),
        None if new_error is None else use.errors("new_error", new_error, world_size),
        out,
        z.numel,
        bits,
        world_size,
    )
    call("co_compress_integers", use.device, *arguments)
    mark_written([messages] if new_error is None else [messages, tensor_of(new_error)])


def average_compress_(
    messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int, bits: int
) -> None:
    """See :meth:`IntegerKernels.average_compress_`."""
    use, nbytes = Operands(error.device, error.numel()), integer_message_nbytes(error.numel(), bits)
    received = use.read("messages", messages, torch.uint8, world_size * nbytes)
    errors = use.errors("error", error, 1, written=False), use.errors("new_error", new_error, 1)
    sent = pointer_to("out", out, use.device, torch.uint8, nbytes)
    call("co_average_integers", use.device, received, *errors, sent, use.numel, bits, world_size)
    mark_written([tensor_of(new_error), out])


def mean_(messages: Tensor, out: Tensor, world_size: int, bits: int, factor: float) -> None:
    """See :meth:`IntegerKernels.mean_`."""
    use, nbytes = Operands(out.device, out.numel()), integer_message_nbytes(out.numel(), bits)
    received = use.read("messages", messages, torch.uint8, world_size * nbytes)
    call("co_mean_integers", use.device, received, use.floats("out", out), use.numel, bits, world_size, factor)
    mark_written([out])


def add_(y: IntegerAverage, outputs: Sequence[Segment], decay: float, scale: float) -> None:
    """See :meth:`IntegerKernels.add_`."""
    use = Operands(y.messages.device, y.numel)
    table = use.segments("outputs", outputs)
    call("co_add_integers", use.device, _average(use, y), table.address, table.count, decay, scale)
    mark_written([], outputs)


def decompress_(y: IntegerAverage, out: Tensor) -> None:
    """See :meth:`IntegerKernels.decompress_`."""
    use = Operands(out.device, y.numel)
    call("co_decode_integers", use.device, _average(use, y), use.floats("out", out))
    mark_written([out])


def commit_(commit: Commit[IntegerAverage]) -> None:
    """See :meth:`IntegerKernels.commit_`."""
    z, y, outputs = commit.z, commit.y, commit.outputs
    use = Operands(commit.error.device, y.numel)
    nbytes = sum(chunk_integer_message_nbytes(y.numel, y.world_size, y.bits))
    if z.numel != y.numel:
        raise ValueError(f"z and y must have as many elements, got {z.numel} and {y.numel}")
    if z.grads is not None and [(s.numel, s.index) for s in z.grads] != [(s.numel, s.index) for s in outputs]:
        raise ValueError("outputs must have segments of the same lengths and indices as the gradients of z")
    table = use.segments("outputs", outputs)
    call(
        "co_commit_integers",
        use.device,
        use.combination(z),
        use.errors("error", commit.error, y.world_size),
        use.read("own", commit.own, torch.uint8, nbytes),
        _average(use, y),
        table.address,
        table.count,
        commit.output_scale,
    )
    mark_written([tensor_of(commit.error)], outputs)
