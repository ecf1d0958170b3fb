"""Causal language modelling with the Hugging Face Trainer and a compressed optimizer.

`import hf_compressopt.auto` adds `--optim onebit_adam` and the other compressed optimizers to Trainer. Everything else
is a plain Trainer script. The README beside this file has the commands.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import transformers
from accelerate.utils import broadcast_object_list
from datasets import Dataset, DatasetDict, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    HfArgumentParser,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
    trainer_utils,
)

import hf_compressopt.auto  # noqa: F401  registers the compressed optimizers with Trainer

logger = logging.getLogger(__name__)

IGNORED = -100  # the label that the loss skips
END_OF_TEXT = "<|endoftext|>"
FILE_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}
PARAGRAPHS_PER_ROW = 20  # of the built-in text: long enough to read on, short enough to split evenly


@dataclass
class ModelArguments:
    """Options of the model: give exactly one of the first three."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Pretrained model to fine-tune."})
    config_name: str | None = field(default=None, metadata={"help": "Train from scratch with this configuration."})
    tiny: bool = field(default=False, metadata={"help": "Train a GPT-2 of about 4M parameters from scratch."})
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "Tokenizer. Default: the pretrained model's, or one trained on the training text."},
    )
    tokenizer_vocab_size: int = field(default=4096, metadata={"help": "Vocabulary size of a tokenizer trained here."})

    def __post_init__(self) -> None:
        """Refuse anything but exactly one model."""
        given = [name for name in ("model_name_or_path", "config_name", "tiny") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of --model_name_or_path, --config_name and --tiny, "
                f"got {' and '.join('--' + name for name in given) or 'none of them'}"
            )
        if self.tokenizer_vocab_size < 257:
            raise ValueError(
                f"--tokenizer_vocab_size must be >= 257 (256 bytes and one special token), got "
                f"{self.tokenizer_vocab_size}"
            )


@dataclass
class DataArguments:
    """Options of the text: a dataset or files. Without either, the text is Python's language reference."""

    dataset_name: str | None = field(default=None, metadata={"help": "Dataset of the Hub, or a local folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    train_file: str | None = field(default=None, metadata={"help": "Training text: .txt, .json, .jsonl or .csv."})
    validation_file: str | None = field(default=None, metadata={"help": "Validation text, same format."})
    validation_percentage: float = field(
        default=10.0, metadata={"help": "Percentage of the data to validate on if it has no validation part."}
    )
    block_size: int = field(default=128, metadata={"help": "Tokens per training example."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on at most this many examples."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenise."})

    def __post_init__(self) -> None:
        """Refuse contradictions before anything is loaded."""
        if self.dataset_name and self.train_file:
            raise ValueError("--dataset_name and --train_file exclude each other: give one, or neither")
        if self.dataset_config_name and not self.dataset_name:
            raise ValueError("--dataset_config_name needs --dataset_name")
        if self.validation_file and not self.train_file:
            raise ValueError("--validation_file needs --train_file")
        if not 0 < self.validation_percentage < 100:
            raise ValueError(f"--validation_percentage must be between 0 and 100, got {self.validation_percentage}")
        if self.block_size < 2:
            raise ValueError(f"--block_size must be >= 2, got {self.block_size}")
        if self.max_eval_samples is not None and self.max_eval_samples < 1:
            raise ValueError(f"--max_eval_samples must be >= 1, got {self.max_eval_samples}")
        self._check_files()

    def _check_files(self) -> None:
        files = {"train_file": self.train_file, "validation_file": self.validation_file}
        for option, name in files.items():
            if name is None:
                continue
            if Path(name).suffix not in FILE_FORMATS:
                raise ValueError(f"--{option} must end in {', '.join(FILE_FORMATS)}, got {name}")
            if not Path(name).is_file():
                raise ValueError(f"--{option}: no such file: {name}")
        if self.validation_file and Path(self.train_file).suffix != Path(self.validation_file).suffix:
            raise ValueError("--train_file and --validation_file must have the same format")


def language_reference() -> Dataset:
    """Make rows of a few paragraphs from Python's language reference, in a fixed order.

    Several topics repeat whole sections of others. Each paragraph is kept once, so that no validation paragraph is also
    training text.
    """
    from pydoc_data.topics import topics

    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        paragraphs.update(dict.fromkeys(topics[name].split("\n\n")))
    kept = list(paragraphs)
    rows = ["\n\n".join(kept[i : i + PARAGRAPHS_PER_ROW]) for i in range(0, len(kept), PARAGRAPHS_PER_ROW)]
    random.Random(0).shuffle(rows)
    return Dataset.from_dict({"text": [row + "\n\n" for row in rows]})


def load_files(data_args: DataArguments) -> DatasetDict:
    """Load --train_file, and --validation_file if it is given."""
    files = {"train": data_args.train_file}
    if data_args.validation_file:
        files["validation"] = data_args.validation_file
    file_format = FILE_FORMATS[Path(data_args.train_file).suffix]
    options = {"keep_linebreaks": True} if file_format == "text" else {}
    return load_dataset(file_format, data_files=files, **options)


def load_text(data_args: DataArguments) -> DatasetDict:
    """Load the text, with a `train` and a `validation` split."""
    if data_args.dataset_name:
        text = load_dataset(data_args.dataset_name, data_args.dataset_config_name)
    elif data_args.train_file:
        text = load_files(data_args)
    else:
        text = DatasetDict(train=language_reference())
    if "train" not in text:
        raise ValueError(f"the dataset needs a split with the name train, got {', '.join(text)}")
    if "validation" not in text:
        parts = text["train"].train_test_split(test_size=data_args.validation_percentage / 100, shuffle=False)
        text = DatasetDict(train=parts["train"], validation=parts["test"])
    return DatasetDict(train=text["train"], validation=text["validation"])


def text_column(text: DatasetDict) -> str:
    """Find the column of the text."""
    columns = text["train"].column_names
    return "text" if "text" in columns else columns[0]


def train_tokenizer(text: Dataset, column: str, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the text."""

    def batches() -> Iterator[list[str]]:
        for start in range(0, len(text), 1000):
            yield text[start : start + 1000][column]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(batches(), trainer)
    return tokenizer


def make_tokenizer(
    model_args: ModelArguments, text: DatasetDict, training_args: TrainingArguments
) -> PreTrainedTokenizerBase:
    """Load the named tokenizer, or let rank 0 train one on the training text and send it to the other ranks."""
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if name:
        return AutoTokenizer.from_pretrained(name)
    trained = [None]
    if training_args.process_index == 0:
        trained = [train_tokenizer(text["train"], text_column(text), model_args.tokenizer_vocab_size).to_str()]
    broadcast_object_list(trained)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained[0]), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )


def tiny_config(block_size: int) -> GPT2Config:
    """Describe a GPT-2 of about 4M parameters with tied embeddings."""
    return GPT2Config(n_positions=block_size, n_embd=256, n_layer=4, n_head=4, attn_pdrop=0.0)


def make_config(model_args: ModelArguments, block_size: int, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Make the configuration of a model that is trained from scratch, with the tokenizer's vocabulary."""
    config = tiny_config(block_size) if model_args.tiny else AutoConfig.from_pretrained(model_args.config_name)
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return config


def make_model(model_args: ModelArguments, block_size: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the pretrained model, or make a new one."""
    if model_args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer))
    else:
        model = AutoModelForCausalLM.from_config(make_config(model_args, block_size, tokenizer))
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and block_size > longest:
        raise ValueError(f"--block_size must be <= {longest}, the model's longest input, got {block_size}")
    logger.info("%s: %.2fM parameters", type(model).__name__, model.num_parameters() / 1e6)
    return model


def make_blocks(text: DatasetDict, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> DatasetDict:
    """Tokenise, concatenate, and cut into examples of `block_size` tokens; drop the rest.

    Nothing predicts the first token of an example, so it is not a label. Trainer divides the summed loss by the number
    of labels: counting the first token would make the loss a little too small (in some versions, at evaluation too).
    """
    column, block_size = text_column(text), data_args.block_size

    def tokenise(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": tokenizer(rows[column], verbose=False)["input_ids"]}

    def chunk(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = [token for row in rows["input_ids"] for token in row]
        whole = len(tokens) // block_size * block_size
        blocks = [tokens[i : i + block_size] for i in range(0, whole, block_size)]
        return {"input_ids": blocks, "labels": [[IGNORED, *block[1:]] for block in blocks]}

    workers = data_args.preprocessing_num_workers
    tokens = text.map(
        tokenise, batched=True, num_proc=workers, remove_columns=text["train"].column_names, desc="tokenise"
    )
    blocks = tokens.map(chunk, batched=True, num_proc=workers, desc=f"blocks of {block_size} tokens")
    for split, examples in blocks.items():
        if len(examples) == 0:
            raise ValueError(f"the {split} text is shorter than one block of {block_size} tokens (--block_size)")
    if data_args.max_eval_samples is not None:
        first = min(data_args.max_eval_samples, len(blocks["validation"]))
        blocks["validation"] = blocks["validation"].select(range(first))
    return blocks


def checkpoint_to_resume(training_args: TrainingArguments) -> str | bool | None:
    """Read --resume_from_checkpoint: a folder, or the last checkpoint of --output_dir: `true`, or `last` if any."""
    asked = training_args.resume_from_checkpoint
    if asked == "last":  # a run that torchrun may restart
        return Path(training_args.output_dir).is_dir() and trainer_utils.get_last_checkpoint(training_args.output_dir)
    return {"true": True, "false": None}.get(str(asked).lower(), asked)


def perplexity(loss: float) -> float:
    """Compute exp(loss); infinity if that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def train_and_evaluate(trainer: Trainer, blocks: DatasetDict) -> None:
    """Train, save the model and the metrics, evaluate."""
    result = trainer.train(resume_from_checkpoint=checkpoint_to_resume(trainer.args))
    trainer.save_model()
    metrics = result.metrics
    metrics["train_samples"] = len(blocks["train"])
    metrics["parameters"] = trainer.model.num_parameters(only_trainable=True)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)

    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(blocks["validation"])
    metrics["perplexity"] = perplexity(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()


def set_up_logging(training_args: TrainingArguments) -> None:
    """Log at the level that Trainer chooses for this rank; show progress bars on the first rank of a machine only."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    level = training_args.get_process_log_level()
    logger.setLevel(logging.INFO if training_args.process_index == 0 else level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    if training_args.local_process_index != 0:
        datasets.utils.logging.disable_progress_bar()


def main() -> None:
    """Read the arguments and run."""
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments), description=__doc__)
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_up_logging(training_args)
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="load the text"):
        text = load_text(data_args)
    tokenizer = make_tokenizer(model_args, text, training_args)
    with training_args.main_process_first(desc="tokenise the text"):
        blocks = make_blocks(text, tokenizer, data_args)
    model = make_model(model_args, data_args.block_size, tokenizer)
    logger.info(
        "%d ranks (rank 0 on %s); %d training and %d validation blocks of %d tokens; vocabulary %d",
        training_args.world_size,
        training_args.device,
        len(blocks["train"]),
        len(blocks["validation"]),
        data_args.block_size,
        len(tokenizer),
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    train_and_evaluate(trainer, blocks)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # closes the process group: left open, a rank can abort at exit


if __name__ == "__main__":
    main()
