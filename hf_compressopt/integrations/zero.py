"""``zero_stage``: an ordinary optimizer, partitioned by ZeroOptimizer."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.zero.optimizer import ZeroOptimizer
from hf_compressopt.zero.supported import check_optimizer_class


def check_takes_stage(name: str, stage: Any) -> None:
    """Check that a compressed optimizer knows ZeRO; its constructor checks the stage.

    Raises:
        ValueError: If it does not. The message says what to use instead.
    """
    if len(ALGORITHMS[name].zero_stages) > 1:
        return
    raise ValueError(
        f"zero_stage={stage} is not supported with {name}, whose ranks need whole moments. Use onebit_adam with "
        f'zero_stage={stage}, or an ordinary optimizer (--optim zero{stage}_adamw; in a plugin optimizer="none", '
        f"zero_stage={stage})"
    )


def partitioned(optimizer: torch.optim.Optimizer, stage: int, **options: Any) -> torch.optim.Optimizer:
    """Replace a fresh optimizer by a partitioned one, with the same param group objects.

    Raises:
        ValueError: If the optimizer cannot be partitioned, or has taken steps.
    """
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer
    kept_apart = getattr(optimizer, "args", None)  # where bitsandbytes keeps optim_bits
    check_optimizer_class(type(optimizer), vars(kept_apart) if hasattr(kept_apart, "__dict__") else {})
    if any(float(row.get("step", 1)) > 0 for row in optimizer.state.values() if row):  # Adagrad's begins at 0
        raise ValueError(
            f"{type(optimizer).__name__} has taken steps already: prepare it before the first one, so that its state "
            "can be partitioned"
        )
    given = {**vars(optimizer), **optimizer.defaults}
    names = [name for name in inspect.signature(type(optimizer).__init__).parameters if name in given]
    inner = {name: given[name] for name in names if name not in ("self", "params")}
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether it ever steps
    return ZeroOptimizer(optimizer.param_groups, type(optimizer), stage=stage, **options, **inner)
