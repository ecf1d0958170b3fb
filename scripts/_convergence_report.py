"""The report of compare_convergence.py: tables in Markdown, a picture, and the rows as JSON."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import pyplot
from _convergence_runs import (
    ALL_RUNS,
    GOALS,
    MB,
    RUNS,
    Run,
    partner,
    seeds_of,
    steps_of,
    world_sizes_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(RUNS["optimizers"], ("#1f6fb4", "#7a7a7a", "#7b4ea3", "#d1495b", "#2a9d5c", "#e09f3e"), strict=True))
OPEN, CLOSE = "<!-- table {} -->", "<!-- end of table -->"
Rows = dict[int, dict[str, Any]]  # by seed


class Results:
    """The rows that are known, and of them those that belong to a report: with its numbers of steps and its seeds."""

    def __init__(self, rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
        self.known = [rounded(row) for row in rows if row["name"] in ALL_RUNS]
        seeds = {*arguments.seeds, *arguments.tuning_seeds}
        self.rows = [
            row
            for row in self.known
            if row["steps"] == steps_of(ALL_RUNS[row["name"]], arguments) and row["seed"] in seeds
        ]

    def __call__(self, run: Run | None, world_size: int, seeds: Sequence[int]) -> Rows:
        name = run and run.name
        rows = [row for row in self.rows if row["name"] == name and row["world_size"] == world_size]
        return {row["seed"]: row for row in rows if row["seed"] in seeds}

    def partner_of(self, run: Run, world_size: int, seeds: Sequence[int]) -> Rows:
        """Return the uncompressed run's losses, or those at another number of ranks, which changes dropout only."""
        other = partner(run)
        found = (self(other, size, seeds) for size in (world_size, *sorted({row["world_size"] for row in self.rows})))
        return next((rows for rows in found if rows), {})


def loss_cell(rows: Rows, _: Rows) -> str:
    losses = [row["eval_loss"] for row in rows.values()]
    if None in losses:
        return f"not finite at {losses.count(None)} of {len(losses)} seeds"
    return f"{statistics.fmean(losses):.4f} ({min(losses):.3f} to {max(losses):.3f})"


def differences(rows: Rows, others: Rows) -> tuple[float, list[float]] | None:
    """In per cent: that of the means, and that at each seed; None if there is no number."""
    pairs = [(rows[seed]["eval_loss"], others[seed]["eval_loss"]) for seed in rows.keys() & others.keys()]
    if not pairs or any(None in pair for pair in pairs):
        return None
    mine, theirs = (statistics.fmean(losses) for losses in zip(*pairs, strict=True))
    return 100 * (mine / theirs - 1), [100 * (a / b - 1) for a, b in pairs]


def difference_cell(rows: Rows, others: Rows) -> str:
    """Of the means; and the smallest and the largest difference at one seed."""
    found = differences(rows, others)
    return f"{found[0]:+.2f} ({min(found[1]):+.2f} to {max(found[1]):+.2f})" if found else ""


def values(rows: Rows, key: str) -> str:
    """A number that is mostly the same at every seed."""
    found = sorted({row[key] for row in rows.values()} - {None})
    return ", ".join(f"{value:,}" for value in found)


def bytes_cell(rows: Rows, others: Rows) -> str:
    """Megabytes; for a compressed run also how many times fewer than those of an all-reduce in float32."""
    sent = statistics.fmean(row["bytes"] for row in rows.values())
    if not others:
        return f"{sent / MB:,.1f}"
    row = next(iter(rows.values()))
    ring = 2 * (row["world_size"] - 1) / row["world_size"] * 4 * row["parameters"] * row["steps"]
    return f"{sent / MB:,.1f} ({ring / sent:.1f}x fewer)"


def late_step_cell(rows: Rows, _: Rows) -> str:
    """Between the last two evaluations, where a compressed run is in its last stage."""
    before, last = next(iter(rows.values()))["curve"][-2:]
    return f"{(last['bytes'] - before['bytes']) / (last['step'] - before['step']) / 1e3:,.1f}"


def largest_step_cell(rows: Rows, _: Rows) -> str:
    """Of any element, step and seed."""
    steps = [row["largest_step"] for row in rows.values()]
    return "not finite" if None in steps else f"{max(steps):,.1f}"


Cell = Callable[[Rows, Rows], str]
LOSS: dict[str, Cell] = {"evaluation loss": loss_cell}
DIFFERENCE: dict[str, Cell] = {**LOSS, "against the uncompressed, %": difference_cell}
MEGABYTES: dict[str, Cell] = {"MB sent per rank": bytes_cell}
SWITCH: dict[str, Cell] = {"last step of the first stage": lambda rows, _: values(rows, "switch")}
STEP: dict[str, Cell] = {"largest step of any element, in lr": largest_step_cell}
COLUMNS: dict[str, dict[str, Cell]] = {
    "optimizers": {**DIFFERENCE, **MEGABYTES, "rounds": lambda rows, _: values(rows, "rounds"), **SWITCH},
    "state": DIFFERENCE,
    "rivals": {**DIFFERENCE, **MEGABYTES},
    "rivals, rates": LOSS,
    "zero": {**DIFFERENCE, **MEGABYTES},
    "many ranks": {**DIFFERENCE, **MEGABYTES, **SWITCH},
    "GPT-2": {**DIFFERENCE, **MEGABYTES, **SWITCH},
    "texts": {**DIFFERENCE, **MEGABYTES, **SWITCH},
    "fine-tuning": {**DIFFERENCE, **MEGABYTES, **SWITCH},
    "warmup bits": {**DIFFERENCE, **MEGABYTES},
    "clip": DIFFERENCE,
    "max_update": {**DIFFERENCE, **STEP},
    "short runs": {**DIFFERENCE, **MEGABYTES, **SWITCH},
    "variance stage": {**DIFFERENCE, **MEGABYTES},
    "OnebitLamb's warmup": {**DIFFERENCE, **MEGABYTES},
    "blocks": {**DIFFERENCE, **MEGABYTES, "kB per compressed step": late_step_cell},
    "floors": {**DIFFERENCE, **STEP},
    "controls": {**DIFFERENCE, **MEGABYTES},
    "learning rates": LOSS,
    "learning rates, GPT-2": LOSS,
    "fine-tuning rates": LOSS,
}


TABLES = ("goals", *COLUMNS)


def table(group: str, results: Results, arguments: argparse.Namespace) -> str:
    """The rows of one group as Markdown."""
    columns = COLUMNS[group]
    lines = [["run", "ranks", "seeds", *columns], ["---"] + ["---:"] * (len(columns) + 2)]
    seeds = seeds_of(group, arguments)
    for world_size in world_sizes_of(group, arguments):
        for run in RUNS[group].values():
            if rows := results(run, world_size, seeds):
                others = results.partner_of(run, world_size, seeds)
                cells = (cell(rows, others) for cell in columns.values())
                lines.append([run.name, str(world_size), str(len(rows)), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def goals(results: Results, arguments: argparse.Namespace) -> str:
    """A row for each goal, and a column for each number of ranks."""
    lines = [["goal, for the mean over seeds", *(f"{world_size} ranks" for world_size in arguments.world_sizes)]]
    lines.append(["---"] * len(lines[0]))
    for name, bound in GOALS.items():
        run = RUNS["optimizers"][name]
        other = partner(run)
        cells = [f"{name} at most {bound:g} % above {other.name if other else ''}"]
        for world_size in arguments.world_sizes:
            rows = results(run, world_size, arguments.seeds)
            found = differences(rows, results.partner_of(run, world_size, arguments.seeds))
            verdict = "met" if found and found[0] <= bound else "missed"
            seeds = f"{len(found[1])} seed{'s' * (len(found[1]) > 1)}" if found else ""
            cells.append(f"{verdict}: {found[0]:+.2f} % ({seeds})" if found else "not run")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(path: Path, results: Results, arguments: argparse.Namespace) -> None:
    """Evaluation loss of the group "optimizers" against steps and bytes: means over seeds, and bands of their range."""
    from matplotlib.ticker import LogLocator, NullFormatter

    plt, world_sizes = pyplot(), arguments.world_sizes
    figure, grid = plt.subplots(
        len(world_sizes), 2, figsize=(13, 5 * len(world_sizes)), sharey=True, layout="constrained", squeeze=False
    )
    for world_size, (by_step, by_bytes) in zip(world_sizes, grid, strict=True):
        for run in RUNS["optimizers"].values():
            if rows := results(run, world_size, arguments.seeds):
                draw(by_step, run, rows, "step", 1)
                draw(by_bytes, run, rows, "bytes", MB)
        by_step.set(title=f"{world_size} ranks: loss against steps", xlabel="optimizer steps")
        by_step.set_ylabel("evaluation loss (nats per token)")
        by_bytes.set(title=f"{world_size} ranks: loss against bytes", xscale="log")
        by_bytes.set_xlabel("megabytes sent by each rank so far (logarithmic)")
        by_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        by_bytes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        by_bytes.xaxis.set_minor_formatter(NullFormatter())
        for panel in (by_step, by_bytes):
            panel.grid(True, which="both", alpha=0.2)
        by_step.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(panel: Axes, run: Run, rows: Rows, key: str, unit: float) -> None:
    """One curve; the compressed optimizers are dashed, so that the others show where they coincide."""
    points = list(zip(*(row["curve"] for row in rows.values()), strict=True))
    losses = [[math.nan if point["eval"] is None else point["eval"] for point in seeds] for seeds in points]
    where = [statistics.fmean(point[key] for point in seeds) / unit for seeds in points]
    compressed, colour = partner(run) is not None, COLOURS[run.name]
    style = {"linestyle": (0, (4, 1.5)) if compressed else "-", "marker": "s" if compressed else "o", "markersize": 4}
    panel.plot(where, [statistics.fmean(seeds) for seeds in losses], label=run.name, color=colour, **style)
    panel.fill_between(where, [min(s) for s in losses], [max(s) for s in losses], color=colour, alpha=0.15, linewidth=0)


def write_report(path: Path, results: Results, arguments: argparse.Namespace) -> None:
    """The Markdown file, and beside it the picture and the rows, one per line."""
    if path.exists():
        text = path.read_text()
    else:
        text = f"# Convergence\n\n![loss against steps and bytes]({path.stem}.png)\n\n"
        text += "\n\n".join(f"## {group}\n\n{OPEN.format(group)}\n{CLOSE}" for group in TABLES) + "\n"
    path.write_text(rendered(text, results, arguments))
    plot(path.with_suffix(".png"), results, arguments)
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in results.known)
    path.with_suffix(".json").write_text(f"[\n{rows}\n]\n")


def rendered(text: str, results: Results, arguments: argparse.Namespace) -> str:
    """The page with its tables anew."""
    for group in TABLES:
        lines = table(group, results, arguments) if group in COLUMNS else goals(results, arguments)
        place = re.compile(f"(?<={re.escape(OPEN.format(group))}\n).*?(?={re.escape(CLOSE)})", re.DOTALL)
        if place.search(text):
            text = place.sub(lambda _, lines=lines: f"{lines}\n", text, count=1)
        elif lines.count("\n") > 1:
            text += f"\n## {group}\n\n{OPEN.format(group)}\n{lines}\n{CLOSE}\n"
    return text


def rounded(value: Any) -> Any:
    """A row as the JSON has it, so that the tables are what the JSON says."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return round(value, 5) if isinstance(value, float) else value
