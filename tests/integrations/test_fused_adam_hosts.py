"""FusedAdam in Trainer and Accelerate, with two real processes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from hf_compressopt import CompressOptAccelerator, FusedAdam
from tests.support import trainer_runs as hosts
from tests.support.harness import on_ranks

MAX_NORM = 0.05


@pytest.mark.parametrize(
    ("world_size", "shape", "dtype", "clips"),
    [
        (2, (2,), torch.float32, False),
        (2, (2,), torch.bfloat16, False),
        (3, (3,), torch.float32, True),
        (4, (2, 2), torch.float32, True),  # replicas of shards, which count once
    ],
    ids=str,
)
@on_ranks()
def test_fully_sharded_model(
    rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype, clips: bool
) -> None:
    """On DTensors, which torch's fused operator takes where they are float32; the norm is taken over all ranks."""
    found = []
    for cls in (torch.optim.AdamW, FusedAdam):
        model = hosts.network().to(dtype)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :]))
        options: dict[str, Any] = {"eps": 1e-2} if clips else {}
        options |= {"max_grad_norm": MAX_NORM} if clips and cls is FusedAdam else {}
        optimizer: Any = cls(model.parameters(), lr=1e-2, weight_decay=0.1, **options)
        for step in range(4):
            model(hosts.batch(rank, step)[0].to(dtype)).square().mean().backward()
            if clips and cls is torch.optim.AdamW:
                assert float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)) > MAX_NORM
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.full_tensor().detach() for p in model.parameters()])
    if os.environ.get("HF_COMPRESSOPT_KERNELS") != "reference":
        kinds = {kind.name for kind, *_ in optimizer._plans[0]._parts}
        assert kinds == ({"SHARDED"} if dtype == torch.float32 else {"OTHER"})
    torch.testing.assert_close(*found, rtol=0, atol=1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("ours", [False, True], ids=["Accelerator", "CompressOptAccelerator"])
@on_ranks(2)
def test_accelerate(rank: int, world_size: int, ours: bool, tmp_path: Path) -> None:
    from accelerate import Accelerator

    found = []
    for cls in (torch.optim.AdamW, FusedAdam):
        hosts.use_accelerate(rank, world_size)
        accelerator = (CompressOptAccelerator if ours else Accelerator)(cpu=True, step_scheduler_with_optimizer=False)
        model: Any = hosts.network()
        optimizer: Any = cls(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        directory, ends = str(tmp_path / cls.__name__), []
        hosts.take_steps(accelerator, model, optimizer, rank, range(3), scheduler=scheduler, clip=0.5)
        accelerator.save_state(directory)
        for again in (False, True):
            if again:
                accelerator.load_state(directory)
            hosts.take_steps(accelerator, model, optimizer, rank, range(3, 6), scheduler=scheduler, clip=0.5)
            assert hosts.same_on_all_ranks(model.parameters())
            ends.append(hosts.params_of(accelerator, model))
        assert hosts.equal_params(*ends)
        found.append(ends[0])
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_shards_of_fsdp1_are_refused(rank: int, world_size: int, use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(hosts.network(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = FusedAdam(model.parameters(), lr=1e-2, max_grad_norm=MAX_NORM)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"FSDP1.*call model.clip_grad_norm_\(max_norm\)"):
        optimizer.step()
    assert not optimizer.state
