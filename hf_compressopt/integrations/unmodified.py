"""Unmodified scripts: environment variables choose what ``python -m hf_compressopt.run script.py`` compresses.

The variables are those of :class:`~hf_compressopt.integrations.plugin.CompressOptPlugin`'s fields, such as
``COMPRESSOPT_OPTIM=onebit_adam``, ``COMPRESSOPT_GRAD_COMPRESSION=int4`` or ``COMPRESSOPT_ZERO_STAGE=2``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from hf_compressopt.integrations.accelerate import attach
from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.integrations.patching import is_wrapped, wrap
from hf_compressopt.integrations.plugin import AUTO, CompressOptPlugin

_CHOICES = ("COMPRESSOPT_OPTIM", "COMPRESSOPT_OPTIMIZER", "COMPRESSOPT_GRAD_COMPRESSION", "COMPRESSOPT_ZERO_STAGE")
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")


def adopt_accelerators() -> None:
    """Attach every accelerator that the program makes from now on, if a variable chooses something to compress."""
    if any(name in os.environ for name in _CHOICES) and not is_wrapped(Accelerator, "__init__"):
        CompressOptPlugin()  # a wrong variable is an error before the program starts
        wrap(Accelerator, "__init__", _init)


def _init(original: Callable[..., None], self: Accelerator, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    attach(self, CompressOptPlugin())


def trainer_optimizer(name: str) -> str:
    """The optimizer that the environment chooses for a Trainer script in the place of AdamW, else ``name``.

    Raises:
        ValueError: For a name that is not legal.
    """
    if name not in _ADAMW:
        return name
    chosen = CompressOptPlugin.optimizer_from_env()
    if chosen and chosen not in (*ALGORITHMS, "none"):
        raise ValueError(f"COMPRESSOPT_OPTIM must be one of {[*ALGORITHMS, 'none']}, got {chosen!r}")
    return chosen if chosen in ALGORITHMS else name


def trainer_options(name: str) -> dict[str, Any]:
    """The options of an optimizer that are set in the environment, by the names of its constructor."""
    plugin = CompressOptPlugin()
    options = {"freeze_step": plugin.freeze_step, "max_update": plugin.max_update, **plugin.common_options()}
    given = {name: value for name, value in options.items() if f"COMPRESSOPT_{name.upper()}" in os.environ}
    if "freeze_step" in given:
        freeze_step = given.pop("freeze_step")
        if freeze_step != AUTO:
            given["freeze_step"] = freeze_step
    return given
