"""A language model of bytes in a plain loop: PyTorch and a compressed optimizer, without Hugging Face libraries.

There is no DistributedDataParallel: `average_gradients` averages the gradients if the optimizer's plan asks for it. The
README beside this file has the commands.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_compressopt import OnebitAdam, average_gradients, load_state, save_state

WIDTH, LAYERS, HEADS = 128, 4, 4
VALIDATION_SHARE, VALIDATION_BLOCKS = 0.1, 64


class ByteModel(nn.Module):
    """A Transformer decoder of 0.9M parameters over bytes: int64 [batch, length] to logits [batch, length, 256]."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(length, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.bytes(tokens) + self.positions.weight
        return self.out(self.layers(hidden, mask=self.mask, is_causal=True))

    def loss(self, blocks: Tensor) -> Tensor:
        """Compute the mean cross entropy, in nats per byte, of blocks [batch, length + 1]."""
        return nn.functional.cross_entropy(self(blocks[:, :-1]).flatten(0, 1), blocks[:, 1:].flatten())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--train_file", type=Path, help="any file; default: Python's language reference")
    parser.add_argument("--block_size", type=int, default=128, help="bytes per example")
    parser.add_argument("--batch_size", type=int, default=8, help="examples per rank and step")
    parser.add_argument("--max_steps", type=int, default=300)
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="peak, after 10 %% of the steps; then cosine")
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument(
        "--freeze_step", type=int, help="last step with averaged gradients (20 %% of the steps, at least 100)"
    )
    parser.add_argument("--communicator", default="auto", help="mpi, or a backend of torch.distributed")
    parser.add_argument("--logging_steps", type=int, default=20)
    parser.add_argument("--save_steps", type=int, default=0, help="steps between checkpoints; 0: never save")
    parser.add_argument(
        "--resume_from_checkpoint", type=Path, help="a folder OUTPUT_DIR/step-N, or last: the newest, if there is one"
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--use_cpu", action="store_true", help="use CPUs even if there is a GPU")
    args = parser.parse_args()
    if args.train_file and not args.train_file.is_file():
        parser.error(f"--train_file: no such file: {args.train_file}")
    return args


def start(use_cpu: bool) -> torch.device:
    """Join the process group that torchrun describes. Returns the device of this rank."""
    if use_cpu or not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def load_bytes(args: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Load the training and the validation part of the text, each int64 [bytes]."""
    if args.train_file:
        text = args.train_file.read_bytes()
    else:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics)).encode()
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    if len(text) - cut <= args.block_size + 1:
        raise ValueError(f"the text has {len(text)} bytes: too few for blocks of --block_size {args.block_size}")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device, torch.int64)
    return tokens[:cut], tokens[cut:]


def blocks_at(tokens: Tensor, starts: Tensor, block_size: int) -> Tensor:
    """Cut blocks [batch, block_size + 1] at the places `starts` [batch]."""
    return torch.stack([tokens[start : start + block_size + 1] for start in starts.tolist()])


def training_blocks(tokens: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """Draw this rank's batch of a step from seed, step and rank alone, so that a resumed run draws the same."""
    seed = (args.seed * 1_000_003 + step) * dist.get_world_size() + dist.get_rank()
    starts = torch.randint(
        len(tokens) - args.block_size, (args.batch_size,), generator=torch.Generator().manual_seed(seed)
    )
    return blocks_at(tokens, starts, args.block_size)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    warmup = max(1, args.max_steps // 10)
    if step < warmup:
        return args.learning_rate * (step + 1) / warmup
    return args.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (args.max_steps - warmup)))


def save(model: nn.Module, optimizer: OnebitAdam, step: int, folder: Path) -> None:
    """Save a checkpoint. The optimizer's index is written last: if it is there, the checkpoint is complete."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "step": step}, folder / "model.pt")
    save_state(optimizer, folder, names=[name for name, _ in model.named_parameters()])  # all ranks call


def load(model: nn.Module, optimizer: OnebitAdam, folder: Path) -> int:
    """Load a checkpoint, saved by any number of ranks. Returns the step after which it was saved."""
    load_state(optimizer, folder, names=[name for name, _ in model.named_parameters()])  # all ranks call
    saved = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    return int(saved["step"])


def last_checkpoint(folder: Path) -> Path | None:
    """Find the newest complete checkpoint, the same for all ranks: rank 0 looks. None if there is none."""
    found: list[Path | None] = [None]
    if dist.get_rank() == 0:
        complete = [index.parent for index in folder.glob("step-*/compressopt.index.json")]
        found = [max(complete, key=lambda path: int(path.name.removeprefix("step-")), default=None)]
    dist.broadcast_object_list(found)
    return found[0]


@torch.no_grad()
def evaluate(model: ByteModel, tokens: Tensor, block_size: int) -> float:
    """Compute nats per byte over evenly spread validation blocks, the same on every rank."""
    starts = torch.linspace(0, len(tokens) - block_size - 1, VALIDATION_BLOCKS).long()
    return model.loss(blocks_at(tokens, starts, block_size)).item()


def main() -> None:
    args = parse_arguments()
    device = start(args.use_cpu)
    train, validation = load_bytes(args, device)
    torch.manual_seed(args.seed)
    model = ByteModel(args.block_size).to(device)
    for p in model.parameters():
        dist.broadcast(p.data, 0)  # every rank starts from the same model
    optimizer = OnebitAdam(
        model.parameters(),
        lr=args.learning_rate,
        weight_decay=0.01,
        freeze_step=args.freeze_step or max(100, args.max_steps // 5),
        communicator=args.communicator,
    )
    asked = args.resume_from_checkpoint
    checkpoint = last_checkpoint(args.output_dir) if asked == Path("last") else asked
    first = load(model, optimizer, checkpoint) if checkpoint else 0
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, from {checkpoint or 'the start'}", flush=True)
    for step in range(first, args.max_steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, args)
        loss = model.loss(training_blocks(train, step, args))
        optimizer.zero_grad()
        loss.backward()
        average_gradients(optimizer)  # if the optimizer's plan asks for it
        optimizer.clip_grad_norm_(args.max_grad_norm)
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % args.logging_steps == 0:
            sent = optimizer.metrics()["bytes_sent_step"]
            print(f"step {step + 1}: loss {loss.item():.4f}, bytes sent {sent:,.0f}", flush=True)
        if args.save_steps and (step + 1) % args.save_steps == 0:
            save(model, optimizer, step + 1, args.output_dir / f"step-{step + 1}")
    loss_at_end = evaluate(model, validation, args.block_size)
    if dist.get_rank() == 0:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.output_dir / "model.pt")
        print(f"validation loss {loss_at_end:.4f} nats per byte after {args.max_steps} steps", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
