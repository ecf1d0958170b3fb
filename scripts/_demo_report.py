"""The results of the demo: what its two runs logged, a table, a picture of the losses, and results.json."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from _common import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE, COMPRESSED = "adamw_torch", "onebit_adam"
MB = 1e6
FOOTNOTE = f"""\
* {COMPRESSED}: counted by the optimizer. {BASELINE}: computed for a ring all-reduce of float32 gradients,
  2 (W-1)/W * 4 n bytes with W = {{ranks}} ranks and n = {{parameters:,}} parameters.
  Bytes cost next to nothing between processes of one machine: the times show what compressing costs here, and
  whatever else the machine was doing, not what a slower network would save."""


@dataclass
class Result:
    """The log of one run, by step."""

    optim: str
    parameters: int
    wall_seconds: float
    train_seconds: float = math.nan
    train_loss: dict[int, float] = field(default_factory=dict)
    eval_loss: dict[int, float] = field(default_factory=dict)
    stage: dict[int, float] = field(default_factory=dict)
    bytes_sent: dict[int, float] = field(default_factory=dict)
    bytes_sent_step: dict[int, float] = field(default_factory=dict)
    compression_ratio: dict[int, float] = field(default_factory=dict)


LOGGED = {
    "loss": "train_loss",
    "eval_loss": "eval_loss",
    "compressopt/stage": "stage",
    "compressopt/bytes_sent": "bytes_sent",
    "compressopt/bytes_sent_step": "bytes_sent_step",
    "compressopt/compression_ratio": "compression_ratio",
}


def read_result(optim: str, directory: Path, wall_seconds: float) -> Result:
    parameters = json.loads((directory / "train_results.json").read_text())["parameters"]
    result = Result(optim, parameters, wall_seconds)
    for entry in json.loads((directory / "trainer_state.json").read_text())["log_history"]:
        for key, name in LOGGED.items():
            if key in entry:
                getattr(result, name)[entry["step"]] = entry[key]
        result.train_seconds = entry.get("train_runtime", result.train_seconds)
    return result


@dataclass
class Traffic:
    """Bytes that one rank sends: those of onebit_adam as it counts them, those of adamw_torch by the formula.

    A run that stays in the warmup stage, as a short one may, has neither a compressed_step nor a switch_step.
    """

    baseline_step: float
    warmup_step: float
    compressed_step: float | None
    switch_step: int | None
    baseline: dict[int, float]
    compressed: dict[int, float]

    @property
    def totals(self) -> tuple[float, float]:
        last = max(self.compressed)
        return self.baseline[last], self.compressed[last]


def ring_all_reduce_bytes(parameters: int, ranks: int) -> float:
    """Bytes that each rank sends to average 4-byte gradients by a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * 4 * parameters


def measure_traffic(result: Result, ranks: int) -> Traffic:
    """Bytes per step by stage; the step of the switch follows from the bytes between the logs around it."""
    warmup_logs = [step for step, stage in result.stage.items() if stage == 0.0]
    compressed_logs = [step for step, stage in result.stage.items() if stage == 1.0]
    if not warmup_logs:
        sys.exit(f"the log of {result.optim} does not show the warmup stage: {sorted(set(result.stage.values()))}")
    before = max(warmup_logs)
    warmup, compressed, switch = result.bytes_sent_step[before], None, None
    if compressed_logs:
        after = min(compressed_logs)
        compressed = result.bytes_sent_step[after]
        sent = result.bytes_sent[after] - result.bytes_sent[before]
        switch = before + round((sent - (after - before) * compressed) / (warmup - compressed))
    baseline = ring_all_reduce_bytes(result.parameters, ranks)
    return Traffic(
        baseline_step=baseline,
        warmup_step=warmup,
        compressed_step=compressed,
        switch_step=switch,
        baseline={step: step * baseline for step in result.bytes_sent},
        compressed=result.bytes_sent,
    )


def write_json(path: Path, runs: dict[str, Result], traffic: Traffic, arguments: argparse.Namespace) -> None:
    content = {
        "arguments": {**vars(arguments), "output_dir": arguments.output_dir.name},
        "traffic": asdict(traffic),
        "runs": {optim: asdict(result) for optim, result in runs.items()},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def percent(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.2f} %"


def megabytes(value: float) -> str:
    return f"{value / MB:,.2f} MB"


def loss_rows(runs: dict[str, Result], traffic: Traffic) -> list[list[str]]:
    base, ours = runs[BASELINE], runs[COMPRESSED]
    rows = []
    for step in sorted(base.eval_loss.keys() & ours.eval_loss.keys() & base.train_loss.keys()):
        rows.append(
            [
                f"{step}",
                "warmup" if traffic.switch_step is None or step <= traffic.switch_step else "compressed",
                *(f"{run.train_loss[step]:.4f}" for run in (base, ours)),
                percent(ours.train_loss[step], base.train_loss[step]),
                *(f"{run.eval_loss[step]:.4f}" for run in (base, ours)),
                percent(ours.eval_loss[step], base.eval_loss[step]),
            ]
        )
    return rows


def cost_rows(runs: dict[str, Result], traffic: Traffic) -> list[list[str]]:
    base, ours = runs[BASELINE], runs[COMPRESSED]
    total_base, total_ours = traffic.totals

    def row(title: str, reference: float, value: float, show: Callable[[float], str], last: str) -> list[str]:
        return [title, show(reference), show(value), last]

    def seconds(value: float) -> str:
        return f"{value:.0f} s"

    def fewer(reference: float, value: float) -> str:
        return f"{reference / value:.1f}x fewer" if value < reference else percent(value, reference)

    step = traffic.baseline_step
    return [
        ["", BASELINE, COMPRESSED, ""],
        *(
            row(title, step, sent, megabytes, fewer(step, sent))
            for title, sent in (
                ("sent per rank and step, warmup*", traffic.warmup_step),
                ("... compressed stage*", traffic.compressed_step),
            )
            if sent is not None
        ),
        row("sent per rank in the whole run*", total_base, total_ours, megabytes, fewer(total_base, total_ours)),
        row(
            "training and evaluation",
            base.train_seconds,
            ours.train_seconds,
            seconds,
            percent(ours.train_seconds, base.train_seconds),
        ),
        row(
            "wall time of the run",
            base.wall_seconds,
            ours.wall_seconds,
            seconds,
            percent(ours.wall_seconds, base.wall_seconds),
        ),
    ]


def print_table(runs: dict[str, Result], traffic: Traffic, arguments: argparse.Namespace) -> None:
    head = ["step", "stage", "train", "train", "difference", "evaluation", "evaluation", "difference"]
    optims = ["", "of onebit_adam", *[BASELINE, COMPRESSED, ""] * 2]
    widths = [6, 14, *[11, 12, 10] * 2]

    def line(cells: list[str], sizes: list[int]) -> str:
        first, *others = (f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
        return "  ".join([first.lstrip().ljust(sizes[0]), *others])

    rule = "-" * len(line([""] * len(widths), widths))
    print(f"\n{rule}")
    for cells in (head, optims):
        print(line(cells, widths))
    print(rule)
    for cells in loss_rows(runs, traffic):
        print(line(cells, widths))
    print(rule)
    for cells in cost_rows(runs, traffic):
        print(line(cells, [32, 22, 22, 12]))
    print(rule)
    print(FOOTNOTE.format(ranks=arguments.processes, parameters=runs[BASELINE].parameters))


COLOURS = {BASELINE: "#1f6fb4", COMPRESSED: "#d1495b"}


def plot(path: Path, runs: dict[str, Result], traffic: Traffic, ranks: int) -> None:
    plt = pyplot()
    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(13, 5.4), sharey=True, layout="constrained")
    sent = {BASELINE: traffic.baseline, COMPRESSED: traffic.compressed}
    for optim, run in runs.items():
        draw_losses(by_step, run, {step: step for step in run.train_loss})
        draw_losses(by_bytes, run, {step: in_all / MB for step, in_all in sent[optim].items()})
        annotate_end(by_bytes, run, sent[optim])
    if traffic.switch_step is not None:
        mark_switch(by_step, traffic.switch_step)
        mark_switch(by_bytes, traffic.switch_step * traffic.warmup_step / MB)
    by_step.set(title="Loss against steps", xlabel="optimizer steps", ylabel="cross-entropy loss (nats per token)")
    by_step.set_xlim(left=0)
    by_bytes.set(title="Loss against bytes", xlabel="megabytes sent by each rank so far (logarithmic)")
    logarithmic(by_bytes)
    for panel in (by_step, by_bytes):
        panel.grid(True, alpha=0.25)
    by_step.legend()
    full, sent_by_ours = traffic.totals
    figure.suptitle(
        f"GPT-2 of {runs[BASELINE].parameters / 1e6:.1f}M parameters from scratch on {ranks} ranks\nin the whole run "
        f"each rank sends {full / MB:,.0f} MB with {BASELINE}, {sent_by_ours / MB:,.0f} MB with {COMPRESSED}, "
        f"{full / sent_by_ours:.1f} times fewer"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_losses(panel: Axes, run: Result, position: dict[int, float]) -> None:
    """Training thin, evaluation bold; the compressed run is dashed, so that the other shows where they coincide."""
    compressed = run.optim == COMPRESSED
    style = {"color": COLOURS[run.optim], "linestyle": (0, (4, 1.5)) if compressed else "-"}
    curves = (
        (run.train_loss, "training", {"linewidth": 1.2, "alpha": 0.8}),
        (run.eval_loss, "evaluation", {"linewidth": 2.2, "marker": "s" if compressed else "o", "markersize": 5}),
    )
    for losses, label, extra in curves:
        steps = sorted(losses.keys() & position.keys())
        x, y = [position[step] for step in steps], [losses[step] for step in steps]
        panel.plot(x, y, label=f"{run.optim}, {label}", **style, **extra)


def annotate_end(panel: Axes, run: Result, sent: dict[int, float]) -> None:
    last = max(run.eval_loss.keys() & sent.keys())
    panel.annotate(
        f"{run.eval_loss[last]:.3f} after\n{sent[last] / MB:,.0f} MB",
        (sent[last] / MB, run.eval_loss[last]),
        xytext=(-24, -4) if run.optim == COMPRESSED else (4, 24),
        textcoords="offset points",
        ha="right",
        va="center",
        color=COLOURS[run.optim],
    )


def mark_switch(panel: Axes, position: float) -> None:
    panel.axvline(position, color="#555555", linestyle=":", linewidth=1.3)
    panel.annotate(
        f"{COMPRESSED}:\nwarmup → compressed",
        (position, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color="#333333",
    )


def logarithmic(panel: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
