"""Train a small language model over slow links to the same number of steps, and compare loss against wall-clock time.

    sudo python scripts/benchmark_time_to_loss.py --report time_to_loss.md
    python scripts/benchmark_time_to_loss.py --loopback                          # without the right to make networks
    python scripts/benchmark_time_to_loss.py --links --steps 1000 --tokens 16 --batch-size 1   # bytes of whole runs

The model, the text and Trainer are those of recipes/causal_lm (`--tiny`), with Trainer's defaults for each optimizer,
so that the warmup stage is part of the time. Each method trains whole on each link; evaluations do not count, neither
their seconds nor their bytes. "compute only" exchanges nothing. Every rank has a network namespace and a shaped link of
its own (_slow_network.py). Runs that a report has are not repeated with --reuse.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from _common import MB, REPOSITORY, check_least, markdown, parser_of, pyplot, write_rows
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

RECIPE = REPOSITORY / "recipes" / "causal_lm"
COMPUTE, BASELINE = "compute", "adamw"
ORDERED = ("steps", "batch_size", "tokens", "seed", "evaluated")
NEAR = 1.01  # of the loss that the baseline ends with


@dataclass(frozen=True)
class Method:
    """A way to train: its name in tables, Trainer's ``--optim`` and ``--optim_args``, DDP's hook, the peak rate."""

    title: str
    optim: str = "adamw_torch"
    options: str = ""
    hook: str = ""
    lr: float = 1e-3


METHODS = {
    COMPUTE: Method("compute only", hook="none"),
    BASELINE: Method("AdamW, DDP fp32"),
    "fp16": Method("AdamW, 16-bit gradients", hook="fp16"),
    "int4": Method("AdamW, int4 gradients", options="grad_compression=int4"),
    "onebit_adam": Method("OnebitAdam", "onebit_adam"),
    "zero_one_adam": Method("ZeroOneAdam", "zero_one_adam"),
    "onebit_lamb": Method("OnebitLamb", "onebit_lamb", lr=1e-2),
}


@dataclass
class Row:
    """A run on a link.

    Attributes:
        link: Name of the link.
        method: Key of METHODS.
        seconds: From the run's start to each evaluation, without evaluations.
        steps: The steps of the evaluations.
        losses: Evaluation losses.
        first: Steps of the warmup stage.
        sent: Bytes that a rank sent in the run.
    """

    link: str
    method: str
    seconds: list[float]
    steps: list[int]
    losses: list[float]
    first: int
    sent: int


# -- one rank ---------------------------------------------------------------------------------------------------------


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


def learn(order: dict[str, Any], interface: str) -> dict[str, Any]:
    """Train with one method. Returns what a Row has of it."""
    blocks, tokenizer = text_and_tokenizer(order["evaluated"], order["tokens"])
    import torch.distributed as dist
    import train as recipe
    from transformers import TrainerCallback, default_data_collator, set_seed

    method, steps = METHODS[order["method"]], int(order["steps"])
    interval = max(1, steps // 30)
    set_seed(order["seed"])
    model = recipe.make_model(recipe.ModelArguments(tiny=True), order["tokens"], tokenizer)

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Losses, and seconds and bytes between evaluations."""

        def __init__(self) -> None:
            self.sent, self.first, self.taken = 0, 0, 0.0
            self.seconds: list[float] = []
            self.steps: list[int] = []
            self.losses: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.go()

        def go(self) -> None:
            dist.barrier()
            self.began, self.sent_before = time.perf_counter(), sent_bytes(interface)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            plan = getattr(trainer.optimizer.optimizer, "plan", None)
            self.first += plan is None or plan.reduce_grads

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % interval == 0:
                dist.barrier()
                self.taken += time.perf_counter() - self.began
                self.sent += sent_bytes(interface) - self.sent_before

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            self.seconds.append(self.taken)
            self.steps.append(state.global_step)
            self.losses.append(metrics["eval_loss"])
            self.go()

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            model,
            blocks["train"],
            folder,
            watch,
            hook=method.hook,
            data={"eval_dataset": blocks["validation"], "data_collator": default_data_collator},
            optim=method.optim,
            optim_args=method.options or None,
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
    return {name: getattr(watch, name) for name in ("seconds", "steps", "losses", "first", "sent")}


# -- the runs ---------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, network: Network | None, ranks: Ranks) -> list[Row]:
    """Every method on every link, each saved when it has ended."""
    rows = {(row.link, row.method): row for row in (read_rows(arguments.report) if arguments.reuse else [])}
    links = ["unshaped"] if network is None else arguments.links or ["unshaped"]
    places = [(link, name) for link in links for name in METHODS if name in arguments.methods]
    for link, name in places:
        if (link, name) in rows:
            continue
        if network is not None:
            network.shape(RATES[link])
        answer = ranks.order(method=name, **{key: getattr(arguments, key) for key in ORDERED})[0]
        row = rows[link, name] = Row(link, name, **answer)
        if network is None:
            row.sent //= len(ranks.processes)  # one interface for all ranks
        print(f"{link}: {METHODS[name].title}: {row.seconds[-1]:.0f} s, {row.sent / MB:.0f} MB", flush=True)
        if arguments.report is not None:
            write_rows(arguments.report, list(rows.values()))
    return [rows[place] for place in places]


def read_rows(report: Path) -> list[Row]:
    """The rows of an earlier report."""
    found = json.loads(report.with_suffix(".json").read_text())
    return [Row(**{key: row[key] for key in Row.__dataclass_fields__}) for row in found if row["method"] in METHODS]


# -- the report -------------------------------------------------------------------------------------------------------


def place_of(losses: Sequence[float], loss: float) -> float | None:
    """Number of the evaluation, with a fraction, at which this loss was reached; None where it never was."""
    for number, reached in enumerate(losses):
        if reached <= loss:
            if number == 0:
                return 0.0
            higher = losses[number - 1]
            return number - 1 + (higher - loss) / (higher - reached)
    return None


def at(values: Sequence[float], place: float) -> float:
    """The value at a number of an evaluation, with a fraction."""
    number = int(place)
    if place == number:
        return values[number]
    return values[number] + (place - number) * (values[number + 1] - values[number])


def seconds_to(row: Row, loss: float) -> float | None:
    """When a run first had this loss, by interpolation between evaluations; None where it never had."""
    place = place_of(row.losses, loss)
    return None if place is None else at(row.seconds, place)


def report(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    lines = [
        "# Loss against wall-clock time" if arguments.links else "# Bytes of whole runs",
        "",
        "`scripts/benchmark_time_to_loss.py` trained the model of `recipes/causal_lm --tiny` (4.2 million parameters): "
        f"{arguments.ranks} ranks of {arguments.threads} thread(s) on {os.cpu_count()} CPU cores, "
        f"{arguments.batch_size} examples of {arguments.tokens} tokens per rank and step, {arguments.steps} steps, "
        f"cosine schedule, peak learning rate 1e-3 (OnebitLamb 1e-2), seed {arguments.seed}, Trainer's defaults. The "
        "bytes are those that left a rank's network interface in the whole run, warmup stages included.",
        "",
    ]
    if arguments.links:
        lines += [
            'Each method trained whole on each link. The target is AdamW\'s last loss plus 1 %. "Of compute only" '
            "compares the time to the target with that of a run that exchanges nothing and takes as many steps.",
            "",
        ]
        if arguments.report is not None:
            lines += [f"![loss against seconds]({arguments.report.stem}.png)", ""]
    baseline = next(row for row in rows if row.method == BASELINE)
    cells = [["", "final loss", "MB sent", "times fewer than AdamW"]]
    for row in (row for row in rows if row.link == rows[0].link and row.method != COMPUTE):
        title, fewer = METHODS[row.method].title, f"{baseline.sent / row.sent:.2f}"
        cells.append([title, f"{row.losses[-1]:.3f}", f"{row.sent / MB:.1f}", fewer])
    lines += [*markdown(cells, "right"), ""]
    for link in dict.fromkeys(row.link for row in rows) if arguments.links else ():
        lines += [*times_on([row for row in rows if row.link == link]), ""]
    return "\n".join(lines)


def times_on(rows: Sequence[Row]) -> list[str]:
    """Lines of one link."""
    of = {row.method: row for row in rows}
    target = NEAR * of[BASELINE].losses[-1]
    baseline = seconds_to(of[BASELINE], target)
    assert baseline is not None  # its last loss is below
    cells = [["", "ms per step", "whole run, s", "seconds to the target", "as fast as AdamW", "of compute only"]]
    for row in rows:
        place = None if row.method == COMPUTE else place_of(row.losses, target)
        found = ["" if row.method == COMPUTE else "never", "", ""]
        if place is not None:
            seconds = at(row.seconds, place)
            of_compute = f"{seconds / at(of[COMPUTE].seconds, place):.2f}" if COMPUTE in of else ""
            found = [f"{seconds:.0f}", f"{baseline / seconds:.2f}", of_compute]
        step = f"{row.seconds[-1] / row.steps[-1] * 1e3:.0f}"
        cells.append([METHODS[row.method].title, step, f"{row.seconds[-1]:.0f}", *found])
    return [f"**{rows[0].link}**, target {target:.3f}", "", *markdown(cells, "right")]


def plot(path: Path, rows: Sequence[Row]) -> None:
    links = list(dict.fromkeys(row.link for row in rows))
    figure, panels = pyplot().subplots(1, len(links), figsize=(7 * len(links), 5), layout="constrained", squeeze=False)
    for link, panel in zip(links, panels[0], strict=True):
        for row in rows:
            if row.link == link and row.method != COMPUTE:
                panel.plot(row.seconds, row.losses, marker=".", label=METHODS[row.method].title)
        panel.set(title=link, xlabel="seconds of training", ylabel="evaluation loss (nats per token)", xscale="log")
        panel.grid(True, which="both", alpha=0.2)
        panel.legend()
    figure.savefig(path, dpi=110)


# -- main -------------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (%(default)s)")
    add_link_arguments(parser, ["1 Gbit/s", "100 Mbit/s"], "*")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--evaluated", type=int, default=64, help="examples of an evaluation (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of each run (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="examples per rank and step (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of an example (%(default)s)")
    parser.add_argument("--reuse", action="store_true", help="repeat no run that the report has")
    parser.add_argument("--seed", type=int, default=42, help="(%(default)s)")
    arguments = parser.parse_args()
    least = {"ranks": 2, "threads": 1, "steps": 10, "batch_size": 1, "evaluated": 1, "tokens": 2}
    check_least(parser, arguments, least)
    if BASELINE not in arguments.methods:
        parser.error(f"--methods must have {BASELINE}, which sets the target, got {' '.join(arguments.methods)}")
    check_report(parser, arguments.report)
    if arguments.reuse and not (arguments.report and arguments.report.with_suffix(".json").exists()):
        parser.error("--reuse needs the --report of an earlier call, with its JSON")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve is not None:
        return serve(partial(learn, interface=arguments.serve))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not arguments.loopback:
        check_rights()
    try:
        with ranks_on_links(arguments.ranks, arguments.threads, __file__, loopback=arguments.loopback) as started:
            rows = measure(arguments, *started)
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing is left behind but the runs that the report has")
    text = report(rows, arguments)
    print(f"\n{text}")
    if arguments.report is not None:
        arguments.report.write_text(text)
        if arguments.links:
            plot(arguments.report.with_suffix(".png"), rows)


if __name__ == "__main__":
    main()
