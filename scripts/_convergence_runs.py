"""The runs that compare_convergence.py compares."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field
from typing import Any

VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS = 2048, 96, 2, 4, 128
GLOBAL_BATCH = 8  # examples per step, over all ranks
MAX_GRAD_NORM, WEIGHT_DECAY = 1.0, 0.01
EVALUATIONS = 10  # per run, where it has the steps for it
LEARNING_RATE = {"AdamW": 2e-3, "Lamb": 1e-2}  # by the table "learning rates"
PARTNER = {"OnebitAdam": "AdamW", "ZeroOneAdam": "AdamW", "OnebitLamb": "Lamb"}
UNCOMPRESSED = tuple(LEARNING_RATE)
ONE_WORLD_SIZE = ("learning rates", "warmup")  # groups that run at the first of --world-sizes only
MB = 1e6


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
