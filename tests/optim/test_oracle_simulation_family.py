"""The simulations of OnebitLamb and ZeroOneAdam, against trajectories recorded from DeepSpeed 0.19.6 on two ranks."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.oracles.simulation_lamb import OnebitLambSimulation
from tests.oracles.simulation_zero_one import ZeroOneAdamSimulation, variance_steps

LAMB_RECORDED = ["onebit_lamb_w2", "onebit_lamb_wd_lr_w2"]
ZERO_ONE_RECORDED = ["zero_one_adam_w2", "zero_one_adam_variance_stage_w2"]
TENSORS = range(3)


def load_recorded(name):
    """The arrays of a recorded run and its arguments, in this package's counting of steps."""
    recorded = dict(np.load(Path(__file__).parents[1] / "oracles" / f"{name}.npz"))
    config = json.loads(str(recorded["config"]))
    kwargs = config["kwargs"]
    kwargs["betas"] = tuple(kwargs.get("betas", (0.9, 0.999)))
    if config["optimizer"] == "OnebitLamb":
        kwargs["freeze_step"] -= 1  # the first step() only counted
    else:
        kwargs["var_freeze_step"] += 1  # the first step() only counted, the next one was number 2
    return recorded, kwargs | {"bias_correction": False, "scale_block": None, "variance_floor": 0.0}


@pytest.mark.invariant(29)
@pytest.mark.parametrize("name", LAMB_RECORDED)
def test_lamb_simulation_agrees_with_recorded_trajectory(name):
    """One bucket over all tensors."""
    recorded, kwargs = load_recorded(name)
    simulation = OnebitLambSimulation([{"params": [recorded[f"init_param{i}"] for i in TENSORS]}], 2, **kwargs)
    (group,) = simulation.groups
    for t in range(1, recorded["lr"].size):
        group.lr = float(recorded["lr"][t])
        assert bool(recorded["reduce_grads"][t]) == (simulation.step_count < simulation.freeze_step)
        simulation.step([[[recorded[f"grads{i}"][rank, t] for i in TENSORS]] for rank in range(2)])
        np.testing.assert_allclose(simulation.lamb_coeffs, recorded["lamb_coeffs"][t], rtol=0, atol=1e-6)
        for i in TENSORS:
            np.testing.assert_allclose(group.params[i], recorded[f"param{i}"][0, t], rtol=0, atol=1e-6)
    for i in TENSORS:
        np.testing.assert_allclose(group.exp_avg[i], recorded[f"exp_avg{i}"][0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(group.exp_avg_sq[i], recorded[f"exp_avg_sq{i}"][0], rtol=0, atol=1e-6)


@pytest.mark.invariant(29)
@pytest.mark.parametrize("name", ZERO_ONE_RECORDED)
def test_zero_one_simulation_agrees_with_recorded_trajectory(name):
    """One optimizer per tensor, whose steps are numbered from 2."""
    recorded, kwargs = load_recorded(name)
    for i in TENSORS:
        simulation = ZeroOneAdamSimulation([{"params": [recorded[f"init_param{i}"]]}], 2, first_step=2, **kwargs)
        (group,) = simulation.groups
        for t in range(1, recorded["lr"].size):
            group.lr = float(recorded["lr"][t])
            assert bool(recorded["reduce_grads"][t]) == simulation.reduces_grads(simulation.step_count + 1)
            simulation.step([[[recorded[f"grads{i}"][rank, t]]] for rank in range(2)])
            for rank in range(2):
                expected = recorded[f"param{i}"][rank, t].ravel()
                np.testing.assert_allclose(group.p[rank], expected, rtol=0, atol=1e-6, err_msg=f"{i} {t} {rank}")
        for rank in range(2):
            np.testing.assert_allclose(group.m[rank], recorded[f"exp_avg{i}"][rank].ravel(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(group.v, recorded[f"exp_avg_sq{i}"][0].ravel(), rtol=0, atol=1e-6)


def test_variance_schedule_by_hand():
    assert variance_steps(24, 2) == [1, 2, 4, 6, 8, 12, 16, 24]
    assert variance_steps(16, 1) == [1, 2, 4, 8, 16]
    assert variance_steps(9, 100) == list(range(1, 10))


def test_local_intervals_by_hand():
    simulation = ZeroOneAdamSimulation(
        [{"params": [np.zeros(3)]}], 1, var_freeze_step=5, local_step_scaler=3, local_step_clipper=4
    )
    assert [simulation.local_interval(t) for t in range(6, 18)] == [1, 1, 1, 2, 2, 2, 4, 4, 4, 4, 4, 4]
    assert [t for t in range(1, 18) if simulation.is_sync(t)] == [6, 7, 8, 10, 12, 16]
