"""The parameters of a model that is described by a folder with its configuration."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel

from hf_compressopt.kernels.messages import travels_in_full


def parameters_of(folder: str) -> tuple[int, int]:
    """Count the trainable parameters of a folder's model, without weights, and those that travel in full precision."""
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
    trainable = [param for param in model.parameters() if param.requires_grad]
    return sum(map(nn.Parameter.numel, trainable)), sum(p.numel() for p in trainable if travels_in_full(p))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
