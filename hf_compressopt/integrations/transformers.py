"""Trainer's plug-in: ``--optim onebit_adam`` and the other names, and the methods that they change."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, trainer, training_args

from hf_compressopt.amp import innermost
from hf_compressopt.checkpoint.background import wait_for_saves
from hf_compressopt.collectives.torch_clipping import guard_torch_clipping
from hf_compressopt.integrations.accelerate import attach, make_ours
from hf_compressopt.integrations.algorithms import ALGORITHMS, OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.capabilities import follows_plan, owns_gradients, saves_shards
from hf_compressopt.integrations.ddp_models import without_compile
from hf_compressopt.integrations.log import prefixed_metrics, show_log
from hf_compressopt.integrations.optim_args import OptimArgs, check_taken, read_optim_args
from hf_compressopt.integrations.patching import add_member, is_wrapped, wrap, wrap_static
from hf_compressopt.integrations.plugin import CompressOptPlugin, check_variables
from hf_compressopt.integrations.run_length import fit
from hf_compressopt.integrations.trainer_checkpoints import attachment_of, optim_name, teach_checkpoints
from hf_compressopt.integrations.unmodified import trainer_options
from hf_compressopt.integrations.unsupported import GRAD_COMPRESSION, check_distributed_type, why_unsupported
from hf_compressopt.zero.optimizer import ZeroOptimizer
from hf_compressopt.zero.supported import check_optimizer_class


def register() -> None:
    """Teach transformers' Trainer the compressed optimizers. Calling it again adds names of new algorithms only.

    Afterwards ``--optim onebit_adam`` (with ``--optim_args "name=value,..."``), ``optimizer_cls_and_kwargs=`` and
    ``optimizers=`` take them; any other optimizer works as before.

    Raises:
        ValueError: For an environment variable COMPRESSOPT_... that no option has.
    """
    check_variables()
    guard_torch_clipping()
    for name in (*OPTIMIZERS, *ZERO_NAMES):
        add_member(training_args.OptimizerNames, name)
    if is_wrapped(Trainer, "create_optimizer"):
        return
    wrap_static(Trainer, "get_optimizer_cls_and_kwargs", _get_optimizer_cls_and_kwargs)
    wrap(Trainer, "create_accelerator_and_postprocess", _create_accelerator)
    wrap(Trainer, "train", _train)
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
        if follows_plan(inner):
            fit(inner, state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Leave the same parameters on all ranks: later code may run on one rank only."""
        wait_for_saves()
        inner = innermost(optimizer)
        if follows_plan(inner) or owns_gradients(inner):
            inner.settle_parameters()


# -- wrappers: each takes Trainer's own method first -----------------------------------------------------------


def _get_optimizer_cls_and_kwargs(original: Callable[..., Any], args: Any, model: Any = None) -> Any:
    name = optim_name(args)
    options = _options_of(args)
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
        check_taken(name, options, kwargs, _source_of_handlers())
    if not options.zero:
        return inner, kwargs
    check_optimizer_class(inner)
    return ZeroOptimizer, {**kwargs, **options.zero, "optimizer_class": inner}


@cache
def _source_of_handlers() -> str:
    """The text of the module in which transformers reads the options of its optimizers."""
    own = "transformers.trainer_optimizer"  # newer transformers have them there
    return inspect.getsource(import_module(own) if find_spec(own) else trainer)


def _create_accelerator(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    _attach(self)
    return result


def _attach(self: Trainer) -> None:
    """Attach the Trainer's accelerator, with the options of --optim_args and of the environment.

    Raises:
        ValueError: If what was asked for cannot work in the accelerator's set-up, or with the Trainer's model.
    """
    name, options, plugin = optim_name(self.args), _options_of(self.args), CompressOptPlugin()
    asked = f"--optim {name}" if name in ALGORITHMS or name in ZERO_NAMES else ""
    if not asked and options.zero:
        asked = f"zero_stage={options.zero['stage']}"
    if not asked and plugin.optimizer_from_env() in ALGORITHMS:
        asked = f"COMPRESSOPT_OPTIM={plugin.optimizer}"
    compression = options.grad_compression or "none"
    wanted = [f"{GRAD_COMPRESSION}{compression}"] * (compression != "none") + [asked] * bool(asked)
    for reason in (why_unsupported(self.accelerator, words, self.model) for words in wanted):
        if reason:
            raise ValueError(reason)
    if "_compressopt" not in vars(self.accelerator) and not self.accelerator._optimizers:
        make_ours(self.accelerator, None)  # at most it has evaluated the model
    elif "_compressopt" not in vars(self.accelerator) and not wanted:
        return  # it has trained before
    attachment = attach(self.accelerator)._compressopt
    attachment.by_trainer, attachment.plugin, attachment.asked = (
        True,
        None,
        asked,
    )  # a plugin of the environment: Trainer makes the optimizer
    attachment.gradient_as_bucket_view = plugin.gradient_as_bucket_view
    attachment.grad_compression = compression
    attachment.messages = replace(plugin.message_options(), **options.messages)


def _train(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Attach a Trainer that is older than :func:`register`, then train."""
    if (attachment := attachment_of(self)) is None or not attachment.by_trainer:
        _attach(self)
    callbacks = self.callback_handler.callbacks
    if not any(isinstance(callback, CompressOptCallback) for callback in callbacks):
        callbacks.insert(0, CompressOptCallback())
    return original(self, *args, **kwargs)


def _create_optimizer(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    made_here = self.optimizer is None
    result = original(self, *args, **kwargs)
    inner = innermost(self.optimizer)
    if not saves_shards(inner):
        return result
    attach(self.accelerator)
    check_distributed_type(self.accelerator, inner)
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
        fit(inner, num_training_steps)
    return result


def _options_of(args: Any) -> OptimArgs:
    """The options of --optim_args; for an ordinary optimizer, also those that the environment gives."""
    name = optim_name(args)
    options = read_optim_args(name, args.optim_args)
    if name in ALGORITHMS or options.zero:
        return options
    plugin = CompressOptPlugin()
    if plugin.partitions:
        options.zero = {"stage": plugin.zero_stage, **plugin.zero_options()}
    elif not options.grad_compression:
        options.grad_compression = plugin.grad_compression
    return options


def _given_options(self: Trainer) -> list[str]:
    """The options that the user gave for the optimizer that Trainer makes."""
    if self.optimizer_cls_and_kwargs is not None:
        return list(self.optimizer_cls_and_kwargs[1])
    return list(self.get_optimizer_cls_and_kwargs(self.args, self.model)[1])
