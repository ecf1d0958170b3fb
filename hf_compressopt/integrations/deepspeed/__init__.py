"""Translate a DeepSpeed configuration into Trainer's flags and Accelerate's call.

Facts on DeepSpeed are those of 0.19.6, the last release with the 1-bit optimizers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hf_compressopt.integrations.algorithms import OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.deepspeed import render
from hf_compressopt.integrations.deepspeed.options import apply, facts_of
from hf_compressopt.integrations.deepspeed.translation import SAME, Row, Translation
from hf_compressopt.integrations.optim_args import read_optim_args

_DEEPEST = 8  # levels of a configuration; DeepSpeed's own have four
_SECTIONS = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16")


def translate(config: dict[str, Any], *, ranks: int | None = None, same_arithmetic: bool = False) -> Translation:
    """Translate a DeepSpeed configuration.

    Args:
        config: The configuration for DeepSpeed, or for Transformers, with "auto" values.
        ranks: Number of ranks, to divide a train_batch_size by.
        same_arithmetic: True to give the compressed optimizers the options that compute what DeepSpeed's did.

    Raises:
        ValueError: If a section is no object, or an option has an illegal value.
    """
    for section in _SECTIONS:
        if not isinstance(config.get(section, {}), dict):
            raise ValueError(f"{section} must be an object with options, got {config[section]!r}")
    given = dict(_options("", {{"bfloat16": "bf16"}.get(name, name): value for name, value in config.items()}))
    options = {name: value for name, value in given.items() if value is not None}
    translation = Translation()
    apply(translation, options, facts_of(options, ranks, same_arithmetic))
    translation.rows += [Row(name, None, SAME, "", "not set") for name in given if name not in options]
    _check_ranges(translation)
    return translation


def _options(prefix: str, section: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a section by their paths.

    Raises:
        ValueError: If it is nested too deeply.
    """
    if prefix.count(".") > _DEEPEST:
        raise ValueError(f"{prefix[:-1]} is nested more than {_DEEPEST} levels deep")
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _options(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def read_config(path: str) -> dict[str, Any]:
    """Read a configuration.

    Raises:
        ValueError: If the file cannot be read, or is no JSON object, or names an option twice; with the file's name.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} given twice")
        return dict(pairs)

    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{path} is not a DeepSpeed configuration in JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a DeepSpeed configuration in JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a DeepSpeed configuration: it must be an object, got {type(config).__name__}")
    return config


def _check_ranges(translation: Translation) -> None:
    """Have the optimizer itself check its options.

    Raises:
        ValueError: If an option is outside its range.
    """
    args = read_optim_args(translation.optim, translation.optim_args_text)
    cls: Callable[..., torch.optim.Optimizer] = OPTIMIZERS.get(translation.optim, torch.optim.AdamW)
    own = args.optimizer if translation.optim in OPTIMIZERS else {}
    if translation.optim not in (*OPTIMIZERS, *ZERO_NAMES, "adamw_torch"):
        return
    if os.environ.get("WORLD_SIZE", "1") == "1":  # else it would look for the other ranks
        values = {**render.adam_options(translation), **own}
        transport = ("communicator", "cuda_aware")
        cls([torch.zeros(8)], **{name: value for name, value in values.items() if name not in transport})
