"""Optimizers ranked by the predicted time of a run, with steps, bytes, memory, and the flags to paste."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any

from hf_compressopt.integrations.algorithms import ALGORITHMS, ZERO_NAMES
from hf_compressopt.optim.group import STATE
from hf_compressopt.planner import report
from hf_compressopt.planner.cost import Model
from hf_compressopt.planner.memory import (
    COMPACT_FIRST,
    COMPACT_THEN,
    FLOAT32,
    ZERO_FIRST,
    ZERO_FREED_FIRST,
    ZERO_FREED_THEN,
)

_ADAMW = "--optim adamw_torch"
_HOOK = f"{_ADAMW}, and model.register_comm_hook(None, bf16_compress_hook) of torch's default_hooks"
#: Runs within this share count as equally fast: the planner's own error is larger (docs/planner.md).
ALIKE = 0.05


@dataclass(frozen=True)
class Choice:
    """An optimizer and its flags.

    Attributes:
        name: Its name in the planner's tables.
        place: Its place in these tables.
        flags: The flags of Trainer, or the change to a script.
        step_seconds: A step of the stage in which a run spends most of its steps.
        run_seconds: A whole run, all stages.
        step_bytes: Bytes that a rank sends in that step.
        run_bytes: Bytes that a rank sends in the run.
        memory_bytes: Parameters, gradients, state and buckets of a rank, at their largest.
    """

    name: str
    place: int
    flags: str
    step_seconds: float
    run_seconds: float
    step_bytes: float
    run_bytes: float
    memory_bytes: int


def ranked(model: Model, steps: int, memory: dict[str, dict[str, int]], warmup_bits: int | None) -> list[Choice]:
    """Rank all optimizers by the time of a run.

    Args:
        model: The planner's model.
        steps: Length of the run.
        memory: Of :func:`hf_compressopt.planner.report.memory_rows`.
        warmup_bits: The option for the flags; None leaves it out.

    Returns:
        The choices, the fastest run first.
    """
    runs, choices = report.whole_runs(model, steps), []
    for place, (name, stages) in enumerate(report.time_rows(model, steps).items()):
        step, run = stages[report.last_stage(stages)], runs[name]
        largest = max(memory[row]["total"] for row in _memory_rows(name))
        flags = _flags(name, model.training.itemsize, warmup_bits)
        choices.append(Choice(name, place, flags, step.seconds, run.seconds, step.sent, run.sent, largest))
    return sorted(choices, key=lambda choice: choice.run_seconds)


def advised(choices: list[Choice]) -> Choice:
    """Return the first choice in the planner's table that is as fast as the best: it changes the training least."""
    fast = [choice for choice in choices if choice.run_seconds <= choices[0].run_seconds * (1 + ALIKE)]
    return min(fast, key=lambda choice: choice.place)


def verdict(choices: list[Choice]) -> str:
    """Say in a sentence which choice to take."""
    mine, plain = advised(choices), next(choice for choice in choices if choice.flags == _ADAMW)
    gain = "" if mine is plain else f": {plain.run_seconds / mine.run_seconds:.2f} times as fast as {plain.name}"
    return f"use {mine.flags}{gain}; no other run is more than {100 * ALIKE:g} % faster"


def table(choices: list[Choice]) -> str:
    """Render choices as a table."""
    heads = ("step", "run", "sent a step", "sent a run", "memory")
    lines = [f"{'':26}" + "".join(f"{head:>14}" for head in heads) + "  flags"]
    for number, choice in enumerate(choices, 1):
        cells = (
            f"{choice.step_seconds * 1e3:,.1f} ms",
            f"{choice.run_seconds / 3600:,.2f} h",
            f"{choice.step_bytes / 1e6:,.2f} MB",
            f"{choice.run_bytes / 1e9:,.2f} GB",
            f"{choice.memory_bytes / 1e9:,.3f} GB",
        )
        lines.append(f"{number:2} {choice.name:23}" + "".join(f"{cell:>14}" for cell in cells) + f"  {choice.flags}")
    return "\n".join(lines)


def as_json(choices: list[Choice]) -> list[dict[str, Any]]:
    """Choices in values that JSON can hold."""
    return [asdict(choice) for choice in choices]


def _flags(name: str, itemsize: int, warmup_bits: int | None) -> str:
    if name.startswith("DDP"):
        return _ADAMW if name == f"DDP, {8 * itemsize}-bit gradients" else _HOOK
    if name.startswith("grad_compression"):
        return f"{_ADAMW} --optim_args {name}"
    if name == report.ZERO_INT4:
        return f"--optim {name.partition(',')[0]} --optim_args grad_compression=int4,param_compression=int4"
    stages = {f"ZeRO-{stage}": optim for optim, stage in ZERO_NAMES.items()}
    if name in stages:
        return f"--optim {stages[name]}"
    given = [f"zero_stage={stage}" for stage, row in report.ONEBIT_ZERO.items() if row == name]
    given += [f"warmup_bits={warmup_bits}"] if warmup_bits else []
    (optim,) = (optim for optim, cls in ALGORITHMS.items() if cls.__name__ == name.partition(",")[0])
    return f"--optim {optim}" + (f" --optim_args {','.join(given)}" if given else "")


def _memory_rows(name: str) -> list[str]:
    """Return the rows of the planner's memory table that belong to a choice, one for each form of its state."""
    if name.startswith("DDP"):
        return ["no ZeRO"]
    if name.startswith("grad_compression"):
        return ["grad_compression"]
    if name.startswith("ZeRO") or name == report.ZERO_INT4:
        return [name]
    for stage, forms in {1: (ZERO_FIRST, COMPACT_THEN), 2: (ZERO_FREED_FIRST, ZERO_FREED_THEN)}.items():
        if name == report.ONEBIT_ZERO[stage]:
            return [f"OnebitAdam, {form}" for form in forms]
    (cls,) = (cls for cls in ALGORITHMS.values() if cls.__name__ == name)
    own = signature(cls).parameters.get("state")
    compact = (STATE if own is None else own.default) != FLOAT32
    return [f"{name}, {form}" for form in ((COMPACT_FIRST, COMPACT_THEN) if compact else (FLOAT32,))]
