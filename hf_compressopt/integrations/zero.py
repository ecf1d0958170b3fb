"""``zero_stage``: an ordinary optimizer by its own name, partitioned."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch

from hf_compressopt.integrations.options import parse_options, text_options
from hf_compressopt.zero.optimizer import ZeroOptimizer
from hf_compressopt.zero.options import check_optimizer_class

#: Names of Trainer's own, with their stage; any other optimizer takes zero_stage in its optim_args.
ZERO_NAMES = {"zero1_adamw": 1, "zero2_adamw": 2}


def refuse_zero_stage(name: str, stage: Any) -> NoReturn:
    """Tell what to use in the place of a compressed optimizer with ZeRO.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"zero_stage={stage} cannot be had with {name}: its error feedback needs whole buckets on every rank; use "
        f"{name} without zero_stage, or an ordinary optimizer with it (--optim zero{stage}_adamw; in a plugin "
        f'optimizer="none", zero_stage={stage})'
    )


def partitioned(optimizer: torch.optim.Optimizer, stage: int, **options: Any) -> torch.optim.Optimizer:
    """The partitioned optimizer in the place of a fresh one. The param groups are the same objects.

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


def zero_options(text: str | None, stage: int | None = None) -> tuple[dict[str, Any], str]:
    """Take ZeroOptimizer's options out of optim_args.

    Args:
        text: The optim_args.
        stage: The stage that the optimizer's name says; with None ``zero_stage`` in the text does, or there is no ZeRO.

    Returns:
        The options, none where there is no ZeRO; and the rest of the text.

    Raises:
        ValueError: For a value of a wrong type, text that is no list of name=value, or two stages.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    names = [part.partition("=")[0].strip() for part in parts]
    if "zero_stage" not in names and stage is None:
        return {}, text or ""
    legal = text_options(ZeroOptimizer)
    mine = [part for part, name in zip(parts, names, strict=True) if name in legal and name != "stage"]
    rest = [part for part, name in zip(parts, names, strict=True) if name not in legal and name != "zero_stage"]
    stages = [
        part.replace("zero_stage", "stage", 1) for part, name in zip(parts, names, strict=True) if name == "zero_stage"
    ]
    if stage is not None and stages:
        raise ValueError(f"optim_args: zero_stage is part of the optimizer's name (zero{stage}_adamw): leave it out")
    options = parse_options(ZeroOptimizer, ",".join(stages + mine))
    return {"stage": stage, **options}, ",".join(rest)
