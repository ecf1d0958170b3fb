"""Results of real ranks, and their comparison with simulations and recorded trajectories."""

from typing import Any

import numpy as np
import torch

from tests.oracles.cases import Problem, flat_params, flat_state, make_optimizer, set_gradients

TENSORS = range(3)


def final_state(optimizer: Any, params: Any) -> dict[str, list[np.ndarray]]:
    """Moments and errors of every group, flat."""
    saved = optimizer.state_dict()["compressopt"]
    return {
        **{name: flat_state(optimizer, params, name) for name in ("exp_avg", "exp_avg_sq")},
        **{name: [error.numpy() for error in saved[name]] for name in ("worker_error", "server_error")},
    }


def run_on_rank(rank: int, problem: Problem) -> dict[str, Any]:
    """Solve a problem with the real optimizer on this rank, with all state in float32."""
    optimizer, params = make_optimizer(problem, state="float32")
    history = []
    for t in range(1, problem.case.steps + 1):
        set_gradients(problem, optimizer, params, rank, t)
        optimizer.step()
        history.append(flat_params(params))
    return {
        "history": np.stack(history),
        **final_state(optimizer, params),
        "steps": [[int(optimizer.state[p]["step"]) for p in group] for group in params],
    }


def assert_errors_close(got: Any, simulation: Any, rank: int, context: str, *, rtol: float = 1e-5) -> None:
    """A rank's errors of every group against the simulation's."""
    for g, group in enumerate(simulation.groups):
        for name in ("worker_error", "server_error") if simulation.world_size > 1 else ():
            expected = np.concatenate([np.zeros(0), *(errors[rank] for errors in getattr(group, name + "s"))])
            where = f"{context}, group {g}: {name}"
            np.testing.assert_allclose(got[name][g], expected, rtol=rtol, atol=5e-6, err_msg=where)


def assert_moments_close(got: Any, simulation: Any, context: str, *, atol: float) -> None:
    """The moments of every group, alike on all ranks, against the simulation's."""
    for g, group in enumerate(simulation.groups):
        where, mean, square = f"{context}, group {g}", group.flatten(group.exp_avg), group.flatten(group.exp_avg_sq)
        np.testing.assert_allclose(got["exp_avg"][g], mean, rtol=4e-6, atol=atol, err_msg=where)
        np.testing.assert_allclose(got["exp_avg_sq"][g], square, rtol=1e-5, atol=1e-7, err_msg=where)


def assert_follows(recorded: Any, rank: int, history: Any, states: Any) -> None:
    """Parameters after every step, and final moments, of one rank against a recording."""
    for i in TENSORS:
        np.testing.assert_allclose(history[i], recorded[f"param{i}"][rank, 1:], rtol=0, atol=2e-6)
        np.testing.assert_allclose(states[i][0], recorded[f"exp_avg{i}"][rank], rtol=0, atol=2e-6)
        np.testing.assert_allclose(states[i][1], recorded[f"exp_avg_sq{i}"][rank], rtol=0, atol=2e-6)


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
