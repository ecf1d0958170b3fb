"""M nodes of g ranks in one process: the exchange in two levels, in the place of the flat one of the simulations.

Every rank of a node stands for its whole node: its worker error is the node's, so that the simulations of the
optimizers need no change. Server errors are in the order of the chunks.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.oracles import simulation, simulation_integers, simulation_low_bits
from tests.oracles.simulation import Array, Compressed, blocks_of, chunk_bounds, distance_to_zero, quantize


def simulate_two_levels(
    xs: Sequence[Array],
    worker_errors: Sequence[Array],
    server_errors: Sequence[Array],
    scale_block: int,
    *,
    node_size: int,
) -> Compressed:
    world_size, numel = len(xs), xs[0].size
    nodes = range(0, world_size, node_size)  # their first ranks
    chunks = chunk_bounds(numel, world_size)
    blocks = [block for begin, end in chunks for block in blocks_of(begin, end, scale_block)]
    total, mean, distance = np.zeros(numel), np.zeros(numel), np.inf
    workers: list[Array] = []
    servers: list[Array] = []
    for first in nodes:
        u = np.mean(xs[first : first + node_size], axis=0) + worker_errors[first]
        q = quantize(u, blocks)
        workers += [u - q] * node_size
        total += q
        distance = min(distance, distance_to_zero(u))
    for (begin, end), error in zip(chunks, server_errors, strict=True):
        a = total[begin:end] / len(nodes) + error
        y = quantize(a, blocks_of(0, end - begin, scale_block))
        servers.append(a - y)
        mean[begin:end] = y
        distance = min(distance, distance_to_zero(a))
    return Compressed(mean, workers, servers, distance)


class IntegersInTwoLevels(simulation_integers.Simulation):
    """The errors of M nodes, alike on the ranks of a node, which average in float32 first."""

    def __init__(self, *args: Any, node_size: int) -> None:
        super().__init__(*args)
        self.node_size = node_size

    def senders(self, grads: np.ndarray) -> list[tuple[slice, np.ndarray]]:
        found = []
        for first in range(0, self.world_size, self.node_size):
            total = grads[first].copy()
            for row in grads[first + 1 : first + self.node_size]:
                total += row
            found.append((slice(first, first + self.node_size), total * np.float32(1.0 / self.node_size)))
        return found


def exchange_in_two_levels(monkeypatch: Any, node_size: int) -> None:
    """Have all simulations exchange in two levels."""
    two_levels = partial(simulate_two_levels, node_size=node_size)
    monkeypatch.setattr(simulation, "simulate_compressed_all_reduce", two_levels)
    monkeypatch.setattr(simulation_low_bits, "Simulation", partial(IntegersInTwoLevels, node_size=node_size))


def own_errors(group: Any, world_size: int, node_size: int, rank: int) -> tuple[Array, Array]:
    """The worker errors of a rank's shards, and the server errors of its chunks, bucket by bucket."""
    nodes, place, node = world_size // node_size, rank % node_size, rank // node_size
    worker, server = [np.zeros(0)], [np.zeros(0)]
    for workers, servers in zip(group.worker_errors, group.server_errors, strict=True):
        shard = chunk_bounds(workers[0].size, world_size)[place * nodes : (place + 1) * nodes]
        worker.append(workers[rank][shard[0][0] : shard[-1][1]])
        server.append(servers[place * nodes + node])
    return np.concatenate(worker), np.concatenate(server)
