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
from hf_compressopt.schedules import AUTO, FreezeDetector, OnebitSchedule, Schedule, StepPlan, Warmup

logger = logging.getLogger(__name__)

_OLD_NAMES = {"var_freeze_step": "freeze_step"}


class Scheduled:
    """Mixin of an optimizer whose steps follow a schedule.

    Attributes:
        schedule: The schedule, a value: it changes by being replaced.
        schedule_class: Its class, whose fields are options of the optimizer.
        freeze_threshold: Stability of the variance at which "auto" ends the first stage.
        lr_warmup: The learning rate's warmup, as the steps so far tell.
        step_was_skipped: Whether the last step was skipped, because a gradient was not finite.
        skipped_steps: Steps skipped so far.
        rounds: Steps so far in which the schedule had gradients averaged or a message sent.
    """

    schedule_class: type[Schedule] = OnebitSchedule

    schedule: Schedule
    freeze_threshold: float
    lr_warmup: Warmup = Warmup()
    warmup_bits: int
    zero_stage: int
    param_groups: list[dict[str, Any]]
    communicator: Communicator
    _step: int
    _tensors: dict[str, Tensor]
    step_was_skipped: bool = False
    skipped_steps: int = 0
    rounds: int = 0
    _open: set[str] | None = None  # of a schedule that is to be fitted, the options that keep their values
    _fitted_to: int | None = None

    # -- schedule -----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; its state is allocated at once.

        Raises:
            ValueError: For an option outside its range; for parameters on another device; and after the first stage,
                in which a new parameter would have no variance, for a group without ``non_freeze=True``.
            TypeError: For a parameter of another dtype than float32, bfloat16 or float16.
        """
        if self.plan.stage.number and not param_group.get("non_freeze"):
            raise ValueError(
                f"a group added in the {self.plan.stage.value} stage has no variance to divide by: add it before, or "
                "with non_freeze=True, which keeps it in full precision"
            )
        super().add_param_group(param_group)  # type: ignore[misc]

    def plan_at(self, step: int) -> StepPlan:
        """Return the plan of step ``step``: a pure function of the step, the schedule and the options.

        With ``zero_stage`` step() itself averages the gradients of the first stage.
        """
        plan = self.schedule.plan(step)
        shared_out = self.zero_stage > 0 and self.communicator.world_size > 1 and plan.stage.number == 0
        return replace(plan, reduce_grads=False, synchronize=True) if shared_out else plan

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
        return self.schedule.freeze_step

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
            A description of the choice, for the log.

        Raises:
            RuntimeError: After the first step.
        """
        given = {_OLD_NAMES.get(name, name) for name in given}
        if self._step > 0 and not self.schedule.is_given(given):
            raise RuntimeError(f"the schedule can be chosen before the first step only, this is step {self._step + 1}")
        self.schedule = self.schedule.fitted(max_steps, given, low_bit=self.warmup_bits < 32)
        self._tensors |= room_for_history(self.schedule, self.param_groups[0]["betas"][1])
        return self.schedule.describe(max_steps, given)

    def defer_schedule(self, given: Iterable[str]) -> None:
        """Leave the schedule open until :meth:`fit_schedule`, but for the options named in ``given``.

        The schedule of an optimizer whose ``freeze_step`` was not given as a number is open anyway.
        """
        self._open, self._fitted_to = {_OLD_NAMES.get(name, name) for name in given}, None

    @property
    def schedule_is_open(self) -> bool:
        """True if the schedule is still to be fitted to the run's length, by :meth:`fit_schedule`."""
        return self._open is not None and self._fitted_to is None and self._step == 0

    def fit_schedule(self, max_steps: int) -> str:
        """Fit an open schedule to a run of ``max_steps`` steps; one that was given, or resumed, stays as it is.

        Whoever knows the run's length calls it, before the first step. It warns, on rank 0, if a ``freeze_step`` that
        was given is beyond the end of the run.

        Until the first step a call with another length fits the schedule again: a Trainer with auto_find_batch_size
        learns the length of the run again with every batch size.

        Returns:
            A description of the choice, for the log; "" if nothing has changed.
        """
        if self._step > 0 or self._fitted_to == max_steps:
            return ""
        self._fitted_to, found = max_steps, ""
        if self._open is not None:
            found = self.scale_schedule(max_steps, self._open)
        freeze_step = self.schedule.freeze_step
        if isinstance(freeze_step, int) and freeze_step > max_steps and self.communicator.rank == 0:
            message = "freeze_step=%d is beyond the end of the run, which has %d steps: all of them belong to the "
            message += "%s stage. Give a smaller freeze_step, or 'auto'"
            write_log(logger, logging.WARNING, message, freeze_step, max_steps, self.plan.stage.value)
        return found


def ends_first_stage(optimizer: Scheduled, plan: StepPlan, norm: Callable[[], float]) -> bool:
    """Return whether the step that was taken by this plan is the last one of the first stage.

    "auto" ends the stage where the variance is stable, at the latest at ``max_freeze_step``; but not before
    ``min_freeze_step``, and not before the learning rate's warmup is over (:class:`Warmup`).

    Args:
        optimizer: The optimizer; its schedule is replaced if "auto" ends the stage.
        plan: The plan.
        norm: Returns the 1-norm of the second moments, alike on all ranks, for "auto".
    """
    schedule, threshold = optimizer.schedule, optimizer.freeze_threshold
    if plan.stage.number:
        return False
    group = optimizer.param_groups[0]
    optimizer.lr_warmup = optimizer.lr_warmup.after(plan.step, float(group["lr"]))
    warmup_is_over = optimizer.lr_warmup.is_over(plan.step, window_of(group["betas"][1]))
    if schedule.freeze_step != AUTO:
        if plan.ends_stage and optimizer.communicator.rank == 0:
            _warn_of_early_freeze(optimizer, plan.step, warmup_is_over)
        return plan.ends_stage
    detector = FreezeDetector(optimizer._tensors[HISTORY], threshold, schedule.last_warmup_step)
    now = norm() if detector.needs_norm(plan.step) else 0.0
    stability = detector.stability(plan.step, now, float(group["lr"]))
    if plan.step < schedule.min_freeze_step or not warmup_is_over:
        return False
    if stability < threshold and plan.step < schedule.max_freeze_step:
        return False
    optimizer.schedule = schedule.frozen_at(plan.step)
    if optimizer.communicator.rank == 0:
        if stability >= threshold:
            why = f"stability {stability:.3f}"
        elif plan.step <= schedule.max_freeze_step:
            why = "its bound, max_freeze_step"
        else:
            late = plan.step > schedule.min_freeze_step
            why = "the learning rate's warmup" if late else "its bound, min_freeze_step"
        write_log(logger, logging.INFO, "freeze_step=auto: found %d (%s)", plan.step, why)
    return True


def _warn_of_early_freeze(optimizer: Scheduled, step: int, warmup_is_over: bool) -> None:
    """Warn that a freeze step that was given is earlier than "auto" would choose it."""
    least, reasons = optimizer.schedule.min_freeze_step, []
    if step < least:
        reasons.append(f"earlier than step {least} (min_freeze_step)")
    if not warmup_is_over:
        reasons.append("within the learning rate's warmup, or too soon after it")
    if reasons:
        message = "freeze_step=%d freezes a variance that has learnt little: it is %s. The loss may suffer; 'auto' "
        message += "waits longer"
        write_log(logger, logging.WARNING, message, step, ", and ".join(reasons))


def window_of(beta2: float) -> int:
    """Return the number of steps that a second moment remembers."""
    return round(1 / (1 - beta2))


def room_for_history(schedule: Schedule, beta2: float) -> dict[str, Tensor]:
    """Return room for the norms that "auto" compares; none if the end of the first stage is known."""
    if schedule.freeze_step != AUTO:
        return {}
    size = FreezeDetector.size(beta2, schedule.last_warmup_step)
    return {HISTORY: torch.zeros(size, dtype=torch.float64, device="cpu")}
