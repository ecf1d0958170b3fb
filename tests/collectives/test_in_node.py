"""Shared memory between the ranks of a node: the bits of gloo, memory that is used again, and the ways without it."""

import copy
import gc
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_compressopt.collectives import in_node, scattering
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import compressed_all_reduce_
from hf_compressopt.collectives.in_node import NodeCommunicator, in_shared_memory
from hf_compressopt.collectives.topology import Topology, TopologyOptions
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.collectives.two_levels import with_topology
from tests.collectives.test_two_levels import feedback_of, in_levels
from tests.support.harness import _pool, run_ranks, run_ranks_of_which_one_dies

MIB = 1 << 20


def node_of(ranks: TorchCommunicator, size: int) -> TorchCommunicator:
    mine = Topology(ranks.world_size, ranks.rank, size).node
    node = ranks.part([rank for rank in range(ranks.world_size) if rank // size == mine])
    node.traffic = ranks.traffic.inside_node()
    return node


def bits(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def values_of(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What the rank at a place of the node sends: every rank can make it."""
    return (
        torch.arange(numel).add_(7 * salt).mul_(rank + 3).remainder_(1009).to(torch.float64).div_(37 + rank).to(dtype)
    )


def expected_sum(sizes: list[int], place: int, dtype: torch.dtype, factor: float, salt: int = 0) -> torch.Tensor:
    """One addition after another, in the order of places."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = [values_of(rank, sum(sizes), dtype, salt).split(sizes)[place].to(wide) for rank in range(len(sizes))]
    total = rows[0].clone()
    for row in rows[1:]:
        total = total + row
    return total * factor


def sum_on(node: Communicator, sizes: list[int], dtype: torch.dtype, factor: float = 1.0, salt: int = 0) -> Any:
    mine = values_of(node.rank, sum(sizes), dtype, salt)
    return node.sum_parts(sizes, lambda out: out.copy_(mine), mine, factor)


def gather_on(node: Communicator, numel: int, dtype: torch.dtype, salt: int = 0) -> Any:
    part = values_of(node.rank, numel, dtype, salt)
    output = part.new_empty(numel * node.world_size)
    return node.all_gather(output, part), output


def trade_on(node: NodeCommunicator, sizes: list[int], salt: int = 0) -> torch.Tensor:
    mine = values_of(node.rank, sum(sizes), torch.float32, salt).split(sizes)
    with node.traded(sizes, lambda out: out.copy_(mine[1 - node.rank])) as theirs:
        return theirs.clone()


def expected_trade(sizes: list[int], place: int, salt: int = 0) -> torch.Tensor:
    return values_of(1 - place, sum(sizes), torch.float32, salt).split(sizes)[place]


def expected_gather(size: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    return torch.cat([values_of(rank, numel, dtype, salt) for rank in range(size)])


# -- bits -------------------------------------------------------------------------------------------------------------


def both_ways(rank: int, world_size: int, size: int) -> list[str]:
    """Failures of what shared memory and gloo bring, against each other and against one addition after another."""
    plain, found = TorchCommunicator(), []
    gloo, shared = node_of(plain, size), in_shared_memory(node_of(plain, size), plain)
    assert isinstance(shared, NodeCommunicator)
    for numel in (0, 1, 5, 33, 1000, 70_001):
        sizes = [numel, *[numel // 2 + place for place in range(1, size)]] if numel else [0] * size
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for factor in (1.0, 1 / 3):
                sums = []
                for node in (gloo, shared):
                    handle, total = sum_on(node, sizes, dtype, factor)
                    handle.wait()
                    sums.append(total())
                wanted = expected_sum(sizes, gloo.rank, dtype, factor)
                if [bits(one) for one in sums] != [bits(wanted)] * 2:
                    found.append(f"sum of {sizes} {dtype} times {factor}")
            for node in (gloo, shared):
                handle, output = gather_on(node, numel, dtype)
                handle.wait()
                if bits(output) != bits(expected_gather(size, numel, dtype)):
                    found.append(f"gather of {numel} {dtype} by {type(node).__name__}")
        if size == 2:
            assert shared.trades
            if bits(trade_on(shared, sizes)) != bits(expected_trade(sizes, shared.rank)):
                found.append(f"trade of {sizes}")
        output = torch.zeros(size * numel)  # a part that lies in its place already
        part = output[gloo.rank * numel :][:numel].copy_(values_of(gloo.rank, numel, torch.float32))
        shared.all_gather(output, part).wait()
        if bits(output) != bits(expected_gather(size, numel, torch.float32)):
            found.append(f"gather of {numel} in place")
    return found


def exchanges(rank: int, world_size: int, size: int) -> list[bool]:
    """Whether whole exchanges have the same bits with shared memory and without."""
    same = []
    for node_bits in (32, 16):
        ways = [in_levels(size, node_bits)]
        ways.append(with_topology(TorchCommunicator(), TopologyOptions(node_size=size, node_bits=node_bits)))
        assert ways[0].levels is not None and ways[1].levels is not None
        assert [isinstance(way.levels.node, NodeCommunicator) for way in ways] == [False, True]
        for numel in (1, 33, 5000):
            results = []
            for way in ways:
                feedback = feedback_of(numel, way)
                means = [
                    compressed_all_reduce_(values_of(rank, numel, torch.float32, s), feedback, way) for s in (0, 1)
                ]
                results.append([bits(mean) for mean in (*means, *feedback.worker_error.chunks, feedback.server_error)])
            same.append(results[0] == results[1])
        for dtype in (torch.float32, torch.bfloat16):
            results = []
            for way in ways:
                buffer = values_of(rank, world_size * 301, dtype)
                handle, total = scattering.reduce_scatter(buffer, way)
                handle.wait()
                part = total().to(dtype)
                gathered = part.new_empty(world_size * 301)
                scattering.all_gather(gathered, part, way).wait()
                results.append(bits(scattering.in_rank_order(gathered, way)))
            same.append(results[0] == results[1])
        counted = [(dict(way.traffic.node_bytes), dict(way.traffic.bytes)) for way in ways]
        same.append(counted[0] == counted[1] and set(counted[0][0]) == {"all_to_all", "all_gather"})
    return same


@pytest.mark.parametrize(("world_size", "size"), [(2, 2), (4, 2), pytest.param(6, 3, marks=pytest.mark.full)])
def test_shared_memory_has_the_bits_of_gloo(world_size: int, size: int) -> None:
    assert run_ranks(world_size, both_ways, size) == [[]] * world_size
    if world_size > size:
        for same in run_ranks(world_size, exchanges, size):
            assert same == [True] * len(same)


# -- memory that is used again ----------------------------------------------------------------------------------------


def many_in_flight(rank: int, world_size: int) -> dict[str, Any]:
    """Rounds of operations that overlap, on a rank that reads late in every second one, and its blocks."""
    plain = TorchCommunicator()
    node = in_shared_memory(node_of(plain, world_size), plain)
    assert isinstance(node, NodeCommunicator)
    wrong, blocks = [], []
    rounds = [3000, 3000, 40_000, 100_000, *[3000, 100_000] * 3]  # the blocks have to grow
    for number, numel in enumerate(rounds):
        sizes = [numel + place for place in range(world_size)]
        salts = range(5 * number, 5 * number + 3)  # other values in every round
        flight = [(salt, *sum_on(node, sizes, torch.float32, salt=salt)) for salt in salts]
        gathers = [(salt, *gather_on(node, 77, torch.float32, salt)) for salt in salts[:2]]
        for salt, handle, total in reversed(flight) if number % 2 else flight:
            handle.wait()
            if rank == number % world_size:
                time.sleep(0.05)  # the others go on: a block that they wrote again now would be read
            if bits(total()) != bits(expected_sum(sizes, rank, torch.float32, 1.0, salt)):
                wrong.append(f"sum {salt} of round {number}")
        for salt, handle, output in gathers:
            handle.wait()
            if bits(output) != bits(expected_gather(world_size, 77, torch.float32, salt)):
                wrong.append(f"gather {salt} of round {number}")
        blocks.append(len(node._memory._blocks))
    copied = copy.deepcopy(node)  # it has the same blocks, and takes turns with the original
    for other in (copied, node, copied):
        handle, total = sum_on(other, [9] * world_size, torch.float32)
        handle.wait()
        wrong += [] if bits(total()) == bits(expected_sum([9] * world_size, rank, torch.float32, 1.0)) else ["copy"]

    def fails(out: torch.Tensor) -> None:
        raise ValueError("not these values")

    for _ in range(20):
        with pytest.raises(ValueError, match="not these values"):
            node.sum_parts([5] * world_size, fails, torch.empty(0))
    blocks.append(len(node._memory._blocks))
    mapped = Path("/proc/self/maps").read_text().count("memfd:hf_compressopt")
    del node, copied, other, handle, total, flight, gathers, output
    gc.collect()
    left = Path("/proc/self/maps").read_text().count("memfd:hf_compressopt")
    files = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return {"wrong": wrong, "blocks": blocks, "mapped": mapped, "left": (left, sum("hf_comp" in f for f in files))}


def test_blocks_grow_and_are_used_again_only_when_all_have_read_them() -> None:
    names = set(os.listdir("/dev/shm"))
    for found in run_ranks(3, many_in_flight):
        assert found["wrong"] == []
        # as many as are in flight, not as many as there were
        assert found["blocks"][-1] == found["blocks"][-4] <= 16, found["blocks"]
        assert found["mapped"] >= 3 * found["blocks"][0] and found["left"] == (0, 0)
    assert {name for name in set(os.listdir("/dev/shm")) - names if "compressopt" in name} == set()


def leaves_early(rank: int, world_size: int) -> list[bool]:
    """Whether a rank that is late reads what the others wrote, though these have let go of all their memory."""
    right = []
    for numel in (10, MIB):  # in the first block, and in a new one
        plain = TorchCommunicator()
        node = in_shared_memory(node_of(plain, world_size), plain)
        wanted = expected_sum([numel] * world_size, rank, torch.float32, 1.0)
        handle, total = sum_on(node, [numel] * world_size, torch.float32)
        if rank:
            time.sleep(0.5)
        handle.wait()
        if rank:
            time.sleep(0.2)
        found = total()
        del node, handle, total
        gc.collect()
        right.append(bits(found) == bits(wanted))
    return right


def test_a_rank_may_end_before_the_others_have_read() -> None:
    assert run_ranks(3, leaves_early) == [[True, True]] * 3


# -- without it -------------------------------------------------------------------------------------------------------


def trades_without(rank: int, world_size: int) -> list[tuple[bool, bool]]:
    """Trade as one of two ranks has little memory: whether the values are right, and whether they would trade again."""
    plain, found = TorchCommunicator(), []
    node = in_shared_memory(node_of(plain, 2), plain, 2 * MIB if rank == 1 else 1 << 30)
    assert isinstance(node, NodeCommunicator)
    for numel in (10, MIB):
        sizes = [numel, numel + 3]
        found.append((bits(trade_on(node, sizes)) == bits(expected_trade(sizes, node.rank)), node.trades))
    return found


def test_two_ranks_trade_by_gloo_when_one_has_no_more_memory() -> None:
    for rank, found in enumerate(run_ranks(4, trades_without)):
        assert found == [(True, True), (True, rank // 2 == 1)]


def without(rank: int, world_size: int) -> dict[str, Any]:
    """What each obstacle leads to, and what the log says."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    in_node.logger.addHandler(handler)
    in_node.logger.setLevel(logging.INFO)
    plain, found = TorchCommunicator(), {}

    def works(node: Communicator) -> list[bool]:
        right, size = [], node.world_size
        for numel in (10, MIB // 4, 20):
            flight = [sum_on(node, [numel] * size, torch.float32, salt=salt) for salt in range(2)]
            gathered = [gather_on(node, numel, torch.float32, salt) for salt in range(2)]
            for salt, (handle, total) in enumerate(flight):
                handle.wait()
                wanted = expected_sum([numel] * size, node.rank, torch.float32, 1.0, salt)
                right.append(bits(total()) == bits(wanted))
            for salt, (handle, output) in enumerate(gathered):
                handle.wait()
                right.append(bits(output) == bits(expected_gather(size, numel, torch.float32, salt)))
        return right

    def tried(limit: int) -> Any:
        lines.clear()
        node = node_of(plain, 2)
        memory = in_shared_memory(node, plain, limit)
        right = works(memory)
        sent = dict(plain.traffic.node_bytes)
        plain.traffic.node_bytes.clear()
        return memory is node, all(right), sent, list(lines)

    found["all"] = tried(1 << 30)
    found["none"] = tried(0)
    found["one rank has none"] = tried(0 if rank == 1 else 1 << 30)
    found["one rank has little"] = tried(2 * MIB if rank == 1 else 1 << 30)
    original, in_node.gethostname = in_node.gethostname, lambda: f"host{rank}"
    try:
        found["two hosts"] = tried(1 << 30)
    finally:
        in_node.gethostname = original
    make = os.memfd_create
    del os.memfd_create
    try:
        found["no memfd"] = tried(1 << 30)
    finally:
        os.memfd_create = make
    in_node.logger.removeHandler(handler)
    return found


def test_without_shared_memory_all_ranks_go_on_by_gloo() -> None:
    reasons = {  # the nodes without it, and what the log says
        "none": ([0, 1], "0 bytes together"),
        "one rank has none": ([0, 1], "rank 1: OSError: the blocks of a rank may have 0 bytes"),
        "one rank has little": ([], "go on without shared memory"),
        "two hosts": ([0, 1], "is on host1, this one on host0"),
        "no memfd": ([0, 1], "no memfd_create()"),
    }
    for rank, found in enumerate(run_ranks(4, without)):
        plain, right, sent, lines = found.pop("all")
        assert (plain, right, lines) == (False, True, [])
        for name, (nodes, reason) in reasons.items():
            plain, right, bytes_sent, lines = found[name]
            assert (plain, right, bytes_sent) == (rank // 2 in nodes, True, sent), name
            assert len(lines) == (rank == 0), (name, lines)
            assert all(line.startswith("INFO ") and reason in line for line in lines), (name, lines)


# -- a rank that dies -------------------------------------------------------------------------------------------------


def dies_inside(rank: int, world_size: int, folder: str) -> None:
    ranks = with_topology(TorchCommunicator(), TopologyOptions(node_size=2))
    assert ranks.levels is not None
    feedback = feedback_of(1000, ranks)
    compressed_all_reduce_(torch.ones(1000), feedback, ranks)
    if rank == 3:  # its neighbour waits for its ticket, and the others for their peers
        ranks.levels.node.traded = lambda *args: os._exit(7)  # type: ignore[method-assign]
    try:
        compressed_all_reduce_(torch.ones(1000), feedback, ranks)
    except RuntimeError as error:
        Path(folder, str(rank)).write_text(str(error))
        raise


def test_a_rank_that_dies_inside_the_node_ends_the_others(tmp_path: Path) -> None:
    run_ranks_of_which_one_dies(4, dies_inside, str(tmp_path))
    start = time.monotonic()
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() - start < 30:
        time.sleep(0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    _pool.kill()
