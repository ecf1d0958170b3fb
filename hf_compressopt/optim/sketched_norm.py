"""The norm of the mean of gradients that stay on their ranks, from count sketches.

A sketch is linear: the mean of the ranks' sketches is the sketch of the mean gradient. Its norm is the norm of the mean
gradient, with a relative standard deviation of 1 / sqrt(2 k): 1.1 % for k = 4096 numbers. It travels in the small
message that the ranks exchange in every step. See :mod:`hf_compressopt.kernels.sketch`.

The sketch of fewer than 65,536 elements is folded: its parts of k numbers are added, so that it takes no more than a
fourth of a byte per element, twice what their signs take. At least 64 numbers stay.

A parameter that only some of the ranks hold, in a param group with a process group of its own, belongs to a sketch of
these ranks. They exchange it first, and tell the norm of its mean to all ranks in the message of all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels import Segment, sum_of_squares
from hf_compressopt.kernels.memory import in_memory
from hf_compressopt.kernels.sketch import SKETCH_NUMEL, sketch_
from hf_compressopt.optim.group_state import GroupState, by_communicator

#: Legal values of ``clip``; "late" clips by the last step's norm, which "sketch" finds.
CLIPS = ("sketch", "local", "late")
_LEAST_BITS = 6
#: What "sketch" reports as the norm, for the log.
ESTIMATE = "an estimate of that of the mean gradient, within some per cent"


class Sketch(NamedTuple):
    """The sketch of the gradients of the parameters that the ranks of a communicator hold.

    Attributes:
        communicator: These ranks.
        y: [4096] float32, this rank's sketch.
        square: [] float64, the sum of squares of this rank's gradients.
        size: The numbers that are sent.
    """

    communicator: Communicator
    y: Tensor
    square: Tensor
    size: int


def sketch_size(numel: int) -> int:
    """Return how many numbers the sketch of so many elements has: a power of two."""
    return min(SKETCH_NUMEL, 1 << max(_LEAST_BITS, (numel // 16).bit_length() - 1))


class MeanNorm:
    """This rank's part of the norm of the mean gradient, and the noise that the norms show.

    Attributes:
        everyone: All ranks.
        sketches: One for each group of ranks whose gradients are each rank's own.
        averaged: [] float64, the share-weighted sum of squares of gradients that are alike on the ranks that hold them.
        squares: The sums of squares of all these gradients, [] float64, by their share: 1 over the number of ranks that
            hold the parameter.
        common: The share of the mean square of the ranks' norms that the true gradient has, as
            :class:`~hf_compressopt.optim.gradient_noise.GradientNoise` averages it, after :meth:`square`; NaN if there
            is none.
        mean_square: The mean over ranks of the squared norms of their gradients, after :meth:`square`.
    """

    def __init__(self, everyone: Communicator, device: torch.device) -> None:
        """Begin without gradients."""
        self.everyone = everyone
        self.sketches: list[Sketch] = []
        self.averaged = torch.zeros((), dtype=torch.float64, device=device)
        self.squares: dict[float, Tensor] = {}
        self.common = self.mean_square = math.nan

    def add(
        self, communicator: Communicator, tensors: Sequence[tuple[int, Tensor | None]], seed: int | None, size: int
    ) -> None:
        """Measure the gradients of the parameters of a communicator.

        Args:
            communicator: The ranks that hold the parameters.
            tensors: For each parameter its number of elements, and its gradient or None.
            seed: A number for each step, the same on all ranks; None if the gradients are alike on these ranks.
            size: The numbers of the sketch that are sent.
        """
        device, share = self.averaged.device, 1 / communicator.world_size
        if seed is None or communicator.world_size == 1:
            square = sum_of_squares([grad for _, grad in tensors if grad is not None], device)
            self.averaged = self.averaged + square * share
        else:
            sketch = _sketch_of(tensors, seed, device)
            self.sketches.append(Sketch(communicator, *sketch, size))
            square = sketch[1]
        self.squares[share] = self.squares.get(share, 0) + square

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the message of all ranks: half the bytes are enough for a sketch."""
        return torch.float32 if any(s.communicator is self.everyone for s in self.sketches) else torch.float64

    def contributions(self) -> list[Tensor]:
        """Return the numbers of this rank whose sums over all ranks :meth:`square` takes.

        The ranks of each process group of a param group exchange their sketch before: all ranks call.
        """
        zero = torch.zeros_like(self.averaged)
        own, local, divided, shared = zero, zero, zero, []
        for communicator, whole, square, size in self.sketches:
            y = whole if size == whole.numel() else whole.view(-1, size).sum(dim=0)
            share = 1 / communicator.world_size
            local, divided = local + square * share, divided + square * share**2
            if communicator is self.everyone:
                shared = [y]
            else:
                communicator.all_reduce(y).wait()
                own = own + _square_of_mean(y.double(), communicator.world_size) * share
        return [self.averaged, own, local, divided, *shared]

    def square(self, sums: Tensor) -> Tensor:
        """Return the squared norm of the mean gradient.

        Args:
            sums: The sums over all ranks of :meth:`contributions`, float64.

        Returns:
            [] float64, alike on all ranks.
        """
        averaged, own, local, divided = sums[:4].unbind()
        mean = own + _square_of_mean(sums[4:], self.everyone.world_size)
        self.common = float((mean - divided) / (local - divided))
        self.mean_square = float(averaged + local)
        return averaged + mean


def measure(
    states: Sequence[GroupState],
    gradients: Sequence[Sequence[Tensor | None]],
    parameters: Sequence[Tensor] | None,
    everyone: Communicator,
    seed: int,
    *,
    averaged: bool,
) -> MeanNorm:
    """Measure this rank's gradients for the norm of their mean.

    Args:
        states: The param groups.
        gradients: One list of gradients per param group, one entry per parameter; None counts as 0. Empty if they are
            not valid: then this rank has part in all messages, and contributes nothing.
        parameters: Take the gradients of these, which may be any; None takes those of all param groups. All ranks hold
            the parameters that are in no param group.
        everyone: All ranks.
        seed: A number for each step, the same on all ranks.
        averaged: Whether gradients are alike on all ranks already, but for param groups with a process group.
    """
    chosen: Collection[int] | None = None if parameters is None else {id(p) for p in parameters}
    found = MeanNorm(everyone, states[0].device if states else everyone.device)
    tensors: dict[int, list[tuple[int, Tensor | None]]] = {id(everyone): []}
    communicators, sizes = {id(everyone): everyone}, {id(everyone): 0}
    for communicator, together in by_communicator(states):
        communicators[id(communicator)] = communicator
        rows = tensors.setdefault(id(communicator), [])
        sizes[id(communicator)] = sum(state.layout.numel for state in together)
        for state in together if gradients else ():
            for param, grad in zip(state.params, gradients[state.number], strict=True):
                rows.append((param.numel(), grad if chosen is None or id(param) in chosen else None))
    known = {id(param) for state in states for param in state.params}
    for param in parameters or ():
        if id(param) not in known and gradients:
            grad = None if param.grad is None else param.grad.to(found.averaged.device, torch.float32)
            tensors[id(everyone)].append((param.numel(), grad))
    for key, communicator in communicators.items():
        alike = averaged and communicator is everyone
        found.add(communicator, tensors[key], None if alike else seed, sketch_size(sizes[key]))
    return found


def _sketch_of(tensors: Sequence[tuple[int, Tensor | None]], seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a sketch, [4096] float32, and a sum of squares, [] float64."""
    y = torch.zeros(SKETCH_NUMEL, dtype=torch.float32, device=device)
    square = torch.zeros((), dtype=torch.float64, device=device)
    segments = [
        Segment(None if grad is None else in_memory("the gradient", grad), 0, numel, index)
        for index, (numel, grad) in enumerate(tensors)
    ]
    if any(segment.numel for segment in segments):
        sketch_(segments, 0, seed, y, square)
    return y, square


def _square_of_mean(sum_of_sketches: Tensor, world_size: int) -> Tensor:
    """Return the squared norm of the mean. sum_of_sketches: [size] float64, or [0]. Returns [] float64."""
    return sum_of_sketches.div(world_size).square().sum()
