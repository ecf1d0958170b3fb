"""Reduce-scatter and all-gather by the topology: flat, or in two levels with the bytes of a ring on a node's link.

A buffer has one part for each rank. Flat, every rank sends every other one its part. In two levels, with M nodes of g
ranks, the ranks of a node first sum what they have for the ranks at each place, and the peers then sum those of their
node; parts come back in the opposite order. So a part crosses the link of a node M - 1 times, not g (M - 1) times.

Sums are in float32, or float64, in an order that depends on the topology alone: inside the node by place, then by node.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator, Handle
from hf_compressopt.collectives.sums import sum_of_rows


class TwoCalls(Handle):
    """Two collectives, the second of which sends what the first brings."""

    def __init__(self, first: Handle, start: Callable[[], Handle]) -> None:
        """Take the first, which has started, and what starts the second."""
        self._first: Handle | None = first
        self._start, self._second = start, first

    def advance(self) -> None:
        """See the base class."""
        if self._first is not None:
            self._first.wait()
            self._first, self._second = None, self._start()

    def wait(self) -> None:
        """See the base class."""
        self.advance()
        self._second.wait()


def reduce_scatter(buffer: Tensor, communicator: Communicator) -> tuple[Handle, Callable[[], Tensor]]:
    """Start summing every rank's part over the ranks. All ranks call.

    In two levels the sums of a node are sent in the buffer's dtype too.

    Args:
        buffer: [world_size * n], the parts in rank order; it must not change before the handle was waited for.
        communicator: The ranks, at least two.

    Returns:
        The handle, and a function that returns the sum [n], float32 or float64, after the handle was waited for.
    """
    levels, topology = communicator.levels, communicator.topology
    if levels is None:
        handle, received = _exchange(buffer, communicator)
        return handle, lambda _keep=buffer: sum_of_rows(received.view(communicator.world_size, -1).unbind())
    dtype, nodes, peers = buffer.dtype, topology.nodes, levels.peers
    handle, sums_of_node = sum_in_node(buffer, levels.node, nodes)
    if nodes == 1:
        return handle, sums_of_node
    between: list[Tensor] = []

    def start() -> Handle:
        sums = sums_of_node().to(dtype)
        second, received = _exchange(sums, peers)
        between.extend((received, sums))
        return second

    calls = TwoCalls(handle, start)
    return calls, lambda: sum_of_rows(between[0].view(nodes, -1).unbind())


def sum_in_node(
    buffer: Tensor, node: Communicator, nodes: int, factor: float = 1.0
) -> tuple[Handle, Callable[[], Tensor]]:
    """Start summing over the ranks of a node: each gets the sums for the ranks at its place, on all nodes.

    Args:
        buffer: As of :func:`reduce_scatter`; it may change at once.
        node: The ranks of this node.
        nodes: Number of nodes.
        factor: Of the sums.

    Returns:
        The handle; and a function that returns the sums [nodes * n], by node, float32 or float64, once, after the
        handle was waited for.
    """
    by_place = buffer.view(nodes, node.world_size, -1).transpose(0, 1)  # by place, then by node

    def write(values: Tensor) -> None:
        values.view(by_place.shape).copy_(by_place)

    sizes = [buffer.numel() // node.world_size] * node.world_size
    return node.sum_parts(sizes, write, buffer, factor)


def all_gather(gathered: Tensor, part: Tensor, communicator: Communicator) -> Handle:
    """Start giving all ranks everybody's part. All ranks call.

    Args:
        gathered: [world_size * n], in which part k is that of the rank whose ``topology.chunk_of`` is k: rank order if
            the topology is flat, else by place and then by node.
        part: [n], this rank's; it may be its place in ``gathered``.
        communicator: The ranks.
    """
    levels, topology = communicator.levels, communicator.topology
    if levels is None or topology.nodes == 1:
        return (communicator if levels is None else levels.node).all_gather(gathered, part)
    count = topology.nodes * part.numel()
    shard = gathered[topology.place * count :][:count]
    first = levels.peers.all_gather(shard, part)
    return TwoCalls(first, lambda: levels.node.all_gather(gathered, shard))


def in_rank_order(gathered: Tensor, communicator: Communicator) -> Tensor:
    """Return what :func:`all_gather` has gathered, [world_size * n], in rank order."""
    topology = communicator.topology
    if topology.node_size == 1:
        return gathered
    return gathered.view(topology.node_size, topology.nodes, -1).transpose(0, 1).reshape(-1)


def _exchange(parts: Tensor, communicator: Communicator) -> tuple[Handle, Tensor]:
    received = torch.empty_like(parts)
    splits = [parts.numel() // communicator.world_size] * communicator.world_size
    return communicator.all_to_all(received, parts, output_splits=splits, input_splits=splits), received
