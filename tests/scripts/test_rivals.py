"""The methods that others use, against what their papers say."""

import sys
from typing import Any

import pytest
import torch

from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.support.harness import run_ranks
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


def means(world_size: int, step: int = 0) -> list[torch.Tensor]:
    rows = zip(*(gradients(rank, step) for rank in range(world_size)), strict=True)
    return [torch.stack(list(row)).mean(0) for row in rows]


def exchanged(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[list[Any], int]]:
    """The gradients that each method leaves, and the bytes that it sent for them and for the parameters."""
    found = []
    for method, options in cases:
        params, communicator = parameters(), TorchCommunicator()
        rival = rivals.RIVALS[method](params, communicator, **options)
        for param, grad in zip(params, gradients(rank), strict=True):
            param.grad = grad
        rival.gradients()
        rival.parameters(last=True)
        found.append(([param.grad for param in params], communicator.traffic.total_bytes))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_become_their_mean(world_size: int) -> None:
    """A rank as large as the matrix, and the first steps, lose nothing."""
    cases = [("bfloat16", {}), ("PowerSGD", {"rank": 12, "start": 0}), ("PowerSGD", {"rank": 1, "start": 1})]
    more = [("PowerSGD", {"rank": 1, "start": 0}), ("LocalSGD", {}), ("DiLoCo", {})]
    rows = run_ranks(world_size, exchanged, cases + more)
    for index, tolerance in enumerate((0.03, 1e-5, 1e-6)):
        for got, *others, expected in zip(*(row[index][0] for row in rows), means(world_size), strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
            assert all(got.equal(other) for other in others)
    ring, factors = 2 * (world_size - 1) / world_size, 12 + 7 + 3 + 1 + 10 + 10  # P and the vectors; Q
    sent = [nbytes for _, nbytes in rows[0]]
    assert sent[0] == int(ring * 2 * NUMEL) and sent[4] == sent[5] == int(ring * 4 * NUMEL)
    assert sent[3] == pytest.approx(ring * 4 * factors, abs=2)


def low_rank_sums(rank: int, world_size: int, steps: int) -> torch.Tensor:
    params, total = parameters(), torch.zeros(12, 10)
    rival = rivals.PowerSGD(params, TorchCommunicator(), rank=1, start=0)
    for _ in range(steps):
        for param, grad in zip(params, gradients(rank), strict=True):
            param.grad = grad
        rival.gradients()
        total += params[0].grad
    return total / steps


def test_powersgd_sends_its_errors_later() -> None:
    """The sum of what was applied nears the sum of the gradients: constant gradients are applied wholly in time."""
    (first, second), expected = run_ranks(2, low_rank_sums, 40), means(2)[0]
    assert torch.equal(first, second)
    assert float((first - expected).norm() / expected.norm()) < 0.3  # of rank 1 alone 0.8


def local_steps(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]], steps: int) -> list[Any]:
    """For each method and step the parameters after it, with plain descent inside."""
    found = []
    for method, options in cases:
        params = parameters()
        rival, seen = rivals.RIVALS[method](params, TorchCommunicator(), **options), []
        for step in range(steps):
            with torch.no_grad():
                for param, grad in zip(params, gradients(rank, step), strict=True):
                    param -= 0.1 * grad
            rival.parameters(last=step == steps - 1)
            seen.append([param.detach().clone() for param in params])
        found.append(seen)
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_meet_every_interval(world_size: int) -> None:
    """LocalSGD at their mean, as DiLoCo with an outer rate of 1 and no momentum; and DiLoCo takes Nesterov's step."""
    outer = {"interval": 2, "outer_lr": 1.0, "momentum": 0.0}
    nesterov = {"interval": 1, "outer_lr": 0.5, "momentum": 0.9}
    cases = [("LocalSGD", {"interval": 2}), ("DiLoCo", outer), ("DiLoCo", nesterov)]
    rows = run_ranks(world_size, local_steps, cases, 3)
    for index, param in enumerate(parameters()):
        start = param.detach()
        for step, through in ((1, (0, 1)), (2, (0, 1, 2))):
            expected = start - 0.1 * sum(means(world_size, s)[index] for s in through)
            for row in rows:
                torch.testing.assert_close(row[0][step][index], expected)
                torch.testing.assert_close(row[1][step][index], expected)
        first, second = (0.1 * means(world_size, step)[index] for step in range(2))
        velocity = 0.9 * first + second
        expected = start - 0.5 * (first + 0.9 * first) - 0.5 * (second + 0.9 * velocity)
        torch.testing.assert_close(rows[0][2][1][index], expected)
    if world_size > 1:
        assert not torch.equal(rows[0][0][0][0], rows[1][0][0][0])
