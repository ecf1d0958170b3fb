"""The base of compressed optimizers that divide by a variance, which the end of the warmup stage freezes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.optim import options
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.gradients import Grads
from hf_compressopt.optim.group import GroupState, ParamGroups
from hf_compressopt.optim.math import sum_of
from hf_compressopt.optim.options import NO_STATE
from hf_compressopt.optim.overlap import OverlapSender
from hf_compressopt.optim.refresh import VarianceRefresh, rows_of
from hf_compressopt.optim.sharded import ShardedOverlap, freeze_moments, take_sharded_step
from hf_compressopt.optim.state import HISTORY
from hf_compressopt.schedules import AUTO, StepPlan, carry_history, variance_stability
from hf_compressopt.weak import WeakCall


class CompressedAdam(CompressedOptimizer):
    """The base of :class:`OnebitAdam`, :class:`ZeroOneAdam`, :class:`OnebitLamb`: Adam's moments, and their freezing.

    With ``freeze_step="auto"`` the variance decides when the warmup stage ends (1-bit Adam, arXiv 2102.02888, section
    4.3; :func:`~hf_compressopt.schedules.variance_stability`), at the latest at ``max_freeze_step``, on all ranks.

    A param group may carry its own eps, bias_correction and eps_inside_sqrt, too.

    Args:
        params: See :class:`~hf_compressopt.optim.base.CompressedOptimizer`.
        lr: Learning rate, >= 0.
        freeze_threshold: How stable the variance must be for "auto", in (0, 1].
        bias_correction: Whether Adam's bias corrections apply.
        eps: Added to the denominator, >= 0.
        eps_inside_sqrt: sqrt(v + eps) instead of sqrt(v) + eps.
        zero_stage: Of OnebitAdam. 1 partitions the moments of the warmup stage. 2 also sends and frees gradients during
            backward, with clip="late" after the warmup stage. 0 is off.
        variance_floor: At the end of the warmup stage every second moment is raised to this share of its tensor's mean,
            >= 0; 0 is off.
        max_update: Largest change of an element in a step by a frozen variance, in learning rates and without the
            weight decay, >= 0; None or 0 is off. It bounds what an outdated variance can do.
        variance_interval: The frozen variance learns beside every so many-th message, >= 0, from gradients that are
            averaged once more (in ``warmup_bits`` if these are 4 or 8, else in full). 0 leaves it as it was, as
            published. None is 16, and 0 of OnebitLamb.
        amsgrad: Must be False.
        **options: See :class:`~hf_compressopt.optim.base.CompressedOptimizer`.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters that no option can make work.
    """

    has_variance = True
    default_variance_interval = 16

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        freeze_threshold: float = 0.96,
        bias_correction: bool = True,
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        zero_stage: int = 0,
        variance_floor: float = 0.01,
        max_update: float | None = 2.0,
        variance_interval: int | None = None,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        if "state" in options:
            raise TypeError(NO_STATE)
        self.freeze_threshold, self.zero_stage = freeze_threshold, zero_stage
        self.variance_floor, self.max_update = variance_floor, max_update
        if amsgrad:
            raise ValueError("amsgrad must be False, got True: its running maximum has no meaning once v is frozen")
        self._group_options = {"eps": eps, "bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt}
        self._fused_warmup = options.get("warmup_bits") != 32
        interval = self.default_variance_interval if variance_interval is None else variance_interval
        self._intervals = {**self._intervals, "variance_interval": interval}
        self._norms: list[tuple[int, Tensor]] = []  # by step; of the history of norms, but still on the device
        super().__init__(params, lr, **options)

    def _check_options(self) -> None:
        for name, value in {"variance_floor": self.variance_floor, "max_update": self.max_update or 0}.items():
            options.check_at_least(name, value, 0)
        if not 0 < self.freeze_threshold <= 1:
            raise ValueError(f"freeze_threshold must be in (0, 1], got {self.freeze_threshold}")
        chosen = self.zero_stages, self.warmup_bits, self._clip
        options.check_zero_stage(self.zero_stage, type(self).__name__, *chosen)

    def _alike(self) -> list[Any]:
        return [self.variance_floor, self.max_update or 0, self.zero_stage, self._fused_warmup]

    # -- the step ------------------------------------------------------------------------------------------------------

    def _compressed_step(self, plan: StepPlan, states: Sequence[GroupState], gradients: Grads | None) -> None:
        super()._compressed_step(plan, states, gradients)
        if plan.refresh_steps and plan.agree:
            self._refresh_variance(plan, gradients)

    def _refresh_variance(self, plan: StepPlan, gradients: Grads | None) -> None:
        """Let the variance learn from a step (:mod:`~hf_compressopt.optim.refresh`). All ranks call.

        ``gradients`` is None on a rank whose own are not usable, and which sends zeros.
        """
        states = [state for state in self._states if state.compressed]
        refresh = (
            VarianceRefresh(self.warmup_bits) if self.overlap is None else self.overlap.take_refresh(self.warmup_bits)
        )
        rows = chain.from_iterable(rows_of(state, gradients) for state in states)
        refresh.send_all(rows if self.overlap is None else map(self.overlap.clip_row, rows))
        refresh.take(states, plan.step, plan.refresh_steps, self.variance_floor)

    def _take_step_of_shards(self, states: Sequence[GroupState], gradients: Grads) -> None:
        take_sharded_step(states, gradients, self.sharded_overlap, bits=self.warmup_bits, fused=self._fused_warmup)

    def _make_overlap(self, groups: ParamGroups) -> OverlapSender | None:
        if self.zero_stage != 2:
            return super()._make_overlap(groups)
        message_of, begin_step = WeakCall(self._message_of), WeakCall(self._begin_step)
        clips = self.max_grad_norm > 0
        return ShardedOverlap(groups, self._tensors, message_of, begin_step, bits=self.warmup_bits, clips=clips)

    # -- the end of the warmup stage -----------------------------------------------------------------------------------

    def _bias_counts(self, state: GroupState) -> tuple[list[float], list[float]]:
        """Return for each parameter how often its first and its second moment have been updated."""
        return state.steps.tolist(), state.steps.tolist()

    def _clip_of_errors(self) -> float:
        if self.sharded_overlap is not None:
            return self.sharded_overlap.clipped
        return super()._clip_of_errors() if self.zero_stage == 0 else 1.0  # else they are clipped before they are sent

    def _freeze(self) -> None:
        """Fold the bias corrections into the moments, apply the variance floor, gather what ranks have shared out."""
        freeze_moments(self._states, self._bias_counts, self.variance_floor)

    def _end_warmup(self, plan: StepPlan) -> None:
        super()._end_warmup(plan)
        names: list[str] = []
        for state in self._states:
            rows = zip(state.labels, state.without_variance, strict=True)
            names += [name for name, without_variance in rows if without_variance]
        if names:
            message = (
                "%d parameter tensor(s) have no variance after the warmup stage and are not updated any more: their "
                "averaged gradients were 0 in all its steps: %s (for such parameters use a later freeze_step, or a "
                "group with non_freeze=True)"
            )
            listed = ", ".join([*names[:8], "..."] if len(names) > 8 else names)
            self._log(logging.WARNING, message, len(names), listed)

    def _ends_warmup_stage(self, plan: StepPlan) -> bool:
        """Return whether the step of the warmup stage that was taken by this plan is the last one."""
        schedule, step = self.schedule, plan.step
        threshold = self.freeze_threshold
        warmup_is_over = self._follow_lr_warmup(step)
        if schedule.freeze_step != AUTO:
            reasons = []
            if step < schedule.min_freeze_step:
                reasons.append(f"earlier than step {schedule.min_freeze_step} (min_freeze_step)")
            if not warmup_is_over:
                reasons.append("within the learning rate's warmup, or too soon after it")
            if plan.ends_stage and reasons:
                message = "freeze_step=%d freezes a variance that has learnt little: it is %s. The loss may suffer; "
                self._log(logging.WARNING, message + "'auto' waits longer", step, ", and ".join(reasons))
            return plan.ends_stage
        stability = self._variance_stability(step, float(self.param_groups[0]["lr"]))
        if step < schedule.min_freeze_step or not warmup_is_over:
            return False
        if stability < threshold and step < schedule.max_freeze_step:
            return False
        if stability >= threshold:
            why = f"stability {stability:.3f}"
        elif step <= schedule.max_freeze_step:
            why = "its bound, max_freeze_step"
        else:
            why = "the learning rate's warmup" if step > schedule.min_freeze_step else "its bound, min_freeze_step"
        self._end_at(step, why)
        return True

    def _variance_stability(self, step: int, lr: float) -> float:
        """Return how stable the variance is after a step.

        The first norms are compared many steps later: the host does not wait for them in their own steps.
        """
        history = self._tensors[HISTORY]
        is_first = step < len(history)  # there is no earlier one to compare it with

        def norm() -> float:
            now = mean_variance_norm(self._states, self._bias_counts, self.communicator)
            if not is_first:
                return float(now)
            self._norms.append((step, now))
            return 0.0

        if not is_first:
            self._fetch_norms()
        return variance_stability(history, step, self.schedule.last_warmup_step, lr, norm)

    def _fetch_norms(self) -> None:
        if self._norms:
            history = self._tensors[HISTORY]
            norms = torch.stack([norm for _, norm in self._norms]).tolist()
            for (step, _), norm in zip(self._norms, norms, strict=True):
                history[step % (len(history) - 1)] = norm
            self._norms = []

    def _schedule_replaced(self) -> None:
        """Allocate the norms that "auto" compares, unless the end of the warmup stage is known; keep those of late."""
        if self.schedule.freeze_step == AUTO:
            size = min(self._memory_of_variance, self.schedule.last_warmup_step) + 1
            before = self._tensors.get(HISTORY)
            if before is None or before.numel() != size:
                self._fetch_norms()
                history = torch.zeros(size, dtype=torch.float64, device="cpu")
                if before is not None:
                    carry_history(before, history, self._step)
                self._tensors[HISTORY] = history


def mean_variance_norm(
    states: Iterable[GroupState],
    counts: Callable[[GroupState], tuple[list[float], list[float]]],
    everyone: Communicator,
) -> Tensor:
    """Return the mean over ranks of the 1-norm of the bias-corrected second moments, [] float64, alike on all ranks."""
    norm = torch.zeros((), dtype=torch.float64, device=everyone.device)
    for state in states:
        count = max(counts(state)[1], default=0.0) if state.compressed else 0.0
        if count == 0:
            continue
        correction = 1 - state.options["betas"][1] ** count if state.options["bias_correction"] else 1.0
        norm += sum_of(state.exp_avg_sq) / correction
        if state.moments.shards is not None:
            for part in state.moments.shards.exp_avg_sq:  # a part of the norm, not one rank's view of it
                norm += sum_of(part) / correction * state.communicator.world_size
    norm /= everyone.world_size
    everyone.all_reduce(norm).wait()
    return norm
