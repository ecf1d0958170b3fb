"""Stages and schedules: pure functions of the step, no torch, no state.

A step has a number t = 1, 2, ...; a schedule maps t to a :class:`StepPlan`. Since a plan depends on nothing but t and
the options, there is no stage to save, to lose at a resume, or to disagree about between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    """What the ranks exchange in a step."""

    WARMUP = "warmup"  # full-precision gradients; the variance is learnt
    COMPRESSED = "compressed"  # 1-bit momentum with error feedback; the variance is frozen
    VARIANCE = "variance"  # full-precision gradients where the variance learns, 1-bit gradients in between
    LOCAL_STEP = "local-step"  # each rank steps alone; 1-bit updates at syncs; the variance is frozen

    @property
    def number(self) -> float:
        """The stage as a number, for logs that take no words: 0.0 for an algorithm's first stage, 1.0 for its last."""
        return 0.0 if self in (Stage.WARMUP, Stage.VARIANCE) else 1.0


@dataclass(frozen=True)
class StepPlan:
    """What one step does.

    Attributes:
        step: The number t >= 1 of the step.
        stage: Its stage.
        reduce_grads: True where ``step()`` expects gradients that are averaged over the ranks (by DDP, by its hook, or
            by the caller); False where they must stay local.
        update_variance: True where the second moment learns from the step.
        synchronize: True where the schedule has a compressed message in the step.
        ends_stage: True in the last step of its stage.
        agree: True where the ranks must agree that all gradients are finite; False where each goes its own way.
    """

    step: int
    stage: Stage
    reduce_grads: bool
    update_variance: bool
    synchronize: bool
    ends_stage: bool
    agree: bool = True


def onebit_plan(step: int, freeze_step: int) -> StepPlan:
    """The schedule of 1-bit Adam and 1-bit LAMB: warmup up to and including ``freeze_step``, compressed after it.

    Source: 1-bit Adam, arXiv 2102.02888, Algorithm 1.
    """
    warmup = step <= freeze_step
    return StepPlan(
        step=step,
        stage=Stage.WARMUP if warmup else Stage.COMPRESSED,
        reduce_grads=warmup,
        update_variance=warmup,
        synchronize=not warmup,
        ends_stage=step == freeze_step,
    )


def variance_interval(step: int, scaler: int) -> int:
    """The interval between variance steps that is in force at ``step`` of 0/1 Adam's variance stage.

    It starts at 1 and doubles after every ``scaler`` variance steps; a step is one where it divides the step.
    Source: 0/1 Adam, arXiv 2202.06009, section 6 (the learning-rate-free policy T_v).
    """
    end, interval = 0, 1
    while True:
        end = (end // interval + scaler) * interval  # the last variance step before the interval doubles
        if step <= end:
            return interval
        interval *= 2


def local_interval(step: int, var_freeze_step: int, scaler: int, clipper: int) -> int:
    """The interval between syncs in force at ``step`` of 0/1 Adam's local-step stage: it doubles, up to a bound."""
    doublings = (step - var_freeze_step - 1) // scaler
    return min(clipper, 1 << min(doublings, clipper.bit_length()))


def zero_one_plan(
    step: int, *, var_freeze_step: int, var_update_scaler: int, local_step_scaler: int, local_step_clipper: int
) -> StepPlan:
    """The schedule of 0/1 Adam (arXiv 2202.06009, Algorithm 1): a variance stage, then a local-step stage."""
    if step <= var_freeze_step:
        learns = step % variance_interval(step, var_update_scaler) == 0
        return StepPlan(step, Stage.VARIANCE, learns, learns, not learns, step == var_freeze_step)
    interval = local_interval(step, var_freeze_step, local_step_scaler, local_step_clipper)
    return StepPlan(step, Stage.LOCAL_STEP, False, False, step % interval == 0, False, agree=False)
