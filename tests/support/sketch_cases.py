"""Cases of the count sketch for native kernels on any device: the reference's bits, and nothing else written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_compressopt.kernels import sketch_native, sketch_reference
from hf_compressopt.kernels.sketch import SKETCH_NUMEL
from tests.support.kernel_cases import Arena, Pair

# Rows hold 16 elements, words of signs 64, runs 4096, spans 65,536 or more.
NUMELS = (1, 15, 16, 17, 64, 1000, 4096, 4097, 70_001)
OFFSETS = (0, 1, 63, 4095, 200_000)


def check_sketch(
    device: torch.device,
    numel: int,
    segments: int,
    *,
    offset: int = 0,
    seed: int = 1,
    cuts: Sequence[int] | None = None,
) -> None:
    case = Pair(Arena(device), numel + offset + segments)
    grads, own_grads, _ = case.segments(numel, segments, missing=True, cuts=cuts)
    y, own_y = case.normal(SKETCH_NUMEL)
    squares = torch.rand((), dtype=torch.float64, generator=case.random)
    own_squares = case.arena.put(squares)
    sketch_reference.sketch_(grads, offset, seed, y, squares)
    sketch_native.sketch_(own_grads, offset, seed, own_y, own_squares)
    case.check()
    torch.testing.assert_close(own_squares.cpu(), squares, rtol=1e-6, atol=0)
