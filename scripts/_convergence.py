"""The runs of compare_convergence.py, and one rank of them: texts, models, optimizers and the loop."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import math
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from _common import REPOSITORY, shard
from real_models import CACHE
from rivals import RIVALS, Rival, gradients_of
from torch import Tensor, nn
from torch.nn import functional

from hf_compressopt.collectives.communicator import Communicator

ROW, VALIDATION = 4000, 240  # characters of a row; examples at most
GLOBAL_BATCH = 8  # examples per step, over all ranks
MAX_GRAD_NORM, WEIGHT_DECAY = 1.0, 0.01
EVALUATIONS = 10  # per run, where it has the steps for it; of models and texts that are large fewer
#: The uncompressed optimizer that a compressed one is compared with.
PARTNER = {"OnebitAdam": "AdamW", "ZeroOneAdam": "AdamW", "OnebitLamb": "Lamb"}
#: Of each text, the text itself and the text that its tokenizer was trained on.
TOKENIZED_AS = {
    "reference": ("reference", "reference"),
    "library": ("library", "library"),
    "all of the library": ("all of the library", "all of the library"),
    "reference, after the library": ("reference", "library"),
    "masked words": ("all of the library", "all of the library"),
}
AFTER_LIBRARY: dict[str, Any] = {"text": "reference, after the library", "pretrained": True}
PRETRAINING_STEPS = 1000
FINE_TUNING_RATES = {", fine-tuning, 300 steps": 5e-4, ", fine-tuning at the best rate, 300 steps": 4e-3}
#: Labelled texts, with the folders of real_models.py that they need.
CLASSIFIED = {"topics": (), "snippets": ("minilm", "snippets"), "images": ("mnist",)}
NEEDS = CLASSIFIED | {"library, SmolLM2": ("smollm2",)} | dict.fromkeys(("CoLA", "MRPC", "RTE", "SST-2"), ("minilm",))
#: Shakespeare's works as nanoGPT trains on them, of the package's own data folder; nothing of it is in this repository.
SHAKESPEARE = Path(os.environ.get("SHAKESPEARE", REPOSITORY.parent / "shared" / "data" / "tinyshakespeare.txt"))

#: GLUE as published (arXiv 1804.07461), TASK/train.tsv and TASK/dev.tsv; nothing of it is in this repository either.
GLUE = Path(os.environ.get("GLUE", REPOSITORY.parent / "shared" / "data" / "glue"))

Examples = dict[str, Tensor]  # input_ids, labels: [examples, tokens]; of images pixel_values, labels: [examples]

# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model's size, and the peak learning rates of its runs, by the tables of learning rates."""

    gpt2: bool  # else SmallDecoder
    vocabulary: int
    tokens: int
    adamw_rate: float = 2e-3
    lamb_rate: float = 1e-2
    width: int = 96
    layers: int = 2
    heads: int = 4
    batch: int = GLOBAL_BATCH
    examples: int = 6000  # at most
    dropout: float = 0.1  # of a SmallDecoder
    weight_decay: float = WEIGHT_DECAY
    betas: tuple[float, float] = (0.9, 0.999)
    cosine: tuple[int, float] | None = None  # steps of warmup and the share of the peak rate at the end; else linear


SMALL = Model(False, 1024, 64)
LARGER = Model(True, 2048, 64, 1e-3, width=256, layers=4)  # 3.7M parameters
#: nanoGPT's recipe for a CPU, but for its random order with repetitions: train_shakespeare_char, 4 layers of 128.
NANOGPT = Model(
    *(False, 65, 65, 1e-3, 1e-2),  # 64 tokens, each of which predicts the next
    width=128,
    layers=4,
    batch=12,
    dropout=0.0,
    weight_decay=0.1,
    betas=(0.9, 0.99),
    cosine=(100, 0.1),
)
GPT2_10M = Model(True, 8192, 128, 1e-3, width=320, layers=6, heads=5, examples=16000)
TINY_BERT, MINILM = Model(False, 1024, 128, 1e-3, batch=32), Model(False, 30522, 64, 2e-4, batch=16)
SMOLLM2 = Model(False, 49152, 128, 1e-4, batch=4)
BERT = Model(False, 2048, 64, 5e-4, 2e-3, width=384, layers=6, heads=12, examples=16000)  # MiniLM's shape; 11.6M
VIT = Model(False, 10, 49, 1e-3, 5e-3, width=64, layers=4, batch=64)  # 0.2M parameters; 49 patches of 4 x 4 pixels
CNN = Model(False, 10, 0, 1e-3, 5e-3, width=32, layers=2, batch=64)  # 0.5M parameters


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE: the columns of its files, and the steps and learning rate of MiniLM."""

    sentences: tuple[int, ...]
    label: int
    positive: str  # the label that is class 1
    steps: int  # of 32 examples: three passes, of SST-2 one over a third
    rate: float  # within half a standard error of AdamW's best of GLUE_RATES
    header: bool = True
    share: int = 1  # every so many-th example
    by_length: bool = True  # see grouped(); the rows of MRPC are older

    @property
    def kept(self) -> dict[str, Any]:
        """The options of Run that all runs of the task share."""
        return {"model": Model(False, 30522, 128, self.rate, batch=32), "steps": self.steps, "autocast": True}


@dataclass(frozen=True)
class Run:
    """One configuration, by the name that the tables call it."""

    name: str
    optimizer: str  # "AdamW", "Lamb", "MuonAdamW" or a key of PARTNER
    options: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None  # the model's
    gradients: str = ""  # messages of an uncompressed optimizer's: "int4", "int8"; else full precision
    rival: str = ""  # a key of RIVALS, around AdamW
    rival_options: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)  # of a ZeroOptimizer around AdamW; empty is none
    replicas: int = 0  # that FSDP2 shards; 0 is no FSDP2
    model: Model = SMALL
    text: str = "reference"  # a key of TOKENIZED_AS or CLASSIFIED
    pretrained: bool = False  # on the library's source
    steps: int | None = None  # --steps
    autocast: bool = False  # to bfloat16

    @property
    def peak_lr(self) -> float:
        if self.lr is not None:
            return self.lr
        return self.model.lamb_rate if "Lamb" in self.optimizer else self.model.adamw_rate

    @property
    def plain(self) -> bool:
        """True if the run is one of those that others are compared with."""
        return self.optimizer not in PARTNER and not (self.gradients or self.rival or self.zero)


#: The form of the state, which was an option when most runs were made: see :func:`in_form`.
FLOAT32, COMPACT = {"state": "float32"}, {"state": "compact"}
ADAM_FAMILY = ("AdamW", "int4", "OnebitAdam", "ZeroOneAdam")
PRETRAINING = Run("pretraining", "AdamW", text="library")
#: Of tasks, what all runs share, and the learning rates of AdamW among which the best one was looked for.
TASKS: dict[str, tuple[dict[str, Any], Sequence[float]]] = {
    "10M": ({"model": GPT2_10M, "text": "all of the library", "steps": 1000, "autocast": True}, (1e-3, 2e-3, 4e-3)),
    "SmolLM2": ({"model": SMOLLM2, "text": "library, SmolLM2", "steps": 200}, (5e-5, 1e-4, 2e-4)),
    "MiniLM": ({"model": MINILM, "text": "snippets", "steps": 150}, (2.5e-5, 5e-5, 1e-4, 2e-4)),
}
NANO: dict[str, Any] = {"model": NANOGPT, "text": "Shakespeare", "steps": 2000}
MASKED: dict[str, Any] = {"model": BERT, "text": "masked words", "steps": 1000, "autocast": True}
GLUE_TASKS = {
    "CoLA": GlueTask((3,), 1, "1", 801, 1e-4, header=False),
    "MRPC": GlueTask((3, 4), 0, "1", 343, 1e-4, by_length=False),
    "RTE": GlueTask((1, 2), 3, "entailment", 233, 1e-4),
    "SST-2": GlueTask((0,), 1, "1", 701, 1e-4, share=3),
}
#: Keys of ``QUANTIZERS`` of which losses are compared.
TRAINED_QUANTIZERS = (
    "int4, squares (ours)",
    "int8 (ours)",
    "4 bits, even, blocks of 128",
    "4 bits, squares, blocks of 64, 8-bit scales",
    "4 bits, squares, blocks of 32, 8-bit scales",
    "NVFP4",
)
GLUE_RATES = (2.5e-5, 5e-5, 1e-4, 2e-4)
BOTH_INT4 = {"stage": 2, "grad_compression": "int4", "param_compression": "int4"}


def in_form(cls: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a class that keeps its state in the form of a run, and the run's other options."""
    others = {name: value for name, value in options.items() if name != "state"}
    if "state" in options:
        cls = type(cls.__name__, (cls,), {"compact": options["state"] == "compact"})
    return cls, others


def named(*runs: Run) -> dict[str, Run]:
    return {run.name: run for run in runs}


def every(
    name: str,
    names: Sequence[str] = ("AdamW", "Lamb", "int4", *PARTNER),
    older: bool = True,
    **kept: Any,
) -> list[Run]:
    """Every optimizer; "int4" is AdamW with low-bit gradients. ``older`` keeps the forms of state of older runs."""
    options = {"OnebitAdam": FLOAT32, "int4": {}} if older else {"int4": COMPACT}
    return [
        Run(f"AdamW, int4 gradients{name}", "AdamW", options["int4"], gradients="int4", **kept)
        if optimizer == "int4"
        else Run(f"{optimizer}{name}", optimizer, options.get(optimizer, {}), **kept)
        for optimizer in names
    ]


def frozen(step: int, name: str, **kept: Any) -> list[Run]:
    """Optimizers that freeze their variance at this step, also in runs that would not."""
    given = {"OnebitAdam": FLOAT32 | {"freeze_step": step}, "ZeroOneAdam": {"freeze_step": step}}
    return [Run(f"{optimizer}, frozen{name}", optimizer, options, **kept) for optimizer, options in given.items()]


def rates(rates_of: dict[str, Sequence[float]], title: str = "{}, lr {:g}", **kept: Any) -> dict[str, Run]:
    """Peak learning rates of uncompressed optimizers."""
    pairs = [(name, lr) for name, values in rates_of.items() for lr in values]
    return named(*(Run(title.format(name, lr), name, lr=lr, **kept) for name, lr in pairs))


def sharded(title: str, replicas: int) -> list[Run]:
    """FSDP2 alone, and with gradients in 4 bits."""
    kept: dict[str, Any] = {"replicas": replicas, "model": LARGER}
    return [Run(title, "AdamW", **kept), Run(f"{title}, int4 gradients", "AdamW", gradients="int4", **kept)]


def rival(title: str, name: str, kept: dict[str, Any] | None = None, **options: Any) -> Run:
    """A run of AdamW by another method."""
    return Run(title, "AdamW", rival=name, rival_options=options, **(kept or {}))


def from_scratch(name: str, **kept: Any) -> list[Run]:
    """All methods on an architecture."""
    return [
        *every(f", {name}", older=False, **kept),
        Run(f"AdamW, int8 gradients, {name}", "AdamW", COMPACT, gradients="int8", **kept),
        Run(f"ZeRO-2 and AdamW, int4 both ways, {name}", "AdamW", zero=BOTH_INT4, **kept),
        Run(f"OnebitAdam, variance_interval=0, {name}", "OnebitAdam", {"variance_interval": 0}, **kept),
        Run(f"ZeroOneAdam, variance_interval=0, {name}", "ZeroOneAdam", {"variance_interval": 0}, **kept),
    ]


def glue(name: str) -> list[Run]:
    """The methods on a task of GLUE."""
    kept: dict[str, Any] = {"text": name, **GLUE_TASKS[name].kept}
    early = {"freeze_step": GLUE_TASKS[name].steps // 5}  # else they stay in the warmup stage
    return [
        *every(f", {name}", ("AdamW", "int4", "OnebitAdam"), older=False, **kept),
        Run(f"AdamW, int8 gradients, {name}", "AdamW", COMPACT, gradients="int8", **kept),
        Run(f"ZeRO-2 and AdamW, int4 both ways, {name}", "AdamW", zero=BOTH_INT4, **kept),
        rival(f"AdamW, bfloat16 gradients, {name}", "bfloat16", kept),
        rival(f"AdamW, float8 gradients, {name}", "float8", kept),
        Run(f"OnebitAdam, frozen at 20%, {name}", "OnebitAdam", early, **kept),
        Run(f"ZeroOneAdam, frozen at 20%, {name}", "ZeroOneAdam", early, **kept),
        Run(
            f"OnebitAdam, frozen at 20%, variance_interval=1, {name}",
            "OnebitAdam",
            early | {"variance_interval": 1},
            **kept,
        ),
    ]


#: By group; a run that stands in several groups is run once.
RUNS: dict[str, dict[str, Run]] = {
    "optimizers": named(*every("")),
    "rivals": named(
        Run("AdamW", "AdamW"),
        rival("AdamW, bfloat16 gradients", "bfloat16"),
        rival("AdamW, PowerSGD rank 4", "PowerSGD", rank=4),
        rival("AdamW, LocalSGD, 8 steps", "LocalSGD", interval=8),
        rival("DiLoCo, 32 steps", "DiLoCo", interval=32, outer_lr=0.2),  # by the group "rivals, rates"
        Run("AdamW, int4 gradients, state=compact", "AdamW", COMPACT, gradients="int4"),
        Run("OnebitAdam, state=compact", "OnebitAdam", COMPACT),
        Run("OnebitAdam, ZeRO-1", "OnebitAdam", {"zero_stage": 1}),
        Run("ZeRO-2 and AdamW, int4 both ways", "AdamW", zero=BOTH_INT4),
    ),
    "quantizers": named(*(rival(f"AdamW, {title}", "quantized", quantizer=title) for title in TRAINED_QUANTIZERS)),
    "BERT": named(*from_scratch("BERT", **MASKED)),
    "BERT, LAMB": named(*(Run(f"Lamb, BERT, lr {lr:g}", "Lamb", lr=lr, **MASKED) for lr in (1e-3, 5e-3))),
    "BERT, one rank": named(  # where nothing is compressed, and the variance freezes as on several
        Run("OnebitAdam, variance_interval=0, BERT", "OnebitAdam", {"variance_interval": 0}, **MASKED),
        Run(
            "OnebitAdam, freeze_step=500, variance_interval=0, BERT",
            "OnebitAdam",
            {"freeze_step": 500, "variance_interval": 0},
            **MASKED,
        ),
    ),
    "ViT": named(*from_scratch("ViT", model=VIT, text="images", steps=1000)),
    "CNN": named(*from_scratch("CNN", model=CNN, text="images", steps=1000)),
    "nanoGPT": named(
        *from_scratch("nanoGPT", **NANO),
        rival("AdamW, bfloat16 gradients, nanoGPT", "bfloat16", NANO),
        rival("AdamW, PowerSGD rank 4, nanoGPT", "PowerSGD", NANO, rank=4),
    ),
    "nanoGPT, one rank": named(Run("AdamW, nanoGPT", "AdamW", **NANO)),
    **{name: named(*glue(name)) for name in GLUE_TASKS},
    **{
        f"{name}, rates": rates({"AdamW": GLUE_RATES}, f"{{}}, {name}, lr {{:g}}", text=name, **task.kept)
        for name, task in GLUE_TASKS.items()
    },
    "FSDP2": named(*sharded("FSDP2", 1), *sharded("HSDP", 2)),
    "Muon": named(
        Run("MuonAdamW", "MuonAdamW", model=LARGER),
        Run("MuonAdamW, int4 gradients", "MuonAdamW", gradients="int4", model=LARGER),
    ),
    "fine-tuning": named(
        *(
            run
            for name, lr in FINE_TUNING_RATES.items()
            for run in (
                *every(name, ADAM_FAMILY, lr=lr, steps=300, **AFTER_LIBRARY),
                *frozen(100, name, lr=lr, steps=300, **AFTER_LIBRARY),
            )
        )
    ),
    "classification": named(
        *every(", topics", ADAM_FAMILY, model=TINY_BERT, text="topics", steps=600),
        *frozen(120, ", topics", model=TINY_BERT, text="topics", steps=600),
        *every(", MiniLM", ADAM_FAMILY, **TASKS["MiniLM"][0]),
    ),
    "SmolLM2": named(*every(", SmolLM2", ADAM_FAMILY, **TASKS["SmolLM2"][0])),
    "10M": named(*every(", 10M", ADAM_FAMILY, older=False, **TASKS["10M"][0])),
    **{f"{k}, rates": rates({"AdamW": lrs}, f"{{}}, {k}, lr {{:g}}", **kept) for k, (kept, lrs) in TASKS.items()},
    "fine-tuning rates": rates(
        {"AdamW": (2e-3, 4e-3, 8e-3)}, "{}, fine-tuning, lr {:g}, 300 steps", steps=300, **AFTER_LIBRARY
    ),
    "learning rates": rates({"AdamW": (1e-3, 2e-3, 4e-3, 8e-3), "Lamb": (5e-3, 1e-2, 2e-2)}),
    "rivals, rates": named(
        *(
            rival(
                f"DiLoCo, 32 steps, outer lr {outer:g}, 300 steps",
                "DiLoCo",
                {"steps": 300},
                interval=32,
                outer_lr=outer,
            )
            for outer in (0.1, 0.2, 0.4, 0.7, 1.0)
        )
    ),
}
#: Groups by which defaults were chosen: with seeds of their own.
TUNING = tuple(name for name in RUNS if "rates" in name)
#: Groups that run at some numbers of ranks only, whatever --world-sizes says.
WORLD_SIZES = {
    **dict.fromkeys(("learning rates", "fine-tuning rates", "classification", "SmolLM2"), (2,)),
    **dict.fromkeys((f"{name}, rates" for name in (*TASKS, *GLUE_TASKS)), (2,)),
    **dict.fromkeys((*GLUE_TASKS, "BERT", "BERT, LAMB", "ViT", "CNN"), (2,)),
    "nanoGPT": (2, 4),
    **dict.fromkeys(("nanoGPT, one rank", "BERT, one rank"), (1,)),
    **dict.fromkeys(("rivals, rates", "fine-tuning", "FSDP2", "Muon", "10M"), (4,)),
    "quantizers": (2,),
}
ALL_RUNS = {name: run for group in RUNS.values() for name, run in group.items()}


def partner(run: Run) -> Run | None:
    """The uncompressed run that a compressed one is compared with, of the same length, model and text."""
    if run.plain:
        return None
    optimizer = PARTNER.get(run.optimizer, run.optimizer)
    alike = ("model", "text", "pretrained", "steps", "peak_lr", "replicas")
    for other in ALL_RUNS.values():
        if other.plain and other.optimizer == optimizer:
            if all(getattr(other, name) == getattr(run, name) for name in alike):
                return other
    return None


# -- texts and models -------------------------------------------------------------------------------------------------


def recipe_of(name: str) -> ModuleType:
    """The script of a recipe, as a module."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", REPOSITORY / "recipes" / name / "train.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing(run: Run) -> list[str]:
    """The models and data that a run needs, and that are not there."""
    if run.text == "Shakespeare" and not SHAKESPEARE.exists():
        return [f"{SHAKESPEARE} (or give SHAKESPEARE=FILE)"]
    if run.text in GLUE_TASKS and not GLUE.exists():
        return [f"{GLUE} (or give GLUE=FOLDER)"]
    return [name for name in NEEDS.get(run.text, ()) if not (CACHE / name).exists()]


@cache
def classified(name: str) -> tuple[ModuleType, Any, Any, Any]:
    """The recipe of labelled texts, its arguments, and of a labelled text the tokenizer and the rows."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    recipe = recipe_of("text_classification")
    if name == "topics":
        given: dict[str, Any] = {"tiny": True}
    else:
        model, files = (CACHE / folder for folder in CLASSIFIED[name])
        given = {f"{split}_file": str(files / f"{split}.csv") for split in ("train", "validation")}
        given["model_name_or_path"] = str(model)
    arguments = recipe.Arguments(**given)
    rows = recipe.load_rows(arguments)
    if arguments.tiny:
        trained = recipe.Tokenizer.from_str(recipe.train_tokenizer(list(rows["train"]["text"])))
        return recipe, arguments, PreTrainedTokenizerFast(tokenizer_object=trained, **recipe.SPECIAL_TOKENS), rows
    return recipe, arguments, AutoTokenizer.from_pretrained(arguments.model_name_or_path), rows


@cache
def examples_of(name: str, model: Model) -> dict[str, Examples]:
    """The text's own split in examples for a model, with the recipe's tokenizer."""
    import datasets
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    if name == "images":
        return _images()
    if name == "Shakespeare":
        return _shakespeare(model.tokens)
    if name in GLUE_TASKS:
        return _glue(name, model.tokens)
    if name in CLASSIFIED:
        _, _, words, rows = classified(name)
        kept: dict[str, Any] = {"truncation": True, "max_length": model.tokens, "padding": "max_length"}
        return {
            split: dict(words(list(part["text"]), return_tensors="pt", return_token_type_ids=False, **kept))
            | {"labels": torch.tensor(part["label"])}
            for split, part in rows.items()
        }
    recipe = recipe_of("causal_lm")
    options = recipe.DataArguments(block_size=model.tokens)
    sources = {"reference": lambda: recipe.load_text(options), "library": _library}
    sources["all of the library"] = partial(_library, "**/*.py")
    if model == SMOLLM2:
        text, tokenizer = _library(), AutoTokenizer.from_pretrained(CACHE / "smollm2")
    else:
        text, known = (sources[word]() for word in TOKENIZED_AS[name])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=recipe.train_tokenizer(known["train"], recipe.text_column(known), model.vocabulary),
            bos_token=recipe.END_OF_TEXT,
            eos_token=recipe.END_OF_TEXT,
        )
    blocks = recipe.make_blocks(text, tokenizer, options)
    longest = {"train": model.examples, "validation": VALIDATION}
    found = {
        split: {key: torch.tensor(examples[key][: longest[split]]) for key in ("input_ids", "labels")}
        for split, examples in blocks.items()
    }
    if name == "masked words":
        found["validation"] = masked(found["validation"], model, torch.Generator().manual_seed(0))
    return found


def masked(examples: Examples, model: Model, generator: torch.Generator) -> Examples:
    """Examples as BERT masks them (arXiv 1810.04805): of 15 % of the words 80 % are hidden, 10 % are any words."""
    words, share = examples["input_ids"], torch.rand(examples["input_ids"].shape, generator=generator)
    anything = torch.randint(model.vocabulary, words.shape, generator=generator)
    hidden = torch.where(share < 0.12, model.vocabulary, torch.where(share < 0.135, anything, words))
    return {"input_ids": hidden, "labels": words.masked_fill(share >= 0.15, -100)}


def _library(files: str = "*.py") -> Any:
    """The source of modules of the standard library; every tenth module is for validation."""
    from datasets import Dataset, DatasetDict

    modules = [p for p in sorted(Path(sysconfig.get_path("stdlib")).glob(files)) if "site-packages" not in p.parts]
    rows: dict[str, list[str]] = {"train": [], "validation": []}
    for number, module in enumerate(modules):
        code = module.read_text(encoding="utf-8", errors="ignore")  # tests have files in other encodings
        rows["train" if number % 10 else "validation"] += [code[i : i + ROW] for i in range(0, len(code), ROW)]
    for part in rows.values():
        random.Random(0).shuffle(part)
    return DatasetDict({split: Dataset.from_dict({"text": part}) for split, part in rows.items()})


def _shakespeare(tokens: int) -> dict[str, Examples]:
    """Characters as nanoGPT numbers and divides them: any window of nine tenths; the rest, each character once."""
    text = SHAKESPEARE.read_text()
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[character] for character in text])
    first = int(0.9 * len(numbers))
    parts = {"train": numbers[:first].unfold(0, tokens, 1), "validation": numbers[first:].unfold(0, tokens, tokens - 1)}
    return {split: {"input_ids": windows, "labels": windows} for split, windows in parts.items()}


def _glue(name: str, tokens: int) -> dict[str, Examples]:
    """The training and the development set of a task, by MiniLM's tokenizer."""
    from transformers import AutoTokenizer

    task = GLUE_TASKS[name]
    words = AutoTokenizer.from_pretrained(CACHE / "minilm")
    found: dict[str, Examples] = {}
    for split, file, every_nth in (("train", "train.tsv", task.share), ("validation", "dev.tsv", 1)):
        with (GLUE / name / file).open(encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[task.header :: every_nth]
        sentences = [[row[column] for row in rows] for column in task.sentences]
        kept: dict[str, Any] = {"truncation": True, "max_length": tokens, "padding": "max_length"}
        labels = torch.tensor([int(row[task.label] == task.positive) for row in rows])
        found[split] = dict(words(*sentences, return_tensors="pt", **kept)) | {"labels": labels}
    return found


def _images() -> dict[str, Examples]:
    """Images of [1, 28, 28] pixels from 0 to 1, in an order of their own; the last 1,000 are for validation."""
    with gzip.open(CACHE / "mnist" / "mnist.csv.gz", "rt") as lines:
        rows = torch.tensor([[*map(int, line.split(","))] for line in lines], dtype=torch.uint8)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    pixels, labels = rows[:, :-1].view(-1, 1, 28, 28) / 255, rows[:, -1].long()
    return {
        "train": {"pixel_values": pixels[:-1000], "labels": labels[:-1000]},
        "validation": {"pixel_values": pixels[-1000:], "labels": labels[-1000:]},
    }


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and with a residual connection, no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Args and returns: [examples, tokens, width]."""
        examples, tokens, width = x.shape
        parts = self.attend(self.before_attention(x)).view(examples, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [examples, heads, tokens, width of a head]
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(examples, tokens, width))
        return x + self.narrow(functional.gelu(self.widen(self.before_feed(x))))


class SmallDecoder(nn.Module):
    """A causal language model that takes few operators, for many runs on a slow machine."""

    def __init__(self, size: Model) -> None:
        super().__init__()
        self.dropout = size.dropout
        self.words, self.places = (nn.Embedding(count, size.width) for count in (size.vocabulary, size.tokens))
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.dropout = size.dropout
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if size == NANOGPT:  # as GPT-2: less where residual connections add up
            for block in self.blocks:
                for layer in (block.project, block.narrow):
                    nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * size.layers))
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of the tokens that have a label; both arguments [examples, tokens]."""
        x = functional.dropout(self.words(input_ids) + self.places.weight, self.dropout, self.training)
        logits = self.head(self.norm(self.blocks(x)))[:, :-1]
        return functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


class SmallConvolutions(nn.Module):
    """Two convolutions, each with a maximum over 2 x 2 pixels, and two linear layers, for images of 28 x 28 pixels."""

    def __init__(self, size: Model) -> None:
        super().__init__()
        wide = 2 * size.width
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, size.width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(size.width, wide, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(wide * 7 * 7, 128), nn.ReLU(), nn.Linear(128, size.vocabulary)),
        )

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        """Mean loss and logits; pixel_values: [images, 1, 28, 28], labels: [images] int64."""
        logits = self.layers(pixel_values)
        return SimpleNamespace(loss=functional.cross_entropy(logits, labels), logits=logits)


def make_model(run: Run, seed: int, start: Path) -> nn.Module:
    """The model of a run, from scratch or from the file of a pretrained one."""
    size = run.model
    torch.manual_seed(seed)
    sizes = {"hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": size.heads}
    sizes["intermediate_size"] = 4 * size.width
    if size == CNN:
        return SmallConvolutions(size)
    if run.text == "images":
        from transformers import ViTConfig, ViTForImageClassification

        pixels = {"image_size": 28, "patch_size": 4, "num_channels": 1, "num_labels": size.vocabulary}
        return ViTForImageClassification(ViTConfig(**sizes, **pixels))
    if run.text == "masked words":
        from transformers import BertConfig, BertForMaskedLM

        words = {"vocab_size": size.vocabulary + 1, "max_position_embeddings": size.tokens}  # one stands for a mask
        return BertForMaskedLM(BertConfig(**sizes, **words))
    if run.text in GLUE_TASKS:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(CACHE / "minilm", num_labels=2).train()
    if run.text in CLASSIFIED:
        recipe, arguments, words, rows = classified(run.text)
        made: nn.Module = recipe.make_model(arguments, words, rows["train"].features["label"].names)
        return made.train()
    if size == SMOLLM2:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(CACHE / "smollm2", dtype=torch.float32, use_cache=False).train()
    if size.gpt2:
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads, "n_positions": size.tokens}
        kept = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "attn_pdrop": 0.0}  # as the recipe's
        return GPT2LMHeadModel(GPT2Config(vocab_size=size.vocabulary, **shape, **kept))
    model = SmallDecoder(size)
    if run.pretrained:
        model.load_state_dict(torch.load(start, weights_only=True))
    return model


def loss_of(model: nn.Module, batch: Examples) -> tuple[Tensor, Tensor | None]:
    """Mean loss per token, or per row of a labelled text; and the classes found, [rows] int64."""
    if (mask := batch.get("attention_mask")) is not None:
        longest = int(mask.sum(dim=1).max())
        batch = {name: values[:, :longest] if values.ndim > 1 else values for name, values in batch.items()}
    found = model(**batch)
    if isinstance(found, Tensor) or batch["labels"].ndim > 1:
        return (found if isinstance(found, Tensor) else found.loss), None
    return found.loss, found.logits.detach().argmax(-1)


def pretrain(file: Path) -> None:
    """Train the model that fine-tuning starts from with AdamW on one rank, and save it."""
    torch.set_num_threads(1)
    model = make_model(PRETRAINING, 0, file)
    size = PRETRAINING.model
    optimizer = torch.optim.AdamW(param_groups(model, size.weight_decay), lr=PRETRAINING.peak_lr)
    scheduler = schedule(optimizer, PRETRAINING_STEPS, size)
    examples = examples_of(PRETRAINING.text, PRETRAINING.model)["train"]
    for batch in batches(examples, PRETRAINING_STEPS, GLOBAL_BATCH, 0, 0, 1):
        loss_of(model, batch)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), file)


# -- one rank ---------------------------------------------------------------------------------------------------------


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Param groups as Trainer's: no decay of vectors."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def schedule(optimizer: torch.optim.Optimizer, steps: int, model: Model) -> torch.optim.lr_scheduler.LRScheduler:
    """Trainer's linear one, with 10 % warmup, or the model's own."""
    from transformers import get_linear_schedule_with_warmup

    if model.cosine is not None:
        warmup, last = model.cosine

        def share(step: int) -> float:
            """The share of the peak rate, as nanoGPT's get_lr."""
            if step < warmup:
                return (step + 1) / (warmup + 1)
            passed = min(1.0, (step - warmup) / (steps - warmup))
            return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * passed))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    return get_linear_schedule_with_warmup(optimizer, max(1, steps // 10), steps)


def grouped(order: Tensor, lengths: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The same examples, in batches of about one length: 50 batches at a time are sorted, then all are shuffled.

    Trainer's group_by_length sorts as many; its batches stay in the order of their lengths.
    """
    by_length = torch.cat([part[lengths[part].argsort()] for part in order.split(50 * size)]).view(-1, size)
    shuffled = by_length[torch.randperm(len(by_length), generator=generator)]
    return shuffled[:, torch.randperm(size, generator=generator)].flatten()


def batches(
    examples: Examples, steps: int, size: int, seed: int, rank: int, world_size: int, by_length: bool = False
) -> Iterator[Examples]:
    """This rank's part of every global batch of a size; the global batches depend on the seed alone."""
    count, generator = len(examples["labels"]), torch.Generator().manual_seed(seed)
    passes = math.ceil(steps * size / count)
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(passes)])[: steps * size]
    if by_length:
        order = grouped(order, examples["attention_mask"].sum(dim=1), size, generator)
    for step in range(steps):
        mine = order[step * size : (step + 1) * size].chunk(world_size)[rank]
        yield {name: values[mine] for name, values in examples.items()}


class Training:
    """The optimizer of a run, with the exchange and the clipping of its gradients.

    ours and others: the ranks, whose bytes count, and those of evaluation; None are those of torch.distributed.
    """

    def __init__(
        self,
        run: Run,
        steps: int,
        model: nn.Module,
        ours: Communicator | None = None,
        others: Communicator | None = None,
    ) -> None:
        import hf_compressopt
        from hf_compressopt.collectives.torch_dist import TorchCommunicator

        mesh = shard(model, run.replicas) if run.replicas else None
        self.run, self.params, groups = run, list(model.parameters()), param_groups(model, run.model.weight_decay)
        self.ours, self.others = ours or TorchCommunicator(), others or TorchCommunicator()
        self.compressed, self.rival, self.low_bit, self.sharded = run.optimizer in PARTNER, None, None, None
        options: dict[str, Any] = {"lr": run.peak_lr, "betas": run.model.betas}
        if self.compressed or run.zero:
            options["communicator"] = self.ours
        elif run.text in GLUE_TASKS:
            options["fused"] = True
        if self.compressed:
            cls, own = in_form(getattr(hf_compressopt, run.optimizer), run.options)
            self.optimizer = cls(groups, **options, **own)
            self.optimizer.scale_schedule(steps, given=run.options)
        elif run.zero:
            self.optimizer = hf_compressopt.ZeroOptimizer(groups, torch.optim.AdamW, **options, **run.zero)
        elif run.optimizer == "MuonAdamW":
            self.optimizer = hf_compressopt.MuonAdamW(model, weight_decay=run.model.weight_decay, **options)
        else:
            self.optimizer = (torch.optim.AdamW if run.optimizer == "AdamW" else hf_compressopt.Lamb)(groups, **options)
        if run.gradients and mesh is not None:
            self.sharded = hf_compressopt.compress_fsdp(model, mesh, run.gradients)
        elif run.gradients:
            cls, own = in_form(hf_compressopt.GradientCompression, FLOAT32 | run.options)
            self.low_bit = cls(model.named_parameters(), run.gradients, communicator=self.ours, **own)
        elif run.rival:
            self.rival = RIVALS[run.rival](self.params, self.ours, **run.rival_options)

    def exchange(self) -> None:
        """Exchange the gradients, and clip them."""
        from hf_compressopt import average_gradients

        if self.run.replicas:
            pass  # FSDP2 does while backward runs
        elif self.run.zero:
            self.optimizer.finish_gradients()  # sent while backward ran
        elif self.compressed:
            average_gradients(self.optimizer)
        elif self.low_bit is not None:
            self.low_bit.average_gradients()
        elif self.rival is not None:
            self.rival.gradients()
        else:
            Rival(self.params, self.ours).average_(gradients_of(self.params))
        if self.compressed or self.run.zero:
            self.optimizer.clip_grad_norm_(MAX_GRAD_NORM)
        else:
            nn.utils.clip_grad_norm_(self.params, MAX_GRAD_NORM)

    def saved_parameters(self) -> AbstractContextManager[None]:
        """Inside, the parameters are those that a saved model has."""
        if self.run.zero:
            return self.optimizer.masters_in_parameters()
        return self.optimizer.averaged_parameters() if self.compressed else nullcontext()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, examples: Examples) -> tuple[float, dict[str, float]]:
        """Mean loss on the whole validation text, of which each rank reads a part; and the scores of classes."""
        model.eval()
        mine = {name: v.tensor_split(self.others.world_size)[self.others.rank] for name, v in examples.items()}
        losses = torch.zeros(2, dtype=torch.float64)  # the sum, examples
        counts = torch.zeros(2, 2, dtype=torch.float64)  # of class 1 or another, by what it is and what was found
        right = torch.zeros(1, dtype=torch.float64)
        with self.saved_parameters():
            for start in range(0, len(mine["labels"]), 16):  # as often on all ranks: FSDP2 gathers each time
                batch = {name: values[start : start + 16] for name, values in mine.items()}
                labels, (loss, classes) = batch["labels"], loss_of(model, batch)
                losses += torch.tensor([float(loss) * len(labels), len(labels)], dtype=torch.float64)
                if classes is not None:
                    right += int((classes == labels).sum())
                    counts += torch.bincount(2 * (labels == 1) + (classes == 1), minlength=4).view(2, 2)
        for sums in (losses, right, counts.view(-1)):
            self.others.all_reduce(sums).wait()
        model.train()
        scores = {"accuracy": float(right / losses[1])}
        if self.run.text == "CoLA":
            scores["matthews"] = matthews(counts)
        return float(losses[0] / losses[1]), scores


def matthews(counts: Tensor) -> float:
    """The Matthews correlation of two classes; counts: [2, 2], rows by what they are and what was found."""
    (no, wrongly), (missed, yes) = counts.tolist()
    product = (no + wrongly) * (missed + yes) * (no + missed) * (wrongly + yes)
    return (yes * no - wrongly * missed) / math.sqrt(product) if product else 0.0


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def train(order: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate a run: its name, seed, steps and, of a pretrained model, the file. Returns its row."""
    began, run, seed, steps = time.monotonic(), ALL_RUNS[order["name"]], order["seed"], order["steps"]
    text, model = examples_of(run.text, run.model), make_model(run, seed, Path(order["start"]))
    training = Training(run, steps, model)
    optimizer, ours, others = training.optimizer, training.ours, training.others
    torch.manual_seed(seed * ours.world_size + ours.rank)  # of dropout
    evaluations = 1 if run.text in NEEDS else 4 if run.text in ("Shakespeare", "masked words") else EVALUATIONS
    scheduler, interval = schedule(optimizer, steps, run.model), max(5, math.ceil(steps / evaluations))
    loss_sum, loss_steps = torch.zeros(()), 0
    curve = []
    by_length = run.text in GLUE_TASKS and GLUE_TASKS[run.text].by_length
    mine = batches(text["train"], steps, run.model.batch, seed, ours.rank, ours.world_size, by_length)
    generator = torch.Generator().manual_seed(seed * ours.world_size + ours.rank)
    for step, batch in enumerate(mine, start=1):
        if run.text == "masked words":
            batch = masked(batch, run.model, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
            loss, _ = loss_of(model, batch)
        loss.backward()
        loss_sum, loss_steps = loss_sum + loss.detach(), loss_steps + 1
        training.exchange()
        optimizer.step()
        if training.rival is not None:
            training.rival.parameters(last=step == steps)
        scheduler.step()
        optimizer.zero_grad()
        if step % interval == 0 or step == steps:
            eval_loss, scores = training.evaluate(model, text["validation"])
            others.all_reduce(loss_sum).wait()
            train_loss = float(loss_sum) / loss_steps / ours.world_size
            sent = (training.sharded or ours).traffic.total_bytes  # FSDP2's own messages are not counted
            curve.append({"step": step, "eval": finite(eval_loss), "train": finite(train_loss), "bytes": sent})
            loss_sum, loss_steps = torch.zeros(()), 0
    return {
        "name": run.name,
        "world_size": ours.world_size,
        "seed": seed,
        "steps": steps,
        "optimizer": run.optimizer,
        "options": run.options,
        "lr": run.peak_lr,
        "parameters": sum(p.numel() for p in training.params),
        "eval_loss": curve[-1]["eval"],
        **(scores if run.text in CLASSIFIED or run.text in GLUE_TASKS else {}),
        "bytes": curve[-1]["bytes"],
        "rounds": int(optimizer.metrics()["rounds"]) if training.compressed else steps,
        "switch": optimizer.schedule.last_warmup_step if training.compressed else None,
        "seconds": round(time.monotonic() - began, 2),
        "curve": curve,
    }
