"""Speed of the native kernels on a CPU or a GPU, beside the memory's own speed, the reference and torch.

    python scripts/benchmark_kernels.py                      # kernels and FusedAdam, torch's number of threads
    python scripts/benchmark_kernels.py --threads 1 --numel 25000000 100000000
    python scripts/benchmark_kernels.py --only integers --threads 1   # messages of 4 and 8 bits, and sketches
    python scripts/benchmark_kernels.py --only step          # a compressed step on 2 gloo ranks, 1 thread each
    python scripts/benchmark_kernels.py --device cuda        # kernels and FusedAdam on a GPU

All variants of a table take turns in one run; times are medians. Kernels on one thread are measured in its CPU time,
which other work on the machine changes less than the time of day; those on a GPU by its own events.

Bytes are those that the mathematics needs: every operand read once, every result written once. The roofline of a kernel
is the fastest plain pass of the same run with its mix of reads and writes: memory moves more bytes per second for a
pass that writes where it has just read than for one that only reads, since the writes travel beside the reads. "of
roofline" is the bytes per second that a kernel must read and write, over those of that pass:

    a += b     8 bytes read per element, 4 of them written back: the sign kernels that update an error in place
    a *= c     4 bytes read and written back: as many writes as reads, in place
    a = b      4 bytes read and 4 written elsewhere, past the caches: as many writes as reads
    a = c      4 bytes written: decompression
    dot(a, b)  8 bytes read: kernels that read floats and write small messages or sums

"of a = b" measures all kernels by one pass, a copy.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _common import Variants, medians, on_ranks, parser_of, print_table
from torch import Tensor

from hf_compressopt import FusedAdam, OnebitAdam, kernels
from hf_compressopt.kernels import Combination, IntegerFormat, Segment, SignFormat, library
from hf_compressopt.kernels.compact import CompactErrors, Errors, LogVariance, encode_variance_

CPU = torch.device("cpu")
AVERAGED = (2, 4, 8)  # messages
LARGE_BUCKETS = 50.0  # MiB of float32 values; the default is 25
BLOCK = 4096
IN_8_BITS = 1 + 2 / 128  # bytes of an error
SIGN = 1 / 8 + 4 / BLOCK  # bytes of an element in a message
MOST_CYCLES = 3e9  # of a GPU in a second

# -- what is timed ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call to be timed, the bytes per element that it must move, and the plain pass with the same mix."""

    name: str
    call: Callable[[], object]
    nbytes: float
    like: str = "a += b"


def call_of(device: torch.device, name: str, *operands: object) -> Callable[[], object]:
    """Return a call of a kernel, native or the reference, as is chosen when it is made."""
    return lambda: getattr(kernels.on(device), name)(*operands)


def sign_cases(numel: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """The kernels of signs and of optimizers; parameters and gradients have this dtype, all else is float32."""
    x, error, out, v, u, anchor = (torch.rand(numel, device=device) + 0.1 for _ in range(6))
    param, grad = (torch.randn(numel, device=device).to(dtype) for _ in range(2))
    params, grads, size = [Segment(param, 0, numel, 0)], [Segment(grad, 0, numel, 0)], param.element_size()
    message, whole, served = (
        torch.zeros(SignFormat(block).nbytes(numel), dtype=torch.uint8, device=device) for block in (BLOCK, None, BLOCK)
    )
    kernels.on(device).compress_(SignFormat(BLOCK), Combination.of(x), error, message, 1, error)
    y, received = kernels.Average(numel, SignFormat(BLOCK), message, 1, message.numel()), message.repeat(max(AVERAGED))
    momentum = Combination(numel, device, x, 0.9, grads, 0.1)
    last = Combination(numel, device, None, 0.9, grads, 0.1, last=y)
    compact, codes = CompactErrors.zeros(numel, 1, device), torch.zeros(numel, dtype=torch.uint8, device=device)
    exponent = torch.tensor([encode_variance_(v, codes)], dtype=torch.int32, device=device)
    descent, lamb = kernels.Descent(1e-6, 1 - 1e-5, 1e-8, False), kernels.LambOptions(0.9, 0.999, 1e-8, 0.01, False)
    factors, rates = torch.ones(1, device=device), torch.full((1,), 1e-6, device=device)
    sums = torch.zeros(1, 3, dtype=torch.float64, device=device)
    adam = kernels.AdamUpdate(y, out, v, params, descent)
    small_adam = kernels.AdamUpdate(y, None, LogVariance(codes, exponent), params, descent)
    local_step = kernels.LocalUpdate(out, v, u, grads, params, 0.9, descent)
    sync = kernels.ParameterSync(y, out, anchor, v, u, params, 1.0, descent)
    moments = kernels.LambMoments(y, out, x, v, params, factors, sums, lamb)
    kernel = partial(call_of, device)

    def compress(z: Combination, out: Tensor, block: int | None, error: Errors = error) -> Callable[[], object]:
        return kernel("compress_", SignFormat(block), z, error, out, 1, error)

    def average(name: str, count: int, error: Errors, each: float) -> Case:
        form, part = SignFormat(BLOCK), received[: count * message.numel()]
        call = kernel("average_compress_", form, part, error, error, served, count)
        return Case(name, call, 2 * each + (count + 1) * SIGN, "a *= c")

    small = 2 * IN_8_BITS + size + 2 * SIGN
    return [
        Case("compress", compress(Combination.of(x), message, BLOCK), 12 + SIGN),
        Case("compress, one scale", compress(Combination.of(x), whole, None), 20 + SIGN),
        Case("momentum + compress", compress(momentum, message, BLOCK), 12 + size + SIGN),
        Case("8 bits: momentum + compress", compress(last, served, BLOCK, compact), small, "dot(a, b)"),
        *(average(f"average of {count}, compress", count, error, 4) for count in AVERAGED),
        *(average(f"8 bits: average of {count}, compress", count, compact, IN_8_BITS) for count in AVERAGED),
        Case("decompress", kernel("decompress_", y, out), 4 + SIGN, "a = c"),
        Case("combine", kernel("combine_", momentum, out), 8 + size),
        Case("decompress + Adam", kernel("apply_adam_", adam), 8 + 2 * size + SIGN),
        Case("8 bits: decompress + Adam", kernel("apply_adam_", small_adam), 1 + 2 * size + SIGN, "a *= c"),
        Case("local step of 0/1 Adam", kernel("local_step_", local_step), 20 + 3 * size),
        Case("decompress + sync of 0/1 Adam", kernel("sync_parameters_", sync), 20 + size + SIGN),
        Case("decompress + LAMB's moments", kernel("lamb_moments_", moments), 20 + size + SIGN),
        Case("LAMB's step", kernel("lamb_apply_", out, v, params, rates, lamb), 8 + 2 * size),
    ]


def integer_cases(numel: int, device: torch.device) -> list[Case]:
    """The kernels of messages of 4 and 8 bits, and norms; gradients are float32."""
    grad, error, out = (torch.randn(numel, device=device) for _ in range(3))
    whole, found = [Segment(grad, 0, numel, 0)], []
    for bits in (4, 8):
        form, z = IntegerFormat(bits), Combination(numel, device, grads=whole, beta=0.5)
        message = torch.zeros(form.nbytes(numel), dtype=torch.uint8, device=device)
        cases = low_bit_cases(form, z, message, error, out)
        found += [replace(case, name=f"int{bits}: {case.name}") for case in cases]
    sketch = torch.zeros(kernels.SKETCH_NUMEL, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    return [
        *found,
        Case("sum of squares", lambda: kernels.sum_of_squares([grad], device), 4, "dot(a, b)"),
        Case("sum of squares + sketch", call_of(device, "sketch_", whole, 0, 1, sketch, squares), 4, "dot(a, b)"),
    ]


def low_bit_cases(form: IntegerFormat, z: Combination, message: Tensor, error: Tensor, out: Tensor) -> list[Case]:
    """The kernels of a format."""
    sent, compact = message.numel() / out.numel(), CompactErrors.zeros(out.numel(), 1, out.device)
    kernels.on(out).compress_(form, z, error, message, 1)
    messages, y = message.repeat(max(AVERAGED)), kernels.Average(out.numel(), form, message, 1, message.numel())
    served, small, kernel = torch.zeros_like(message), ", errors in 8 bits", partial(call_of, out.device)

    def average(name: str, count: int, error: Errors, new_error: Errors, each: float, like: str) -> Case:
        received, nbytes = messages[: count * message.numel()], 2 * each + (count + 1) * sent
        return Case(name, kernel("average_compress_", form, received, error, new_error, served, count), nbytes, like)

    numel, device = out.numel(), out.device
    tops, floors = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, device=device)
    variance = LogVariance(torch.full((numel,), 9, dtype=torch.uint8, device=device), tops)
    refresh = kernels.VarianceUpdate(y, variance, [Segment(None, 0, numel, 0)], 0.9)
    sums = torch.zeros(1, 3, dtype=torch.float64, device=device)
    return [
        Case("compress", kernel("compress_", form, z, error, message, 1), 8 + sent, "dot(a, b)"),
        *(average(f"average of {count}", count, error, out, 4, "a = b") for count in AVERAGED),
        Case("decompress", kernel("decompress_", y, out), 4 + sent, "a = c"),
        Case(f"compress{small}", kernel("compress_", form, z, compact, message, 1), 4 + IN_8_BITS + sent, "dot(a, b)"),
        *(average(f"average of {count}{small}", count, compact, compact, IN_8_BITS, "a *= c") for count in AVERAGED),
        Case("any_nan", kernel("any_nan", y), 1 / 64, "dot(a, b)"),
        Case("refresh, sums", kernel("variance_sums_", refresh, sums), 1 + sent, "dot(a, b)"),
        Case("refresh, codes", kernel("refresh_variance_", refresh, floors, tops, 1), 2 + sent, "a *= c"),
    ]


def plain_passes(numel: int, device: torch.device) -> list[Case]:
    """The rooflines."""
    a, b, c = (torch.rand(numel, device=device) for _ in range(3))
    zeros = torch.zeros(numel, device=device)
    copy = partial(kernels.copy_, b, a) if device == CPU else partial(a.copy_, b)
    return [
        Case("a += b", lambda: a.add_(zeros), 12, "a += b"),
        Case("a *= c", lambda: a.mul_(1.0), 8, "a *= c"),
        Case("a = b", copy, 8, "a = b"),
        Case("a = c", lambda: b.zero_(), 4, "a = c"),
        Case("dot(a, b)", lambda: torch.dot(a, c), 8, "dot(a, b)"),
    ]


# -- times ------------------------------------------------------------------------------------------------------------


def kernels_from(choice: str) -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, HF_COMPRESSOPT_KERNELS=choice)


def seconds_on_gpu(variants: Variants, rounds: int) -> dict[str, float]:
    """Median seconds of each variant by the GPU's events; it sleeps while the host launches a round, so none waits."""
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for call in variants.values():
            call()
        launching = time.perf_counter() - began
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        torch.cuda._sleep(int(2 * launching * MOST_CYCLES))
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in variants}
        for name, call in variants.items():
            events[name][0].record()
            call()
            events[name][1].record()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def timed(variants: Variants, rounds: int, device: torch.device) -> dict[str, float]:
    if device != CPU:
        return seconds_on_gpu(variants, rounds)
    return medians(variants, rounds, clock=time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)


def place(device: torch.device) -> str:
    where = f"{torch.get_num_threads()} threads" if device == CPU else torch.cuda.get_device_name(device)
    return f"{where}, {kernels.implementation(device)}"


def measure_kernels(
    numel: int, measured: list[Case], *, rounds: int, slow: int, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each kernel and each plain pass; slow: rounds of the reference, on a CPU."""
    everything = plain_passes(numel, device) + measured
    with kernels_from("native"):
        seconds = timed({case.name: case.call for case in everything}, rounds, device)
    others = {}
    if slow > 0 and device == CPU:
        with kernels_from("reference"):
            others = timed({case.name: case.call for case in measured}, slow, device)
    rates = {case.name: case.nbytes * numel / seconds[case.name] for case in everything}
    rows = []
    for case in everything:
        name, rate = case.name, rates[case.name]
        row = {"kernel": name, "ms": seconds[name] * 1e3, "gb_per_s": rate / 1e9, "of_copy": rate / rates["a = b"]}
        row |= {"roofline": case.like, "of_roofline": rate / rates[case.like]}
        rows.append(row | ({"slower": others[name] / seconds[name]} if name in others else {}))
    return rows


def benchmark_kernels(
    title: str, numel: int, measured: list[Case], *, rounds: int, slow: int, device: torch.device
) -> None:
    rows = [["kernel", "ms", "GB/s", "of a = b", "roofline", "of roofline", "reference / native"]]
    for row in measure_kernels(numel, measured, rounds=rounds, slow=slow, device=device):
        rates = f"{row['ms']:.3f}", f"{row['gb_per_s']:.1f}", f"{row['of_copy']:.2f}"
        slower = f"{row['slower']:.1f}" if "slower" in row else ""
        rows.append([row["kernel"], *rates, row["roofline"], f"{row['of_roofline']:.2f}", slower])
    print_table(f"{numel:,} elements, {title}, {place(device)}", rows)


# -- FusedAdam --------------------------------------------------------------------------------------------------------


def parameters(numels: Sequence[int], device: torch.device = CPU) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(numel, device=device)) for numel in numels]
    for param in params:
        param.grad = torch.randn_like(param) * 0.01
    return params


def report(title: str, kind: str, seconds: dict[str, float]) -> None:
    """Print the times of variants, and how many times that of the first one each takes."""
    first, rows = next(iter(seconds.values())), [[kind, "ms", "of the first"]]
    rows += [[name, f"{value * 1e3:.3f}", f"{value / first:.2f}"] for name, value in seconds.items()]
    print_table(title, rows)


def gpt2(width: int = 768, layers: int = 12, vocabulary: int = 50257) -> list[int]:
    """Elements of the tensors of a GPT-2, by default of the 148 of GPT-2's 124M parameters."""
    block = [width, width, 3 * width**2, 3 * width, width**2, width, width, width]
    block += [4 * width**2, 4 * width, 4 * width**2, width]
    return [vocabulary * width, 1024 * width, *block * layers, width, width]


def benchmark_adam(title: str, numels: Sequence[int], rounds: int, device: torch.device) -> None:
    options: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}
    variants: Variants = {
        "FusedAdam": FusedAdam(parameters(numels, device), **options).step,
        "torch AdamW, fused": torch.optim.AdamW(parameters(numels, device), fused=True, **options).step,
        "torch AdamW, foreach": torch.optim.AdamW(parameters(numels, device), foreach=True, **options).step,
    }
    report(f"{title}, {place(device)}", "optimizer", timed(variants, rounds, device))


def benchmark_whole_step(numels: list[int], rounds: int, device: torch.device) -> None:
    """Unscale, clip, Adam and a bfloat16 copy."""
    scale, found_inf = torch.ones((), device=device), torch.zeros((), device=device)  # gradients must not vanish
    options: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}
    fused: Any = FusedAdam(parameters(numels, device), max_grad_norm=1.0, **options)
    fused.copies = {p: p.detach().bfloat16() for p in fused.param_groups[0]["params"]}
    params = parameters(numels, device)
    copies, adamw = [p.detach().bfloat16() for p in params], torch.optim.AdamW(params, fused=True, **options)

    def one_pass() -> None:
        fused.grad_scale, fused.found_inf = scale, found_inf
        fused.step()

    def four_passes() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in params], found_inf, scale.reciprocal())
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adamw.step()
        torch._foreach_copy_(copies, [p.detach() for p in params])

    variants: Variants = {"FusedAdam": one_pass, "torch: unscale, clip, fused, copy": four_passes}
    title = f"unscale + clip + Adam + bfloat16 copy, {sum(numels)} elements in {len(numels)} tensors"
    report(f"{title}, {place(device)}", "step", timed(variants, rounds, device))


# -- a step on several ranks ------------------------------------------------------------------------------------------


class WideOnebitAdam(OnebitAdam):
    """One that keeps all state in float32, for comparison."""

    compact = False


def compressed_step(
    numels: list[int], cls: type[OnebitAdam] = OnebitAdam, bucket_cap_mb: float = 25.0
) -> Callable[[], Any]:
    """The step of an optimizer in its compressed stage."""
    torch.manual_seed(0)
    params = parameters(numels)
    optimizer = cls(params, lr=1e-6, weight_decay=0.01, freeze_step=2, bucket_cap_mb=bucket_cap_mb)
    for _ in range(2):
        optimizer.step()  # the same gradients on all ranks, as if they were averaged
    torch._foreach_mul_([p.grad for p in params], 1.0 + dist.get_rank())
    optimizer.step()
    return optimizer.step


def compare_steps(rank: int, _: Path, numels: list[int], rounds: int) -> None:
    """A compressed step of OnebitAdam against all_reduce + torch's fused AdamW, on a rank."""
    params = parameters(numels)
    flat = torch.cat([p.grad for p in params])  # the best case: all gradients in one buffer
    for param, grad in zip(params, flat.split(numels), strict=True):
        param.grad = grad
    baseline = torch.optim.AdamW(params, lr=1e-6, weight_decay=0.01, fused=True)
    wide = compressed_step(numels, WideOnebitAdam)

    def all_reduce_and_adam() -> None:
        flat.mul_(1 / dist.get_world_size())
        dist.all_reduce(flat)
        baseline.step()

    def reference_step() -> None:
        with kernels_from("reference"):
            wide()

    variants: Variants = {
        "all_reduce + torch AdamW, fused": all_reduce_and_adam,
        f"OnebitAdam, compressed, {kernels.implementation(CPU)}": compressed_step(numels),
        f"the same, bucket_cap_mb={LARGE_BUCKETS:g}": compressed_step(numels, bucket_cap_mb=LARGE_BUCKETS),
        "the same, all state in float32": wide,
        "the same, all state in float32, reference kernels": reference_step,
    }
    title = f"{sum(numels)} parameters, {dist.get_world_size()} gloo ranks over loopback, 1 thread each"
    seconds = medians(variants, rounds, before=lambda _: dist.barrier())
    if rank == 0:
        report(title, "step", seconds)


def main() -> None:
    parser = parser_of(__doc__)
    parts = ["kernels", "integers", "adam", "step"]
    parser.add_argument("--only", nargs="+", choices=parts, default=["kernels", "integers", "adam"])
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--numel", type=int, nargs="+", default=[25_000_000, 100_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slow-rounds", type=int, default=3, help="of the reference, on a CPU")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    device: torch.device = args.device
    if device != CPU:
        if not torch.cuda.is_available():
            sys.exit("benchmark_kernels: torch sees no CUDA device here, so there is nothing to measure")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if missing := library.why_not(device):
        sys.exit(f"benchmark_kernels: the native kernels cannot run on {device}: {missing}")
    torch.manual_seed(0)
    for threads in args.threads:
        torch.set_num_threads(threads)
        for numel in args.numel:
            benchmark = partial(benchmark_kernels, rounds=args.rounds, slow=args.slow_rounds, device=device)
            if "kernels" in args.only:
                for dtype in (torch.float32, torch.bfloat16) if device != CPU else (torch.float32,):
                    benchmark(f"signs, {dtype}", numel, sign_cases(numel, device, dtype))
            if "integers" in args.only:
                benchmark("4 and 8 bits", numel, integer_cases(numel, device))
        if "adam" in args.only:
            benchmark_adam("one tensor of 25000000 elements", [25_000_000], args.rounds, device)
            benchmark_adam("150 tensors of 1000 elements", [1000] * 150, 20 * args.rounds, device)
            if device != CPU:
                benchmark_adam("GPT-2's 148 tensors, 124M elements", gpt2(), args.rounds, device)
            benchmark_whole_step([250_000] * 100, args.rounds, device)
    if "step" in args.only:
        on_ranks(compare_steps, args.ranks, [args.numel[0] // 100] * 100, args.rounds)


if __name__ == "__main__":
    main()
