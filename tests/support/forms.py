"""Optimizers, and low-bit gradients, in a form of the state that is not theirs: float32 for oracles of exact bits."""

from functools import cache
from typing import Any


@cache
def in_form(cls: Any, form: str | None) -> Any:
    """Return a class with its state in this form, "compact" or "float32"; None is its own."""
    if form is None or cls.compact == (form == "compact"):
        return cls
    names = ("__module__", "__qualname__", "__doc__")
    return type(cls.__name__, (cls,), {"compact": form == "compact", **{name: getattr(cls, name) for name in names}})
