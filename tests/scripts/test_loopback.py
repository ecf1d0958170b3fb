"""Ranks that are threads of one process train in the bits of ranks that are processes of gloo; and what ends them."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt import OnebitAdam
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.support.harness import run_ranks
from tests.support.launching import REPO_ROOT

sys.path.append(str(REPO_ROOT / "scripts"))

from _loopback import World  # noqa: E402
from converge_on_gpu import METHODS, MODELS, Replica, Settings  # noqa: E402

CPU = torch.device("cpu")
STEPS = 12
#: Options with which a run of a few steps comes to the compressed stage, and to local steps.
SOON: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 4},
    "ZeroOneAdam": {"freeze_step": 4, "local_step_scaler": 2, "local_step_clipper": 4},
}


class InOrder(TorchCommunicator):
    """gloo, but that sums are taken in rank order: gloo's own order depends on the length of a message."""

    def _all_reduce(self, tensor: Tensor, op: str) -> Callable[[], Any]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        total = parts[0]
        for part in parts[1:]:
            total = total + part if op == "sum" else torch.maximum(total, part)
        tensor.copy_(total)
        return lambda: None


def settings_of(method: str) -> Settings:
    run = METHODS[method]
    run = replace(run, model=MODELS["tiny"], options=run.options | SOON.get(method, {}))
    return Settings(run, seed=3, steps=STEPS, device=CPU)


def part_of(step: int, rank: int) -> Tensor:
    """Tokens of a rank, [2, 16]."""
    return torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(100 * step + rank))


def digest(replica: Replica) -> str:
    values = [*replica.model.parameters(), *replica.training.optimizer.state_dict()["state"][0].values()]
    flat = [value.detach().reshape(-1).float() for value in values if isinstance(value, Tensor)]
    return hashlib.sha256(torch.cat(flat).numpy().tobytes()).hexdigest()


def in_processes(rank: int, world_size: int) -> list[str]:
    digests = []
    for method in METHODS:
        replica = Replica(settings_of(method), InOrder(), InOrder())
        for step in range(STEPS):
            replica.backward(part_of(step, rank))
            replica.update()
        digests.append(digest(replica))
    return digests


def in_threads(world_size: int) -> list[list[str]]:
    world, digests = World(world_size, CPU), []
    for method in METHODS:
        pairs = zip(world.communicators(), world.communicators(), strict=True)
        replicas = [Replica(settings_of(method), ours, others) for ours, others in pairs]
        for step in range(STEPS):
            for rank, replica in enumerate(replicas):
                replica.backward(part_of(step, rank))
            world.run(lambda rank: replicas[rank].update())  # noqa: B023
        digests.append([digest(replica) for replica in replicas])
    return [list(row) for row in zip(*digests, strict=True)]


@pytest.mark.parametrize("world_size", [2, pytest.param(8, marks=pytest.mark.full)])
def test_threads_of_one_process_train_in_the_bits_of_gloo_processes(world_size: int) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # what one rank does to another's state is seen then, and seldom otherwise
    try:
        threads = in_threads(world_size)
    finally:
        sys.setswitchinterval(interval)
    assert threads == run_ranks(world_size, in_processes)
    assert len({row[-2] for row in threads}) == 1, "the ranks of OnebitAdam are apart"


def test_a_rank_that_leaves_out_a_collective_or_starts_another_is_named() -> None:
    world = World(2, CPU, seconds=0.2)
    ranks = world.communicators()

    def skip(rank: int) -> None:
        if rank == 0:
            ranks[rank].all_reduce(torch.ones(3)).wait()

    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not start sum"):
        world.run(skip)

    def differ(rank: int) -> None:
        message = torch.ones(2)
        if rank == 0:
            ranks[rank].all_reduce(message).wait()
        else:
            ranks[rank].all_gather(torch.ones(4), message).wait()

    world = World(2, CPU)
    ranks = world.communicators()
    with pytest.raises(RuntimeError, match="rank [01] starts (sum|all_gather), and another rank (all_gather|sum)"):
        world.run(differ)


def test_an_error_of_a_rank_is_raised() -> None:
    world = World(2, CPU)
    ranks = world.communicators()
    params = [[torch.nn.Parameter(torch.ones(9))] for _ in range(2)]
    optimizers = [OnebitAdam(params[rank], lr=0.1, freeze_step=1, communicator=ranks[rank]) for rank in range(2)]

    def step(rank: int) -> None:
        if rank == 1:
            raise KeyError("rank 1 has an error of its own")
        optimizers[rank].step()

    for param in params[0]:
        param.grad = torch.ones(9)
    with pytest.raises(KeyError, match="an error of its own"):
        world.run(step)


def test_runs_are_rows_and_are_not_repeated(tmp_path: Path) -> None:
    tokens = torch.randint(0, 512, (4000,), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    for name in ("train", "validation"):
        (tmp_path / f"{name}.bin").write_bytes(tokens.numpy().tobytes())
    words = ["--device", "cpu", "--models", "tiny", "--steps", "10", "--world-sizes", "2"]
    command = [sys.executable, str(REPO_ROOT / "scripts" / "converge_on_gpu.py"), *words]
    command += ["--tokens", str(tmp_path), "--out", str(tmp_path)]
    subprocess.run([*command, "--methods", "AdamW"], check=True, capture_output=True)
    subprocess.run([*command, "--methods", "AdamW", "int4"], check=True, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "convergence.jsonl").read_text().splitlines()]
    assert [(row["name"], row["world_size"]) for row in rows] == [("AdamW", 1), ("AdamW, int4 gradients", 2)]
    assert rows[0]["bytes"] == 0 < rows[1]["bytes"]
    assert abs(rows[0]["eval_loss"] / rows[1]["eval_loss"] - 1) < 0.01
