"""Write docs/scaling.md: the planner's predictions for a large model on up to 1,024 GPUs.

    python scripts/make_scaling.py            # write docs/scaling.md
    python scripts/make_scaling.py --check    # exit code 1 if the file differs

Only the text between `<!-- table NAME -->` and `<!-- end of table -->` changes. Run it after a change of the planner.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import torch
from _common import REPOSITORY, parser_of

from hf_compressopt.planner import report
from hf_compressopt.planner.cost import Model, Step, Training
from hf_compressopt.planner.wire import Cluster

PAGE = REPOSITORY / "docs" / "scaling.md"
PARAMS, COMPUTE_SECONDS, STEPS, GPUS, GPU_BYTES = 7_000_000_000, 2.5, 10_000, 8, 80e9
DTYPE = torch.bfloat16
NODES = (2, 8, 32, 128)
LINKS = {"10 Gbit/s": 10e9 / 8, "25 Gbit/s": 25e9 / 8, "100 Gbit/s": 100e9 / 8}
DDP = f"DDP, {8 * DTYPE.itemsize}-bit gradients"
#: What the tables call a method, by its row in the planner's table of times.
METHODS = {
    DDP: DDP,
    "ZeRO-2": "`zero2_adamw`",
    report.ZERO_INT4: "`zero2_adamw`, int4 both ways",
    "grad_compression=int4": "`grad_compression=int4`",
    "OnebitAdam": "`onebit_adam`",
    report.ONEBIT_ZERO[1]: "`onebit_adam`, `zero_stage=1`",
    report.ONEBIT_ZERO[2]: "`onebit_adam`, `zero_stage=2`",
    "ZeroOneAdam": "`zero_one_adam`",
}
#: The rows of the planner's table of memory, by method.
FORMS = {
    DDP: ("no ZeRO",),
    "ZeRO-2": ("ZeRO-2",),
    report.ZERO_INT4: (report.ZERO_INT4,),
    "grad_compression=int4": ("grad_compression",),
    "OnebitAdam": ("OnebitAdam, compact, first stage", "OnebitAdam, compact, then"),
    report.ONEBIT_ZERO[1]: ("OnebitAdam, zero_stage=1, first stage", "OnebitAdam, compact, then"),
    report.ONEBIT_ZERO[2]: ("OnebitAdam, zero_stage=2, first stage", "OnebitAdam, zero_stage=2, then"),
    "ZeroOneAdam": ("ZeroOneAdam, float32",),
}


def mean_steps(nodes: int, bandwidth: float) -> dict[str, Step]:
    """The mean step of a run, by method."""
    model = Model(Training(PARAMS, COMPUTE_SECONDS, itemsize=DTYPE.itemsize), Cluster(nodes, GPUS, bandwidth))
    return {name: list(stages.values())[-1] for name, stages in report.time_rows(model, STEPS).items()}


def times(bandwidth: float) -> Iterator[list[str]]:
    """Seconds of a mean step by number of GPUs; and how many times as fast as DDP a run is."""
    yield ["method", *(f"{nodes * GPUS:,} GPUs" for nodes in NODES)]
    found = [mean_steps(nodes, bandwidth) for nodes in NODES]
    for name, title in METHODS.items():
        yield [
            title,
            *(f"{steps[name].seconds:.1f} s ({steps[DDP].seconds / steps[name].seconds:.1f}x)" for steps in found),
        ]


def volumes() -> Iterator[list[str]]:
    """Gigabytes that leave a node in a mean step."""
    yield ["method", *(f"{nodes * GPUS:,} GPUs" for nodes in NODES)]
    found = [mean_steps(nodes, LINKS["10 Gbit/s"]) for nodes in NODES]
    for name, title in METHODS.items():
        yield [title, *(f"{steps[name].on_link / 1e9:.2f}" for steps in found)]


def memory() -> Iterator[list[str]]:
    """Gigabytes on each GPU, at their largest; and whether that leaves room for activations."""
    yield ["method", *(f"{nodes * GPUS:,} GPUs" for nodes in NODES)]
    found = [report.memory_rows(PARAMS, nodes * GPUS, DTYPE, 2, 25.0, GPUS) for nodes in NODES]
    for name, title in METHODS.items():
        largest = [max(rows[form]["total"] for form in FORMS[name]) for rows in found]
        yield [title, *(f"{nbytes / 1e9:.1f}" + " (too much)" * (nbytes > GPU_BYTES) for nbytes in largest)]


def markdown(rows: Iterator[list[str]]) -> str:
    """A table whose first column is text."""
    head, *body = rows
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def render(page: str) -> str:
    """The page with its tables anew."""
    tables = {f"step at {link}": markdown(times(rate)) for link, rate in LINKS.items()}
    tables |= {"bytes": markdown(volumes()), "memory": markdown(memory())}
    for name, table in tables.items():
        pattern = rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end of table -->)"
        page, count = re.subn(pattern, rf"\g<1>{table}\n\2", page, flags=re.S)
        if count != 1:
            raise ValueError(f"{PAGE} must have one table named {name!r}, and has {count}")
    return page


def main() -> int:
    """Write or check the page; the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file differs")
    page = PAGE.read_text()
    if parser.parse_args().check:
        return int(page != render(page))
    PAGE.write_text(render(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
