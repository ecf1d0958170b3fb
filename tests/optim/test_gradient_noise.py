"""The gradient noise scale, which clipping by sketches measures: its value, and its state in checkpoints."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_compressopt import OnebitAdam, ZeroOneAdam, load_state, save_state
from hf_compressopt.optim.agreement import GradientNoise
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks

NUMEL, DEVIATION = 65_536, 0.0135  # enough for a sketch of 4096 numbers


def gradient(rank: int, step: int) -> torch.Tensor:
    """The true gradient, of norm 1 and alike in all steps, and noise of each rank's own."""
    true, own = (torch.randn(NUMEL, generator=torch.Generator().manual_seed(s)) for s in (0, 1000 * (rank + 1) + step))
    return true / true.norm() + DEVIATION * own


def steps(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, rank: int, which: range) -> list[tuple[Any, ...]]:
    rows = []
    for step in which:
        p.grad = gradient(0 if optimizer.plan.reduce_grads else rank, step)  # type: ignore[attr-defined]
        norm = float(optimizer.clip_grad_norm_(0.5))  # type: ignore[attr-defined]
        optimizer.step()
        scale = optimizer.metrics().get("gradient_noise_scale")  # type: ignore[attr-defined]
        rows.append((norm, scale, p.detach().clone()))
    return rows


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_it_is_that_of_the_gradients(rank: int, world_size: int) -> None:
    """Against float64: from the gradients themselves within the sketch's error, and the true one nearly so."""
    p = torch.nn.Parameter(torch.zeros(NUMEL))
    rows = steps(OnebitAdam([p], lr=1e-3, freeze_step=1), p, rank, range(25))
    total = weight = 0.0
    assert rows[0][1] is None  # averaged gradients tell nothing
    for step, (norm, scale, _) in enumerate(rows[1:], start=1):
        grads = [gradient(other, step).double() for other in range(world_size)]
        mean = float((sum(grads) / world_size).square().sum())  # type: ignore[union-attr]
        square = sum(float(grad.square().sum()) for grad in grads) / world_size
        noise = (square - mean) * world_size / (world_size - 1)
        total, weight = 0.95 * total + 0.05 * (1 - noise / square), 0.95 * weight + 0.05
        assert norm == pytest.approx(math.sqrt(mean), rel=0.05)
        assert scale == pytest.approx(weight / total - 1, rel=0.25 if step > 10 else 0.5)
        assert same_on_all_ranks([torch.tensor([norm, scale])])
    assert scale == pytest.approx(DEVIATION**2 * NUMEL, rel=0.15)


def test_the_average_and_its_limits() -> None:
    tensors: dict[str, torch.Tensor] = {}
    noise = GradientNoise(tensors)
    assert noise.common is None and noise.scale is None and noise.square_ratio(0.25) == 1 and not tensors
    noise.add(math.nan)
    assert noise.common is None and not tensors
    noise.add(0.2)
    assert noise.common == pytest.approx(0.2) and noise.scale == pytest.approx(4)
    assert noise.square_ratio(0.25) == pytest.approx(0.4)
    noise.add(0.4)
    assert noise.common == pytest.approx((0.95 * 0.2 + 0.4) / 1.95)
    for _ in range(200):
        noise.add(-0.1)
    assert noise.scale is None and noise.square_ratio(0.25) == 0.25  # noise alone
    for _ in range(200):
        noise.add(1.1)
    assert noise.scale == 0 and noise.square_ratio(0.25) == 1  # no noise at all


def local_steps() -> tuple[torch.nn.Parameter, ZeroOneAdam]:
    p = torch.nn.Parameter(torch.zeros(NUMEL))
    options = {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 4, "local_step_clipper": 4}
    return p, ZeroOneAdam([p], lr=1e-3, **options)


def resumed(rank: int, world_size: int, folder: str) -> None:
    """A run that stops inside a local interval, and resumes, is the uninterrupted one, in bits."""
    p, optimizer = local_steps()
    steps(optimizer, p, rank, range(15))
    assert optimizer.ranks_are_apart
    save_state(optimizer, folder)
    packed, start = deepcopy(optimizer.state_dict()), p.detach().clone()
    whole = steps(optimizer, p, rank, range(15, 24))
    for way in ("checkpoint", "state dict"):
        again, other = local_steps()
        if way == "checkpoint":
            load_state(other, folder)
        else:
            again.data.copy_(start)
            other.load_state_dict(packed)
        rows = steps(other, again, rank, range(15, 24))
        assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(rows, whole, strict=True)), way
    true = math.sqrt(1 + DEVIATION**2 * NUMEL / 2)
    assert whole[-1][0] == pytest.approx(true, rel=0.05)  # of each rank, by its own gradient


def other_ranks(rank: int, world_size: int, folder: str) -> None:
    p, optimizer = local_steps()
    load_state(optimizer, folder)
    scale = optimizer.metrics()["gradient_noise_scale"]
    assert scale == pytest.approx(DEVIATION**2 * NUMEL, rel=0.3) and same_on_all_ranks([torch.tensor(scale)])
    optimizer.load_state_dict(torch.optim.AdamW([p]).state_dict())  # knows nothing of noise
    assert optimizer.metrics().get("gradient_noise_scale") is None


def test_its_state_is_in_checkpoints(tmp_path: Path) -> None:
    run_ranks(2, resumed, str(tmp_path))
    run_ranks(3, other_ranks, str(tmp_path))
