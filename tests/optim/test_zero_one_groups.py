"""Param groups of 0/1 Adam that are added late, or that only some of the ranks fill."""

import torch
import torch.distributed as dist
from torch import nn

from hf_compressopt import ZeroOneAdam
from tests.support.harness import run_ranks

SCHEDULE = {"var_freeze_step": 8, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4}


def add_groups(rank: int, world_size: int) -> list[int]:
    """Add a group before each step of the variance stage, whatever the step does, and after it."""
    first = nn.Parameter(torch.ones(11))
    optimizer = ZeroOneAdam([first], lr=0.01, scale_block=8, **SCHEDULE)
    params, learning, refused = [first], [], []
    for step in range(1, 11):
        new = nn.Parameter(torch.ones(5))
        try:
            optimizer.add_param_group({"params": [new]})
            params.append(new)
        except ValueError as error:
            assert "local-step stage has no variance" in str(error)
            refused.append(step)
        learning.append(optimizer.plan.update_variance)
        seed = step if optimizer.plan.reduce_grads else 100 * step + rank
        for param in params:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    assert True in learning[:8] and False in learning[:8]
    assert all(bool(param.isfinite().all()) for param in params)
    assert not any(bool((param == 1).all()) for param in params[:6]), "a parameter that saw a variance step moves"
    return refused


def test_groups_are_taken_in_every_step_of_the_variance_stage_and_refused_after_it() -> None:
    assert run_ranks(2, add_groups) == [[9, 10]] * 2


def one_empty_group(rank: int, world_size: int, bad: bool) -> tuple[float, bool]:
    """A non_freeze group with a process group of its own that has parameters on rank 1 only."""
    own = [dist.new_group([r]) for r in range(world_size)][rank]
    dense = nn.Parameter(torch.ones(11))
    extra = [nn.Parameter(torch.ones(4))] if rank == 1 else []
    groups = [{"params": [dense]}, {"params": extra, "non_freeze": True, "process_group": own}]
    options = {**SCHEDULE, "var_freeze_step": 2}
    optimizer = ZeroOneAdam(groups, lr=0.01, scale_block=8, **options)
    for step in range(1, 9):
        seed = step if optimizer.plan.reduce_grads else 100 * step + rank
        for param in (dense, *extra):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        if bad and step == 6 and rank == 0:
            dense.grad[0] = torch.nan
        optimizer.step()
    return optimizer.metrics()["skipped_steps"], bool(dense.isfinite().all())


def test_a_group_that_is_empty_on_one_rank_keeps_the_ranks_together() -> None:
    assert run_ranks(2, one_empty_group, False, timeout=30) == [(0.0, True)] * 2
    assert run_ranks(2, one_empty_group, True, timeout=30) == [(1.0, True)] * 2


def empty_group_of_all_ranks(rank: int, world_size: int) -> tuple[float, bool]:
    """An empty non_freeze group that all ranks share connects nobody, and has no state of its own."""
    dense = nn.Parameter(torch.ones(11))
    groups = [{"params": [dense]}, {"params": [], "non_freeze": True}]
    options = {**SCHEDULE, "var_freeze_step": 2}
    optimizer = ZeroOneAdam(groups, lr=0.01, scale_block=8, **options)
    for step in range(1, 9):
        seed = step if optimizer.plan.reduce_grads else 100 * step + rank
        dense.grad = torch.randn(11, generator=torch.Generator().manual_seed(seed))
        if step == 6 and rank == 0:
            dense.grad[0] = torch.nan
        optimizer.step()
    return optimizer.metrics()["skipped_steps"], bool(dense.isfinite().all())


def test_a_rank_with_a_bad_gradient_goes_on_beside_an_empty_group() -> None:
    assert run_ranks(2, empty_group_of_all_ranks) == [(0.0, True)] * 2
