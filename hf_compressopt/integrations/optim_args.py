"""``--optim_args``: one parser, which reads the options of the optimizer, of ZeRO, and of the host from one text."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Union, get_args, get_origin, get_type_hints

from hf_compressopt.grad_compression import FORMATS, GradientCompression, MessageOptions
from hf_compressopt.integrations.algorithms import ALGORITHMS, OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.zero import check_takes_stage
from hf_compressopt.zero.config import check_stage
from hf_compressopt.zero.optimizer import ZeroOptimizer

#: Types that an option may have, and its default.
Options = dict[str, tuple[tuple[type, ...], Any]]

# Trainer has flags of its own for these.
_TRAINER_FLAGS = {
    "lr": "--learning_rate",
    "betas": "--adam_beta1 and --adam_beta2",
    "eps": "--adam_epsilon",
    "weight_decay": "--weight_decay",
    "max_grad_norm": "--max_grad_norm",
}
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_ASYNC_SAVE: Options = {"async_save": ((bool,), False)}
_ZERO_STAGE: Options = {"zero_stage": ((int,), 0)}
_COMPRESSIONS = ("grad_compression", "param_compression")


@dataclass
class OptimArgs:
    """The options of one ``--optim_args``, by their owners.

    Attributes:
        optimizer: Options of an optimizer of this package.
        zero: Options of ZeroOptimizer, with ``stage``; empty without ZeRO.
        async_save: True to write checkpoints in the background.
        grad_compression: "int4" or "int8" for gradients in low-bit messages, "none", or "" if it is not given. Under
            ZeRO it is in ``zero``.
        messages: Options of these messages.
        others: The rest of the text, for Trainer's own optimizer.
    """

    optimizer: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    async_save: bool = False
    grad_compression: str = ""
    messages: dict[str, Any] = field(default_factory=dict)
    others: str = ""


def read_optim_args(name: str, text: str | None) -> OptimArgs:
    """Read ``--optim_args`` for the optimizer that ``--optim`` names.

    Args:
        name: The optimizer, one of this package or of Trainer's own.
        text: ``"name=value,name=value"``; None is no option.

    Raises:
        ValueError: For an option that the optimizer does not have, a value of a wrong type, an option that is given
            twice, or text that is no list of name=value; and for the text "help", with a list of what is legal.
    """
    ours = name in OPTIMIZERS or name in ZERO_NAMES
    if (text or "").strip() == "help":
        raise ValueError(f"optim_args: the options of {name} are {_described(_legal(name, zero=name in ZERO_NAMES))}")
    if not ours and not any(option in (text or "") for option in ("zero_stage", "async_save", *_COMPRESSIONS)):
        return OptimArgs(others=text or "")
    pairs = _pairs(text)
    stage = _take_stage(name, pairs)
    found = OptimArgs(
        zero={} if stage is None else {"stage": stage},
        async_save=_take_async_save(name, pairs, stage),
        grad_compression=_take_grad_compression(name, pairs, stage),
    )
    if not ours:
        check_param_compression(pairs.get("param_compression", "none"), stage)
    if found.grad_compression in FORMATS:
        found.messages = _take_messages(pairs)
    own = text_options(OPTIMIZERS[name]) if name in OPTIMIZERS else {}
    zero = {} if stage is None else {key: kinds for key, kinds in text_options(ZeroOptimizer).items() if key != "stage"}
    for key, value in pairs.items():
        if key in own:
            found.optimizer[key] = parse_value(key, value, own[key][0])
        elif key in zero:
            found.zero[key] = parse_value(key, value, zero[key][0])
        elif ours:
            raise ValueError(_unknown(name, key, _legal(name, zero=stage is not None)))
        else:
            found.others += f"{',' if found.others else ''}{key}={value}"
    return found


def _take_stage(name: str, pairs: dict[str, str]) -> int | None:
    """The stage of ZeroOptimizer, by the optimizer's name or by ``zero_stage``; None without ZeroOptimizer."""
    text = pairs.pop("zero_stage", None)
    if text is None:
        return ZERO_NAMES.get(name)
    if name in ZERO_NAMES:
        raise ValueError(f"optim_args: zero_stage is part of the optimizer's name ({name}): leave it out")
    stage: int = parse_value("zero_stage", text, (int,))
    if name in ALGORITHMS:
        check_takes_stage(name, stage)
        pairs["zero_stage"] = text  # the optimizer's own option
        return None
    check_stage(stage)
    return stage


def _take_async_save(name: str, pairs: dict[str, str], stage: int | None) -> bool:
    """The value of ``async_save``, which is an option of the host."""
    wanted: bool = parse_value("async_save", pairs.pop("async_save", "false"), (bool,))
    if wanted and stage is None and name not in ALGORITHMS:
        raise ValueError(
            f"optim_args: async_save=true is not supported with {name}, because Trainer saves its state: use it with "
            f"one of {[*ALGORITHMS, *ZERO_NAMES]}, or with zero_stage"
        )
    return wanted


def _take_grad_compression(name: str, pairs: dict[str, str], stage: int | None) -> str:
    """The value of ``grad_compression``, which is an option of the host; "" if it is not given."""
    if stage is not None:
        return ""  # ZeroOptimizer has an option of that name
    value = pairs.pop("grad_compression", "")
    if value:
        check_grad_compression(value, name if name in ALGORITHMS else "")
    return value


def _take_messages(pairs: dict[str, str]) -> dict[str, Any]:
    """The options of the messages of compressed gradients."""
    legal = text_options(GradientCompression)
    names = [field.name for field in fields(MessageOptions) if field.name in pairs]
    found = {name: parse_value(name, pairs.pop(name), legal[name][0]) for name in names}
    MessageOptions(**found)
    return found


def check_grad_compression(value: str, other: str) -> None:
    """Check a value of ``grad_compression``.

    Args:
        value: The value.
        other: The name of what sends gradients in a way of its own, or "".

    Raises:
        ValueError: For an unknown value, and for compression beside ``other``.
    """
    if value not in (*FORMATS, "none"):
        raise ValueError(f"grad_compression must be one of {[*FORMATS, 'none']}, got {value!r}")
    if value != "none" and other:
        raise ValueError(
            f"grad_compression={value} is for ordinary optimizers, such as adamw_torch: {other} sends gradients in a "
            "way of its own. Leave grad_compression out, or choose an ordinary optimizer"
        )


def check_param_compression(value: str, stage: int | None) -> None:
    """Check a value of ``param_compression``.

    Raises:
        ValueError: For an unknown value, and for compression without ZeRO.
    """
    if value not in (*FORMATS, "none"):
        raise ValueError(f"param_compression must be one of {[*FORMATS, 'none']}, got {value!r}")
    if value != "none" and not stage:
        raise ValueError(
            f"param_compression={value} is an option of ZeRO, under which ranks send parameters: give zero_stage=1 or "
            "2, or leave it out"
        )


def check_taken(name: str, args: OptimArgs, taken: dict[str, Any], source: str) -> None:
    """Check that Trainer's own optimizer takes every option that is left, since Trainer ignores others.

    Args:
        name: The optimizer.
        args: The options as they were read.
        taken: Keyword arguments that Trainer gives to the optimizer.
        source: The text of the functions that read options for Trainer's optimizers, which quotes their names.

    Raises:
        ValueError: For an option that has no effect. The message names the nearest.
    """
    for key in _pairs(args.others):
        read_by_trainer = f'"{key}"' in source and not args.zero  # some options go to the param groups
        if key not in taken and not read_by_trainer:
            raise ValueError(_unknown(name, key, _legal(name, zero=bool(args.zero))))


def _legal(name: str, *, zero: bool) -> Options:
    """The options that --optim_args may have for an optimizer."""
    found = text_options(OPTIMIZERS[name]) if name in OPTIMIZERS else {}
    found |= {key: kinds for key, kinds in text_options(ZeroOptimizer).items() if zero and key != "stage"}
    found |= _ASYNC_SAVE if zero or name in ALGORITHMS else {}
    if name not in ALGORITHMS and not zero:
        found |= {name: ((str,), "none") for name in _COMPRESSIONS[:1]}
    return found if name in ALGORITHMS or name in ZERO_NAMES else found | _ZERO_STAGE


def _unknown(name: str, key: str, legal: Options) -> str:
    if key in _TRAINER_FLAGS:
        return f"optim_args: {key} is set by Trainer's {_TRAINER_FLAGS[key]}"
    what = OPTIMIZERS[name].__name__ if name in OPTIMIZERS else name
    owners = [other for other in ALGORITHMS if key in text_options(ALGORITHMS[other])]
    has = f", which {' and '.join(owners)} have." if owners else did_you_mean(key, legal)
    return f"optim_args: {what} has no option {key!r}{has or '.'} --optim_args help lists all options"


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """Name the legal names that are nearest to one that is not; "" if none is near."""
    near = get_close_matches(name, list(legal), n=2)
    return f": did you mean {' or '.join(map(repr, near))}?" if near else ""


def _pairs(text: str | None) -> dict[str, str]:
    """The options of a text, each once."""
    pairs: dict[str, str] = {}
    for part in filter(str.strip, (text or "").split(",")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name or not value:
            raise ValueError(
                f"optim_args must be name=value pairs, separated by commas; got {part.strip()!r} in {text!r}"
            )
        if name in pairs:
            raise ValueError(f"optim_args: {name} is given twice in {text!r}")
        pairs[name] = value
    return pairs


def text_options(optimizer_class: type[Any]) -> Options:
    """Options that text can set: name -> (types that it may have, default)."""
    options: Options = {}
    for init in reversed(_constructors(optimizer_class)):
        hints = get_type_hints(init)
        for name, parameter in inspect.signature(init).parameters.items():
            kinds = _text_types(hints.get(name))
            if name == "freeze_step" != getattr(optimizer_class, "freeze_option", name):
                continue  # this class calls it by another name
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and kinds and name not in _TRAINER_FLAGS:
                options[name] = (kinds, parameter.default)
    return options


def _constructors(cls: type) -> list[Callable[..., None]]:
    """The class's own constructor, and those of its bases to which it hands further options."""
    found: list[Callable[..., None]] = []
    for base in cls.__mro__:
        if init := vars(base).get("__init__"):
            found.append(init)
            if config := vars(base).get("config_class"):  # its fields are further options
                found.append(config.__init__)
            if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(init).parameters.values()):
                break
    return found


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


def _described(options: Options) -> str:
    return ", ".join(
        f"{name} ({_kinds(kinds)}; default {default})" for name, (kinds, default) in sorted(options.items())
    )
