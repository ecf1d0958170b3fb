"""M nodes of g ranks in one process: the exchange in two levels, in the place of the flat one of the simulations.

Every rank of a node stands for its whole node: its worker error is the node's, so that the simulations of the
optimizers need no change. Server errors are in the order of the chunks.
"""

from functools import partial
from typing import Any

import numpy as np

from tests.oracles import simulation, simulation_integers, simulation_low_bits
from tests.oracles.simulation import Array, chunk_bounds


class IntegersInTwoLevels(simulation_integers.Simulation):
    """The errors of M nodes, alike on the ranks of a node, which average in float32 first."""

    def __init__(self, *args: Any, node_size: int) -> None:
        super().__init__(*args)
        self.node_size = node_size

    def senders(self, grads: np.ndarray) -> list[tuple[slice, np.ndarray]]:
        nodes = [slice(first, first + self.node_size) for first in range(0, self.world_size, self.node_size)]
        return [
            (ranks, simulation_integers.in_order(grads[ranks]) * np.float32(1.0 / self.node_size)) for ranks in nodes
        ]


def exchange_in_two_levels(monkeypatch: Any, node_size: int) -> None:
    """Have all simulations exchange in two levels."""
    two_levels = partial(simulation.simulate_compressed_all_reduce, node_size=node_size)
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
