"""LoRA fine-tuning of a pretrained model with the Hugging Face Trainer and compressed gradients of the adapters.

`import hf_compressopt.auto` adds `--optim_args grad_compression=int4` and `--optim onebit_adam` to Trainer. Everything
else is a plain PEFT script. The README beside this file has the commands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hf_compressopt.auto  # noqa: F401  registers the compressed optimizers with Trainer


@dataclass
class Arguments:
    """Options of the model, the adapters and the text; give exactly one of the first two sources of text."""

    model_name_or_path: str = field(metadata={"help": "Pretrained model: a name on the Hub, or a folder."})
    dataset_name: str | None = field(default=None, metadata={"help": "Dataset of the Hub with a column `text`."})
    train_file: str | None = field(default=None, metadata={"help": "A text whose paragraphs are the examples."})
    max_length: int = field(default=512, metadata={"help": "Tokens of an example; the rest is cut off."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters."})
    shard_base: bool = field(default=False, metadata={"help": "Shard the model by FSDP2 when it is loaded."})

    def __post_init__(self) -> None:
        """Refuse contradictions before anything is loaded."""
        if bool(self.dataset_name) == bool(self.train_file):
            raise ValueError("give exactly one of --dataset_name and --train_file")


def load_model(args: Arguments, training_args: TrainingArguments) -> Any:
    """Load the base; if it is to be in shards, each rank keeps one of them."""
    if not args.shard_base:
        return AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    from transformers.distributed import DistributedConfig  # newer versions have it

    config = DistributedConfig(fsdp_size=training_args.world_size)
    return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, distributed_config=config)


def load_texts(args: Arguments) -> Dataset:
    """Load the examples, with a column `text`."""
    if args.dataset_name:
        return load_dataset(args.dataset_name, split="train")
    return load_dataset("text", data_files=args.train_file, sample_by="paragraph", split="train")


def main() -> None:
    """Read the arguments, train the adapters and save them."""
    parser = HfArgumentParser((Arguments, TrainingArguments), description=__doc__)
    args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with training_args.main_process_first(desc="tokenise the text"):
        texts = load_texts(args)
        examples = texts.map(
            lambda rows: tokenizer(rows["text"], truncation=True, max_length=args.max_length),
            batched=True,
            remove_columns=texts.column_names,
        )
    adapters = LoraConfig(
        r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = Trainer(
        model=get_peft_model(load_model(args, training_args), adapters),
        args=training_args,
        train_dataset=examples,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # adapter_model.safetensors
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # closes the process group: left open, a rank can abort at exit


if __name__ == "__main__":
    main()
