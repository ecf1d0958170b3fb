"""Cases of b-bit integers for native kernels on any device: the reference's bits, and nothing else written."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels import integer_native, integer_reference
from hf_compressopt.kernels.commit import Commit
from hf_compressopt.kernels.integer_messages import IntegerAverage, chunk_integer_message_nbytes, integer_message_nbytes
from hf_compressopt.kernels.operands import Combination
from tests.support.kernel_cases import Arena, Pair, assert_same_bits

# Blocks hold 128 elements, a warp of a GPU takes 512, a thread of a CPU 32,768.
NUMELS = (1, 7, 8, 9, 127, 128, 129, 511, 513, 1000, 4097)
#: Values of which every kind must come through: zeros, denormals, the largest numbers, and what is not finite.
SPECIAL = torch.tensor(
    [
        0.0,
        -0.0,
        1e-45,
        -1e-38,
        1e-36,
        2.0**-117,
        3e-30,
        -1.0,
        2.0**127,
        -(2.0**127),
        3.4e38,
        math.inf,
        -math.inf,
        math.nan,
    ]
)


def assert_same_bits_but_nan(got: Tensor, expected: Tensor) -> None:
    """The same bits, but for the payload of what is not a number."""
    assert torch.equal(got.cpu().isnan(), expected.isnan())
    assert_same_bits(got.cpu().nan_to_num(7.0, math.inf, -math.inf), expected.nan_to_num(7.0, math.inf, -math.inf))


def operands(
    case: Pair, numel: int, segments: int, *, with_x: bool, with_factors: bool, shift: int
) -> tuple[Combination, Combination]:
    """Values to send: for the reference, and for the kernel."""
    x, own_x = case.normal(numel, shift=shift) if with_x else (None, None)
    factors, own_factors = case.positive(max(segments, 1))
    grads, own_grads, _ = case.segments(numel, segments, missing=True) if segments else (None, None, None)
    z = Combination(numel, torch.device("cpu"), x, 0.9, grads, 0.1)
    own = Combination(numel, case.arena.device, own_x, 0.9, own_grads, 0.1)
    if with_factors and segments:
        return replace(z, factors=factors), replace(own, factors=own_factors)
    return z, own


def check_compress(
    device: torch.device,
    numel: int,
    world_size: int,
    bits: int,
    *,
    segments: int = 0,
    with_x: bool = True,
    with_factors: bool = False,
    shift: int = 0,
) -> None:
    case = Pair(Arena(device), numel + 31 * world_size + segments)
    z, own = operands(case, numel, segments, with_x=with_x, with_factors=with_factors, shift=shift)
    error, own_error = case.normal(numel, shift=shift)
    nbytes = sum(chunk_integer_message_nbytes(numel, world_size, bits))
    messages, own_messages = case.put(torch.full((nbytes,), 7, dtype=torch.uint8))
    integer_reference.compress_(z, error, messages, world_size, bits)
    integer_native.compress_(own, own_error, own_messages, world_size, bits)
    case.check()
    left, own_left = (error, own_error) if numel % 2 == 0 else case.normal(numel, shift=shift)
    for tensor in (messages, own_messages):
        tensor.fill_(7)
    integer_reference.compress_(z, error, messages, world_size, bits, left)
    integer_native.compress_(own, own_error, own_messages, world_size, bits, own_left)
    case.check()


def check_compress_values(device: torch.device, u: Tensor, bits: int) -> None:
    case = Pair(Arena(device), 0)
    x, own_x = case.put(u)
    error, own_error = case.put(torch.zeros_like(u))
    messages, own_messages = case.put(torch.full((integer_message_nbytes(u.numel(), bits),), 7, dtype=torch.uint8))
    integer_reference.compress_(Combination.of(x), error, messages, 1, bits)
    integer_native.compress_(Combination.of(own_x), own_error, own_messages, 1, bits)
    case.check()
    left, own_left = torch.empty_like(u), case.arena.put(torch.zeros_like(u))
    integer_reference.compress_(Combination.of(x), error, messages, 1, bits, left)
    integer_native.compress_(Combination.of(own_x), own_error, own_messages, 1, bits, own_left)
    case.check()
    assert_same_bits_but_nan(own_left, left)


def messages_of(case: Pair, numel: int, count: int, bits: int, values: Tensor | None = None) -> Tensor:
    """Messages of ``count`` ranks, each of the same chunk, of normal numbers or drawn from the values."""
    nbytes = integer_message_nbytes(numel, bits)
    messages = torch.zeros(count * nbytes, dtype=torch.uint8)
    for part in messages.view(count, nbytes):
        u = torch.randn(numel, generator=case.random)
        if values is not None:
            u = values[torch.randint(len(values), (numel,), generator=case.random)]
        integer_reference.compress_(Combination.of(u), torch.zeros(numel), part, 1, bits)
    return messages


def check_average_compress(
    device: torch.device,
    numel: int,
    world_size: int,
    bits: int,
    *,
    shift: int = 0,
    in_place: bool = False,
    values: Tensor | None = None,
) -> None:
    case = Pair(Arena(device), numel + 17 * world_size)
    messages, own_messages = case.put(messages_of(case, numel, world_size, bits, values))
    out, own_out = case.put(torch.full((integer_message_nbytes(numel, bits),), 7, dtype=torch.uint8))
    error = torch.randn(numel, generator=case.random)
    own_error = case.arena.put(error, shift)
    new_error = error if in_place else torch.empty(numel)
    own_new_error = own_error if in_place else case.arena.put(torch.zeros(numel), shift)
    before = error.clone()
    integer_reference.average_compress_(messages, error, new_error, out, world_size, bits)
    integer_native.average_compress_(own_messages, own_error, own_new_error, own_out, world_size, bits)
    case.check()
    assert_same_bits_but_nan(own_new_error, new_error)
    if not in_place:
        assert_same_bits(own_error, before)


def check_mean(
    device: torch.device, numel: int, world_size: int, bits: int, *, shift: int = 0, values: Tensor | None = None
) -> None:
    case = Pair(Arena(device), numel + 17 * world_size)
    messages, own_messages = case.put(messages_of(case, numel, world_size, bits, values))
    out, own_out = torch.empty(numel), case.arena.put(torch.zeros(numel), shift)
    integer_reference.mean_(messages, out, world_size, bits, 3.0 / world_size)
    integer_native.mean_(own_messages, own_out, world_size, bits, 3.0 / world_size)
    case.check()
    assert_same_bits_but_nan(own_out, out)


def average(
    case: Pair, numel: int, world_size: int, bits: int, values: Tensor | None = None
) -> tuple[IntegerAverage, IntegerAverage]:
    """An averaged bucket, as it is gathered: messages of its chunks, a stride apart."""
    sizes = chunk_integer_message_nbytes(numel, world_size, bits)
    stride = max(sizes) + 16
    messages = torch.zeros(world_size * stride, dtype=torch.uint8)
    for rank in range(world_size):
        start, stop = chunk_range(numel, world_size, rank)
        if start < stop:
            messages[rank * stride :][: sizes[rank]] = messages_of(case, stop - start, 1, bits, values)
    messages, own = case.put(messages)
    y = IntegerAverage(numel, messages, world_size, bits, stride)
    return y, replace(y, messages=own)


def check_decompress(device: torch.device, numel: int, world_size: int, bits: int, shift: int = 0) -> None:
    case = Pair(Arena(device), numel)
    y, own_y = average(case, numel, world_size, bits)
    out, own_out = case.normal(numel, shift=shift)
    integer_reference.decompress_(y, out)
    integer_native.decompress_(own_y, own_out)
    case.check()


def check_add(
    device: torch.device, numel: int, world_size: int, bits: int, *, segments: int, decay: float, scale: float
) -> None:
    case = Pair(Arena(device), numel + 31 * world_size + segments)
    y, own_y = average(case, numel, world_size, bits)
    outputs, own_outputs, _ = case.segments(numel, segments, missing=True)
    integer_reference.add_(y, outputs, decay, scale)
    integer_native.add_(own_y, own_outputs, decay, scale)
    case.check()


def check_commit(
    device: torch.device,
    numel: int,
    world_size: int,
    bits: int,
    *,
    segments: int,
    with_x: bool = False,
    with_factors: bool = False,
    elsewhere: bool = False,
    shift: int = 0,
) -> None:
    """elsewhere: the outputs are not the gradients themselves."""
    case = Pair(Arena(device), numel + 31 * world_size + segments)
    z, own = operands(case, numel, segments, with_x=with_x, with_factors=with_factors, shift=shift)
    assert z.grads is not None and own.grads is not None
    error, own_error = case.normal(numel, shift=shift)
    nbytes = sum(chunk_integer_message_nbytes(numel, world_size, bits))
    messages, own_messages = case.put(torch.zeros(nbytes, dtype=torch.uint8))
    integer_reference.compress_(z, error, messages, world_size, bits)
    own_messages.copy_(messages)
    y, own_y = average(case, numel, world_size, bits)
    outputs, own_outputs = z.grads, own.grads
    if elsewhere:
        cuts = torch.tensor([segment.numel for segment in outputs]).cumsum(0).tolist()[:-1]
        fresh, own_fresh, _ = case.segments(numel, segments, missing=True, cuts=cuts)
        outputs, own_outputs = (
            [replace(new, index=old.index) for new, old in zip(news, outputs, strict=True)]
            for news in (fresh, own_fresh)
        )
    integer_reference.commit_(Commit(z, error, messages, y, outputs, 3.0))
    integer_native.commit_(Commit(own, own_error, own_messages, own_y, own_outputs, 3.0))
    case.check()
