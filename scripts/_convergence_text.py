"""The texts of compare_convergence.py, cut into examples."""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from _common import REPOSITORY
from _convergence_runs import TOKENIZED_AS, Model, Run
from torch import Tensor

RECIPE = REPOSITORY / "recipes" / "causal_lm"
ROW, EXAMPLES, VALIDATION = 4000, 6000, 240  # characters of a row; examples at most

Examples = dict[str, Tensor]  # input_ids, labels: [examples, tokens]
Text = dict[str, Examples]  # "train", "validation"
Texts = dict[tuple[str, Model], Text]


def prepare_texts(runs: Iterable[Run]) -> Texts:
    """The text of every run, in examples for its model."""
    return {key: _prepare(*key) for key in dict.fromkeys((run.text, run.model) for run in runs)}


def _prepare(name: str, model: Model) -> Text:
    """The text's own split, and the recipe's tokenizer."""
    import datasets

    sys.path.insert(0, str(RECIPE))
    import train as recipe
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    options = recipe.DataArguments(block_size=model.tokens)
    sources = {"reference": lambda: recipe.load_text(options), "library": _library}
    text, known = (sources[word]() for word in TOKENIZED_AS[name])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=recipe.train_tokenizer(known["train"], recipe.text_column(known), model.vocabulary),
        bos_token=recipe.END_OF_TEXT,
        eos_token=recipe.END_OF_TEXT,
    )
    blocks = recipe.make_blocks(text, tokenizer, options)
    longest = {"train": EXAMPLES, "validation": VALIDATION}
    return {
        split: {key: torch.tensor(examples[key][: longest[split]]) for key in ("input_ids", "labels")}
        for split, examples in blocks.items()
    }


def _library() -> Any:
    """The source of the standard library's modules; every tenth module is for validation."""
    from datasets import Dataset, DatasetDict

    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rows: dict[str, list[str]] = {"train": [], "validation": []}
    for number, module in enumerate(modules):
        code = module.read_text(encoding="utf-8")
        rows["train" if number % 10 else "validation"] += [code[i : i + ROW] for i in range(0, len(code), ROW)]
    for part in rows.values():
        random.Random(0).shuffle(part)
    return DatasetDict({split: Dataset.from_dict({"text": part}) for split, part in rows.items()})
