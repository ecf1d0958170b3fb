"""The norm of the mean of gradients that stay on their ranks, from count sketches.

A sketch is linear: the mean of the ranks' sketches is the sketch of the mean gradient. Its norm is the norm of the mean
gradient, with a relative standard deviation of 1.1 %. A sketch has 4096 numbers, and travels in the small message that
the ranks exchange in every step. See :mod:`hf_compressopt.kernels.sketch`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hf_compressopt.kernels import Segment
from hf_compressopt.kernels.sketch import SKETCH_NUMEL, sketch_
from hf_compressopt.optim.group_state import GroupState

#: Legal values of ``clip``.
CLIPS = ("local", "sketch")


def sketch_of(
    states: Sequence[GroupState], groups: Sequence[Sequence[Tensor | None]], chosen: Collection[int] | None, seed: int
) -> tuple[Tensor, Tensor]:
    """Sketch this rank's gradients.

    Args:
        states: The param groups.
        groups: One list of gradients per param group, one entry per parameter; None counts as 0.
        chosen: The parameters (by id) to take; None takes all.
        seed: A number for each step, the same on all ranks.

    Returns:
        [4096] float32, the sketch; and [] float64, the sum of the squares.
    """
    device = states[0].device
    y = torch.zeros(SKETCH_NUMEL, dtype=torch.float32, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    offset = 0
    for state, grads in zip(states, groups, strict=True):
        segments = []
        for index, (param, grad) in enumerate(zip(state.params, grads, strict=True)):
            taken = grad is not None and (chosen is None or id(param) in chosen)
            tensor = grad.contiguous() if grad is not None and taken else None
            segments.append(Segment(tensor, 0, param.numel(), index))
        if state.layout.numel:
            sketch_(segments, offset, seed, y, squares)
        offset += state.layout.numel
    return y, squares


def square_of_mean(sum_of_sketches: Tensor, world_size: int) -> Tensor:
    """Return the squared norm of the mean gradient. sum_of_sketches: [4096] float64. Returns [] float64."""
    return sum_of_sketches.div(world_size).square().sum()
