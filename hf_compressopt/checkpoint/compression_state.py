"""The errors of compressed gradients as a checkpoint sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.checkpointable import LoadPlan
from hf_compressopt.checkpoint.header import Header
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.format.index import NODE_SIZE, TensorEntry
from hf_compressopt.format.record import StateTensor, TensorKey
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
        compression = self._compression
        nodes = {} if self.communicator.levels is None else {NODE_SIZE: self.communicator.topology.node_size}
        return {
            **nodes,
            "optimizer": _NAME,
            "step": compression.steps,
            "skipped_steps": compression.skipped_steps,
            "world_size": self.communicator.world_size,
            "bits": compression.bits,
            "bytes_sent": compression.traffic.total_bytes,
        }

    def tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """See the protocol; the tensors share memory with the compression. A single rank has no errors."""
        compression, place = self._compression, self.communicator.topology
        if place.world_size == 1:
            return []
        buckets, whole = compression.layout.buckets, (compression.layout.numel,)
        worker, server = TensorKey("worker_error", group=0, rank=place.node), TensorKey("server_error", group=0)
        runs = [(0, compression.worker_error)]  # with their first elements
        if place.node_size > 1:
            ranges = [place.sent_range(bucket.numel) for bucket in buckets]
            parts = torch.split(compression.worker_error, [stop - start for start, stop in ranges])
            runs = [(b.start + start, part) for b, (start, _), part in zip(buckets, ranges, parts, strict=True)]
        own, size = {"of_each_rank": True, "is_error": True}, place.node_size
        found = [StateTensor.of(worker, part, whole, start, **own, node_size=size) for start, part in runs]
        for bucket, (_, error) in zip(buckets, compression.errors, strict=True):
            start = bucket.start + place.own_range(bucket.numel)[0]
            found.append(StateTensor.of(server, error, whole, start, is_error=True))
        return [tensor for tensor in found if tensor.local.numel()]

    def plan_load(self, names: Sequence[Sequence[str]], header: Header, entries: Mapping[str, TensorEntry]) -> LoadPlan:
        """See the protocol. The errors of a run on one rank, which has none, become zero."""
        compression, values = self._compression, header.values
        if header.title != _NAME:
            raise ValueError(f"it is of {header.title}, not of {_NAME}")
        known = values["world_size"] > 1
        tensors = self.tensors(names) if known else []

        def commit() -> None:
            if not known:
                compression.worker_error.zero_()
                compression.server_error.zero_()
            compression.steps, compression.skipped_steps = values["step"], values["skipped_steps"]
            compression.traffic.restore(values["bytes_sent"])

        return LoadPlan(tensors, commit)
