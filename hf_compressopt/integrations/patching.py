"""Teach classes of another package: wrap a method once, add a member to an enum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_hf_compressopt"


def is_wrapped(cls: type, name: str) -> bool:
    """True if :func:`wrap` has wrapped the method of this class."""
    return hasattr(getattr(cls, name), _MARK)


def wrap(cls: type, name: str, wrapper: Callable[..., Any], *, static: bool = False) -> None:
    """Replace a method by ``wrapper(original, self, *args, **kwargs)``, without ``self`` if it is static."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(method, _MARK, True)
    setattr(cls, name, staticmethod(method) if static else method)


def add_member(enum: Any, value: str) -> None:
    """Add a member to an enum of strings, because argument parsers accept members only."""
    if value in enum._value2member_map_:
        return
    name = value.upper()
    member = str.__new__(enum, value)
    member._name_, member._value_ = name, value
    member._sort_order_ = len(enum._member_names_)
    type.__setattr__(enum, name, member)
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    if hasattr(enum, "_hashable_values_"):  # Python >= 3.12.3 looks here too
        enum._hashable_values_.append(value)
