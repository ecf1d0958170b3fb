"""The topology of the compressed exchange: flat, or hierarchical on nodes of several ranks each."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from socket import gethostname
from typing import Any

import torch

from hf_compressopt.collectives.chunks import Topology
from hf_compressopt.collectives.communicator import Communicator, Levels

logger = logging.getLogger(__name__)

AUTO, FLAT, TWO_LEVELS = TOPOLOGIES = ("auto", "flat", "hierarchical")
_ALSO = "two-level"  # another spelling of the last one
_NODE_DTYPES = {32: torch.float32, 16: torch.bfloat16}
#: Environment variables in which launchers tell the ranks of a node: torchrun and Accelerate, and Open MPI.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class TopologyOptions:
    """The topology that the user wants."""

    topology: str = AUTO  # or "flat", or "hierarchical", for which "two-level" is another spelling
    node_size: int | None = None  # ranks per node; None takes them from the launcher and the host names
    node_bits: int = 32  # bits per element inside a node; 16 is bfloat16

    def __post_init__(self) -> None:
        if self.topology == _ALSO:
            object.__setattr__(self, "topology", TWO_LEVELS)
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"topology must be one of {list(TOPOLOGIES)}, got {self.topology!r}")
        if isinstance(self.node_bits, bool) or self.node_bits not in _NODE_DTYPES:
            raise ValueError(f"node_bits must be 32 or 16, got {self.node_bits!r}")
        if self.node_size is None:
            return
        if isinstance(self.node_size, bool) or not isinstance(self.node_size, int):
            raise TypeError(f"node_size must be an int >= 1, or None, got {self.node_size!r}")
        if self.node_size < 1:
            raise ValueError(f"node_size must be >= 1, got {self.node_size}")
        if self.topology == FLAT and self.node_size > 1:
            raise ValueError(
                f"node_size={self.node_size} belongs to the hierarchical topology, and topology is 'flat': give "
                "topology='hierarchical', or leave node_size out"
            )


def node_size_of_hosts(hosts: Sequence[str], announced: Sequence[Any]) -> tuple[int, str]:
    """Return the ranks per node that all ranks can be divided by, and if there are none, the reason."""
    runs = [len(list(run)) for _, run in groupby(hosts)]
    told = sorted({count for count in announced if count is not None})
    if told == [1]:  # one rank on each node, or a launcher that does not count, such as Accelerate's debug_launcher
        return 1, ""
    agrees = told in ([], [runs[0]])
    if agrees and (len(runs) == 1 or set(runs) == {1}):
        return 1, ""
    if len(set(hosts)) != len(runs):
        return 1, "the ranks of a host do not follow one another"
    if len(set(runs)) > 1:
        return 1, f"the nodes have different numbers of ranks, {runs}"
    if not agrees:
        return 1, f"the host names say that a node has {runs[0]} ranks, the launcher says {told}"
    return runs[0], ""


def with_topology(communicator: Communicator, wanted: TopologyOptions, scale_block: int | None = 0) -> Communicator:
    """Return the ranks in the topology that the user wants. All ranks call, unless the topology is flat.

    "auto" is hierarchical if the launcher tells of at least two nodes, all with the same number of ranks, at least two.
    Without a launcher, and on one node, it is flat. Nothing is measured, so that a command has the same bits every day.
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
    if scale_block is None:
        refusal = "a hierarchical topology needs a scale_block, not None (one scale for all ranks): give 4096"
        if wanted.node_size is not None or wanted.topology == TWO_LEVELS:
            raise ValueError(f"{refusal}, or topology='flat'")
        _warn(communicator, refusal)
        return communicator
    ranks, mine = range(communicator.world_size), Topology(communicator.world_size, communicator.rank, size)
    node = communicator.part([rank for rank in ranks if rank // size == mine.node])
    peers = communicator.part([rank for rank in ranks if rank % size == mine.place])
    return communicator.on_nodes(Levels(node, peers, _NODE_DTYPES[wanted.node_bits]))


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
    if (size := wanted.node_size) is not None:
        if (count := communicator.world_size) % size:
            legal = [each for each in range(1, count + 1) if count % each == 0]
            raise ValueError(
                f"node_size must divide the number of ranks, {count}, got {size}: give one of {legal}, or "
                "topology='flat'"
            )
        return size
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


def _warn(communicator: Communicator, reason: str) -> None:
    if communicator.rank == 0:
        logger.warning("the exchange is flat: %s", reason)
