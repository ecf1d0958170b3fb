"""Train one small GPT-2 with every optimizer and many of their options, and compare loss, bytes and rounds.

Real process groups (gloo, one CPU process per rank), a plain torch loop, the same global batch whatever the number of
ranks. Every finished run is one line of OUTPUT/rows.jsonl, and a run that has its line is not repeated: an
interrupted script goes on where it was. The report is Markdown; beside it lie a picture and the rows as JSON. In a
report that is there already only the text between `<!-- table NAME -->` and `<!-- end of table -->` changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "causal_lm"
VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS = 2048, 96, 2, 4, 128
GLOBAL_BATCH = 8  # examples per step, over all ranks
MAX_GRAD_NORM, WEIGHT_DECAY = 1.0, 0.01
EVALUATIONS = 10  # per run, where it has the steps for it
LEARNING_RATE = {"AdamW": 2e-3, "Lamb": 1e-2}  # by the table "learning rates"
PARTNER = {"OnebitAdam": "AdamW", "ZeroOneAdam": "AdamW", "OnebitLamb": "Lamb"}
UNCOMPRESSED = tuple(LEARNING_RATE)
ONE_WORLD_SIZE = ("learning rates", "warmup")  # groups that run at the first of --world-sizes only
COLOURS = dict(zip((*LEARNING_RATE, *PARTNER), ("#1f6fb4", "#7a7a7a", "#d1495b", "#2a9d5c", "#e09f3e"), strict=True))
MB = 1e6
OPEN, CLOSE = "<!-- table {} -->", "<!-- end of table -->"


# ------------------------------------------------------------------------------------------------ what is run


@dataclass(frozen=True)
class Run:
    """One configuration.

    Attributes:
        name: What the tables call it.
        optimizer: A key of LEARNING_RATE or PARTNER.
        options: Options of a compressed optimizer beside its defaults.
        lr: Peak learning rate; that of the optimizer or its partner where None.
        freeze: Last warmup step as a share of the steps; 0 is one step; None leaves it to Trainer's default.
        tied: Whether the input embedding is the output layer too.
        error_feedback: False forgets the errors after every step.
        clip: Clip to MAX_GRAD_NORM "by the optimizer", "by the norm of the mean" (which takes an all-reduce of local
            gradients that no count has), or not at all ("").
        long: Whether it takes --steps, or --ablation-steps.
    """

    name: str
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None
    freeze: float | None = None
    tied: bool = True
    error_feedback: bool = True
    clip: str = "by the optimizer"
    long: bool = False

    @property
    def peak_lr(self) -> float:
        return LEARNING_RATE[PARTNER.get(self.optimizer, self.optimizer)] if self.lr is None else self.lr


def named(*runs: Run) -> dict[str, Run]:
    return {run.name: run for run in runs}


ADAMW, ADAMW_UNTIED = Run("AdamW, tied", "AdamW"), Run("AdamW, untied", "AdamW", tied=False)
UNCLIPPED = Run("AdamW, no clipping", "AdamW", clip="", long=True)
DEFAULTS = Run("defaults: blocks of 4096, floor 0.01", "OnebitAdam")


def floor(value: float, *, tied: bool) -> Run:
    return Run(f"floor {value:g}, {'tied' if tied else 'untied'}", "OnebitAdam", {"variance_floor": value}, tied=tied)


def one_bit_gradients(name: str = "", clip: str = Run.clip, freeze: float | None = None, **options: Any) -> Run:
    """0/1 Adam as in the paper, which has 1-bit gradients in a variance stage of more than 16 steps."""
    options = {"var_update_scaler": 16, **options}
    return Run(f"ZeroOneAdam, var_update_scaler 16{name}", "ZeroOneAdam", options, freeze=freeze, clip=clip, long=True)


# A run that stands in several groups is run once.
RUNS: dict[str, dict[str, Run]] = {
    "learning rates": named(
        *(Run(f"AdamW, lr {lr:g}", "AdamW", lr=lr, long=True) for lr in (1e-3, 2e-3, 3e-3)),
        *(Run(f"Lamb, lr {lr:g}", "Lamb", lr=lr, long=True) for lr in (3e-3, 5e-3, 1e-2, 2e-2)),
    ),
    "optimizers": named(*(Run(name, name, long=True) for name in (*LEARNING_RATE, *PARTNER))),
    "causes": named(
        UNCLIPPED,
        Run("OnebitAdam, no clipping", "OnebitAdam", clip="", long=True),
        Run("OnebitAdam, clipped by the norm of the mean", "OnebitAdam", clip="by the norm of the mean", long=True),
        Run("ZeroOneAdam, no clipping", "ZeroOneAdam", clip="", long=True),
        one_bit_gradients(),
        one_bit_gradients(", no clipping", clip=""),
        one_bit_gradients(", var_freeze_step 20%", freeze=0.2),
        one_bit_gradients(", local_step_clipper 1", local_step_clipper=1),
    ),
    "blocks": named(
        ADAMW,
        Run("one scale per message", "OnebitAdam", {"scale_block": None}),
        DEFAULTS,
        *(Run(f"blocks of {size}", "OnebitAdam", {"scale_block": size}) for size in (1024, 512, 256)),
    ),
    "floors": named(
        ADAMW,
        floor(0.0, tied=True),
        DEFAULTS,
        floor(0.1, tied=True),
        ADAMW_UNTIED,
        *(floor(value, tied=False) for value in (0.0, 0.01, 0.1)),
    ),
    "controls": named(
        ADAMW,
        DEFAULTS,
        Run("without error feedback", "OnebitAdam", error_feedback=False),
        Run("without warmup", "OnebitAdam", freeze=0),
    ),
    "warmup": named(
        ADAMW, DEFAULTS, *(Run(f"freeze_step {share:.0%}", "OnebitAdam", freeze=share) for share in (0.05, 0.1, 0.4))
    ),
}
ALL_RUNS = {name: run for group in RUNS.values() for name, run in group.items()}


@dataclass(frozen=True)
class Job:
    """A run at one world size, with one seed and a number of steps."""

    run: Run
    world_size: int
    seed: int
    steps: int

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.run.name, self.world_size, self.seed, self.steps


def steps_of(run: Run, arguments: argparse.Namespace) -> int:
    return arguments.steps if run.long else arguments.ablation_steps


def jobs(arguments: argparse.Namespace) -> list[Job]:
    """The most important first: a part of them makes a report too."""
    found: dict[tuple[str, int, int, int], Job] = {}
    for groups in (["learning rates"], ["optimizers"], ["blocks", "floors", "controls"], ["warmup"], ["causes"]):
        chosen = arguments.only
        runs = [run for group in groups for run in RUNS[group].values() if group in chosen or run.name in chosen]
        seeds = arguments.seeds[:1] if "learning rates" in groups else arguments.seeds
        world_sizes = arguments.world_sizes[:1] if groups[0] in ONE_WORLD_SIZE else arguments.world_sizes
        for seed, world_size, run in itertools.product(seeds, world_sizes, runs):
            job = Job(run, world_size, seed, steps_of(run, arguments))
            found.setdefault(job.key, job)
    return list(found.values())


# --------------------------------------------------------------------------------------------- text and model


def prepare_text() -> dict[str, dict[str, Tensor]]:
    """The recipe's text and split: "train" and "validation", each input_ids and labels [examples, TOKENS]."""
    sys.path.insert(0, str(RECIPE))
    import datasets
    import train as recipe
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    options = recipe.DataArguments(block_size=TOKENS)
    text = recipe.load_text(options)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=recipe.train_tokenizer(text["train"], recipe.text_column(text), VOCABULARY),
        bos_token=recipe.END_OF_TEXT,
        eos_token=recipe.END_OF_TEXT,
    )
    blocks = recipe.make_blocks(text, tokenizer, options)
    return {
        split: {name: torch.tensor(examples[name][:]) for name in ("input_ids", "labels")}
        for split, examples in blocks.items()
    }


def make_model(run: Run, seed: int) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        tie_word_embeddings=run.tied,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_pdrop=0.0,  # as the recipe's
    )
    return GPT2LMHeadModel(config)


def make_optimizer(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer with Trainer's param groups and, where it is compressed, Trainer's default schedule."""
    import hf_compressopt

    run = job.run
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if run.optimizer == "AdamW":
        return torch.optim.AdamW(groups, lr=run.peak_lr)
    if run.optimizer == "Lamb":
        return hf_compressopt.Lamb(groups, lr=run.peak_lr)
    cls, given = getattr(hf_compressopt, run.optimizer), dict(run.options)
    if run.freeze is not None:
        given[cls.freeze_option] = max(1, round(run.freeze * job.steps))
    optimizer = cls(groups, lr=run.peak_lr, **given)
    optimizer.scale_schedule(job.steps, given=given)
    return optimizer


# --------------------------------------------------------------------------------------------------- one rank


def batches(text: dict[str, Tensor], job: Job, rank: int) -> Iterator[dict[str, Tensor]]:
    """This rank's part of every global batch; the global batches depend on the seed alone."""
    examples, generator = len(text["input_ids"]), torch.Generator().manual_seed(job.seed)
    passes = math.ceil(job.steps * GLOBAL_BATCH / examples)
    order = torch.cat([torch.randperm(examples, generator=generator) for _ in range(passes)])
    for step in range(job.steps):
        mine = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH].chunk(job.world_size)[rank]
        yield {name: values[mine] for name, values in text.items()}


def average_gradients(params: Sequence[Tensor], world_size: int) -> None:
    """As DDP: times 1/W, then the sum over the ranks."""
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    flat.mul_(1 / world_size)
    dist.all_reduce(flat)
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param)


def clip(run: Run, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], world_size: int) -> None:
    averaged = run.optimizer in UNCOMPRESSED or optimizer.plan.reduce_grads
    if run.clip == "by the norm of the mean" and not averaged:
        flat = torch.cat([p.grad.reshape(-1) for p in params]).mul_(1 / world_size)
        dist.all_reduce(flat)
        torch._foreach_mul_([p.grad for p in params], min(1.0, MAX_GRAD_NORM / (float(flat.norm()) + 1e-6)))
    elif run.clip and run.optimizer in UNCOMPRESSED:
        torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
    elif run.clip:
        optimizer.clip_grad_norm_(MAX_GRAD_NORM)


@torch.no_grad()
def evaluate(model: torch.nn.Module, text: dict[str, Tensor], rank: int, world_size: int) -> float:
    """Mean loss per token of the whole validation text, of which each rank reads a part."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, examples
    for start in range(rank * 16, len(text["input_ids"]), world_size * 16):
        batch = {name: values[start : start + 16] for name, values in text.items()}
        examples = len(batch["input_ids"])
        sums += torch.tensor([float(model(**batch).loss) * examples, examples], dtype=torch.float64)
    dist.all_reduce(sums)
    model.train()
    return float(sums[0] / sums[1])


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def train(job: Job, rank: int, text: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Train and evaluate, all ranks together. Returns the row of this run."""
    from transformers import get_linear_schedule_with_warmup

    start = time.monotonic()
    run, world_size = job.run, job.world_size
    model = make_model(run, job.seed)
    torch.manual_seed(job.seed * job.world_size + rank)  # of dropout
    params = list(model.parameters())
    numel = sum(p.numel() for p in params)
    optimizer = make_optimizer(job, model)
    plain = run.optimizer in UNCOMPRESSED
    scheduler = get_linear_schedule_with_warmup(optimizer, max(1, job.steps // 10), job.steps)
    ring_bytes = 2 * (world_size - 1) / world_size * 4 * numel
    averaged_steps, largest_step, loss_sum, loss_steps = 0, 0.0, torch.zeros(()), 0
    interval = max(5, math.ceil(job.steps / EVALUATIONS))
    curve = []
    for step, batch in enumerate(batches(text["train"], job, rank), start=1):
        loss = model(**batch).loss
        loss.backward()
        loss_sum, loss_steps = loss_sum + loss.detach(), loss_steps + 1
        if plain or optimizer.plan.reduce_grads:
            average_gradients(params, world_size)
            averaged_steps += 1
        clip(run, optimizer, params, world_size)
        lr = optimizer.param_groups[0]["lr"]
        late = step > job.steps // 5 if plain else optimizer.plan.stage.number == 1.0
        before = [p.detach().clone() for p in params] if late and lr > 0 and rank == 0 else []
        optimizer.step()
        for old, param in zip(before, params, strict=False):
            largest_step = max(largest_step, float((param.detach() - old).abs().max()) / lr)
        if not run.error_feedback:
            for state in optimizer._states:
                state.worker_error.zero_()
                state.server_error.zero_()
        scheduler.step()
        optimizer.zero_grad()
        if step % interval == 0 or step == job.steps:
            with nullcontext() if plain else optimizer.averaged_parameters():
                eval_loss = evaluate(model, text["validation"], rank, world_size)
            dist.all_reduce(loss_sum)
            sent = averaged_steps * ring_bytes + (0 if plain else optimizer.traffic.total_bytes)
            train_loss = float(loss_sum) / loss_steps / world_size
            curve.append({"step": step, "eval": finite(eval_loss), "train": finite(train_loss), "bytes": sent})
            loss_sum, loss_steps = torch.zeros(()), 0
    return {
        "name": run.name,
        "world_size": world_size,
        "seed": job.seed,
        "steps": job.steps,
        "optimizer": run.optimizer,
        "lr": run.peak_lr,
        "parameters": numel,
        "eval_loss": curve[-1]["eval"],
        "bytes": curve[-1]["bytes"],
        "rounds": job.steps if plain else int(optimizer.metrics()["rounds"]),
        "switch": None if plain else optimizer.last_warmup_step,
        "skipped_steps": 0 if plain else optimizer.skipped_steps,
        "largest_step": finite(largest_step),
        "seconds": round(time.monotonic() - start, 2),
        "curve": curve,
    }


def serve(rank: int, world_size: int, store: str, text: dict[str, dict[str, Tensor]], connection: Connection) -> None:
    """One rank: takes jobs until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its ranks
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        while True:
            connection.send(train(connection.recv(), rank, text))
    except EOFError:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------- the ranks


class Ranks:
    """The processes of one world size, which take one job after the other."""

    def __init__(self, world_size: int, text: dict[str, dict[str, Tensor]], directory: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = os.path.join(directory, f"store{world_size}")
            process = context.Process(target=serve, args=(rank, world_size, store, text, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, job: Job) -> dict[str, Any]:
        """The row of rank 0.

        Raises:
            RuntimeError: If a rank died.
        """
        for connection in self.connections:
            connection.send(job)
        try:
            return [connection.recv() for connection in self.connections][0]
        except EOFError:
            raise RuntimeError(f"a rank of {job.run.name} at {job.world_size} ranks died; see its traceback") from None

    def close(self, *, at_once: bool) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            if not at_once:
                process.join(timeout=20)
            process.kill()
            process.join()


def run_all(todo: Sequence[Job], rows_file: Path) -> None:
    """Run the jobs, each of which appends its row."""
    text = prepare_text()
    pools: dict[int, Ranks] = {}
    done_steps, start = 0.0, time.monotonic()
    all_steps = sum(job.steps * job.world_size**0.5 for job in todo)  # more ranks cost more, if not as many times
    at_once = True
    with tempfile.TemporaryDirectory() as directory:
        try:
            for number, job in enumerate(todo, start=1):
                if job.world_size not in pools:
                    pools[job.world_size] = Ranks(job.world_size, text, directory)
                row = pools[job.world_size].run(job)
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


def read_rows(rows_file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []


# ------------------------------------------------------------------------------------------------------- tables


Rows = dict[int, dict[str, Any]]  # by seed


class Results:
    """The rows that belong to a report: those with its numbers of steps and its seeds."""

    def __init__(self, rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
        self.rows = [
            row
            for row in rows
            if row["name"] in ALL_RUNS
            and row["steps"] == steps_of(ALL_RUNS[row["name"]], arguments)
            and row["seed"] in arguments.seeds
        ]

    def __call__(self, run: Run | None, world_size: int) -> Rows:
        name = run and run.name
        return {row["seed"]: row for row in self.rows if row["name"] == name and row["world_size"] == world_size}


def reference(run: Run) -> Run | None:
    """The uncompressed run that a compressed one is compared with."""
    if run.optimizer in UNCOMPRESSED:
        return None
    if run.long:
        return ALL_RUNS[PARTNER[run.optimizer]] if run.clip else UNCLIPPED
    return ADAMW if run.tied else ADAMW_UNTIED


def loss_cell(rows: Rows, _: Rows) -> str:
    losses = [row["eval_loss"] for row in rows.values()]
    if None in losses:
        return f"not finite at {losses.count(None)} of {len(losses)} seeds"
    return f"{statistics.fmean(losses):.4f} ({min(losses):.3f} to {max(losses):.3f})"


def difference_cell(rows: Rows, others: Rows) -> str:
    """Of the means; and the smallest and the largest difference at one seed."""
    pairs = [(rows[seed]["eval_loss"], others[seed]["eval_loss"]) for seed in rows.keys() & others.keys()]
    if not pairs or any(None in pair for pair in pairs):
        return ""
    mine, theirs = (statistics.fmean(losses) for losses in zip(*pairs, strict=True))
    each = [100 * (a / b - 1) for a, b in pairs]
    return f"{100 * (mine / theirs - 1):+.2f} ({min(each):+.2f} to {max(each):+.2f})"


def values(rows: Rows, key: str) -> str:
    """A number that is mostly the same at every seed."""
    found = sorted({row[key] for row in rows.values()} - {None})
    return ", ".join(f"{value:,}" for value in found)


def bytes_cell(rows: Rows, others: Rows) -> str:
    sent = statistics.fmean(row["bytes"] for row in rows.values())
    if not others:
        return f"{sent / MB:,.1f}"
    full = statistics.fmean(row["bytes"] for row in others.values())
    return f"{sent / MB:,.1f} ({full / sent:.1f}x fewer)"


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
SWITCH: dict[str, Cell] = {"last step of warmup": lambda rows, _: values(rows, "switch")}
COLUMNS: dict[str, dict[str, Cell]] = {
    "learning rates": LOSS,
    "optimizers": {**DIFFERENCE, **MEGABYTES, "rounds": lambda rows, _: values(rows, "rounds"), **SWITCH},
    "causes": {**DIFFERENCE, **MEGABYTES, **SWITCH},
    "blocks": {**DIFFERENCE, **MEGABYTES, "kB per compressed step": late_step_cell},
    "floors": {**DIFFERENCE, "largest step of any element, in lr": largest_step_cell},
    "controls": {**DIFFERENCE, **MEGABYTES},
    "warmup": {**DIFFERENCE, **MEGABYTES, **SWITCH},
}


def table(group: str, results: Results, arguments: argparse.Namespace) -> str:
    """The rows of one group as Markdown."""
    columns = COLUMNS[group]
    lines = [["run", "ranks", "seeds", *columns], ["---"] + ["---:"] * (len(columns) + 2)]
    for world_size in arguments.world_sizes[:1] if group in ONE_WORLD_SIZE else arguments.world_sizes:
        for run in RUNS[group].values():
            if rows := results(run, world_size):
                others = results(reference(run), world_size)
                cells = (cell(rows, others) for cell in columns.values())
                lines.append([run.name, str(world_size), str(len(rows)), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# ------------------------------------------------------------------------------------------------------ the report


def plot(path: Path, results: Results, arguments: argparse.Namespace) -> None:
    """Evaluation loss of the group "optimizers" against steps and bytes: means over seeds, and bands of their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    world_sizes = arguments.world_sizes
    figure, grid = plt.subplots(
        len(world_sizes), 2, figsize=(13, 5 * len(world_sizes)), sharey=True, layout="constrained", squeeze=False
    )
    for world_size, (by_step, by_bytes) in zip(world_sizes, grid, strict=True):
        for run in RUNS["optimizers"].values():
            if rows := results(run, world_size):
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
    compressed, colour = run.optimizer in PARTNER, COLOURS[run.optimizer]
    style = {"linestyle": (0, (4, 1.5)) if compressed else "-", "marker": "s" if compressed else "o", "markersize": 4}
    panel.plot(where, [statistics.fmean(seeds) for seeds in losses], label=run.name, color=colour, **style)
    panel.fill_between(where, [min(s) for s in losses], [max(s) for s in losses], color=colour, alpha=0.15, linewidth=0)


def write_report(path: Path, results: Results, arguments: argparse.Namespace) -> None:
    """The Markdown file, and beside it the picture and the rows, one per line."""
    if path.exists():
        text = path.read_text()
    else:
        text = f"# Convergence\n\n![loss against steps and bytes]({path.stem}.png)\n\n"
        text += "\n\n".join(f"## {group}\n\n{OPEN.format(group)}\n{CLOSE}" for group in COLUMNS) + "\n"
    for group in COLUMNS:
        place = re.compile(f"(?<={re.escape(OPEN.format(group))}\n).*?(?={re.escape(CLOSE)})", re.DOTALL)
        if not place.search(text):
            sys.exit(f"{path} has no place for a table: it needs the lines {OPEN.format(group)} and {CLOSE}")
        lines = table(group, results, arguments)
        text = place.sub(lambda _, lines=lines: f"{lines}\n", text, count=1)
    path.write_text(text)
    plot(path.with_suffix(".png"), results, arguments)
    rows = ",\n".join(json.dumps(rounded(row), separators=(",", ":")) for row in results.rows)
    path.with_suffix(".json").write_text(f"[\n{rows}\n]\n")


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return round(value, 5) if isinstance(value, float) else value


# --------------------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 4], help="numbers of ranks (2 4)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of model and data (0 1 2)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the group 'optimizers' (%(default)s)")
    parser.add_argument("--ablation-steps", type=int, default=300, help="steps of all other groups (%(default)s)")
    parser.add_argument("--report-only", action="store_true", help="run nothing, report on the runs that there are")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - RUNS.keys() - ALL_RUNS.keys():
        parser.error(f"--only knows no {', '.join(sorted(unknown))}; legal are {', '.join([*RUNS, *ALL_RUNS])}")
    for name in ("steps", "ablation_steps"):
        if getattr(arguments, name) < 10:
            parser.error(f"--{name.replace('_', '-')} must be >= 10, got {getattr(arguments, name)}")
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
    done = {(row["name"], row["world_size"], row["seed"], row["steps"]) for row in read_rows(rows_file)}
    todo = [] if arguments.report_only else [job for job in jobs(arguments) if job.key not in done]
    try:
        if todo:
            run_all(todo, rows_file)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {rows_file}", flush=True)
        sys.exit(130)
    results = Results(read_rows(rows_file), arguments)
    if not results.rows:
        sys.exit(f"{rows_file} holds no run with these numbers of steps and these seeds")
    write_report(arguments.report, results, arguments)
    print(f"wrote {arguments.report}, and its picture and rows beside it")


if __name__ == "__main__":
    main()
