"""FSDP2 without replicas, in low-bit messages between the ranks that share a model, on real gloo ranks.

The oracle is one process with the whole model: float32 simulations of the messages of every unit, by its columns, and
means of small tensors in rank order.
"""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_compressopt import FSDPCompression, compress_fsdp, load_state, save_state
from hf_compressopt.planner.memory import FSDP2, memory_rows
from tests.fsdp import test_fsdp_compression as hsdp
from tests.oracles.simulation_integers import Simulation, in_order
from tests.support.harness import on_ranks, run_ranks

# bits, accumulation, options of fully_shard
RUNS: list[tuple[int, str, dict[str, Any]]] = [
    (4, "", {}),
    (8, "unreduced", {"reshard_after_forward": False}),
    (4, "unreduced", {"reshard_after_forward": True}),
]


def sharded(net: nn.Module, **options: Any) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return (hsdp.shard_units if isinstance(net, hsdp.Net) else fully_shard)(net, mesh=mesh, **options), mesh


def train(rank: int, bits: int, accumulate: str, how: dict[str, Any]) -> dict[str, Any]:
    net, mesh = sharded(hsdp.make(), **how)
    compression = compress_fsdp(net, mesh, f"int{bits}", bucket_cap_mb=hsdp.CAP)
    return hsdp.trained(net, rank, accumulate) | {"errors": hsdp.errors_of(compression)}


class Columns:
    """The columns of a unit, [ranks, numel], as they travel: bucket by bucket, and in it rank by rank."""

    def __init__(self, shapes: list[tuple[int, ...]], ranks: int, bits: int) -> None:
        self.ranks, zeros = ranks, [np.zeros(shape, np.float32) for shape in shapes]
        self.rows_of = [shape[0] for shape in shapes]
        self.shapes = [hsdp.cut(zero, 0, ranks).shape for zero in zeros]
        self.numel = sum(int(np.prod(shape)) for shape in self.shapes)
        self.padded, width = -(-self.numel // 8) * 8, max(8, hsdp.BUCKET // (8 * ranks) * 8)
        self.cuts = list(range(width, self.padded, width))
        options: dict[str, Any] = {"compact": True, "served": False}
        self.simulation = Simulation(self.padded * ranks, width * ranks, ranks, bits, **options)

    def flat(self, tensors: list[np.ndarray]) -> np.ndarray:
        rows = np.zeros((self.ranks, self.padded), np.float32)
        for rank in range(self.ranks):
            rows[rank, : self.numel] = np.concatenate([hsdp.cut(t, rank, self.ranks).ravel() for t in tensors])
        return np.concatenate([part.ravel() for part in np.split(rows, self.cuts, axis=1)])

    def rows(self, flat: np.ndarray) -> np.ndarray:
        bounds = [0, *self.cuts, self.padded]
        sizes = [self.ranks * (stop - start) for start, stop in zip(bounds, bounds[1:], strict=False)]
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return np.concatenate([part.reshape(self.ranks, -1) for part in parts], axis=1)[:, : self.numel]

    def whole(self, flat: np.ndarray) -> list[np.ndarray]:
        """The tensors, each joined from the parts of all ranks."""
        parts = np.split(self.rows(flat), np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1], axis=1)
        joined = [part.reshape(-1, *shape[1:]) for part, shape in zip(parts, self.shapes, strict=True)]
        return [tensor[:count] for tensor, count in zip(joined, self.rows_of, strict=True)]


def simulated(ranks: int, bits: int, accumulate: str) -> tuple[list[dict[str, Any]], hsdp.Net, list[Columns]]:
    net = hsdp.make()
    optimizer, names = hsdp.optimizer_of(net), dict(net.named_parameters())
    columns = [Columns([tuple(names[n].shape) for n in members], ranks, bits) for members in hsdp.UNITS]
    history = []
    for step in range(hsdp.STEPS):
        everyone = []
        for rank in range(ranks):
            net.zero_grad()
            for part in (1, 0) if accumulate else (0,):
                net(hsdp.data(rank, step, part), hsdp.uses(step)).pow(2).mean().backward()
            everyone.append({n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in names.items()})
        for members, unit in zip(hsdp.UNITS, columns, strict=True):
            rows = [[mine[n].numpy() for mine in everyone] for n in members]
            small = [hsdp.travels_in_full(tensors[0]) for tensors in rows]
            sent = np.stack(
                [
                    unit.flat([t[rank] * np.float32(not each) for t, each in zip(rows, small, strict=True)])
                    for rank in range(ranks)
                ]
            )
            means = unit.whole(unit.simulation.average(sent))
            for n, mean, tensors, each in zip(members, means, rows, small, strict=True):
                mean = in_order(tensors) * np.float32(1 / ranks) if each else mean
                names[n].grad = torch.from_numpy(mean.copy())
        history.append({n: names[n].grad.numpy().copy() for members in hsdp.UNITS for n in members})
        optimizer.step()
    return history, net, columns


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_equals_a_simulation_in_bits(world_size: int) -> None:
    ranks = run_ranks(world_size, hsdp.in_turn, train, RUNS, timeout=240)
    for number, (bits, accumulate, _) in enumerate(RUNS):
        history, net, columns = simulated(world_size, bits, accumulate)
        weights = {n: p.detach().numpy() for n, p in net.named_parameters() if p.requires_grad}
        for rank in range(world_size):
            got = ranks[rank][number]
            for mine, expected in zip([*got["grads"], got["weights"]], [*history, weights], strict=True):
                for name, values in mine.items():
                    assert values.tobytes() == hsdp.shard_of(expected[name], rank, world_size).tobytes(), (number, name)
            errors = sorted(unit.simulation.worker_error[rank].tobytes() for unit in columns)
            assert sorted(got["errors"][f"worker_errors{unit}"].tobytes() for unit in range(3)) == errors
            assert all(got["errors"][f"server_errors{unit}"].size == 0 for unit in range(3))


def started(seed: int = 0, how: dict[str, Any] | None = None, **options: Any) -> tuple[Any, FSDPCompression, Any]:
    net, mesh = sharded(hsdp.make(seed), **(how or {}))
    compression = compress_fsdp(net, mesh, **{"bucket_cap_mb": hsdp.CAP, **options})
    return net, compression, hsdp.optimizer_of(net)


def sent_bytes(rank: int) -> tuple[dict[str, float], str, int]:
    """The bytes of a step of a model of some size, without padding to speak of, and those that it holds."""
    torch.manual_seed(0)
    net, mesh = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), init_device_mesh("cpu", (4,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    compression = compress_fsdp(net, mesh, "int4")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 256) * (rank + 1)).pow(2).mean().backward()
        optimizer.step()
    errors = sum(errors.kept.worker.nbytes for errors in compression.units)
    return compression.metrics(), compression.describe(), errors


def precisions(rank: int) -> None:
    """Mixed precision in bfloat16 and float16, a divisor of the user's, and a loss scale, beside FSDP2's own."""
    cases = ((torch.bfloat16, None), (torch.float16, None), (torch.float16, 3.0), (torch.float32, 3.0))
    for dtype, divisor in cases:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        found = []
        for bits in (None, "int8", "int8"):
            scale = 1024.0 if len(found) == 2 else 1.0
            net, mesh = sharded(hsdp.make(), mp_policy=policy)
            times = 4 / 3 if bits is None and dtype is torch.float32 else 1.0  # gloo itself divides by no other factor
            for unit in (net, net.first, net.second) if divisor is not None and times == 1 else ():
                unit.set_gradient_divide_factor(divisor)
            asked = mock.Mock(return_value=scale)
            compression = bits and compress_fsdp(net, mesh, bits, loss_scale=asked)
            (net(hsdp.data(rank, 0).to(dtype)).float().pow(2).mean() * scale * times).backward()
            if compression:
                compression.step_taken()
            assert asked.call_count == bool(bits)  # a GPU's host waits for it: once in a pass, not for each unit
            found.append((hsdp.local(net), hsdp.errors_of(compression) if compression else {}))
        (plain, _), (grads, errors), (scaled, scaled_errors) = found
        for name, grad in plain.items():
            off = np.abs(grads[name] - grad)
            assert off.max(initial=0.0) <= 0.02 * np.abs(grad).max(initial=0.0) + 1e-3, (dtype, divisor, name)
            if dtype is torch.bfloat16:
                assert np.array_equal(grads[name] * scale, scaled[name])
        if dtype is torch.bfloat16:
            assert hsdp.same(errors, scaled_errors)


class Tied(nn.Module):
    """Two blocks whose activations are made anew in backward, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 16)) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def tied(rank: int, reentrant: bool) -> list[list[float]]:
    """Losses of a model with tied weights and checkpointed activations, with FSDP2 alone and compressed."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    impl, found = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT, []
    for form in ("none", "int4", "int8"):
        torch.manual_seed(5)
        net, mesh = Tied(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        apply_activation_checkpointing(
            net, lambda m: checkpoint_wrapper(m, checkpoint_impl=impl), lambda m: isinstance(m, nn.Sequential)
        )
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        if form != "none":
            compress_fsdp(net, mesh, form, bucket_cap_mb=hsdp.CAP)
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-2)
        losses = []
        for step in range(6):
            tokens = torch.randint(50, (8, 6), generator=torch.Generator().manual_seed(31 * rank + step % 2))
            loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        found.append(losses)
    return found


def gradients(rank: int, world_size: int) -> list[list[list[float]]]:
    precisions(rank)
    hsdp.check_not_finite(rank, started)
    return [tied(rank, again) for again in (False, True)]


def test_precisions_tied_weights_checkpointed_activations_and_skipped_steps() -> None:
    for rank, (found, reentrant) in enumerate(run_ranks(4, gradients, timeout=240)):
        assert found == reentrant, rank
        plain, *others = found
        for losses in others:
            assert losses == pytest.approx(plain, abs=0.1) and losses[-1] < 0.5 * losses[0], found


def resumed(rank: int, world_size: int, folder: str) -> tuple[dict[str, float], str, int]:
    for where, options in (("", {}), (folder, {"compression": "int8"})):
        hsdp.check_resume(rank, partial(started, **options), where)
    return sent_bytes(rank)


def test_resumes_and_sends_and_holds_what_the_planner_says(tmp_path: Path) -> None:
    for metrics, said, held in run_ranks(4, resumed, str(tmp_path), timeout=240):
        biases = 2 * 64  # of a shard, in full
        values = 2 * 64 * 256 + biases
        assert metrics["bytes_sent_step"] == pytest.approx(3 * (values * (0.5 + 2 / 128) + 4 * biases), rel=0.01)
        assert metrics["compression_ratio"] == pytest.approx(3 * 4 * values / metrics["bytes_sent_step"])
        assert metrics["compression_ratio"] > 7.5
        plain, grads, exact = (memory_rows(4 * values, 4, torch.float32, 2, 25.0)[name] for name in FSDP2)
        assert grads["states"] - plain["states"] == pytest.approx(2 * held, rel=0.01)
        assert exact["states"] - plain["states"] == 2 * 4 * values
        assert "int4 with error feedback between 4 rank(s), and parameters in full precision" in said


@on_ranks(4)
def test_refuses_by_name(rank: int, world_size: int) -> None:
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    (net, mesh), replicated = sharded(hsdp.make()), fully_shard(hsdp.make(), mesh=pairs)
    taken = started()[0]
    calls: dict[str, Any] = {
        "1 dimension, the shards": lambda: compress_fsdp(net, init_device_mesh("cpu", (1, 2, 2))),
        "sharded over the ranks": lambda: compress_fsdp(net, pairs["shard"]),
        "has replicas": lambda: compress_fsdp(replicated, pairs["shard"]),
        "custom reduce-scatter already": lambda: compress_fsdp(taken, mesh),
        "rank 1 has [8": lambda: compress_fsdp(net, mesh, "int8" if rank == 1 else "int4"),
        "the state dict has param_bits=4": lambda: started()[1].load_state_dict(
            {**started()[1].state_dict(), "param_bits": 4}
        ),
        "the state dict has replicas=2": lambda: started()[1].load_state_dict(
            {**started()[1].state_dict(), "shards": 2, "replicas": 2}
        ),
    }
    hsdp.check_refusals(calls)


@on_ranks(2)
def test_a_parameter_that_is_frozen_later_is_an_error_on_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    net, state, _ = started()
    net.first.weight.requires_grad_(False)
    save_state(state, tmp_path)  # as a model may be frozen after its training
    load_state(state, tmp_path)
    assert "worker_error/rank1/first.weight" in (tmp_path / "compressopt.index.json").read_text()
    with pytest.raises((ValueError, RuntimeError), match="freeze parameters before grad_compression begins"):
        hsdp.take_step(net, rank, 0, "")
