"""Advice: all ways to train, their predicted runs, their ranking, and what to use.

Loss is not predicted: docs/convergence.md measures it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Any

from hf_compressopt.collectives.topology import AUTO
from hf_compressopt.flat import FLOAT_BYTES
from hf_compressopt.integrations.algorithms import ALGORITHMS, ZERO_NAMES
from hf_compressopt.kernels import INTEGER_BITS
from hf_compressopt.planner.cost import ONEBIT_ADAM, ONEBIT_LAMB, ZERO_ONE_GRADIENT, Cluster, Model, Step, average
from hf_compressopt.planner.memory import ALWAYS, FIRST, THEN, ZERO1_FIRST, ZERO2_FIRST, ZERO2_THEN, ZERO_INT4
from hf_compressopt.quantities import duration, with_unit
from hf_compressopt.schedules import Stage, ZeroOneSchedule

#: Runs within this share count as equally fast: the planner's own error is larger (docs/dev/planner.md).
ALIKE = 0.05
EVERY_STEP = "every step"  # the stage of a way that has one only
_WHOLE_RUN = "whole run"
_HALF_BYTES = 2
_ENOUGH_STEPS = 100_000  # the stages have the same shares in a longer run
_PASSES = {"onebit_adam": ONEBIT_ADAM, "onebit_lamb": ONEBIT_LAMB}
PLAIN = "--optim adamw_torch"  # what the others are compared with
_HOOK = f"{PLAIN}, and model.register_comm_hook(None, bf16_compress_hook) of torch's default_hooks"
_SAME = 0.02  # a difference of bytes that nobody would ask about


# -- ways to train ----------------------------------------------------------------------------------------------------


@cache
def zero_one_shares(steps: int, low_bit: bool) -> Counter[tuple[Stage, int]]:
    """Count the steps that 0/1 Adam takes in each stage and of each kind, by Trainer's default schedule.

    The kind is 1 for averaged gradients, 0 for a 1-bit gradient, and the length of the interval in local steps.
    """
    schedule = ZeroOneSchedule().fitted(steps, (), low_bit=low_bit).expected()
    shares: Counter[tuple[Stage, int]] = Counter()
    for step in range(1, steps + 1):
        plan = schedule.plan(step)
        learning = plan.stage is Stage.VARIANCE
        shares[plan.stage, int(plan.reduce_grads) if learning else schedule.local_interval(step)] += 1
    return shares


class Change(IntEnum):
    """Changes that a way to train makes, the smallest first, with the words for each."""

    words: str

    NOTHING = 0, "nothing"
    HALF = 1, "gradients are rounded to 16 bits"
    LOW_BIT = 2, "gradients are rounded to 4 or 8 bits, with error feedback"
    BOTH_WAYS = 3, "gradients and parameters are rounded to 4 bits, with error feedback"
    FROZEN = (
        4,
        "gradients are rounded in the warmup stage; after it momentum travels as signs, and the variance learns beside "
        f"every {ALGORITHMS['onebit_adam'].default_variance_interval}th message only",
    )
    ALONE = (
        5,
        f"as with onebit_adam, and ranks step alone for up to {ZeroOneSchedule().local_step_clipper} steps: "
        "with a few examples per rank the loss ends 1 to 2 % higher",
    )
    LAMB = 6, "as with onebit_adam, but LAMB takes the place of Adam, and after the warmup stage its variance is frozen"

    def __new__(cls, value: int, words: str) -> Change:
        """Make a member of its number and its words."""
        member = int.__new__(cls, value)
        member._value_, member.words = value, words
        return member


@dataclass(frozen=True)
class Way:
    """A way to train: its flags for Trainer, its rows of memory, and the predicted steps of its stages."""

    change: Change
    name: str
    flags: str
    memory: list[str]  # names of rows of memory_rows
    stages: dict[str, Step]  # the last one is the mean of a run
    note: str = ""

    @property
    def mean(self) -> Step:
        return list(self.stages.values())[-1]


def ways(model: Model, steps: int, warmup_bits: int | None) -> list[Way]:
    """All ways to train for so many steps, the smallest change of a training first; ``warmup_bits`` may be None."""
    every = [*_ordinary(model), *_partitioned(model)]
    stages = (0, 1, 2) if model.training.warmup_bits in INTEGER_BITS else (0,)
    every += [
        _compressed(Change.FROZEN, "onebit_adam", _onebit(model, "onebit_adam", steps, stage), warmup_bits, stage)
        for stage in stages
    ]
    every.append(_compressed(Change.ALONE, "zero_one_adam", _zero_one(model, steps), warmup_bits))
    every.append(_compressed(Change.LAMB, "onebit_lamb", _onebit(model, "onebit_lamb", steps), warmup_bits))
    every = [_with_topology(way, model.cluster) for way in every]
    return sorted(every, key=lambda way: way.change)


def _with_topology(way: Way, cluster: Cluster) -> Way:
    """Return the way with topology=flat among its flags where "auto" would be hierarchical."""
    if way.flags in (PLAIN, _HOOK) or replace(cluster, topology=AUTO).node_size == cluster.node_size:
        return way
    joint = "," if "--optim_args" in way.flags else " --optim_args "
    return replace(way, flags=f"{way.flags}{joint}topology=flat")


def _ordinary(model: Model) -> list[Way]:
    """DDP and ordinary optimizers."""
    itemsize = model.training.itemsize
    ordinary = [
        Way(Change.NOTHING, f"DDP, {8 * itemsize}-bit gradients", PLAIN, ["no ZeRO"], {EVERY_STEP: model.ddp()})
    ]
    if itemsize > _HALF_BYTES:
        name, step = f"DDP, {8 * _HALF_BYTES}-bit gradients", model.ddp(_HALF_BYTES)
        ordinary.append(Way(Change.HALF, name, _HOOK, ["no ZeRO"], {EVERY_STEP: step}))
    for bits in INTEGER_BITS:
        option, step = f"grad_compression=int{bits}", model.low_bit(bits)
        flags = f"{PLAIN} --optim_args {option}"
        ordinary.append(Way(Change.LOW_BIT, option, flags, ["grad_compression"], {EVERY_STEP: step}))
    return ordinary


def _partitioned(model: Model) -> list[Way]:
    """ZeRO around AdamW, with gradients and parameters as they are, and in 4 bits."""
    partitioned = []
    for optim, stage in sorted(ZERO_NAMES.items()):
        notes = ["keeps float32 weights"] if model.training.itemsize < FLOAT_BYTES else []
        if stage == 2 and model.training.accumulation > 1:
            notes.append("sends every micro-batch's gradients")
        name, flags = f"ZeRO-{stage}", f"--optim {optim}"
        note = ", ".join(notes)
        partitioned.append(Way(Change.NOTHING, name, flags, [name], {EVERY_STEP: model.zero(stage)}, note))
        name, flags = ZERO_INT4[stage], f"{flags} --optim_args grad_compression=int4"
        if model.training.itemsize == FLOAT_BYTES:  # those of 16 bits are sent as their changes
            flags += ",param_compression=int4"
        partitioned.append(Way(Change.BOTH_WAYS, name, flags, [name], {EVERY_STEP: model.zero_low_bit(4, stage)}, note))
    return partitioned


def _compressed(
    change: Change, optim: str, stages: dict[str, Step], warmup_bits: int | None, zero_stage: int = 0
) -> Way:
    """A compressed optimizer, from the steps of its stages and the mean of a run."""
    cls = ALGORITHMS[optim]
    options = [f"zero_stage={zero_stage}"] * bool(zero_stage) + [f"warmup_bits={warmup_bits}"] * bool(warmup_bits)
    flags = f"--optim {optim}" + f" --optim_args {','.join(options)}" * bool(options)
    by_stage = {1: (ZERO1_FIRST, THEN), 2: (ZERO2_FIRST, ZERO2_THEN)}
    stages_held = by_stage.get(zero_stage, (FIRST, THEN) if cls.compact else (ALWAYS,))
    name = f"{cls.__name__}, ZeRO-{zero_stage}" if zero_stage else cls.__name__
    note = "too short a run: stays in its warmup stage" if len(stages) == 2 else ""  # one stage, and the mean
    return Way(change, name, flags, [f"{cls.__name__}{when}" for when in stages_held], stages, note)


def _is_low_bit(model: Model) -> bool:
    return model.training.warmup_bits < 8 * FLOAT_BYTES


def _onebit(model: Model, name: str, steps: int, zero_stage: int = 0) -> dict[str, Step]:
    schedule = ALGORITHMS[name].schedule_class().fitted(steps, (), low_bit=_is_low_bit(model))
    first, sent = min(schedule.last_warmup_step, steps), {"during_backward": zero_stage == 2}
    averaged = model.shared_out(**sent) if zero_stage else model.averaged()
    if first == steps:
        return {"warmup": averaged, _WHOLE_RUN: averaged}
    compressed = model.refreshed(model.compressed(_PASSES[name], **sent), ALGORITHMS[name].default_variance_interval)
    whole = average([(first, averaged), (steps - first, compressed)])
    return {"warmup": averaged, "compressed": compressed, _WHOLE_RUN: whole}


def _zero_one(model: Model, steps: int) -> dict[str, Step]:
    averaged, gradient = model.averaged(), model.compressed(ZERO_ONE_GRADIENT)
    interval = ALGORITHMS["zero_one_adam"].default_variance_interval  # in syncs
    weighed: dict[str, list[tuple[float, Step]]] = defaultdict(list)
    for (stage, kind), count in zero_one_shares(min(steps, _ENOUGH_STEPS), _is_low_bit(model)).items():
        if stage is Stage.VARIANCE:
            step = averaged if kind else gradient
        else:
            step = model.refreshed(model.local_steps(kind), interval * kind)
        for name in (stage.value, _WHOLE_RUN):
            weighed[name].append((count, step))
    return {name: average(weighed[name]) for name in ("variance", "local-step", _WHOLE_RUN) if name in weighed}


# -- ranking ----------------------------------------------------------------------------------------------------------


def ranked(every: list[Way], steps: int, memory: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    """Rank the :func:`ways` by the time of a run, the fastest first; figures of a step are means of the run."""
    plain = every[0].mean.sent
    choices = [
        {
            "name": way.name,
            "place": index,
            "flags": way.flags,
            "change": int(way.change),
            "changes": way.change.words,
            "note": way.note,
            "step_seconds": way.mean.seconds,
            "run_seconds": way.mean.seconds * steps,
            "step_bytes": way.mean.sent,
            "run_bytes": way.mean.sent * steps,
            "fewer": plain / way.mean.sent if way.mean.sent else 1.0,
            "memory_bytes": max(memory[row]["total"] for row in way.memory),
        }
        for index, way in enumerate(every)
    ]
    return sorted(choices, key=lambda choice: choice["run_seconds"])


def advised(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of the :func:`ways` that is as fast as the best: it changes the training least.

    One that changes less, is as fast as that one, and sends less takes its place.
    """
    best = min(_as_fast_as(choices[0], choices), key=index_of)
    while True:
        others = [choice for choice in _as_fast_as(best, choices) if choice["run_bytes"] < best["run_bytes"]]
        smaller = [choice for choice in others if choice["change"] < best["change"]]
        if not smaller:
            return best
        best = min(smaller, key=index_of)


def _as_fast_as(other: dict[str, Any], choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for choice in choices if choice["run_seconds"] <= other["run_seconds"] * (1 + ALIKE)]


def index_of(choice: dict[str, Any]) -> int:
    """The index of a choice among the :func:`ways`."""
    return int(choice["place"])


def verdict(choices: list[dict[str, Any]], steps: int, itemsize: int) -> str:
    """Say what to use, and why, in a few lines, for a run of so many steps and weights of so many bytes each."""
    best, plain = advised(choices), plain_of(choices)
    lines = [f"use {best['flags']}"]
    if best is plain:
        lines.append(f"  {seconds_of(best)} a step; no other way is more than {100 * ALIKE:g} % faster")
        return "\n".join(lines)
    lines.append(
        f"  {plain['run_seconds'] / best['run_seconds']:.2f} times as fast as DDP: {seconds_of(best)} a step, not "
        f"{seconds_of(plain)}; a rank sends {bytes_of(best)} a step, not {bytes_of(plain)} ({against_plain(best)})"
    )
    lines.append(
        f"  no other way is more than {100 * ALIKE:g} % faster, in a run of {steps:,} steps (--steps says yours)"
    )
    lines.append(f"  what changes: {best['changes']}")
    held, before = float(best["memory_bytes"]), float(plain["memory_bytes"])
    if held > before * (1 + ALIKE):
        lines.append(f"  a rank holds {with_unit(held)} of weights, gradients and states, with DDP {with_unit(before)}")
    if best["change"] >= Change.FROZEN and itemsize < FLOAT_BYTES:
        lines.append(
            "  it keeps no float32 copy of 16-bit weights, which lose small updates: load them in float32, and compute "
            "in bfloat16"
        )
    return "\n".join([*lines, *([f"  {best['note']}"] if best["note"] else [])])


def plain_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that all are compared with: DDP."""
    return next(choice for choice in choices if choice["flags"] == PLAIN)


def seconds_of(choice: dict[str, Any]) -> str:
    """The time of a step, in words."""
    return duration(float(choice["step_seconds"]))


def bytes_of(choice: dict[str, Any]) -> str:
    """The bytes that a rank sends in a step, in words."""
    return with_unit(float(choice["step_bytes"]))


def against_plain(choice: dict[str, Any]) -> str:
    """The bytes of a way beside those of DDP."""
    fewer = float(choice["fewer"])
    if abs(fewer - 1) < _SAME:
        return "as many"
    return f"{fewer:.1f}x fewer" if fewer > 1 else f"{1 / fewer:.1f}x MORE"


def as_json(model: Model, steps: int, memory: dict[str, dict[str, int]], warmup_bits: int | None) -> dict[str, Any]:
    """Times, bytes, ranking and advice in values that JSON can hold; an infinite rate is None."""
    rates = {name: None if value == math.inf else value for name, value in asdict(model.cluster).items()}
    every = ways(model, steps, warmup_bits)
    choices = ranked(every, steps, memory)
    return {
        "assumptions": {**rates, **asdict(model.training), "update_seconds": model.update, "steps": steps},
        "steps": {way.name: {stage: _figures(step) for stage, step in way.stages.items()} for way in every},
        "run": {way.name: _figures(way.mean * steps) for way in every},
        "ranking": choices,
        "advised": advised(choices)["flags"],
        "verdict": verdict(choices, steps, model.training.itemsize),
    }


def _figures(step: Step) -> dict[str, float]:
    return {"seconds": step.seconds, "sent": step.sent, "on_link": step.on_link}
