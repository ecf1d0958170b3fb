"""The errors of gradients that are compressed between FSDP2's replicas, as a checkpoint sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.checkpoint.checkpointable import LoadPlan
from hf_compressopt.checkpoint.compression_state import compression_header
from hf_compressopt.checkpoint.header import Header
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.errors import GroupErrors
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.format.index import NODE_SIZE, TensorEntry
from hf_compressopt.format.record import StateTensor, TensorKey
from hf_compressopt.fsdp.compression import FSDPCompression, UnitErrors
from hf_compressopt.optim.options import check_names

_NAME = "FSDPCompression"


class FSDPState:
    """The state of an FSDPCompression: for each parameter the worker error of each replica, and the servers' errors.

    They are float32 values in the order of the parameter's elements, so that any mesh can load them.

    Attributes:
        communicator: All ranks.
    """

    communicator: Communicator

    def __init__(self, compression: FSDPCompression) -> None:
        """Wrap the errors.

        Raises:
            ValueError: If the mesh has not all ranks in their order.
        """
        self._compression = compression
        self._replicas, self._replica = compression.communicator.world_size, compression.communicator.rank
        self._shards, self._shard = compression.replica.world_size, compression.replica.rank
        units = [errors.unit for errors in compression.units]
        found = {name: param for unit in units for name, param in zip(unit.names, unit.params, strict=True)}
        self._params = {name: found[name] for name in sorted(found)}  # in one order, whatever the units are
        self.communicator = TorchCommunicator(device=compression.communicator.device)
        place = self._replica * self._shards + self._shard
        if (dist.get_world_size(), dist.get_rank()) != (self._replicas * self._shards, place):
            raise ValueError(
                "a checkpoint of compress_fsdp needs a mesh of all ranks in their order, as init_device_mesh makes it "
                "of 2 dimensions: save its state_dict() on each rank instead"
            )

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """See the protocol."""
        found = list(self._params if names is None else names)
        check_names(found, len(self._params))
        return [found]

    def shared_parameters(self) -> list[list[Tensor]]:
        """See the protocol."""
        return [list(self._params.values())]

    def header(self) -> dict[str, Any]:
        """See the protocol."""
        node_size = self._shards if self._shards > 1 else None
        return compression_header(_NAME, self._compression, self.communicator, node_size)

    def tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """See the protocol. A single replica has no errors."""
        return self._tensors(names, [errors.kept for errors in self._compression.units])

    def _tensors(self, names: Sequence[Sequence[str]], found: Sequence[GroupErrors]) -> list[StateTensor]:
        if self._replicas == 1:
            return []
        called = dict(zip(self._params, chain.from_iterable(names), strict=True))
        rows = zip(self._compression.units, found, strict=True)
        every = (tensor for errors, group in rows for tensor in self._of_unit(errors, group, called))
        return [tensor for tensor in every if tensor.local.numel()]

    def _of_unit(self, errors: UnitErrors, group: GroupErrors, called: Mapping[str, str]) -> list[StateTensor]:
        worker, server = (group.values()) if group.compact else (group.worker, group.server)
        owned = [group.own_range(bucket) for bucket in errors.layout.buckets]
        parts = list(zip(owned, torch.split(server, [stop - start for start, stop in owned]), strict=True))
        found = []
        for own_name, offset, numel, first in errors.unit.places(self._shard):
            name, whole = called[own_name], tuple(self._params[own_name].shape)
            key = TensorKey("worker_error", name, rank=self._replica)
            own = worker[offset : offset + numel]
            found.append(
                StateTensor.of(key, own, whole, first, of_each_rank=True, is_error=True, node_size=self._shards)
            )
            for (start, stop), values in parts:
                low, high = max(start, offset), min(stop, offset + numel)
                if low < high:
                    part, at = values[low - start : high - start], first + low - offset
                    found.append(StateTensor.of(TensorKey("server_error", name), part, whole, at, is_error=True))
        return found

    def plan_load(self, names: Sequence[Sequence[str]], header: Header, entries: Mapping[str, TensorEntry]) -> LoadPlan:
        """See the protocol. The errors of a run of one replica, which has none, become zero."""
        compression, values = self._compression, header.values
        if header.title != _NAME:
            raise ValueError(f"it is of {header.title}, not of {_NAME}")
        known = values["world_size"] > values.get(NODE_SIZE, 1)
        rooms = [errors.kept.room(compact=False) for errors in compression.units]
        tensors = self._tensors(names, rooms) if known else []

        def commit() -> None:
            for errors, room in zip(compression.units, rooms, strict=True):
                if not known:
                    errors.kept.zero_()
                elif room is not errors.kept:
                    errors.kept.copy_(room.worker, room.server)
            compression.set_counters(values["step"], values["skipped_steps"])
            compression.traffic.restore(values["bytes_sent"])

        return LoadPlan(tensors, commit)
