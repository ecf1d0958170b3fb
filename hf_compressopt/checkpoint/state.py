"""The state of any optimizer as checkpoints see it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.format.index import CheckpointIndex, TensorEntry
from hf_compressopt.format.plan import Plan, Read, StateTensor, TensorKey, dtype_name
from hf_compressopt.format.shards import ShardFiles
from hf_compressopt.optim.options import check_names

#: The optimizers whose state is Adam's moments: as they are, or inside a ZeroOptimizer.
PLAIN = ("AdamW", "Adam", "FusedAdam", "Lamb")
COMPRESSED = ("OnebitAdam", "ZeroOneAdam", "OnebitLamb")
_ZERO = re.compile(r"ZeroOptimizer\((\w+)\)")


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
        zero = _ZERO.fullmatch(name)
        return cls(values, zero[1] if zero else name, False)

    @property
    def title(self) -> Any:
        return self.values.get("optimizer", self.values.get("class"))

    @property
    def is_partitioned(self) -> bool:
        """True if a ZeroOptimizer of stage 1 or 2 has written it, which saves master copies of 16-bit parameters."""
        return not self.compressed and self.values.get("stage") != 0

    def param_groups(self, count: int) -> list[Any]:
        saved = self.values.get("param_groups")
        if not isinstance(saved, list) or len(saved) != count:
            raise ValueError(f"the checkpoint has the param groups {saved!r}, this optimizer has {count}")
        return saved


@dataclass(frozen=True)
class LoadPlan:
    """Effect of a load on an optimizer."""

    tensors: Sequence[StateTensor]  # what is read, into memory that may be the optimizer's own
    commit: Callable[[], None]  # takes over the header, and what was read into other memory, after all is read
    #: For some small tensors what raises a ValueError, before anything changes, if no run could have saved the values.
    checks: Mapping[TensorKey, Callable[[Tensor], None]] = field(default_factory=dict)


class State(ABC):
    """An optimizer's state as a checkpoint sees it.

    Attributes:
        communicator: The ranks that save and load it.
        params: The trainable parameters of each param group; none for a group with a process group of its own.
    """

    def __init__(
        self, communicator: Communicator, names: Sequence[Sequence[str]], params: Sequence[Sequence[Tensor]]
    ) -> None:
        self.communicator, self.params, self._names = communicator, params, names

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Return the names of the trainable parameters per param group: those given in their order, or their own."""
        found = list(chain.from_iterable(self._names) if names is None else names)
        check_names(found, sum(map(len, self._names)))
        rest = iter(found)
        return [[next(rest) for _ in group] for group in self._names]

    def checked_names(self, names: Sequence[str] | None) -> list[list[str]]:
        """Return those of :meth:`parameter_names` if files can hold them."""
        for name in names or ():
            if not isinstance(name, str):
                raise TypeError(f"names must be strings, got {name!r}")
        grouped = self.parameter_names(names)
        for name in chain.from_iterable(grouped):
            try:
                name.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f"the parameter name {name!r} is not valid Unicode, so files cannot hold it: give names=..."
                ) from None
        return grouped

    def described(self, names: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
        """Return name, shape and dtype of the parameters of each param group that all ranks hold."""
        return [
            [
                {"name": name, "shape": list(param.shape), "dtype": dtype_name(param)}
                for name, param in zip(called, params, strict=False)
            ]
            for called, params in zip(names, self.params, strict=True)
        ]

    @abstractmethod
    def tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """Describe every state tensor that this rank holds a part of, for a save."""

    @abstractmethod
    def header(self) -> dict[str, Any]:
        """Return the values of a checkpoint beside its tensors, as JSON holds them."""

    @abstractmethod
    def plan_load(self, names: Sequence[Sequence[str]], header: Header, entries: Mapping[str, TensorEntry]) -> LoadPlan:
        """Check that a checkpoint fits, and say what to read. The optimizer does not change."""


def not_alike(key: object) -> str:
    return (
        f"{key} is not the same for all parts of the parameter, so that a checkpoint cannot hold it as one number: "
        "the optimizer is not element-wise; use it without ZeRO, or save optimizer.state_dict() on every rank"
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def fill(values: Tensor | None, plan: Plan, files: ShardFiles, index: CheckpointIndex) -> None:
    """Read what a plan says into ``values`` [numel], on any device, or only verify it.

    A mean is summed in float64, in rank order.
    """
    if values is None or len(plan.sources) == 1:
        for reads in plan.sources:
            _read_source(values, reads, files)
        return
    values.zero_()
    start = 0
    for window in plan.windows(index.block_bytes) if plan.sources else ():
        part = torch.empty(window.nbytes // values.element_size(), dtype=values.dtype, device="cpu")
        mean = torch.zeros(part.numel(), dtype=torch.float64, device="cpu")
        for reads in window.sources:
            _read_source(part, reads, files)
            mean += part
        values[start : start + part.numel()] = mean.div_(len(window.sources))
        start += part.numel()


def _read_source(values: Tensor | None, reads: Sequence[Read], files: ShardFiles) -> None:
    for read in reads:
        out = None if values is None else values.view(torch.uint8)[read.offset : read.offset + read.end - read.begin]
        memory = out.numpy().data if out is not None and out.device.type == "cpu" else None
        for begin, part in files[read.piece.shard].blocks(read.piece, read.entry, read.begin, read.end, memory):
            if out is not None and memory is None:
                offset = begin - read.begin
                out[offset : offset + len(part)] = torch.frombuffer(part, dtype=torch.uint8)
