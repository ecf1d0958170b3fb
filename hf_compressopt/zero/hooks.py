"""Hooks on parameters, by which a reducer hears of gradients, and by which it can be found again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.function import BackwardCFunction

if TYPE_CHECKING:
    from hf_compressopt.zero.reducer import GradientReducer

_NESTED = BackwardCFunction.apply.__code__  # the frame in which an autograd function of the user's calls backward


class GradientHook:
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
    def reducer(self) -> GradientReducer | None:
        """The reducer, or None if it is gone."""
        return self._reducer()


def reducers_of(params: Iterable[Tensor]) -> list[GradientReducer]:
    """List the living reducers that take the gradients of any of these parameters."""
    found: dict[int, GradientReducer] = {}
    for param in params:
        for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            if isinstance(hook, GradientHook) and (reducer := hook.reducer) is not None:
                found[id(reducer)] = reducer
    return list(found.values())


def inside_another_backward() -> bool:
    """Tell whether an autograd function inside another backward called this one, as reentrant checkpointing does."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NESTED:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
