"""The methods that docs/convergence.md compares with, against what their papers say, on ranks that are threads."""

import sys

import pytest
import torch

from tests.support.launching import REPO_ROOT

sys.path.append(str(REPO_ROOT / "scripts"))

import rivals  # noqa: E402
from _convergence_ranks import InProcess, Room  # noqa: E402
from rivals.demo import inverse, transform  # noqa: E402

SHAPES = [(12, 10), (7,), (3, 5, 2), (1,)]


def on_ranks(world_size, action):
    room = Room(world_size)
    return room.run(lambda rank: action(InProcess(room, rank)))


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(rank, step=0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def give(params, rank, step=0):
    for param, grad in zip(params, gradients(rank, step), strict=True):
        param.grad = grad


def means(world_size, step=0):
    return [
        torch.stack(rows).mean(0) for rows in zip(*(gradients(rank, step) for rank in range(world_size)), strict=True)
    ]


def assert_alike(rows):
    for other in rows[1:]:
        for mine, theirs in zip(rows[0], other, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("method", "options", "tolerance"),
    [("bfloat16", {}, 0.03), ("PowerSGD", {"rank": 12, "start": 0}, 1e-5), ("PowerSGD", {"rank": 1, "start": 1}, 1e-6)],
)
def test_gradients_become_their_mean(world_size, method, options, tolerance):
    """A rank as large as the matrix, and the first steps, lose nothing."""

    def action(communicator):
        params = parameters()
        rival = rivals.RIVALS[method](params, communicator, **options)
        give(params, communicator.rank)
        rival.gradients()
        return [param.grad for param in params]

    rows = on_ranks(world_size, action)
    assert_alike(rows)
    for got, expected in zip(rows[0], means(world_size), strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_powersgd_sends_what_it_missed_later():
    """The sum of what was applied nears the sum of the gradients: constant gradients are applied wholly in time."""
    steps = 40

    def action(communicator):
        params = parameters()
        rival = rivals.PowerSGD(params, communicator, rank=1, start=0)
        total = torch.zeros(12, 10)
        for _ in range(steps):
            give(params, communicator.rank)
            rival.gradients()
            total += params[0].grad
        return total / steps

    (first, second), expected = on_ranks(2, action), means(2)[0]
    assert torch.equal(first, second)
    assert float((first - expected).norm() / expected.norm()) < 0.3  # of rank 1 alone 0.8


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_meet_at_their_mean_every_interval(world_size):
    """LocalSGD; and DiLoCo with an outer rate of 1 and no momentum is the same."""

    def action(communicator, method, options):
        params = parameters()
        rival, seen = method(params, communicator, interval=2, **options), []
        for step in range(3):
            with torch.no_grad():
                for param, grad in zip(params, gradients(communicator.rank, step), strict=True):
                    param -= 0.1 * grad
            rival.parameters(last=step == 2)
            seen.append([param.detach().clone() for param in params])
        return seen

    plain = on_ranks(world_size, lambda c: action(c, rivals.LocalSGD, {}))
    outer = on_ranks(world_size, lambda c: action(c, rivals.DiLoCo, {"outer_lr": 1.0, "momentum": 0.0}))
    start = parameters()
    for step, through in ((1, (0, 1)), (2, (0, 1, 2))):
        assert_alike([row[step] for row in plain])
        for index, param in enumerate(start):
            expected = param.detach() - 0.1 * sum(means(world_size, s)[index] for s in through)
            torch.testing.assert_close(plain[0][step][index], expected)
            torch.testing.assert_close(outer[-1][step][index], expected)
    if world_size > 1:
        assert not torch.equal(plain[0][0][0], plain[1][0][0])


def test_diloco_takes_nesterovs_step():
    def action(communicator):
        params = parameters()
        rival = rivals.DiLoCo(params, communicator, interval=1, outer_lr=0.5, momentum=0.9)
        for step in range(2):
            with torch.no_grad():
                for param, grad in zip(params, gradients(communicator.rank, step), strict=True):
                    param -= 0.1 * grad
            rival.parameters(last=False)
        return [param.detach() for param in params]

    got, start = on_ranks(2, action)[0], parameters()
    for index, param in enumerate(start):
        first, second = (0.1 * means(2, step)[index] for step in range(2))
        velocity = 0.9 * first + second
        expected = param.detach() - 0.5 * (first + 0.9 * first) - 0.5 * (second + 0.9 * velocity)
        torch.testing.assert_close(got[index], expected)


@pytest.mark.parametrize("shape", [(128, 96), (130,), (3, 4, 5), (1, 67)])
def test_the_transform_of_chunks_keeps_norms_and_is_undone(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    chunks = transform(values)
    torch.testing.assert_close(chunks.norm(), values.norm())
    torch.testing.assert_close(inverse(chunks, values.shape), values, rtol=1e-5, atol=1e-5)
    constant = transform(torch.ones(shape))
    assert int((constant.abs() > 1e-4).sum()) == len(constant)  # one component of each chunk


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_demo_follows_its_algorithm(world_size):
    def action(communicator, k):
        params = parameters()
        optimizer = rivals.DeMo(params, lr=0.1, communicator=communicator, k=k)
        for step in range(2):
            give(params, communicator.rank, step)
            optimizer.step()
        return [param.detach() for param in params], [optimizer.state[param]["momentum"] for param in params]

    rows = on_ranks(world_size, lambda c: action(c, 4096))  # every component: sign descent by the mean gradient
    assert_alike([params for params, _ in rows])
    for index, param in enumerate(parameters()):
        steps = [means(world_size, step)[index] for step in range(2)]
        sure = torch.stack([step.abs() for step in steps]).amin(0) > 0.05  # beyond what 16 bits may turn
        expected = param.detach() - 0.1 * sum(step.sign() for step in steps)
        torch.testing.assert_close(rows[0][0][index][sure], expected[sure])
        assert float(rows[0][1][index].abs().max()) < 0.05  # what 16 bits have left of the momentum
    kept = on_ranks(world_size, lambda c: action(c, 1))
    assert_alike([params for params, _ in kept])
    assert float(kept[0][1][0].norm()) > 1.0  # what did not leave stays in the momentum


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_signsgd_counts_the_votes(world_size):
    def action(communicator):
        params = parameters()
        optimizer = rivals.SignSGD(params, lr=0.1, communicator=communicator, beta=0.5)
        for step in range(2):
            give(params, communicator.rank, step)
            optimizer.step()
        return [param.detach() for param in params], communicator.traffic.total_bytes

    rows = on_ranks(world_size, action)
    assert_alike([params for params, _ in rows])
    for index, param in enumerate(parameters()):
        expected = param.detach().clone()
        for step in range(2):
            momenta = [
                sum(0.5 ** (step + 1 - s) * gradients(rank, s)[index] for s in range(step + 1))
                for rank in range(world_size)
            ]
            negative = sum((momentum < 0).float() for momentum in momenta)
            expected -= torch.where(negative > world_size / 2, -0.1, 0.1)
        torch.testing.assert_close(rows[0][0][index], expected)
    numel = sum(param.numel() for param in parameters())
    part = -(-numel // (8 * world_size))
    assert rows[0][1] == 2 * 2 * (world_size - 1) * part


def test_bytes_of_a_step():
    def sent(method, options, communicator):
        params = parameters()
        if method in rivals.RIVALS:
            rival = rivals.RIVALS[method](params, communicator, **options)
            give(params, communicator.rank)
            rival.gradients()
            rival.parameters(last=True)
        else:
            optimizer = rivals.OPTIMIZERS[method](params, lr=0.1, communicator=communicator, **options)
            give(params, communicator.rank)
            optimizer.step()
        return communicator.traffic.total_bytes

    numel, world_size = sum(param.numel() for param in parameters()), 4
    ring = 2 * (world_size - 1) / world_size

    def of(method, **options):
        return on_ranks(world_size, lambda c: sent(method, options, c))[0]

    assert of("bfloat16") == int(ring * 2 * numel)
    assert of("LocalSGD") == int(ring * 4 * numel) == of("DiLoCo")
    factors = 12 + 7 + 3 + 1 + 10 + 10  # P of the two matrices, the vectors; Q
    assert of("PowerSGD", rank=1, start=0) == pytest.approx(ring * 4 * factors, abs=2)
    components = sum(min(2, size) for size in (120, 7, 30, 1))
    assert of("DeMo", k=2) == (world_size - 1) * 4 * components
