"""The models of an accelerator: the hooks of DDP and FSDP2, and the set-ups in which they cannot work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt.collectives.ddp import attach_ddp, find_sync
from hf_compressopt.fsdp.compression import FSDPCompression, compress_fsdp
from hf_compressopt.grad_compression import FULL, GradientCompression, MessageOptions, compress_hook
from hf_compressopt.integrations.algorithms import (
    Ours,
    all_parameters,
    follows_plan,
    saves_shards,
    shares,
)
from hf_compressopt.integrations.run_options import GRAD_COMPRESSION, NONE, RunOptions
from hf_compressopt.optim.math import is_dtensor

_LOADED_IN_SHARDS = "from_pretrained(distributed_config=...)"
_INSTEAD = {
    "DEEPSPEED": "DeepSpeed averages the gradients and takes the steps itself. Launch without DeepSpeed; "
    "`hf-compressopt from-deepspeed ds_config.json` translates its configuration",
    "MEGATRON_LM": "Megatron-LM averages the gradients and takes the steps itself. Launch without Megatron-LM, or use "
    "Megatron-LM's own optimizer",
    "FSDP": "FSDP partitions the parameters and averages the gradients itself. Use an ordinary optimizer with FSDP2 "
    "(grad_compression=int4), or launch without FSDP: --optim zero2_adamw partitions gradients and optimizer state",
    "XLA": "XLA averages the gradients itself. Use an ordinary optimizer there",
    _LOADED_IN_SHARDS: "leave out one of the two, or use an ordinary optimizer with grad_compression",
}


class Models:
    """The models of an accelerator, which are not kept alive, and the messages of their gradients."""

    def __init__(self) -> None:
        self._ddp: WeakKeyDictionary[DistributedDataParallel, None] = WeakKeyDictionary()  # in their order
        self._sharded: WeakKeyDictionary[FSDPCompression, None] = WeakKeyDictionary()  # a model's hooks keep both alive

    def add(self, model: nn.Module) -> None:
        if isinstance(inner := without_compile(model), DistributedDataParallel):
            self._ddp.setdefault(inner, None)

    @property
    def has_ddp(self) -> bool:
        return bool(self._ddp)

    def bind(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        options: RunOptions,
        users_hook: Any,
        loss_scale: Callable[[], float],
        waiting: set[int],
    ) -> None:
        """Give every DDP model its hook: it follows the plan of a compressed optimizer, or sends low-bit messages.

        A model with parameters (by id) of ``waiting`` gets none before its optimizer is there.
        """
        compression, messages = options.grad_compression, options.messages
        for model in self._ddp:
            params = {id(p) for p in model.parameters() if p.requires_grad}
            owners = [o for o in optimizers if shares(all_parameters(o), params)]
            compressed = list(filter(follows_plan, owners))
            if compressed and len(compressed) < len(owners):
                other = next(o for o in owners if not follows_plan(o))
                raise ValueError(
                    f"the model has parameters in {type(compressed[0]).__name__} and in {type(other).__name__}: "
                    "gradients that stay local for the one would stay local for the other; give all to the first, "
                    "with non_freeze=True for a group that is to stay in full precision"
                )
            if compressed and compression != NONE:
                raise ValueError(
                    f"grad_compression={compression!r} compresses the gradients of ordinary optimizers, and "
                    f"{type(compressed[0]).__name__} compresses by itself: leave one of the two out"
                )
            if compressed:
                check_no_hook(users_hook, "a compressed optimizer")
            if compressed or find_sync(model) is not None:
                attach_ddp(model, *compressed, loss_scale=loss_scale)
            comes_later = not owners and not params.isdisjoint(waiting)
            if compression != NONE and not comes_later and find_compression(model) is None:
                check_no_hook(users_hook, "grad_compression")
                if compression == FULL:
                    raise ValueError(
                        f"grad_compression={FULL} is for parameters beside those that FSDP2 shards: "
                        "DistributedDataParallel averages in full precision by itself; leave grad_compression out"
                    )
                ignored, group = model.parameters_to_ignore, model.process_group  # experts that each rank has
                named = [(name, p) for name, p in model.module.named_parameters() if name not in ignored]
                cap = messages.bucket_cap_mb or model.bucket_bytes_cap / 2**20
                more = {**asdict(messages), "bucket_cap_mb": cap, "loss_scale": loss_scale}
                state = GradientCompression(named, compression, process_group=group, **more)
                model.register_comm_hook(state, compress_hook)

    def compress_sharded(
        self, models: Iterable[nn.Module], options: RunOptions, loss_scale: Callable[[], float]
    ) -> None:
        """Give every model that FSDP2 shards low-bit messages, and exact parameters if asked, unless it has them."""
        messages = options.messages
        if replace(messages, bucket_cap_mb=None) != MessageOptions():
            raise ValueError(
                f"topology={messages.topology!r}, node_size={messages.node_size} and node_bits={messages.node_bits} "
                "have no effect with FSDP, whose mesh says which ranks share a node: leave them out"
            )
        for model in map(without_compile, models):
            if self.compression_of(model) is None:
                params: Iterator[Any] = model.parameters()
                mesh = next(param.device_mesh for param in params if is_dtensor(param))
                state = compress_fsdp(
                    model,
                    mesh,
                    options.grad_compression,
                    bucket_cap_mb=messages.bucket_cap_mb,
                    loss_scale=loss_scale,
                    param_compression="exact" if options.param_compression == "exact" else NONE,
                )
                self._sharded[state] = None

    def ignored(self) -> list[tuple[str, Tensor]]:
        """The parameters, with their names, that DistributedDataParallel was told not to average."""
        ignored: list[tuple[str, Tensor]] = []
        for model in self._ddp:
            names = model.parameters_to_ignore
            ignored += [(name, param) for name, param in model.module.named_parameters() if name in names]
        return ignored

    def compression_of(self, model: nn.Module) -> FSDPCompression | None:
        """Return what averages the gradients of a model that FSDP2 shards; None if FSDP2 itself does."""
        inner = without_compile(model)
        return next((state for state in self._sharded if state.model is inner), None)

    def compressions(self) -> list[GradientCompression | FSDPCompression]:
        return [*filter(None, map(find_compression, self._ddp)), *self._sharded]

    def close_passes(self, doing: str) -> None:
        """Raise an error on all ranks if one is still in a backward pass: nothing else tells after the last step.

        All ranks call.
        """
        for sender in [*filter(None, map(find_sync, self._ddp)), *self.compressions()]:
            sender.close_passes(doing)

    def release(self) -> None:
        """Have the gradients of every DDP model averaged in all steps, until an optimizer is bound again."""
        for sync in filter(None, map(find_sync, self._ddp)):
            sync.bind(())

    def check_not_averaging(self, optimizer: Ours) -> None:
        params = {id(p) for p in optimizer.trainable_parameters}
        if any(shares(model.parameters(), params) for model in self._ddp):
            raise ValueError(
                f"the model was prepared before its {type(optimizer).__name__} was known, and is a "
                "DistributedDataParallel now, which would average the gradients a second time: give both to one "
                "prepare(model, optimizer)"
            )


def find_compression(model: DistributedDataParallel) -> GradientCompression | None:
    """The state of the model's :func:`compress_hook`, or None if the model has none."""
    registered: Iterable[tuple[Any, Any]] = model._comm_hooks
    return next((state for hook, state in registered if hook is compress_hook), None)


def check_no_hook(hook: Any, name: str) -> None:
    if hook is not None and getattr(hook, "name", str(hook)) != "NO":
        raise ValueError(
            f"{name} needs DDP's communication hook for itself, but the accelerator has one already: "
            f"remove your own comm_hook (DistributedDataParallelKwargs(comm_hook={hook}))"
        )


def without_compile(model: nn.Module) -> nn.Module:
    """The model within torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


def undo_evaluation_mode(model: nn.Module, prepared: list[nn.Module]) -> None:
    """Let accelerate (from 1.14) prepare a model again that was prepared for evaluation: else it leaves out DDP."""
    if not getattr(model, "_is_accelerate_prepared", False):
        return
    if isinstance(without_compile(model), DistributedDataParallel):
        return
    del model._is_accelerate_prepared
    if hasattr(model, "_original_forward"):
        model.forward = model._original_forward  # type: ignore[assignment]
    prepared[:] = [other for other in prepared if other is not model]


# -- set-ups in which compressed and partitioned optimizers cannot work -----------------------------------------------


def is_loaded_in_shards(model: Any) -> bool:
    """True for a model that ``from_pretrained(..., distributed_config=...)`` has sharded, or cut in another way."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def why_not_loaded_in_shards(model: Any) -> str:
    """Return why low-bit messages cannot carry the gradients of such a model; "" if they can."""
    config = model.config.distributed_config
    sizes = {name: getattr(config, name, None) or 1 for name in ("tp_size", "pp_size", "ep_size")}
    if other := [f"{name}={size}" for name, size in sizes.items() if size > 1]:
        return f"{', '.join(other)} of DistributedConfig cuts parameters in a way that its messages do not know"
    return ""


def _why_not_in_fsdp(accelerator: Any) -> str:
    if not getattr(accelerator, "is_fsdp2", False):
        return "FSDP1 averages the gradients itself: give FullyShardedDataParallelPlugin(fsdp_version=2)"
    config = getattr(accelerator, "parallelism_config", None)
    if config is not None and config.non_data_parallel_size > 1:
        return "it needs a mesh of dp_replicate and dp_shard only, without tensor or context parallelism"
    return ""


def why_unsupported(accelerator: Any, name: str, model: Any = None) -> str:
    """Return why an optimizer, or grad_compression, cannot work in the accelerator's set-up; "" if it can."""
    loaded = is_loaded_in_shards(model)
    kind = _LOADED_IN_SHARDS if loaded else accelerator.distributed_type.name
    if kind in ("FSDP", _LOADED_IN_SHARDS) and name.startswith(GRAD_COMPRESSION):
        reason = why_not_loaded_in_shards(model) if loaded else _why_not_in_fsdp(accelerator)
        return f"{name} does not work with this {'model' if loaded else 'FSDP'}: {reason}" if reason else ""
    instead = _INSTEAD.get(kind)
    return f"{name} works with DistributedDataParallel, not with {kind}: {instead}" if instead else ""


def check_distributed_type(
    accelerator: Any, optimizer: Any, options: RunOptions | None = None, model: Any = None
) -> None:
    """Raise if an optimizer, or what the options make of it, cannot work in the set-up or with the model."""
    if saves_shards(optimizer):
        name = type(optimizer).__name__
    else:
        name = "" if options is None else options.sender
    if name and (reason := why_unsupported(accelerator, name, model)):
        raise ValueError(reason)
