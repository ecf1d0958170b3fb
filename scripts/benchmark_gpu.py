"""Bandwidth that the kernels reach on a GPU, against a device copy measured beside them; FusedAdam against torch's own.

Usage: python scripts/benchmark_gpu.py [--numel 25000000 100000000] [--rounds 30] [--device 0] [--out table.md]

All candidates of a table run interleaved, one after the other in each round; medians are over the rounds, times are the
GPU's own (events), the fractions are of the copy's bytes per second in the same rounds. Bytes are those that the
mathematics needs: every operand read once, every result written once.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _common import markdown, parser_of
from torch import Tensor

from hf_compressopt import FusedAdam, kernels
from hf_compressopt.kernels import (
    AdamUpdate,
    Average,
    Combination,
    CompactErrors,
    Descent,
    Errors,
    LambMoments,
    LambOptions,
    LocalUpdate,
    LogVariance,
    ParameterSync,
    Segment,
    library,
)
from hf_compressopt.kernels.messages import chunk_message_nbytes, message_nbytes

SCALE_BLOCK = 4096
WORLD_SIZE = 8
MOST_CYCLES = 3e9  # of a GPU in a second
IN_8_BITS = 1 + 2 / 128  # bytes of an error
Case = tuple[str, Callable[[], object], float]  # name, what runs, bytes that it moves


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
        for _, run, _ in cases:
            run()
        launching = time.perf_counter() - began
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        torch.cuda._sleep(int(2 * launching * MOST_CYCLES))
        events = []
        for _, run, _ in cases:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        for taken, (start, end) in zip(times, events, strict=True):
            taken.append(start.elapsed_time(end) / 1e3)
    return [statistics.median(taken) for taken in times]


def copy_case(numel: int, device: torch.device) -> Case:
    source, target = torch.empty(numel, device=device), torch.empty(numel, device=device)
    return "device copy", lambda: target.copy_(source), 8.0 * numel


def kernel_cases(numel: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Every kernel on one bucket: a flat side in float32, and one tensor of parameters or gradients of this dtype."""
    x, error, m, v, u, anchor = (torch.rand(numel, device=device) + 0.1 for _ in range(6))
    param, grad = (torch.randn(numel, device=device).to(dtype) for _ in range(2))
    params, grads = [Segment(param, 0, numel, 0)], [Segment(grad, 0, numel, 0)]
    size, signs = param.element_size(), numel / 8
    nbytes = chunk_message_nbytes(numel, WORLD_SIZE, SCALE_BLOCK)
    messages = torch.zeros(sum(nbytes), dtype=torch.uint8, device=device)
    one_scale = torch.zeros(sum(chunk_message_nbytes(numel, WORLD_SIZE, None)), dtype=torch.uint8, device=device)
    kernels.SignFormat(SCALE_BLOCK).compress_with_feedback_(Combination.of(x), error, messages, WORLD_SIZE)
    stride = nbytes[0]
    gathered = torch.zeros(WORLD_SIZE * stride, dtype=torch.uint8, device=device)
    gathered[: messages.numel()] = messages
    y = Average(numel, None, gathered, WORLD_SIZE, SCALE_BLOCK, stride)
    chunk = numel // WORLD_SIZE // 8 * 8
    received = torch.zeros(WORLD_SIZE * message_nbytes(chunk, SCALE_BLOCK), dtype=torch.uint8, device=device)
    served = torch.zeros(message_nbytes(chunk, SCALE_BLOCK), dtype=torch.uint8, device=device)
    momentum = Combination(numel, device, m, 0.9, grads, 0.1)
    descent, lamb = Descent(1e-6, 0.999999, 1e-8, False), LambOptions(0.9, 0.999, 1e-8, 0.01, False)
    factors, rates = torch.ones(1, device=device), torch.full((1,), 1e-6, device=device)
    sums = torch.zeros(1, 3, dtype=torch.float64, device=device)
    compact, of_chunk = CompactErrors.zeros(numel, WORLD_SIZE, device), CompactErrors.zeros(chunk, 1, device)
    codes = torch.randint(0, 160, (numel,), dtype=torch.uint8, device=device)
    variance = LogVariance(codes, torch.zeros(1, dtype=torch.int32, device=device))
    last = Combination(numel, device, None, 0.9, grads, 0.1, last=y)

    def compress(z: Combination, out: Tensor, scale_block: int | None, error: Errors = error) -> Callable[[], object]:
        return lambda: kernels.SignFormat(scale_block).compress_with_feedback_(z, error, out, WORLD_SIZE)

    def average(error: Errors) -> Callable[[], object]:
        return lambda: kernels.SignFormat(SCALE_BLOCK).average_with_feedback_(received, error, served, WORLD_SIZE)

    return [
        ("compress x", compress(Combination.of(x), messages, SCALE_BLOCK), 12 * numel + signs),
        ("compress x, one scale", compress(Combination.of(x), one_scale, None), 12 * numel + signs),
        ("compress momentum and gradient", compress(momentum, messages, SCALE_BLOCK), (12 + size) * numel + signs),
        (
            "compress last average and gradient, errors in 8 bits",
            compress(last, messages, SCALE_BLOCK, compact),
            (2 * IN_8_BITS + size) * numel + 2 * signs,
        ),
        (
            "compress last average and gradient, errors in 8 bits, one scale",
            compress(last, one_scale, None, compact),
            (2 * IN_8_BITS + size) * numel + 2 * signs,
        ),
        (
            f"average {WORLD_SIZE} messages, compress",
            average(error[:chunk]),
            8 * chunk + (WORLD_SIZE + 1) * chunk / 8,
        ),
        (
            f"average {WORLD_SIZE} messages, compress, errors in 8 bits",
            average(of_chunk),
            2 * IN_8_BITS * chunk + (WORLD_SIZE + 1) * chunk / 8,
        ),
        ("decompress", lambda: kernels.on(device).decompress_(y, x), 4 * numel + signs),
        ("combine", lambda: kernels.on(device).combine_(momentum, x), (8 + size) * numel),
        (
            "decompress, Adam",
            lambda: kernels.on(device).apply_adam_(AdamUpdate(y, m, v, params, descent)),
            (8 + 2 * size) * numel + signs,
        ),
        (
            "decompress, Adam without momentum, variance in 8 bits",
            lambda: kernels.on(device).apply_adam_(AdamUpdate(y, None, variance, params, descent)),
            (1 + 2 * size) * numel + signs,
        ),
        (
            "local step",
            lambda: kernels.on(device).local_step_(LocalUpdate(m, v, u, grads, params, 0.9, descent)),
            (20 + 3 * size) * numel,
        ),
        (
            "decompress, sync",
            lambda: kernels.on(device).sync_parameters_(ParameterSync(y, m, anchor, v, u, params, 1.0, descent)),
            (20 + size) * numel + signs,
        ),
        (
            "decompress, LAMB's moments",
            lambda: kernels.on(device).lamb_moments_(LambMoments(y, m, x, v, params, factors, sums, lamb)),
            (20 + size) * numel + signs,
        ),
        ("LAMB's step", lambda: kernels.on(device).lamb_apply_(m, v, params, rates, lamb), (8 + 2 * size) * numel),
        ("sum of squares", lambda: kernels.sum_of_squares([grad], device), size * numel),
    ]


def adam_cases(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Case]:
    """FusedAdam and torch's AdamW on the same float32 parameters; the bytes of p, g, m and v."""

    def optimizer(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[], object]:
        params = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        return make(params).step

    nbytes = 28.0 * sum(torch.Size(shape).numel() for shape in shapes)
    return [
        ("FusedAdam", optimizer(lambda p: FusedAdam(p, lr=1e-6)), nbytes),
        ("torch AdamW fused", optimizer(lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True)), nbytes),
        ("torch AdamW foreach", optimizer(lambda p: torch.optim.AdamW(p, lr=1e-6, foreach=True)), nbytes),
    ]


def table(title: str, cases: Sequence[Case], rounds: int) -> str:
    """The cases as a Markdown table, the first of which is the copy."""
    seconds = measure(cases, rounds)
    rate = cases[0][2] / seconds[0]
    rows = [["", "microseconds", "GB/s", "of the copy"]]
    for (name, _, nbytes), taken in zip(cases, seconds, strict=True):
        reached = nbytes / taken
        rows.append([name, f"{taken * 1e6:.1f}", f"{reached / 1e9:.0f}", f"{reached / rate:.2f}"])
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
            tables.append(table(title, [copy_case(numel, device), *kernel_cases(numel, device, dtype)], options.rounds))
            torch.cuda.empty_cache()
    lists = {
        "one tensor of 25M elements": [(25_000_000,)],
        "GPT-2's 148 tensors, 124M elements": gpt2_like(),
        "400 tensors of 2048 elements": [(2048,)] * 400,
    }
    for name, shapes in lists.items():
        cases = [copy_case(sum(torch.Size(shape).numel() for shape in shapes), device), *adam_cases(shapes, device)]
        tables.append(table(f"AdamW, float32: {name}", cases, options.rounds))
        torch.cuda.empty_cache()
    text = "\n".join(tables) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
