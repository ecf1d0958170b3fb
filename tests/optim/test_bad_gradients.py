"""Gradients and parameters that cannot be used: refused by all ranks together, and nothing has changed."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.harness import run_ranks_expecting_error

BAD = {
    "complex": (lambda p: torch.zeros(p.shape, dtype=torch.complex64), "complex64; legal are real floating-point"),
    "float64": (lambda p: torch.zeros(p.shape, dtype=torch.float64), "torch.float64; legal are"),
    "sparse": (lambda p: torch.ones(p.shape).to_sparse(), "is sparse (torch.sparse_coo); only dense gradients"),
    "integer": (lambda p: torch.zeros(p.shape, dtype=torch.int32), "int32; legal are real floating-point"),
    "shape": (lambda p: torch.zeros(3), "has shape (3,); legal is the parameter's, (5, 4)"),
    "device": (lambda p: torch.zeros(p.shape, device="meta"), "is on meta, its parameter on cpu"),
}


def give(rank: int, world_size: int, kind: str, steps: int) -> None:
    """Take good steps, then hand a bad gradient to rank 1 only."""
    from hf_compressopt import OnebitAdam

    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 4))
    optimizer = OnebitAdam([("layer.weight", p)], freeze_step=2, scale_block=8)
    for step in range(steps):
        optimizer.step(grads=[torch.full_like(p, 1.0 + step)])
    state: dict[str, Any] = optimizer.state_dict()["compressopt"]
    before = [t.clone() for t in (p.detach(), *optimizer.state[p].values(), *state["worker_error"])]
    bad, _ = BAD[kind]
    try:
        optimizer.step(grads=[bad(p) if rank == 1 else torch.ones_like(p)])
    finally:
        state = optimizer.state_dict()["compressopt"]
        after = [p.detach(), *optimizer.state[p].values(), *state["worker_error"]]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "something has changed"
        assert optimizer.metrics()["step"] == steps


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("steps", [0, 3], ids=["warmup", "compressed"])
def test_a_bad_gradient_on_one_rank_is_an_error_on_all(kind: str, steps: int) -> None:
    errors = run_ranks_expecting_error(2, give, kind, steps)
    assert "the gradient of layer.weight" in errors[1] and BAD[kind][1] in errors[1], errors
    assert errors[0].startswith("RuntimeError: 1 other rank(s)"), errors
