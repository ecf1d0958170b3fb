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

    @property
    def number(self) -> float:
        """The stage as a number, for logs that take numbers only: 0.0 is the first stage of an algorithm."""
        return 0.0 if self is Stage.WARMUP else 1.0


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
    """

    step: int
    stage: Stage
    reduce_grads: bool
    update_variance: bool
    synchronize: bool
    ends_stage: bool


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
