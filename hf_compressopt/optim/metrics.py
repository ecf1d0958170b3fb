"""Numbers and words about a compressed optimizer, for logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.flat import FLOAT_BYTES
from hf_compressopt.kernels import IntegerFormat
from hf_compressopt.optim.consensus import Consensus
from hf_compressopt.optim.group_state import GroupState
from hf_compressopt.optim.logs import write_log
from hf_compressopt.optim.warmup_gradients import WarmupGradients
from hf_compressopt.schedules import Schedule, StepPlan

logger = logging.getLogger(__name__)

#: How many times fewer bytes gradients in 4 bits take than in full precision.
FOUR_BITS_RATIO = 4096 * FLOAT_BYTES / IntegerFormat(4).nbytes(4096)


class Measured:
    """Mixin of an optimizer that tells what it does.

    Attributes:
        warmup_gradients: The form of the averaged gradients of the first stage.
    """

    warmup_gradients: WarmupGradients
    communicator: Communicator
    traffic: Traffic
    schedule: Schedule
    scale_block: int | None
    zero_stage: int
    skipped_steps: int
    rounds: int
    _consensus: Consensus
    _states: list[GroupState]
    _step: int
    _bytes_compared = False

    @property
    def last_plan(self) -> StepPlan:
        """Plan of the last step."""
        raise NotImplementedError("abstract")

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step and of the run so far, of this rank.

        Returns:
            ``stage`` (0.0 is the first stage), ``step``, ``skipped_steps``, ``rounds`` (steps in which the schedule has
            gradients averaged or a message sent); ``bytes_sent_step`` and ``bytes_sent`` (by this rank; without the
            traffic of a plain loop that averages gradients itself, and in two levels to other nodes only:
            ``bytes_sent_in_node`` has the rest; of 0/1 Adam's steps the mean over the last sync and the local steps
            before it); ``compression_ratio`` (bytes of a float32 ring all-reduce over ``bytes_sent_step``; in two
            levels both on the link of a node); ``seconds_all_to_all``,
            ``seconds_all_gather`` and ``seconds_communication`` (host seconds blocked so far); and, once local
            gradients were clipped by clip="sketch", ``gradient_noise_scale``, in batches of one rank (see
            :mod:`~hf_compressopt.optim.gradient_noise`).
        """
        counts: dict[str, float] = {"step": self._step, "skipped_steps": self.skipped_steps, "rounds": self.rounds}
        in_full = self.last_plan.reduce_grads and not self.warmup_gradients.in_use
        numbers = numbers_of(self.last_plan, self._states, self.traffic, in_full=in_full)
        noise = self._consensus.noise.scale
        counts |= {} if noise is None else {"gradient_noise_scale": noise}
        return {**numbers, **{name: float(value) for name, value in counts.items()}}

    def _compare_bytes(self, plan: StepPlan) -> None:
        """Warn, once, if a step of the last stage sends more than gradients in 4 bits would."""
        if self._bytes_compared or not (plan.stage.number and plan.synchronize) or self.communicator.rank != 0:
            return
        self._bytes_compared = True
        numbers = self.metrics()
        if numbers["bytes_sent_step"] > 0 and numbers["compression_ratio"] < FOUR_BITS_RATIO:
            write_log(
                logger,
                logging.WARNING,
                "a step sends %.0f bytes, full precision only %.1f times as many, and gradients in 4 bits %.1f times "
                "fewer than full precision: the model has too few parameters (%d) for what messages carry beside "
                "signs, or scale_block=%s is too small. Use an ordinary optimizer with grad_compression='int4', or a "
                "larger scale_block",
                numbers["bytes_sent_step"],
                numbers["compression_ratio"],
                FOUR_BITS_RATIO,
                sum(state.layout.numel for state in self._states),
                self.scale_block,
            )

    def describe(self) -> str:
        """Return one line for the log: class, size, schedule, ranks, kernels."""
        bounds = ("max_freeze_step", "min_freeze_step")
        options = {name: value for name, value in self.schedule.options().items() if name not in bounds}
        options["warmup_bits"] = self.warmup_gradients.bits
        options |= {"zero_stage": self.zero_stage} if self.zero_stage else {}
        return describe(type(self).__name__, self._states, options, self.communicator, self.scale_block)


def numbers_of(plan: StepPlan, states: Sequence[GroupState], traffic: Traffic, *, in_full: bool) -> dict[str, float]:
    """Return the numbers of the last step, and of the run so far, that its plan and its traffic tell.

    Args:
        plan: Plan of the last step.
        states: The param groups.
        traffic: Bytes and seconds so far.
        in_full: Whether the gradients of the last step were averaged in full precision.
    """
    full = sum(2 * (1 - 1 / s.communicator.world_size) * FLOAT_BYTES * s.layout.numel for s in states)
    sent = traffic.round_bytes / max(1, traffic.round_steps)
    on_link = sent * max((s.communicator.topology.node_size for s in states), default=1)  # all ranks of the node
    inside = sum(traffic.node_bytes.values())
    return {
        **({"bytes_sent_in_node": float(inside)} if inside else {}),
        "stage": plan.stage.number,
        "bytes_sent_step": sent,
        "bytes_sent": float(traffic.total_bytes),
        "compression_ratio": full / on_link if sent > 0 and not in_full else 1.0,
        "seconds_all_to_all": traffic.seconds["all_to_all"],
        "seconds_all_gather": traffic.seconds["all_gather"],
        "seconds_communication": traffic.total_seconds,
    }


def describe(
    name: str,
    states: Sequence[GroupState],
    options: Mapping[str, Any],
    communicator: Communicator,
    scale_block: int | None,
) -> str:
    """Return one line for the log: class, size, options, ranks, kernels."""
    chosen = ", ".join(f"{key}={value}" for key, value in options.items())
    numel = sum(state.layout.numel for state in states)
    nodes = "" if communicator.levels is None else f" in two levels, {communicator.topology.nodes} node(s)"
    return (
        f"{name}, {numel:,} parameters, {chosen}; {communicator.world_size} rank(s) over {communicator.name}{nodes}, "
        f"scale_block={scale_block}, kernels: {kernels.implementation(communicator.device)}"
    )
