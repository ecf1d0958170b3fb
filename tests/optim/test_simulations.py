"""Compressed optimizers that average their gradients themselves, on real ranks, against float64 simulations.

In both stages: averaged gradients in 4 and 8 bits, state in float32 and compact, moments shared out, two levels.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import hf_compressopt
from tests.oracles.cases import (
    MASK,
    ODD,
    Case,
    Problem,
    bucket_cap,
    first_safe,
    make_params,
    missing_gradients,
    mixed_groups,
    run_simulation,
    shared_cases,
    simulated_params,
)
from tests.oracles.simulation_compact import CompactOnebitAdam, CompactOnebitLamb, CompactZeroOneAdam
from tests.oracles.simulation_low_bits import LowBitOnebitAdam, LowBitOnebitLamb, LowBitZeroOneAdam
from tests.oracles.simulation_two_levels import exchange_in_two_levels, own_errors
from tests.oracles.simulation_zero_onebit import FreedZeroOnebitAdam, ZeroOnebitAdam
from tests.oracles.steps import take_steps_of_own_gradients
from tests.support.harness import run_ranks
from tests.support.spreading import Share, spread

LOW_BIT = {"OnebitAdam": LowBitOnebitAdam, "OnebitLamb": LowBitOnebitLamb, "ZeroOneAdam": LowBitZeroOneAdam}
COMPACT = {"OnebitAdam": CompactOnebitAdam, "OnebitLamb": CompactOnebitLamb, "ZeroOneAdam": CompactZeroOneAdam}
ZERO = {1: ZeroOnebitAdam, 2: FreedZeroOnebitAdam}
ZERO_ONE = {"var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 2}


def with_large(case: Case) -> Case:
    """Add a tensor that travels as integers to the first group, beside small ones in full precision."""
    first, *others = case.groups
    return replace(case, groups=[{**first, "shapes": [*first["shapes"], (52, 5)]}, *others])


CASES = [
    with_large(Case("groups", mixed_groups(0.02), {"bucket_cap_mb": bucket_cap(37), "weight_decay": 0.1})),
    Case("mask", [{"shapes": [(3, 5), (5,)], "mask": MASK}, {"shapes": ODD}], {"max_grad_norm": 0.5, "lr": 0.01}),
    missing_gradients({"lr": 0.01, "scale_block": 8}),
]
BLOCKS = Case("blocks", [{"shapes": [(11, 26), (7,)]}], {"scale_block": 64, "lr": 0.01, "eps": 1e-3})


class Run(NamedTuple):
    """One run: what simulates it, and the options of the optimizer and of the simulation."""

    case: Case
    name: str
    simulation: type[Any]
    bits: int
    options: dict[str, Any]

    def schedule(self) -> dict[str, Any]:
        return ZERO_ONE if self.name == "ZeroOneAdam" else {"freeze_step": self.case.freeze_step}

    def simulate(self, problem: Problem) -> tuple[Any, list[Any]]:
        """The finished simulation, and every rank's parameters after every step."""

        def observe(simulation: Any) -> Any:
            if self.name == "ZeroOneAdam":
                return [simulation.params_of(rank) for rank in range(problem.world_size)]
            return [simulated_params(simulation)] * problem.world_size

        return run_simulation(problem, self.simulation, observe, bits=self.bits, **self.schedule())


def float32() -> Iterator[Run]:
    for number, (case, name) in enumerate((case, name) for case in (*CASES, BLOCKS) for name in LOW_BIT):
        yield Run(case, name, LOW_BIT[name], (4, 8)[number // 2 % 2], {"state": "float32"})


def compact() -> Iterator[Run]:
    for name in COMPACT:
        for case in (*CASES, BLOCKS):
            yield Run(case, name, COMPACT[name], 4, {"state": "compact", "max_update": 0})


def zero(stage: int) -> Iterator[Run]:
    cases = [with_large(case) if case.name == "groups" else case for case in shared_cases()]
    for number, case in enumerate([*cases, BLOCKS, replace(BLOCKS, steps=7)]):
        if stage == 1 or case.kwargs.get("clip") != "local":
            yield Run(
                case, "OnebitAdam", ZERO[stage], (4, 8)[number in (0, 5, 12)], {"zero_stage": stage, "max_update": 0}
            )


def solve(rank: int, world_size: int, rows: list[tuple[Problem, Run]], more: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for problem, run in rows:
        params, groups = make_params(problem)
        options = {**problem.case.kwargs, **run.schedule(), "warmup_bits": run.bits, **run.options, **more}
        optimizer = getattr(hf_compressopt, run.name)(groups, **options)
        history = take_steps_of_own_gradients(problem, optimizer, params, rank)
        errors = [[error.numpy() for error in state.errors.values()] for state in optimizer._states]
        found.append({"history": history, "errors": errors})
    return found


def check(
    world_size: int,
    runs: list[Run],
    errors_of: Callable[[Any, int], tuple[np.ndarray, np.ndarray]],
    atol: float,
    **more: Any,
) -> None:
    """Compare parameters after every step, and the errors, with the simulations."""
    solved = [first_safe(run.case, world_size, Problem, run.simulate) for run in runs]
    rows = [(problem, run) for run, (problem, *_) in zip(runs, solved, strict=True)]
    ranks = run_ranks(world_size, solve, rows, more, timeout=240)
    for run, (_, simulation, history), results in zip(runs, solved, zip(*ranks, strict=True), strict=True):
        for rank, got in enumerate(results):
            context = f"{run.name}, {run.bits} bits, {run.options}, case {run.case.name}, rank {rank}"
            mine = np.stack([step[rank] for step in history])
            np.testing.assert_allclose(got["history"], mine, rtol=0, atol=atol, err_msg=context)
            if run.name != "ZeroOneAdam":  # whose ranks differ inside an interval
                assert got["history"].tobytes() == results[0]["history"].tobytes(), context
            for g, group in enumerate(simulation.groups if world_size > 1 else ()):
                for found, errors in zip(got["errors"][g], errors_of(group, rank), strict=True):
                    np.testing.assert_allclose(found, errors, rtol=1e-5, atol=5e-6, err_msg=context)


KINDS: dict[str, tuple[list[Run], float]] = {
    "float32": ([*float32()], 3e-6),
    "compact": ([*compact()], 4e-6),
    "zero_stage=1": ([*zero(1)], 5e-6),
    "zero_stage=2": ([*zero(2)], 5e-6),
}


@pytest.mark.invariant(8, 29)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3, 4, 1)))
def test_equals_the_simulation(world_size: int, share: Share, kind: str) -> None:
    def errors_of(group: Any, rank: int) -> tuple[np.ndarray, ...]:
        rows = (group.worker_errors, group.server_errors)
        return tuple(np.concatenate([np.zeros(0), *(bucket[rank] for bucket in row)]) for row in rows)

    runs, atol = KINDS[kind]
    check(world_size, share.of(runs), errors_of, atol)


@pytest.mark.invariant(29)
@pytest.mark.parametrize(
    ("world_size", "node_size", "share"),
    [  # half of the cases, and in the long tests all with every size of the nodes
        pytest.param(4, 2, Share(0, 2), id="4-2-share"),
        pytest.param(4, 2, Share(0, 2, rest=True), id="4-2", marks=pytest.mark.full),
        *(pytest.param(*row, Share(0, 1), marks=pytest.mark.full) for row in ((4, 4), (6, 2), (6, 3))),
    ],
)
def test_equals_the_simulation_in_two_levels(
    world_size: int, node_size: int, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange_in_two_levels(monkeypatch, node_size)
    blocks = [Run(BLOCKS, name, COMPACT[name], (8, 4, 4)[i], {"state": "compact"}) for i, name in enumerate(COMPACT)]
    check(
        world_size,
        share.of([*float32(), *blocks]),
        lambda group, rank: own_errors(group, world_size, node_size, rank),
        4e-6,
        topology="two-level",
        node_size=node_size,
    )
