"""Trainer's plug-in: ``--optim onebit_adam`` and the other names, and the methods that they change."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, trainer, training_args

from hf_compressopt.amp import innermost
from hf_compressopt.checkpoint.background import wait_for_saves
from hf_compressopt.collectives.torch_clipping import guard_torch_clipping
from hf_compressopt.integrations.accelerate import attach
from hf_compressopt.integrations.algorithms import ALGORITHMS, OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.capabilities import FollowsPlan, follows_plan, owns_gradients, saves_shards
from hf_compressopt.integrations.ddp_models import without_compile
from hf_compressopt.integrations.log import prefixed_metrics, show_log
from hf_compressopt.integrations.optim_args import check_grad_compression, check_taken, read_optim_args
from hf_compressopt.integrations.patching import add_member, is_wrapped, wrap, wrap_static
from hf_compressopt.integrations.plugin import CompressOptPlugin
from hf_compressopt.integrations.run_length import warn_if_nothing_is_compressed
from hf_compressopt.integrations.trainer_checkpoints import optim_name, teach_checkpoints
from hf_compressopt.integrations.unmodified import trainer_options
from hf_compressopt.integrations.unsupported import check_distributed_type, why_unsupported
from hf_compressopt.zero.optimizer import ZeroOptimizer
from hf_compressopt.zero.supported import check_optimizer_class

logger = logging.getLogger(__name__)


def register() -> None:
    """Teach transformers' Trainer the compressed optimizers. Calling it again adds names of new algorithms only.

    Afterwards ``--optim onebit_adam`` (with ``--optim_args "name=value,..."``), ``optimizer_cls_and_kwargs=`` and
    ``optimizers=`` take them; any other optimizer works as before.
    """
    guard_torch_clipping()
    for name in (*OPTIMIZERS, *ZERO_NAMES):
        add_member(training_args.OptimizerNames, name)
    if is_wrapped(Trainer, "create_optimizer"):
        return
    wrap_static(Trainer, "get_optimizer_cls_and_kwargs", _get_optimizer_cls_and_kwargs)
    wrap(Trainer, "create_accelerator_and_postprocess", _create_accelerator)
    wrap(Trainer, "create_optimizer", _create_optimizer)
    wrap(Trainer, "create_scheduler", _create_scheduler)
    teach_checkpoints()
    trainer.DEFAULT_CALLBACKS.append(CompressOptCallback)
    show_log()


class CompressOptCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that adds ``compressopt/...`` numbers to every log line, ahead of the reporting callbacks."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Add the metrics to the line, and to Trainer's copy of it in the history."""
        inner = innermost(optimizer)
        if saves_shards(inner) and logs is not None and "loss" in logs:
            metrics = prefixed_metrics(inner)
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Fit the schedule, if a Trainer overrides how its learning-rate scheduler is made."""
        inner = innermost(optimizer)
        if follows_plan(inner) and (chosen := inner.fit_schedule(state.max_steps)):
            _announce(inner, chosen, state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Leave the same parameters on all ranks: later code may run on one rank only."""
        wait_for_saves()
        inner = innermost(optimizer)
        if follows_plan(inner) or owns_gradients(inner):
            inner.settle_parameters()


# -- wrappers: each takes Trainer's own method first -----------------------------------------------------------


def _get_optimizer_cls_and_kwargs(original: Callable[..., Any], args: Any, model: Any = None) -> Any:
    name = optim_name(args)
    options = read_optim_args(name, args.optim_args)
    if name in OPTIMIZERS:
        inner: Any = OPTIMIZERS[name]
        kwargs = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        if name in ALGORITHMS:
            kwargs |= trainer_options(name)
        kwargs |= options.optimizer
    else:
        wrapped = copy.copy(args)
        wrapped.optim_args = options.others or None
        if name in ZERO_NAMES:
            wrapped.optim = training_args.OptimizerNames(training_args.TrainingArguments.default_optim)
        inner, kwargs = original(wrapped, model)
        check_taken(name, options, kwargs)
    if not options.zero:
        return inner, kwargs
    check_optimizer_class(inner)
    return ZeroOptimizer, {**kwargs, **options.zero, "optimizer_class": inner}


def _create_accelerator(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    attachment = attach(self.accelerator, announce=False)._compressopt
    attachment.plugin = None  # of the environment, if at all: Trainer makes the optimizer
    attachment.gradient_as_bucket_view = CompressOptPlugin().gradient_as_bucket_view
    name = optim_name(self.args)
    attachment.grad_compression = _grad_compression(name, self.args.optim_args)
    if attachment.grad_compression != "none":
        given = read_optim_args(name, self.args.optim_args).messages
        attachment.messages = replace(CompressOptPlugin().message_options(), **given)
        if reason := why_unsupported(self.accelerator, f"grad_compression={attachment.grad_compression}"):
            raise ValueError(reason)
    if (name in ALGORITHMS or name in ZERO_NAMES) and (reason := why_unsupported(self.accelerator, f"--optim {name}")):
        raise ValueError(reason)
    return result


def _create_optimizer(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    made_here = self.optimizer is None
    result = original(self, *args, **kwargs)
    inner = innermost(self.optimizer)
    if not saves_shards(inner):
        return result
    attach(self.accelerator, announce=False)
    check_distributed_type(self.accelerator, inner)
    if owns_gradients(inner) and made_here and inner.communicator.rank == 0:
        logger.info("attached to Trainer: %s", inner.describe())
    if follows_plan(inner):
        if made_here:
            inner.defer_schedule(_given_options(self))
        is_ddp = isinstance(without_compile(self.model_wrapped), DistributedDataParallel)
        if self.accelerator.num_processes > 1 and not is_ddp:
            # an evaluation before the training may have left a compiled model without DDP here
            self.model_wrapped = self.model
    return result


def _create_scheduler(
    original: Callable[..., Any], self: Trainer, num_training_steps: int, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, num_training_steps, *args, **kwargs)
    inner = innermost(self.optimizer)
    if follows_plan(inner):
        _announce(inner, inner.fit_schedule(num_training_steps), num_training_steps)
    return result


def _grad_compression(name: str, optim_args: str | None) -> str:
    """The compression of gradients that --optim_args or the environment asks for, or "none"."""
    options = read_optim_args(name, optim_args)
    if options.grad_compression or options.zero or name in ALGORITHMS:
        return options.grad_compression or "none"
    value = os.environ.get("COMPRESSOPT_GRAD_COMPRESSION", "none")
    check_grad_compression(value, "")
    return value


def _announce(optimizer: FollowsPlan, schedule: str, steps: int) -> None:
    if optimizer.communicator.rank == 0:
        logger.info("attached to Trainer: %s%s", optimizer.describe(), f" ({schedule})" if schedule else "")
    warn_if_nothing_is_compressed(optimizer, steps)


def _given_options(self: Trainer) -> list[str]:
    """The options that the user gave for the optimizer that Trainer makes."""
    if self.optimizer_cls_and_kwargs is not None:
        return list(self.optimizer_cls_and_kwargs[1])
    return list(self.get_optimizer_cls_and_kwargs(self.args, self.model)[1])
