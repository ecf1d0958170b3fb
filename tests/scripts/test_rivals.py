"""The methods that others use, against what their papers say."""

import sys
from typing import Any

import pytest
import torch

import hf_compressopt
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.support.harness import on_ranks, same_on_all_ranks
from tests.support.launching import REPO_ROOT

sys.path.append(str(REPO_ROOT / "scripts"))

import rivals  # noqa: E402

SHAPES = [(12, 10), (7,), (3, 5, 2), (1,)]
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(rank: int, step: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make(method: str, **options: Any) -> tuple[list[torch.nn.Parameter], Any, TorchCommunicator]:
    params, communicator = parameters(), TorchCommunicator()
    return params, rivals.RIVALS[method](params, communicator, **options), communicator


def give(params: list[torch.nn.Parameter], rank: int) -> None:
    for param, grad in zip(params, gradients(rank), strict=True):
        param.grad = grad


def means(world_size: int, step: int = 0) -> list[torch.Tensor]:
    rows = zip(*(gradients(rank, step) for rank in range(world_size)), strict=True)
    return [torch.stack(list(row)).mean(0) for row in rows]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_gradients_become_their_mean(rank: int, world_size: int) -> None:
    """A rank as large as the matrix, and the first steps, lose nothing."""
    ring, factors = 2 * (world_size - 1) / world_size, 12 + 7 + 3 + 1 + 10 + 10  # P and the vectors; Q
    cases: list[tuple[str, dict[str, Any], float | None, float | None]] = [
        ("bfloat16", {}, 0.03, int(ring * 2 * NUMEL)),
        ("PowerSGD", {"rank": 12, "start": 0}, 1e-5, None),
        ("PowerSGD", {"rank": 1, "start": 1}, 1e-6, None),
        ("PowerSGD", {"rank": 1, "start": 0}, None, pytest.approx(ring * 4 * factors, abs=2)),
        ("LocalSGD", {}, None, int(ring * 4 * NUMEL)),
        ("DiLoCo", {}, None, int(ring * 4 * NUMEL)),
    ]
    for method, options, tolerance, sent in cases:
        params, rival, communicator = make(method, **options)
        give(params, rank)
        rival.gradients()
        rival.parameters(last=True)
        assert sent is None or communicator.traffic.total_bytes == sent, method
        if tolerance is not None:
            for param, expected in zip(params, means(world_size), strict=True):
                torch.testing.assert_close(param.grad, expected, rtol=tolerance, atol=tolerance)
            assert same_on_all_ranks(param.grad for param in params), method


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_float8_rounds_each_element_twice(rank: int, world_size: int) -> None:
    """Each rounding errs by at most 1/16 of an element; a byte per element and four per block travel there and back."""
    params, rival, communicator = make("float8")
    give(params, rank)
    rival.gradients()
    apart = [torch.stack([row[index].abs() for row in map(gradients, range(world_size))]).mean(0) for index in range(4)]
    for param, mean, sizes in zip(params, means(world_size), apart, strict=True):
        smallest = 2 * sizes.max() * 2**-9 / 448 * 64  # subnormal numbers, in a block of other parameters too
        assert ((param.grad - mean).abs() <= sizes / 16 + mean.abs() / 16 * 1.07 + smallest).all()
    padded = -(-NUMEL // (128 * world_size)) * 128
    assert communicator.traffic.total_bytes == 2 * (world_size - 1) * (padded + 4 * padded // 128)


@on_ranks(2)
def test_quantized_gradients_are_ours_with_our_quantizer(rank: int, world_size: int) -> None:
    """Of a matrix of whole blocks, over three steps, with errors as float32 values."""
    mine, other = (torch.nn.Parameter(torch.zeros(16, 32)) for _ in range(2))
    cls = type("Float32Errors", (hf_compressopt.GradientCompression,), {"compact": False})
    communicator = TorchCommunicator()
    ours = cls({"matrix": mine}.items(), "int4", communicator=communicator)
    rival = rivals.RIVALS["quantized"]([other], communicator, quantizer="int4, squares (ours)")
    optimizer = torch.optim.SGD([mine, other], lr=0.1)  # errors change where a step takes the average
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        mine.grad = torch.randn(16, 32, generator=generator)
        other.grad = mine.grad.clone()
        ours.average_gradients()
        rival.gradients()
        assert torch.equal(mine.grad, other.grad), step
        assert len(mine.grad.unique()) < 4 * 2 * 15  # of a block, a scale and 15 numbers
        optimizer.step()


@on_ranks(2)
def test_powersgd_sends_its_errors_later(rank: int, world_size: int) -> None:
    """The sum of what was applied nears the sum of the gradients: constant gradients are applied wholly in time."""
    params, rival, _ = make("PowerSGD", rank=1, start=0)
    total, expected = torch.zeros(12, 10), means(2)[0]
    for _ in range(40):
        give(params, rank)
        rival.gradients()
        total += params[0].grad
    assert same_on_all_ranks([total])
    assert float((total / 40 - expected).norm() / expected.norm()) < 0.3  # of rank 1 alone 0.8


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_parameters_meet_every_interval(rank: int, world_size: int) -> None:
    """LocalSGD at their mean, as DiLoCo with an outer rate of 1 and no momentum; and DiLoCo takes Nesterov's step."""
    outer = {"interval": 2, "outer_lr": 1.0, "momentum": 0.0}
    nesterov = {"interval": 1, "outer_lr": 0.5, "momentum": 0.9}
    seen: list[list[list[torch.Tensor]]] = []  # for each method and step the parameters, with plain descent inside
    for method, options in (("LocalSGD", {"interval": 2}), ("DiLoCo", outer), ("DiLoCo", nesterov)):
        params, rival, _ = make(method, **options)
        seen.append([])
        for step in range(3):
            with torch.no_grad():
                for param, grad in zip(params, gradients(rank, step), strict=True):
                    param -= 0.1 * grad
            rival.parameters(last=step == 2)
            seen[-1].append([param.detach().clone() for param in params])
    assert same_on_all_ranks(seen[0][0]) == (world_size == 1)
    for index, param in enumerate(parameters()):
        start = param.detach()
        for step, through in ((1, (0, 1)), (2, (0, 1, 2))):
            expected = start - 0.1 * sum(means(world_size, s)[index] for s in through)
            torch.testing.assert_close(seen[0][step][index], expected)
            torch.testing.assert_close(seen[1][step][index], expected)
        first, second = (0.1 * means(world_size, step)[index] for step in range(2))
        velocity = 0.9 * first + second
        expected = start - 0.5 * (first + 0.9 * first) - 0.5 * (second + 0.9 * velocity)
        torch.testing.assert_close(seen[2][1][index], expected)
