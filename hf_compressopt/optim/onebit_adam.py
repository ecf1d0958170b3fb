"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888).

With g_r the gradient of rank r, g their mean, and t the step:

Warmup stage, t <= freeze_step (AdamW, arXiv 1711.05101):
    m = b1 m + (1 - b1) g                                                                   (1)
    v = b2 v + (1 - b2) g^2                                                                 (2)
    p <- p (1 - lr wd) - lr m^ / (sqrt(v^) + eps)                                           (3)
At the end of step freeze_step, once: m <- m^, v <- v^; in each tensor v <- max(v, variance_floor mean(v)).
Compressed stage, t > freeze_step:
    m_r = b1 m + (1 - b1) g_r                                                               (4)
    m = compressed_all_reduce(m_r), times exp_avg_mask where there is one                   (5)
    p <- p (1 - lr wd) - lr m / (sqrt(v) + eps)                                             (6)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.flat import Bucket
from hf_compressopt.optim.compressed import CompressedOptimizer
from hf_compressopt.optim.functional import denominator
from hf_compressopt.optim.group_state import GroupState
from hf_compressopt.optim.options import check_count
from hf_compressopt.stages import StepPlan, onebit_plan


class OnebitAdam(CompressedOptimizer):
    """Adam whose momentum crosses the network as signs, after a warmup stage in full precision.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer. Param-group keys beyond the
            options below: ``exp_avg_mask`` (a tensor that broadcasts to each parameter of the group; the momentum is
            multiplied with it after every compressed message) and ``non_freeze`` (True keeps the group in the warmup
            stage for good).
        lr: Learning rate.
        freeze_step: Last step of the warmup stage, >= 1. Papers use 15-25 % of all steps.
        **options: See :class:`~hf_compressopt.optim.compressed.CompressedOptimizer`.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters that no option can make work.
    """

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, *, freeze_step: int = 100_000, **options: Any) -> None:
        """See the class."""
        check_count("freeze_step", freeze_step)
        self.freeze_step = freeze_step
        super().__init__(params, lr, **options)

    def plan_at(self, step: int) -> StepPlan:
        """Warmup up to and including ``freeze_step``, compressed after it."""
        return onebit_plan(step, self.freeze_step)

    def _prepare(self, group: dict[str, Any], state: GroupState, bucket: Bucket, grads: list[Tensor | None]) -> Tensor:
        beta1, _ = group["betas"]
        message = state.exp_avg[bucket.start : bucket.stop].mul_(beta1)  # the momentum itself, so (5) is done in place
        for piece in bucket.pieces:
            if (grad := grads[piece.index]) is not None:  # (4); no gradient is a gradient of zero
                part = state.exp_avg[piece.offset : piece.offset + piece.stop - piece.start]
                part.add_(grad.reshape(-1)[piece.start : piece.stop], alpha=1 - beta1)
        return message

    def _apply(self, group: dict[str, Any], state: GroupState, bucket: Bucket, message: Tensor) -> None:
        variance = state.exp_avg_sq[bucket.start : bucket.stop]
        direction = denominator(variance, group["eps"], group["eps_inside_sqrt"])
        torch.div(message, direction, out=direction)  # (6)
        state.apply_direction_(bucket, direction, float(group["lr"]), group["weight_decay"])

    def _schedule_options(self) -> dict[str, Any]:
        return {"freeze_step": self.freeze_step}

    def _set_schedule_options(self, options: dict[str, Any]) -> None:
        self.freeze_step = options["freeze_step"]

    def scale_schedule(self, max_steps: int, given: Iterable[str]) -> str:
        """Freeze after 20 % of the run, unless ``freeze_step`` is given."""
        if "freeze_step" in given:
            return f"freeze_step={self.freeze_step}, as given, of {max_steps} steps"
        if self._step > 0:
            raise RuntimeError(f"the schedule can be chosen before the first step only, this is step {self._step}")
        self.freeze_step = max(1, max_steps // 5)
        return f"freeze_step={self.freeze_step}, 20 % of {max_steps} steps (none was given)"
