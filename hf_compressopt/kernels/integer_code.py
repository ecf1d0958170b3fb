"""The code of messages of b-bit integers in pure PyTorch: one chunk's message, and the values that it stands for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_compressopt.flat import SIGNS_PER_BYTE, chunk_range
from hf_compressopt.kernels.integer_messages import (
    INTEGER_BLOCK,
    integer_message_nbytes,
    integers_nbytes,
    num_integer_blocks,
    scales_of,
)

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
    scales = (exact.view(torch.int32) + 0x8000).bitwise_and_(~0xFFFF).view(torch.float32)
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


def chunk_messages(messages: Tensor, numel: int, world_size: int, bits: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the elements [start, stop) and the message of each chunk that has elements."""
    byte = 0
    for rank in range(world_size):
        start, stop = chunk_range(numel, world_size, rank)
        nbytes = integer_message_nbytes(stop - start, bits)
        if start < stop:
            yield start, stop, messages[byte : byte + nbytes]
        byte += nbytes
