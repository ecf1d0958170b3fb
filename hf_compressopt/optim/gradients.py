"""The gradients of one step: collected and checked once, measured, and clipped.

Noise: with A the mean over ranks of ||g_r||^2, and g the mean of W gradients (docs/algorithms.md, "Gradient noise"),
    common = (||g||^2 - A / W) / (A - A / W)                                      (1)
    S / |G|^2 = (1 - common) / common                                             (2)
    ||g||^2 / A = common + (1 - common) / W                                       (3)

The norm of the mean of local gradients is that of the mean of their sketches
(:func:`hf_compressopt.kernels.reference.sketch_`), which travel in the small message of every step. The sketch of fewer
than 65,536 elements is folded to at most a fourth of a byte per element, at least 64 numbers. Parameters with a process
group of their own have a sketch of these ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels import SKETCH_NUMEL, Segment, sum_of_squares
from hf_compressopt.kernels.memory import holds_values, in_memory, numbers_on
from hf_compressopt.optim.group import GroupState, by_communicator
from hf_compressopt.optim.options import DTYPES

#: Name of the tensor that holds the moving average.
NOISE = "gradient_noise"
#: Share of the moving average that stays at each measurement.
MEMORY = 0.95
_LEAST_BITS = 6  # of the number of elements of a sketch


class GradientNoise:
    """The moving average of (1), alike on all ranks, and what follows from it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def add(self, common: float) -> None:
        """Take up a measurement of (1), alike on all ranks; NaN and infinity are none."""
        if math.isfinite(common):
            state = self._tensors.setdefault(NOISE, torch.zeros(2, dtype=torch.float64, device="cpu"))
            state.mul_(MEMORY).add_(numbers_on(state.device, [common, 1.0], torch.float64), alpha=1 - MEMORY)

    @property
    def common(self) -> float | None:
        """The moving average of (1), or None before the first measurement."""
        total, weight = self._tensors[NOISE].tolist() if NOISE in self._tensors else (0.0, 0.0)
        return total / weight if weight > 0 else None

    @property
    def scale(self) -> float | None:
        """The noise scale (2), >= 0. None before the first measurement, or if noise hides the true gradient."""
        common = self.common
        return max(0.0, (1 - common) / common) if common is not None and common > 0 else None

    def square_ratio(self, share: float) -> float:
        """Return (3) for 1 / W = ``share``, in [share, 1]; 1 before the first measurement."""
        measured = self.common
        common = 1.0 if measured is None else min(1.0, max(0.0, measured))
        return common + (1 - common) * share


def sketch_size(numel: int) -> int:
    """Return the count of numbers in the sketch of so many elements: a power of two."""
    return min(SKETCH_NUMEL, 1 << max(_LEAST_BITS, (numel // 16).bit_length() - 1))


Rows = list[tuple[int, "Tensor | None"]]  # elements and gradient of some parameters


class Sketch(NamedTuple):
    """The sketch of the gradients that the ranks of a communicator hold."""

    communicator: Communicator
    y: Tensor  # [4096] float32, of this rank
    square: Tensor  # [] float64, the sum of squares of this rank's gradients
    size: int  # the numbers that are sent

    @classmethod
    def of(cls, rows: Rows, communicator: Communicator, size: int, seed: int, device: torch.device) -> Sketch:
        y = torch.zeros(SKETCH_NUMEL, dtype=torch.float32, device=device)
        square = torch.zeros((), dtype=torch.float64, device=device)
        segments = [
            Segment(None if grad is None else in_memory("the gradient", grad), 0, numel, index)
            for index, (numel, grad) in enumerate(rows)
        ]
        if any(segment.numel for segment in segments):
            kernels.on(device).sketch_(segments, 0, seed, y, square)
        return cls(communicator, y, square, size)


class MeanNorm:
    """This rank's part of the norm of the mean gradient, and the noise that the norms show."""

    def __init__(self, gradients: Gradients, everyone: Communicator, seed: int, *, averaged: bool) -> None:
        """Measure this rank's gradients; if ``averaged``, those that all ranks hold are alike on all."""
        self.everyone = everyone
        self.sketches: list[Sketch] = []  # one for each group of ranks whose gradients are each rank's own
        states = gradients.states
        device = states[0].device if states else everyone.device
        # [] float64, the share-weighted sum of squares of gradients that are alike where they are held
        self.averaged = torch.zeros((), dtype=torch.float64, device=device)
        self.squares: dict[float, Tensor] = {}  # [] float64, by share: 1 over the number of ranks that hold parameters
        self.common = math.nan  # (1), after square(); and the mean over ranks of their squared norms
        self.mean_square = math.nan
        groups = [(everyone, [state for state in states if state.communicator is everyone])]
        groups += by_communicator(state for state in states if state.communicator is not everyone)
        for communicator, together in groups:
            rows: Rows = []
            if gradients.fault is None:
                for state in together:
                    grads = gradients.groups[state.number]
                    rows += [(param.numel(), grad) for param, grad in zip(state.params, grads, strict=True)]
                if communicator is everyone:
                    rows += gradients.rows_of_others(device)
            share = 1 / communicator.world_size
            if share == 1 or (averaged and communicator is everyone):
                square = sum_of_squares([grad for _, grad in rows if grad is not None], device)
                self.averaged = self.averaged + square * share
            else:
                size = sketch_size(sum(state.layout.numel for state in together))
                self.sketches.append(Sketch.of(rows, communicator, size, seed, device))
                square = self.sketches[-1].square
            self.squares[share] = self.squares.get(share, 0) + square

    def add_averaged(self, square: Tensor) -> None:
        """Add the sum of squares of means that this rank alone has, [] float64."""
        self.averaged = self.averaged + square

    def contributions(self) -> tuple[list[Tensor], Tensor | None]:
        """Return four numbers of this rank and its sketch, whose sums over all ranks :meth:`square` takes."""
        of_own_groups = local = divided = torch.zeros_like(self.averaged)
        shared: Tensor | None = None
        for communicator, whole, square, size in self.sketches:
            y = whole if size == whole.numel() else whole.view(-1, size).sum(dim=0)
            share = 1 / communicator.world_size
            local = local + square * share
            divided = divided + square * share**2
            if communicator is self.everyone:
                shared = y
            else:
                communicator.all_reduce(y).wait()
                of_own_groups = of_own_groups + y.double().div(communicator.world_size).square().sum() * share
        return [self.averaged, of_own_groups, local, divided], shared

    def square(self, sums: Sequence[float]) -> float:
        """Return the squared norm of the mean gradient, alike on all ranks."""
        averaged, of_own_groups, local, divided, *squares = sums
        mean = of_own_groups + sum(squares)
        self.common = (mean - divided) / (local - divided) if local != divided else math.nan
        self.mean_square = averaged + local
        return averaged + mean


class SentGradients(Protocol):
    """Gradients that were sent and freed during backward, of which a step has means or sketches."""

    @property
    def is_exact(self) -> bool: ...  # whether the norm of the mean gradient is known from means
    @property
    def is_measured(self) -> bool: ...  # whether it can be measured; alike on all ranks
    def squares(self) -> dict[float, Tensor]: ...  # [] float64, by the factor of their sum over the ranks
    def contribute(self, mean: MeanNorm) -> None: ...
    def scale_(self, factor: float) -> None: ...


Grads = list[list["Tensor | None"]]  # one list per param group, one entry per trainable parameter
_Mark = tuple[Tensor, "Tensor | None", int]  # a parameter, its gradient, and the version of that


@dataclass(eq=False)
class Gradients:
    """The gradients of one step, collected and checked once, and what is wrong with them."""

    states: Sequence[GroupState]
    groups: Grads  # one entry per trainable parameter, None without a gradient; empty if the count is wrong
    fault: Exception | None  # to raise on this rank
    communicator: Communicator
    others: Sequence[Tensor] = ()  # parameters without state, which belong to all ranks
    left: frozenset[int] = frozenset()  # ids of gradients that are in messages already: they are not clipped
    sent: SentGradients | None = None  # and freed during backward, beside those of the groups
    squares: dict[float, Tensor] | None = None  # see local_squares()
    _marks: list[_Mark] = field(default_factory=list)  # what they were when they were collected, or clipped

    @classmethod
    def collect(
        cls, states: Sequence[GroupState], given: Iterable[Any] | None, communicator: Communicator
    ) -> Gradients:
        """Return the gradients of all param groups, those of ``p.grad`` if none are given, after a check of each."""
        flat = _all_of(states)
        grads: list[Any] = [p.grad for p in flat] if given is None else list(given)
        if grads and all(isinstance(entry, (list, tuple)) for entry in grads):  # one list per param group
            grads = list(chain.from_iterable(grads))
        if len(grads) != len(flat):
            what = f"grads must hold one gradient (or None) per parameter, {len(flat)} in all, got {len(grads)}"
            return cls(states, [], ValueError(what), communicator)
        by_param = dict(zip(map(id, flat), grads, strict=True))
        try:
            groups = [[by_param.pop(id(p)) for p in state.params] for state in states]
        except KeyError:
            what = "a parameter was taken out of its param group: leave it there, and call its requires_grad_(False)"
            return cls(states, [], ValueError(what), communicator)
        fault: Exception | None = None
        if any(grad is not None for grad in by_param.values()):
            fault = ValueError(
                "a parameter that was frozen (requires_grad=False) when it was added now has a gradient: the optimizer "
                "has no state for it. Make it trainable first, wrap the model in DistributedDataParallel after that, "
                "and call add_param_group({'params': [parameter]}), which moves it out of its old group"
            )
        for state, grads_of_group in zip(states, groups, strict=True):
            fault = fault or find_fault(state.params, grads_of_group, state.labels)
        gradients = cls(states, groups, fault, communicator)
        if given is None:
            gradients.mark()
        return gradients

    def mark(self) -> None:
        """Take the gradients as they are now for what was collected."""
        rows = ((param, param.grad) for param in _all_of(self.states))
        self._marks = [(param, grad, 0 if grad is None else grad._version) for param, grad in rows]

    def are_current(self) -> bool:
        """Return whether ``p.grad`` of all parameters is what was collected, and nobody has written to it since."""
        flat = _all_of(self.states)
        if len(flat) != len(self._marks):
            return False
        return all(
            param is known and param.grad is grad and (grad is None or grad._version == version)
            for param, (known, grad, version) in zip(flat, self._marks, strict=True)
        )

    def present(self) -> list[Tensor]:
        grads = chain(chain.from_iterable(self.groups), (param.grad for param in self.others))
        return [grad for grad in grads if grad is not None]

    def of(self, params: Sequence[Tensor]) -> Gradients:
        """Return the gradients of any parameters."""
        if {id(p.grad) for p in params if p.grad is not None} == {id(grad) for grad in self.present()}:
            return self
        chosen, known = {id(p) for p in params}, {id(p) for state in self.states for p in state.params}
        groups: Grads = []
        for state, grads in zip(self.states, self.groups, strict=False):
            groups.append([g if id(p) in chosen else None for p, g in zip(state.params, grads, strict=True)])
        others = [p for p in params if id(p) not in known]
        return replace(self, groups=groups, others=others, squares=None)

    def rows_of_others(self, device: torch.device) -> Rows:
        """Return the elements and gradients of parameters without state, as float32 on a device."""
        grads = ((param, param.grad) for param in self.others)
        return [(p.numel(), None if grad is None else grad.to(device, torch.float32)) for p, grad in grads]

    def local_squares(self) -> dict[float, Tensor]:
        """Return the sums of squares of this rank's gradients, [] float64, by their group's share. Computed once."""
        if self.squares is None:
            by_share: dict[float, list[Tensor]] = {}
            for state, grads in zip(self.states, self.groups, strict=True):
                share = 1 / state.communicator.world_size
                by_share.setdefault(share, []).extend(grad for grad in grads if grad is not None)
            others = [param.grad for param in self.others if param.grad is not None]
            if others:
                by_share.setdefault(1 / self.communicator.world_size, []).extend(others)
            device = self.communicator.device
            self.squares = {share: sum_of_squares(grads, device) for share, grads in by_share.items()}
            if self.sent is not None:
                for share, square in self.sent.squares().items():
                    self.squares[share] = self.squares.get(share, 0) + square
        return self.squares

    def is_usable(self) -> bool:
        """Return whether this rank's gradients are valid and finite."""
        return self.fault is None and math.isfinite(sum(self.local_squares().values()))

    def weighted_square(self, weight: Callable[[float], float]) -> Tensor:
        """Return the sum of this rank's squares, [] float64, weighted by a function of their group's share."""
        square = torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        if self.fault is None:
            for share, local in self.local_squares().items():
                square = square + local * weight(share)
        return square

    def scale_(self, factor: float | Tensor, *, in_place: bool) -> None:
        """Multiply all gradients that are in no message yet by a factor; those that were given get copies."""
        chosen = [grad for grad in self.present() if id(grad) not in self.left]
        if in_place:
            _scale_(chosen, factor)
        else:
            scaled = {id(grad): _times(grad, factor) for grad in chosen}
            self.groups = [[scaled.get(id(grad), grad) for grad in grads] for grads in self.groups]
        if self.sent is not None:
            self.sent.scale_(float(factor))
        if self.left:
            self.squares = None
        else:
            self.squares = {share: local * factor**2 for share, local in self.local_squares().items()}
        if in_place:
            self.mark()

    def forget_values(self) -> None:
        """Take note that a part of the gradients was written: their squares are others."""
        self.squares = None
        self.mark()

    def note_squares(self, squares: dict[float, Tensor]) -> None:
        """Take what :meth:`local_squares` would compute, where somebody else has measured it."""
        self.squares = squares

    def note_left(self, left: frozenset[int]) -> None:
        """Note the ids of the gradients that are in messages already."""
        self.left = left

    def note_fault(self, fault: Exception | None) -> None:
        """Note what is wrong with this rank's gradients, if nothing else is."""
        self.fault = self.fault or fault

    def take_sent(self, sent: SentGradients, numbers: Iterable[int], fault: Exception | None) -> None:
        """Take sent and freed gradients for those of some param groups, by number, and what was wrong with them."""
        self.sent = sent
        self.note_fault(fault)
        for number in numbers:
            self.groups[number] = [None] * len(self.states[number].params)

    def count_as_zero(self) -> None:
        """Leave out all gradients, each of which then counts as 0."""
        self.groups = [[None] * len(state.params) for state in self.states]


def _all_of(states: Sequence[GroupState]) -> list[Tensor]:
    """Return all parameters of the groups, frozen ones too."""
    return [param for state in states for param in state.options["params"]]


def _scale_(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place. Lazily negated and expanded ones get new memory: torch refuses to write to it."""
    plain: list[Tensor] = []
    for grad in grads:
        if grad._is_zerotensor():
            continue  # lazy zeros, to which torch cannot write
        if not holds_values(grad) or 0 in grad.stride():
            grad.data = _times(grad, factor)
        else:
            plain.append(grad)
    for dtype in {grad.dtype for grad in plain}:
        same = [grad for grad in plain if grad.dtype == dtype]
        torch._foreach_mul_(same, factor.to(dtype) if isinstance(factor, Tensor) else factor)


def _times(grad: Tensor, factor: float | Tensor) -> Tensor:
    """Return the product, rounded once also if the factor is on the device."""
    if isinstance(factor, float):
        return (grad * factor).to(grad.dtype)  # torch makes float64 of a lazy zero without dimensions
    return (grad.float() * factor.float()).to(grad.dtype)


def find_fault(params: Sequence[Tensor], grads: Sequence[Tensor | None], names: Sequence[str]) -> Exception | None:
    """Return the error in the first gradient that cannot be used, or None."""
    for param, grad, name in zip(params, grads, names, strict=True):
        if grad is None:
            continue
        if grad.layout != torch.strided:
            return TypeError(
                f"the gradient of {name} is sparse ({grad.layout}); only dense gradients are supported: make the "
                "embedding with sparse=False"
            )
        if not grad.is_floating_point():
            return TypeError(f"the gradient of {name} is {grad.dtype}; legal are real floating-point gradients")
        if grad.dtype not in DTYPES:
            return TypeError(f"the gradient of {name} is {grad.dtype}; legal are {DTYPES}: give it as grad.float()")
        if grad.shape != param.shape:
            return ValueError(
                f"the gradient of {name} has shape {tuple(grad.shape)}; legal is the parameter's, {tuple(param.shape)}"
            )
        if grad.device != param.device:
            return ValueError(f"the gradient of {name} is on {grad.device}, its parameter on {param.device}")
        if not holds_values(grad):
            try:
                in_memory(f"the gradient of {name}", grad)
            except TypeError as error:
                return error
    return None
