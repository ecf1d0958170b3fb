"""Speed of the native CPU kernels, beside the memory's own speed, the reference and torch.

    python scripts/benchmark_kernels.py                      # kernels and FusedAdam, torch's number of threads
    python scripts/benchmark_kernels.py --threads 1 --numel 25000000 100000000
    python scripts/benchmark_kernels.py --only step          # a compressed step on 2 gloo ranks, 1 thread each

All variants of a table take turns in one run; times are medians. The roofline is an in-place `a += b`; "of roofline" is
the ratio of the bytes per second that a kernel reads and writes to those of the roofline. Kernels that mostly read have
a lower one, `dot(a, b)`: memory takes writes on top of its reads for little, so "of dot" is their measure.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _common import Variants, gloo_ranks, medians, parser_of, print_table
from torch import Tensor

from hf_compressopt import FusedAdam, OnebitAdam, kernels
from hf_compressopt.kernels import (
    AdamUpdate,
    Average,
    Combination,
    Descent,
    IntegerFormat,
    Segment,
    any_nan,
    message_nbytes,
    num_blocks,
)
from hf_compressopt.kernels.integer_messages import Commit
from hf_compressopt.kernels.sketch import SKETCH_NUMEL, sketch_

CPU = torch.device("cpu")
BLOCK = 4096
AVERAGED = (2, 4, 8)  # messages
DESCENT = Descent(1e-3, 1 - 1e-5, 1e-8, False)


@contextmanager
def kernels_from(choice: str) -> Iterator[None]:
    before = os.environ.get("HF_COMPRESSOPT_KERNELS")
    os.environ["HF_COMPRESSOPT_KERNELS"] = choice
    try:
        yield
    finally:
        os.environ.pop("HF_COMPRESSOPT_KERNELS")
        if before is not None:
            os.environ["HF_COMPRESSOPT_KERNELS"] = before


# -- kernels ----------------------------------------------------------------------------------------------------------


class Buffers:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.x, self.error, self.out = torch.randn(numel), torch.randn(numel) * 0.1, torch.empty(numel)
        self.param, self.variance = torch.randn(numel), torch.rand(numel) + 0.1
        self.message = torch.zeros(message_nbytes(numel, BLOCK), dtype=torch.uint8)
        self.whole = torch.zeros(message_nbytes(numel, None), dtype=torch.uint8)
        self.messages = self.message.new_zeros(max(AVERAGED), self.message.numel())
        for message in self.messages:
            message.random_()
            message[: 4 * num_blocks(numel, BLOCK)].view(torch.float32).fill_(0.01)

    def variants(self) -> dict[str, tuple[Callable[[], object], float]]:
        """By name: what to call, and bytes that it must read and write per element."""
        n, segments = self.numel, [Segment(self.param, 0, self.numel, 0)]
        y = Average(n, None, self.messages[0], 1, BLOCK, self.message.numel())
        grads = [Segment(self.variance, 0, n, 0)]
        momentum = Combination(n, CPU, self.x, 0.9, grads, 0.1)
        sent = 1 / 8 + 4 / BLOCK

        def compress(z: Combination, message: Tensor, block: int | None) -> None:
            kernels.SignFormat(block).compress_(z, self.error, message, 1)

        def average_compress(count: int) -> tuple[Callable[[], None], float]:
            received = self.messages[:count].view(-1)

            def call() -> None:
                kernels.SignFormat(BLOCK).average_compress_(received, self.error, self.message, count)

            return call, 8 + (count + 1) * sent

        return {
            "compress": (lambda: compress(Combination.of(self.x), self.message, BLOCK), 12 + sent),
            "momentum + compress": (lambda: compress(momentum, self.message, BLOCK), 16 + sent),
            "compress, one scale": (lambda: compress(Combination.of(self.x), self.whole, None), 20 + sent),
            "decompress": (lambda: kernels.on(CPU).decompress_(y, self.out), 4 + sent),
            **{f"decompress + average of {count}, compress": average_compress(count) for count in AVERAGED},
            "decompress + apply": (
                lambda: kernels.on(CPU).apply_adam_(AdamUpdate(y, self.out, self.variance, segments, DESCENT)),
                16 + sent,
            ),
        }

    def integer_variants(self, bits: int) -> dict[str, tuple[Callable[[], object], float]]:
        """The same of b-bit integers."""
        n, form, whole = self.numel, IntegerFormat(bits), [Segment(self.param, 0, self.numel, 0)]
        z = Combination(n, CPU, grads=whole, beta=0.5)
        message = torch.zeros(form.nbytes(n), dtype=torch.uint8)
        form.compress_(z, self.error, message, 1)
        messages, y, sent = (
            message.repeat(max(AVERAGED)),
            form.average(n, message, 1, message.numel()),
            bits / 8 + 1 / 64,
        )

        def average_compress(count: int, new_error: Tensor) -> tuple[Callable[[], None], float]:
            received = messages[: count * message.numel()]
            return lambda: form.average_compress_(received, self.error, new_error, message, count), (
                8 + (count + 1) * sent
            )

        return {
            f"int{bits}: compress": (lambda: form.compress_(z, self.error, message, 1), 8 + sent),
            **{f"int{bits}: average of {count}": average_compress(count, self.out) for count in AVERAGED},
            f"int{bits}: average of 2 in place": average_compress(2, self.error),
            f"int{bits}: decompress": (lambda: form.decompress_(y, self.out), 4 + sent),
            f"int{bits}: commit": (lambda: form.commit_(Commit(z, self.error, message, y, whole)), 16 + 2 * sent),
            f"int{bits}: any_nan": (lambda: any_nan(y), 1 / 64),
        }

    def norm_variants(self) -> dict[str, tuple[Callable[[], object], float]]:
        """Sums of squares, without a sketch and with one."""
        y, squares = torch.zeros(SKETCH_NUMEL), torch.zeros((), dtype=torch.float64)
        whole = [Segment(self.variance, 0, self.numel, 0)]
        return {
            "sum of squares": (lambda: kernels.sum_of_squares([self.variance], CPU), 4),
            "sum of squares + sketch": (lambda: sketch_(whole, 0, 1, y, squares), 4),
        }

    def roofline(self) -> None:
        self.error.add_(self.out)

    def dot(self) -> None:
        torch.dot(self.x, self.variance)

    def torch_and_packbits(self) -> None:
        """Compression as one writes it with torch and numpy."""
        self.error.add_(self.x)
        blocks = self.error[: self.numel // BLOCK * BLOCK].view(-1, BLOCK)
        scales = torch.linalg.vector_norm(blocks, dim=1).div_(BLOCK**0.5)
        negative = blocks < 0
        packed = np.packbits(negative.numpy().reshape(-1), bitorder="little")
        self.message[: packed.size] = torch.from_numpy(packed)
        blocks.sub_(torch.where(negative, -scales.unsqueeze(1), scales.unsqueeze(1)))


def benchmark_kernels(numel: int, rounds: int, slow_rounds: int) -> None:
    buffers = Buffers(numel)
    variants = {
        **buffers.variants(),
        **buffers.integer_variants(4),
        **buffers.integer_variants(8),
        **buffers.norm_variants(),
    }
    buffers.out.zero_()
    with kernels_from("native"):
        calls: Variants = {"roofline": buffers.roofline, "dot": buffers.dot}
        calls |= {name: call for name, (call, _) in variants.items()}
        native = medians(calls, rounds)
    with kernels_from("reference"):
        slow: Variants = {name: call for name, (call, _) in variants.items()}
        slow["torch + packbits"] = buffers.torch_and_packbits
        others = medians(slow, slow_rounds)
    speed, reading = 12 * numel / native["roofline"], 8 * numel / native["dot"]
    rows = [["kernel", "ms", "GB/s", "of roofline", "of dot", "reference / native", "torch + packbits / native"]]
    rows.append(
        ["a += b", f"{native['roofline'] * 1e3:.2f}", f"{speed / 1e9:.1f}", "1", f"{speed / reading:.2f}", "", ""]
    )
    rows.append(
        ["dot(a, b)", f"{native['dot'] * 1e3:.2f}", f"{reading / 1e9:.1f}", f"{reading / speed:.2f}", "1", "", ""]
    )
    for name, (_, nbytes) in variants.items():
        seconds = native[name]
        rate = nbytes * numel / seconds
        packbits = f"{others['torch + packbits'] / seconds:.1f}" if name == "compress" else ""
        shares = f"{rate / speed:.2f}", f"{rate / reading:.2f}", f"{others[name] / seconds:.1f}"
        rows.append([name, f"{seconds * 1e3:.2f}", f"{rate / 1e9:.1f}", *shares, packbits])
    print_table(f"{numel} elements, {torch.get_num_threads()} threads, {kernels.implementation(CPU)}", rows)


# -- FusedAdam --------------------------------------------------------------------------------------------------------


def parameters(numels: list[int]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(numel)) for numel in numels]
    for param in params:
        param.grad = torch.randn_like(param) * 0.01
    return params


def benchmark_adam(title: str, numels: list[int], rounds: int) -> None:
    options: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}
    ours = FusedAdam(parameters(numels), **options)
    theirs = torch.optim.AdamW(parameters(numels), fused=True, **options)
    foreach = torch.optim.AdamW(parameters(numels), foreach=True, **options)
    result = medians({"ours": ours.step, "fused": theirs.step, "foreach": foreach.step}, rounds)
    rows = [["optimizer", "us", "times FusedAdam"]]
    for name, key in (("FusedAdam", "ours"), ("torch AdamW, fused", "fused"), ("torch AdamW, foreach", "foreach")):
        rows.append([name, f"{result[key] * 1e6:.0f}", f"{result[key] / result['ours']:.2f}"])
    print_table(f"{title}, {torch.get_num_threads()} threads", rows)


def benchmark_whole_step(numels: list[int], rounds: int) -> None:
    """Unscale, clip, Adam and a bfloat16 copy."""
    scale, max_norm = torch.ones(()), 1.0  # gradients stay unscaled, and must not vanish from step to step
    found_inf = torch.zeros(())
    options: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}

    def fused_adam(write_grads: bool) -> Callable[[], None]:
        optimizer = FusedAdam(parameters(numels), max_grad_norm=max_norm, write_grads=write_grads, **options)
        optimizer.copies = {p: p.detach().bfloat16() for p in optimizer.param_groups[0]["params"]}

        def step() -> None:
            optimizer.grad_scale, optimizer.found_inf = scale, found_inf
            optimizer.step()

        return step

    def torch_form(fold: bool) -> Callable[[], None]:
        params = parameters(numels)
        copies = [p.detach().bfloat16() for p in params]
        optimizer: Any = torch.optim.AdamW(params, fused=True, **options)

        def step() -> None:
            grads = [p.grad for p in params]
            if fold:  # unscaled and clipped inside the fused operator
                norm = torch.nn.utils.get_total_norm(grads) / scale
                optimizer.grad_scale = scale / torch.clamp(max_norm / (norm + 1e-6), max=1.0)
                optimizer.found_inf = (~norm.isfinite()).float()
            else:
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scale.reciprocal())
                torch.nn.utils.clip_grad_norm_(params, max_norm)
            optimizer.step()
            torch._foreach_copy_(copies, [p.detach() for p in params])

        return step

    variants = {
        "ours": fused_adam(True),
        "unwritten": fused_adam(False),
        "passes": torch_form(False),
        "folded": torch_form(True),
    }
    result = medians(variants, rounds)
    rows = [["step", "ms", "times FusedAdam"]]
    names = {
        "ours": "FusedAdam",
        "unwritten": "FusedAdam, write_grads=False",
        "passes": "torch: unscale, clip, fused, copy",
        "folded": "torch: norm, fused, copy",
    }
    for key, name in names.items():
        rows.append([name, f"{result[key] * 1e3:.2f}", f"{result[key] / result['ours']:.2f}"])
    title = f"unscale + clip + Adam + bfloat16 copy, {sum(numels)} elements in {len(numels)} tensors"
    print_table(f"{title}, {torch.get_num_threads()} threads", rows)


# -- a step on several ranks ------------------------------------------------------------------------------------------


def benchmark_step(rank: int, world_size: int, numel: int, rounds: int, store: str) -> None:
    """A compressed step of OnebitAdam against all_reduce + torch's fused AdamW."""
    with gloo_ranks(rank, world_size, store):
        compare_steps(rank, world_size, [numel // 100] * 100, rounds)


def compare_steps(rank: int, world_size: int, numels: list[int], rounds: int) -> None:
    torch.manual_seed(0)
    params = parameters(numels)
    optimizer = OnebitAdam(params, lr=1e-6, weight_decay=0.01, freeze_step=2)
    for _ in range(2):
        optimizer.step()  # the same gradients on all ranks, as if they were averaged
    torch._foreach_mul_([p.grad for p in params], 1.0 + rank)
    optimizer.step()
    torch.manual_seed(0)
    baseline_params = parameters(numels)
    flat = torch.cat([p.grad for p in baseline_params])  # the best case: all gradients in one buffer
    for param, grad in zip(baseline_params, flat.split(numels), strict=True):
        param.grad = grad
    baseline = torch.optim.AdamW(baseline_params, lr=1e-6, weight_decay=0.01, fused=True)

    def all_reduce_and_adam() -> None:
        flat.mul_(1 / world_size)
        dist.all_reduce(flat)
        baseline.step()

    def reference_step() -> None:
        with kernels_from("reference"):
            optimizer.step()

    variants = {"OnebitAdam": optimizer.step, "reference": reference_step, "all_reduce": all_reduce_and_adam}
    result = medians(variants, rounds, before=dist.barrier)
    if rank == 0:
        rows = [["step", "ms", "of all_reduce + AdamW"]]
        names = {
            "OnebitAdam": f"OnebitAdam, compressed, {kernels.implementation(CPU)}",
            "reference": "OnebitAdam, compressed, reference kernels",
            "all_reduce": "all_reduce + torch AdamW, fused",
        }
        for key, name in names.items():
            rows.append([name, f"{result[key] * 1e3:.1f}", f"{result[key] / result['all_reduce']:.2f}"])
        print_table(f"{sum(numels)} parameters, {world_size} gloo ranks over loopback, 1 thread each", rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=["kernels", "adam", "step"], default=["kernels", "adam"])
    parser.add_argument("--numel", type=int, nargs="+", default=[25_000_000, 100_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slow-rounds", type=int, default=3, help="of the reference")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    for threads in args.threads:
        torch.set_num_threads(threads)
        if "kernels" in args.only:
            for numel in args.numel:
                benchmark_kernels(numel, args.rounds, args.slow_rounds)
        if "adam" in args.only:
            benchmark_adam("one tensor of 25000000 elements", [25_000_000], args.rounds)
            benchmark_adam("150 tensors of 1000 elements", [1000] * 150, 20 * args.rounds)
            benchmark_whole_step([250_000] * 100, args.rounds)
    if "step" in args.only:
        with tempfile.TemporaryDirectory() as directory:
            store = os.path.join(directory, "store")
            torch.multiprocessing.spawn(
                benchmark_step, (args.ranks, args.numel[0], args.rounds, store), nprocs=args.ranks
            )


if __name__ == "__main__":
    main()
