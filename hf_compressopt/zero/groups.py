"""Param groups before there is an optimizer of them, and the optimizers that had their parameters before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from hf_compressopt.zero.hooks import reducers_of

logger = logging.getLogger(__name__)


class ParamGroups(torch.optim.Optimizer):
    """Param groups as torch makes them of parameters, named parameters or groups, before there is an optimizer."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: there is no optimizer."""


def detach_earlier(groups: Sequence[dict[str, Any]]) -> None:
    """Detach living ZeroOptimizers of these parameters: each gradient goes to one of them only."""
    earlier = reducers_of(param for group in groups for param in group["params"])
    for reducer in earlier:
        reducer.detach()
    if earlier:
        logger.warning(
            "%d earlier ZeroOptimizer(s) of some of these parameters are still alive: they get no more gradients, and "
            "their step() raises an error",
            len(earlier),
        )
