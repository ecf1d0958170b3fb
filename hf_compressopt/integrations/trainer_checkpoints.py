"""Trainer's checkpoints: optimizer states in shards, saves in the background, and one set of parameters."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import Trainer, trainer, trainer_utils

from hf_compressopt.amp import innermost
from hf_compressopt.checkpoint import io
from hf_compressopt.checkpoint.background import wait_for_saves
from hf_compressopt.integrations.capabilities import follows_plan, owns_gradients, saves_shards
from hf_compressopt.integrations.optim_args import read_optim_args
from hf_compressopt.integrations.patching import wrap
from hf_compressopt.integrations.plugin import CompressOptPlugin
from hf_compressopt.integrations.saving_accelerator import Attachment
from hf_compressopt.integrations.shards import anyone, load_compressions, parameter_names, save_compressions
from hf_compressopt.integrations.unmodified import trainer_optimizer

logger = logging.getLogger(__name__)


def teach_checkpoints() -> None:
    """Wrap Trainer's methods for checkpoints and weights."""
    wrap(Trainer, "_save_optimizer_and_scheduler", _save_optimizer_and_scheduler)
    wrap(Trainer, "_load_optimizer_and_scheduler", _load_optimizer_and_scheduler)
    wrap(Trainer, "_save_checkpoint", _save_checkpoint)
    wrap(Trainer, "_load_best_model", _load_best_model)
    wrap(Trainer, "_push_from_checkpoint", _push_from_checkpoint)
    wrap(Trainer, "log", _log)
    wrap(Trainer, "evaluate", _with_averaged_parameters)
    wrap(Trainer, "predict", _with_averaged_parameters)
    wrap(Trainer, "save_model", _save_model)
    for module in (trainer, trainer_utils):
        module.get_last_checkpoint = partial(_get_last_checkpoint, trainer_utils.get_last_checkpoint)


def optim_name(args: Any) -> str:
    """The optimizer by name: the value of ``--optim``, or what the environment chooses in the place of AdamW."""
    return trainer_optimizer(str(getattr(args.optim, "value", args.optim)))


def attachment_of(self: Trainer) -> Attachment | None:
    """The state beside that of the Trainer's accelerator; None for a Trainer that is older than register()."""
    return getattr(self.accelerator, "_compressopt", None)


# -- states -----------------------------------------------------------------------------------------------------------


def _save_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, output_dir: str) -> Any:
    inner: torch.optim.Optimizer = innermost(self.optimizer)
    if attachment := attachment_of(self):
        save_compressions(attachment.compressions(), output_dir)
    if not saves_shards(innermost(self.optimizer)):
        return original(self, output_dir)
    save = io.async_save_state if _saves_in_background(self) else io.save_state
    save(inner, output_dir, names=parameter_names(inner, [self.model]))
    with innermost(self.optimizer).state_in_shards():
        return original(self, output_dir)


def _load_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, checkpoint: str | None) -> Any:
    """Load a checkpoint in shards into the optimizer of this run, also into an ordinary one such as AdamW."""
    inner = innermost(self.optimizer)
    if checkpoint is None or not isinstance(inner, torch.optim.Optimizer):
        return original(self, checkpoint)
    wait_for_saves()
    if attachment := attachment_of(self):
        load_compressions(attachment.compressions(), checkpoint)
    if not anyone(io.has_checkpoint(checkpoint), inner, self.args.device):
        has_plain = os.path.isfile(os.path.join(checkpoint, "optimizer.pt"))
        if not has_plain and saves_shards(inner):
            logger.warning("%s holds no optimizer state (save_only_model?): the optimizer starts from zero", checkpoint)
        return original(self, checkpoint)
    io.load_state(inner, checkpoint, names=parameter_names(inner, [self.model]))
    with io.state_is_loaded(inner):
        return original(self, checkpoint)


def _get_last_checkpoint(original: Callable[[str], str | None], folder: str) -> str | None:
    """Find the last checkpoint as transformers does, without one whose writing was interrupted."""
    wait_for_saves()
    last = original(folder)
    if last is None or not _is_incomplete(last):
        return last
    pattern = trainer_utils._re_checkpoint
    numbers = sorted(int(found[1]) for name in os.listdir(folder) if (found := pattern.search(name)))
    candidates = [os.path.join(folder, f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{number}") for number in numbers]
    whole = [path for path in candidates if os.path.isdir(path) and not _is_incomplete(path)]
    logger.warning("%s is incomplete: the last whole checkpoint is %s", last, whole[-1] if whole else None)
    return whole[-1] if whole else None


def _is_incomplete(checkpoint: str) -> bool:
    begun = any(name.startswith(f"{io.DEFAULT_PREFIX}-") for name in os.listdir(checkpoint))
    return begun and not io.has_checkpoint(checkpoint)


# -- saves in the background ------------------------------------------------------------------------------------------


def _saves_in_background(self: Trainer) -> bool:
    if not saves_shards(innermost(self.optimizer)):
        return False
    return CompressOptPlugin().async_save or (
        "async_save" in (self.args.optim_args or "")
        and read_optim_args(optim_name(self.args), self.args.optim_args).async_save
    )


def _save_checkpoint(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    with _in_checkpoint(self):
        if not _saves_in_background(self):
            return original(self, *args, **kwargs)
        _finish_saves(self)
        with _rotation_put_off(self):
            return original(self, *args, **kwargs)


@contextmanager
def _in_checkpoint(self: Trainer) -> Iterator[None]:
    """Tell :func:`_save_model` inside that all ranks save, so that they can average."""
    attachment = attachment_of(self)
    if attachment is None:
        yield
        return
    attachment.in_checkpoint = True
    try:
        yield
    finally:
        attachment.in_checkpoint = False


@contextmanager
def _rotation_put_off(self: Trainer) -> Iterator[None]:
    """Keep older checkpoints inside: they go when the one that is being written is complete."""
    holder: Any = trainer if hasattr(trainer, "rotate_checkpoints") else self  # a method before transformers 5
    name = "rotate_checkpoints" if holder is trainer else "_rotate_checkpoints"
    rotate = getattr(holder, name)
    setattr(holder, name, lambda *a, **k: self.accelerator._compressopt.rotations.append(partial(rotate, *a, **k)))
    try:
        yield
    finally:
        setattr(trainer, name, rotate) if holder is trainer else delattr(self, name)


def _finish_saves(self: Trainer) -> None:
    """Wait for the save in the background, then remove the checkpoints that it replaces."""
    wait_for_saves()
    rotations = self.accelerator._compressopt.rotations
    while rotations:
        rotations.pop(0)()


def _log(original: Callable[..., Any], self: Trainer, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    if "train_runtime" in logs and _saves_in_background(self):
        _finish_saves(self)  # Trainer's last line, before it removes the checkpoints that it does not keep
    if "loss" in logs and (attachment := attachment_of(self)):
        logs.update(attachment.metrics())
    return original(self, logs, *args, **kwargs)


def _push_from_checkpoint(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    if "checkpoint" in str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy)):
        wait_for_saves()  # the folder itself is uploaded
    return original(self, *args, **kwargs)


# -- one set of parameters --------------------------------------------------------------------------------------------


def _with_averaged_parameters(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Use one set of parameters, also in an interval in which each rank has its own. All ranks call."""
    inner = innermost(self.optimizer)
    with inner.averaged_parameters() if follows_plan(inner) else nullcontext():
        return original(self, *args, **kwargs)


def _save_model(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Save one set of parameters: in a checkpoint the average or the masters, else those of the last sync.

    A checkpoint is saved by all ranks. Anything else may be saved by rank 0 alone, which cannot average.
    """
    inner = innermost(self.optimizer)
    if (attachment := attachment_of(self)) and attachment.in_checkpoint:
        with inner.masters_in_parameters() if owns_gradients(inner) else nullcontext():
            result = _with_averaged_parameters(original, self, *args, **kwargs)
        if saves_shards(inner):
            # Each rank now looks whether the folder of the best checkpoint exists, which rank 0 makes. Transformers
            # before 4.57 did not wait for it: a rank that saw none missed the barrier of load_best_model_at_end.
            self.accelerator.wait_for_everyone()
        return result
    with inner.synced_parameters() if follows_plan(inner) else nullcontext():
        return original(self, *args, **kwargs)


def _load_best_model(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Load the best model on all ranks, and have the optimizer continue from it."""
    result = original(self, *args, **kwargs)
    inner = innermost(self.optimizer)
    if follows_plan(inner):
        inner.parameters_replaced()
    return result
