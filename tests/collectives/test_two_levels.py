"""The exchange in two levels on real gloo ranks: its chunks, its groups, its bytes, and the choice of a topology."""

import copy
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_compressopt import GradientCompression, OnebitAdam, average_gradients
from hf_compressopt.collectives import topology
from hf_compressopt.collectives.chunks import Topology
from hf_compressopt.collectives.topology import TopologyOptions, with_topology
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.oracles.simulation import chunk_bounds, simulate_compressed_all_reduce
from tests.support.exchanging import average_, zero_feedback
from tests.support.harness import _pool, on_ranks, run_ranks, run_ranks_of_which_one_dies
from tests.support.logs import log_lines

NUMELS = (1, 5, 33, 100, 1000)
BLOCK = 64


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "size"), [(1, 1), (4, 1), (1, 4), (2, 2), (2, 3), (3, 2), (8, 8)])
def test_every_chunk_has_one_server_and_every_shard_one_rank_of_each_node(nodes: int, size: int) -> None:
    world_size = nodes * size
    places = [Topology(world_size, rank, size) for rank in range(world_size)]
    assert sorted(place.own_chunk for place in places) == list(range(world_size))
    for numel in (0, 1, 7, 8 * world_size, 1000):
        chunks = chunk_bounds(numel, world_size)
        for place in places:
            assert place.own_range(numel) == chunks[place.own_chunk] and place.own_chunk in place.sent_chunks
            sent = [stop - start for start, stop in (chunks[chunk] for chunk in place.sent_chunks)]
            assert place.sent_numels(numel) == sent
            assert place.sent_range(numel) == (chunks[place.sent_chunks[0]][0], chunks[place.sent_chunks[-1]][1])
            servers = [other.rank for chunk in place.sent_chunks for other in places if other.own_chunk == chunk]
            assert servers == [place.place + size * node for node in range(nodes)]  # the peers, in order
        for node in range(nodes):
            mine = [place.sent_range(numel) for place in places if place.node == node]
            assert sum(stop - start for start, stop in mine) == numel


# -- the exchange -----------------------------------------------------------------------------------------------------


def in_levels(node_size: int, node_bits: int = 32) -> Any:
    return with_topology(TorchCommunicator(), TopologyOptions(node_size=node_size, node_bits=node_bits))


def inputs(numel: int, world_size: int) -> np.ndarray:
    """[repeats, world_size, numel] float32."""
    return np.random.default_rng(numel).standard_normal((4, world_size, numel)).astype(np.float32)


def exchange(rank: int, world_size: int, node_size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The last mean and both errors for each size."""
    ranks, found = in_levels(node_size), []
    for numel in NUMELS:
        feedback = zero_feedback(numel, ranks)
        for x in inputs(numel, world_size):
            mean = average_(torch.from_numpy(x[rank].copy()), feedback, ranks)
        worker = torch.cat([*feedback.worker, torch.empty(0)])
        found.append((mean.numpy(), worker.numpy(), feedback.server.numpy()))
    return found


@pytest.mark.parametrize(("world_size", "node_size"), [(4, 2), (4, 4), (2, 2), (3, 3)])
def test_equals_the_simulation(world_size: int, node_size: int) -> None:
    ranks = run_ranks(world_size, exchange, node_size)
    for index, numel in enumerate(NUMELS):
        workers = [np.zeros(numel)] * world_size
        servers = [np.zeros(stop - start) for start, stop in chunk_bounds(numel, world_size)]
        for x in inputs(numel, world_size):
            xs = list(x.astype(np.float64))
            result = simulate_compressed_all_reduce(xs, workers, servers, BLOCK, node_size=node_size)
            workers, servers = result.worker_errors, result.server_errors
            assert result.min_distance > 1e-7  # the seeds keep away from a change of sign
        for rank, found in enumerate(ranks):
            mean, worker, server = found[index]
            place = Topology(world_size, rank, node_size)
            assert mean.tobytes() == ranks[0][index][0].tobytes(), "the ranks differ"
            np.testing.assert_allclose(mean, result.mean, rtol=4e-6, atol=2e-6)
            shard = slice(*place.sent_range(numel))
            np.testing.assert_allclose(worker, workers[rank][shard], rtol=4e-6, atol=2e-6)
            np.testing.assert_allclose(server, servers[place.own_chunk], rtol=4e-6, atol=2e-6)


@pytest.mark.invariant(33)
@on_ranks(4)
def test_bytes_between_and_inside_the_nodes(rank: int, world_size: int) -> None:
    numel = 40_000
    message, norms = numel / 8 + 4 * numel / BLOCK, []
    for bits in (32, 16):
        ranks = in_levels(2, bits)
        feedback = zero_feedback(numel, ranks)
        norms.append(average_(torch.randn(numel), feedback, ranks).norm().item())
        inside = ranks.traffic.node_bytes
        found = torch.tensor([ranks.traffic.total_bytes, inside["all_to_all"], inside["all_gather"]]).double()
        dist.all_reduce(found, group=ranks.levels.node.process_group)  # of a node: 2 (M-1)/M messages
        expected = torch.tensor([2 * (2 - 1) / 2 * message, numel * bits / 8, message]).double()
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0)
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
    copied = copy.deepcopy(ranks)
    average_(torch.randn(numel), feedback, copied)
    assert copied.traffic.total_bytes == 2 * ranks.traffic.total_bytes
    assert copied.traffic.node_bytes["all_to_all"] == 2 * ranks.traffic.node_bytes["all_to_all"]


# -- the choice -------------------------------------------------------------------------------------------------------


def choose(rank: int, hosts: str, local: dict[int, int], given: dict[str, Any]) -> tuple[int, list[str]]:
    """The ranks per node that an optimizer finds, and the warnings."""
    with pytest.MonkeyPatch.context() as patch, log_lines() as lines:
        patch.setattr(topology, "gethostname", lambda: hosts[rank])  # one machine stands for several
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if rank in local:
            patch.setenv("LOCAL_WORLD_SIZE", str(local[rank]))
        optimizer = OnebitAdam([nn.Parameter(torch.zeros(64))], **given)
    return optimizer.communicator.topology.node_size, lines


@on_ranks(4)
def test_auto_follows_the_launcher_and_warns_once_of_unequal_nodes(rank: int, world_size: int) -> None:
    two, all_four = {rank: 2 for rank in range(4)}, {rank: 4 for rank in range(4)}
    rows: list[tuple[tuple[str, dict[int, int], dict[str, Any]], int, str]] = [
        (("aabb", two, {"topology": "flat"}), 1, ""),
        (("aabb", {}, {}), 1, ""),  # nobody says how many ranks a node has
        (("aabb", {}, {"topology": "two-level"}), 2, ""),
        (("aaaa", all_four, {}), 1, ""),
        (("abcd", {rank: 1 for rank in range(4)}, {}), 1, ""),
        (("aaab", {0: 3, 1: 3, 2: 3, 3: 1}, {}), 1, "[3, 1]"),
        (("aaaa", two, {}), 1, "the launcher says [2]"),
        (("aabb", {rank: 3 for rank in range(4)}, {}), 1, "the launcher says [3]"),
        (("abab", two, {}), 1, "follow one another"),
        (("aaaa", two, {"node_size": 2}), 2, ""),
        (("aaaa", two, {"node_size": 1}), 1, ""),
        (("aabb", two, {"scale_block": None}), 1, "scale_block"),
    ]
    for row, expected, warning in rows:
        size, lines = choose(rank, *row)
        assert size == expected, row
        assert len(lines) == (bool(warning) and rank == 0) and all(warning in line for line in lines), (row, lines)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"node_size": 3}], r"node_size.*divide.*4.*got 3.*\[1, 2, 4\]|node_size.*divide.*4.*\[1, 2, 4\].*got 3"),
        ([{"topology": "two-level"}], r"at least two nodes.*1 host\(s\).*node_size"),
        ([{"node_size": 2, "scale_block": None}], "scale_block.*None.*topology='flat'"),
        ([{"node_size": 2}, {"node_size": 4}], r"ranks \[1, 3\] differ.*node_size"),
        ([{"node_size": 2}, {"node_size": 2, "node_bits": 16}], r"ranks \[1, 3\] differ.*16"),
        ([{"node_size": 2}, {"topology": "flat"}], r"ranks \[1, 3\] differ"),
    ],
)
@on_ranks(4, timeout=30)
def test_what_cannot_be_is_an_error_on_all_ranks(
    rank: int, world_size: int, given: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){said}"):
        average_gradients(OnebitAdam([nn.Parameter(torch.zeros(64))], **given[rank % len(given)]))


@on_ranks(5)
def test_a_process_group_has_levels_of_its_own(rank: int, world_size: int) -> None:
    """The first four of the ranks have an optimizer, two of them per node; the others have nothing to do with it."""
    four = dist.new_group([0, 1, 2, 3])
    if rank < 4:
        p = nn.Parameter(torch.zeros(100))
        state = GradientCompression([p], process_group=four, node_size=2)
        p.grad = torch.full((100,), float(rank))
        state.average_gradients()
        assert state.communicator.topology.nodes == 2
        assert p.grad.tolist() == pytest.approx([1.5] * 100, rel=0.01)
        ranks: list[Any] = [None] * 4
        dist.all_gather_object(ranks, p.grad.tolist(), group=four)
        assert ranks == [ranks[0]] * 4


@on_ranks(4)
def test_dropped_optimizers_leave_no_groups_behind(rank: int, world_size: int) -> None:
    held = []
    for _ in range(4):
        p = nn.Parameter(torch.ones(100))
        optimizer = OnebitAdam([p], node_size=2, freeze_step=1, warmup_bits=32)
        for _ in range(3):
            p.grad = torch.ones(100)
            average_gradients(optimizer)
            optimizer.step()
        del optimizer
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    assert held[1:] == held[:1] * 3, held


# -- errors on the way ------------------------------------------------------------------------------------------------


def dies(rank: int, world_size: int, folder: str) -> None:
    ranks = in_levels(2)
    feedback = zero_feedback(1000, ranks)
    average_(torch.ones(1000), feedback, ranks)
    if rank == 3:  # inside the node all is done, and its peer waits for it
        ranks.levels.peers.all_to_all = lambda *args, **splits: os._exit(7)
    try:
        average_(torch.ones(1000), feedback, ranks)
    except RuntimeError as error:
        Path(folder, str(rank)).write_text(str(error))
        raise


def test_a_rank_that_dies_between_the_levels_ends_the_others(tmp_path: Path) -> None:
    run_ranks_of_which_one_dies(4, dies, str(tmp_path))
    start = time.monotonic()
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() - start < 30:
        time.sleep(0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    _pool.kill()
