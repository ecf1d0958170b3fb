"""OnebitAdam under ZeRO: its arithmetic against a float64 simulation, its memory, its state, and what it refuses."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from hf_compressopt import OnebitAdam
from tests.oracles.cases import (
    Case,
    Problem,
    first_safe,
    flat_params,
    make_params,
    run_simulation,
    set_gradients,
    shared_cases,
    simulated_params,
)
from tests.oracles.simulation_zero_onebit import ZeroOnebitAdam
from tests.support.harness import run_ranks
from tests.support.spreading import Share, spread

CASES = [
    *shared_cases(),
    Case("blocks", [{"shapes": [(11, 13), (150,)]}], {"scale_block": 64, "lr": 0.01, "eps": 1e-3}),
]


def solve(rank: int, problem: Problem, bits: int) -> dict[str, Any]:
    params, groups = make_params(problem)
    options = {"freeze_step": problem.case.freeze_step, "zero_stage": 1, "warmup_bits": bits, "max_update": 0}
    optimizer = OnebitAdam(groups, **options, **problem.case.kwargs)
    history = []
    for t in range(1, problem.case.steps + 1):
        set_gradients(problem, optimizer, params, rank, t)
        optimizer.step()
        history.append(flat_params(params))
    errors = [[error.numpy() for error in state.errors.values()] for state in optimizer._states]
    return {"history": np.stack(history), "errors": errors}


def solve_all(rank: int, world_size: int, rows: list[tuple[Problem, int]]) -> list[dict[str, Any]]:
    return [solve(rank, *row) for row in rows]


def simulate(problem: Problem, bits: int) -> tuple[Any, list[Any]]:
    options = {"freeze_step": problem.case.freeze_step, "bits": bits}
    return run_simulation(problem, ZeroOnebitAdam, simulated_params, **options)


@pytest.mark.invariant(8)
@pytest.mark.invariant(29)
@pytest.mark.parametrize(("world_size", "share"), spread(1, shared=(2, 3, 4)))
def test_equals_the_simulation_in_both_stages(world_size: int, share: Share) -> None:
    rows, expected = [], []
    for number, case in share.of(enumerate(CASES)):
        bits = (4, 8)[number % 5 == 0]
        problem, *solution = first_safe(case, world_size, Problem, partial(simulate, bits=bits))
        rows.append((problem, bits))
        expected.append(solution)
    ranks = run_ranks(world_size, solve_all, rows, timeout=240)
    for (problem, _), (simulation, history), results in zip(rows, expected, zip(*ranks, strict=True), strict=True):
        for rank, got in enumerate(results):
            context = f"case {problem.case.name}, rank {rank}"
            assert np.array_equal(got["history"], results[0]["history"]), context
            np.testing.assert_allclose(got["history"], np.stack(history), rtol=0, atol=5e-6, err_msg=context)
            for g, group in enumerate(simulation.groups if world_size > 1 else ()):
                for number, key in enumerate(("worker_errors", "server_errors")):
                    errors = np.concatenate([np.zeros(0), *(bucket[rank] for bucket in getattr(group, key))])
                    np.testing.assert_allclose(got["errors"][g][number], errors, rtol=1e-5, atol=5e-6, err_msg=context)
