"""Train a small language model over slow links to the same number of steps, and compare loss against wall-clock time.

    sudo python scripts/benchmark_time_to_loss.py --report docs/time_to_loss.md
    python scripts/benchmark_time_to_loss.py --loopback                          # without the right to make networks

The model, the text and Trainer are those of recipes/causal_lm (`--tiny`), with Trainer's defaults for each optimizer,
so that warmup in full precision is part of the time. The clock stands still during evaluations, and bytes are not
counted. Every rank has a network namespace and a shaped link of its own (slow_network.py).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from _common import REPOSITORY, check_least, markdown, parser_of, pyplot, write_rows
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
)

RECIPE = REPOSITORY / "recipes" / "causal_lm"
TOKENS = 128  # of an example
BASELINE = "adamw"
NEAR = 1.01  # of the loss that the baseline ends with


@dataclass(frozen=True)
class Method:
    """An optimizer of Trainer's, with its peak learning rate and, for DDP, whether gradients travel in 16 bits."""

    title: str
    optim: str
    lr: float = 1e-3
    half: bool = False


METHODS = {
    BASELINE: Method("AdamW, DDP fp32", "adamw_torch"),
    "fp16": Method("AdamW, 16-bit gradients", "adamw_torch", half=True),
    "onebit_adam": Method("OnebitAdam", "onebit_adam"),
    "zero_one_adam": Method("ZeroOneAdam", "zero_one_adam"),
    "onebit_lamb": Method("OnebitLamb", "onebit_lamb", lr=1e-2),
}


@dataclass
class Row:
    """One run: seconds, steps and evaluation losses at its evaluations, and bytes that left rank 0's interface."""

    link: str
    method: str
    seconds: list[float]
    steps: list[int]
    losses: list[float]
    sent: int


# --------------------------------------------------------------------------------------------------- one rank


@lru_cache(maxsize=1)
def text_and_tokenizer(evaluated: int) -> tuple[Any, Any]:
    """The recipe's examples of TOKENS tokens, so many of them for evaluations, and its tokenizer."""
    sys.path.insert(0, str(RECIPE))
    import datasets
    import train as recipe
    from transformers import TrainingArguments

    datasets.disable_progress_bars()
    options = recipe.DataArguments(block_size=TOKENS, max_eval_samples=evaluated)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", report_to="none")
        text = recipe.load_text(options)
        tokenizer = recipe.make_tokenizer(recipe.ModelArguments(tiny=True), text, arguments)
    return recipe.make_blocks(text, tokenizer, options), tokenizer


def learn(order: dict[str, Any]) -> dict[str, Any]:
    """Train with one method. Returns what a Row has of it."""
    blocks, tokenizer = text_and_tokenizer(order["evaluated"])
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

    method, steps = METHODS[order["method"]], int(order["steps"])
    interval = max(1, steps // 30)
    set_seed(order["seed"])
    model = recipe.make_model(recipe.ModelArguments(tiny=True), TOKENS, tokenizer)

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Seconds of training and bytes that it sent, without evaluations."""

        def __init__(self) -> None:
            self.spent, self.sent = 0.0, 0
            self.seconds: list[float] = []
            self.steps: list[int] = []
            self.losses: list[float] = []

        def go(self) -> None:
            dist.barrier()
            self.since, self.sent_before = time.perf_counter(), sent_bytes(order["interface"])

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if method.half:
                trainer.model_wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
            self.go()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % interval == 0:
                dist.barrier()
                self.spent += time.perf_counter() - self.since
                self.sent += sent_bytes(order["interface"]) - self.sent_before

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            self.seconds.append(self.spent)
            self.steps.append(state.global_step)
            self.losses.append(metrics["eval_loss"])
            self.go()

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
            optim=method.optim,
            per_device_train_batch_size=order["batch_size"],
            per_device_eval_batch_size=16,
            max_steps=steps,
            learning_rate=method.lr,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 10,
            max_grad_norm=1.0,
            eval_strategy="steps",
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
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return {"seconds": clock.seconds, "steps": clock.steps, "losses": clock.losses, "sent": clock.sent}


# ------------------------------------------------------------------------------------------------------ the runs


def measure(arguments: argparse.Namespace, network: Network | None, ranks: Ranks) -> list[Row]:
    rows = []
    for link in ["unshaped"] if network is None else arguments.links:
        if network is not None:
            network.shape(RATES[link])
        for name in arguments.methods:
            options = {key: getattr(arguments, key) for key in ("steps", "batch_size", "seed", "evaluated")}
            answers = ranks.order(**options, method=name, interface="lo" if network is None else "eth0")
            row = Row(link=link, method=name, **answers[0])
            print(f"{link}: {METHODS[name].title}: {row.seconds[-1]:.0f} s, loss {row.losses[-1]:.3f}", flush=True)
            rows.append(row)
    return rows


def seconds_to(row: Row, loss: float) -> float | None:
    """When a run first had this loss, by interpolation between evaluations; None where it never had."""
    for number, (after, reached) in enumerate(zip(row.seconds, row.losses, strict=True)):
        if reached <= loss:
            if number == 0:
                return after
            before, higher = row.seconds[number - 1], row.losses[number - 1]
            return before + (after - before) * (higher - loss) / (higher - reached)
    return None


def report(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    lines = [
        "# Loss against wall-clock time",
        "",
        "`scripts/benchmark_time_to_loss.py` trained the model of `recipes/causal_lm --tiny` (4.2 million parameters): "
        f"{arguments.ranks} ranks of {arguments.threads} thread(s) on {os.cpu_count()} CPU cores, "
        f"{arguments.batch_size} examples of {TOKENS} tokens per rank and step, {arguments.steps} steps, cosine "
        f"schedule, peak learning rate 1e-3 (OnebitLamb 1e-2), seed {arguments.seed}. The times include the "
        "warmup stages, with Trainer's defaults, but no evaluations. The target is AdamW's last loss plus 1 %.",
        "",
    ]
    if arguments.report is not None:
        lines += [f"![loss against seconds]({arguments.report.stem}.png)", ""]
    for link in dict.fromkeys(row.link for row in rows):
        mine = [row for row in rows if row.link == link]
        baseline = next(row for row in mine if row.method == BASELINE)
        target = NEAR * baseline.losses[-1]
        reference = seconds_to(baseline, target) or baseline.seconds[-1]
        lines += [f"**{link}**, target {target:.3f}", ""]
        cells = [["", "whole run, s", "final loss", "seconds to the target", "times as fast as AdamW", "MB sent"]]
        for row in mine:
            reached = seconds_to(row, target)
            found = ["never", ""] if reached is None else [f"{reached:.0f}", f"{reference / reached:.2f}"]
            final = [f"{row.seconds[-1]:.0f}", f"{row.losses[-1]:.3f}"]
            cells.append([METHODS[row.method].title, *final, *found, f"{row.sent / 1e6:.0f}"])
        lines += [*markdown(cells, "right"), ""]
    return "\n".join(lines)


def plot(path: Path, rows: Sequence[Row]) -> None:
    links = list(dict.fromkeys(row.link for row in rows))
    figure, panels = pyplot().subplots(1, len(links), figsize=(7 * len(links), 5), layout="constrained", squeeze=False)
    for link, panel in zip(links, panels[0], strict=True):
        for row in rows:
            if row.link == link:
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
    add_link_arguments(parser, ["1 Gbit/s", "100 Mbit/s"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--evaluated", type=int, default=64, help="examples of an evaluation (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of each run (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="examples per rank and step (%(default)s)")
    parser.add_argument("--seed", type=int, default=42, help="(%(default)s)")
    arguments = parser.parse_args()
    check_least(parser, arguments, {"ranks": 2, "threads": 1, "steps": 10, "batch_size": 1, "evaluated": 1})
    if BASELINE not in arguments.methods:
        parser.error(f"--methods must have {BASELINE}, which sets the target, got {' '.join(arguments.methods)}")
    check_report(parser, arguments.report)
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
        plot(arguments.report.with_suffix(".png"), rows)


if __name__ == "__main__":
    main()
