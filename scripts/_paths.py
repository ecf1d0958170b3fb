"""Every path of the package between ranks, each a short training on processes that share one device.

Processes talk over gloo, which takes tensors of GPUs too, so that one GPU is enough. Each path is trained twice, with
native kernels and with the reference. Its parameters must be alike on all ranks, its loss must fall, and both trainings
must end at the same loss. A rank that fails, hangs or dies spoils its own path alone.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmark_host import counted_waits
from benchmark_kernels import kernels_from
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import GradientCompression, ZeroOptimizer, average_gradients

STEPS, FREEZE = 12, 4
SMALL = 0.02  # MiB of a bucket, of which a model has several
SECONDS = {"cuda": 20.0, "cpu": 60.0}  # that a collective may take; a path takes thrice as long at most
NEAR = 0.02  # by how much the losses of native kernels and of the reference may differ

# -- what is trained --------------------------------------------------------------------------------------------------


#: 90 tensors, more than one of a GPU's small tables holds; a CPU has no such tables.
LAYERS = {"cuda": 44, "cpu": 15}


class Net(nn.Module):
    """Layers of odd sizes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(33, 33) for _ in range(layers))
        self.head = nn.Linear(33, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return self.head(x)


@dataclass
class Rank:
    """The place of a rank in a path, and what it notes there."""

    rank: int
    world_size: int
    device: torch.device
    folder: Path
    losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def net(self) -> Net:
        return Net(LAYERS[self.device.type]).to(self.device)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of this rank's examples: different on each rank, the same every fourth step."""
        random = torch.Generator().manual_seed(100 * (step % 4) + self.rank)
        x, y = (torch.randn(16, numel, generator=random).to(self.device) for numel in (33, 7))
        return (model(x).float() - y).square().mean()

    def note(self, loss: Tensor) -> None:
        self.losses.append(loss.item())

    @contextmanager
    def waiting_in_backward(self, step: int) -> Iterator[None]:
        """Count, in the last steps, what waits for the device inside: all backward passes are to wait for nothing."""
        if step < STEPS - 2:
            yield
            return
        counts: Counter[str] = Counter()
        with counted_waits(self.device, counts):
            yield
        self.facts["waits_in_backward"] = sum(counts.values())


def train(
    rank: Rank,
    model: nn.Module,
    optimizer: Any,
    average: Callable[[], object] = lambda: None,
    steps: Sequence[int] = range(STEPS),
    clips: bool = True,
) -> None:
    """Train for some steps; average is called after each backward."""
    backward = getattr(optimizer, "backward", Tensor.backward)  # a ZeroOptimizer has one of its own
    for step in steps:
        optimizer.zero_grad()
        loss = rank.loss(model, step)
        with rank.waiting_in_backward(step):
            backward(loss)
        rank.note(loss)
        average()
        if clips and hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(1.0)
        elif clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# -- paths ------------------------------------------------------------------------------------------------------------


def in_ddp(rank: Rank, model: nn.Module) -> DistributedDataParallel:
    devices = [rank.device.index] if rank.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=SMALL)


def optimizer_in_ddp(rank: Rank, name: str, **options: Any) -> nn.Module:
    """An optimizer of the package, and DDP with its hook where it has one."""
    net = rank.net()
    model = in_ddp(rank, net)
    optimizer = getattr(hf_compressopt, name)(net.parameters(), lr=3e-3, **options)
    if hasattr(optimizer, "plan"):
        hf_compressopt.attach_ddp(model, optimizer)
    train(rank, model, optimizer)
    with getattr(optimizer, "averaged_parameters", nullcontext)():  # 0/1 Adam's are apart between two syncs
        return copies(net.parameters())


def copies(tensors: Iterable[Tensor]) -> nn.Module:
    return nn.ParameterList(nn.Parameter(tensor.detach().clone()) for tensor in tensors)


def low_bit_gradients(rank: Rank, compression: str, **options: Any) -> nn.Module:
    """AdamW behind DDP's hook of low-bit messages."""
    net = rank.net()
    model = in_ddp(rank, net)
    state = GradientCompression(net.named_parameters(), compression, bucket_cap_mb=SMALL, **options)
    model.register_comm_hook(state, hf_compressopt.compress_hook)
    train(rank, model, torch.optim.AdamW(net.parameters(), lr=3e-3))
    return net


def without_ddp(rank: Rank, name: str, **options: Any) -> nn.Module:
    net = rank.net()
    optimizer = getattr(hf_compressopt, name)(net.parameters(), lr=3e-3, bucket_cap_mb=SMALL, **options)
    train(rank, net, optimizer, partial(average_gradients, optimizer))
    return net


def zero(rank: Rank, **options: Any) -> nn.Module:
    net = rank.net()
    options |= {"lr": 3e-3, "bucket_cap_mb": SMALL}
    train(rank, net, ZeroOptimizer(net.parameters(), torch.optim.AdamW, **options))
    return net


def fsdp(rank: Rank, replicas: int, compression: str) -> nn.Module:
    """FSDP2 over all ranks, or over a part of them and replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names, shape = ("replicate", "shard"), (replicas, rank.world_size // replicas)
    first = int(replicas == 1)
    backend = dict.fromkeys(names[first:], "gloo")  # where there are GPUs torch would take NCCL, one rank for each GPU
    mesh = init_device_mesh(rank.device.type, shape[first:], mesh_dim_names=names[first:], backend_override=backend)
    net = rank.net()
    for start in range(0, len(net.layers), 11):
        fully_shard(list(net.layers[start : start + 11]), mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    hf_compressopt.compress_fsdp(net, mesh, compression, bucket_cap_mb=SMALL)
    train(rank, net, torch.optim.AdamW(net.parameters(), lr=3e-3), clips=False)
    return copies(p.full_tensor() for p in net.parameters())  # type: ignore[attr-defined]


def overflow_on_one_rank(rank: Rank) -> nn.Module:
    """A gradient of rank 1 is infinite in one compressed step: all ranks skip that step, and no other."""
    net = rank.net()
    model = in_ddp(rank, net)
    optimizer = hf_compressopt.OnebitAdam(net.parameters(), lr=3e-3, freeze_step=FREEZE, bucket_cap_mb=SMALL)
    scaler = hf_compressopt.GradScaler(rank.device.type, init_scale=256.0)
    hf_compressopt.attach_ddp(model, optimizer, loss_scale=scaler.get_scale)
    dtype = torch.float16 if rank.device.type == "cuda" else torch.bfloat16
    skipped = []
    for step in range(STEPS):
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        with torch.autocast(rank.device.type, dtype):
            loss = rank.loss(model, step)
        scaler.scale(loss).backward()
        rank.note(loss)
        if step == FREEZE + 3 and rank.rank == 1:
            net.head.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)):
            skipped.append(step)
    require(skipped == [FREEZE + 3], f"steps {skipped} were skipped, not {[FREEZE + 3]}")
    return net


def saved_and_resumed(rank: Rank, make: Callable[[nn.Module], Any], average: bool) -> nn.Module:
    """Save in the background, go on; load what was saved into a fresh optimizer, and train on to the same bits."""

    def steps_of(net: nn.Module, optimizer: Any, steps: Sequence[int]) -> None:
        train(rank, net, optimizer, partial(average_gradients, optimizer) if average else lambda: None, steps)

    net = rank.net()
    optimizer = make(net)
    steps_of(net, optimizer, range(STEPS - 5))
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    pending = hf_compressopt.async_save_state(optimizer, rank.folder / "saved")
    steps_of(net, optimizer, range(STEPS - 5, STEPS))
    pending.result()
    again = rank.net()
    again.load_state_dict(saved)
    optimizer = make(again)
    hf_compressopt.load_state(optimizer, rank.folder / "saved")
    kept = list(rank.losses)
    steps_of(again, optimizer, range(STEPS - 5, STEPS))
    rank.losses = kept
    pairs = zip(net.parameters(), again.parameters(), strict=True)
    require(all(torch.equal(p, q) for p, q in pairs), "the resumed training ends at other bits")
    return again


def onebit(net: nn.Module) -> Any:
    return hf_compressopt.OnebitAdam(net.parameters(), lr=3e-3, freeze_step=FREEZE, bucket_cap_mb=SMALL)


def zero2(net: nn.Module) -> Any:
    return ZeroOptimizer(net.parameters(), torch.optim.AdamW, lr=3e-3, stage=2, bucket_cap_mb=SMALL)


def require(true: bool, words: str) -> None:
    if not true:
        raise AssertionError(words)


BUCKETS, SOON = {"bucket_cap_mb": SMALL}, {"freeze_step": FREEZE}
BOTH = {"grad_compression": "int4", "param_compression": "int4"}
NODES = {"topology": "hierarchical", "node_size": 2}

Path_ = Callable[[Rank], nn.Module]
#: By the number of ranks.
PATHS: dict[int, dict[str, Path_]] = {
    2: {
        "OnebitAdam": partial(optimizer_in_ddp, name="OnebitAdam", **SOON, **BUCKETS),
        "ZeroOneAdam": partial(optimizer_in_ddp, name="ZeroOneAdam", local_step_scaler=2, **SOON, **BUCKETS),
        "OnebitLamb": partial(optimizer_in_ddp, name="OnebitLamb", **SOON, **BUCKETS),
        "FusedAdam": partial(optimizer_in_ddp, name="FusedAdam"),
        "Lamb": partial(optimizer_in_ddp, name="Lamb"),
        "int4 hook": partial(low_bit_gradients, compression="int4"),
        "int8 hook": partial(low_bit_gradients, compression="int8"),
        "OnebitAdam, sent while backward runs": partial(
            optimizer_in_ddp, name="OnebitAdam", clip="late", max_grad_norm=1.0, **SOON, **BUCKETS
        ),
        "OnebitAdam, zero_stage=1": partial(without_ddp, name="OnebitAdam", zero_stage=1, **SOON),
        "OnebitAdam, zero_stage=2": partial(without_ddp, name="OnebitAdam", zero_stage=2, max_grad_norm=1.0, **SOON),
        "ZeRO-1": partial(zero, stage=1),
        "ZeRO-2": partial(zero, stage=2),
        "ZeRO-2, int4 both ways": partial(zero, stage=2, **BOTH),
        "ZeRO-2, offload": partial(zero, stage=2, offload_optimizer="cpu"),
        "FSDP2, int4 between replicas": partial(fsdp, replicas=2, compression="int4"),
        "FSDP2, int4 over all ranks": partial(fsdp, replicas=1, compression="int4"),
        "GradScaler, an overflow on one rank": overflow_on_one_rank,
        "OnebitAdam, saved and resumed": partial(saved_and_resumed, make=onebit, average=True),
        "ZeRO-2, saved and resumed": partial(saved_and_resumed, make=zero2, average=False),
    },
    4: {
        "OnebitAdam, hierarchical": partial(optimizer_in_ddp, name="OnebitAdam", **NODES, **SOON, **BUCKETS),
        "int4 hook, hierarchical": partial(low_bit_gradients, compression="int4", **NODES),
        "ZeRO-2, int4 both ways, hierarchical": partial(zero, stage=2, **BOTH, **NODES),
    },
}
#: What a backward pass may wait for, where it is not nothing: whether a gradient was not finite.
WAITS = {"int4 hook": 1, "int8 hook": 1, "int4 hook, hierarchical": 1}
#: Paths whose backward copies to host memory, or, on a CPU, reads numbers that are there anyway.
MAY_WAIT = {"cuda": ("offload",), "cpu": ("while backward runs", "zero_stage=2", "FSDP2")}
NEEDS_GPU = ("ZeRO-2, offload",)

# -- ranks ------------------------------------------------------------------------------------------------------------


def run_rank(number: int, world_size: int, names: Sequence[str], device: str, folder: str) -> None:
    """Run paths one after the other, each in a process group of its own, and write what became of each."""
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    torch.set_num_threads(1)
    for name in names:
        result: dict[str, Any] = {"began": time.time()}
        for kernels in ("native", "reference"):
            try:
                result[kernels] = run_path(name, kernels, number, world_size, place, Path(folder))
            except Exception as error:
                result[kernels] = {"error": f"{type(error).__name__}: {error}"[:1000]}
                print(f"rank {number}, {name}, {kernels} kernels:\n{traceback.format_exc()}", flush=True)
                break
            finally:
                gc.collect()  # who keeps a gloo group alive lets the others wait for it
        result["seconds"] = round(time.time() - result.pop("began"), 2)
        done = Path(folder, f"{names.index(name)}.{number}")
        done.with_suffix(f".{number}.tmp").write_text(json.dumps(result))
        done.with_suffix(f".{number}.tmp").rename(done)


def run_path(name: str, kernels: str, number: int, world_size: int, device: torch.device, folder: Path) -> Any:
    place = folder / f"{name} {kernels}".replace("/", " ").replace("=", "")
    place.mkdir(exist_ok=True)
    store = dist.FileStore(f"{place}/store", world_size)
    timeout = timedelta(seconds=SECONDS[device.type])
    dist.init_process_group("gloo", store=store, rank=number, world_size=world_size, timeout=timeout)
    rank = Rank(number, world_size, device, place)
    chosen: AbstractContextManager[Any] = kernels_from("reference") if kernels == "reference" else nullcontext()
    try:
        store.set(f"connected {number}", "")
        store.wait([f"connected {each}" for each in range(world_size)])  # a rank that fails at once closes its end
        with chosen:
            trained = PATHS[world_size][name](rank)
        digest = hashlib.sha256()
        for param in trained.parameters():
            digest.update(param.detach().cpu().contiguous().view(-1).numpy().tobytes())
        dist.barrier()
        losses = [sum(part) / len(part) for part in (rank.losses[:4], rank.losses[-4:])]  # of the same examples
        return {"digest": digest.hexdigest()[:16], "losses": losses, **rank.facts}
    finally:
        dist.destroy_process_group()


def verdict(name: str, ranks: Sequence[dict[str, Any]], device: str) -> dict[str, Any]:
    """What ranks found in a path, as a row whose "ok" says whether all is well."""
    row = {"path": name, "ranks": len(ranks), "seconds": max(rank.get("seconds", 0) for rank in ranks)}
    parts = [rank.get(kernels, {}) for rank in ranks for kernels in ("native", "reference")]
    if errors := [part["error"] for part in parts if "error" in part]:
        return {"ok": False, **row, "error": " | ".join(dict.fromkeys(errors))}
    native, reference = ([rank[kernels] for rank in ranks] for kernels in ("native", "reference"))
    first, last = native[0]["losses"]
    other = reference[0]["losses"][1]
    waits = max(part.get("waits_in_backward", 0) for part in native)
    wrong = []
    if len({part["digest"] for part in native}) > 1:
        wrong.append("the ranks have other parameters than one another")
    if not last < first:
        wrong.append("the loss does not fall")
    if not abs(last - other) <= NEAR * abs(other):
        wrong.append("the loss is not that of the reference kernels")
    if waits > WAITS.get(name, 0) and not any(words in name for words in MAY_WAIT[device]):
        wrong.append(f"backward waits {waits} times for the device")
    same = native[0]["digest"] == reference[0]["digest"]
    row |= {"losses": [first, last], "loss_of_reference": other, "bits_of_reference": same, "waits_in_backward": waits}
    return {"ok": not wrong, **row, **({"error": "; ".join(wrong)} if wrong else {})}


def run_paths(
    world_size: int,
    device: torch.device,
    report: Callable[[dict[str, Any]], None],
    names: Sequence[str] = (),
    end: float = math.inf,
) -> None:
    """Run paths on so many processes that share a device, and report a row for each as soon as it is there.

    Paths that have not ended by ``end``, by time.time(), are reported with "ok" None.
    """
    todo = [name for name in names or PATHS[world_size] if device.type == "cuda" or name not in NEEDS_GPU]
    while todo and time.time() < end:
        with tempfile.TemporaryDirectory() as folder:
            given = (world_size, todo, str(device), folder)
            context = mp.start_processes(run_rank, given, world_size, join=False, start_method="spawn")
            died, began, done = "", time.time(), 0
            while done < len(todo) and not died and time.time() < end:
                files = [Path(folder, f"{done}.{rank}") for rank in range(world_size)]
                try:
                    ended = context.join(timeout=0.2)
                except Exception as error:  # a rank died, and the others were ended
                    ended, died = True, f"{error}"[:1000]
                if all(file.exists() for file in files):
                    report(verdict(todo[done], [json.loads(file.read_text()) for file in files], device.type))
                    done, began, died = done + 1, time.time(), died if done + 1 < len(todo) else ""
                elif ended:
                    died = died or "a rank ended too early"
                elif time.time() - began > 3 * SECONDS[device.type]:
                    died = f"it took more than {3 * SECONDS[device.type]:.0f} s"
            for process in context.processes:
                process.kill()
                process.join()
            if died:
                report({"ok": False, "path": todo[done], "ranks": world_size, "seconds": 0, "error": died})
                done += 1
            todo = todo[done:]
    for name in todo:
        report({"ok": None, "path": name, "ranks": world_size, "because": "no time is left"})
