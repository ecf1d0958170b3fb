"""Checks of the options that all compressed optimizers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_compressopt.kernels import INTEGER_BITS
from hf_compressopt.optim.compact import STATES
from hf_compressopt.optim.options import check_at_least, check_scale_block


def check_family_options(
    *,
    max_grad_norm: float,
    variance_floor: float,
    freeze_threshold: float,
    scale_block: Any,
    state: str,
    clip: str,
    clips: Sequence[str],
    amsgrad: bool,
) -> None:
    """Check options; ``clips`` are the values of ``clip`` that are legal for the optimizer.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
    """
    for name, value in (("max_grad_norm", max_grad_norm), ("variance_floor", variance_floor)):
        check_at_least(name, value, 0)
    check_scale_block(scale_block)
    if state not in STATES:
        raise ValueError(f"state must be one of {list(STATES)}, got {state!r}")
    if amsgrad:
        raise ValueError("amsgrad must be False, got True: its running maximum has no meaning once v is frozen")
    if clip not in clips:
        only = ", which only OnebitAdam has" if clip == "late" else ""
        raise ValueError(f"clip must be one of {list(clips)}, got {clip!r}{only}")
    if not 0 < freeze_threshold <= 1:
        raise ValueError(f"freeze_threshold must be in (0, 1], got {freeze_threshold}")


def check_zero_stage(
    stage: Any, name: str, stages: Sequence[int], warmup_bits: int, state: str, clip: str = "sketch"
) -> None:
    """Check ``zero_stage``, and what it needs.

    Args:
        stage: The value.
        name: Name of the optimizer.
        stages: Values that are legal for the optimizer.
        warmup_bits: The option.
        state: The option.
        clip: The option.

    Raises:
        TypeError: If it is no int.
        ValueError: If it is not legal; the message says what is.
    """
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise TypeError(f"zero_stage must be an int, one of {list(stages)}, got {stage!r}")
    if stage and tuple(stages) == (0,):
        raise ValueError(
            f"zero_stage={stage} is not supported with {name}, whose ranks need whole moments: use OnebitAdam with "
            f"zero_stage={2 if stage == 2 else 1}, or ZeroOptimizer with an ordinary optimizer"
        )
    if stage not in stages:
        raise ValueError(f"zero_stage must be one of {list(stages)}, got {stage}")
    if stage and state != "compact":
        raise ValueError(f"zero_stage={stage} needs state='compact', got {state!r}: moments are gathered in that form")
    if stage == 2 and clip == "local":
        raise ValueError(
            f"zero_stage=2 needs clip='late', its default, got {clip!r}: messages leave before the norm is known"
        )
    if stage and warmup_bits not in INTEGER_BITS:
        raise ValueError(
            f"zero_stage={stage} needs warmup_bits to be one of {list(INTEGER_BITS)}, got {warmup_bits}: gradients and "
            "updates travel in that many bits"
        )
