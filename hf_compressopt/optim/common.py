"""Steps that all optimizers share."""

from __future__ import annotations

from collections.abc import Callable

import torch


def evaluate(closure: Callable[[], float] | None) -> float | None:
    """Evaluate the closure of ``step(closure)`` with gradients enabled, and return its loss; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
