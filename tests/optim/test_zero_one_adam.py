"""ZeroOneAdam on real gloo ranks, against the float64 simulation and the recorded trajectories."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_compressopt import OnebitAdam, ZeroOneAdam, average_gradients, load_state, save_state
from tests.optim.test_oracle_simulation import TENSORS, ZERO_ONE_RECORDED, load_recorded
from tests.oracles.cases import (
    MASK,
    MIXED,
    MIXED_GROUPS,
    ODD,
    ONE_SCALE,
    ONE_SCALE_GROUPS,
    Case,
    Problem,
    bucket_cap,
    cosine,
    first_safe,
    flat_params,
    make_params,
    mixed_groups,
    run_simulation,
    set_gradients,
)
from tests.oracles.comparing import assert_errors_close, assert_follows, final_state, follow_recording
from tests.oracles.simulation_zero_one import ZeroOneAdamSimulation, variance_steps
from tests.oracles.steps import (
    bytes_of_a_compressed_step,
    differences_of_resumes,
    different,
    everything,
    problems_of_a_skip,
)
from tests.support.harness import run_ranks
from tests.support.logs import log_lines
from tests.support.spreading import spread

FREEZE, STEPS = 8, 24
SCHEDULE = {"var_freeze_step": FREEZE, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}
VARIANCE_STEPS = (1, 2, 4, 6, 8)
SYNCS = (9, 10, 11, 12, 14, 16, 20, 24)  # intervals of 1, 2 and 4
COSINE = cosine(0.02, STEPS)


def zero_lr(*ranges):
    """A learning rate that is 0 in these steps, both ends included."""
    return tuple(0.0 if any(a <= t <= b for a, b in ranges) else 0.02 for t in range(1, STEPS + 1))


def case(name, groups, kwargs=None, **more):
    return Case(name, groups, {"lr": 0.02, **SCHEDULE, **(kwargs or {})}, steps=more.pop("steps", STEPS), **more)


ONE = [{"shapes": ODD}]
CASES = [
    *(case(f"block_{block}", ONE, {"scale_block": block}) for block in (None, 8, 64)),
    case("weight_decay", ONE, {"weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}, lrs=COSINE),
    case("no_bias_correction", ONE, {"bias_correction": False, "scale_block": 8, "betas": (0.8, 0.9)}),
    case("eps_inside_sqrt", ONE, {"eps_inside_sqrt": True, "eps": 0.05}),
    case("mask", [{"shapes": [(3, 5), (5,)], "mask": MASK}, *ONE], {"scale_block": 8, "weight_decay": 0.05}),
    case(
        "groups",
        mixed_groups(0.03),
        {"scale_block": 64},
        lrs=COSINE,
    ),
    case(
        "missing_gradients",
        ONE,
        {"scale_block": 8},
        missing=((2, None, 0, 1), (3, 0, 0, 2), (4, 0, 0, 2), (5, None, 0, 1), (8, 0, None, None), (17, None, 0, 0)),
    ),
    case("small_buckets", [*ONE, {"shapes": [(50,)]}], {"bucket_cap_mb": bucket_cap(11)}),
    case("small_buckets_one_scale", ONE_SCALE_GROUPS, ONE_SCALE),
    *(
        case(f"clipping{name}_{clip}", groups, {"max_grad_norm": 0.5, "clip": clip})
        for name, groups in (("", ONE), ("_together", [*ONE, {"shapes": [(5,)], "non_freeze": True}]))
        for clip in ("sketch", "local")  # of fewer than 4096 elements the sketch is exact
    ),
    case("high_floor", ONE, {"variance_floor": 0.9}),
    case("bounded", ONE, {"max_update": 0.3, "weight_decay": 0.1, "scale_block": 8}, lrs=COSINE),
    case("freeze_at_a_one_bit_step", ONE, {"var_freeze_step": 7, "local_step_scaler": 5, "local_step_clipper": 3}),
    case("freeze_at_once", ONE, {"var_freeze_step": 1, "local_step_scaler": 2, "local_step_clipper": 8}),
    case("lr_zero_at_start", ONE, {"weight_decay": 0.1}, lrs=zero_lr((1, 5))),
    case("lr_zero_at_switch", ONE, {"weight_decay": 0.1}, lrs=zero_lr((7, 10))),
    case("lr_zero_in_the_middle", ONE, {"weight_decay": 0.1}, lrs=zero_lr((10, 10), (13, 14), (17, 20))),
    case("lr_zero_at_end", ONE, {"weight_decay": 0.1}, lrs=zero_lr((18, 24))),
    case("lr_zero_always", ONE, lrs=zero_lr((1, 24))),
    case(
        "large",
        [{"shapes": [(61, 133), (9,)]}],
        {"lr": 0.1, "var_freeze_step": 3, "local_step_scaler": 1, "local_step_clipper": 2, "variance_floor": 0.5},
        steps=6,
    ),
]
NOT_FINITE = case("not_finite", ONE, {"scale_block": 8})


class ZeroOneProblem(Problem):
    """In the case not_finite, the last rank has a gradient with a NaN inside an interval, and one at a sync."""

    def __init__(self, case, world_size, seed):
        super().__init__(case, world_size, seed)
        for t, i in ((18, 1), (20, 4)) if case.name == "not_finite" else ():
            self.grads[t - 1][-1][0][i].flat[0] = math.nan if t == 18 else math.inf


def simulate(problem):
    """The finished simulation, and every rank's parameters after every step, [steps, world_size, numel]."""

    def observe(simulation):
        return np.stack([simulation.params_of(rank) for rank in range(problem.world_size)])

    simulation, history = run_simulation(problem, ZeroOneAdamSimulation, observe)
    return simulation, np.stack(history)


def safe_problem(case, world_size):
    return first_safe(case, world_size, ZeroOneProblem, simulate)


def make_optimizer(problem, **kwargs):
    params, groups = make_params(problem)
    return ZeroOneAdam(groups, **{**problem.case.kwargs, **kwargs}), params


def solve_all(rank, world_size, problems):
    return [solve(rank, problem) for problem in problems]


def solve(rank, problem):
    optimizer, params = make_optimizer(problem)
    history, bytes_sent = [], []
    for t in range(1, problem.case.steps + 1):
        set_gradients(problem, optimizer, params, rank, t)
        optimizer.step()
        assert not optimizer.step_was_skipped
        history.append(flat_params(params))
        bytes_sent.append(optimizer.traffic.step_bytes)
    return {
        "history": np.stack(history),
        "bytes": bytes_sent,
        "rounds": optimizer.metrics()["rounds"],
        **final_state(optimizer, params),
    }


@pytest.mark.invariant(29)
@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3, 4, 1)))
def test_equals_simulation(world_size, share):
    """Every rank's own parameters after every step, and the same bits on all ranks after a sync."""
    solved = [safe_problem(case, world_size) for case in share.of(CASES)]
    by_rank = run_ranks(world_size, solve_all, [problem for problem, *_ in solved])
    for index, (problem, simulation, history) in enumerate(solved):
        for rank in range(world_size):
            got = by_rank[rank][index]
            context = f"case {problem.case.name}, rank {rank}"
            assert np.isfinite(got["history"]).all(), context
            np.testing.assert_allclose(got["history"], history[:, rank], rtol=0, atol=2e-6, err_msg=context)
            compare_state(got, simulation, rank, context)
            for t in range(1, problem.case.steps + 1):
                if not simulation.in_local_stage(t) or simulation.is_sync(t):
                    mine, first = got["history"][t - 1], by_rank[0][index]["history"][t - 1]
                    assert mine.tobytes() == first.tobytes(), f"{context}: ranks differ after step {t}"


def compare_state(got, simulation, rank, context):
    for g, group in enumerate(simulation.groups):
        where = f"{context}, group {g}"
        np.testing.assert_allclose(got["exp_avg"][g], group.m[rank], rtol=1e-5, atol=4e-6, err_msg=where)
        np.testing.assert_allclose(got["exp_avg_sq"][g], group.v, rtol=1e-5, atol=1e-7, err_msg=where)
    assert_errors_close(got, simulation, rank, context)


@pytest.mark.parametrize("name", ["lr_zero_in_the_middle", "lr_zero_at_end", "lr_zero_always"])
def test_nothing_is_sent_where_nothing_has_moved(name):
    """A sync at the end of an interval whose learning rates were all 0 sends nothing; the others do."""
    (chosen,) = (case for case in CASES if case.name == name)
    problem = ZeroOneProblem(chosen, 2, 0)
    moved, expected = False, {}
    for t in range(FREEZE + 1, STEPS + 1):
        moved |= chosen.lrs[t - 1] > 0
        expected[t] = t in SYNCS and moved
        moved &= t not in SYNCS
    assert not all(expected[t] for t in SYNCS)
    for (result,) in run_ranks(2, solve_all, [problem]):
        assert {t: result["bytes"][t - 1] > 0 for t in expected} == expected


@pytest.mark.invariant(29)
@pytest.mark.parametrize("name", ZERO_ONE_RECORDED)
def test_equals_recorded_trajectory(name):
    recorded, _ = load_recorded(name)
    for rank, (history, states, _) in enumerate(run_ranks(2, follow, name)):
        assert_follows(recorded, rank, history, states)


class CountedFromTwo(ZeroOneAdam):
    """The original's schedule: its first step() did nothing but count, and the next one was number 2."""

    def plan_at(self, step):
        plan = dataclasses.replace(super().plan_at(step + 1), step=step)
        schedule = self.schedule.options()
        if step + 1 > schedule["freeze_step"]:
            return plan
        learns = step + 1 in variance_steps(step + 1, schedule["var_update_scaler"], first=2)
        return dataclasses.replace(plan, reduce_grads=learns, update_variance=learns, synchronize=not learns)


def follow(rank, world_size, name):
    recorded, kwargs = load_recorded(name)
    params = [torch.nn.Parameter(torch.from_numpy(recorded[f"init_param{i}"].copy())) for i in TENSORS]
    return follow_recording(recorded, [CountedFromTwo([p], **kwargs) for p in params], params, rank)


# -- schedule and bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler", [1, 2, 3, 16])
def test_variance_schedule_is_that_of_a_counter(scaler):
    optimizer = ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], var_freeze_step=400, var_update_scaler=scaler)
    learning = [t for t in range(1, 401) if optimizer.plan_at(t).update_variance]
    assert learning == variance_steps(400, scaler)


def lines_of_a_run(rank, world_size):
    """Metrics as a log has them that is written in some of the steps."""
    param = torch.nn.Parameter(torch.zeros(400, 100))
    schedule = {"var_freeze_step": 2, "local_step_scaler": 3, "local_step_clipper": 4}
    optimizer = ZeroOneAdam([param], lr=1e-3, warmup_bits=32, **schedule)
    lines = []
    for step in range(1, 31):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * rank + step))
        average_gradients(optimizer)
        optimizer.step()
        if step in (2, 7, 17, 29, 30):
            lines.append(optimizer.metrics())
            assert lines[-1] == optimizer.metrics()
    return lines


def test_metrics_of_local_steps_are_means_since_the_last_line():
    for lines in run_ranks(2, lines_of_a_run):
        for before, line in itertools.pairwise(lines[:-1]):
            steps, sent = line["step"] - before["step"], line["bytes_sent"] - before["bytes_sent"]
            assert sent > 0 and line["bytes_sent_step"] == sent / steps
            assert line["compression_ratio"] == pytest.approx(4 * 40_000 / (sent / steps))
        *_, before, silent = lines  # no sync since the line before
        assert silent["bytes_sent"] == before["bytes_sent"]
        assert silent["bytes_sent_step"] == before["bytes_sent_step"] > 0


@pytest.mark.invariant(33)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rounds_and_bytes_are_those_of_the_schedule(world_size):
    """A full message in every one-bit step and every sync, next to nothing in a variance step, nothing in between."""
    numel = 40_000
    formula = bytes_of_a_compressed_step(numel, world_size, 64)
    for by_step in run_ranks(world_size, metrics_on_a_rank, numel):
        total, last = 0.0, 0
        for t, metrics in enumerate(by_step, start=1):
            expected = 0 if t in VARIANCE_STEPS or t > FREEZE and t not in SYNCS else formula
            sent = metrics["bytes_sent"] - total
            assert abs(sent - expected) <= 64 * world_size, t
            if t <= FREEZE or t in SYNCS:  # the mean over the local steps before, and over this one
                assert metrics["bytes_sent_step"] == sent / (1 if t <= FREEZE else t - last), t
                last = t
            else:
                before = by_step[t - 2]
                assert sent == 0 and metrics["bytes_sent_step"] == before["bytes_sent_step"], t
                assert metrics["compression_ratio"] == before["compression_ratio"] or t == FREEZE + 1
            if t > FREEZE and t in SYNCS and world_size > 1:
                full = 2 * (world_size - 1) / world_size * 4 * numel
                assert metrics["compression_ratio"] == pytest.approx(full / metrics["bytes_sent_step"])
                assert metrics["compression_ratio"] > 15 * (t - SYNCS[SYNCS.index(t) - 1] if t > SYNCS[0] else 1)
            assert metrics["stage"] == float(t > FREEZE) and metrics["step"] == t
            total = metrics["bytes_sent"]
        assert by_step[-1]["rounds"] == FREEZE + len(SYNCS)


def metrics_on_a_rank(rank, world_size, numel):
    p = torch.nn.Parameter(torch.zeros(numel))
    optimizer = ZeroOneAdam([p], scale_block=64, **SCHEDULE)
    seen = []
    for t in range(1, STEPS + 1):
        seed = t if optimizer.plan.reduce_grads else 100 * t + rank
        p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        seen.append(optimizer.metrics())
    return seen


# -- gradients that are not finite, or not there ----------------------------------------------------------------------


@pytest.mark.invariant(13)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rank_goes_on_with_its_momentum_where_its_gradient_is_not_finite(world_size):
    """In the local-step stage, where ranks do not wait for each other: as in the simulation, and it says so."""
    problem, simulation, history = safe_problem(NOT_FINITE, world_size)
    for rank, (got, messages) in enumerate(run_ranks(world_size, solve_and_listen, problem)):
        np.testing.assert_allclose(got["history"], history[:, rank], rtol=0, atol=2e-6)
        compare_state(got, simulation, rank, f"rank {rank}")
        told = [message for message in messages if "not finite" in message]
        assert len(told) == (2 if rank == world_size - 1 else 0)
        assert all(f"step {t}" in message for t, message in zip((18, 20), told, strict=False))


def solve_and_listen(rank, world_size, problem):
    with log_lines() as messages:
        return solve(rank, problem), messages


@pytest.mark.invariant(13)
@pytest.mark.parametrize("groups", [ONE, [*ONE, {"shapes": [(6,)], "non_freeze": True}]], ids=["one", "non_freeze"])
def test_gradient_that_is_not_finite_skips_the_step_everywhere(groups):
    """In the variance stage; and wherever a group in full precision connects the ranks."""
    for rank, problems in enumerate(run_ranks(2, skip_on_a_rank, groups)):
        assert problems == [], f"rank {rank}"


def skip_on_a_rank(rank, world_size, groups):
    problem = ZeroOneProblem(case("skip", groups), world_size, 0)
    steps = (2, 3, 8) if len(groups) == 1 else (2, 3, 8, 9, 18, 20)
    return [text for step in steps for text in problems_of_a_skip(problem, make_optimizer, rank, step, math.nan)]


# -- one set of parameters --------------------------------------------------------------------------------------------

MIXED_CASE = case("mixed", MIXED_GROUPS, MIXED, lrs=COSINE)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_averaged_parameters(world_size):
    """The mean on all ranks, for as long as the context is open, and a run that does not notice it."""
    by_rank = run_ranks(world_size, average_on_a_rank)
    for rank, (own, seen, differences) in enumerate(by_rank):
        assert differences == [], f"rank {rank}"
        assert seen.tobytes() == by_rank[0][1].tobytes(), "ranks differ inside"
        mean = np.mean([row[0].astype(np.float64) for row in by_rank], axis=0)
        np.testing.assert_allclose(seen, mean, rtol=0, atol=1e-6)
        for t in range(1, STEPS + 1):
            alike = t <= FREEZE or t in SYNCS or world_size == 1
            assert alike == (own[t - 1].tobytes() == seen[t - 1].tobytes()), f"step {t}"


def average_on_a_rank(rank, world_size):
    problem = ZeroOneProblem(MIXED_CASE, world_size, 0)
    optimizer, params = make_optimizer(problem)
    undisturbed, others = make_optimizer(problem)
    own, seen, differences = [], [], []
    for t in range(1, STEPS + 1):
        for each, tensors in ((optimizer, params), (undisturbed, others)):
            set_gradients(problem, each, tensors, rank, t)
            each.step()
        own.append(flat_params(params))
        with optimizer.averaged_parameters():
            seen.append(flat_params(params))
        try:
            with optimizer.averaged_parameters():
                raise KeyError("an evaluation that fails")
        except KeyError:
            pass
        differences += [(t, key) for key in different(everything(undisturbed, others), everything(optimizer, params))]
    differences += [] if optimizer.metrics()["bytes_sent"] == undisturbed.metrics()["bytes_sent"] else ["bytes_sent"]
    return np.stack(own), np.stack(seen), differences


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_settled_parameters_are_alike_and_leave_the_next_sync_as_it_was(world_size):
    by_rank = run_ranks(world_size, settle_on_a_rank)
    for rank, (settled, differences) in enumerate(by_rank):
        assert settled.tobytes() == by_rank[0][0].tobytes()
        assert differences == [], f"rank {rank}"


def settle_on_a_rank(rank, world_size):
    problem = ZeroOneProblem(MIXED_CASE, world_size, 0)
    runs = [make_optimizer(problem) for _ in range(2)]
    for t in range(1, 21):
        for optimizer, params in runs:
            set_gradients(problem, optimizer, params, rank, t)
            optimizer.step()
        if t == 18:
            runs[0][0].settle_parameters()
            settled = flat_params(runs[0][1])
            assert all(state.own_params is None for state in runs[0][0]._states)
    return settled, different(everything(*runs[0]), everything(*runs[1]))


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(21)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_resume_is_the_uninterrupted_run(world_size, tmp_path):
    """In every stage, and inside a local interval, where the model's file holds the mean and not this rank's own."""
    for rank, differences in enumerate(run_ranks(world_size, resume_on_a_rank, str(tmp_path))):
        assert differences == [], f"rank {rank}"


def resume_on_a_rank(rank, world_size, directory):
    problem = ZeroOneProblem(MIXED_CASE, world_size, 0)
    stops, others = (2, 3, FREEZE, 15, 18, 20), {"lr": 0.5, "var_freeze_step": 9, "local_step_clipper": 2}
    return differences_of_resumes(problem, make_optimizer, rank, directory, stops, (3, 18), others)


# -- lower precision, and what the constructor refuses ----------------------------------------------------------------


@pytest.mark.parametrize("steps", [1000, 3000, 20_000])
def test_default_schedules_send_at_most_half_of_onebit_adams_bytes(steps):
    def bytes_per_element(optimizer):
        optimizer.scale_schedule(steps, given=())
        schedule = optimizer.schedule.expected()
        plans = [schedule.plan(step) for step in range(1, steps + 1)]
        return sum(4 * plan.reduce_grads + (1 / 8 + 4 / optimizer.scale_block) * plan.synchronize for plan in plans)

    zero_one, onebit = (cls([torch.nn.Parameter(torch.zeros(3))], warmup_bits=32) for cls in (ZeroOneAdam, OnebitAdam))
    assert bytes_per_element(zero_one) <= 0.5 * bytes_per_element(onebit)
    assert "var_update_scaler=16" not in zero_one.scale_schedule(steps, given=())
    assert "var_update_scaler=16" in ZeroOneAdam(zero_one.param_groups[0]["params"]).scale_schedule(
        steps, ["var_update_scaler"]
    )


def save_in_an_interval_with_other_strides(rank: int, world_size: int, folder: str) -> None:
    def make() -> tuple[torch.nn.Conv2d, ZeroOneAdam]:
        torch.manual_seed(0)
        conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        options: dict[str, Any] = {"var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 4}
        return conv, ZeroOneAdam(conv.parameters(), lr=1e-2, var_freeze_step=3, scale_block=16, **options)

    def train(conv: torch.nn.Conv2d, optimizer: ZeroOneAdam, steps: range) -> None:
        for step in steps:
            images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            conv(images).square().mean().backward()
            for param in conv.parameters():
                if step < 3:  # in the variance stage they must be alike
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()

    conv, optimizer = make()
    assert not conv.weight.is_contiguous()
    train(conv, optimizer, range(9))
    save_state(optimizer, folder)
    saved = json.loads((Path(folder) / "compressopt.index.json").read_text())["tensors"]
    assert any(name.startswith("param/") for name in saved), "not inside an interval"
    train(conv, optimizer, range(9, 12))
    other, again = make()
    load_state(again, folder)
    train(other, again, range(9, 12))
    assert not other.weight.is_contiguous()
    assert torch.equal(other.weight, conv.weight) and torch.equal(other.bias, conv.bias)  # type: ignore[arg-type]


def test_parameters_with_other_strides_resume_inside_an_interval(tmp_path: Path) -> None:
    run_ranks(2, save_in_an_interval_with_other_strides, str(tmp_path))
