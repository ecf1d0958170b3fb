"""Checks of the options that all compressed optimizers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
