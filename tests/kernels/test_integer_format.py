"""The integer format: layout, arithmetic, and whole steps, with the native CPU kernels and with the reference."""

import math
import struct

import pytest
import torch
from torch import Tensor

from hf_compressopt.kernels import Average, Combination, IntegerFormat, on

pytestmark = pytest.mark.usefixtures("implementation")
CPU = torch.device("cpu")
BITS = pytest.mark.parametrize("bits", [4, 8])
MOST = {4: 49, 8: 127}  # steps that an integer stands for


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def compressed(u: Tensor, bits: int, world_size: int = 1) -> Tensor:
    messages = torch.full((sum(IntegerFormat(bits).chunk_nbytes(u.numel(), world_size)),), 7, dtype=torch.uint8)
    on(CPU).compress_(IntegerFormat(bits), Combination.of(u), torch.zeros_like(u), messages, world_size)
    return messages


def decoded(messages: Tensor, numel: int, bits: int) -> Tensor:
    out = torch.full((numel,), math.nan)
    on(out).decompress_(Average(numel, IntegerFormat(bits), messages, 1, messages.numel()), out)
    return out


# -- layout -----------------------------------------------------------------------------------------------------------


def test_a_message_of_four_bits_by_hand() -> None:
    u = torch.tensor([49.0, -49.0, 1.0, -1.0, 0.4, 6.5, 12.6, -2.5, 36.0, -44.0])  # the scale is 1; ties go to even
    #          7, -7 -> 9;  1, -1 -> f;  0, 2;  4, -1 -> f;  6, -7 -> 9; eight elements at a time
    expected = bytes([0x97, 0xF1, 0x20, 0xF4, 0x96, 0, 0, 0]) + struct.pack("<H", 0x3F80) + bytes(6)
    assert bytes(compressed(u, 4).tolist()) == expected
    assert decoded(compressed(u, 4), 10, 4).tolist() == [49, -49, 1, -1, 0, 4, 16, -1, 36, -49]


def test_a_message_of_eight_bits_by_hand() -> None:
    u = torch.tensor([127.0, -127.0, 0.5, 1.5, -0.5, -1.5, 3.0, -100.0, 64.0])
    integers_of_u = [127, -127, 0, 2, 0, -2, 3, -100, 64, 0, 0, 0, 0, 0, 0, 0]
    expected = struct.pack("<16b", *integers_of_u) + struct.pack("<H", 0x3F80) + bytes(14)
    assert bytes(compressed(u, 8).tolist()) == expected


def test_blocks_are_counted_from_the_start_of_a_chunk() -> None:
    numel = 2 * 136  # of two ranks: a block of 128, and one of 8
    u = torch.cat([torch.full((128,), 49.0), torch.full((8,), 98.0), torch.full((128,), -196.0), torch.zeros(8)])
    messages = compressed(u, 4, world_size=2)
    assert IntegerFormat(4).chunk_nbytes(numel, 2) == [80, 80]  # 68 and 4 bytes
    first = bytes([0x77] * 64 + [0x77] * 4) + struct.pack("<2H", 0x3F80, 0x4000) + bytes(8)
    second = bytes([0x99] * 64 + [0x00] * 4) + struct.pack("<2H", 0x4080, 0x0000) + bytes(8)
    assert bytes(messages.tolist()) == first + second


def test_lengths() -> None:
    assert [IntegerFormat(4).nbytes(n) for n in (0, 1, 8, 9, 112, 113, 128, 129)] == [0, 16, 16, 16, 64, 64, 80, 80]
    assert [IntegerFormat(8).nbytes(n) for n in (0, 1, 8, 9, 112, 113, 128)] == [0, 16, 16, 32, 128, 128, 144]
    assert IntegerFormat(4).chunk_nbytes(8, 3) == [16, 0, 0]
    n = 25_000_000
    assert IntegerFormat(4).nbytes(n) <= n * (4 + 16 / 128) / 8 + 18  # the published formula
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 5"):
        IntegerFormat(5)


# -- arithmetic, against float64 --------------------------------------------------------------------------------------


@BITS
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_against_float64(bits: int, size: float) -> None:
    numel, limit = 70_001, MOST[bits]
    u = normal(numel) * size * (1 + normal(numel, 1).abs().pow(8))  # some blocks have outliers
    message = compressed(u, bits)
    values = decoded(message, numel, bits)
    blocks = -(-numel // 128)
    scale = IntegerFormat(bits).scales(message, numel).double()
    rows = torch.nn.functional.pad(u, (0, blocks * 128 - numel)).double().view(blocks, 128)
    exact = rows.abs().amax(1) / limit
    assert bool((scale >= exact * (1 - 2**-8)).all() and (scale <= exact * (1 + 2**-7.9)).all())
    wide = scale.repeat_interleave(128)[:numel]
    quotient = u.double() / wide
    steps = torch.arange(limit + 1.0, dtype=torch.float64) if bits == 8 else torch.arange(8.0).double().square()
    between = (steps[1:] + steps[:-1]) / 2
    near_tie = (quotient.abs().unsqueeze(1) - between).abs().amin(dim=1) < 1e-4
    nearest = steps[torch.bucketize(quotient.abs(), between)].copysign(quotient)
    assert torch.equal((values.double() / wide)[~near_tie], nearest[~near_tie])
    residual = u - values
    assert torch.equal(residual.double() + values.double(), u.double())  # nothing is lost
    assert bool((residual.double().abs() <= (nearest * wide - u.double()).abs() + wide * 1e-3).all())


@BITS
def test_every_scale_is_rounded_to_the_nearest(bits: int) -> None:
    limit = MOST[bits]
    largest = normal(3_000).abs() * torch.linspace(-60, 60, 3_000).exp2()
    u = torch.zeros(3_000, 128)
    u[:, 5] = largest
    got = IntegerFormat(bits).scales(compressed(u.view(-1), bits), u.numel())
    exact = largest / torch.tensor(float(limit))
    distance = (got.double() - exact.double()).abs()
    for step in (-1, 1):
        neighbour = (got.view(torch.int16) + step).view(torch.bfloat16)
        assert bool((distance <= (neighbour.double() - exact.double()).abs()).all())


@pytest.mark.invariant(38)
@BITS
def test_the_message_of_what_a_message_stands_for_is_the_same(bits: int) -> None:
    """Also where the largest of a block is halfway between two scales."""
    limit = MOST[bits]
    u = normal(64 * 128).view(64, 128) * torch.linspace(-40, 40, 64).exp2().unsqueeze(1)
    patterns = torch.arange(64, dtype=torch.int32) * 0x10000 + 0x3F808000 - torch.arange(64, dtype=torch.int32) % 2
    largest = patterns.view(torch.float32) * limit
    u[:, 3] = torch.maximum(largest, u.abs().amax(dim=1))
    message = compressed(u.view(-1), bits)
    values = decoded(message, u.numel(), bits)
    assert torch.equal(compressed(values, bits), message)
    levels = values.view(64, 128).double() / IntegerFormat(bits).scales(message, u.numel()).double().unsqueeze(1)
    assert levels.abs().amax(dim=1).unique().tolist() == [limit]


@BITS
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
def test_the_average_against_float64(bits: int, world_size: int) -> None:
    numel = 1_003
    messages = torch.cat([compressed(normal(numel, k), bits) for k in range(world_size)])
    mean = torch.stack([decoded(m, numel, bits).double() for m in messages.view(world_size, -1)]).mean(0)
    error, new_error = normal(numel, 99), torch.empty(numel)
    out = torch.empty(IntegerFormat(bits).nbytes(numel), dtype=torch.uint8)
    on(CPU).average_compress_(IntegerFormat(bits), messages, error, new_error, out, world_size)
    torch.testing.assert_close(
        decoded(out, numel, bits).double() + new_error.double(), mean + error.double(), rtol=0, atol=2e-6
    )
    assert torch.equal(error, normal(numel, 99))


# -- numbers at the edges ---------------------------------------------------------------------------------------------


@BITS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -1.8e38])
def test_what_is_not_finite_marks_its_block_and_no_other(bits: int, value: float) -> None:
    numel = 5 * 128 + 40
    for place in (0, 127, 128, 400, numel - 1):
        u = normal(numel)
        clean = compressed(u, bits)
        u[place] = value
        message = compressed(u, bits)
        block = place // 128
        expected = IntegerFormat(bits).scales(clean, numel).clone()
        expected[block] = math.nan
        got = IntegerFormat(bits).scales(message, numel)
        assert got.view(torch.int16)[block] == 0x7FC0
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
        values = decoded(message, numel, bits)
        assert torch.equal(values.isnan(), torch.arange(numel) // 128 == block)
        assert bool(on(CPU).any_nan(Average(numel, IntegerFormat(bits), message, 1, message.numel())))
        assert not bool(on(CPU).any_nan(Average(numel, IntegerFormat(bits), clean, 1, clean.numel())))


@BITS
def test_blocks_of_zeros_and_of_tiny_numbers_are_zero(bits: int) -> None:
    limit = MOST[bits]
    smallest = 2.0**-120 * limit
    for value, kept in ((0.0, False), (-0.0, False), (1e-45, False), (smallest * 0.99, False), (smallest, True)):
        message = compressed(torch.full((200,), value), bits)
        assert bool((message == 0).all()) is not kept
        assert torch.equal(decoded(message, 200, bits), torch.full((200,), value if kept else 0.0))


@BITS
def test_the_largest_numbers_decode_to_finite_ones(bits: int) -> None:
    u = torch.tensor([2.0**127, -(2.0**127), 2.0**126 * 1.99, 1.0])
    values = decoded(compressed(u, bits), 4, bits)
    assert bool(values.isfinite().all())
    assert bool(((values - u).abs() <= 2.0**127 / (2 * MOST[bits]) * (1 + 2**-7) + 2.0**127 * 2**-8).all())


# -- many steps -------------------------------------------------------------------------------------------------------


@BITS
def test_rounding_adds_to_the_second_moment_what_the_equation_says(bits: int) -> None:
    """With error feedback E y^2 = g^2 + s^2 (x - a) (b - x), x = |g| / s between a and b; the mean is not changed.

    Where the steps below a are smaller, a message is sometimes below a, and the equation is near the truth.
    """
    form, steps, numel = IntegerFormat(bits), 6000, 128
    sizes = torch.logspace(-1.5, -0.5, numel)  # of elements beside one of 1, which sets the scale of the block
    sizes[0] = 1.0
    noise = normal(numel).clamp_(-3, 3)
    noise[0] = 0.8 / 0.3
    grads = (sizes * (0.2 + 0.3 * noise)).expand(steps, numel)
    scale = float(torch.tensor(1 / MOST[bits]).bfloat16())
    size = grads.abs() / scale
    below = size.floor() if bits == 8 else size.sqrt().floor().square()
    above = below + 1 if bits == 8 else (below.sqrt() + 1).square()
    expected = (grads.square() + scale**2 * (size - below) * (above - size)).mean(dim=0)
    error, sent = torch.zeros(numel), torch.empty(steps, numel)
    message = torch.empty(form.nbytes(numel), dtype=torch.uint8)
    for step in range(steps):
        u = grads[step] + error
        sent[step] = form.encode_(u.clone(), message)
        error = u - sent[step]
    torch.testing.assert_close(
        sent.mean(dim=0), grads.mean(dim=0), rtol=0, atol=float((above - below).max()) * scale / steps
    )
    even = torch.ones(numel, dtype=torch.bool) if bits == 8 else (size < 1)[0]
    assert int(even.sum()) > numel // 4
    found = sent.square().mean(dim=0)
    torch.testing.assert_close(found[even], expected[even], rtol=0.1, atol=0)
    torch.testing.assert_close(found, expected, rtol=0.3, atol=0)
