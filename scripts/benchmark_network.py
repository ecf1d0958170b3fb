"""Train over links of known speed, and compare what a step takes with every way to exchange gradients.

    sudo python scripts/benchmark_network.py --report docs/network.md      # a shaped link for every rank
    python scripts/benchmark_network.py --loopback                         # without the right to make networks

Every rank has a network namespace and a shaped link of its own (slow_network.py). Each trains the same GPT-2-like model
with transformers' Trainer, one method after the other, and that several times over, so that a slow spell of the machine
meets all methods. Times are those of whole steps in the stage that a method spends most of a run in; bytes are the
interface's own. A report that is there already keeps its rows of other models, numbers of ranks, links and methods.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slow_network import RATES, Network, Ranks, check_report, check_rights, ranks_on_links, sent_bytes, serve

MODELS = {"10M": (6, 320, 8000), "30M": (8, 512, 8000), "tiny": (1, 32, 256)}  # layers, width, vocabulary
TOKENS = 128
SWITCH = 3  # steps before a compressed optimizer's last stage, in which DDP also settles its buckets
LONGEST_INTERVAL = 16  # 0/1 Adam: every window of this many steps has one sync


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients.

    Attributes:
        title: Its name in tables.
        optim: Trainer's ``--optim``.
        optim_args: Trainer's ``--optim_args``.
        hook: DDP communication hook: "none" exchanges nothing at all, "fp16", "powersgd", or "" for DDP's own.
        bytes_per_parameter: What a rank sends in a step, by the formula; of W ranks.
    """

    title: str
    optim: str
    optim_args: str = ""
    hook: str = ""
    bytes_per_parameter: Callable[[int], float] | None = None


def ring(itemsize: float) -> Callable[[int], float]:
    """Bytes that a rank sends per parameter in an all-reduce of values of this size."""
    return lambda world_size: 2 * (world_size - 1) / world_size * itemsize


SIGN_BYTES = 1 / 8 + 4 / 4096  # a bit, and its share of a block's scale
METHODS = {
    "compute": Method("compute only", "adamw_torch", hook="none"),
    "ddp": Method("DDP fp32", "adamw_torch", bytes_per_parameter=ring(4)),
    "fp16": Method("DDP, 16-bit gradients", "adamw_torch", hook="fp16", bytes_per_parameter=ring(2)),
    "powersgd": Method("DDP, PowerSGD rank 1", "adamw_torch", hook="powersgd"),
    "zero2": Method("ZeRO-2", "zero2_adamw", bytes_per_parameter=ring(4)),
    "onebit_adam": Method("OnebitAdam", "onebit_adam", f"freeze_step={SWITCH}", bytes_per_parameter=ring(SIGN_BYTES)),
    "zero_one_adam": Method(
        "ZeroOneAdam",
        "zero_one_adam",
        f"var_freeze_step={SWITCH},local_step_scaler=1,local_step_clipper={LONGEST_INTERVAL}",
        bytes_per_parameter=lambda world_size: ring(SIGN_BYTES)(world_size) / LONGEST_INTERVAL,
    ),
    "onebit_lamb": Method("OnebitLamb", "onebit_lamb", f"freeze_step={SWITCH}", bytes_per_parameter=ring(SIGN_BYTES)),
}


# --------------------------------------------------------------------------------------------------- one rank


def train(order: dict[str, Any], interface: str) -> dict[str, Any]:
    """Train with one method. Returns seconds of each step, and bytes that left, of the last steps."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    import hf_compressopt.auto  # noqa: F401

    method, steps = METHODS[order["method"]], int(order["steps"])
    layers, width, vocabulary = MODELS[order["model"]]
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64), "vocab_size": vocabulary}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_positions=TOKENS, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes, **dropout)
    model = GPT2LMHeadModel(config)
    examples = [{"input_ids": row, "labels": row} for row in torch.randint(0, vocabulary, (64, TOKENS))]
    warmup = SWITCH + 5  # 0/1 Adam's intervals are at their longest then: a step at a multiple of it is a sync

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Times of steps, between barriers; the interface's counter around the last ones."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.sent: list[int] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            wrapped = trainer.model_wrapped
            if method.hook and isinstance(wrapped, DistributedDataParallel):
                register(wrapped)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step in (warmup, warmup + steps):
                dist.barrier()
                self.sent.append(sent_bytes(interface))
            if state.global_step >= warmup:
                self.ends.append(time.perf_counter())

    def register(wrapped: DistributedDataParallel) -> None:
        if method.hook == "none":
            wrapped.register_comm_hook(None, nothing_hook)
        elif method.hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_bucket_cap_mb=1000 if method.hook == "powersgd" else 25,  # it needs one bucket on gloo
            ddp_find_unused_parameters=False,
            optim=method.optim,
            optim_args=method.optim_args or None,
            per_device_train_batch_size=1,
            max_steps=warmup + steps,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[watch])
        trainer.train()
    seconds = [after - before for before, after in zip(watch.ends, watch.ends[1:], strict=False)]
    numel = sum(p.numel() for p in model.parameters())
    return {"seconds": seconds, "sent": watch.sent[1] - watch.sent[0], "numel": numel}


def nothing_hook(_, bucket):  # DDP compares annotations with its own types
    """Exchange nothing: each rank trains by itself."""
    import torch

    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# ------------------------------------------------------------------------------------------------------ measuring


# ------------------------------------------------------------------------------------------------------ measuring


@dataclass
class Row:
    """What one method took on one link.

    Attributes:
        model: Name of the model.
        ranks: How many trained.
        link: Name of the link.
        method: Key of METHODS.
        numel: Parameters.
        seconds: Of a step: the mean of each window of steps, one window per round.
        sent: Bytes that one rank sent per step, the mean over ranks and rounds.
    """

    model: str
    ranks: int
    link: str
    method: str
    numel: int
    seconds: list[float]
    sent: float

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Where it stands among all rows."""
        columns = (list(MODELS).index(self.model), self.ranks, list(RATES).index(self.link))
        return *columns, list(METHODS).index(self.method)


def steps_for(link: str, arguments: argparse.Namespace) -> int:
    """Steps of a window: 0/1 Adam's longest interval, or fewer on links where a step takes many seconds."""
    rate = RATES[link]
    return int(arguments.slow_steps if rate is not None and rate < 2e8 else arguments.steps)


def measure(arguments: argparse.Namespace, network: Network | None, ranks: Ranks) -> Iterator[list[Row]]:
    """The rows of every model on every link; on each the methods take turns."""
    count = len(ranks.processes)
    for model in arguments.models:
        for link in ["unshaped"] if network is None else arguments.links:
            if network is not None:
                network.shape(RATES[link])
            rows = {name: Row(model, count, link, name, 0, [], 0.0) for name in arguments.methods}
            names = list(arguments.methods)
            for number in range(arguments.rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    steps = LONGEST_INTERVAL if name == "zero_one_adam" else steps_for(link, arguments)
                    answers = ranks.order(method=name, model=model, steps=steps)
                    mean = statistics.fmean(statistics.fmean(answer["seconds"]) for answer in answers)
                    sent = statistics.fmean(answer["sent"] for answer in answers) / steps
                    row = rows[name]
                    row.numel, row.sent = answers[0]["numel"], row.sent + sent / arguments.rounds
                    row.seconds.append(mean)
                    where = f"{model}, {count} ranks, {link}, round {number + 1}"
                    print(f"{where}: {METHODS[name].title}: {mean * 1e3:.0f} ms", flush=True)
            if network is None:
                for row in rows.values():
                    row.sent /= count  # one interface for all ranks
            yield list(rows.values())


def merged(known: Sequence[Row], fresh: Sequence[Row]) -> list[Row]:
    """What was measured now, and of what was known the other places; in their order."""
    rows = {row.place: row for row in (*known, *fresh)}
    return [rows[place] for place in sorted(rows)]


# ------------------------------------------------------------------------------------------------------ the report


def median(row: Row) -> float:
    return statistics.median(row.seconds)


def crossover(rows: Sequence[Row], mine: str, other: str) -> str:
    """Bandwidth below which ``mine`` is faster: between links that were measured, by interpolation in 1/rate."""
    points = []
    for link, rate in RATES.items():
        times = {row.method: median(row) for row in rows if row.link == link}
        if mine in times and other in times:
            points.append((0.0 if rate is None else 1 / rate, times[mine] - times[other]))
    points.sort()
    if not points:
        return ""
    if points[0][1] < 0:
        return "faster on every link"
    for (a, gain_a), (b, gain_b) in zip(points, points[1:], strict=False):
        if gain_b < 0:
            place = a + (b - a) * gain_a / (gain_a - gain_b)
            return f"faster below {1 / place / 1e9:.2g} Gbit/s" if place > 0 else "faster on every link"
    return "slower on every link"


def report(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """Tables in Markdown."""
    lines = [
        "# Training over links of known speed",
        "",
        f"By `scripts/benchmark_network.py`: transformers' Trainer, ranks of {arguments.threads} thread(s) on "
        f"{os.cpu_count()} CPU cores, 1 example of {TOKENS} tokens per rank and step. Milliseconds per step: the "
        "median over rounds of the mean over a window of steps, in brackets the least and the most, and how many times "
        "the step that exchanges nothing. Bytes are those that left a rank's network interface.",
        "",
    ]
    if not arguments.loopback and arguments.report is not None:
        lines += [f"![ms per step over bandwidth]({arguments.report.stem}.png)", ""]
    for model, ranks in dict.fromkeys((row.model, row.ranks) for row in rows):
        lines += [*table([row for row in rows if (row.model, row.ranks) == (model, ranks)]), ""]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of one model on one number of ranks."""
    ranks, numel = rows[0].ranks, rows[0].numel
    links = list(dict.fromkeys(row.link for row in rows))
    lines = [f"**{rows[0].model}: {numel:,} parameters, {ranks} ranks**", ""]
    lines += ["| | " + " | ".join(f"{link}, ms" for link in links) + " | MB sent per step | of the formula |"]
    lines += ["|---|" + "---:|" * (len(links) + 2)]
    compute = {row.link: median(row) for row in rows if row.method == "compute"}
    for name in METHODS:
        its = {row.link: row for row in rows if row.method == name}
        if not its:
            continue
        sent = statistics.fmean(row.sent for row in its.values())
        formula = METHODS[name].bytes_per_parameter
        share = f"{sent / (formula(ranks) * numel):.3f}" if formula else ""
        cells = [cell(its[link], compute.get(link)) if link in its else "" for link in links]
        lines.append(f"| {METHODS[name].title} | " + " | ".join(cells) + f" | {sent / 1e6:.3f} | {share} |")
    if limit := limits(rows):
        cells = [f"{limit[link] * 1e3:.0f}" if link in limit else "" for link in links]
        lines.append("| limit of OnebitAdam: compute only + its bytes / rate | " + " | ".join(cells) + " | | |")
    lines.append("")
    for name in ("onebit_adam", "zero_one_adam", "onebit_lamb"):
        for other in ("ddp", "fp16"):
            if found := crossover(rows, name, other):
                lines.append(f"- {METHODS[name].title} against {METHODS[other].title}: {found}")
    return lines


def cell(row: Row, compute: float | None) -> str:
    spread = f"{min(row.seconds) * 1e3:.0f} to {max(row.seconds) * 1e3:.0f}"
    share = "" if compute is None else f", {median(row) / compute:.2f}x"
    return f"{median(row) * 1e3:.0f} ({spread}){share}"


def limits(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds that a step of OnebitAdam cannot go below on each link."""
    found = {}
    for row in rows:
        rate = RATES[row.link]
        if row.method == "compute":
            wire = 0.0 if rate is None else ring(SIGN_BYTES)(row.ranks) * row.numel * 8 / rate
            found[row.link] = median(row) + wire
    return found


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Milliseconds per step over bandwidth, both logarithmic; the limit is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models, counts = (list(dict.fromkeys(column)) for column in zip(*((r.model, r.ranks) for r in rows), strict=True))
    size = (6.5 * len(counts), 5 * len(models))
    figure, grid = plt.subplots(len(models), len(counts), figsize=size, layout="constrained", squeeze=False)
    for (row, model), (column, ranks) in itertools.product(enumerate(models), enumerate(counts)):
        panel = grid[row][column]
        mine = [row for row in rows if (row.model, row.ranks) == (model, ranks) and RATES[row.link] is not None]
        panel.set_visible(bool(mine))
        for name in METHODS:
            points = sorted((gigabits(row.link), median(row) * 1e3) for row in mine if row.method == name)
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", label=METHODS[name].title)
        if limit := sorted((gigabits(link), seconds * 1e3) for link, seconds in limits(mine).items()):
            panel.plot(*zip(*limit, strict=True), "k--", label="limit of OnebitAdam")
        panel.set(xscale="log", yscale="log", xlabel="link of each rank, Gbit/s", ylabel="ms per step")
        panel.set_title(f"{model} parameters, {ranks} ranks")
        panel.grid(True, which="both", alpha=0.2)
        panel.legend()
    figure.savefig(path, dpi=110)


def write_report(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """The Markdown file, and beside it the rows and, of links, the picture."""
    arguments.report.write_text(report(rows, arguments))
    entries = ",\n".join(json.dumps(asdict(row)) for row in rows)
    arguments.report.with_suffix(".json").write_text(f"[\n{entries}\n]\n")
    if not arguments.loopback:
        plot(arguments.report.with_suffix(".png"), rows)


def gigabits(link: str) -> float:
    return (RATES[link] or math.inf) / 1e9


# ----------------------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks (2)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["10M", "30M"])
    parser.add_argument("--links", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=3, help="how often the methods take turns (%(default)s)")
    parser.add_argument("--steps", type=int, default=LONGEST_INTERVAL, help="measured in each turn (%(default)s)")
    parser.add_argument("--slow-steps", type=int, default=4, help="the same at 100 Mbit/s (%(default)s)")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no shaping")
    parser.add_argument("--report", type=Path, help="Markdown file; a picture and the rows as JSON go beside it")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, least in {"ranks": 2, "threads": 1, "rounds": 1, "steps": 2, "slow_steps": 2}.items():
        given = getattr(arguments, name)
        if (lowest := min(given) if isinstance(given, list) else given) < least:
            parser.error(f"--{name.replace('_', '-')} must be >= {least}, got {lowest}")
    check_report(parser, arguments.report)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve is not None:
        return serve(partial(train, interface=arguments.serve))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not arguments.loopback:
        check_rights()
    rows: list[Row] = []
    if arguments.report is not None and (data := arguments.report.with_suffix(".json")).exists():
        rows = [Row(**row) for row in json.loads(data.read_text())]
    try:
        for count in arguments.ranks:
            with ranks_on_links(count, arguments.threads, __file__, loopback=arguments.loopback) as (network, ranks):
                for fresh in measure(arguments, network, ranks):
                    rows = merged(rows, fresh)
                    if arguments.report is not None:
                        write_report(rows, arguments)
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing is left behind but the report of the links that were done")
    print(f"\n{report(rows, arguments)}")


if __name__ == "__main__":
    main()
