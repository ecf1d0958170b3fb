"""The gradients of one step: collected, checked, measured, and agreed upon by all ranks before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels import sum_of_squares
from hf_compressopt.kernels.memory import holds_values, in_memory
from hf_compressopt.optim.functional import clip_factor
from hf_compressopt.optim.group_state import GroupState
from hf_compressopt.optim.options import DTYPES
from hf_compressopt.optim.sketched_norm import MeanNorm

Grads = list[list["Tensor | None"]]  # one list per param group, one entry per trainable parameter


class Freed(Protocol):
    """Gradients that have left, and are freed."""

    def squares(self) -> dict[float, Tensor]:
        """Return sums of squares, [] float64, by the factor that makes their sum over the ranks a squared norm."""
        ...

    def scale_(self, factor: float) -> None:
        """Clip what can still be clipped."""
        ...


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
        """Wrap the gradients of one step.

        Args:
            groups: See the class.
            fault: See the class.
            communicator: The ranks.
            shares: For each group, 1 over the number of ranks that hold its parameters.
            ask: See the class.
        """
        self.groups, self.fault, self.ask = groups, fault, ask
        self.left: frozenset[int] = frozenset()
        self.freed: Freed | None = None
        self._communicator, self._shares = communicator, tuple(shares)
        self._local_squares: dict[float, Tensor] | None = None
        self._square: Tensor | None = None
        self.measured_signature: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def collect(
        cls, states: Sequence[GroupState], given: Iterable[Any] | None, communicator: Communicator, *, ask: bool
    ) -> StepGradients:
        """Collect the gradients of the trainable parameters.

        Args:
            states: The param groups.
            given: One gradient (or None) per parameter, flat or per group; None for ``p.grad`` of each.
            communicator: The ranks.
            ask: See the class.
        """
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
        """Reuse the local sums of squares of gradients that were measured before, if they are the same gradients.

        Returns:
            Whether they are the same.
        """
        same = measured is not None and measured.measured_signature == self.signature()
        if measured is not None and same:
            self._local_squares = measured._local_squares
        return same

    def is_usable(self) -> bool:
        """Return whether this rank's gradients are valid and finite."""
        return self.fault is None and all(math.isfinite(float(square)) for square in self.local_squares().values())

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

        Args:
            digests: Numbers to compare; see :meth:`~hf_compressopt.collectives.agreement.Agreement.sum_and_compare`.
            overflow: Whether this rank knows already that an element of its gradients is not finite.
            part: Gradients of some parameters, whose squares are summed in the same message.
            mean: What this rank knows of the mean gradient of ``part``. Then the norm of ``part`` is that of the mean.
            ratio: Without ``ask``: returns the factor on the sum of squares of the gradients with a share, if it is not
                1.

        Returns:
            For each digest, whether all ranks have the same one; none without ``ask``.

        Raises:
            Exception: ``fault`` on the ranks that have one, and a RuntimeError on the others.
        """
        part = part or self
        weight = _share_of if self.ask else ratio or _whole
        squares = [each._own_square(overflow, weight) for each in (self, part)]
        alike: list[bool] = []
        if self.ask:
            faults = torch.full_like(squares[0], float(self.fault is not None))
            means = [] if mean is None else mean.contributions()
            dtype = torch.float64 if mean is None else mean.dtype
            sums, alike = self._communicator.sum_and_compare([faults, *squares, *means], digests, dtype)
            if self.fault is None and float(sums[0]) > 0:
                raise RuntimeError(f"{int(sums[0])} other rank(s) were given gradients that cannot be used")
            squares = [sums[1], sums[2]]
            if mean is not None:
                squares[1] = torch.where(sums[2].isfinite(), mean.square(sums[3:]), sums[2])
        if self.fault is not None:
            raise self.fault
        self._square = squares[0]
        part._square = squares[1]
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

    def square_norm(self) -> Tensor:
        """Return the squared norm of averaged gradients; of local ones the mean over ranks of their squared norms.

        The latter is at least the square of the norm of the mean, and at most W times that. Parameters that only some
        of the ranks hold count by the mean over these.

        Returns:
            [] float64, alike on all ranks, after :meth:`agree`. Not finite if an element on any rank is not, or is too
            large for its square to be a float32.
        """
        if self._square is None:
            self.agree()
        assert self._square is not None
        return self._square

    def is_finite(self) -> bool:
        """Return whether the gradients of all ranks are finite; alike on all ranks."""
        return math.isfinite(float(self.square_norm()))

    def clip_(self, max_norm: float, *, in_place: bool) -> Tensor:
        """Clip to ``max_norm``, by the same factor on every rank; gradients that are not finite do not change.

        Returns:
            [] float64, the norm before.
        """
        norm = self.square_norm().sqrt()
        factor = float(clip_factor(norm, max_norm))
        if math.isfinite(float(norm)) and factor < 1.0:
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
