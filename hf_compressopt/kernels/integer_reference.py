"""The kernels of b-bit integers in pure PyTorch: the specification, and the fallback on every device.

The functions implement :class:`hf_compressopt.kernels.integer_protocol.IntegerKernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels import reference
from hf_compressopt.kernels.commit import Commit
from hf_compressopt.kernels.errors import Errors, keep_errors_, values_of_errors
from hf_compressopt.kernels.integer_code import chunk_messages, decode, encode_
from hf_compressopt.kernels.integer_messages import IntegerAverage
from hf_compressopt.kernels.operands import Combination, Segment

_GROUP = 4  # messages that are summed by themselves


def compress_(
    z: Combination, error: Errors, messages: Tensor, world_size: int, bits: int, new_error: Errors | None = None
) -> None:
    """See :meth:`IntegerKernels.compress_`."""
    u = reference.values_of(z) + values_of_errors(error)
    for start, stop, message in chunk_messages(messages, z.numel, world_size, bits):
        u[start:stop] -= encode_(u[start:stop], message, bits)
    if new_error is not None:
        keep_errors_(new_error, u)


def average_compress_(
    messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int, bits: int
) -> None:
    """See :meth:`IntegerKernels.average_compress_`."""
    if error.numel() == 0:
        return
    mean = torch.empty(error.numel(), dtype=torch.float32, device=error.device)
    mean_(messages, mean, world_size, bits, 1.0 / world_size)
    mean += values_of_errors(error)
    keep_errors_(new_error, mean - encode_(mean, out, bits))


def mean_(messages: Tensor, out: Tensor, world_size: int, bits: int, factor: float) -> None:
    """See :meth:`IntegerKernels.mean_`."""
    if out.numel() == 0:
        return
    total = torch.zeros_like(out)
    for group in torch.split(messages.view(world_size, -1), _GROUP):
        part = torch.zeros_like(out)
        for message in group:
            part += decode(message, out.numel(), bits)
        total += part
    out.copy_(total * factor)


def decompress_(y: IntegerAverage, out: Tensor) -> None:
    """See :meth:`IntegerKernels.decompress_`."""
    for rank in range(y.world_size):
        start, stop = chunk_range(y.numel, y.world_size, rank)
        if start < stop:
            out[start:stop] = decode(y.messages[rank * y.stride :], stop - start, y.bits)


def commit_(commit: Commit[IntegerAverage]) -> None:
    """See :meth:`IntegerKernels.commit_`."""
    y, error = commit.y, reference.values_of(commit.z) + values_of_errors(commit.error)
    for start, stop, message in chunk_messages(commit.own, y.numel, y.world_size, y.bits):
        error[start:stop] -= decode(message, stop - start, y.bits)
    keep_errors_(commit.error, error)
    add_(y, commit.outputs, 0.0, commit.output_scale)


def add_(y: IntegerAverage, outputs: Sequence[Segment], decay: float, scale: float) -> None:
    """See :meth:`IntegerKernels.add_`."""
    values = torch.empty(y.numel, dtype=torch.float32, device=y.messages.device)
    decompress_(y, values)
    values *= scale
    for segment, change in zip(outputs, torch.split(values, [s.numel for s in outputs]), strict=True):
        if segment.tensor is not None:
            segment.part.copy_(change if decay == 0 else segment.part.float() * decay + change)
