"""The options of the optimizers, each read from its one declaration: a keyword of a constructor, and its description.

``--optim_args``, the plug-in, the environment, the translator of DeepSpeed's configurations and docs/options.md read
the types, defaults and descriptions here.
"""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import field
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

_Class = TypeVar("_Class", bound=type)

#: Arguments that are accepted and that nobody has to set: spellings of DeepSpeed and torch, what is found by itself.
ACCEPTED = (
    *("comm_backend_name", "cuda_aware", "amsgrad", "eps_inside_sqrt", "var_freeze_step", "node_size", "fused_warmup"),
    *("var_update_scaler", "local_step_scaler", "local_step_clipper", "adam_w_mode", "set_grad_none", "maximize"),
    *("capturable", "reduce_bucket_size", "allgather_bucket_size", "clip_grad"),
    *("contiguous_gradients", "round_robin_gradients", "postscale_gradients", "gradient_predivide_factor"),
    *("ignore_unused_parameters", "initial_loss_scale", "loss_scale_window"),
)
_NOT_OPTIONS = ("self", "params", "optimizer_class", "config")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class Option(NamedTuple):
    """An option of a class: types that text may give (none: Python only), default, and help as in docstrings."""

    kinds: tuple[type, ...]
    default: Any
    annotation: str
    keyword: bool
    help: str


@cache
def options_of(cls: type) -> dict[str, Option]:
    """The options of a class by name: its own constructor's first, then those that it hands to its bases."""
    described: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for documented in (base, vars(base).get("__init__"), vars(base).get("config_class")):
            described.update(descriptions(documented))
    options: dict[str, Option] = {}
    for init in _constructors(cls):
        hints = get_type_hints(init)
        for name, parameter in inspect.signature(init).parameters.items():
            if name in (*_NOT_OPTIONS, *options) or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            kind, keyword = parameter.annotation, parameter.kind is parameter.KEYWORD_ONLY
            annotation = kind if isinstance(kind, str) else inspect.formatannotation(kind)
            kinds, default = _kinds_of(hints.get(name)), parameter.default
            if init is vars(cls).get("__init__"):
                default = _declared_defaults(cls).get(name, default)
            options[name] = Option(kinds, default, annotation, keyword, described.get(name, ""))
    return options


def _constructors(cls: type) -> Iterator[Callable[..., None]]:
    """The class's own constructor, and those of its bases to which it hands further options."""
    for base in cls.__mro__:
        if (init := vars(base).get("__init__")) is None or base is object or base.__module__.startswith("torch."):
            continue
        yield init
        if config := vars(base).get("config_class"):  # its fields are further options
            yield config.__init__
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(init).parameters.values()):
            return


def descriptions(documented: object) -> dict[str, str]:
    """The description of each name in the ``Args`` or ``Attributes`` of a docstring; a class must have it itself."""
    text = vars(documented).get("__doc__") if isinstance(documented, type) else getattr(documented, "__doc__", "")
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?:^\S|\Z)", inspect.cleandoc(text or ""), re.S | re.M)
    entries = re.split(r"^ {4}(?=\S)", section[1], flags=re.M)[1:] if section else []
    pairs = (entry.partition(":") for entry in entries)
    return {name.strip("* "): " ".join(words.split()) for name, _, words in pairs}


def _kinds_of(hint: Any) -> tuple[type, ...]:
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = tuple(kind for kind in alternatives if kind in (bool, int, float, str, type(None)))
    return kinds if any(kind is not type(None) for kind in kinds) else ()


# -- environment variables ---------------------------------------------------------------------------------------------

PREFIX = "COMPRESSOPT_"
_SHORT = {"optimizer": f"{PREFIX}OPTIM"}  # another variable of the option


def with_variables(cls: _Class) -> _Class:
    """Have the fields of a dataclass default from their environment variables, COMPRESSOPT_<FIELD>, if these are set.

    A decorator of a class before it is made a dataclass.
    """
    for name, hint in get_type_hints(cls).items():
        default = getattr(cls, name)
        read = partial(_read_or, default, name, _kinds_of(hint))
        setattr(cls, name, field(default_factory=read, metadata={"default": default}))
    return cls


def _declared_defaults(cls: type) -> dict[str, Any]:
    rows = getattr(cls, "__dataclass_fields__", {}).items()
    return {name: row.metadata["default"] for name, row in rows if "default" in row.metadata}


def _read_or(default: Any, name: str, kinds: tuple[type, ...]) -> Any:
    return read_variables({name: kinds}).get(name, default)


def variables_of(name: str) -> list[str]:
    """The environment variables of an option."""
    return [*filter(None, [_SHORT.get(name)]), f"{PREFIX}{name.upper()}"]


def texts_of(name: str) -> dict[str, str]:
    """The environment variables that set an option, with their texts; an empty variable sets nothing."""
    return {variable: text for variable in variables_of(name) if (text := os.environ.get(variable))}


def read_variables(kinds: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    """The values of options, by name, that environment variables set."""
    values: dict[str, Any] = {}
    for name in kinds:
        texts = texts_of(name)
        if len(set(texts.values())) > 1:
            both = " and ".join(f"{variable}={text}" for variable, text in texts.items())
            raise ValueError(f"{both} differ: set one of them")
        for variable, text in texts.items():
            values[name] = parse(variable, text, kinds[name])
    return values


# -- text --------------------------------------------------------------------------------------------------------------


def parse(name: str, text: str, kinds: tuple[type, ...]) -> Any:
    """Read the value of an option from text; a ValueError if it is of none of these types."""
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
    words = {bool: "true or false", int: "an int", float: "a float", str: "a name", type(None): "none"}
    raise ValueError(f"{name} must be {' or '.join(words[kind] for kind in kinds)}, got {text!r}")


def did_you_mean(name: str, legal: Collection[str]) -> str:
    """Name the legal names that are nearest to one that is not; "" if none is near."""
    near = get_close_matches(name, list(legal), n=2)
    return f": did you mean {' or '.join(map(repr, near))}?" if near else ""
