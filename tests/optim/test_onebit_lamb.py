"""OnebitLamb on real gloo ranks, against the float64 simulation and the recorded trajectories."""

import copy
import math
import os
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_compressopt import OnebitLamb, load_state, save_state
from hf_compressopt.kernels import library
from tests.optim.test_oracle_simulation_family import LAMB_RECORDED, TENSORS, load_recorded
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
from tests.oracles.comparing import assert_errors_close, assert_follows, assert_moments_close, final_state
from tests.oracles.simulation_lamb import OnebitLambSimulation
from tests.oracles.steps import (
    bytes_of_a_compressed_step,
    check_low_precision,
    different,
    everything,
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
    for history, coeffs, states in run_ranks(2, follow_recording, name):
        np.testing.assert_allclose(coeffs, recorded["lamb_coeffs"][1:], rtol=0, atol=2e-6)
        assert_follows(recorded, 0, history, states)


def follow_recording(rank, world_size, name):
    recorded, kwargs = load_recorded(name)
    params = [torch.nn.Parameter(torch.from_numpy(recorded[f"init_param{i}"].copy())) for i in TENSORS]
    optimizer = OnebitLamb(params, **kwargs)
    history, coeffs = [[] for _ in TENSORS], []
    for t in range(1, recorded["lr"].size):
        assert optimizer.plan.reduce_grads == recorded["reduce_grads"][t]
        optimizer.param_groups[0]["lr"] = float(recorded["lr"][t])
        for i, p in enumerate(params):
            grads = recorded[f"grads{i}"][:, t]
            p.grad = torch.from_numpy(grads.mean(axis=0) if optimizer.plan.reduce_grads else grads[rank].copy())
        optimizer.step()
        coeffs.append(optimizer.get_lamb_coeffs())
        for i, p in enumerate(params):
            history[i].append(p.detach().numpy().copy())
    states = [(optimizer.state[p]["exp_avg"].numpy(), optimizer.state[p]["exp_avg_sq"].numpy()) for p in params]
    return [np.stack(rows) for rows in history], coeffs, states


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


@pytest.mark.invariant(36)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_parameter_without_any_gradient_in_warmup_keeps_still(eps, decay):
    """Without a variance to divide by, and without a momentum scale, weight decay alone may move the parameter."""
    for moved, grown, finite in run_ranks(2, train_beside_unused_parameter, eps, decay):
        assert finite
        assert grown <= 1e-6
        assert moved <= (1e-6 if decay == 0 else 20 * 0.01 * decay * 10)


def train_beside_unused_parameter(rank, world_size, eps, decay):
    used, unused = torch.nn.Parameter(torch.ones(20)), torch.nn.Parameter(torch.ones(20))
    optimizer = OnebitLamb([used, unused], lr=0.01, freeze_step=3, eps=eps, weight_decay=decay)
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 21):
        used.grad = torch.randn(20, generator=generator)
        unused.grad = torch.ones(20) if t > 10 else None
        optimizer.step()
    moved = unused.detach() - 1
    finite = bool(used.isfinite().all() and unused.isfinite().all())
    return float(moved.abs().max()), float(moved.max()), finite


class HostReads(TorchDispatchMode):
    """A counter of values and tensors that the host reads, except step counts, which lie in host memory anyway."""

    def __init__(self, optimizer, params):
        super().__init__()
        self.counts = {}
        self.step_counts = {storage(optimizer.state[p]["step"]) for p in params}
        self.patches = [
            mock.patch.object(torch.Tensor, name, self.counting(name)) for name in ("tolist", "numpy", "__array__")
        ]

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for patch in self.patches:
            patch.stop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:  # item, float, int, bool, a tensor given as a number
            self.count("value", args[0])
        return func(*args, **(kwargs or {}))

    def counting(self, name):
        method = getattr(torch.Tensor, name)

        def counted(tensor, *args, **kwargs):
            self.count(name, tensor)
            return method(tensor, *args, **kwargs)

        return counted

    def count(self, name, tensor):
        if storage(tensor) not in self.step_counts:
            self.counts[name] = self.counts.get(name, 0) + 1


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_host_reads_no_more_for_more_tensors(decay):
    """In a warmup step, t = 1, as in compressed ones, t = 4 and 5."""
    for rank, (few, many) in enumerate(run_ranks(2, count_host_reads, decay)):
        assert few == many, f"rank {rank}"
        assert all(sum(counts.values()) > 0 for _, counts in few), "nothing was counted at all"


def count_host_reads(rank, world_size, decay):
    counted = []
    for tensors in (3, 30):
        params = [torch.nn.Parameter(torch.ones(5)) for _ in range(tensors)]
        optimizer = OnebitLamb(params, lr=0.01, freeze_step=2, weight_decay=decay)
        counted.append([])
        for t in range(1, 6):
            for i, p in enumerate(params):
                p.grad = torch.full((5,), 0.1 * (i + t))
            with HostReads(optimizer, params) as reads:
                optimizer.step()
            if t not in (2, 3):  # the end of the warmup stage may look at every tensor, once
                counted[-1].append((t, reads.counts))
    return counted


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


@pytest.mark.invariant(33)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_metrics_count_bytes(world_size):
    numel = 40_000
    formula = bytes_of_a_compressed_step(numel, world_size, 64)
    for metrics in run_ranks(world_size, metrics_on_a_rank, numel):
        assert metrics["stage"] == 1.0 and metrics["step"] == 3.0
        assert abs(metrics["bytes_sent_step"] - formula) <= 64 * world_size


def metrics_on_a_rank(rank, world_size, numel):
    p = torch.nn.Parameter(torch.ones(numel))
    optimizer = OnebitLamb([p], freeze_step=1, scale_block=64)
    for _ in range(3):
        seed = 0 if optimizer.plan.reduce_grads else rank
        p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    return optimizer.metrics()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_follow_float32_moments(dtype):
    run_ranks(2, low_precision_on_a_rank, dtype)


def low_precision_on_a_rank(rank, world_size, dtype):
    case = Case("low", [{"shapes": ODD}], {"lr": 0.01, "weight_decay": 0.1}, 3, 8)
    problem = LambProblem(case, world_size, 0)
    check_low_precision(
        problem, make_optimizer(problem), lambda params: OnebitLamb(params, freeze_step=3, **case.kwargs), rank, dtype
    )


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
    whole, params = make_optimizer(problem)
    saved = {}
    for t in range(1, RESUMED.steps + 1):
        set_gradients(problem, whole, params, rank, t)
        whole.step()
        if t in (2, RESUMED.freeze_step, 5, 9):
            save_state(whole, f"{directory}/{t}")
            torch.save([[p.detach() for p in group] for group in params], f"{directory}/{t}-{rank}.pt")
            saved[t] = copy.deepcopy(whole.state_dict())
    expected, differences = everything(whole, params), []
    for at in saved:
        for way in ("files", "state dict") if at in (2, 5) else ("files",):
            optimizer, params = make_optimizer(problem, lr=0.5, freeze_step=7)
            values = torch.load(f"{directory}/{at}-{rank}.pt")
            with torch.no_grad():
                for group, row in zip(params, values, strict=True):
                    for p, value in zip(group, row, strict=True):
                        p.copy_(value)
            load_state(optimizer, f"{directory}/{at}") if way == "files" else optimizer.load_state_dict(saved[at])
            for t in range(at + 1, RESUMED.steps + 1):
                set_gradients(problem, optimizer, params, rank, t)
                optimizer.step()
            differences += [(at, way, key) for key in different(expected, everything(optimizer, params))]
    return differences


# -- what the constructor refuses -------------------------------------------------------------------------------------


@pytest.mark.invariant(7)
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"freeze_step": 0}, ["freeze_step", ">= 1", "0"]),
        ({"min_coeff": -0.5}, ["min_coeff", ">= 0", "-0.5"]),
        ({"max_coeff": 0.1, "min_coeff": 0.2}, ["max_coeff", "0.1"]),
        ({"coeff_beta": 1.0}, ["coeff_beta", "[0, 1)", "1.0"]),
        ({"factor_min": 5.0}, ["factor_m", "5.0"]),
        ({"factor_threshold": -0.1}, ["factor_threshold", ">= 0", "-0.1"]),
        ({"betas": (0.9, 1.0)}, ["betas[1]", "[0, 1)", "1.0"]),
        ({"max_update": 5.0}, ["max_update", "not supported", "5.0", "factor_max"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_option_is_named(kwargs, words):
    with pytest.raises(ValueError) as caught:
        OnebitLamb([torch.nn.Parameter(torch.zeros(3))], **kwargs)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def reference_on_one(rank, world_size):
    with mock.patch.dict(os.environ, {"HF_COMPRESSOPT_KERNELS": "reference"} if rank == 1 else {}):
        p = torch.nn.Parameter(torch.ones(5))
        p.grad = torch.ones(5)
        OnebitLamb([p]).step()


@pytest.mark.skipif(not library.available(torch.device("cpu")), reason="there is no native library to mix with")
def test_ranks_whose_norms_would_differ_are_refused_together():
    for text in run_ranks_expecting_error(2, reference_on_one).values():
        assert "kernels=reference" in text and "kernels=native" in text
