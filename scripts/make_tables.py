"""Write every measured table of README.md and docs/, and the pictures in docs/images, from scripts/results.

    python scripts/make_tables.py            # tables and pictures
    python scripts/make_tables.py --check    # exit code 1 if a table differs

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`. No number of it is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "scripts" / "results", ROOT / "docs" / "images"
BASELINE, UNLIMITED = "compute", "unshaped"
#: The share of a run of 1,000 steps that onebit_adam spends in its warmup stage.
WARMUP = 0.2
METHODS = {
    "compute": "no-communication baseline",
    "ddp": "DDP, float32",
    "fp16": "DDP, 16-bit gradients",
    "int4": "AdamW, `grad_compression=int4`",
    "int4_levels": "AdamW, `grad_compression=int4`, hierarchical",
    "zero2": "`zero2_adamw`",
    "zero2_levels": "`zero2_adamw`, hierarchical",
    "zero2_int4": "`zero2_adamw`, int4 both ways",
    "zero2_int4_levels": "`zero2_adamw`, int4 both ways, hierarchical",
    "zero_torch": "DDP, torch's ZeroRedundancyOptimizer",
    "warmup_stage": "`onebit_adam`, warmup stage",
    "onebit_adam": "`onebit_adam`, compressed stage",
    "onebit_adam_levels": "`onebit_adam`, compressed stage, hierarchical",
    "onebit_adam_zero2": "`onebit_adam`, compressed stage, `zero_stage=2`",
    "zero_one_adam": "`zero_one_adam`, local steps",
    "onebit_lamb": "`onebit_lamb`, compressed stage",
    "hsdp_16": "FSDP2 in the nodes, 16 bits between them",
    "hsdp_int4": "FSDP2 in the nodes, int4 between them",
    "powersgd_4": "PowerSGD, rank 4",
    "local_sgd_8": "LocalSGD, 8 steps",
    "diloco_32": "DiLoCo, 32 steps",
}
Table = list[list[str]]


@cache
def rows(name: str) -> Any:
    """The content of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# Milliseconds over links -------------------------------------------------------------------------------------------


def times(name: str, model: str, ranks: int, link: str, per_node: int = 1) -> dict[str, list[float]]:
    """Milliseconds of a step, a number for each window of steps, by method."""
    place = (model, ranks, link, per_node)
    found = [row for row in rows(name) if (row["model"], row["ranks"], row["link"], row.get("per_node", 1)) == place]
    return {row["method"]: [1e3 * seconds for seconds in row["seconds"]] for row in found}


def sent(name: str, model: str, ranks: int, per_node: int = 1) -> dict[str, float]:
    """Megabytes of a step at the network interface, by method."""
    found: dict[str, list[float]] = {}
    for row in rows(name):
        if (row["model"], row["ranks"], row.get("per_node", 1)) == (model, ranks, per_node):
            found.setdefault(row["method"], []).append(row["sent"] / 1e6)
    return {method: statistics.fmean(values) for method, values in found.items()}


def network(
    name: str, model: str, ranks: int, links: Sequence[str], per_node: int = 1, methods: Sequence[str] = tuple(METHODS)
) -> Table:
    """Milliseconds of a step: the median, the range, and the multiple of the baseline."""
    columns = [times(name, model, ranks, link, per_node) for link in links]
    megabytes = sent(name, model, ranks, per_node)
    head = ["method", *("unlimited" if link == UNLIMITED else link for link in links), "MB per step"]
    lines = [head]
    for method in methods:
        if any(method in column for column in columns):
            cells = [milliseconds(column, method) for column in columns]
            lines.append([METHODS[method], *cells, f"{megabytes[method]:.2f}" if method != BASELINE else ""])
    return lines


def milliseconds(column: dict[str, list[float]], method: str) -> str:
    if method not in column:
        return ""
    found = column[method]
    spread = f" ({min(found):.0f}-{max(found):.0f})" if len(found) > 1 else ""
    return f"{statistics.median(found):.0f}{spread}, {median(column, method) / median(column, BASELINE):.2f}x"


def median(column: dict[str, list[float]], method: str) -> float:
    return statistics.median(column[method])


def whole_runs() -> dict[str, tuple[float, float, float]]:
    """Of 30 million parameters and 2 ranks: megabytes, milliseconds unlimited, and at 1 Gbit/s, means over a run."""
    place = ("avx512", "30M", 2)
    fast, slow, megabytes = times(*place, UNLIMITED), times(*place, "1 Gbit/s"), sent(*place)

    def of(method: str) -> tuple[float, float, float]:
        return megabytes[method], median(fast, method), median(slow, method)

    run = [WARMUP * a + (1 - WARMUP) * b for a, b in zip(of("warmup_stage"), of("onebit_adam"), strict=True)]
    plain = {METHODS[method]: of(method) for method in (BASELINE, "ddp", "fp16", "int4")}
    return plain | {"`onebit_adam`, 1,000 steps, calculated": (run[0], run[1], run[2])}


def readme() -> Table:
    found = whole_runs()
    slowest = found[METHODS["ddp"]][2]
    head = ["method", "MB per step", "ms, unlimited bandwidth", "ms, 1 Gbit/s", "speed-up at 1 Gbit/s"]
    lines = [
        [name, f"{mb:.1f}" if mb > 0.1 else "", f"{fast:.0f}", f"{slow:.0f}", f"{slowest / slow:.1f}x"]
        for name, (mb, fast, slow) in found.items()
    ]
    return [head, *lines]


# Losses --------------------------------------------------------------------------------------------------------------


def losses(name: str, ranks: int) -> dict[int, dict[str, Any]]:
    """The rows of a run, by seed."""
    return {row["seed"]: row for row in rows("convergence") if (row["name"], row["world_size"]) == (name, ranks)}


def against(name: str, partner: str, ranks: int) -> tuple[float, float, float] | None:
    """Per cent by which the mean loss lies above the partner's, and the least and the most at one seed."""
    mine, other = losses(name, ranks), losses(partner, ranks)
    pairs = [(mine[seed]["eval_loss"], other[seed]["eval_loss"]) for seed in mine.keys() & other.keys()]
    if not pairs:
        return None
    a, b = (statistics.fmean(column) for column in zip(*pairs, strict=True))
    each = [100 * (x / y - 1) for x, y in pairs]
    return 100 * (a / b - 1), min(each), max(each)


def fewer(name: str, ranks: int) -> float:
    """How many times fewer bytes a run sends than an all-reduce in float32."""
    found = losses(name, ranks)
    row = next(iter(found.values()))
    ring = 2 * (ranks - 1) / ranks * 4 * row["parameters"] * row["steps"]
    return ring / statistics.fmean(row["bytes"] for row in found.values())


def difference(name: str, partner: str, ranks: int) -> str:
    found = against(name, partner, ranks)
    if found is None:
        return ""
    mean, least, most = found
    return f"{mean:+.2f} %" + (f" ({least:+.2f} to {most:+.2f})" if least != most else "")


DEFAULTS = {
    "`grad_compression=int4`": ("AdamW, int4 gradients, state=compact", "AdamW"),
    "`onebit_adam`": ("OnebitAdam, state=compact", "AdamW"),
    "`onebit_adam`, `overlap_comm`": ("OnebitAdam, state=compact, clip=late", "AdamW"),
    "`onebit_adam`, `zero_stage=1`": ("OnebitAdam, ZeRO-1", "AdamW"),
    "`zero_one_adam`": ("ZeroOneAdam", "AdamW"),
    "`onebit_lamb`, against LAMB": ("OnebitLamb", "Lamb"),
    "`zero2_adamw`, int4 both ways": ("ZeRO-2 and AdamW, int4 both ways", "AdamW"),
}
RIVALS = {
    "DDP, 16-bit gradients": "AdamW, bfloat16 gradients",
    "PowerSGD, rank 4": "AdamW, PowerSGD rank 4",
    "LocalSGD, 8 steps": "AdamW, LocalSGD, 8 steps",
    "DiLoCo, 32 steps": "DiLoCo, 32 steps",
}


def by_ranks(runs: dict[str, tuple[str, str]], counts: Sequence[int], of_bytes: int) -> Table:
    lines = [["method", *(f"{ranks} ranks" for ranks in counts), "fewer bytes"]]
    for title, (name, partner) in runs.items():
        cells = [difference(name, partner, ranks) for ranks in counts]
        lines.append([title, *cells, f"{fewer(name, of_bytes):.1f}x"])
    return lines


def fine_tuning() -> Table:
    lengths = (100, 200, 300)
    lines = [["method", *(f"{steps} steps" for steps in lengths), "fewer bytes, 300 steps"]]
    for title, name in (
        ("`grad_compression=int4`", "AdamW, int4 gradients"),
        ("`onebit_adam`", "OnebitAdam"),
        ("`zero_one_adam`", "ZeroOneAdam"),
    ):
        runs = [f"{name}, fine-tuning, {steps} steps" for steps in lengths]
        partners = [f"AdamW, fine-tuning, {steps} steps" for steps in lengths]
        cells = [difference(run, partner, 4) for run, partner in zip(runs, partners, strict=True)]
        lines.append([title, *cells, f"{fewer(runs[-1], 4):.1f}x"])
    return lines


def many_ranks() -> Table:
    named = {"`grad_compression=int4`": "AdamW, int4 gradients", "`onebit_adam`": "OnebitAdam"}
    named |= {"`zero_one_adam`": "ZeroOneAdam"}
    runs = {title: (f"{name}, batch 64", "AdamW, batch 64") for title, name in named.items()}
    return by_ranks(runs, (16, 32, 64), 64)


def time_to_loss() -> Table:
    """Seconds of a whole run, and until the loss is AdamW's last one plus 1 %."""
    titles = {"adamw": "DDP, float32", "fp16": "DDP, 16-bit gradients", "int4": METHODS["int4"]}
    titles["onebit_adam"] = "`onebit_adam`"
    links = ("1 Gbit/s", "100 Mbit/s")
    found = {(row["method"], row["link"]): row for row in rows("time_to_loss")}
    target = 1.01 * found["adamw", links[0]]["losses"][-1]
    lines = [["method", *(f"{link}, s: run / to the loss" for link in links), "final loss"]]
    for method, title in titles.items():
        cells = []
        for link in links:
            row = found[method, link]
            cells.append(f"{row['seconds'][-1]:.0f} / {reached(row, target):.0f}")
        lines.append([title, *cells, f"{found[method, links[0]]['losses'][-1]:.3f}"])
    return lines


def reached(row: dict[str, Any], target: float) -> float:
    """Seconds at which the loss was there, by interpolation between two evaluations."""
    curve = list(zip(row["seconds"], row["losses"], strict=True))
    for (t0, a), (t1, b) in zip(curve, curve[1:], strict=False):
        if b <= target:
            return float(t0 + (t1 - t0) * (a - target) / (a - b))
    raise ValueError(f"{row['method']} never had a loss of {target}")


# Other measurements --------------------------------------------------------------------------------------------------


def other(name: str, head: Sequence[str], keys: Sequence[str]) -> Table:
    """Rows of results/other.json as they are."""
    found = rows("other")[name]["rows"]
    return [list(head), *([f"{row.get(key, '')}" for key in keys] for row in found)]


def demo() -> Table:
    """Losses and megabytes of the two runs of the demo."""
    found = rows("demo")
    runs, traffic = found["runs"], found["traffic"]
    lines = [["", *(f"`{name}`" for name in runs)]]
    for step in ("80", "200", "300"):
        lines.append([f"evaluation loss, step {step}", *(f"{run['eval_loss'][step]:.3f}" for run in runs.values())])
    lines.append(["training loss, step 300", *(f"{run['train_loss']['300']:.3f}" for run in runs.values())])
    for title, key in (("warmup stage", "warmup_step"), ("compressed stage", "compressed_step")):
        lines.append([f"MB per rank and step, {title}", *(f"{traffic[k] / 1e6:.2f}" for k in ("baseline_step", key))])
    whole = demo_megabytes()
    return [*lines, ["MB per rank, whole run", *(f"{value:,.0f}" for value in whole)]]


def demo_megabytes() -> tuple[float, float]:
    """Megabytes that a rank sent in the whole run: of adamw_torch, by the formula of a ring, and of onebit_adam."""
    traffic, steps = rows("demo")["traffic"], rows("demo")["arguments"]["steps"]
    switch = traffic["switch_step"]
    mine = switch * traffic["warmup_step"] + (steps - switch) * traffic["compressed_step"]
    return steps * traffic["baseline_step"] / 1e6, mine / 1e6


NODES = ("ddp", "fp16", "int4", "int4_levels", "zero2_int4", "zero2_int4_levels", "onebit_adam", "onebit_adam_levels")
TABLES: dict[str, Callable[[], Table]] = {
    "readme": readme,
    "network 30M": lambda: network("avx512", "30M", 2, (UNLIMITED, "1 Gbit/s")),
    "network 10M": lambda: network("rivals", "10M", 2, ("10 Gbit/s", "1 Gbit/s", "100 Mbit/s")),
    "network 100M": lambda: network("avx512", "100M, 16 tokens", 2, ("1 Gbit/s",)),
    "nodes": lambda: network(
        "avx512", "10M", 4, ("1 Gbit/s", "100 Mbit/s"), 2, (BASELINE, *NODES, "hsdp_16", "hsdp_int4")
    ),
    "loss": lambda: by_ranks(DEFAULTS, (2, 4, 8), 4),
    "rivals": lambda: by_ranks({title: (name, "AdamW") for title, name in RIVALS.items()}, (2, 4, 8), 4),
    "fine-tuning": fine_tuning,
    "many ranks": many_ranks,
    "time to loss": time_to_loss,
    "kernels": lambda: other("kernels", ("kernel", "ms", "of the roofline"), ("kernel", "ms", "of_roofline")),
    "step": lambda: other("step", ("step", "ms"), ("step", "ms")),
    "fused adam": lambda: other(
        "fused_adam",
        ("ms", "FusedAdam", "torch, fused", "torch, foreach"),
        ("case", "FusedAdam", "torch fused", "torch foreach"),
    ),
    "zero memory": lambda: other(
        "zero_memory",
        ("method", "parameters", "gradients", "state", "other", "all", "sent"),
        ("method", "parameters", "gradients", "states", "other", "all", "sent"),
    ),
    "checkpoints": lambda: other(
        "checkpoints",
        ("method", "save, s", "training waits, s", "load, s", "MiB to save", "MiB to load"),
        ("method", "save", "blocked", "load", "save_mib", "load_mib"),
    ),
    "demo": demo,
    "fine-tuned": lambda: other("fine_tuning", ("model", "loss", "perplexity"), ("model", "loss", "perplexity")),
    "classification": lambda: other(
        "text_classification",
        ("method", "accuracy", "least", "most", "loss"),
        ("method", "accuracy", "least", "most", "loss"),
    ),
}


def markdown(lines: Table) -> str:
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (lines[0], rule, *lines[1:]))


def rendered(text: str) -> str:
    """A page with its tables anew."""
    place = re.compile(r"(<!-- table ([^>]*) -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
    return place.sub(lambda found: found[1] + markdown(TABLES[found[2]]()), text)


def pages() -> list[Path]:
    """The pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").glob("*/README.md"))]


# Pictures ------------------------------------------------------------------------------------------------------------

#: Okabe and Ito's colours, one for each method in every picture.
COLOURS = {"baseline": "#999999", "ddp": "#000000", "fp16": "#D55E00", "int4": "#0072B2", "onebit_adam": "#009E73"}
COLOURS |= {"zero_one_adam": "#CC79A7", "onebit_lamb": "#E69F00", "zero": "#56B4E9"}


def bars(panel: Any, named: dict[str, tuple[float, str]], title: str) -> None:
    """Horizontal bars from zero, the first one at the top."""
    names = list(named)[::-1]
    drawn = panel.barh(names, [named[name][0] for name in names], color=[named[name][1] for name in names])
    panel.bar_label(drawn, [f"{named[name][0]:,.0f}" for name in names], padding=3, fontsize=9)
    panel.set(title=title, xlabel="ms per step", xlim=(0, 1.18 * max(value for value, _ in named.values())))
    panel.spines[["top", "right"]].set_visible(False)


def picture_of_steps(plt: Any) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(10, 2.9), layout="constrained", sharey=True)
    for panel, place, title in zip(panels, (1, 2), ("unlimited bandwidth", "1 Gbit/s"), strict=True):
        found = dict(zip(("baseline", "ddp", "fp16", "int4", "onebit_adam"), whole_runs().items(), strict=True))
        named = {name.replace("`", ""): (values[place], COLOURS[key]) for key, (name, values) in found.items()}
        bars(panel, named, title)
    figure.savefig(IMAGES / "step_time.png", dpi=110)


def picture_of_slow_links(plt: Any) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(10, 2.9), layout="constrained", sharey=True)
    for panel, link in zip(panels, ("1 Gbit/s", "100 Mbit/s"), strict=True):
        column = times("rivals", "10M", 2, link)
        methods = ("ddp", "fp16", "int4", "onebit_adam", "zero_one_adam")
        bars(panel, {METHODS[m].replace("`", ""): (median(column, m), COLOURS[m]) for m in methods}, link)
    figure.savefig(IMAGES / "slow_links.png", dpi=110)


def picture_of_losses(plt: Any) -> None:
    figure, panel = plt.subplots(figsize=(8, 3.4), layout="constrained")
    shown = {"int4": 0, "onebit_adam": 1, "zero_one_adam": 4, "onebit_lamb": 5}
    for place, (key, number) in enumerate(shown.items()):
        title, (name, partner) = list(DEFAULTS.items())[number]
        for shift, (ranks, marker) in enumerate(((2, "o"), (4, "s"), (8, "^"))):
            mean, least, most = against(name, partner, ranks) or (0.0, 0.0, 0.0)
            where, bounds = place + 0.2 * (shift - 1), [[mean - least], [most - mean]]
            look = {"fmt": marker, "color": COLOURS[key], "capsize": 3}
            panel.errorbar(where, mean, bounds, label=f"{ranks} ranks" if not place else None, **look)
        panel.annotate(title.replace("`", ""), (place, 0.95), ha="center", fontsize=9)
    panel.axhline(0, color="#999999", linewidth=1)
    panel.set(ylabel="final loss against the partner, %", xticks=[], ylim=(-1.2, 1.1), xlim=(-0.5, 3.5))
    panel.legend(loc="lower right", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / "loss.png", dpi=110)


def memory(ranks: int) -> dict[str, dict[str, float]]:
    """Bytes per float32 parameter at the peak of a run, by formula."""
    errors = 1 + 2 / 128
    both = errors * (1 + 1 / ranks)
    return {
        "AdamW, DDP": {"parameters": 4, "gradients": 4, "moments": 8, "errors": 0},
        "AdamW, grad_compression=int4": {"parameters": 4, "gradients": 4, "moments": 8, "errors": 2 * both},
        "onebit_adam, warmup stage": {"parameters": 4, "gradients": 4, "moments": 8, "errors": both},
        "onebit_adam, compressed stage": {"parameters": 4, "gradients": 4, "moments": 1.13, "errors": both},
        "zero2_adamw": {"parameters": 4, "gradients": 4 / ranks, "moments": 8 / ranks, "errors": 0},
        "onebit_adam, zero_stage=2": {
            "parameters": 4,
            "gradients": 4 / ranks,
            "moments": max(8 / ranks, 1.13),
            "errors": both + errors,
        },
    }


def picture_of_memory(plt: Any) -> None:
    figure, panel = plt.subplots(figsize=(9, 3), layout="constrained")
    found = memory(4)
    names = list(found)[::-1]
    left = [0.0] * len(names)
    colours = {"parameters": "#999999", "gradients": "#56B4E9", "moments": "#0072B2", "errors": "#E69F00"}
    for kind, colour in colours.items():
        widths = [found[name][kind] for name in names]
        panel.barh(names, widths, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        panel.annotate(f"{total:.1f}", (total, place), xytext=(4, -3), textcoords="offset points", fontsize=9)
    panel.set(xlabel="bytes per float32 parameter on each of 4 ranks, calculated; without activations", xlim=(0, 22))
    panel.legend(loc="lower right", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / "memory.png", dpi=110)


def main() -> int:
    """Write or check the tables; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table differs")
    if parser.parse_args().check:
        return int(any(page.read_text() != rendered(page.read_text()) for page in pages()))
    for page in pages():
        page.write_text(rendered(page.read_text()))
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    for draw in (picture_of_steps, picture_of_slow_links, picture_of_losses, picture_of_memory):
        draw(plt)
        plt.close("all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
