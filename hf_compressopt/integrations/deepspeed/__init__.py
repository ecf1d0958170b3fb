"""Translate a DeepSpeed configuration into Trainer's flags and Accelerate's call.

Facts on DeepSpeed are those of 0.19.6, the last release with the 1-bit optimizers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from hf_compressopt.integrations.algorithms import OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.deepspeed import optimizer, render, training
from hf_compressopt.integrations.deepspeed.translation import Options, Translation
from hf_compressopt.integrations.optim_args import read_optim_args


def translate(config: dict[str, Any], *, ranks: int | None = None, same_arithmetic: bool = False) -> Translation:
    """Translate a DeepSpeed configuration.

    Args:
        config: The configuration for DeepSpeed, or for Transformers, with "auto" values.
        ranks: Number of ranks, to divide a train_batch_size by.
        same_arithmetic: True to give the compressed optimizers the options that compute what DeepSpeed's did.

    Raises:
        ValueError: If a section is no object, or an option has an illegal value.
    """
    options = Options(config)
    optimizer.optimizer(options, same_arithmetic=same_arithmetic)
    optimizer.zero(options)
    training.precision(options)
    training.batches(options, ranks)
    training.clipping(options)
    training.scheduler(options)
    training.rest(options)
    translation = options.translation
    args = read_optim_args(translation.optim, translation.optim_args_text)
    if translation.optim in OPTIMIZERS:
        cls = OPTIMIZERS[translation.optim]
        _check_ranges(cls, {**render.adam_options(translation), **args.optimizer})
    elif translation.optim in (*ZERO_NAMES, "adamw_torch"):
        _check_ranges(torch.optim.AdamW, render.adam_options(translation))
    return translation


def _check_ranges(cls: Callable[..., torch.optim.Optimizer], values: dict[str, Any]) -> None:
    """Have the optimizer itself check its options.

    Raises:
        ValueError: If an option is outside its range.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":  # else it would look for the other ranks
        transport = ("communicator", "cuda_aware")
        cls([torch.zeros(8)], **{name: value for name, value in values.items() if name not in transport})
