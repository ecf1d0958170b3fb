"""Param groups with a process group of their own: experts that only some of the ranks hold."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import CompressOptAccelerator, OnebitAdam
from tests.oracles.steps import same
from tests.support import family
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.trainer_runs import use_accelerate

SCHEDULES: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 4, "local_step_scaler": 4},
    "OnebitLamb": {"freeze_step": 3},
}
STEPS = 12


def expert_of(rank: int, world_size: int) -> int:
    return rank % 2


def expert_group(rank: int, world_size: int) -> dist.ProcessGroup:
    """The group of the ranks that hold this rank's expert; every rank takes part in making all of them."""
    groups = [dist.new_group([r for r in range(world_size) if expert_of(r, world_size) == e]) for e in (0, 1)]
    return groups[expert_of(rank, world_size)]


def make(rank: int, world_size: int) -> tuple[nn.Parameter, nn.Parameter]:
    dense = nn.Parameter(torch.randn(7, 9, generator=torch.Generator().manual_seed(0)))
    seed = 1 + expert_of(rank, world_size)
    expert = nn.Parameter(torch.randn(3 + 4 * seed, 5, generator=torch.Generator().manual_seed(seed)))
    return dense, expert


def gradient(p: Tensor, rank: int, step: int, what: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + what))


def optimizer_of(name: str, params: Any, **options: Any) -> Any:
    return family.optimizer_of(name, params, **{"weight_decay": 0.1, "scale_block": 16, **SCHEDULES[name], **options})


def mixed_optimizer(
    name: str, rank: int, world_size: int, group: Any = None, **options: Any
) -> tuple[nn.Parameter, nn.Parameter, Any]:
    dense, expert = make(rank, world_size)
    own = {"params": [expert], "process_group": group or expert_group(rank, world_size)}
    groups = [{"params": [dense]}, own]
    return dense, expert, optimizer_of(name, groups, **options)


def give(optimizer: Any, dense: nn.Parameter, expert: nn.Parameter, rank: int, step: int) -> None:
    """Set this rank's gradients; those of the dense parameter are averaged where the step wants it, as DDP does."""
    dense.grad, expert.grad = gradient(dense, rank, step, 0), gradient(expert, rank, step, 1)
    if optimizer.plan.reduce_grads:
        dense.grad /= dist.get_world_size()
        dist.all_reduce(dense.grad)


def take_steps(optimizer: Any, dense: nn.Parameter, expert: nn.Parameter, rank: int, steps: range) -> None:
    for step in steps:
        give(optimizer, dense, expert, rank, step)
        optimizer.step()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
@on_ranks()
def test_each_group_does_what_an_optimizer_of_its_own_would(rank: int, world_size: int, name: str) -> None:
    """Dense and expert parameters in one optimizer, and each in an optimizer of its own over its own ranks."""
    group = expert_group(rank, world_size)
    for cap in (25.0, 40 * 4 / 2**20):
        dense, expert, mixed = mixed_optimizer(name, rank, world_size, group, bucket_cap_mb=cap)
        take_steps(mixed, dense, expert, rank, range(STEPS))
        lone_dense, lone_expert = make(rank, world_size)
        first = optimizer_of(name, [lone_dense], bucket_cap_mb=cap)
        second = optimizer_of(name, [lone_expert], bucket_cap_mb=cap, process_group=group)
        for step in range(STEPS):
            give(first, lone_dense, lone_expert, rank, step)
            if second.plan.reduce_grads:
                lone_expert.grad *= 1 / dist.get_world_size(group)
                dist.all_reduce(lone_expert.grad, group=group)
            first.step()
            second.step()
        assert torch.equal(dense, lone_dense) and torch.equal(expert, lone_expert)


@on_ranks(3)
def test_lamb_unites_the_scales_of_all_tensors_whoever_holds_them(rank: int, world_size: int) -> None:
    """Expert 0 is on ranks 0 and 2, expert 1 on rank 1."""
    dense, expert, optimizer = mixed_optimizer("OnebitLamb", rank, world_size)
    take_steps(optimizer, dense, expert, rank, range(3))
    states = [optimizer.state[p] for p in (dense, expert)]
    scales = [float(s["exp_avg"].double().norm()) / s["exp_avg"].numel() ** 0.5 for s in states]
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, scales)
    united = (everywhere[0][0] + everywhere[0][1] + everywhere[1][1]) / 3
    assert [float(s["scaling_coeff"]) for s in states] == pytest.approx([united / scale for scale in scales], rel=1e-6)
    take_steps(optimizer, dense, expert, rank, range(3, STEPS))
    assert same_on_all_ranks([dense])
    experts: list[Any] = [None] * world_size
    dist.all_gather_object(experts, expert.detach())
    assert torch.equal(experts[0], experts[2])


def clipped_norms(rank: int, world_size: int, name: str, clip: str) -> list[dict[str, Any]]:
    """For each step its plan, the norm that clipping reports, and this rank's dense and expert gradients before it."""
    dense, expert, optimizer = mixed_optimizer(name, rank, world_size, clip=clip)
    rows = []
    for step in range(STEPS):
        give(optimizer, dense, expert, rank, step)
        before = [p.grad.double() for p in (dense, expert)]
        plan, norm = optimizer.plan, float(optimizer.clip_grad_norm_(0.5, [dense, expert]))
        after = sum(float(p.grad.double().square().sum()) for p in (dense, expert))
        expected = sum(float(grad.square().sum()) for grad in before) * min(1.0, 0.5 / norm) ** 2
        assert after == pytest.approx(expected, rel=1e-4)
        rows.append({"plan": plan, "norm": norm, "grads": before, "noise": None})
        optimizer.step()
        rows[-1]["noise"] = optimizer.metrics().get("gradient_noise_scale")
    return rows


def test_the_norm_is_alike_everywhere_and_counts_every_expert_once() -> None:
    results = run_ranks(3, clipped_norms, "OnebitAdam", "local")
    for rows in zip(*results, strict=True):
        dense, experts = ([float(row["grads"][i].square().sum()) for row in rows] for i in (0, 1))
        assert {row["norm"] for row in rows} == {rows[0]["norm"]}
        expected = sum(dense) / 3 + (experts[0] + experts[2]) / 2 + experts[1]
        assert rows[0]["norm"] == pytest.approx(expected**0.5, rel=1e-5)


@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
def test_the_norm_of_the_mean_has_a_sketch_for_each_process_group(name: str) -> None:
    """Against float64: the ranks 0 and 2 share an expert, rank 1 has its own. A small sketch is exact."""
    shared = ((0, (0, 1, 2)), (1, (0, 2)))  # the dense parameter and expert 0, by ranks; expert 1 is nobody else's
    total, weight = 0.0, 0.0
    for rows in zip(*run_ranks(3, clipped_norms, name, "sketch"), strict=True):
        plan, grads = rows[0]["plan"], [row["grads"] for row in rows]
        means = [float((sum(grads[r][i] for r in ranks) / len(ranks)).square().sum()) for i, ranks in shared]
        squares = [sum(float(grads[r][i].square().sum()) for r in ranks) / len(ranks) for i, ranks in shared]
        alone = float(grads[1][1].square().sum())
        if plan.agree:
            assert {row["norm"] for row in rows} == {rows[0]["norm"]}
            assert rows[0]["norm"] == pytest.approx((sum(means) + alone) ** 0.5, rel=1e-5)
        else:
            common = min(1.0, max(0.0, total / weight))
            ratios = {ranks: common + (1 - common) / ranks for ranks in (1, 2, 3)}
            for row, holders in zip(rows, (2, 1, 2), strict=True):
                dense, expert = (float(grad.square().sum()) for grad in row["grads"])
                assert row["norm"] ** 2 == pytest.approx(dense * ratios[3] + expert * ratios[holders], rel=1e-5)
        if plan.agree or plan.synchronize:
            local = [i for i, (_, ranks) in enumerate(shared) if i or not plan.reduce_grads]
            divided = sum(squares[i] / len(shared[i][1]) for i in local)
            found = (sum(means[i] for i in local) - divided) / (sum(squares[i] for i in local) - divided)
            total, weight = 0.95 * total + 0.05 * found, 0.95 * weight + 0.05
        scale = max(0.0, weight / total - 1) if total > 0 else None
        assert [row["noise"] for row in rows] == [None if scale is None else pytest.approx(scale, rel=1e-4)] * 3


@pytest.mark.parametrize("steps", [1, 5], ids=["warmup", "compressed"])
@on_ranks(3)
def test_an_overflow_in_one_expert_skips_the_step_everywhere(rank: int, world_size: int, steps: int) -> None:
    dense, expert, optimizer = mixed_optimizer("OnebitAdam", rank, world_size)
    take_steps(optimizer, dense, expert, rank, range(steps))
    before = [dense.detach().clone(), expert.detach().clone()]
    dense.grad = torch.ones_like(dense)
    expert.grad = torch.full_like(expert, torch.inf if rank == 1 else 1.0)
    optimizer.step()
    assert same(before, [dense, expert]) and optimizer.step_was_skipped


@on_ranks(4)
def test_a_freeze_step_is_found_alike_though_variances_differ(rank: int, world_size: int) -> None:
    search: dict[str, Any] = {"freeze_step": "auto", "max_freeze_step": 40, "min_freeze_step": 1}
    search |= {"lr": 1e-3, "weight_decay": 0.0, "scale_block": 4096, "betas": (0.5, 0.8), "freeze_threshold": 0.7}
    dense, expert, optimizer = mixed_optimizer("OnebitAdam", rank, world_size, **search)
    take_steps(optimizer, dense, expert, rank, range(45))
    assert isinstance(optimizer.freeze_step, int) and 5 < optimizer.freeze_step < 40
    assert same_on_all_ranks([torch.tensor(optimizer.freeze_step)])


@on_ranks(3)
def test_ranks_that_do_not_fit_are_found_before_anything_hangs(rank: int, world_size: int) -> None:
    group = expert_group(rank, world_size)
    dense, expert = make(rank, world_size)
    own = {"params": [expert], "process_group": group}
    optimizer = optimizer_of("OnebitAdam", [{"params": [dense]}, own] if rank == 0 else [{"params": [dense]}])
    dense.grad = torch.ones_like(dense)
    with pytest.raises(ValueError, match="param groups with a process_group of their own"):
        optimizer.clip_grad_norm_(1.0)
    of_another_size = nn.Parameter(torch.zeros(4 if rank == 2 else 3))
    groups = [{"params": [dense]}, {"params": [of_another_size], "process_group": group}]
    said = r"rank 0: .*parameter sizes" if rank == 1 else "parameter sizes"
    with pytest.raises((ValueError, RuntimeError), match=said):
        take_steps(optimizer_of("OnebitAdam", groups), dense, of_another_size, rank, range(1))
    alone = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match="not a member"):
            optimizer_of("OnebitAdam", [{"params": [dense]}, {"params": [expert], "process_group": alone}])


@pytest.mark.parametrize(("ignored", "world_size"), [(False, 2), (True, 3)])
@on_ranks()
def test_accelerate_refuses_experts_that_ddp_would_average(rank: int, world_size: int, ignored: bool) -> None:
    use_accelerate(rank, world_size)
    model = nn.Sequential(OrderedDict(dense=nn.Linear(20, 20), expert=nn.Linear(20, 20)))
    if ignored:
        names = ["expert.weight", "expert.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    own = {"params": model.expert.parameters(), "process_group": expert_group(rank, world_size)}
    optimizer = OnebitAdam([{"params": model.dense.parameters()}, own], freeze_step=2, warmup_bits=4)
    errors = [state.errors for state in optimizer._states]
    accelerator = CompressOptAccelerator(cpu=True)
    if not ignored:
        with pytest.raises(ValueError, match="expert.weight is in a param group with a process_group of its own"):
            accelerator.prepare(model, optimizer)
        return
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for step in range(4):
        x = torch.randn(2, 20, generator=torch.Generator().manual_seed(10 * rank + step))
        accelerator.backward(wrapped(x).square().sum())
        if step < 2:  # by DDP's hook, which leaves the experts alone
            assert errors[0].pending.worker.any() and errors[1].pending is None
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all_ranks(model.dense.parameters())
    experts: list[Any] = [None] * world_size
    dist.all_gather_object(experts, [p.tolist() for p in model.expert.parameters()])
    assert experts[0] == experts[2] != experts[1]
