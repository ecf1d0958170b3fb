"""Trainer's plug-in: ``--optim onebit_adam`` and the other names, and the methods that they change."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, trainer, trainer_utils, training_args

from hf_compressopt.amp import innermost
from hf_compressopt.announce import closing_line, show_log
from hf_compressopt.checkpoint import io
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.integrations import accelerate
from hf_compressopt.integrations.accelerate import Attachment, attach, parameter_names, wrap
from hf_compressopt.integrations.algorithms import (
    ALGORITHMS,
    OPTIMIZERS,
    ZERO_NAMES,
    follows_plan,
    owns_gradients,
    saves_shards,
)
from hf_compressopt.integrations.log import fit, prefixed_metrics, run_totals
from hf_compressopt.integrations.models import (
    check_distributed_type,
    is_loaded_in_shards,
    why_unsupported,
    without_compile,
)
from hf_compressopt.integrations.optim_args import check_taken, is_help, print_help, read_optim_args
from hf_compressopt.integrations.plugin import UNREAD, check_variables, options_from_variables
from hf_compressopt.integrations.run_options import NONE, RunOptions, check_optimizer
from hf_compressopt.optim.muon import MuonAdamW
from hf_compressopt.options import options_of
from hf_compressopt.zero.config import check_optimizer_class
from hf_compressopt.zero.optimizer import ZeroOptimizer

logger = logging.getLogger(__name__)
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")


def register() -> None:
    """Teach transformers' Trainer the compressed optimizers. Calling it again adds names of new algorithms only.

    Afterwards ``--optim onebit_adam`` (with ``--optim_args "name=value,..."``), ``optimizer_cls_and_kwargs=`` and
    ``optimizers=`` take them, and a stock Accelerator attaches itself when it prepares one. Any other optimizer works
    as before.

    Raises:
        ValueError: For an environment variable COMPRESSOPT_... that no option has.
    """
    check_variables()
    for name in (*OPTIMIZERS, *ZERO_NAMES):
        _add_member(training_args.OptimizerNames, name)
    if CompressOptCallback in trainer.DEFAULT_CALLBACKS:
        return
    wrap(Trainer, "get_optimizer_cls_and_kwargs", _get_optimizer_cls_and_kwargs, static=True)
    wrap(Trainer, "create_accelerator_and_postprocess", _create_accelerator)
    wrap(Trainer, "train", _train)
    wrap(Trainer, "create_optimizer", _create_optimizer)
    wrap(Trainer, "create_scheduler", _create_scheduler)
    wrap(Trainer, "_save_optimizer_and_scheduler", _save_optimizer_and_scheduler)
    wrap(Trainer, "_load_optimizer_and_scheduler", _load_optimizer_and_scheduler)
    wrap(Trainer, "_save_checkpoint", _save_checkpoint)
    wrap(Trainer, "_load_best_model", _load_best_model)
    wrap(Trainer, "_push_from_checkpoint", _push_from_checkpoint)
    wrap(Trainer, "log", _log)
    wrap(Trainer, "evaluate", _with_averaged_parameters)
    wrap(Trainer, "predict", _with_averaged_parameters)
    wrap(Trainer, "save_model", _save_model)
    if hasattr(Trainer, "_sync_replicated_trainable_parameters"):  # newer ones average them by themselves
        wrap(Trainer, "_sync_replicated_trainable_parameters", _average_beside_shards)
    for module in (trainer, trainer_utils):
        module.get_last_checkpoint = partial(_get_last_checkpoint, trainer_utils.get_last_checkpoint)
    accelerate.register()
    trainer.DEFAULT_CALLBACKS.append(CompressOptCallback)
    show_log(always=True)


def _add_member(enum: Any, value: str) -> None:
    """Add a member to an enum of strings, because argument parsers accept members only."""
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


class CompressOptCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that runs ahead of others: it fits the schedule, and ends the training with alike parameters."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Begin without gradients, and fit the schedule, if a Trainer overrides how its scheduler is made."""
        inner = innermost(optimizer)
        if saves_shards(inner):
            inner.zero_grad()  # what has left in a training that was interrupted; model.zero_grad() drops the others
        if follows_plan(inner):
            fit(inner, state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Leave the same parameters on all ranks: later code may run on one rank only."""
        io.wait_for_saves()
        inner = innermost(optimizer)
        if follows_plan(inner) or owns_gradients(inner):
            inner.settle_parameters()


# -- wrappers: each takes Trainer's own method first ------------------------------------------------------------------


def _get_optimizer_cls_and_kwargs(original: Callable[..., Any], args: Any, model: Any = None) -> Any:
    name, options = optim_name(args), trainer_options(args)
    if name in OPTIMIZERS:
        inner: Any = OPTIMIZERS[name]
        kwargs = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        kwargs = {option: value for option, value in kwargs.items() if option in options_of(inner)}
        if inner is MuonAdamW:  # it divides the parameters itself
            kwargs |= {"model": model, "weight_decay": args.weight_decay}
        kwargs |= options.optimizer_options
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
    newer = "transformers.trainer_optimizer"  # newer transformers have them there
    return inspect.getsource(import_module(newer) if find_spec(newer) else trainer)


def _create_accelerator(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    _attach(self)
    return result


def note_command_line(arguments: Sequence[str]) -> None:
    """Keep the flags of a script that ask for compression; ``--optim_args help`` prints the options and exits."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--optim", default="")
    parser.add_argument("--optim_args", "--optim-args", default="")
    flags, _ = parser.parse_known_args(arguments)
    if is_help(flags.optim_args):
        print_help(flags.optim or options_from_variables().get("optimizer") or _ADAMW[0])
    UNREAD.flags.clear()
    if flags.optim in ALGORITHMS or flags.optim in ZERO_NAMES:
        UNREAD.flags.append(f"--optim {flags.optim}")
    if re.search(r"(grad_compression=(?!none)|zero_stage=[12])", flags.optim_args):
        UNREAD.flags.append(f"--optim_args {flags.optim_args}")


def _attach(self: Trainer) -> None:
    """Attach the Trainer's accelerator, with the options of --optim_args and of the environment, if they can work."""
    options = trainer_options(self.args)
    requests = [words for words in (options.compresses, options.asked) if words]
    model = getattr(self, "model", None)  # older Trainers, which load no model in shards, have it only later
    for words in requests:
        if reason := why_unsupported(self.accelerator, words, model):
            raise ValueError(reason)
    if requests:
        UNREAD.clear()
    if "_compressopt" not in vars(self.accelerator) and not self.accelerator._optimizers:
        accelerate.make_ours(self.accelerator)  # at most it has evaluated the model
    elif "_compressopt" not in vars(self.accelerator) and not requests:
        return  # it has trained before
    attach(self.accelerator)._compressopt.take(options)


def _train(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Attach a Trainer that is older than :func:`register`, then train."""
    if not attachment_of(self).has_options:
        _attach(self)
    if UNREAD.flags and self.args.world_size > 1:
        raise ValueError(
            f"{' '.join(UNREAD.flags)} stands on the command line, but not in the script's TrainingArguments, and "
            "nothing would be compressed: parse them by transformers.HfArgumentParser, or set optim, optim_args there"
        )
    _sync_before_reading(self)
    callbacks = self.callback_handler.callbacks
    if not any(isinstance(callback, CompressOptCallback) for callback in callbacks):
        callbacks.insert(0, CompressOptCallback())
    return original(self, *args, **kwargs)


def _create_optimizer(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    made_here = self.optimizer is None
    result = original(self, *args, **kwargs)
    inner = innermost(self.optimizer)
    low_bit = attachment_of(self).options.grad_compression != NONE and not is_loaded_in_shards(self.model)
    several = self.accelerator.num_processes > 1
    if several and (follows_plan(inner) or low_bit) and without_compile(self.model_wrapped) is self.model:
        self.model_wrapped = self.model  # an evaluation before the training may have left it compiled, and without DDP
    if several and (saves_shards(inner) or attachment_of(self).options.grad_compression != NONE):
        for callback in self.callback_handler.callbacks:
            if getattr(callback, "jit_manager", None) is not None:
                _save_at_a_signal_together(self, callback)
    if not saves_shards(inner):
        return result
    attach(self.accelerator)
    check_distributed_type(self.accelerator, inner)
    if follows_plan(inner) and made_here:
        made_of = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        inner.defer_schedule(list(made_of[1]))  # the options that the user gave
    return result


def _save_at_a_signal_together(self: Trainer, callback: Any) -> None:
    """Have all ranks save for ``enable_jit_checkpoint`` at the end of the same step, however late each gets its signal.

    Else one is in the messages of a save, and another one in those of the next step.
    """
    ranks, at_step_end = TorchCommunicator(device=self.args.device), type(callback).on_step_end

    def on_step_end(*args: Any, **kwargs: Any) -> None:
        asked = torch.tensor([float(callback.jit_manager.is_checkpoint_requested)], device=self.args.device)
        ranks.all_reduce(asked, op="max").wait()
        if asked:  # else a signal that has come meanwhile counts in the next step
            callback.jit_manager.is_checkpoint_requested = True
            at_step_end(callback, *args, **kwargs)

    callback.on_step_end = on_step_end
    for event in ("on_step_begin", "on_pre_optimizer_step", "on_epoch_end"):
        setattr(callback, event, lambda *args, **kwargs: None)


def _average_beside_shards(original: Callable[..., Any], self: Trainer, model: Any) -> None:
    """Average what lies beside shards once: by grad_compression if it was asked for, and else by Trainer itself."""
    if attachment_of(self).models.compression_of(model) is None:
        original(self, model)


def _create_scheduler(
    original: Callable[..., Any], self: Trainer, num_training_steps: int, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, num_training_steps, *args, **kwargs)
    inner = innermost(self.optimizer)
    if follows_plan(inner):
        fit(inner, num_training_steps)
    return result


def trainer_options(args: Any) -> RunOptions:
    """The options of ``--optim``, ``--optim_args`` and, where these say nothing, of environment variables."""
    name, variables = optim_name(args), options_from_variables()
    options, chosen = read_optim_args(name, args.optim_args, variables), variables.get("optimizer", NONE)
    if name in ALGORITHMS or name in ZERO_NAMES:
        asked = f"--optim {name}"
    elif options.zero:
        asked = f"zero_stage={options.zero['stage']}"
    else:
        asked = "" if chosen == NONE else f"COMPRESSOPT_OPTIM={chosen}"
    return replace(options, asked=asked, by_trainer=True)


def optim_name(args: Any) -> str:
    """The optimizer by name: the value of ``--optim``, or what the environment chooses in the place of AdamW."""
    name, chosen = str(getattr(args.optim, "value", args.optim)), options_from_variables().get("optimizer", NONE)
    check_optimizer(chosen, "COMPRESSOPT_OPTIM")
    return chosen if name in _ADAMW and chosen != NONE else name


def attachment_of(self: Trainer) -> Attachment:
    """The state beside that of the Trainer's accelerator; an empty one for a Trainer that is older than register()."""
    return getattr(self.accelerator, "_compressopt", None) or Attachment()


# -- states -----------------------------------------------------------------------------------------------------------


def _save_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, output_dir: str) -> Any:
    inner = innermost(self.optimizer)
    background, compressions = _saves_in_background(self), attachment_of(self).models.compressions()
    accelerate.save_states([inner], [self.model], compressions, output_dir, background=background)
    with inner.state_in_shards() if saves_shards(inner) else nullcontext():
        return original(self, output_dir)


def _load_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, checkpoint: str | None) -> Any:
    """Load a checkpoint in shards into the optimizer of this run, also into an ordinary one such as AdamW."""
    inner = innermost(self.optimizer)
    if checkpoint is None or not isinstance(inner, torch.optim.Optimizer):
        return original(self, checkpoint)
    io.wait_for_saves()
    if compressions := attachment_of(self).models.compressions():
        ranks = TorchCommunicator(device=self.args.device, alone=self.accelerator.num_processes == 1)
        outdated = any(ranks.all_gather_object(_was_saved_without_compression(checkpoint)))  # one may have the file
        accelerate.load_compressions(compressions, checkpoint, outdated=outdated)
    if not accelerate.is_saved_in_shards(checkpoint, "optimizer.pt", inner, self.args.device):
        has_plain = os.path.isfile(os.path.join(checkpoint, "optimizer.pt"))
        if not has_plain and saves_shards(inner):
            logger.warning("%s holds no optimizer state (save_only_model?): the optimizer starts from zero", checkpoint)
        return original(self, checkpoint)
    io.load_state(inner, checkpoint, names=parameter_names(inner, [self.model]))
    with io.state_is_loaded(inner):
        return original(self, checkpoint)


def _was_saved_without_compression(checkpoint: str) -> bool:
    """Return whether the run that wrote a checkpoint compressed nothing, by the line that it logged in this step.

    A run without this package leaves the errors of an earlier one in the folder.
    """
    try:
        state = json.loads(Path(checkpoint, trainer.TRAINER_STATE_NAME).read_text())
        lines = [row for row in state["log_history"] if "loss" in row and row["step"] == state["global_step"]]
    except (OSError, ValueError, KeyError, TypeError):  # the file may be missing or damaged, as Trainer tells itself
        return False
    return bool(lines) and not any(name.startswith(f"{io.DEFAULT_PREFIX}/") for name in lines[-1])


def _get_last_checkpoint(original: Callable[[str], str | None], folder: str) -> str | None:
    """Find the last checkpoint as transformers does, without one whose writing was interrupted."""
    io.wait_for_saves()
    last = original(folder)
    if last is None:
        return None
    pattern = trainer_utils._re_checkpoint
    paths = {int(match[1]): entry.path for entry in os.scandir(folder) if (match := pattern.search(entry.name))}
    folders = [path for _, path in sorted(paths.items()) if os.path.isdir(path)]
    of_trainer = any(os.path.isfile(os.path.join(path, name)) for path in folders for name in _OF_TRAINER)
    newest = next((path for path in reversed(folders) if not _is_incomplete(path, of_trainer)), None)
    if newest is not None and os.path.samefile(newest, last):
        return last
    logger.warning("%s is incomplete: the last whole checkpoint is %s", last, newest)
    return newest


#: Files of Trainer's checkpoints; the first is written last.
_OF_TRAINER = (trainer.TRAINER_STATE_NAME, "training_args.bin")
_SHARD = re.compile(rf"({io.DEFAULT_PREFIX}\w*)-[0-9a-f]{{16}}-\d{{5}}-of-\d{{5}}\.")


def _is_incomplete(checkpoint: str, of_trainer: bool) -> bool:
    """Return whether a checkpoint lacks the index of shards that it has, or Trainer's state if it is Trainer's."""
    names = os.listdir(checkpoint)
    begun = {match[1] for name in names if (match := _SHARD.match(name))}
    if not all(io.has_checkpoint(checkpoint, prefix=prefix) for prefix in begun):
        return True
    return of_trainer and trainer.TRAINER_STATE_NAME not in names


# -- saves in the background ------------------------------------------------------------------------------------------


def _saves_in_background(self: Trainer) -> bool:
    return saves_shards(innermost(self.optimizer)) and attachment_of(self).options.async_save


def _save_checkpoint(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    attachment, background = attachment_of(self), _saves_in_background(self)
    if background:
        attachment.finish_saves()
    with _rotation_put_off(self) if background else nullcontext(), _model_saved_together(self):
        return original(self, *args, **kwargs)


@contextmanager
def _rotation_put_off(self: Trainer) -> Iterator[None]:
    """Keep older checkpoints inside: they go when the one that is being written is complete."""
    holder: Any = trainer if hasattr(trainer, "rotate_checkpoints") else self  # a method before transformers 5
    name = "rotate_checkpoints" if holder is trainer else "_rotate_checkpoints"
    rotate = getattr(holder, name)
    setattr(holder, name, lambda *a, **k: attachment_of(self).put_off(partial(rotate, *a, **k)))
    try:
        yield
    finally:
        setattr(trainer, name, rotate) if holder is trainer else delattr(self, name)


def _log(original: Callable[..., Any], self: Trainer, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    if "train_runtime" in logs and _saves_in_background(self):
        attachment_of(
            self
        ).finish_saves()  # Trainer's last line, before it removes the checkpoints that it does not keep
    if "loss" in logs or "train_runtime" in logs:
        ours = [*filter(saves_shards, [innermost(self.optimizer)]), *attachment_of(self).models.compressions()]
        if "loss" in logs:
            logs.update(prefixed_metrics(*ours))
        elif not run_totals(*ours).keys() <= logs.keys():  # of the whole run: train() returns, save_metrics writes it
            logs.update(run_totals(*ours))
            if self.is_world_process_zero() and (line := closing_line(*ours)):
                logger.info("%s", line)
    return original(self, logs, *args, **kwargs)


def _push_from_checkpoint(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    if "checkpoint" in str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy)):
        io.wait_for_saves()  # the folder itself is uploaded
    return original(self, *args, **kwargs)


# -- one set of parameters --------------------------------------------------------------------------------------------


def _with_averaged_parameters(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Use one set of parameters and buffers, also where each rank has its own. All ranks call."""
    inner = innermost(self.optimizer)
    for buffers in attachment_of(self).buffers:
        buffers.share()
    with inner.averaged_parameters() if follows_plan(inner) else nullcontext():
        return original(self, *args, **kwargs)


#: Methods by which TRL's Trainers, and objects and callbacks of theirs, read the parameters in the midst of a training.
_READERS = ("_move_model_to_vllm", "sync_weights", "sync_target_model")


def _sync_before_reading(self: Trainer) -> None:
    """Have known readers, such as TRL's copy of the weights to vLLM, see one set of parameters between two syncs."""
    others = [value for value in vars(self).values() if type(value).__module__.startswith("trl.")]
    for owner in (self, *others, *self.callback_handler.callbacks):
        for name in _READERS:
            method = getattr(owner, name, None)
            if callable(method) and not isinstance(method, partial):
                setattr(owner, name, partial(_with_synced_parameters, self, method))


def _with_synced_parameters(self: Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    inner = innermost(self.optimizer)
    with inner.synced_parameters() if follows_plan(inner) else nullcontext():
        return original(*args, **kwargs)


@contextmanager
def _model_saved_together(self: Trainer) -> Iterator[None]:
    """Have all ranks prepare inside for save_model, with which a subclass may let one rank alone go on."""
    given, own = self.save_model, "save_model" in vars(self)
    self.save_model = partial(_save_model_together, self, given)
    try:
        yield
    finally:
        if own:
            self.save_model = given
        else:
            del self.save_model


def _save_model_together(self: Trainer, save_model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Save the average or the masters. All ranks call."""
    inner = innermost(self.optimizer)
    with attachment_of(self).checkpoint(), inner.masters_in_parameters() if owns_gradients(inner) else nullcontext():
        result = _with_averaged_parameters(lambda _: save_model(*args, **kwargs), self)
    if saves_shards(inner):
        # Each rank now looks whether the folder of the best checkpoint exists, which rank 0 makes. Transformers
        # before 4.57 did not wait for it: a rank that saw none missed the barrier of load_best_model_at_end.
        self.accelerator.wait_for_everyone()
    return result


def _save_model(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Save the parameters as they are in a checkpoint, for which all ranks prepare; else those of the last sync."""
    inner = innermost(self.optimizer)
    alone = follows_plan(inner) and not attachment_of(self).in_checkpoint
    with inner.synced_parameters() if alone else nullcontext():
        return original(self, *args, **kwargs)


def _load_best_model(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Load the best model on all ranks, and have the optimizer continue from it."""
    result = original(self, *args, **kwargs)
    inner = innermost(self.optimizer)
    if follows_plan(inner):
        inner.parameters_replaced()
    return result
