"""The agreement of the ranks: gradients are checked and measured, and what must be alike is compared.

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

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.announce import write_log
from hf_compressopt.collectives.communicator import DIGEST_BOUND, Communicator
from hf_compressopt.collectives.passes import StepPasses
from hf_compressopt.collectives.sender import listed, size_of, sizes_differ
from hf_compressopt.kernels import SKETCH_NUMEL, Segment, sum_of_squares
from hf_compressopt.kernels.memory import holds_values, in_memory, numbers_on
from hf_compressopt.optim.group import GroupState, by_communicator, has_own_groups
from hf_compressopt.optim.math import bit_sum
from hf_compressopt.optim.options import DTYPES
from hf_compressopt.schedules import Stage, StepPlan

logger = logging.getLogger(__name__)

#: Legal values of ``clip``; "late" clips by the last step's norm, which "sketch" finds.
CLIPS = ("sketch", "local", "late")
#: What "sketch" reports as the norm, for the log.
ESTIMATE = "an estimate of that of the mean gradient, within some per cent"
#: Name of the tensor that holds the moving average.
NOISE = "gradient_noise"
#: Share of the moving average that stays at each measurement.
MEMORY = 0.95
_LEAST_BITS = 6  # of the number of elements of a sketch
_PRIME = 1_048_573  # just below DIGEST_BOUND
_CHUNK = 1 << 20  # elements that are compared, or sent, at a time
_MOST = 0.01  # relative difference of parameters that counts as rounding
#: Every so many steps the small message of a compressed step, or of a sync, has a digest of the parameters.
DRIFT_INTERVAL = 256


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
    """Return how many numbers the sketch of so many elements has: a power of two."""
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

    def __init__(self, gradients: StepGradients, everyone: Communicator, seed: int, *, averaged: bool) -> None:
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
            for state in together if gradients.fault is None else ():
                grads = gradients.groups[state.number]
                rows += [(param.numel(), grad) for param, grad in zip(state.params, grads, strict=True)]
            for param in gradients.others if communicator is everyone and gradients.fault is None else ():
                rows.append((param.numel(), None if param.grad is None else param.grad.to(device, torch.float32)))
            share = 1 / communicator.world_size
            if share == 1 or (averaged and communicator is everyone):
                square = sum_of_squares([grad for _, grad in rows if grad is not None], device)
                self.averaged = self.averaged + square * share
            else:
                size = sketch_size(sum(state.layout.numel for state in together))
                self.sketches.append(Sketch.of(rows, communicator, size, seed, device))
                square = self.sketches[-1].square
            self.squares[share] = self.squares.get(share, 0) + square

    def contributions(self) -> tuple[list[Tensor], Tensor | None]:
        """Return four numbers of this rank and its sketch, whose sums over all ranks :meth:`square` takes."""
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
                own = own + y.double().div(communicator.world_size).square().sum() * share
        return [self.averaged, own, local, divided], shared

    def square(self, sums: Sequence[float]) -> float:
        """Return the squared norm of the mean gradient, alike on all ranks."""
        averaged, own, local, divided, *squares = sums
        mean = own + sum(squares)
        self.common = (mean - divided) / (local - divided) if local != divided else math.nan
        self.mean_square = averaged + local
        return averaged + mean


class FreedNorm(Protocol):
    """The norm of gradients that were sent and freed during backward, of which a step has means or sketches."""

    @property
    def is_exact(self) -> bool: ...  # whether the norm of the mean gradient is known from means
    @property
    def is_measured(self) -> bool: ...  # whether it can be measured; alike on all ranks
    def squares(self) -> dict[float, Tensor]: ...  # [] float64, by the factor of their sum over the ranks
    def contribute(self, mean: MeanNorm) -> None: ...
    def scale_(self, factor: float) -> None: ...


class SentMessages(Protocol):
    """Messages of the compressed stage that were sent during backward, if any."""

    enabled: bool
    agreed: bool  # the ranks have agreed on the messages that count, or there are none

    @property
    def signature(self) -> list[tuple[int, int]]: ...  # the buckets whose messages count
    def complete(self) -> None: ...
    def put_into(self, gradients: StepGradients) -> None: ...
    def left(self, gradients: Sequence[Sequence[Tensor | None]]) -> frozenset[int]: ...  # ids of gradients
    def agree(self) -> None: ...  # drop what another rank has dropped
    def discard(self) -> None: ...
    def overflow(self) -> Tensor | None: ...
    def note_norm(self, norm: float, max_norm: float, usual: float, *, whole: bool) -> None: ...


class ReadsVariances(Protocol):
    """The messages of the warmup stage, which ask for the largest variances before a step by signs."""

    def largest_variances(self, plan: StepPlan) -> Tensor | None: ...


Grads = list[list["Tensor | None"]]  # one list per param group, one entry per trainable parameter


@dataclass(eq=False)
class StepGradients:
    """The gradients of one step, and what is wrong with them."""

    states: Sequence[GroupState]
    groups: Grads  # one entry per trainable parameter, None without a gradient; empty if the count is wrong
    fault: Exception | None  # to raise on this rank
    communicator: Communicator
    ask: bool  # whether the ranks must agree on the norm, since some gradients are each rank's own
    others: Sequence[Tensor] = ()  # parameters without state, which belong to all ranks
    left: frozenset[int] = frozenset()  # ids of gradients that are in messages already: they are not clipped
    freed: FreedNorm | None = None  # sent and freed gradients, beside those of the groups
    # the squared norm of averaged gradients, of local ones the mean over ranks of their squared norms: alike on all
    # ranks, and not finite if an element is not, or is too large for its square; [] float64 until the host reads it
    square: float | Tensor = math.nan
    measured_signature: tuple[tuple[int, int], ...] | None = None
    squares: dict[float, Tensor] | None = None

    @classmethod
    def collect(
        cls, states: Sequence[GroupState], given: Iterable[Any] | None, communicator: Communicator, *, ask: bool
    ) -> StepGradients:
        flat = [param for state in states for param in state.options["params"]]
        grads = [p.grad for p in flat] if given is None else list(given)
        if grads and all(isinstance(entry, (list, tuple)) for entry in grads):  # one list per param group
            grads = list(chain.from_iterable(grads))
        if len(grads) != len(flat):
            what = f"grads must hold one gradient (or None) per parameter, {len(flat)} in all, got {len(grads)}"
            return cls(states, [], ValueError(what), communicator, ask)
        by_param = dict(zip(map(id, flat), grads, strict=True))
        groups = [[by_param.pop(id(p)) for p in state.params] for state in states]
        fault: Exception | None = None
        if any(grad is not None for grad in by_param.values()):
            fault = ValueError(
                "a parameter that was frozen (requires_grad=False) when it was added now has a gradient: the optimizer "
                "has no state for it. Make it trainable first, wrap the model in DistributedDataParallel after that, "
                "and call add_param_group({'params': [parameter]}), which moves it out of its old group"
            )
        for state, mine in zip(states, groups, strict=True):
            fault = fault or find_fault(state.params, mine, state.labels)
        return cls(states, groups, fault, communicator, ask)

    def present(self) -> list[Tensor]:
        grads = chain(chain.from_iterable(self.groups), (param.grad for param in self.others))
        return [grad for grad in grads if grad is not None]

    def signature(self) -> tuple[tuple[int, int], ...]:
        """Return the identity and version of each gradient: equal signatures have equal values."""
        return tuple((id(grad), grad._version) for grad in self.present())

    def of(self, params: Sequence[Tensor]) -> StepGradients:
        """Return the gradients of any parameters."""
        if {id(p.grad) for p in params if p.grad is not None} == {id(grad) for grad in self.present()}:
            return self
        chosen, known = {id(p) for p in params}, {id(p) for state in self.states for p in state.params}
        groups: Grads = []
        for state, grads in zip(self.states, self.groups, strict=False):
            groups.append([g if id(p) in chosen else None for p, g in zip(state.params, grads, strict=True)])
        others = [p for p in params if id(p) not in known]
        return replace(self, groups=groups, others=others, squares=None)

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
            for share, square in {} if self.freed is None else self.freed.squares().items():
                self.squares[share] = self.squares.get(share, 0) + square
        return self.squares

    def reuse(self, measured: StepGradients | None) -> bool:
        """Reuse the local sums of squares of gradients that were measured before, if they are the same gradients."""
        same = measured is not None and measured.measured_signature == self.signature()
        if measured is not None and same:
            self.squares = measured.squares
        return same

    def is_usable(self) -> bool:
        """Return whether this rank's gradients are valid and finite."""
        return self.fault is None and math.isfinite(sum(self.local_squares().values()))

    def weighted_square(self, weight: Callable[[float], float]) -> Tensor:
        """Return the sum of this rank's squares, [] float64, weighted by a function of their group's share."""
        square = torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        for share, local in self.local_squares().items() if self.fault is None else ():
            square = square + local * weight(share)
        return square

    def is_finite(self) -> bool:
        self.square = float(self.square)
        return math.isfinite(self.square)

    def may_be_used(self) -> bool:
        """Return whether the gradients are finite, True while the norm is not read."""
        return isinstance(self.square, Tensor) or self.is_finite()

    def clip_(self, max_norm: float, *, in_place: bool) -> float | Tensor:
        """Clip to ``max_norm``, by the same factor on every rank, and return the norm before: [] if it is not read."""
        norm: float | Tensor
        factor: float | Tensor
        if isinstance(self.square, Tensor):
            norm = self.square.sqrt()
            factor = torch.where(norm.isfinite(), torch.clamp(max_norm / (norm + 1e-6), max=1.0), 1.0)
        else:
            norm = math.sqrt(self.square) if self.square >= 0 else math.nan
            factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0  # as torch computes it
        if isinstance(factor, Tensor) or factor < 1.0:
            if in_place:
                _scale_([grad for grad in self.present() if id(grad) not in self.left], factor)
            else:
                clipped = {id(grad): _times(grad, factor) for grad in self.present() if id(grad) not in self.left}
                self.groups = [[clipped.get(id(grad), grad) for grad in grads] for grads in self.groups]
            if self.freed is not None:
                self.freed.scale_(float(factor))
            if self.left:
                self.squares = None
            else:
                self.square = self.square if isinstance(self.square, Tensor) else self.square * float(factor) ** 2
                self.squares = {share: local * factor**2 for share, local in self.local_squares().items()}
        self.measured_signature = self.signature()
        return norm


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


def digest_of(value: Any) -> int:
    """Return a number below DIGEST_BOUND that stands for a value."""
    return crc32(repr(value).encode()) % DIGEST_BOUND


class Comparison:
    """The comparison of the ranks of one optimizer, before its first step and where a stage begins."""

    def __init__(self, states: Sequence[GroupState], communicator: Communicator) -> None:
        self._states, self._communicator = states, communicator
        self.checked = False
        self.has_new_groups = False  # which no message has compared yet
        self._compared_at = 0  # the step before which the ranks were compared last
        self._layouts: tuple[list[Any], int] = ([], 0)  # what may change of the layouts, and their digest

    def check(self, plan: StepPlan, before: StepPlan | None, alike: Callable[[], Sequence[Any]]) -> None:
        """Check, before the first step and before the first one of a stage, that the ranks are alike."""
        if not self.checked:
            own = [state.own_rank is not None for state in self._states]
            what = "optimizer, step, options, or param groups with a process_group of their own"
            self._communicator.require_equal(what, [*alike(), own])
            self.require_same_groups()
            self.require_same_hyperparameters()
            if plan.agree:  # else each rank has parameters of its own
                what = "the bits of their parameters (are they alike at the start?)"
                self._require_equal(what, lambda state: _bits(state.params))
            if plan.reduce_grads:
                self._require_averaged()
            self.checked, self.has_new_groups, self._compared_at = True, False, plan.step
        elif self._compared_at != plan.step and before is not None and before.stage is not plan.stage:
            self.require_same_groups()
            self.require_same_hyperparameters()
            self._align(plan.step)
            self._compared_at = plan.step

    def hyperparameters(self) -> list[list[Any]]:
        """Return the hyperparameters of the param groups that all ranks hold, as JSON holds them."""
        found: list[list[Any]] = []
        for group in (state.options for state in self._states if state.own_rank is None):
            numbers = *(group.get(name, 0) for name in ("lr", "eps", "weight_decay")), *group["betas"]
            flags = (group.get(name) for name in ("bias_correction", "eps_inside_sqrt"))
            found.append([*map(float, numbers), *map(bool, flags)])
        return found

    def snapshot(self) -> list[Any]:
        """Return what a small message compares of the param groups: what may change between two steps."""
        masks = [state.options.get("exp_avg_mask") for state in self._states]
        now = [(id(mask), getattr(mask, "_version", 0)) for mask in masks]
        if self._layouts[0] != now or not now:
            shared = [state for state in self._states if state.own_rank is None]
            own = [state.own_rank is not None for state in self._states]
            self._layouts = now, digest_of([own, [_rows_of(state) for state in shared]])
        return [self.hyperparameters(), len(now), self._layouts[1], self.trained(), self.has_new_groups]

    def compare_new_groups(self, plan: StepPlan) -> None:
        """Check the parameters of groups that all ranks have added, as the last small message has told. All call."""
        if self.has_new_groups and plan.agree:
            what = "the bits of their parameters (are those of a new param group alike on all ranks?)"
            self._require_equal(what, lambda state: _bits(state.params))
        self.has_new_groups = False

    def trained(self) -> list[str]:
        """Return for each param group that all ranks hold, and each parameter, "1" if it requires a gradient."""
        shared = (state for state in self._states if state.own_rank is None)
        return ["".join("01"[param.requires_grad] for param in state.params) for state in shared]

    def require_same_snapshot(self) -> None:
        """Raise on all ranks if they differ in what :meth:`snapshot` returns. All ranks call."""
        self.require_same_groups()
        self.require_same_hyperparameters()
        everyone = self._communicator.all_gather_object(self.trained())
        if any(trained != everyone[0] for trained in everyone):
            shared = [state for state in self._states if state.own_rank is None]
            names = [name for state in shared for name in state.labels]
            columns = zip(*("".join(trained) for trained in everyone), strict=True)
            first = next(number for number, column in enumerate(columns) if len(set(column)) > 1)
            at = [rank for rank, trained in enumerate(everyone) if "".join(trained)[first] == "0"]
            raise ValueError(
                f"{names[first]} does not require a gradient on ranks {at} only: freeze parameters on all ranks "
                "together, or on none"
            )

    def require_same_groups(self) -> None:
        """Raise on all ranks if they differ in the names, sizes or order of their parameters. All ranks call."""
        what = "the number of their param groups (call add_param_group on all), or in which have a process_group"
        self._communicator.require_equal(what, [state.own_rank is not None for state in self._states])
        error: Exception | None = None
        for communicator, states in by_communicator(self._states):
            rows = [row for state in states for row in _rows_of(state)]
            digests = communicator.all_gather_object([len(states), digest_of(rows)])
            if all(digest == digests[0] for digest in digests):
                continue
            everyone = communicator.all_gather_object(rows)
            rank = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
            first, theirs = everyone[0], everyone[rank]
            at = next(
                number for number in range(len(first) + 1) if first[number : number + 1] != theirs[number : number + 1]
            )
            has = [row[at] if at < len(row) else "no further parameter" for row in (theirs, first)]
            error = ValueError(
                f"ranks differ in the names, parameter sizes or order of their param groups: rank {rank} has {has[0]}, "
                f"rank 0 {has[1]}. Give all ranks the same parameters in the same order, and call "
                "add_param_group on all of them"
            )
        self._raise_together(error)

    def require_same_hyperparameters(self) -> None:
        """Check that the ranks have the same hyperparameters, else they would drift apart unnoticed."""
        what = "the hyperparameters of their param groups (does each rank's scheduler see the same numbers?)"
        self._communicator.require_equal(what, self.hyperparameters())

    def _require_averaged(self) -> None:
        """Check that gradients which the caller has to average are alike on all ranks, but for rounding."""
        shared = [state for state in self._states if state.own_rank is None]
        rows = [row for state in shared for row in zip(state.labels, state.params, strict=True)]
        sizes = {name: size_of(param.grad) for name, param in rows}
        everyone = self._communicator.all_gather_object(sizes)
        known = sorted({name for found in everyone for name in found})
        names = [
            name for name in known if any(sizes_differ(found.get(name), everyone[0].get(name)) for found in everyone)
        ]
        if names:
            raise ValueError(
                f"nobody has averaged the gradients of {listed(names)}, which differ between the ranks, in a "
                "step by averaged gradients (optimizer.plan.reduce_grads): call hf_compressopt.average_gradients("
                "optimizer) between backward() and step(), or train a DistributedDataParallel model, through the "
                "wrapper, that hf_compressopt.attach_ddp(model, optimizer) knows; give model and optimizer to one "
                "prepare() in Accelerate"
            )

    def _align(self, step: int) -> None:
        """Take rank 0's parameters on all ranks; differences that are larger than rounding are an error."""
        error: Exception | None = None
        apart = False
        with self._communicator.traffic.paused():
            for communicator, states in by_communicator(self._states):
                everyone = communicator.all_gather_object([_bits(_replicated(state)) for state in states])
                if all(bits == everyone[0] for bits in everyone):
                    continue
                apart = True
                if _take_first_ranks(states, step - 1, communicator) > 1:
                    error = ValueError(
                        "the parameters of the ranks differ by more than rounding at the end of the warmup stage: "
                        "average all gradients over the ranks while optimizer.plan.reduce_grads, and start all ranks "
                        "from the same parameters"
                    )
        self._raise_together(error)
        if apart and self._communicator.rank == 0:
            message = "step %d: the ranks' parameters differ by rounding (unlike devices?): all take those of rank 0"
            write_log(logger, logging.WARNING, message, step)

    def _require_equal(self, what: str, value: Callable[[GroupState], int]) -> None:
        """Check that a number of every param group is alike on all the ranks that hold it."""
        error: Exception | None = None
        for communicator, states in by_communicator(self._states):
            try:
                communicator.require_equal(what, [value(state) for state in states])
            except ValueError as found:
                error = found
        self._raise_together(error)

    def _raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks if one has an error; without groups of their own, all have it or none."""
        if has_own_groups(self._states):
            self._communicator.raise_together(error, ValueError)
        elif error is not None:
            raise error


def _rows_of(state: GroupState) -> list[str]:
    """Return what is fixed of each parameter of a group, in words; of other ranks' own groups names may differ."""
    mask = state.options.get("exp_avg_mask")
    kind = "" if state.compressed else ", non_freeze"
    if mask is not None:
        kind += f", exp_avg_mask {digest_of([list(mask.shape), int(bit_sum(mask.detach().to(torch.float32)))])}"
    names = state.labels if state.own_rank is None else [""] * len(state.params)
    rows = [f"{name} {list(p.shape)} {p.dtype}{kind}".strip() for name, p in zip(names, state.params, strict=True)]
    return [f"group {state.number}", *rows]


def _bits(tensors: Iterable[Tensor]) -> int:
    return int(sum(bit_sum(tensor) for tensor in tensors))


def _tolerance(tensor: Tensor, steps: int) -> float:
    """Return by how much, of its largest element, rounding makes a tensor of one rank another one in so many steps."""
    return min(_MOST, 8 * math.sqrt(steps) * torch.finfo(tensor.dtype).eps)


def _take_first_ranks(states: Sequence[GroupState], steps: int, communicator: Communicator) -> float:
    """Replace parameters, moments and coefficients by rank 0's. All ranks call.

    Returns the largest difference on any rank; up to 1 it is what rounding makes in so many steps.
    """
    worst = torch.zeros((), dtype=torch.float64, device=communicator.device)
    for tensor in (tensor for state in states for tensor in _replicated(state)):
        tolerance = _tolerance(tensor, steps)
        difference = largest = torch.zeros((), dtype=torch.float64, device=tensor.device)
        flat = tensor.reshape(-1)  # a view, or a copy of what has other strides
        for chunk in torch.split(flat, _CHUNK):
            before = chunk.double()
            communicator.broadcast(chunk)
            difference = torch.maximum(difference, (before - chunk.double()).abs().max())
            largest = torch.maximum(largest, chunk.abs().max().double())
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
        share = torch.where(difference > 0, difference / (largest * tolerance), 0.0)
        worst = torch.maximum(worst, torch.nan_to_num(share, nan=torch.inf, posinf=torch.inf))
    communicator.all_reduce(worst, op="max").wait()
    return float(worst)


def _distance_from_first(tensors: Iterable[Tensor], steps: int, communicator: Communicator) -> float:
    """Return the largest difference from rank 0's tensors on any rank, as _take_first_ranks() does. All ranks call."""
    worst = torch.zeros((), dtype=torch.float64, device=communicator.device)
    for tensor in tensors:
        difference = largest = torch.zeros((), dtype=torch.float64, device=tensor.device)
        for chunk in torch.split(tensor.reshape(-1), _CHUNK):
            first = chunk.clone()
            communicator.broadcast(first)
            difference = torch.maximum(difference, (chunk.double() - first.double()).abs().max())
            largest = torch.maximum(largest, first.abs().max().double())
        share = torch.where(difference > 0, difference / (largest * _tolerance(tensor, steps)), 0.0)
        worst = torch.maximum(worst, torch.nan_to_num(share, nan=torch.inf, posinf=torch.inf))
    communicator.all_reduce(worst, op="max").wait()
    return float(worst)


def _replicated(state: GroupState) -> Iterator[Tensor]:
    held = (*state.params, state.exp_avg, state.exp_avg_sq, *state.extra.values())
    yield from (tensor.detach() for tensor in held if tensor.numel())


class Consensus:
    """The small messages beside those of a step, and what the ranks know from them."""

    early: SentMessages  # set by the optimizer, as the next one
    warmup: ReadsVariances

    def __init__(self, states: Sequence[GroupState], communicator: Communicator, tensors: dict[str, Tensor]) -> None:
        self.states, self.communicator = states, communicator
        self.noise = GradientNoise(tensors)
        self.clip = "sketch"
        # the gradients of the coming step if their norm is known already, from clipping or a gradient scaler
        self.measured: StepGradients | None = None
        # those of a step of 0/1 Adam whose message follows at its end, as they were before clipping
        self.at_sync: MeanNorm | None = None
        self._common = math.nan  # what the coming step's gradients say about noise
        self._usual = math.nan  # the root of the mean square of the ranks' own norms in the coming step
        self._overflow = False  # a gradient scaler found an element that is not finite
        self._gradients_compared = False
        self._unread: StepGradients | None = None  # what the message of a sync tells whether it is finite
        self.read = list[float]()  # the largest variances of the coming step, if it asks for them
        self.comparison = Comparison(states, communicator)
        # norm and limit of the averaged gradients of the step
        self.clipping: tuple[float | Tensor, float] | None = None
        self._limit: float | None = None  # to which the gradients of the step are clipped
        self.passes = StepPasses("average_gradients or DistributedDataParallel's hook")  # up to what compares them
        self.held_fault: Exception | None = None  # in this rank's gradients since the last sync of 0/1 Adam

    # -- gradients ----------------------------------------------------------------------------------------------------

    def asks(self, plan: StepPlan) -> bool:
        """Return whether a gradient that is not finite on one rank skips this step on all."""
        uncompressed = (state for state in self.states if not state.compressed)
        # of a group with a process group of its own, others may have parameters if this rank has none
        return plan.agree or any(state.params or state.own_rank is not None for state in uncompressed)

    def are_local(self, plan: StepPlan) -> bool:
        """Return whether some gradients of a step are this rank's own, so that ranks must agree on their norm."""
        return not plan.reduce_grads or has_own_groups(self.states)

    def final_gradients(
        self, plan: StepPlan, given: Iterable[Any] | None, max_grad_norm: float
    ) -> tuple[StepGradients, bool]:
        """Return the gradients of a step, clipped, and whether those of all ranks are finite."""
        # given gradients may be averaged or not: a wrong number of them on one rank must fail on all
        ask = self.asks(plan) and (self.are_local(plan) or given is not None)
        if given is not None:
            self.early.discard()
        gradients, measured = self._collect(given, ask=ask), self.measured
        same = gradients.reuse(measured)
        if measured is not None and not max_grad_norm:
            known = measured.ask and self.early.agreed and ask and given is None
            if known and measured.is_finite():
                if not same and not gradients.is_usable():
                    gradients.groups = [[None] * len(state.params) for state in self.states]
                    message = "step %d: rank %d's clipped gradients were changed and cannot be used; they count as 0"
                    write_log(logger, logging.WARNING, message, plan.step, self.communicator.rank)
                return gradients, True
            if same and not ask:
                self._unread = measured
                return measured, measured.may_be_used()
        # what was no finite norm in the message of a sketch, of float32, is none in another message either
        overflown = measured is not None and measured.ask and not measured.is_finite()
        self._agree(gradients, plan, sketched=max_grad_norm > 0 or overflown)
        if max_grad_norm > 0:
            norm = gradients.clip_(max_grad_norm, in_place=given is None)
            self.clipping = norm, max_grad_norm
            if self.early.enabled:
                self.early.note_norm(float(norm), max_grad_norm, self._usual, whole=True)
        self._unread = gradients
        return gradients, gradients.may_be_used()

    def clip_(self, plan: StepPlan, max_norm: float, parameters: Iterable[Tensor] | None) -> float | Tensor:
        """Clip the gradients of the coming step that are in no message yet. Returns the norm before."""
        self._limit = float(max_norm)
        gradients = self._collect(None, ask=self.asks(plan) and self.are_local(plan))
        gradients.reuse(self.measured)
        chosen = None if parameters is None else list(parameters)
        ids = {id(param) for param in chosen or ()}
        whole = chosen is None or all(id(param) in ids for state in self.states for param in state.params)
        if gradients.freed is not None and not whole:
            raise ValueError(
                f"clip all parameters of the optimizer together with zero_stage=2, got {len(ids)} of them: the norm of "
                "gradients that have left is known for all together only"
            )
        part = gradients if chosen is None else gradients.of(chosen)
        self._agree(gradients, plan, part, sketched=True)
        norm = part.clip_(max_norm, in_place=True)
        self.clipping = (norm, max_norm) if whole else None
        if part is not gradients:  # those are finite as before, but their norm is another one
            gradients.squares = None
            gradients.measured_signature = gradients.signature()
        self.measured = gradients
        if self.early.enabled:
            self.early.note_norm(float(norm), max_norm, self._usual, whole=whole)
        return norm

    def _collect(self, given: Iterable[Any] | None, *, ask: bool) -> StepGradients:
        if given is None:
            self.early.complete()
        gradients = StepGradients.collect(self.states, given, self.communicator, ask=ask)
        self.early.put_into(gradients)
        return gradients

    def note_overflow(self, overflow: bool) -> None:
        """Record what a gradient scaler found while it changed this rank's gradients."""
        self._overflow, self.measured = overflow, None

    def overflow_anywhere(self, plan: StepPlan) -> bool:
        """Return whether the gradients of any rank are not finite."""
        if self.measured is None or not self.measured.ask:
            gradients = self._collect(None, ask=True)
            self._agree(gradients, plan)
            self.measured = gradients
        return not self.measured.is_finite()

    def clip_coefficient(self) -> float:
        """Return the factor by which all gradients of the step under way were clipped; 1 if they were not."""
        if self.clipping is None:
            return 1.0
        norm, max_norm = float(self.clipping[0]), self.clipping[1]
        return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def end_step(self, *, compared: bool = True) -> None:
        """Close a step; ``compared``: not between two syncs of 0/1 Adam."""
        if compared:
            self.passes.end_step()
        self.clipping = self._limit = None
        self.noise.add(self._common)
        self.measured, self.at_sync, self._unread, self._overflow = None, None, None, False
        self.read = []
        self._common = self._usual = math.nan

    def _agree(
        self, gradients: StepGradients, plan: StepPlan, part: StepGradients | None = None, *, sketched: bool = False
    ) -> None:
        """Find the squared norms, of all gradients and of a part, and raise if a rank's cannot be used."""
        part, alike = part or gradients, list[bool]()
        mean = self._measure(gradients, plan, part) if sketched else None
        sent = self.early.overflow()

        def weight(share: float) -> float:
            if gradients.ask:
                return share  # so that a sum over the ranks is their mean
            return self.noise.square_ratio(share) if self.clip == "sketch" and not plan.agree else 1.0

        squares: list[Any] = []
        for each in (gradients, part) if part is not gradients else (gradients,):
            own = each.weighted_square(weight)
            own = torch.full_like(own, math.inf) if self._overflow else own
            squares.append(own if sent is None else own + sent)
        if gradients.ask:
            squares, alike = self._exchange(gradients, plan, squares, mean)
        if gradients.fault is not None and (gradients.ask or plan.agree or self.communicator.world_size == 1):
            raise gradients.fault
        if gradients.fault is not None:
            squares = [math.inf, math.inf]
            self._hold(gradients.fault, plan)
        elsewhere = gradients.fault is None and any(grad.device != self.communicator.device for grad in part.present())
        local = not gradients.ask and gradients.fault is None
        if local and (elsewhere or not plan.is_local_sync):  # else the message of the sync brings them
            squares = torch.stack(squares).tolist()
        gradients.square, part.square = squares[0], squares[-1]
        gradients.measured_signature = gradients.signature()
        if mean is not None and gradients.ask:
            self._common, self._usual = mean.common, math.sqrt(mean.mean_square)
            if gradients.freed is not None and gradients.freed.is_exact:
                self._usual = math.nan  # the ranks' own norms are not measured
        elif mean is not None and self.at_sync is None:
            self.at_sync = mean
        if alike and not alike[0]:
            self.comparison.require_same_snapshot()
            self.communicator.require_equal("the norm to which they clip (max_norm)", self._limit)
            self.passes.compare(self.communicator, in_step=True)
            self.early.agree()
            for each in (gradients, part):
                each.left = self.early.left(gradients.groups)
        elif alike:
            self.comparison.compare_new_groups(plan)
        self.early.agreed |= gradients.ask
        self.heed_second(plan, alike[1:])

    def _hold(self, fault: Exception, plan: StepPlan) -> None:
        """Keep what is wrong with this rank's gradients in a local step until the next sync, where all ranks raise."""
        if self.held_fault is None:
            self.held_fault = fault
            message = (
                "step %d: rank %d cannot use its gradients; it steps with its momentum up to the next sync, where all "
                "ranks raise: %s"
            )
            write_log(logger, logging.ERROR, message, plan.step, self.communicator.rank, fault)

    def _exchange(
        self, gradients: StepGradients, plan: StepPlan, squares: Sequence[Tensor], mean: MeanNorm | None
    ) -> tuple[list[float], list[bool]]:
        """Exchange the one small message of a step: norms, faults, what must be alike. Returns the squared norms."""
        digests: list[int | Tensor] = [
            digest_of([self.comparison.snapshot(), self.early.signature, self._limit, self.passes.count])
        ]
        if not plan.reduce_grads:
            # one in every step: a resumed run, which compares once more, sends the uninterrupted one's bytes
            digests.append(self.second_digest(plan, gradients.groups))
        faults = torch.full_like(squares[0], float(gradients.fault is not None))
        means, sketch = ([], None) if mean is None else mean.contributions()
        numbers = [faults, squares[0], squares[-1], *means]
        beside = self.warmup.largest_variances(plan) if plan.stage is Stage.VARIANCE else None
        beside = beside if beside is not None and beside.numel() else None
        sums, alike = self.communicator.sum_and_compare(numbers, digests, sketch, beside)
        if beside is not None:
            sums, self.read = sums[: -len(beside)], sums[-len(beside) :]
        if gradients.fault is None and sums[0] > 0:
            raise RuntimeError(f"{int(sums[0])} other rank(s) were given gradients that cannot be used")
        part = sums[2] if mean is None or not math.isfinite(sums[2]) else mean.square(sums[3:])
        return [sums[1], part], alike

    def _measure(self, gradients: StepGradients, plan: StepPlan, part: StepGradients) -> MeanNorm | None:
        """Measure the gradients that are clipped, for the norm of their mean; None if another norm clips them."""
        in_message = gradients.ask and self.are_local(plan)
        if self.clip != "sketch" or self.communicator.world_size == 1 or not (in_message or plan.is_local_sync):
            return None
        if gradients.freed is not None and not gradients.freed.is_measured:
            return None
        mean = MeanNorm(part, self.communicator, plan.step, averaged=plan.reduce_grads)
        if gradients.freed is not None:
            gradients.freed.contribute(mean)
        if gradients.fault is None:
            part.squares = mean.squares
        return mean

    def compare_at_sync(self, written: Tensor, digests: Sequence[int | Tensor]) -> tuple[bool, bool, list[bool]]:
        """Compare what must be alike at a sync of 0/1 Adam; measure the noise of gradients clipped before it.

        Returns whether any rank has written, whether this rank's gradients may be used, and what is alike.
        """
        mean, self.at_sync = self.at_sync, None
        unread = None if self._unread is None else self._unread.square
        beside = unread if isinstance(unread, Tensor) else torch.zeros_like(written)
        means, sketch = ([], None) if mean is None else mean.contributions()
        # as checks are no part of the training's traffic
        faults, held = torch.full_like(written, float(self.held_fault is not None)), self.held_fault
        self.held_fault = None
        with self.communicator.traffic.paused() if mean is None else nullcontext():
            sums, alike = self.communicator.sum_and_compare([written, faults, *means], digests, sketch, beside.view(1))
        if held is not None:
            raise held
        if sums[1] > 0:
            raise RuntimeError(
                f"{int(sums[1])} other rank(s) were given gradients that cannot be used since the last sync"
            )
        if mean is not None:
            mean.square(sums[2:-1])
            self._common = mean.common
        return sums[0] > 0, math.isfinite(sums[-1]), alike

    def second_digest(self, plan: StepPlan, gradients: Grads | None) -> int | Tensor:
        """Return a digest of this rank's gradients until they were compared, and later, now and then, of parameters."""
        if not self._gradients_compared:
            return self._gradient_digest(gradients)
        if plan.step % DRIFT_INTERVAL:
            return 0
        sums = [bit_sum(values) for _, values in self._alike_values(plan)]
        return sum(sums, torch.zeros((), dtype=torch.int64, device=self.communicator.device)) % _PRIME

    def heed_second(self, plan: StepPlan, alike: Sequence[bool], *, usable: bool = True) -> None:
        """Heed what the second digests told: gradients that are identical on all ranks, or parameters that are not.

        Gradients that are not ``usable``, since they are not finite, may well be identical.
        """
        if self._gradients_compared and alike and not alike[0]:
            self._heed_drift(plan)
        self.heed_gradients([alike[0] and usable] if alike else [])

    def _alike_values(self, plan: StepPlan) -> Iterator[tuple[str, Tensor]]:
        """Yield what has the same bits on all ranks, by parameter: between syncs of 0/1 Adam those of the last one."""
        for state in self.states:
            apart = state.compressed and not plan.agree
            for index, param in enumerate(state.params if state.own_rank is None else ()):
                yield state.labels[index], state.view(state.extra["anchor"], index) if apart else param.detach()

    def _heed_drift(self, plan: StepPlan) -> None:
        """Take rank 0's parameters where the ranks differ by rounding; raise if they differ by more. All ranks call."""
        rows = list(self._alike_values(plan))
        with self.communicator.traffic.paused():
            everyone = self.communicator.all_gather_object([int(bit_sum(values)) for _, values in rows])
            columns = zip(*everyone, strict=True)
            apart = [row for row, column in zip(rows, columns, strict=True) if len(set(column)) > 1]
            by_rounding = _distance_from_first([values for _, values in apart], plan.step - 1, self.communicator) <= 1
            for _, values in apart if by_rounding else ():
                self.communicator.broadcast(values)
        shown = ", ".join([*(name for name, _ in apart[:4]), *(["..."] if len(apart) > 4 else [])])
        if not by_rounding:
            raise ValueError(
                f"step {plan.step}: the parameters of the ranks have drifted apart: {len(apart)} of {len(rows)} differ "
                f"({shown}). Something changes them on each rank alone: code that reads p.grad after backward or "
                "step() (AdaLoRA, pruning by gradients), where gradients stay each rank's own after the warmup stage, "
                "or that draws random numbers of each rank's own. Let it run on one rank, and broadcast what it decides"
            )
        if self.communicator.rank == 0:
            message = (
                "step %d: parameters of the ranks differ by rounding (unlike devices?): all take those of rank 0: %s"
            )
            write_log(logger, logging.WARNING, message, plan.step, shown)

    def _gradient_digest(self, gradients: Grads | None) -> int | Tensor:
        """Return a digest of this rank's gradients, [] int64; the rank if they are all 0."""
        rank = self.communicator.rank % DIGEST_BOUND
        if gradients is None:
            return rank
        shared = [grads for grads, state in zip(gradients, self.states, strict=False) if state.own_rank is None]
        sums = [bit_sum(grad) for grad in chain.from_iterable(shared) if grad is not None]
        # a power of two would see the low bits alone, which are 0 after bfloat16
        digest = sum(sums, torch.zeros((), dtype=torch.int64, device=self.communicator.device)) % _PRIME
        return torch.where(digest == 0, rank, digest)

    def heed_gradients(self, alike: Sequence[bool]) -> None:
        """Warn, once, if the local gradients of all ranks are identical, and not 0, by what their digests told."""
        if self._gradients_compared or not alike:
            return
        self._gradients_compared = True
        if alike[0] and self.communicator.rank == 0 and self.communicator.world_size > 1:
            write_log(
                logger,
                logging.WARNING,
                "the gradients of all ranks are identical in the first step whose gradients must stay local: they seem "
                "to be averaged already, in full precision, so that no traffic is saved. For a DistributedDataParallel "
                "model call hf_compressopt.attach_ddp(model, optimizer); with Trainer import hf_compressopt.auto; with "
                "Accelerate use CompressOptAccelerator; in a plain loop average gradients only if "
                "optimizer.plan.reduce_grads",
            )
