"""The rules of options.txt: each row there is an option of DeepSpeed, a condition, what it becomes, and a remark."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_compressopt.integrations.algorithms import OPTIMIZERS
from hf_compressopt.integrations.deepspeed.translation import AUTO, BECOMES, KINDS, Case, Rule, number
from hf_compressopt.integrations.optim_args import text_options

#: DeepSpeed's optimizers, in lower case, and Trainer's ``--optim`` here.
NAMES = {
    "onebitadam": "onebit_adam",
    "zerooneadam": "zero_one_adam",
    "onebitlamb": "onebit_lamb",
    **dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam"), "fused_adam"),
    **dict.fromkeys(("lamb", "fusedlamb"), "lamb"),
    "sgd": "sgd",
    "adagrad": "adagrad",
}
#: DeepSpeed's schedules, in lower case, and Trainer's ``--lr_scheduler_type``.
SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine_with_min_lr"}


def _beta(number_of: int) -> Callable[[Case], Any]:
    def value(case: Case) -> Any:
        if case.value == AUTO:
            return AUTO
        if not isinstance(case.value, (list, tuple)) or len(case.value) != 2:
            raise ValueError(f"{case.option} must be 2 numbers, got {case.value!r}")
        return number(case.option, case.value[number_of])

    return value


def _power(case: Case) -> float:
    if not 0 <= number(case.option, case.value) <= 126:
        raise ValueError(f"{case.option} must be from 0 to 126, got {case.value!r}")
    return float(2.0**case.value)


def _optim(case: Case) -> str:
    name = NAMES[str(case.config["optimizer.type"]).lower()]
    return "adamw_torch" if name == "fused_adam" and case.config.get("optimizer.params.torch_adam") else name


def _legal(case: Case) -> bool:
    return case.optim in OPTIMIZERS and case.option.split(".")[-1] in text_options(OPTIMIZERS[case.optim])


def _over_mpi(case: Case) -> bool:
    return case.compressed and case.config.get("optimizer.params.comm_backend_name") == "mpi"


def _clips_nothing(case: Case) -> bool:
    return not case.value or case.facts["same_arithmetic"] or bool(case.config.get("gradient_clipping"))


_CONDITIONS: dict[str, Callable[[Case], Any]] = {
    "": lambda case: True,
    "on": lambda case: bool(case.value),
    "off": lambda case: not case.value,
    "never": lambda case: case.value == math.inf,  # as Accelerate writes it
    "ordinary": lambda case: not case.compressed,
    "1-bit": lambda case: case.optim in ("onebit_adam", "onebit_lamb"),
    "1-bit adam": lambda case: case.optim == "onebit_adam",
    "0/1": lambda case: case.optim == "zero_one_adam",
    "adamw": lambda case: case.optim in ("", "adamw_torch"),
    "decoupled": lambda case: case.value and case.optim != "fused_adam",
    "not fused": lambda case: case.optim != "fused_adam",
    "legal": _legal,
    "illegal": lambda case: not _legal(case),
    "heeded": lambda case: case.key not in ("bias_correction", "eps_inside_sqrt") or not case.compressed,
    "over mpi": _over_mpi,
    "no clip": _clips_nothing,
    "no norm": lambda case: "--max_grad_norm" not in case.translation.flags,
    "mean": lambda case: case.value and case.compressed,
    "staged": lambda case: case.config.get("zero_optimization.stage"),
    "stage 3": lambda case: case.option.split(".")[1].startswith(("stage3_", "zero_", "mics_")),
    "after": lambda case: case.value != 1 and not case.config.get("prescale_gradients"),
    "disabled": lambda case: not case.config.get(f"{case.section}.enabled"),
    "switched off": lambda case: not case.config.get(f"{case.section}.enabled", True),
    "whole": lambda case: not case.facts["missing"],
    "ranks": lambda case: case.facts["size"],
    "cosine": lambda case: case.translation.flags["--lr_scheduler_type"] == "cosine_with_min_lr",
    "no cosine": lambda case: case.translation.flags["--lr_scheduler_type"] != "cosine_with_min_lr",
}
_VALUES: dict[str, Callable[[Case], Any]] = {
    "value": lambda case: case.value,
    "number": lambda case: AUTO if case.value == AUTO else number(case.option, case.value),
    "int": lambda case: AUTO if case.value == AUTO else int(number(case.option, case.value)),  # 5e8 is an int too
    "float": lambda case: float(number(case.option, case.value)),
    "power": _power,
    "beta1": _beta(0),
    "beta2": _beta(1),
    "optim": _optim,
    "zero_adamw": lambda case: f"zero{case.value}_adamw",
    "schedule": lambda case: SCHEDULES[case.value.lower()],
    "min_lr_rate": lambda case: json.dumps({"min_lr_rate": case.value}),
}


def _literal(text: str) -> Any:
    """Return a value as JSON writes it, or the word itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _condition(text: str) -> Callable[[Case], Any]:
    values = [_literal(word) for word in text.split()]
    return _CONDITIONS.get(text, lambda case: case.value in values)


def _target(text: str) -> tuple[str, Callable[[Case], Any]]:
    name, given, value = text.partition("=")
    if given:
        return name, _VALUES.get(value, lambda case: _literal(value))
    return name, _VALUES["number" if name.startswith("--") else "value"]


def _rule(line: str) -> Rule:
    path, when, here, remark = (cell.strip() for cell in line.split("|", 3))
    path, absent, default = path.partition(" = ")
    words = here.split()
    kind = words.pop(0) if words[0] in KINDS else BECOMES
    targets = [_target(word) for word in words]
    return Rule(path, _condition(when), kind, targets, remark, bool(absent), _literal(default))


def _read() -> dict[str, list[Rule]]:
    text = Path(__file__).with_name("options.txt").read_text(encoding="utf-8")
    rules: dict[str, list[Rule]] = {}
    for line in text.splitlines():
        if line.startswith("== "):
            rules[line[3:]] = table = []
        elif line and not line.startswith("#"):
            table.append(_rule(line))
    return rules


#: The rules of each table.
RULES = _read()
