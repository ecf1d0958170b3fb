"""The CPU library against the reference, in all its instruction sets."""

import math
from dataclasses import replace

import pytest
import torch

from hf_compressopt import kernels
from hf_compressopt.kernels import native, reference, signs
from hf_compressopt.kernels.messages import message_nbytes
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.updates import Descent, LambOptions, ParameterSync
from tests.support import kernel_cases as cases
from tests.support.instruction_sets import CPU

pytestmark = pytest.mark.usefixtures("native_library", "threads")
STILL = Descent(0.0, 1.0, 1e-8, False)
LARGE = 700_001  # enough for several threads


# -- the reference's bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
def test_compress(instruction_set: str, scale_block: int | None) -> None:
    for numel in (*cases.NUMELS, 70_001):
        for world_size in (1, 2, 3):
            cases.check_compress(CPU, numel, world_size, scale_block, segments=numel % 5, with_factors=numel % 5 > 2)
    cases.check_compress(CPU, 5003, 4, scale_block, segments=40, with_x=False, shift=1)
    cases.check_compress(CPU, 3001, 4, scale_block, segments=900, with_factors=True)
    cases.check_compress(CPU, 100, 1, scale_block, with_x=False)


@pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
def test_average_compress(instruction_set: str, scale_block: int | None) -> None:
    for numel in (*cases.NUMELS, 70_001):
        for world_size in (1, 2, 3, 8, 13):
            cases.check_average_compress(CPU, numel, world_size, scale_block, shift=numel % 3)
    for world_size in range(4, 18):
        cases.check_average_compress(CPU, 1511, world_size, scale_block)


def test_sums_of_messages_keep_the_sign_of_zero(instruction_set: str) -> None:
    numel, random = 5_000, torch.Generator().manual_seed(2)
    for world_size in range(1, 11):
        nbytes = message_nbytes(numel, None)
        messages = torch.randint(256, (world_size, nbytes), dtype=torch.uint8, generator=random)
        messages[:, :4] = 0  # the scale: a sum of zeros is -0 only where all signs are negative
        expected, error = torch.full((numel,), -0.0), torch.full((numel,), -0.0)
        reference.average_compress_(messages.view(-1), expected, torch.empty(nbytes).byte(), world_size, None)
        assert 0 < int(expected.signbit().sum()) < numel
        native.average_compress_(messages.view(-1), error, torch.empty(nbytes).byte(), world_size, None)
        cases.assert_same_bits(error, expected)


@pytest.mark.parametrize("scale_block", cases.SCALE_BLOCKS)
def test_decompress(instruction_set: str, scale_block: int | None) -> None:
    for numel in (*cases.NUMELS, 70_001):
        for world_size in (0, 1, 2, 4):
            cases.check_decompress(CPU, numel, world_size, scale_block, shift=numel % 2)


def test_outputs_beyond_the_caches(instruction_set: str) -> None:
    cases.check_decompress(CPU, 4_300_003, 2, 4096, shift=3)
    cases.check_apply_adam(CPU, 4_300_003, 5, world_size=2, shift=1)


def test_combine(instruction_set: str) -> None:
    for numel in cases.NUMELS:
        for segments in (0, 1, 7):
            for with_x in (True, False):
                cases.check_combine(CPU, numel, segments, with_x=with_x, with_factors=segments > 1)


@pytest.mark.parametrize("descent", cases.DESCENTS)
def test_apply_adam(instruction_set: str, descent: Descent) -> None:
    for numel in cases.NUMELS:
        for world_size, block in ((0, None), (1, 4096), (3, 512), (2, None), (4, 8)):
            for beta, corrected in ((1.0, False), (0.1, True)):
                options = {"beta": beta, "corrected": corrected, "descent": descent, "shift": numel % 2}
                cases.check_apply_adam(CPU, numel, 7, world_size=world_size, scale_block=block, **options)


@pytest.mark.parametrize("descent", cases.DESCENTS)
def test_local_step(instruction_set: str, descent: Descent) -> None:
    for numel in cases.NUMELS:
        for with_grads in (True, False):
            cases.check_local_step(CPU, numel, 7, with_grads=with_grads, descent=descent)


@pytest.mark.parametrize("descent", cases.DESCENTS[::2])
def test_sync_parameters(instruction_set: str, descent: Descent) -> None:
    for numel in cases.NUMELS:
        for world_size in (0, 1, 3):
            cases.check_sync_parameters(CPU, numel, 7, world_size=world_size, descent=descent)


def test_directions_beyond_a_bound(instruction_set: str) -> None:
    cases.check_bound(CPU)


@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
@pytest.mark.parametrize("eps_inside_sqrt", (False, True))
def test_lamb(instruction_set: str, weight_decay: float, eps_inside_sqrt: bool) -> None:
    options = LambOptions(0.9, 0.999, 1e-6, weight_decay, eps_inside_sqrt)
    for numel in cases.NUMELS:
        cases.check_lamb(CPU, numel, 6, world_size=numel % 3, options=options)


def test_adam(instruction_set: str) -> None:
    some = cases.STEP
    scale, clip = torch.tensor([1024.0]), torch.tensor([0.3])
    for step in (
        some,
        replace(some, weight_decay=0.0, bias_correction=False),
        replace(some, adam_w_mode=False, maximize=True, lr=torch.tensor(0.02)),
        replace(some, grad_scale=scale, clip_factor=clip, write_grads=True, found_inf=torch.zeros(1)),
        replace(some, grad_scale=torch.tensor([3.0]), adam_w_mode=False),
        replace(some, found_inf=torch.ones(1)),
    ):
        cases.check_adam(CPU, (1, 0, 5, 17, 1000, 4099), step, shift=1)
        for masters, moments in ((False, False), (True, False), (False, True)):

            def dtypes(k: int, own: bool = moments) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
                param, grad = cases.DTYPES[k % 3], cases.DTYPES[k // 3 % 3]
                return param, grad, param if own else torch.float32

            cases.check_adam(
                CPU, (1, 513, 100, 31, 40, 1025, 7, 600, 3), step, dtypes=dtypes, masters=masters, copies=True
            )


def test_adam_on_several_threads(instruction_set: str) -> None:
    torch.set_num_threads(3)
    step = replace(cases.STEP, grad_scale=torch.tensor([3.0]), write_grads=True)
    cases.check_adam(CPU, (5, LARGE, 1000, 300_001), step, copies=True, shift=1)


def test_sums_of_squares(instruction_set: str) -> None:
    cases.check_square_sums(CPU, (1, 5, 0, 1000, 65_536, 65_537, 200_003), shift=1)
    assert not math.isfinite(native.sum_of_squares([torch.tensor([1.0, math.inf])], CPU))
    assert math.isnan(native.sum_of_squares([torch.ones(40), torch.tensor([math.nan])], CPU))
    assert float(native.sum_of_squares([torch.full((3,), 3e38)], CPU)) > 2.6e77  # beyond float32
    assert float(native.sum_of_squares([], CPU)) == 0


# -- numbers at the edges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_conversion_from_every_low_precision_number(instruction_set: str, dtype: torch.dtype) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(values.numel())
    grads = [Segment(values, 0, values.numel(), 0)]
    native.combine_(Combination(values.numel(), CPU, grads=grads), out)
    cases.assert_equal_with_nan(out, 0.0 + values.float())  # a term that is left out counts as 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_rounding_to_low_precision(instruction_set: str, dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    between = every.view(torch.int32)
    shift = 16 if dtype == torch.bfloat16 else 13
    near = [between + step for step in (0, 1, -1, (1 << shift - 1) - 1, 1 << shift - 1, (1 << shift - 1) + 1)]
    numbers = torch.cat([*near, torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int32)]).view(torch.float32)
    n = numbers.numel()
    param = torch.empty(n, dtype=dtype)
    anchor, zeros = numbers.clone(), torch.zeros(n)
    # A tensor that keeps still, and decay 1: the parameter is the anchor, rounded.
    params = [Segment(param, 0, n, 0, still=True)]
    native.sync_parameters_(
        ParameterSync(Average.of(zeros), zeros.clone(), anchor, zeros, zeros.clone(), params, 1.0, STILL)
    )
    cases.assert_equal_with_nan(param, numbers.to(dtype))


@pytest.mark.parametrize("scale_block", (None, 8, 512, 4096))
def test_values_that_are_not_ordinary(instruction_set: str, scale_block: int | None) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30, 1e18, -1e18, math.inf, -math.inf, math.nan])
    for kinds in (special[:2], special[2:5], special[:8], special):
        x = kinds[torch.randint(len(kinds), (9_001,), generator=torch.Generator().manual_seed(1))]
        message = torch.full((message_nbytes(x.numel(), scale_block),), 7, dtype=torch.uint8)
        error = torch.zeros(x.numel())
        native.compress_(Combination.of(x), error, message, 1, scale_block)
        scales = message[: 4 * kernels.num_blocks(x.numel(), scale_block)].view(torch.float32)
        rows = x.double().split(scale_block or x.numel())
        expected = torch.stack([row.square().mean().sqrt() for row in rows]).float()
        torch.testing.assert_close(scales, expected, rtol=3e-7, atol=2e-45, equal_nan=True)
        packed = message[scales.numel() * 4 :][: -(-x.numel() // 8)]
        u = x + 0.0
        assert torch.equal(packed, signs.pack_signs(u))
        cases.assert_equal_with_nan(error, u - signs.decompress_message(message, x.numel(), scale_block))
