"""Shared parts of the scripts: times in turns, tables, reports, pictures, and gloo process groups."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(REPOSITORY))  # scripts run from the tree, whether the package is installed or not
MIB, MB = 2**20, 1e6

Variants = dict[str, Callable[[], object]]
Table = Sequence[Sequence[str]]
#: Okabe and Ito's colours, one for each method in every picture.
COLOURS = {"baseline": "#999999", "ddp": "#000000", "fp16": "#D55E00", "int4": "#0072B2", "onebit_adam": "#009E73"}
COLOURS |= {"zero_one_adam": "#CC79A7", "onebit_lamb": "#E69F00", "zero": "#56B4E9"}


# -- arguments --------------------------------------------------------------------------------------------------------


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows a script's docstring as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def check_least(parser: argparse.ArgumentParser, arguments: argparse.Namespace, least: dict[str, int]) -> None:
    """Exit with code 2 if an argument, or an entry of a list of them, is too small."""
    for name, bound in least.items():
        given = getattr(arguments, name)
        lowest = min(given) if isinstance(given, list) else given
        if lowest < bound:
            flag = next(action.option_strings[0] for action in parser._actions if action.dest == name)
            parser.error(f"{flag} must be >= {bound}, got {lowest}")


# -- times ------------------------------------------------------------------------------------------------------------


def medians(
    variants: Variants,
    rounds: int,
    before: Callable[[str], object] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each variant, in an order by chance, alike on all ranks. The first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(variants), len(variants)):
            before(name)
            start = clock()
            variants[name]()
            times[name].append(clock() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def in_turn(names: Collection[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield the number of each round with each name; a round begins with another name than the one before."""
    for number in range(rounds):
        turn = number % len(names)
        for name in [*names][turn:] + [*names][:turn]:
            yield number, name


# -- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(
    work: Callable[..., Any], ranks: int, *arguments: Any, threads: int = 1, folder: Path | None = None
) -> Any:
    """Call work(rank, folder, ...) on ranks of gloo, all with one temporary folder. Returns what each returned."""
    import multiprocessing

    import torch.multiprocessing as mp

    multiprocessing.set_forkserver_preload(["torch"])  # the ranks need not import it one by one
    place, processes = tempfile.mkdtemp(prefix="benchmark-", dir=folder), []
    try:
        given = (work, ranks, place, threads, arguments)
        context = mp.start_processes(_run_rank, given, ranks, join=False, start_method="forkserver")
        processes += context.processes
        while not context.join():
            pass
        return [json.loads(Path(place, f"{rank}.json").read_text()) for rank in range(ranks)]
    finally:
        for process in processes:  # nobody writes any more where the folder goes
            process.kill()
            process.join()
        shutil.rmtree(place, ignore_errors=True)


def _run_rank(
    rank: int, work: Callable[..., Any], ranks: int, folder: str, threads: int, arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(work(rank, Path(folder), *arguments)))
    dist.barrier()
    dist.destroy_process_group()


def small_gpt2(layers: int, width: int, vocabulary: int, tokens: int) -> Any:
    """Transformers' GPT-2 without dropout, alike on all ranks."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64), "vocab_size": vocabulary}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    kept = {"n_positions": tokens, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **kept))


def shard(model: Any, replicas: int, *, reduce_dtype: Any = None, resharded: bool = True) -> Any:
    """Shard a GPT-2 by FSDP2, each of its blocks by itself; its mesh has one dimension if there is one replica."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = (replicas, dist.get_world_size() // replicas)
    kept = slice(int(replicas == 1), 2)
    mesh = init_device_mesh("cpu", shape[kept], mesh_dim_names=("replicate", "shard")[kept])
    for module in (*model.transformer.h, model):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=resharded)
    return mesh


# -- reports ----------------------------------------------------------------------------------------------------------


def markdown(rows: Table) -> str:
    """A Markdown table; the first row is the heading, and all columns but the first are aligned to the right."""
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (rows[0], rule, *rows[1:]))


def print_table(title: str, rows: Table) -> None:
    """Print a Markdown table whose columns line up."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}\n")
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|", flush=True)


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSON, one per line."""
    file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def write_measurements(out: Path | None, options: dict[str, Any], **measured: Any) -> None:
    """Write all measurements as JSON, with the options and the machine; None writes nothing."""
    if out is None:
        return
    import torch

    out.parent.mkdir(parents=True, exist_ok=True)
    everything = {"options": options, "torch": torch.__version__, "cores": os.cpu_count(), **measured}
    out.write_text(json.dumps(everything, indent=1))


def pyplot() -> Any:
    """matplotlib's pyplot, for files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
