"""Messages of b-bit integers in pure PyTorch: the specification, and the fallback on every device.

The functions from :func:`compress_` on implement :class:`hf_compressopt.kernels.integer_protocol.IntegerKernels`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_compressopt.flat import SIGNS_PER_BYTE, chunk_range
from hf_compressopt.kernels import reference
from hf_compressopt.kernels.integer_messages import (
    INTEGER_BLOCK,
    Commit,
    IntegerAverage,
    integer_message_nbytes,
    integers_nbytes,
    num_integer_blocks,
    scales_of,
)
from hf_compressopt.kernels.operands import Combination

_GROUP = 4  # messages that are summed by themselves
_SIZE_BITS = 0x7FFFFFFF  # of a float32, without its sign
_HUGE_PATTERN = 0x7F000000  # of 2^127
_TINY_SCALE = 2.0**-120


def quantize(u: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize the blocks of a chunk.

    Args:
        u: [n] float32, n > 0.
        bits: 4 or 8.

    Returns:
        The scales, [blocks] float32, and the integers, [n] int8.
    """
    blocks = num_integer_blocks(u.numel())
    rows = pad(u, (0, blocks * INTEGER_BLOCK - u.numel())).view(blocks, INTEGER_BLOCK)
    pattern = rows.view(torch.int32).bitwise_and(_SIZE_BITS).amax(dim=1)
    exact = pattern.view(torch.float32) / u.new_tensor(float((1 << bits - 1) - 1))
    scales = (exact.view(torch.int32) + 0xFFFF).bitwise_and_(~0xFFFF).view(torch.float32)
    huge = pattern > _HUGE_PATTERN
    empty = huge | (scales < _TINY_SCALE)
    quotients = rows * (u.new_ones(()) / scales).unsqueeze(1)
    integers = quotients.round_().masked_fill_(empty.unsqueeze(1), 0.0).to(torch.int8)
    scales = torch.where(huge, torch.nan, torch.where(empty, 0.0, scales))
    return scales, integers.view(-1)[: u.numel()]


def dequantize(scales: Tensor, integers: Tensor) -> Tensor:
    """Multiply the integers of a chunk by their scales. scales: [blocks]; integers: [n] int8. Returns [n] float32."""
    return integers.float().mul_(scales.float().repeat_interleave(INTEGER_BLOCK)[: integers.numel()])


def pack(integers: Tensor, bits: int) -> Tensor:
    """Pack the integers of a message. integers: [n] int8. Returns [integers_nbytes(n, bits)] uint8."""
    padded = pad(integers, (0, -integers.numel() % SIGNS_PER_BYTE)).view(torch.uint8)
    if bits == 8:
        return padded
    low, high = padded.view(-1, 2).unbind(dim=1)
    return (low & 0xF) | (high << 4)


def unpack(packed: Tensor, numel: int, bits: int) -> Tensor:
    """Unpack the integers of a message. packed: [integers_nbytes(numel, bits)] uint8. Returns [numel] int8."""
    if bits == 4:
        packed = torch.stack([packed & 0xF, packed >> 4], dim=1).view(-1)
        packed = (packed ^ 8) - 8  # the sign is the fourth bit
    return packed.view(torch.int8)[:numel]


def encode_(u: Tensor, message: Tensor, bits: int) -> Tensor:
    """Write the message of a chunk. u: [n] float32; message: uint8, written. Returns Q(u), [n] float32."""
    scales, integers = quantize(u, bits)
    message.zero_()
    message[: integers_nbytes(u.numel(), bits)] = pack(integers, bits)
    patterns = scales.view(torch.int32).bitwise_right_shift(16).to(torch.int16)  # torch's conversion may change a NaN's
    scales_of(message, u.numel(), bits).view(torch.int16).copy_(patterns)
    return dequantize(scales, integers)


def decode(message: Tensor, numel: int, bits: int) -> Tensor:
    """Decode a message. message: uint8, from its first byte on. Returns [numel] float32."""
    integers = unpack(message[: integers_nbytes(numel, bits)], numel, bits)
    return dequantize(scales_of(message, numel, bits), integers)


# -- the kernels ------------------------------------------------------------------------------------------------------


def compress_(z: Combination, error: Tensor, messages: Tensor, world_size: int, bits: int) -> None:
    """See :meth:`IntegerKernels.compress_`."""
    u = reference.values_of(z) + error
    for start, stop, message in _chunks(messages, z.numel, world_size, bits):
        encode_(u[start:stop], message, bits)


def average_compress_(
    messages: Tensor, error: Tensor, new_error: Tensor, out: Tensor, world_size: int, bits: int
) -> None:
    """See :meth:`IntegerKernels.average_compress_`."""
    numel = error.numel()
    if numel == 0:
        return
    total = torch.zeros_like(error)
    for group in torch.split(messages.view(world_size, -1), _GROUP):
        part = torch.zeros_like(error)
        for message in group:
            part += decode(message, numel, bits)
        total += part
    mean = total * (1.0 / world_size) + error
    torch.sub(mean, encode_(mean, out, bits), out=new_error)


def decompress_(y: IntegerAverage, out: Tensor) -> None:
    """See :meth:`IntegerKernels.decompress_`."""
    for rank in range(y.world_size):
        start, stop = chunk_range(y.numel, y.world_size, rank)
        if start < stop:
            out[start:stop] = decode(y.messages[rank * y.stride :], stop - start, y.bits)


def commit_(commit: Commit) -> None:
    """See :meth:`IntegerKernels.commit_`."""
    error, y = commit.error, commit.y
    error.add_(reference.values_of(commit.z))
    for start, stop, message in _chunks(commit.own, y.numel, y.world_size, y.bits):
        error[start:stop] -= decode(message, stop - start, y.bits)
    average = torch.empty_like(error)
    decompress_(y, average)
    average *= commit.output_scale
    start = 0
    for segment in commit.outputs:
        if segment.tensor is not None:
            segment.part.copy_(average[start : start + segment.numel])
        start += segment.numel


def _chunks(messages: Tensor, numel: int, world_size: int, bits: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the elements [start, stop) and the message of each chunk that has elements."""
    byte = 0
    for rank in range(world_size):
        start, stop = chunk_range(numel, world_size, rank)
        nbytes = integer_message_nbytes(stop - start, bits)
        if start < stop:
            yield start, stop, messages[byte : byte + nbytes]
        byte += nbytes
