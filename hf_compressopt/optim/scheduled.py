"""An optimizer's schedule: the plan of each step, and how the schedule is fitted to the length of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.optim.logs import write_log
from hf_compressopt.optim.state_dict import HISTORY
from hf_compressopt.schedules import AUTO, FreezeDetector, OnebitSchedule, Schedule, StepPlan

logger = logging.getLogger(__name__)


class Scheduled:
    """Mixin of an optimizer whose steps follow a schedule.

    Attributes:
        schedule: The schedule, a value: it changes by being replaced.
        schedule_class: Its class, whose fields are options of the optimizer.
        freeze_option: Name of the option that says when the first stage ends.
        freeze_threshold: Stability of the variance at which "auto" ends the first stage.
        step_was_skipped: Whether the last step was skipped, because a gradient was not finite.
        skipped_steps: Steps skipped so far.
        rounds: Steps so far in which the schedule had gradients averaged or a message sent.
    """

    schedule_class: type[Schedule] = OnebitSchedule
    freeze_option: str = OnebitSchedule.freeze_option

    schedule: Schedule
    freeze_threshold: float
    param_groups: list[dict[str, Any]]
    communicator: Communicator
    _step: int
    _tensors: dict[str, Tensor]
    step_was_skipped: bool = False
    skipped_steps: int = 0
    rounds: int = 0
    _deferred: list[str] | None = None
    _fitted_to: int | None = None

    # -- schedule -----------------------------------------------------------------------------------------------------

    def plan_at(self, step: int) -> StepPlan:
        """Return the plan of step ``step``: a pure function of the step and the schedule."""
        return self.schedule.plan(step)

    @property
    def plan(self) -> StepPlan:
        """Plan of the coming step."""
        return self.plan_at(self._step + 1)

    @property
    def last_plan(self) -> StepPlan:
        """Plan of the last step; before the first one its own."""
        return self.plan_at(max(self._step, 1))

    @property
    def freeze_step(self) -> int | str:
        """Last step of the first stage, or "auto"."""
        return self.schedule.freezes_at

    @freeze_step.setter
    def freeze_step(self, step: int | str) -> None:
        self.schedule = self.schedule.frozen_at(step)

    @property
    def max_freeze_step(self) -> int:
        """Bound on the step that "auto" finds."""
        return self.schedule.max_freeze_step

    @max_freeze_step.setter
    def max_freeze_step(self, step: int) -> None:
        self.schedule = replace(self.schedule, max_freeze_step=step)  # type: ignore[type-var]

    def scale_schedule(self, max_steps: int, given: Iterable[str]) -> str:
        """Fit the schedule to a run of ``max_steps`` steps; the options named in ``given`` keep their values.

        Returns:
            What was chosen, in words, for the log.

        Raises:
            RuntimeError: After the first step.
        """
        given = set(given)
        if self._step > 0 and not self.schedule.is_given(given):
            raise RuntimeError(f"the schedule can be chosen before the first step only, this is step {self._step + 1}")
        self.schedule = self.schedule.fitted(max_steps, given)
        self._tensors |= room_for_history(self.schedule, self.param_groups[0]["betas"][1])
        return self.schedule.describe(max_steps, given)

    def defer_schedule(self, given: Iterable[str]) -> None:
        """Leave the schedule open until :meth:`fit_schedule`, but for the options named in ``given``."""
        self._deferred, self._fitted_to = list(given), None

    def fit_schedule(self, max_steps: int) -> str:
        """Fit a schedule that was left open to a run of ``max_steps`` steps; a resumed run keeps the one it has.

        Until the first step a call with another length fits the schedule anew: a Trainer with auto_find_batch_size
        learns the length of the run again with every batch size.

        Returns:
            What was chosen, in words, for the log; "" if nothing has changed.
        """
        if self._deferred is None or self._step > 0 or self._fitted_to == max_steps:
            return ""
        self._fitted_to = max_steps
        return self.scale_schedule(max_steps, self._deferred)


def ends_first_stage(optimizer: Scheduled, plan: StepPlan, norm: Callable[[], float]) -> bool:
    """Return whether the step that was taken by this plan is the last one of the first stage.

    Args:
        optimizer: The optimizer; its schedule is replaced if "auto" ends the stage.
        plan: The plan.
        norm: Returns the 1-norm of the second moments, alike on all ranks, for "auto".
    """
    schedule, threshold = optimizer.schedule, optimizer.freeze_threshold
    if schedule.freezes_at != AUTO:
        return plan.ends_stage
    detector = FreezeDetector(optimizer._tensors[HISTORY], threshold, schedule.max_freeze_step)
    now = norm() if detector.needs_norm(plan.step) else 0.0
    stability = detector.stability(plan.step, now, float(optimizer.param_groups[0]["lr"]))
    if stability < threshold and not plan.ends_stage:
        return False
    optimizer.schedule = schedule.frozen_at(plan.step)
    if optimizer.communicator.rank == 0:
        why = f"stability {stability:.3f}" if stability >= threshold else "its bound, max_freeze_step"
        write_log(logger, logging.INFO, "%s=auto: found %d (%s)", optimizer.freeze_option, plan.step, why)
    return True


def room_for_history(schedule: Schedule, beta2: float) -> dict[str, Tensor]:
    """Return room for the norms that "auto" compares; none if the end of the first stage is known."""
    if schedule.freezes_at != AUTO:
        return {}
    size = FreezeDetector.size(beta2, schedule.max_freeze_step)
    return {HISTORY: torch.zeros(size, dtype=torch.float64, device="cpu")}
