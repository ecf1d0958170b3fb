"""Accelerate's plug-in: an Accelerator whose DDP models leave gradients local when a compressed optimizer asks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt.amp import GradScaler, innermost
from hf_compressopt.checkpoint.background import wait_for_saves
from hf_compressopt.checkpoint.io import (
    DEFAULT_PREFIX,
    async_save_state,
    has_checkpoint,
    load_state,
    save_state,
    state_is_loaded,
)
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.grad_sync import GradientSync, ddp_hook
from hf_compressopt.integrations.log import show_log
from hf_compressopt.integrations.plugin import CompressOptPlugin
from hf_compressopt.optim.compressed import CompressedOptimizer
from hf_compressopt.optim.fused_adam import FusedAdam
from hf_compressopt.zero.optimizer import ZeroOptimizer
from hf_compressopt.zero.plain import PlainState

logger = logging.getLogger(__name__)

_LOGGED = ("stage", "bytes_sent", "bytes_sent_step", "compression_ratio", "seconds_communication")
OUR_OPTIMIZERS = (CompressedOptimizer, ZeroOptimizer)
OurOptimizer = CompressedOptimizer | ZeroOptimizer
_UNSUPPORTED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


class CompressOptAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's wrapper, which also reports the steps that our optimizers skip by themselves."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, by the scaler or by the optimizer."""
        return bool(self._is_overflow or self.optimizer.step_was_skipped)


@dataclass
class _Model:
    """A DDP model, not kept alive, and the state of its hook once it has one."""

    ddp: weakref.ref[DistributedDataParallel]
    sync: GradientSync | None = None


@dataclass
class _Attachment:
    """What a CompressOptAccelerator remembers beyond an Accelerator."""

    plugin: CompressOptPlugin | None
    announce: bool
    models: list[_Model] = field(default_factory=list)
    partitioned: set[int] = field(default_factory=set)  # parameters (by id) of partitioned optimizers
    without_ddp: set[int] = field(default_factory=set)  # parameters (by id) of models prepared without DDP for them
    loading: ExitStack = field(default_factory=ExitStack)  # open while Accelerate loads a state
    rotations: list[Callable[[], None]] = field(default_factory=list)  # put off until a save in the background is done


class CompressOptAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator for compressed optimizers; with any other optimizer it is Accelerate's own.

    It leaves the gradients of a DDP model local when the optimizer's plan says so, clips them by a norm that all ranks
    know, keeps a GradScaler's decisions alike on all ranks, saves and loads the optimizer's state in shards, and adds
    the optimizer's metrics to what is logged.

    Args:
        *args: Accelerate's.
        compressopt_plugin: Options; with None an Adam or AdamW stays what it is, and compressed optimizers are to be
            given to ``prepare`` as such.
        **kwargs: Accelerate's.
    """

    def __init__(self, *args: Any, compressopt_plugin: CompressOptPlugin | None = None, **kwargs: Any) -> None:
        """See the class."""
        super().__init__(*args, **kwargs)
        attach(self, compressopt_plugin)

    # -- prepare ------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; a model whose optimizer is partitioned gets no DDP."""
        for optimizer in map(innermost, args):
            if isinstance(optimizer, ZeroOptimizer):
                self._compressopt.partitioned |= {id(p) for p in optimizer.trainable_parameters}
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As Accelerate's; a model that was prepared for evaluation only is prepared anew for training."""
        if not evaluation_mode and self.num_processes > 1:
            _undo_evaluation_mode(model, self._models)
        if not evaluation_mode and self._is_partitioned(model):
            alone: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
            self._compressopt.without_ddp |= {id(p) for p in model.parameters()}
            self._check_nobody_needs_ddp(map(innermost, self._optimizers))
            communicator = TorchCommunicator(device=self.device)
            for tensor in (*alone.parameters(), *alone.buffers()):  # as DDP does
                communicator.broadcast(tensor)
            return alone
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        wrapped = _without_compile(prepared)
        if isinstance(wrapped, DistributedDataParallel):
            if not any(model.ddp() is wrapped for model in self._compressopt.models):
                self._compressopt.models.append(_Model(weakref.ref(wrapped)))
            self._bind()
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """As Accelerate's; by the plugin, an Adam or AdamW becomes a compressed optimizer.

        Raises:
            ValueError: If a compressed optimizer cannot work in this set-up.
        """
        if self._compressopt.plugin is not None:
            optimizer = self._compressopt.plugin.convert(optimizer)
        inner = innermost(optimizer)
        if isinstance(inner, OUR_OPTIMIZERS):
            if self.distributed_type.name in _UNSUPPORTED:
                raise ValueError(
                    f"{type(inner).__name__} works with DistributedDataParallel, not with {self.distributed_type.name}"
                )
            if isinstance(inner, ZeroOptimizer):
                self._take_over_gradients(inner)
            if self.scaler is not None and not isinstance(self.scaler, GradScaler):
                self.scaler.__class__ = GradScaler
        self._check_nobody_needs_ddp([inner])
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if isinstance(inner, (*OUR_OPTIMIZERS, FusedAdam)):
            prepared.__class__ = CompressOptAcceleratedOptimizer
        if isinstance(inner, CompressedOptimizer):
            if self._compressopt.announce and self.is_main_process:
                logger.info("attached %s", inner.describe())
        self._bind()
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's; models that live on have their gradients averaged until an optimizer is prepared again."""
        for model in self._compressopt.models:
            if model.sync is not None:
                model.sync.optimizers = ()
        self._compressopt.partitioned.clear()
        self._compressopt.without_ddp.clear()
        return super().free_memory(*objects)

    def compressed_optimizers(self) -> list[CompressedOptimizer]:
        """The compressed optimizers among those that were prepared."""
        return [optimizer for optimizer in self.our_optimizers() if isinstance(optimizer, CompressedOptimizer)]

    def our_optimizers(self) -> list[OurOptimizer]:
        """The compressed and the partitioned optimizers among those that were prepared."""
        found = (innermost(optimizer) for optimizer in self._optimizers)
        return [optimizer for optimizer in found if isinstance(optimizer, OUR_OPTIMIZERS)]

    def _is_partitioned(self, model: nn.Module) -> bool:
        plugin = self._compressopt.plugin
        if plugin is not None and plugin.zero_stage:
            return True
        return _shares(model.parameters(), self._compressopt.partitioned)

    def _check_nobody_needs_ddp(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if isinstance(optimizer, ZeroOptimizer) or self.num_processes == 1:
                continue
            if _shares(_all_params(optimizer), self._compressopt.without_ddp):
                raise ValueError(
                    f"the model has parameters in a ZeroOptimizer and in {type(optimizer).__name__}, and nobody would "
                    "average the gradients of the latter: give all to ZeroOptimizer, or a ZeroOptimizer to each"
                )

    def _take_over_gradients(self, optimizer: ZeroOptimizer) -> None:
        """Check that no DDP averages the optimizer's gradients, and that no earlier one takes them away."""
        params = {id(p) for p in optimizer.trainable_parameters}
        for model in self._compressopt.models:
            ddp = model.ddp()
            if ddp is not None and _shares(ddp.parameters(), params):
                raise ValueError(
                    "the model was prepared before its ZeroOptimizer was known, and is a DistributedDataParallel now, "
                    "which would average the gradients a second time: give both to one prepare(model, optimizer)"
                )
        for other in self.our_optimizers():
            if isinstance(other, ZeroOptimizer) and other is not optimizer:
                if _shares(other.trainable_parameters, params):
                    other.detach()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As Accelerate's; with ZeRO stage 1 gradients stay whole inside, in stage 2 they are sent and freed."""
        params = {id(p) for p in model.parameters()}
        with ExitStack() as stack:
            stack.enter_context(super().no_sync(model))
            for optimizer in self.our_optimizers():
                if isinstance(optimizer, ZeroOptimizer) and optimizer.stage == 1:
                    if _shares(optimizer.trainable_parameters, params):
                        stack.enter_context(optimizer.no_sync())
            yield

    def _bind(self) -> None:
        """Give every DDP model whose parameters a compressed optimizer owns the hook that follows its plan."""
        models = self._compressopt.models
        models[:] = [model for model in models if model.ddp() is not None]
        for model in models:
            ddp = model.ddp()
            if ddp is None:
                continue
            params = {id(p) for p in ddp.parameters() if p.requires_grad}
            owners = [o for o in self.compressed_optimizers() if _shares(o.trainable_parameters, params)]
            if owners:
                self._check_owners(ddp, owners, params)
                if model.sync is None:
                    sync = GradientSync(TorchCommunicator(ddp.process_group, device=owners[0].communicator.device))
                    self._register_hook(ddp, sync)
                    model.sync = sync
            if model.sync is not None:
                model.sync.optimizers = tuple(owners)
                model.sync.communicator.traffic = owners[0].traffic if owners else Traffic()

    def _check_owners(
        self, ddp: DistributedDataParallel, owners: Sequence[CompressedOptimizer], params: set[int]
    ) -> None:
        for other in map(innermost, self._optimizers):
            if not isinstance(other, CompressedOptimizer) and _shares(_all_params(other), params):
                raise ValueError(
                    f"the model has parameters in {type(owners[0]).__name__} and in {type(other).__name__}: gradients "
                    "that stay local for the one would stay local for the other; give all to the first, with "
                    "non_freeze=True for a group that is to stay in full precision"
                )
        own = {id(p) for owner in owners for p in owner.own_parameters()}
        averaged = [
            name for name, p in ddp.module.named_parameters() if id(p) in own and name not in ddp.parameters_to_ignore
        ]
        if averaged:
            raise ValueError(
                f"{averaged[0]} is in a param group with a process_group of its own, over which the optimizer averages "
                "its gradient, but DistributedDataParallel averages it over all ranks: before the model is prepared, "
                "call DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)"
            )
        world_size = torch.distributed.get_world_size(ddp.process_group)
        if any(owner.communicator.world_size != world_size for owner in owners):
            raise ValueError(
                f"the model averages over {world_size} ranks, its optimizer over "
                f"{[owner.communicator.world_size for owner in owners]}: make the optimizer after the process group"
            )

    def _register_hook(self, ddp: DistributedDataParallel, sync: GradientSync) -> None:
        hook = getattr(self.ddp_handler, "comm_hook", None)
        try:
            if hook is not None and getattr(hook, "name", str(hook)) != "NO":
                raise RuntimeError(f"DistributedDataParallelKwargs(comm_hook={hook})")
            ddp.register_comm_hook(sync, ddp_hook)
        except RuntimeError as error:
            raise ValueError(
                "a compressed optimizer needs DDP's communication hook for itself, but the model has one already: "
                f"remove your own comm_hook ({error})"
            ) from error

    # -- a step -------------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """As Accelerate's; local gradients are clipped by a norm that all ranks agree on.

        Raises:
            ValueError: If ``norm_type`` is not 2, for parameters of a compressed optimizer.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = {id(p) for p in parameters}
        owners = [o for o in self.our_optimizers() if _shares(o.trainable_parameters, wanted)]
        if not owners:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[no-any-return]
        if norm_type != 2:
            raise ValueError(f"norm_type must be 2 with {type(owners[0]).__name__}, got {norm_type}")
        self._unscale(owners)
        if isinstance(owners[0], ZeroOptimizer):
            if len(owners) > 1:
                raise ValueError("clip the parameters of one ZeroOptimizer at a time: each has a norm of its own")
            return owners[0].clip_grad_norm_(max_norm, parameters)
        local = [owner for owner in owners if isinstance(owner, CompressedOptimizer) and owner.local_gradients]
        if not local:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[no-any-return]
        return local[0].clip_grad_norm_(max_norm, parameters)

    def _unscale(self, owners: Sequence[OurOptimizer]) -> None:
        """Unscale before clipping, also where a scaler was set by hand and mixed_precision is not "fp16"."""
        if self.scaler is not None and not (self.native_amp and self.mixed_precision == "fp16"):
            for owner in owners:
                self.scaler.unscale_(owner)
        elif any(isinstance(owner, ZeroOptimizer) or owner.local_gradients for owner in owners):
            self.unscale_gradients()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As Accelerate's; times the loss scale that a ZeroOptimizer takes out again."""
        scales = {o.loss_scale.value for o in self.our_optimizers() if isinstance(o, ZeroOptimizer)}
        if len(scales) > 1:
            raise ValueError(f"one backward cannot serve ZeroOptimizers of different loss scales, got {sorted(scales)}")
        super().backward(loss * scales.pop() if scales - {1.0} else loss, **kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """As Accelerate's, with the optimizers' metrics as ``compressopt/...``."""
        metrics: dict[str, float] = {}
        for number, optimizer in enumerate(self.our_optimizers()):
            metrics.update(prefixed_metrics(optimizer, _prefix(number)))
        super().log({**metrics, **values}, step=step, log_kwargs=log_kwargs or {})

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; compressed optimizers' states go to safetensors shards beside the rest; all ranks call.

        Raises:
            OSError: If a file cannot be written, or an earlier save in the background has failed; on all ranks.
        """
        wait_for_saves()  # Accelerate may remove older folders first
        with ExitStack() as stack:
            for optimizer in self.our_optimizers():
                stack.enter_context(optimizer.state_in_shards())
            return super().save_state(*args, **kwargs)

    def end_training(self) -> None:
        """As Accelerate's, after the saves in the background.

        Raises:
            OSError: If one of them has failed; on all ranks.
        """
        wait_for_saves()
        super().end_training()

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; compressed optimizers' states come from the shards. All ranks call.

        Raises:
            CheckpointError: If they are damaged or do not fit.
            OSError: If a save in the background has failed; on all ranks.
        """
        wait_for_saves()
        with ExitStack() as self._compressopt.loading:
            return super().load_state(*args, **kwargs)

    def _save_shards(self, models: list[nn.Module], weights: Any, directory: str) -> None:
        plugin = self._compressopt.plugin
        save = async_save_state if plugin is not None and plugin.async_save else save_state
        for number, optimizer in enumerate(self.our_optimizers()):
            save(optimizer, directory, names=parameter_names(optimizer, models), prefix=_prefix(number))

    def _load_shards(self, models: list[nn.Module], directory: str) -> None:
        everybody = [innermost(optimizer) for optimizer in self._optimizers]
        # as many checkpoints as optimizers: those that are none of ours go on from them too
        last = len(everybody) - 1
        whose = everybody if everybody and self._anyone_has(directory, last, everybody[last]) else self.our_optimizers()
        for number, optimizer in enumerate(whose):
            if self._anyone_has(directory, number, optimizer):  # else the state dict in the folder must be a whole one
                load_state(optimizer, directory, names=parameter_names(optimizer, models), prefix=_prefix(number))
                self._compressopt.loading.enter_context(state_is_loaded(optimizer))
                if isinstance(optimizer, CompressedOptimizer):
                    # Accelerate loads the model next, the same on all ranks
                    self._compressopt.loading.callback(optimizer.own_parameters_restorer())

    def _anyone_has(self, directory: str, number: int, optimizer: torch.optim.Optimizer) -> bool:
        return anyone(has_checkpoint(directory, prefix=_prefix(number)), optimizer, self.device)


def attach(
    accelerator: Accelerator, plugin: CompressOptPlugin | None = None, *, announce: bool = True
) -> CompressOptAccelerator:
    """Make an accelerator that exists a :class:`CompressOptAccelerator`, in place, before it prepares anything.

    Args:
        accelerator: The accelerator.
        plugin: Options; see :class:`CompressOptAccelerator`.
        announce: Whether a line in the log says what was attached.

    Returns:
        The same object.

    Raises:
        ValueError: If it has prepared a model or an optimizer already.
    """
    if "_compressopt" in vars(accelerator):
        if plugin is not None:
            accelerator._compressopt.plugin = plugin
        return cast("CompressOptAccelerator", accelerator)
    if accelerator._models or accelerator._optimizers:
        raise ValueError("attach the accelerator before it prepares a model or an optimizer; this one has done so")
    if announce:
        show_log()
    cls = type(accelerator)
    if cls is Accelerator:
        accelerator.__class__ = CompressOptAccelerator
    elif not issubclass(cls, CompressOptAccelerator):
        accelerator.__class__ = type(f"CompressOpt{cls.__name__}", (CompressOptAccelerator, cls), {})
    accelerator._compressopt = _Attachment(plugin, announce)
    accelerator.register_save_state_pre_hook(accelerator._save_shards)
    accelerator.register_load_state_pre_hook(accelerator._load_shards)
    return cast("CompressOptAccelerator", accelerator)


def prefixed_metrics(optimizer: OurOptimizer, prefix: str = DEFAULT_PREFIX) -> dict[str, float]:
    """Those of the optimizer's metrics that a log line carries, under the names that it carries."""
    metrics = optimizer.metrics()
    return {f"{prefix}/{name}": metrics[name] for name in _LOGGED if name in metrics}


def anyone(answer: bool, optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the answer of any rank that has this optimizer is yes. All ranks call."""
    if isinstance(optimizer, OUR_OPTIMIZERS):
        return any(optimizer.communicator.all_gather_object(answer))
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return answer
    return any(TorchCommunicator(device=device).all_gather_object(answer))


def parameter_names(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[str]:
    """Names of the optimizer's trainable parameters in the models that hold them, else the optimizer's own."""
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        inner = _without_compile(model)
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        for name, param in _without_compile(inner).named_parameters():
            names.setdefault(id(param), name if len(models) == 1 else f"model{number}.{name}")
    state = optimizer if isinstance(optimizer, OUR_OPTIMIZERS) else PlainState(optimizer)
    params = state.trainable_parameters if isinstance(state, OUR_OPTIMIZERS) else chain(*state.shared_parameters())
    own = chain.from_iterable(state.parameter_names())
    return [names.get(id(p), name) for p, name in zip(params, own, strict=True)]


def _prefix(number: int) -> str:
    return DEFAULT_PREFIX if number == 0 else f"{DEFAULT_PREFIX}_{number}"


def _all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _shares(params: Iterable[Tensor], ids: set[int]) -> bool:
    return any(id(p) in ids for p in params)


def _without_compile(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _undo_evaluation_mode(model: nn.Module, prepared: list[nn.Module]) -> None:
    """Let a model that was prepared for evaluation only be prepared again.

    accelerate marks such a model as prepared (from 1.14) and would leave out DDP: every rank would train alone.
    """
    if not getattr(model, "_is_accelerate_prepared", False) or isinstance(
        _without_compile(model), DistributedDataParallel
    ):
        return
    del model._is_accelerate_prepared
    if hasattr(model, "_original_forward"):
        model.forward = model._original_forward  # type: ignore[assignment]
    prepared[:] = [other for other in prepared if other is not model]
