"""Bandwidth that the kernels reach on a GPU, against a device copy measured beside them; FusedAdam against torch's own.

Usage: python scripts/benchmark_gpu.py [--numel 25000000 100000000] [--rounds 30] [--device 0] [--out table.md]

All candidates of a table run interleaved, one after the other in each round; medians are over the rounds, times are the
GPU's own (events), the fractions are of the copy's bytes per second in the same rounds. _kernel_cases.py has the bytes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _common import markdown, parser_of
from _kernel_cases import Case, integer_cases, sign_cases
from torch import Tensor

from hf_compressopt import FusedAdam, kernels
from hf_compressopt.kernels import library

AVERAGED = (8,)  # messages
MOST_CYCLES = 3e9  # of a GPU in a second


def gpt2_like() -> list[tuple[int, ...]]:
    """Shapes of the parameters of GPT-2 small, 124M elements in 148 tensors."""
    width = 768
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *block * 12, (width,), (width,)]


def measure(cases: Sequence[Case], rounds: int) -> list[float]:
    """Median seconds of each case on the GPU, which sleeps while the host launches a round, so that none waits."""
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for case in cases:
            case.call()
        launching = time.perf_counter() - began
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        torch.cuda._sleep(int(2 * launching * MOST_CYCLES))
        events = []
        for case in cases:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            case.call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        for taken, (start, end) in zip(times, events, strict=True):
            taken.append(start.elapsed_time(end) / 1e3)
    return [statistics.median(taken) for taken in times]


def copy_case(numel: int, device: torch.device) -> Case:
    source, target = torch.empty(numel, device=device), torch.empty(numel, device=device)
    return Case("device copy", lambda: target.copy_(source), 8)


def adam_cases(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Case]:
    """FusedAdam and torch's AdamW on the same float32 parameters; the bytes of p, g, m and v."""

    def optimizer(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[], object]:
        params = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        return make(params).step

    return [
        Case("FusedAdam", optimizer(lambda p: FusedAdam(p, lr=1e-6)), 28),
        Case("torch AdamW fused", optimizer(lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True)), 28),
        Case("torch AdamW foreach", optimizer(lambda p: torch.optim.AdamW(p, lr=1e-6, foreach=True)), 28),
    ]


def table(title: str, numel: int, device: torch.device, cases: Sequence[Case], rounds: int) -> str:
    """The cases as a Markdown table, beside a copy."""
    cases = [copy_case(numel, device), *cases]
    seconds = measure(cases, rounds)
    rows = [["", "microseconds", "GB/s", "of the copy"]]
    for case, taken in zip(cases, seconds, strict=True):
        reached = case.nbytes / taken
        share = reached / (cases[0].nbytes / seconds[0])
        rows.append([case.name, f"{taken * 1e6:.1f}", f"{reached * numel / 1e9:.0f}", f"{share:.2f}"])
    torch.cuda.empty_cache()
    return "\n".join([f"\n**{title}**\n", *markdown(rows)])


def main(arguments: Sequence[str]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--numel", type=int, nargs="+", default=[25_000_000, 100_000_000])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", options.device)
    if not torch.cuda.is_available():
        sys.exit("benchmark_gpu: torch sees no CUDA device here, so there is nothing to measure")
    if missing := library.why_not(device):
        sys.exit(f"benchmark_gpu: the native kernels cannot run on {device}: {missing}")
    torch.cuda.set_device(device)
    heading = f"{torch.cuda.get_device_name(device)}, {kernels.implementation(device)}, torch {torch.__version__}"
    tables = [f"{heading}, median of {options.rounds} interleaved rounds"]
    for numel in options.numel:
        for dtype in (torch.float32, torch.bfloat16):
            title = f"{numel:,} elements, parameters and gradients in {str(dtype).removeprefix('torch.')}"
            cases = sign_cases(numel, device, dtype, AVERAGED)
            tables.append(table(title, numel, device, cases, options.rounds))
        title = f"{numel:,} elements, messages of 4 and 8 bits"
        tables.append(table(title, numel, device, integer_cases(numel, device, AVERAGED), options.rounds))
    lists = {
        "one tensor of 25M elements": [(25_000_000,)],
        "GPT-2's 148 tensors, 124M elements": gpt2_like(),
        "400 tensors of 2048 elements": [(2048,)] * 400,
    }
    for name, shapes in lists.items():
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        cases = adam_cases(shapes, device)
        tables.append(table(f"AdamW, float32: {name}", numel, device, cases, options.rounds))
    text = "\n".join(tables) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
