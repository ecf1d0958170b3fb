"""Train small language models with every optimizer and many of their options, and compare loss, bytes and rounds.

A plain torch loop with the production optimizers and messages, the same global batch whatever the number of ranks.
Ranks are threads of this process, or gloo processes. Every finished run is one line of OUTPUT/rows.jsonl. A run that
has its line, or a row in the JSON beside the report, is not repeated: an interrupted script goes on where it was, and a
published report can be extended. To run something again, remove its row. The report is Markdown; beside it lie a
picture and the rows as JSON. In a report that is there already only the text between `<!-- table NAME -->` and
`<!-- end of table -->` changes.
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
from pathlib import Path
from typing import Any

from _common import check_least, parser_of
from _convergence_ranks import Processes, Ranks, Threads
from _convergence_report import Results, write_report
from _convergence_runs import ALL_RUNS, GLOBAL_BATCH, MB, PRETRAINING, RUNS, Job, jobs
from _convergence_training import prepare_texts, pretrain


def run_all(todo: Sequence[Job], rows_file: Path, *, threads: bool) -> None:
    """Run the jobs, each of which appends its row."""
    texts = prepare_texts(job.run for job in todo)
    prepare_start(todo)
    pools: dict[tuple[int, bool], Ranks] = {}
    done_steps, start = 0.0, time.monotonic()
    all_steps = sum(job.steps * job.world_size**0.5 for job in todo)  # more ranks cost more, if not as many times
    at_once = True
    with tempfile.TemporaryDirectory() as directory:
        try:
            for number, job in enumerate(todo, start=1):
                place = (
                    job.world_size,
                    threads and not job.run.zero,
                )  # of a process's ZeroOptimizers one sends at a time
                if place not in pools:
                    pools[place] = (
                        Threads(job.world_size, texts) if place[1] else Processes(job.world_size, texts, directory)
                    )
                row = pools[place].run(job)
                with rows_file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                done_steps += job.steps * job.world_size**0.5
                left = (time.monotonic() - start) * (all_steps / done_steps - 1)
                print(
                    f"[{number}/{len(todo)}] {job.run.name}, {job.world_size} ranks, seed {job.seed}, {job.steps} "
                    f"steps: evaluation loss {row['eval_loss']}, {row['bytes'] / MB:,.1f} MB, {row['seconds']:.0f} s; "
                    f"about {left / 60:.0f} min left",
                    flush=True,
                )
            at_once = False
        finally:
            for pool in pools.values():
                pool.close(at_once=at_once)


def prepare_start(todo: Sequence[Job]) -> None:
    """Train the model that the fine-tuning runs start from, unless its file is there."""
    files = [Path(job.start) for job in todo if job.run.pretrained]
    if files and not files[0].exists():
        pretrain(prepare_texts([PRETRAINING])[PRETRAINING.text, PRETRAINING.model], files[0])


def read_rows(rows_file: Path, report: Path) -> list[dict[str, Any]]:
    """The rows of finished runs; those beside the report first, unless there is a newer one."""
    published = report.with_suffix(".json")
    rows = json.loads(published.read_text()) if published.exists() else []
    rows += map(json.loads, rows_file.read_text().splitlines()) if rows_file.exists() else []
    return list({key_of(row): row for row in rows}.values())


def key_of(row: dict[str, Any]) -> tuple[str, int, int, int]:
    """As Job.key."""
    return row["name"], row["world_size"], row["seed"], row["steps"]


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/convergence"), help="folder of rows.jsonl (%(default)s)"
    )
    parser.add_argument("--report", type=Path, help="Markdown file to write (OUTPUT/convergence.md)")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        default=list(RUNS),
        help=f"groups ({', '.join(RUNS)}), or runs of theirs (all)",
    )
    parser.add_argument(
        "--ranks",
        choices=["threads", "processes"],
        default="threads",
        help="what a rank is: a thread of one process, or a gloo process; the numbers are the same (%(default)s)",
    )
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 4, 8], help="numbers of ranks (2 4 8)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of model and data (0 1 2)")
    parser.add_argument(
        "--tuning-seeds",
        nargs="+",
        type=int,
        default=[10, 11, 12],
        help="seeds of the groups by which defaults were chosen (10 11 12)",
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="steps of the groups 'optimizers' and 'texts' (%(default)s)"
    )
    parser.add_argument(
        "--ablation-steps", type=int, default=300, help="steps of the groups that name no length (%(default)s)"
    )
    parser.add_argument("--report-only", action="store_true", help="run nothing, report on the runs that there are")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - RUNS.keys() - ALL_RUNS.keys():
        parser.error(f"--only knows no {', '.join(sorted(unknown))}; legal are {', '.join([*RUNS, *ALL_RUNS])}")
    check_least(parser, arguments, {"steps": 10, "ablation_steps": 10})
    for world_size in arguments.world_sizes:
        if world_size < 2 or GLOBAL_BATCH % world_size:
            parser.error(f"--world-sizes must be >= 2 and divide the global batch of {GLOBAL_BATCH}, got {world_size}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows_file = arguments.output / "rows.jsonl"
    arguments.report = arguments.report or arguments.output / "convergence.md"
    done = {key_of(row) for row in read_rows(rows_file, arguments.report)}
    todo = [] if arguments.report_only else [job for job in jobs(arguments) if job.key not in done]
    try:
        if todo:
            run_all(todo, rows_file, threads=arguments.ranks == "threads")
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
