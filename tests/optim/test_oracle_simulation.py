"""The simulations themselves, against trajectories recorded from DeepSpeed 0.19.6 on two gloo ranks."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.oracles.simulation import OnebitAdamSimulation, chunk_bounds, simulate_compressed_all_reduce
from tests.oracles.simulation_lamb import OnebitLambSimulation
from tests.oracles.simulation_zero_one import ZeroOneAdamSimulation, variance_steps

RECORDED = ["onebit_adam_w2", "onebit_adam_wd_lr_w2", "onebit_adam_mask_w2"]
TENSORS = range(3)


def recorded_kwargs(recorded, tensor, name):
    """The arguments for one tensor of a recorded run; its first step() only counted, so freeze_step is one lower."""
    kwargs = json.loads(str(recorded["config"]))["kwargs"]
    kwargs["freeze_step"] -= 1
    kwargs["betas"] = tuple(kwargs.get("betas", (0.9, 0.999)))
    mask = None
    if "mask" in name and tensor == 1:
        mask = np.ones(recorded["init_param1"].shape, np.float32)
        mask[:, 5:] = 0
    return kwargs | {"bias_correction": False, "scale_block": None, "variance_floor": 0.0}, mask


@pytest.mark.invariant(29)
@pytest.mark.parametrize("name", RECORDED)
def test_simulation_agrees_with_recorded_trajectory(name):
    recorded = np.load(Path(__file__).parents[1] / "oracles" / f"{name}.npz")
    for i in TENSORS:
        kwargs, mask = recorded_kwargs(recorded, i, name)
        group = {"params": [recorded[f"init_param{i}"]], "exp_avg_mask": mask}
        simulation = OnebitAdamSimulation([group], 2, **kwargs)
        grads, expected = recorded[f"grads{i}"], recorded[f"param{i}"][0]
        for t in range(1, grads.shape[1]):
            simulation.groups[0].lr = float(recorded["lr"][t])
            assert bool(recorded["reduce_grads"][t]) == (simulation.step_count < simulation.freeze_step)
            simulation.step([[[grads[rank, t]]] for rank in range(2)])
            np.testing.assert_allclose(simulation.groups[0].params[0], expected[t], rtol=0, atol=1e-6)
        np.testing.assert_allclose(simulation.groups[0].exp_avg[0], recorded[f"exp_avg{i}"][0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(simulation.groups[0].exp_avg_sq[0], recorded[f"exp_avg_sq{i}"][0], rtol=0, atol=1e-6)


def test_chunks_by_hand():
    assert chunk_bounds(100, 4) == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert chunk_bounds(9, 4) == [(0, 8), (8, 9), (9, 9), (9, 9)]
    assert chunk_bounds(48, 2) == [(0, 24), (24, 48)]


def test_one_bucket_by_hand():
    """Two ranks, chunks of 8 and 4 elements, every number small enough to do without a computer."""
    x0 = np.array([3.0, -3] * 4 + [1, 1, -1, 1])
    x1 = np.array([1.0, 1] * 4 + [-5, 5, -5, 5])
    zeros = [np.zeros(12), np.zeros(12)]
    result = simulate_compressed_all_reduce([x0, x1], zeros, [np.zeros(8), np.zeros(4)], 8)
    rms = np.sqrt((4 * 2.0**2 + 4 * 1.0**2) / 8)  # chunk 0: a = 2, -1, 2, -1, ...
    np.testing.assert_allclose(result.mean[:8], [rms, -rms] * 4)
    np.testing.assert_allclose(result.server_errors[0], [2 - rms, rms - 1] * 4)
    rms = np.sqrt((2.0**2 + 3**2 + 3**2 + 3**2) / 4)  # chunk 1: a = -2, 3, -3, 3
    np.testing.assert_allclose(result.mean[8:], [-rms, rms, -rms, rms])
    np.testing.assert_allclose(np.concatenate(result.worker_errors), 0, atol=1e-12)
    assert result.min_distance == 1.0


LAMB_RECORDED = ["onebit_lamb_w2", "onebit_lamb_wd_lr_w2"]
ZERO_ONE_RECORDED = ["zero_one_adam_w2", "zero_one_adam_variance_stage_w2"]


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
