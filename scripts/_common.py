"""Shared parts of the scripts: times in turns, tables, reports, pictures, and gloo process groups."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
MIB, MB = 2**20, 1e6

Variants = dict[str, Callable[[], object]]


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
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each variant, in an order by chance, alike on all ranks. The first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name in shuffled(variants, number):
            before()
            start = clock()
            variants[name]()
            times[name].append(clock() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def shuffled(names: Collection[str], number: int) -> list[str]:
    """The names in the order of a round: by chance, alike on all ranks."""
    return random.Random(number).sample(list(names), len(names))


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of a round: each round begins with another one."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


# -- ranks ------------------------------------------------------------------------------------------------------------


@contextmanager
def gloo_ranks(rank: int, world_size: int, store: str | Path, threads: int = 1) -> Iterator[None]:
    """A gloo process group whose ranks meet at a file, with this many threads of torch on each rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)
    yield
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.3)  # gloo's threads come to rest


def small_gpt2(layers: int, width: int, vocabulary: int, tokens: int) -> Any:
    """Transformers' GPT-2 without dropout, alike on all ranks."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64), "vocab_size": vocabulary}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(n_positions=tokens, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes, **dropout)
    )


# -- reports ----------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]], align: str = "left") -> list[str]:
    """The lines of a Markdown table; the first row is the heading. "right" aligns all columns but the first."""
    heading, *others = rows
    rule = "---|" + ("---:|" if align == "right" else "---|") * (len(heading) - 1)
    return [f"| {' | '.join(heading)} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in others)]


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table whose columns line up."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}\n")
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def write_rows(report: Path, rows: Sequence[Any]) -> None:
    """Write rows (dataclasses or dictionaries) as JSON beside a report, one per line."""
    entries = (json.dumps(row if isinstance(row, dict) else asdict(row)) for row in rows)
    report.with_suffix(".json").write_text("[\n" + ",\n".join(entries) + "\n]\n")


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


def logarithmic(panel: Any) -> None:
    """Make a panel's horizontal axis logarithmic, with plain numbers at 1, 2, 5, 10, ..."""
    from matplotlib.ticker import LogLocator

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:,g}")
    panel.xaxis.set_minor_formatter("")
