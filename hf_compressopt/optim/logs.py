"""Log lines from inside a step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

from hf_compressopt.optim.group_state import GroupState
from hf_compressopt.schedules import StepPlan

logger = logging.getLogger(__name__)


def write_log(logger: logging.Logger, level: int, message: str, *args: object) -> None:
    """Log a line; a handler that fails, such as one that writes to a closed stderr, does not stop the step.

    An error on one rank in the middle of a step would leave the other ranks waiting.
    """
    with suppress(Exception):
        logger.log(level, message, *args)


def report_switch(plan: StepPlan, states: Iterable[GroupState], world_size: int, sent: str, norm: str) -> None:
    """Log the end of the first stage, and warn of parameters that do not move after it.

    Args:
        plan: Plan of the last step of the stage.
        states: The param groups.
        world_size: The number of ranks.
        sent: Name of the values that are sent after the switch.
        norm: Name of the norm that clipping reports after the switch.
    """
    message = "step %d: %s ends, the variance is frozen; "
    if world_size > 1:
        message += f"from here on gradients stay local, {sent} is sent as signs, and a reported grad_norm is {norm}"
    else:
        message += "with one rank nothing is sent, and so nothing is compressed"
    write_log(logger, logging.INFO, message, plan.step, plan.stage.value)
    names = [name for state in states for name, still in zip(state.labels, state.still, strict=True) if still]
    if names:
        write_log(
            logger,
            logging.WARNING,
            "%d parameter(s) have no variance after the warmup stage and are not updated any more, since their "
            "averaged gradients were 0 in all its steps: %s%s (for such parameters use a later freeze_step, or a group "
            "with non_freeze=True)",
            len(names),
            ", ".join(names[:8]),
            ", ..." if len(names) > 8 else "",
        )
