"""Train small language models with every optimizer and some of their options, and compare loss and bytes.

A plain torch loop with the production optimizers and messages on gloo processes, with the same global batch whatever
the number of ranks. Every finished run is one line of OUTPUT/rows.jsonl. A run that has its line, or a row in the JSON
of --report, is not repeated: an interrupted script goes on where it was, and published results can be extended. To run
something again, remove its row. The published rows of FSDP2 and Muon are of `--steps 300`. `make_tables.py` writes the
tables and pictures of the documentation from scripts/results/convergence.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _common import MB, check_least, parser_of, print_table
from _convergence import ALL_RUNS, GLOBAL_BATCH, RUNS, TUNING, WORLD_SIZES, missing, partner, pretrain, train
from _slow_network import ranks_on_links, serve
from make_tables import against, fewer, losses, percent, score_of

Key = tuple[str, int, int, int]

# -- running ----------------------------------------------------------------------------------------------------------


def places_of(group: str, arguments: argparse.Namespace) -> tuple[list[int], Sequence[int]]:
    """The seeds and the numbers of ranks that a group runs with."""
    seeds = arguments.tuning_seeds[:1] if group in TUNING else arguments.seeds
    return seeds, WORLD_SIZES.get(group, arguments.world_sizes)


def jobs(arguments: argparse.Namespace) -> list[Key]:
    """The runs that were asked for, group by group, and in each of them seed by seed; as key_of()."""
    found: dict[Key, None] = {}
    for group, chosen in RUNS.items():
        runs = [run for run in chosen.values() if group in arguments.only or run.name in arguments.only]
        for run in filter(missing, runs):
            print(
                f"SKIPPED {run.name}: needs {', '.join(missing(run))}; python scripts/real_models.py fetches models",
                flush=True,
            )
        runs = [run for run in runs if not missing(run)]
        places = itertools.product(*places_of(group, arguments), runs)
        found |= {(run.name, world_size, seed, run.steps or arguments.steps): None for seed, world_size, run in places}
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
    """The rows of finished runs, rounded as in the report; those of the report first, unless there is a newer one."""
    read = partial(json.loads, parse_float=lambda text: round(float(text), 5))
    rows = read(report.read_text()) if report.exists() else []
    rows += map(read, rows_file.read_text().splitlines()) if rows_file.exists() else []
    return list({key_of(row): row for row in rows}.values())


def print_group(group: str, rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the loss of each run of a group, against the uncompressed run's, and megabytes sent by a rank."""
    lines = [["run", "ranks", "seeds", "evaluation loss", "against the uncompressed", "MB sent", "fewer bytes"]]
    if scored := any("accuracy" in row for row in rows if row["name"] in RUNS[group]):
        lines[0].append("accuracy, of CoLA Matthews correlation")
    seeds, world_sizes = places_of(group, arguments)
    mine = [row for row in rows if row["seed"] in seeds]
    mine = [row for row in mine if row["steps"] == (ALL_RUNS[row["name"]].steps or arguments.steps)]
    for ranks, run in itertools.product(world_sizes, RUNS[group].values()):
        if found := losses(run.name, ranks, mine):
            values, other = [row["eval_loss"] for row in found.values()], partner(run)
            finite = [value for value in values if value is not None]
            mean = f"{statistics.fmean(finite):.4f}" if len(finite) == len(values) else "not finite"
            difference = "" if other is None else percent(against(run.name, other.name, ranks, mine))
            sent = statistics.fmean(row["bytes"] for row in found.values()) / MB
            cells = mean, difference, f"{sent:,.1f}", f"{fewer(run.name, ranks, mine):.1f}x" if sent else ""
            lines.append([run.name, str(ranks), str(len(values)), *cells])
            if scored:
                lines[-1].append(f"{statistics.fmean(score_of(row) for row in found.values()):.4f}")
    if len(lines) > 1:
        print_table(group, lines)


# -- main -------------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    folder = Path("runs/convergence")
    parser.add_argument("--output", type=Path, default=folder, help="folder of rows.jsonl (%(default)s)")
    parser.add_argument("--report", type=Path, help="JSON file of all rows to extend (OUTPUT/convergence.json)")
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
    report = (arguments.report or arguments.output / "convergence").with_suffix(".json")
    done = {key_of(row) for row in read_rows(rows_file, report)}
    todo = [] if arguments.report_only else [key for key in jobs(arguments) if key not in done]
    try:
        run_all(todo, rows_file)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {rows_file}", flush=True)
        sys.exit(130)
    rows = read_rows(rows_file, report)
    report.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")
    for group in RUNS:
        print_group(group, [row for row in rows if row["name"] in ALL_RUNS], arguments)
    print(f"wrote {report}")


if __name__ == "__main__":
    main()
