"""Lamb, against the warmup stage of the float64 simulation of OnebitLamb, on one process without a group."""

import copy
import math

import numpy as np
import pytest
import torch

from hf_compressopt import Lamb
from tests.oracles.simulation_lamb import OnebitLambSimulation

SHAPES = [(7,), (3, 5), (2, 3, 4), (1,), (0,), (13,)]
STEPS = 12
COSINE = [0.05 * (0.55 + 0.45 * math.cos(math.pi * t / STEPS)) for t in range(STEPS)]

CASES = {
    "plain": ({}, [{}]),
    "decay": ({"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}, [{}]),
    "no_correction": ({"lr": 0.01, "bias_correction": False}, [{}]),
    "eps_inside": ({"lr": 0.01, "eps_inside_sqrt": True, "eps": 0.05}, [{}]),
    "clamped": ({"lr": 0.01, "max_coeff": 1.2, "min_coeff": 0.9, "weight_decay": 0.2}, [{}]),
    "groups": ({"eps": 1e-6}, [{"lr": 0.02, "weight_decay": 0.2}, {"betas": (0.5, 0.9)}, {"eps": 1e-3}]),
}


class Run:
    """A simulation and the optimizer side by side, with gradients that they share."""

    def __init__(self, kwargs, groups, seed=0):
        self.rng = np.random.default_rng(seed)
        values = [[self.rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in groups]
        simulated = [{"params": v, **group} for v, group in zip(values, groups, strict=True)]
        self.simulation = OnebitLambSimulation(simulated, 1, freeze_step=10**9, **kwargs)
        self.params = [[torch.nn.Parameter(torch.from_numpy(p.copy())) for p in group] for group in values]
        real = [{"params": v, **group} for v, group in zip(self.params, groups, strict=True)]
        self.optimizer = Lamb(real, **kwargs)

    def step(self, missing=()):
        draws = [[self.rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in self.params]
        grads = [[None if i in missing else grad for i, grad in enumerate(row)] for row in draws]
        for group, row in zip(self.params, grads, strict=True):
            for p, g in zip(group, row, strict=True):
                p.grad = None if g is None else torch.from_numpy(g.copy())
        self.simulation.step([grads])
        self.optimizer.step()

    def compare(self, context):
        for group, simulated in zip(self.params, self.simulation.groups, strict=True):
            for i, p in enumerate(group):
                got = p.detach().numpy()
                np.testing.assert_allclose(got, simulated.params[i], rtol=0, atol=2e-6, err_msg=f"{context}, {i}")
        got = self.optimizer.get_lamb_coeffs()
        np.testing.assert_allclose(got, self.simulation.lamb_coeffs, rtol=1e-5, err_msg=context)


@pytest.mark.invariant(29)
@pytest.mark.parametrize("name", CASES)
def test_equals_simulation(name):
    run = Run(*CASES[name])
    for t in range(STEPS):
        for group, simulated in zip(run.optimizer.param_groups, run.simulation.groups, strict=True):
            if name in ("plain", "groups"):
                group["lr"] = simulated.lr = COSINE[t]
        run.step(missing={1, 3} if t in (3, 7) else ())
        run.compare(f"{name}, step {t}")


def test_coefficients_are_clamped_and_copied():
    run = Run({"lr": 0.01, "max_coeff": 1.2, "min_coeff": 0.9}, [{}])
    with torch.no_grad():
        run.params[0][0].mul_(100)
        run.params[0][1].mul_(0.01)
    run.optimizer.param_groups[0]["lr"] = 0.0
    run.step()
    coeffs = run.optimizer.get_lamb_coeffs()
    assert len(coeffs) == len(SHAPES) and all(isinstance(value, float) for value in coeffs)
    assert coeffs[0] == pytest.approx(1.2) and coeffs[1] == pytest.approx(0.9) and coeffs[4] == 1.0
    coeffs[0] = 5.0
    assert run.optimizer.get_lamb_coeffs()[0] == pytest.approx(1.2)


def test_coefficient_is_one_where_a_norm_is_zero():
    zero, idle = torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.ones(8))
    frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    optimizer = Lamb([zero, frozen, idle], lr=0.1)
    zero.grad, idle.grad = torch.ones(8), torch.zeros(8)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0, 1.0]
    torch.testing.assert_close(zero.detach(), torch.full((8,), -0.1))
    assert torch.equal(idle.detach(), torch.ones(8)) and torch.equal(frozen.detach(), torch.ones(8))


def test_coefficients_keep_the_order_of_the_parameters():
    """The first tensor has its first gradient later than the second."""
    p, q = torch.nn.Parameter(torch.full((4,), 3.0)), torch.nn.Parameter(torch.full((4,), 2.0))
    optimizer = Lamb([p, q], lr=0.0)
    for grad in (None, torch.ones(4)):
        p.grad, q.grad = grad, torch.ones(4)
        optimizer.step()
    assert optimizer.get_lamb_coeffs() == pytest.approx([3.0, 2.0])


def test_low_precision_resumes_bit_for_bit():
    """Moments stay float32, in a loaded state too."""
    ends = []
    for resume in (False, True):
        generator = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(40, generator=generator).bfloat16())
        optimizer = Lamb([p], lr=0.01)
        for t in range(6):
            if resume and t == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = Lamb([p], lr=0.01)
                optimizer.load_state_dict(saved)
            p.grad = torch.randn(40, generator=generator).bfloat16()
            optimizer.step()
        assert optimizer.state[p]["exp_avg"].dtype == optimizer.state[p]["exp_avg_sq"].dtype == torch.float32
        ends.append(torch.cat([p.detach().float(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]))
    assert torch.equal(*ends)
