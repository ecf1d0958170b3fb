"""Train over links of known speed, and compare what a step, or a whole run, takes with every way to exchange gradients.

    sudo python scripts/benchmark_network.py --report network.json         # a shaped link for every rank
    sudo python scripts/benchmark_network.py --nodes 2 --ranks-per-node 2  # several ranks share a shaped link
    sudo python scripts/benchmark_network.py --whole-runs 300              # loss against time
    python scripts/benchmark_network.py --loopback                         # without the right to make networks

Every rank, or every node, has a network namespace and a shaped link of its own (_slow_network.py). Each rank trains the
same GPT-2-like model, one method after the other, and that several times over, so that a slow spell of the machine
meets all methods. Times are those of whole steps in the stage that a method spends most of a run in; bytes are the
interface's own.

--whole-runs trains the model and the text of recipes/causal_lm (`--tiny`) with Trainer's defaults for each method, so
that the warmup stage is part of the time. Evaluations do not count, neither their seconds nor their bytes.

A report keeps its rows of other models, numbers of ranks, links and methods. To resume an interrupted command, repeat
it with --missing: it measures only the rows that the report does not have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from _common import MB, REPOSITORY, check_least, in_turn, parser_of, print_table, shard, small_gpt2, write_rows
from _slow_network import RATES, Network, Ranks, check_rights, ranks_on_links, sent_bytes, serve, trainer_of

# -- models and methods -----------------------------------------------------------------------------------------------

#: Layers, width, vocabulary, and the tokens of an example: few of them compute as little as a faster device would.
MODELS = {
    "4M": (4, 256, 2048, 64),
    "10M": (6, 320, 8000, 128),
    "30M": (8, 512, 8000, 128),
    "100M": (12, 768, 20000, 128),
    "100M, 16 tokens": (12, 768, 20000, 16),
    "tiny": (1, 32, 256, 128),
    "SmolLM2-135M": (30, 576, 49152, 64),  # pretrained, of real_models.py, on real text
}
PRETRAINED = "SmolLM2-135M"
SWITCH = 3  # steps before a compressed optimizer's last stage, in which DDP also settles its buckets
WARMUP = SWITCH + 5  # 0/1 Adam's intervals are at their longest then: a step at a multiple of it is a sync
REFRESHES = 16  # variance_interval
LONGEST_INTERVAL = 16  # 0/1 Adam: every window of this many steps has one sync
LR, FINE_TUNING_LR = 1e-4, 2e-5
BASELINE, UNLIMITED = "compute", "unshaped"
RECIPE = REPOSITORY / "recipes" / "causal_lm"
NEAR = 1.01  # of the loss that DDP ends with


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients; its title is for tables, in Markdown."""

    title: str
    optim_args: str = ""  # {per_node} stands for the ranks of a node
    optim: str = "adamw_torch_fused"
    stage: str = ""  # --optim_args that soon begin the stage to be measured, but for whole runs
    hook: str = ""  # of DDP: "none" exchanges nothing at all, "fp16", or "" for its own
    # in a plain loop instead of Trainer: FSDP2 over all ranks or (HSDP) in the nodes, and what it sends; "ZeRO" of
    # torch; or a key of RIVALS
    loop: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # of the rival
    period: int = 1  # of so many steps one exchanges what the others do not
    refreshed: bool = False  # one of REFRESHES steps refreshes the variance
    lr: float = 1e-3  # peak of a whole run
    bfloat16: bool = False  # the parameters, at the learning rate of fine-tuning

    @property
    def needs_nodes(self) -> bool:
        """True if the method needs several ranks on a node."""
        return self.loop.startswith("HSDP") or "{per_node}" in self.optim_args


def local_steps(title: str, rival: str, interval: int) -> Method:
    """A method whose ranks step alone, and average parameters every ``interval`` steps."""
    return Method(title, loop=rival, options={"interval": interval}, period=interval)


FROZEN, NODES = f"freeze_step={SWITCH}", "node_size={per_node}"
INT4, THEN = "grad_compression=int4", "`onebit_adam`, compressed stage"
BOTH_WAYS = f"{INT4},param_compression=int4"
LAST_STAGE = f"var_freeze_step={SWITCH},local_step_scaler=1,local_step_clipper={LONGEST_INTERVAL}"
METHODS = {
    "compute": Method("no-communication baseline", hook="none"),
    "ddp": Method("DDP, float32"),
    "fp16": Method("DDP, 16-bit gradients", hook="fp16"),
    "int4": Method("AdamW, `grad_compression=int4`", INT4),
    "int4_levels": Method("AdamW, `grad_compression=int4`, hierarchical", f"{INT4},{NODES}"),
    "int8": Method("AdamW, `grad_compression=int8`", "grad_compression=int8"),
    "zero2": Method("`zero2_adamw`", optim="zero2_adamw"),
    "zero2_levels": Method("`zero2_adamw`, hierarchical", NODES, "zero2_adamw"),
    "zero2_int4": Method("`zero2_adamw`, int4 both ways", BOTH_WAYS, "zero2_adamw"),
    "zero2_int4_levels": Method("`zero2_adamw`, int4 both ways, hierarchical", f"{BOTH_WAYS},{NODES}", "zero2_adamw"),
    "zero2_16": Method("`zero2_adamw`, bfloat16 both ways", "param_compression=none", "zero2_adamw", bfloat16=True),
    "zero2_exact": Method("`zero2_adamw`, bfloat16, exact parameters", "", "zero2_adamw", bfloat16=True),
    "zero2_int4_exact": Method("`zero2_adamw`, int4, exact parameters", INT4, "zero2_adamw", bfloat16=True),
    "zero2_int4_16": Method("`zero2_adamw`, bfloat16, int4 both ways", BOTH_WAYS, "zero2_adamw", bfloat16=True),
    "zero_torch": Method("DDP, torch's ZeroRedundancyOptimizer", loop="ZeRO"),
    "warmup_stage": Method("`onebit_adam`, warmup stage", "freeze_step=100000,warmup_bits=4", "onebit_adam"),
    "onebit_adam": Method(THEN, "", "onebit_adam", FROZEN, refreshed=True),
    "onebit_adam_levels": Method(f"{THEN}, hierarchical", NODES, "onebit_adam", FROZEN, refreshed=True),
    "onebit_adam_zero2": Method(f"{THEN}, `zero_stage=2`", "zero_stage=2", "onebit_adam", FROZEN, refreshed=True),
    "onebit_adam_late": Method(f"{THEN}, `overlap_comm`", "overlap_comm=true", "onebit_adam", FROZEN, refreshed=True),
    "zero_one_adam": Method("`zero_one_adam`, local steps", "", "zero_one_adam", LAST_STAGE, period=LONGEST_INTERVAL),
    "onebit_lamb": Method("`onebit_lamb`, compressed stage", "", "onebit_lamb", FROZEN, lr=1e-2),
    "fsdp2": Method("FSDP2", loop="FSDP2"),
    "fsdp2_gradients": Method("FSDP2, int4 gradients", loop="FSDP2, int4"),
    "hsdp_32": Method("FSDP2 in the nodes, 32 bits between them", loop="HSDP"),
    "hsdp_16": Method("FSDP2 in the nodes, 16 bits between them", loop="HSDP, bfloat16"),
    "hsdp_int4": Method("FSDP2 in the nodes, int4 between them", loop="HSDP, int4"),
    "powersgd_1": Method("PowerSGD, rank 1", loop="PowerSGD", options={"rank": 1, "start": 2}),
    "powersgd_4": Method("PowerSGD, rank 4", loop="PowerSGD", options={"rank": 4, "start": 2}),
    "local_sgd_8": local_steps("LocalSGD, 8 steps", "LocalSGD", 8),
    "diloco_32": local_steps("DiLoCo, 32 steps", "DiLoCo", 32),
}
OF_WHOLE_RUNS = [name for name, method in METHODS.items() if not method.loop and not method.needs_nodes]

Row = dict[str, Any]


def place(row: Row) -> tuple[Any, ...]:
    """The place of a measurement, by which a report is sorted."""
    where = (row["ranks"], row.get("per_node", 1), list(RATES).index(row["link"])) if "ranks" in row else (row["link"],)
    model = list(MODELS).index(row["model"]) if "model" in row else -1
    return model, *where, list(METHODS).index(row["method"])


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

    def found(self) -> dict[str, Any]:
        """Return seconds of each step, and the bytes that left in them."""
        seconds = [after - before for before, after in itertools.pairwise(self._ends)]
        return {"seconds": seconds, "sent": self._sent[1] - self._sent[0]}


def train(order: dict[str, Any], interface: str) -> dict[str, Any]:
    """Train with one method: a window of steps, or a whole run. Returns what a row has of it."""
    import torch

    from hf_compressopt.kernels.messages import travels_in_full

    if "whole" in order:
        return train_whole(order, interface)
    method, steps = METHODS[order["method"]], WARMUP + int(order["steps"])
    model, rows = model_and_rows(order["model"])
    model.to(torch.bfloat16 if method.bfloat16 else torch.float32)
    params = list(model.parameters())
    sizes = {"numel": params, "in_full": filter(travels_in_full, params)}  # the second beside messages of integers
    found = {name: sum(param.numel() for param in each) for name, each in sizes.items()}
    watch = Watch(int(order["steps"]), interface)
    run = train_in_plain_loop if method.loop else train_by_trainer
    run(model, rows, method, order["per_node"], steps, watch.end_step)
    return {**watch.found(), **found}


def model_and_rows(name: str) -> tuple[Any, Any]:
    """The model of that name, in float32 and alike on all ranks, and examples of so many tokens, [64, tokens]."""
    import torch

    *_, vocabulary, tokens = MODELS[name]
    if name != PRETRAINED:
        return small_gpt2(*MODELS[name]), torch.randint(0, vocabulary, (64, tokens))
    from _convergence import ALL_RUNS, examples_of
    from real_models import fetched
    from transformers import AutoModelForCausalLM

    run, folder = ALL_RUNS["AdamW, SmolLM2"], fetched("smollm2")
    rows = examples_of(run.text, run.model)["train"]["input_ids"][:64, :tokens]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False), rows


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
            optim=method.optim,
            optim_args=",".join(filter(None, (method.optim_args.format(per_node=per_node), method.stage))) or None,
            per_device_train_batch_size=1,
            max_steps=steps,
            learning_rate=FINE_TUNING_LR if method.bfloat16 else LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
        ).train()


def train_in_plain_loop(
    model: Any, rows: Any, method: Method, per_node: int, steps: int, end_step: Callable[[int], None]
) -> None:
    """Train with a rival, with torch's ZeRO, or with FSDP2, which Accelerate offers on accelerators only."""
    import torch
    import torch.distributed as dist
    from rivals import RIVALS, Rival
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from hf_compressopt import compress_fsdp
    from hf_compressopt.collectives.torch_dist import TorchCommunicator

    rank, world_size, make = dist.get_rank(), dist.get_world_size(), partial(torch.optim.AdamW, fused=True)
    if "SDP" in method.loop:
        nodes = world_size // per_node if method.needs_nodes else 1
        dtype = torch.bfloat16 if "bfloat16" in method.loop else None
        mesh = shard(model, nodes, reduce_dtype=dtype, resharded=nodes == 1)
        if "int4" in method.loop:
            compress_fsdp(model, mesh, "int4")
    if method.loop == "ZeRO":
        model = DistributedDataParallel(model)
        make = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, fused=True)
    optimizer = make(model.parameters(), lr=LR)
    rival = RIVALS.get(method.loop, Rival)(model.parameters(), TorchCommunicator(), **method.options)
    for number in range(1, steps + 1):
        row = rows[((number - 1) * world_size + rank) % len(rows)].unsqueeze(0)
        model(input_ids=row, labels=row).loss.backward()
        rival.gradients()
        optimizer.step()
        rival.parameters(last=False)
        optimizer.zero_grad()
        end_step(number)


@lru_cache(maxsize=1)
def text_and_tokenizer(evaluated: int, tokens: int) -> tuple[Any, Any]:
    """The recipe's examples of so many tokens, some of them for evaluations, and its tokenizer."""
    sys.path.insert(0, str(RECIPE))
    import datasets
    import train as recipe
    from transformers import TrainingArguments

    datasets.disable_progress_bars()
    options = recipe.DataArguments(block_size=tokens, max_eval_samples=evaluated)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", report_to="none")
        text = recipe.load_text(options)
        tokenizer = recipe.make_tokenizer(recipe.ModelArguments(tiny=True), text, arguments)
    return recipe.make_blocks(text, tokenizer, options), tokenizer


def train_whole(order: dict[str, Any], interface: str) -> dict[str, Any]:
    """Train a whole run. Returns seconds and losses at its evaluations, steps of the warmup stage, and bytes."""
    blocks, tokenizer = text_and_tokenizer(order["evaluated"], order["tokens"])
    import torch.distributed as dist
    import train as recipe
    from transformers import TrainerCallback, default_data_collator, set_seed

    method, steps = METHODS[order["method"]], int(order["whole"])
    interval = max(1, steps // 30)
    bound = f"max_freeze_step={max(1, steps // 5)}" if method.stage else ""  # also in a run that would not freeze
    set_seed(order["seed"])
    model = recipe.make_model(recipe.ModelArguments(tiny=True), order["tokens"], tokenizer)
    found: dict[str, Any] = {"seconds": [], "steps": [], "losses": [], "first": 0, "sent": 0}

    class Evaluations(TrainerCallback):  # type: ignore[misc]
        """Losses, and seconds and bytes between evaluations."""

        taken = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            dist.barrier()
            self.began, self.sent_before = time.perf_counter(), sent_bytes(interface)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            plan = getattr(trainer.optimizer.optimizer, "plan", None)
            found["first"] += plan is None or plan.reduce_grads

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % interval == 0:
                dist.barrier()
                self.taken += time.perf_counter() - self.began
                found["sent"] += sent_bytes(interface) - self.sent_before

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            found["seconds"].append(self.taken)
            found["steps"].append(state.global_step)
            found["losses"].append(metrics["eval_loss"])
            self.on_train_begin()

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            model,
            blocks["train"],
            folder,
            Evaluations(),
            hook=method.hook,
            data={"eval_dataset": blocks["validation"], "data_collator": default_data_collator},
            optim=method.optim,
            optim_args=",".join(filter(None, (method.optim_args, bound))) or None,
            per_device_train_batch_size=order["batch_size"],
            per_device_eval_batch_size=16,
            max_steps=steps,
            learning_rate=method.lr,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 10,
            max_grad_norm=1.0,
            eval_strategy="steps",
            eval_steps=interval,
            seed=order["seed"],
        )
        trainer.train()
    return found


# -- measuring --------------------------------------------------------------------------------------------------------


def steps_for(method: Method, link: str, arguments: argparse.Namespace) -> int:
    """Steps of a window: fewer on links where a step takes many seconds, but whole periods of the method."""
    rate = RATES[link]
    steps: int = arguments.slow_steps if rate is not None and rate < 2e8 else arguments.steps
    period = REFRESHES if method.refreshed else method.period
    return math.ceil(steps / period) * period


def planned(arguments: argparse.Namespace, rows: Sequence[Row]) -> dict[int, list[list[Row]]]:
    """The rows to measure by number of ranks: those of a list take turns. With --missing only those not in ``rows``."""
    known = {place(row) for row in rows} if arguments.missing else set()
    links = [UNLIMITED] if arguments.loopback else arguments.links
    found: dict[int, list[list[Row]]] = {}
    for ranks, model, link in itertools.product(arguments.ranks, arguments.models, links):
        if arguments.whole_runs:
            todo = [[{"link": link, "method": name}] for name in arguments.methods]
        else:
            where = {"model": model, "ranks": ranks, "link": link}
            todo = [[{**where, "method": name, "per_node": arguments.ranks_per_node} for name in arguments.methods]]
        todo = [[row for row in turns if place(row) not in known] for turns in todo]
        found.setdefault(ranks, []).extend(filter(None, todo))
    return {ranks: todo for ranks, todo in found.items() if todo}


def measure(
    arguments: argparse.Namespace, network: Network | None, ranks: Ranks, todo: list[list[Row]]
) -> Iterator[list[Row]]:
    """The rows with what was measured, those that took turns together."""
    shared = len(ranks.processes) if network is None else 1  # one interface for all ranks
    windows, done, began = sum(map(len, todo)) * arguments.rounds, 0, time.monotonic()
    for rows in todo:
        link, measured = rows[0]["link"], {row["method"]: {**row, "seconds": [], "sent": 0.0} for row in rows}
        if network is not None:
            network.shape(RATES[link])
        for number, name in in_turn(measured, arguments.rounds):
            if arguments.whole_runs:
                given = {key: getattr(arguments, key) for key in ("batch_size", "tokens", "seed", "evaluated")}
                row = ranks.order(method=name, whole=arguments.whole_runs, **given)[0]
                measured[name] = {"link": link, "method": name, **row, "sent": row["sent"] // shared}
                seconds = row["seconds"][-1]
            else:
                steps, row = steps_for(METHODS[name], link, arguments), measured[name]
                order = {key: row[key] for key in ("method", "model", "per_node")}
                answers = ranks.order(**order, steps=steps)
                seconds = statistics.fmean(statistics.fmean(answer["seconds"]) for answer in answers)
                sent = statistics.fmean(answer["sent"] for answer in answers) / steps / shared
                row |= {"refreshed": True} if METHODS[name].refreshed else {}
                row |= {key: answers[0][key] for key in ("numel", "in_full")}
                row["sent"] += sent / arguments.rounds
                row["seconds"].append(seconds)
            done += 1
            left = (time.monotonic() - began) * (windows / done - 1) / 60
            where = f"{len(ranks.processes)} ranks, {link}, round {number + 1}: {name}: {seconds:.3f} s"
            print(f"{where} ({done} of {windows}, about {left:.0f} min left)", flush=True)
        yield list(measured.values())


# -- tables -----------------------------------------------------------------------------------------------------------


def times(rows: Sequence[Row], model: str, ranks: int, link: str, per_node: int = 1) -> dict[str, list[float]]:
    """Milliseconds of a step, a number for each window of steps, by method."""
    where = (model, ranks, link, per_node)
    found = [row for row in rows if (row["model"], row["ranks"], row["link"], row.get("per_node", 1)) == where]
    return {row["method"]: [1e3 * seconds for seconds in row["seconds"]] for row in found}


def sent_megabytes(rows: Sequence[Row], model: str, ranks: int, per_node: int = 1) -> dict[str, float]:
    """Megabytes of a step at the network interface, by method."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (row["model"], row["ranks"], row.get("per_node", 1)) == (model, ranks, per_node):
            found.setdefault(row["method"], []).append(row["sent"] / MB)
    return {method: statistics.fmean(values) for method, values in found.items()}


def table_of_steps(
    rows: Sequence[Row],
    model: str,
    ranks: int,
    links: Sequence[str],
    per_node: int = 1,
    methods: Sequence[str] = tuple(METHODS),
) -> list[list[str]]:
    """Milliseconds of a step: the median, the range, and the multiple of the baseline."""
    columns = [times(rows, model, ranks, link, per_node) for link in links]
    megabytes = sent_megabytes(rows, model, ranks, per_node)
    lines = [["method", *("unlimited" if link == UNLIMITED else link for link in links), "MB per step"]]
    for method in methods:
        if any(method in column for column in columns):
            cells = [_milliseconds(column, method) for column in columns]
            lines.append([METHODS[method].title, *cells, f"{megabytes[method]:.2f}" if method != BASELINE else ""])
    return lines


def _milliseconds(column: dict[str, list[float]], method: str) -> str:
    if not (found := column.get(method)):
        return ""
    spread = f" ({min(found):.0f}-{max(found):.0f})" if len(found) > 1 else ""
    multiple = f", {median(column, method) / median(column, BASELINE):.2f}x" if BASELINE in column else ""
    return f"{statistics.median(found):.0f}{spread}{multiple}"


def median(column: dict[str, list[float]], method: str) -> float:
    return statistics.median(column[method])


def table_of_runs(rows: Sequence[Row], links: Sequence[str], methods: Sequence[str] = OF_WHOLE_RUNS) -> list[list[str]]:
    """Seconds of a whole run, and until the loss is DDP's last one plus 1 %."""
    found = {(row["method"], row["link"]): row for row in rows}
    target = NEAR * found["ddp", links[0]]["losses"][-1]
    lines = [["method", *(f"{link}, s: run / to loss" for link in links), "final loss"]]
    for method in methods:
        if method != BASELINE and (method, links[0]) in found:
            its = [found[method, link] for link in links]
            cells = [f"{row['seconds'][-1]:.0f} / {_reached(row, target)}" for row in its]
            title = METHODS[method].title.removesuffix(", compressed stage")
            lines.append([title, *cells, f"{its[0]['losses'][-1]:.3f}"])
    return lines


def _reached(row: Row, target: float) -> str:
    """Seconds at which the loss was there, by interpolation between two evaluations."""
    curve = list(zip(row["seconds"], row["losses"], strict=True))
    for (t0, a), (t1, b) in itertools.pairwise(curve):
        if b <= target:
            return f"{t0 + (t1 - t0) * (a - target) / (a - b):.0f}"
    return "never"


def print_tables(rows: Sequence[Row], *, whole: bool) -> None:
    if whole:
        return print_table("Whole runs", table_of_runs(rows, list(dict.fromkeys(row["link"] for row in rows))))
    for model, ranks, per_node in dict.fromkeys((row["model"], row["ranks"], row["per_node"]) for row in rows):
        links = [link for link in RATES if times(rows, model, ranks, link, per_node)]
        nodes = "" if per_node == 1 else f" on {ranks // per_node} nodes; bytes are those of a node's link"
        title = f"{model}, {ranks} ranks{nodes}; milliseconds of a step"
        print_table(title, table_of_steps(rows, model, ranks, links, per_node))


# -- main -------------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks (2)")
    parser.add_argument("--nodes", type=int, help="instead of --ranks: nodes of --ranks-per-node ranks each")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="that share a link (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["10M", "30M"])
    parser.add_argument("--links", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no shaping")
    parser.add_argument("--report", type=Path, help="JSON file of the rows")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="all of the package and of torch")
    parser.add_argument("--rounds", type=int, default=3, help="how often the methods take turns (%(default)s)")
    parser.add_argument("--steps", type=int, default=LONGEST_INTERVAL, help="measured in each turn (%(default)s)")
    parser.add_argument("--slow-steps", type=int, default=4, help="the same at 100 Mbit/s (%(default)s)")
    parser.add_argument("--missing", action="store_true", help="only what the report does not have yet")
    parser.add_argument("--whole-runs", type=int, default=0, metavar="STEPS", help="train whole runs instead")
    for name, value, what in (
        ("batch-size", 4, "examples per rank and step"),
        ("tokens", 128, "of an example"),
        ("evaluated", 64, "examples of an evaluation"),
        ("seed", 42, "of model and data"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"of whole runs: {what} (%(default)s)")
    arguments = parser.parse_args()
    least = {"ranks": 2, "ranks_per_node": 1, "threads": 1, "rounds": 1, "steps": 2, "slow_steps": 2}
    check_least(parser, arguments, {**least, "batch_size": 1, "tokens": 2, "evaluated": 1})
    shared = arguments.ranks_per_node > 1
    if shared and (arguments.nodes is None or arguments.nodes < 2 or arguments.loopback):
        parser.error("--ranks-per-node needs --nodes of 2 or more, and links of their own: no --loopback")
    if arguments.nodes is not None:
        arguments.ranks = [arguments.nodes * arguments.ranks_per_node]
    levels = {name for name, method in METHODS.items() if method.needs_nodes}
    if arguments.methods is None:
        others = {name for name, method in METHODS.items() if method.loop} - levels
        arguments.methods = [name for name in METHODS if name not in others and (shared or name not in levels)]
        if arguments.whole_runs:
            arguments.methods = ["compute", "ddp", "fp16", "int4", "onebit_adam", "zero_one_adam", "onebit_lamb"]
    if not shared and levels & set(arguments.methods):
        parser.error(f"--methods: {', '.join(sorted(levels))} need --ranks-per-node of 2 or more")
    if arguments.whole_runs:
        check_least(parser, arguments, {"whole_runs": 10})
        if "ddp" not in arguments.methods or not set(arguments.methods) <= set(OF_WHOLE_RUNS):
            parser.error(f"--methods of --whole-runs must have ddp, the target; legal are {', '.join(OF_WHOLE_RUNS)}")
        arguments.rounds, arguments.models = 1, arguments.models[:1]
    if arguments.missing and arguments.report is None:
        parser.error("--missing needs --report: the file whose rows are not measured again")
    if arguments.report is not None and not arguments.report.resolve().parent.is_dir():
        parser.error(f"--report: there is no folder {arguments.report.parent}: make it first")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve is not None:
        return serve(partial(train, interface=arguments.serve))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not arguments.loopback:
        check_rights()
    rows: dict[tuple[Any, ...], Row] = {}
    if arguments.report is not None and arguments.report.exists():
        known = json.loads(arguments.report.read_text())
        rows = {place(row): row for row in known if row["method"] in METHODS}
    try:
        for count, todo in planned(arguments, list(rows.values())).items():
            per_node, loopback = arguments.ranks_per_node, arguments.loopback
            links = ranks_on_links(count, arguments.threads, __file__, loopback=loopback, per_node=per_node)
            with links as (network, ranks):
                for fresh in measure(arguments, network, ranks, todo):
                    rows |= {place(row): row for row in fresh}
                    if arguments.report is not None:
                        write_rows(arguments.report, [rows[where] for where in sorted(rows)])
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing is left behind but the report of the rows that were done")
    print_tables([rows[where] for where in sorted(rows)], whole=bool(arguments.whole_runs))


if __name__ == "__main__":
    main()
