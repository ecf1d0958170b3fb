"""The length of sign messages. :class:`hf_compressopt.kernels.formats.SignFormat` documents their layout."""

from __future__ import annotations

from hf_compressopt.flat import SIGNS_PER_BYTE, chunk_range

#: Every message starts at, and is padded to, a multiple of this many bytes.
MESSAGE_ALIGNMENT = 16

_SCALE_BYTES = 4


def num_blocks(numel: int, scale_block: int | None) -> int:
    """Return the number of scales in the message of a chunk of ``numel`` elements."""
    if numel == 0:
        return 0
    return 1 if scale_block is None else -(-numel // scale_block)


def message_nbytes(numel: int, scale_block: int | None) -> int:
    """Return the bytes of the message of a chunk of ``numel`` elements."""
    used = _SCALE_BYTES * num_blocks(numel, scale_block) + -(-numel // SIGNS_PER_BYTE)
    return -(-used // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT


def chunk_message_nbytes(numel: int, world_size: int, scale_block: int | None) -> list[int]:
    """Return the bytes of the message of each chunk of a bucket of ``numel`` elements, in rank order."""
    ranges = (chunk_range(numel, world_size, rank) for rank in range(world_size))
    return [message_nbytes(stop - start, scale_block) for start, stop in ranges]


class InChunks:
    """The part that all message formats share: a bucket's message is those of its chunks, one after another."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message of a chunk of ``numel`` elements."""
        raise NotImplementedError("abstract")

    def chunk_nbytes(self, numel: int, world_size: int) -> list[int]:
        """Return the bytes of the message of each chunk of a bucket of ``numel`` elements, in rank order."""
        ranges = (chunk_range(numel, world_size, rank) for rank in range(world_size))
        return [self.nbytes(stop - start) for start, stop in ranges]
