"""The CPU library against the reference, in all its instruction sets."""

import math
from dataclasses import replace

import pytest
import torch

from hf_compressopt.kernels import (
    Average,
    Combination,
    Descent,
    IntegerFormat,
    ParameterSync,
    Segment,
    SignFormat,
    native,
    reference,
)
from hf_compressopt.kernels.messages import pack_signs
from tests.support import kernel_cases as cases
from tests.support.instruction_sets import CPU
from tests.support.kernel_cases import Form
from tests.support.kernel_suite import CompactSuite, KernelSuite

pytestmark = pytest.mark.usefixtures("native_library", "threads")
STILL = Descent(0.0, 1.0, 1e-8, False)
SEVERAL = [*map(SignFormat, (24, 136, 4096, 65_544, 100_000, None)), IntegerFormat(4), IntegerFormat(8)]


class TestKernels(KernelSuite):
    """The suite, with each instruction set."""


class TestCompact(CompactSuite):
    """The suite, with each instruction set."""


# -- sizes of a CPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", SEVERAL, ids=str)
def test_pieces_of_several_threads(device: torch.device, form: Form) -> None:
    torch.set_num_threads(3)
    cases.check_compress(device, form, 700_001, 3, segments=7, last=2, with_factors=True, compact=True)
    cases.check_compress(device, form, 70_001, 1, segments=7)
    for compact in (True, False):
        cases.check_average_compress(device, form, 300_001, 5, shift=1, compact=compact)
    cases.check_decompress(device, form, 70_001, 2)
    if isinstance(form, IntegerFormat):
        cases.check_mean(device, form, 70_001, 5, shift=1)
        cases.check_add(device, form, 70_001, 2, segments=7, decay=0.9, scale=2.0)
    else:
        cases.check_apply_adam(device, 700_001, 5, chunks=3, scale_block=form.scale_block, with_m=False, log=True)


def test_adam_and_sketches_of_several_threads(device: torch.device) -> None:
    torch.set_num_threads(3)
    step = replace(cases.STEP, grad_scale=torch.tensor([3.0]), write_grads=True)
    cases.check_adam(CPU, (5, 700_001, 1000, 300_001), step, copies=True, shift=1)
    cases.check_sketch(device, 5_000_003, 9, offset=77)


def test_outputs_beyond_the_caches(device: torch.device) -> None:
    cases.check_decompress(CPU, SignFormat(4096), 4_300_003, 2, shift=3)
    cases.check_apply_adam(CPU, 4_300_003, 5, chunks=2, shift=1)
    for form in cases.INTEGERS:
        cases.check_average_compress(device, form, 4_300_003, 2)
        cases.check_decompress(device, form, 4_300_003, 1)
        cases.check_add(device, form, 4_300_003, 2, segments=7, decay=0.0, scale=2.0)


def test_averages_of_every_number_of_ranks(device: torch.device) -> None:
    for form in cases.FORMATS:
        for ranks in range(4, 18):
            cases.check_average_compress(CPU, form, 1511, ranks)


# -- numbers at the edges ---------------------------------------------------------------------------------------------


def test_sums_of_messages_keep_the_sign_of_zero(device: torch.device) -> None:
    numel, random, form = 5_000, torch.Generator().manual_seed(2), SignFormat(None)
    for ranks in range(1, 11):
        messages = torch.randint(256, (ranks, form.nbytes(numel)), dtype=torch.uint8, generator=random)
        messages[:, :4] = 0  # the scale: a sum of zeros is -0 only where all signs are negative
        expected, error = torch.full((numel,), -0.0), torch.full((numel,), -0.0)
        out = torch.empty_like(messages[0])
        reference.average_compress_(form, messages.view(-1), expected, expected, out, ranks)
        assert 0 < int(expected.signbit().sum()) < numel
        native.average_compress_(form, messages.view(-1), error, error, out, ranks)
        cases.assert_same_bits(error, expected)


def test_sums_of_squares_at_the_edges(device: torch.device) -> None:
    cases.check_square_sums(CPU, (1, 5, 0, 1000, 65_536, 65_537, 200_003), shift=1)
    assert not math.isfinite(native.sum_of_squares([torch.tensor([1.0, math.inf])], CPU))
    assert math.isnan(native.sum_of_squares([torch.ones(40), torch.tensor([math.nan])], CPU))
    assert float(native.sum_of_squares([torch.full((3,), 3e38)], CPU)) > 2.6e77  # beyond float32
    assert float(native.sum_of_squares([], CPU)) == 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_conversion_from_every_low_precision_number(device: torch.device, dtype: torch.dtype) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(values.numel())
    native.combine_(Combination(values.numel(), CPU, grads=[Segment(values, 0, values.numel(), 0)]), out)
    cases.assert_same_bits_but_nan(out, 0.0 + values.float())  # a term that is left out counts as 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_rounding_to_low_precision(device: torch.device, dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    between = every.view(torch.int32)
    shift = 16 if dtype == torch.bfloat16 else 13
    near = [between + step for step in (0, 1, -1, (1 << shift - 1) - 1, 1 << shift - 1, (1 << shift - 1) + 1)]
    numbers = torch.cat([*near, torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int32)]).view(torch.float32)
    n = numbers.numel()
    param, anchor, zeros = torch.empty(n, dtype=dtype), numbers.clone(), torch.zeros(n)
    # A tensor that keeps still, and decay 1: the parameter is the anchor, rounded.
    params = [Segment(param, 0, n, 0, still=True)]
    native.sync_parameters_(
        ParameterSync(Average.of(zeros), zeros.clone(), anchor, zeros, zeros.clone(), params, 1.0, STILL)
    )
    cases.assert_same_bits_but_nan(param, numbers.to(dtype))


@pytest.mark.parametrize("scale_block", (None, 8, 512, 4096))
def test_values_that_are_not_ordinary(device: torch.device, scale_block: int | None) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30, 1e18, -1e18, math.inf, -math.inf, math.nan])
    form = SignFormat(scale_block)
    for kinds in (special[:2], special[2:5], special[:8], special):
        x = kinds[torch.randint(len(kinds), (9_001,), generator=torch.Generator().manual_seed(1))]
        message, error = cases.empty_messages(form, x.numel()), torch.zeros(x.numel())
        native.compress_(form, Combination.of(x), error, message, 1, error)
        rows = x.double().split(scale_block or x.numel())
        expected = torch.stack([row.square().mean().sqrt() for row in rows]).float()
        scales = form.scales(message, x.numel())
        torch.testing.assert_close(scales, expected, rtol=3e-7, atol=2e-45, equal_nan=True)
        u = x + 0.0
        assert torch.equal(message[scales.numel() * 4 :][: -(-x.numel() // 8)], pack_signs(u))
        cases.assert_same_bits_but_nan(error, u - form.decode(message, x.numel()))
        assert message.numel() == form.nbytes(x.numel())
