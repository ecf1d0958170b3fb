"""What a checkpoint knows of an optimizer's state, whichever optimizer it is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.format.index import CheckpointIndex, TensorEntry
from hf_compressopt.format.plan import MASTER, REPLICA, Per, Plan, StateTensor, TensorKey, dtype_name
from hf_compressopt.format.shards import ShardFiles
from hf_compressopt.optim.options import check_names, check_plain, group_from_plain

#: The optimizers whose state is Adam's moments: as they are, or inside a ZeroOptimizer.
PLAIN = ("AdamW", "Adam", "FusedAdam", "Lamb")
COMPRESSED = ("OnebitAdam", "ZeroOneAdam", "OnebitLamb")
_ZERO = re.compile(r"ZeroOptimizer\((\w+)\)")
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Header:
    """A checkpoint's header."""

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
        """The name that the header gives the optimizer, such as "ZeroOptimizer(AdamW)"."""
        return self.values.get("optimizer", self.values.get("class"))

    @property
    def is_partitioned(self) -> bool:
        """True if a ZeroOptimizer of stage 1 or 2 has written it, which saves master copies of 16-bit parameters."""
        return not self.compressed and self.values.get("stage") != 0

    def param_groups(self, count: int) -> list[Any]:
        """The hyperparameters of each param group."""
        saved = self.values.get("param_groups")
        if not isinstance(saved, list) or len(saved) != count:
            raise ValueError(f"the checkpoint has the param groups {saved!r}, this optimizer has {count}")
        return saved


@dataclass(frozen=True)
class LoadPlan:
    """Effect of a load on an optimizer.

    Attributes:
        tensors: What is read, and the memory that it is read into, some of it the optimizer's own.
        commit: Takes over the header, and what was read into other memory. It is called after all tensors are read.
        checks: For some small tensors what raises a ValueError if no run could have saved these values. It is called
            before anything changes.
    """

    tensors: Sequence[StateTensor]
    commit: Callable[[], None]
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
        """Take the names of the trainable parameters per param group, and those that all ranks hold."""
        self.communicator, self.params, self._names = communicator, params, names

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Return the names of the trainable parameters per param group: those given in their order, or their own."""
        found = list(chain.from_iterable(self._names) if names is None else names)
        check_names(found, sum(map(len, self._names)))
        rest = iter(found)
        return [[next(rest) for _ in group] for group in self._names]

    def checked_names(self, names: Sequence[str] | None) -> list[list[str]]:
        """Return the names as :meth:`parameter_names` does, if files can hold them."""
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


def groups_to_load(
    groups: Sequence[dict[str, Any]], header: Header, names: Sequence[Sequence[str]], entries: Mapping[str, TensorEntry]
) -> list[dict[str, Any]]:
    """The hyperparameters of a checkpoint for the param groups of an ordinary or partitioned optimizer."""
    saved = header.param_groups(len(groups))
    for number, (group, values) in enumerate(zip(groups, saved, strict=True)):
        check_plain(group, values, number)
        for name in names[number] if values.get("amsgrad") else ():
            if f"exp_avg_sq/{name}" in entries and f"max_exp_avg_sq/{name}" not in entries:
                raise ValueError(f"amsgrad of param group {number} is True, and there is no max_exp_avg_sq/{name}")
    return [group_from_plain(values) for values in saved]


def check_keys(state: Mapping[Any, Any], optimizer: str) -> None:
    """Check that a checkpoint can name what an optimizer has for a parameter."""
    for key in state:
        named = isinstance(key, str) and "/" not in key and key not in (MASTER, REPLICA)
        if not named or TensorKey.parse(key).per is not Per.ELEMENT:
            raise ValueError(
                f"the state {key!r} of {optimizer} cannot be saved by this name: a key must be a string without '/', "
                f"other than {MASTER!r} and {REPLICA!r}, that does not begin with {Per.SCALAR.value!r} or "
                f"{Per.NUMBER.value!r}; rename it in the optimizer"
            )


def value_of_parameter(kind: str, name: str, value: Any, *, replicated: bool = False) -> StateTensor:
    """Describe what an optimizer has once per parameter: a tensor, or a number of Python's."""
    if isinstance(value, Tensor):
        return StateTensor.of(TensorKey(kind, name, per=Per.SCALAR), value, replicated=replicated)
    key, dtype = TensorKey(kind, name, per=Per.NUMBER), _NUMBERS.get(type(value))
    if dtype is None or (dtype is torch.int64 and not -(2**63) <= value < 2**63):
        raise ValueError(f"{key} must be a tensor, a boolean or a number of 64 bits to be saved, got {value!r}")
    return StateTensor.of(key, torch.tensor(value, dtype=dtype, device="cpu"), replicated=replicated)


def not_alike(key: object) -> str:
    """The error for a number of a parameter that differs between the parts of it."""
    return (
        f"{key} is not the same for all parts of the parameter, so that a checkpoint cannot hold it as one number: "
        "the optimizer is not element-wise; use it without ZeRO, or save optimizer.state_dict() on every rank"
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def room_for(live: Any, shape: Sequence[int], dtype: str) -> Tensor:
    """Memory that a tensor of a checkpoint is read into: the state's own if it is such a tensor, else new memory."""
    wanted: torch.dtype = getattr(torch, dtype)
    if isinstance(live, Tensor) and live.shape == tuple(shape) and live.dtype == wanted and live.is_contiguous():
        return live
    return torch.empty(tuple(shape), dtype=wanted, device="cpu")


class Decoded:
    """Stands for a float32 tensor that is decoded when a save writes it."""

    dtype = torch.float32

    def __init__(self, shape: Sequence[int], decode: Callable[[], Tensor]) -> None:
        """Take the function that returns its values, which need not have the shape."""
        self.shape, self._decode = tuple(shape), decode

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def detach(self) -> Tensor:
        """Return the values, decoded now."""
        return self._decode().view(self.shape)


def fill(values: Tensor, plan: Plan, files: ShardFiles, index: CheckpointIndex) -> None:
    """Read what a plan says into ``values`` [numel], on any device. A mean is summed in float64, in rank order."""
    if len(plan.sources) == 1:
        _read_source(values, plan, 0, files)
        return
    values.zero_()
    if not plan.sources:
        return
    start = 0
    for window in plan.windows(index.block_bytes):
        part = torch.empty(window.nbytes // values.element_size(), dtype=values.dtype, device="cpu")
        mean = torch.zeros(part.numel(), dtype=torch.float64, device="cpu")
        for source in range(len(window.sources)):
            _read_source(part, window, source, files)
            mean += part
        values[start : start + part.numel()] = mean.div_(len(window.sources))
        start += part.numel()


def _read_source(values: Tensor, plan: Plan, source: int, files: ShardFiles) -> None:
    for read in plan.sources[source]:
        out = values.view(torch.uint8)[read.offset : read.offset + read.end - read.begin]
        memory = out.numpy().data if out.device.type == "cpu" else None
        file = files[read.piece.shard]
        for begin, part in file.blocks(read.piece, read.entry, read.begin, read.end, memory):
            if memory is None:
                offset = begin - read.begin
                out[offset : offset + len(part)] = torch.frombuffer(part, dtype=torch.uint8)
