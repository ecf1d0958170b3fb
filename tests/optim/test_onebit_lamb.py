"""OnebitLamb on real gloo ranks, against the float64 simulation and the recorded trajectories."""

import math
import os
from unittest import mock

import numpy as np
import pytest
import torch

from hf_compressopt import OnebitLamb
from hf_compressopt.kernels import library
from tests.optim.test_oracle_simulation import LAMB_RECORDED, TENSORS, load_recorded
from tests.oracles.cases import (
    COSINE,
    MIXED,
    MIXED_GROUPS,
    ODD,
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
from tests.oracles.comparing import (
    assert_errors_close,
    assert_follows,
    assert_moments_close,
    final_state,
    follow_recording,
)
from tests.oracles.simulation_lamb import OnebitLambSimulation
from tests.oracles.steps import (
    differences_of_resumes,
    problems_of_a_skip,
)
from tests.support.harness import run_ranks, run_ranks_expecting_error
from tests.support.spreading import spread

CANCEL = "momentum cancels"  # a case of this name: tensor 1 of every group has a momentum of exactly zero at the freeze


CASES = [
    *(Case(f"block_{block}", [{"shapes": ODD}], {"lr": 0.01, "scale_block": block}) for block in (None, 8, 64)),
    *shared_cases(),
    Case("no_bias_correction", [{"shapes": ODD}], {"bias_correction": False, "scale_block": 8, "lr": 0.01}),
    Case(
        "coefficients",
        [{"shapes": ODD, "scale": (3, 0.1, 1, 1, 1)}],
        {"lr": 0.01, "max_coeff": 1.5, "min_coeff": 0.3, "coeff_beta": 0.6, "weight_decay": 0.3},
    ),
    Case(
        "factors",
        [{"shapes": ODD}],
        {"lr": 0.01, "factor_max": 1.2, "factor_min": 0.9, "factor_threshold": 0.04, "betas": (0.9, 0.8)},
        steps=16,
    ),
    Case("always_one", [{"shapes": ODD[:3], "scale": (3, 1, 3)}], {"lr": 0.01, "max_coeff": 1.0}),
    Case(CANCEL, [{"shapes": ODD}, {"shapes": ODD[:2]}], {"betas": (0.5, 0.9), "lr": 0.01}, freeze_step=2, steps=8),
    Case("large", [{"shapes": [(131, 133), (9,)]}], {"lr": 0.01}, freeze_step=2, steps=5),
]


class LambProblem(Problem):
    """Its groups may have a "scale", one factor on the initial values of each tensor."""

    def __init__(self, case, world_size, seed):
        super().__init__(case, world_size, seed)
        for group, values in zip(case.groups, self.params, strict=True):
            for i, scale in enumerate(group.get("scale", ())):
                values[i] *= np.float32(scale)
        if case.name == CANCEL:
            for rank in range(world_size):
                for g in range(len(case.groups)):
                    self.grads[1][rank][g][1] = np.float32(-0.5) * self.grads[0][rank][g][1]

    def options(self, index, convert):
        return {key: value for key, value in super().options(index, convert).items() if key != "scale"}


def simulate(problem):
    """The finished simulation, and the parameters and coefficients after every step."""

    def observe(simulation):
        return simulated_params(simulation), simulation.lamb_coeffs

    options = {"freeze_step": problem.case.freeze_step}
    simulation, history = run_simulation(problem, OnebitLambSimulation, observe, **options)
    params, coeffs = zip(*history, strict=True)
    return simulation, np.stack(params), np.array(coeffs)


def safe_problem(case, world_size):
    return first_safe(case, world_size, LambProblem, simulate)


def make_optimizer(problem, **kwargs):
    case = problem.case
    params, groups = make_params(problem)
    return OnebitLamb(groups, **{"freeze_step": case.freeze_step, **case.kwargs, **kwargs}), params


def solve_all(rank, world_size, problems):
    return [solve(rank, problem) for problem in problems]


def solve(rank, problem):
    optimizer, params = make_optimizer(problem)
    history, coeffs = [], []
    for t in range(1, problem.case.steps + 1):
        assert optimizer.plan.reduce_grads == (t <= problem.case.freeze_step)
        set_gradients(problem, optimizer, params, rank, t)
        optimizer.step()
        history.append(flat_params(params))
        coeffs.append(optimizer.get_lamb_coeffs())
    return {
        "history": np.stack(history),
        "coeffs": np.array(coeffs),
        **final_state(optimizer, params),
    }


@pytest.mark.invariant(29)
@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3, 4, 1)))
def test_equals_simulation(world_size, share):
    """Parameters after every step alike on all ranks, bit for bit, and equal to the simulation's."""
    solved = [safe_problem(case, world_size) for case in share.of(CASES)]
    by_rank = run_ranks(world_size, solve_all, [problem for problem, *_ in solved])
    for index, (problem, simulation, history, coeffs) in enumerate(solved):
        for rank in range(world_size):
            got = by_rank[rank][index]
            context = f"case {problem.case.name}, rank {rank}"
            assert got["history"].tobytes() == by_rank[0][index]["history"].tobytes(), f"{context}: ranks differ"
            np.testing.assert_allclose(got["history"], history, rtol=0, atol=2e-6, err_msg=context)
            np.testing.assert_allclose(got["coeffs"], coeffs, rtol=1e-5, err_msg=context)
            compare_state(got, simulation, rank, context)


def compare_state(got, simulation, rank, context):
    assert_moments_close(got, simulation, context, atol=4e-6)
    assert_errors_close(got, simulation, rank, context)


def test_the_cases_reach_what_they_are_named_after():
    """A simulation whose momentum is not zero, or whose coefficients are never bounded, would test nothing."""
    by_name = {case.name: safe_problem(case, 2) for case in CASES if case.name in (CANCEL, "always_one", "factors")}
    _, simulation, _, _ = by_name[CANCEL]
    assert [rows[1].scaling_coeff for rows in simulation.scales] == [1.0, 1.0]
    assert simulation.scales[0][0].scaling_coeff != 1.0
    problem, simulation, history, coeffs = by_name["always_one"]
    assert [scales.coeff_updates for scales in simulation.scales[0]][::2] == [0, 0]
    assert (np.abs(history[-1] - history[problem.case.freeze_step - 1])[:7] > 1e-3).all(), "it must go on moving"
    _, simulation, _, coeffs = by_name["factors"]
    factors = {round(scales.last_factor, 9) for scales in simulation.scales[0]}
    assert factors & {1.2, 0.9}


@pytest.mark.invariant(29)
@pytest.mark.parametrize("name", LAMB_RECORDED)
def test_equals_recorded_trajectory(name):
    recorded, _ = load_recorded(name)
    for history, states, coeffs in run_ranks(2, follow, name):
        np.testing.assert_allclose(coeffs, recorded["lamb_coeffs"][1:], rtol=0, atol=2e-6)
        assert_follows(recorded, 0, history, states)


def follow(rank, world_size, name):
    recorded, kwargs = load_recorded(name)
    params = [torch.nn.Parameter(torch.from_numpy(recorded[f"init_param{i}"].copy())) for i in TENSORS]
    return follow_recording(recorded, [OnebitLamb(params, **kwargs)], params, rank)


# -- coefficients -----------------------------------------------------------------------------------------------------


def test_get_lamb_coeffs_is_a_copy_with_one_entry_per_trainable_tensor():
    params = [torch.nn.Parameter(torch.full((4,), value)) for value in (3.0, 5.0, 2.0)]
    params[1].requires_grad_(False)
    optimizer = OnebitLamb(params, lr=0.0, freeze_step=2)
    for p in params[::2]:
        p.grad = torch.ones(4)
    optimizer.step()
    coeffs = optimizer.get_lamb_coeffs()
    assert coeffs == pytest.approx([3.0, 2.0]) and all(isinstance(value, float) for value in coeffs)
    coeffs[0] = 7.0
    assert optimizer.get_lamb_coeffs() == pytest.approx([3.0, 2.0])


# -- skips, bytes, low precision --------------------------------------------------------------------------------------


@pytest.mark.invariant(13)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_that_is_not_finite_skips_the_step_everywhere(world_size):
    """The run goes on as if the step had never been."""
    for rank, problems in enumerate(run_ranks(world_size, skip_on_a_rank)):
        assert problems == [], f"rank {rank}"


def skip_on_a_rank(rank, world_size):
    case = Case("skip", [{"shapes": ODD}, {"shapes": [(6,)], "non_freeze": True}], {"lr": 0.01}, 3, 8)
    problem = LambProblem(case, world_size, 0)
    return [text for step in (2, 4, 6) for text in problems_of_a_skip(problem, make_optimizer, rank, step, math.nan)]


# -- resume -----------------------------------------------------------------------------------------------------------

RESUMED = Case("resume", MIXED_GROUPS, MIXED, lrs=COSINE)


@pytest.mark.invariant(21)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_resume_is_the_uninterrupted_run(world_size, tmp_path):
    """Saved in the warmup stage, at its end, and in the compressed stage; through files and through state dicts."""
    for rank, differences in enumerate(run_ranks(world_size, resume_on_a_rank, str(tmp_path))):
        assert differences == [], f"rank {rank}"


def resume_on_a_rank(rank, world_size, directory):
    problem = LambProblem(RESUMED, world_size, 0)
    stops, others = (2, RESUMED.freeze_step, 5, 9), {"lr": 0.5, "freeze_step": 7}
    return differences_of_resumes(problem, make_optimizer, rank, directory, stops, (2, 5), others)


def reference_on_one(rank, world_size):
    with mock.patch.dict(os.environ, {"HF_COMPRESSOPT_KERNELS": "reference"} if rank == 1 else {}):
        p = torch.nn.Parameter(torch.ones(5))
        p.grad = torch.ones(5)
        OnebitLamb([p]).step()


@pytest.mark.skipif(not library.available(torch.device("cpu")), reason="there is no native library to mix with")
def test_ranks_whose_norms_would_differ_are_refused_together():
    for text in run_ranks_expecting_error(2, reference_on_one).values():
        assert "kernels=reference" in text and "kernels=native" in text
