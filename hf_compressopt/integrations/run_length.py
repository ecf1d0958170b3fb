"""The length of a run, by its learning-rate scheduler, and the warnings that follow from it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from hf_compressopt.integrations.capabilities import FollowsPlan

logger = logging.getLogger(__name__)
_steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of the run, by optimizer
_fits: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # the schedule that was chosen for it, in words


def fit(optimizer: FollowsPlan, steps: int) -> None:
    """Fit the optimizer's schedule to a run of ``steps`` steps, if it is open; say if nothing would be compressed."""
    if _steps.get(optimizer) != steps:
        _steps[optimizer], _fits[optimizer] = steps, optimizer.fit_schedule(steps)
        warn_if_nothing_is_compressed(optimizer, steps)


def is_fitted(optimizer: FollowsPlan) -> bool:
    """True if the length of the optimizer's run is known."""
    return optimizer in _steps


def describe_schedule(optimizer: FollowsPlan) -> str:
    """Say how the schedule was chosen, and with which step the next stage begins."""
    schedule, steps = optimizer.schedule, _steps.get(optimizer)
    last = schedule.last_warmup_step
    latest = "" if isinstance(schedule.freeze_step, int) else " at the latest"
    begins = "" if steps is not None and last >= steps else f"compressed from step {last + 1}{latest}"
    return "; ".join(filter(None, [_fits.get(optimizer, ""), begins]))


def scheduler_steps(scheduler: Any) -> int | None:
    """The number of steps that a learning-rate scheduler is made for, or None if it does not tell.

    It tells for those of ``transformers.get_scheduler`` and for torch's OneCycleLR, CosineAnnealingLR, PolynomialLR,
    and a SequentialLR that ends with one of them.
    """
    for function in getattr(scheduler, "lr_lambdas", ()):  # transformers'
        if isinstance(function, partial) and (steps := _count(function.keywords.get("num_training_steps"))):
            return steps
    if milestones := getattr(scheduler, "_milestones", None):
        last = scheduler_steps(scheduler._schedulers[-1])
        return None if last is None else milestones[-1] + last
    name = {"OneCycleLR": "total_steps", "CosineAnnealingLR": "T_max", "PolynomialLR": "total_iters"}
    return _count(getattr(scheduler, name.get(type(scheduler).__name__, ""), None))


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value >= 1 else None


def warn_if_nothing_is_compressed(optimizer: FollowsPlan, steps: int) -> None:
    """Warn, on rank 0, if a run of ``steps`` steps sends no compressed message.

    Args:
        optimizer: The optimizer, with its schedule.
        steps: Optimizer steps of the whole run.
    """
    name = type(optimizer).__name__
    if optimizer.communicator.rank != 0:
        return
    if optimizer.communicator.world_size == 1:
        logger.warning("%s runs on one rank: nothing is sent, so nothing is compressed", name)
    elif optimizer.warmup_bits < 32:
        return  # low-bit gradients are compressed too
    elif all(optimizer.schedule.expected().plan(step).reduce_grads for step in (max(1, steps - 1), steps)):
        logger.warning(
            "%s compresses nothing in this run: its first stage, in full precision, takes all %d steps of the "
            "run, as Trainer or its learning-rate scheduler counts them. Give a smaller freeze_step, or 'auto'",
            name,
            steps,
        )
