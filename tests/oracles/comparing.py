"""Results of real ranks, and their comparison with simulations and recorded trajectories."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.oracles.cases import Problem, flat_params, flat_state, make_optimizer, set_gradients

TENSORS = range(3)


def solve(rank: int, problem: Problem) -> dict[str, Any]:
    """Solve a problem with the real optimizer on this rank, with all state in float32."""
    plain = not hasattr(problem.optimizer, "schedule_class")
    optimizer, params = make_optimizer(problem, **({} if plain else {"state": "float32"}))
    history, coeffs, sent = [], [], []
    for t in range(1, problem.case.steps + 1):
        set_gradients(problem, optimizer, params, rank, t)
        optimizer.step()
        assert not getattr(optimizer, "step_was_skipped", False)
        history.append(flat_params(params))
        coeffs.append(optimizer.get_lamb_coeffs() if hasattr(optimizer, "get_lamb_coeffs") else [])
        sent.append(0 if plain else optimizer.traffic.step_bytes)
    found = {name: flat_state(optimizer, params, name) for name in ("exp_avg", "exp_avg_sq")}
    saved = optimizer.state_dict().get("compressopt", {"worker_error": [], "server_error": []})
    return {
        **found,
        **{name: [error.numpy() for error in saved[name]] for name in ("worker_error", "server_error")},
        "history": np.stack(history),
        "coeffs": np.array(coeffs),
        "bytes": sent,
    }


def assert_state_close(got: Any, simulation: Any, rank: int, context: str, rtol: float, atol: float) -> None:
    """A rank's moments and errors of every group against the simulation's."""
    for g, group in enumerate(simulation.groups):
        where, (mean, square) = f"{context}, group {g}", simulation.moments_of(group, rank)
        np.testing.assert_allclose(got["exp_avg"][g], mean, rtol=rtol, atol=atol, err_msg=where)
        np.testing.assert_allclose(got["exp_avg_sq"][g], square, rtol=1e-5, atol=1e-7, err_msg=where)
        for name in ("worker_error", "server_error") if simulation.world_size > 1 else ():
            expected = np.concatenate([np.zeros(0), *(errors[rank] for errors in getattr(group, name + "s"))])
            np.testing.assert_allclose(got[name][g], expected, rtol=1e-5, atol=5e-6, err_msg=f"{where}: {name}")


def load_recorded(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a recorded run and its arguments, in this package's counting of steps."""
    recorded = dict(np.load(Path(__file__).with_name(f"{name}.npz")))
    kwargs = json.loads(str(recorded["config"]))["kwargs"]
    kwargs["betas"] = tuple(kwargs.get("betas", (0.9, 0.999)))
    if "var_freeze_step" in kwargs:
        kwargs["var_freeze_step"] += 1  # the first step() only counted, the next one was number 2
    else:
        kwargs["freeze_step"] -= 1  # the first step() only counted
    return recorded, kwargs | {"bias_correction": False, "scale_block": None, "variance_floor": 0.0}


def recorded_group(recorded: Any, name: str, i: int) -> dict[str, Any]:
    """A param group of one tensor; tensor 1 of a run with masks has one."""
    group = {"params": [recorded[f"init_param{i}"].copy()]}
    if "mask" in name and i == 1:
        group["exp_avg_mask"] = np.ones(recorded["init_param1"].shape, np.float32)
        group["exp_avg_mask"][:, 5:] = 0
    return group


def assert_follows(recorded: Any, rank: int, history: Any, states: Any, atol: float = 2e-6) -> None:
    """Parameters after every step, and final moments, of one rank against a recording."""
    rank = min(rank, len(recorded["param0"]) - 1)  # some have one row for all ranks, which were alike
    for i in TENSORS:
        rows = (history[i], recorded[f"param{i}"][rank, 1:])
        moments = zip(states[i], (recorded[f"exp_avg{i}"][rank], recorded[f"exp_avg_sq{i}"][rank]), strict=True)
        for got, expected in (rows, *moments):
            np.testing.assert_allclose(np.reshape(got, np.shape(expected)), expected, rtol=0, atol=atol, err_msg=str(i))


def follow_recording(recorded: Any, optimizers: Any, params: list[torch.nn.Parameter], rank: int) -> tuple[Any, ...]:
    """Take the recorded steps; return each tensor's parameters after them and its moments, and LAMB's coefficients."""
    history: list[list[np.ndarray]] = [[] for _ in params]
    coeffs = []
    for t in range(1, recorded["lr"].size):
        averaged = bool(recorded["reduce_grads"][t])
        for i, p in enumerate(params):
            grads = recorded[f"grads{i}"][:, t]
            p.grad = torch.from_numpy(grads.mean(axis=0) if averaged else grads[rank].copy())
        for optimizer in optimizers:
            assert optimizer.plan.reduce_grads == averaged
            optimizer.param_groups[0]["lr"] = float(recorded["lr"][t])
            optimizer.step()
            coeffs += [optimizer.get_lamb_coeffs()] if hasattr(optimizer, "get_lamb_coeffs") else []
        for row, p in zip(history, params, strict=True):
            row.append(p.detach().numpy().copy())
    rows = {p: optimizer.state[p] for optimizer in optimizers for p in optimizer.state}
    states = [(rows[p]["exp_avg"].numpy(), rows[p]["exp_avg_sq"].numpy()) for p in params]
    return [np.stack(row) for row in history], states, coeffs


def simulate_recording(recorded: Any, simulations: Any) -> list[tuple[Any, ...]]:
    """Take the recorded steps with simulations of one group each; for each rank what follow_recording() returns."""
    numbers = iter(TENSORS)
    own = [[next(numbers) for _ in simulation.groups[0].params] for simulation in simulations]
    world_size = simulations[0].world_size
    found: list[tuple[Any, ...]] = [([[] for _ in TENSORS], [], []) for _ in range(world_size)]
    for t in range(1, recorded["lr"].size):
        for simulation, tensors in zip(simulations, own, strict=True):
            (group,) = simulation.groups
            group.lr = float(recorded["lr"][t])
            assert bool(recorded["reduce_grads"][t]) == simulation.reduces_grads(simulation.step_count + 1)
            simulation.step([[[recorded[f"grads{i}"][rank, t] for i in tensors]] for rank in range(world_size)])
            for rank, (history, _, coeffs) in enumerate(found):
                for i, part in zip(tensors, group.unflatten(simulation.params_of(rank)), strict=True):
                    history[i].append(part)
                coeffs += [simulation.lamb_coeffs] if simulation.lamb_coeffs else []
    for simulation in simulations:
        (group,) = simulation.groups
        for rank, (_, states, _) in enumerate(found):
            states += zip(*map(group.unflatten, simulation.moments_of(group, rank)), strict=True)
    return found
