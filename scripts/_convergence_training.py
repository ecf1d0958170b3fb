"""Training for compare_convergence.py: texts, models, optimizers, and the loop of one rank."""

from __future__ import annotations

import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from _common import REPOSITORY
from _convergence_runs import (
    EVALUATIONS,
    MAX_GRAD_NORM,
    PRETRAINING,
    PRETRAINING_STEPS,
    TOKENIZED_AS,
    UNCOMPRESSED,
    WEIGHT_DECAY,
    Job,
    Model,
    Run,
)
from rivals import OPTIMIZERS, RIVALS
from torch import Tensor, nn
from torch.nn import functional

from hf_compressopt import GradientCompression, average_gradients
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.ddp import GradientRounds

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


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and with a residual connection, no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Args and returns: [examples, tokens, width]."""
        examples, tokens, width = x.shape
        parts = self.attend(self.before_attention(x)).view(examples, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [examples, heads, tokens, width of a head]
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(examples, tokens, width))
        return x + self.narrow(functional.gelu(self.widen(self.before_feed(x))))


class SmallDecoder(nn.Module):
    """A causal language model that takes few operators, for many runs on a slow machine."""

    def __init__(self, vocabulary: int, tokens: int, width: int, heads: int, layers: int, *, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of the tokens that have a label; both arguments [examples, tokens]."""
        x = functional.dropout(self.words(input_ids) + self.places.weight, 0.1, self.training)
        logits = self.head(self.norm(self.blocks(x)))[:, :-1]
        return functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


def make_model(job: Job) -> torch.nn.Module:
    """The model of a run, from scratch or pretrained."""
    size, tied = job.run.model, job.run.tied
    torch.manual_seed(job.seed)
    model: torch.nn.Module
    if size.gpt2:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=size.tokens,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.heads,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            attn_pdrop=0.0,  # as the recipe's
        )
        model = GPT2LMHeadModel(config)
    else:
        model = SmallDecoder(size.vocabulary, size.tokens, size.width, size.heads, size.layers, tied=tied)
    if job.run.pretrained:
        model.load_state_dict(torch.load(job.start, weights_only=True))
    return model.to(torch.bfloat16) if job.run.bf16 else model


def loss_of(model: torch.nn.Module, batch: Examples) -> Tensor:
    """Mean loss per token."""
    found = model(**batch)
    return found if isinstance(found, Tensor) else found.loss


def pretrain(text: Text, file: Path) -> None:
    """Train a model with AdamW on one rank, and save it."""
    job = Job(PRETRAINING, 1, 0, PRETRAINING_STEPS)
    torch.set_num_threads(1)
    model = make_model(job)
    optimizer = torch.optim.AdamW(param_groups(model), lr=PRETRAINING.peak_lr)
    scheduler = schedule(optimizer, job.steps)
    for batch in batches(text["train"], job, 0):
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), file)


def param_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Param groups as Trainer's: no decay of vectors."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Trainer's linear one, with 10 % warmup."""
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, max(1, steps // 10), steps)


def make_optimizer(job: Job, model: torch.nn.Module, communicator: Communicator) -> torch.optim.Optimizer:
    """The optimizer with Trainer's param groups and, where it is compressed, Trainer's default schedule."""
    import hf_compressopt

    run, groups = job.run, param_groups(model)
    if run.zero:
        wrapped = torch.optim.AdamW if run.optimizer == "AdamW" else hf_compressopt.Lamb
        return hf_compressopt.ZeroOptimizer(groups, wrapped, lr=run.peak_lr, communicator=communicator, **run.zero)
    if run.optimizer == "AdamW":
        return torch.optim.AdamW(groups, lr=run.peak_lr)
    if run.optimizer == "Lamb":
        return hf_compressopt.Lamb(groups, lr=run.peak_lr)
    if run.optimizer in OPTIMIZERS:
        return OPTIMIZERS[run.optimizer](groups, lr=run.peak_lr, communicator=communicator, **run.options)
    cls, given = getattr(hf_compressopt, run.optimizer), dict(run.options)
    if run.freeze is not None:
        given["freeze_step"] = max(1, round(run.freeze * job.steps))
    optimizer = cls(groups, lr=run.peak_lr, communicator=communicator, **given)
    optimizer.scale_schedule(job.steps, given=given)
    return optimizer


def batches(examples: Examples, job: Job, rank: int) -> Iterator[Examples]:
    """This rank's part of every global batch; the global batches depend on the seed alone."""
    count, generator = len(examples["input_ids"]), torch.Generator().manual_seed(job.seed)
    passes = math.ceil(job.steps * job.run.batch / count)
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(passes)])
    for step in range(job.steps):
        mine = order[step * job.run.batch : (step + 1) * job.run.batch].chunk(job.world_size)[rank]
        yield {name: values[mine] for name, values in examples.items()}


def average_all(params: Sequence[Tensor], communicator: Communicator) -> None:
    """Average as DDP does: times 1/W, then the sum over the ranks."""
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    flat.mul_(1 / communicator.world_size)
    communicator.all_reduce(flat).wait()
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param)


def send_early(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Send the messages of clip="late", as DDP's hook does while backward runs."""
    messages = optimizer.early_messages
    if messages.due(optimizer.plan, optimizer.last_plan):
        current = GradientRounds()
        current.begin(messages.buckets(1.0))
        for param in reversed(params):
            current.add(param, param.grad)
        current.finish()
        messages.note_gradients()


def clip(run: Run, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], others: Communicator) -> None:
    """Clip the gradients as the run says."""
    averaged = run.optimizer in UNCOMPRESSED or optimizer.plan.reduce_grads
    if run.clip == "by the norm of the mean" and not averaged:
        flat = torch.cat([p.grad.reshape(-1) for p in params]).mul_(1 / others.world_size)
        others.all_reduce(flat).wait()
        torch._foreach_mul_([p.grad for p in params], min(1.0, MAX_GRAD_NORM / (float(flat.norm()) + 1e-6)))
    elif run.clip and run.optimizer in UNCOMPRESSED and not run.zero:
        torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
    elif run.clip:
        optimizer.clip_grad_norm_(MAX_GRAD_NORM)


@torch.no_grad()
def evaluate(model: torch.nn.Module, examples: Examples, communicator: Communicator) -> float:
    """Mean loss per token of the whole validation text, of which each rank reads a part."""
    model.eval()
    rank, world_size = communicator.rank, communicator.world_size
    sums = torch.zeros(2, dtype=torch.float64)  # loss, examples
    for start in range(rank * 16, len(examples["input_ids"]), world_size * 16):
        batch = {name: values[start : start + 16] for name, values in examples.items()}
        count = len(batch["input_ids"])
        sums += torch.tensor([float(loss_of(model, batch)) * count, count], dtype=torch.float64)
    communicator.all_reduce(sums).wait()
    model.train()
    return float(sums[0] / sums[1])


def saved_parameters(run: Run, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Inside, the parameters are those that a saved model has."""
    if run.zero:
        return optimizer.masters_in_parameters()
    return nullcontext() if run.optimizer in UNCOMPRESSED else optimizer.averaged_parameters()


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def train(job: Job, make_communicator: Callable[[], Communicator], texts: Texts) -> dict[str, Any]:
    """Train and evaluate, all ranks together. Returns the row of this run."""
    start = time.monotonic()
    run, text = job.run, texts[job.run.text, job.run.model]
    ours, others = make_communicator(), make_communicator()  # whose bytes count, and those of evaluation
    model = make_model(job)
    torch.manual_seed(job.seed * job.world_size + ours.rank)  # of dropout
    params = list(model.parameters())
    plain = run.optimizer in UNCOMPRESSED
    optimizer = make_optimizer(job, model, ours)
    form = run.options.get("state", "float32")
    named = model.named_parameters()
    state = GradientCompression(named, run.gradients, communicator=ours, state=form) if run.gradients else None
    rival = RIVALS[run.rival](params, ours, **run.rival_options) if run.rival else None
    scheduler = schedule(optimizer, job.steps)
    largest_step, loss_sum, loss_steps = 0.0, torch.zeros(()), 0
    interval = max(5, math.ceil(job.steps / EVALUATIONS))
    curve = []
    for step, batch in enumerate(batches(text["train"], job, ours.rank), start=1):
        loss = loss_of(model, batch)
        loss.backward()
        loss_sum, loss_steps = loss_sum + loss.detach(), loss_steps + 1
        if run.zero:
            optimizer.finish_gradients()  # sent while backward ran
        elif state is not None:
            state.average_gradients()
        elif rival is not None:
            rival.gradients()
        elif plain:
            if run.optimizer not in OPTIMIZERS:
                average_all(params, ours)
        else:
            average_gradients(optimizer)
            with torch.no_grad():
                send_early(optimizer, params)
        clip(run, optimizer, params, others)
        lr = optimizer.param_groups[0]["lr"]
        late = step > job.steps // 5 if plain else optimizer.plan.stage.number == 1.0
        before = [p.detach().clone() for p in params] if late and lr > 0 and ours.rank == 0 else []
        optimizer.step()
        for old, param in zip(before, params, strict=False):
            largest_step = max(largest_step, float((param.detach() - old).abs().max()) / lr)
        if rival is not None:
            rival.parameters(last=step == job.steps)
        if not run.error_feedback:
            for group in optimizer._states:
                group.worker_error.zero_()
                group.server_error.zero_()
        scheduler.step()
        optimizer.zero_grad()
        if step % interval == 0 or step == job.steps:
            with saved_parameters(run, optimizer):
                eval_loss = evaluate(model, text["validation"], others)
            others.all_reduce(loss_sum).wait()
            train_loss, sent = float(loss_sum) / loss_steps / ours.world_size, ours.traffic.total_bytes
            curve.append({"step": step, "eval": finite(eval_loss), "train": finite(train_loss), "bytes": sent})
            loss_sum, loss_steps = torch.zeros(()), 0
    return {
        "name": run.name,
        "world_size": job.world_size,
        "seed": job.seed,
        "steps": job.steps,
        "optimizer": run.optimizer,
        "options": run.options,
        "lr": run.peak_lr,
        "parameters": sum(p.numel() for p in params),
        "eval_loss": curve[-1]["eval"],
        "bytes": curve[-1]["bytes"],
        "rounds": job.steps if plain else int(optimizer.metrics()["rounds"]),
        "switch": None if plain else optimizer.schedule.last_warmup_step,
        "skipped_steps": 0 if plain else optimizer.skipped_steps,
        "largest_step": finite(largest_step),
        "seconds": round(time.monotonic() - start, 2),
        "curve": curve,
    }
