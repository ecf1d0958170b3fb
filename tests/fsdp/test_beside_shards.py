"""Trainable parameters that FSDP2 does not manage: adapters that came after ``fully_shard``, on real gloo ranks."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_compressopt import compress_fsdp, load_state, save_state
from tests.support.harness import run_ranks, same_on_all_ranks

WIDTH, ROWS = 24, 12  # of a global batch
STEPS = 5


class Lora(nn.Module):
    """A frozen layer, and an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(16, base.in_features) / 4)
        self.up, self.scale = nn.Parameter(torch.zeros(base.out_features, 16)), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + torch.nn.functional.linear(x, self.down) * self.scale @ self.up.T


def base(*, frozen: bool) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    return nn.Sequential(*layers).requires_grad_(not frozen)


def add_adapters(net: Any, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for number in (0, 2):
        net[number] = Lora(net[number])


def sharded(shards: int, *, frozen: bool, seed: int = 0) -> tuple[Any, Any]:
    """A base that is sharded before it gets its adapters, other ones on each rank."""
    net, world_size = base(frozen=frozen), torch.distributed.get_world_size()
    names = ("replicate", "shard")
    sizes = (world_size,) if shards == world_size else (world_size // shards, shards)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    add_adapters(net, seed + torch.distributed.get_rank())
    return net, mesh


def adapters(net: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad and not hasattr(p, "device_mesh")}


def whole(net: nn.Module) -> dict[str, Any]:
    found = {
        n: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in net.named_parameters()
    }
    return {name: value.numpy().copy() for name, value in found.items()}


def data(step: int, part: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * part + step))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def backward(net: Any, step: int, how: str) -> Tensor:
    """Run one pass, or two of which the first sends nothing, with this rank's rows of the batch."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    switch = net.set_requires_all_reduce if how == "all_reduce" else net.set_requires_gradient_sync
    for part in (1, 0) if how else (0,):
        switch(part == 0)
        rows = data(step, part)[rank * ROWS // world_size : (rank + 1) * ROWS // world_size]
        loss = net(rows).square().mean()
        loss.backward()
    return loss.detach()


def train(rank: int, world_size: int, cases: list[tuple[int, bool, str, str]]) -> list[dict[str, Any]]:
    found = []
    for shards, frozen, compression, how in cases:
        net, mesh = sharded(shards, frozen=frozen)
        state = compress_fsdp(net, mesh, compression)
        optimizer = optimizer_of(net)
        assert same_on_all_ranks(adapters(net).values())
        for step in range(STEPS):
            backward(net, step, how)
            state.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            assert same_on_all_ranks(adapters(net).values())
        found.append(whole(net))
    return found


def alone(*, frozen: bool, how: str) -> dict[str, Any]:
    """One process that has the whole batch, and rank 0's adapters."""
    net = base(frozen=frozen)
    add_adapters(net)
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        for part in (1, 0) if how else (0,):
            net(data(step, part)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return whole(net)


def test_equal_to_one_process_with_the_whole_batch() -> None:
    """To rounding in full precision, on 2 ranks and in HSDP on 4, with shards that are trained too, and clipped."""
    for world_size, shards, hows in ((2, 2, ("", "sync")), (4, 2, ("", "all_reduce"))):
        cases = [(shards, frozen, "float32", how) for frozen in (True, False) for how in hows]
        for ranks in run_ranks(world_size, train, cases):
            for (_, frozen, _, how), found in zip(cases, ranks, strict=True):
                for name, expected in alone(frozen=frozen, how=how).items():
                    assert abs(found[name] - expected).max() < 1e-5, (world_size, frozen, how, name)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def stepped(net: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(net, step, "sync" if step % 2 else "")
        optimizer.step()
        optimizer.zero_grad()


def errors_of(state: Any) -> list[Tensor]:
    averages = state.find_beside()
    return [averages.worker_error, averages.server_error]


def resumed(rank: int, world_size: int, folder: str, frozen: bool) -> None:
    net, mesh = sharded(2, frozen=frozen)
    state, optimizer = compress_fsdp(net, mesh, "int4"), optimizer_of(net)
    stepped(net, optimizer, range(3))
    for name in ("dict", "files"):
        again, _ = sharded(2, frozen=frozen, seed=7)
        other, continued = compress_fsdp(again, mesh, "int4"), optimizer_of(again)
        with torch.no_grad():
            for p, q in zip(net.parameters(), again.parameters(), strict=True):
                q.copy_(p)
        continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if name == "dict":
            other.load_state_dict(state.state_dict())
        else:
            save_state(state, folder)
            load_state(other, folder)
        assert all(bool(error.any()) for error in errors_of(other))
        stepped(again, continued, range(3, 6))
        if name == "dict":
            after = whole(again), errors_of(other)
    stepped(net, optimizer, range(3, 6))
    for found, errors in (after, (whole(again), errors_of(other))):
        assert all(np.array_equal(value, found[key]) for key, value in whole(net).items())
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(errors_of(state), errors, strict=True))
    assert state.steps == other.steps == 6


@pytest.mark.parametrize(("world_size", "frozen"), [(2, True), (4, False)])
def test_a_resumed_run_has_the_same_bits(world_size: int, frozen: bool, tmp_path: Path) -> None:
    run_ranks(world_size, resumed, str(tmp_path), frozen)
