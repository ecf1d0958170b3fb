"""FusedAdam's own clipping on parameters that FSDP has shared out among the ranks."""

import pytest
import torch
from torch import nn

from hf_compressopt import FusedAdam
from tests.support.harness import run_ranks

MAX_NORM = 0.05


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 7))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, clip: bool) -> None:
    for step in range(4):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        model(torch.randn(16, 10, generator=generator)).square().mean().backward()
        if clip:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)) > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()


def fsdp2(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    """On one mesh of shards, and on replicas of shards, which count once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    results = []
    for ours in (True, False):
        model = model_of()
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :]))
        optimizer = (
            FusedAdam(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1, max_grad_norm=MAX_NORM)
            if ours
            else torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)
        )
        steps(model, optimizer, rank, clip=not ours)
        results.append([p.full_tensor().detach() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
def test_the_norm_of_fsdp2_is_taken_over_all_ranks(shape: tuple[int, ...]) -> None:
    run_ranks(3 if shape == (3,) else 4, fsdp2, shape)


def fsdp1(rank: int, world_size: int, use_orig_params: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(model_of(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = FusedAdam(model.parameters(), lr=1e-2, max_grad_norm=MAX_NORM)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"FSDP1.*call model.clip_grad_norm_\(max_norm\)"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_shards_of_fsdp1_are_refused(use_orig_params: bool) -> None:
    run_ranks(2, fsdp1, use_orig_params)
