"""Translate a DeepSpeed configuration into Trainer's flags and Accelerate's call."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hf_compressopt.format.inspect import printable
from hf_compressopt.integrations.algorithms import ALGORITHMS, OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.deepspeed_options import (
    ANY,
    BECOMES,
    DIFFERS,
    LOST,
    RULES,
    SAME,
    Rule,
    Target,
    as_given,
    number,
)
from hf_compressopt.integrations.optim_args import read_optim_args, text_options
from hf_compressopt.optim.lamb import FROZEN_OPTIONS
from hf_compressopt.zero.optimizer import ZeroOptimizer


@dataclass(frozen=True)
class Row:
    """The translation of one option."""

    option: str  # its path in the configuration, with dots
    value: Any  # DeepSpeed's default if it is not given
    kind: str  # "becomes" (a flag or option here), "same" (nothing to do), "differs", or "lost" (no counterpart)
    here: str = ""  # the flag or option
    remark: str = ""  # the reason, or the difference
    given: bool = True  # in the configuration


@dataclass
class Translation:
    """A configuration in the terms of this package."""

    optim: str = ""  # Trainer's --optim; "" if the configuration names no optimizer
    optim_args: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)  # Trainer's other flags; True for one without a value
    accelerate: dict[str, Any] = field(default_factory=dict)  # arguments of Accelerator
    scaler: dict[str, Any] = field(default_factory=dict)  # arguments of Accelerate's GradScalerKwargs
    rows: list[Row] = field(default_factory=list)

    @property
    def lost(self) -> list[Row]:
        return [row for row in self.rows if row.kind == LOST]

    @property
    def optim_args_text(self) -> str:
        return ",".join(f"{name}={_text(value)}" for name, value in self.optim_args.items())

    def flags_as_words(self) -> list[list[str]]:
        """Trainer's flags, each as words of a command line."""
        named = {"--optim": self.optim, "--optim_args": self.optim_args_text}
        flags = {flag: value for flag, value in named.items() if value} | self.flags
        return [_words(flag, value) for flag, value in flags.items()]

    def arguments(self) -> list[str]:
        return [word for words in self.flags_as_words() for word in words]

    def set(self, name: str, value: Any) -> str:
        """Set "--FLAG" of Trainer, "Accelerator:NAME", "GradScalerKwargs:NAME", or the option NAME of the optimizer."""
        place, _, key = name.rpartition(":")
        if place == "Accelerator":
            self.accelerate[key] = value
            return ""
        if place == "GradScalerKwargs":
            self.scaler.setdefault(key, value)
            return f"{place}({key}={value!r})"
        if name == "--optim":
            self.optim = value
        elif name.startswith("--"):
            self.flags[name] = value
        else:
            self.optim_args[name] = value
            name, value = "--optim_args", f"{name}={_text(value)}"
        return shlex.join(_words(name, value))


def _words(flag: str, value: Any) -> list[str]:
    return [flag] if value is True else [flag, _text(value)]


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


_AUTO = "auto"
# DeepSpeed's optimizers, in lower case, and Trainer's --optim here; its schedules, and Trainer's --lr_scheduler_type.
_OPTIMIZERS = {"onebitadam": "onebit_adam", "zerooneadam": "zero_one_adam", "onebitlamb": "onebit_lamb"}
_OPTIMIZERS |= {"lamb": "lamb", "fusedlamb": "lamb", "sgd": "sgd", "adagrad": "adagrad"}
_OPTIMIZERS |= dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam"), "fused_adam")
_SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine_with_min_lr"}


def facts_of(config: dict[str, Any], ranks: int | None, same_arithmetic: bool) -> SimpleNamespace:
    """Return what the conditions, remarks and values of the rules know of a configuration."""
    get, params = config.get, "optimizer.params."
    stage, norm = get("zero_optimization.stage"), get(f"{params}max_grad_norm")
    if isinstance(stage, bool) or stage not in (None, 0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")
    kind, schedule = str(get("optimizer.type", "")), str(get("scheduler.type", ""))
    optim = _OPTIMIZERS.get(kind.lower(), "")
    if optim == "fused_adam" and get(f"{params}torch_adam"):
        optim = "adamw_torch"
    compressed, legal = optim in ALGORITHMS, text_options(OPTIMIZERS[optim]) if optim in OPTIMIZERS else {}
    unheeded = ("bias_correction", "eps_inside_sqrt") if compressed else ()
    unclipped = same_arithmetic or not norm or get("gradient_clipping")  # max_grad_norm clips nothing
    missing, size = _missing_size(config, ranks)
    factors = any(get(f"{params}{name}") is not None for name in FROZEN_OPTIONS)
    sections = dict.fromkeys(option.split(".")[0] for option in config)
    optional = ("fp16", "bf16", "tensorboard", "wandb")  # off if nothing is said
    off = [name for name in sections if name.isidentifier() and not get(f"{name}.enabled", name not in optional)]
    return SimpleNamespace(
        optim=optim,
        unknown="" if optim else kind,
        known=", ".join([*OPTIMIZERS, *ZERO_NAMES]),
        compressed=compressed,
        as_deepspeed=compressed and same_arithmetic,
        frozen_ratio=optim == "onebit_lamb" and (same_arithmetic or factors),
        heeded=" ".join(name for name in legal if name not in unheeded),
        mpi=get(f"{params}comm_backend_name") == "mpi",
        unclipped=unclipped,
        norm=optim and not unclipped and norm != _AUTO,
        stage=stage,
        zero=stage in (1, 2) and not compressed,
        adamw=optim in ("", "adamw_torch"),
        prescaled=get("prescale_gradients"),
        missing=missing,
        size=size,
        ranks=ranks,
        schedule=_SCHEDULES.get(schedule.lower()),
        unscheduled="" if schedule.lower() in _SCHEDULES else schedule,
        cosine=schedule.lower() == "warmupcosinelr",
        off=" ".join(f"{name}.*" for name in off),
    )


def _missing_size(options: dict[str, Any], ranks: int | None) -> tuple[str, int | None]:
    """Return which of the two factors of train_batch_size is missing, and its value, if it follows from the others."""

    def whole(name: str) -> int:
        value = number(name, options[name])
        if value < 1 or value != int(value):
            raise ValueError(f'{name} must be a whole number >= 1 or "auto", got {value!r}')
        return int(value)

    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    known = [name for name in names if options.get(name, _AUTO) != _AUTO]
    sizes, missing = [whole(name) for name in known], next((name for name in names if name not in known), "")
    if ranks is None or not missing or options.get("train_batch_size", _AUTO) == _AUTO:
        return missing, None
    total, divisor = whole("train_batch_size"), ranks * math.prod(sizes)
    if total % divisor:
        raise ValueError(f"train_batch_size must be a multiple of {divisor}, by {ranks} rank(s), got {total}")
    return missing, total // divisor


def _fitting(rule: Rule, config: dict[str, Any], facts: SimpleNamespace) -> Iterator[tuple[str, Any]]:
    """Yield the options that a rule is for, and their values, or DeepSpeed's for options that are left out."""
    options: str = rule.options(facts) if callable(rule.options) else rule.options
    for name in options.split():
        path = rule.section + name
        if rule.default is not ANY and path not in config:
            yield path, rule.default
        for option, value in config.items():
            fits = option == path or fnmatchcase(f"{option}.", path)
            if fits and (rule.value is ANY or value == rule.value):
                yield option, value


def _row(rule: Rule, t: Translation, option: str, value: Any, given: bool, facts: SimpleNamespace) -> Row:
    targets = rule.targets or (option.split(".")[-1],) * (rule.kind == BECOMES)
    made = [_target(target, facts) for target in targets]
    if value == _AUTO and any(callable(new) for _, new in made):
        flags = [name for name, _ in made if name.startswith("--")]
        remark = "Trainer's flag decides, as before" if flags else "left out: the default here is used"
        return Row(option, value, SAME, " ".join(flags), remark, given)
    words = [t.set(name, new(option, value) if callable(new) else new) for name, new in made]
    remark = rule.remark.format_map(vars(facts)) or ("" if given or option == facts.missing else "DeepSpeed's default")
    return Row(option, value, rule.kind, " ".join(filter(None, words)), remark, given)


def _target(target: Target, facts: SimpleNamespace) -> tuple[str, Any]:
    """Return what to set, and the value, or a function that makes it of an option and the option's value."""
    if isinstance(target, str):
        return target, number if target.startswith("--") else as_given
    name, value = target
    return name, value.format_map(vars(facts)) if isinstance(value, str) else value


_TITLES = {BECOMES: "What becomes what", DIFFERS: "What is different", SAME: "Nothing to do", LOST: "No counterpart"}
_TORCH_CLASSES = {"sgd": "SGD", "adagrad": "Adagrad"}


def render(translation: Translation) -> str:
    """Render a translation as text: the flags, the code, and a remark on every option, without control characters."""
    flags = [shlex.join(words) for words in translation.flags_as_words()]
    lines = ["Trainer: accelerate launch -m hf_compressopt.run script.py, with", *(f"    {flag}" for flag in flags)]
    lines += ["", "Accelerate:", *(f"    {line}" for line in accelerate_code(translation).splitlines())]
    for kind, title in _TITLES.items():
        rows = [row for row in translation.rows if row.kind == kind]
        lines += ["", f"{title}:"] if rows else []
        for row in rows:
            value = json.dumps(row.value) if row.given else f"not given: {json.dumps(row.value)}"
            here = f" -> {row.here}" if row.here else ""
            lines.append(f"    {row.option} ({value}){here}" + (f": {row.remark}" if row.remark else ""))
    return "\n".join(map(printable, lines))


def as_json(translation: Translation) -> dict[str, Any]:
    """A translation for programs: the flags as words, the code, every option, and those without a counterpart."""
    return {
        "trainer": translation.arguments(),
        "accelerate": accelerate_code(translation),
        "options": [vars(row) for row in translation.rows],
        "lost": [row.option for row in translation.lost],
    }


def accelerate_code(translation: Translation) -> str:
    """Code for a training loop with Accelerate; the script has a ``model``."""
    accelerate, imports = _call(translation.accelerate), ["CompressOptAccelerator"]
    if translation.scaler:
        accelerate.append(f"kwargs_handlers=[GradScalerKwargs({', '.join(_call(translation.scaler))})]")
    made = _optimizer(translation, imports)
    lines = ["from accelerate.utils import GradScalerKwargs"] if translation.scaler else []
    lines += ["import torch"] if "torch." in made else []
    lines += [f"from hf_compressopt import {', '.join(imports)}", ""]
    lines += [f"accelerator = CompressOptAccelerator({', '.join(accelerate)})", f"optimizer = {made}"]
    lines.append("model, optimizer = accelerator.prepare(model, optimizer)  # the loader and scheduler too")
    if norm := translation.flags.get("--max_grad_norm"):
        lines.append(f"# before each step: accelerator.clip_grad_norm_(model.parameters(), {norm})")
    return "\n".join(lines)


def _optimizer(translation: Translation, imports: list[str]) -> str:
    """The expression that creates the optimizer, for :func:`accelerate_code`; what it imports goes to ``imports``."""
    name, options = translation.optim, dict(translation.optim_args)
    common = adam_options(translation)
    cls = f"torch.optim.{_TORCH_CLASSES.get(name, 'AdamW')}"
    if name in OPTIMIZERS:
        cls = OPTIMIZERS[name].__name__
        imports.append(cls)
    if name in _TORCH_CLASSES:
        common = {key: value for key, value in common.items() if key in ("lr", "weight_decay")}
    words = ["model.parameters()"]
    if stage := ZERO_NAMES.get(name) or options.pop("zero_stage", 0):
        imports.append("ZeroOptimizer")
        zero = {key: options.pop(key) for key in list(options) if key in text_options(ZeroOptimizer)}
        words += [cls, *_call({"stage": stage, **zero})]
        cls = "ZeroOptimizer"
    return f"{cls}({', '.join(words + _call(common | options))})"


def adam_options(translation: Translation) -> dict[str, Any]:
    """Options that Trainer has flags for, by the names that every Adam has."""
    names = {"lr": "learning_rate", "betas": "adam_beta1", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
    flags = translation.flags
    options = {name: flags[f"--{flag}"] for name, flag in names.items() if f"--{flag}" in flags}
    if "betas" in options:
        options["betas"] = options["betas"], flags["--adam_beta2"]
    return options


def _call(values: dict[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in values.items()]


_DEEPEST = 8  # levels of a configuration; DeepSpeed's own have four
_SECTIONS = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16")


def translate(config: dict[str, Any], *, ranks: int | None = None, same_arithmetic: bool = False) -> Translation:
    """Translate a DeepSpeed configuration, or one for Transformers with "auto"; ``ranks`` divides a train_batch_size.

    ``same_arithmetic`` gives the compressed optimizers the options that compute what DeepSpeed's did.
    """
    for section in _SECTIONS:
        if not isinstance(config.get(section, {}), dict):
            raise ValueError(f"{section} must be an object with options, got {config[section]!r}")
    listed = dict(_options("", {{"bfloat16": "bf16"}.get(name, name): value for name, value in config.items()}))
    options = {name: value for name, value in listed.items() if value is not None}
    facts, translation = facts_of(options, ranks, same_arithmetic), Translation()
    translated: set[str] = set()
    config = options | ({facts.missing: facts.size} if facts.size else {})
    for rule in RULES:
        if rule.when(facts):
            for option, value in _fitting(rule, config, facts):
                if option not in translated:  # by the first rule that fits it
                    translated.add(option)
                    translation.rows.append(_row(rule, translation, option, value, option in options, facts))
    translation.rows += [Row(name, None, SAME, "", "not set") for name in listed if name not in options]
    _check_ranges(translation)
    return translation


def _options(prefix: str, section: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if prefix.count(".") > _DEEPEST:
        raise ValueError(f"{prefix[:-1]} is nested more than {_DEEPEST} levels deep")
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _options(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def read_config(path: str) -> dict[str, Any]:

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} given twice")
        return dict(pairs)

    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{path} is not a DeepSpeed configuration in JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a DeepSpeed configuration in JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a DeepSpeed configuration: it must be an object, got {type(config).__name__}")
    return config


def _check_ranges(translation: Translation) -> None:
    args = read_optim_args(translation.optim, translation.optim_args_text)
    known = translation.optim in (*OPTIMIZERS, *ZERO_NAMES, "adamw_torch")
    if known and os.environ.get("WORLD_SIZE", "1") == "1":  # else it would look for the other ranks
        cls: Callable[..., torch.optim.Optimizer] = OPTIMIZERS.get(translation.optim, torch.optim.AdamW)
        values, transport = {**adam_options(translation), **args.optimizer_options}, ("communicator", "cuda_aware")
        cls([torch.zeros(8)], **{name: value for name, value in values.items() if name not in transport})
