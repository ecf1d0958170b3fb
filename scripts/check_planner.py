"""Compare what the planner predicts with what was measured, row by row.

    python scripts/check_planner.py              # all rows of scripts/results
    python scripts/check_planner.py ROWS.json

The rows are those of benchmark_network.py; the compute-only row of each link, model and number of ranks is the
--compute-seconds of the others. What else the model asks of a machine stands below: it was measured by other
benchmarks, on the machine of the rows. Exit code 1 where a prediction is further from the measured median than --bound.
PowerSGD is not predicted, and neither are rows that were measured with kernels of more passes than there are now.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import REPOSITORY, markdown, parser_of

from hf_compressopt.collectives.topology import FLAT, TWO_LEVELS
from hf_compressopt.planner.cost import ONEBIT_ADAM, ONEBIT_ADAM_FLOAT32, ONEBIT_LAMB, Cluster, Model, Training
from hf_compressopt.quantities import bandwidth

CORES = 2


@dataclass(frozen=True)
class Machine:
    """A machine whose ranks share two cores and their memory; bytes per second, and seconds."""

    memory_bandwidth: float  # of both cores, "a += b" with 2 threads
    update_seconds: float | None  # per parameter: AdamW as a loop over tensors of 25 million; None where it was fused
    host_bandwidth: dict[int, float]  # of an all-reduce, by ranks on a core: recipes/multi_node/check_link.py
    latency: float  # of an all_reduce of two values by gloo
    earlier: tuple[str, ...] = ()  # methods that were measured with kernels of more passes
    deferred: bool = False  # low-bit gradients were measured with errors that are written after backward
    copies: int = 0  # bytes per parameter for DDP's copies of gradients, which the compute-only step makes alone


EPYC = Machine(63.4e9, 3.36e-9, {1: 1.61e9, 2: 1.19e9}, 160e-6, ("zero2_int4", "zero2_int4_levels"), deferred=True)
XEON = Machine(38.7e9, None, {1: 1.32e9, 2: 0.964e9}, 212e-6, copies=16)
RESULTS = REPOSITORY / "scripts" / "results"
FILES = [*sorted(RESULTS.glob("network*.json")), RESULTS / "avx512.json"]
FLOAT32_STATE = ("network.json", "network_low_bits.json")  # rows from before OnebitAdam's compact state
REFRESHES = 16  # steps, of which one refreshes the variance
LONGEST_INTERVAL = 16  # in which benchmark_network.py measures 0/1 Adam


def predict(row: dict[str, Any], compute_seconds: float) -> float | None:
    """Seconds of the row's step; None for a method that the planner does not know, or whose kernels are gone."""
    machine = XEON if row["file"].name == "avx512.json" else EPYC
    if row["method"] in machine.earlier:
        return None
    ranks, per_node = row["ranks"], row["per_node"]
    crowd = max(1.0, ranks / CORES)  # ranks that take turns on a core
    method = row["method"].removesuffix("_levels")
    cluster = Cluster(
        nodes=ranks // per_node,
        gpus_per_node=per_node,
        topology=FLAT if method == row["method"] else TWO_LEVELS,
        bandwidth=math.inf if row["link"] == "unshaped" else bandwidth(row["link"]),
        memory_bandwidth=machine.memory_bandwidth / ranks,
        host_bandwidth=machine.host_bandwidth[math.ceil(crowd)],
        latency=machine.latency,
    )
    onebit_adam = ONEBIT_ADAM_FLOAT32 if row["file"].name in FLOAT32_STATE else ONEBIT_ADAM
    if method.startswith(("onebit", "int")):
        compute_seconds -= cluster.pass_seconds(machine.copies * row["numel"])
    update = None if machine.update_seconds is None else machine.update_seconds * crowd * row["numel"]
    in_full = row.get("in_full", 0)  # rows of before sent all tensors as messages
    model = Model(Training(row["numel"], compute_seconds, update, in_full=in_full, beside_signs=in_full), cluster)
    predictions = {
        "ddp": model.ddp,
        "fp16": lambda: model.ddp(2),
        "int4": lambda: model.low_bit(4, deferred=machine.deferred),
        "int8": lambda: model.low_bit(8, deferred=machine.deferred),
        "zero2": model.zero,
        "zero2_int4": lambda: model.zero_low_bit(4),
        "onebit_adam": lambda: model.compressed(onebit_adam),
        "onebit_adam_zero2": lambda: model.compressed(onebit_adam, during_backward=True),
        "zero_one_adam": lambda: model.local_steps(LONGEST_INTERVAL),
        "onebit_lamb": lambda: model.compressed(ONEBIT_LAMB),
    }
    if method not in predictions:
        return None
    # rows of before have no refreshes of the variance
    return model.refreshed(predictions[method](), REFRESHES * row.get("refreshed", False)).seconds


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("rows", type=Path, nargs="*", help="JSON of benchmark_network.py", default=FILES)
    parser.add_argument("--bound", type=float, default=0.2, help="largest relative error (%(default)s)")
    arguments = parser.parse_args()
    rows = [{"per_node": 1, **row, "file": file} for file in arguments.rows for row in json.loads(file.read_text())]
    compute = {place(row): statistics.median(row["seconds"]) for row in rows if row["method"] == "compute"}
    cells, errors = [["model", "ranks", "link", "method", "measured, ms", "predicted, ms", "error, %"]], []
    for row in rows:
        base = None if row["method"] == "compute" else compute.get(place(row))
        predicted = None if base is None else predict(row, base)
        if predicted is None:
            continue
        measured = statistics.median(row["seconds"])
        errors.append(predicted / measured - 1)
        nodes = "" if row["per_node"] == 1 else f" on {row['ranks'] // row['per_node']} nodes"
        numbers = f"{measured * 1e3:.0f}", f"{predicted * 1e3:.0f}", f"{errors[-1] * 100:+.1f}"
        cells.append([row["model"], f"{row['ranks']}{nodes}", row["link"], row["method"], *numbers])
    if not errors:
        print("no row of a predicted method with its compute-only row", file=sys.stderr)
        return 2
    largest, mean = max(errors, key=abs), statistics.fmean(map(abs, errors))
    print(f"{markdown(cells)}\n{len(errors)} rows; error {mean:.1%} in the mean, {largest:+.1%} at most")
    return int(abs(largest) > arguments.bound)


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    """The place of a measurement, where a baseline stands in the same file."""
    return tuple(row[name] for name in ("file", "model", "ranks", "per_node", "link"))


if __name__ == "__main__":
    sys.exit(main())
