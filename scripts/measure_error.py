"""Measure the error of averaged gradients by many quantizers, on real gradients of pretrained models.

vNMSE = ||estimate - mean||^2 / ||mean||^2 of one average, the measure of DynamiQ (arXiv 2602.08923), without error
feedback; and the same of the sum of 20 averages, with error feedback and without. Every quantizer works as messages
do here: each rank quantizes what it sends, the servers average and quantize again,

    estimate = Q(mean_r Q(g_r + e_r) + s),  e_r and s what each Q has missed so far (0 without error feedback),

on the matrices of a model; vectors travel in full precision. PowerSGD has no servers: it works on the mean. The models
are those of real_models.py, whose parameters stay as they are; a rank's gradient is that of a batch of its own. Of
SmolLM2 every second block counts besides the embedding, for the sums every tenth, so that 16 ranks fit into memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _common import parser_of, print_table
from _convergence import ALL_RUNS, Run, examples_of, loss_of, make_model
from quantizers import QUANTIZERS, Quantizer
from real_models import fetched
from torch import Tensor, nn

RANKS, SUMMED, SUM_RANKS, BATCHES = (2, 4, 8, 16), 20, 4, 3
MODELS = {"SmolLM2-135M": "AdamW, SmolLM2", "MiniLM": "AdamW, MiniLM"}
CHUNK = 1 << 22  # elements that are quantized at once: a multiple of all blocks


def applied(quantizer: Quantizer, values: Tensor) -> Tensor:
    return torch.cat([quantizer(part) for part in torch.split(values, CHUNK)])


class Average:
    """The averages of a quantizer, one after another."""

    def __init__(self, quantizer: Quantizer, *, feedback: bool) -> None:
        self.quantizer, self.feedback = quantizer, feedback
        self.errors: list[Tensor | float] = []

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the estimate of the mean of flat gradients."""
        total = torch.zeros_like(gradients[0])
        self.errors = self.errors or [0.0] * (len(gradients) + 1)
        for rank, gradient in enumerate(gradients):
            total += self._sent(rank, gradient)
        return self._sent(len(gradients), total.div_(len(gradients)))

    def _sent(self, place: int, values: Tensor) -> Tensor:
        wanted = values + self.errors[place]
        found = applied(self.quantizer, wanted)
        if self.feedback:
            self.errors[place] = wanted.sub_(found)
        return found


class LowRank:
    """PowerSGD's averages (arXiv 1905.09727, Algorithms 1 and 2); ``shapes`` are those of the matrices."""

    def __init__(self, shapes: Sequence[torch.Size], rank: int, *, feedback: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shapes, self.feedback = [(shape[0], shape[1:].numel()) for shape in shapes], feedback
        self.factors = [torch.randn(columns, rank, generator=generator) for _, columns in self.shapes]
        self.errors: list[Tensor | float] = [0.0] * len(shapes)
        sent = sum(rank * (rows + columns) for rows, columns in self.shapes)
        self.bits = 32 * sent / sum(rows * columns for rows, columns in self.shapes)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        mean = torch.stack(list(gradients)).mean(dim=0) if len(gradients) < 8 else sum(gradients) / len(gradients)
        parts = torch.split(mean, [rows * columns for rows, columns in self.shapes])
        found = []
        for number, (part, shape) in enumerate(zip(parts, self.shapes, strict=True)):
            wanted = part.view(shape) + self.errors[number]
            basis = torch.linalg.qr(wanted @ self.factors[number]).Q
            self.factors[number] = wanted.T @ basis
            estimate = basis @ self.factors[number].T
            if self.feedback:
                self.errors[number] = wanted - estimate
            found.append(estimate.view(-1))
        return torch.cat(found)


# -- gradients --------------------------------------------------------------------------------------------------------


def chosen(model: nn.Module, every: int) -> list[Tensor]:
    """The matrices of which gradients are measured; the others need none."""
    found = []
    for name, param in model.named_parameters():
        block = next((int(word) for word in name.split(".") if word.isdigit()), 0)
        param.requires_grad_(param.ndim > 1 and block % every == 0)
        if param.requires_grad:
            found.append(param)
    return found


def gradients(run: Run, model: nn.Module, params: Sequence[Tensor], ranks: int, times: int) -> Iterator[list[Tensor]]:
    """Yield the flat gradients of all ranks, each of a batch of its own, so many times."""
    examples = examples_of(run.text, run.model)["train"]
    order = torch.randperm(len(examples["labels"]), generator=torch.Generator().manual_seed(0))
    size, count = run.model.batch, 0
    for _ in range(times):
        found = []
        for _ in range(ranks):
            rows = order[torch.arange(count, count + size) % len(order)]
            count += size
            loss_of(model, {name: values[rows] for name, values in examples.items()})[0].backward()
            found.append(torch.cat([param.grad.reshape(-1) for param in params]))
            model.zero_grad()
        yield found


def error(estimate: Tensor, mean: Tensor) -> float:
    return float((estimate - mean).double().square().sum() / mean.double().square().sum())


def mean_of(parts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float64)
    for part in parts:
        total += part
    return (total / len(parts)).float()


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """The rows of a model."""
    run = ALL_RUNS[MODELS[name]]
    model = make_model(run, 0, Path())
    model.eval()  # no dropout: the error is the quantizer's
    rows: dict[tuple[str, int], dict[str, object]] = {}

    params = chosen(model, 2 if name == "SmolLM2-135M" else 1)
    shapes = [param.shape for param in params]
    singles: dict[tuple[str, int], list[float]] = {}
    for flat in gradients(run, model, params, max(RANKS), arguments.batches):
        for ranks in RANKS:
            mean = mean_of(flat[:ranks])
            methods = {title: Average(each, feedback=False) for title, each in QUANTIZERS.items()}
            lines = {**methods, "PowerSGD, rank 4": LowRank(shapes, 4, feedback=False)}
            for title, average in lines.items():
                singles.setdefault((title, ranks), []).append(error(average(flat[:ranks]), mean))
                bits = average.bits if isinstance(average, LowRank) else average.quantizer.bits
                rows[title, ranks] = {"model": name, "quantizer": title, "ranks": ranks, "bits": round(bits, 4)}
        print(f"{name}: {len(singles[next(iter(singles))])} of {arguments.batches} batches", flush=True)
    for key, values in singles.items():
        rows[key] |= {"vnmse": sum(values) / len(values), "elements": sum(map(torch.Size.numel, shapes))}

    params = chosen(model, 10 if name == "SmolLM2-135M" else 1)
    shapes = [param.shape for param in params]
    sums = {
        (title, feedback): Average(each, feedback=feedback)
        for title, each in QUANTIZERS.items()
        for feedback in (True, False)
    }
    lows = {("PowerSGD, rank 4", feedback): LowRank(shapes, 4, feedback=feedback) for feedback in (True, False)}
    methods_of_sums = {**sums, **lows}
    total = torch.zeros(sum(map(torch.Size.numel, shapes)))
    totals = {key: torch.zeros_like(total) for key in methods_of_sums}
    for flat in gradients(run, model, params, SUM_RANKS, arguments.summed):
        total += mean_of(flat)
        for key, average in methods_of_sums.items():
            totals[key] += average(flat)
    for (title, feedback), found in totals.items():
        rows[title, SUM_RANKS]["sum with feedback" if feedback else "sum without"] = error(found, total)
    return list(rows.values())


def table_of_errors(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The errors of each model and quantizer: single averages by ranks, and sums of averages."""
    table = [["model", "quantizer", "bits", *(f"{ranks} ranks" for ranks in RANKS), "sum, feedback", "sum, without"]]
    for model, quantizer in dict.fromkeys((row["model"], row["quantizer"]) for row in rows):
        chosen = {row["ranks"]: row for row in rows if (row["model"], row["quantizer"]) == (model, quantizer)}
        summed = chosen[SUM_RANKS]
        values = [chosen[ranks]["vnmse"] for ranks in RANKS] + [summed["sum with feedback"], summed["sum without"]]
        table.append([model, quantizer, f"{summed['bits']:.2f}", *(f"{value:.1e}" for value in values)])
    return table


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help="averages of which the mean is shown (%(default)s)"
    )
    parser.add_argument("--summed", type=int, default=SUMMED, help="averages of which the sum is shown (%(default)s)")
    parser.add_argument("--json", type=Path, help="file of the rows, in which those of other models stay")
    arguments = parser.parse_args()
    for model in ("smollm2", "minilm", "snippets"):
        fetched(model)
    rows: list[dict[str, object]] = []
    for name in arguments.models:
        rows += measure(name, arguments)
        if arguments.json is not None:
            before = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
            kept = [row for row in before if row["model"] not in arguments.models]
            lines = ",\n".join(json.dumps(row, default=float) for row in [*kept, *rows])
            arguments.json.write_text(f"[\n{lines}\n]\n")
    print_table("error of averaged gradients", table_of_errors(rows))


if __name__ == "__main__":
    main()
