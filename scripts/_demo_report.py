"""The results of the demo: what its two runs logged, its table, and results.json."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

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
