"""An optimizer whose steps follow a schedule: its plan, its metrics, and what of them outlives a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.optim.flat_optimizer import FlatOptimizer
from hf_compressopt.optim.functional import sum_of
from hf_compressopt.optim.group_state import GroupState
from hf_compressopt.optim.logs import write_log
from hf_compressopt.optim.options import check_count
from hf_compressopt.schedules import AUTO, FreezeDetector, OnebitSchedule, Schedule, Stage, StepPlan

logger = logging.getLogger(__name__)

BYTES_PER_MB = 2**20
FLOAT_BYTES = 4
_HISTORY = "freeze_history"


class ScheduledOptimizer(FlatOptimizer):
    """A flat optimizer with a schedule, which is a pure function of the step and the options.

    Attributes:
        step_was_skipped: Whether the last step was skipped, because a gradient was not finite.
        skipped_steps: Steps skipped so far.
        rounds: Steps so far in which the schedule had gradients averaged or a message sent.
    """

    #: The class of the schedule, whose fields are options.
    schedule_class: type[Schedule] = OnebitSchedule
    #: The schedule's; see :class:`~hf_compressopt.schedules.Schedule`.
    freeze_option: str = OnebitSchedule.freeze_option

    def __init__(self, *args: Any, schedule: Schedule, freeze_threshold: float, **kwargs: Any) -> None:
        """Start the schedule; the other arguments are the base class's."""
        if not 0 < freeze_threshold <= 1:
            raise ValueError(f"freeze_threshold must be in (0, 1], got {freeze_threshold}")
        self.schedule, self.freeze_threshold = schedule, freeze_threshold
        self.step_was_skipped = False
        self.skipped_steps = 0
        self.rounds = 0
        self._deferred: list[str] | None = None
        self._fitted_to: int | None = None
        super().__init__(*args, **kwargs)
        self._make_history()

    def _make_history(self) -> None:
        """Make room for the norms that "auto" compares."""
        if self.schedule.freezes_at == AUTO:
            size = FreezeDetector.size(self.param_groups[0]["betas"][1], self.schedule.max_freeze_step)
            self._tensors[_HISTORY] = torch.zeros(size, dtype=torch.float64, device="cpu")

    def _stage_ends(self, plan: StepPlan) -> bool:
        """Return whether the step that was taken by this plan is the last one of its stage; "auto" decides here."""
        if self.schedule.freezes_at != AUTO:
            return plan.ends_stage
        detector = FreezeDetector(self._tensors[_HISTORY], self.freeze_threshold, self.schedule.max_freeze_step)
        norm = self._variance_norm() if detector.needs_norm(plan.step) else 0.0
        stability = detector.stability(plan.step, norm, float(self.param_groups[0]["lr"]))
        if stability < self.freeze_threshold and not plan.ends_stage:
            return False
        self.schedule = self.schedule.frozen_at(plan.step)
        if self.communicator.rank == 0:
            why = f"stability {stability:.3f}" if stability >= self.freeze_threshold else "its bound, max_freeze_step"
            write_log(logger, logging.INFO, "%s=auto: found %d (%s)", self.freeze_option, plan.step, why)
        return True

    def _variance_norm(self) -> float:
        """Return the 1-norm of the bias-corrected second moments, averaged over the ranks so that all know it."""
        norm = torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        for group, state in zip(self.param_groups, self._states, strict=True):
            count = max(self._bias_counts(state)[1], default=0.0) if state.compressed else 0.0
            if count > 0:
                correction = 1 - group["betas"][1] ** count if group["bias_correction"] else 1.0
                norm += sum_of(state.exp_avg_sq) / correction
        norm /= self.communicator.world_size
        self.communicator.all_reduce(norm).wait()
        return float(norm)

    def _bias_counts(self, state: GroupState) -> tuple[list[float], list[float]]:
        """Return for each parameter how often its first and its second moment have been updated."""
        return state.steps.tolist(), state.steps.tolist()

    # -- schedule -----------------------------------------------------------------------------------------------------

    def plan_at(self, step: int) -> StepPlan:
        """Return the plan of step ``step``: a pure function of the step and the schedule."""
        return self.schedule.plan(step)

    @property
    def plan(self) -> StepPlan:
        """Plan of the coming step."""
        return self.plan_at(self._step + 1)

    @property
    def _stage(self) -> Stage:
        """Stage of the last step; before the first one its own."""
        return self.plan_at(max(self._step, 1)).stage

    @property
    def freeze_step(self) -> int | str:
        """Last step of the first stage, or "auto"."""
        return self.schedule.freezes_at

    @property
    def max_freeze_step(self) -> int:
        """Bound on the step that "auto" finds."""
        return self.schedule.max_freeze_step

    @property
    def last_warmup_step(self) -> int:
        """Last step of the first stage if it is known, else its bound."""
        return self.schedule.last_warmup_step

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
        self._make_history()
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

    # -- stages in which each rank has parameters of its own ----------------------------------------------------------

    @contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Inside, all ranks hold the same parameters, which here they always do. All ranks call."""
        yield

    def own_parameters_restorer(self) -> Callable[[], None]:
        """A function that puts this rank's parameters back as they are now, where each rank has its own."""
        if "param" not in self._own_tensors(self._stage):
            return lambda: None
        own = [(param, param.detach().clone()) for state in self._states if state.compressed for param in state.params]

        def restore() -> None:
            with torch.no_grad():
                for param, value in own:
                    param.copy_(value)

        return restore

    @contextmanager
    def synced_parameters(self) -> Iterator[bool]:
        """Inside, the parameters are alike on all ranks, as they always are here. No collective call. Yields False."""
        yield False

    @property
    def ranks_are_apart(self) -> bool:
        """Whether each rank has its own parameters at this moment: never here."""
        return False

    def settle_parameters(self) -> None:
        """Make all ranks hold the same parameters until the next step, which here they always do. All ranks call."""

    def parameters_replaced(self) -> None:
        """Go on from the parameters as they are, such as those of a model that was loaded. All ranks call."""

    # -- metrics ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step and of the run so far, of this rank.

        Returns:
            ``stage`` (0.0 is the first stage), ``step``, ``skipped_steps``, ``rounds`` (steps in which the schedule has
            gradients averaged or a message sent); ``bytes_sent_step`` and ``bytes_sent`` (by
            this rank; without what the caller of a plain loop sends to average gradients); ``compression_ratio``
            (bytes of a float32 ring all-reduce over bytes sent, of the last step); ``seconds_all_to_all``,
            ``seconds_all_gather`` and ``seconds_communication`` (host seconds blocked so far).
        """
        full = sum(
            2 * (1 - 1 / state.communicator.world_size) * FLOAT_BYTES * state.layout.numel for state in self._states
        )
        plan = self.plan_at(max(self._step, 1))
        sent = self.traffic.step_bytes
        compressed = not plan.reduce_grads and sent > 0
        return {
            "stage": plan.stage.number,
            "step": float(self._step),
            "skipped_steps": float(self.skipped_steps),
            "rounds": float(self.rounds),
            "bytes_sent_step": float(sent),
            "bytes_sent": float(self.traffic.total_bytes),
            "compression_ratio": full / sent if compressed else 1.0,
            "seconds_all_to_all": self.traffic.seconds["all_to_all"],
            "seconds_all_gather": self.traffic.seconds["all_gather"],
            "seconds_communication": self.traffic.total_seconds,
        }

    def describe(self) -> str:
        """One line on what this optimizer is and how it talks."""
        schedule = ", ".join(f"{key}={value}" for key, value in self.schedule.options().items())
        numel = sum(state.layout.numel for state in self._states)
        implementation = kernels.implementation(self.communicator.device)
        return (
            f"{type(self).__name__}, {numel:,} parameters, {schedule}; {self.communicator.world_size} rank(s) over "
            f"{self.communicator.name}, scale_block={self.scale_block}, kernels: {implementation}"
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        return {
            "optimizer": type(self).__name__,
            "step": self._step,
            "stage": self._stage.value,
            "world_size": self.communicator.world_size,
            "schedule": self.schedule.options(),
            "bucket_numel": self.bucket_numel,
            "scale_block": self.scale_block,
            "skipped_steps": self.skipped_steps,
            "rounds": self.rounds,
            "bytes_sent": self.traffic.total_bytes,
        }

    def _check_header(self, header: dict[str, Any]) -> None:
        if header.get("optimizer") != type(self).__name__:
            raise ValueError(f"the state is {header.get('optimizer')}'s, this optimizer is {type(self).__name__}")
        for name in ("step", "skipped_steps", "rounds", "bytes_sent", "bucket_numel", "world_size"):
            check_count(name, header.get(name), low=0)
        if header.get("stage") not in {stage.value for stage in Stage}:
            raise ValueError(f"stage must be one of {[stage.value for stage in Stage]}, got {header.get('stage')!r}")
        schedule, mine = header.get("schedule"), self.schedule.options()
        if not isinstance(schedule, dict) or schedule.keys() != mine.keys():
            raise ValueError(f"the state has the schedule {schedule!r}, this optimizer one of {sorted(mine)}")
        type(self.schedule)(**schedule)
        if self.communicator.world_size > 1 and header["bucket_numel"] != self.bucket_numel:
            cap = (header["bucket_numel"] + 0.5) * FLOAT_BYTES / BYTES_PER_MB
            raise ValueError(
                f"the state was made with buckets of {header['bucket_numel']} elements, this optimizer has "
                f"{self.bucket_numel}: give bucket_cap_mb={cap!r}"
            )

    def _load_header(self, header: dict[str, Any]) -> None:
        mine = self.schedule.options()
        if header["schedule"] != mine and "auto" not in mine.values() and self.communicator.rank == 0:
            logger.warning(
                "the schedule of the state that is loaded, %s, takes the place of %s", header["schedule"], mine
            )
        self.schedule = type(self.schedule)(**header["schedule"])
        self._step = header["step"]
        self.skipped_steps = header["skipped_steps"]
        self.rounds = header["rounds"]
        self.traffic.restore(header["bytes_sent"])
        self.step_was_skipped = False

    def _plain_header(self, step: int) -> dict[str, Any]:
        """As the base class's; if the first stage should have ended by then, it ends with the coming step."""
        ended = step >= self.schedule.last_warmup_step
        schedule = (self.schedule.frozen_at(step + 1) if ended else self.schedule).options()
        fresh = {"skipped_steps": 0, "rounds": step, "bytes_sent": 0}
        return {**self._header(), "schedule": schedule, "step": step, **fresh}

    def _check_tensors(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        rest = dict(tensors)
        history = rest.pop(_HISTORY, None)
        super()._check_tensors(rest, header)
        if history is None and header["schedule"][self.freeze_option] == AUTO:
            raise ValueError(f"{self.freeze_option} is 'auto', and there is no {_HISTORY!r}")
        if history is not None and (history.dtype != torch.float64 or history.dim() != 1 or history.numel() < 2):
            raise ValueError(f"{_HISTORY!r} must be float64 [2 or more], got {history.dtype} {list(history.shape)}")
