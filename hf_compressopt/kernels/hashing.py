"""Numbers that look random, the same on every machine: the finalizer of SplitMix64, in integers."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MASK = 2**64 - 1


def next_key(key: int) -> int:
    """Return hash(key + G) of a number from 0 to 2^64 - 1."""
    x = key + _GOLDEN & _MASK
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        x = (x ^ x >> shift) * factor & _MASK
    return x


def hashes(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return hash(key + i G) for i from ``first`` on, [count] int64, the bits of numbers without sign."""
    x = torch.arange(first, first + count, dtype=torch.int64, device=device) * _signed(_GOLDEN) + _signed(key)
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return x


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
