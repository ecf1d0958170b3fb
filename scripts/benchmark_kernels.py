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
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _common import Variants, gloo_ranks, medians, parser_of, print_table
from _kernel_cases import Case, integer_cases, sign_cases

from hf_compressopt import FusedAdam, OnebitAdam, kernels

CPU = torch.device("cpu")
AVERAGED = (2, 4, 8)  # messages
LARGE_BUCKETS = 50.0  # MiB of float32 values; the default is 25


@contextmanager
def kernels_from(choice: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, HF_COMPRESSOPT_KERNELS=choice):
        yield


# -- kernels ----------------------------------------------------------------------------------------------------------


def plain_passes(numel: int) -> list[Case]:
    """The rooflines."""
    a, b, c, zeros = torch.randn(numel), torch.randn(numel), torch.rand(numel), torch.zeros(numel)
    return [
        Case("a += b", lambda: a.add_(zeros), 12, "a += b"),
        Case("a *= c", lambda: a.mul_(1.0), 8, "a *= c"),
        Case("a = b", lambda: kernels.copy_(b, a), 8, "a = b"),
        Case("a = c", lambda: b.zero_(), 4, "a = c"),
        Case("dot(a, b)", lambda: torch.dot(a, c), 8, "dot(a, b)"),
    ]


def benchmark_kernels(numel: int, rounds: int, slow_rounds: int, signs: bool) -> None:
    measured = sign_cases(numel, CPU, torch.float32, AVERAGED) if signs else []
    measured += integer_cases(numel, CPU, AVERAGED)
    everything = plain_passes(numel) + measured
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with kernels_from("native"):
        seconds = medians({case.name: case.call for case in everything}, rounds, clock=clock)
    with kernels_from("reference"):
        slow: Variants = {case.name: case.call for case in measured} if slow_rounds > 0 else {}
        others = medians(slow, slow_rounds, clock=clock)
    rates = {case.name: case.nbytes * numel / seconds[case.name] for case in everything}
    rows = [["kernel", "ms", "GB/s", "of a += b", "roofline", "of roofline", "reference / native"]]
    for case in everything:
        name, rate = case.name, rates[case.name]
        slower = f"{others[name] / seconds[name]:.1f}" if name in others else ""
        shares = f"{rate / rates['a += b']:.2f}", case.like, f"{rate / rates[case.like]:.2f}"
        rows.append([name, f"{seconds[name] * 1e3:.2f}", f"{rate / 1e9:.1f}", *shares, slower])
    print_table(f"{numel} elements, {torch.get_num_threads()} threads, {kernels.implementation(CPU)}", rows)


# -- FusedAdam --------------------------------------------------------------------------------------------------------


def parameters(numels: list[int]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(numel)) for numel in numels]
    for param in params:
        param.grad = torch.randn_like(param) * 0.01
    return params


def report(title: str, kind: str, variants: Variants, rounds: int, before: Callable[[], object] = lambda: None) -> None:
    """Print the times of variants, and how many times that of the first one each takes. Of ranks, rank 0 prints."""
    seconds = medians(variants, rounds, before)
    first = next(iter(seconds.values()))
    rows = [[kind, "ms", "of the first"]]
    rows += [[name, f"{value * 1e3:.3f}", f"{value / first:.2f}"] for name, value in seconds.items()]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print_table(title, rows)


def benchmark_adam(title: str, numels: list[int], rounds: int) -> None:
    options: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}
    variants: Variants = {
        "FusedAdam": FusedAdam(parameters(numels), **options).step,
        "torch AdamW, fused": torch.optim.AdamW(parameters(numels), fused=True, **options).step,
        "torch AdamW, foreach": torch.optim.AdamW(parameters(numels), foreach=True, **options).step,
    }
    report(f"{title}, {torch.get_num_threads()} threads", "optimizer", variants, rounds)


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

    variants: Variants = {
        "FusedAdam": fused_adam(True),
        "FusedAdam, write_grads=False": fused_adam(False),
        "torch: unscale, clip, fused, copy": torch_form(False),
        "torch: norm, fused, copy": torch_form(True),
    }
    title = f"unscale + clip + Adam + bfloat16 copy, {sum(numels)} elements in {len(numels)} tensors"
    report(f"{title}, {torch.get_num_threads()} threads", "step", variants, rounds)


# -- a step on several ranks ------------------------------------------------------------------------------------------


def compressed_step(numels: list[int], state: str, bucket_cap_mb: float = 25.0) -> Callable[[], Any]:
    """The step of an optimizer in its compressed stage."""
    torch.manual_seed(0)
    params = parameters(numels)
    optimizer = OnebitAdam(params, lr=1e-6, weight_decay=0.01, freeze_step=2, state=state, bucket_cap_mb=bucket_cap_mb)
    for _ in range(2):
        optimizer.step()  # the same gradients on all ranks, as if they were averaged
    torch._foreach_mul_([p.grad for p in params], 1.0 + dist.get_rank())
    optimizer.step()
    return optimizer.step


def benchmark_step(rank: int, world_size: int, numel: int, rounds: int, store: str) -> None:
    """A compressed step of OnebitAdam against all_reduce + torch's fused AdamW, on a rank."""
    with gloo_ranks(rank, world_size, store):
        compare_steps([numel // 100] * 100, rounds)


def compare_steps(numels: list[int], rounds: int) -> None:
    params = parameters(numels)
    flat = torch.cat([p.grad for p in params])  # the best case: all gradients in one buffer
    for param, grad in zip(params, flat.split(numels), strict=True):
        param.grad = grad
    baseline, wide = (
        torch.optim.AdamW(params, lr=1e-6, weight_decay=0.01, fused=True),
        compressed_step(numels, "float32"),
    )

    def all_reduce_and_adam() -> None:
        flat.mul_(1 / dist.get_world_size())
        dist.all_reduce(flat)
        baseline.step()

    def reference_step() -> None:
        with kernels_from("reference"):
            wide()

    variants: Variants = {
        "all_reduce + torch AdamW, fused": all_reduce_and_adam,
        f"OnebitAdam, compressed, {kernels.implementation(CPU)}": compressed_step(numels, "compact"),
        f"the same, bucket_cap_mb={LARGE_BUCKETS:g}": compressed_step(numels, "compact", LARGE_BUCKETS),
        "the same, state=float32": wide,
        "the same, state=float32, reference kernels": reference_step,
    }
    title = f"{sum(numels)} parameters, {dist.get_world_size()} gloo ranks over loopback, 1 thread each"
    report(title, "step", variants, rounds, before=dist.barrier)


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
