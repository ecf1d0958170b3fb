"""The runs that compare_convergence.py compares."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

GLOBAL_BATCH = 8  # examples per step, over all ranks
MAX_GRAD_NORM, WEIGHT_DECAY = 1.0, 0.01
EVALUATIONS = 10  # per run, where it has the steps for it
PARTNER = {"OnebitAdam": "AdamW", "ZeroOneAdam": "AdamW", "OnebitLamb": "Lamb"}
#: Optimizers whose gradients or steps this package does not compress; the rivals' own stand in scripts/rivals.
UNCOMPRESSED = ("AdamW", "Lamb", "DeMo", "SignSGD")
#: Groups that run at some numbers of ranks only, whatever --world-sizes says.
WORLD_SIZES = {
    **dict.fromkeys(("learning rates", "learning rates, GPT-2", "fine-tuning rates"), (2,)),
    "clip": (8,),
    "OnebitLamb's warmup": (8,),
    "rivals, rates": (4,),
    **dict.fromkeys(("texts", "fine-tuning", "warmup bits", "max_update", "short runs", "variance stage"), (4,)),
    **dict.fromkeys(("blocks", "floors", "controls"), (2, 4)),
    "many ranks": (16, 32, 64),
}
#: Groups by which defaults were chosen: with seeds of their own.
TUNING = (
    "learning rates",
    "fine-tuning rates",
    "rivals, rates",
    "warmup bits",
    "clip",
    "max_update",
    "short runs",
    "variance stage",
    "OnebitLamb's warmup",
)
ONE_SEED = ("many ranks", "rivals, rates", "learning rates", "learning rates, GPT-2", "fine-tuning rates")
MB = 1e6
#: Of each text, the text itself and the text that its tokenizer was trained on.
TOKENIZED_AS = {
    "reference": ("reference", "reference"),
    "library": ("library", "library"),
    "reference, after the library": ("reference", "library"),
}
PRETRAINING_STEPS, PRETRAINED = 1000, "pretrained.pt"
AFTER_LIBRARY: dict[str, Any] = {"text": "reference, after the library", "pretrained": True}
FINE_TUNING_RATE = 5e-4


@dataclass(frozen=True)
class Model:
    """A model's size, and the peak learning rates of its runs, by the tables of learning rates.

    `gpt2` says whether it is Transformers' GPT-2, or the decoder of _convergence_training.py.
    """

    gpt2: bool
    adamw_rate: float
    lamb_rate: float
    vocabulary: int
    tokens: int
    width: int = 96
    layers: int = 2
    heads: int = 4


SMALL = Model(gpt2=False, adamw_rate=2e-3, lamb_rate=1e-2, vocabulary=1024, tokens=64)
GPT2 = Model(gpt2=True, adamw_rate=2e-3, lamb_rate=1e-2, vocabulary=2048, tokens=128)


@dataclass(frozen=True)
class Run:
    """One configuration.

    Attributes:
        name: What the tables call it.
        optimizer: A key of UNCOMPRESSED or PARTNER.
        options: Options of a compressed optimizer beside its defaults.
        lr: Peak learning rate; that of the optimizer or its partner where None.
        freeze: Last warmup step as a share of the steps; 0 is one step; None leaves it to Trainer's default.
        tied: Whether the input embedding is the output layer too.
        error_feedback: False forgets the errors after every step.
        clip: Clip to MAX_GRAD_NORM "by the optimizer", "by the norm of the mean" (which takes an all-reduce of local
            gradients that no count has), or not at all ("").
        long: Whether it takes --steps, or --ablation-steps.
        gradients: Messages of an uncompressed optimizer's gradients: "int4", "int8", or "" for full precision.
        rival: A key of rivals.RIVALS, a method around AdamW, or "".
        rival_options: Its options.
        zero: Options of a ZeroOptimizer around an uncompressed optimizer; empty is no ZeRO.
        model: The model.
        text: A key of TOKENIZED_AS.
        bf16: Whether the parameters are bfloat16.
        pretrained: Whether it starts from a model that was trained on the library's source.
        steps: Its steps; None leaves them to `long`.
        batch: Examples per step, over all ranks.
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
    gradients: str = ""
    rival: str = ""
    rival_options: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    model: Model = SMALL
    text: str = "reference"
    bf16: bool = False
    pretrained: bool = False
    steps: int | None = None
    batch: int = GLOBAL_BATCH

    @property
    def peak_lr(self) -> float:
        if self.lr is not None:
            return self.lr
        return self.model.lamb_rate if "Lamb" in self.optimizer else self.model.adamw_rate


def named(*runs: Run) -> dict[str, Run]:
    return {run.name: run for run in runs}


PRETRAINING = Run("pretraining", "AdamW", text="library")
ADAMW, ADAMW_UNTIED = (Run(f"AdamW, {word}", "AdamW", tied=word == "tied", model=GPT2) for word in ("tied", "untied"))
#: The options of the tables that were made before the first stage had low-bit gradients, and states 8 bits.
EARLIER: dict[str, Any] = {"clip": "local", "warmup_bits": 32, "state": "float32"}


#: The two forms of the state. All tables but "state" were run with float32.
FLOAT32, COMPACT = {"state": "float32"}, {"state": "compact"}


def earlier(name: str, *, tied: bool = True, freeze: float = 0.2, error_feedback: bool = True, **options: Any) -> Run:
    given, kept = EARLIER | options, {"tied": tied, "freeze": freeze, "error_feedback": error_feedback}
    return Run(name, "OnebitAdam", given, model=GPT2, **kept)


BLOCKS = earlier("blocks of 4096, floor 0.01")


def floor(value: float, *, tied: bool) -> Run:
    return earlier(f"floor {value:g}, {'tied' if tied else 'untied'}", tied=tied, variance_floor=value)


def of_steps(steps: int, suffix: str = "", **kept: Any) -> Run:
    """AdamW in full precision, as the partner of runs of some length."""
    return Run(f"AdamW{suffix}, {steps} steps", "AdamW", steps=steps, **kept)


def every(name: str, names: tuple[str, ...] = ("AdamW", "Lamb", "int4", *PARTNER), **kept: Any) -> dict[str, Run]:
    """Every optimizer with its defaults; "int4" is AdamW with low-bit gradients."""
    runs = []
    for optimizer in names:
        if optimizer == "int4":
            runs.append(Run(f"AdamW, int4 gradients{name}", "AdamW", gradients="int4", **kept))
        else:
            runs.append(Run(f"{optimizer}{name}", optimizer, FLOAT32 if optimizer == "OnebitAdam" else {}, **kept))
    return named(*runs)


def onebit(steps: int, name: str, freeze: float | None = None, clipped: str = Run.clip, **options: Any) -> Run:
    given = FLOAT32 | options
    return Run(f"OnebitAdam, {name}, {steps} steps", "OnebitAdam", given, freeze=freeze, clip=clipped, steps=steps)


def rates(adamw: Sequence[float], lamb: Sequence[float], suffix: str = "", **kept: Any) -> dict[str, Run]:
    """Peak learning rates of the uncompressed optimizers."""
    pairs = [("AdamW", lr) for lr in adamw] + [("Lamb", lr) for lr in lamb]
    return named(*(Run(f"{name}, lr {lr:g}{suffix}", name, lr=lr, long=True, **kept) for name, lr in pairs))


def rival(title: str, name: str, lr: float | None = None, **options: Any) -> Run:
    """A method of scripts/rivals around AdamW, or an optimizer of there."""
    kept: dict[str, Any] = {"long": True, "lr": lr}
    if name in ("DeMo", "SignSGD"):
        return Run(title, name, options, clip="", **kept)
    return Run(title, "AdamW", rival=name, rival_options=options, **kept)


ZERO_INT4 = Run(
    "ZeRO-2 and AdamW, int4 both ways",
    "AdamW",
    zero={"stage": 2, "grad_compression": "int4", "param_compression": "int4"},
    long=True,
)
#: Peak learning rates and outer learning rates of rivals, by the group "rivals, rates".
DEMO_RATE, SIGN_RATE = 3e-3, 2e-3
OUTER_RATES = {8: 0.1, 32: 0.2, 128: 0.7}  # by the number of local steps
ADAM_FAMILY = ("AdamW", "int4", "OnebitAdam", "ZeroOneAdam")
SHORT = (20, 60, 100, 200, 300, 400)
FINE_TUNING = (100, 200, 300)

# A run that stands in several groups is run once.
RUNS: dict[str, dict[str, Run]] = {
    "optimizers": every("", long=True),
    "state": named(
        *(
            run
            for name in PARTNER
            for run in (Run(name, name, FLOAT32, long=True), Run(f"{name}, state=compact", name, COMPACT, long=True))
        ),
        Run("AdamW, int4 gradients", "AdamW", gradients="int4", long=True),
        Run("AdamW, int4 gradients, state=compact", "AdamW", COMPACT, gradients="int4", long=True),
        Run("OnebitAdam, state=compact, clip=late", "OnebitAdam", COMPACT | {"clip": "late"}, long=True),
    ),
    "rivals": named(
        Run("AdamW", "AdamW", long=True),
        rival("AdamW, bfloat16 gradients", "bfloat16"),
        rival("AdamW, PowerSGD rank 1", "PowerSGD", rank=1),
        rival("AdamW, PowerSGD rank 4", "PowerSGD", rank=4),
        rival("AdamW, LocalSGD, 8 steps", "LocalSGD", interval=8),
        *(
            rival(f"DiLoCo, {steps} steps", "DiLoCo", interval=steps, outer_lr=outer)
            for steps, outer in OUTER_RATES.items()
        ),
        *(rival(f"DeMo, k={k}", "DeMo", DEMO_RATE, k=k) for k in (8, 32)),
        rival("signSGD, majority vote", "SignSGD", SIGN_RATE),
        Run("AdamW, int4 gradients", "AdamW", gradients="int4", long=True),
        Run("OnebitAdam, state=compact", "OnebitAdam", COMPACT, long=True),
        *(Run(name, name, {}, long=True) for name in ("ZeroOneAdam", "OnebitLamb")),
        ZERO_INT4,
    ),
    "zero": named(
        Run("AdamW", "AdamW", long=True),
        ZERO_INT4,
        Run("OnebitAdam, ZeRO-1", "OnebitAdam", {"zero_stage": 1}, long=True),
    ),
    "many ranks": every(", batch 64", ADAM_FAMILY, steps=400, batch=64),
    "GPT-2": every(", GPT-2", model=GPT2, long=True),
    "texts": {
        **every(", library, untied", ADAM_FAMILY, text="library", tied=False, long=True),
        **every(", bfloat16", ADAM_FAMILY, bf16=True, long=True),
    },
    "fine-tuning": {
        name: run
        for steps in FINE_TUNING
        for name, run in every(
            f", fine-tuning, {steps} steps", ADAM_FAMILY, lr=FINE_TUNING_RATE, steps=steps, **AFTER_LIBRARY
        ).items()
    },
    "fine-tuning rates": named(
        *(of_steps(200, f", fine-tuning, lr {lr:g}", lr=lr, **AFTER_LIBRARY) for lr in (2e-4, 5e-4, 1e-3, 2e-3))
    ),
    "warmup bits": named(
        of_steps(600), *(onebit(600, f"warmup_bits={bits}", warmup_bits=bits) for bits in (4, 8, 16, 32))
    ),
    "clip": named(
        of_steps(600),
        *(onebit(600, f"clip={clip}", clip=clip) for clip in ("local", "sketch")),
    ),
    "max_update": named(of_steps(600), *(onebit(600, f"max_update={bound}", max_update=bound) for bound in (0, 5, 10))),
    "short runs": named(
        *(
            run
            for steps in SHORT
            for run in (
                of_steps(steps),
                onebit(steps, "defaults"),
                *(onebit(steps, f"frozen at {share:.0%}", freeze=share) for share in (0.2, 0.4)),
            )
        )
    ),
    "variance stage": named(
        of_steps(1000),
        *(
            Run(
                f"ZeroOneAdam, var_freeze_step {share:.0%}",
                "ZeroOneAdam",
                {"var_update_scaler": 1000},  # the variance learns from every step of the stage
                freeze=share,
                steps=1000,
            )
            for share in (0.1, 0.2, 0.3, 0.5)
        ),
    ),
    "OnebitLamb's warmup": named(
        Run("Lamb, 1000 steps", "Lamb", steps=1000),
        *(
            Run(
                f"OnebitLamb, {bits} bits, frozen at {share:.0%}",
                "OnebitLamb",
                {"warmup_bits": bits},
                freeze=share,
                steps=1000,
            )
            for bits, share in ((4, 0.2), (8, 0.2), (32, 0.2), (4, 0.3), (8, 0.3), (4, 0.4))
        ),
    ),
    "blocks": named(
        ADAMW,
        earlier("one scale per message", scale_block=None),
        BLOCKS,
        *(earlier(f"blocks of {size}", scale_block=size) for size in (1024, 512, 256)),
    ),
    "floors": named(
        ADAMW,
        floor(0.0, tied=True),
        BLOCKS,
        floor(0.1, tied=True),
        ADAMW_UNTIED,
        *(floor(value, tied=False) for value in (0.0, 0.01, 0.1)),
    ),
    "controls": named(
        ADAMW,
        BLOCKS,
        earlier("without error feedback", error_feedback=False),
        earlier("without warmup", freeze=0),
    ),
    "rivals, rates": named(
        *(
            replace(run, name=f"{run.name}, lr {lr:g}, 300 steps", lr=lr, steps=300)
            for name, rates_of in (("DeMo", (3e-4, 1e-3, 3e-3, 1e-2)), ("SignSGD", (2e-4, 5e-4, 1e-3, 2e-3, 4e-3)))
            for lr in rates_of
            for run in [rival(name, name)]
        ),
        *(
            replace(
                rival(f"DiLoCo, {interval} steps", "DiLoCo", interval=interval, outer_lr=outer),
                name=f"DiLoCo, {interval} steps, outer lr {outer:g}, {steps} steps",
                steps=steps,
            )
            for interval, steps in ((8, 300), (32, 300), (128, 600))
            for outer in (0.1, 0.2, 0.4, 0.7, 1.0)
        ),
    ),
    "learning rates": rates((1e-3, 2e-3, 4e-3, 8e-3), (5e-3, 1e-2, 2e-2)),
    "learning rates, GPT-2": rates((1e-3, 2e-3, 3e-3), (3e-3, 5e-3, 1e-2, 2e-2), ", GPT-2", model=GPT2),
}
#: Per cent by which the mean of a run of "optimizers" may lie above its uncompressed partner's.
GOALS = {"OnebitAdam": 0.5, "OnebitLamb": 0.5, "AdamW, int4 gradients": 0.5, "ZeroOneAdam": 1.0}
ALL_RUNS = {name: run for group in RUNS.values() for name, run in group.items()}


@dataclass(frozen=True)
class Job:
    """A run at one world size, with one seed and a number of steps."""

    run: Run
    world_size: int
    seed: int
    steps: int
    start: str = ""  # file of the pretrained model

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.run.name, self.world_size, self.seed, self.steps


def steps_of(run: Run, arguments: argparse.Namespace) -> int:
    if run.steps is not None:
        return run.steps
    return arguments.steps if run.long else arguments.ablation_steps


def seeds_of(group: str, arguments: argparse.Namespace) -> list[int]:
    """The seeds of a group's runs."""
    seeds = arguments.tuning_seeds if group in TUNING else arguments.seeds
    return seeds[:1] if group in ONE_SEED else seeds


def world_sizes_of(group: str, arguments: argparse.Namespace) -> Sequence[int]:
    """The numbers of ranks of a group's runs."""
    return WORLD_SIZES.get(group, arguments.world_sizes)


def jobs(arguments: argparse.Namespace) -> list[Job]:
    """The runs that were asked for, group by group, and in each of them seed by seed."""
    found: dict[tuple[str, int, int, int], Job] = {}
    for group, chosen in RUNS.items():
        runs = [run for run in chosen.values() if group in arguments.only or run.name in arguments.only]
        for seed, world_size, run in itertools.product(
            seeds_of(group, arguments), world_sizes_of(group, arguments), runs
        ):
            job = Job(run, world_size, seed, steps_of(run, arguments), str(arguments.output / PRETRAINED))
            found.setdefault(job.key, job)
    return list(found.values())


def partner(run: Run) -> Run | None:
    """The uncompressed run that a compressed one is compared with, of the same length, model and text."""
    if run.optimizer in ("AdamW", "Lamb") and not (run.gradients or run.rival or run.zero):
        return None
    optimizer = PARTNER.get(run.optimizer, run.optimizer)
    if optimizer in ("DeMo", "SignSGD"):  # at a rate of their own
        return RUNS["optimizers"]["AdamW"] if run.long and run.steps is None else None
    alike = ("model", "tied", "long", "text", "bf16", "pretrained", "steps", "batch", "peak_lr")
    for other in ALL_RUNS.values():
        if other.optimizer == optimizer and not (other.gradients or other.rival or other.zero):
            if all(getattr(other, name) == getattr(run, name) for name in alike):
                return other
    return None
