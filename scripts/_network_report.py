"""The report of benchmark_network.py: tables in Markdown, a picture, and the rows as JSON."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from _common import markdown, pyplot, write_rows
from _network_methods import METHODS, MODELS, SIGN_BYTES, Row, ring
from _slow_network import RATES


def merged(known: Sequence[Row], fresh: Sequence[Row]) -> list[Row]:
    """Merge new measurements with the known ones of other places, in the places' order."""
    rows = {row.place: row for row in (*known, *fresh)}
    return [rows[place] for place in sorted(rows)]


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
    if not arguments.loopback and arguments.report is not None and _has_picture(rows):
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
    compute = {row.link: median(row) for row in rows if row.method == "compute"}
    for name in METHODS:
        its = {row.link: row for row in rows if row.method == name}
        if not its:
            continue
        sent = statistics.fmean(row.sent for row in its.values())
        formula = METHODS[name].bytes_per_parameter if per_node == 1 else None
        share = f"{sent / (formula(ranks) * numel):.3f}" if formula else ""
        times = [cell(its[link], compute.get(link)) if link in its else "" for link in links]
        cells.append([METHODS[name].title, *times, f"{sent / 1e6:.3f}", share])
    if limit := limits(rows):
        times = [f"{limit[link] * 1e3:.0f}" if link in limit else "" for link in links]
        cells.append(["limit of OnebitAdam: compute only + its bytes / rate", *times, "", ""])
    lines += [*markdown(cells, "right"), ""]
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
        if row.method == "compute" and row.per_node == 1:
            wire = 0.0 if rate is None else ring(SIGN_BYTES)(row.ranks) * row.numel * 8 / rate
            found[row.link] = median(row) + wire
    return found


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Milliseconds per step over bandwidth, both logarithmic; the limit is dashed, rivals are dotted."""
    models, counts = (list(dict.fromkeys(column)) for column in zip(*((r.model, r.ranks) for r in rows), strict=True))
    size = (6.5 * len(counts), 5 * len(models))
    plt = pyplot()
    figure, grid = plt.subplots(len(models), len(counts), figsize=size, layout="constrained", squeeze=False)
    drawn = [name for name in METHODS if any(row.method == name for row in rows)]
    colours = dict(
        zip(drawn, itertools.cycle(plt.get_cmap("tab20" if len(drawn) > 10 else "tab10").colors), strict=False)
    )
    for (row, model), (column, ranks) in itertools.product(enumerate(models), enumerate(counts)):
        panel = grid[row][column]
        mine = [row for row in rows if (row.model, row.ranks, row.per_node) == (model, ranks, 1)]
        mine = [row for row in mine if RATES[row.link] is not None]
        panel.set_visible(bool(mine))
        for name in drawn:
            points = sorted((gigabits(row.link), median(row) * 1e3) for row in mine if row.method == name)
            if points:
                look = {"marker": "s", "linestyle": ":"} if METHODS[name].in_plain_loop else {"marker": "o"}
                panel.plot(*zip(*points, strict=True), label=METHODS[name].title, color=colours[name], **look)
        if limit := sorted((gigabits(link), seconds * 1e3) for link, seconds in limits(mine).items()):
            panel.plot(*zip(*limit, strict=True), "k--", label="limit of OnebitAdam")
        panel.set(xscale="log", yscale="log", xlabel="link of each rank, Gbit/s", ylabel="ms per step")
        panel.set_title(f"{model} parameters, {ranks} ranks")
        panel.grid(True, which="both", alpha=0.2)
    found = {
        label: line for panel in figure.axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(found.values(), found.keys(), loc="outside right upper")
    figure.savefig(path, dpi=110)


def write_report(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """The Markdown file, and beside it the rows and, of links, the picture."""
    arguments.report.write_text(report(rows, arguments))
    write_rows(arguments.report, rows)
    if not arguments.loopback and _has_picture(rows):
        plot(arguments.report.with_suffix(".png"), rows)


def _has_picture(rows: Sequence[Row]) -> bool:
    """Only ranks with links of their own are drawn."""
    return any(row.per_node == 1 for row in rows)


def gigabits(link: str) -> float:
    return (RATES[link] or math.inf) / 1e9
