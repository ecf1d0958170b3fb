"""FSDP2 inside a node and low-bit messages between nodes, on real gloo ranks: 2 replicas of 2 shards.

The oracle is one process with the whole model: its gradients are averaged inside each replica, cut as FSDP2 cuts them,
and averaged between replicas by the float32 simulation of the messages; those of small tensors as they are.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hf_compressopt import FSDPCompression, compress_fsdp, load_state, save_state
from hf_compressopt.fsdp.compression import UnitErrors
from tests.oracles.simulation_integers import Simulation, in_full
from tests.support.harness import on_ranks, run_ranks
from tests.support.logs import log_lines

BUCKET = 300  # elements, so that buckets cut units
CAP = BUCKET * 4 / 2**20
SHARDS = 2
RUNS = [("shard", 4), ("hsdp", 8), ("hsdp", 4)]
STEPS = 4


class Net(nn.Module):
    """Layers of odd sizes: a frozen one, one whose rows are fewer than the shards, one that is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(13, 37), nn.Linear(37, 37, bias=False)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.sometimes, self.last = nn.Linear(37, 37), nn.Linear(37, 1)

    def forward(self, x: torch.Tensor, also: bool = True) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.second(torch.tanh(self.first(x)))))
        return self.last(self.sometimes(h) if also else h)


# the parameters of each fully_shard call, the root's at the end
UNITS = [["first.weight", "first.bias"], ["second.weight", "last.weight", "last.bias"]]
UNITS += [["sometimes.weight", "sometimes.bias"]]


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded(net: Net, how: str, **options: Any) -> tuple[Net, Any]:
    replicas = torch.distributed.get_world_size() // SHARDS
    mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("replicate", "shard"))
    return shard_units(net, mesh if how == "hsdp" else mesh["shard"], **options), mesh


def shard_units(net: Net, mesh: Any, **options: Any) -> Any:
    fully_shard(net.first, mesh=mesh, **options)
    fully_shard([net.second, net.frozen, net.last], mesh=mesh, **options)  # one unit of several modules
    return fully_shard(net, mesh=mesh, **options)


def data(rank: int, step: int, part: int = 0) -> torch.Tensor:
    return torch.randn(8, 13, generator=torch.Generator().manual_seed(10_000 * part + 100 * rank + step))


def uses(step: int) -> bool:
    """True if a step uses all layers; always if this torch's FSDP2 cannot reduce a parameter without a gradient."""
    return step % 2 == 0 or not hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, foreach=False)


def local(net: nn.Module, what: str = "grad") -> dict[str, np.ndarray]:
    tensors = {n: p.grad if what == "grad" else p.detach() for n, p in net.named_parameters() if p.requires_grad}
    return {name: value.to_local().numpy().copy() for name, value in tensors.items()}


def take_step(net: Any, rank: int, step: int, accumulate: str) -> torch.Tensor:
    """One backward pass, or two whose gradients add up: before FSDP2's reduction or after it."""
    if accumulate:
        switch = net.set_requires_all_reduce if accumulate == "reduced" else net.set_requires_gradient_sync
        switch(False)
        net(data(rank, step, 1), uses(step)).pow(2).mean().backward()
        switch(True)
    loss = net(data(rank, step), uses(step)).pow(2).mean()
    loss.backward()
    return loss.detach()


def trained(net: Any, rank: int, accumulate: str) -> dict[str, Any]:
    """Train, and return the gradients of each step and the weights."""
    optimizer, grads = optimizer_of(net), []
    for step in range(STEPS):
        take_step(net, rank, step, accumulate)
        grads.append(local(net))
        optimizer.step()
        optimizer.zero_grad()
    return {"grads": grads, "weights": local(net, "weights")}


def train(rank: int, how: str, bits: int, accumulate: str) -> dict[str, Any]:
    net, mesh = sharded(make(), how)
    compression = compress_fsdp(net, mesh, f"int{bits}", bucket_cap_mb=CAP)
    return trained(net, rank, accumulate) | {"errors": compression.state_dict()}


def in_turn(rank: int, world_size: int, run: Any, rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [run(rank, *row) for row in rows]


def cut(whole: np.ndarray, rank: int, ranks: int = SHARDS) -> np.ndarray:
    """A rank's rows of a tensor, padded as FSDP2 pads them."""
    rows = -(-whole.shape[0] // ranks)
    padded = np.zeros((rows * ranks, *whole.shape[1:]), whole.dtype)
    padded[: whole.shape[0]] = whole
    return padded[rank * rows : (rank + 1) * rows]


def travels_in_full(values: np.ndarray) -> bool:
    return bool(in_full([values.shape]).all())


def simulated(
    count: int, bits: int, accumulate: str, heard: list[dict[str, np.ndarray]]
) -> tuple[list[dict[str, Any]], Net, dict[Any, Simulation]]:
    """Train on whole tensors. Small ones take the means that ``heard`` has, whose bits depend on the order of a sum."""
    net = make()
    optimizer, names = optimizer_of(net), dict(net.named_parameters())
    simulations: dict[Any, Simulation] = {}
    history = []
    for step in range(STEPS):
        replicas = []
        for replica in range(count):
            total: dict[str, np.ndarray] = {}
            for part in (1, 0) if accumulate else (0,):
                ranks = []
                for rank in range(replica * SHARDS, (replica + 1) * SHARDS):
                    net.zero_grad()
                    net(data(rank, step, part), uses(step)).pow(2).mean().backward()
                    trained = {n: p for n, p in names.items() if p.requires_grad}
                    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
                    ranks.append({n: grad.numpy().copy() for n, grad in grads.items()})
                for n in ranks[0]:
                    mean = (ranks[0][n] + ranks[1][n]) * np.float32(0.5)
                    total[n] = total[n] + mean if n in total else mean
            replicas.append(total)
        averages: dict[str, list[np.ndarray]] = {}
        for unit, members in enumerate(UNITS):
            for shard in range(SHARDS):
                flat = np.stack([np.concatenate([cut(r[n], shard).ravel() for n in members]) for r in replicas])
                made = Simulation(flat.shape[1], BUCKET, count, bits, compact=True)
                sizes = [cut(replicas[0][n], shard).size for n in members]
                small = np.repeat([travels_in_full(replicas[0][n]) for n in members], sizes)
                mean = simulations.setdefault((unit, shard), made).average(np.where(small, np.float32(0), flat))
                whole = np.concatenate([cut(heard[step][n], shard).ravel() for n in members])
                np.testing.assert_allclose(whole[small], flat.mean(axis=0)[small], rtol=1e-5, atol=1e-7)
                mean = np.where(small, whole, mean)
                for n, values in zip(members, np.split(mean, np.cumsum(sizes)[:-1]), strict=True):
                    averages.setdefault(n, []).append(values.reshape(cut(replicas[0][n], shard).shape))
        for n, parts in averages.items():
            names[n].grad = torch.from_numpy(np.concatenate(parts)[: names[n].shape[0]].copy())
        history.append({n: names[n].grad.numpy().copy() for n in averages})
        optimizer.step()
    return history, net, simulations


def shard_of(whole: np.ndarray, rank: int, ranks: int = SHARDS) -> np.ndarray:
    rows = -(-whole.shape[0] // ranks)
    return whole[rank * rows : (rank + 1) * rows]


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.full)])
def test_equals_replicas_of_two_shards_in_bits(replicas: int) -> None:
    rows = [(*run, accumulate) for run, accumulate in zip(RUNS, ("", "", "reduced"), strict=True)]
    ranks = run_ranks(replicas * SHARDS, in_turn, train, rows)
    for number, (_, bits, accumulate) in enumerate(rows):
        everyone = zip(*(ranks[shard][number]["grads"] for shard in range(SHARDS)), strict=True)
        heard = [{name: np.concatenate([each[name] for each in grads]) for name in grads[0]} for grads in everyone]
        history, net, simulations = simulated(replicas, bits, accumulate, heard)
        weights = {n: p.detach().numpy() for n, p in net.named_parameters() if p.requires_grad}
        for rank in range(replicas * SHARDS):
            got, (replica, shard) = ranks[rank][number], divmod(rank, SHARDS)
            for mine, expected in zip(got["grads"], history, strict=True):
                for name, grad in mine.items():
                    assert grad.tobytes() == shard_of(expected[name], shard).tobytes(), (rows[number], rank, name)
            for name, weight in got["weights"].items():
                assert weight.tobytes() == shard_of(weights[name], shard).tobytes(), (rows[number], rank, name)
            errors = got["errors"]
            assert sorted(errors["numels"]) == sorted(
                [cut(weights[n], shard).size for n in members] for members in UNITS
            )
            for numels, worker in zip(errors["numels"], errors["worker_errors"], strict=True):
                unit = next(u for u, m in enumerate(UNITS) if [cut(weights[n], 0).size for n in m] == numels)
                assert worker.numpy().tobytes() == simulations[unit, shard].worker_error[replica].tobytes()


# -- one run of four ranks --------------------------------------------------------------------------------------------


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


def errors_of(compression: FSDPCompression) -> dict[str, Any]:
    state = compression.state_dict()
    return {f"{key}{i}": e.numpy() for key in ("worker_errors", "server_errors") for i, e in enumerate(state[key])}


def started(seed: int = 0) -> tuple[Any, FSDPCompression, Any]:
    net, mesh = sharded(make(seed), "shard")
    return net, compress_fsdp(net, mesh, bucket_cap_mb=CAP), optimizer_of(net)


def clipped_step(net: Any, optimizer: torch.optim.Optimizer, rank: int, step: int, accumulate: str) -> None:
    optimizer.zero_grad()
    take_step(net, rank, step, accumulate)
    assert float(nn.utils.clip_grad_norm_(net.parameters(), 0.01).full_tensor()) > 0.01
    optimizer.step()


def check_resume(rank: int, started: Callable[..., tuple[Any, FSDPCompression, Any]], folder: str = "") -> None:
    """Compare a resumed run with an uninterrupted one. Both clip gradients."""
    net, compression, optimizer = started()
    again, resumed, other = started(seed=7)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                for p, q in zip(net.parameters(), again.parameters(), strict=True):
                    q.to_local().copy_(p.to_local())
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if folder:
                save_state(compression, folder)
                load_state(resumed, folder)
            else:
                resumed.load_state_dict(compression.state_dict())
        clipped_step(net, optimizer, rank, step, "unreduced" if step == 3 else "")
        if step >= 2:
            clipped_step(again, other, rank, step, "unreduced" if step == 3 else "")
    assert same(local(net, "weights"), local(again, "weights")) and same(errors_of(compression), errors_of(resumed))
    assert resumed.steps == compression.steps == 4


def check_not_finite(rank: int, started: Callable[..., tuple[Any, FSDPCompression, Any]]) -> None:
    """One rank has a gradient that is not finite, in one step: nobody's errors change in it."""
    net, compression, optimizer = started()
    take_step(net, rank, 0, "")
    optimizer.step()
    before = errors_of(compression)
    net.zero_grad()
    hook = net.last.register_forward_hook(lambda *rest: rest[-1] * (float("inf") if rank == 3 else 1.0))
    with log_lines() as lines:
        take_step(net, rank, 1, "")
    said = [line for line in lines if re.search(r"step 2: gradients of rank (2, )?3 are not finite", line)]
    assert said or rank, lines  # in a replica FSDP2 has averaged them already
    assert not all(np.isfinite(g).all() for g in local(net).values())
    norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    assert not norm.full_tensor().isfinite()
    compression.step_taken()
    assert same(before, errors_of(compression)) and compression.steps_not_finite == 1
    hook.remove()
    net.zero_grad()
    take_step(net, rank, 2, "")
    assert all(np.isfinite(g).all() for g in local(net).values()) and same(before, errors_of(compression))
    optimizer.step()
    assert not same(before, errors_of(compression))


def low_precision(rank: int, world_size: int) -> dict[str, Any]:
    """bfloat16 as FSDP2's mixed precision has it; a loss scale is no part of the errors."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    found = []
    for scale in (1.0, 1024.0):
        net, mesh = sharded(make(), "hsdp", mp_policy=policy)
        compression = compress_fsdp(net, mesh, "int8", loss_scale=lambda scale=scale: scale)
        for step in range(2):
            net.zero_grad()
            (net(data(rank, step).bfloat16()).float().pow(2).mean() * scale).backward()
            compression.step_taken()
        found.append((local(net), errors_of(compression)))
    (grads, errors), (scaled, scaled_errors) = found
    assert all(np.array_equal(grad * 1024, scaled[name]) for name, grad in grads.items())
    assert same(errors, scaled_errors) and any(error.any() for error in errors.values())
    return grads


def losses(rank: int, world_size: int, how: str) -> tuple[list[float], float]:
    """Training on one batch per rank; "alone" is FSDP2's own all-reduce."""
    net = nn.Sequential(nn.Linear(13, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    torch.manual_seed(3)
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    mesh = init_device_mesh("cpu", (world_size // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    fully_shard(net[2], mesh=mesh)
    fully_shard(net, mesh=mesh)
    compression = None if how == "alone" else compress_fsdp(net, mesh, how)
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=1e-3), []
    for step in range(40):
        generator = torch.Generator().manual_seed(100 * rank + step)
        x, noise = torch.randn(32, 13, generator=generator), torch.randn(32, 1, generator=generator)
        loss = (net(x) - (x.sum(dim=1, keepdim=True) / 4).tanh() - noise / 2).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        found.append(float(whole) / 4)
    return found, 0.0 if compression is None else compression.metrics()["compression_ratio"]


@on_ranks(4)
def test_a_run_resumes_bit_for_bit(rank: int, world_size: int) -> None:
    check_resume(rank, started)


@on_ranks(4)
def test_errors_stay_if_a_gradient_is_not_finite(rank: int, world_size: int) -> None:
    check_not_finite(rank, started)


def test_replicas_are_alike_in_bits_in_low_precision() -> None:
    ranks = run_ranks(4, low_precision)
    assert all(same(ranks[shard], ranks[SHARDS + shard]) for shard in range(SHARDS))


def test_bytes_and_loss() -> None:
    """7.7 times fewer bytes between replicas than a ring of float32 values but for biases, and the loss of FSDP2."""
    (alone, _), (compressed, ratio) = (run_ranks(4, losses, how)[0] for how in ("alone", "int4"))
    biases = 128 + 128 + 1  # of a shard, in full
    values = 128 * 256 + 128 * 13 + 256 + biases
    assert ratio == pytest.approx(4 * values / (values * (0.5 + 2 / 128) + 4 * biases), rel=0.01)
    assert ratio > 7.3 and alone[-1] < 0.8 * alone[0]
    assert np.mean(compressed[-8:]) == pytest.approx(np.mean(alone[-8:]), rel=0.005)


# -- dropped gradients -------------------------------------------------------------------------------------------------


class Given(nn.Module):
    """Matrices whose gradients are what they are given; the second one is a unit of its own."""

    def __init__(self, inner: "Given | None" = None) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.zeros(64, 64)), inner

    def forward(self, grad: torch.Tensor, also: bool = False) -> torch.Tensor:
        loss = (self.weight * grad).sum()
        return loss + self.inner(grad) if self.inner is not None and also else loss


DROPPED = [((4,), ""), ((2, 2), ""), ((2, 2), "held back"), ((2, 2), "added up")]


class Scaled(nn.Module):
    """A matrix with large gradients, and small tensors; their gradients are what forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.norm, self.scale = (nn.Parameter(torch.zeros(shape)) for shape in ((40, 40), (64,), (1,)))

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * grad).sum() for p, grad in zip(self.parameters(), grads, strict=True)]).sum()


@on_ranks(2)
def test_small_tensors_beside_large_ones_move_as_uncompressed_ones(rank: int, world_size: int) -> None:
    for bits, mesh in (("int4", (2,)), ("int4", (2, 1)), ("int8", (2,))):
        devices = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
        net, exact = Scaled(), Scaled()
        fully_shard(net, mesh=devices["shard"])
        compress_fsdp(net, devices, bits)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0.0) for each in (net, exact)]
        for step in range(20):
            seeds = [torch.Generator().manual_seed(world_size * step + number) for number in range(world_size)]
            every = [[torch.randn(p.shape, generator=seed) + 0.3 for p in exact.parameters()] for seed in seeds]
            for grads in every:
                grads[0] *= 1e4
            net(every[rank]).backward()
            for p, *grads in zip(exact.parameters(), *every, strict=True):
                p.grad = sum(grads) / world_size
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name in ("norm", "scale"):
            found = getattr(net, name).full_tensor()
            torch.testing.assert_close(found, getattr(exact, name).data, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("bits", "most"), [("int4", 0.3), pytest.param("int8", 0.02, marks=pytest.mark.full)])
@on_ranks(4)
def test_gradients_that_are_dropped_leave_nothing_behind(rank: int, world_size: int, bits: str, most: float) -> None:
    """100 times larger, and thrown away by zero_grad(): before FSDP2's all-reduce too, and beside what adds up."""
    for sizes, how in DROPPED:
        for to_none in (True, False):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
            net: Any = Given(fully_shard(Given(), mesh=mesh))
            compression = compress_fsdp(fully_shard(net, mesh=mesh), mesh, bits)
            optimizer, mean = torch.optim.SGD(net.parameters(), lr=1.0), torch.zeros(64, 64)
            for step in range(30):
                parts = [(torch.randn(64, 64, generator=torch.Generator().manual_seed(9 * r + step))) for r in range(4)]
                net.set_requires_all_reduce(how != "held back")
                net(100 * parts[rank], also=True).backward()
                optimizer.zero_grad(set_to_none=to_none)
                for synchronize in (True, False, True) if how == "added up" else (True,):
                    net.set_requires_all_reduce(synchronize)
                    net(parts[rank]).backward()
                    mean += sum(parts) / world_size
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            assert float((net.weight.full_tensor() + mean).square().mean().sqrt()) < most, (sizes, how, to_none)
            assert not net.inner.weight.full_tensor().any(), (sizes, how, to_none)
            assert sum(error.any() for error in errors_of(compression).values()) == len(sizes), "of the first unit"


# -- refusals ---------------------------------------------------------------------------------------------------------


def check_refusals(calls: dict[str, Callable[[], Any]]) -> None:
    for text, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=re.escape(text)):
            call()


@on_ranks(4)
def test_refuses_by_name(rank: int, world_size: int) -> None:
    net, mesh = sharded(make(), "shard")
    over_all = fully_shard(make(), mesh=init_device_mesh("cpu", (world_size,)))
    hooked, _ = sharded(make(), "shard")
    hooked.set_all_reduce_hook(lambda grads: None)
    divided, _ = sharded(make(), "hsdp")
    divided.set_gradient_divide_factor(3.0)
    wide, _ = sharded(make().double(), "shard")
    single = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    with log_lines() as lines:
        alone = compress_fsdp(fully_shard(make(), mesh=single["shard"]), single).describe()
    assert "nothing is compressed, since there is one replica of 4" in alone and len(lines) == (rank == 0)
    assert all("compresses nothing: the mesh has one replica of 4 rank(s)" in line for line in lines)
    calls: dict[str, Any] = {
        "mesh must be a DeviceMesh": lambda: compress_fsdp(net, "int4"),
        "not sharded by FSDP2": lambda: compress_fsdp(make(), mesh),
        "mesh=mesh['shard']": lambda: compress_fsdp(over_all, mesh),
        "hook already": lambda: compress_fsdp(hooked, mesh),
        "divides gradients by 3.0": lambda: compress_fsdp(divided, mesh),
        "must be float32": lambda: compress_fsdp(wide, mesh),
        "compression must be one of": lambda: compress_fsdp(net, mesh, "int2"),
        "the state dict has bits=4": lambda: compress_fsdp(sharded(make(), "shard")[0], mesh, "int8").load_state_dict(
            compress_fsdp(net, mesh).state_dict()
        ),
    }
    check_refusals(calls)


@on_ranks(4)
def test_replicas_must_start_alike(rank: int, world_size: int) -> None:
    net, mesh = sharded(make(seed=rank // SHARDS), "shard")
    with pytest.raises((ValueError, RuntimeError), match="do all replicas start from the same model"):
        compress_fsdp(net, mesh)
        take_step(net, rank, 0, "")


# -- checkpoints ------------------------------------------------------------------------------------------------------


def checkpointed(rank: int, world_size: int, folder: str, shards: int, load: bool) -> dict[str, Any]:
    """The errors that this rank has, NaN elsewhere; without replicas the mesh has one dimension."""
    net, names = make(), ("replicate", "shard")
    sizes = (world_size // shards, shards) if shards < world_size else (shards,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])
    fully_shard(net.first, mesh=mesh)
    if not load:  # other units where it is loaded
        fully_shard([net.second, net.frozen, net.last], mesh=mesh)
    fully_shard(net, mesh=mesh)
    compression = compress_fsdp(net, mesh, bucket_cap_mb=CAP * (2 if load else 1))
    if load:
        load_state(compression, folder)
    else:
        for step in range(3):
            take_step(net, rank, step, "")
            compression.step_taken()
        save_state(compression, folder)
    found: dict[str, Any] = {"steps": compression.steps}
    for errors in compression.units:
        for kind, shard, start, run in errors.runs(errors.kept.values(), compression.replica.rank):
            for (name, offset, count, first), param in zip(errors.unit.places(shard), errors.unit.params, strict=True):
                low, high = max(start, offset), min(start + run.numel(), offset + count)
                if low < high:
                    whole = found.setdefault(f"{kind} {name}", np.full(param.numel(), np.nan, np.float32))
                    whole[first + low - offset : first + high - offset] = run[low - start : high - start].numpy()
    return found


@pytest.mark.parametrize("shards", [2, 4])
def test_a_checkpoint_loads_on_any_mesh(shards: int, tmp_path: Path) -> None:
    """Worker errors become the mean of the replicas', or ranks', server errors stay with their elements."""
    saved = run_ranks(4, checkpointed, str(tmp_path), shards, False)
    for world_size, wanted in ((4, 2), (3, 1), (4, 4), (2, 2)):
        together, here = 1 if shards == 4 else shards, 1 if wanted == world_size else wanted  # ranks of a replica
        for rank, found in enumerate(run_ranks(world_size, checkpointed, str(tmp_path), wanted, True)):
            assert found.pop("steps") == 3
            assert any(name.startswith("server_error") for name in found) == (wanted < world_size)
            for name, mine in found.items():
                known = [result[name] for result in saved if name in result]
                if name.startswith("server_error"):
                    whole = np.nanmean(known, axis=0) if known else np.zeros_like(mine)
                else:
                    groups = [saved[first : first + together] for first in range(0, 4, together)]
                    replicas = [np.nanmean([g[name] for g in group if name in g], axis=0) for group in groups]
                    exact = (world_size, wanted) == (4, shards)
                    whole = replicas[rank // here] if exact else np.mean(replicas, axis=0)
                part = ~np.isnan(mine)
                assert not np.isnan(whole).any() and (part.any() or whole.size < 100)
                np.testing.assert_allclose(mine[part], whole[part], atol=2e-3, err_msg=name)


class OnGPU(torch.Tensor):
    """A tensor that says that it lies on a GPU, and notes what is done with it."""

    done: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":
            return torch.device("cuda")
        cls.done.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)

    def record_stream(self, stream: object) -> None:
        self.done.append("record_stream")


def test_gradients_of_a_later_pass_keep_their_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 drops the buffer of a unit right after the hook, and the next unit's reduce-scatter may get its memory."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: None)
    compression, errors = FSDPCompression.__new__(FSDPCompression), UnitErrors.__new__(UnitErrors)
    compression.communicator, compression._pass, compression._checked = SimpleNamespace(world_size=2), -1, True
    errors.unit, errors.waiting = SimpleNamespace(numel=3, more_to_come=True), None
    grads = torch.ones(3).as_subclass(OnGPU)
    OnGPU.done.clear()
    compression._average(errors, grads)
    assert OnGPU.done == ["numel", "record_stream", "clone", "zero_"]
