"""Training for compare_convergence.py: text, model, the loop of one rank, and the processes of one world size."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from _common import REPOSITORY
from _convergence_runs import (
    EVALUATIONS,
    GLOBAL_BATCH,
    HEADS,
    LAYERS,
    MAX_GRAD_NORM,
    TOKENS,
    UNCOMPRESSED,
    VOCABULARY,
    WEIGHT_DECAY,
    WIDTH,
    Job,
    Run,
)
from torch import Tensor

RECIPE = REPOSITORY / "recipes" / "causal_lm"


def prepare_text() -> dict[str, dict[str, Tensor]]:
    """The recipe's text and split: "train" and "validation", each input_ids and labels [examples, TOKENS]."""
    sys.path.insert(0, str(RECIPE))
    import datasets
    import train as recipe
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    options = recipe.DataArguments(block_size=TOKENS)
    text = recipe.load_text(options)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=recipe.train_tokenizer(text["train"], recipe.text_column(text), VOCABULARY),
        bos_token=recipe.END_OF_TEXT,
        eos_token=recipe.END_OF_TEXT,
    )
    blocks = recipe.make_blocks(text, tokenizer, options)
    return {
        split: {name: torch.tensor(examples[name][:]) for name in ("input_ids", "labels")}
        for split, examples in blocks.items()
    }


def make_model(run: Run, seed: int) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        tie_word_embeddings=run.tied,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_pdrop=0.0,  # as the recipe's
    )
    return GPT2LMHeadModel(config)


def make_optimizer(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer with Trainer's param groups and, where it is compressed, Trainer's default schedule."""
    import hf_compressopt

    run = job.run
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if run.optimizer == "AdamW":
        return torch.optim.AdamW(groups, lr=run.peak_lr)
    if run.optimizer == "Lamb":
        return hf_compressopt.Lamb(groups, lr=run.peak_lr)
    cls, given = getattr(hf_compressopt, run.optimizer), dict(run.options)
    if run.freeze is not None:
        given[cls.freeze_option] = max(1, round(run.freeze * job.steps))
    optimizer = cls(groups, lr=run.peak_lr, **given)
    optimizer.scale_schedule(job.steps, given=given)
    return optimizer


def batches(text: dict[str, Tensor], job: Job, rank: int) -> Iterator[dict[str, Tensor]]:
    """This rank's part of every global batch; the global batches depend on the seed alone."""
    examples, generator = len(text["input_ids"]), torch.Generator().manual_seed(job.seed)
    passes = math.ceil(job.steps * GLOBAL_BATCH / examples)
    order = torch.cat([torch.randperm(examples, generator=generator) for _ in range(passes)])
    for step in range(job.steps):
        mine = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH].chunk(job.world_size)[rank]
        yield {name: values[mine] for name, values in text.items()}


def average_gradients(params: Sequence[Tensor], world_size: int) -> None:
    """As DDP: times 1/W, then the sum over the ranks."""
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    flat.mul_(1 / world_size)
    dist.all_reduce(flat)
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param)


def clip(run: Run, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], world_size: int) -> None:
    averaged = run.optimizer in UNCOMPRESSED or optimizer.plan.reduce_grads
    if run.clip == "by the norm of the mean" and not averaged:
        flat = torch.cat([p.grad.reshape(-1) for p in params]).mul_(1 / world_size)
        dist.all_reduce(flat)
        torch._foreach_mul_([p.grad for p in params], min(1.0, MAX_GRAD_NORM / (float(flat.norm()) + 1e-6)))
    elif run.clip and run.optimizer in UNCOMPRESSED:
        torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
    elif run.clip:
        optimizer.clip_grad_norm_(MAX_GRAD_NORM)


@torch.no_grad()
def evaluate(model: torch.nn.Module, text: dict[str, Tensor], rank: int, world_size: int) -> float:
    """Mean loss per token of the whole validation text, of which each rank reads a part."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, examples
    for start in range(rank * 16, len(text["input_ids"]), world_size * 16):
        batch = {name: values[start : start + 16] for name, values in text.items()}
        examples = len(batch["input_ids"])
        sums += torch.tensor([float(model(**batch).loss) * examples, examples], dtype=torch.float64)
    dist.all_reduce(sums)
    model.train()
    return float(sums[0] / sums[1])


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def train(job: Job, rank: int, text: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Train and evaluate, all ranks together. Returns the row of this run."""
    from transformers import get_linear_schedule_with_warmup

    start = time.monotonic()
    run, world_size = job.run, job.world_size
    model = make_model(run, job.seed)
    torch.manual_seed(job.seed * job.world_size + rank)  # of dropout
    params = list(model.parameters())
    numel = sum(p.numel() for p in params)
    optimizer = make_optimizer(job, model)
    plain = run.optimizer in UNCOMPRESSED
    scheduler = get_linear_schedule_with_warmup(optimizer, max(1, job.steps // 10), job.steps)
    ring_bytes = 2 * (world_size - 1) / world_size * 4 * numel
    averaged_steps, largest_step, loss_sum, loss_steps = 0, 0.0, torch.zeros(()), 0
    interval = max(5, math.ceil(job.steps / EVALUATIONS))
    curve = []
    for step, batch in enumerate(batches(text["train"], job, rank), start=1):
        loss = model(**batch).loss
        loss.backward()
        loss_sum, loss_steps = loss_sum + loss.detach(), loss_steps + 1
        if plain or optimizer.plan.reduce_grads:
            average_gradients(params, world_size)
            averaged_steps += 1
        clip(run, optimizer, params, world_size)
        lr = optimizer.param_groups[0]["lr"]
        late = step > job.steps // 5 if plain else optimizer.plan.stage.number == 1.0
        before = [p.detach().clone() for p in params] if late and lr > 0 and rank == 0 else []
        optimizer.step()
        for old, param in zip(before, params, strict=False):
            largest_step = max(largest_step, float((param.detach() - old).abs().max()) / lr)
        if not run.error_feedback:
            for state in optimizer._states:
                state.worker_error.zero_()
                state.server_error.zero_()
        scheduler.step()
        optimizer.zero_grad()
        if step % interval == 0 or step == job.steps:
            with nullcontext() if plain else optimizer.averaged_parameters():
                eval_loss = evaluate(model, text["validation"], rank, world_size)
            dist.all_reduce(loss_sum)
            sent = averaged_steps * ring_bytes + (0 if plain else optimizer.traffic.total_bytes)
            train_loss = float(loss_sum) / loss_steps / world_size
            curve.append({"step": step, "eval": finite(eval_loss), "train": finite(train_loss), "bytes": sent})
            loss_sum, loss_steps = torch.zeros(()), 0
    return {
        "name": run.name,
        "world_size": world_size,
        "seed": job.seed,
        "steps": job.steps,
        "optimizer": run.optimizer,
        "lr": run.peak_lr,
        "parameters": numel,
        "eval_loss": curve[-1]["eval"],
        "bytes": curve[-1]["bytes"],
        "rounds": job.steps if plain else int(optimizer.metrics()["rounds"]),
        "switch": None if plain else optimizer.schedule.last_warmup_step,
        "skipped_steps": 0 if plain else optimizer.skipped_steps,
        "largest_step": finite(largest_step),
        "seconds": round(time.monotonic() - start, 2),
        "curve": curve,
    }


def serve(rank: int, world_size: int, store: str, text: dict[str, dict[str, Tensor]], connection: Connection) -> None:
    """One rank: takes jobs until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its ranks
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        while True:
            connection.send(train(connection.recv(), rank, text))
    except EOFError:
        dist.destroy_process_group()


class Ranks:
    """The processes of one world size, which take one job after the other."""

    def __init__(self, world_size: int, text: dict[str, dict[str, Tensor]], directory: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = os.path.join(directory, f"store{world_size}")
            process = context.Process(target=serve, args=(rank, world_size, store, text, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, job: Job) -> dict[str, Any]:
        """The row of rank 0.

        Raises:
            RuntimeError: If a rank died.
        """
        for connection in self.connections:
            connection.send(job)
        try:
            return [connection.recv() for connection in self.connections][0]
        except EOFError:
            raise RuntimeError(f"a rank of {job.run.name} at {job.world_size} ranks died; see its traceback") from None

    def close(self, *, at_once: bool) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            if not at_once:
                process.join(timeout=20)
            process.kill()
            process.join()
