"""Methods that parts of an object call without keeping the object alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref


class WeakCall:
    """A call of a method of an object that may die meanwhile; it belongs to a part of that object.

    A bound method in a part would make a cycle, and the object would live until a garbage collection, at another time
    on each rank. In a copy of the object, by deepcopy or pickle, it calls the copy's method.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._owner, self._name = ref(method.__self__), method.__name__  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if owner is None:
            raise ReferenceError(f"the object whose {self._name} is called was deleted")
        return getattr(owner, self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _weak_call, (self._owner(), self._name)


def _weak_call(owner: Any, name: str) -> WeakCall:
    return WeakCall(getattr(owner, name))
