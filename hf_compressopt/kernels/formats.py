"""Message formats: the forms in which the values of a bucket travel from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels.choice import on
from hf_compressopt.kernels.commit import AnyAverage, Commit
from hf_compressopt.kernels.errors import Errors, tensor_of
from hf_compressopt.kernels.messages import InChunks, message_nbytes, num_blocks
from hf_compressopt.kernels.operands import Average, Combination


class MessageFormat(Protocol[AnyAverage]):
    """A message format with error feedback, as the collectives know it.

    A message is a run of bytes (uint8, contiguous) that holds one chunk of a bucket. Its length depends on the chunk's
    elements alone, and is 0 for a chunk of no elements. Messages of several chunks stand one after another, in rank
    order.

    No worker error is written before :meth:`commit_`, so that a step that turns out not finite can be dropped.
    """

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message of a chunk of ``numel`` elements."""

    def chunk_nbytes(self, numel: int, world_size: int) -> list[int]:
        """Return the bytes of the message of each chunk of a bucket of ``numel`` elements, in rank order."""

    def compress_(self, z: Combination, error: Errors, messages: Tensor, world_size: int) -> None:
        """Compress a bucket: u = z + error; messages <- Q(u). The error is only read.

        Args:
            z: The n values to send, read.
            error: n elements, read.
            messages: [sum(chunk_nbytes(n, world_size))] uint8, written.
            world_size: Number of chunks.
        """

    def compress_settled_(
        self, z: Combination, error: Errors, new_error: Errors, messages: Tensor, world_size: int
    ) -> None:
        """Compress a bucket whose values are not kept: as :meth:`compress_`, and new_error <- u - Q(u).

        Args:
            z: See :meth:`compress_`.
            error: Likewise.
            new_error: n elements, in the form of ``error``, written. It may be ``error`` itself.
            messages: See :meth:`compress_`.
            world_size: Likewise.
        """

    def average_compress_(
        self, messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int
    ) -> None:
        """Average a chunk on its server: a = mean of the messages' values + error; out <- Q(a); new_error <- a - Q(a).

        Args:
            messages: [world_size * nbytes(n)] uint8, one message of the same chunk per rank, read.
            error: n elements, read.
            new_error: n elements, in the form of ``error``, written. It may be ``error`` itself.
            out: [nbytes(n)] uint8, written.
            world_size: Number of messages.
        """

    def average(self, numel: int, messages: Tensor, world_size: int, stride: int) -> AnyAverage:
        """Return the messages of the averaged chunks of a bucket as an operand of kernels.

        Args:
            numel: Elements of the bucket.
            messages: [world_size * stride] uint8, the message of chunk j begins at ``j * stride``.
            world_size: Number of chunks.
            stride: Bytes from one message to the next.
        """

    def decompress_(self, y: AnyAverage, out: Tensor) -> None:
        """Write the values of an average: out <- y.

        Args:
            y: n elements, read.
            out: [n] float32, written.
        """

    def commit_(self, commit: Commit[AnyAverage]) -> None:
        """Finish a step: error <- z + error - the values of ``own``; outputs <- y * output_scale."""


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

    def compress_with_feedback_(self, z: Combination, error: Errors, messages: Tensor, world_size: int) -> None:
        """See :meth:`Kernels.compress_`: the errors are written at once, in the same pass."""
        on(tensor_of(error)).compress_(z, error, messages, world_size, self.scale_block)

    def average_with_feedback_(self, messages: Tensor, error: Errors, out: Tensor, world_size: int) -> None:
        """See :meth:`Kernels.average_compress_`: the error is written at once, in the same pass."""
        on(tensor_of(error)).average_compress_(messages, error, out, world_size, self.scale_block)

    def compress_(self, z: Combination, error: Errors, messages: Tensor, world_size: int) -> None:
        """See :meth:`MessageFormat.compress_`."""
        on(tensor_of(error)).compress_only_(z, error, messages, world_size, self.scale_block)

    def compress_settled_(
        self, z: Combination, error: Errors, new_error: Errors, messages: Tensor, world_size: int
    ) -> None:
        """See :meth:`MessageFormat.compress_settled_`."""
        if tensor_of(new_error) is not tensor_of(error):
            tensor_of(new_error).copy_(tensor_of(error))
        self.compress_with_feedback_(z, new_error, messages, world_size)

    def average_compress_(
        self, messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int
    ) -> None:
        """See :meth:`MessageFormat.average_compress_`."""
        tensor_of(new_error).copy_(tensor_of(error))
        self.average_with_feedback_(messages, new_error, out, world_size)

    def commit_(self, commit: Commit[Average]) -> None:
        """See :meth:`MessageFormat.commit_`.

        Raises:
            ValueError: If there are outputs: the optimizers' kernels read the average itself.
        """
        if commit.outputs:
            raise ValueError(f"signs are written to no outputs, got {len(commit.outputs)}")
        world_size = commit.y.world_size
        on(tensor_of(commit.error)).commit_(commit.z, commit.error, commit.own, world_size, self.scale_block)

    def decompress_(self, y: Average, out: Tensor) -> None:
        """See :meth:`MessageFormat.decompress_`."""
        on(out).decompress_(y, out)

    def average(self, numel: int, messages: Tensor, world_size: int, stride: int) -> Average:
        """See :meth:`MessageFormat.average`."""
        return Average(numel, None, messages, world_size, self.scale_block, stride)


def all_finite(y: Average) -> Tensor:
    """Return whether all blocks of an average in messages are finite, from their scales alone.

    Returns:
        [] bool, on the device of the messages.

    Raises:
        ValueError: If the average is not in messages.
    """
    if y.messages is None:
        raise ValueError("all_finite needs an average in messages")
    found = [torch.ones((), dtype=torch.bool, device=y.messages.device)]
    for rank in range(y.world_size):
        start, stop = chunk_range(y.numel, y.world_size, rank)
        if start < stop:
            scales = y.messages[rank * y.stride :][: 4 * num_blocks(stop - start, y.scale_block)]
            found.append(scales.view(torch.float32).isfinite().all())
    return torch.stack(found).all()
