"""Trainer: ``--optim onebit_adam`` and its relatives, and what has to follow from them."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, trainer, trainer_utils, training_args

from hf_compressopt.amp import innermost
from hf_compressopt.checkpoint.background import wait_for_saves
from hf_compressopt.checkpoint.io import (
    DEFAULT_PREFIX,
    async_save_state,
    has_checkpoint,
    load_state,
    save_state,
    state_is_loaded,
)
from hf_compressopt.integrations.accelerate import OUR_OPTIMIZERS, anyone, attach, parameter_names, prefixed_metrics
from hf_compressopt.integrations.log import show_log
from hf_compressopt.integrations.options import COMPRESSED, OPTIMIZERS, parse_options, take_async_save
from hf_compressopt.integrations.zero import ZERO_NAMES, refuse_zero_stage, zero_options
from hf_compressopt.optim.compressed import CompressedOptimizer
from hf_compressopt.zero.optimizer import ZeroOptimizer
from hf_compressopt.zero.options import check_optimizer_class

logger = logging.getLogger(__name__)

_MARK = "_hf_compressopt"


def register() -> None:
    """Teach transformers' Trainer the compressed optimizers. Calling it again changes nothing.

    Afterwards ``--optim onebit_adam`` (with ``--optim_args "name=value,..."``), ``optimizer_cls_and_kwargs=`` and
    ``optimizers=`` take them; any other optimizer works as before.
    """
    if hasattr(Trainer.create_optimizer, _MARK):
        return
    for name in (*OPTIMIZERS, *ZERO_NAMES):
        _add_optimizer_name(name)
    _wrap_static(Trainer, "get_optimizer_cls_and_kwargs", _get_optimizer_cls_and_kwargs)
    _wrap(Trainer, "create_accelerator_and_postprocess", _create_accelerator)
    _wrap(Trainer, "create_optimizer", _create_optimizer)
    _wrap(Trainer, "create_scheduler", _create_scheduler)
    _wrap(Trainer, "_save_optimizer_and_scheduler", _save_optimizer_and_scheduler)
    _wrap(Trainer, "_load_optimizer_and_scheduler", _load_optimizer_and_scheduler)
    _wrap(Trainer, "_save_checkpoint", _save_checkpoint)
    _wrap(Trainer, "_push_from_checkpoint", _push_from_checkpoint)
    _wrap(Trainer, "log", _log)
    for module in (trainer, trainer_utils):
        module.get_last_checkpoint = partial(_get_last_checkpoint, trainer_utils.get_last_checkpoint)
    for name in ("evaluate", "predict", "save_model"):
        _wrap(Trainer, name, _with_averaged_parameters)
    trainer.DEFAULT_CALLBACKS.append(CompressOptCallback)
    show_log()


class CompressOptCallback(TrainerCallback):  # type: ignore[misc]
    """Adds ``compressopt/...`` numbers to every log line of the training, ahead of the reporting callbacks."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Add the metrics to the line, and to Trainer's copy of it in the history."""
        inner = innermost(optimizer)
        if isinstance(inner, OUR_OPTIMIZERS) and logs is not None and "loss" in logs:
            metrics = prefixed_metrics(inner)
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Fit the schedule, where a Trainer makes its learning-rate scheduler in a way of its own."""
        inner = innermost(optimizer)
        if isinstance(inner, CompressedOptimizer) and (chosen := inner.fit_schedule(state.max_steps)):
            _announce(inner, chosen)

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Leave the same parameters on all ranks: what follows may run on one of them only."""
        wait_for_saves()
        inner = innermost(optimizer)
        if isinstance(inner, CompressedOptimizer) and not args.load_best_model_at_end:  # which are alike already
            inner.settle_parameters()


# -- what is wrapped: each takes Trainer's own method first -----------------------------------------------------------


def _get_optimizer_cls_and_kwargs(original: Callable[..., Any], args: Any, model: Any = None) -> Any:
    name = _optim_name(args)
    cls = OPTIMIZERS.get(name)
    async_save, rest = take_async_save(args.optim_args)
    zero, rest = zero_options(rest, ZERO_NAMES.get(name))
    if async_save and not zero and name not in COMPRESSED:
        raise ValueError(
            f"optim_args: async_save=true cannot be had with {name}, whose state Trainer saves itself: use it with one "
            f"of {[*COMPRESSED, *ZERO_NAMES]}, or with zero_stage"
        )
    if zero and name in COMPRESSED:
        refuse_zero_stage(name, zero["stage"])
    if cls is not None:
        kwargs = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        inner, kwargs = cls, {**kwargs, **parse_options(cls, rest)}
    else:
        wrapped = copy.copy(args)
        wrapped.optim_args = rest or None
        if name in ZERO_NAMES:
            wrapped.optim = training_args.OptimizerNames.ADAMW_TORCH
        inner, kwargs = original(wrapped, model)
    if not zero:
        return inner, kwargs
    check_optimizer_class(inner)
    return ZeroOptimizer, {**kwargs, **zero, "optimizer_class": inner}


def _create_accelerator(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    attach(self.accelerator, announce=False)
    return result


def _create_optimizer(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    made_here = self.optimizer is None
    result = original(self, *args, **kwargs)
    inner = innermost(self.optimizer)
    if isinstance(inner, OUR_OPTIMIZERS):
        attach(self.accelerator, announce=False)
    if isinstance(inner, ZeroOptimizer) and made_here and inner.communicator.rank == 0:
        logger.info("attached to Trainer: %s", inner.describe())
    if isinstance(inner, CompressedOptimizer):
        if made_here:
            inner.defer_schedule(_given_options(self))
        inner_model = getattr(self.model_wrapped, "_orig_mod", self.model_wrapped)
        if self.accelerator.num_processes > 1 and not isinstance(inner_model, DistributedDataParallel):
            # an evaluation before the training may have left a compiled model without DDP here
            self.model_wrapped = self.model
    return result


def _create_scheduler(
    original: Callable[..., Any], self: Trainer, num_training_steps: int, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, num_training_steps, *args, **kwargs)
    inner = innermost(self.optimizer)
    if isinstance(inner, CompressedOptimizer):
        _announce(inner, inner.fit_schedule(num_training_steps))
    return result


def _announce(optimizer: CompressedOptimizer, schedule: str) -> None:
    if optimizer.communicator.rank == 0:
        logger.info("attached to Trainer: %s%s", optimizer.describe(), f" ({schedule})" if schedule else "")


def _save_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, output_dir: str) -> Any:
    inner = innermost(self.optimizer)
    if not isinstance(inner, OUR_OPTIMIZERS):
        return original(self, output_dir)
    save = async_save_state if _saves_in_background(self) else save_state
    save(inner, output_dir, names=parameter_names(inner, [self.model]))
    with inner.state_in_shards():
        return original(self, output_dir)


def _saves_in_background(self: Trainer) -> bool:
    return isinstance(innermost(self.optimizer), OUR_OPTIMIZERS) and take_async_save(self.args.optim_args)[0]


def _save_checkpoint(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    if not _saves_in_background(self):
        return original(self, *args, **kwargs)
    _finish_saves(self)
    with _rotation_put_off(self):
        return original(self, *args, **kwargs)


@contextmanager
def _rotation_put_off(self: Trainer) -> Iterator[None]:
    """Inside, older checkpoints stay: they go when the one that is being written is whole."""
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
        _finish_saves(self)  # Trainer's last line, before it removes what it keeps no longer
    return original(self, logs, *args, **kwargs)


def _push_from_checkpoint(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    if "checkpoint" in str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy)):
        wait_for_saves()  # the folder itself is uploaded
    return original(self, *args, **kwargs)


def _get_last_checkpoint(original: Callable[[str], str | None], folder: str) -> str | None:
    """As transformers', without a checkpoint whose writing was cut off."""
    wait_for_saves()
    last = original(folder)
    if last is None or not _was_cut_off(last):
        return last
    pattern = trainer_utils._re_checkpoint
    numbers = sorted(int(found[1]) for name in os.listdir(folder) if (found := pattern.search(name)))
    candidates = [os.path.join(folder, f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{number}") for number in numbers]
    whole = [path for path in candidates if os.path.isdir(path) and not _was_cut_off(path)]
    logger.warning("%s was not written to its end: the last checkpoint is %s", last, whole[-1] if whole else None)
    return whole[-1] if whole else None


def _was_cut_off(checkpoint: str) -> bool:
    begun = any(name.startswith(f"{DEFAULT_PREFIX}-") for name in os.listdir(checkpoint))
    return begun and not has_checkpoint(checkpoint)


def _load_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, checkpoint: str | None) -> Any:
    """A checkpoint of ours goes to the optimizer of this run, also where it is none of ours, such as AdamW."""
    inner = innermost(self.optimizer)
    if checkpoint is None or not isinstance(inner, torch.optim.Optimizer):
        return original(self, checkpoint)
    wait_for_saves()
    if not anyone(has_checkpoint(checkpoint), inner, self.args.device):
        has_plain = os.path.isfile(os.path.join(checkpoint, "optimizer.pt"))
        if not has_plain and isinstance(inner, OUR_OPTIMIZERS):
            logger.warning("%s holds no optimizer state (save_only_model?): the optimizer starts anew", checkpoint)
        return original(self, checkpoint)
    load_state(inner, checkpoint, names=parameter_names(inner, [self.model]))
    with state_is_loaded(inner):
        return original(self, checkpoint)


def _with_averaged_parameters(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """An evaluation or a saved model is of one set of parameters, also where each rank has its own for a while."""
    inner = innermost(self.optimizer)
    with inner.averaged_parameters() if isinstance(inner, CompressedOptimizer) else nullcontext():
        return original(self, *args, **kwargs)


def _given_options(self: Trainer) -> list[str]:
    """The options that the user gave for the optimizer that Trainer makes."""
    if self.optimizer_cls_and_kwargs is not None:
        return list(self.optimizer_cls_and_kwargs[1])
    return list(self.get_optimizer_cls_and_kwargs(self.args, self.model)[1])


# -- how it is wrapped ------------------------------------------------------------------------------------------------


def _optim_name(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _wrap(cls: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(method, _MARK, True)
    setattr(cls, name, method)


def _wrap_static(cls: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(cls, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(cls, name, staticmethod(function))


def _add_optimizer_name(value: str) -> None:
    """Add a member to OptimizerNames: TrainingArguments and argument parsers accept members of that enum only."""
    enum = training_args.OptimizerNames
    if value in enum._value2member_map_:
        return
    name = value.upper()
    member = str.__new__(enum, value)
    member._name_, member._value_ = name, value
    member._sort_order_ = len(enum._member_names_)
    type.__setattr__(enum, name, member)
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    if hasattr(enum, "_hashable_values_"):  # Python >= 3.12.3 looks here too
        enum._hashable_values_.append(value)
