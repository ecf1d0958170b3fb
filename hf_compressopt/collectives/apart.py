"""A warning of code that reads parameters while each rank has its own, as between two syncs of 0/1 Adam."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol
from weakref import ref

import torch
from torch import nn

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.schedules import Stage

logger = logging.getLogger(__name__)


class MayBeApart(Protocol):
    """An optimizer between whose syncs ranks may have different parameters."""

    own_tensors: ClassVar[Mapping[Stage, Sequence[str]]]

    @property
    def ranks_are_apart(self) -> bool: ...
    @property
    def communicator(self) -> Communicator: ...


class _Read:
    """A hook of a model: it warns once where the model is read while ranks are apart. A copy of it does nothing."""

    def __init__(self, model: nn.Module, what: str, optimizers: Callable[[], Iterable[MayBeApart]]) -> None:
        self._model, self._what, self._optimizers, self._said = ref(model), what, optimizers, False

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._said or module is not self._model():
            return
        for optimizer in self._optimizers():
            if optimizer.ranks_are_apart:
                self._said = True
                logger.warning(
                    "rank %d %s between two syncs of %s, where each rank has parameters of its own. Do it inside `with "
                    "optimizer.averaged_parameters():` on all ranks, for their mean, or inside `with "
                    "optimizer.synced_parameters():` on one rank, for the parameters of the last sync",
                    optimizer.communicator.rank,
                    self._what,
                    type(optimizer).__name__,
                )


class _Evaluation(_Read):
    def __call__(self, module: nn.Module, *more: Any) -> None:
        if not module.training:
            super().__call__(module, *more)


class _Nothing:
    def __call__(self, *_: Any) -> None:
        return


def may_be_apart(optimizer: MayBeApart) -> bool:
    """True for a compressed optimizer in a stage of which each rank has parameters of its own."""
    return any("param" in names for names in optimizer.own_tensors.values())


def warn_of_reads(model: nn.Module, optimizers: Callable[[], Iterable[MayBeApart]]) -> None:
    """Warn once if the model is evaluated, and once if its state dict is taken, while ranks are apart."""
    model.register_forward_pre_hook(_Evaluation(model, "evaluates the model", optimizers))
    reading = _Read(model, "takes the model's state dict", optimizers)
    model.register_state_dict_pre_hook(reading)  # type: ignore[no-untyped-call]
