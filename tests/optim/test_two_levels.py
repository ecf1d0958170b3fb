"""The exchange in two levels inside the optimizers, on real ranks: M nodes of g ranks on one machine.

The oracle is the float64 simulation of M nodes, and the flat topology where both must agree.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import hf_compressopt
from hf_compressopt import average_gradients
from tests.optim.test_compact_state import CASES as COMPACT_CASES
from tests.optim.test_compact_state import SIMULATIONS as COMPACT
from tests.optim.test_warmup_gradients import CASES, SIMULATIONS, options_of, simulate
from tests.oracles.cases import Problem, first_safe, flat_params, make_params
from tests.oracles.simulation_two_levels import exchange_in_two_levels, own_errors
from tests.support.harness import run_ranks

Row = tuple[Problem, str, int, str]  # the optimizer, bits of the first stage, form of the state
WORLDS = [(4, 2), (4, 4), *(pytest.param(6, size, marks=pytest.mark.full) for size in (2, 3))]


def solve(rank: int, problem: Problem, name: str, bits: int, state: str, node_size: int) -> dict[str, Any]:
    params, groups = make_params(problem)
    options = {**problem.case.kwargs, **options_of(problem, name), "warmup_bits": bits, "state": state}
    optimizer = getattr(hf_compressopt, name)(groups, topology="two-level", node_size=node_size, **options)
    history = []
    for t in range(1, problem.case.steps + 1):
        for group, grads in zip(params, problem.grads[t - 1][rank], strict=True):
            for p, grad in zip(group, grads, strict=True):
                p.grad = None if grad is None else torch.from_numpy(grad.copy())
        average_gradients(optimizer)
        optimizer.step()
        history.append(flat_params(params))
    errors = [[error.numpy() for error in state.errors.values()] for state in optimizer._states]
    return {"history": np.stack(history), "errors": errors}


def solve_all(rank: int, world_size: int, rows: list[Row], node_size: int) -> list[dict[str, Any]]:
    return [solve(rank, *row, node_size) for row in rows]


@pytest.mark.invariant(29)
@pytest.mark.parametrize(("world_size", "node_size"), WORLDS)
def test_equals_the_simulation_in_both_stages(world_size: int, node_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs and integers, each optimizer through its switch, errors in float32 and in 8 bits; odd sizes and masks."""
    exchange_in_two_levels(monkeypatch, node_size)
    rows: list[Row] = []
    solutions = []
    chosen = [(case, name, "float32", SIMULATIONS) for case in CASES for name in SIMULATIONS]
    chosen += [(COMPACT_CASES[-1], name, "compact", COMPACT) for name in COMPACT]
    for number, (case, name, state, simulations) in enumerate(chosen):
        bits = (4, 8)[number % 2]
        solution = partial(simulate, name=name, bits=bits, simulations=simulations)
        problem, simulation, history = first_safe(case, world_size, Problem, solution)
        rows.append((problem, name, bits, state))
        solutions.append((simulation, history))
    ranks = run_ranks(world_size, solve_all, rows, node_size, timeout=240)
    for row, (simulation, history), results in zip(rows, solutions, zip(*ranks, strict=True), strict=True):
        problem, name, bits, state = row
        for rank, got in enumerate(results):
            context = f"{name}, {bits} bits, {state}, case {problem.case.name}, rank {rank}"
            mine = np.stack([step[rank] for step in history])
            np.testing.assert_allclose(got["history"], mine, rtol=0, atol=4e-6, err_msg=context)
            if name != "ZeroOneAdam":  # whose ranks differ inside an interval
                assert got["history"].tobytes() == results[0]["history"].tobytes(), context
            for g, group in enumerate(simulation.groups):
                for found, errors in zip(got["errors"][g], own_errors(group, world_size, node_size, rank), strict=True):
                    np.testing.assert_allclose(found, errors, rtol=1e-5, atol=5e-6, err_msg=context)
