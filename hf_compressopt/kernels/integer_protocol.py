"""The interface of the kernels of b-bit integers, with the contract of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hf_compressopt.kernels.commit import Commit
from hf_compressopt.kernels.errors import Errors
from hf_compressopt.kernels.integer_messages import IntegerAverage
from hf_compressopt.kernels.operands import Combination, Segment


class IntegerKernels(Protocol):
    """The kernels of b-bit integers of one device. All implementations leave the same bits.

    Every operation on an element is rounded on its own, in the order of the formulas.
    :class:`~hf_compressopt.kernels.integers.IntegerFormat` describes Q(u) and the messages.
    """

    def compress_(
        self,
        z: Combination,
        error: Errors,
        messages: Tensor,
        world_size: int,
        bits: int,
        new_error: Errors | None = None,
    ) -> None:
        """Compress a bucket to integers: u = z + error; messages <- Q(u); new_error <- u - Q(u), if it is given.

        Without it, :meth:`commit_` updates the error once all ranks know that the step is finite.

        Args:
            z: The n values to send, read.
            error: n elements, read.
            messages: [sum(chunk_integer_message_nbytes(n, world_size, bits))] uint8, written.
            world_size: Number of chunks.
            bits: 4 or 8.
            new_error: n elements, in the form of ``error``, written; it may be ``error`` itself. None: nothing.
        """

    def average_compress_(
        self, messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int, bits: int
    ) -> None:
        """Average a chunk on its server: a = mean of the messages' values + error; out <- Q(a); new_error <- a - Q(a).

        The sum is taken in float32: messages in groups of four, in rank order, and then the groups' sums, in order.

        Args:
            messages: [world_size * integer_message_nbytes(n, bits)] uint8, one message of the chunk per rank, read.
            error: n elements, read.
            new_error: n elements, in the form of ``error``, written. It may be ``error`` itself.
            out: [integer_message_nbytes(n, bits)] uint8, written.
            world_size: Number of messages.
            bits: 4 or 8.
        """

    def decompress_(self, y: IntegerAverage, out: Tensor) -> None:
        """Write the values of an average: out <- y.

        Args:
            y: n elements, read.
            out: [n] float32, written.
        """

    def mean_(self, messages: Tensor, out: Tensor, world_size: int, bits: int, factor: float) -> None:
        """Sum the messages of one chunk, in the order of :meth:`average_compress_`: out <- sum * factor.

        Args:
            messages: [world_size * integer_message_nbytes(n, bits)] uint8, one message of the chunk per rank, read.
            out: [n] float32, written.
            world_size: Number of messages.
            bits: 4 or 8.
            factor: Of the sum, such as 1 / world_size.
        """

    def add_(self, y: IntegerAverage, outputs: Sequence[Segment], decay: float, scale: float) -> None:
        """Add an average to tensors: outputs <- outputs * decay + y * scale, each operation rounded to float32.

        Args:
            y: n elements, read.
            outputs: Segments that cover the bucket, each written in its own dtype. Those without a tensor are left
                alone.
            decay: Factor of what the outputs hold; 0 if they are not to be read.
            scale: Factor of the average.
        """

    def commit_(self, commit: Commit[IntegerAverage]) -> None:
        """Finish a step that is finite: error <- z + error - the values of ``own``; outputs <- y * output_scale."""
