"""Train a small language model over slow links to the same number of steps, and compare loss against wall-clock time.

    sudo python scripts/benchmark_time_to_loss.py --report docs/time_to_loss.md
    python scripts/benchmark_time_to_loss.py --loopback                          # without the right to make networks
    python scripts/benchmark_time_to_loss.py --links --steps 1000 --tokens 16 --batch-size 1   # bytes of whole runs

The model, the text and Trainer are those of recipes/causal_lm (`--tiny`), with Trainer's defaults for each optimizer,
so that the first stage is part of the time. What a run learns does not depend on the link: each method trains once, on
an unshaped one, where its bytes are counted too. Then the step of each of its stages is timed on each link, the methods
in turn, several times over, so that a slow spell of the machine meets all; the seconds of a run are the sum over its
steps. "compute only" is a run that exchanges nothing, and takes as many steps; with a barrier at the end of each step
it also shows what it costs that ranks wait for each other. Every rank has a network namespace and a shaped link of its
own (_slow_network.py).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from _common import REPOSITORY, check_least, in_turn, markdown, parser_of, pyplot, write_rows
from _slow_network import (
    RATES,
    Network,
    Ranks,
    add_link_arguments,
    check_report,
    check_rights,
    nothing_hook,
    ranks_on_links,
    sent_bytes,
    serve,
)

RECIPE = REPOSITORY / "recipes" / "causal_lm"
COMPUTE, BASELINE = "compute", "adamw"
ALONE = (COMPUTE, "in_step")  # they exchange no gradients, so what they learn is not compared
ORDERED = ("steps", "batch_size", "tokens", "seed", "evaluated")
NEAR = 1.01  # of the loss that the baseline ends with


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        title: Its name in tables.
        optim: Trainer's ``--optim``.
        lr: Peak learning rate.
        options: Trainer's ``--optim_args``.
        hook: DDP communication hook: "fp16", "none", which exchanges nothing, or "" for the method's own.
        barrier: Whether ranks wait for each other at the end of a step.
        stages: Options, beside the others, that keep a run in its first stage or in its last one.
    """

    title: str
    optim: str
    lr: float = 1e-3
    options: str = ""
    hook: str = ""
    barrier: bool = False
    stages: tuple[str, ...] = ("",)


SETTLING = 8  # steps before a window, in which DDP settles its buckets and a compressed optimizer switches
SWITCHED = (f"freeze_step={10**6}", "freeze_step=3")
METHODS = {
    COMPUTE: Method("compute only", "adamw_torch", hook="none"),
    "in_step": Method("compute only, and a barrier", "adamw_torch", hook="none", barrier=True),
    BASELINE: Method("AdamW, DDP fp32", "adamw_torch"),
    "fp16": Method("AdamW, 16-bit gradients", "adamw_torch", hook="fp16"),
    "int4": Method("AdamW, int4 gradients", "adamw_torch", options="grad_compression=int4"),
    "onebit_adam": Method("OnebitAdam", "onebit_adam", options="warmup_bits=4", stages=SWITCHED),
    "onebit_lamb": Method("OnebitLamb", "onebit_lamb", lr=1e-2, options="warmup_bits=4", stages=SWITCHED),
}


@dataclass
class Row:
    """A run on a link.

    Attributes:
        link: Name of the link; "" for what no link changes.
        method: Key of METHODS.
        seconds: From the run's start to each evaluation.
        steps: The steps of the evaluations.
        losses: Evaluation losses.
        first: Steps of the first stage.
        sent: Bytes that a rank sent in the run.
        windows: Seconds of a step in each stage, one number per round.
    """

    link: str
    method: str
    seconds: list[float]
    steps: list[int]
    losses: list[float]
    first: int
    sent: int
    windows: list[list[float]]


# --------------------------------------------------------------------------------------------------- one rank


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


def learn(order: dict[str, Any]) -> dict[str, Any]:
    """Train with one method: a whole run with evaluations; or, where a stage is given, a window of its steps.

    Returns:
        What a Row has of it, or the mean seconds of a step.
    """
    blocks, tokenizer = text_and_tokenizer(order["evaluated"], order["tokens"])
    import torch.distributed as dist
    import train as recipe
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from transformers import (
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
        set_seed,
    )

    method, stage = METHODS[order["method"]], order.get("stage")
    steps = int(order["steps"]) if stage is None else SETTLING + int(order["window"])
    interval = max(1, steps // 30)
    set_seed(order["seed"])
    model = recipe.make_model(recipe.ModelArguments(tiny=True), order["tokens"], tokenizer)

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Losses, bytes without those of evaluations, and the time of a window."""

        def __init__(self) -> None:
            self.sent, self.sent_before, self.first = 0, 0, 0
            self.steps: list[int] = []
            self.losses: list[float] = []
            self.times: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if method.hook == "fp16":
                trainer.model_wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
            elif method.hook:
                trainer.model_wrapped.register_comm_hook(None, nothing_hook)
            self.go()

        def go(self) -> None:
            dist.barrier()
            self.sent_before = sent_bytes(order["interface"])

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            plan = getattr(trainer.optimizer.optimizer, "plan", None)
            self.first += plan is None or plan.reduce_grads

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if method.barrier:
                dist.barrier()
            if stage is not None and state.global_step in (SETTLING, steps):
                dist.barrier()
                self.times.append(time.perf_counter())
            if stage is None and state.global_step % interval == 0:
                dist.barrier()
                self.sent += sent_bytes(order["interface"]) - self.sent_before

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            self.steps.append(state.global_step)
            self.losses.append(metrics["eval_loss"])
            self.go()

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
            optim=method.optim,
            optim_args=",".join(filter(None, [method.options, stage])) or None,
            per_device_train_batch_size=order["batch_size"],
            per_device_eval_batch_size=16,
            max_steps=steps,
            learning_rate=method.lr,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 10,
            max_grad_norm=1.0,
            eval_strategy="steps" if stage is None else "no",
            eval_steps=interval,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=order["seed"],
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=blocks["train"],
            eval_dataset=blocks["validation"],
            data_collator=default_data_collator,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if stage is not None:
        return {"seconds": (watch.times[1] - watch.times[0]) / order["window"]}
    return {"steps": watch.steps, "losses": watch.losses, "first": watch.first, "sent": watch.sent}


# ------------------------------------------------------------------------------------------------------ the runs


def measure(arguments: argparse.Namespace, network: Network | None, ranks: Ranks) -> list[Row]:
    """The runs, on an unshaped link and saved one by one, and then their steps on each link."""
    options: dict[str, Any] = {key: getattr(arguments, key) for key in ORDERED}
    options["interface"] = "lo" if network is None else "eth0"
    if network is not None:
        network.shape(None)
    runs = known_runs(arguments)
    for name in arguments.methods:
        if name not in ALONE and name not in runs:
            runs[name] = run = Row("", name, [], windows=[], **ranks.order(**options, method=name)[0])
            if network is None:
                run.sent //= len(ranks.processes)  # one interface for all ranks
            print(f"{METHODS[name].title}: loss {run.losses[-1]:.3f}, {run.sent / 1e6:.0f} MB", flush=True)
            if arguments.report is not None:
                write_rows(arguments.report, list(runs.values()))
    runs = {name: runs[name] for name in METHODS if name in runs and name in arguments.methods}
    everywhere = runs[BASELINE].steps
    compute = Row("", "", [], everywhere, [0.0] * len(everywhere), everywhere[-1], 0, [])
    rows = []
    for link in ["unshaped"] if network is None else arguments.links:
        if network is not None:
            network.shape(RATES[link])
        windows = windows_on(link, arguments, ranks, options)
        for name, of_stages in windows.items():
            run, step = runs.get(name, compute), [statistics.median(times) for times in of_stages]
            seconds = [step[0] * min(at, run.first) + step[-1] * max(0, at - run.first) for at in run.steps]
            rows.append(replace(run, link=link, method=name, seconds=seconds, windows=of_stages))
    return rows or list(runs.values())


def known_runs(arguments: argparse.Namespace) -> dict[str, Row]:
    """The runs of the report that is there, for --reuse."""
    if not arguments.reuse:
        return {}
    known = [Row(**row) for row in json.loads(arguments.report.with_suffix(".json").read_text())]
    return {row.method: replace(row, link="", seconds=[], windows=[]) for row in known if row.method not in ALONE}


def windows_on(
    link: str, arguments: argparse.Namespace, ranks: Ranks, options: dict[str, Any]
) -> dict[str, list[list[float]]]:
    """Of each method and stage the seconds of a step, one number per round; the methods take turns."""
    windows: dict[str, list[list[float]]] = {name: [[] for _ in METHODS[name].stages] for name in arguments.methods}
    for number in range(arguments.rounds):
        for name in in_turn(arguments.methods, number):
            for stage, times in zip(METHODS[name].stages, windows[name], strict=True):
                answers = ranks.order(**options, method=name, stage=stage, window=arguments.window)
                times.append(answers[0]["seconds"])
                print(f"{link}: {METHODS[name].title} {stage}: {times[-1] * 1e3:.0f} ms per step", flush=True)
    return windows


def seconds_to(row: Row, loss: float) -> float | None:
    """When a run first had this loss, by interpolation between evaluations; None where it never had."""
    place = place_of(row.losses, loss)
    return None if place is None else at(row.seconds, place)


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


def report(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    lines = [
        "# Loss against wall-clock time" if arguments.links else "# Bytes of whole runs",
        "",
        "`scripts/benchmark_time_to_loss.py` trained the model of `recipes/causal_lm --tiny` (4.2 million parameters): "
        f"{arguments.ranks} ranks of {arguments.threads} thread(s) on {os.cpu_count()} CPU cores, "
        f"{arguments.batch_size} examples of {arguments.tokens} tokens per rank and step, {arguments.steps} steps, "
        f"cosine schedule, peak learning rate 1e-3 (OnebitLamb 1e-2), seed {arguments.seed}, Trainer's defaults. The "
        "bytes are those that left a rank's network interface in the whole run, first stages included.",
        "",
    ]
    if arguments.links:
        lines += [
            "Each method trained once. The seconds are the sum over its steps of the time of a step in their stage: "
            f"the median of {arguments.rounds} windows of {arguments.window} steps on the link, in which the methods "
            'took turns. The target is AdamW\'s last loss plus 1 %. "Of compute only" compares the time to the target '
            "with that of a run that exchanges nothing and takes as many steps.",
            "",
        ]
    if arguments.report is not None and arguments.links:
        lines += [f"![loss against seconds]({arguments.report.stem}.png)", ""]
    baseline = next(row for row in rows if row.method == BASELINE)
    target = NEAR * baseline.losses[-1]
    heading = ["", "final loss", "MB sent", "times fewer than AdamW"]
    cells = [heading]
    for row in (row for row in rows if row.link == rows[0].link and row.method not in ALONE):
        title, fewer = METHODS[row.method].title, f"{baseline.sent / row.sent:.2f}"
        cells.append([title, f"{row.losses[-1]:.3f}", f"{row.sent / 1e6:.1f}", fewer])
    lines += [*markdown(cells, "right"), ""]
    for link in dict.fromkeys(row.link for row in rows if row.link):
        lines += [*times_on(link, [row for row in rows if row.link == link], target), ""]
    return "\n".join(lines)


def times_on(link: str, rows: Sequence[Row], target: float) -> list[str]:
    """Lines of one link."""
    of = {row.method: row for row in rows}
    names = ["ms per step, by stage", "whole run, s", "seconds to the target", "as fast as AdamW", "of compute only"]
    cells = [["", *names]]
    baseline = seconds_to(of[BASELINE], target)
    assert baseline is not None
    for row in rows:
        step = " / ".join(f"{statistics.median(times) * 1e3:.0f}" for times in row.windows)
        place = None if row.method in ALONE else place_of(row.losses, target)
        found = ["", "", ""] if row.method in ALONE else ["never", "", ""]
        if place is not None:
            seconds = at(row.seconds, place)
            of_compute = f"{seconds / at(of[COMPUTE].seconds, place):.2f}" if COMPUTE in of else ""
            found = [f"{seconds:.0f}", f"{baseline / seconds:.2f}", of_compute]
        cells.append([METHODS[row.method].title, step, f"{row.seconds[-1]:.0f}", *found])
    return [f"**{link}**, target {target:.3f}", "", *markdown(cells, "right")]


def plot(path: Path, rows: Sequence[Row]) -> None:
    links = list(dict.fromkeys(row.link for row in rows))
    figure, panels = pyplot().subplots(1, len(links), figsize=(7 * len(links), 5), layout="constrained", squeeze=False)
    for link, panel in zip(links, panels[0], strict=True):
        for row in rows:
            if row.link == link and row.method not in ALONE:
                panel.plot(row.seconds, row.losses, marker=".", label=METHODS[row.method].title)
        panel.set(title=link, xlabel="seconds of training", ylabel="evaluation loss (nats per token)", xscale="log")
        panel.grid(True, which="both", alpha=0.2)
        panel.legend()
    figure.savefig(path, dpi=110)


# ----------------------------------------------------------------------------------------------------------- main


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
    parser.add_argument("--rounds", type=int, default=3, help="how often the methods take turns (%(default)s)")
    parser.add_argument("--window", type=int, default=8, help="steps that are timed in each turn (%(default)s)")
    parser.add_argument("--reuse", action="store_true", help="the runs of the report; only steps are timed")
    parser.add_argument("--seed", type=int, default=42, help="(%(default)s)")
    arguments = parser.parse_args()
    check_least(
        parser,
        arguments,
        {"ranks": 2, "threads": 1, "steps": 10, "batch_size": 1, "evaluated": 1, "tokens": 2, "rounds": 1, "window": 1},
    )
    if BASELINE not in arguments.methods:
        parser.error(f"--methods must have {BASELINE}, which sets the target, got {' '.join(arguments.methods)}")
    check_report(parser, arguments.report)
    if arguments.reuse and not (arguments.report and arguments.report.with_suffix(".json").exists()):
        parser.error("--reuse needs the --report of an earlier call, with its JSON")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve is not None:
        return serve(learn)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not arguments.loopback:
        check_rights()
    try:
        with ranks_on_links(arguments.ranks, arguments.threads, __file__, loopback=arguments.loopback) as started:
            rows = measure(arguments, *started)
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing is left behind")
    text = report(rows, arguments)
    print(f"\n{text}")
    if arguments.report is not None:
        arguments.report.write_text(text)
        write_rows(arguments.report, rows)
        if arguments.links:
            plot(arguments.report.with_suffix(".png"), rows)


if __name__ == "__main__":
    main()
