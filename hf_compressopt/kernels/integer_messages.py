"""Layout of messages of b-bit integers. Its table is in the docstring of ``IntegerFormat``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_compressopt.flat import SIGNS_PER_BYTE, chunk_range
from hf_compressopt.kernels.messages import MESSAGE_ALIGNMENT

#: Elements per scale, counted from the start of a chunk.
INTEGER_BLOCK = 128
#: Supported bits per element.
INTEGER_BITS = (4, 8)

_SCALE_BYTES = 2


def num_integer_blocks(numel: int) -> int:
    """Return the number of scales in the message of a chunk of ``numel`` elements."""
    return -(-numel // INTEGER_BLOCK)


def integers_nbytes(numel: int, bits: int) -> int:
    """Return the bytes of the packed integers of a chunk of ``numel`` elements, which precede the scales."""
    return -(-numel // SIGNS_PER_BYTE) * bits


def integer_message_nbytes(numel: int, bits: int) -> int:
    """Return the bytes of the message of a chunk of ``numel`` elements."""
    used = integers_nbytes(numel, bits) + _SCALE_BYTES * num_integer_blocks(numel)
    return -(-used // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT


def chunk_integer_message_nbytes(numel: int, world_size: int, bits: int) -> list[int]:
    """Return the bytes of the message of each chunk of a bucket of ``numel`` elements, in rank order."""
    ranges = (chunk_range(numel, world_size, rank) for rank in range(world_size))
    return [integer_message_nbytes(stop - start, bits) for start, stop in ranges]


@dataclass(frozen=True)
class IntegerAverage:
    """The average of a bucket over the ranks, as messages of b-bit integers.

    Attributes:
        numel: Elements of the bucket.
        messages: uint8; the message of chunk j begins at ``j * stride``.
        world_size: Number of chunks.
        bits: 4 or 8.
        stride: Bytes from one message to the next, a multiple of 16.
    """

    numel: int
    messages: Tensor
    world_size: int
    bits: int
    stride: int


def scales_of(message: Tensor, numel: int, bits: int) -> Tensor:
    """Return the scales of a message, which share its memory.

    Args:
        message: uint8, from its first byte on.
        numel: Elements of its chunk.
        bits: 4 or 8.

    Returns:
        [num_integer_blocks(numel)] bfloat16.
    """
    first = integers_nbytes(numel, bits)
    return message[first : first + _SCALE_BYTES * num_integer_blocks(numel)].view(torch.bfloat16)
