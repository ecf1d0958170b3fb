"""The kernels that benchmark_kernels.py and benchmark_gpu.py time, with the bytes that they must move.

Bytes are those that the mathematics needs: every operand read once, every result written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.kernels import (
    AdamUpdate,
    Average,
    Combination,
    Descent,
    IntegerFormat,
    LambMoments,
    LambOptions,
    LocalUpdate,
    ParameterSync,
    Segment,
    any_nan,
    message_nbytes,
)
from hf_compressopt.kernels.errors import CompactErrors, Errors
from hf_compressopt.kernels.sketch import SKETCH_NUMEL, sketch_
from hf_compressopt.kernels.variance import LogVariance, encode_variance_

BLOCK = 4096
IN_8_BITS = 1 + 2 / 128  # bytes of an error
SIGN = 1 / 8 + 4 / BLOCK  # bytes of an element in a message


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        name: What it is called.
        call: What runs.
        nbytes: Bytes that it must read and write per element.
        like: The plain pass with the same mix of reads and writes (benchmark_kernels.py).
    """

    name: str
    call: Callable[[], object]
    nbytes: float
    like: str = "a += b"


def sign_cases(numel: int, device: torch.device, dtype: torch.dtype, averaged: tuple[int, ...]) -> list[Case]:
    """The kernels of signs and of optimizers; one tensor of parameters or gradients has this dtype.

    Args:
        numel: Elements of the bucket.
        device: Where they are.
        dtype: Of parameters and gradients; all else is float32.
        averaged: Numbers of messages that a server averages.
    """
    x, error, out, v, u, anchor = (torch.rand(numel, device=device) + 0.1 for _ in range(6))
    param, grad = (torch.randn(numel, device=device).to(dtype) for _ in range(2))
    params, grads, size = [Segment(param, 0, numel, 0)], [Segment(grad, 0, numel, 0)], param.element_size()
    message, whole = (
        torch.zeros(message_nbytes(numel, block), dtype=torch.uint8, device=device) for block in (BLOCK, None)
    )
    kernels.SignFormat(BLOCK).compress_(Combination.of(x), error, message, 1, error)
    y, received = Average(numel, None, message, 1, BLOCK, message.numel()), message.repeat(max(averaged))
    served, native = torch.zeros_like(message), kernels.on(device)
    momentum = Combination(numel, device, x, 0.9, grads, 0.1)
    last = Combination(numel, device, None, 0.9, grads, 0.1, last=y)
    compact, codes = CompactErrors.zeros(numel, 1, device), torch.zeros(numel, dtype=torch.uint8, device=device)
    exponent = torch.tensor([encode_variance_(v, codes)], dtype=torch.int32, device=device)
    variance, descent = LogVariance(codes, exponent), Descent(1e-6, 1 - 1e-5, 1e-8, False)
    lamb, factors = LambOptions(0.9, 0.999, 1e-8, 0.01, False), torch.ones(1, device=device)
    rates, sums = torch.full((1,), 1e-6, device=device), torch.zeros(1, 3, dtype=torch.float64, device=device)

    def compress(z: Combination, out: Tensor, block: int | None, error: Errors = error) -> Callable[[], object]:
        return lambda: kernels.SignFormat(block).compress_(z, error, out, 1, error)

    def average(name: str, count: int, error: Errors, each: float) -> Case:
        form, nbytes = kernels.SignFormat(BLOCK), 2 * each + (count + 1) * SIGN
        part = received[: count * message.numel()]
        return Case(name, lambda: form.average_compress_(part, error, error, served, count), nbytes, "a *= c")

    return [
        Case("compress", compress(Combination.of(x), message, BLOCK), 12 + SIGN),
        Case("compress, one scale", compress(Combination.of(x), whole, None), 20 + SIGN),
        Case("momentum + compress", compress(momentum, message, BLOCK), 12 + size + SIGN),
        Case(
            "8 bits: momentum + compress",
            compress(last, served, BLOCK, compact),
            2 * IN_8_BITS + size + 2 * SIGN,
            "dot(a, b)",
        ),
        *(average(f"average of {count}, compress", count, error, 4) for count in averaged),
        *(average(f"8 bits: average of {count}, compress", count, compact, IN_8_BITS) for count in averaged),
        Case("decompress", lambda: native.decompress_(y, out), 4 + SIGN, "a = c"),
        Case("combine", lambda: native.combine_(momentum, out), 8 + size),
        Case(
            "decompress + Adam",
            lambda: native.apply_adam_(AdamUpdate(y, out, v, params, descent)),
            8 + 2 * size + SIGN,
        ),
        Case(
            "8 bits: decompress + Adam",
            lambda: native.apply_adam_(AdamUpdate(y, None, variance, params, descent)),
            1 + 2 * size + SIGN,
            "a *= c",
        ),
        Case(
            "local step of 0/1 Adam",
            lambda: native.local_step_(LocalUpdate(out, v, u, grads, params, 0.9, descent)),
            20 + 3 * size,
        ),
        Case(
            "decompress + sync of 0/1 Adam",
            lambda: native.sync_parameters_(ParameterSync(y, out, anchor, v, u, params, 1.0, descent)),
            20 + size + SIGN,
        ),
        Case(
            "decompress + LAMB's moments",
            lambda: native.lamb_moments_(LambMoments(y, out, x, v, params, factors, sums, lamb)),
            20 + size + SIGN,
        ),
        Case("LAMB's step", lambda: native.lamb_apply_(out, v, params, rates, lamb), 8 + 2 * size),
    ]


def integer_cases(numel: int, device: torch.device, averaged: tuple[int, ...]) -> list[Case]:
    """The kernels of messages of 4 and 8 bits, and norms; gradients are float32."""
    grad, error, out = (torch.randn(numel, device=device) for _ in range(3))
    whole, found = [Segment(grad, 0, numel, 0)], []
    for bits in (4, 8):
        form, z = IntegerFormat(bits), Combination(numel, device, grads=whole, beta=0.5)
        message = torch.zeros(form.nbytes(numel), dtype=torch.uint8, device=device)
        found += [
            replace(case, name=f"int{bits}: {case.name}")
            for case in low_bit_cases(form, z, message, error, out, averaged)
        ]
    sketch, squares = torch.zeros(SKETCH_NUMEL, device=device), torch.zeros((), dtype=torch.float64, device=device)
    return [
        *found,
        Case("sum of squares", lambda: kernels.sum_of_squares([grad], device), 4, "dot(a, b)"),
        Case("sum of squares + sketch", lambda: sketch_(whole, 0, 1, sketch, squares), 4, "dot(a, b)"),
    ]


def low_bit_cases(
    form: IntegerFormat, z: Combination, message: Tensor, error: Tensor, out: Tensor, averaged: tuple[int, ...]
) -> list[Case]:
    """The kernels of a format."""
    sent, compact = message.numel() / out.numel(), CompactErrors.zeros(out.numel(), 1, out.device)
    form.compress_(z, error, message, 1)
    messages, y = message.repeat(max(averaged)), form.average(out.numel(), message, 1, message.numel())
    served = torch.zeros_like(message)

    def average(name: str, count: int, error: Errors, new_error: Errors, each: float, like: str) -> Case:
        received, nbytes = messages[: count * message.numel()], 2 * each + (count + 1) * sent
        return Case(name, lambda: form.average_compress_(received, error, new_error, served, count), nbytes, like)

    return [
        Case("compress", lambda: form.compress_(z, error, message, 1), 8 + sent, "dot(a, b)"),
        *(average(f"average of {count}", count, error, out, 4, "a = b") for count in averaged),
        Case("decompress", lambda: form.decompress_(y, out), 4 + sent, "a = c"),
        Case(
            "compress, errors in 8 bits",
            lambda: form.compress_(z, compact, message, 1),
            4 + IN_8_BITS + sent,
            "dot(a, b)",
        ),
        *(
            average(f"average of {count}, errors in 8 bits", count, compact, compact, IN_8_BITS, "a *= c")
            for count in averaged
        ),
        Case("any_nan", lambda: any_nan(y), 1 / 64, "dot(a, b)"),
    ]
