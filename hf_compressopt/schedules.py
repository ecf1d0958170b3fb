"""Stages and schedules: values that map the number of a step to a plan of the step. No torch.

A step has a number t = 1, 2, ...; a schedule maps t to a :class:`StepPlan`. A plan depends on t and the schedule alone,
so that there is no stage to save, to lose at a resume, or to disagree about between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any, ClassVar, TypeVar

#: The value of a freeze step that the variance finds; see :func:`variance_stability`.
AUTO = "auto"
#: Steps that a variance must have learnt from before "auto" freezes it, unless an option says otherwise. In simulated
#: runs a variance of 80 steps could be frozen, and one of 40 could not.
MIN_FREEZE_STEP = 100
#: A shorter run stays in its warmup stage, if that stage sends low-bit gradients; and so does one that is shorter than
#: what the variance remembers, 1 / (1 - beta2) steps: most of those are fine-tunings, whose gradients shrink.
SHORT_RUN = 300
WINDOW = 1000  # of beta2 = 0.999
#: How many of the longest intervals between syncs of 0/1 Adam a run has at least. A ViT of 400 steps at a constant
#: rate ended 1.2 % above AdamW with intervals of up to 2 steps, and 0.6 % with this (1 step): means of two seeds.
LONGEST_INTERVALS = 400
#: Options of a schedule that states of earlier versions lack.
_LATER_OPTIONS = {"min_freeze_step", "variance_interval"}
_Schedule = TypeVar("_Schedule", bound="Schedule")


class Stage(Enum):
    """The kind of messages that the ranks exchange in a step."""

    WARMUP = "warmup"  # full-precision gradients; the variance is learnt
    COMPRESSED = "compressed"  # 1-bit momentum with error feedback; the variance is frozen between refreshes
    VARIANCE = "variance"  # full-precision gradients if the variance learns in the step, else 1-bit gradients
    LOCAL_STEP = "local-step"  # each rank steps alone; 1-bit updates at syncs; the variance as in COMPRESSED

    @property
    def number(self) -> float:
        """The stage as a number, for logs that take no words: 0.0 for an algorithm's warmup stage, 1.0 for its last."""
        return 0.0 if self in (Stage.WARMUP, Stage.VARIANCE) else 1.0


@dataclass(frozen=True)
class StepPlan:
    step: int  # t >= 1
    stage: Stage
    reduce_grads: bool  # step() expects gradients that are averaged over the ranks; else they must stay local
    update_variance: bool  # the second moment learns from the step
    synchronize: bool  # the schedule has a compressed message in the step
    ends_stage: bool  # the last step of its stage
    agree: bool = True  # the ranks must agree that all gradients are finite; else each rank decides for itself
    refresh_steps: int = 0  # for which a frozen variance learns from gradients beside the message; 0: it does not

    @property
    def is_local_sync(self) -> bool:
        """True if each rank decides for itself in the step, and there is a message at its end."""
        return self.synchronize and not self.agree


@dataclass(frozen=True)
class Schedule:
    """The schedule of 1-bit Adam (arXiv 2102.02888, Algorithm 1) and 1-bit LAMB: warmup up to ``freeze_step``."""

    freeze_share: ClassVar[float] = 0.2  # of a run that the warmup stage takes at most, unless it is given
    low_bit_freeze_share: ClassVar[float] = 0.2  # the same if the warmup stage sends low-bit gradients

    freeze_step: int | str = AUTO  # last step of the warmup stage, or "auto": the variance finds it
    max_freeze_step: int = 100_000  # bound on what "auto" finds; it yields to the next one and to the rate's warmup
    min_freeze_step: int = MIN_FREEZE_STEP
    variance_interval: int = 0  # messages from one refresh of the frozen variance to the next; 0 is no refresh

    def __post_init__(self) -> None:
        for name, value in self.options().items():
            if name == "variance_interval":
                _check_interval(name, value)
                continue
            if name == "freeze_step" and isinstance(value, str):
                if value != AUTO:
                    raise ValueError(f"{name} must be an int >= 1, or 'auto', got {value!r}")
                continue
            auto = f", or {AUTO!r}" if name == "freeze_step" else ""
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int >= 1{auto}, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be >= 1{auto}, got {value}")

    def plan(self, step: int) -> StepPlan:
        warmup = self.is_in_warmup_stage(step)
        return StepPlan(
            step=step,
            stage=Stage.WARMUP if warmup else Stage.COMPRESSED,
            reduce_grads=warmup,
            update_variance=warmup,
            synchronize=not warmup,
            ends_stage=step == self.freeze_step,
            refresh_steps=0 if warmup else self._refresh_steps(step),
        )

    def _refresh_steps(self, step: int, interval: int = 1) -> int:
        """Return for how many steps the variance learns in a step, if there is a message every ``interval`` steps."""
        between = self.variance_interval * interval
        return between if between and step % between == 0 else 0

    def options(self) -> dict[str, Any]:
        """Return the options by name, for headers."""
        return asdict(self)

    @classmethod
    def of(cls: type[_Schedule], options: Any) -> _Schedule:
        """Return the schedule with these options, as :meth:`options` returns them, or an earlier version did."""
        legal = {field.name for field in fields(cls)}
        if isinstance(options, dict):
            options = {"freeze_step" if name == "var_freeze_step" else name: value for name, value in options.items()}
        if not isinstance(options, dict) or not legal - _LATER_OPTIONS <= options.keys() <= legal:
            raise ValueError(f"the state has the schedule {options!r}, this optimizer one of {sorted(legal)}")
        return cls(**options)

    @property
    def last_warmup_step(self) -> int:
        """Last step of the warmup stage; with "auto" the last one that is found if the learning rate has no warmup."""
        if isinstance(self.freeze_step, int):
            return self.freeze_step
        return max(self.max_freeze_step, self.min_freeze_step)

    def is_in_warmup_stage(self, step: int) -> bool:
        return not isinstance(self.freeze_step, int) or step <= self.freeze_step

    def expected(self: _Schedule) -> _Schedule:
        """Return the schedule whose warmup stage ends where "auto" ends it at the latest, without a warmup."""
        return self.frozen_at(self.last_warmup_step)

    def frozen_at(self: _Schedule, step: int | str) -> _Schedule:
        return replace(self, freeze_step=step)

    def is_given(self, given: Collection[str]) -> bool:
        """Return whether the end of the warmup stage is among the options that a user gave, and known."""
        return "freeze_step" in given and self.freeze_step != AUTO

    def fitted(
        self: _Schedule, max_steps: int, given: Collection[str], *, low_bit: bool = False, window: int = WINDOW
    ) -> _Schedule:
        """Fit the schedule to a run of ``max_steps`` steps; the options named in ``given`` keep their values.

        The variance finds the end of the warmup stage within a share of the run. A run of fewer than ``SHORT_RUN`` or
        ``window`` steps, 1 / (1 - beta2), stays in its warmup stage if that sends gradients in a few bits
        (``low_bit``). One of fewer than ``SHORT_RUN`` freezes early if it does not.
        """
        if self.is_given(given):
            return self
        short = max_steps < (max(SHORT_RUN, window) if low_bit else SHORT_RUN)
        share = self.low_bit_freeze_share if low_bit else self.freeze_share
        bounds = {"max_freeze_step": max(1, int(max_steps * share)), "min_freeze_step": MIN_FREEZE_STEP}
        if short and low_bit and "max_freeze_step" not in given:
            bounds = dict.fromkeys(("max_freeze_step", "min_freeze_step"), max_steps + 1)
        elif short and not low_bit:
            bounds["min_freeze_step"] = 1
        chosen = {name: value for name, value in bounds.items() if name not in given}
        return replace(self.frozen_at(AUTO), **chosen)

    def describe(self, max_steps: int, given: Collection[str]) -> str:
        if self.is_given(given):
            return f"of {max_steps} steps, as given"
        if self.last_warmup_step > max_steps:
            return (
                f"the warmup stage takes all {max_steps} steps: in so short a run a frozen variance costs loss, "
                "most of all in fine-tuning; freeze_step=N freezes it all the same"
            )
        return f"freeze_step is found by the variance, at most {self.last_warmup_step} of {max_steps} steps"


def _check_interval(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= 0, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be >= 0, got {value}; 0 keeps the variance as the warmup stage has left it")


@dataclass(frozen=True)
class ZeroOneSchedule(Schedule):
    """The schedule of 0/1 Adam: a variance stage, then a local-step stage.

    Source: 0/1 Adam, arXiv 2202.06009, Algorithm 1 and section 6; ``var_update_scaler`` is its kappa,
    ``local_step_clipper`` its H.
    """

    freeze_share: ClassVar[float] = 0.1

    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16

    def plan(self, step: int) -> StepPlan:
        if self.is_in_warmup_stage(step):
            learns = step % self.learning_interval(step) == 0
            return StepPlan(step, Stage.VARIANCE, learns, learns, not learns, step == self.freeze_step)
        interval = self.local_interval(step)
        refresh = self._refresh_steps(step, interval)
        return StepPlan(
            step, Stage.LOCAL_STEP, False, False, step % interval == 0, False, agree=False, refresh_steps=refresh
        )

    def learning_interval(self, step: int) -> int:
        """Return the interval between variance steps that is in force at a step of the variance stage.

        It starts at 1 and doubles after every ``var_update_scaler`` variance steps (the learning-rate-free policy T_v
        of the paper). A step is a variance step if the interval divides its number.
        """
        end, interval = 0, 1
        while True:
            end = (end // interval + self.var_update_scaler) * interval  # the last one before the interval doubles
            if step <= end:
                return interval
            interval *= 2

    def local_interval(self, step: int) -> int:
        """Return the interval between syncs in force at a step of the local-step stage: it doubles, up to a bound."""
        doublings = (step - self.last_warmup_step - 1) // self.local_step_scaler
        return min(self.local_step_clipper, 1 << min(doublings, self.local_step_clipper.bit_length()))

    def fitted(
        self, max_steps: int, given: Collection[str], *, low_bit: bool = False, window: int = WINDOW
    ) -> ZeroOneSchedule:
        """Freeze the variance within a share of the run, and let it learn from every step until then, unless given.

        The share is 10 % of the run if the variance learns from full-precision gradients, and 20 % if it learns from
        low-bit ones, which cost little. 1-bit gradients under a variance that is still learning cost runs of some
        thousand steps several per cent of their loss, by docs/convergence.md. The interval between syncs doubles
        every 10 %, up to 0.25 % of the run: what local steps cost grows with their share of it.
        """
        papers = type(self)()
        longest = 1 << max(0, (max_steps // LONGEST_INTERVALS).bit_length() - 1)  # a power of 2, as the intervals
        scaled = {
            "var_update_scaler": max(papers.var_update_scaler, max_steps),
            "local_step_scaler": max(1, max_steps // 10),
            "local_step_clipper": min(papers.local_step_clipper, longest),
        }
        chosen = {name: value for name, value in scaled.items() if name not in given}
        return replace(super().fitted(max_steps, given, low_bit=low_bit, window=window), **chosen)

    def describe(self, max_steps: int, given: Collection[str]) -> str:
        names = ("var_update_scaler", "local_step_scaler", "local_step_clipper")
        scaled = (f"{name}={getattr(self, name)}" for name in names)
        return ", ".join([super().describe(max_steps, given), *scaled])


#: Names of options that are others' names of ours.
_OLD_NAMES = {"var_freeze_step": "freeze_step"}


class RunSchedule:
    """The schedule of one run: as it was given or resumed, and fitted to the run's length where it was left open."""

    def __init__(self, schedule: Schedule, given: Collection[str], *, low_bit: bool) -> None:
        self.schedule = schedule
        self.steps: int | None = None  # the run's length, if it is known
        self.choice = ""  # how the length has decided, in words
        self._unfitted = schedule  # as it is while nobody has told the length
        self._given = set(given)  # the options that keep their values
        self._low_bit = low_bit  # the warmup stage sends gradients in a few bits

    def freeze_at(self, step: int | str) -> None:
        """Set the end of the warmup stage."""
        self.schedule = self.schedule.frozen_at(step)

    def scale(self, steps: int, given: Collection[str], *, next_step: int, window: int) -> str:
        """Fit the schedule to a run of so many steps, whatever is known. Returns a description of the choice.

        Raises a RuntimeError if ``next_step`` is after the warmup stage.
        """
        given = {_OLD_NAMES.get(name, name) for name in given}
        if self.schedule.plan(next_step).stage.number and not self.schedule.is_given(given):
            raise RuntimeError(f"the schedule can be chosen in the warmup stage only, this is step {next_step}")
        self.schedule = self.schedule.fitted(steps, given, low_bit=self._low_bit, window=window)
        return self.schedule.describe(steps, given)

    def defer(self, given: Collection[str]) -> None:
        """Leave the schedule open until :meth:`fit`, but for the options named in ``given``."""
        self._given = {_OLD_NAMES.get(name, name) for name in given}
        self.steps = None

    def fit(self, steps: int, *, next_step: int, window: int) -> str:
        """Fit what is open to a run of so many steps. Returns a description of the choice; "" if nothing changed."""
        self.steps = steps
        before = self.schedule
        self.choice = self.scale(steps, self._given, next_step=next_step, window=window)
        if self.schedule.is_given(self._given) and self.schedule == before:
            self.choice = ""
        return self.choice

    def forget_length(self) -> None:
        """Take back what :meth:`fit` was told."""
        self.schedule = self._unfitted
        self.steps = None
        self.choice = ""

    def resume(self, saved: Schedule, *, next_step: int) -> None:
        """Take over the schedule of a saved state; one that is still open is fitted to this run already."""
        saved = replace(saved, variance_interval=self.schedule.variance_interval)  # which belongs to no stage
        is_open = self.steps is not None and not saved.plan(next_step).stage.number
        if not (is_open and saved.freeze_step == self.schedule.freeze_step):
            self.schedule = saved


@dataclass(frozen=True)
class Warmup:
    """The warmup of the learning rate, as the rates so far tell: it lasts until the highest of them.

    A variance that is frozen where the warmup ends knows nothing of the gradients at the full rate: in simulated runs
    that cost up to 17 % of the loss.
    """

    rate: float = 0.0  # the highest so far
    step: int = 0  # the first step that had it; 0 if it was before the first step that is known

    def after(self, step: int, rate: float) -> Warmup:
        return Warmup(rate, step) if rate > self.rate else self

    def is_over(self, step: int, window: int) -> bool:
        """Return whether as many steps had the full rate as the warmup took or the variance remembers: two at least."""
        at_full_rate = step - self.step + 1
        return self.step <= 1 or (at_full_rate > 1 and at_full_rate >= min(self.step - 1, window))


def variance_stability(history: Any, step: int, last_step: int, lr: float, norm: Callable[[], float]) -> float:
    """Return how stable the variance is after a step (1-bit Adam, arXiv 2102.02888, section 4.3), and record the step.

    With a the 1-norm of the bias-corrected second moment now, and b the same D = 1/(1 - beta2) steps ago, that is
    min(a/b, b/a); 0 if it is not known yet, or the learning rate rises. ``norm`` is asked for a only where it is ever
    compared, up to ``last_step``. ``history``, such as a 1-D float64 tensor on the CPU, has D norms, in a ring, and the
    last learning rate behind them.
    """
    window = len(history) - 1
    before, last_lr = float(history[step % window]), float(history[window])
    compared = step <= last_step and (step > window or step + window <= last_step)
    now = norm() if compared else 0.0
    history[step % window], history[window] = now, lr
    known = step > window and min(before, now) > 0 and math.isfinite(now)
    return min(now / before, before / now) if known and lr <= last_lr else 0.0


def carry_history(before: Any, history: Any, step: int) -> None:
    """Copy the norms of the last steps up to ``step`` into a history of another length, and the last learning rate."""
    old_window, window = len(before) - 1, len(history) - 1
    for recent in range(max(1, step - min(old_window, window) + 1), step + 1):
        history[recent % window] = before[recent % old_window]
    history[window] = before[old_window]
