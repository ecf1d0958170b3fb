"""Causal language modelling of bytes or tokens in a loop with Accelerate, without Trainer.

`CompressOptAccelerator` replaces `Accelerator`, and its plugin turns the AdamW given to `prepare` into a compressed
optimizer. Everything else is a plain Accelerate loop. The README beside this file has the commands.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import chain
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from datasets import Dataset, load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
    get_cosine_schedule_with_warmup,
)

from hf_compressopt import CompressOptAccelerator, CompressOptPlugin

FILE_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def parse_arguments() -> argparse.Namespace:
    """Read the command line; refuse contradictions before anything is loaded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model_name_or_path", help="pretrained model to fine-tune")
    model.add_argument("--tiny", action="store_true", help="train a byte-level GPT-2 of about 0.8M parameters")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--dataset_name", help="dataset of the Hub, or a folder; default: Python's language reference")
    data.add_argument("--train_file", type=Path, help=f"text: {', '.join(FILE_FORMATS)}")
    parser.add_argument("--dataset_config_name", help="configuration of --dataset_name")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--block_size", type=int, default=128, help="tokens per example")
    parser.add_argument("--validation_share", type=float, default=0.1, help="share of blocks to validate on")
    parser.add_argument("--per_device_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="peak, after 10 %% of the steps; then cosine")
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--optimizer", default="onebit_adam", help="a name of CompressOptPlugin; none keeps AdamW")
    parser.add_argument(
        "--freeze_step", type=int, help="last step with averaged gradients (20 %% of the steps, at least 100)"
    )
    parser.add_argument("--mixed_precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--logging_steps", type=int, default=20)
    parser.add_argument("--save_steps", type=int, default=0, help="steps between checkpoints; 0: never save")
    parser.add_argument("--resume_from_checkpoint", type=Path, help="a folder OUTPUT_DIR/step-N")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--use_cpu", action="store_true", help="use CPUs even if there is a GPU")
    args = parser.parse_args()
    if args.train_file and (args.train_file.suffix not in FILE_FORMATS or not args.train_file.is_file()):
        parser.error(f"--train_file must exist and end in {', '.join(FILE_FORMATS)}, got {args.train_file}")
    if not 0 < args.validation_share < 1:
        parser.error(f"--validation_share must be between 0 and 1, got {args.validation_share}")
    return args


def load_text(args: argparse.Namespace) -> Dataset:
    """Load the training text, one row for each document or line."""
    if args.dataset_name:
        return load_dataset(args.dataset_name, args.dataset_config_name, split="train")
    if args.train_file:
        return load_dataset(FILE_FORMATS[args.train_file.suffix], data_files=str(args.train_file), split="train")
    from pydoc_data.topics import topics

    return Dataset.from_dict({args.text_column: [topics[name] for name in sorted(topics)]})


def make_model(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the pretrained model and its tokenizer, or make a small GPT-2 that reads bytes."""
    if args.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        return AutoModelForCausalLM.from_pretrained(args.model_name_or_path), tokenizer
    tokenizer = ByT5Tokenizer(extra_ids=0)
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"n_positions": args.block_size, "n_embd": 128, "n_layer": 4, "n_head": 4}
    config = GPT2Config(vocab_size=len(tokenizer), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes, **ends)
    return AutoModelForCausalLM.from_config(config), tokenizer


def make_blocks(text: Dataset, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Tokenise, concatenate, and cut into training and validation examples of `block_size` tokens."""

    def blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        tokens = list(chain.from_iterable(tokenizer(rows[args.text_column])["input_ids"]))
        starts = range(0, len(tokens) - args.block_size + 1, args.block_size)
        cut = [tokens[start : start + args.block_size] for start in starts]
        return {"input_ids": cut, "labels": cut}

    cut = text.map(blocks, batched=True, remove_columns=text.column_names)
    train = int(len(cut) * (1 - args.validation_share))
    if not 0 < train < len(cut):
        raise ValueError(f"the text has {len(cut)} blocks of --block_size {args.block_size}: too few to split")
    return cut.select(range(train)), cut.select(range(train, len(cut)))


@torch.no_grad()
def evaluate(accelerator: CompressOptAccelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Compute the mean loss over the validation examples of all ranks."""
    model.eval()
    losses = [accelerator.gather_for_metrics(model(**batch).loss.repeat(len(batch["labels"]))) for batch in loader]
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    """Read the arguments, train, save and evaluate."""
    args = parse_arguments()
    freeze_step = args.freeze_step or max(100, args.max_steps // 5)
    accelerator = CompressOptAccelerator(
        cpu=args.use_cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        step_scheduler_with_optimizer=False,  # max_steps counts optimizer steps, on any number of ranks
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # the same order after a resume
        compressopt_plugin=CompressOptPlugin(optimizer=args.optimizer, freeze_step=freeze_step),
    )
    set_seed(args.seed)
    with accelerator.main_process_first():
        text = load_text(args)
    model, tokenizer = make_model(args)
    with accelerator.main_process_first():
        train, validation = make_blocks(text, tokenizer, args)

    batches = {"batch_size": args.per_device_batch_size, "collate_fn": default_data_collator}
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.max_steps // 10, args.max_steps)
    model, optimizer, scheduler, loader, validation_loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(train, shuffle=True, **batches), DataLoader(validation, **batches)
    )
    steps_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    step = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(str(args.resume_from_checkpoint))
        step = int(args.resume_from_checkpoint.name.removeprefix("step-"))

    while step < args.max_steps:
        epoch, done = divmod(step, steps_per_epoch)
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, done * args.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            step += 1
            if step % args.logging_steps == 0:
                sent = optimizer.optimizer.metrics()["bytes_sent_step"] if args.optimizer != "none" else "uncounted"
                accelerator.print(f"step {step}: loss {loss.item():.4f}, bytes sent {sent}", flush=True)
            if args.save_steps and step % args.save_steps == 0:
                accelerator.save_state(str(args.output_dir / f"step-{step}"))
            if step == args.max_steps:
                break

    results = {"eval_loss": evaluate(accelerator, model, validation_loader), "steps": step}
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
        (args.output_dir / "results.json").write_text(json.dumps(results))
    accelerator.print(json.dumps(results))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
