"""Train small language models with every optimizer and some of their options, and compare loss, bytes and rounds.

A plain torch loop with the production optimizers and messages on gloo processes, with the same global batch whatever
the number of ranks. Every finished run is one line of OUTPUT/rows.jsonl. A run that has its line, or a row in the JSON
beside the report, is not repeated: an interrupted script goes on where it was, and a published report can be extended.
To run something again, remove its row. The report is Markdown; beside it lie a picture and the rows as JSON. In a
report that is there already only the text between `<!-- table NAME -->` and `<!-- end of table -->` changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _common import MB, check_least, logarithmic, markdown, parser_of, pyplot
from _convergence import (
    ALL_RUNS,
    GLOBAL_BATCH,
    ONE_SEED,
    RUNS,
    TUNING,
    WORLD_SIZES,
    Run,
    missing,
    partner,
    pretrain,
    train,
)
from _slow_network import ranks_on_links, serve

COLOURS = dict(zip(RUNS["optimizers"], ("#1f6fb4", "#7a7a7a", "#7b4ea3", "#d1495b", "#2a9d5c", "#e09f3e"), strict=True))
OPEN, CLOSE = "<!-- table {} -->", "<!-- end of table -->"
Key = tuple[str, int, int, int]
Rows = dict[int, dict[str, Any]]  # by seed

# -- running ----------------------------------------------------------------------------------------------------------


def steps_of(run: Run, arguments: argparse.Namespace) -> int:
    return arguments.steps if run.steps is None else run.steps


def seeds_of(group: str, arguments: argparse.Namespace) -> list[int]:
    seeds = arguments.tuning_seeds if group in TUNING else arguments.seeds
    return seeds[:1] if group in ONE_SEED else seeds


def world_sizes_of(group: str, arguments: argparse.Namespace) -> Sequence[int]:
    return WORLD_SIZES.get(group, arguments.world_sizes)


def jobs(arguments: argparse.Namespace) -> list[Key]:
    """The runs that were asked for, group by group, and in each of them seed by seed; as key_of()."""
    found: dict[Key, None] = {}
    for group, chosen in RUNS.items():
        runs = [run for run in chosen.values() if group in arguments.only or run.name in arguments.only]
        for run in filter(missing, runs):
            print(f"SKIPPED {run.name}: python scripts/real_models.py fetches {', '.join(missing(run))}", flush=True)
        runs = [run for run in runs if not missing(run)]
        places = itertools.product(seeds_of(group, arguments), world_sizes_of(group, arguments), runs)
        found |= {(run.name, world_size, seed, steps_of(run, arguments)): None for seed, world_size, run in places}
    return list(found)


def key_of(row: dict[str, Any]) -> Key:
    return row["name"], row["world_size"], row["seed"], row["steps"]


def run_all(todo: Sequence[Key], rows_file: Path) -> None:
    """Run them, number of ranks by number of ranks; each appends its row."""
    start = rows_file.parent.resolve() / "pretrained.pt"
    if any(ALL_RUNS[name].pretrained for name, *_ in todo) and not start.exists():
        pretrain(start)
    began, done, everything = time.monotonic(), 0, sum(steps for *_, steps in todo)
    for world_size in dict.fromkeys(world_size for _, world_size, *_ in todo):
        with ranks_on_links(world_size, 1, __file__, loopback=True) as (_, ranks):
            for name, _, seed, steps in [key for key in todo if key[1] == world_size]:
                row = ranks.order(name=name, seed=seed, steps=steps, start=str(start))[0]
                with rows_file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                done += steps
                left = (time.monotonic() - began) * (everything / done - 1)
                print(
                    f"{name}, {world_size} ranks, seed {seed}, {steps} steps: evaluation loss {row['eval_loss']}, "
                    f"{row['bytes'] / MB:,.1f} MB, {row['seconds']:.0f} s; about {left / 60:.0f} min left",
                    flush=True,
                )


def read_rows(rows_file: Path, report: Path) -> list[dict[str, Any]]:
    """The rows of finished runs; those beside the report first, unless there is a newer one."""
    published = report.with_suffix(".json")
    rows = json.loads(published.read_text()) if published.exists() else []
    rows += map(json.loads, rows_file.read_text().splitlines()) if rows_file.exists() else []
    return list({key_of(row): row for row in rows}.values())


# -- the report -------------------------------------------------------------------------------------------------------


class Results:
    """The rows that are known, and of them those that belong to a report: with its numbers of steps and its seeds."""

    def __init__(self, rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
        self.known = [rounded(row) for row in rows]
        seeds = {*arguments.seeds, *arguments.tuning_seeds}
        mine = (row for row in self.known if row["name"] in ALL_RUNS and row["seed"] in seeds)
        self.rows = [row for row in mine if row["steps"] == steps_of(ALL_RUNS[row["name"]], arguments)]

    def __call__(self, run: Run | None, world_size: int, seeds: Sequence[int]) -> Rows:
        name = run and run.name
        rows = [row for row in self.rows if row["name"] == name and row["world_size"] == world_size]
        return {row["seed"]: row for row in rows if row["seed"] in seeds}

    def partner_of(self, run: Run, world_size: int, seeds: Sequence[int]) -> Rows:
        """Return the uncompressed run's losses, or those at another number of ranks, which changes dropout only."""
        other = partner(run)
        found = (self(other, size, seeds) for size in (world_size, *sorted({row["world_size"] for row in self.rows})))
        return next((rows for rows in found if rows), {})


def rounded(value: Any) -> Any:
    """A row as the JSON has it, so that the tables are what the JSON says."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return round(value, 5) if isinstance(value, float) else value


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


def accuracy_cell(rows: Rows, _: Rows) -> str:
    found = [row["accuracy"] for row in rows.values()]
    return f"{statistics.fmean(found):.4f} ({min(found):.3f} to {max(found):.3f})"


def bytes_cell(rows: Rows, others: Rows) -> str:
    """Megabytes; for a compressed run also how many times fewer than those of an all-reduce in float32."""
    sent = statistics.fmean(row["bytes"] for row in rows.values())
    if not others:
        return f"{sent / MB:,.1f}"
    row = next(iter(rows.values()))
    ring = 2 * (row["world_size"] - 1) / row["world_size"] * 4 * row["parameters"] * row["steps"]
    return f"{sent / MB:,.1f} ({ring / sent:.1f}x fewer)"


def values_cell(key: str) -> Callable[[Rows, Rows], str]:
    """A number that is mostly the same at every seed."""
    return lambda rows, _: ", ".join(f"{value:,}" for value in sorted({row[key] for row in rows.values()} - {None}))


LOSS, ROUNDS, SWITCH, ACCURACY = "evaluation loss", "rounds", "last step of the warmup stage", "accuracy"
DIFFERENCE, SENT = "against the uncompressed, %", "MB sent per rank"
CELLS: dict[str, Callable[[Rows, Rows], str]] = {
    LOSS: loss_cell,
    DIFFERENCE: difference_cell,
    SENT: bytes_cell,
    ROUNDS: values_cell("rounds"),
    SWITCH: values_cell("switch"),
    ACCURACY: accuracy_cell,
}
#: What the table of a group shows beside loss, difference and bytes, or instead of them.
COLUMNS = {
    **{group: [LOSS, DIFFERENCE, SENT] for group in RUNS},
    "optimizers": [LOSS, DIFFERENCE, SENT, ROUNDS, SWITCH],
    "classification": [LOSS, DIFFERENCE, ACCURACY, SENT, SWITCH],
    **dict.fromkeys(("GPT-2", "fine-tuning"), [LOSS, DIFFERENCE, SENT, SWITCH]),
    **dict.fromkeys(ONE_SEED, [LOSS]),
}


def table(group: str, results: Results, arguments: argparse.Namespace) -> str:
    """The rows of one group as Markdown."""
    columns = COLUMNS[group]
    lines = [["run", "ranks", "seeds", *columns]]
    seeds = seeds_of(group, arguments)
    for world_size in world_sizes_of(group, arguments):
        for run in RUNS[group].values():
            if rows := results(run, world_size, seeds):
                others = results.partner_of(run, world_size, seeds)
                lines.append(
                    [run.name, str(world_size), str(len(rows)), *(CELLS[name](rows, others) for name in columns)]
                )
    return "\n".join(markdown(lines, "right"))


def plot(path: Path, results: Results, arguments: argparse.Namespace) -> None:
    """Evaluation loss of the group "optimizers" against steps and bytes: means over seeds, and bands of their range."""
    plt, world_sizes = pyplot(), arguments.world_sizes
    size = (13, 5 * len(world_sizes))
    figure, grid = plt.subplots(len(world_sizes), 2, figsize=size, sharey=True, layout="constrained", squeeze=False)
    for world_size, panels in zip(world_sizes, grid, strict=True):
        for panel, key, unit in zip(panels, ("step", "bytes"), (1, MB), strict=True):
            for run in RUNS["optimizers"].values():
                if rows := results(run, world_size, arguments.seeds):
                    draw(panel, run, rows, key, unit)
            panel.set(title=f"{world_size} ranks: loss against {key}", ylabel="evaluation loss (nats per token)")
            panel.set(xlabel="optimizer steps" if key == "step" else "megabytes sent by each rank so far (logarithmic)")
            panel.grid(True, which="both", alpha=0.2)
        panels[0].legend()
        logarithmic(panels[1])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(panel: Any, run: Run, rows: Rows, key: str, unit: float) -> None:
    """One curve; the compressed optimizers are dashed, so that the others show where they coincide."""
    points = list(zip(*(row["curve"] for row in rows.values()), strict=True))
    losses = [[math.nan if point["eval"] is None else point["eval"] for point in seeds] for seeds in points]
    where = [statistics.fmean(point[key] for point in seeds) / unit for seeds in points]
    look = {"linestyle": "-", "marker": "o"} if run.plain else {"linestyle": (0, (4, 1.5)), "marker": "s"}
    colour = COLOURS[run.name]
    panel.plot(where, [statistics.fmean(seeds) for seeds in losses], label=run.name, color=colour, markersize=4, **look)
    panel.fill_between(where, [min(s) for s in losses], [max(s) for s in losses], color=colour, alpha=0.15, linewidth=0)


def write_report(path: Path, results: Results, arguments: argparse.Namespace) -> None:
    """The Markdown file, and beside it the picture and the rows, one per line."""
    if path.exists():
        text = path.read_text()
    else:
        text = f"# Convergence\n\n![loss against steps and bytes]({path.stem}.png)\n\n"
        text += "\n\n".join(f"## {group}\n\n{OPEN.format(group)}\n{CLOSE}" for group in RUNS) + "\n"
    path.write_text(rendered(text, results, arguments))
    plot(path.with_suffix(".png"), results, arguments)
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in results.known)
    path.with_suffix(".json").write_text(f"[\n{rows}\n]\n")


def rendered(text: str, results: Results, arguments: argparse.Namespace) -> str:
    """The page with its tables anew."""
    for group in RUNS:
        lines = table(group, results, arguments)
        place = re.compile(f"(?<={re.escape(OPEN.format(group))}\n).*?(?={re.escape(CLOSE)})", re.DOTALL)
        if place.search(text):
            text = place.sub(lambda _, lines=lines: f"{lines}\n", text, count=1)  # type: ignore[misc]
        elif lines.count("\n") > 1:
            text += f"\n## {group}\n\n{OPEN.format(group)}\n{lines}\n{CLOSE}\n"
    return text


# -- main -------------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    folder = Path("runs/convergence")
    parser.add_argument("--output", type=Path, default=folder, help="folder of rows.jsonl (%(default)s)")
    parser.add_argument("--report", type=Path, help="Markdown file to write (OUTPUT/convergence.md)")
    what = f"groups ({', '.join(RUNS)}), or runs of theirs (all)"
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(RUNS), help=what)
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 4, 8], help="numbers of ranks (2 4 8)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of model and data (0 1 2)")
    tuning = "seeds of the groups by which defaults were chosen (10 11 12)"
    parser.add_argument("--tuning-seeds", nargs="+", type=int, default=[10, 11, 12], help=tuning)
    parser.add_argument("--steps", type=int, default=1000, help="of the runs that name no length (%(default)s)")
    parser.add_argument("--report-only", action="store_true", help="run nothing, report on the runs that there are")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - RUNS.keys() - ALL_RUNS.keys():
        parser.error(f"--only knows no {', '.join(sorted(unknown))}; legal are {', '.join([*RUNS, *ALL_RUNS])}")
    check_least(parser, arguments, {"steps": 10})
    for world_size in arguments.world_sizes:
        if world_size < 2 or GLOBAL_BATCH % world_size:
            parser.error(f"--world-sizes must be >= 2 and divide the global batch of {GLOBAL_BATCH}, got {world_size}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve is not None:
        return serve(train)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows_file = arguments.output / "rows.jsonl"
    arguments.report = arguments.report or arguments.output / "convergence.md"
    done = {key_of(row) for row in read_rows(rows_file, arguments.report)}
    todo = [] if arguments.report_only else [key for key in jobs(arguments) if key not in done]
    try:
        run_all(todo, rows_file)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {rows_file}", flush=True)
        sys.exit(130)
    results = Results(read_rows(rows_file, arguments.report), arguments)
    if not results.rows:
        sys.exit(f"{rows_file} holds no run with these numbers of steps and these seeds")
    write_report(arguments.report, results, arguments)
    print(f"wrote {arguments.report}, and its picture and rows beside it")


if __name__ == "__main__":
    main()
