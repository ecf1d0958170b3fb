"""Write every measured table of README.md and docs/, and the pictures in docs/images, from scripts/results.

What pages say of GPUs follows from scripts/results/gpu, where proof.jsonl and convergence.jsonl of `make gpu-proof` go.

    python scripts/make_tables.py            # tables and pictures
    python scripts/make_tables.py --check    # exit code 1 if a table differs

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`, a text between `<!-- text NAME -->` and
`<!-- end of text -->`. No number of them is typed by hand.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from _common import COLOURS, REPOSITORY, Table, markdown, parser_of, pyplot
from benchmark_network import BASELINE, METHODS, UNLIMITED, median, sent_megabytes, table_of_runs, table_of_steps, times

RESULTS, IMAGES = REPOSITORY / "scripts" / "results", REPOSITORY / "docs" / "images"
#: The share of a run of 1,000 steps that onebit_adam spends in its warmup stage.
WARMUP = 0.2


@cache
def rows(name: str) -> Any:
    """The content of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# Milliseconds over links -------------------------------------------------------------------------------------------


def whole_runs() -> dict[str, tuple[float, float, float]]:
    """Megabytes, ms with unlimited bandwidth and at 1 Gbit/s, means over a run of 30 million parameters on 2 ranks."""
    place = (rows("avx512"), "30M", 2)
    fast, slow, megabytes = times(*place, UNLIMITED), times(*place, "1 Gbit/s"), sent_megabytes(*place)

    def of(method: str) -> tuple[float, float, float]:
        return megabytes[method], median(fast, method), median(slow, method)

    run = [WARMUP * a + (1 - WARMUP) * b for a, b in zip(of("warmup_stage"), of("onebit_adam"), strict=True)]
    plain = {METHODS[method].title: of(method) for method in (BASELINE, "ddp", "fp16", "int4")}
    return plain | {"`onebit_adam`, 1,000 steps, calculated": (run[0], run[1], run[2])}


def readme(*, calculated: bool) -> Table:
    """The rows that were measured, or those that were calculated from measured ones."""
    found = whole_runs()
    slowest = found[METHODS["ddp"].title][2]
    head = ["method", "MB per step", "ms, unlimited bandwidth", "ms, 1 Gbit/s", "speed-up at 1 Gbit/s"]
    lines = [
        [name, f"{mb:.1f}" if mb > 0.1 else "", f"{fast:.0f}", f"{slow:.0f}", f"{slowest / slow:.1f}x"]
        for name, (mb, fast, slow) in found.items()
        if ("calculated" in name) == calculated
    ]
    return [head, *[[cell.removesuffix(", calculated") for cell in line] for line in lines]]


# Losses --------------------------------------------------------------------------------------------------------------

Rows = Sequence[dict[str, Any]]


def losses(name: str, ranks: int, among: Rows | None = None) -> dict[int, dict[str, Any]]:
    """The rows of a run, by seed."""
    found = rows("convergence") if among is None else among
    return {row["seed"]: row for row in found if (row["name"], row["world_size"]) == (name, ranks)}


def against(name: str, partner: str, ranks: int, among: Rows | None = None) -> tuple[float, float, float] | None:
    """Per cent by which the mean loss lies above the partner's, and the least and the most at one seed."""
    mine, other = losses(name, ranks, among), losses(partner, ranks, among)
    pairs = [(mine[seed]["eval_loss"], other[seed]["eval_loss"]) for seed in mine.keys() & other.keys()]
    if not pairs or any(None in pair for pair in pairs):
        return None
    a, b = (statistics.fmean(column) for column in zip(*pairs, strict=True))
    each = [100 * (x / y - 1) for x, y in pairs]
    return 100 * (a / b - 1), min(each), max(each)


def fewer(name: str, ranks: int, among: Rows | None = None) -> float:
    """The factor by which a run sends fewer bytes than an all-reduce in float32."""
    found = losses(name, ranks, among)
    row = next(iter(found.values()))
    ring = 2 * (ranks - 1) / ranks * 4 * row["parameters"] * row["steps"]
    return ring / statistics.fmean(row["bytes"] for row in found.values())


def percent(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return ""
    mean, least, most = found
    return f"{mean:+.2f} %" + (f" ({least:+.2f} to {most:+.2f})" if least != most else "")


DEFAULTS = {
    "`grad_compression=int4`": ("AdamW, int4 gradients, state=compact", "AdamW"),
    "`onebit_adam`": ("OnebitAdam, state=compact", "AdamW"),
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
        cells = [percent(against(name, partner, ranks)) for ranks in counts]
        lines.append([title, *cells, f"{fewer(name, of_bytes):.1f}x"])
    return lines


NANOGPT = {
    "`grad_compression=int8`": "AdamW, int8 gradients, nanoGPT",
    "`grad_compression=int4`": "AdamW, int4 gradients, nanoGPT",
    "`onebit_adam`": "OnebitAdam, nanoGPT",
    "`onebit_adam`, `variance_interval=0`": "OnebitAdam, variance_interval=0, nanoGPT",
    "`zero_one_adam`": "ZeroOneAdam, nanoGPT",
    "`zero_one_adam`, `variance_interval=0`": "ZeroOneAdam, variance_interval=0, nanoGPT",
    "`zero2_adamw`, int4 both ways": "ZeRO-2 and AdamW, int4 both ways, nanoGPT",
    "DDP, 16-bit gradients": "AdamW, bfloat16 gradients, nanoGPT",
    "PowerSGD, rank 4": "AdamW, PowerSGD rank 4, nanoGPT",
}


def above_one_rank(name: str, ranks: int) -> tuple[float, float, float] | None:
    """As :func:`against`, against nanoGPT's AdamW on one rank, which has the same batches."""
    alone = ({**row, "world_size": ranks} for row in losses("AdamW, nanoGPT", 1).values())
    return against(name, "AdamW, nanoGPT", ranks, [*rows("convergence"), *alone])


def mean_loss(name: str, ranks: int) -> str:
    """The mean evaluation loss over seeds, or nothing."""
    found = losses(name, ranks).values()
    return f"{statistics.fmean(row['eval_loss'] for row in found):.3f}" if found else ""


#: What models of some architectures were trained with, and what it is compared with.
FAMILIES = {
    "`grad_compression=int8`": ("AdamW, int8 gradients", "AdamW"),
    "`grad_compression=int4`": ("AdamW, int4 gradients", "AdamW"),
    "`onebit_adam`": ("OnebitAdam", "AdamW"),
    "`onebit_adam`, `variance_interval=0`": ("OnebitAdam, variance_interval=0", "AdamW"),
    "`zero_one_adam`": ("ZeroOneAdam", "AdamW"),
    "`zero_one_adam`, `variance_interval=0`": ("ZeroOneAdam, variance_interval=0", "AdamW"),
    "`zero2_adamw`, int4 both ways": ("ZeRO-2 and AdamW, int4 both ways", "AdamW"),
    "`onebit_lamb`": ("OnebitLamb", "Lamb"),
}


def families() -> Table:
    """Losses of a BERT and of a GPT-2 on 4 ranks, and accuracies of a ViT and a CNN, on 2 ranks where none are said.

    Each of the uncompressed stands before what follows it.
    """
    titles = {"`adamw_torch`": ("AdamW", ""), **FAMILIES}
    last = titles.pop("`onebit_lamb`")
    titles |= {"LAMB": ("Lamb", ""), "`onebit_lamb`": last}
    columns = "BERT, loss", "against", "seeds", "GPT-2, loss", "ViT, accuracy", "CNN, accuracy"
    lines = [["method", *columns, "fewer bytes"]]
    for title, (name, partner) in titles.items():
        above, of_gpt2 = (
            percent(against(f"{name}, {model}", f"{partner}, {model}", ranks)) if partner else ""
            for model, ranks in (("BERT", 2), ("10M", 4))
        )
        seeds = str(len(losses(f"{name}, BERT", 2)) or "")
        cells = [mean_loss(f"{name}, BERT", 2), above, seeds, of_gpt2 or mean_loss(f"{name}, 10M", 4)]
        for model in ("ViT", "CNN"):
            cells.append(f"{statistics.fmean(row['accuracy'] for row in losses(f'{name}, {model}', 2).values()):.3f}")
        lines.append([title, *cells, f"{fewer(f'{name}, ViT', 2):.1f}x"])
    return lines


def nanogpt() -> Table:
    """Validation losses, and how far they lie above AdamW's."""
    plain, counts = "AdamW, nanoGPT", (2, 4)
    lines = [["method", "loss, 2 ranks", "4 ranks", "against AdamW, 2 ranks", "4 ranks", "seeds", "fewer bytes"]]
    lines.append(["`adamw_torch`, one rank", mean_loss(plain, 1), "", "", "", str(len(losses(plain, 1))), ""])
    for title, name in NANOGPT.items():
        ended = [mean_loss(name, ranks) for ranks in counts]
        above = [percent(above_one_rank(name, ranks)) for ranks in counts]
        if any(ended):
            seeds = "/".join(str(len(losses(name, ranks))) for ranks in counts)
            most = 4 if losses(name, 4) else 2
            lines.append([title, *ended, *above, seeds, f"{fewer(name, most):.1f}x"])
    return lines


MANY_RANKS = {
    "`grad_compression=int4`": "AdamW, int4 gradients",
    "`onebit_adam`": "OnebitAdam",
    "`zero_one_adam`": "ZeroOneAdam",
}
TUNED = {title: name for title, name in MANY_RANKS.items() if name != "ZeroOneAdam"}
TUNED |= {"`onebit_adam`, frozen": "OnebitAdam, frozen", "`zero_one_adam`, frozen": "ZeroOneAdam, frozen"}
#: Tasks of classification, with their titles and validation rows: MiniLM is fine-tuned.
TASKS = {
    "MiniLM": ("films", 1603),
    "CoLA": ("CoLA", 1043),
    "MRPC": ("MRPC", 408),
    "RTE": ("RTE", 277),
    "SST-2": ("SST-2", 872),
}
#: What was fine-tuned, and on how many ranks.
FINE_TUNED = {
    "best rate": ("fine-tuning at the best rate, 300 steps", 4),
    "an eighth": ("fine-tuning, 300 steps", 4),
    "SmolLM2-135M": ("SmolLM2", 2),
}


def fine_tuning() -> Table:
    lines = [["method", *FINE_TUNED, "fewer bytes"]]
    for title, name in TUNED.items():
        cells = [percent(against(f"{name}, {run}", f"AdamW, {run}", ranks)) for run, ranks in FINE_TUNED.values()]
        lines.append([title, *cells, f"{fewer(f'{name}, fine-tuning, 300 steps', 4):.1f}x"])
    return lines


def lost() -> Table:
    """All runs of the tables that ended 0.3 % above their partner, or more; the worst first."""
    cases = [
        (f"{title}, from scratch", name, partner, n) for title, (name, partner) in DEFAULTS.items() for n in (2, 4, 8)
    ]
    suffixes = [(", batch 64", "64 examples per step", n) for n in (16, 32, 64)]
    suffixes.append((", library, untied", "untied, on code", 4))
    for title, name in MANY_RANKS.items():
        cases += [(f"{title}, {words}", name + suffix, "AdamW" + suffix, n) for suffix, words, n in suffixes]
    for title, name in TUNED.items():
        cases += [(f"{title}, fine-tuning, {k}", f"{name}, {v}", f"AdamW, {v}", n) for k, (v, n) in FINE_TUNED.items()]
        cases.append((f"{title}, films", f"{name}, MiniLM", "AdamW, MiniLM", 2))
    for title, (name, partner) in FAMILIES.items():
        cases.append((f"{title}, BERT", f"{name}, BERT", f"{partner}, BERT", 2))
        cases.append((f"{title}, GPT-2 of 10M", f"{name}, 10M", f"{partner}, 10M", 4))
    found: dict[str, dict[int, float]] = {}
    for title, name, partner, ranks in cases:
        if (by := against(name, partner, ranks)) and by[0] >= 0.3:
            found.setdefault(title, {})[ranks] = by[0]
    worst = sorted(found.items(), key=lambda pair: -max(pair[1].values()))
    above = (", ".join(f"{by:+.2f} % ({ranks})" for ranks, by in places.items()) for _, places in worst)
    return [["where", "above (ranks)"], *([title, cell] for (title, _), cell in zip(worst, above, strict=True))]


def score_of(row: dict[str, Any]) -> float:
    """The measure of a task: of CoLA the Matthews correlation, else the accuracy."""
    return float(row.get("matthews", row["accuracy"]))


def standard_error(task: str, scores: Sequence[float]) -> float:
    """The standard error of a mean score over seeds, from the number of rows, which all seeds share, and the seeds."""
    mean, count = statistics.fmean(scores), TASKS[task][1]
    of_rows = (1 - mean**2) ** 2 / count if task == "CoLA" else mean * (1 - mean) / count
    of_seeds = statistics.variance(scores) / len(scores) if len(scores) > 1 else 0.0
    return (of_rows + of_seeds) ** 0.5


def classification() -> Table:
    """Scores of the methods on the tasks, means over seeds, with the largest standard error of a task."""
    methods = {"`adamw_torch`": "AdamW", "DDP, 8-bit floats": "AdamW, float8 gradients"}
    methods |= {title: name.removesuffix(", nanoGPT") for title, name in NANOGPT.items()}
    early = {"onebit_adam": "OnebitAdam", "zero_one_adam": "ZeroOneAdam"}
    methods |= {f"`{title}`, frozen at 20%": f"{name}, frozen at 20%" for title, name in early.items()}
    tasks = [task for task in TASKS if losses(f"AdamW, int4 gradients, {task}", 2)]
    scores = {
        task: {name: [score_of(row) for row in losses(f"{name}, {task}", 2).values()] for name in methods.values()}
        for task in tasks
    }
    errors = {task: max(standard_error(task, each) for each in scores[task].values() if each) for task in tasks}
    lines = [["score", *(f"{TASKS[task][0]} ± {errors[task]:.3f}" for task in tasks), "seeds", "fewer bytes"]]
    for title, name in methods.items():
        found = {task: scores[task][name] for task in tasks}
        cells = [f"{statistics.fmean(each):.3f}" if each else "" for each in found.values()]
        if task := next((task for task, each in found.items() if each), None):
            seeds = "/".join(str(len(each)) for each in found.values())
            lines.append([title, *cells, seeds, f"{fewer(f'{name}, {task}', 2):.1f}x"])
    return lines


def errors_of_averages() -> Table:
    """Errors of single averages at 2 and 16 ranks, and of sums of 20 averages; the models beside each other."""
    found = rows("vnmse")
    models = list(dict.fromkeys(row["model"] for row in found))
    lines = [["quantizer", "bits", *(what for model in models for what in (f"{model}, 2 ranks", "16", "sum"))]]
    for quantizer in dict.fromkeys(row["quantizer"] for row in found):
        cells: list[str] = []
        for model in models:
            mine = {row["ranks"]: row for row in found if (row["model"], row["quantizer"]) == (model, quantizer)}
            cells += [f"{value:.1e}" for value in (mine[2]["vnmse"], mine[16]["vnmse"], mine[4]["sum with feedback"])]
        bits = next(row["bits"] for row in found if row["quantizer"] == quantizer)
        lines.append([quantizer.replace("4 bits, squares, blocks of", "squares in"), f"{bits:.2f}", *cells])
    return lines


#: The name of the losses, that of the uncompressed, that in benchmark_network.py, and ranks of a node.
FSDP2 = (
    ("FSDP2", "", "fsdp2", 1),
    ("FSDP2, int4 gradients", "FSDP2", "", 1),
    ("HSDP", "", "hsdp_32", 2),
    ("HSDP, int4 gradients", "HSDP", "hsdp_int4", 2),
    ("MuonAdamW, int4 gradients", "MuonAdamW", "", 1),
)


def fsdp() -> Table:
    """Losses against FSDP2 alone, and bytes at the interface of a rank, or of a node of two."""
    lines = [["4 ranks", "loss", "MB per step", "fewer"]]
    alone = 0.0
    for name, partner, method, per_node in FSDP2:
        sent = sent_megabytes(rows("network_fsdp"), "4M", 4, per_node).get(method)
        alone = sent if sent and not partner else alone
        loss = percent(against(name, partner, 4)) if partner else ""
        lines.append([name, loss, f"{sent:.2f}" if sent else "", f"{alone / sent:.1f}x" if sent and partner else ""])
    return lines


# Other measurements --------------------------------------------------------------------------------------------------


def other(name: str, *columns: str) -> Table:
    """Rows of results/other.json as they are; a column is "key", or "heading = key"."""
    found, keys = rows("other")[name]["rows"], [column.rpartition(" = ")[2] for column in columns]
    heads = [column.partition(" = ")[0] for column in columns]
    return [heads, *([f"{row.get(key, '')}" for key in keys] for row in found)]


#: What the table of exact parameters calls the encodings.
ENCODINGS = {
    "map + 4": "map + 4 bits",
    "blocks, 2 bits": "`exact`",
    "entropy": "entropy",
}


def exact_parameters() -> Table:
    """Shares of 16-bit parameters that steps 11 to 40 change, and bits of encodings; ours in other steps too."""
    others = ("`exact`, step 1", "steps 41 to 100")
    lines = [["model", "learning rate", "changed, %", "beyond a unit, %", *ENCODINGS.values(), *others]]
    found = sorted(rows("exact_parameters"), key=lambda row: (row["model"], row["lr"], row["warmup"]))
    by_steps = ([row for row in found if row["steps"] == steps] for steps in ("1", "11 to 40", "41 to 100"))
    for first, row, last in zip(*by_steps, strict=True):
        rate = f"{row['lr']:.0e}".replace("e-0", "e-") + (", warmup" if row["warmup"] else "")
        shares = [f"{100 * row[key]:.1f}" for key in ("changed", "beyond")]
        bits = [*(row[key] for key in ENCODINGS), first["blocks, 2 bits"], last["blocks, 2 bits"]]
        lines.append([row["model"], rate, *shares, *(f"{value:.2f}" for value in bits)])
    return lines


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
    return steps * traffic["baseline_step"] / 1e6, traffic["compressed"][str(steps)] / 1e6


OTHERS = [name for name in METHODS if name != "powersgd_1"]
NODES = (
    *(BASELINE, "ddp", "fp16", "int4", "int4_levels", "zero2_int4", "zero2_int4_levels"),
    *("onebit_adam", "onebit_adam_levels", "hsdp_16", "hsdp_int4"),
)
TABLES: dict[str, Callable[[], Table]] = {
    "readme": partial(readme, calculated=False),
    "readme, calculated": partial(readme, calculated=True),
    "network 30M": lambda: table_of_steps(rows("avx512"), "30M", 2, (UNLIMITED, "1 Gbit/s")),
    "network 10M": lambda: table_of_steps(rows("rivals"), "10M", 2, ("10 Gbit/s", "1 Gbit/s", "100 Mbit/s"), 1, OTHERS),
    "network 100M": lambda: table_of_steps(rows("avx512"), "100M, 16 tokens", 2, ("1 Gbit/s",)),
    "nodes": lambda: table_of_steps(rows("avx512"), "10M", 4, ("1 Gbit/s", "100 Mbit/s"), 2, NODES),
    "nanoGPT": nanogpt,
    "rivals": lambda: by_ranks({title: (name, "AdamW") for title, name in RIVALS.items()}, (2, 4, 8), 4),
    "fine-tuning": fine_tuning,
    "FSDP2": fsdp,
    "FSDP2 over links": lambda: table_of_steps(rows("network_fsdp"), "30M", 4, ("1 Gbit/s",)),
    "lost": lost,
    "time to loss": lambda: table_of_runs(rows("time_to_loss"), ("1 Gbit/s", "100 Mbit/s")),
    "kernels": partial(other, "kernels", "kernel", "ms", "of the roofline = of_roofline"),
    "step": partial(other, "step", "step", "ms"),
    "host": partial(other, "host", "step", "µs = us", "ratio"),
    "fused adam": partial(
        other, "fused_adam", "ms = case", "FusedAdam", "torch, fused = torch fused", "torch, foreach = torch foreach"
    ),
    "zero memory": partial(
        other, "zero_memory", "method", "parameters", "gradients", "state = states", "other", "all", "sent"
    ),
    "checkpoints": partial(
        other,
        *("checkpoints", "method", "save, s = save", "training waits, s = blocked", "load, s = load"),
        *("MiB to save = save_mib", "MiB to load = load_mib"),
    ),
    "demo": demo,
    "exact parameters": exact_parameters,
    "families": families,
    "classification": classification,
    "errors": errors_of_averages,
    "LoRA": partial(other, "lora", "method", "PEFT = peft", "TRL = trl", "MB per step = mb"),
}


# GPUs ----------------------------------------------------------------------------------------------------------------


def on_gpu(name: str) -> list[dict[str, Any]]:
    """The lines of a file of `make gpu-proof`; none if no GPU could be had."""
    file = RESULTS / "gpu" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def gpu_name() -> str:
    """The GPU of the results, or ""."""
    facts = [line["environment"] for line in on_gpu("proof") if line.get("what") == "environment"]
    return str(facts[0]["gpu"]["devices"][0]) if facts else ""


def status() -> str:
    """What the README says of GPUs."""
    lines = [line for line in on_gpu("proof") if line["ok"] is not None]
    if not lines:
        return "Tested on\nCPUs; nothing has run on a GPU yet (the CUDA kernels are tested in an emulation)."
    well = sum(line["ok"] for line in lines)
    return f"Tested on\nCPUs, and on one GPU ({gpu_name()}): {well} of {len(lines)} checks passed there."


def gpu_benchmarks() -> str:
    """Kernels against the memory's speed, and steps."""
    kernels = [
        line for line in on_gpu("proof") if line.get("what") == "kernel" and line["parameters"] == "torch.bfloat16"
    ]
    steps = [line for line in on_gpu("proof") if line.get("what") == "step" and "gpu_ms" in line]
    if not steps:
        return "**Nothing here has run on a GPU**: `make gpu-proof` is ready.\n"
    speeds = [["kernel", "ms", "GB/s", "of the roofline"]]
    for line in kernels:
        rate = f"{line['gb_per_s']:.0f}"
        speeds.append([line["kernel"], f"{line['ms']:.3f}", rate, f"{line['of_roofline']:.2f}"])
    times = [
        ["step", "model", "ranks", "MiB of a bucket", "GPU, ms", "host, ms", "waits", "launched", "bytes per parameter"]
    ]
    for line in steps:
        numbers = f"{line['gpu_ms']:.2f}", f"{line['host_ms']:.2f}", f"{line['waits']:.0f}", f"{line['launched']:.0f}"
        place = line["model"], str(line["ranks"]), f"{line['bucket_mb']:.0f}"
        times.append([line["step"], *place, *numbers, f"{line['bytes_per_parameter']:.1f}"])
    head = f"{gpu_name()}. Kernels on {kernels[0]['numel']:,} elements, with gradients and parameters in bfloat16:"
    then = "Steps by gradients that are there already: times, waits and launches of a rank, whose messages are copies."
    return f"## On a GPU\n\n{head}\n\n{markdown(speeds)}\n{then}\n\n{markdown(times)}"


def gpu_losses() -> str:
    """Losses of runs on a GPU against AdamW's at the same seeds, which ran on one rank with the same batch."""
    found = on_gpu("convergence")
    if not found:
        return "Nothing was trained on a GPU: `make gpu-proof` is ready.\n"
    lines = [["model", "ranks", "steps", "method", "seeds", "loss", "against AdamW", "fewer bytes"]]
    for key in dict.fromkeys((row["model"], row["world_size"], row["steps"], row["name"]) for row in found):
        model, ranks, steps, name = key
        mine = [row for row in found if (row["model"], row["world_size"], row["steps"], row["name"]) == key]
        other = [{**row, "world_size": ranks} for row in found if row["name"] == "AdamW" and row["model"] == model]
        alike = [*mine, *(row for row in other if row["steps"] == steps and row not in mine)]
        loss = statistics.fmean(row["eval_loss"] for row in mine)
        cells = ["", ""]
        if name != "AdamW":
            cells = [percent(against(name, "AdamW", ranks, alike)), f"{fewer(name, ranks, alike):.1f}x"]
        lines.append([model, str(ranks), f"{steps:,}", name, str(len(mine)), f"{loss:.4f}", *cells])
    batch = f"{found[0]['tokens_per_step']:,} tokens per step"
    return f"## On a GPU\n\n{found[0]['device']}, {batch}, none of them twice, bfloat16 autocast:\n\n{markdown(lines)}"


TEXTS: dict[str, Callable[[], str]] = {
    "gpu status": status,
    "gpu benchmarks": gpu_benchmarks,
    "gpu losses": gpu_losses,
}


def rendered(text: str) -> str:
    """A page with its tables and texts anew."""
    place = re.compile(r"(<!-- table ([^>]*) -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
    text = place.sub(lambda found: found[1] + markdown(TABLES[found[2]]()), text)
    place = re.compile(r"(<!-- text ([^>]*) -->\n?).*?(?=<!-- end of text -->)", re.DOTALL)
    return place.sub(lambda found: found[1] + TEXTS[found[2]](), text)


def pages() -> list[Path]:
    """The pages that may have tables."""
    found = (REPOSITORY.glob(pattern) for pattern in ("README.md", "docs/**/*.md", "recipes/*/README.md"))
    return [page for paths in found for page in sorted(paths)]


# Pictures ------------------------------------------------------------------------------------------------------------


#: What draws each picture into its panels, their number, and the size.
PICTURES: dict[str, tuple[Callable[[Any], None], int, tuple[float, float]]] = {}


def picture(name: str, panels: int, *size: float) -> Callable[[Callable[[Any], None]], None]:
    """Add what draws docs/images/NAME.png."""
    return lambda draw: PICTURES.update({name: (draw, panels, size)})


def bars(panel: Any, named: dict[str, tuple[float, str]], title: str) -> None:
    """Horizontal bars from zero, the first one at the top."""
    names = list(named)[::-1]
    drawn = panel.barh(names, [named[name][0] for name in names], color=[named[name][1] for name in names])
    panel.bar_label(drawn, [f"{named[name][0]:,.0f}" for name in names], padding=3, fontsize=9)
    panel.set(title=title, xlabel="ms per step", xlim=(0, 1.18 * max(value for value, _ in named.values())))


@picture("step_time", 2, 10, 2.9)
def of_steps(panels: Any) -> None:
    for panel, place, title in zip(panels, (1, 2), ("unlimited bandwidth", "1 Gbit/s"), strict=True):
        found = dict(zip(("baseline", "ddp", "fp16", "int4", "onebit_adam"), whole_runs().items(), strict=True))
        named = {name.replace("`", ""): (values[place], COLOURS[key]) for key, (name, values) in found.items()}
        bars(panel, named, title)


@picture("slow_links", 2, 10, 2.9)
def of_slow_links(panels: Any) -> None:
    for panel, link in zip(panels, ("1 Gbit/s", "100 Mbit/s"), strict=True):
        column = times(rows("rivals"), "10M", 2, link)
        methods = ("ddp", "fp16", "int4", "onebit_adam", "zero_one_adam")
        bars(panel, {METHODS[m].title.replace("`", ""): (median(column, m), COLOURS[m]) for m in methods}, link)


@picture("errors", 1, 8, 3.4)
def of_errors(panel: Any) -> None:
    """The error of an average of 4 ranks by each quantizer, in the order of their bits."""
    found = sorted((row for row in rows("vnmse") if row["ranks"] == 4), key=lambda row: -row["bits"])
    names = list(dict.fromkeys(row["quantizer"] for row in found))
    for model, marker in zip(sorted({row["model"] for row in found}), ("o", "s"), strict=False):
        mine = [row for row in found if row["model"] == model]
        colours = [COLOURS["int4"] if "ours" in row["quantizer"] else COLOURS["ddp"] for row in mine]
        places = [names.index(row["quantizer"]) for row in mine]
        panel.scatter([row["vnmse"] for row in mine], places, c=colours, marker=marker)
        panel.plot([], [], marker, color="#707070", label=model)
    bits = {row["quantizer"]: row["bits"] for row in found}
    panel.set(xscale="log", xlabel="vNMSE of an average, 4 ranks")
    panel.set_yticks(range(len(names)), [f"{name.removesuffix(' (ours)')}: {bits[name]:.2f} bits" for name in names])
    panel.grid(axis="y", color="#DDDDDD")
    panel.legend(fontsize=8, loc="upper left")


PARTS = {"parameters": "#D8D8D8", "gradients": "#AAAAAA", "moments": "#707070", "errors": "#882255"}


def memory(ranks: int) -> dict[str, dict[str, float]]:
    """Bytes per float32 parameter at the peak of a run, by formula."""
    errors = 1 + 2 / 128
    both = errors * (1 + 1 / ranks)
    found = {
        "AdamW, DDP": (4, 4, 8, 0),
        "AdamW, grad_compression=int4": (4, 4, 8, 2 * both),
        "onebit_adam, warmup stage": (4, 4, 8, both),
        "onebit_adam, compressed stage": (4, 4, 1.13, both),
        "zero2_adamw": (4, 4 / ranks, 8 / ranks, 0),
        "onebit_adam, zero_stage=2": (4, 4 / ranks, max(8 / ranks, 1.13), both + errors),
    }
    return {name: dict(zip(PARTS, values, strict=True)) for name, values in found.items()}


@picture("memory", 1, 9, 3)
def of_memory(panel: Any) -> None:
    found = memory(4)
    names = list(found)[::-1]
    left = [0.0] * len(names)
    for kind, colour in PARTS.items():
        widths = [found[name][kind] for name in names]
        panel.barh(names, widths, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        panel.annotate(f"{total:.1f}", (total, place), xytext=(4, -3), textcoords="offset points", fontsize=9)
    panel.set(xlabel="bytes per float32 parameter on each of 4 ranks, calculated; without activations", xlim=(0, 22))
    panel.legend(loc="lower right", fontsize=8)


@picture("bits", 1, 8, 3.2)
def of_bits(panel: Any) -> None:
    """Bits that a rank sends per parameter and step, means of 100 steps, over those of a ring with one bit a value."""
    for key, name in (
        ("ddp", "AdamW"),
        ("int4", "AdamW, int4 gradients, state=compact"),
        ("onebit_adam", "OnebitAdam, state=compact"),
        ("zero_one_adam", "ZeroOneAdam"),
    ):
        row = losses(name, 4)[0]
        points = [{"step": 0, "bytes": 0}, *row["curve"]]
        pairs = list(itertools.pairwise(points))
        values = 2 * 3 / 4 * row["parameters"] / 8
        bits = [(b["bytes"] - a["bytes"]) / (b["step"] - a["step"]) / values for a, b in pairs]
        title = METHODS[key].title.replace("`", "").partition(",")[0] if key != "int4" else "grad_compression=int4"
        look: dict[str, Any] = {"color": COLOURS[key], "linewidth": 2, "label": title, "baseline": None}
        panel.stairs(bits, [point["step"] for point in points], **look)
    panel.axvline(200, color=COLOURS["baseline"], linestyle=":")
    panel.annotate("warmup stage", (195, 0.1), ha="right", fontsize=9)
    panel.set(xlabel="step", ylabel="bits per parameter and step", yscale="log", xlim=(0, 1000), ylim=(0.05, 60))
    panel.set_yticks((0.1, 1, 4, 32), ("0.1", "1", "4", "32"))
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def advised(params: float, bandwidth: float) -> str:
    """The planner's choice for 8 machines of one GPU each whose step takes 0.6 s: a key of COLOURS."""
    import torch

    from hf_compressopt.flat import DDP_BUCKET_MB, DEFAULT_BUCKET_MB_ON_CUDA
    from hf_compressopt.planner.advice import as_json
    from hf_compressopt.planner.cost import Cluster, Model, Training
    from hf_compressopt.planner.memory import memory_rows

    buckets = {"bucket_cap_mb": DEFAULT_BUCKET_MB_ON_CUDA, "ddp_bucket_cap_mb": DDP_BUCKET_MB}
    model = Model(Training(int(params), 0.6, **buckets), Cluster(8, 1, bandwidth / 8))
    memory = memory_rows(int(params), 8, torch.float32, 2, **buckets)
    flags = as_json(model, 10_000, memory, None)["advised"]
    return next(key for key in ("int4", "onebit_adam", "zero_one_adam", "ddp") if key in flags or key == "ddp")


@picture("advice", 1, 8, 3.6)
def of_advice(panel: Any) -> None:
    """Bandwidth and model size, and what the planner advises."""
    from matplotlib.colors import ListedColormap

    rates = [10 ** (8 + 3 * n / 60) for n in range(61)]
    sizes = [10 ** (7.5 + 2.5 * n / 50) for n in range(51)]
    named = {"ddp": "adamw_torch", "int4": "int4 gradients", "onebit_adam": "onebit_adam"}
    named |= {"zero_one_adam": "zero_one_adam"}
    grid = [[list(named).index(advised(size, rate)) for rate in rates] for size in sizes]
    colours = ListedColormap([COLOURS[key] for key in named])
    panel.pcolormesh(rates, sizes, grid, cmap=colours, vmin=-0.5, vmax=len(named) - 0.5, alpha=0.75, shading="nearest")
    for number, title in enumerate(named.values()):
        places = [(rate, size) for y, size in enumerate(sizes) for x, rate in enumerate(rates) if grid[y][x] == number]
        x, y = (statistics.geometric_mean(column) for column in zip(*places, strict=True))
        panel.annotate(title, (x, y), ha="center", color="white", fontsize=9, weight="bold")
    panel.set(xscale="log", yscale="log", xlabel="network between the machines", ylabel="parameters")
    panel.set_title("8 machines of one GPU each, 0.6 s of computing per step; calculated, not measured", fontsize=10)
    panel.set_xticks((1e8, 1e9, 1e10, 2.5e10, 1e11), ("100 Mbit/s", "1 Gbit/s", "10", "25", "100 Gbit/s"))
    panel.set_yticks((1e8, 3.5e8, 1e9, 1e10), ("100M", "350M", "1B", "10B"))
    panel.minorticks_off()


def main() -> int:
    """Write or check the tables; the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table differs")
    if parser.parse_args().check:
        return int(any(page.read_text() != rendered(page.read_text()) for page in pages()))
    for page in pages():
        page.write_text(rendered(page.read_text()))
    plt = pyplot()
    for name, (draw, count, size) in PICTURES.items():
        figure, panels = plt.subplots(1, count, figsize=size, layout="constrained", sharey=True)
        draw(panels)
        for panel in figure.axes:
            panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(IMAGES / f"{name}.png", dpi=110)
        plt.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
