"""Numbers and words about a compressed optimizer, for logs."""

from __future__ import annotations

from collections.abc import Sequence

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.flat import FLOAT_BYTES
from hf_compressopt.optim.group_state import GroupState
from hf_compressopt.schedules import Schedule, StepPlan


def numbers_of(plan: StepPlan, states: Sequence[GroupState], traffic: Traffic) -> dict[str, float]:
    """Return the numbers of the last step, and of the run so far, that its plan and its traffic tell.

    Args:
        plan: Plan of the last step.
        states: The param groups.
        traffic: Bytes and seconds so far.
    """
    full = sum(2 * (1 - 1 / s.communicator.world_size) * FLOAT_BYTES * s.layout.numel for s in states)
    sent = traffic.step_bytes
    return {
        "stage": plan.stage.number,
        "bytes_sent_step": float(sent),
        "bytes_sent": float(traffic.total_bytes),
        "compression_ratio": full / sent if sent > 0 and not plan.reduce_grads else 1.0,
        "seconds_all_to_all": traffic.seconds["all_to_all"],
        "seconds_all_gather": traffic.seconds["all_gather"],
        "seconds_communication": traffic.total_seconds,
    }


def describe(
    name: str,
    states: Sequence[GroupState],
    schedule: Schedule,
    communicator: Communicator,
    scale_block: int | None,
) -> str:
    """Return one line for the log: class, size, schedule, ranks, kernels."""
    options = ", ".join(f"{key}={value}" for key, value in schedule.options().items())
    numel = sum(state.layout.numel for state in states)
    return (
        f"{name}, {numel:,} parameters, {options}; {communicator.world_size} rank(s) over {communicator.name}, "
        f"scale_block={scale_block}, kernels: {kernels.implementation(communicator.device)}"
    )
