"""The choice of a topology, which all ranks make together, and the groups of ranks that two levels need."""

from __future__ import annotations

import logging
import os
from copy import copy
from socket import gethostname

from hf_compressopt.collectives.communicator import Communicator, Levels
from hf_compressopt.collectives.topology import FLAT, TWO_LEVELS, Topology, TopologyOptions, node_size_of_hosts

logger = logging.getLogger(__name__)

#: Environment variables in which launchers tell the ranks of a node: torchrun and Accelerate, and Open MPI.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def with_topology(communicator: Communicator, wanted: TopologyOptions, scale_block: int | None = 0) -> Communicator:
    """Return the ranks in the topology that the user wants. All ranks call, unless the topology is flat.

    "auto" takes two levels if there are at least two nodes, all with the same number of ranks, at least two. It asks
    the launcher. Without a launcher, and on one node, the topology is flat, and this function sends nothing.

    Args:
        communicator: All ranks; if they have levels already, these stay.
        wanted: The options, alike on all ranks.
        scale_block: Elements per scale of the messages; None is one scale for all chunks.

    Raises:
        ValueError: If ``node_size`` does not divide the number of ranks, if the ranks have different options or nodes,
            or if two levels are wanted with messages or a transport that cannot have them.
    """
    told = _announced()
    if (
        communicator.levels is not None
        or communicator.world_size == 1
        or wanted.topology == FLAT
        or wanted.node_size == 1
    ):
        return communicator
    one_node = communicator.process_group is None and told == communicator.world_size
    if wanted.node_size is None and wanted.topology != TWO_LEVELS and (told is None or one_node):
        return communicator
    size = _agreed_size(communicator, wanted, told)
    if size == 1:
        return communicator
    refusal = _refusal(communicator, scale_block)
    if refusal and (wanted.node_size is not None or wanted.topology == TWO_LEVELS):
        raise ValueError(f"{refusal} Or give topology='flat'")
    if refusal:
        _warn(communicator, refusal)
        return communicator
    ranks, mine = range(communicator.world_size), Topology(communicator.world_size, communicator.rank, size)
    node = communicator.part([rank for rank in ranks if rank // size == mine.node])
    peers = communicator.part([rank for rank in ranks if rank % size == mine.place])
    node.traffic = communicator.traffic.inside_node()
    found = copy(communicator)
    found.levels = Levels(node, peers, wanted.node_dtype)
    return found


def _announced() -> int | None:
    """Return the ranks of this node as the launcher tells them, or None."""
    for name in _LOCAL_SIZES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return None


def _agreed_size(communicator: Communicator, wanted: TopologyOptions, told: int | None) -> int:
    """Return the ranks per node, alike on all ranks; 1 for the flat topology."""
    ranks = communicator.reached()
    ranks.require_equal("topology, node_size or node_bits", [wanted.topology, wanted.node_size, wanted.node_bits])
    if wanted.node_size is not None:
        return wanted.checked_size(communicator.world_size)
    hosts, announced = zip(*ranks.all_gather_object([gethostname(), told]), strict=True)
    size, reason = node_size_of_hosts(hosts, announced if communicator.process_group is None else ())
    if wanted.topology == TWO_LEVELS and size == 1:
        raise ValueError(
            "topology='hierarchical' needs at least two nodes, all with the same number of ranks, at least two: "
            f"{reason or f'the ranks are on {len(set(hosts))} host(s)'}. Give node_size, or topology='auto'"
        )
    if reason:
        _warn(communicator, f"{reason}. Give node_size if the nodes are alike")
    return size


def _refusal(communicator: Communicator, scale_block: int | None) -> str:
    """Return the reason why two levels are not possible; "" if they are."""
    if scale_block is None:
        return "two levels need a scale_block, got None (one scale for the chunks of all ranks): give scale_block=4096."
    if type(communicator).part is Communicator.part:
        return f"two levels need a communicator with part(), which {type(communicator).__name__} does not have."
    return ""


def _warn(communicator: Communicator, reason: str) -> None:
    if communicator.rank == 0:
        logger.warning("the exchange is flat: %s", reason)
