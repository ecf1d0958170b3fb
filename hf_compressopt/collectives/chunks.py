"""Chunks of a bucket: which of them a rank sends, and which one it serves.

A bucket has as many chunks as there are ranks. In the flat topology every rank sends all of them, and rank k serves
chunk k. In the hierarchical topology the ranks lie on nodes of ``node_size`` consecutive ranks. Each sends a shard,
consecutive chunks, to its peers, the ranks of the same place on the other nodes, which serve them. With one rank per
node both topologies are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from hf_compressopt.flat import chunk_range


@dataclass(frozen=True, eq=False)
class Topology:
    """The place of a rank; with a ``node_size`` of 1 the topology is flat."""

    world_size: int
    rank: int
    node_size: int = 1

    @property
    def nodes(self) -> int:
        """Nodes, and so the ranks that exchange a shard."""
        return self.world_size // self.node_size

    @property
    def node(self) -> int:
        return self.rank // self.node_size

    @property
    def place(self) -> int:
        return self.rank % self.node_size

    @property
    def own_chunk(self) -> int:
        return self.chunks[self.rank]

    @cached_property
    def chunks(self) -> list[int]:
        """The chunk that each rank serves."""
        return [rank % self.node_size * self.nodes + rank // self.node_size for rank in range(self.world_size)]

    @property
    def sent_chunks(self) -> range:
        """The chunks that this rank sends, in the order of their servers: all of them if the topology is flat."""
        return range(self.place * self.nodes, (self.place + 1) * self.nodes)

    def own_range(self, numel: int) -> tuple[int, int]:
        """Return the elements [start, stop) of a bucket that this rank serves."""
        return chunk_range(numel, self.world_size, self.own_chunk)

    def sent_range(self, numel: int) -> tuple[int, int]:
        return self.shard_range(numel, self.place)

    def shard_range(self, numel: int, place: int) -> tuple[int, int]:
        """Return the elements [start, stop) of a bucket that the rank at a place of the node sends."""
        first, last = place * self.nodes, (place + 1) * self.nodes - 1
        return chunk_range(numel, self.world_size, first)[0], chunk_range(numel, self.world_size, last)[1]

    def sent_numels(self, numel: int) -> list[int]:
        """Return the elements of each chunk of a bucket that this rank sends."""
        ranges = (chunk_range(numel, self.world_size, chunk) for chunk in self.sent_chunks)
        return [stop - start for start, stop in ranges]


#: The place of a rank, always the same object, which is found again by its identity.
topology_of = lru_cache(maxsize=None)(Topology)
