"""Steps of any compressed optimizer on a rank: a skip, low precision, and the comparison of all bits."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_compressopt import average_gradients
from tests.oracles.cases import Problem, flat_params, give, make_optimizer, set_gradients, set_rates
from tests.oracles.simulation import chunk_bounds
from tests.support.harness import same_on_all_ranks


def take_steps_of_own_gradients(problem: Problem, optimizer: Any, params: Any, rank: int) -> np.ndarray:
    """Take a problem's steps with this rank's gradients, and return the parameters after each, [steps, elements]."""
    history = []
    for t in range(1, problem.case.steps + 1):
        give(params, problem.grads[t - 1][rank])
        set_rates(problem, optimizer.param_groups, t)
        average_gradients(optimizer)
        optimizer.step()
        history.append(flat_params(params))
    return np.stack(history)


def everything(optimizer: Any, params: Any) -> dict[str, torch.Tensor]:
    """Every bit of a run, by name."""
    saved = copy.deepcopy(optimizer.state_dict())
    own = saved["compressopt"]
    values = {f"{key}{i}": torch.as_tensor(v) for i, row in saved["state"].items() for key, v in row.items()}
    for name in ("worker_error", "server_error"):
        values |= {f"{name}{g}": error for g, error in enumerate(own[name])}
    values |= {f"{key}{g}": value for g, group in enumerate(own["group_tensors"]) for key, value in group.items()}
    values |= {f"param{g}.{i}": p.detach().clone() for g, group in enumerate(params) for i, p in enumerate(group)}
    if hasattr(optimizer, "get_lamb_coeffs"):
        values["coeffs"] = torch.tensor(optimizer.get_lamb_coeffs())
    return values | {"step": torch.tensor(optimizer.plan.step)}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of nested dicts and lists, copied, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    rows = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for row in rows for tensor in tensors_in(row)]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def different(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that differ in a bit."""
    assert before.keys() == after.keys()
    return [key for key in before if not torch.equal(before[key], after[key])]


def check_low_precision(problem: Problem, rank: int, dtype: torch.dtype) -> None:
    """Check that parameters are rounded once a step: moments stay float32, and a float32 run stays near.

    The problem has one param group.
    """
    optimizer, (wide_params,) = make_optimizer(problem)
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in wide_params]
    for p, q in zip(wide_params, params, strict=True):
        p.data.copy_(q.detach())
    narrow = problem.optimizer(params, **problem.schedule, **problem.case.kwargs)
    for t in range(1, problem.case.steps + 1):
        set_gradients(problem, optimizer, [wide_params], rank, t)
        for p, q in zip(wide_params, params, strict=True):
            q.grad = p.grad.to(dtype)  # type: ignore[union-attr]
            p.grad = q.grad.float()
        optimizer.step()
        narrow.step()
    flat, exact = (torch.cat([p.detach().reshape(-1) for p in tensors]).float() for tensors in (params, wide_params))
    assert same_on_all_ranks(params), "ranks differ"
    assert narrow.state[params[0]]["exp_avg"].dtype == torch.float32
    assert float(((flat - exact).abs() / exact.abs().clamp(min=1)).max()) <= 12 * torch.finfo(dtype).eps


def bytes_of_a_compressed_step(numel: int, world_size: int, scale_block: int) -> float:
    """Bytes that a rank sends: 2 (W-1)/W of one bit per element and one float32 scale per block."""
    blocks = sum(-(-(stop - start) // scale_block) for start, stop in chunk_bounds(numel, world_size))
    return 2 * (world_size - 1) / world_size * (numel / 8 + 4 * blocks)
