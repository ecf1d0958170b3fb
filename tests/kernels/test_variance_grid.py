"""The logarithmic grid of a frozen variance: how far it rounds, what it keeps, and that its codes are stable."""

import pytest
import torch
from torch import Tensor

from hf_compressopt.kernels.compact import (
    NO_TOP,
    ZERO_CODE,
    decode_variance,
    dithered_codes,
    encode_variance_,
    tops_of_variances,
    tops_to_dither,
)


def encoded(values: Tensor) -> tuple[Tensor, int]:
    codes = torch.full((values.numel(),), 9, dtype=torch.uint8)
    return codes, encode_variance_(values.clone(), codes)


def variances(octaves: float, numel: int = 20_000) -> Tensor:
    """Values over this many octaves, spread evenly by their logarithms."""
    generator = torch.Generator().manual_seed(0)
    return torch.exp2(octaves * (torch.rand(numel, generator=generator, dtype=torch.float64) - 0.5)).float()


@pytest.mark.invariant(38)
@pytest.mark.parametrize("octaves", [0.01, 1, 31, 60, 240])
def test_a_variance_is_rounded_by_half_a_step_at_most_and_only_once(octaves: float) -> None:
    values = variances(octaves)
    kept = decode_variance(*encoded(values))
    steps = 8 * (torch.log2(kept.double()) - torch.log2(values.double()))
    near = values.double() > values.max() / 2**31.5
    assert steps[near].abs().max() <= 0.5 + 1e-6
    assert (kept[~near].double() >= kept.max() / 2**31.751).all()  # smaller ones are raised
    values[::7] = 0
    codes, top = encoded(values)
    again, same_top = encoded(decode_variance(codes, top))
    assert top == same_top and torch.equal(codes, again)


def test_zeros_and_tiny_values_are_zero() -> None:
    codes, top = encoded(torch.tensor([0.0, 1.0, 2.0**-127, 2.0**-126]))
    assert codes.tolist() == [ZERO_CODE, 0, ZERO_CODE, 254] and top == 0
    assert encoded(torch.zeros(3))[1] == 0 and decode_variance(*encoded(torch.zeros(3))).tolist() == [0, 0, 0]


def test_tops_of_several_tensors_are_those_of_each() -> None:
    parts = [variances(20, 1000), torch.zeros(3), torch.zeros(0), torch.tensor([2.0**-127]), variances(1, 77) * 2**9]
    tops = [encoded(part)[1] if part.numel() and part.max() >= 2**-126 else NO_TOP for part in parts]
    assert tops_of_variances(parts) == tops and len(set(tops)) == 3


def test_codes_may_lie_in_the_memory_of_the_values() -> None:
    values = variances(20, (1 << 20) + 77)  # more than are encoded at once
    expected, top = encoded(values)
    codes = values.view(torch.uint8)[: values.numel()]
    assert encode_variance_(values, codes) == top and torch.equal(codes, expected)


def test_rounding_at_random_is_right_in_the_mean_and_says_the_same_of_any_part() -> None:
    """A refresh changes most codes by less than a half: rounded to the nearest, they would never change."""
    values = variances(20)
    top = tops_to_dither(values.max().view(1))[0]
    logarithms = torch.zeros(values.shape, dtype=torch.float64)
    for step in range(256):
        codes = dithered_codes(values, top, (step, 3), 0)
        found = torch.log2(decode_variance(codes, top).double())
        assert (found - torch.log2(values.double())).abs().max() <= 1 / 8 + 1e-3
        logarithms += found / 256
    errors = logarithms - torch.log2(values.double())
    assert errors.abs().max() < 0.04 and abs(float(errors.mean())) < 1e-3
    parts = [dithered_codes(part, top, (255, 3), start) for part, start in ((values[:1001], 0), (values[1001:], 1001))]
    assert torch.equal(codes, torch.cat(parts))
    others = [dithered_codes(values, top, key, 0) for key in ((254, 3), (255, 4))]
    assert not any(torch.equal(codes, other) for other in others)
