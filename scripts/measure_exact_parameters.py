"""Measure how many 16-bit parameters a step of fine-tuning changes, and the bits that encodings of the changes take.

A model has float32 master weights, which AdamW updates, and computes with their rounding to bfloat16, as with
ZeroOptimizer. The change of an element is the difference of its two bfloat16 values as integers in the order of the
numbers. Models and texts are those of real_models.py; the learning rate is constant, or rises linearly over the first
ten steps ("warmup"). The gradients are those of one rank, clipped to a norm of 1. The first ten steps are measured, and
of later ones those that --every divides.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import check_least, parser_of, print_table
from _convergence import ALL_RUNS, MAX_GRAD_NORM, WEIGHT_DECAY, batches, examples_of, loss_of, make_model, param_groups
from real_models import fetched
from torch import Tensor, nn
from torch.nn.functional import pad

MODELS = {"MiniLM": "AdamW, MiniLM", "SmolLM2-135M": "AdamW, SmolLM2"}
RATES = (3e-6, 1e-5, 2e-5, 1e-4)
RISE = 10  # steps of a warmup of the learning rate
#: First and last step, from 1, over which a row is the mean.
PERIODS = {"1": (1, 1), "2 to 10": (2, 10), "11 to 40": (11, 40), "41 to 100": (41, 100)}
BLOCK = 256

# -- encodings --------------------------------------------------------------------------------------------------------


def ordered(values: Tensor) -> Tensor:
    """Return bfloat16 numbers as integers in their order. values: [n]. Returns [n] int32."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -0x8000 - bits - 1, bits)


def bitmap_16(change: Tensor) -> float:
    """Bits of a map of the changed elements, and 16 for each of them. change: [n] int32, not 0 at least once."""
    return change.numel() + 16 * float((change != 0).sum())


def two_bits(change: Tensor) -> float:
    return 2 * change.numel() + 16 * float((change.abs() > 1).sum())


def bitmap_4(change: Tensor) -> float:
    """Bits of a map, 4 for each changed element, and 16 more for each beyond +-7."""
    size = change.abs()
    return change.numel() + 4 * float((size > 0).sum()) + 16 * float((size > 7).sum())


def in_blocks(change: Tensor, codes: int) -> float:
    """Bits in blocks of 256, each with a size of 16 bits: empty, plain where that is shorter, or a map.

    The map is a bit per byte of the map, and its bytes that are not 0. Changes then take codes of 2 bits (+1, -1, 4
    bits more up to +-9, 16 bits more), or of 4 bits (up to +-7, 16 bits more); each kind fills whole bytes.
    """
    size = pad(change, (0, -change.numel() % BLOCK)).abs().view(-1, BLOCK)
    changed = size > 0
    used = changed.view(-1, BLOCK // 8, 8).any(dim=2).sum(dim=1)
    count = changed.sum(dim=1)
    if codes == 2:
        wide = (size > 9).sum(dim=1)
        middle = (size > 1).sum(dim=1) - wide
        rest = (count + 3) // 4 + (middle + 1) // 2
    else:
        wide = (size > 7).sum(dim=1)
        rest = (count + 1) // 2
    nbytes = BLOCK // 64 + used + rest + 2 * wide
    nbytes = torch.where(count > 0, nbytes.clamp(max=2 * BLOCK), 0)
    return 8.0 * float(nbytes.sum() + 2 * len(nbytes))


def entropy(change: Tensor) -> float:
    """Bits that no code of single changes goes below, whose distribution is known to both sides."""
    counts = torch.bincount(change.clamp(-1000, 1000) + 1000).double()
    shares = counts[counts > 0] / change.numel()
    return float(-(shares * shares.log2()).sum()) * change.numel()


ENCODINGS: dict[str, Callable[[Tensor], float]] = {
    "map + 16": bitmap_16,
    "2 bits": two_bits,
    "map + 4": bitmap_4,
    "blocks, 4 bits": lambda change: in_blocks(change, 4),
    "blocks, 2 bits": lambda change: in_blocks(change, 2),
    "entropy": entropy,
}

# -- training ---------------------------------------------------------------------------------------------------------


class Masters:
    """Float32 master weights of a model, whose parameters are their rounding to bfloat16, held in float32."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.copies = [nn.Parameter(param.detach().clone()) for param in self.params]
        twin = dict(zip(map(id, self.params), self.copies, strict=True))
        groups = param_groups(model, WEIGHT_DECAY)
        groups = [{**group, "params": [twin[id(p)] for p in group["params"]]} for group in groups]
        self.optimizer = torch.optim.AdamW(groups, lr=lr)
        self.publish()

    @torch.no_grad()
    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.params, MAX_GRAD_NORM)
        for param, copy in zip(self.params, self.copies, strict=True):
            copy.grad, param.grad = param.grad, None
        self.optimizer.step()

    @torch.no_grad()
    def changes(self) -> dict[str, float]:
        """Return the sums over all elements of what is measured, between the parameters and the new masters."""
        found = dict.fromkeys(("elements", "changed", "beyond", *ENCODINGS), 0.0)
        for param, copy in zip(self.params, self.copies, strict=True):
            new = copy.detach().to(torch.bfloat16)
            for old, now in zip(param.detach().view(-1).split(1 << 22), new.view(-1).split(1 << 22), strict=True):
                change = ordered(now) - ordered(old.to(torch.bfloat16))
                found["elements"] += change.numel()
                found["changed"] += float((change != 0).sum())
                found["beyond"] += float((change.abs() > 1).sum())
                for name, bits in ENCODINGS.items():
                    found[name] += bits(change)
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters."""
        for param, copy in zip(self.params, self.copies, strict=True):
            param.copy_(copy.to(torch.bfloat16))


def measure(name: str, lr: float, rises: bool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a model and a learning rate, one for each period."""
    run = ALL_RUNS[MODELS[name]]
    model = make_model(run, 0, Path())
    masters = Masters(model, lr)
    examples = examples_of(run.text, run.model)["train"]
    steps: dict[int, dict[str, float]] = {}
    for number, batch in enumerate(batches(examples, arguments.steps, arguments.batch, 0, 0, 1), start=1):
        for group in masters.optimizer.param_groups:
            group["lr"] = lr * min(1.0, number / RISE) if rises else lr
        loss_of(model, batch)[0].backward()
        masters.step()
        if number <= RISE or number % arguments.every == 0:
            steps[number] = masters.changes()
        masters.publish()
    rows = []
    for title, (first, last) in PERIODS.items():
        chosen = [step for number, step in steps.items() if first <= number <= last]
        if not chosen:
            continue
        total = math.fsum(step["elements"] for step in chosen)
        shares = {key: round(math.fsum(step[key] for step in chosen) / total, 4) for key in chosen[0]}
        shares["elements"] = int(chosen[0]["elements"])
        most = max(step["blocks, 2 bits"] / step["elements"] for step in chosen)
        rows.append({"model": name, "lr": lr, "warmup": rises, "steps": title, **shares, "most": round(most, 4)})
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--every", type=int, default=1, help="distance of the steps that are measured after the tenth")
    parser.add_argument("--json", type=Path, help="file of the rows, which others that it has stay in")
    arguments = parser.parse_args()
    check_least(parser, arguments, {"steps": 1, "batch": 1, "every": 1})
    for name in ("smollm2", "minilm", "snippets"):
        fetched(name)
    found: list[dict[str, Any]] = []
    for name in arguments.models:
        for lr in arguments.rates:
            for rises in (False, True) if lr == RATES[2] else (False,):
                mine = measure(name, lr, rises, arguments)
                heads = ["model", "lr", "warmup", "steps", "changed", "beyond", *ENCODINGS]
                print_table(f"{name}, lr {lr:g}", [heads, *([str(row[head]) for head in heads] for row in mine)])
                found += mine
                if arguments.json is not None:
                    keys = [(row["model"], row["lr"], row["warmup"]) for row in found]
                    before = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
                    kept = [row for row in before if (row["model"], row["lr"], row["warmup"]) not in keys]
                    lines = ",\n".join(json.dumps(row) for row in [*kept, *found])
                    arguments.json.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
