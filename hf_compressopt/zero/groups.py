"""Param groups before there is an optimizer of them."""

from __future__ import annotations

from typing import Any

import torch


class ParamGroups(torch.optim.Optimizer):
    """Param groups as torch makes them of parameters, named parameters or groups, before there is an optimizer."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: there is no optimizer."""
