"""The gradients of one step: collected, checked, measured, and agreed upon by all ranks before anything is written.

The noise in the ranks' gradients, measured while they are clipped.

A rank's gradient g_r is the true gradient G and noise: E ||g_r||^2 = |G|^2 + S, where S is the trace of the noise's
covariance. The mean g of W of them has E ||g||^2 = |G|^2 + S / W. With A, the mean over ranks of ||g_r||^2,
    common = (||g||^2 - A / W) / (A - A / W)                                      (1)
estimates |G|^2 / (|G|^2 + S), the share of A that the ranks have in common, whatever W is. From its moving average:
    S / |G|^2 = (1 - common) / common                                             (2)
    ||g||^2 / A = common + (1 - common) / W                                       (3)
(2) is the simple noise scale of McCandlish et al. 2018, arXiv 1812.06162, in units of the batch of one rank.

The norm of the mean of gradients that stay on their ranks, from count sketches.

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
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels import Segment, sum_of_squares
from hf_compressopt.kernels.memory import holds_values, in_memory
from hf_compressopt.kernels.sketch import SKETCH_NUMEL, sketch_
from hf_compressopt.optim.group import GroupState, by_communicator
from hf_compressopt.optim.options import DTYPES

if TYPE_CHECKING:
    from hf_compressopt.optim.sharded import FreedGradients

#: Name of the tensor that holds the moving average.
NOISE = "gradient_noise"
#: Share of the moving average that stays at each measurement.
MEMORY = 0.95


class GradientNoise:
    """The moving average of (1), alike on all ranks, and what follows from it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """Keep the average in a dict: [2] float64, the weighted sum of the measurements and the sum of the weights."""
        self._tensors = tensors

    def add(self, common: float) -> None:
        """Take up a measurement of (1), alike on all ranks; NaN and infinity are none."""
        if math.isfinite(common):
            state = self._tensors.setdefault(NOISE, torch.zeros(2, dtype=torch.float64, device="cpu"))
            state.mul_(MEMORY)
            for place, value in enumerate((common, 1.0)):
                state[place].add_(value, alpha=1 - MEMORY)

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
        common = min(1.0, max(0.0, 1.0 if measured is None else measured))
        return common + (1 - common) * share


def check_noise(tensor: Tensor) -> None:
    """Check the moving average of a checkpoint."""
    if tensor.dtype != torch.float64 or tensor.shape != (2,):
        raise ValueError(f"{NOISE!r} must be float64 [2], got {tensor.dtype} {list(tensor.shape)}")


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
            :class:`~hf_compressopt.optim.gradients.GradientNoise` averages it, after :meth:`square`; NaN if there
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
        """Measure the gradients of the parameters of a communicator."""
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

    def contributions(self) -> tuple[list[Tensor], Tensor | None]:
        """Return four numbers of this rank and its sketch, whose sums over all ranks :meth:`square` takes.

        The ranks of each process group of a param group exchange their sketch before: all ranks call.
        """
        zero = torch.zeros_like(self.averaged)
        own, local, divided = zero, zero, zero
        shared: Tensor | None = None
        for communicator, whole, square, size in self.sketches:
            y = whole if size == whole.numel() else whole.view(-1, size).sum(dim=0)
            share = 1 / communicator.world_size
            local, divided = local + square * share, divided + square * share**2
            if communicator is self.everyone:
                shared = y
            else:
                communicator.all_reduce(y).wait()
                own = own + _square_of_mean(y.double(), communicator.world_size) * share
        return [self.averaged, own, local, divided], shared

    def square(self, sums: Sequence[float]) -> float:
        """Return the squared norm of the mean gradient, alike on all ranks."""
        averaged, own, local, divided, *squares = sums
        mean = own + sum(squares)
        self.common = (mean - divided) / (local - divided) if local != divided else math.nan
        self.mean_square = averaged + local
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
    """Measure this rank's gradients for the norm of their mean."""
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


Grads = list[list["Tensor | None"]]  # one list per param group, one entry per trainable parameter


class StepGradients:
    """The gradients of one step, and what is wrong with them.

    Attributes:
        groups: One list per param group, one entry per trainable parameter; None for a parameter without gradient.
        fault: The error to raise on this rank, or None if the gradients are valid.
        ask: Whether the ranks must agree on the norm, since some gradients are each rank's own.
        left: Ids of gradients that are in messages already: they are not clipped.
        freed: Gradients that have left and are freed, beside those of ``groups``; None if there are none.
        measured_signature: The :meth:`signature` of the gradients when they were measured.
    """

    def __init__(
        self,
        groups: Grads,
        fault: Exception | None,
        communicator: Communicator,
        shares: Sequence[float],
        *,
        ask: bool,
    ) -> None:
        """Wrap the gradients of one step."""
        self.groups, self.fault, self.ask = groups, fault, ask
        self.left: frozenset[int] = frozenset()
        self.freed: FreedGradients | None = None
        self._communicator, self._shares = communicator, tuple(shares)
        self._local_squares: dict[float, Tensor] | None = None
        self._square: float | None = None
        self.measured_signature: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def collect(
        cls, states: Sequence[GroupState], given: Iterable[Any] | None, communicator: Communicator, *, ask: bool
    ) -> StepGradients:
        """Collect the gradients of the trainable parameters."""
        flat = [param for state in states for param in state.options["params"]]
        try:
            grads = [p.grad for p in flat] if given is None else _flatten(given, len(flat))
        except ValueError as error:
            return cls([], error, communicator, [], ask=ask)
        by_param = dict(zip(map(id, flat), grads, strict=True))
        groups = [[by_param.pop(id(p)) for p in state.params] for state in states]
        fault: Exception | None = None
        if any(grad is not None for grad in by_param.values()):
            fault = ValueError(
                "a parameter that was frozen (requires_grad=False) when it was added now has a gradient: the optimizer "
                "has no state for it; add it with add_param_group once it is trainable"
            )
        for state, mine in zip(states, groups, strict=True):
            fault = fault or find_fault(state.params, mine, state.labels)
        shares = [1 / state.communicator.world_size for state in states]
        return cls(groups, fault, communicator, shares, ask=ask)

    def present(self) -> list[Tensor]:
        """Return the gradients, without None."""
        return [grad for grad in chain.from_iterable(self.groups) if grad is not None]

    def signature(self) -> tuple[tuple[int, int], ...]:
        """Return the identity and version of each gradient: equal signatures have equal values."""
        return tuple((id(grad), grad._version) for grad in self.present())

    def of(self, params: Iterable[Tensor], states: Sequence[GroupState]) -> StepGradients:
        """Return the gradients of any parameters; parameters without state belong to all ranks."""
        params = [p for p in params if p.grad is not None]
        if {id(p.grad) for p in params} == {id(grad) for grad in self.present()}:
            return self
        shares = {id(p): 1 / state.communicator.world_size for state in states for p in state.params}
        chosen: dict[float, list[Tensor | None]] = {}
        for p in params:
            chosen.setdefault(shares.get(id(p), 1 / self._communicator.world_size), []).append(p.grad)
        part = StepGradients(list(chosen.values()), self.fault, self._communicator, list(chosen), ask=self.ask)
        part.left, part.freed = self.left, self.freed
        return part

    def local_squares(self) -> dict[float, Tensor]:
        """Return the sums of squares of this rank's gradients, [] float64, by their group's share. Computed once."""
        if self._local_squares is None:
            by_share: dict[float, list[Tensor]] = {}
            for grads, share in zip(self.groups, self._shares, strict=True):
                by_share.setdefault(share, []).extend(grad for grad in grads if grad is not None)
            device = self._communicator.device
            self._local_squares = {share: sum_of_squares(grads, device) for share, grads in by_share.items()}
            for share, square in {} if self.freed is None else self.freed.squares().items():
                self._local_squares[share] = self._local_squares.get(share, 0) + square
        return self._local_squares

    def take_squares(self, squares: dict[float, Tensor]) -> None:
        """Take over what :meth:`local_squares` returns, if someone has computed it."""
        self._local_squares = squares

    def reuse(self, measured: StepGradients | None) -> bool:
        """Reuse the local sums of squares of gradients that were measured before, if they are the same gradients."""
        same = measured is not None and measured.measured_signature == self.signature()
        if measured is not None and same:
            self._local_squares = measured._local_squares
        return same

    def is_usable(self) -> bool:
        """Return whether this rank's gradients are valid and finite."""
        squares = [*self.local_squares().values()] if self.fault is None else []
        return self.fault is None and (not squares or all(map(math.isfinite, torch.stack(squares).tolist())))

    def agree(
        self,
        digests: Sequence[int] = (),
        *,
        overflow: bool = False,
        part: StepGradients | None = None,
        mean: MeanNorm | None = None,
        ratio: Callable[[float], float] | None = None,
    ) -> Any:
        """Sum the squares over the ranks, for :meth:`square_norm`, tell each other of faults, and compare numbers.

        One small all-reduce, of which all ranks take part; without ``ask`` nothing is sent.
        """
        part = part or self
        weight = _share_of if self.ask else ratio or _whole
        own = [each._own_square(overflow, weight) for each in (self, *([] if part is self else [part]))]
        alike: list[bool] = []
        if self.ask:
            faults = torch.full_like(own[0], float(self.fault is not None))
            means, sketch = ([], None) if mean is None else mean.contributions()
            dtype = torch.float64 if mean is None else mean.dtype
            numbers = [faults, own[0], own[-1], *means]
            sums, alike = self._communicator.sum_and_compare(numbers, digests, dtype, sketch)
            if self.fault is None and sums[0] > 0:
                raise RuntimeError(f"{int(sums[0])} other rank(s) were given gradients that cannot be used")
            squares = sums[1:3]
            if mean is not None and math.isfinite(squares[1]):
                squares[1] = mean.square(sums[3:])
        elif self.fault is None:
            squares = torch.stack(own).tolist()
        if self.fault is not None:
            raise self.fault
        self._square = squares[0]
        part._square = squares[-1]
        self.measured_signature = self.signature()
        return alike

    def _own_square(self, overflow: bool, weight: Callable[[float], float]) -> Tensor:
        """This rank's contribution to the sum of squares, [] float64; ``weight`` returns the factor of each share."""
        square = torch.zeros((), dtype=torch.float64, device=self._communicator.device)
        if overflow:
            return square + math.inf
        for share, local in self.local_squares().items() if self.fault is None else ():
            square = square + local * weight(share)
        return square

    def square_norm(self) -> float:
        """Return the squared norm of averaged gradients; of local ones the mean over ranks of their squared norms.

        The latter is at least the square of the norm of the mean, and at most W times that. Parameters that only some
        of the ranks hold count by the mean over these.

        It is alike on all ranks, after :meth:`agree`, and not finite if an element on any rank is not, or is too large
        for its square to be a float32.
        """
        if self._square is None:
            self.agree()
        assert self._square is not None
        return self._square

    def is_finite(self) -> bool:
        """Return whether the gradients of all ranks are finite; alike on all ranks."""
        return math.isfinite(self.square_norm())

    def clip_(self, max_norm: float, *, in_place: bool) -> float:
        """Clip to ``max_norm``, by the same factor on every rank, and return the norm before.

        Gradients that are not finite do not change.
        """
        square = self.square_norm()
        norm = math.sqrt(square) if square >= 0 else math.nan
        factor = min(1.0, max_norm / (norm + 1e-6))  # as torch computes it
        if math.isfinite(norm) and factor < 1.0:
            if in_place:
                _scale_([grad for grad in self.present() if id(grad) not in self.left], factor)
            else:
                self.groups = [[self._scaled(grad, factor) for grad in grads] for grads in self.groups]
            if self.freed is not None:
                self.freed.scale_(factor)
            if self.left:
                self._local_squares = None
            else:
                self._square = self.square_norm() * factor**2
                self._local_squares = {share: local * factor**2 for share, local in self.local_squares().items()}
        self.measured_signature = self.signature()
        return norm

    def _scaled(self, grad: Tensor | None, factor: float) -> Tensor | None:
        return grad if grad is None or id(grad) in self.left else grad * factor

    def after_clipping(self, part: StepGradients) -> None:
        """Record that a part of the gradients was clipped: they are finite as before, and their norm is another one."""
        if part is not self:
            self._local_squares = None
            self.measured_signature = self.signature()


def _share_of(share: float) -> float:
    return share


def _whole(share: float) -> float:
    return 1.0


def _scale_(grads: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place. Lazily negated and expanded ones get new memory: torch refuses to write to it."""
    plain: list[Tensor] = []
    for grad in grads:
        if holds_values(grad) and 0 not in grad.stride():
            plain.append(grad)
        else:
            grad.data = grad * factor
    if plain:
        torch._foreach_mul_(plain, factor)


def _flatten(grads: Iterable[Any], count: int) -> list[Tensor | None]:
    """Gradients handed to ``step(grads=...)`` as one list: per parameter, or per group a list of these."""
    given = list(grads)
    if given and all(isinstance(entry, (list, tuple)) for entry in given):
        given = list(chain.from_iterable(given))
    if len(given) != count:
        raise ValueError(f"grads must hold one gradient (or None) per parameter, {count} in all, got {len(given)}")
    return given


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
