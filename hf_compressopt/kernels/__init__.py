"""The hot loops of compression, behind documented wrappers.

Every optimizer and collective calls these wrappers, never an implementation. :mod:`hf_compressopt.kernels.reference`
is the pure-PyTorch implementation: the specification, the fallback on every device, and the oracle of native ones.

**Message of one chunk** of n elements (uint8, contiguous), n > 0:

======================  ==========================================================================================
bytes                   content
======================  ==========================================================================================
``4 * blocks``          float32 scales, little-endian, one per block; ``blocks = ceil(n / scale_block)``, or 1 where
                        ``scale_block`` is None
``ceil(n / 8)``         signs: element i is bit ``i % 8`` (least significant first) of byte ``i // 8``; 1 is
                        negative; zero, of either sign, counts as positive; bits beyond n are 0
up to 15                zeros up to a multiple of :data:`MESSAGE_ALIGNMENT`
======================  ==========================================================================================

A chunk of no elements has an empty message. Messages of several chunks stand one after another, in rank order.
"""

from __future__ import annotations

from torch import Tensor

from hf_compressopt.flat import SIGNS_PER_BYTE, chunk_numel, chunk_range
from hf_compressopt.kernels import reference

#: Every message starts at, and is padded to, a multiple of this many bytes.
MESSAGE_ALIGNMENT = 16

_SCALE_BYTES = 4


def implementation() -> str:
    """Which implementation the wrappers use: ``"reference"``."""
    return "reference"


def num_blocks(numel: int, scale_block: int | None) -> int:
    """Scales in the message of a chunk of ``numel`` elements."""
    if numel == 0:
        return 0
    return 1 if scale_block is None else -(-numel // scale_block)


def message_nbytes(numel: int, scale_block: int | None) -> int:
    """Bytes of the message of a chunk of ``numel`` elements."""
    used = _SCALE_BYTES * num_blocks(numel, scale_block) + -(-numel // SIGNS_PER_BYTE)
    return -(-used // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT


def chunk_message_nbytes(numel: int, world_size: int, scale_block: int | None) -> list[int]:
    """Bytes of the message of each chunk of a bucket of ``numel`` elements, in rank order."""
    ranges = (chunk_range(numel, world_size, rank) for rank in range(world_size))
    return [message_nbytes(stop - start, scale_block) for start, stop in ranges]


def compress_(x: Tensor, error: Tensor, messages: Tensor, *, world_size: int, scale_block: int | None) -> None:
    """Compress a bucket with error feedback: u = x + error; messages <- Q(u); error <- u - Q(u).

    Q(u) is sign(u) times RMS(u) of the block; with ``scale_block=None`` all chunks share RMS(u) of the whole bucket.

    Args:
        x: [n] float32, read.
        error: [n] float32, updated in place.
        messages: [sum(chunk_message_nbytes(n, world_size, scale_block))] uint8, written.
        world_size: Number of chunks.
        scale_block: Elements per scale, a positive multiple of 8, or None.
    """
    error.add_(x)
    scale = None if scale_block is not None else reference.rms(error)
    reference.compress_chunks_(error, messages, _chunks(error.numel(), world_size, scale_block), scale_block, scale)


def average_compress_(
    messages: Tensor, error: Tensor, out: Tensor, *, world_size: int, scale_block: int | None
) -> None:
    """The server's part: a = mean of the decompressed messages + error; out <- Q(a); error <- a - Q(a).

    The sum runs in rank order, in float32.

    Args:
        messages: [world_size * message_nbytes(n, scale_block)] uint8, one message of the same chunk per rank, read.
        error: [n] float32, updated in place.
        out: [message_nbytes(n, scale_block)] uint8, written.
        world_size: Number of messages.
        scale_block: As in :func:`compress_`.
    """
    numel = error.numel()
    if numel == 0:
        return
    error.add_(reference.mean_of_messages(messages.view(world_size, -1), numel, scale_block))
    scale = None if scale_block is not None else reference.rms(error)
    chunk = reference.Chunk(0, numel, 0, num_blocks(numel, scale_block))
    reference.compress_chunks_(error, out, [chunk], scale_block, scale)


def decompress_(messages: Tensor, out: Tensor, *, world_size: int, scale_block: int | None, stride: int) -> None:
    """Decompress the chunks of a bucket: out <- concatenation of the decompressed messages.

    Args:
        messages: [world_size * stride] uint8, the message of chunk j begins at ``j * stride``, read.
        out: [n] float32, written.
        world_size: Number of chunks.
        scale_block: As in :func:`compress_`.
        stride: Bytes from one message to the next, a multiple of :data:`MESSAGE_ALIGNMENT`.
    """
    for rank in range(world_size):
        start, stop = chunk_range(out.numel(), world_size, rank)
        if start < stop:
            message = messages[rank * stride :]
            out[start:stop] = reference.decompress_message(message, stop - start, scale_block)


def _chunks(numel: int, world_size: int, scale_block: int | None) -> list[reference.Chunk]:
    chunks, byte = [], 0
    for rank in range(world_size):
        start, stop = chunk_range(numel, world_size, rank)
        if start < stop:
            chunks.append(reference.Chunk(start, stop, byte, num_blocks(stop - start, scale_block)))
        byte += message_nbytes(stop - start, scale_block)
    return chunks


__all__ = [
    "MESSAGE_ALIGNMENT",
    "average_compress_",
    "chunk_message_nbytes",
    "chunk_numel",
    "compress_",
    "decompress_",
    "implementation",
    "message_nbytes",
    "num_blocks",
]
