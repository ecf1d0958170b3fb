"""The exchange in two levels on real gloo ranks: its chunks, its groups, its bytes, and the choice of a topology."""

import copy
import logging
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
from hf_compressopt.collectives.topology import Levels, Topology, TopologyOptions, node_size_of_hosts, with_topology
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.oracles.simulation import chunk_bounds
from tests.oracles.simulation_two_levels import simulate_two_levels
from tests.support.exchanging import average_, zero_feedback
from tests.support.harness import _pool, run_ranks, run_ranks_expecting_error, run_ranks_of_which_one_dies

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


def test_nodes_are_found_from_hosts_and_the_launcher() -> None:
    assert node_size_of_hosts("aabb", [2] * 4) == (2, "")
    assert node_size_of_hosts("aaabbb", [None] * 6) == (3, "")
    assert node_size_of_hosts("aaaa", [4] * 4) == (1, "") == node_size_of_hosts("abcd", [1] * 4)
    assert "[2, 1]" in node_size_of_hosts("aab", [2, 2, 1])[1]
    assert "follow one another" in node_size_of_hosts("abab", [2] * 4)[1]
    assert "the launcher says [4]" in node_size_of_hosts("aabb", [4] * 4)[1]
    assert "the launcher says [2]" in node_size_of_hosts("aaaa", [2] * 4)[1]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"topology": "ring"}, ValueError, ["topology", "hierarchical", "'ring'"]),
        ({"node_size": 0}, ValueError, ["node_size", ">= 1", "0"]),
        ({"node_size": 2.0}, TypeError, ["node_size", "int", "2.0"]),
        ({"node_size": 2, "topology": "flat"}, ValueError, ["node_size=2", "'flat'", "hierarchical"]),
        ({"node_bits": 8}, ValueError, ["node_bits", "32 or 16", "8"]),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    for make in (TopologyOptions, lambda **given: OnebitAdam([nn.Parameter(torch.zeros(3))], **given)):
        with pytest.raises(error) as raised:
            make(**options)
        assert all(word in str(raised.value) for word in words), raised.value


# -- the exchange -----------------------------------------------------------------------------------------------------


def in_levels(node_size: int, node_bits: int = 32) -> TorchCommunicator:
    """Two levels, on one machine."""
    ranks = TorchCommunicator()
    place = Topology(ranks.world_size, ranks.rank, node_size)
    node = ranks.part([rank for rank in range(ranks.world_size) if rank // node_size == place.node])
    peers = ranks.part([rank for rank in range(ranks.world_size) if rank % node_size == place.place])
    node.traffic = ranks.traffic.inside_node()
    ranks.levels = Levels(node, peers, TopologyOptions(node_bits=node_bits).node_dtype)
    return ranks


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
            result = simulate_two_levels(list(x.astype(np.float64)), workers, servers, BLOCK, node_size=node_size)
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


def bytes_of_two_levels(rank: int, world_size: int, numel: int) -> dict[str, Any]:
    found = {}
    for bits in (32, 16):
        ranks = in_levels(2, bits)
        feedback = zero_feedback(numel, ranks)
        mean = average_(torch.randn(numel), feedback, ranks)
        found[bits] = (ranks.traffic.total_bytes, dict(ranks.traffic.node_bytes), mean.norm().item())
    copied = copy.deepcopy(ranks)
    average_(torch.randn(numel), feedback, copied)
    found["copy"] = (copied.traffic.total_bytes, copied.traffic.node_bytes["all_to_all"])
    found["original"] = (ranks.traffic.total_bytes, ranks.traffic.node_bytes["all_to_all"])
    return found


@pytest.mark.invariant(33)
def test_bytes_between_and_inside_the_nodes() -> None:
    numel = 40_000
    message = numel / 8 + 4 * numel / BLOCK
    ranks = run_ranks(4, bytes_of_two_levels, numel)
    for first in (0, 2):
        for bits in (32, 16):
            between = sum(ranks[rank][bits][0] for rank in (first, first + 1))
            assert between == pytest.approx(2 * (2 - 1) / 2 * message, rel=0.03)  # of a node: 2 (M-1)/M messages
            inside = [ranks[rank][bits][1] for rank in (first, first + 1)]
            assert sum(row["all_to_all"] for row in inside) == pytest.approx(numel * bits / 8, rel=0.01)
            assert sum(row["all_gather"] for row in inside) == pytest.approx(message, rel=0.03)
    for rank in ranks:
        assert rank["copy"] == tuple(2 * count for count in rank["original"])
        assert rank[16][2] == pytest.approx(rank[32][2], rel=0.1)


# -- the choice -------------------------------------------------------------------------------------------------------


def choose(rank: int, hosts: str, local: dict[int, int], given: dict[str, Any]) -> tuple[int, list[str]]:
    """The ranks per node that an optimizer finds, and the warnings."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    topology.logger.addHandler(handler)
    original = topology.gethostname
    topology.gethostname = lambda: hosts[rank]  # one machine stands for several
    try:
        if rank in local:
            os.environ["LOCAL_WORLD_SIZE"] = str(local[rank])
        optimizer = OnebitAdam([nn.Parameter(torch.zeros(64))], **given)
    finally:
        topology.gethostname = original
        topology.logger.removeHandler(handler)
    return optimizer.communicator.topology.node_size, lines


def choose_all(rank: int, world_size: int, rows: list[tuple[str, dict[int, int], dict[str, Any]]]) -> list[Any]:
    results = []
    for row in rows:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        results.append(choose(rank, *row))
    return results


def test_auto_follows_the_launcher_and_warns_once_of_unequal_nodes() -> None:
    two, all_four = {rank: 2 for rank in range(4)}, {rank: 4 for rank in range(4)}
    rows: list[tuple[tuple[str, dict[int, int], dict[str, Any]], int, str]] = [
        (("aabb", two, {"topology": "flat"}), 1, ""),
        (("aabb", {}, {}), 1, ""),  # nobody says how many ranks a node has
        (("aabb", {}, {"topology": "two-level"}), 2, ""),
        (("aaaa", all_four, {}), 1, ""),
        (("abcd", {rank: 1 for rank in range(4)}, {}), 1, ""),
        (("aaab", {0: 3, 1: 3, 2: 3, 3: 1}, {}), 1, "[3, 1]"),
        (("aaaa", two, {}), 1, "the launcher says [2]"),
        (("aaaa", two, {"node_size": 2}), 2, ""),
        (("aaaa", two, {"node_size": 1}), 1, ""),
        (("aabb", two, {"scale_block": None}), 1, "scale_block"),
    ]
    for rank, results in enumerate(run_ranks(4, choose_all, [row for row, _, _ in rows])):
        for (size, lines), (row, expected, warning) in zip(results, rows, strict=True):
            assert size == expected, row
            assert len(lines) == (bool(warning) and rank == 0) and all(warning in line for line in lines), (row, lines)


def measured(rank: int, world_size: int, slow: str) -> list[tuple[int, list[str]]]:
    """What "auto" chooses twice, on links that a wait makes slow: inside the nodes, or between them."""
    kind, ranks = ("all_reduce", 2) if slow == "inside" else ("all_to_all", 4)
    original = getattr(TorchCommunicator, kind)

    def waits(self: TorchCommunicator, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2 if self.world_size == ranks else 0.0)
        return original(self, *args, **kwargs)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCommunicator, kind, waits)
        topology.logger.setLevel(logging.INFO)
        try:
            for _ in range(2):
                size, lines = choose(rank, "aabb", {r: 2 for r in range(4)}, {})
                found.append((size, lines))
        finally:
            topology.logger.setLevel(logging.NOTSET)
    return found


@pytest.mark.parametrize(("slow", "size", "said"), [("inside", 1, "(flat)"), ("between", 2, "(hierarchical)")])
def test_auto_measures_once_whether_the_links_inside_the_nodes_are_the_slow_ones(
    slow: str, size: int, said: str
) -> None:
    for rank, (first, second) in enumerate(run_ranks(4, measured, slow)):
        assert first[0] == second[0] == size and second[1] == []
        assert len(first[1]) == (rank == 0) and all(said in line and " ms flat" in line for line in first[1])


def refused(rank: int, world_size: int, given: list[dict[str, Any]]) -> None:
    optimizer = OnebitAdam([nn.Parameter(torch.zeros(64))], **given[rank % len(given)])
    average_gradients(optimizer)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([{"node_size": 3}], ["node_size", "divide", "4", "got 3", "[1, 2, 4]"]),
        ([{"topology": "two-level"}], ["at least two nodes", "1 host(s)", "node_size"]),
        ([{"node_size": 2, "scale_block": None}], ["scale_block", "None", "topology='flat'"]),
        ([{"node_size": 2}, {"node_size": 4}], ["ranks [1, 3] differ", "node_size"]),
        ([{"node_size": 2}, {"node_size": 2, "node_bits": 16}], ["ranks [1, 3] differ", "16"]),
        ([{"node_size": 2}, {"topology": "flat"}], ["ranks [1, 3] differ"]),
    ],
)
def test_what_cannot_be_is_an_error_on_all_ranks(given: list[dict[str, Any]], words: list[str]) -> None:
    errors = run_ranks_expecting_error(4, refused, given, timeout=30)
    for error in errors.values():
        assert error.startswith("ValueError") and all(word in error for word in words), error


def in_a_process_group(rank: int, world_size: int) -> tuple[int, list[float]]:
    """The first four of the ranks have an optimizer, two of them per node; the others have nothing to do with it."""
    four = dist.new_group([0, 1, 2, 3])
    if rank > 3:
        return 0, []
    p = nn.Parameter(torch.zeros(100))
    state = GradientCompression([p], process_group=four, node_size=2)
    p.grad = torch.full((100,), float(rank))
    state.average_gradients()
    return state.communicator.topology.nodes, p.grad.tolist()


def test_a_process_group_has_levels_of_its_own() -> None:
    *inside, outside = run_ranks(5, in_a_process_group)
    assert outside == (0, []) and inside == [inside[0]] * 4
    assert inside[0] == (2, pytest.approx([1.5] * 100, rel=0.01))


def make_and_drop(rank: int, world_size: int) -> None:
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


def test_dropped_optimizers_leave_no_groups_behind() -> None:
    run_ranks(4, make_and_drop)


# -- errors on the way ------------------------------------------------------------------------------------------------


def dies(rank: int, world_size: int, folder: str) -> None:
    ranks = with_topology(TorchCommunicator(), TopologyOptions(node_size=2))
    feedback = zero_feedback(1000, ranks)
    average_(torch.ones(1000), feedback, ranks)
    if rank == 3:  # inside the node all is done, and its peer waits for it
        ranks.levels.peers.all_to_all = lambda *args, **splits: os._exit(7)  # type: ignore[union-attr]
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
