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
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _common import MIB, Table, in_turn, on_ranks, parser_of, print_table, write_measurements
from torch import nn

from hf_compressopt import OnebitAdam, ZeroOptimizer, async_save_state, load_state, save_state
from hf_compressopt.checkpoint.io import checkpointable
from hf_compressopt.checkpoint.save import take_snapshot
from hf_compressopt.zero.memory import release_memory, resident_bytes

BLOCK = 4 * MIB


class WideOnebitAdam(OnebitAdam):
    """One that keeps all state in float32, so that a checkpoint is large."""

    compact = False


def make(options: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer with state, of square matrices of about as many elements as asked for, alike on all ranks."""
    torch.manual_seed(0)
    width = options["width"]
    params = [nn.Parameter(torch.randn(width, width)) for _ in range(max(options["parameters"] // width**2, 1))]
    if options["optimizer"] == "onebit":
        return WideOnebitAdam(params, lr=1e-3, freeze_step=1)
    optimizer = ZeroOptimizer(params, torch.optim.AdamW, stage=1, lr=1e-3)
    sum(p.square().mean() for p in params).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def tensors_of(optimizer: Any, folder: Path) -> dict[str, torch.Tensor]:
    """This rank's state for torch.save and DCP: plain tensors under names of its own."""
    snapshot = take_snapshot(checkpointable(optimizer), Path(tempfile.mkdtemp(dir=folder)), None, "names")
    snapshot.remove()
    dist.barrier()
    return {f"rank{dist.get_rank()}/{tensor.key}@{tensor.start}": tensor.local for tensor in snapshot.tensors}


Save, Load = Callable[[], Callable[[], Any] | None], Callable[[], None]  # a save may return what finishes it


def variants_of(optimizer: Any, tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, tuple[Save, Load]]:
    """The ways to write a state and to read it back, each in a folder of its own."""
    block, nbytes = memoryview(os.urandom(BLOCK)), sum(t.nbytes for t in tensors.values())

    def place(name: str) -> Path:
        (folder / name).mkdir(exist_ok=True)
        return folder / name

    def write_disk() -> None:
        with open(disk_file, "wb", buffering=0) as file:
            for low in range(0, nbytes, BLOCK):
                file.write(block[: min(BLOCK, nbytes - low)])
            os.fsync(file.fileno())

    def read_disk() -> None:
        space = bytearray(BLOCK)
        with open(disk_file, "rb", buffering=0) as file:
            while file.readinto(space):
                pass

    def read_torch() -> None:
        for key, value in torch.load(torch_file, weights_only=True).items():
            tensors[key].copy_(value)

    def by_dcp(write: Callable[..., Any], folder: Path) -> tuple[Save, Load]:
        def save() -> Callable[[], Any] | None:
            writer = dcp.FileSystemWriter(folder, sync_files=True, overwrite=True)
            return getattr(write(tensors, storage_writer=writer), "result", None)

        return save, lambda: dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))

    ours, behind = place("save_state"), place("async_save_state")
    disk_file, torch_file = (place(name) / f"{dist.get_rank()}.pt" for name in ("disk", "torch"))
    return {
        "disk": (write_disk, read_disk),
        "save_state": (lambda: save_state(optimizer, ours), lambda: load_state(optimizer, ours)),
        "async_save_state": (lambda: async_save_state(optimizer, behind).result, lambda: load_state(optimizer, behind)),
        "torch.save (no fsync)": (lambda: torch.save(tensors, torch_file), read_torch),
        "DCP save": by_dcp(dcp.save, place("DCP")),
        "DCP async_save": by_dcp(dcp.async_save, place("DCP async")),
    }


@contextmanager
def growth() -> Iterator[list[int]]:
    """Measure the peak growth of the resident set inside, as the kernel has it."""
    release_memory()
    before, grown = resident_bytes(), [0]
    Path("/proc/self/clear_refs").write_text("5")  # it forgets the peak so far
    yield grown
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    grown[0] = 1024 * int(peak[1]) - before if peak else 0


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


def measure(save: Save, load: Load, keep_cache: bool) -> dict[str, float]:
    dist.barrier()
    with growth() as save_growth:
        dist.barrier()
        start = time.perf_counter()
        finish = save()
        blocked = time.perf_counter() - start
        if finish is not None:
            finish()
        saved = time.perf_counter() - start
    dropped = drop_cache(keep_cache)
    with growth() as load_growth:
        dist.barrier()
        start = time.perf_counter()
        load()
        loaded = time.perf_counter() - start
    seconds = {"save": saved, "blocked": blocked, "load": loaded}
    return {**seconds, "rss_save": save_growth[0], "rss_load": load_growth[0], "from_disk": dropped}


def measure_variants(rank: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds and memory of each variant; in each round the variants take turns."""
    warnings.filterwarnings("ignore")
    optimizer = make(options)
    tensors = tensors_of(optimizer, folder)
    variants = variants_of(optimizer, tensors, folder)
    result: dict[str, Any] = {name: [] for name in variants}
    for number, name in in_turn(variants, options["rounds"]):
        found = measure(*variants[name], options["keep_cache"])
        result[name].append(found)
        gc.collect()
        if rank == 0:
            print(f"round {number + 1}: {name}: {found['save']:.2f} s, {found['load']:.2f} s", flush=True)
    result["bytes"] = sum(t.nbytes for t in tensors.values())
    return result


def table(ranks: list[dict[str, Any]], rounds: int) -> Table:
    """Seconds of the slowest rank, medians over rounds; growth of the rank that grew most, in the first round."""

    def seconds(name: str, what: str) -> list[float]:
        return [max(rank[name][number][what] for rank in ranks) for number in range(rounds)]

    def share(name: str, what: str) -> str:
        """Share of the disk's speed in the same round."""
        pairs = zip(seconds("disk", what), seconds(name, what), strict=True)
        return f"{statistics.median(disk / its for disk, its in pairs):.2f}"

    of_disk = "of the disk's speed"
    rows = [["method", "save, s", of_disk, "training waits, s", "load, s", of_disk, "MiB to save", "MiB to load"]]
    for name in (name for name in ranks[0] if name != "bytes"):
        save, blocked, load = (f"{statistics.median(seconds(name, what)):.2f}" for what in ("save", "blocked", "load"))
        grown = (max(rank[name][0][what] for rank in ranks) / MIB for what in ("rss_save", "rss_load"))
        rows.append([name, save, share(name, "save"), blocked, load, share(name, "load"), *(f"{g:.0f}" for g in grown)])
    return rows


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
    out, folder = options.pop("out"), options.pop("folder")
    ranks = on_ranks(measure_variants, options["ranks"], options, threads=options["threads"], folder=folder)
    total = sum(rank["bytes"] for rank in ranks) / MIB
    cached = "" if ranks[0]["disk"][0]["from_disk"] else ", reads from the page cache"
    title = f"{options['optimizer']}, {len(ranks)} ranks, {total:.0f} MiB in all{cached}"
    print_table(title, table(ranks, options["rounds"]))
    write_measurements(out, options, ranks=ranks)


if __name__ == "__main__":
    main()
