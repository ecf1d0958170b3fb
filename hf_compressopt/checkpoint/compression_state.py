"""The errors of compressed gradients as a checkpoint sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.checkpointable import LoadPlan
from hf_compressopt.checkpoint.header import Header
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.errors import GroupErrors
from hf_compressopt.format.index import NODE_SIZE, TensorEntry
from hf_compressopt.format.record import StateTensor, TensorKey
from hf_compressopt.fsdp.compression import FSDPCompression
from hf_compressopt.grad_compression import GradientCompression
from hf_compressopt.optim.options import check_names

_NAME = "GradientCompression"


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
        return compression_header(_NAME, self._compression, self.communicator, node_size)

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
        if header.title != _NAME:
            raise ValueError(f"it is of {header.title}, not of {_NAME}")
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
