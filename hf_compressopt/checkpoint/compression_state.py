"""The errors of compressed gradients as a checkpoint sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_compressopt.checkpoint.checkpointable import LoadPlan
from hf_compressopt.checkpoint.header import Header
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import chunk_range
from hf_compressopt.format.index import TensorEntry
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
        return {
            "optimizer": _NAME,
            "step": compression.steps,
            "skipped_steps": compression.skipped_steps,
            "world_size": self.communicator.world_size,
            "bits": compression.bits,
            "bytes_sent": compression.traffic.total_bytes,
        }

    def tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """See the protocol; the tensors share memory with the compression. A single rank has no errors."""
        compression, ranks = self._compression, self.communicator
        if ranks.world_size == 1:
            return []
        key = TensorKey("worker_error", group=0, rank=ranks.rank)
        found = [StateTensor.of(key, compression.worker_error, of_each_rank=True, is_error=True)]
        for bucket, (_, error) in zip(compression.layout.buckets, compression.errors, strict=True):
            if error.numel():
                start = bucket.start + chunk_range(bucket.numel, ranks.world_size, ranks.rank)[0]
                whole = (compression.layout.numel,)
                found.append(StateTensor.of(TensorKey("server_error", group=0), error, whole, start, is_error=True))
        return found

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
