"""A compressed optimizer attaches itself to the hosts; plain DDP and plain loops have public functions."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.harness import run_ranks, run_ranks_expecting_error
from tests.support.launching import run, run_python
from tests.support.trainer_runs import same_on_all_ranks

SCRIPT = str(Path(__file__).parents[1] / "support" / "programs" / "stock_hosts.py")
STEPS, FREEZE = 6, 2


@pytest.mark.parametrize("host", ["trainer", "accelerator"])
def test_a_stock_host_leaves_gradients_local_after_the_registration(host: str) -> None:
    done = run_python([SCRIPT, host], ranks=2)
    for rank in (0, 1):
        assert f"rank {rank}: [False, False, True, True]" in done.stdout, done.stdout + done.stderr
    assert "is not in use" not in done.stderr


@pytest.mark.parametrize("host", ["trainer", "accelerator"])
def test_construction_changes_no_host_and_the_optimizer_says_that_it_has_no_hook(host: str) -> None:
    done = run_python([SCRIPT, host, "unregistered"], ranks=2)
    for rank in (0, 1):
        assert f"rank {rank}: [False, False, False, False]" in done.stdout, done.stdout + done.stderr
    assert done.stderr.count("is not in use") == 1 and "hf_compressopt.register()" in done.stderr


def test_construction_loads_no_host() -> None:
    code = """
import sys, torch
from hf_compressopt import OnebitAdam
OnebitAdam([torch.zeros(3, requires_grad=True)])
print([name for name in ("transformers", "accelerate") if name in sys.modules])
"""
    assert run([sys.executable, "-c", code]).stdout.strip() == "[]"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 17), nn.Tanh(), nn.Linear(17, 3))


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * rank + step))
    return model(inputs).square().mean()


def train_ddp(rank: int, world_size: int, how: str) -> dict[str, Any]:
    from hf_compressopt import OnebitAdam, attach_ddp, average_gradients

    inner = network()
    optimizer = OnebitAdam(inner.parameters(), lr=1e-2, freeze_step=FREEZE, scale_block=64)
    model: Any = inner if how == "loop" else DistributedDataParallel(inner)
    if how == "hook":
        attach_ddp(model, OnebitAdam(inner.parameters(), freeze_step=1))  # one that is given up again
        assert attach_ddp(model, optimizer).optimizers == (optimizer,)
    differ = []
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        if how == "loop":
            average_gradients(optimizer)
        grads = [torch.empty_like(inner[0].weight) for _ in range(world_size)]
        dist.all_gather(grads, inner[0].weight.grad)
        differ.append(not torch.equal(grads[0], grads[-1]))
        optimizer.step()
        optimizer.zero_grad()
    params = [p.detach().clone() for p in inner.parameters()]
    return {"params": params, "alike": same_on_all_ranks(params), "differ": differ}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ddp_with_the_hook_and_a_plain_loop_leave_gradients_local(world_size: int) -> None:
    hooked, looped = run_ranks(world_size, train_ddp, "hook"), run_ranks(world_size, train_ddp, "loop")
    local = [False] * FREEZE + [world_size > 1] * (STEPS - FREEZE)
    for a, b in zip(hooked, looped, strict=True):
        assert a["alike"] and b["alike"] and a["differ"] == b["differ"] == local
        for p, q in zip(a["params"], b["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)  # DDP's buckets are others, and so are its sums


def partly_unused(rank: int, world_size: int) -> dict[str, Any]:
    from hf_compressopt import OnebitAdam, average_gradients

    params = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    params[3].requires_grad_(False)
    for index in [0] if rank else [0, 1]:  # rank 0 alone has a gradient of the second; nobody has one of the third
        params[index].grad = torch.full((3,), 1.0 + rank + index)
    average_gradients(iter(params))
    grads = [None if p.grad is None else p.grad.tolist() for p in params]
    half = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    half.grad = torch.full((5,), float(rank), dtype=torch.bfloat16)
    average_gradients([params[0], half])
    expert = nn.Parameter(torch.zeros(2))
    group = dist.new_group([0, 1])
    optimizer = OnebitAdam([{"params": [params[1]]}, {"params": [expert], "process_group": group}])
    expert.grad = torch.full((2,), float(rank))
    average_gradients(optimizer)
    return {"grads": grads, "half": half.grad.float().tolist(), "expert": expert.grad.tolist()}


def test_average_gradients_takes_missing_gradients_for_zero() -> None:
    for rank, found in enumerate(run_ranks(2, partly_unused)):
        assert found["grads"] == [[1.5] * 3, [1.0] * 3, None, None]
        assert found["half"] == [0.5] * 5 and found["expert"] == [float(rank)] * 2


def misuse(rank: int, world_size: int, what: str) -> None:
    from hf_compressopt import OnebitAdam, attach_ddp, average_gradients

    model = network()
    if what == "no ddp":
        attach_ddp(model, OnebitAdam(model.parameters()))  # type: ignore[arg-type]
    if what == "no plan":
        attach_ddp(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    if what == "group":
        average_gradients(OnebitAdam(model.parameters()), dist.group.WORLD)
    if what == "sparse":
        table = nn.Embedding(3, 2, sparse=rank == 1)
        table(torch.tensor([1])).sum().backward()
        average_gradients(table.parameters())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no ddp", "TypeError: model must be a DistributedDataParallel"),
        ("no plan", "TypeError: optimizers must be compressed optimizers"),
        ("group", "ValueError: process_group belongs to parameters"),
        ("sparse", "TypeError: sparse gradients are not supported"),
    ],
)
def test_misuse_is_refused_on_all_ranks(what: str, said: str) -> None:
    errors = run_ranks_expecting_error(2, misuse, what)
    assert all(text.startswith(said) for text in errors.values()), errors
