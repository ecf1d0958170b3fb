"""The planner's report: memory, bytes and predicted times of every optimizer, as data and as tables."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch

from hf_compressopt.flat import FLOAT_BYTES, bucket_numel_of
from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.kernels import INTEGER_BITS
from hf_compressopt.planner.cost import (
    ONEBIT_ADAM,
    ONEBIT_LAMB,
    ZERO_ONE_GRADIENT,
    Model,
    Step,
    average,
)
from hf_compressopt.planner.memory import compact_error_bytes, compressed_states, freed_gradient_bytes
from hf_compressopt.schedules import Stage, ZeroOneSchedule
from hf_compressopt.zero.memory import MemoryEstimate, estimate_zero_memory

_MEMORY = ("parameters", "gradients", "states", "buckets", "total")
_HALF_BYTES = 2
_ENOUGH_STEPS = 100_000  # the stages have the same shares in a longer run
_SLOWEST, _FASTEST, _GRID = 1e5, 1e13, 0.1  # range of the search for a crossover, in bytes per second, in steps of 10 %
_WHOLE_RUN = "whole run"
_EVERY_STEP = "every step"
_FULL_PRECISION = ("DDP", "ZeRO")
_PASSES = {"onebit_adam": ONEBIT_ADAM, "onebit_lamb": ONEBIT_LAMB}
#: ZeRO-2 with gradients and parameters in 4 bits.
ZERO_INT4 = "zero2_adamw, int4"
#: OnebitAdam, by its ``zero_stage``.
ONEBIT_ZERO = {1: "OnebitAdam, ZeRO-1", 2: "OnebitAdam, ZeRO-2"}


def memory_rows(
    params: int,
    world_size: int,
    dtype: torch.dtype,
    states_per_parameter: int,
    bucket_cap_mb: float,
    node_size: int = 1,
) -> dict[str, dict[str, int]]:
    """Bytes on each rank, by optimizer and by content.

    A compressed optimizer has a row for each form of its state: see :func:`compressed_states`. Its messages in flight
    are left out: they have 1/32 of the buckets' bytes. With ``zero_stage=2`` gradients are the means of this rank's
    chunks, and a bucket of gradients waits to leave; so does the rest of a parameter that is larger. ``node_size``: see
    :func:`compact_error_bytes`.
    """
    estimate = partial(
        estimate_zero_memory,
        params,
        world_size,
        dtype=dtype,
        states_per_parameter=states_per_parameter,
        bucket_cap_mb=bucket_cap_mb,
    )
    bucket_numel = bucket_numel_of(bucket_cap_mb)
    estimates = {name: estimate(stage) for stage, name in enumerate(("no ZeRO", "ZeRO-1", "ZeRO-2"))}
    if world_size > 1:
        small = estimate(2, grad_compression="int4", param_compression="int4", node_size=node_size)
        estimates[ZERO_INT4] = replace(small, states=small.states + small.errors, errors=0)
        full = estimates["no ZeRO"]
        errors = compact_error_bytes(params, world_size, bucket_numel, node_size)
        estimates["grad_compression"] = replace(full, states=full.states + errors)
    for cls in ALGORITHMS.values():
        for form, states in compressed_states(cls, params, world_size, bucket_numel, node_size).items():
            freed = freed_gradient_bytes(form, params, world_size, bucket_numel)
            gradients, buckets = (
                (params * dtype.itemsize, 0) if freed is None else (freed, bucket_numel * dtype.itemsize)
            )
            estimates[f"{cls.__name__}, {form}"] = MemoryEstimate(params * dtype.itemsize, gradients, states, buckets)
    return {name: {part: getattr(memory, part) for part in _MEMORY} for name, memory in estimates.items()}


@cache
def zero_one_shares(steps: int, low_bit: bool) -> Counter[tuple[Stage, int]]:
    """Count the steps that 0/1 Adam takes in each stage, by Trainer's default schedule.

    Args:
        steps: Length of the run.
        low_bit: Whether averaged gradients travel in fewer than 32 bits, which Trainer's schedule depends on.

    Returns:
        Counts by stage and kind. The kind is 1 for a step with averaged gradients and 0 for a 1-bit gradient in the
        variance stage; in the local-step stage it is the length of the interval.
    """
    schedule = ZeroOneSchedule().fitted(steps, (), low_bit=low_bit).expected()
    shares: Counter[tuple[Stage, int]] = Counter()
    for step in range(1, steps + 1):
        plan = schedule.plan(step)
        learning = plan.stage is Stage.VARIANCE
        shares[plan.stage, int(plan.reduce_grads) if learning else schedule.local_interval(step)] += 1
    return shares


def time_rows(model: Model, steps: int) -> dict[str, dict[str, Step]]:
    """Predicted steps, by optimizer and by stage.

    Args:
        model: Model of the training and the cluster.
        steps: Length of the run. The first stages of the compressed optimizers have the shares that Trainer gives them.
    """
    ddp, zero, itemsize = model.ddp(), model.zero(), model.training.itemsize
    halves = {f"DDP, {8 * _HALF_BYTES}-bit gradients": {"": model.ddp(_HALF_BYTES)}}
    return {
        f"DDP, {8 * itemsize}-bit gradients": {"": ddp},
        **(halves if itemsize > _HALF_BYTES else {}),
        "ZeRO-1": {"": zero},
        "ZeRO-2": {"": zero},
        ZERO_INT4: {"": model.zero_low_bit(4)},
        **{f"grad_compression=int{bits}": {"": model.low_bit(bits)} for bits in INTEGER_BITS},
        "OnebitAdam": _onebit(model, "onebit_adam", steps),
        **{
            name: _onebit(model, "onebit_adam", steps, stage)
            for stage, name in ONEBIT_ZERO.items()
            if model.training.warmup_bits in INTEGER_BITS
        },
        "ZeroOneAdam": _zero_one(model, steps),
        "OnebitLamb": _onebit(model, "onebit_lamb", steps),
    }


def _is_low_bit(model: Model) -> bool:
    return model.training.warmup_bits < 8 * FLOAT_BYTES


def _onebit(model: Model, name: str, steps: int, zero_stage: int = 0) -> dict[str, Step]:
    schedule = ALGORITHMS[name].schedule_class().fitted(steps, (), low_bit=_is_low_bit(model))
    first, early = min(schedule.last_warmup_step, steps), zero_stage == 2
    averaged = model.shared_out(early=early) if zero_stage else model.averaged()
    compressed = model.compressed(_PASSES[name], early=early)
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


def whole_runs(model: Model, steps: int) -> dict[str, Step]:
    """Seconds and bytes of a run of this many steps, by optimizer."""
    means = {name: list(stages.values())[-1] for name, stages in time_rows(model, steps).items()}
    return {name: mean * steps for name, mean in means.items()}


def last_stage(stages: dict[str, Step]) -> str:
    """The stage in which a run spends most of its steps."""
    return [name for name in stages if name != _WHOLE_RUN][-1]


def crossovers(model: Model, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Find the bandwidths below which the compressed optimizers are faster than DDP.

    Returns:
        Bytes per second of a node's link, by optimizer, stage (the last one, and the whole run; "" if there are no
        stages) and kind of DDP. Infinity means faster over every link, 0 slower over the slowest link.
    """
    number = round(math.log(_FASTEST / _SLOWEST) / _GRID)
    links = [_SLOWEST * math.exp(_GRID * index) for index in range(number + 1)]
    table = [time_rows(model.at(link), steps) for link in links]

    def below(name: str, stage: str, other: str) -> float:
        def faster(rows: dict[str, dict[str, Step]]) -> bool:
            return rows[name][stage].seconds < rows[other][""].seconds

        first = next((index for index, rows in enumerate(table) if not faster(rows)), None)
        if first is None or first == 0:
            return math.inf if first is None else 0.0
        low, high = links[first - 1], links[first]
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if faster(time_rows(model.at(middle), steps)) else (low, middle)
        return low

    return {
        name: {
            stage: {other: below(name, stage, other) for other in table[0] if other.startswith("DDP")}
            for stage in dict.fromkeys((last_stage(stages), list(stages)[-1]))
        }
        for name, stages in table[0].items()
        if not name.startswith(_FULL_PRECISION)
    }


def as_json(model: Model, steps: int) -> dict[str, Any]:
    """Times, bytes and crossovers in values that JSON can hold; an infinite rate is None."""
    rates = {
        name: {
            stage or _EVERY_STEP: {other: None if math.isinf(rate) else rate for other, rate in others.items()}
            for stage, others in stages.items()
        }
        for name, stages in crossovers(model, steps).items()
    }
    return {
        "assumptions": {
            **{name: None if value == math.inf else value for name, value in asdict(model.cluster).items()},
            **asdict(model.training),
            "update_seconds": model.update,
            "steps": steps,
        },
        "steps": {
            name: {stage or _EVERY_STEP: asdict(step) for stage, step in stages.items()}
            for name, stages in time_rows(model, steps).items()
        },
        "run": {name: asdict(run) for name, run in whole_runs(model, steps).items()},
        "faster_below_bytes_per_second": rates,
    }


def memory_table(rows: dict[str, dict[str, int]]) -> str:
    """Render GB on each rank as a table."""
    width = max(map(len, rows))
    lines = [f"{'':{width}}" + "".join(f"{part:>12}" for part in _MEMORY)]
    lines += [
        f"{name:{width}}" + "".join(f"{value / 1e9:12,.3f}" for value in parts.values()) for name, parts in rows.items()
    ]
    return "\n".join(lines)


def time_table(model: Model, steps: int) -> str:
    """Render predicted steps, and the bandwidths below which compression pays, as a table."""
    compute = model.training.compute_seconds
    lines = [f"{'':26}{'stage':>12}" + _columns("sent by a rank", "out of a node", "step", "of compute")]
    for name, stages in time_rows(model, steps).items():
        for stage, step in stages.items():
            cells = (
                f"{step.sent / 1e6:,.1f} MB",
                f"{step.on_link / 1e6:,.1f} MB",
                f"{step.seconds * 1e3:,.1f} ms",
                f"{step.seconds / compute:.2f} x",
            )
            lines.append(f"{name:26}{stage:>12}" + _columns(*cells))
            name = ""
    lines.append("")
    for name, found in crossovers(model, steps).items():
        for stage, others in found.items():
            verdicts = [f"{other}, {_verdict(rate)}" for other, rate in others.items()]
            lines.append(f"{name}, {stage or _EVERY_STEP}: faster than {'; than '.join(verdicts)}")
    return "\n".join(lines)


def run_table(model: Model, steps: int) -> str:
    """Render the bytes and the time of a whole run, beside those of DDP with gradients as they are.

    With several nodes the bytes are those that leave a node: two levels send more inside it, to send fewer there.
    """
    runs, several = whole_runs(model, steps), model.cluster.nodes > 1
    lines = [f"{'':26}" + _columns("out of a node" if several else "sent by a rank", "fewer bytes", "time", "as fast")]
    sent = {name: run.on_link if several else run.sent for name, run in runs.items()}
    plain = next(iter(runs))
    for name, run in runs.items():
        fewer, faster = sent[plain] / sent[name], runs[plain].seconds / run.seconds
        cells = (f"{sent[name] / 1e9:,.1f} GB", f"{fewer:.1f} x", f"{run.seconds / 3600:,.2f} h", f"{faster:.2f} x")
        lines.append(f"{name:26}" + _columns(*cells))
    return "\n".join(lines)


def _columns(*cells: str) -> str:
    return "".join(f"{cell:>16}" for cell in cells)


def _verdict(rate: float) -> str:
    if rate in (0.0, math.inf):
        return "over every link" if rate else "over no link"
    value = 8e-9 * rate
    return f"below {value:.2g} Gbit/s" if value < 100 else f"below {value:,.0f} Gbit/s"
