"""Gradients and parameters that cannot be used: refused by all ranks together, and nothing has changed."""

import re

import pytest
import torch
from torch import nn

from hf_compressopt import OnebitAdam
from tests.oracles.steps import same, tensors_in
from tests.support.harness import on_ranks

BAD = {
    "complex": (lambda p: torch.zeros(p.shape, dtype=torch.complex64), "complex64; legal are real floating-point"),
    "float64": (lambda p: torch.zeros(p.shape, dtype=torch.float64), "torch.float64; legal are"),
    "sparse": (lambda p: torch.ones(p.shape).to_sparse(), "is sparse (torch.sparse_coo); only dense gradients"),
    "integer": (lambda p: torch.zeros(p.shape, dtype=torch.int32), "int32; legal are real floating-point"),
    "shape": (lambda p: torch.zeros(3), "has shape (3,); legal is the parameter's, (5, 4)"),
    "device": (lambda p: torch.zeros(p.shape, device="meta"), "is on meta, its parameter on cpu"),
    "memory": (lambda p: torch._to_functional_tensor(torch.ones(p.shape)), "must hold its values in dense memory"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("steps", [0, 3], ids=["warmup", "compressed"])
@on_ranks(2)
def test_a_bad_gradient_on_one_rank_is_an_error_on_all(rank: int, world_size: int, kind: str, steps: int) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 4))
    optimizer = OnebitAdam([("layer.weight", p)], freeze_step=2, scale_block=8)
    for step in range(steps):
        optimizer.step(grads=[torch.full_like(p, 1.0 + step)])
    before = tensors_in([p, optimizer.state_dict()])
    bad, words = BAD[kind]
    said = f"the gradient of layer.weight .*{re.escape(words)}" if rank else r"^1 other rank\(s\)"
    with pytest.raises((TypeError, ValueError) if rank else RuntimeError, match=said):
        optimizer.step(grads=[bad(p) if rank else torch.ones_like(p)])
    assert same(before, tensors_in([p, optimizer.state_dict()])) and optimizer.metrics()["step"] == steps
