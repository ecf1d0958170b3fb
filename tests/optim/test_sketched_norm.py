"""clip="sketch": local gradients are clipped by the norm of their mean, which every rank finds from a small message."""

import math
from typing import Any

import pytest
import torch

from hf_compressopt import OnebitAdam, OnebitLamb, ZeroOneAdam
from hf_compressopt.optim.agreement import sketch_size
from tests.support.harness import run_ranks, run_ranks_expecting_error
from tests.support.logs import log_lines

SHAPES = [(300, 41), (77,), (0,), (5, 6, 7), (900,)]
MOST = 4 / math.sqrt(2 * sketch_size(sum(math.prod(shape) for shape in SHAPES)))  # four standard deviations


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    """A common part, and noise of its own on each rank, of more than its size."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (step, 1000 * (rank + 1) + step))
    return [torch.randn(s, generator=common) + 2 * torch.randn(s, generator=own) for s in SHAPES]


def norm_of_mean(world_size: int, step: int, numbers: list[int]) -> float:
    total = 0.0
    for i in numbers:
        mean = sum(gradients(rank, step)[i].double() for rank in range(world_size)) / world_size
        total += float(mean.square().sum())
    return math.sqrt(total)


def norms(rank: int, world_size: int, clip: str, numbers: list[int] | None) -> list[float]:
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = OnebitAdam(groups, lr=1e-3, freeze_step=1, scale_block=64, clip=clip)
    found = []
    for step in range(1, 9):
        for i, (p, grad) in enumerate(zip(params, gradients(rank if step > 1 else 0, step), strict=True)):
            p.grad = None if i == 1 and rank == 1 and step > 1 else grad  # one rank has no gradient for it
        chosen = None if numbers is None else [params[i] for i in numbers]
        norm = float(optimizer.clip_grad_norm_(0.5, chosen))
        if step > 1:
            found.append(norm)
            optimizer.step()
        else:
            optimizer.step()
    return [*found, float(torch.cat([p.detach().flatten() for p in params]).double().sum())]


@pytest.mark.parametrize("numbers", [None, [0, 2, 4], [4]])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_norm_is_that_of_the_mean_gradient(world_size: int, numbers: list[int] | None) -> None:
    ranks = run_ranks(world_size, norms, "sketch", numbers)
    assert all(row == ranks[0] for row in ranks)  # the norms, and the parameters after them, in bits
    places = list(range(len(SHAPES))) if numbers is None else numbers
    for step, found in enumerate(ranks[0][:-1], start=2):
        true = norm_of_mean(world_size, step, [i for i in places if i != 1])
        assert (1 - MOST) * true < found < (1.03 if 1 in places else 1.0) * (1 + MOST) * true
    local = run_ranks(world_size, norms, "local", numbers)[0]
    assert all(mine < 0.9 * theirs for mine, theirs in zip(ranks[0][:-1], local[:-1], strict=True))


def with_others(rank: int, world_size: int) -> float:
    """Parameters of no optimizer, or of another one, are clipped together with these."""
    mine, others = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((40, 5), (300,)))
    frozen = torch.nn.Parameter(torch.zeros(9), requires_grad=False)
    optimizer = OnebitAdam([mine], lr=1e-3, freeze_step=1)
    for step in range(2):
        mine.grad = gradients(rank * step, 1)[0].flatten()[:200].view(40, 5)
        others.grad = gradients(rank * step, 1)[0].flatten()[200:500]
        norm = float(optimizer.clip_grad_norm_(0.5, [others, frozen, mine]))
        optimizer.step()
    return norm


def test_parameters_of_no_param_group_count_too() -> None:
    mean = sum(gradients(rank, 1)[0].flatten()[:500].double() for rank in range(2)) / 2
    for norm in run_ranks(2, with_others):
        # of a sketch of 64 numbers, as 200 elements have it
        assert norm == pytest.approx(float(mean.norm()), rel=4 / math.sqrt(2 * 64))  # type: ignore[union-attr]


def clipped_in_step(rank: int, world_size: int, bad: bool, form: str) -> dict[str, Any]:
    """max_grad_norm in step(), beside gradients that were clipped by the true norm of the mean before."""
    made: list[torch.optim.Optimizer] = []
    weights = []
    for clip in ("sketch", "by hand"):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        options = {"max_grad_norm": 1.0, "clip": "sketch"} if clip == "sketch" else {}
        optimizer = OnebitAdam(params, lr=1e-3, freeze_step=2, scale_block=64, eps=1e-3, state=form, **options)
        for step in range(1, 7):
            warm = step <= 2
            mine = [g.clone() for g in gradients(rank, step)]
            if warm:
                mine = [sum(g) / world_size for g in zip(*(gradients(r, step) for r in range(world_size)), strict=True)]
            if clip != "sketch":
                norm = norm_of_mean(world_size, step, list(range(len(SHAPES))))
                mine = [g * min(1.0, 1.0 / (norm + 1e-6)) for g in mine]
            if bad and step == 4 and rank == 1 and clip == "sketch":
                mine[0][3, 3] = math.inf
            for p, g in zip(params, mine, strict=True):
                p.grad = g
            optimizer.step()
        made.append(optimizer)
        weights.append(torch.cat([p.detach().flatten() for p in params]))
    return {"weights": weights, "skipped": made[0].skipped_steps}


def test_a_step_clips_by_the_norm_of_the_mean() -> None:
    for result in run_ranks(2, clipped_in_step, False, "float32"):  # 8 bits would round the two runs apart
        sketched, by_hand = result["weights"]
        assert result["skipped"] == 0
        assert float((sketched - by_hand).norm()) < MOST * float((by_hand - 1).norm())


def first_norms(rank: int, world_size: int, numel: int, seeds: range) -> tuple[list[float], float]:
    """The norm of the first compressed step of each run, as a share of the true one, and the bytes of the message."""
    found = []
    for seed in seeds:
        own, common = (torch.Generator().manual_seed(s) for s in (1000 * (seed + 1) + rank, seed))
        p = torch.nn.Parameter(torch.zeros(numel))
        optimizer = OnebitAdam([p], freeze_step=1, scale_block=64, bucket_cap_mb=1)
        p.grad = torch.ones(numel)
        optimizer.step()
        shared = torch.randn(numel, generator=common)
        p.grad = shared + torch.randn(numel, generator=own)
        mean = p.grad.clone()
        optimizer.communicator.all_reduce(mean).wait()
        before = optimizer.traffic.total_bytes
        norm = float(optimizer.clip_grad_norm_(1.0))
        found.append(norm * world_size / float(mean.double().norm()))
        message = optimizer.traffic.total_bytes - before
    return found, message


@pytest.mark.parametrize("numel", [40, 1792, 26_624, 70_000])
def test_the_sketch_of_a_small_model_is_small_and_without_bias(numel: int) -> None:
    (found, nbytes), (others, _) = run_ranks(2, first_norms, numel, range(60))
    assert found == others
    size = sketch_size(numel)
    assert size == {40: 64, 1792: 64, 26_624: 1024, 70_000: 4096}[numel]
    assert 4 * size < nbytes < 4 * size + 200  # no more than a fourth of a byte per element, if it has 1024
    squares = torch.tensor(found).double().square()
    deviation = math.sqrt(2 / size)  # of the square; the seed is the step's, and so the sketch is the same
    assert abs(float(squares.mean()) - 1) < 4 * deviation / math.sqrt(60)
    assert 0.5 * deviation < float(squares.std()) < 1.5 * deviation or numel == 40


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks() -> None:
    ranks = run_ranks(2, clipped_in_step, True, "compact")
    assert [result["skipped"] for result in ranks] == [1, 1]
    assert torch.equal(ranks[0]["weights"][0], ranks[1]["weights"][0])


@pytest.mark.parametrize("cls", [OnebitAdam, OnebitLamb, ZeroOneAdam])
def test_an_unknown_norm_is_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match=r"clip must be one of \['sketch', 'local'.*\], got 'mean'"):
        cls([torch.nn.Parameter(torch.zeros(3))], clip="mean")


def unlike(rank: int, world_size: int) -> None:
    p = torch.nn.Parameter(torch.zeros(9))
    optimizer = OnebitAdam([p], clip="sketch" if rank else "local")
    p.grad = torch.ones(9)
    optimizer.step()


def test_ranks_must_clip_alike() -> None:
    errors = run_ranks_expecting_error(2, unlike)
    assert all("differ from rank 0" in error for error in errors.values())


def few_parameters(rank: int, world_size: int, numel: int, scale_block: int) -> tuple[float, list[str]]:
    p = torch.nn.Parameter(torch.zeros(numel))
    optimizer = OnebitAdam([p], freeze_step=1, scale_block=scale_block)
    with log_lines() as lines:
        for step in range(4):
            p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + (rank if step else 0)))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    return optimizer.metrics()["compression_ratio"], [line for line in lines if "gradients in 4 bits" in line]


@pytest.mark.parametrize(("numel", "scale_block", "warns"), [(26_624, 512, 0), (400, 4096, 1), (26_624, 8, 1)])
def test_messages_that_are_larger_than_4_bits_are_warned_of_once(numel: int, scale_block: int, warns: int) -> None:
    (ratio, said), (_, silent) = run_ranks(2, few_parameters, numel, scale_block)
    assert (ratio < 7.75) == bool(warns) and len(said) == warns and not silent
    assert ratio > 9 or warns
