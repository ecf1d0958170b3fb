"""A Trainer script that knows nothing of hf_compressopt: what `python -m hf_compressopt.run` must be able to run."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_positions=12, n_embd=24, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    rows = torch.randint(0, 61, (64, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_state()
    print(f"rank {args.process_index} of {args.world_size} ran {sys.argv[0]} as {__name__}")


if __name__ == "__main__":
    main()
