"""Speed and memory of checkpoints beside the disk's own speed, torch.save and torch.distributed.checkpoint (DCP).

    python scripts/benchmark_checkpoint.py --out build/benchmark_checkpoint.json

Every rank holds the state of ZeRO-1 (its share of two moments per parameter) or of OnebitAdam (two moments that all
ranks hold, and its errors). In each round every variant saves and loads it once, in turn, and so does the disk alone:

- disk: each rank writes as many bytes as its shard has, from memory, and calls fsync; then reads them into memory. As
  root the page cache is dropped before every read (--keep-cache leaves it).
- save: seconds until the checkpoint is durable, of the slowest rank; without fsync where the variant has none.
- blocked: seconds that the training stands still; of a save in the background until the call returns.
- RSS: growth of the resident set at its peak, in save and load, of the rank that grew most; in the first round.

The disk's seconds over a variant's are its share of the disk's speed: 1 is as fast.
"""

import gc
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from _common import MIB, gloo_ranks, in_turn, markdown, parser_of, write_measurements
from torch import nn

from hf_compressopt import OnebitAdam, ZeroOptimizer, async_save_state, load_state, save_state
from hf_compressopt.checkpoint.io import checkpointable
from hf_compressopt.checkpoint.save import take_snapshot
from hf_compressopt.zero.memory import release_memory, resident_bytes

BLOCK = 4 * MIB


def parameters(options: dict[str, Any]) -> list[nn.Parameter]:
    """Square matrices of about as many elements as asked for, alike on all ranks."""
    torch.manual_seed(0)
    width = options["width"]
    return [nn.Parameter(torch.randn(width, width)) for _ in range(max(options["parameters"] // width**2, 1))]


def make(options: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer with state."""
    params = parameters(options)
    if options["optimizer"] == "onebit":
        return OnebitAdam(params, lr=1e-3, freeze_step=1, state="float32")
    optimizer = ZeroOptimizer(params, torch.optim.AdamW, stage=1, lr=1e-3)
    sum(p.square().mean() for p in params).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def tensors_of(optimizer: Any, folder: str) -> dict[str, torch.Tensor]:
    """This rank's state for torch.save and DCP: plain tensors under names of its own."""
    snapshot = take_snapshot(checkpointable(optimizer), Path(tempfile.mkdtemp(dir=folder)), None, "names")
    snapshot.remove()
    dist.barrier()
    return {f"rank{dist.get_rank()}/{tensor.key}@{tensor.start}": tensor.local for tensor in snapshot.tensors}


class Variant:
    """One way to write a state and to read it back; ``save`` returns what finishes it, where it goes on behind."""

    def __init__(self, optimizer: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        self.optimizer, self.tensors, self.folder = optimizer, tensors, folder
        self.file = folder / f"{dist.get_rank()}.pt"

    def save(self) -> Callable[[], Any] | None:
        raise NotImplementedError

    def load(self) -> None:
        raise NotImplementedError


class Disk(Variant):
    """The same bytes from one buffer, and fsync."""

    buffer = memoryview(os.urandom(BLOCK))

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        nbytes = sum(t.numel() * t.element_size() for t in self.tensors.values())
        with open(self.file, "wb", buffering=0) as file:
            for low in range(0, nbytes, BLOCK):
                file.write(self.buffer[: min(BLOCK, nbytes - low)])
            os.fsync(file.fileno())

    def load(self) -> None:
        space = bytearray(BLOCK)
        with open(self.file, "rb", buffering=0) as file:
            while file.readinto(space):
                pass


class Ours(Variant):
    def save(self) -> Callable[[], Any] | None:
        save_state(self.optimizer, self.folder)
        return None

    def load(self) -> None:
        load_state(self.optimizer, self.folder)


class OursBehind(Ours):
    def save(self) -> Callable[[], Any]:
        return async_save_state(self.optimizer, self.folder).result


class TorchSave(Variant):
    """A file for each rank."""

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.tensors, self.file)

    def load(self) -> None:
        for key, value in torch.load(self.file, weights_only=True).items():
            self.tensors[key].copy_(value)


class Dcp(Variant):
    write: Callable[..., Any] = staticmethod(dcp.save)

    def save(self) -> Callable[[], Any] | None:
        writer = dcp.FileSystemWriter(self.folder, sync_files=True, overwrite=True)
        return getattr(self.write(self.tensors, storage_writer=writer), "result", None)

    def load(self) -> None:
        dcp.load(self.tensors, storage_reader=dcp.FileSystemReader(self.folder))


class DcpBehind(Dcp):
    write = staticmethod(dcp.async_save)


VARIANTS: dict[str, type[Variant]] = {
    "disk": Disk,
    "save_state": Ours,
    "async_save_state": OursBehind,
    "torch.save (no fsync)": TorchSave,
    "DCP save": Dcp,
    "DCP async_save": DcpBehind,
}


@contextmanager
def growth(measured: bool) -> Iterator[list[int]]:
    """Measure the peak growth of the resident set inside; read every 2 ms, which takes time."""
    grown, over = [0], threading.Event()
    release_memory()
    if not measured:
        yield grown
        return
    before = resident_bytes()

    def watch() -> None:
        while not over.wait(0.002):
            grown[0] = max(grown[0], resident_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield grown
    finally:
        grown[0] = max(grown[0], resident_bytes() - before)
        over.set()
        thread.join()


def drop_cache(keep: bool) -> bool:
    """Drop the page cache, so that the disk is read; return True if that worked."""
    dist.barrier()
    if keep or os.geteuid() != 0:
        return False
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    dist.barrier()
    return True


def measure(variant: Variant, keep_cache: bool, memory: bool) -> dict[str, float]:
    dist.barrier()
    with growth(memory) as save_growth:
        dist.barrier()
        start = time.perf_counter()
        finish = variant.save()
        blocked = time.perf_counter() - start
        if finish is not None:
            finish()
        saved = time.perf_counter() - start
    dropped = drop_cache(keep_cache)
    with growth(memory) as load_growth:
        dist.barrier()
        start = time.perf_counter()
        variant.load()
        loaded = time.perf_counter() - start
    return {
        "save": saved,
        "blocked": blocked,
        "load": loaded,
        "rss_save": save_growth[0],
        "rss_load": load_growth[0],
        "from_disk": dropped,
    }


def work(rank: int, options: dict[str, Any], folder: str) -> None:
    warnings.filterwarnings("ignore")
    with gloo_ranks(rank, options["ranks"], f"{folder}/store", options["threads"]):
        found = measure_variants(rank, options, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def measure_variants(rank: int, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Seconds and memory of each variant; in each round the variants take turns."""
    optimizer = make(options)
    tensors = tensors_of(optimizer, folder)
    variants = {n: cls(optimizer, tensors, Path(folder, f"v{i}")) for i, (n, cls) in enumerate(VARIANTS.items())}
    result: dict[str, Any] = {name: [] for name in variants}
    names = list(variants)
    for number in range(options["rounds"]):
        for name in in_turn(names, number):
            found = measure(variants[name], options["keep_cache"], memory=number == 0)
            result[name].append(found)
            gc.collect()
            if rank == 0:
                print(f"round {number + 1}: {name}: {found['save']:.2f} s, {found['load']:.2f} s", flush=True)
    result["bytes"] = sum(t.numel() * t.element_size() for t in tensors.values())
    return result


def table(ranks: list[dict[str, Any]], options: dict[str, Any]) -> list[str]:
    rounds = range(options["rounds"])

    def seconds(name: str, what: str, number: int) -> float:
        return max(r[name][number][what] for r in ranks)

    def median(name: str, what: str) -> str:
        return f"{statistics.median(seconds(name, what, n) for n in rounds):.2f}"

    def share(name: str, what: str) -> str:
        """Of the disk's speed in the same round, the median."""
        return f"{statistics.median(seconds('disk', what, n) / seconds(name, what, n) for n in rounds):.2f}"

    total = sum(r["bytes"] for r in ranks)
    cached = "" if ranks[0]["disk"][0]["from_disk"] else ", reads from the page cache"
    heading = (
        f"{options['optimizer']}, {len(ranks)} ranks, {total / MIB:.0f} MiB in all, medians of {len(rounds)} rounds"
    )
    speed = "of the disk's speed"
    rows = [["", "save, s", speed, "blocked, s", "load, s", speed, "RSS +, save, MiB", "RSS +, load, MiB"]]
    for name in VARIANTS:
        grown = (f"{max(r[name][0][what] for r in ranks) / MIB:.0f}" for what in ("rss_save", "rss_load"))
        saved = median(name, "save"), share(name, "save"), median(name, "blocked")
        rows.append([name, *saved, median(name, "load"), share(name, "load"), *grown])
    ratio = statistics.median(
        seconds("async_save_state", "blocked", n) / seconds("save_state", "save", n) for n in rounds
    )
    blocked = f"blocked by async_save_state: {ratio:.1%} of the time of save_state"
    return [heading + cached, "", *markdown(rows, "right"), "", blocked, ""]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--optimizer", choices=["zero1", "onebit"], default="zero1")
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=100_000_000)
    parser.add_argument("--width", type=int, default=1024, help="of the square matrices that the parameters are")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--keep-cache", action="store_true", help="do not drop the page cache before reads")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one where not given")
    parser.add_argument("--out", type=Path, help="write everything that was measured to this JSON file")
    options = vars(parser.parse_args())
    out, place = options.pop("out"), options.pop("folder")
    folder = tempfile.mkdtemp(prefix="benchmark_checkpoint-", dir=place)
    processes: list[Any] = []
    try:
        set_forkserver_preload(["torch"])  # the ranks need not import it one by one
        context = mp.start_processes(
            work, args=(options, folder), nprocs=options["ranks"], join=False, start_method="forkserver"
        )
        processes += context.processes
        while not context.join():
            pass
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options["ranks"])]
    finally:
        for process in processes:  # nobody writes any more where the folder goes
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)
    lines = table(ranks, options)
    print("\n" + "\n".join(lines), flush=True)
    write_measurements(out, options, ranks=ranks)


if __name__ == "__main__":
    main()
