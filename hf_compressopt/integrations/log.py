"""Log lines of a run: its schedule, its savings, its numbers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from hf_compressopt.announce import totals
from hf_compressopt.checkpoint.io import DEFAULT_PREFIX
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.schedules import AUTO

logger = logging.getLogger(__name__)
_LOGGED = (
    *("stage", "zero_stage", "bytes_sent", "bytes_sent_step", "bytes_sent_in_node", "node_size"),
    *("compression_ratio", "bits_per_parameter", "seconds_communication", "gradient_noise_scale"),
)
_steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of the run, by optimizer


def prefix_of(number: int) -> str:
    """The start of the file names, and of the metrics, of an accelerator's optimizer with this number."""
    return DEFAULT_PREFIX if number == 0 else f"{DEFAULT_PREFIX}_{number}"


def prefixed_metrics(*states: Any) -> dict[str, float]:
    """The metrics of optimizers, or of compressions of gradients, for a log line: ``<prefix>/<name>``."""
    numbered = [(prefix_of(number), state.metrics()) for number, state in enumerate(states)]
    return {
        f"{prefix}/{name}": _rounded(name, metrics[name])
        for prefix, metrics in numbered
        for name in _LOGGED
        if name in metrics
    }


def _rounded(name: str, value: float) -> float:
    """Round a number for people, who read it in a log: bytes to whole ones, the others to three or four digits."""
    if name.startswith("bytes_"):
        return round(value)
    return float(f"{value:.4g}") if name == "gradient_noise_scale" else round(value, 3)


def run_totals(*states: Any) -> dict[str, float]:
    """The bytes of a whole run, and those that DDP would have sent, for its last log line and train_results.json."""
    plain, sent = totals(*states)
    if not sent:
        return {}
    numbers = {"bytes_on_link": round(sent), "bytes_uncompressed": round(plain)}
    return {f"{DEFAULT_PREFIX}/{name}": number for name, number in numbers.items()}


def fit(optimizer: CompressedOptimizer, steps: int) -> None:
    """Fit the optimizer's schedule to a run of ``steps`` steps, if it is open; say if nothing would be compressed."""
    if _steps.get(optimizer) == steps:
        return
    _steps[optimizer] = steps
    optimizer.fit_schedule(steps)
    name = type(optimizer).__name__
    if optimizer.communicator.rank != 0:
        return
    if optimizer.communicator.world_size == 1:
        logger.warning("%s runs on one rank: nothing is sent, so nothing is compressed", name)
    elif optimizer.warmup_bits < 32 or (isinstance(optimizer.freeze_step, int) and optimizer.freeze_step > steps):
        return  # low-bit gradients are compressed too; fit_schedule has warned of a warmup beyond the run
    elif all(optimizer.schedule.expected().plan(step).reduce_grads for step in (max(1, steps - 1), steps)):
        logger.warning(
            "%s compresses nothing in this run: its warmup stage, in full precision, takes all %d steps of the "
            "run, as Trainer or its learning-rate scheduler counts them. Give a smaller freeze_step, or 'auto'",
            name,
            steps,
        )


@dataclass
class SchedulerLength:
    """The run's length that a learning-rate scheduler tells, until it is seen to be stepped with the optimizer."""

    optimizer: CompressedOptimizer
    scheduler: Any
    steps: int  # of the optimizer
    per_step: int  # steps of the scheduler in each
    _begin: tuple[int, int] | None = None  # steps of the optimizer and of the scheduler at the first look

    #: Shorter runs count as so long, so that no warmup stage ends before the second look.
    LEAST: ClassVar[int] = 10

    def fit(self) -> None:
        fit(self.optimizer, max(self.LEAST, self.steps))

    def is_settled(self) -> bool:
        """Look before a backward pass, on all ranks: keep the fitted schedule, or take the length back."""
        done, stepped = self.optimizer.plan.step - 1, self.scheduler.last_epoch
        self._begin = self._begin or (done, stepped)
        taken, is_resumed = done - self._begin[0], self._begin[0] > 0
        kept_up = stepped >= self.per_step * done > 0
        if kept_up or (taken > 1 and stepped - self._begin[1] >= self.per_step * taken):
            self.fit()
            return True
        if is_resumed or taken > 0:
            self.optimizer.forget_length()
            _steps.pop(self.optimizer, None)
        if taken <= is_resumed:
            return False
        if self.optimizer.freeze_step == AUTO and self.optimizer.communicator.rank == 0:
            logger.warning(
                "the learning-rate scheduler, made for %d steps, is not stepped with the optimizer (once an epoch?): "
                "they are not the length of the run, which freeze_step='auto' does not know now: give "
                "CompressOptPlugin(total_steps=...), or total_steps=... to the optimizer; otherwise the variance alone "
                "decides",
                self.steps * self.per_step,
            )
        return True


def scheduler_steps(scheduler: Any) -> int | None:
    """The number of steps that a learning-rate scheduler is made for, or None if it does not tell."""
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
