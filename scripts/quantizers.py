"""Quantizers of gradients, of the package and of others, by the names that tables call them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_compressopt.kernels import IntegerFormat, SignFormat


class Quantizer(ABC):
    """Q, and the bits of an element on the wire with its share of the scales."""

    bits: float

    @abstractmethod
    def __call__(self, values: Tensor) -> Tensor:
        """Return Q(values), [n] float32; values likewise."""


class Ours(Quantizer):
    """A format of the package's messages."""

    def __init__(self, form: IntegerFormat | SignFormat) -> None:
        assert form.scale_block is not None
        self.form, self.bits = form, form.bits + 8 * form.scale_dtype.itemsize / form.scale_block

    def __call__(self, values: Tensor) -> Tensor:
        message = torch.empty(self.form.nbytes(values.numel()), dtype=torch.uint8)
        return self.form.encode_(values, message)


class BFloat16(Quantizer):
    bits = 16.0

    def __call__(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).float()


def grid_of(exponent_bits: int, mantissa_bits: int, largest: float) -> Tensor:
    """The numbers >= 0 of a small float format, sorted: subnormal ones and those up to ``largest``."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    numbers = [step / steps * 2.0 ** (1 - bias) for step in range(steps)]
    numbers += [(1 + step / steps) * 2.0 ** (e - bias) for e in range(1, 2**exponent_bits) for step in range(steps)]
    return torch.tensor([number for number in numbers if number <= largest])


E2M1 = grid_of(2, 1, 6.0)
E4M3 = grid_of(4, 3, 448.0)
EVEN = torch.linspace(0, 1, 8)
SQUARES = EVEN.square()  # as the package's own 4 bits


class Blocks(Quantizer):
    """A grid of numbers and a scale per block, from the block's largest element."""

    def __init__(self, grid: Tensor, block: int, scale: str, bits: int, scale_bits: int) -> None:
        self.grid, self.block = grid, block
        self.scale = scale
        self.bits = bits + scale_bits / block

    def __call__(self, values: Tensor) -> Tensor:
        rows = pad(values, (0, -values.numel() % self.block)).view(-1, self.block)
        largest = rows.abs().amax(dim=1, keepdim=True)
        if self.scale == "E8M0":  # OCP Microscaling formats 1.0, section 6.3: a power of two
            exponent = torch.floor(torch.log2(largest)) - torch.floor(torch.log2(self.grid[-1]))
            scales = torch.where(largest > 0, torch.exp2(exponent), torch.zeros(()))
        elif self.scale == "E4M3":  # as NVFP4, of which the scales have one float32 scale together
            whole = largest.max() / (self.grid[-1] * E4M3[-1])
            scales = nearest(E4M3, largest / self.grid[-1] / whole) * whole
        elif self.scale == "3 bits":  # a float of 8 bits: 5 of its exponent, 3 of its mantissa, and no sign
            unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-38))) - 3)
            scales = torch.round(largest / self.grid[-1] / unit) * unit
        else:
            scales = (largest / self.grid[-1]).to(torch.bfloat16).float()
        parts = torch.where(scales > 0, rows / scales, torch.zeros(()))
        return (nearest(self.grid, parts.abs()).copysign(parts) * scales).view(-1)[: values.numel()]


def nearest(grid: Tensor, values: Tensor) -> Tensor:
    """Return the numbers of a sorted grid that are nearest to values >= 0; larger ones become the largest."""
    return grid[torch.bucketize(values, (grid[1:] + grid[:-1]) / 2)]


QUANTIZERS: dict[str, Quantizer] = {
    "int4, squares (ours)": Ours(IntegerFormat(4)),
    "int8 (ours)": Ours(IntegerFormat(8)),
    "signs, blocks of 4,096 (ours)": Ours(SignFormat(4096)),
    "bfloat16": BFloat16(),
    "4 bits, even, blocks of 128": Blocks(EVEN, 128, "bfloat16", 4, 16),
    "4 bits, squares, blocks of 64, 8-bit scales": Blocks(SQUARES, 64, "3 bits", 4, 8),
    "4 bits, squares, blocks of 32, 8-bit scales": Blocks(SQUARES, 32, "3 bits", 4, 8),
    "MXFP4": Blocks(E2M1, 32, "E8M0", 4, 8),
    "NVFP4": Blocks(E2M1, 16, "E4M3", 4, 8),
    "MXFP8 E4M3": Blocks(E4M3, 32, "E8M0", 8, 8),
}
