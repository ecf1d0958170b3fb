"""Memory, traffic and step time of ZeroOptimizer beside DDP, torch's ZeroRedundancyOptimizer and FSDP2.

    python scripts/benchmark_zero.py --out zero.json

Every variant trains the same GPT-2-like model on the same tokens. Each is built, run and torn down in turn, and that
several times over, so that a slow spell of the machine meets all of them. What is measured, on each rank:

- live bytes: every tensor storage that is alive, counted by a dispatch mode as they come and go (one untimed pass), at
  the end of backward and after the step; of these parameters, gradients, optimizer state and master weights by holder;
  the rest is buckets and whatever else a variant keeps. For ZeRO the formula without buckets stands beside them.
- RSS at the end of backward, from /proc.
- bytes sent: what the loopback interface carried per step and rank (headers included): keep the machine idle.
- step time: forward, backward, step, gradients thrown away; the median over all rounds.
"""

import gc
import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import MIB, Table, in_turn, on_ranks, parser_of, print_table, shard, small_gpt2, write_measurements
from _slow_network import sent_bytes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_compressopt import ZeroOptimizer, estimate_zero_memory
from hf_compressopt.zero.memory import release_memory, resident_bytes

BUCKET_MB = 25.0
DDP = "DDP + AdamW"


class LiveBytes(TorchDispatchMode):
    """A counter of the bytes of all tensor storages that are born inside and still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._meet(getattr(leaf, "_local_tensor", leaf))
        return result

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            weakref.finalize(storage, self._forget, key)
            self._known[key] = 0
        self.total += size - self._known[key]
        self._known[key] = size

    def _forget(self, key: int) -> None:
        self.total -= self._known.pop(key)


@dataclass
class Training:
    """A model, and what one step of it is made of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def parts(self) -> dict[str, int]:
        params = [local(p) for p in self.model.parameters()]
        grads = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        states = [local(v) for row in self.optimizer.state.values() for v in row.values() if isinstance(v, Tensor)]
        if isinstance(self.optimizer, ZeroOptimizer):
            grads += [g.average for g in self.optimizer.partition.reducer.slices if g.average is not None]
            for part in self.optimizer.partition.parts():
                states += [v for v in part.state.values() if isinstance(v, Tensor)]
                states += [] if part.direct else [part.tensor]
        elif hasattr(self.optimizer, "optim"):  # ZeroRedundancyOptimizer
            states = [v for row in self.optimizer.optim.state.values() for v in row.values() if isinstance(v, Tensor)]
        return {"parameters": nbytes(params), "gradients": nbytes(grads), "states": nbytes(states)}


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def nbytes(tensors: list[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def make_model(options: dict[str, Any]) -> nn.Module:
    sizes = (options[name] for name in ("layers", "width", "vocabulary", "length"))
    return small_gpt2(*sizes).to(getattr(torch, options["dtype"]))


def ddp(options: dict[str, Any], partitioned: bool) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make_model(options), bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    if partitioned:
        return Training(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4))
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def fsdp2(options: dict[str, Any]) -> Training:
    model = make_model(options)
    shard(model, 1, resharded=False)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def ours(options: dict[str, Any], stage: int) -> Training:
    model = make_model(options)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=stage, bucket_cap_mb=BUCKET_MB, lr=1e-4)
    return Training(model, optimizer)


VARIANTS: dict[str, Callable[[dict[str, Any]], Training]] = {
    DDP: partial(ddp, partitioned=False),
    "ZeroRedundancyOptimizer": partial(ddp, partitioned=True),
    "FSDP2, no reshard": fsdp2,
    "ZeroOptimizer, stage 1": partial(ours, stage=1),
    "ZeroOptimizer, stage 2": partial(ours, stage=2),
}


def backward(training: Training, options: dict[str, Any]) -> None:
    tokens = torch.randint(0, options["vocabulary"], (options["batch"], options["length"]))
    training.model(input_ids=tokens, labels=tokens).loss.backward()


def finish(training: Training) -> None:
    training.optimizer.step()
    training.optimizer.zero_grad()


def measure_memory(make: Callable[[dict[str, Any]], Training], options: dict[str, Any]) -> dict[str, Any]:
    """Live bytes in the third step; in ZeRO-1 that of the first of two micro-batches."""
    release_memory()
    before = resident_bytes()
    with LiveBytes() as live:
        training = make(options)
        for _ in range(2):
            backward(training, options)
            finish(training)
        gc.collect()
        accumulates = isinstance(training.optimizer, ZeroOptimizer) and training.optimizer.stage == 1
        with training.optimizer.no_sync() if accumulates else nullcontext():
            backward(training, options)
        found = {"after_backward": live.total, "rss": resident_bytes() - before, **training.parts()}
        if accumulates:
            backward(training, options)
        finish(training)
        gc.collect()
        return found | {"after_step": live.total, "numel": sum(p.numel() for p in training.model.parameters())}


def measure_time(make: Callable[[dict[str, Any]], Training], options: dict[str, Any]) -> tuple[list[float], float]:
    """Seconds of each step, and bytes on the loopback interface per step and rank."""
    training = make(options)
    for _ in range(options["warmup"]):
        backward(training, options)
        finish(training)
    dist.barrier()
    before = sent_bytes("lo")
    seconds = []
    for _ in range(options["steps"]):
        dist.barrier()
        start = time.perf_counter()
        backward(training, options)
        finish(training)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    sent = (sent_bytes("lo") - before) / options["steps"] / dist.get_world_size()
    dist.barrier()
    return seconds, sent


def measure_variants(rank: int, _: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Memory of each variant, then its times: in each round the variants take turns."""
    names = [name for name in VARIANTS if options["only"] is None or options["only"] in name]
    result: dict[str, Any] = {name: {"seconds": [], "sent": []} for name in names}
    for name in names:
        result[name]["memory"] = measure_memory(VARIANTS[name], options)
        release_memory()
    for number, name in in_turn(names, options["rounds"]):
        torch.manual_seed(rank)
        seconds, sent = measure_time(VARIANTS[name], options)
        result[name]["seconds"] += seconds
        result[name]["sent"].append(sent)
        release_memory()
        if rank == 0:
            print(f"round {number + 1}: {name}: {statistics.median(seconds):.3f} s", flush=True)
    return result


def table(ranks: list[dict[str, Any]], dtype: str) -> Table:
    """MiB of the rank that has most, and medians of bytes and times."""
    rows = [["method", "parameters", "gradients", "state", "other", "all", "formula", "after step", "RSS", "sent", "s"]]
    kind = getattr(torch, dtype)
    for name, found in ranks[0].items():
        most = {key: max(rank[name]["memory"][key] for rank in ranks) for key in found["memory"]}
        known, formula = [most[key] for key in ("parameters", "gradients", "states")], 0
        if name.startswith("ZeroOptimizer"):
            formula = estimate_zero_memory(most["numel"], len(ranks), int(name[-1]), dtype=kind, bucket_cap_mb=0).total
        memory = [*known, most["after_backward"] - sum(known), most["after_backward"], formula, most["after_step"]]
        seconds = statistics.median(statistics.median(rank[name]["seconds"]) for rank in ranks)
        sent = statistics.median(found["sent"]) / MIB
        rows.append([name, *(f"{n / MIB:.0f}" for n in (*memory, most["rss"])), f"{sent:.1f}", f"{seconds:.3f}"])
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    sizes = {"layers": 12, "width": 768, "vocabulary": 20000, "length": 64, "batch": 1}
    for name, value in {**sizes, "rounds": 3, "steps": 4, "warmup": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="(%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--only", help="only variants with this in their name")
    parser.add_argument("--out", type=Path, help="write everything that was measured to this JSON file")
    options = vars(parser.parse_args())
    out = options.pop("out")
    measured: dict[str, Any] = {}
    for world_size in options["ranks"]:
        ranks = measured[str(world_size)] = on_ranks(measure_variants, world_size, options, threads=options["threads"])
        title = f"{world_size} ranks, {options['dtype']}, buckets of {BUCKET_MB:g} MiB; MiB of the rank with most"
        print_table(title, table(ranks, options["dtype"]))
    write_measurements(out, options, **measured)


if __name__ == "__main__":
    main()
