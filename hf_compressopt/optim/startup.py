"""The comparison of the ranks before the first step, where a stage begins, and where a small message tells of more."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.announce import write_log
from hf_compressopt.collectives.communicator import Communicator, digest_of
from hf_compressopt.collectives.sender import HYPERPARAMETERS, listed, size_of, sizes_differ
from hf_compressopt.optim.group import GroupState, by_communicator, has_own_groups, hyperparameters_of, trained_of
from hf_compressopt.optim.math import bit_sum
from hf_compressopt.schedules import StepPlan

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20  # elements that are compared, or sent, at a time
_MOST = 0.01  # relative difference of parameters that counts as rounding


class StartupCheck:
    """The comparison of the ranks of one optimizer, before its first step and where a stage begins."""

    def __init__(self, states: Sequence[GroupState], communicator: Communicator) -> None:
        self._states, self._communicator = states, communicator
        self.checked = False
        self.has_new_groups = False  # which no message has compared yet
        self.compared_at = 0  # the step before which the ranks were compared last

    def begin_anew(self) -> None:
        """Compare the ranks before the next step once more."""
        self.checked = False

    def groups_added(self) -> None:
        """Compare the groups in the next small message: only one of the ranks may have added them."""
        self.has_new_groups = True

    def check(self, plan: StepPlan, before: StepPlan | None, alike: Callable[[], Sequence[Any]]) -> None:
        """Check, before the first step and before the first one of a stage, that the ranks are alike."""
        if not self.checked:
            with_ranks = [state.own_rank is not None for state in self._states]
            what = "optimizer, step, options, or param groups with a process_group of their own"
            self._communicator.require_equal(what, [*alike(), with_ranks])
            self.require_same_groups()
            self.require_same_hyperparameters()
            if plan.agree:  # else each rank has parameters of its own
                what = "the bits of their parameters (are they alike at the start?)"
                self._require_equal(what, lambda state: _bits(state.params))
            if plan.reduce_grads:
                self._require_averaged()
            self.checked = True
            self.has_new_groups = False
            self.compared_at = plan.step
        elif self.compared_at != plan.step and before is not None and before.stage is not plan.stage:
            self.require_same_groups()
            self.require_same_hyperparameters()
            self._align(plan.step)
            self.compared_at = plan.step

    def compare_new_groups(self, plan: StepPlan) -> None:
        """Check the parameters of groups that all ranks have added, as the last small message has told. All call."""
        if self.has_new_groups and plan.agree:
            what = "the bits of their parameters (are those of a new param group alike on all ranks?)"
            self._require_equal(what, lambda state: _bits(state.params))
        self.has_new_groups = False

    def require_same_snapshot(self) -> None:
        """Raise on all ranks if they differ in what a small message compares of the param groups. All ranks call."""
        self.require_same_groups()
        self.require_same_hyperparameters()
        everyone = self._communicator.all_gather_object(trained_of(self._states))
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
            rows = [row for state in states for row in rows_of(state)]
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
        self._communicator.require_equal(HYPERPARAMETERS, hyperparameters_of(self._states))

    def _require_averaged(self) -> None:
        """Check that gradients which the caller has to average are alike on all ranks, but for rounding."""
        shared = [state for state in self._states if state.own_rank is None]
        rows = [row for state in shared for row in zip(state.labels, state.params, strict=True)]
        sizes = {name: size_of(param.grad) for name, param in rows}
        everyone = self._communicator.all_gather_object(sizes)
        known = sorted({name for of_rank in everyone for name in of_rank})
        first = everyone[0]
        names = [
            name for name in known if any(sizes_differ(of_rank.get(name), first.get(name)) for of_rank in everyone)
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
                replicated = (tensor for state in states for tensor in _replicated(state))
                if distance_from_first(replicated, step - 1, communicator, take=True) > 1:
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
            except ValueError as differ:
                error = differ
        self._raise_together(error)

    def _raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks if one has an error; without groups of their own, all have it or none."""
        if has_own_groups(self._states):
            self._communicator.raise_together(error, ValueError)
        elif error is not None:
            raise error


def rows_of(state: GroupState) -> list[str]:
    """Return name, shape, dtype and kind of each parameter of a group; in other ranks' own groups names may differ."""
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
    """Return the difference, as a share of its largest element, that rounding makes of a tensor in so many steps."""
    return min(_MOST, 8 * math.sqrt(steps) * torch.finfo(tensor.dtype).eps)


def distance_from_first(
    tensors: Iterable[Tensor], steps: int, communicator: Communicator, *, take: bool = False
) -> float:
    """Return the largest difference from rank 0's tensors on any rank, and ``take`` these if wanted. All ranks call.

    Up to 1 the difference is what rounding makes in so many steps.
    """
    worst = torch.zeros((), dtype=torch.float64, device=communicator.device)
    for tensor in tensors:
        tolerance = _tolerance(tensor, steps)
        difference = largest = torch.zeros((), dtype=torch.float64, device=tensor.device)
        flat = tensor.reshape(-1)  # a view, or a copy of what has other strides
        for chunk in torch.split(flat, _CHUNK):
            first = chunk.clone()
            communicator.broadcast(first)
            difference = torch.maximum(difference, (chunk.double() - first.double()).abs().max())
            largest = torch.maximum(largest, first.abs().max().double())
            if take:
                chunk.copy_(first)
        if take and flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
        share = torch.where(difference > 0, difference / (largest * tolerance), 0.0)
        worst = torch.maximum(worst, torch.nan_to_num(share, nan=torch.inf, posinf=torch.inf))
    communicator.all_reduce(worst, op="max").wait()
    return float(worst)


def _replicated(state: GroupState) -> Iterator[Tensor]:
    """Yield parameters, moments and coefficients, which all ranks have alike."""
    tensors = (*state.params, state.exp_avg, state.exp_avg_sq, *state.extra.values())
    yield from (tensor.detach() for tensor in tensors if tensor.numel())
