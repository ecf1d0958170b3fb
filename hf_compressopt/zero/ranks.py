"""The ranks among which a ZeroOptimizer partitions: all of them, or those of a param group's own process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.collectives.topology import TopologyOptions, with_topology
from hf_compressopt.collectives.torch_dist import TorchCommunicator, make_communicator


class Ranks:
    """The communicators of one ZeroOptimizer.

    Attributes:
        everyone: The communicator of all ranks.
        model_parallel: The communicator of the ranks that share one copy of the model, or None.
    """

    def __init__(
        self,
        transport: str | Communicator | None,
        process_group: dist.ProcessGroup | None,
        model_parallel_group: dist.ProcessGroup | None,
        device: torch.device,
        traffic: Traffic,
        topology: TopologyOptions,
    ) -> None:
        """Make the communicators of all ranks and of the model-parallel group.

        Args:
            transport: As ``communicator`` of ZeroOptimizer.
            process_group: All ranks; None is the default group.
            model_parallel_group: The ranks that share one copy of the model, or None.
            device: Device of the parameters.
            traffic: Counters of the optimizer.
            topology: The topology of all ranks; the groups of param groups are flat.

        Raises:
            ValueError: If the group does not have the transport, or not the topology.
            RuntimeError: If a launcher announces several ranks but torch.distributed is not initialized.
        """
        self._traffic = traffic
        self._by_group: dict[int, tuple[Any, Communicator]] = {}  # by id; the group itself keeps the id its own
        flat = make_communicator(transport, process_group, device=device, traffic=traffic)
        self.everyone = with_topology(flat, topology)
        self.model_parallel: Communicator | None = None
        if model_parallel_group is not None:
            self.model_parallel = self._communicator(model_parallel_group)

    def of(self, process_group: dist.ProcessGroup | None) -> Communicator:
        """Return the communicator of a param group's ``process_group``; None means all ranks."""
        if process_group is None:
            return self.everyone
        if id(process_group) not in self._by_group:
            self._by_group[id(process_group)] = (process_group, self._communicator(process_group))
        return self._by_group[id(process_group)][1]

    def each(self) -> list[Communicator]:
        """List the communicator of all ranks, then those of param groups."""
        return [self.everyone, *(communicator for _, communicator in self._by_group.values())]

    def _communicator(self, process_group: dist.ProcessGroup) -> Communicator:
        return TorchCommunicator(process_group, device=self.everyone.device, traffic=self._traffic)
