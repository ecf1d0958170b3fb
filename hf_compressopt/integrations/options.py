"""The optimizers by the names that users type, and their options read from text."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from hf_compressopt.optim.freezing import FreezingOptimizer
from hf_compressopt.optim.fused_adam import FusedAdam
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.onebit_adam import OnebitAdam
from hf_compressopt.optim.onebit_lamb import OnebitLamb
from hf_compressopt.optim.zero_one_adam import ZeroOneAdam

#: What ``CompressOptPlugin(optimizer=NAME)`` stands for.
COMPRESSED: dict[str, type[FreezingOptimizer]] = {
    "onebit_adam": OnebitAdam,
    "zero_one_adam": ZeroOneAdam,
    "onebit_lamb": OnebitLamb,
}
#: What ``--optim NAME`` stands for: the compressed ones, and ordinary optimizers.
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {**COMPRESSED, "lamb": Lamb, "fused_adam": FusedAdam}

# Trainer has flags of its own for these.
_TRAINER_FLAGS = {
    "lr": "--learning_rate",
    "betas": "--adam_beta1 and --adam_beta2",
    "eps": "--adam_epsilon",
    "weight_decay": "--weight_decay",
    "max_grad_norm": "--max_grad_norm",
}
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def text_options(optimizer_class: type[torch.optim.Optimizer]) -> dict[str, tuple[tuple[type, ...], Any]]:
    """Options that text can set: name -> (types that it may have, default)."""
    options: dict[str, tuple[tuple[type, ...], Any]] = {}
    for init in reversed(_constructors(optimizer_class)):
        hints = get_type_hints(init)
        for name, parameter in inspect.signature(init).parameters.items():
            kinds = _text_types(hints.get(name))
            if name == "freeze_step" != getattr(optimizer_class, "freeze_option", name):
                continue  # this one calls it by another name
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and kinds and name not in _TRAINER_FLAGS:
                options[name] = (kinds, parameter.default)
    return options


def _constructors(cls: type) -> list[Callable[..., None]]:
    """The class's own constructor, and those of its bases to which it hands further options."""
    found: list[Callable[..., None]] = []
    for base in cls.__mro__:
        if init := vars(base).get("__init__"):
            found.append(init)
            if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(init).parameters.values()):
                break
    return found


def parse_options(optimizer_class: type[torch.optim.Optimizer], text: str | None) -> dict[str, Any]:
    """Read ``"freeze_step=200,scale_block=1024"`` into keyword arguments, each of its option's type.

    Raises:
        ValueError: For an unknown name, a value of a wrong type, or text that is no list of name=value; the message
            lists what is legal.
    """
    options = text_options(optimizer_class)
    values: dict[str, Any] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name or not value:
            raise ValueError(
                f"optim_args must be name=value pairs, separated by commas; got {part.strip()!r} in {text!r}"
            )
        if name in _TRAINER_FLAGS:
            raise ValueError(f"optim_args: {name} is set by Trainer's {_TRAINER_FLAGS[name]}")
        if name not in options:
            raise ValueError(
                f"optim_args: {optimizer_class.__name__} has no option {name!r}; legal are {_legal(options)}"
            )
        if name in values:
            raise ValueError(f"optim_args: {name} is given twice in {text!r}")
        values[name] = parse_value(name, value, options[name][0])
    return values


def take_async_save(text: str | None) -> tuple[bool, str]:
    """Take ``async_save``, which is no option of an optimizer, out of optim_args.

    Returns:
        Whether checkpoints are written while the training goes on; and the rest of the text.

    Raises:
        ValueError: For a value that is neither true nor false, or two of them.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    mine = [part for part in parts if part.partition("=")[0].strip() == "async_save"]
    if not mine:
        return False, text or ""
    if len(mine) > 1:
        raise ValueError(f"optim_args: async_save is given twice in {text!r}")
    value = parse_value("async_save", mine[0].partition("=")[2].strip(), (bool,))
    return value, ",".join(part for part in parts if part not in mine)


def parse_value(name: str, text: str, kinds: tuple[type, ...]) -> Any:
    """One value from text.

    Raises:
        ValueError: If the text is of none of these types.
    """
    if type(None) in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        try:
            if kind is bool:
                return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]
            if kind in (int, float, str):
                return kind(text)
        except (ValueError, KeyError):
            continue
    raise ValueError(f"{name} must be {_kinds(kinds)}, got {text!r}")


def _text_types(hint: Any) -> tuple[type, ...]:
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = tuple(kind for kind in alternatives if kind in (bool, int, float, str, type(None)))
    return kinds if any(kind is not type(None) for kind in kinds) else ()


def _kinds(kinds: tuple[type, ...]) -> str:
    names = {bool: "true or false", int: "an int", float: "a float", str: "a name", type(None): "none"}
    return " or ".join(names[kind] for kind in kinds)


def _legal(options: dict[str, tuple[tuple[type, ...], Any]]) -> str:
    return ", ".join(
        f"{name} ({_kinds(kinds)}; default {default})" for name, (kinds, default) in sorted(options.items())
    )
