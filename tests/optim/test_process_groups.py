"""Param groups with a process group of their own: experts that only some of the ranks hold."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.harness import run_ranks, run_ranks_expecting_error
from tests.support.trainer_runs import use_accelerate

OPTIONS: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 4, "local_step_clipper": 4},
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


def averaged(grad: Tensor) -> Tensor:
    """Average gradients as DDP does."""
    grad = grad / dist.get_world_size()
    dist.all_reduce(grad)
    return grad


def optimizer_of(name: str, params: Any, **options: Any) -> Any:
    import hf_compressopt

    return getattr(hf_compressopt, name)(params, lr=0.01, weight_decay=0.1, scale_block=16, **OPTIONS[name], **options)


def take_steps(optimizer: Any, dense: nn.Parameter, expert: nn.Parameter, rank: int, steps: range) -> None:
    for step in steps:
        grad = gradient(dense, rank, step, 0)
        dense.grad = averaged(grad) if optimizer.plan.reduce_grads else grad
        expert.grad = gradient(expert, rank, step, 1)
        optimizer.step()


def together_and_apart(rank: int, world_size: int, name: str, cap: float) -> list[tuple[Tensor, Tensor]]:
    """Dense and expert parameters in one optimizer, and each in an optimizer of its own over its own ranks."""
    group = expert_group(rank, world_size)
    dense, expert = make(rank, world_size)
    mixed = [{"params": [dense]}, {"params": [expert], "process_group": group}]
    take_steps(optimizer_of(name, mixed, bucket_cap_mb=cap), dense, expert, rank, range(STEPS))

    lone_dense, lone_expert = make(rank, world_size)
    first = optimizer_of(name, [lone_dense], bucket_cap_mb=cap)
    second = optimizer_of(name, [lone_expert], bucket_cap_mb=cap, process_group=group)
    members = dist.get_world_size(group)
    for step in range(STEPS):
        grad = gradient(lone_dense, rank, step, 0)
        lone_dense.grad = averaged(grad) if first.plan.reduce_grads else grad
        lone_expert.grad = gradient(lone_expert, rank, step, 1)
        if second.plan.reduce_grads:
            lone_expert.grad *= 1 / members
            dist.all_reduce(lone_expert.grad, group=group)
        first.step()
        second.step()
    return [(dense.detach(), lone_dense.detach()), (expert.detach(), lone_expert.detach())]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
def test_each_group_does_what_an_optimizer_of_its_own_would(name: str, world_size: int) -> None:
    for cap in (25.0, 40 * 4 / 2**20):
        for pairs in run_ranks(world_size, together_and_apart, name, cap):
            for mixed, lone in pairs:
                assert torch.equal(mixed, lone)


def lamb_run(rank: int, world_size: int) -> tuple[list[Tensor], list[float], list[float]]:
    group = expert_group(rank, world_size)
    dense, expert = make(rank, world_size)
    optimizer = optimizer_of("OnebitLamb", [{"params": [dense]}, {"params": [expert], "process_group": group}])
    take_steps(optimizer, dense, expert, rank, range(3))
    states = [optimizer.state[p] for p in (dense, expert)]
    scales = [float(s["exp_avg"].double().norm()) / s["exp_avg"].numel() ** 0.5 for s in states]
    coefficients = [float(s["scaling_coeff"]) for s in states]
    take_steps(optimizer, dense, expert, rank, range(3, STEPS))
    return [dense.detach(), expert.detach()], scales, coefficients


def test_lamb_unites_the_scales_of_all_tensors_whoever_holds_them() -> None:
    results = run_ranks(3, lamb_run)  # expert 0 on ranks 0 and 2, expert 1 on rank 1
    united = (results[0][1][0] + results[0][1][1] + results[1][1][1]) / 3
    for _, scales, coefficients in results:
        assert coefficients == pytest.approx([united / scale for scale in scales], rel=1e-6)
    assert all(torch.equal(params[0], results[0][0][0]) for params, _, _ in results)
    assert torch.equal(results[0][0][1], results[2][0][1])


def clipped_norms(rank: int, world_size: int, name: str, clip: str) -> list[dict[str, Any]]:
    """For each step its plan, the norm that clipping reports, and this rank's dense and expert gradients before it."""
    group = expert_group(rank, world_size)
    dense, expert = make(rank, world_size)
    optimizer = optimizer_of(name, [{"params": [dense]}, {"params": [expert], "process_group": group}], clip=clip)
    rows = []
    for step in range(STEPS):
        grad = gradient(dense, rank, step, 0)
        dense.grad = averaged(grad) if optimizer.plan.reduce_grads else grad
        expert.grad = gradient(expert, rank, step, 1)
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


def overflow(rank: int, world_size: int, steps: int) -> bool:
    group = expert_group(rank, world_size)
    dense, expert = make(rank, world_size)
    optimizer = optimizer_of("OnebitAdam", [{"params": [dense]}, {"params": [expert], "process_group": group}])
    take_steps(optimizer, dense, expert, rank, range(steps))
    before = [dense.detach().clone(), expert.detach().clone()]
    dense.grad = torch.ones_like(dense)
    expert.grad = torch.full_like(expert, torch.inf if rank == 1 else 1.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, (dense, expert), strict=True))
    return bool(optimizer.step_was_skipped)


@pytest.mark.parametrize("steps", [1, 5], ids=["warmup", "compressed"])
def test_an_overflow_in_one_expert_skips_the_step_everywhere(steps: int) -> None:
    assert run_ranks(3, overflow, steps) == [True] * 3


def resumed(rank: int, world_size: int, name: str, folder: str, stop: int) -> list[tuple[Tensor, Tensor]]:
    from hf_compressopt import load_state, save_state

    group = expert_group(rank, world_size)
    mask = torch.arange(5) < 3 + expert_of(rank, world_size)
    names = ["dense", f"expert{expert_of(rank, world_size)}"]

    def build() -> tuple[nn.Parameter, nn.Parameter, Any]:
        dense, expert = make(rank, world_size)
        groups = [{"params": [dense]}, {"params": [expert], "process_group": group, "exp_avg_mask": mask}]
        return dense, expert, optimizer_of(name, groups)

    dense, expert, optimizer = build()
    take_steps(optimizer, dense, expert, rank, range(stop))
    save_state(optimizer, folder, names=names)
    saved = [dense.detach().clone(), expert.detach().clone()]
    take_steps(optimizer, dense, expert, rank, range(stop, STEPS))

    other_dense, other_expert, other = build()
    with torch.no_grad():
        other_dense.copy_(saved[0])
        other_expert.copy_(saved[1])
    other.param_groups[1].pop("exp_avg_mask")
    load_state(other, folder, names=names)
    assert torch.equal(other.param_groups[1]["exp_avg_mask"], mask)
    take_steps(other, other_dense, other_expert, rank, range(stop, STEPS))
    return [(dense.detach(), other_dense.detach()), (expert.detach(), other_expert.detach())]


@pytest.mark.parametrize("name", OPTIONS)
def test_resume_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    for stop in (2, 7, 9):
        for pairs in run_ranks(3, resumed, name, str(tmp_path / str(stop)), stop):
            assert all(torch.equal(uninterrupted, again) for uninterrupted, again in pairs)


def copies(rank: int, world_size: int) -> bool:
    from copy import deepcopy
    from io import BytesIO

    group = expert_group(rank, world_size)
    dense, expert = make(rank, world_size)
    optimizer = optimizer_of("OnebitAdam", [{"params": [dense]}, {"params": [expert], "process_group": group}])
    take_steps(optimizer, dense, expert, rank, range(5))
    assert deepcopy(optimizer).metrics()["step"] == 5
    assert "process_group" not in repr(optimizer)
    file = BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    take_steps(optimizer, dense, expert, rank, range(5, 7))
    return optimizer.metrics()["step"] == 7 and optimizer.metrics()["compression_ratio"] > 1


def test_copies_and_state_dicts_do_not_trip_over_the_process_group() -> None:
    assert run_ranks(2, copies) == [True] * 2


def auto_freeze(rank: int, world_size: int) -> int:
    from hf_compressopt import OnebitAdam

    group = expert_group(rank, world_size)
    dense, expert = make(rank, world_size)
    groups = [{"params": [dense]}, {"params": [expert], "process_group": group}]
    search: dict[str, Any] = {"freeze_step": "auto", "max_freeze_step": 40, "min_freeze_step": 1}
    optimizer = OnebitAdam(groups, betas=(0.5, 0.8), freeze_threshold=0.7, **search)
    take_steps(optimizer, dense, expert, rank, range(45))
    assert isinstance(optimizer.freeze_step, int)
    return optimizer.freeze_step


def test_a_freeze_step_is_found_alike_though_variances_differ() -> None:
    found = run_ranks(4, auto_freeze)
    assert len(set(found)) == 1 and 5 < found[0] < 40, found


def one_without(rank: int, world_size: int) -> None:
    group = expert_group(rank, world_size)
    dense, expert = make(rank, world_size)
    own = {"params": [expert], "process_group": group}
    optimizer = optimizer_of("OnebitAdam", [{"params": [dense]}, own] if rank == 0 else [{"params": [dense]}])
    dense.grad = torch.ones_like(dense)
    optimizer.clip_grad_norm_(1.0)


def different_sizes(rank: int, world_size: int) -> None:
    group = expert_group(rank, world_size)
    dense, _ = make(rank, world_size)
    expert = nn.Parameter(torch.zeros(4 if rank == 2 else 3))
    optimizer = optimizer_of("OnebitAdam", [{"params": [dense]}, {"params": [expert], "process_group": group}])
    take_steps(optimizer, dense, expert, rank, range(1))


def not_a_member(rank: int, world_size: int) -> None:
    group = dist.new_group([0])
    dense, expert = make(rank, world_size)
    optimizer_of("OnebitAdam", [{"params": [dense]}, {"params": [expert], "process_group": group}])
    if rank == 0:
        raise ValueError("rank 0 is a member")


def test_ranks_that_do_not_fit_are_found_before_anything_hangs() -> None:
    for text in run_ranks_expecting_error(2, one_without).values():
        assert "param groups with a process_group of their own" in text
    errors = run_ranks_expecting_error(3, different_sizes)
    assert "parameter sizes" in errors[0] and "parameter sizes" in errors[2] and "rank 0: " in errors[1], errors
    assert "not a member" in run_ranks_expecting_error(2, not_a_member)[1]


def ddp_averages_experts(rank: int, world_size: int, ignored: bool) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from hf_compressopt import CompressOptAccelerator, OnebitAdam

    use_accelerate(rank, world_size)
    group = expert_group(rank, world_size)
    model = nn.Sequential(OrderedDict(dense=nn.Linear(3, 3), expert=nn.Linear(3, 3)))
    if ignored:
        names = ["expert.weight", "expert.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    groups = [{"params": model.dense.parameters()}, {"params": model.expert.parameters(), "process_group": group}]
    accelerator = CompressOptAccelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, OnebitAdam(groups, freeze_step=2))
    for step in range(4):
        x = torch.full((2, 3), 1.0 + rank + step)
        accelerator.backward(model(x).square().sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_accelerate_refuses_experts_that_ddp_would_average() -> None:
    for text in run_ranks_expecting_error(2, ddp_averages_experts, False).values():
        assert "expert.weight is in a param group with a process_group of its own" in text
    run_ranks(2, ddp_averages_experts, True)
