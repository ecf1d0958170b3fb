"""Accelerate's plug-in: an Accelerator whose models leave gradients local when a compressed optimizer asks."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial, wraps
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from accelerate.utils.constants import OPTIMIZER_NAME
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt.amp import GradScaler, innermost
from hf_compressopt.announce import closing_line, show_log
from hf_compressopt.checkpoint import io
from hf_compressopt.checkpoint.partitioned import PlainState
from hf_compressopt.collectives.backward import guard_torch_clipping
from hf_compressopt.collectives.buffers import SharedBuffers
from hf_compressopt.collectives.ddp import refuse_gradient_readers
from hf_compressopt.collectives.sender import PassesDiffer, SendRecord, is_answered_for, named_parameters
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.format.index import BY_PLACE, INDEX_NAME, CheckpointIndex
from hf_compressopt.fsdp.compression import FSDPCompression
from hf_compressopt.grad_compression import GradientCompression
from hf_compressopt.integrations import log
from hf_compressopt.integrations.algorithms import (
    Ours,
    Prepared,
    follows_plan,
    frees_gradients,
    owns_gradients,
    saves_shards,
    shares,
)
from hf_compressopt.integrations.models import (
    Models,
    check_distributed_type,
    is_loaded_in_shards,
    undo_evaluation_mode,
    without_compile,
)
from hf_compressopt.integrations.plugin import UNREAD, CompressOptPlugin
from hf_compressopt.integrations.run_options import NONE, RunOptions
from hf_compressopt.optim.state import STATE_KEY
from hf_compressopt.options import texts_of
from hf_compressopt.schedules import AUTO
from hf_compressopt.zero.optimizer import ZeroOptimizer

logger = logging.getLogger(__name__)
#: Seconds after which a rank says that it waits for others.
PATIENCE = 20
_MARK = "_hf_compressopt"  # of a method that is wrapped
#: Options of which one, as a variable, makes ``python -m hf_compressopt.run`` attach every accelerator.
_CHOICES = ("optimizer", "grad_compression", "zero_stage")


@dataclass
class Attachment:
    """State of a CompressOptAccelerator beside that of an Accelerator."""

    options: RunOptions = field(default_factory=RunOptions)
    has_options: bool = False  # a Trainer's, or a plug-in's
    plugin: CompressOptPlugin | None = None  # whose options they are
    checked: bool = False  # since the last object was prepared
    models: Models = field(default_factory=Models)
    prepared: Prepared = field(default_factory=Prepared)
    partitioned: set[int] = field(default_factory=set)  # parameters (by id) of partitioned optimizers
    following: set[int] = field(default_factory=set)  # parameters (by id) of compressed optimizers given to prepare
    record: SendRecord = field(default_factory=lambda: SendRecord("hf_compressopt"))  # of what no hook answers for
    buffers: list[SharedBuffers] = field(default_factory=list)  # of models prepared without DDP
    loading: ExitStack = field(default_factory=ExitStack)  # open while Accelerate loads a state
    in_checkpoint: bool = False  # all ranks are saving a checkpoint
    lengths: list[log.SchedulerLength] = field(default_factory=list)  # that no step has confirmed yet
    rotations: list[Callable[[], None]] = field(default_factory=list)  # put off until a save in the background is done
    meetings: int = 0  # of all ranks, where each of them calls the same

    def take(self, options: RunOptions, plugin: CompressOptPlugin | None = None) -> None:
        """Take the options of a Trainer or of a plug-in."""
        self.options = options
        self.has_options = True
        self.plugin = plugin

    def read_plugin(self) -> None:
        """Take what the plug-in says now: its fields may be set until something is prepared."""
        if self.plugin is not None:
            self.options = self.plugin.run_options()

    def leave_gradients_alone(self) -> None:
        """Compress no gradients of ordinary optimizers, as there is nobody to send them to."""
        self.options = replace(self.options, grad_compression=NONE, param_compression=AUTO)
        self.plugin = None

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Inside, all ranks save the model of a checkpoint, for which its parameters were averaged."""
        self.in_checkpoint = True
        try:
            yield
        finally:
            self.in_checkpoint = False

    def put_off(self, rotation: Callable[[], None]) -> None:
        """Remove old checkpoints later, when the one that is being written is complete."""
        self.rotations.append(rotation)

    def finish_saves(self) -> None:
        """Wait for the save in the background, then remove the checkpoints that it replaces."""
        io.wait_for_saves()
        while self.rotations:
            self.rotations.pop(0)()

    def note_given(self, optimizer: Any) -> None:
        """Record the parameters of an optimizer that is given to ``prepare``, before any model is prepared."""
        if owns_gradients(optimizer) or frees_gradients(optimizer):
            self.partitioned |= {id(p) for p in optimizer.trainable_parameters}
        elif follows_plan(optimizer):
            self.following |= {id(p) for p in optimizer.trainable_parameters}

    def share_buffers(self, accelerator: Accelerator, model: nn.Module, communicator: TorchCommunicator) -> None:
        """Have the ranks share a model's buffers as DDP would, unless its options say otherwise."""
        for shared in [each for each in self.buffers if each.belongs_to(model)]:
            shared.remove()
            self.buffers.remove(shared)
        if getattr(accelerator.ddp_handler, "broadcast_buffers", True):
            self.buffers.append(SharedBuffers(model, communicator, lambda: bool(accelerator.sync_gradients)))

    @contextmanager
    def gradients_in_buckets(self, accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
        """Inside, a model whose gradients travel in messages of this package has them in the buckets of its DDP."""
        options, handler = self.options, accelerator.ddp_handler
        travels = options.grad_compression != NONE or options.optimizer != NONE
        if options.gradient_as_bucket_view and (travels or shares(model.parameters(), self.following)):
            accelerator.ddp_handler = replace(handler or DistributedDataParallelKwargs(), gradient_as_bucket_view=True)
        try:
            yield
        finally:
            accelerator.ddp_handler = handler


class CompressOptAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's wrapper, which also reports the steps that the optimizer skips by itself."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped, by the scaler or by the optimizer."""
        return bool(self._is_overflow or self.optimizer.step_was_skipped)


class CompressOptAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator for compressed optimizers; with any other optimizer it is Accelerate's own.

    It leaves the gradients of a DDP model local when the optimizer's plan says so, clips them by a norm that all ranks
    know, keeps a GradScaler's decisions alike on all ranks, saves and loads the optimizer's state in shards, and adds
    the optimizer's metrics to every log line::

        accelerator = CompressOptAccelerator(compressopt_plugin=CompressOptPlugin(grad_compression="int4"))

    Args:
        *args: Accelerate's.
        compressopt_plugin: Options. Without a plugin Adam and AdamW stay as they are; give compressed optimizers to
            ``prepare`` instead.
        **kwargs: Accelerate's.

    Raises:
        ValueError: In ``prepare`` and ``backward``, if an optimizer or a compression cannot work in this set-up; in
            ``clip_grad_norm_``, for a norm_type other than 2 and parameters of a compressed optimizer.
        CheckpointError: In ``load_state``, for a checkpoint that is damaged or does not fit.
        OSError: In ``save_state``, ``load_state`` and ``end_training``, if a file cannot be written, or a save in the
            background has failed; on all ranks.
    """

    _compressopt: Attachment

    def __init__(self, *args: Any, compressopt_plugin: CompressOptPlugin | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach(self, compressopt_plugin)

    def optimizers_inside(self) -> list[torch.optim.Optimizer]:
        """The prepared optimizers, without the wrappers of Accelerate."""
        return list(self._prepared().inner)

    def our_optimizers(self) -> list[Ours]:
        """The compressed and the partitioned optimizers among them."""
        return list(filter(saves_shards, self.optimizers_inside()))

    def _prepared(self) -> Prepared:
        """Return the optimizers of now, which Accelerate keeps in a list of its own."""
        state = self._compressopt
        if state.prepared.wrapped != self._optimizers:
            state.prepared = Prepared.of(self._optimizers)
        return state.prepared

    # -- prepare ------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as Accelerate does; a model whose optimizer is partitioned gets no DDP."""
        self._compressopt.read_plugin()
        for optimizer in map(innermost, args):
            if hasattr(optimizer, "param_groups") or type(optimizer).__name__ == "DummyOptim":  # DeepSpeed's own
                check_distributed_type(self, optimizer, self._compressopt.options)
            self._compressopt.note_given(optimizer)
        prepared = super().prepare(*args, **kwargs)
        if self.distributed_type == DistributedType.FSDP:
            self._compress_sharded(prepared if isinstance(prepared, (tuple, list)) else (prepared,))
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare as Accelerate does; a model that was prepared for evaluation only is prepared anew for training."""
        self._compressopt.read_plugin()
        state, options = self._compressopt, self._compressopt.options
        loaded = is_loaded_in_shards(without_compile(model))
        if loaded and not evaluation_mode:
            check_distributed_type(self, None, options, without_compile(model))
            evaluation_mode = options.grad_compression != NONE  # the model averages its gradients itself
        if not evaluation_mode and self.num_processes > 1:
            undo_evaluation_mode(model, self._models)
        if not evaluation_mode and (options.keeps_models_out_of_ddp or shares(model.parameters(), state.partitioned)):
            alone: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
            if self.num_processes > 1:
                refuse_gradient_readers(model, "ZeRO")
                state.record.add(model.named_parameters())  # of which other optimizers may have some
            communicator = TorchCommunicator(device=self.device)
            for tensor in (*alone.parameters(), *alone.buffers()):  # as DDP does
                communicator.broadcast(tensor)
            state.share_buffers(self, alone, communicator)
            return alone
        with state.gradients_in_buckets(self, model):
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        if loaded:  # transformers' Trainer prepares it for evaluation
            self._compress_sharded([prepared])
        state.models.add(prepared)
        self._bind()
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare as Accelerate does; by the plugin, an Adam or AdamW becomes a compressed optimizer."""
        self._compressopt.read_plugin()
        state, options = self._compressopt, self._compressopt.options
        check_distributed_type(self, innermost(optimizer), options)
        if self.is_main_process and (reason := options.why_left_alone(innermost(optimizer))):
            logger.warning("%s", reason)
        optimizer = options.convert(optimizer)
        inner = innermost(optimizer)
        if owns_gradients(inner):
            self._take_over_gradients(inner)
        elif frees_gradients(inner) and self.num_processes > 1 and inner.sharded_overlap is not None:
            state.models.check_not_averaging(inner)
            inner.sharded_overlap.follow_loss_scale(self._loss_scale)
        if saves_shards(inner) and self.scaler is not None and not isinstance(self.scaler, GradScaler):
            self.scaler.__class__ = GradScaler
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if hasattr(inner, "step_was_skipped"):
            prepared.__class__ = CompressOptAcceleratedOptimizer
        if follows_plan(inner) and options.total_steps is not None:
            log.fit(inner, options.total_steps)
        self._bind()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare as Accelerate does; the scheduler waits for its own optimizer only, and tells the run's length."""
        prepared = super().prepare_scheduler(scheduler)
        driven = {id(group) for group in getattr(getattr(scheduler, "optimizer", None), "param_groups", ())}
        optimizers = [o for o in self._optimizers if driven & {id(group) for group in o.param_groups}]
        if optimizers and hasattr(prepared, "optimizers"):
            # Accelerate takes all, if the plugin has replaced the scheduler's optimizer
            prepared.optimizers = optimizers
        steps = log.scheduler_steps(scheduler)
        if steps is not None and self._compressopt.options.total_steps is None:
            per_step = 1 if self.split_batches or not self.step_scheduler_with_optimizer else self.num_processes
            for optimizer in filter(follows_plan, map(innermost, optimizers)):
                length = log.SchedulerLength(optimizer, scheduler, max(1, steps // per_step), per_step)
                length.fit()
                if hasattr(scheduler, "last_epoch"):
                    self._compressopt.lengths.append(length)
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Free as Accelerate does; models that live on have their gradients averaged until a next optimizer comes."""
        state = self._compressopt
        state.models.release()
        state.prepared = Prepared()  # which would keep the optimizers alive
        state.lengths.clear()
        state.record.close()
        for known in (state.partitioned, state.following):
            known.clear()
        while state.buffers:
            state.buffers.pop().remove()
        return super().free_memory(*objects)

    def _take_over_gradients(self, optimizer: ZeroOptimizer) -> None:
        """Check that no DDP averages the optimizer's gradients, and that no earlier optimizer takes them away."""
        self._compressopt.models.check_not_averaging(optimizer)
        params = {id(p) for p in optimizer.trainable_parameters}
        for other in filter(owns_gradients, self.optimizers_inside()):
            if other is not optimizer and shares(other.trainable_parameters, params):
                other.detach()

    def _compress_sharded(self, prepared: Sequence[Any]) -> None:
        """Send the gradients of FSDP2's models between replicas in low-bit messages, if the user asked for it."""
        state, models = self._compressopt, [each for each in prepared if isinstance(each, nn.Module)]
        if state.options.grad_compression != NONE and models:
            state.models.compress_sharded(models, state.options, self._loss_scale)

    def _bind(self) -> None:
        """Give every model the hook that its optimizers need."""
        state, optimizers = self._compressopt, self.optimizers_inside()
        for optimizer in filter(frees_gradients, optimizers):  # the others get names from DDP's hook
            for model in map(without_compile, self._models):
                optimizer.label_parameters(model.named_parameters())
        state.checked = False
        compresses = state.options.grad_compression != NONE
        if optimizers and self.num_processes == 1 and (compresses or any(map(saves_shards, optimizers))):
            _refuse_processes_apart()
        if compresses and self.num_processes == 1 and optimizers:
            message = (
                "%s has no effect: there is one process (WORLD_SIZE is not set, or 1), which sends nothing; start more "
                "by torchrun --nproc_per_node N"
            )
            logger.warning(message, state.options.compresses)
            state.leave_gradients_alone()
        if state.options.param_compression == "exact" and state.models.has_ddp:
            raise ValueError(
                "param_compression=exact is for ZeRO (zero_stage) and for FSDP2: DistributedDataParallel sends no "
                "parameters; leave it out"
            )
        users_hook = getattr(self.ddp_handler, "comm_hook", None)
        waiting = state.following  # for its optimizer
        state.models.bind(optimizers, state.options, users_hook, self._loss_scale, waiting)
        if self.num_processes > 1:
            self._answer(optimizers)

    def _answer(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Answer for the gradients that optimizers have beside those of models with a hook of this package."""
        state, names = self._compressopt, dict[int, str]()
        state.record.add(state.models.ignored(), watched=False)
        for model in self._models:
            names.update((id(param), name) for name, param in without_compile(model).named_parameters())
        for optimizer in optimizers:
            if follows_plan(optimizer):
                rows = optimizer.shared_parameters()
            elif state.options.grad_compression != NONE and not owns_gradients(optimizer):
                rows = named_parameters(optimizer)
            else:
                continue
            rows = [row for row in rows if not is_answered_for(row[1])]
            state.record.add((names.get(id(param), name), param) for name, param in rows)

    def _loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    # -- a step -------------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Skip the averaging as Accelerate does; gradients stay whole inside, but ZeRO stage 2 of others sends them."""
        params = {id(p) for p in model.parameters()}
        with ExitStack() as stack:
            stack.enter_context(super().no_sync(model))
            for optimizer in self.our_optimizers():
                whole = frees_gradients(optimizer) or (owns_gradients(optimizer) and optimizer.stage == 1)
                if whole and shares(optimizer.trainable_parameters, params):
                    stack.enter_context(cast("ZeroOptimizer", optimizer).no_sync())
            yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Join as Accelerate does; a model whose optimizer all ranks must step together is refused by name."""
        ids = {id(p) for joined in joinables if isinstance(joined, nn.Module) for p in joined.parameters()}
        for optimizer in self.our_optimizers() if self.num_processes > 1 else ():
            if shares(optimizer.trainable_parameters, ids):
                optimizer.join_hook()
        return super().join_uneven_inputs(joinables, even_batches)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip as Accelerate does; local gradients are clipped by a norm that all ranks agree on."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(p) for p in parameters}
        prepared = self._prepared()
        compressed = [o for o in prepared.compressed if not ids.isdisjoint(map(id, o.trainable_parameters))]
        partitioned = [o for o in prepared.partitioned if not ids.isdisjoint(map(id, o.trainable_parameters))]
        owners: list[Ours] = [*compressed, *partitioned]
        if owners and norm_type != 2:
            raise ValueError(f"norm_type must be 2 with {type(owners[0]).__name__}, got {norm_type}")
        local: list[Ours] = [*(owner for owner in compressed if owner.local_gradients), *partitioned]
        if self.scaler is not None and not (self.native_amp and self.mixed_precision == "fp16"):
            for owner in owners:  # the scaler was set by hand
                self.scaler.unscale_(owner)
        elif local:
            self.unscale_gradients()
        if not local:
            norm: Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
            for owner in compressed:
                if norm is not None and ids.issuperset(map(id, owner.trainable_parameters)):
                    owner.note_clipping(norm, max_norm)
            return norm
        if len(owners) > 1 and partitioned:
            raise ValueError("clip the parameters of one ZeroOptimizer at a time: each has a norm of its own")
        return local[0].clip_grad_norm_(max_norm, parameters)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as Accelerate does, on the loss times the loss scale that a ZeroOptimizer divides by again."""
        prepared = self._prepared()
        scales = {optimizer.loss_scale.value for optimizer in prepared.partitioned}
        if len(scales) > 1:
            raise ValueError(f"one backward cannot serve ZeroOptimizers of different loss scales, got {sorted(scales)}")
        if scales - {1.0} and len(prepared.partitioned) < len(prepared.inner):
            other = next(optimizer for optimizer in prepared.inner if not owns_gradients(optimizer))
            raise ValueError(
                f"a ZeroOptimizer's loss_scale of {scales.pop()} scales the gradients of {type(other).__name__} too, "
                "which does not divide by it: leave loss_scale out, and give the accelerator mixed_precision='fp16', "
                "whose scaler serves all optimizers"
            )
        state = self._compressopt
        state.lengths = [length for length in state.lengths if not length.is_settled()]
        if not state.checked and self.num_processes > 1:
            self._check_attached()
        super().backward(loss * scales.pop() if scales - {1.0} else loss, **kwargs)
        state.checked = True

    def _check_attached(self) -> None:
        """Check at the start of a training that an optimizer of this package trains, if the user asked for one."""
        options, optimizers = self._compressopt.options, self.optimizers_inside()
        if not options.asked or self.our_optimizers():
            return
        if not optimizers:
            raise ValueError(
                f"{options.asked} was asked for, but no optimizer was given to prepare(), and nothing is compressed: "
                "give the model and its optimizer to one prepare(model, optimizer), and train with what it returns"
            )
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        remedy = "give the accelerator an optimizer that it can replace (AdamW), or one of this package"
        if options.by_trainer:
            remedy = (
                "leave optimizers=(...) of the Trainer out, and Trainer makes the optimizer that was asked for, or "
                "give it an optimizer of this package there; a create_optimizer of your own must return such a one"
            )
        raise ValueError(
            f"{options.asked} was asked for, but {names} trains the model, and nothing is compressed: {remedy}. To "
            "train without compression leave the option out"
        )

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log as Accelerate does, with the optimizers' metrics as ``compressopt/...``."""
        compressions = self._compressopt.models.compressions()
        metrics = {**log.prefixed_metrics(*self.our_optimizers()), **log.prefixed_metrics(*compressions)}
        super().log({**metrics, **values}, step=step, log_kwargs=log_kwargs or {})

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the model's state dict as Accelerate does; inside a local interval of 0/1 Adam, that of the last sync.

        Between two syncs every rank has parameters of its own. Those of the last sync are the same on all ranks, and
        reading them needs no communication, so that one rank alone may call this and ``save_model``. With a
        ZeroOptimizer's ``param_compression`` the state dict has the master weights, which the ranks share: all ranks
        call.
        """
        params = {id(p) for p in model.parameters()}
        with ExitStack() as stack:
            owners = [o for o in self.our_optimizers() if shares(o.trainable_parameters, params)]
            synced = list(filter(follows_plan, owners))
            replicas = [o for o in filter(owns_gradients, owners) if o.partition.has_replicas]
            apart = bool(replicas) or any(owner.ranks_are_apart for owner in synced)
            for optimizer in replicas:
                stack.enter_context(optimizer.masters_in_parameters())
            for owner in synced:
                stack.enter_context(owner.synced_parameters())
            state = super().get_state_dict(model, unwrap)
            if not apart:
                return state
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerate does; compressed optimizers' states go to safetensors shards. All ranks call."""
        self._close_passes("saves its state")
        io.wait_for_saves()  # Accelerate may remove older folders first
        with ExitStack() as stack:
            for optimizer in self.our_optimizers():
                stack.enter_context(optimizer.state_in_shards())
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load as Accelerate does; compressed optimizers' states come from the shards. All ranks call."""
        io.wait_for_saves()
        with ExitStack() as self._compressopt.loading:
            return super().load_state(*args, **kwargs)

    def end_training(self) -> None:
        """End the training as Accelerate does, after the saves in the background, and say what the run has sent."""
        if sys.exc_info()[0] is None:  # else, in a ``finally``, the others do something else
            self._close_passes("ends the training", is_last=True)
        io.wait_for_saves()
        line = closing_line(*self.our_optimizers(), *self._compressopt.models.compressions())
        if line and self.is_main_process:
            logger.info("%s", line)
        super().end_training()

    def _close_passes(self, doing: str, *, is_last: bool = False) -> None:
        """Raise an error on all ranks if one is still in a backward pass. All ranks call; one alone is told so.

        Unless the ranks exchange anything after it (``is_last``), it is no error if the missing ones have ended.
        """
        models, ours = self._compressopt.models, self.our_optimizers()
        if self.num_processes == 1 or not (ours or models.compressions()) or not dist.is_initialized():
            return
        self._compressopt.meetings += 1
        all_are_here = tell_who_is_missing(doing, self._compressopt.meetings)
        try:
            models.close_passes(doing)
            for optimizer in filter(owns_gradients, ours):
                optimizer.partition.reducer.backward.passes.close(doing)
        except PassesDiffer:
            raise
        except RuntimeError as error:
            if all_are_here or not is_last:
                raise
            logger.warning("rank %d %s without ranks that have ended (%s)", self.process_index, doing, error)

    def _save_shards(self, models: list[nn.Module], weights: Any, directory: str) -> None:
        state = self._compressopt
        background = state.options.async_save
        save_states(self.optimizers_inside(), models, state.models.compressions(), directory, background=background)

    def _load_shards(self, models: list[nn.Module], directory: str) -> None:
        load_shards(self.optimizers_inside(), models, directory, self.device, self._compressopt.loading)
        load_compressions(self._compressopt.models.compressions(), directory)


def tell_who_is_missing(doing: str, number: int) -> bool:
    """Warn of ranks that do not come where all must call: messages to them, which follow, may never be answered.

    Returns whether all have come. They tell by the store of the process group, with the ``number`` of their meeting.
    """
    store = PrefixStore(f"compressopt/{doing}/{number}", dist.distributed_c10d._get_default_store())
    names = list(map(str, range(dist.get_world_size())))
    store.set(names[dist.get_rank()], "here")
    try:
        store.wait(names, timedelta(seconds=PATIENCE))
    except RuntimeError:  # the time is over
        missing = [name for name in names if not store.check([name])]
        logger.warning(
            "rank %d %s, and for %d s rank %s has not come to do so: save_state() and end_training() are for all "
            "ranks, and not for the main process alone, as inside `if accelerator.is_main_process`, which may wait for "
            "ever",
            dist.get_rank(),
            doing,
            PATIENCE,
            ", ".join(missing),
        )
        return False
    return True


# -- states in shards, beside the files of the host -------------------------------------------------------------------


def save_states(
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[nn.Module],
    compressions: Sequence[GradientCompression | FSDPCompression],
    directory: str,
    *,
    background: bool,
) -> None:
    """Save the states of the optimizers that save shards, and the errors of compressed gradients. All ranks call."""
    save = io.async_save_state if background else io.save_state
    for number, optimizer in enumerate(filter(saves_shards, optimizers)):
        save(optimizer, directory, names=parameter_names(optimizer, models), prefix=log.prefix_of(number))
    saved = [_errors_prefix(number) for number in range(len(compressions))]
    for prefix, state in zip(saved, compressions, strict=True):
        io.save_state(state, directory, prefix=prefix)
    for file in sorted(Path(directory).glob(INDEX_NAME.format(prefix="*"))):
        prefix = file.name.removesuffix(INDEX_NAME.format(prefix=""))
        if _ERRORS_PREFIX.fullmatch(prefix) and prefix not in saved:  # of a run that had more to save
            io.remove_checkpoint(directory, prefix=prefix)


def load_shards(
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[nn.Module],
    directory: str,
    device: torch.device,
    loading: ExitStack,
) -> None:
    """Load the states of the optimizers that :func:`save_states` saved. All ranks call."""
    # With as many checkpoints as optimizers, the ordinary optimizers load theirs too.
    last = len(optimizers) - 1

    def is_saved(number: int, optimizer: torch.optim.Optimizer) -> bool:
        place = next(place for place, each in enumerate(optimizers) if each is optimizer)
        host_file = f"{OPTIMIZER_NAME}.bin" if place == 0 else f"{OPTIMIZER_NAME}_{place}.bin"
        return is_saved_in_shards(directory, host_file, optimizer, device, prefix=log.prefix_of(number))

    everybody = bool(optimizers) and is_saved(last, optimizers[last])
    for number, optimizer in enumerate(optimizers if everybody else filter(saves_shards, optimizers)):
        if not is_saved(number, optimizer):
            continue  # the state dict in the folder must be a whole one
        io.load_state(optimizer, directory, names=parameter_names(optimizer, models), prefix=log.prefix_of(number))
        loading.enter_context(io.state_is_loaded(optimizer))
        if owns_gradients(optimizer):
            loading.callback(optimizer.partition.replicas_restorer())  # the model's file has the masters' values
        if follows_plan(optimizer):
            loading.callback(optimizer.own_parameters_restorer())  # the host loads one model into all ranks next


def load_compressions(
    compressions: Sequence[GradientCompression | FSDPCompression], directory: str, *, outdated: bool = False
) -> None:
    """Load the errors that :func:`save_states` saved; without them the errors start at zero. All ranks call.

    ``outdated``: those that are there belong to an earlier checkpoint in the same folder.
    """
    for number, state in enumerate(compressions):
        prefix = _errors_prefix(number)
        are_there = any(state.communicator.all_gather_object(io.has_checkpoint(directory, prefix=prefix)))
        if are_there and not outdated:
            io.load_state(state, directory, prefix=prefix)
            continue
        io.zero_errors(state)
        if state.communicator.rank == 0:
            logger.warning(
                "%s holds no errors of compressed gradients (was it saved without grad_compression?): they start at "
                "zero, so that the run does not continue bit for bit",
                directory,
            )


_ERRORS_PREFIX = re.compile(rf"{io.DEFAULT_PREFIX}(_\d+)?_gradients")


def _errors_prefix(number: int) -> str:
    return f"{log.prefix_of(number)}_gradients"


def is_saved_in_shards(
    directory: str,
    host_file: str,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    prefix: str = io.DEFAULT_PREFIX,
) -> bool:
    """True if a folder has an optimizer's state in shards, on any rank that has this optimizer. All ranks call.

    Beside shards the host's own file is a stub. If it holds a state, a later run into the same folder wrote it, which
    has left the shards of an earlier one, and that state counts.
    """
    found = io.has_checkpoint(directory, prefix=prefix)
    mine = [found, found and _is_older(Path(directory), host_file, prefix)]
    several = dist.is_available() and dist.is_initialized()
    others = TorchCommunicator(device=device, alone=not several)
    ranks = optimizer.communicator if saves_shards(optimizer) else others
    everyone = ranks.all_gather_object(mine)
    outdated = any(older for _, older in everyone)
    if outdated and ranks.rank == 0:
        logger.warning(
            "%s holds an optimizer's state twice: in shards, and in %s, which has been written there without them. The "
            "state in %s is loaded",
            directory,
            host_file,
            host_file,
        )
    return not outdated and any(found for found, _ in everyone)


def _is_older(folder: Path, host_file: str, prefix: str) -> bool:
    """Return whether shards are of an earlier run than the host's file, which is whole, and from which none come."""
    try:
        state = torch.load(folder / host_file, map_location="cpu", weights_only=True, mmap=True)
        imported = CheckpointIndex.read(folder / INDEX_NAME.format(prefix=prefix)).header.get(BY_PLACE)
    except Exception:  # the file may be missing or damaged, of which the load itself tells
        return False
    return isinstance(state, dict) and "state" in state and STATE_KEY not in state and not imported


def parameter_names(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[str]:
    """Names of the optimizer's trainable parameters, by the models that hold them, else by the optimizer."""
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        inner = without_compile(model)
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        for name, param in without_compile(inner).named_parameters():
            names.setdefault(id(param), name if len(models) == 1 else f"model{number}.{name}")
    if saves_shards(optimizer):
        params, labels = list(optimizer.trainable_parameters), optimizer.parameter_names()
    else:
        state = PlainState(optimizer)
        params, labels = list(chain.from_iterable(state.params)), state.parameter_names()
    return [names.get(id(p), label) for p, label in zip(params, chain.from_iterable(labels), strict=True)]


# -- attaching --------------------------------------------------------------------------------------------------------


def wrap(cls: type, name: str, wrapper: Callable[..., Any], *, static: bool = False) -> None:
    """Replace a method, once, by ``wrapper(original, self, *args, **kwargs)``, without ``self`` if it is static."""
    original = getattr(cls, name, None)
    if original is None:
        host = cls.__module__.partition(".")[0]
        raise RuntimeError(
            f"{host} {version(host)} has no {cls.__name__}.{name}, which hf_compressopt has to change: install a newer "
            f"hf_compressopt, or an older {host}"
        )
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(method, _MARK, True)
    setattr(cls, name, staticmethod(method) if static else method)


def register() -> None:
    """Have every Accelerator attach itself when it prepares a model, or an optimizer of this package.

    Calling it again changes nothing. With other optimizers every Accelerator works as before.
    """
    guard_torch_clipping()
    for name in ("prepare", "prepare_model", "prepare_optimizer"):
        wrap(Accelerator, name, partial(_attach_and_prepare, name))


def _refuse_processes_apart() -> None:
    """Raise if a launcher has started several processes, and Accelerate takes this one for all."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise ValueError(
            f"WORLD_SIZE is {size}, but Accelerate sees one process, so that each would train a model of its own. On "
            "CPUs it has to be told so: ACCELERATE_USE_CPU=1, Accelerator(cpu=True), or --use_cpu for Trainer"
        )


def _attach_and_prepare(name: str, original: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Attach the accelerator first, if it is a stock one that may get an optimizer of this package."""
    ours = any(saves_shards(innermost(arg)) for arg in args)
    if "_compressopt" in vars(self) or not (ours or name == "prepare_model"):
        return original(self, *args, **kwargs)
    if self._models or self._optimizers:
        if ours and self.num_processes > 1:
            raise ValueError(
                "this Accelerator prepared a model before it knew of a compressed optimizer, and would average its "
                "gradients in full precision: call hf_compressopt.register() before the first prepare, or use "
                "CompressOptAccelerator"
            )
        return original(self, *args, **kwargs)
    if ours:
        show_log(always=True)
    return getattr(make_ours(self), name)(*args, **kwargs)


def attach(accelerator: Accelerator, plugin: CompressOptPlugin | None = None) -> CompressOptAccelerator:
    """Make an existing accelerator a :class:`CompressOptAccelerator`, in place, before it prepares an optimizer.

    Args:
        accelerator: The accelerator.
        plugin: Options; see :class:`CompressOptAccelerator`.

    Returns:
        The same object.

    Raises:
        ValueError: If it has prepared a model or an optimizer already.
    """
    ours = "_compressopt" in vars(accelerator)
    if (accelerator._models or accelerator._optimizers) and (plugin is not None or not ours):
        raise ValueError(
            "this accelerator has prepared a model or an optimizer already, so it is too late to attach it: call "
            "attach right after Accelerator(...), or use CompressOptAccelerator instead"
        )
    if not ours:
        show_log(always=True)
        make_ours(accelerator)
    if plugin is not None:
        accelerator._compressopt.take(plugin.run_options(), plugin)
        UNREAD.variables.clear()
    return cast("CompressOptAccelerator", accelerator)


def make_ours(accelerator: Accelerator) -> CompressOptAccelerator:
    """Change the accelerator's class, in place."""
    guard_torch_clipping()
    cls = type(accelerator)
    if cls is Accelerator:
        accelerator.__class__ = CompressOptAccelerator
    elif not issubclass(cls, CompressOptAccelerator):
        accelerator.__class__ = type(f"CompressOpt{cls.__name__}", (CompressOptAccelerator, cls), {})
    accelerator._compressopt = Attachment()
    accelerator.register_save_state_pre_hook(accelerator._save_shards)
    accelerator.register_load_state_pre_hook(accelerator._load_shards)
    return cast("CompressOptAccelerator", accelerator)


def adopt_accelerators() -> None:
    """Attach every accelerator that the program makes from now on, if a variable chooses something to compress."""
    if any(map(texts_of, _CHOICES)):
        CompressOptPlugin()  # a wrong variable is an error before the program starts
        wrap(Accelerator, "__init__", _make_and_attach)


def _make_and_attach(original: Callable[..., None], self: Accelerator, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    attach(self, CompressOptPlugin())
