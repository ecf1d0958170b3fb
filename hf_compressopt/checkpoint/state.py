"""The state of any optimizer as checkpoints see it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.feedback import ErrorFeedback
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.format.index import BESIDE, NODE_SIZE, TensorEntry
from hf_compressopt.format.plan import Kind, StateTensor, TensorKey, dtype_name
from hf_compressopt.fsdp.compression import FSDPCompression
from hf_compressopt.grad_compression import GradientCompression
from hf_compressopt.optim.describe import errors_of_group
from hf_compressopt.optim.options import check_count, names_by_group

#: The optimizers whose state is Adam's moments: as they are, or inside a ZeroOptimizer.
PLAIN = ("AdamW", "Adam", "FusedAdam", "Lamb")
COMPRESSED = ("OnebitAdam", "ZeroOneAdam", "OnebitLamb")
Names = Sequence[Sequence[str]]  # of the parameters, per param group
Entries = Mapping[str, TensorEntry]  # the tensors of a checkpoint, by name
#: The tensors that a load reads, in memory that may be the optimizer's own, and a function that then takes over the
#: header, and values that were read into other memory.
LoadPlan = tuple[Sequence[StateTensor], Callable[[], None]]


@dataclass(frozen=True)
class Header:
    values: dict[str, Any]
    optimizer: str  # the name of its class, without ZeRO
    compressed: bool  # whether it is a compressed optimizer

    @classmethod
    def of(cls, values: dict[str, Any]) -> Header:
        """Tell from the values which optimizer has written them."""
        if "optimizer" in values:
            return cls(values, str(values["optimizer"]), True)
        name = str(values.get("class"))
        zero = re.fullmatch(r"ZeroOptimizer\((\w+)\)", name)
        return cls(values, zero[1] if zero else name, False)

    @property
    def title(self) -> Any:
        return self.values.get("optimizer", self.values.get("class"))

    def param_groups(self, count: int) -> list[Any]:
        saved = self.values.get("param_groups")
        if not isinstance(saved, list) or len(saved) != count:
            raise ValueError(f"the checkpoint has the param groups {saved!r}, this optimizer has {count}")
        return saved


class State(ABC):
    """An optimizer's state as a checkpoint sees it. ``params`` lists no param group with its own process group."""

    def __init__(self, communicator: Communicator, names: Names, params: Sequence[Sequence[Tensor]]) -> None:
        self.communicator = communicator
        self.params, self._names = params, names

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Return the names of the trainable parameters per param group: those given in their order, or their own."""
        for name in names or ():
            if not isinstance(name, str):
                raise TypeError(f"names must be strings, got {name!r}")
        grouped = names_by_group(self._names, names)
        for name in chain.from_iterable(grouped):
            try:
                name.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f"the parameter name {name!r} is not valid Unicode, so files cannot hold it: give names=..."
                ) from None
        return grouped

    def described(self, names: Names) -> list[list[dict[str, Any]]]:
        return [
            [
                {"name": name, "shape": list(param.shape), "dtype": dtype_name(param)}
                for name, param in zip(called, params, strict=False)
            ]
            for called, params in zip(names, self.params, strict=True)
        ]

    @abstractmethod
    def tensors(self, names: Names) -> Sequence[StateTensor]:
        """Describe every state tensor that this rank holds a part of, for a save; they share the optimizer's memory."""

    @abstractmethod
    def header(self) -> dict[str, Any]:
        """Return the values of a checkpoint beside its tensors, as JSON holds them."""

    def marks(self) -> list[str]:
        """List keys of the header that are True in a checkpoint if they are on any rank. Called after ``tensors``."""
        return []

    @abstractmethod
    def plan_load(self, names: Names, header: Header, entries: Entries) -> LoadPlan:
        """Check that a checkpoint fits, and say what to read. The optimizer does not change."""


def not_alike(key: object) -> str:
    return (
        f"{key} is not the same for all parts of the parameter, so that a checkpoint cannot hold it as one number: "
        "the optimizer is not element-wise; use it without ZeRO, or save optimizer.state_dict() on every rank"
    )


# -- the errors of gradients that are compressed in DDP or FSDP2 -------------------------------------------------------


class LowBitState(State):
    """The errors, and what counts steps and bytes. A single rank, or replica of FSDP2, has no errors."""

    def __init__(
        self,
        compression: GradientCompression | FSDPCompression,
        communicator: Communicator,
        params: Mapping[str, Tensor],
        errors: Sequence[ErrorFeedback],
        node_size: int,
    ) -> None:
        super().__init__(communicator, [list(params)], [list(params.values())])
        self._compression, self._errors = compression, errors
        self._node_size = node_size
        self._title = type(compression).__name__

    def header(self) -> dict[str, Any]:
        compression = self._compression
        return {
            **({NODE_SIZE: self._node_size} if self._node_size > 1 else {}),
            "optimizer": self._title,
            "step": compression.steps,
            "skipped_steps": compression.steps_not_finite,
            "world_size": self.communicator.world_size,
            "bits": compression.bits,
            "bytes_sent": compression.traffic.total_bytes,
        }

    def tensors(self, names: Names) -> list[StateTensor]:
        return self._described(names[0], self._errors)

    @abstractmethod
    def _described(self, names: Sequence[str], errors: Sequence[ErrorFeedback]) -> list[StateTensor]:
        """Describe worker and server errors."""

    def _to_fill(self, header: Header, entries: Entries) -> list[ErrorFeedback]:
        """Return the errors that a load fills, in the form of the checkpoint."""
        return [errors.to_fill(compact=False) for errors in self._errors]

    def plan_load(self, names: Names, header: Header, entries: Entries) -> LoadPlan:
        """Set the errors to zero if the run that saved had none."""
        compression, values = self._compression, header.values
        if header.title != self._title:
            raise ValueError(f"it is of {header.title}, not of {self._title}")
        saved = {TensorKey.parse(name).kind for name in entries}
        to_fill = self._to_fill(header, entries)
        described = self._described(names[0], to_fill)
        check_count("world_size", values.get("world_size"))
        check_count(NODE_SIZE, values.get(NODE_SIZE, 1))
        senders = values["world_size"] // values.get(NODE_SIZE, 1)
        if senders > 1 and Kind.WORKER not in saved and any(tensor.key.kind == Kind.WORKER for tensor in described):
            raise ValueError(
                f"it holds no errors, and the messages of {senders} ranks or nodes had some: save it again"
            )

        def commit() -> None:
            for errors, filled in zip(self._errors, to_fill, strict=True):
                errors.drop()
                if Kind.WORKER not in saved:
                    errors.zero_()
                    continue
                if Kind.SERVER not in saved:  # as by FSDP2 without replicas
                    filled.server.zero_()
                if filled is not errors:
                    errors.copy_(filled.worker, filled.server)
            compression.resume(values["step"], values["skipped_steps"])
            compression.traffic.restore(values["bytes_sent"])

        return [tensor for tensor in described if tensor.key.kind in saved], commit


class CompressionState(LowBitState):
    """The state of a GradientCompression: one flat tensor for each rank's own errors, and one for the servers'.

    They are stored as they lie in memory. Errors of 8 bits are decoded for another number of ranks or other buckets.
    """

    def __init__(self, compression: GradientCompression) -> None:
        params = dict(zip(compression.names, compression.params, strict=True))
        ranks = compression.communicator
        super().__init__(compression, ranks, params, [compression.errors], ranks.topology.node_size)
        self._gradients, self._bucket_numel = compression, compression.layout.bucket_numel

    def header(self) -> dict[str, Any]:
        return {**super().header(), "bucket_numel": self._bucket_numel}

    def _to_fill(self, header: Header, entries: Entries) -> list[ErrorFeedback]:
        (errors,), saved = self._errors, entries.get(str(TensorKey(Kind.SERVER, group=0)))
        alike = (self.communicator.world_size, self._bucket_numel) == tuple(
            header.values.get(name) for name in ("world_size", "bucket_numel")
        )
        in_bytes = saved is not None and saved.dtype == "uint8"
        return [errors.to_fill(compact=in_bytes and alike and self.communicator.levels is None)]

    def _described(self, names: Sequence[str], errors: Sequence[ErrorFeedback]) -> list[StateTensor]:
        return list(errors_of_group(errors[0], 0, self.communicator))


class FSDPState(LowBitState):
    """The errors of an FSDPCompression, float32 in the order of elements; without replicas the servers have none."""

    def __init__(self, compression: FSDPCompression) -> None:
        peers, self._shard = compression.communicator, compression.replica.rank
        self._fsdp, self._units = compression, compression.units
        self._replica = peers.rank
        named: dict[str, Tensor] = {}
        for errors in self._units:
            named.update(zip(errors.unit.names, errors.unit.params, strict=True))
        params = {name: named[name] for name in sorted(named)}  # in one order, whatever the units are
        ranks = TorchCommunicator(device=peers.device)
        together = compression.replica.world_size if compression.replicated else 1
        place = peers.rank * together + (self._shard if compression.replicated else 0)
        if (ranks.world_size, ranks.rank) != (peers.world_size * together, place):
            raise ValueError(
                "a checkpoint of compress_fsdp needs a mesh of all ranks in their order, as init_device_mesh makes it: "
                "save its state_dict() on each rank instead"
            )
        super().__init__(compression, ranks, params, [errors.kept for errors in self._units], together)

    def header(self) -> dict[str, Any]:
        return {**super().header(), BESIDE: self._fsdp.beside is not None}

    def _described(self, names: Sequence[str], errors: Sequence[ErrorFeedback]) -> list[StateTensor]:
        described: list[StateTensor] = []
        if not any(group.worker.numel() for group in errors):
            return described
        values = [group.values() if group.compact else (group.worker, group.server) for group in errors]
        rows = zip(self._names[0], names, self.params[0], strict=True)
        called = {name_in_unit: (name, tuple(param.shape)) for name_in_unit, name, param in rows}
        of_sender: dict[str, Any] = {"of_each_rank": True, "node_size": self._node_size}
        for unit, errors_of_unit in zip(self._units, values, strict=True):
            for kind, shard, start, run in unit.runs(errors_of_unit, self._shard):
                rank, options = (self._replica, of_sender) if kind == Kind.WORKER else (None, {})
                for name_in_unit, offset, numel, first in unit.unit.places(shard):
                    low, high = max(start, offset), min(start + run.numel(), offset + numel)
                    if low < high:
                        name, shape = called[name_in_unit]
                        key, at = TensorKey(kind, name, rank=rank), first + low - offset
                        part = run[low - start : high - start]
                        described.append(StateTensor.of(key, part, shape, at, is_error=True, **options))
        return described
