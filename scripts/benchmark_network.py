"""Train over links of known speed, and compare what a step takes with every way to exchange gradients.

    sudo python scripts/benchmark_network.py --report network.md           # a shaped link for every rank
    sudo python scripts/benchmark_network.py --nodes 2 --ranks-per-node 2  # several ranks share a shaped link
    python scripts/benchmark_network.py --loopback                         # without the right to make networks

Every rank, or every node, has a network namespace and a shaped link of its own (_slow_network.py). Each rank trains the
same GPT-2-like model, one method after the other, and that several times over, so that a slow spell of the machine
meets all methods. Times are those of whole steps in the stage that a method spends most of a run in; bytes are the
interface's own.

An existing report keeps its rows of other models, numbers of ranks, links and methods. To resume an interrupted run,
repeat its command with --missing: it measures only the rows that the report does not have.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _common import check_least, in_turn, markdown, parser_of, pyplot, small_gpt2, write_rows
from _slow_network import (
    RATES,
    Network,
    Ranks,
    add_link_arguments,
    check_report,
    check_rights,
    ranks_on_links,
    sent_bytes,
    serve,
    trainer_of,
)

# -- models and methods -----------------------------------------------------------------------------------------------

#: Layers, width, vocabulary, and the tokens of an example: few of them compute as little as a faster device would.
MODELS = {
    "10M": (6, 320, 8000, 128),
    "30M": (8, 512, 8000, 128),
    "100M": (12, 768, 20000, 128),
    "100M, 16 tokens": (12, 768, 20000, 16),
    "tiny": (1, 32, 256, 128),
}
SWITCH = 3  # steps before a compressed optimizer's last stage, in which DDP also settles its buckets
WARMUP = SWITCH + 5  # 0/1 Adam's intervals are at their longest then: a step at a multiple of it is a sync
LONGEST_INTERVAL = 16  # 0/1 Adam: every window of this many steps has one sync
LR = 1e-4


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients.

    Attributes:
        title: Its name in tables.
        optim_args: Trainer's ``--optim_args``; ``{per_node}`` stands for the ranks of a node.
        optim: Trainer's ``--optim``, by default its own default.
        hook: DDP communication hook: "none" exchanges nothing at all, "fp16", "powersgd", or "" for DDP's own.
        ddp_bucket_cap_mb: MiB of a bucket of DDP.
        between: What FSDP2 sends between the nodes, in the nodes of which it shards the model: "bfloat16" or "int4";
            "" without FSDP2.
        rival: A method of rivals.py around AdamW, in place of Trainer's; or "".
        rival_options: Its options.
        period: Of so many steps one exchanges what the others do not.
        bytes_per_parameter: What a rank sends in a step, by the formula; of W ranks.
    """

    title: str
    optim_args: str = ""
    optim: str = "adamw_torch_fused"
    hook: str = ""
    ddp_bucket_cap_mb: int = 25
    between: str = ""
    rival: str = ""
    rival_options: Mapping[str, Any] = field(default_factory=dict)
    period: int = 1
    bytes_per_parameter: Callable[[int], float] | None = None

    @property
    def needs_nodes(self) -> bool:
        """True if the method needs several ranks on a node."""
        return bool(self.between) or "{per_node}" in self.optim_args

    @property
    def in_plain_loop(self) -> bool:
        """True if Trainer does not train it."""
        return bool(self.between or self.rival)


def ring(itemsize: float) -> Callable[[int], float]:
    """Bytes that a rank sends per parameter in an all-reduce of values of this size."""
    return lambda world_size: 2 * (world_size - 1) / world_size * itemsize


def low_bit(title: str, optim_args: str, bits: int = 4, optim: str = Method.optim) -> Method:
    return Method(title, optim_args, optim, bytes_per_parameter=ring(bits / 8 + 2 / 128))  # a share of a block's scale


def signs(title: str, optim_args: str, optim: str = "onebit_adam") -> Method:
    return Method(title, optim_args, optim, bytes_per_parameter=ring(SIGN_BYTES))


def local_steps(title: str, rival: str, interval: int) -> Method:
    """A method whose ranks step alone, and average parameters every ``interval`` steps."""
    sent = ring(4 / interval)
    return Method(title, rival=rival, rival_options={"interval": interval}, period=interval, bytes_per_parameter=sent)


SIGN_BYTES = 1 / 8 + 4 / 4096  # a bit, and its share of a block's scale
FROZEN, NODES = f"freeze_step={SWITCH}", "node_size={per_node}"
BOTH_WAYS = "grad_compression=int4,param_compression=int4"
LAST_STAGE = f"var_freeze_step={SWITCH},local_step_scaler=1,local_step_clipper={LONGEST_INTERVAL}"
METHODS = {
    "compute": Method("compute only", hook="none"),
    "ddp": Method("DDP fp32", bytes_per_parameter=ring(4)),
    "fp16": Method("DDP, 16-bit gradients", hook="fp16", bytes_per_parameter=ring(2)),
    "powersgd": Method("DDP, PowerSGD rank 1", hook="powersgd", ddp_bucket_cap_mb=1000),  # one bucket, on gloo
    "int4": low_bit("AdamW, int4 gradients", "grad_compression=int4"),
    "int8": low_bit("AdamW, int8 gradients", "grad_compression=int8", 8),
    "zero2": Method("ZeRO-2", optim="zero2_adamw", bytes_per_parameter=ring(4)),
    "zero2_int4": low_bit("ZeRO-2, int4 both ways", BOTH_WAYS, optim="zero2_adamw"),
    "zero2_levels": Method("ZeRO-2, two levels", NODES, "zero2_adamw"),
    "onebit_adam": signs("OnebitAdam", FROZEN),
    "onebit_adam_zero2": signs("OnebitAdam, zero_stage=2", f"{FROZEN},zero_stage=2"),
    "zero2_int4_levels": Method("ZeRO-2, int4 both ways, two levels", f"{BOTH_WAYS},{NODES}", "zero2_adamw"),
    "int4_levels": Method("AdamW, int4 gradients, two levels", f"grad_compression=int4,{NODES}"),
    "onebit_adam_levels": Method("OnebitAdam, two levels", f"{FROZEN},{NODES}", "onebit_adam"),
    "onebit_adam_late": signs("OnebitAdam, clip=late", f"{FROZEN},clip=late"),
    "hsdp_16": Method("HSDP of FSDP2, 16-bit gradients", between="bfloat16"),
    "hsdp_int4": Method("HSDP of FSDP2, int4 gradients between nodes", between="int4"),
    "warmup_stage": low_bit("OnebitAdam, warmup stage", "freeze_step=100000,warmup_bits=4", optim="onebit_adam"),
    "zero_one_adam": Method(
        "ZeroOneAdam",
        LAST_STAGE,
        "zero_one_adam",
        period=LONGEST_INTERVAL,
        bytes_per_parameter=ring(SIGN_BYTES / LONGEST_INTERVAL),
    ),
    "onebit_lamb": signs("OnebitLamb", FROZEN, "onebit_lamb"),
    "powersgd_1": Method("PowerSGD rank 1", rival="PowerSGD", rival_options={"rank": 1, "start": 2}),
    "powersgd_4": Method("PowerSGD rank 4", rival="PowerSGD", rival_options={"rank": 4, "start": 2}),
    "local_sgd_8": local_steps("LocalSGD, 8 steps", "LocalSGD", 8),
    "diloco_32": local_steps("DiLoCo, 32 steps", "DiLoCo", 32),
}


@dataclass
class Row:
    """The cost of one method on one link.

    Attributes:
        model: Name of the model.
        ranks: How many trained.
        link: Name of the link.
        method: Key of METHODS.
        numel: Parameters.
        seconds: Of a step: the mean of each window of steps, one window per round.
        sent: Bytes that left one rank's interface per step, the mean over ranks and rounds; ranks may share one.
        per_node: Ranks that share a link.
    """

    model: str
    ranks: int
    link: str
    method: str
    numel: int
    seconds: list[float]
    sent: float
    per_node: int = 1

    @property
    def place(self) -> tuple[int, ...]:
        """The place among all rows."""
        columns = (list(MODELS).index(self.model), self.ranks, self.per_node, list(RATES).index(self.link))
        return *columns, list(METHODS).index(self.method)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


# -- one rank ---------------------------------------------------------------------------------------------------------


class Watch:
    """Times of steps, and the interface's counter around the measured ones, of which there are ``steps``."""

    def __init__(self, steps: int, interface: str) -> None:
        self._places, self._interface = (WARMUP, WARMUP + steps), interface
        self._ends: list[float] = []
        self._sent: list[int] = []

    def end_step(self, number: int) -> None:
        """Take note of the end of a step; the first is number 1. All ranks call."""
        import torch.distributed as dist

        if number in self._places:
            dist.barrier()
            self._sent.append(sent_bytes(self._interface))
        if number >= WARMUP:
            self._ends.append(time.perf_counter())

    def found(self, numel: int) -> dict[str, Any]:
        """Return seconds of each step, bytes that left in them, and the number of parameters."""
        seconds = [after - before for before, after in itertools.pairwise(self._ends)]
        return {"seconds": seconds, "sent": self._sent[1] - self._sent[0], "numel": numel}


def train(order: dict[str, Any], interface: str) -> dict[str, Any]:
    """Train with one method. Returns what Watch.found does."""
    import torch

    method, steps = METHODS[order["method"]], WARMUP + int(order["steps"])
    model, (*_, vocabulary, tokens) = small_gpt2(*MODELS[order["model"]]), MODELS[order["model"]]
    numel, rows = sum(p.numel() for p in model.parameters()), torch.randint(0, vocabulary, (64, tokens))
    watch = Watch(int(order["steps"]), interface)
    if method.in_plain_loop:
        train_in_plain_loop(model, rows, method, order["per_node"], steps, watch.end_step)
    else:
        train_by_trainer(model, rows, method, order["per_node"], steps, watch.end_step)
    return watch.found(numel)


def train_by_trainer(
    model: Any, rows: Any, method: Method, per_node: int, steps: int, end_step: Callable[[int], None]
) -> None:
    """Train with transformers' Trainer, which wraps the model in DistributedDataParallel unless ZeRO averages."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            end_step(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        trainer_of(
            model,
            [{"input_ids": row, "labels": row} for row in rows],
            folder,
            Steps(),
            hook=method.hook,
            ddp_bucket_cap_mb=method.ddp_bucket_cap_mb,
            optim=method.optim,
            optim_args=method.optim_args.format(per_node=per_node) or None,
            per_device_train_batch_size=1,
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
        ).train()


def train_in_plain_loop(
    model: Any, rows: Any, method: Method, per_node: int, steps: int, end_step: Callable[[int], None]
) -> None:
    """Train with a rival; or with FSDP2, which Accelerate offers on accelerators only."""
    import torch
    import torch.distributed as dist
    from rivals import RIVALS, Rival

    from hf_compressopt.collectives.torch_dist import TorchCommunicator

    rank, world_size, communicator = dist.get_rank(), dist.get_world_size(), TorchCommunicator()
    if method.between:
        shard(model, (world_size // per_node, per_node), method.between)
    exchange = RIVALS[method.rival] if method.rival else Rival
    rival = exchange(model.parameters(), communicator, **method.rival_options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for number in range(1, steps + 1):
        row = rows[((number - 1) * world_size + rank) % len(rows)].unsqueeze(0)
        model(input_ids=row, labels=row).loss.backward()
        rival.gradients()
        optimizer.step()
        rival.parameters(last=False)
        optimizer.zero_grad()
        end_step(number)


def shard(model: Any, shape: tuple[int, int], between: str) -> None:
    """Shard a model by FSDP2 in each node, and have gradients travel between the nodes as they should."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hf_compressopt import compress_fsdp

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if between == "bfloat16" else None)
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if between != "bfloat16":
        compress_fsdp(model, mesh, between)


# -- measuring --------------------------------------------------------------------------------------------------------


def steps_for(method: Method, link: str, arguments: argparse.Namespace) -> int:
    """Steps of a window: fewer on links where a step takes many seconds, but whole periods of the method."""
    rate = RATES[link]
    steps: int = arguments.slow_steps if rate is not None and rate < 2e8 else arguments.steps
    return math.ceil(steps / method.period) * method.period


class Plan:
    """The turns of the methods at each number of ranks, model and link.

    Attributes:
        methods: The methods that take turns, by number of ranks, model and link.
    """

    def __init__(self, arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
        """Take all methods, with --missing only those without a row in ``rows``."""
        known = {row.place for row in rows} if arguments.missing else set()
        links = ["unshaped"] if arguments.loopback else arguments.links
        self.methods: dict[tuple[int, str, str], list[str]] = {}
        for place in itertools.product(arguments.ranks, arguments.models, links):
            count, model, link = place
            todo = [Row(model, count, link, name, 0, [], 0.0, arguments.ranks_per_node) for name in arguments.methods]
            if names := [row.method for row in todo if row.place not in known]:
                self.methods[place] = names
        self._windows = arguments.rounds * sum(map(len, self.methods.values()))
        self._done, self._began = 0, time.monotonic()

    def progress(self) -> str:
        """Count a window, and say how many are done and how long the others take if they are like these."""
        self._done += 1
        left = (time.monotonic() - self._began) * (self._windows / self._done - 1)
        return f"{self._done} of {self._windows}, about {left / 60:.0f} min left"


def measure(arguments: argparse.Namespace, network: Network | None, ranks: Ranks, plan: Plan) -> Iterator[list[Row]]:
    """The rows of every model on every link; on each the methods take turns."""
    per_node = arguments.ranks_per_node
    for (count, model, link), names in plan.methods.items():
        if count != len(ranks.processes):
            continue
        if network is not None:
            network.shape(RATES[link])
        rows = {name: Row(model, count, link, name, 0, [], 0.0, per_node) for name in names}
        for number in range(arguments.rounds):
            for name in in_turn(names, number):
                steps = steps_for(METHODS[name], link, arguments)
                answers = ranks.order(method=name, model=model, steps=steps, per_node=per_node)
                mean = statistics.fmean(statistics.fmean(answer["seconds"]) for answer in answers)
                sent = statistics.fmean(answer["sent"] for answer in answers) / steps
                row = rows[name]
                row.numel, row.sent = answers[0]["numel"], row.sent + sent / arguments.rounds
                row.seconds.append(mean)
                where = f"{model}, {count} ranks, {link}, round {number + 1}"
                print(f"{where}: {METHODS[name].title}: {mean * 1e3:.0f} ms ({plan.progress()})", flush=True)
        if network is None:
            for row in rows.values():
                row.sent /= count  # one interface for all ranks
        yield list(rows.values())


# -- the report -------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    """The rows of an earlier report, but for those of methods that are gone."""
    return [Row(**row) for row in json.loads(path.read_text()) if row["method"] in METHODS]


def merged(known: Sequence[Row], fresh: Sequence[Row]) -> list[Row]:
    """Merge new measurements with the known ones of other places, in the places' order."""
    rows = {row.place: row for row in (*known, *fresh)}
    return [rows[place] for place in sorted(rows)]


def report(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """Tables in Markdown."""
    tokens = " or ".join(str(number) for number in sorted({MODELS[row.model][3] for row in rows}))
    others = {METHODS[row.method].title for row in rows if METHODS[row.method].in_plain_loop}
    plain_loop = f" (in a plain loop: {'; '.join(sorted(others))})" if others else ""
    lines = [
        "# Training over links of known speed",
        "",
        f"`scripts/benchmark_network.py` made this report with transformers' Trainer: ranks of {arguments.threads} "
        f"thread(s) on {os.cpu_count()} CPU cores, 1 example of {tokens} tokens per rank and step{plain_loop}. "
        "Cells show milliseconds per step: the median over rounds of the mean over a window of steps, the smallest and "
        "the largest in brackets, and the multiple of the step that exchanges nothing. Bytes are those that left a "
        "rank's network interface.",
        "",
    ]
    if not arguments.loopback and arguments.report is not None and has_picture(rows):
        lines += [f"![ms per step over bandwidth]({arguments.report.stem}.png)", ""]
    for place in dict.fromkeys((row.model, row.ranks, row.per_node) for row in rows):
        lines += [*table([row for row in rows if (row.model, row.ranks, row.per_node) == place]), ""]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of one model on one number of ranks, so many of them on a node."""
    ranks, numel, per_node = rows[0].ranks, rows[0].numel, rows[0].per_node
    links = list(dict.fromkeys(row.link for row in rows))
    nodes = "" if per_node == 1 else f" on {ranks // per_node} nodes; rates and bytes are those of a node's link"
    lines = [f"**{rows[0].model}: {numel:,} parameters, {ranks} ranks{nodes}**", ""]
    cells = [["", *(f"{link}, ms" for link in links), "MB sent per step", "of the formula"]]
    compute = {row.link: row.median for row in rows if row.method == "compute"}
    for name in METHODS:
        its = {row.link: row for row in rows if row.method == name}
        if not its:
            continue
        sent = statistics.fmean(row.sent for row in its.values())
        formula = METHODS[name].bytes_per_parameter if per_node == 1 else None
        share = f"{sent / (formula(ranks) * numel):.3f}" if formula else ""
        times = [cell(its[link], compute.get(link)) if link in its else "" for link in links]
        cells.append([METHODS[name].title, *times, f"{sent / 1e6:.3f}", share])
    return [*lines, *markdown(cells, "right"), ""]


def cell(row: Row, compute: float | None) -> str:
    spread = f"{min(row.seconds) * 1e3:.0f} to {max(row.seconds) * 1e3:.0f}"
    share = "" if compute is None else f", {row.median / compute:.2f}x"
    return f"{row.median * 1e3:.0f} ({spread}){share}"


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Milliseconds per step over bandwidth, both logarithmic; rivals are dotted."""
    models, counts = (list(dict.fromkeys(column)) for column in zip(*((r.model, r.ranks) for r in rows), strict=True))
    plt, size = pyplot(), (6.5 * len(counts), 5 * len(models))
    figure, grid = plt.subplots(len(models), len(counts), figsize=size, layout="constrained", squeeze=False)
    drawn = [name for name in METHODS if any(row.method == name for row in rows)]
    colours = dict(zip(drawn, itertools.cycle(plt.get_cmap("tab20").colors), strict=False))
    labels: dict[str, Any] = {}
    for panel, (model, ranks) in zip(grid.flat, itertools.product(models, counts), strict=True):
        mine = [row for row in rows if (row.model, row.ranks, row.per_node) == (model, ranks, 1)]
        mine = [row for row in mine if RATES[row.link] is not None]
        panel.set_visible(bool(mine))
        for name in drawn:
            points = sorted((gigabits(row.link), row.median * 1e3) for row in mine if row.method == name)
            if points:
                look = {"marker": "s", "linestyle": ":"} if METHODS[name].in_plain_loop else {"marker": "o"}
                panel.plot(*zip(*points, strict=True), label=METHODS[name].title, color=colours[name], **look)
        panel.set(xscale="log", yscale="log", xlabel="link of each rank, Gbit/s", ylabel="ms per step")
        panel.set_title(f"{model} parameters, {ranks} ranks")
        panel.grid(True, which="both", alpha=0.2)
        labels |= {label: line for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside right upper")
    figure.savefig(path, dpi=110)


def write_report(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """The Markdown file, and beside it the rows and, of links, the picture."""
    arguments.report.write_text(report(rows, arguments))
    write_rows(arguments.report, rows)
    if not arguments.loopback and has_picture(rows):
        plot(arguments.report.with_suffix(".png"), rows)


def has_picture(rows: Sequence[Row]) -> bool:
    """Only ranks with links of their own are drawn."""
    return any(row.per_node == 1 for row in rows)


def gigabits(link: str) -> float:
    return (RATES[link] or math.inf) / 1e9


# -- main -------------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks (2)")
    parser.add_argument("--nodes", type=int, help="instead of --ranks: nodes of --ranks-per-node ranks each")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="that share a link (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["10M", "30M"])
    add_link_arguments(parser, list(RATES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="all of the package and of torch")
    parser.add_argument("--rounds", type=int, default=3, help="how often the methods take turns (%(default)s)")
    parser.add_argument("--steps", type=int, default=LONGEST_INTERVAL, help="measured in each turn (%(default)s)")
    parser.add_argument("--slow-steps", type=int, default=4, help="the same at 100 Mbit/s (%(default)s)")
    parser.add_argument("--missing", action="store_true", help="only what the report does not have yet")
    arguments = parser.parse_args()
    least = {"ranks": 2, "ranks_per_node": 1, "threads": 1, "rounds": 1, "steps": 2, "slow_steps": 2}
    check_least(parser, arguments, least)
    shared = arguments.ranks_per_node > 1
    if shared and (arguments.nodes is None or arguments.nodes < 2 or arguments.loopback):
        parser.error("--ranks-per-node needs --nodes of 2 or more, and links of their own: no --loopback")
    if arguments.nodes is not None:
        arguments.ranks = [arguments.nodes * arguments.ranks_per_node]
    levels = [name for name, method in METHODS.items() if method.needs_nodes]
    if arguments.methods is None:
        mine = [name for name, method in METHODS.items() if not method.rival]
        arguments.methods = [name for name in mine if shared or name not in levels]
    if not shared and set(levels) & set(arguments.methods):
        parser.error(f"--methods: {', '.join(levels)} need --ranks-per-node of 2 or more")
    if arguments.missing and arguments.report is None:
        parser.error("--missing needs --report: the file whose rows are not measured again")
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
        rows = read_rows(data)
    plan = Plan(arguments, rows)
    try:
        for count in dict.fromkeys(count for count, _, _ in plan.methods):
            per_node, loopback = arguments.ranks_per_node, arguments.loopback
            links = ranks_on_links(count, arguments.threads, __file__, loopback=loopback, per_node=per_node)
            with links as (network, ranks):
                for fresh in measure(arguments, network, ranks, plan):
                    rows = merged(rows, fresh)
                    if arguments.report is not None:
                        write_report(rows, arguments)
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing is left behind but the report of the links that were done")
    print(f"\n{report(rows, arguments)}")


if __name__ == "__main__":
    main()
