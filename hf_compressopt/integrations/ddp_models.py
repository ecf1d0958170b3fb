"""The DDP models that an accelerator has prepared, and the optimizers that their hooks follow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt.collectives.ddp_hook import attach_ddp, find_sync
from hf_compressopt.grad_compression import GradientCompression, MessageOptions, compress_hook
from hf_compressopt.integrations.capabilities import (
    FollowsPlan,
    FreesGradients,
    OwnsGradients,
    all_parameters,
    follows_plan,
    frees_gradients,
    owns_gradients,
    shares,
)
from hf_compressopt.integrations.log import prefix_of, prefixed_metrics


class DDPModels:
    """The DDP models of an accelerator. It does not keep them alive."""

    def __init__(self) -> None:
        """Begin without models."""
        self._models: list[weakref.ref[DistributedDataParallel]] = []

    def __iter__(self) -> Iterator[DistributedDataParallel]:
        """The models that are alive."""
        self._models = [reference for reference in self._models if reference() is not None]
        return iter([model for reference in self._models if (model := reference()) is not None])

    def add(self, model: nn.Module) -> None:
        """Add a prepared model, if it is a DDP model that is not here yet."""
        inner = without_compile(model)
        if isinstance(inner, DistributedDataParallel) and not any(known is inner for known in self):
            self._models.append(weakref.ref(inner))

    def bind(self, optimizers: Sequence[torch.optim.Optimizer], own_hook: Any, loss_scale: Callable[[], float]) -> None:
        """Give every model whose parameters a compressed optimizer owns the hook that follows its plan.

        Args:
            optimizers: All optimizers of the accelerator.
            own_hook: The communication hook that the user asked Accelerate for, or None.
            loss_scale: Returns the factor that the gradients of the coming step carry.

        Raises:
            ValueError: If a model's gradients must be averaged for one optimizer and stay local for another, or if the
                model has another hook.
        """
        for model in self:
            params = {id(p) for p in model.parameters() if p.requires_grad}
            owners = [o for o in optimizers if follows_plan(o) and shares(o.trainable_parameters, params)]
            if owners:
                _check_no_other(owners, optimizers, params)
                check_no_hook(own_hook, "a compressed optimizer")
            if owners or find_sync(model) is not None:
                attach_ddp(model, *owners, loss_scale=loss_scale)

    def compress(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        own_hook: Any,
        compression: str,
        messages: MessageOptions,
        loss_scale: Callable[[], float],
    ) -> None:
        """Give every model of an ordinary optimizer the hook that averages gradients by low-bit messages.

        Args:
            optimizers: All optimizers of the accelerator.
            own_hook: The communication hook that the user asked Accelerate for, or None.
            compression: "int4" or "int8".
            messages: The options of the messages.
            loss_scale: Returns the factor that the gradients of the coming step carry.

        Raises:
            ValueError: If a model's parameters belong to a compressed optimizer, or if the model has another hook.
        """
        for model in self:
            params = {id(p) for p in model.parameters() if p.requires_grad}
            owners = [o for o in optimizers if shares(all_parameters(o), params)]
            for owner in filter(follows_plan, owners):
                raise ValueError(
                    f"grad_compression={compression!r} compresses the gradients of ordinary optimizers, and "
                    f"{type(owner).__name__} compresses by itself: leave one of the two out"
                )
            if owners and find_compression(model) is None:
                check_no_hook(own_hook, "grad_compression")
                state = GradientCompression(
                    model.module.named_parameters(),
                    compression,
                    process_group=model.process_group,
                    loss_scale=loss_scale,
                    **asdict(messages),
                )
                model.register_comm_hook(state, compress_hook)

    def hooked(self) -> list[DistributedDataParallel]:
        """The models whose gradients travel in messages of this package."""
        syncs = [(model, find_sync(model)) for model in self]
        return [model for model, sync in syncs if find_compression(model) or (sync is not None and sync.optimizers)]

    def compressions(self) -> list[GradientCompression]:
        """The states of the models' :func:`compress_hook`."""
        return [state for model in self if (state := find_compression(model)) is not None]

    def metrics(self) -> dict[str, float]:
        """Metrics of the models whose gradients are compressed, for a log line."""
        found: dict[str, float] = {}
        for number, state in enumerate(self.compressions()):
            found.update(prefixed_metrics(state, prefix_of(number)))
        return found

    def release(self) -> None:
        """Have the gradients of every model averaged in all steps, until an optimizer is bound again."""
        for model in self:
            if (sync := find_sync(model)) is not None:
                sync.bind(())

    def check_not_averaging(self, optimizer: OwnsGradients | FreesGradients) -> None:
        """Check that no model averages the gradients of an optimizer that averages them itself.

        Raises:
            ValueError: If one does.
        """
        params = {id(p) for p in optimizer.trainable_parameters}
        if any(shares(model.parameters(), params) for model in self):
            raise ValueError(
                f"the model was prepared before its {type(optimizer).__name__} was known, and is a "
                "DistributedDataParallel now, which would average the gradients a second time: give both to one "
                "prepare(model, optimizer)"
            )


def _check_no_other(
    owners: Sequence[FollowsPlan], optimizers: Iterable[torch.optim.Optimizer], params: set[int]
) -> None:
    for other in optimizers:
        if not follows_plan(other) and shares(all_parameters(other), params):
            raise ValueError(
                f"the model has parameters in {type(owners[0]).__name__} and in {type(other).__name__}: gradients "
                "that stay local for the one would stay local for the other; give all to the first, with "
                "non_freeze=True for a group that is to stay in full precision"
            )


def find_compression(model: DistributedDataParallel) -> GradientCompression | None:
    """The state of the model's :func:`compress_hook`, or None if the model has none."""
    registered: Iterable[tuple[Any, Any]] = model._comm_hooks
    return next((state for hook, state in registered if hook is compress_hook), None)


def check_no_hook(hook: Any, name: str) -> None:
    """Check that the user asked Accelerate for no communication hook.

    Raises:
        ValueError: If there is one.
    """
    if hook is not None and getattr(hook, "name", str(hook)) != "NO":
        raise ValueError(
            f"{name} needs DDP's communication hook for itself, but the accelerator has one already: "
            f"remove your own comm_hook (DistributedDataParallelKwargs(comm_hook={hook}))"
        )


def check_somebody_averages(optimizers: Iterable[torch.optim.Optimizer], without_ddp: set[int]) -> None:
    """Check that every optimizer's gradients are averaged, by DDP or by the optimizer itself.

    Args:
        optimizers: The optimizers.
        without_ddp: Parameters (by id) of models that were prepared without DDP.

    Raises:
        ValueError: If nobody would average an optimizer's gradients.
    """
    for optimizer in optimizers:
        alone = owns_gradients(optimizer) or frees_gradients(optimizer)
        if not alone and shares(all_parameters(optimizer), without_ddp):
            raise ValueError(
                f"the model has parameters in a ZeroOptimizer and in {type(optimizer).__name__}, and nobody would "
                "average the gradients of the latter: give all to ZeroOptimizer, or a ZeroOptimizer to each"
            )


def without_compile(model: nn.Module) -> nn.Module:
    """The model within torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


def undo_evaluation_mode(model: nn.Module, prepared: list[nn.Module]) -> None:
    """Allow a model that was prepared for evaluation only to be prepared again.

    accelerate marks such a model as prepared (from 1.14) and would leave out DDP: every rank would train alone.
    """
    if not getattr(model, "_is_accelerate_prepared", False):
        return
    if isinstance(without_compile(model), DistributedDataParallel):
        return
    del model._is_accelerate_prepared
    if hasattr(model, "_original_forward"):
        model.forward = model._original_forward  # type: ignore[assignment]
    prepared[:] = [other for other in prepared if other is not model]
