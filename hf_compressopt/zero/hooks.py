"""Hooks on parameters, by which a reducer hears of gradients, and by which it can be found again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from hf_compressopt.collectives.backward_pass import FreeingHook, hooks_of

if TYPE_CHECKING:
    from hf_compressopt.zero.reducer import GradientReducer


class GradientHook(FreeingHook):
    """A hook on a parameter that tells a reducer of its gradient, without keeping the reducer alive."""

    def __init__(self, reducer: GradientReducer, number: int) -> None:
        """Remember a reducer, and the number of the parameter in it."""
        self._reducer, self._number = weakref.ref(reducer), number

    def __call__(self, _: Tensor) -> None:
        """Tell the reducer, if it is alive."""
        reducer = self._reducer()
        if reducer is not None:
            reducer.gradient_arrived(self._number)

    @property
    def is_alive(self) -> bool:
        """Whether the reducer is alive."""
        return self.reducer is not None

    @property
    def reducer(self) -> GradientReducer | None:
        """The reducer, or None if it is gone."""
        return self._reducer()


def reducers_of(params: Iterable[Tensor]) -> list[GradientReducer]:
    """List the living reducers that take the gradients of any of these parameters."""
    found: dict[int, GradientReducer] = {}
    for param in params:
        for hook in hooks_of(param):
            if isinstance(hook, GradientHook) and (reducer := hook.reducer) is not None:
                found[id(reducer)] = reducer
    return list(found.values())
