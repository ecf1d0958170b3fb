"""What the three share: a first stage that ends when the variance is frozen, at a step that is given or found."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.optim.compressed import CompressedOptimizer
from hf_compressopt.optim.functional import sum_of
from hf_compressopt.optim.logs import write_log
from hf_compressopt.optim.options import check_count
from hf_compressopt.stages import StepPlan, onebit_plan

logger = logging.getLogger(__name__)

AUTO = "auto"
_HISTORY = "freeze_history"


class FreezingOptimizer(CompressedOptimizer):
    """A compressed optimizer whose first stage ends for good when the variance is frozen.

    With ``freeze_step="auto"`` the variance decides (1-bit Adam, arXiv 2102.02888, section 4.3): with a the 1-norm of
    the bias-corrected second moment now and b the same D = 1/(1 - beta2) steps ago, warmup ends at the first step at
    which the learning rate rises no more and min(a/b, b/a) >= ``freeze_threshold``; at the latest at
    ``max_freeze_step``. Ranks decide alike, since a is averaged over them.

    Args:
        params: See :class:`~hf_compressopt.optim.compressed.CompressedOptimizer`.
        lr: Likewise.
        freeze_step: Last step of the warmup stage, >= 1, or "auto".
        freeze_threshold: How stable the variance must be for "auto", in (0, 1].
        max_freeze_step: Bound on what "auto" finds, >= 1.
        **options: See :class:`~hf_compressopt.optim.compressed.CompressedOptimizer`.
    """

    #: What users call ``freeze_step``, and the share of a run that it takes, or is bounded by, where it is not given.
    freeze_option, freeze_share = "freeze_step", 0.2

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        freeze_step: int | str = 100_000,
        freeze_threshold: float = 0.96,
        max_freeze_step: int = 100_000,
        **options: Any,
    ) -> None:
        """See the class."""
        self._check_schedule({self.freeze_option: freeze_step, "max_freeze_step": max_freeze_step})
        if not 0 < freeze_threshold <= 1:
            raise ValueError(f"freeze_threshold must be in (0, 1], got {freeze_threshold}")
        self.freeze_step, self.freeze_threshold, self.max_freeze_step = freeze_step, freeze_threshold, max_freeze_step
        super().__init__(params, lr, **options)
        if freeze_step == AUTO:
            self._make_history()

    def _make_history(self) -> None:
        """One 1-norm for each of the last D steps, in a ring, and the last learning rate behind them."""
        window = round(1 / (1 - self.param_groups[0]["betas"][1]))
        self._tensors[_HISTORY] = torch.zeros(min(window, self.max_freeze_step) + 1, dtype=torch.float64, device="cpu")

    @property
    def last_warmup_step(self) -> int:
        """``freeze_step`` where it is known, else its bound."""
        return self.freeze_step if isinstance(self.freeze_step, int) else self.max_freeze_step

    def plan_at(self, step: int) -> StepPlan:
        """Warmup up to and including ``freeze_step``, compressed after it."""
        return onebit_plan(step, self.last_warmup_step)

    def _stage_ends(self, plan: StepPlan) -> bool:
        if self.freeze_step != AUTO:
            return plan.ends_stage
        stability = self._stability(plan.step)
        if stability < self.freeze_threshold and not plan.ends_stage:
            return False
        self.freeze_step = plan.step
        if self.communicator.rank == 0:
            why = f"stability {stability:.3f}" if stability >= self.freeze_threshold else "its bound, max_freeze_step"
            write_log(logger, logging.INFO, "%s=auto: found %d (%s)", self.freeze_option, plan.step, why)
        return True

    def _stability(self, step: int) -> float:
        """How alike the variance is to that of D steps ago: min(a/b, b/a); 0 while that cannot be told."""
        history = self._tensors[_HISTORY]
        window = history.numel() - 1
        lr, last_lr = float(self.param_groups[0]["lr"]), float(history[window])
        before, now = float(history[step % window]), 0.0
        if step > window or step + window <= self.max_freeze_step:  # else nobody ever compares it
            now = self._variance_norm()
        history[step % window], history[window] = now, lr
        known = step > window and min(before, now) > 0 and math.isfinite(now)
        return min(now / before, before / now) if known and lr <= last_lr else 0.0

    def _variance_norm(self) -> float:
        """1-norm of the bias-corrected second moments, averaged over the ranks so that all know the same number."""
        norm = torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        for group, state in zip(self.param_groups, self._states, strict=True):
            count = max(self._bias_counts(state)[1], default=0.0) if state.compressed else 0.0
            if count > 0:
                correction = 1 - group["betas"][1] ** count if group["bias_correction"] else 1.0
                norm += sum_of(state.exp_avg_sq) / correction
        norm /= self.communicator.world_size
        self.communicator.all_reduce(norm).wait()
        return float(norm)

    def _schedule_options(self) -> dict[str, Any]:
        return {self.freeze_option: self.freeze_step, "max_freeze_step": self.max_freeze_step}

    def _check_schedule(self, options: dict[str, Any]) -> None:
        freeze_step = options[self.freeze_option]
        if isinstance(freeze_step, str) and freeze_step != AUTO:
            raise ValueError(f"{self.freeze_option} must be an int >= 1, or 'auto', got {freeze_step!r}")
        if freeze_step != AUTO:
            check_count(self.freeze_option, freeze_step)
        check_count("max_freeze_step", options["max_freeze_step"])

    def _check_tensors(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        rest = dict(tensors)
        history = rest.pop(_HISTORY, None)
        super()._check_tensors(rest, header)
        if history is None and header["schedule"][self.freeze_option] == AUTO:
            raise ValueError(f"{self.freeze_option} is 'auto', and there is no {_HISTORY!r}")
        if history is not None and (history.dtype != torch.float64 or history.dim() != 1 or history.numel() < 2):
            raise ValueError(f"{_HISTORY!r} must be float64 [2 or more], got {history.dtype} {list(history.shape)}")

    def _set_schedule_options(self, options: dict[str, Any]) -> None:
        self.freeze_step, self.max_freeze_step = options[self.freeze_option], options["max_freeze_step"]

    def _plain_header(self, step: int) -> dict[str, Any]:
        """As the base class's; where the first stage should have ended by then, it ends with the coming step."""
        header = super()._plain_header(step)
        if step >= self.last_warmup_step:
            header["schedule"] = {**header["schedule"], self.freeze_option: step + 1}
        return header

    def scale_schedule(self, max_steps: int, given: Iterable[str]) -> str:
        """Let the variance find ``freeze_step`` within a share of the run, unless it is given.

        Raises:
            RuntimeError: After the first step.
        """
        given = set(given)
        if self.freeze_option in given and self.freeze_step != AUTO:
            return f"of {max_steps} steps, as given"
        if self._step > 0:
            raise RuntimeError(f"the schedule can be chosen before the first step only, this is step {self._step + 1}")
        self.freeze_step = AUTO
        if "max_freeze_step" not in given:
            self.max_freeze_step = max(1, int(max_steps * self.freeze_share))
        self._make_history()
        return f"{self.freeze_option} is found by the variance, at most {self.max_freeze_step} of {max_steps} steps"
