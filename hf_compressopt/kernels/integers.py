"""b-bit integers as a message format with error feedback, and the choice of its kernels for a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels import integer_native, integer_operators, integer_reference
from hf_compressopt.kernels.choice import one_of
from hf_compressopt.kernels.commit import Commit
from hf_compressopt.kernels.errors import Errors, tensor_of
from hf_compressopt.kernels.integer_messages import INTEGER_BITS, IntegerAverage, integer_message_nbytes, scales_of
from hf_compressopt.kernels.integer_protocol import IntegerKernels
from hf_compressopt.kernels.messages import InChunks
from hf_compressopt.kernels.operands import Combination, Segment


@dataclass(frozen=True)
class IntegerFormat(InChunks):
    """A b-bit integer per element, and a bfloat16 scale per block of 128 elements.

    Sources: LoCo (arXiv 2407.04480: 4 bits with error feedback), SDP4Bit (arXiv 2410.15526: groups of 128). It is a
    :class:`~hf_compressopt.kernels.formats.MessageFormat`.

    **Quantizing a block** of up to 128 elements, counted from the start of a chunk, with L = 2^(b-1) - 1:

    * m is the largest bit pattern of the block with the signs cleared, so that NaN > infinity > numbers.
    * If m is above 2^127, which includes infinity and NaN, the scale is NaN (0x7FC0) and all integers are 0. (Above
      2^127, L times the scale could overflow.)
    * Otherwise the scale is m / L, divided in float32 and rounded to the nearest bfloat16, ties upwards. If the scale
      is below 2^-120, as for a block of zeros, the scale and all integers are 0.
    * Otherwise q = round(u * (1 / scale)), a float32 division and a float32 product, to nearest, ties to even. The
      scale is so near to m / L that the largest |q| of a block is L. So to quantize what a message stands for gives
      the same message.
    * The decoded value is q * scale. This product is exact, and so is the error u - q * scale.

    **The message of a chunk** of n elements, n > 0:

    =======================  ======================================================================================
    bytes                    content
    =======================  ======================================================================================
    ``bits * ceil(n / 8)``   integers; 8 bits: one signed byte each; 4 bits: two's complement, element i in the low
                             half of byte ``i // 2`` if i is even, else in its high half; integers beyond n are 0
    ``2 * ceil(n / 128)``    bfloat16 scales, little-endian, one per block
    up to 14                 zeros up to a multiple of :data:`~hf_compressopt.kernels.messages.MESSAGE_ALIGNMENT`
    =======================  ======================================================================================

    The integers come first: a block's integers begin at a multiple of 64 bytes from the message's first byte.

    Attributes:
        bits: 4 or 8.

    Raises:
        ValueError: If ``bits`` is neither 4 nor 8.
    """

    bits: int

    def __post_init__(self) -> None:
        """Check the number of bits."""
        if self.bits not in INTEGER_BITS:
            raise ValueError(f"bits must be 4 or 8, got {self.bits}")

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message of a chunk of ``numel`` elements."""
        return integer_message_nbytes(numel, self.bits)

    def compress_(self, z: Combination, error: Errors, messages: Tensor, world_size: int) -> None:
        """See :meth:`IntegerKernels.compress_`."""
        integer_kernels(tensor_of(error)).compress_(z, error, messages, world_size, self.bits)

    def compress_settled_(
        self, z: Combination, error: Errors, new_error: Errors, messages: Tensor, world_size: int
    ) -> None:
        """See :meth:`~hf_compressopt.kernels.formats.MessageFormat.compress_settled_`: one pass."""
        integer_kernels(tensor_of(error)).compress_(z, error, messages, world_size, self.bits, new_error)

    def average_compress_(
        self, messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int
    ) -> None:
        """See :meth:`IntegerKernels.average_compress_`."""
        integer_kernels(tensor_of(error)).average_compress_(messages, error, new_error, out, world_size, self.bits)

    def average(self, numel: int, messages: Tensor, world_size: int, stride: int) -> IntegerAverage:
        """See :meth:`~hf_compressopt.kernels.formats.MessageFormat.average`."""
        return IntegerAverage(numel, messages, world_size, self.bits, stride)

    def mean_(self, messages: Tensor, out: Tensor, world_size: int, factor: float) -> None:
        """See :meth:`IntegerKernels.mean_`."""
        integer_kernels(out).mean_(messages, out, world_size, self.bits, factor)

    def add_(self, y: IntegerAverage, outputs: Sequence[Segment], decay: float = 0.0, scale: float = 1.0) -> None:
        """See :meth:`IntegerKernels.add_`."""
        integer_kernels(y.messages).add_(y, outputs, decay, scale)

    def decompress_(self, y: IntegerAverage, out: Tensor) -> None:
        """See :meth:`IntegerKernels.decompress_`."""
        integer_kernels(out).decompress_(y, out)

    def commit_(self, commit: Commit[IntegerAverage]) -> None:
        """See :meth:`IntegerKernels.commit_`."""
        integer_kernels(tensor_of(commit.error)).commit_(commit)


def integer_kernels(where: torch.device | Tensor) -> IntegerKernels:
    """Return the kernels of b-bit integers for the tensors of a device.

    Args:
        where: The device; or a tensor on it. For a fake tensor, and while torch.compile traces, a tensor gives kernels
            that are operators of torch.
    """
    return one_of(where, integer_native, integer_reference, integer_operators)


def any_nan(y: IntegerAverage) -> Tensor:
    """Return whether a block of an average is not finite, from its scales alone.

    Args:
        y: n elements. Only the scales are read, 2 bytes per block of 128 elements.

    Returns:
        [] bool, on the device of the messages.
    """
    largest = []
    for rank in range(y.world_size):
        start, stop = chunk_range(y.numel, y.world_size, rank)
        if start < stop:
            largest.append(scales_of(y.messages[rank * y.stride :], stop - start, y.bits).amax())  # a NaN wins
    return torch.stack(largest).isnan().any() if largest else torch.zeros_like(y.messages[:1], dtype=torch.bool).any()
