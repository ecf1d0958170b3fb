"""The interface of the kernels of b-bit integers, with the contract of each."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hf_compressopt.kernels.commit import Commit
from hf_compressopt.kernels.errors import Errors
from hf_compressopt.kernels.integer_messages import IntegerAverage
from hf_compressopt.kernels.operands import Combination


class IntegerKernels(Protocol):
    """The kernels of b-bit integers of one device. All implementations leave the same bits.

    Every operation on an element is rounded on its own, in the order of the formulas.
    :class:`~hf_compressopt.kernels.integers.IntegerFormat` describes Q(u) and the messages.
    """

    def compress_(self, z: Combination, error: Errors, messages: Tensor, world_size: int, bits: int) -> None:
        """Compress a bucket to integers: u = z + error; messages <- Q(u).

        The error is only read. :meth:`commit_` updates it once all ranks know that the step is finite.

        Args:
            z: The n values to send, read.
            error: n elements, read.
            messages: [sum(chunk_integer_message_nbytes(n, world_size, bits))] uint8, written.
            world_size: Number of chunks.
            bits: 4 or 8.
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

    def commit_(self, commit: Commit[IntegerAverage]) -> None:
        """Finish a step that is finite: error <- z + error - the values of ``own``; outputs <- y * output_scale."""
