"""FusedAdam's own clipping on parameters that FSDP has shared out among the ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from hf_compressopt import FusedAdam
from tests.support.harness import on_ranks

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


@pytest.mark.parametrize(("world_size", "shape"), [(3, (3,)), (4, (2, 2))], ids=str)
@on_ranks()
def test_the_norm_of_fsdp2_is_taken_over_all_ranks(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    """On one mesh of shards, and on replicas of shards, which count once."""
    results = []
    for ours in (True, False):
        model = model_of()
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :]))
        options = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
        cls, more = (FusedAdam, {"max_grad_norm": MAX_NORM}) if ours else (torch.optim.AdamW, {})
        steps(model, cls(model.parameters(), **options, **more), rank, clip=not ours)
        results.append([p.full_tensor().detach() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_shards_of_fsdp1_are_refused(rank: int, world_size: int, use_orig_params: bool) -> None:

    model = FullyShardedDataParallel(model_of(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = FusedAdam(model.parameters(), lr=1e-2, max_grad_norm=MAX_NORM)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"FSDP1.*call model.clip_grad_norm_\(max_norm\)"):
        optimizer.step()
    assert not optimizer.state
