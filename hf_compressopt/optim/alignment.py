"""The comparison of the ranks of one optimizer, and the alignment of copies that differ by rounding.

Copies may differ so if the ranks compute on unlike devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import DIGEST_BOUND, Communicator
from hf_compressopt.optim.functional import bit_sum
from hf_compressopt.optim.group_state import GroupState, by_communicator, has_own_groups
from hf_compressopt.optim.logs import write_log
from hf_compressopt.schedules import StepPlan

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20  # elements that are compared, or sent, at a time
_MOST = 0.01


def digest_of(value: Any) -> int:
    """Return a number below DIGEST_BOUND that stands for a value."""
    return crc32(repr(value).encode()) % DIGEST_BOUND


class Comparison:
    """The comparison of the ranks of one optimizer, before its first step and where a stage begins."""

    def __init__(self, states: Sequence[GroupState], communicator: Communicator) -> None:
        """Begin with nothing compared.

        Args:
            states: The param groups, a list that may grow.
            communicator: All ranks.
        """
        self._states, self._communicator = states, communicator
        self._checked = False
        self._compared_at = 0  # the step before which the ranks were compared last

    def check_anew(self) -> None:
        """Have the ranks compare everything before the next step."""
        self._checked = False

    def check(self, plan: StepPlan, before: StepPlan | None, alike: Sequence[Any]) -> None:
        """Check, before the first step and before the first one of a stage, that the ranks are alike.

        Args:
            plan: Plan of the coming step.
            before: Plan of the step before it; None before the first one.
            alike: Numbers, strings and lists of these that must be alike.

        Raises:
            ValueError: If the ranks are not alike, on all ranks.
        """
        if not self._checked:
            own = [state.own_rank is not None for state in self._states]
            self._communicator.require_equal(
                "optimizer, step, options, or param groups with a process_group of their own", [*alike, own]
            )
            self._require_equal("parameter sizes", lambda state: digest_of((state.compressed, state.layout.numels)))
            self.require_same_hyperparameters()
            if plan.agree:  # else each rank has parameters of its own
                self._require_equal("the bits of their parameters (are they alike at the start?)", _parameter_bits)
            self._checked, self._compared_at = True, plan.step
        elif self._compared_at != plan.step and before is not None and before.stage is not plan.stage:
            self.require_same_hyperparameters()
            self._align(plan.step)
            self._compared_at = plan.step

    def hyperparameters(self) -> list[list[Any]]:
        """Return the hyperparameters of the param groups that all ranks hold."""
        return [_plain_options(state.options) for state in self._states if state.own_rank is None]

    def require_same_hyperparameters(self) -> None:
        """Check that the ranks have the same hyperparameters, else they would drift apart unnoticed.

        Raises:
            ValueError: If they do not, on all ranks.
        """
        what = "the hyperparameters of their param groups (does each rank's scheduler see the same numbers?)"
        self._communicator.require_equal(what, self.hyperparameters())

    def _align(self, step: int) -> None:
        """Take rank 0's parameters on all ranks if they differ by no more than rounding.

        Raises:
            ValueError: If they differ by more, on all ranks; nothing has changed.
        """
        error: Exception | None = None
        apart: list[tuple[Communicator, list[GroupState]]] = []
        with self._communicator.traffic.paused():
            for communicator, states in by_communicator(self._states):
                everyone = communicator.all_gather_object([_replicated_bits(state) for state in states])
                if any(bits != everyone[0] for bits in everyone):
                    apart.append((communicator, states))
                    if _largest_difference(states, step - 1, communicator) > 1:
                        error = ValueError(
                            "the parameters of the ranks differ by more than rounding at the end of the warmup stage: "
                            "average all gradients over the ranks while optimizer.plan.reduce_grads, and start all "
                            "ranks from the same parameters"
                        )
            self._raise_together(error)
            for communicator, states in apart:
                _take_first_ranks(states, communicator)
        if apart and self._communicator.rank == 0:
            message = (
                "step %d: the parameters of the ranks differ by rounding (unlike devices?): all take those of rank 0"
            )
            write_log(logger, logging.WARNING, message, step)

    def _require_equal(self, what: str, value: Callable[[GroupState], int]) -> None:
        """Check that a number of every param group is alike on all the ranks that hold it.

        Raises:
            ValueError: If one is not, on all ranks.
        """
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


def _parameter_bits(state: GroupState) -> int:
    """Return a sum of the bits of a group's parameters."""
    return int(sum(bit_sum(param) for param in state.params))


def _replicated_bits(state: GroupState) -> int:
    """Return a sum of the bits of what ranks hold alike after the warmup stage: parameters, moments, coefficients."""
    return int(sum(bit_sum(tensor) for tensor in _replicated(state)))


def _largest_difference(states: Sequence[GroupState], steps: int, communicator: Communicator) -> float:
    """Compare this rank's parameters, moments and coefficients with rank 0's. All ranks call.

    Args:
        states: The same groups on all ranks.
        steps: Steps taken so far.
        communicator: The ranks.

    Returns:
        The largest difference of an element on any rank, as a share of what rounding can explain: its tensor's largest
        magnitude times 8 sqrt(steps) units of the last place, at most 1 % of it. Infinity if one is not finite.
    """
    worst = torch.zeros((), dtype=torch.float64, device=communicator.device)
    for tensor in (tensor for state in states for tensor in _replicated(state)):
        tolerance = min(_MOST, 8 * sqrt(steps) * torch.finfo(tensor.dtype).eps)
        difference = largest = torch.zeros((), dtype=torch.float64, device=tensor.device)
        for mine in torch.split(tensor.reshape(-1), _CHUNK):
            first = mine.clone()
            communicator.broadcast(first)
            difference = torch.maximum(difference, (mine.double() - first.double()).abs().max())
            largest = torch.maximum(largest, first.abs().max().double())
        share = torch.where(difference > 0, difference / (largest * tolerance), 0.0)
        worst = torch.maximum(worst, torch.nan_to_num(share, nan=torch.inf, posinf=torch.inf))
    communicator.all_reduce(worst, op="max").wait()
    return float(worst)


def _take_first_ranks(states: Sequence[GroupState], communicator: Communicator) -> None:
    """Replace parameters, moments and coefficients by rank 0's. All ranks call."""
    for state in states:
        for tensor in _replicated(state):
            flat = tensor.reshape(-1)  # a view, or a copy of what has other strides
            for chunk in torch.split(flat, _CHUNK):
                communicator.broadcast(chunk)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


def _replicated(state: GroupState) -> Iterator[Tensor]:
    held = (*state.params, state.exp_avg, state.exp_avg_sq, *state.extra.values())
    yield from (tensor.detach() for tensor in held if tensor.numel())


def _plain_options(group: dict[str, Any]) -> list[Any]:
    """The hyperparameters of a param group that all ranks must share, as JSON holds them."""
    return [
        *(float(group[name]) for name in ("lr", "eps", "weight_decay")),
        *map(float, group["betas"]),
        *(bool(group[name]) for name in ("bias_correction", "eps_inside_sqrt")),
    ]
