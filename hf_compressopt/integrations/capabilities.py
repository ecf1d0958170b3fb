"""The capabilities that the hosts ask of an optimizer; an optimizer of another kind needs no line in the hosts.

A capability is the presence of its members on the optimizer's class, so that asking calls no property.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.ddp_hook import HasEarlySlots, HasSlots
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.optim.freed_gradients import FreedGradients
from hf_compressopt.schedules import Schedule, StepPlan


class SavesShards(Protocol):
    """An optimizer of which every rank saves its own part, and which clips and measures its gradients itself."""

    param_groups: list[dict[str, Any]]
    communicator: Communicator

    @property
    def trainable_parameters(self) -> Sequence[Tensor]: ...  # noqa: D102

    def parameter_names(self) -> list[list[str]]: ...  # noqa: D102

    def state_in_shards(self) -> AbstractContextManager[None]: ...  # noqa: D102

    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor: ...  # noqa: D102

    def metrics(self) -> dict[str, float]: ...  # noqa: D102

    def describe(self) -> str: ...  # noqa: D102


class FollowsPlan(SavesShards, Protocol):
    """An optimizer that says of every step whether DDP averages its gradients, by a schedule fitted to the run."""

    traffic: Traffic
    warmup_gradients: HasSlots
    early_messages: HasEarlySlots
    schedule: Schedule
    warmup_bits: int
    zero_stage: int

    @property
    def plan(self) -> StepPlan: ...  # noqa: D102

    @property
    def last_plan(self) -> StepPlan: ...  # noqa: D102

    @property
    def local_gradients(self) -> bool: ...  # noqa: D102

    def plan_at(self, step: int) -> StepPlan: ...  # noqa: D102

    def own_parameters(self) -> Sequence[Tensor]: ...  # noqa: D102

    def defer_schedule(self, given: Iterable[str]) -> None: ...  # noqa: D102

    def fit_schedule(self, max_steps: int) -> str: ...  # noqa: D102
    def label_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None: ...  # noqa: D102

    def averaged_parameters(self) -> AbstractContextManager[None]: ...  # noqa: D102

    def synced_parameters(self) -> AbstractContextManager[None]: ...  # noqa: D102

    @property
    def ranks_are_apart(self) -> bool: ...  # noqa: D102

    def settle_parameters(self) -> None: ...  # noqa: D102

    def parameters_replaced(self) -> None: ...  # noqa: D102

    def own_parameters_restorer(self) -> Callable[[], None]: ...  # noqa: D102


class OwnsGradients(SavesShards, Protocol):
    """An optimizer that averages gradients itself while the backward pass runs, so that no DDP must."""

    stage: int
    loss_scale: Any
    partition: Any

    def detach(self) -> None: ...  # noqa: D102

    def no_sync(self) -> AbstractContextManager[None]: ...  # noqa: D102

    def masters_in_parameters(self) -> AbstractContextManager[None]: ...  # noqa: D102

    def settle_parameters(self) -> None: ...  # noqa: D102


class FreesGradients(FollowsPlan, Protocol):
    """A compressed optimizer that frees gradients while the backward pass runs."""

    freed: FreedGradients

    def no_sync(self) -> AbstractContextManager[None]: ...  # noqa: D102


def saves_shards(optimizer: object) -> TypeGuard[SavesShards]:
    """True if the optimizer has the members of :class:`SavesShards`."""
    return hasattr(type(optimizer), "state_in_shards")


def follows_plan(optimizer: object) -> TypeGuard[FollowsPlan]:
    """True if the optimizer has the members of :class:`FollowsPlan`."""
    return saves_shards(optimizer) and hasattr(type(optimizer), "plan_at")


def owns_gradients(optimizer: object) -> TypeGuard[OwnsGradients]:
    """True if the optimizer has the members of :class:`OwnsGradients`."""
    return saves_shards(optimizer) and hasattr(type(optimizer), "masters_in_parameters")


def frees_gradients(optimizer: object) -> TypeGuard[FreesGradients]:
    """True for a compressed optimizer that frees gradients while backward runs: no DDP may hold them."""
    return follows_plan(optimizer) and optimizer.zero_stage == 2


def skips_steps(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer may skip a step by itself, and tells so in ``step_was_skipped``."""
    return hasattr(optimizer, "step_was_skipped")


def all_parameters(optimizer: Any) -> list[Tensor]:
    """The parameters of all param groups, frozen ones too."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def shares(params: Iterable[Tensor], ids: set[int]) -> bool:
    """True if one of the parameters has one of these ids."""
    return any(id(p) in ids for p in params)
