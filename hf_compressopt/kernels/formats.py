"""Message formats: the forms in which the values of a bucket travel from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hf_compressopt.kernels.choice import on
from hf_compressopt.kernels.messages import InChunks, message_nbytes
from hf_compressopt.kernels.operands import Average, Combination


class MessageFormat(Protocol):
    """A message format, as the collectives know it.

    A message is a run of bytes (uint8, contiguous) that holds one chunk of a bucket. Its length depends on the chunk's
    elements alone, and is 0 for a chunk of no elements. Messages of several chunks stand one after another, in rank
    order.
    """

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message of a chunk of ``numel`` elements."""

    def chunk_nbytes(self, numel: int, world_size: int) -> list[int]:
        """Return the bytes of the message of each chunk of a bucket of ``numel`` elements, in rank order."""

    def compress_(self, z: Combination, error: Tensor, messages: Tensor, world_size: int) -> None:
        """Compress a bucket with error feedback: u = z + error; messages <- Q(u); error <- u - Q(u).

        Args:
            z: The n values to send, read.
            error: [n] float32, updated in place.
            messages: [sum(chunk_nbytes(n, world_size))] uint8, written.
            world_size: Number of chunks.
        """

    def average_compress_(self, messages: Tensor, error: Tensor, out: Tensor, world_size: int) -> None:
        """Average a chunk on its server: a = mean of the messages' values + error; out <- Q(a); error <- a - Q(a).

        Args:
            messages: [world_size * nbytes(n)] uint8, one message of the same chunk per rank, read.
            error: [n] float32, updated in place.
            out: [nbytes(n)] uint8, written.
            world_size: Number of messages.
        """

    def average(self, numel: int, messages: Tensor, world_size: int, stride: int) -> Average:
        """Return the messages of the averaged chunks of a bucket as an operand of the optimizers' kernels.

        Args:
            numel: Elements of the bucket.
            messages: [world_size * stride] uint8, the message of chunk j begins at ``j * stride``.
            world_size: Number of chunks.
            stride: Bytes from one message to the next.
        """


@dataclass(frozen=True)
class SignFormat(InChunks):
    """A sign per element, and a float32 scale per block: the RMS of its values (1-bit Adam, arXiv 2102.02888).

    The message of a chunk of n elements, n > 0:

    ======================  ========================================================================================
    bytes                   content
    ======================  ========================================================================================
    ``4 * blocks``          float32 scales, little-endian, one per block; ``blocks = ceil(n / scale_block)``, or 1 if
                            ``scale_block`` is None
    ``ceil(n / 8)``         signs: element i is bit ``i % 8`` (least significant first) of byte ``i // 8``; 1 is
                            negative; zero, of either sign, counts as positive; bits beyond n are 0
    up to 15                zeros up to a multiple of :data:`~hf_compressopt.kernels.messages.MESSAGE_ALIGNMENT`
    ======================  ========================================================================================

    Attributes:
        scale_block: Elements per scale, a positive multiple of 8. None: all chunks share one scale.
    """

    scale_block: int | None

    def nbytes(self, numel: int) -> int:
        """See :meth:`MessageFormat.nbytes`."""
        return message_nbytes(numel, self.scale_block)

    def compress_(self, z: Combination, error: Tensor, messages: Tensor, world_size: int) -> None:
        """See :meth:`MessageFormat.compress_`."""
        on(error).compress_(z, error, messages, world_size, self.scale_block)

    def average_compress_(self, messages: Tensor, error: Tensor, out: Tensor, world_size: int) -> None:
        """See :meth:`MessageFormat.average_compress_`."""
        on(error).average_compress_(messages, error, out, world_size, self.scale_block)

    def average(self, numel: int, messages: Tensor, world_size: int, stride: int) -> Average:
        """See :meth:`MessageFormat.average`."""
        return Average(numel, None, messages, world_size, self.scale_block, stride)
