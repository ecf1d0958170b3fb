"""Message formats: the bytes in which the values of a chunk travel, and their code in PyTorch.

A message is a run of bytes (uint8, contiguous) that holds one chunk of a bucket. Its length depends on the chunk's
elements alone, and is 0 for a chunk of no elements. Messages of several chunks stand one after another, in rank order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_compressopt.flat import SIGNS_PER_BYTE, chunk_range
from hf_compressopt.kernels.memory import kept_per_device

#: Every message starts at, and is padded to, a multiple of this many bytes.
MESSAGE_ALIGNMENT = 16
#: Elements per scale of integers, counted from the start of a chunk.
INTEGER_BLOCK = 128
#: Blocks of signs after which a tensor has one of its own, wherever it begins.
OWN_BLOCKS = 2
#: Supported bits per integer.
INTEGER_BITS = (4, 8)

_GROUP = 4  # messages that are summed first: few enough for a table of all sums that their signs can make
# Multiplying eight 0/1 bytes, read as one little-endian int64, by this number gathers them in the top byte, the first
# byte as its least significant bit; no partial sums meet, so there are no carries.
_GATHER_BITS = 0x0102040810204080
_TOP_BYTE_SHIFT = 56
# Norms are taken in float32 over runs of this length, and in float64 over the runs: longer runs lose digits.
_RUN = 256
_SIZE_BITS = 0x7FFFFFFF  # of a float32, without its sign
_HUGE_PATTERN = 0x7F000000  # of 2^127
_TINY_SCALE = 2.0**-120
_MOST_STEPS = {4: 49.0, 8: 127.0}  # that an integer stands for


def travels_in_full(tensor: Tensor) -> bool:
    """Return whether a tensor stays out of messages of integers: of one dimension, or without a block of its own.

    Larger neighbours in a block would round it to 0. A tensor of two blocks has one of its own wherever it begins.
    """
    return tensor.dim() < 2 or tensor.numel() < 2 * INTEGER_BLOCK


def travels_beside_signs(shape: Sequence[int], scale_block: int | None) -> bool:
    """Return whether a tensor stays out of messages of signs: a vector without a block of its own, or a small tensor.

    A block has one scale, which larger neighbours would make: steps of a bias beside a matrix would all be too large,
    or, bounded, too rare. With one scale for a whole message, as in the papers, no tensor stays out.
    """
    if scale_block is None:
        return False
    return prod(shape) < OWN_BLOCKS * (scale_block if len(shape) < 2 else min(scale_block, INTEGER_BLOCK))


class Layout(ABC):
    """The layout of a chunk's values in a message."""

    bits: int  # of an element
    scale_block: int | None  # elements per scale; None: all chunks share one scale
    scale_dtype: torch.dtype
    scales_come_first: bool

    def blocks(self, numel: int) -> int:
        """Return the number of scales of a chunk of ``numel`` elements."""
        return -(-numel // (self.scale_block or max(numel, 1)))

    def scales_at(self, numel: int) -> int:
        """Return the first byte of the scales in the message of a chunk."""
        return 0 if self.scales_come_first else self.packed_nbytes(numel)

    def packed_nbytes(self, numel: int) -> int:
        """Return the bytes of a chunk's elements without their scales."""
        return -(-numel // SIGNS_PER_BYTE) * self.bits

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message of a chunk of ``numel`` elements."""
        nbytes = self.packed_nbytes(numel) + self.blocks(numel) * self.scale_dtype.itemsize
        return -(-nbytes // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT

    def chunk_nbytes(self, numel: int, world_size: int) -> list[int]:
        """Return the bytes of the message of each chunk of a bucket of ``numel`` elements, in rank order."""
        ranges = (chunk_range(numel, world_size, rank) for rank in range(world_size))
        return [self.nbytes(stop - start) for start, stop in ranges]

    def scales(self, message: Tensor, numel: int) -> Tensor:
        """Return the scales of a message, which share its memory. message: uint8, from its first byte on."""
        first, nbytes = self.scales_at(numel), self.blocks(numel) * self.scale_dtype.itemsize
        return message[first : first + nbytes].view(self.scale_dtype)

    def common_scale(self, u: Tensor) -> Tensor | None:
        """Return the scale that all chunks of a bucket share, [] float32, or None. u: [n] float32."""
        return None

    @abstractmethod
    def encode_(self, u: Tensor, message: Tensor, scale: Tensor | None = None) -> Tensor:
        """Write the message of a chunk, [nbytes(n)] uint8, and return Q(u). u: [n] float32, n > 0; likewise.

        scale: What :meth:`common_scale` has returned for the bucket.
        """

    @abstractmethod
    def decode(self, message: Tensor, numel: int) -> Tensor:
        """Return the values of a message. message: uint8, from its first byte on. Returns [numel] float32."""

    def chunks(
        self, messages: Tensor, numel: int, world_size: int, stride: int | None = None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the elements [start, stop) and the message of each chunk that has elements, a stride apart if given."""
        byte = 0
        for rank, nbytes in enumerate(self.chunk_nbytes(numel, world_size)):
            start, stop = chunk_range(numel, world_size, rank)
            if start < stop:
                yield start, stop, messages[byte : byte + nbytes]
            byte += nbytes if stride is None else stride

    def sum_of(self, messages: Tensor, numel: int) -> Tensor:
        """Sum messages of one chunk, [ranks, bytes]: groups of four in rank order, then their sums, in order."""
        sums = []
        for group in torch.split(messages, _GROUP):
            first, *others = (self.decode(message, numel) for message in group)
            for values in others:
                first.add_(values)
            sums.append(first)
        total, *others = sums
        for part in others:
            total.add_(part)
        return total


# -- signs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignFormat(Layout):
    """A sign per element, and a float32 scale per block: the RMS of its values (1-bit Adam, arXiv 2102.02888).

    The message of a chunk of n elements, n > 0:

    ======================  ========================================================================================
    bytes                   content
    ======================  ========================================================================================
    ``4 * blocks``          float32 scales, little-endian, one per block; ``blocks = ceil(n / scale_block)``, or 1 if
                            ``scale_block`` is None
    ``ceil(n / 8)``         signs: element i is bit ``i % 8`` (least significant first) of byte ``i // 8``; 1 is
                            negative; zero, of either sign, counts as positive; bits beyond n are 0
    up to 15                zeros up to a multiple of :data:`MESSAGE_ALIGNMENT`
    ======================  ========================================================================================
    """

    scale_block: int | None  # a positive multiple of 8, or None
    bits = 1
    scale_dtype = torch.float32
    scales_come_first = True

    def __post_init__(self) -> None:
        if self.scale_block is not None and (self.scale_block <= 0 or self.scale_block % SIGNS_PER_BYTE):
            raise ValueError(f"scale_block must be a positive multiple of 8 or None, got {self.scale_block}")

    def common_scale(self, u: Tensor) -> Tensor | None:
        return block_rms(u, u.numel()).view(()) if self.scale_block is None and u.numel() else None

    def encode_(self, u: Tensor, message: Tensor, scale: Tensor | None = None) -> Tensor:
        scales = block_rms(u, self.scale_block or u.numel()) if scale is None else scale.view(1)
        signs, first = pack_signs(u), 4 * scales.numel()
        self.scales(message, u.numel()).copy_(scales)
        message[first : first + signs.numel()] = signs
        message[first + signs.numel() :] = 0
        return self._scaled(unpack_signs(signs, u.numel()), scales)

    def decode(self, message: Tensor, numel: int) -> Tensor:
        scales = self.scales(message, numel)
        signs = message[4 * scales.numel() :][: self.packed_nbytes(numel)]
        return self._scaled(unpack_signs(signs, numel), scales)

    def _scaled(self, signs: Tensor, scales: Tensor) -> Tensor:
        """Multiply each block of signs by its scale, in place. signs: [n], scales: [blocks]. Returns signs."""
        if self.scale_block is None:
            return signs.mul_(scales)
        whole = signs.numel() // self.scale_block * self.scale_block
        signs[:whole].view(-1, self.scale_block).mul_(scales[: whole // self.scale_block].unsqueeze(1))
        signs[whole:].mul_(scales[-1])
        return signs


def block_rms(x: Tensor, scale_block: int) -> Tensor:
    """Return the root mean square of each block. x: [n] float32, n > 0. Returns [ceil(n / scale_block)] float32."""
    blocks = x.numel() // scale_block
    parts = x[: blocks * scale_block].view(blocks, scale_block), x[blocks * scale_block :].unsqueeze(0)
    return torch.cat([_row_norms(rows).div_(rows.shape[1] ** 0.5) for rows in parts if rows.numel()]).float()


def _row_norms(rows: Tensor) -> Tensor:
    """Return row norms, in float32 over short runs and in float64 over the runs. rows: [r, n]. Returns [r] float64."""
    whole = rows.shape[1] // _RUN * _RUN
    parts = []
    if whole:
        runs = torch.linalg.vector_norm(rows[:, :whole].view(rows.shape[0], -1, _RUN), dim=2)
        parts.append(torch.linalg.vector_norm(runs.double(), dim=1))
    if whole < rows.shape[1]:
        parts.append(torch.linalg.vector_norm(rows[:, whole:], dim=1).double())
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0) if len(parts) > 1 else parts[0]
    return norms


def pack_signs(x: Tensor) -> Tensor:
    """Pack signs, eight to a byte, least significant bit first; 1 is negative. x: [n]. Returns [ceil(n / 8)] uint8."""
    negative = (x < 0).view(torch.uint8)
    if padding := -x.numel() % SIGNS_PER_BYTE:
        negative = torch.cat([negative, negative.new_zeros(padding)])
    return negative.view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(_TOP_BYTE_SHIFT).to(torch.uint8)


def unpack_signs(bits: Tensor, numel: int) -> Tensor:
    """Return signs as +1.0 and -1.0. bits: [ceil(numel / 8)] uint8. Returns [numel] float32."""
    return _sign_table(bits.device).index_select(0, bits.to(torch.int32)).view(-1)[:numel]


@kept_per_device
def _sign_table(device: torch.device) -> Tensor:
    byte = torch.arange(256, device=device).unsqueeze(1)
    bit = torch.arange(8, device=device)
    return 1.0 - 2.0 * (byte >> bit & 1).float()  # [256, 8]


# -- integers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IntegerFormat(Layout):
    """A b-bit integer per element, and a bfloat16 scale per block of 128 elements.

    Sources: LoCo (arXiv 2407.04480: 4 bits with error feedback), SDP4Bit (arXiv 2410.15526: groups of 128).

    An integer q of 8 bits stands for q steps, one of 4 bits for q |q| steps: 0, 1, 4, 9, 16, 25, 36 or 49 with a sign.
    Small elements of a block are rounded less, which Adam's variance needs.

    **Quantizing a block** of up to 128 elements, counted from a chunk's start. The largest is L steps, L = 127 or 49:

    * m is the largest bit pattern of the block with the signs cleared, so that NaN > infinity > numbers.
    * If m is above 2^127, which includes infinity and NaN, the scale is NaN (0x7FC0) and all integers are 0. (Above
      2^127, L times the scale could overflow.)
    * Otherwise the scale is m / L, divided in float32 and rounded to the nearest bfloat16, ties upwards. If the scale
      is below 2^-120, as for a block of zeros, the scale and all integers are 0.
    * Otherwise r = round(u * (1 / scale)), a float32 division and a float32 product, to nearest, ties to even. The
      scale is so near to m / L that the largest |r| of a block is L. 8 bits: q = r. 4 bits: q is the root of |r|, to
      nearest, with the sign of r. So to quantize what a message stands for gives the same message.
    * The decoded value is the steps times the scale. This product is exact, and so is the error.

    **The message of a chunk** of n elements, n > 0:

    =======================  ======================================================================================
    bytes                    content
    =======================  ======================================================================================
    ``bits * ceil(n / 8)``   integers; 8 bits: one signed byte each; 4 bits: two's complement, element i in the low
                             half of byte ``i // 2`` if i is even, else in its high half; integers beyond n are 0
    ``2 * ceil(n / 128)``    bfloat16 scales, little-endian, one per block
    up to 14                 zeros up to a multiple of :data:`MESSAGE_ALIGNMENT`
    =======================  ======================================================================================

    The integers come first: a block's integers begin at a multiple of 64 bytes from the message's first byte.
    """

    bits: int  # 4 or 8
    scale_block = INTEGER_BLOCK
    scale_dtype = torch.bfloat16
    scales_come_first = False

    def __post_init__(self) -> None:
        if self.bits not in INTEGER_BITS:
            raise ValueError(f"bits must be 4 or 8, got {self.bits}")

    def encode_(self, u: Tensor, message: Tensor, scale: Tensor | None = None) -> Tensor:
        scales, integers = self._quantize(u)
        message.zero_()
        message[: self.packed_nbytes(u.numel())] = self._pack(integers)
        patterns = scales.view(torch.int32).bitwise_right_shift(16).to(torch.int16)  # a conversion may change a NaN
        self.scales(message, u.numel()).view(torch.int16).copy_(patterns)
        return self._dequantize(scales, integers)

    def decode(self, message: Tensor, numel: int) -> Tensor:
        packed = message[: self.packed_nbytes(numel)]
        if self.bits == 4:
            packed = torch.stack([packed & 0xF, packed >> 4], dim=1).view(-1)
            packed = (packed ^ 8) - 8  # the sign is the fourth bit
        return self._dequantize(self.scales(message, numel), packed.view(torch.int8)[:numel])

    def _quantize(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize a chunk. u: [n] float32. Returns the scales, [blocks] float32, and the integers, [n] int8."""
        blocks = self.blocks(u.numel())
        rows = pad(u, (0, blocks * INTEGER_BLOCK - u.numel())).view(blocks, INTEGER_BLOCK)
        pattern = rows.view(torch.int32).bitwise_and(_SIZE_BITS).amax(dim=1)
        exact = pattern.view(torch.float32) / u.new_full((), _MOST_STEPS[self.bits])
        scales = (exact.view(torch.int32) + 0x8000).bitwise_and_(~0xFFFF).view(torch.float32)
        huge = pattern > _HUGE_PATTERN
        empty = huge | (scales < _TINY_SCALE)
        quotients = rows * (u.new_ones(()) / scales).unsqueeze(1)
        steps = quotients.round_().masked_fill_(empty.unsqueeze(1), 0.0)
        integers = (steps if self.bits == 8 else steps.abs().sqrt_().round_().copysign_(steps)).to(torch.int8)
        scales = torch.where(huge, torch.nan, torch.where(empty, 0.0, scales))
        return scales, integers.view(-1)[: u.numel()]

    def _dequantize(self, scales: Tensor, integers: Tensor) -> Tensor:
        """Return the values of a chunk, [n] float32. scales: [blocks]; integers: [n] int8."""
        steps = integers.float()
        if self.bits == 4:
            steps *= steps.abs()
        return steps.mul_(scales.float().repeat_interleave(INTEGER_BLOCK)[: integers.numel()])

    def _pack(self, integers: Tensor) -> Tensor:
        padded = pad(integers, (0, -integers.numel() % SIGNS_PER_BYTE)).view(torch.uint8)
        if self.bits == 8:
            return padded
        low, high = padded.view(-1, 2).unbind(dim=1)
        return (low & 0xF) | (high << 4)


#: A format of messages, which kernels take as an operand.
MessageFormat = SignFormat | IntegerFormat
