"""The compressed all-reduce on real gloo ranks, against the float64 simulation and against what it promises."""

import json
from itertools import product

import numpy as np
import pytest
import torch

from hf_compressopt import OnebitAdam, kernels
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.flat import chunk_range
from tests.oracles.simulation import chunk_bounds, simulate_compressed_all_reduce
from tests.support.exchanging import average_, zero_feedback
from tests.support.harness import on_ranks, run_ranks
from tests.support.launching import REPO_ROOT, own_network, run, torchrun
from tests.support.recording import Recording

SCALE_BLOCKS = (None, 8, 64, 4096)
NUMELS = (1, 5, 8, 9, 33, 100, 1000)
LONG = 9001  # more than one block of 4096 per chunk at W = 2
SAFE_DISTANCE = 3e-7
RTOL = 4e-6  # float32's sum of 4096 equal squares, which all round the same way


def inputs(world_size, numel, repeats, seed):
    """[repeats, world_size, numel] float32."""
    return np.random.default_rng(seed).standard_normal((repeats, world_size, numel)).astype(np.float32)


def repeat_all(rank, world_size, cases):
    """For each case every result, and the errors at the end, of repeated calls on this rank's rows of xs [_, W, n]."""
    communicator, found = TorchCommunicator(), []
    for xs, scale_block in cases:
        feedback = zero_feedback(xs.shape[2], communicator)
        means = [average_(torch.from_numpy(x[rank].copy()), feedback, communicator, scale_block).numpy() for x in xs]
        found.append((np.stack(means), feedback.worker[0].numpy(), feedback.server.numpy()))
    assert world_size > 1 or communicator.traffic.total_bytes == 0
    return found


def simulate(xs, scale_block):
    repeats, world_size, numel = xs.shape
    workers = [np.zeros(numel)] * world_size
    servers = [np.zeros(end - begin) for begin, end in chunk_bounds(numel, world_size)]
    means, distance = [], np.inf
    for x in xs:
        result = simulate_compressed_all_reduce(list(x.astype(np.float64)), workers, servers, scale_block)
        workers, servers = result.worker_errors, result.server_errors
        means.append(result.mean)
        distance = min(distance, result.min_distance)
    return np.stack(means), workers, servers, distance


def safe_case(world_size, numel, scale_block, repeats):
    for seed in range(100):
        xs = inputs(world_size, numel, repeats, seed)
        expected = simulate(xs, scale_block)
        if expected[3] >= SAFE_DISTANCE:
            return xs, expected
    raise AssertionError(f"no seed keeps {numel} elements away from a change of sign")


@pytest.mark.invariant(29)
@pytest.mark.invariant(35)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_simulation(world_size):
    """All sizes and blocks, errors carried over the calls; below 8 W elements some ranks have no chunk.

    A single rank sends nothing and keeps its input.
    """
    sizes = [(numel, block) for numel in (*NUMELS, LONG) for block in SCALE_BLOCKS]
    chosen = [safe_case(world_size, numel, block, 2 if numel == LONG else 4) for numel, block in sizes]
    cases = [(xs, block) for (xs, _), (_, block) in zip(chosen, sizes, strict=True)]
    by_rank = run_ranks(world_size, repeat_all, cases)
    for index, (numel, block) in enumerate(sizes):
        means, workers, servers, _ = chosen[index][1]
        for rank in range(world_size):
            got_means, got_worker, got_server = by_rank[rank][index]
            context = f"numel={numel} scale_block={block} rank={rank}"
            alike = cases[index][0][:, 0] if world_size == 1 else by_rank[0][index][0]
            assert got_means.tobytes() == alike.tobytes(), f"{context}: ranks differ"
            np.testing.assert_allclose(got_means, means, rtol=RTOL, atol=2e-6, err_msg=context)
            np.testing.assert_allclose(got_worker, workers[rank], rtol=RTOL, atol=2e-6, err_msg=context)
            np.testing.assert_allclose(got_server, servers[rank], rtol=RTOL, atol=2e-6, err_msg=context)


@pytest.mark.invariant(28)
@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
@pytest.mark.parametrize("numel", [*NUMELS, LONG])
def test_decompressed_plus_error_is_input(numel, scale_block):
    """u = Q(u) + error up to the one rounding of the subtraction, for the worker's and for the server's message."""
    generator = torch.Generator().manual_seed(numel)
    form = kernels.SignFormat(scale_block)
    for world_size in (1, 2, 3, 4):
        x, error = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
        u = x + error
        sizes = form.chunk_nbytes(numel, world_size)
        messages = torch.zeros(sum(sizes), dtype=torch.uint8)
        kernels.on(x).compress_(form, kernels.Combination.of(x), error, messages, world_size, error)
        chunks = form.chunks(messages, numel, world_size)
        quantized = torch.cat([form.decode(message, stop - start) for start, stop, message in chunks])
        assert_adds_up(u, quantized, error)
        assert torch.equal(quantized < 0, u < 0)

        own = chunk_range(numel, world_size, 0)[1]
        size = sizes[0]
        received = messages[:size].repeat(world_size)
        server_error = torch.randn(own, generator=generator)
        a = server_error + form.decode(messages, own)
        out = torch.zeros(size, dtype=torch.uint8)
        kernels.on(x).average_compress_(form, received, server_error, server_error, out, world_size)
        result = torch.empty(own)
        kernels.on(result).decompress_(kernels.Average(own, form, out, 1, size), result)
        assert_adds_up(a, result, server_error, roundings=world_size)


def test_messages_are_summed_in_groups_of_four():
    """Beside 2^24 a 1 is lost in float32, but four of them are not; the order is the same everywhere."""
    messages = torch.zeros(8, kernels.SignFormat(8).nbytes(1), dtype=torch.uint8)
    messages[:, :4].view(torch.float32).copy_(torch.tensor([2.0**24] + 7 * [1.0]).view(8, 1))
    assert float(kernels.SignFormat(8).sum_of(messages, 1)) == 2.0**24 + 4
    messages[5, 4] = 1  # negative
    assert float(kernels.SignFormat(8).sum_of(messages, 1)) == 2.0**24 + 2


def assert_adds_up(u, quantized, error, roundings=1):
    largest = torch.maximum(torch.maximum(u.abs(), quantized.abs()), error.abs()).double()
    missing = (u.double() - quantized.double() - error.double()).abs()
    assert bool((missing <= roundings * largest * 2.0**-23).all()), float((missing / largest).max())


@pytest.mark.invariant(28)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@on_ranks()
def test_nothing_is_lost_and_the_residual_stays_bounded(rank, world_size):
    """Over 200 calls: sum of results = sum of mean inputs - mean residual, and the residual stops growing."""
    repeats, numel, communicator = 200, 300, TorchCommunicator()
    for scale_block in (None, 64):
        xs, feedback = inputs(world_size, numel, repeats, seed=1), zero_feedback(numel, communicator)
        total, norms = torch.zeros(numel, dtype=torch.float64), []
        for x in xs:
            total += average_(torch.from_numpy(x[rank].copy()), feedback, communicator, scale_block)
            norms.append(float(feedback.worker[0].norm()))
        assert max(norms[100:]) <= 1.25 * max(norms[:100])
        assert max(norms) < 10 * np.sqrt(numel), "the residual is many times a message"
        residual = feedback.worker[0].double() / world_size
        residual[slice(*chunk_bounds(numel, world_size)[rank])] += feedback.server
        communicator.all_reduce(residual).wait()
        lost = xs.astype(np.float64).mean(axis=1).sum(axis=0) - (total + residual).numpy()
        np.testing.assert_allclose(lost, 0, atol=2e-3)


@pytest.mark.invariant(30)
@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_zeros(rank, world_size):
    """sign(0) = +1 for both zeros, in the message and in what comes back; nothing but zeros stays zeros."""
    communicator = TorchCommunicator()
    feedback = zero_feedback(100, communicator)
    for _ in range(3):
        zero = average_(torch.zeros(100), feedback, communicator, 8)
    assert not any(tensor.any() for tensor in (zero, feedback.worker[0], feedback.server))
    x = torch.tensor([0.0, -0.0, 1, -1, 1, -1, 1, -1])
    mean = average_(x, zero_feedback(8, communicator), communicator, 8)
    assert torch.equal(mean[:2], mean[2:3].expand(2)), "zeros must come back positive, with the scale of their block"
    assert float(mean[2]) == pytest.approx(np.sqrt(6 / 8))
    assert torch.equal(mean[2:] > 0, torch.tensor([True, False, True, False, True, False]))


@pytest.mark.invariant(33)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@on_ranks()
def test_bytes_on_the_wire(rank, world_size):
    """The tensors handed to the process group are as large as counted, and as 2 (W-1)/W (n/8 + 4 blocks) says."""
    for numel, block in product((9, 1000, 100_003), SCALE_BLOCKS):
        communicator = MeasuringCommunicator()
        average_(torch.randn(numel), zero_feedback(numel, communicator), communicator, block)
        blocks = sum(-(-(end - begin) // (block or numel)) for begin, end in chunk_bounds(numel, world_size))
        formula = 2 * (world_size - 1) / world_size * (numel / 8 + 4 * blocks)
        few_bytes = 32 * 2 * (world_size - 1)
        assert communicator.measured == communicator.traffic.total_bytes, (numel, block)
        assert abs(communicator.measured - formula) <= few_bytes, (numel, block)


class MeasuringCommunicator(TorchCommunicator):
    """A counter of the bytes of every tensor that leaves this rank, whatever the class itself counts."""

    measured = 0

    def _all_to_all(self, output, inputs, output_splits, input_splits):
        assert sum(input_splits) == inputs.numel()
        self.measured += inputs.element_size() * (inputs.numel() - input_splits[self.rank])
        return super()._all_to_all(output, inputs, output_splits, input_splits)

    def _all_gather(self, output, part):
        self.measured += (self.world_size - 1) * part.nbytes
        return super()._all_gather(output, part)


@on_ranks(2)
def test_two_messages_per_bucket_and_the_next_bucket_leaves_before_one_is_awaited(rank: int, world_size: int) -> None:
    events: list[str] = []
    p = torch.nn.Parameter(torch.zeros(1000))
    cap = 256 * 4 / 2**20  # four buckets
    optimizer = OnebitAdam([p], freeze_step=1, scale_block=8, bucket_cap_mb=cap, communicator=Recording(events))
    for step in range(3):  # the second one also compares the ranks
        events.clear()
        p.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    started, awaited = {}, {}
    for kind in ("message", "answer"):
        started[kind] = [place for place, event in enumerate(events) if event == kind]
        awaited[kind] = [events.index(f"{kind} {number} awaited") for number in range(4)]
        assert len(started[kind]) == 4 and awaited[kind] == sorted(awaited[kind])
        assert all(started[kind][i + 1] < awaited[kind][i] for i in range(3))
    assert all(started["message"][i + 2] < awaited["answer"][i] for i in range(2))


@pytest.mark.full
@pytest.mark.invariant(33)
def test_bytes_at_the_interface_are_those_of_the_formula() -> None:
    # where a namespace of its own is not allowed, other traffic on the loopback device can only add to the count
    command = [*own_network(), *torchrun(2), str(REPO_ROOT / "tests" / "support" / "programs" / "traffic.py")]
    numbers = json.loads(run([*command, str(8_000_000), "5", str(4096)]).stdout.strip().splitlines()[-1])
    formula = 2 * (2 - 1) / 2 * (8_000_000 / 8 + 4 * -(-8_000_000 // 4096))
    assert 0.99 * formula < numbers["interface"] <= 1.05 * formula, numbers
    assert numbers["counted"] == pytest.approx(formula, rel=0.002)
