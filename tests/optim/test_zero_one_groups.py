"""Param groups of 0/1 Adam that are added late, or that only some of the ranks fill."""

import pytest
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


def one_empty_group(rank: int, world_size: int, own: bool, bad: bool) -> tuple[float, bool]:
    """A non_freeze group that is empty on rank 0: of a process group of its own, or without parameters anywhere."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    dense = nn.Parameter(torch.ones(11))
    extra = [nn.Parameter(torch.ones(4))] if rank == 1 and own else []
    more = {"process_group": alone} if own else {}
    groups = [{"params": [dense]}, {"params": extra, "non_freeze": True, **more}]
    optimizer = ZeroOneAdam(groups, lr=0.01, scale_block=8, **{**SCHEDULE, "var_freeze_step": 2})
    for step in range(1, 9):
        seed = step if optimizer.plan.reduce_grads else 100 * step + rank
        for param in (dense, *extra):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        if bad and step == 6 and rank == 0:
            dense.grad[0] = torch.nan
        optimizer.step()
    return optimizer.metrics()["skipped_steps"], bool(dense.isfinite().all())


@pytest.mark.parametrize(("own", "bad", "skipped"), [(True, False, 0.0), (True, True, 1.0), (False, True, 0.0)])
def test_an_empty_group_keeps_ranks_together_only_if_others_may_have_parameters(own, bad, skipped) -> None:
    assert run_ranks(2, one_empty_group, own, bad, timeout=30) == [(skipped, True)] * 2
