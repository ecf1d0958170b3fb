"""Gradients that are each rank's own: clipping and overflows, decided by all ranks together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.optim.consensus import Consensus
from hf_compressopt.schedules import StepPlan


class LocalGradients:
    """Mixin of an optimizer whose gradients stay local in some stages."""

    _consensus: Consensus

    @property
    def plan(self) -> StepPlan:
        """Plan of the coming step."""
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
        larger.

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
