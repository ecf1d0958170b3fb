"""A compressed optimizer attaches itself to the hosts; plain DDP and plain loops have public functions."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import GradientCompression, OnebitAdam, attach_ddp, average_gradients
from tests.support.harness import on_ranks, same_on_all_ranks
from tests.support.launching import run, run_python
from tests.support.trainer_runs import loss_of, network

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


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_ddp_with_the_hook_and_a_plain_loop_leave_gradients_local(rank: int, world_size: int) -> None:
    found = []
    for how in ("hook", "loop"):
        inner = network()
        optimizer = OnebitAdam(inner.parameters(), lr=1e-2, freeze_step=FREEZE, scale_block=64)
        model: Any = inner if how == "loop" else DistributedDataParallel(inner)
        if how == "hook":
            attach_ddp(model, OnebitAdam(inner.parameters(), freeze_step=1))  # one that is given up again
            assert attach_ddp(model, optimizer).optimizers == (optimizer,)
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            if how == "loop":
                average_gradients(optimizer)
            assert same_on_all_ranks([inner[0].weight.grad]) == (step < FREEZE or world_size == 1)
            optimizer.step()
            optimizer.zero_grad()
        assert same_on_all_ranks(inner.parameters())
        found.append([p.detach() for p in inner.parameters()])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)  # DDP's buckets are others, and so are its sums


@on_ranks(2)
def test_average_gradients_takes_missing_gradients_for_zero(rank: int, world_size: int) -> None:
    params = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    params[3].requires_grad_(False)
    for index in [0] if rank else [0, 1]:  # rank 0 alone has a gradient of the second; nobody has one of the third
        params[index].grad = torch.full((3,), 1.0 + rank + index)
    average_gradients(iter(params))
    assert [None if p.grad is None else p.grad.tolist() for p in params] == [[1.5] * 3, [1.0] * 3, None, None]
    half = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    half.grad = torch.full((5,), float(rank), dtype=torch.bfloat16)
    average_gradients([params[0], half])
    assert half.grad.float().tolist() == [0.5] * 5
    expert = nn.Parameter(torch.zeros(2))
    group = dist.new_group([0, 1])
    optimizer = OnebitAdam([{"params": [params[1]]}, {"params": [expert], "process_group": group}])
    expert.grad = torch.full((2,), float(rank))
    average_gradients(optimizer)
    assert expert.grad.tolist() == [float(rank)] * 2


@on_ranks(2)
def test_misuse_is_refused_on_all_ranks(rank: int, world_size: int) -> None:
    model, table = network(), nn.Embedding(3, 2, sparse=rank == 1)
    table(torch.tensor([1])).sum().backward()
    adam, sgd = OnebitAdam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    refused: list[tuple[Any, type[Exception], str]] = [
        (lambda: attach_ddp(model, adam), TypeError, "model must be a DistributedDataParallel"),
        (lambda: attach_ddp(DistributedDataParallel(model), sgd), TypeError, "optimizers must be compressed"),
        (lambda: average_gradients(adam, dist.group.WORLD), ValueError, "process_group belongs to parameters"),
        (lambda: average_gradients(table.parameters()), TypeError, "sparse gradients are not supported"),
        (GradientCompression(table.parameters()).average_gradients, TypeError, "sparse gradients are not supported"),
    ]
    for call, kind, said in refused:
        with pytest.raises(kind, match=f"^{said}"):
            call()
