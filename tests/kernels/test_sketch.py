"""The count sketch: its definition, its statistics, and the native CPU kernels against the reference."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_compressopt.kernels import SKETCH_NUMEL, Segment, on
from tests.support.kernel_cases import assert_same_bits


def sketch(x: Tensor, seed: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    y, squares = torch.zeros(SKETCH_NUMEL), torch.zeros((), dtype=torch.float64)
    on(y).sketch_([Segment(x, 0, x.numel(), 0)], offset, seed, y, squares)
    return y, squares


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# -- the definition ---------------------------------------------------------------------------------------------------

GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def splitmix(x: int) -> int:
    """The first number of SplitMix64 from the state x - GOLDEN, as its authors write it."""
    x &= MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def test_the_hash_is_splitmix() -> None:
    assert splitmix(GOLDEN) == 0xE220A8397B1DCDAF  # the published first number for the seed 0


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("offset", [0, 5, 4_000])
def test_every_element_by_the_definition(offset: int) -> None:
    numel, seed = 9_000, 77
    x = normal(numel)
    expected = [0.0] * SKETCH_NUMEL
    signs = splitmix(seed + GOLDEN)
    rotations = splitmix(signs + GOLDEN)
    for i, value in enumerate(x.tolist(), start=offset):
        run, row, lane = i // 4096, i // 16 % 256, i % 16
        h = splitmix(rotations + run * GOLDEN)
        place = (row + h % 256) % 256 * 16 + (lane + h // 256) % 16
        negative = splitmix(signs + i // 64 * GOLDEN) >> i % 64 & 1
        expected[place] += -value if negative else value
    y, squares = sketch(x, seed, offset)
    torch.testing.assert_close(y, torch.tensor(expected), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(squares, x.double().square().sum(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("implementation")
def test_it_is_linear_and_adds_to_what_is_there() -> None:
    a, b = normal(30_000), normal(30_000, 1)
    mean, _ = sketch((a + b) / 2, 3)
    torch.testing.assert_close((sketch(a, 3)[0] + sketch(b, 3)[0]) / 2, mean, rtol=0, atol=1e-5)
    y, squares = torch.zeros(SKETCH_NUMEL), torch.zeros((), dtype=torch.float64)
    on(y).sketch_([Segment(a, 0, 12_345, 0)], 0, 3, y, squares)
    on(y).sketch_([Segment(a, 12_345, 0, 0), Segment(a, 12_345, 30_000 - 12_345, 1)], 12_345, 3, y, squares)
    torch.testing.assert_close(y, sketch(a, 3)[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(squares, a.double().square().sum(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("implementation")
def test_segments_without_a_tensor_count_as_zero() -> None:
    x = normal(10_000)
    y, squares = torch.zeros(SKETCH_NUMEL), torch.zeros((), dtype=torch.float64)
    segments = [Segment(x, 0, 3_000, 0), Segment(None, 0, 4_000, 1), Segment(x, 7_000, 3_000, 2)]
    on(y).sketch_(segments, 0, 9, y, squares)
    x[3_000:7_000] = 0
    assert_same_bits(y, sketch(x, 9)[0])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows(value: float) -> None:
    x = normal(10_000)
    x[7_777] = value
    y, squares = sketch(x, 4)
    assert int((~y.isfinite()).sum()) == 1
    assert not bool(squares.isfinite())


# -- statistics -------------------------------------------------------------------------------------------------------


def gradients_of_a_model() -> Tensor:
    """The gradients of a small language model: rows never met, rows met often, and weights of all sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        parts = torch.nn.Embedding(1_000, 64), layer, torch.nn.Linear(64, 1_000, bias=False)
        tokens = (1_000 * torch.rand(16, 33).pow(4)).long()  # few words are frequent
        logits = torch.nn.Sequential(*parts)(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return torch.cat([param.grad.flatten() for part in parts for param in part.parameters() if param.grad is not None])


def one_lane() -> Tensor:
    """All elements in the same column of a wide matrix, and so in the same lane of a row."""
    x = torch.zeros(1_000, 768)
    x[:, 5] = normal(1_000)
    return x.view(-1)


@pytest.mark.parametrize(
    "gradients", [gradients_of_a_model, lambda: normal(100_000), one_lane], ids=["model", "normal", "one lane"]
)
def test_the_norm_over_many_seeds(gradients: Callable[[], Tensor]) -> None:
    x = gradients()
    exact = float(x.double().norm())
    norms = torch.stack([sketch(x, seed)[0].double().norm() for seed in range(1_000)])
    off = norms / exact - 1
    assert int((off.abs() > 0.04).sum()) <= 1
    assert abs(float(off.mean())) < 0.003
    assert abs(float((norms / exact).square().mean()) - 1) < 0.003
    assert float(off.std()) < 1.15 / math.sqrt(2 * SKETCH_NUMEL)


def test_seeds_and_elements_have_signs_of_their_own() -> None:
    ones = torch.ones(SKETCH_NUMEL)
    rows = torch.stack([sketch(ones, seed)[0] for seed in range(200)])  # the signs, rotated
    assert bool((rows.abs() == 1).all())
    assert abs(float(rows.mean())) < 0.01
    other = torch.stack([sketch(ones, seed, offset=SKETCH_NUMEL)[0] for seed in range(200)])
    assert abs(float((rows * other).mean())) < 0.01 and abs(float((rows[1:] * rows[:-1]).mean())) < 0.01
