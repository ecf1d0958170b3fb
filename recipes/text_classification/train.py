"""Text classification with the Hugging Face Trainer and a compressed optimizer.

`import hf_compressopt.auto` adds `--optim onebit_adam` and the other compressed optimizers to Trainer. Everything else
is a plain Trainer script. The README beside this file has the commands.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import ModelOutput

import hf_compressopt.auto  # noqa: F401  registers the compressed optimizers with Trainer

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv"}
SPECIAL_TOKENS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
TOPICS = ("compound", "debugger", "specialnames", "string-methods", "types", "typesmapping")  # the longest ones
WORDS_PER_ROW = 16  # of the built-in text
VALIDATION_SHARE = 0.1  # of the training rows, if the data has no validation part


@dataclass
class Arguments:
    """Options of the model and the rows; give exactly one of the first two."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Pretrained model to fine-tune."})
    tiny: bool = field(default=False, metadata={"help": "Train a BERT of about 0.6M parameters from scratch."})
    dataset_name: str | None = field(default=None, metadata={"help": "Dataset of the Hub, or a local folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    validation_split: str = field(default="validation", metadata={"help": "The split to evaluate on."})
    train_file: str | None = field(default=None, metadata={"help": "Training rows: .csv, .json or .jsonl."})
    validation_file: str | None = field(default=None, metadata={"help": "Validation rows, same format."})
    text_columns: list[str] | None = field(
        default=None, metadata={"help": "One or two columns of text. Default: the columns of strings."}
    )
    label_column: str = field(default="label", metadata={"help": "The column of the classes."})
    max_length: int = field(default=128, metadata={"help": "Tokens per example; the rest is cut off."})

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


def topics_of_the_language_reference() -> DatasetDict:
    """Make rows of words, each labelled with one of six topics of Python's language reference.

    A paragraph that several topics share counts for the first. Each paragraph goes to one split as a whole, so that no
    training row continues in a validation row.
    """
    from pydoc_data.topics import topics

    owners: dict[str, int] = {}
    for label, name in enumerate(TOPICS):
        for paragraph in topics[name].split("\n\n"):
            owners.setdefault(" ".join(paragraph.split()), label)
    paragraphs = list(owners.items())
    random.Random(0).shuffle(paragraphs)
    cut = int(len(paragraphs) * (1 - VALIDATION_SHARE))
    features = {"text": [], "label": []}
    splits = {"train": features, "validation": {name: [] for name in features}}
    for number, (paragraph, label) in enumerate(paragraphs):
        words = paragraph.split()
        for start in range(0, len(words) - WORDS_PER_ROW // 2, WORDS_PER_ROW):
            rows = splits["train" if number < cut else "validation"]
            rows["text"].append(" ".join(words[start : start + WORDS_PER_ROW]))
            rows["label"].append(TOPICS[label])
    return DatasetDict({name: Dataset.from_dict(rows) for name, rows in splits.items()})


def load_rows(args: Arguments) -> DatasetDict:
    """Load the rows, with a `train` and a `validation` split, and classes counted from 0 in the column `label`."""
    if args.dataset_name:
        loaded = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        files = {"train": args.train_file, args.validation_split: args.validation_file}
        files = {split: name for split, name in files.items() if name}
        loaded = load_dataset(FILE_FORMATS[Path(args.train_file).suffix], data_files=files)
    else:
        loaded = topics_of_the_language_reference()
    train = loaded["train"]
    if args.label_column not in train.column_names:
        raise ValueError(f"--label_column must be one of {', '.join(train.column_names)}, got {args.label_column}")
    if args.validation_split in loaded:
        rows = DatasetDict(train=train, validation=loaded[args.validation_split])
    else:
        parts = train.train_test_split(test_size=VALIDATION_SHARE, seed=0)
        rows = DatasetDict(train=parts["train"], validation=parts["test"])
    if args.label_column != "label":
        rows = rows.rename_column(args.label_column, "label")
    if not isinstance(train.features[args.label_column], ClassLabel):
        classes = sorted({str(value) for value in train.unique(args.label_column)})
        rows = rows.map(lambda row: {"label": str(row["label"])}).cast_column("label", ClassLabel(names=classes))
    return rows


def text_columns(args: Arguments, rows: DatasetDict) -> list[str]:
    """The columns whose text is classified, a pair where there are two."""
    kinds = (Value("string"), Value("large_string"))
    strings = [name for name, kind in rows["train"].features.items() if kind in kinds and name != "label"]
    columns = args.text_columns or strings
    if len(columns) not in (1, 2) or not set(columns) <= set(strings):
        raise ValueError(f"--text_columns must be one or two of {', '.join(strings)}, got {' '.join(columns)}")
    return columns


def train_tokenizer(texts: list[str]) -> str:
    """A lower-casing BPE tokenizer of the texts, as JSON; tokenizers' WordPiece comes out different in every run."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=list(SPECIAL_TOKENS.values()), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer.to_str()


def make_tokenizer(args: Arguments, texts: list[str], is_main: bool) -> PreTrainedTokenizerBase:
    """Load the pretrained model's tokenizer, or let rank 0 train one on the training text and send it to the others."""
    if args.model_name_or_path:
        return AutoTokenizer.from_pretrained(args.model_name_or_path)
    trained = [train_tokenizer(texts) if is_main else None]
    broadcast_object_list(trained)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained[0]), **SPECIAL_TOKENS)


def make_model(args: Arguments, tokenizer: PreTrainedTokenizerBase, classes: list[str]) -> PreTrainedModel:
    """Load the pretrained model with a new head, or make a small BERT."""
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    if args.model_name_or_path:
        return AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, **names)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes, **names)
    return AutoModelForSequenceClassification.from_config(config)


def mean_loss(
    outputs: ModelOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Compute the cross entropy over all examples of a step, on all ranks and in all accumulated batches.

    Some versions of Trainer multiply the loss of such models by the number of ranks: the model divides by the number of
    examples of one batch, while Trainer expects that of the whole step.
    """
    total = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Compute the share of examples whose class gets the highest score."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    """Read the arguments, train and evaluate."""
    parser = HfArgumentParser((Arguments, TrainingArguments), description=__doc__)
    args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="load the rows"):
        rows = load_rows(args)
    columns = text_columns(args, rows)
    texts = [text for column in columns for text in rows["train"][column]]
    tokenizer = make_tokenizer(args, texts, training_args.process_index == 0)
    with training_args.main_process_first(desc="tokenise the rows"):
        tokens = rows.map(
            lambda row: tokenizer(*(row[column] for column in columns), truncation=True, max_length=args.max_length),
            remove_columns=[name for name in rows["train"].column_names if name != "label"],
        )
    model = make_model(args, tokenizer, rows["train"].features["label"].names)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokens["train"],
        eval_dataset=tokens["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_loss_func=mean_loss,
        compute_metrics=accuracy,
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
