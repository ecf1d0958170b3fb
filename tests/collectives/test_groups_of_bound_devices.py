"""Groups of some ranks, where the default group was given a device: NCCL is not asked to split, which all must join."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_compressopt.collectives.torch_dist import TorchCommunicator


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    world = dist.distributed_c10d._get_default_group()
    world.bound_device_id = torch.device("cuda", 0)
    yield world
    dist.destroy_process_group()


def test_a_part_is_not_split_off(bound: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dist.distributed_c10d, "_get_split_source", lambda _: pytest.fail("torch splits the default group")
    )
    part = TorchCommunicator(device=torch.device("cpu")).part([0])
    assert part.world_size == 1
    assert bound.bound_device_id == torch.device("cuda", 0)
