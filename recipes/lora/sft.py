"""Supervised fine-tuning with TRL's SFTTrainer, LoRA and compressed gradients of the adapters.

`import hf_compressopt.auto` adds `--optim_args grad_compression=int4` and `--optim onebit_adam` to every Trainer, and
so to TRL's. The README beside this file has the commands.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import load_dataset
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

import hf_compressopt.auto  # noqa: F401  registers the compressed optimizers with Trainer


@dataclass
class Arguments:
    """Options of the model, the adapters and the examples; give exactly one of the first two sources of examples."""

    model_name_or_path: str = field(metadata={"help": "Pretrained model: a name on the Hub, or a folder."})
    dataset_name: str | None = field(default=None, metadata={"help": "Dataset of the Hub, in a format of TRL's."})
    train_file: str | None = field(default=None, metadata={"help": ".jsonl in such a format, or a text in .txt."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters."})

    def __post_init__(self) -> None:
        """Refuse contradictions before anything is loaded."""
        if bool(self.dataset_name) == bool(self.train_file):
            raise ValueError("give exactly one of --dataset_name and --train_file")


def main() -> None:
    """Read the arguments, train the adapters and save them."""
    args, config = HfArgumentParser((Arguments, SFTConfig), description=__doc__).parse_args_into_dataclasses()
    if args.dataset_name:
        examples = load_dataset(args.dataset_name, split="train")
    elif args.train_file.endswith(".txt"):  # its paragraphs
        examples = load_dataset("text", data_files=args.train_file, sample_by="paragraph", split="train")
    else:
        examples = load_dataset("json", data_files=args.train_file, split="train")
    adapters = LoraConfig(
        r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = SFTTrainer(model=args.model_name_or_path, args=config, train_dataset=examples, peft_config=adapters)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()  # adapter_model.safetensors
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # closes the process group: left open, a rank can abort at exit


if __name__ == "__main__":
    main()
