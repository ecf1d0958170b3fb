"""clip="sketch": local gradients are clipped by the norm of their mean, which every rank finds from a small message."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_compressopt import OnebitAdam, ZeroOneAdam, load_state, save_state
from hf_compressopt.optim.gradients import GradientNoise, sketch_size
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.logs import log_lines

SHAPES = [(300, 41), (77,), (0,), (5, 6, 7), (900,)]
MOST = 4 / math.sqrt(2 * sketch_size(sum(math.prod(shape) for shape in SHAPES)))  # four standard deviations


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    """A common part, and noise of its own on each rank, of more than its size."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (step, 1000 * (rank + 1) + step))
    return [torch.randn(s, generator=common) + 2 * torch.randn(s, generator=own) for s in SHAPES]


def norm_of_mean(world_size: int, step: int, numbers: Sequence[int] = range(len(SHAPES))) -> float:
    rows = [[gradients(rank, step)[i].double() for rank in range(world_size)] for i in numbers]
    return math.sqrt(sum(float((sum(row) / world_size).square().sum()) for row in rows))  # type: ignore[union-attr]


@pytest.mark.parametrize("numbers", [None, [0, 2, 4], [4]])
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_the_norm_is_that_of_the_mean_gradient(rank: int, world_size: int, numbers: list[int] | None) -> None:
    found: dict[str, list[float]] = {"sketch": [], "local": []}
    for clip, norms in found.items():
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer = OnebitAdam(groups, lr=1e-3, freeze_step=1, scale_block=64, clip=clip)
        for step in range(1, 9):
            for i, (p, grad) in enumerate(zip(params, gradients(rank if step > 1 else 0, step), strict=True)):
                p.grad = None if i == 1 and rank == 1 and step > 1 else grad  # one rank has no gradient for it
            norms.append(float(optimizer.clip_grad_norm_(0.5, numbers and [params[i] for i in numbers])))
            optimizer.step()
        assert same_on_all_ranks([torch.tensor(norms), *params])
    places = list(range(len(SHAPES))) if numbers is None else numbers
    for step, (sketched, local) in enumerate(zip(found["sketch"], found["local"], strict=True), start=1):
        if step > 1:
            true = norm_of_mean(world_size, step, [i for i in places if i != 1])
            assert (1 - MOST) * true < sketched < (1.03 if 1 in places else 1.0) * (1 + MOST) * true
            assert sketched < 0.9 * local


@on_ranks(2)
def test_parameters_of_no_param_group_count_too(rank: int, world_size: int) -> None:
    mine, others = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((40, 5), (300,)))
    frozen = torch.nn.Parameter(torch.zeros(9), requires_grad=False)
    optimizer = OnebitAdam([mine], lr=1e-3, freeze_step=1)
    for step in range(2):
        mine.grad = gradients(rank * step, 1)[0].flatten()[:200].view(40, 5)
        others.grad = gradients(rank * step, 1)[0].flatten()[200:500]
        norm = float(optimizer.clip_grad_norm_(0.5, [others, frozen, mine]))
        optimizer.step()
    mean = sum(gradients(rank, 1)[0].flatten()[:500].double() for rank in range(2)) / 2
    # of a sketch of 64 numbers, as 200 elements have it
    assert norm == pytest.approx(float(mean.norm()), rel=4 / math.sqrt(2 * 64))  # type: ignore[union-attr]


@pytest.mark.parametrize(("numel", "size"), [(40, 64), (1792, 64), (26_624, 1024), (70_000, 4096)])
@on_ranks(2)
def test_the_sketch_of_a_small_model_is_small_and_without_bias(
    rank: int, world_size: int, numel: int, size: int
) -> None:
    """By the norm of the first compressed step of each run, as a share of the true one."""
    found = []
    for seed in range(60):
        own, common = (torch.Generator().manual_seed(s) for s in (1000 * (seed + 1) + rank, seed))
        p = torch.nn.Parameter(torch.zeros(numel))
        optimizer = OnebitAdam([p], freeze_step=1, scale_block=64, bucket_cap_mb=1)
        p.grad = torch.ones(numel)
        optimizer.step()
        p.grad = torch.randn(numel, generator=common) + torch.randn(numel, generator=own)
        mean = p.grad.clone()
        optimizer.communicator.all_reduce(mean).wait()
        before = optimizer.traffic.total_bytes
        norm = float(optimizer.clip_grad_norm_(1.0))
        found.append(norm * world_size / float(mean.double().norm()))
        message = optimizer.traffic.total_bytes - before
    assert same_on_all_ranks([torch.tensor(found)]) and size == sketch_size(numel)
    assert 4 * size < message < 4 * size + 200  # no more than a fourth of a byte per element, if it has 1024
    squares = torch.tensor(found).double().square()
    deviation = math.sqrt(2 / size)  # of the square; the seed is the step's, and so the sketch is the same
    assert abs(float(squares.mean()) - 1) < 4 * deviation / math.sqrt(60)
    assert 0.5 * deviation < float(squares.std()) < 1.5 * deviation or numel == 40


@pytest.mark.parametrize(
    ("numel", "scale_block", "interval", "small"),
    [
        (26_624, 512, 16, ""),
        (400, 4096, 16, "scale_block=4096"),
        (26_624, 8, 16, "scale_block=8"),
        (26_624, 512, 1, "scale_block=512 or variance_interval=1"),
    ],
)
@on_ranks(2)
def test_messages_that_are_larger_than_4_bits_are_warned_of_once(
    rank: int, world_size: int, numel: int, scale_block: int, interval: int, small: str
) -> None:
    p = torch.nn.Parameter(torch.zeros(numel))
    optimizer = OnebitAdam([p], freeze_step=1, scale_block=scale_block, variance_interval=interval)
    with log_lines() as lines:
        for step in range(4):
            p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + (rank if step else 0)))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    ratio = optimizer.metrics()["compression_ratio"]
    assert ratio < 7.75 if small else ratio > 9
    told = [line for line in lines if "gradients in 4 bits" in line]
    assert len(told) == (1 if small and rank == 0 else 0)
    assert all(f"or {small} is too small" in line for line in told)


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


def after_local_steps(rank: int, world_size: int, folder: str, saves: bool) -> None:
    """Save inside an interval, where each rank clips by its own gradient; or load that, and then AdamW's state."""
    p = torch.nn.Parameter(torch.zeros(NUMEL))
    options = {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 4, "local_step_clipper": 4}
    optimizer = ZeroOneAdam([p], lr=1e-3, **options)
    if saves:
        steps(optimizer, p, rank, range(15))
        assert optimizer.ranks_are_apart
        save_state(optimizer, folder)
        norm, *_ = steps(optimizer, p, rank, range(15, 24))[-1]
        assert norm == pytest.approx(math.sqrt(1 + DEVIATION**2 * NUMEL / 2), rel=0.05)
        return
    load_state(optimizer, folder)
    scale = optimizer.metrics()["gradient_noise_scale"]
    assert scale == pytest.approx(DEVIATION**2 * NUMEL, rel=0.3) and same_on_all_ranks([torch.tensor(scale)])
    optimizer.load_state_dict(torch.optim.AdamW([p]).state_dict())  # knows nothing of noise
    assert optimizer.metrics().get("gradient_noise_scale") is None


def test_its_state_goes_to_other_ranks(tmp_path: Path) -> None:
    run_ranks(2, after_local_steps, str(tmp_path), True)
    run_ranks(3, after_local_steps, str(tmp_path), False)


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
