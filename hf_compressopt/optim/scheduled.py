"""An optimizer whose steps follow a schedule: its plan, its metrics, and what of them outlives a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_compressopt import kernels
from hf_compressopt.optim.flat_optimizer import FlatOptimizer
from hf_compressopt.optim.options import check_count
from hf_compressopt.stages import Stage, StepPlan

logger = logging.getLogger(__name__)

BYTES_PER_MB = 2**20
FLOAT_BYTES = 4


class ScheduledOptimizer(FlatOptimizer):
    """A flat optimizer with a schedule, which is a pure function of the step and the options.

    Attributes:
        step_was_skipped: Whether the last step was skipped, because a gradient was not finite.
        skipped_steps: Steps skipped so far.
        rounds: Steps so far in which the schedule had gradients averaged or a message sent.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As the base class."""
        self.step_was_skipped = False
        self.skipped_steps = 0
        self.rounds = 0
        self._deferred: list[str] | None = None
        self._fitted_to: int | None = None
        super().__init__(*args, **kwargs)

    # -- schedule -----------------------------------------------------------------------------------------------------

    def plan_at(self, step: int) -> StepPlan:
        """The schedule: what step ``step`` does. A pure function of the step and the options."""
        raise NotImplementedError("abstract")

    @property
    def plan(self) -> StepPlan:
        """What the coming step does."""
        return self.plan_at(self._step + 1)

    @property
    def _stage(self) -> Stage:
        """The stage of the last step; before the first one its own."""
        return self.plan_at(max(self._step, 1)).stage

    def _schedule_options(self) -> dict[str, Any]:
        """The options that :meth:`plan_at` depends on: they must be alike on all ranks and outlive a resume."""
        raise NotImplementedError("abstract")

    def _check_schedule(self, options: dict[str, Any]) -> None:
        """Raise ValueError or TypeError for options that no schedule can have; the keys are right."""
        raise NotImplementedError("abstract")

    def _set_schedule_options(self, options: dict[str, Any]) -> None:
        """Take over the schedule of a checkpoint."""
        raise NotImplementedError("abstract")

    def scale_schedule(self, max_steps: int, given: Iterable[str]) -> str:
        """Fit the schedule to a run of ``max_steps`` steps, leaving alone the options named in ``given``.

        Returns:
            What was chosen, in words, for the log.

        Raises:
            RuntimeError: After the first step.
        """
        raise NotImplementedError("abstract")

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
        schedule = ", ".join(f"{key}={value}" for key, value in self._schedule_options().items())
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
            "schedule": self._schedule_options(),
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
        schedule, mine = header.get("schedule"), self._schedule_options()
        if not isinstance(schedule, dict) or schedule.keys() != mine.keys():
            raise ValueError(f"the state has the schedule {schedule!r}, this optimizer one of {sorted(mine)}")
        self._check_schedule(schedule)
        if self.communicator.world_size > 1 and header["bucket_numel"] != self.bucket_numel:
            cap = (header["bucket_numel"] + 0.5) * FLOAT_BYTES / BYTES_PER_MB
            raise ValueError(
                f"the state was made with buckets of {header['bucket_numel']} elements, this optimizer has "
                f"{self.bucket_numel}: give bucket_cap_mb={cap!r}"
            )

    def _load_header(self, header: dict[str, Any]) -> None:
        mine = self._schedule_options()
        if header["schedule"] != mine and "auto" not in mine.values() and self.communicator.rank == 0:
            logger.warning(
                "the schedule of the state that is loaded, %s, takes the place of %s", header["schedule"], mine
            )
        self._set_schedule_options(header["schedule"])
        self._step = header["step"]
        self.skipped_steps = header["skipped_steps"]
        self.rounds = header["rounds"]
        self.traffic.restore(header["bytes_sent"])
        self.step_was_skipped = False

    def _plain_header(self, step: int) -> dict[str, Any]:
        return {**self._header(), "step": step, "skipped_steps": 0, "rounds": step, "bytes_sent": 0}
