"""Speed of the native CPU kernels, beside the memory's own speed, the reference and torch.

    python scripts/benchmark_kernels.py                      # kernels and FusedAdam, torch's number of threads
    python scripts/benchmark_kernels.py --threads 1 --numel 25000000 100000000
    python scripts/benchmark_kernels.py --only integers --threads 1   # messages of 4 and 8 bits, and sketches
    python scripts/benchmark_kernels.py --only step          # a compressed step on 2 gloo ranks, 1 thread each

All variants of a table take turns in one run; times are medians. Kernels on one thread are measured in its CPU time,
which other work on the machine changes less than the time of day.

The roofline of a kernel is the fastest plain pass of the same run with its mix of reads and writes: memory moves more
bytes per second for a pass that writes where it has just read than for one that only reads, since the writes travel
beside the reads. "of roofline" is the bytes per second that a kernel must read and write, over those of that pass:

    a += b     8 bytes read per element, 4 of them written back: the sign kernels that update an error in place
    a *= c     4 bytes read and written back: as many writes as reads, in place
    a = b      4 bytes read and 4 written elsewhere, past the caches: as many writes as reads
    a = c      4 bytes written: decompression
    dot(a, b)  8 bytes read: kernels that read floats and write small messages or sums

"of a += b" measures all kernels by one pass.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from hf_compressopt.kernels.errors import CompactErrors, Errors
from hf_compressopt.kernels.sketch import SKETCH_NUMEL, sketch_
from hf_compressopt.kernels.variance import LogVariance, encode_variance_

CPU = torch.device("cpu")
BLOCK = 4096
AVERAGED = (2, 4, 8)  # messages
LARGE_BUCKETS = 50.0  # MiB of float32 values; the default is 25
IN_8_BITS = 1 + 2 / 128  # bytes of an error
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


@dataclass(frozen=True)
class Kernel:
    """A function to call, the bytes that it must read and write per element, and the plain pass with the same mix."""

    call: Callable[[], object]
    nbytes: float
    like: str


class Buffers:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.x, self.error, self.out = torch.randn(numel), torch.randn(numel) * 0.1, torch.zeros(numel)
        self.zeros = torch.zeros(numel)
        self.param, self.variance = torch.randn(numel), torch.rand(numel) + 0.1
        self.message = torch.zeros(message_nbytes(numel, BLOCK), dtype=torch.uint8)
        self.whole = torch.zeros(message_nbytes(numel, None), dtype=torch.uint8)
        self.messages = self.message.new_zeros(max(AVERAGED), self.message.numel())
        for message in self.messages:
            message.random_()
            message[: 4 * num_blocks(numel, BLOCK)].view(torch.float32).fill_(0.01)

    def plain_passes(self) -> dict[str, Kernel]:
        """The rooflines."""
        return {
            name: Kernel(call, nbytes, name)
            for name, call, nbytes in (
                ("a += b", lambda: self.error.add_(self.zeros), 12),
                ("a *= c", lambda: self.error.mul_(1.0), 8),
                ("a = b", lambda: kernels.copy_(self.out, self.x), 8),
                ("a = c", lambda: self.out.zero_(), 4),
                ("dot(a, b)", lambda: torch.dot(self.x, self.variance), 8),
            )
        }

    def sign_kernels(self) -> dict[str, Kernel]:
        n, segments = self.numel, [Segment(self.param, 0, self.numel, 0)]
        y = Average(n, None, self.messages[0], 1, BLOCK, self.message.numel())
        grads = [Segment(self.variance, 0, n, 0)]
        momentum = Combination(n, CPU, self.x, 0.9, grads, 0.1)
        sent = 1 / 8 + 4 / BLOCK

        def compress(z: Combination, message: Tensor, block: int | None) -> None:
            kernels.SignFormat(block).compress_with_feedback_(z, self.error, message, 1)

        def average_compress(count: int) -> Kernel:
            received = self.messages[:count].view(-1)

            def call() -> None:
                kernels.SignFormat(BLOCK).average_with_feedback_(received, self.error, self.message, count)

            return Kernel(call, 8 + (count + 1) * sent, "a *= c")

        update = AdamUpdate(y, self.out, self.variance, segments, DESCENT)
        return {
            "compress": Kernel(lambda: compress(Combination.of(self.x), self.message, BLOCK), 12 + sent, "a += b"),
            "momentum + compress": Kernel(lambda: compress(momentum, self.message, BLOCK), 16 + sent, "a += b"),
            "compress, one scale": Kernel(
                lambda: compress(Combination.of(self.x), self.whole, None), 20 + sent, "a += b"
            ),
            "decompress": Kernel(lambda: kernels.on(CPU).decompress_(y, self.out), 4 + sent, "a = c"),
            **{f"decompress + average of {count}, compress": average_compress(count) for count in AVERAGED},
            "decompress + apply": Kernel(lambda: kernels.on(CPU).apply_adam_(update), 16 + sent, "a += b"),
        }

    def compact_kernels(self) -> dict[str, Kernel]:
        """The sign kernels with errors and variances in 8 bits, and the last average as messages."""
        n, error = self.numel, CompactErrors.zeros(self.numel)
        y = Average(n, None, self.messages[0], 1, BLOCK, self.message.numel())
        grads, params = [Segment(self.variance, 0, n, 0)], [Segment(self.param, 0, n, 0)]
        momentum = Combination(n, CPU, None, 0.9, grads, 0.1, last=y)
        codes, form, sent = torch.zeros(n, dtype=torch.uint8), kernels.SignFormat(BLOCK), 1 / 8 + 4 / BLOCK
        update = AdamUpdate(
            y, None, LogVariance(codes, torch.tensor([encode_variance_(self.variance, codes)]).int()), params, DESCENT
        )

        def average_compress(count: int) -> Kernel:
            received = self.messages[:count].view(-1)
            return Kernel(
                lambda: form.average_with_feedback_(received, error, self.message, count),
                2 * IN_8_BITS + (count + 1) * sent,
                "a *= c",
            )

        of = {
            "momentum + compress": Kernel(
                lambda: form.compress_with_feedback_(momentum, error, self.message, 1),
                4 + 2 * IN_8_BITS + 2 * sent,
                "dot(a, b)",
            ),
            **{f"decompress + average of {count}, compress": average_compress(count) for count in AVERAGED},
            "decompress + apply": Kernel(lambda: kernels.on(CPU).apply_adam_(update), 9 + sent, "a *= c"),
        }
        return {f"8 bits: {name}": kernel for name, kernel in of.items()}

    def integer_kernels(self, bits: int) -> dict[str, Kernel]:
        n, form, whole = self.numel, IntegerFormat(bits), [Segment(self.param, 0, self.numel, 0)]
        z = Combination(n, CPU, grads=whole, beta=0.5)
        message = torch.zeros(form.nbytes(n), dtype=torch.uint8)
        form.compress_(z, self.error, message, 1)
        messages, y = message.repeat(max(AVERAGED)), form.average(n, message, 1, message.numel())
        sent = bits / 8 + 1 / 64

        def average_compress(count: int, error: Errors, new_error: Errors, each: float, like: str) -> Kernel:
            received = messages[: count * message.numel()]
            return Kernel(
                lambda: form.average_compress_(received, error, new_error, message, count),
                2 * each + (count + 1) * sent,
                like,
            )

        compact = CompactErrors.zeros(n)
        of = {
            "compress": Kernel(lambda: form.compress_(z, self.error, message, 1), 8 + sent, "dot(a, b)"),
            **{f"average of {count}": average_compress(count, self.error, self.out, 4, "a = b") for count in AVERAGED},
            "average of 2 in place": average_compress(2, self.error, self.error, 4, "a *= c"),
            "decompress": Kernel(lambda: form.decompress_(y, self.out), 4 + sent, "a = c"),
            "compress, errors in 8 bits": Kernel(
                lambda: form.compress_(z, compact, message, 1), 4 + IN_8_BITS + sent, "dot(a, b)"
            ),
            **{
                f"average of {count}, errors in 8 bits": average_compress(count, compact, compact, IN_8_BITS, "a *= c")
                for count in AVERAGED
            },
            "any_nan": Kernel(lambda: any_nan(y), 1 / 64, "dot(a, b)"),
        }
        return {f"int{bits}: {name}": kernel for name, kernel in of.items()}

    def norm_kernels(self) -> dict[str, Kernel]:
        """Sums of squares, without a sketch and with one."""
        y, squares = torch.zeros(SKETCH_NUMEL), torch.zeros((), dtype=torch.float64)
        whole = [Segment(self.variance, 0, self.numel, 0)]
        return {
            "sum of squares": Kernel(lambda: kernels.sum_of_squares([self.variance], CPU), 4, "dot(a, b)"),
            "sum of squares + sketch": Kernel(lambda: sketch_(whole, 0, 1, y, squares), 4, "dot(a, b)"),
        }


def benchmark_kernels(numel: int, rounds: int, slow_rounds: int, signs: bool) -> None:
    buffers = Buffers(numel)
    measured = {**buffers.sign_kernels(), **buffers.compact_kernels()} if signs else {}
    measured |= {**buffers.integer_kernels(4), **buffers.integer_kernels(8), **buffers.norm_kernels()}
    plain = buffers.plain_passes()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with kernels_from("native"):
        seconds = medians({name: kernel.call for name, kernel in (plain | measured).items()}, rounds, clock=clock)
    with kernels_from("reference"):
        slow: Variants = {name: kernel.call for name, kernel in measured.items()}
        others = medians(slow, slow_rounds, clock=clock) if slow_rounds > 0 else {}
    rates = {name: kernel.nbytes * numel / seconds[name] for name, kernel in (plain | measured).items()}
    rows = [["kernel", "ms", "GB/s", "of a += b", "roofline", "of roofline", "reference / native"]]
    for name, kernel in (plain | measured).items():
        rate, slower = rates[name], f"{others[name] / seconds[name]:.1f}" if name in others else ""
        shares = f"{rate / rates['a += b']:.2f}", kernel.like, f"{rate / rates[kernel.like]:.2f}"
        rows.append([name, f"{seconds[name] * 1e3:.2f}", f"{rate / 1e9:.1f}", *shares, slower])
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


def compressed_step(rank: int, numels: list[int], state: str, bucket_cap_mb: float = 25.0) -> Callable[[], Any]:
    """The step of an optimizer in its compressed stage."""
    torch.manual_seed(0)
    params = parameters(numels)
    optimizer = OnebitAdam(params, lr=1e-6, weight_decay=0.01, freeze_step=2, state=state, bucket_cap_mb=bucket_cap_mb)
    for _ in range(2):
        optimizer.step()  # the same gradients on all ranks, as if they were averaged
    torch._foreach_mul_([p.grad for p in params], 1.0 + rank)
    optimizer.step()
    return optimizer.step


def compare_steps(rank: int, world_size: int, numels: list[int], rounds: int) -> None:
    compact, wide = (compressed_step(rank, numels, state) for state in ("compact", "float32"))
    large = compressed_step(rank, numels, "compact", LARGE_BUCKETS)
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
            wide()

    variants = {
        "compact": compact,
        "large": large,
        "float32": wide,
        "reference": reference_step,
        "all_reduce": all_reduce_and_adam,
    }
    result = medians(variants, rounds, before=dist.barrier)
    if rank == 0:
        rows = [["step", "ms", "of all_reduce + AdamW"]]
        names = {
            "compact": f"OnebitAdam, compressed, state=compact, {kernels.implementation(CPU)}",
            "large": f"the same, bucket_cap_mb={LARGE_BUCKETS:g}",
            "float32": f"OnebitAdam, compressed, state=float32, {kernels.implementation(CPU)}",
            "reference": "OnebitAdam, compressed, state=float32, reference kernels",
            "all_reduce": "all_reduce + torch AdamW, fused",
        }
        for key, name in names.items():
            rows.append([name, f"{result[key] * 1e3:.1f}", f"{result[key] / result['all_reduce']:.2f}"])
        print_table(f"{sum(numels)} parameters, {world_size} gloo ranks over loopback, 1 thread each", rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=["kernels", "integers", "adam", "step"], default=["kernels", "adam"]
    )
    parser.add_argument("--numel", type=int, nargs="+", default=[25_000_000, 100_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slow-rounds", type=int, default=3, help="of the reference")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    for threads in args.threads:
        torch.set_num_threads(threads)
        if {"kernels", "integers"} & set(args.only):
            for numel in args.numel:
                benchmark_kernels(numel, args.rounds, args.slow_rounds, signs="kernels" in args.only)
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
