"""The registry of optimizers, by the names that users type, and their kinds. A new algorithm is one row here."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from hf_compressopt.amp import innermost
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.fused_adam import FusedAdam
from hf_compressopt.optim.lamb import Lamb, OnebitLamb
from hf_compressopt.optim.muon import MuonAdamW
from hf_compressopt.optim.onebit_adam import OnebitAdam
from hf_compressopt.optim.zero_one_adam import ZeroOneAdam
from hf_compressopt.zero.optimizer import ZeroOptimizer

#: The compressed optimizers: ``--optim NAME`` and ``CompressOptPlugin(optimizer=NAME)``.
ALGORITHMS: dict[str, type[CompressedOptimizer]] = {
    "onebit_adam": OnebitAdam,
    "zero_one_adam": ZeroOneAdam,
    "onebit_lamb": OnebitLamb,
}
#: The ordinary optimizers of this package: ``--optim NAME``.
ORDINARY: dict[str, type[torch.optim.Optimizer]] = {"lamb": Lamb, "fused_adam": FusedAdam, "muon": MuonAdamW}
#: All of them, as a view of the two tables.
OPTIMIZERS: MutableMapping[str, type[torch.optim.Optimizer]] = ChainMap(ORDINARY, ALGORITHMS)  # type: ignore[arg-type]
#: Partitioned AdamW by name, with its ZeRO stage; in Trainer it is the AdamW that is Trainer's default.
#: Any other element-wise optimizer takes zero_stage in its optim_args.
ZERO_NAMES = {"zero1_adamw": 1, "zero2_adamw": 2}
#: An optimizer of which every rank saves its own shard, and which clips and measures its gradients itself.
Ours: TypeAlias = CompressedOptimizer | ZeroOptimizer


def saves_shards(optimizer: object) -> TypeGuard[Ours]:
    """True for a compressed or a partitioned optimizer."""
    return isinstance(optimizer, (CompressedOptimizer, ZeroOptimizer))


def follows_plan(optimizer: object) -> TypeGuard[CompressedOptimizer]:
    """True for an optimizer whose plan says of every step whether DDP averages its gradients."""
    return isinstance(optimizer, CompressedOptimizer)


def owns_gradients(optimizer: object) -> TypeGuard[ZeroOptimizer]:
    """True for an optimizer that averages gradients itself during backward, so that no DDP must."""
    return isinstance(optimizer, ZeroOptimizer)


def frees_gradients(optimizer: object) -> TypeGuard[CompressedOptimizer]:
    """True for a compressed optimizer that frees gradients during backward: no DDP may hold them."""
    return isinstance(optimizer, CompressedOptimizer) and optimizer.zero_stage == 2


def all_parameters(optimizer: Any) -> list[Tensor]:
    """The parameters of all param groups, frozen ones too."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def shares(params: Iterable[Tensor], ids: set[int]) -> bool:
    """True if one of the parameters has one of these ids."""
    return any(id(p) in ids for p in params)


class Prepared(NamedTuple):
    """The optimizers that an Accelerator has prepared, found once: the steps ask for them."""

    wrapped: Sequence[Any] = ()  # as Accelerate has them
    inner: Sequence[torch.optim.Optimizer] = ()  # without its wrappers
    compressed: Sequence[CompressedOptimizer] = ()  # of these
    partitioned: Sequence[ZeroOptimizer] = ()

    @classmethod
    def of(cls, wrapped: Iterable[Any]) -> Prepared:
        wrapped = list(wrapped)
        inner = list(map(innermost, wrapped))
        return cls(wrapped, inner, list(filter(follows_plan, inner)), list(filter(owns_gradients, inner)))
