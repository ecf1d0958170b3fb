"""Methods that parts of an object, or hooks, call without keeping the object alive, and hooks that go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, finalize, ref

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


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


class Hooks:
    """The hooks that an object has on others. They are removed when it goes."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        finalize(self, _remove, self._handles).atexit = False

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove them all."""
        _remove(self._handles)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def weak_hook(method: Callable[..., object], *args: Any) -> Callable[[object], None]:
    """Return a hook that calls a method with these arguments while its object lives."""
    weak = WeakMethod(method)

    def call(_: object) -> None:
        if (alive := weak()) is not None:
            alive(*args)

    return call
