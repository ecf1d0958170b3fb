"""The time of a training step without communication: a model made from a configuration, on this device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    PretrainedConfig,
)
from transformers.utils import logging

from hf_compressopt.kernels.messages import travels_in_full

_KINDS = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM)
_HEAD = 64  # width of an attention head of GPT-2, and, roughly, width / layers
_VOCABULARIES = ((20_000_000, 50_257), (1_000_000, 8_000), (0, 256))  # from so many parameters on
_WIDTHS = (8, 16, 32, *range(_HEAD, 256 * _HEAD, _HEAD))
_MOST_LAYERS = 256
_NEAR = 0.05  # a stand-in has the given size within this share
_FEWEST, _MOST, _BUDGET_SECONDS, _LIMIT_SECONDS = 3, 20, 3.0, 60.0
_STEP_BYTES = 16  # a float32 parameter, its gradient, and two moments
_BACKWARD_BYTES = 2  # what a step takes at its peak, of the bytes that its forward pass keeps
_MOST_OF_MEMORY = 0.8  # of what is free


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: medians."""

    seconds: float  # of forward, backward and the update by torch's fused AdamW
    update: float  # of these
    at_once: int  # examples that were timed at once: in little memory the time of some stands for the others


def named_config(name: str) -> PretrainedConfig:
    """Load the configuration of a model: a name on the Hub, or a folder."""
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"--config_name {name!r} cannot be loaded ({_first_line(error)}): give the name of a model on the Hub that "
            "can be reached or is in the cache, a folder with a config.json, or --params"
        ) from None
    if _kind(config) is None:
        raise ValueError(
            f"--config_name {name!r} is a {config.model_type!r} model, and no language model: give "
            "--params and --compute-seconds"
        )
    return config


def stand_in(params: int, tokens: int) -> GPT2Config:
    """Make the configuration of a GPT-2 of about this many parameters, for examples of up to this many tokens."""
    vocabulary = next(size for least, size in _VOCABULARIES if params >= least)
    near: list[tuple[float, int, int]] = []
    sizes: list[int] = []
    for width in _WIDTHS:
        block, fixed = 12 * width**2 + 13 * width, (vocabulary + tokens + 2) * width
        layers = min(max(1, round((params - fixed) / block)), _MOST_LAYERS)
        sizes.append(layers * block + fixed)
        if abs(sizes[-1] / params - 1) <= _NEAR:
            near.append((abs(math.log(width / layers / _HEAD)), layers, width))
    if not near:
        closest = min(sizes, key=lambda size: abs(size - params))
        raise ValueError(
            f"no GPT-2 has about {params:,} parameters, the nearest has {closest:,}: give --compute-seconds, or "
            "--config_name"
        )
    _, layers, width = min(near)
    sizes_of = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // _HEAD), "n_positions": tokens}
    return GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes_of)


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
    return _count(model), sum(p.numel() for p in model.parameters() if p.requires_grad and travels_in_full(p))


def trainable(config: PretrainedConfig) -> int:
    """Count the trainable parameters of a configuration's model, without memory for them."""
    with torch.device("meta"):
        return _count(_make(config))


def _count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters() if param.requires_grad)


def most_tokens(config: PretrainedConfig) -> int | None:
    """Return the longest example that the model takes, or None if its configuration does not say."""
    most = getattr(config, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def check_tokens(config: PretrainedConfig, tokens: int) -> None:
    most = most_tokens(config)
    if most is not None and tokens > most:
        raise ValueError(f"--tokens must be at most {most}, the positions of this model, got {tokens}")


def check_memory(params: int, ranks: int) -> None:
    """Check that a step of so many float32 parameters on each of a host's ranks fits, where the system tells."""
    free, needed = _free_memory(), _STEP_BYTES * params * ranks
    if needed > free:
        raise ValueError(
            f"a step of {params:,} parameters takes {needed / 1e9:,.1f} GB on the {ranks} rank(s) of this machine, "
            f"which has {free / 1e9:,.1f} GB: give --compute-seconds, measured on a machine that has them"
        )


def time_step(
    config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    tokens: int,
    ranks: int,
    adapters: int | None = None,
) -> StepTime:
    """Time steps on random tokens. ``adapters``: so many parameters of all layers are updated, the model is frozen."""
    logging.set_verbosity_error()  # models made from configurations warn of what only training needs
    free = _free_memory() / ranks
    try:
        with torch.device(device):
            model = _make(config).to(dtype).train()
            ids = torch.randint(0, config.get_text_config().vocab_size, (batch, tokens))
        params: list[nn.Parameter] = list(model.parameters())
        if adapters is not None:
            model.requires_grad_(False).enable_input_require_grads()
            params = [nn.Parameter(torch.zeros(adapters, dtype=dtype, device=device))]
        optimizer = torch.optim.AdamW(params, fused=True)
        at_once = _examples_at_once(model, ids, free) if device.type == "cpu" else batch
        some = ids[:at_once]

        def backward() -> None:
            model(input_ids=some, labels=some).loss.backward()
            if adapters is not None:
                params[0].grad = torch.zeros_like(params[0])

        seconds, update = _time(backward, optimizer, device)
        return StepTime((seconds - update) * batch / at_once + update, update, at_once)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"a step of {batch} x {tokens} tokens does not fit into the memory of {device} ({_first_line(error)}): "
            "give a smaller --batch-size or --tokens, or --compute-seconds"
        ) from None


def _free_memory() -> float:
    """Return this host's free bytes; infinity if the system does not tell."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return math.inf


def _examples_at_once(model: nn.Module, ids: Tensor, free: float) -> int:
    """Return how many of the examples a step in so many free bytes can take, from what one of them keeps."""
    held, kept = _STEP_BYTES * sum(param.numel() for param in model.parameters()), _kept_bytes(model, ids[:1])
    if held + kept > free:
        raise ValueError(
            f"a step of one example of {ids.shape[1]} tokens takes more than the {free / 1e9:,.1f} GB that this "
            "machine has for each rank: give fewer --tokens, or --compute-seconds"
        )
    return int(min(len(ids), max(1.0, (_MOST_OF_MEMORY * free - held) / (_BACKWARD_BYTES * kept))))


def _kept_bytes(model: nn.Module, ids: Tensor) -> int:
    """Count the bytes that a forward pass keeps for the backward pass, beside parameters."""
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # with its graph it would be in a circle of references

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=ids, labels=ids)
    del output
    return sum(kept.values())


def _time(
    backward: Callable[[], object], optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[float, float]:
    rows: list[tuple[float, float]] = []
    began = time.perf_counter()
    while True:
        start = _now(device)
        backward()
        middle = _now(device)
        optimizer.step()
        optimizer.zero_grad()
        end = _now(device)
        rows.append((end - start, end - middle))
        done, spent = len(rows) - 1, end - began
        if done >= 1 and (spent > _LIMIT_SECONDS or done >= _MOST or (done >= _FEWEST and spent > _BUDGET_SECONDS)):
            seconds, update = (statistics.median(column) for column in zip(*rows[1:], strict=True))
            return seconds, update


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _make(config: PretrainedConfig) -> Any:
    return _kind(config).from_config(config)


def _kind(config: PretrainedConfig) -> Any:
    """The class that makes a model with a language model's loss from the configuration, or None."""
    return next((kind for kind in _KINDS if type(config) in kind._model_mapping), None)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
