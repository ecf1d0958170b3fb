"""The translation of DeepSpeed's options: the facts that decide it, and the rows of options.txt."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hf_compressopt.integrations.algorithms import ALGORITHMS, OPTIMIZERS, ZERO_NAMES
from hf_compressopt.integrations.deepspeed.translation import BECOMES, KINDS, SAME, Row, Translation
from hf_compressopt.integrations.optim_args import text_options

_AUTO = "auto"
# DeepSpeed's optimizers, in lower case, and Trainer's --optim here; its schedules, and Trainer's --lr_scheduler_type.
_OPTIMIZERS = {"onebitadam": "onebit_adam", "zerooneadam": "zero_one_adam", "onebitlamb": "onebit_lamb"}
_OPTIMIZERS |= {"lamb": "lamb", "fusedlamb": "lamb", "sgd": "sgd", "adagrad": "adagrad"}
_OPTIMIZERS |= dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam"), "fused_adam")
_SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine_with_min_lr"}


def facts_of(config: dict[str, Any], ranks: int | None, same_arithmetic: bool) -> dict[str, Any]:
    """Return the facts of a configuration that options.txt refers to.

    Raises:
        ValueError: If there is no such stage of ZeRO, or the sizes of batches contradict each other.
    """
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
    sections = dict.fromkeys(option.split(".")[0] for option in config)
    optional = ("fp16", "bf16", "tensorboard", "wandb")  # off if nothing is said
    off = [name for name in sections if name.isidentifier() and not get(f"{name}.enabled", name not in optional)]
    return {
        **{name: name == optim for name in OPTIMIZERS},
        "optim": optim,
        "unknown": "" if optim else kind,
        "known": ", ".join([*OPTIMIZERS, *ZERO_NAMES]),
        "compressed": compressed,
        "as_deepspeed": compressed and same_arithmetic,
        "heeded": " ".join(name for name in legal if name not in unheeded),
        "mpi": get(f"{params}comm_backend_name") == "mpi",
        "unclipped": unclipped,
        "norm": optim and not unclipped and norm != _AUTO,
        "stage": stage,
        "zero": stage in (1, 2) and not compressed,
        "adamw": optim in ("", "adamw_torch"),
        "prescaled": get("prescale_gradients"),
        "missing": missing,
        "size": size,
        "ranks": ranks,
        "schedule": _SCHEDULES.get(schedule.lower()),
        "unscheduled": "" if schedule.lower() in _SCHEDULES else schedule,
        "cosine": schedule.lower() == "warmupcosinelr",
        "off": " ".join(f"{name}.*" for name in off),
    }


def _missing_size(options: dict[str, Any], ranks: int | None) -> tuple[str, int | None]:
    """Return which of the two factors of train_batch_size is missing, and its value, if it follows from the others."""

    def whole(name: str) -> int:
        value = _number(name, options[name])
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


class Rule(NamedTuple):
    """A row of options.txt, which describes the columns."""

    facts: list[str]
    section: str
    options: str
    kind: str
    targets: list[str]
    remark: str


def apply(t: Translation, given: dict[str, Any], facts: dict[str, Any]) -> None:
    """Translate options, each by the first row of options.txt that fits it.

    Raises:
        ValueError: If an option has an illegal value.
    """
    config, said = {**given, facts["missing"]: facts["size"]} if facts["size"] else given, set[str]()
    for rule in RULES:
        if all(bool(facts[fact.lstrip("!")]) != fact.startswith("!") for fact in rule.facts):
            for option, value in [*_fitting(rule, config, facts)]:
                if option not in said:
                    said.add(option)
                    t.rows.append(_row(rule, t, option, value, option in given, facts))


def _fitting(rule: Rule, config: dict[str, Any], facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options that a row is for, and their values, or DeepSpeed's for options that are left out."""
    for pattern in rule.options.format(**facts).split():
        path, _, text = (rule.section + pattern).partition("=")
        wanted = _literal(text) if text else None
        if path.endswith(":") and path[:-1] not in config:
            yield path[:-1], wanted
        for option, value in config.items():
            if (option == path or fnmatchcase(f"{option}.", path)) and (not text or value == wanted):
                yield option, value


def _row(rule: Rule, t: Translation, option: str, value: Any, given: bool, facts: dict[str, Any]) -> Row:
    """Set what an option becomes."""
    targets = rule.targets or [option.split(".")[-1]] * (rule.kind == BECOMES)
    made = [_target(*target.format(**facts).partition("=")) for target in targets]
    if value == _AUTO and any(callable(new) for _, new in made):
        flags = [name for name, _ in made if name.startswith("--")]
        remark = "Trainer's flag decides, as before" if flags else "left out: the default here is used"
        return Row(option, value, SAME, " ".join(flags), remark, given)
    words = [t.set(name, new(option, value) if callable(new) else new) for name, new in made]
    remark = rule.remark.format(**facts) or ("" if given or option == facts["missing"] else "DeepSpeed's default")
    return Row(option, value, rule.kind, " ".join(filter(None, words)), remark, given)


def _target(name: str, equals: str, text: str) -> tuple[str, Any]:
    """Return what to set, and the value, or a function that makes it of an option and the option's value."""
    word = text if equals else "number" if name.startswith("--") else "value"
    return name, _VALUES.get(word) or _literal(text)


def _number(option: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise ValueError(f'{option} must be a finite number or "auto", got {value!r}')
    return value


def _beta(index: int, option: str, value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{option} must be 2 numbers, got {value!r}")
    return _number(option, value[index])


def _power(option: str, value: Any) -> float:
    if not 0 <= _number(option, value) <= 126:
        raise ValueError(f"{option} must be from 0 to 126, got {value!r}")
    return float(2.0**value)


_VALUES: dict[str, Callable[[str, Any], Any]] = {
    "value": lambda option, value: value,
    "number": _number,
    "int": lambda option, value: int(_number(option, value)),  # 5e8 is an int too
    "float": lambda option, value: float(_number(option, value)),
    "power": _power,
    "beta1": partial(_beta, 0),
    "beta2": partial(_beta, 1),
    "min_lr_rate": lambda option, value: json.dumps({"min_lr_rate": value}),
}


def _literal(text: str) -> Any:
    """Return a value as JSON writes it, or the word itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read() -> Iterator[Rule]:
    common, section = list[str](), ""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        cell, *columns = (cell.strip() for cell in line.removeprefix("==").split("|"))
        *facts, options = cell.split("?")
        own = " ".join(facts).split()
        if line.startswith("=="):
            common, section = own, options.strip()
        elif not line.startswith("#"):
            words = columns[0].split()
            kind = words.pop(0) if words[0] in KINDS else BECOMES
            yield Rule(common + own, section, options, kind, words, "".join(columns[1:]))


#: The rows of options.txt.
RULES = list(_read())
