"""Optimizers' states in shards, as the hosts save and load them beside their own files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt.checkpoint.io import async_save_state, has_checkpoint, load_state, save_state, state_is_loaded
from hf_compressopt.checkpoint.plain import PlainState
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.fsdp.compression import FSDPCompression
from hf_compressopt.grad_compression import GradientCompression
from hf_compressopt.integrations.algorithms import follows_plan, owns_gradients, saves_shards
from hf_compressopt.integrations.log import prefix_of
from hf_compressopt.integrations.models import without_compile

logger = logging.getLogger(__name__)


def save_shards(
    optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module], directory: str, *, background: bool
) -> None:
    """Save the states of the optimizers that save shards. All ranks call."""
    save = async_save_state if background else save_state
    for number, optimizer in enumerate(filter(saves_shards, optimizers)):
        save(optimizer, directory, names=parameter_names(optimizer, models), prefix=prefix_of(number))


def load_shards(
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[nn.Module],
    directory: str,
    device: torch.device,
    loading: ExitStack,
) -> None:
    """Load the states that :func:`save_shards` saved. All ranks call."""
    # With as many checkpoints as optimizers, the ordinary optimizers load theirs too.
    last = len(optimizers) - 1

    def is_saved(number: int, optimizer: torch.optim.Optimizer) -> bool:
        return anyone(has_checkpoint(directory, prefix=prefix_of(number)), optimizer, device)

    everybody = bool(optimizers) and is_saved(last, optimizers[last])
    for number, optimizer in enumerate(optimizers if everybody else filter(saves_shards, optimizers)):
        if not is_saved(number, optimizer):
            continue  # the state dict in the folder must be a whole one
        load_state(optimizer, directory, names=parameter_names(optimizer, models), prefix=prefix_of(number))
        loading.enter_context(state_is_loaded(optimizer))
        if owns_gradients(optimizer):
            loading.callback(optimizer.partition.replicas_restorer())  # the model's file has the masters' values
        if follows_plan(optimizer):
            loading.callback(optimizer.own_parameters_restorer())  # the host loads one model into all ranks next


def save_compressions(compressions: Sequence[GradientCompression | FSDPCompression], directory: str) -> None:
    """Save the errors of compressed gradients. All ranks call."""
    for number, state in enumerate(compressions):
        save_state(state, directory, prefix=_errors_prefix(number))


def load_compressions(compressions: Sequence[GradientCompression | FSDPCompression], directory: str) -> None:
    """Load the errors that :func:`save_compressions` saved; without them the errors start at zero. All ranks call."""
    for number, state in enumerate(compressions):
        prefix = _errors_prefix(number)
        if any(state.communicator.all_gather_object(has_checkpoint(directory, prefix=prefix))):
            load_state(state, directory, prefix=prefix)
        elif state.communicator.rank == 0:
            logger.warning(
                "%s holds no errors of compressed gradients (was it saved without grad_compression?): they start at "
                "zero, so that the run does not continue bit for bit",
                directory,
            )


def _errors_prefix(number: int) -> str:
    return f"{prefix_of(number)}_gradients"


def anyone(answer: bool, optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """True if the answer of any rank that has this optimizer is True. All ranks call."""
    if saves_shards(optimizer):
        return any(optimizer.communicator.all_gather_object(answer))
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return answer
    return any(TorchCommunicator(device=device).all_gather_object(answer))


def parameter_names(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[str]:
    """Names of the optimizer's trainable parameters, by the models that hold them, else by the optimizer."""
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        inner = without_compile(model)
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        for name, param in without_compile(inner).named_parameters():
            names.setdefault(id(param), name if len(models) == 1 else f"model{number}.{name}")
    if saves_shards(optimizer):
        params, own = list(optimizer.trainable_parameters), optimizer.parameter_names()
    else:
        state = PlainState(optimizer)
        params, own = list(chain.from_iterable(state.params)), state.parameter_names()
    return [names.get(id(p), name) for p, name in zip(params, chain.from_iterable(own), strict=True)]
