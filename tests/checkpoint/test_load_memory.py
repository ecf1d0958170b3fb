"""Memory at load: a rank that reads its share of a big checkpoint grows by that share and little more."""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forking import forked
from tests.support.harness import run_ranks
from tests.support.memory import MIB, peak_beyond

SIDE, COUNT = 1024, 30  # 30 parameters of 4 MiB: with Adam's two moments a checkpoint of 240 MiB


def sharded() -> Any:
    from hf_compressopt import ZeroOptimizer

    params = [nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(COUNT)]
    optimizer = ZeroOptimizer(params, torch.optim.AdamW, stage=1, lr=1e-3)
    sum(p.sum() for p in params).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save(rank: int, world_size: int, directory: str) -> int:
    from hf_compressopt import save_state

    save_state(sharded(), directory)
    return sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))


def load(connection: Any, rank: int, store: str, directory: str) -> None:
    """In a fresh process: bytes of this rank's share, and by how many MiB it grew at most."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    from hf_compressopt import load_state

    optimizer = sharded()
    states = (bucket.state_of(piece) for bucket, piece in optimizer.partition.parts())
    held = sum(t.numel() * t.element_size() for state in states for key, t in state.items() if key != "step")
    connection.send((held, peak_beyond(lambda: load_state(optimizer, directory))))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from Linux's /proc")
def test_a_load_grows_by_the_ranks_own_share_and_64_mb_at_most(tmp_path: Path) -> None:
    written = run_ranks(4, save, str(tmp_path / "checkpoint"), timeout=240)[0]
    assert written > COUNT * SIDE**2 * 8
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    paths = (str(tmp_path / "store"), str(tmp_path / "checkpoint"))
    processes = [forked(load, pipes[rank][1], rank, *paths) for rank in range(2)]
    try:
        for ours, _ in pipes:
            assert ours.poll(240), "a rank gave no answer"
            held, grown = ours.recv()
            assert abs(held - written / 2) < 8 * MIB, "the share is not a half"
            assert grown <= held / MIB + 64, f"grew by {grown:.0f} MiB for a share of {held / MIB:.0f}"
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
