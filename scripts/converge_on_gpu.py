"""Train language models on one GPU with several ranks in one process, and compare loss and bytes with AdamW's.

    python scripts/make_tokens.py                         # once, on any machine
    python scripts/converge_on_gpu.py --models 10M 124M --world-sizes 8 --seeds 0 1
    python scripts/converge_on_gpu.py --device cpu --models tiny --steps 20

Each rank is a replica with the package's own optimizer, kernels, errors and messages (_loopback.py); all share the
GPU's one stream. Forward and backward of a replica are a CUDA graph. The global batch is the same whatever the number
of ranks. AdamW runs once, on one rank with the whole batch. No token is trained on twice. Losses and bytes are real;
seconds are not those of a cluster, since the ranks take turns on one GPU.

Every finished run is a line of OUT/convergence.jsonl; the same command goes on behind the lines that are there.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _common import MB, REPOSITORY, check_least, parser_of
from _convergence import Examples, Model, Run, SmallDecoder, Training, batches, finite, schedule
from _loopback import World
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator

VOCABULARY = 8192
#: Tokens of a step over all ranks are batch x tokens: 16,384, but for tiny ones.
_ALIKE: dict[str, Any] = {"dropout": 0.0, "tokens": 256, "batch": 64}
MODELS = {
    "tiny": Model(False, 512, 16, 1e-2, width=32, layers=2, heads=2, batch=16, dropout=0.0),
    "10M": Model(False, VOCABULARY, adamw_rate=1e-3, width=320, layers=6, heads=5, **_ALIKE),
    "30M": Model(False, VOCABULARY, adamw_rate=6e-4, width=512, layers=8, heads=8, **_ALIKE),
    # the words beyond 8,192 never come: their rows make the model as large as GPT-2
    "124M": Model(False, 50257, adamw_rate=6e-4, width=768, layers=12, heads=12, **_ALIKE),
}
LARGE_BUCKETS = {"bucket_cap_mb": 100.0}  # fewer launches
METHODS = {
    "AdamW": Run("AdamW", "AdamW"),
    "int4": Run("AdamW, int4 gradients", "AdamW", LARGE_BUCKETS, gradients="int4"),
    "OnebitAdam": Run("OnebitAdam", "OnebitAdam", LARGE_BUCKETS),
    "ZeroOneAdam": Run("ZeroOneAdam", "ZeroOneAdam", LARGE_BUCKETS),
}
EVALUATIONS = 5


@dataclass
class Settings:
    """What the ranks of a run share."""

    run: Run
    seed: int
    steps: int
    device: torch.device

    def autocast(self) -> AbstractContextManager[Any]:
        """bfloat16 on a GPU; a graph can hold no cache of casts."""
        kind = self.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False)


class Replica:
    """A rank's model and optimizer. Backward belongs in the main thread, updates in the thread of the rank."""

    def __init__(self, settings: Settings, ours: Communicator, others: Communicator) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.model = SmallDecoder(settings.run.model).to(settings.device)
        self.training = Training(settings.run, settings.steps, self.model, ours, others)
        self.scheduler = schedule(self.training.optimizer, settings.steps, settings.run.model)
        self.graph: torch.cuda.CUDAGraph | None = None

    def backward(self, tokens: Tensor) -> Tensor:
        """Set the gradients of this rank's part of the batch, [rows, tokens]. Returns the loss, []."""
        if self.graph is None:
            return self._backward(tokens.to(self.settings.device))
        self.tokens.copy_(tokens)
        self.graph.replay()
        for param, grad in zip(self.training.params, self.grads, strict=True):
            param.grad = grad
        return self.loss

    def _backward(self, tokens: Tensor) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        with self.settings.autocast():
            loss = self.model(tokens, tokens)
        loss.backward()
        return loss.detach()

    def capture(self, tokens: Tensor, pool: Any) -> Any:
        """Make the graph of backward, in the memory of the replicas before. Returns that memory for the next."""
        self.tokens = tokens.to(self.settings.device, copy=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._backward(self.tokens)
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.loss = self._backward(self.tokens)
        self.graph, self.grads = graph, [param.grad for param in self.training.params]
        return graph.pool()

    def update(self) -> None:
        """Exchange gradients, clip, and step."""
        self.training.exchange()
        self.training.optimizer.step()
        self.scheduler.step()

    def evaluate(self, examples: Examples) -> float:
        with self.settings.autocast():
            return self.training.evaluate(self.model, examples)[0]


def read_tokens(folder: Path, name: str, model: Model) -> Examples:
    """Blocks of tokens: [blocks, tokens] int64."""
    file = folder / f"{name}.bin"
    if not file.exists():
        sys.exit(f"converge_on_gpu: {file} is missing: run `python scripts/make_tokens.py`")
    tokens = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.int16)
    count = len(tokens) // model.tokens
    blocks = tokens[: count * model.tokens].view(count, model.tokens).long() % model.vocabulary
    return {"input_ids": blocks, "labels": blocks}


def train(
    settings: Settings, world_size: int, folder: Path, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Train and evaluate. Returns the run's row, or None if it had to stop."""
    began, model, device = time.monotonic(), settings.run.model, settings.device
    text = {name: read_tokens(folder, name, model) for name in ("train", "validation")}
    held_out = {name: blocks[:512].to(device) for name, blocks in text["validation"].items()}
    if settings.steps * model.batch > len(text["train"]["labels"]):
        sys.exit(f"converge_on_gpu: there are tokens for {len(text['train']['labels']) // model.batch} steps only")
    world = World(world_size, device)
    pairs = list(zip(world.communicators(), world.communicators(), strict=True))
    replicas = [Replica(settings, ours, others) for ours, others in pairs]
    graphs, curve, loss_sum = False, [], torch.zeros((), device=device)
    interval = math.ceil(settings.steps / EVALUATIONS)
    for step, batch in enumerate(batches(text["train"], settings.steps, model.batch, settings.seed, 0, 1), start=1):
        tokens = batch["input_ids"]
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)  # the host does not wait for the steps before
        parts = tokens.chunk(world_size)
        if step == 1 and device.type == "cuda":
            graphs = capture_all(replicas, parts)
        for replica, part in zip(replicas, parts, strict=True):
            loss_sum += replica.backward(part)
        world.run(lambda rank: replicas[rank].update())
        if step % interval == 0 or step == settings.steps:
            loss = world.run(lambda rank: replicas[rank].evaluate(held_out))[0]
            seen = float(loss_sum) / world_size / (step - (curve[-1]["step"] if curve else 0))
            sent = replicas[0].training.ours.traffic.total_bytes
            curve.append({"step": step, "eval": finite(loss), "train": finite(seen), "bytes": sent})
            loss_sum.zero_()
            print(f"  step {step}: {loss:.4f}, {time.monotonic() - began:.0f} s", flush=True)
        if stop():
            return None
    training = replicas[0].training
    compressed = training.compressed
    return {
        "name": settings.run.name,
        "world_size": world_size,
        "seed": settings.seed,
        "steps": settings.steps,
        "optimizer": settings.run.optimizer,
        "lr": settings.run.peak_lr,
        "parameters": sum(p.numel() for p in training.params),
        "tokens_per_step": model.batch * model.tokens,
        "eval_loss": curve[-1]["eval"],
        "bytes": curve[-1]["bytes"],
        "switch": training.optimizer.schedule.last_warmup_step if compressed else None,
        "seconds": round(time.monotonic() - began, 2),
        "graphs": graphs,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "curve": curve,
    }


def capture_all(replicas: list[Replica], parts: tuple[Tensor, ...]) -> bool:
    """Make the graphs; False, and no graph, if that fails."""
    pool = None
    try:
        for replica, part in zip(replicas, parts, strict=True):
            pool = replica.capture(part, pool)
    except RuntimeError as error:
        print(f"no CUDA graphs: {error}", flush=True)
        for replica in replicas:
            replica.graph = None
        return False
    return True


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["name"], row["world_size"], row["seed"], row["steps"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", type=torch.device, default="cuda", help="cuda or cpu (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["10M"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long; no run begins that late")
    parser.add_argument("--tokens", type=Path, default=REPOSITORY / "build" / "tokens", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of convergence.jsonl (%(default)s)")
    arguments = parser.parse_args()
    check_least(parser, arguments, {"steps": 10, "world_sizes": 1})
    device = arguments.device
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, end = arguments.out / "convergence.jsonl", time.monotonic() + arguments.seconds
    done = {key_of(json.loads(line)) for line in file.read_text().splitlines()} if file.exists() else set()
    for model in arguments.models:
        for seed in arguments.seeds:
            for method in arguments.methods:
                for world_size in [1] if method == "AdamW" else arguments.world_sizes:
                    run = replace(METHODS[method], model=MODELS[model])
                    settings = Settings(run, seed, arguments.steps, device)
                    title = f"{model}, {method}, {world_size} ranks, seed {seed}"
                    if (model, run.name, world_size, seed, arguments.steps) in done:
                        continue
                    print(title, flush=True)
                    row = train(settings, world_size, arguments.tokens, lambda: time.monotonic() > end)
                    if row is None:
                        print(f"{title}: no time is left", flush=True)
                        return
                    with file.open("a") as rows:
                        rows.write(json.dumps({"model": model, **row}) + "\n")
                    loss, sent = row["eval_loss"], row["bytes"] / MB
                    print(f"{title}: loss {loss}, {sent:,.1f} MB sent per rank, {row['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
