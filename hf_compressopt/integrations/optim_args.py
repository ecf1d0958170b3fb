"""``--optim_args`` of Trainer: its text, with environment variables beside it, as options of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from hf_compressopt.grad_compression import GradientCompression, MessageOptions
from hf_compressopt.integrations.algorithms import ALGORITHMS, OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.plugin import OPTIONS
from hf_compressopt.integrations.run_options import (
    NONE,
    RunOptions,
    check_stage_or_none,
    check_takes_stage,
    options_for,
)
from hf_compressopt.optim.onebit_adam import OnebitAdam
from hf_compressopt.optim.options import NO_STATE
from hf_compressopt.options import ACCEPTED, Option, did_you_mean, options_of, parse
from hf_compressopt.zero.optimizer import ZeroOptimizer

# Trainer has flags of its own for these.
_TRAINER_FLAGS = {
    "lr": "--learning_rate",
    "betas": "--adam_beta1 and --adam_beta2",
    "eps": "--adam_epsilon",
    "weight_decay": "--weight_decay",
    "max_grad_norm": "--max_grad_norm",
}


def read_optim_args(name: str, text: str | None, variables: Mapping[str, Any] | None = None) -> RunOptions:
    """Read ``--optim_args`` for the optimizer that ``--optim`` names.

    Args:
        name: The optimizer.
        text: The options, as name=value pairs.
        variables: Options that environment variables set; the text overrides them. None if there are none.

    Returns:
        The options, with ``others`` for an optimizer of Trainer's.

    Raises:
        ValueError: For an option that is unknown, has a value that is not legal, or does not go with the others.
    """
    if is_help(text):
        print_help(name)
    ours = name in OPTIMIZERS or name in ZERO_NAMES
    is_foreign = not ours and not any(option in (text or "") for option in _all_names(name))
    source = _Source({} if is_foreign else _pairs(text), variables or {})
    optimizer, stage = name if name in ALGORITHMS else NONE, _take_stage(name, source)
    values = source.take(_only("async_save"))
    if "async_save" in source.told and values["async_save"] and not stage and optimizer == NONE:
        raise ValueError(
            f"optim_args: async_save=true is not supported with {name}, because Trainer saves its state: use it with "
            f"one of {[*ALGORITHMS, *ZERO_NAMES]}, or with zero_stage"
        )
    if "gradient_as_bucket_view" in source.variables:
        values["gradient_as_bucket_view"] = source.variables["gradient_as_bucket_view"]
    if stage:
        values["zero"] = {"stage": stage, **source.take(_options_of_zero())}
    else:
        values |= source.take(_only("grad_compression"))
        values |= source.take(_only("param_compression"), may_be_told=not ours)
        if values.get("grad_compression", NONE) != NONE:
            values["messages"] = MessageOptions(**source.take(_options_of_messages()))
    if name in OPTIMIZERS:
        values["optimizer_options"] = _options_of_optimizer(name, source)
    if ours and source.pairs:
        key = next(iter(source.pairs))
        raise ValueError(_unknown(name, key, _legal(name, zero=bool(stage))))
    others = text or "" if is_foreign else ",".join(f"{key}={value}" for key, value in source.pairs.items())
    return RunOptions(optimizer=optimizer, others=others, **values)


class _Source:
    """Values of options: name=value pairs of text, and environment variables for what the text does not say."""

    def __init__(self, pairs: dict[str, str], variables: Mapping[str, Any]) -> None:
        self.pairs = pairs  # that nobody has taken yet
        self.told = frozenset(pairs)
        self.variables = variables

    def take(self, legal: Mapping[str, Option], *, may_be_told: bool = True) -> dict[str, Any]:
        """Take the values of legal options that are set, by the variables alone if text may not set them."""
        values = {name: self.variables[name] for name in legal if name in self.variables}
        for name in [name for name in self.pairs if name in legal and may_be_told]:
            values[name] = parse(name, self.pairs.pop(name), legal[name].kinds)
        return values


def _take_stage(name: str, source: _Source) -> int:
    """The stage of ZeroOptimizer, by the optimizer's name or by ``zero_stage``; 0 without ZeroOptimizer."""
    if name in ZERO_NAMES:
        if "zero_stage" in source.told:
            raise ValueError(f"optim_args: zero_stage is part of the optimizer's name ({name}): leave it out")
        return ZERO_NAMES[name]
    if name in ALGORITHMS:  # the optimizer's own option
        if "zero_stage" in source.told:
            check_takes_stage(name, source.pairs["zero_stage"])
        return 0
    stage: int = source.take(_only("zero_stage")).get("zero_stage", 0)
    check_stage_or_none(stage)
    return stage


def _options_of_optimizer(name: str, source: _Source) -> dict[str, Any]:
    """The options of an optimizer of this package; Trainer knows the run's length."""
    legal = text_options(OPTIMIZERS[name])
    if name in ALGORITHMS:
        shared = OPTIONS.keys() & options_of(OnebitAdam).keys()
        options_for(name, dict(source.variables), shared & source.variables.keys() - {"total_steps"})
    values = source.take(legal)
    if "total_steps" not in source.told:
        values.pop("total_steps", None)
    return values


def _pairs(text: str | None) -> dict[str, str]:
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


# -- what is legal ----------------------------------------------------------------------------------------------------


def text_options(optimizer_class: type[Any]) -> dict[str, Option]:
    """Options that text can set, by name."""
    rows = options_of(optimizer_class).items()  # type: ignore[arg-type]  # mypy: is type[Any] hashable?
    return {name: option for name, option in rows if option.kinds and option.keyword and name not in _TRAINER_FLAGS}


def _only(option: str) -> dict[str, Option]:
    return {option: OPTIONS[option]}


def _options_of_messages() -> dict[str, Option]:
    shared = options_of(OnebitAdam)
    described = {name: shared[name] for name in ("topology", "node_bits")}  # others refer to these
    known = text_options(ZeroOptimizer) | text_options(GradientCompression) | described
    return {option.name: known[option.name] for option in fields(MessageOptions)}


def _options_of_zero() -> dict[str, Option]:
    return {key: option for key, option in text_options(ZeroOptimizer).items() if key != "stage"}


def _groups(name: str) -> Iterator[tuple[str, dict[str, Option]]]:
    """Yield the options that --optim_args may have for an optimizer, after the option that they go with, or ""."""
    if name in OPTIMIZERS:
        yield "", text_options(OPTIMIZERS[name])
    if name in ALGORITHMS:
        yield "", _only("async_save")
        return
    if name not in ZERO_NAMES:
        yield "", _only("grad_compression")
        yield "grad_compression", _options_of_messages()
        yield "", _only("zero_stage")
    yield "zero_stage", _options_of_zero() | _only("async_save")


def _all_names(name: str) -> set[str]:
    return {key for _, group in _groups(name) for key in group}


def _legal(name: str, *, zero: bool) -> list[str]:
    other = "grad_compression" if zero else "zero_stage"
    return list(dict.fromkeys(key for option, group in _groups(name) if option != other for key in group))


def check_taken(name: str, options: RunOptions, taken: dict[str, Any], source: str) -> None:
    """Check that Trainer's own optimizer takes every option that is left, since Trainer ignores others."""
    for key in _pairs(options.others):
        read_by_trainer = f'"{key}"' in source and not options.zero  # some options go to the param groups
        if key not in taken and not read_by_trainer:
            raise ValueError(_unknown(name, key, _legal(name, zero=bool(options.zero))))


def _unknown(name: str, key: str, legal: Collection[str]) -> str:
    if key in _TRAINER_FLAGS:
        return f"optim_args: {key} is set by Trainer's {_TRAINER_FLAGS[key]}"
    if key == "state":
        return f"optim_args: {NO_STATE}"
    what = OPTIMIZERS[name].__name__ if name in OPTIMIZERS else name
    owners = [other for other in ALGORITHMS if key in text_options(ALGORITHMS[other])]
    has = f", which {' and '.join(owners)} have." if owners else did_you_mean(key, legal)
    return f"optim_args: {what} has no option {key!r}{has or '.'} --optim_args help lists all options"


# -- help -------------------------------------------------------------------------------------------------------------


def is_help(text: str | None) -> bool:
    """True if the options are to be listed."""
    return (text or "").strip() == "help"


def print_help(name: str) -> None:
    """Print the options of an optimizer, on the first rank, and end the program."""
    if os.environ.get("RANK", "0") == "0":
        print(*_list_options(name), sep="\n", flush=True)
    raise SystemExit(0)


def _list_options(name: str) -> Iterator[str]:
    """Yield the options of an optimizer, one a line, with default and the first sentence of the description."""
    yield f'--optim {name} --optim_args "option=value,option=value"'
    for other, group in _groups(name):
        indent = "  " if other and name not in ZERO_NAMES else ""
        for key, option in group.items():
            if key not in ACCEPTED:
                meaning, default = option.help.split(". ")[0], option.default
                words = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", meaning).replace("``", "").rstrip(".")
                value = str(default).removeprefix("torch.")
                text = f"{key}={value if isinstance(default, (str, torch.dtype)) else value.lower()}"
                yield f"{indent}  {text:32} {words}"
