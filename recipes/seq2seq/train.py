"""Sequence to sequence with the Hugging Face Seq2SeqTrainer and a compressed optimizer.

`import hf_compressopt.auto` adds `--optim onebit_adam` and the other compressed optimizers to Trainer. Everything else
is a plain Seq2SeqTrainer script. The README beside this file has the commands.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    set_seed,
)

import hf_compressopt.auto  # noqa: F401  registers the compressed optimizers with Trainer

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv"}
IGNORED = -100  # the label that the loss skips
DATE_FORMATS = ("%d %B %Y", "%B %d, %Y", "%d %b %Y", "%a %d.%m.%Y")  # of the built-in task
TRAIN_ROWS, VALIDATION_ROWS = 20_000, 256
VALIDATION_SHARE = 0.1  # of the training rows, if the data has no validation part


@dataclass
class Arguments:
    """Options of the model and the pairs; give exactly one of the first two."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Pretrained model to fine-tune."})
    tiny: bool = field(default=False, metadata={"help": "Train a byte-level T5 of about 0.7M parameters from scratch."})
    dataset_name: str | None = field(default=None, metadata={"help": "Dataset of the Hub, or a local folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    train_file: str | None = field(default=None, metadata={"help": "Training pairs: .csv, .json or .jsonl."})
    validation_file: str | None = field(default=None, metadata={"help": "Validation pairs, same format."})
    source_column: str = field(default="source", metadata={"help": "The column that the model reads."})
    target_column: str = field(default="target", metadata={"help": "The column that the model learns to write."})
    source_prefix: str = field(default="", metadata={"help": 'Text before each source, such as "summarize: ".'})
    max_source_length: int = field(default=128, metadata={"help": "Tokens; the rest is cut off."})
    max_target_length: int = field(default=128, metadata={"help": "Tokens; the rest is cut off."})

    def __post_init__(self) -> None:
        """Refuse contradictions before anything is loaded."""
        if bool(self.model_name_or_path) == self.tiny:
            raise ValueError("give exactly one of --model_name_or_path and --tiny")
        if self.dataset_name and self.train_file:
            raise ValueError("--dataset_name and --train_file exclude each other: give one, or neither")
        if self.validation_file and not self.train_file:
            raise ValueError("--validation_file needs --train_file")
        for name in filter(None, (self.train_file, self.validation_file)):
            if Path(name).suffix not in FILE_FORMATS or not Path(name).is_file():
                raise ValueError(f"expected a file that exists and ends in {', '.join(FILE_FORMATS)}, got {name}")


def written_dates() -> DatasetDict:
    """Make pairs of dates of two centuries: as people write them, and in ISO 8601 (March 5, 1987 -> 1987-03-05)."""
    draw = random.Random(0)
    first, last = datetime.date(1900, 1, 1).toordinal(), datetime.date(2099, 12, 31).toordinal()
    days = [datetime.date.fromordinal(n) for n in draw.sample(range(first, last + 1), TRAIN_ROWS + VALIDATION_ROWS)]
    rows = {"source": [day.strftime(draw.choice(DATE_FORMATS)) for day in days], "target": list(map(str, days))}
    pairs = Dataset.from_dict(rows)
    return DatasetDict(
        train=pairs.select(range(TRAIN_ROWS)), validation=pairs.select(range(TRAIN_ROWS, TRAIN_ROWS + VALIDATION_ROWS))
    )


def load_pairs(args: Arguments) -> DatasetDict:
    """Load the pairs, with a `train` and a `validation` split."""
    if args.dataset_name:
        loaded = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        files = {"train": args.train_file, "validation": args.validation_file}
        files = {split: name for split, name in files.items() if name}
        loaded = load_dataset(FILE_FORMATS[Path(args.train_file).suffix], data_files=files)
    else:
        loaded = written_dates()
    for option in ("source_column", "target_column"):
        if getattr(args, option) not in loaded["train"].column_names:
            columns = ", ".join(loaded["train"].column_names)
            raise ValueError(f"--{option} must be one of {columns}, got {getattr(args, option)}")
    if "validation" not in loaded:
        parts = loaded["train"].train_test_split(test_size=VALIDATION_SHARE, seed=0)
        loaded = DatasetDict(train=parts["train"], validation=parts["test"])
    return DatasetDict(train=loaded["train"], validation=loaded["validation"])


def make_model(args: Arguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the pretrained model and its tokenizer, or make a small T5 that reads and writes bytes."""
    if args.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        return AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path), tokenizer
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        num_heads=4,
        d_ff=256,
        num_layers=2,
        dropout_rate=0.0,
        tie_word_embeddings=True,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForSeq2SeqLM.from_config(config), tokenizer


def exact_match(tokenizer: PreTrainedTokenizerBase) -> Callable[[EvalPrediction], dict[str, float]]:
    """Make a metric: the share of generated texts that equal their target."""

    def metric(prediction: EvalPrediction) -> dict[str, float]:
        written, wanted = (
            tokenizer.batch_decode(np.where(ids == IGNORED, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        )
        return {"exact_match": float(np.mean([a == b for a, b in zip(written, wanted, strict=True)]))}

    return metric


def main() -> None:
    """Read the arguments, train and evaluate."""
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments), description=__doc__)
    args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    training_args.generation_max_length = training_args.generation_max_length or args.max_target_length

    with training_args.main_process_first(desc="load the pairs"):
        pairs = load_pairs(args)
    model, tokenizer = make_model(args)

    def tokenise(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        sources = [args.source_prefix + text for text in rows[args.source_column]]
        tokens = tokenizer(sources, max_length=args.max_source_length, truncation=True)
        targets = tokenizer(text_target=rows[args.target_column], max_length=args.max_target_length, truncation=True)
        return {**tokens, "labels": targets["input_ids"]}

    with training_args.main_process_first(desc="tokenise the pairs"):
        tokens = pairs.map(tokenise, batched=True, remove_columns=pairs["train"].column_names)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=tokens["train"],
        eval_dataset=tokens["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=IGNORED),
        compute_metrics=exact_match(tokenizer) if training_args.predict_with_generate else None,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    metrics = {"train": result.metrics, "eval": trainer.evaluate()}
    for split, values in metrics.items():
        trainer.log_metrics(split, values)
        trainer.save_metrics(split, values)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # closes the process group: left open, a rank can abort at exit


if __name__ == "__main__":
    main()
