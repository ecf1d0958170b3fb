"""The errors of gradients that are compressed in DDP or between FSDP2's replicas, as a checkpoint sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.checkpoint.state import Header, LoadPlan
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.group_errors import GroupErrors
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.format.index import NODE_SIZE, TensorEntry
from hf_compressopt.format.plan import StateTensor, TensorKey
from hf_compressopt.fsdp.compression import FSDPCompression, UnitErrors
from hf_compressopt.grad_compression import GradientCompression
from hf_compressopt.optim.options import check_names

_DDP = "GradientCompression"


class CompressionState:
    """The state of a GradientCompression: one flat tensor for each rank's own errors, and one for the servers'.

    Attributes:
        communicator: All ranks.
    """

    communicator: Communicator

    def __init__(self, compression: GradientCompression) -> None:
        """Wrap the errors."""
        self._compression, self.communicator = compression, compression.communicator

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """See the protocol."""
        own = self._compression.names
        found = list(own if names is None else names)
        check_names(found, len(own))
        return [found]

    def shared_parameters(self) -> list[list[Tensor]]:
        """See the protocol."""
        return [self._compression.params]

    def header(self) -> dict[str, Any]:
        """See the protocol."""
        node_size = None if self.communicator.levels is None else self.communicator.topology.node_size
        return compression_header(_DDP, self._compression, self.communicator, node_size)

    def tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """See the protocol. A single rank has no errors. They are float32 values, so that any buckets can load them."""
        return self._tensors(self._compression.errors)

    def _tensors(self, errors: GroupErrors) -> list[StateTensor]:
        layout, place = self._compression.layout, self.communicator.topology
        if place.world_size == 1:
            return []
        worker, server, whole = errors.worker, errors.server, (layout.numel,)
        if errors.compact:
            worker, server = errors.values()
        own: dict[str, Any] = {"of_each_rank": True, "node_size": place.node_size}
        found = []
        for key, values, range_of, options in (
            (TensorKey("worker_error", group=0, rank=place.node), worker, errors.sent_range, own),
            (TensorKey("server_error", group=0), server, errors.own_range, {}),
        ):
            ranges = [range_of(bucket) for bucket in layout.buckets]
            for (start, _), part in zip(ranges, torch.split(values, [b - a for a, b in ranges]), strict=True):
                found.append(StateTensor.of(key, part, whole, start, is_error=True, **options))
        return [tensor for tensor in found if tensor.local.numel()]

    def plan_load(self, names: Sequence[Sequence[str]], header: Header, entries: Mapping[str, TensorEntry]) -> LoadPlan:
        """See the protocol. The errors of a run on one rank, which has none, become zero."""
        compression, values = self._compression, header.values
        if header.title != _DDP:
            raise ValueError(f"it is of {header.title}, not of {_DDP}")
        known = values["world_size"] > 1
        room = compression.errors.room(compact=False)
        tensors = self._tensors(room) if known else []

        def commit() -> None:
            if not known:
                compression.errors.zero_()
            elif room is not compression.errors:
                compression.errors.copy_(room.worker, room.server)
            compression.steps, compression.skipped_steps = values["step"], values["skipped_steps"]
            compression.traffic.restore(values["bytes_sent"])

        return LoadPlan(tensors, commit)


def compression_header(
    name: str, compression: GradientCompression | FSDPCompression, communicator: Communicator, node_size: int | None
) -> dict[str, Any]:
    """Return the header of a checkpoint of compressed gradients; ``node_size`` is None if each rank has its errors."""
    return {
        **({} if node_size is None else {NODE_SIZE: node_size}),
        "optimizer": name,
        "step": compression.steps,
        "skipped_steps": compression.skipped_steps,
        "world_size": communicator.world_size,
        "bits": compression.bits,
        "bytes_sent": compression.traffic.total_bytes,
    }


_FSDP = "FSDPCompression"


class FSDPState:
    """The state of an FSDPCompression: for each parameter the worker error of each replica, and the servers' errors.

    They are float32 values in the order of the parameter's elements, so that any mesh can load them.

    Attributes:
        communicator: All ranks.
    """

    communicator: Communicator

    def __init__(self, compression: FSDPCompression) -> None:
        """Wrap the errors."""
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
        return compression_header(_FSDP, self._compression, self.communicator, node_size)

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
        if header.title != _FSDP:
            raise ValueError(f"it is of {header.title}, not of {_FSDP}")
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
