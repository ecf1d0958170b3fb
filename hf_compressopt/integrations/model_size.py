"""The size of a model that is described by a folder with its configuration."""

from __future__ import annotations

from typing import NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel

from hf_compressopt.kernels.messages import travels_beside_signs, travels_in_full
from hf_compressopt.optim.onebit_adam import OnebitAdam
from hf_compressopt.options import options_of


class ModelSize(NamedTuple):
    """Trainable parameters, and those of them that messages leave out and that travel in full precision."""

    params: int
    in_full: int  # beside messages of integers
    beside_signs: int


def size_of(folder: str) -> ModelSize:
    """Count the parameters of a folder's model, without its weights."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
        with torch.device("meta"):
            kind = next(filter(None, named), None)
            model: nn.Module = AutoModel.from_config(config) if kind is None else kind._from_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--model {folder!r} cannot be counted ({_first_line(error)}): give a folder with the config.json of a "
            "Transformers model, or --params"
        ) from None
    scale_block = options_of(OnebitAdam)["scale_block"].default
    trainable = [param for param in model.parameters() if param.requires_grad]
    return ModelSize(
        params=sum(param.numel() for param in trainable),
        in_full=sum(param.numel() for param in trainable if travels_in_full(param)),
        beside_signs=sum(p.numel() for p in trainable if travels_beside_signs(p.shape, scale_block)),
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
