"""The planner's report: memory, bytes and predicted times of every way to train, their ranking, and their flags."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from inspect import signature
from typing import Any

import torch

from hf_compressopt.collectives.topology import AUTO
from hf_compressopt.flat import FLOAT_BYTES, bucket_numel_of, chunk_numel
from hf_compressopt.integrations.algorithms import ALGORITHMS, ZERO_NAMES
from hf_compressopt.kernels import INTEGER_BITS, CompactErrors, SignFormat
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.planner.cost import ONEBIT_ADAM, ONEBIT_LAMB, ZERO_ONE_GRADIENT, Cluster, Model, Step, average
from hf_compressopt.quantities import duration, with_unit
from hf_compressopt.schedules import Stage, ZeroOneSchedule
from hf_compressopt.zero.memory import MemoryEstimate, estimate_zero_memory

#: Runs within this share count as equally fast: the planner's own error is larger (docs/dev/planner.md).
ALIKE = 0.05
MEMORY = ("parameters", "gradients", "states", "buckets", "total")
#: ZeRO with gradients and parameters in 4 bits, and FSDP2 without replicas.
ZERO_INT4 = {stage: f"zero{stage}_adamw, int4" for stage in (1, 2)}
FSDP2 = ("FSDP2", "FSDP2, int4 gradients", "FSDP2, exact parameters")
#: When a compressed optimizer's state has a size: always, if it is in float32, or in the two stages if it is compact.
#: With ``zero_stage=2`` they are what is held from the backward pass to the step.
ALWAYS, FIRST, THEN = "", ", warmup stage", ", then"
ZERO1_FIRST = ", zero_stage=1, warmup stage"
ZERO2_FIRST, ZERO2_THEN = ", zero_stage=2, warmup stage", ", zero_stage=2, then"
_HALF_BYTES = 2
_ENOUGH_STEPS = 100_000  # the stages have the same shares in a longer run
_WHOLE_RUN, _EVERY_STEP = "whole run", "every step"
_PASSES = {"onebit_adam": ONEBIT_ADAM, "onebit_lamb": ONEBIT_LAMB}
_SIGNS = SignFormat(signature(CompressedOptimizer).parameters["scale_block"].default)
_ADAMW = "--optim adamw_torch"
_SAME = 0.02  # a difference of bytes that nobody would ask about
_HOOK = f"{_ADAMW}, and model.register_comm_hook(None, bf16_compress_hook) of torch's default_hooks"

# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buckets:
    """Bytes of a compressed optimizer's buffers on the rank that serves the longest chunks."""

    params: int
    world_size: int
    bucket_numel: int
    node_size: int = 1

    def _sum(self, of_bucket: Callable[[int, int], int]) -> int:
        """Sum over all buckets what their elements, and those of their longest chunk, take."""
        whole, rest = divmod(self.params, self.bucket_numel)
        counts = ((whole, self.bucket_numel), (int(rest > 0), rest))
        return sum(n * of_bucket(numel, min(chunk_numel(numel, self.world_size), numel)) for n, numel in counts if n)

    @property
    def own_elements(self) -> int:
        """Elements of the chunks that the rank serves."""
        return self._sum(lambda numel, chunk: chunk)

    @property
    def messages(self) -> int:
        """Bytes of the servers' sign messages, which lie as far apart as the longest one is."""
        return self._sum(lambda numel, chunk: self.world_size * _SIGNS.nbytes(chunk))

    @property
    def worker_errors(self) -> int:
        """Bytes of the worker errors in 8 bits, of the chunks that ranks of a node share; one rank alone has none."""
        shards = self.world_size // self.node_size
        held = self._sum(lambda numel, chunk: CompactErrors.nbytes(min(shards * chunk, numel), shards))
        return held if self.world_size > 1 else 0

    @property
    def errors(self) -> int:
        """Bytes of all errors in 8 bits."""
        server = self._sum(lambda numel, chunk: CompactErrors.nbytes(chunk))
        return self.worker_errors + server if self.world_size > 1 else 0

    def states(self, optimizer_class: type[CompressedOptimizer]) -> dict[str, int]:
        """Bytes of a compressed optimizer's state by stage; in the first compressed step moments lie in both forms."""
        several = self.world_size > 1
        own = FLOAT_BYTES * self.params * sum(state.per == "element" for state in optimizer_class.extra_state)
        momentum = FLOAT_BYTES * self.params
        if optimizer_class.momentum_is_message and several:
            momentum = self.messages
        count = 1 + optimizer_class.has_variance
        moments, shard = (FLOAT_BYTES * count * numel for numel in (self.params, self.own_elements))
        if not optimizer_class.compact:
            errors = FLOAT_BYTES * (-(-self.params // self.node_size) + -(-self.params // self.world_size)) * several
            return {ALWAYS: own + moments + errors}
        variance = self.params * optimizer_class.has_variance  # a byte per element
        then = own + momentum + variance + self.errors
        found = {FIRST: own + moments + self.errors, THEN: then}
        if 1 in optimizer_class.zero_stages and several:
            found[ZERO1_FIRST] = own + shard + self.errors
            found[ZERO2_FIRST] = own + shard + self.errors + self.worker_errors  # new errors wait for the step
            found[ZERO2_THEN] = then + self.errors + momentum  # and so do the new messages
        return found


def memory_rows(
    params: int,
    world_size: int,
    dtype: torch.dtype,
    states: int,
    bucket_cap_mb: float,
    node_size: int = 1,
    *,
    accumulates: bool = False,
) -> dict[str, dict[str, int]]:
    """Bytes on each rank, by optimizer and by content, with a row for each stage of a compact state.

    A compressed optimizer with ``zero_stage=2`` holds whole gradients while it ``accumulates`` micro-batches.

    Messages in flight are left out: 1/32 of the buckets' bytes. FSDP2 has no replicas here: each rank has a shard of
    all, and with gradients in 4 bits errors for all, old and new ones, with exact parameters what was gathered last.
    """
    estimate = partial(
        estimate_zero_memory, params, world_size, dtype=dtype, states_per_parameter=states, bucket_cap_mb=bucket_cap_mb
    )
    bucket_numel, full = bucket_numel_of(bucket_cap_mb), params * dtype.itemsize
    buckets = Buckets(params, world_size, bucket_numel, node_size)
    estimates = {name: estimate(stage) for stage, name in enumerate(("no ZeRO", "ZeRO-1", "ZeRO-2"))}
    if world_size > 1:
        parameters = AUTO if dtype.itemsize < FLOAT_BYTES else "int4"
        for stage, name in ZERO_INT4.items():
            small = estimate(stage, grad_compression="int4", param_compression=parameters, node_size=node_size)
            estimates[name] = replace(small, states=small.states + small.errors, errors=0)
        plain = estimates["no ZeRO"]
        estimates["grad_compression"] = replace(plain, states=plain.states + buckets.errors)
        shard = [-(-value // world_size) for value in (full, full, plain.states)]
        errors = 2 * Buckets(params, world_size, bucket_numel).worker_errors
        for name, held in zip(FSDP2, (0, errors, params * _HALF_BYTES), strict=True):
            estimates[name] = MemoryEstimate(shard[0], shard[1], shard[2] + held, plain.buckets)
    gradients = {ZERO2_FIRST: FLOAT_BYTES * buckets.own_elements, ZERO2_THEN: 0}
    if accumulates:
        gradients = {when: full + held for when, held in gradients.items()}
    for cls in ALGORITHMS.values():
        for when, held in buckets.states(cls).items():
            waiting = bucket_numel * dtype.itemsize if when in gradients else 0
            estimates[f"{cls.__name__}{when}"] = MemoryEstimate(full, gradients.get(when, full), held, waiting)
    return {name: {part: getattr(memory, part) for part in MEMORY} for name, memory in estimates.items()}


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


#: What a way to train changes, the smallest change first. Loss is not predicted: docs/convergence.md measures it.
CHANGES = (
    "nothing",
    "gradients are rounded to 16 bits",
    "gradients are rounded to 4 or 8 bits, with error feedback",
    "gradients and parameters are rounded to 4 bits, with error feedback",
    "gradients are rounded in the warmup stage; after it the variance is frozen, and momentum travels as signs",
    f"as with onebit_adam, and ranks step alone for up to {ZeroOneSchedule().local_step_clipper} steps: "
    "with a few examples per rank the loss ends 1 to 2 % higher",
    "as with onebit_adam, and LAMB takes the place of Adam",
)
_NOTHING, _HALF, _LOW_BIT, _BOTH_WAYS, _FROZEN, _ALONE, _LAMB = range(len(CHANGES))


@dataclass(frozen=True)
class Way:
    """A way to train: its flags for Trainer, its rows of :func:`memory_rows`, and the predicted steps of its stages."""

    change: int  # its place in CHANGES
    name: str
    flags: str
    memory: list[str]
    stages: dict[str, Step]  # the last one is the mean of a run
    note: str = ""

    @property
    def mean(self) -> Step:
        return list(self.stages.values())[-1]


def ways(model: Model, steps: int, warmup_bits: int | None) -> list[Way]:
    """All ways to train for so many steps, the smallest change of a training first; ``warmup_bits`` may be None."""
    found = [*_ordinary(model), *_partitioned(model)]
    stages = (0, 1, 2) if model.training.warmup_bits in INTEGER_BITS else (0,)
    found += [
        _compressed(_FROZEN, "onebit_adam", _onebit(model, "onebit_adam", steps, stage), warmup_bits, stage)
        for stage in stages
    ]
    found.append(_compressed(_ALONE, "zero_one_adam", _zero_one(model, steps), warmup_bits))
    found.append(_compressed(_LAMB, "onebit_lamb", _onebit(model, "onebit_lamb", steps), warmup_bits))
    found = [_with_topology(way, model.cluster) for way in found]
    return sorted(found, key=lambda way: way.change)


def _with_topology(way: Way, cluster: Cluster) -> Way:
    """Return the way with topology=flat among its flags where "auto" would be hierarchical."""
    if way.flags in (_ADAMW, _HOOK) or replace(cluster, topology=AUTO).node_size == cluster.node_size:
        return way
    joint = "," if "--optim_args" in way.flags else " --optim_args "
    return replace(way, flags=f"{way.flags}{joint}topology=flat")


def _ordinary(model: Model) -> list[Way]:
    """DDP and ordinary optimizers."""
    itemsize = model.training.itemsize
    found = [Way(_NOTHING, f"DDP, {8 * itemsize}-bit gradients", _ADAMW, ["no ZeRO"], {_EVERY_STEP: model.ddp()})]
    if itemsize > _HALF_BYTES:
        name, step = f"DDP, {8 * _HALF_BYTES}-bit gradients", model.ddp(_HALF_BYTES)
        found.append(Way(_HALF, name, _HOOK, ["no ZeRO"], {_EVERY_STEP: step}))
    for bits in INTEGER_BITS:
        option, step = f"grad_compression=int{bits}", model.low_bit(bits)
        flags = f"{_ADAMW} --optim_args {option}"
        found.append(Way(_LOW_BIT, option, flags, ["grad_compression"], {_EVERY_STEP: step}))
    return found


def _partitioned(model: Model) -> list[Way]:
    """ZeRO around AdamW, with gradients and parameters as they are, and in 4 bits."""
    found = []
    for optim, stage in sorted(ZERO_NAMES.items()):
        notes = ["keeps float32 weights"] if model.training.itemsize < FLOAT_BYTES else []
        if stage == 2 and model.training.accumulation > 1:
            notes.append("sends every micro-batch's gradients")
        name, flags, note = f"ZeRO-{stage}", f"--optim {optim}", ", ".join(notes)
        found.append(Way(_NOTHING, name, flags, [name], {_EVERY_STEP: model.zero(stage)}, note))
        name, flags = ZERO_INT4[stage], f"{flags} --optim_args grad_compression=int4"
        if model.training.itemsize == FLOAT_BYTES:  # those of 16 bits are sent as their changes
            flags += ",param_compression=int4"
        found.append(Way(_BOTH_WAYS, name, flags, [name], {_EVERY_STEP: model.zero_low_bit(4, stage)}, note))
    return found


def _compressed(change: int, optim: str, stages: dict[str, Step], warmup_bits: int | None, zero_stage: int = 0) -> Way:
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
    compressed = model.compressed(_PASSES[name], **sent)
    whole = average([(first, averaged), (steps - first, compressed)])
    return {"warmup": averaged, "compressed": compressed, _WHOLE_RUN: whole}


def _zero_one(model: Model, steps: int) -> dict[str, Step]:
    averaged, gradient = model.averaged(), model.compressed(ZERO_ONE_GRADIENT)
    weighed: dict[str, list[tuple[float, Step]]] = defaultdict(list)
    for (stage, kind), count in zero_one_shares(min(steps, _ENOUGH_STEPS), _is_low_bit(model)).items():
        learning = stage is Stage.VARIANCE
        step = (averaged if kind else gradient) if learning else model.local_steps(kind)
        for name in (stage.value, _WHOLE_RUN):
            weighed[name].append((count, step))
    return {name: average(weighed[name]) for name in ("variance", "local-step", _WHOLE_RUN) if name in weighed}


# -- ranking ----------------------------------------------------------------------------------------------------------


def ranked(found: list[Way], steps: int, memory: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    """Rank the :func:`ways` by the time of a run, the fastest first; figures of a step are means of the run."""
    plain = found[0].mean.sent
    choices = [
        {
            "name": way.name,
            "place": place,
            "flags": way.flags,
            "change": way.change,
            "changes": CHANGES[way.change],
            "note": way.note,
            "step_seconds": way.mean.seconds,
            "run_seconds": way.mean.seconds * steps,
            "step_bytes": way.mean.sent,
            "run_bytes": way.mean.sent * steps,
            "fewer": plain / way.mean.sent if way.mean.sent else 1.0,
            "memory_bytes": max(memory[row]["total"] for row in way.memory),
        }
        for place, way in enumerate(found)
    ]
    return sorted(choices, key=lambda choice: choice["run_seconds"])


def advised(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of the :func:`ways` that is as fast as the best: it changes the training least.

    One that changes less, is as fast as that one, and sends less takes its place.
    """
    best = min(_as_fast_as(choices[0], choices), key=_place)
    while True:
        others = [choice for choice in _as_fast_as(best, choices) if choice["run_bytes"] < best["run_bytes"]]
        smaller = [choice for choice in others if choice["change"] < best["change"]]
        if not smaller:
            return best
        best = min(smaller, key=_place)


def _as_fast_as(other: dict[str, Any], choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for choice in choices if choice["run_seconds"] <= other["run_seconds"] * (1 + ALIKE)]


def _place(choice: dict[str, Any]) -> int:
    """The place of a choice among the :func:`ways`."""
    return int(choice["place"])


def verdict(choices: list[dict[str, Any]], steps: int, itemsize: int) -> str:
    """Say what to use, and why, in a few lines, for a run of so many steps and weights of so many bytes each."""
    mine, plain = advised(choices), next(choice for choice in choices if choice["flags"] == _ADAMW)
    lines = [f"use {mine['flags']}"]
    if mine is plain:
        lines.append(f"  {_seconds(mine)} a step; no other way is more than {100 * ALIKE:g} % faster")
        return "\n".join(lines)
    lines.append(
        f"  {plain['run_seconds'] / mine['run_seconds']:.2f} times as fast as DDP: {_seconds(mine)} a step, not "
        f"{_seconds(plain)}; a rank sends {_bytes(mine)} a step, not {_bytes(plain)} ({_against(mine)})"
    )
    lines.append(
        f"  no other way is more than {100 * ALIKE:g} % faster, in a run of {steps:,} steps (--steps says yours)"
    )
    lines.append(f"  what changes: {mine['changes']}")
    held, before = float(mine["memory_bytes"]), float(plain["memory_bytes"])
    if held > before * (1 + ALIKE):
        lines.append(f"  a rank holds {with_unit(held)} of weights, gradients and states, with DDP {with_unit(before)}")
    if mine["change"] >= _FROZEN and itemsize < FLOAT_BYTES:
        lines.append(
            "  it keeps no float32 copy of 16-bit weights, which lose small updates: load them in float32, and compute "
            "in bfloat16"
        )
    return "\n".join([*lines, *([f"  {mine['note']}"] if mine["note"] else [])])


def _seconds(choice: dict[str, Any]) -> str:
    return duration(float(choice["step_seconds"]))


def _bytes(choice: dict[str, Any]) -> str:
    return with_unit(float(choice["step_bytes"]))


def _against(choice: dict[str, Any]) -> str:
    """The bytes of a way beside those of DDP."""
    fewer = float(choice["fewer"])
    if abs(fewer - 1) < _SAME:
        return "as many"
    return f"{fewer:.1f}x fewer" if fewer > 1 else f"{1 / fewer:.1f}x MORE"


# -- output -----------------------------------------------------------------------------------------------------------


def as_json(model: Model, steps: int, memory: dict[str, dict[str, int]], warmup_bits: int | None) -> dict[str, Any]:
    """Times, bytes, ranking and advice in values that JSON can hold; an infinite rate is None."""
    rates = {name: None if value == math.inf else value for name, value in asdict(model.cluster).items()}
    found = ways(model, steps, warmup_bits)
    choices = ranked(found, steps, memory)
    return {
        "assumptions": {**rates, **asdict(model.training), "update_seconds": model.update, "steps": steps},
        "steps": {way.name: {stage: _figures(step) for stage, step in way.stages.items()} for way in found},
        "run": {way.name: _figures(way.mean * steps) for way in found},
        "ranking": choices,
        "advised": advised(choices)["flags"],
        "verdict": verdict(choices, steps, model.training.itemsize),
    }


def _figures(step: Step) -> dict[str, float]:
    return {"seconds": step.seconds, "sent": step.sent, "on_link": step.on_link}


def memory_table(rows: dict[str, dict[str, int]]) -> str:
    gigabytes = ([name, *(f"{nbytes / 1e9:,.3f}" for nbytes in parts.values())] for name, parts in rows.items())
    return _table([["", *MEMORY], *gigabytes])


def time_table(rows: dict[str, dict[str, dict[str, float]]], compute: float) -> str:
    """Render the steps of :func:`as_json`."""
    lines = [["", "stage", "sent by a rank", "out of a node", "step", "of compute"]]
    for name, stages in rows.items():
        for number, (stage, step) in enumerate(stages.items()):
            names = "" if number else name, "" if stage == _EVERY_STEP else stage
            sent, on_link = f"{step['sent'] / 1e6:,.1f} MB", f"{step['on_link'] / 1e6:,.1f} MB"
            seconds = f"{step['seconds'] * 1e3:,.1f} ms"
            lines.append([*names, sent, on_link, seconds, f"{step['seconds'] / compute:.2f} x"])
    return _table(lines)


def ranking_table(choices: list[dict[str, Any]]) -> str:
    """Render all ways of :func:`ranked`, the fastest first."""
    lines = [["", "step", "run", "sent a step", "against DDP", "memory", "flags"]]
    for number, choice in enumerate(choices, 1):
        step, run = f"{choice['step_seconds'] * 1e3:,.1f} ms", f"{choice['run_seconds'] / 3600:,.2f} h"
        sent, memory = f"{choice['step_bytes'] / 1e6:,.2f} MB", f"{choice['memory_bytes'] / 1e9:,.3f} GB"
        flags = choice["flags"] + (f"  ({choice['note']})" if choice["note"] else "")
        lines.append([f"{number:2} {choice['name']}", step, run, sent, _against(choice), memory, flags])
    return _table(lines, left=(0, 6))


def short_table(choices: list[dict[str, Any]]) -> str:
    """Render DDP, the advice, and the fastest of the ways with the same changes, from the smallest change on."""
    fastest: dict[int, dict[str, Any]] = {}
    for choice in choices:
        fastest.setdefault(choice["change"], choice)
    plain = next(choice for choice in choices if choice["flags"] == _ADAMW)
    kept = [plain["name"], advised(choices)["name"], *(choice["name"] for choice in fastest.values())]
    lines = [["", "step", "sent a step", "against DDP", "memory", ""]]
    for choice in sorted(choices, key=_place):
        if choice["name"] in kept:
            memory = with_unit(choice["memory_bytes"])
            lines.append([choice["name"], _seconds(choice), _bytes(choice), _against(choice), memory, choice["note"]])
    return _table(lines, left=(0, 5))


def _table(rows: list[list[str]], left: tuple[int, ...] = (0,)) -> str:
    """Align columns: those of ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        sized = enumerate(zip(row, widths, strict=True))
        cells = [text.ljust(width) if place in left else text.rjust(width) for place, (text, width) in sized]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
