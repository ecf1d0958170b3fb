"""Gradients that are each rank's own: clipping and overflows, decided by all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.optim.consensus import Consensus
from hf_compressopt.optim.early_messages import EarlyMessages
from hf_compressopt.optim.logs import write_log
from hf_compressopt.optim.warmup_gradients import WarmupGradients
from hf_compressopt.schedules import StepPlan

logger = logging.getLogger(__name__)


class LocalGradients:
    """Mixin of an optimizer whose gradients stay local in some stages."""

    _consensus: Consensus
    early_messages: EarlyMessages
    communicator: Communicator
    warmup_gradients: WarmupGradients
    traffic: Traffic
    step_was_skipped: bool
    skipped_steps: int

    @property
    def plan(self) -> StepPlan:
        """Plan of the coming step."""
        raise NotImplementedError("abstract")

    def _compare_bytes(self, plan: StepPlan) -> None:
        """Warn if a step sends more than it should."""
        raise NotImplementedError("abstract")

    def _begin_step(self) -> StepPlan:
        """Return the plan of the coming step, after the checks before it."""
        raise NotImplementedError("abstract")

    @property
    def local_gradients(self) -> bool:
        """True if some gradients of the coming step are this rank's own, so that ranks must agree on their norm."""
        return self._consensus.are_local(self.plan)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Clip the gradients of the coming step, by the same factor on every rank. All ranks call.

        Averaged gradients are clipped by their norm. Local ones by an estimate of the norm of their average; with
        clip="local" by sqrt(mean over ranks of their squared norms), an upper bound of that norm, at most sqrt(W)
        larger. Gradients whose messages have left during backward (clip="late") are only measured.

        Args:
            max_norm: The norm to clip to; ``math.inf`` only measures.
            parameters: Clip these, which may be any; all parameters of the optimizer if None.

        Returns:
            [] float32, the norm before clipping.

        Raises:
            ValueError: If ``max_norm`` is not positive, and if the ranks differ in what must be alike.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {max_norm}")
        return self._consensus.clip_(self._begin_step(), max_norm, parameters).float()

    def skip_step(self) -> None:
        """Close a step that is not taken, because a gradient is not finite: also for a gradient scaler to call."""
        self.skipped_steps += 1
        end_step(self, self.plan, taken=False)
        if self.communicator.rank == 0:
            write_log(logger, logging.WARNING, "step %d skipped: a gradient is not finite", self.plan.step)

    def join_hook(self, **_: Any) -> Any:
        """Refuse torch's Join context, in which ranks that run out of inputs leave steps to the others.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__} does not support uneven inputs (torch's Join, Accelerate's join_uneven_inputs): "
            "all ranks take every step together. Give all as many batches: drop_last=True in the DataLoader, or "
            "even_batches=True in Accelerate"
        )


def end_step(optimizer: LocalGradients, plan: StepPlan, *, taken: bool) -> None:
    """Close a step of an optimizer, which was taken or skipped."""
    optimizer.step_was_skipped = not taken
    optimizer._consensus.end_step()
    optimizer.early_messages.end_step(taken=taken)
    optimizer.warmup_gradients.end_step(plan)
    optimizer.traffic.end_step(local=not plan.agree)
    if taken:
        optimizer._compare_bytes(plan)
