"""The protocol by which each optimizer's state becomes a checkpoint, and helpers that its adapters share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_compressopt.checkpoint.header import Header
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.format.index import TensorEntry
from hf_compressopt.format.record import MASTER, REPLICA, Per, StateTensor, TensorKey, dtype_name
from hf_compressopt.optim.options import check_plain, group_from_plain

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


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


class Checkpointable(Protocol):
    """An optimizer's state as a checkpoint sees it.

    Attributes:
        communicator: The ranks that save and load it.
    """

    communicator: Communicator

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Names of the trainable parameters, per param group.

        Args:
            names: A name for each of them, in the optimizer's order; torch's ``param_names`` if None.

        Raises:
            ValueError: If their number is not that of the trainable parameters, or one occurs twice.
        """

    def shared_parameters(self) -> list[list[Tensor]]:
        """The trainable parameters of each param group; none for a group with a process group of its own."""

    def tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """Every state tensor that this rank holds a part of, for a save.

        Args:
            names: Names of the trainable parameters, per param group.

        Raises:
            ValueError: If a checkpoint cannot hold one.
        """

    def header(self) -> dict[str, Any]:
        """Values of a checkpoint beside its tensors, as JSON holds them."""

    def plan_load(self, names: Sequence[Sequence[str]], header: Header, entries: Mapping[str, TensorEntry]) -> LoadPlan:
        """Check that a checkpoint fits, and say what to read. The optimizer does not change.

        Args:
            names: Names of the trainable parameters, per param group.
            header: The checkpoint's header.
            entries: Its tensors, by name.

        Raises:
            ValueError: If it does not fit.
            TypeError: Likewise.
        """


def describe_parameters(state: Checkpointable, names: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
    """Name, shape and dtype of the parameters of each param group that all ranks hold."""
    return [
        [
            {"name": name, "shape": list(param.shape), "dtype": dtype_name(param)}
            for name, param in zip(called, params, strict=False)
        ]
        for called, params in zip(names, state.shared_parameters(), strict=True)
    ]


def checked_names(state: Checkpointable, names: Sequence[str] | None) -> list[list[str]]:
    """Names of the trainable parameters, per group, that files can hold.

    Raises:
        TypeError: If one is no string.
        ValueError: If their number does not fit, or if one occurs twice or is not valid Unicode.
    """
    for name in names or ():
        if not isinstance(name, str):
            raise TypeError(f"names must be strings, got {name!r}")
    grouped = state.parameter_names(names)
    for name in chain.from_iterable(grouped):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"the parameter name {name!r} is not valid Unicode, so files cannot hold it: give names=..."
            ) from None
    return grouped


def groups_to_load(
    groups: Sequence[dict[str, Any]], header: Header, names: Sequence[Sequence[str]], entries: Mapping[str, TensorEntry]
) -> list[dict[str, Any]]:
    """The hyperparameters of a checkpoint for the param groups of an ordinary or partitioned optimizer.

    Raises:
        ValueError: If they do not fit the groups or the tensors, or one is outside its range.
    """
    saved = header.param_groups(len(groups))
    for number, (group, values) in enumerate(zip(groups, saved, strict=True)):
        check_plain(group, values, number)
        for name in names[number] if values.get("amsgrad") else ():
            if f"exp_avg_sq/{name}" in entries and f"max_exp_avg_sq/{name}" not in entries:
                raise ValueError(f"amsgrad of param group {number} is True, and there is no max_exp_avg_sq/{name}")
    return [group_from_plain(values) for values in saved]


def check_keys(state: Mapping[Any, Any], optimizer: str) -> None:
    """Check that a checkpoint can name what an optimizer has for a parameter.

    Raises:
        ValueError: For a key that would be read as something else.
    """
    for key in state:
        named = isinstance(key, str) and "/" not in key and key not in (MASTER, REPLICA)
        if not named or TensorKey.parse(key).per is not Per.ELEMENT:
            raise ValueError(
                f"the state {key!r} of {optimizer} cannot be saved by this name: a key must be a string without '/', "
                f"other than {MASTER!r} and {REPLICA!r}, that does not begin with {Per.SCALAR.value!r} or "
                f"{Per.NUMBER.value!r}; rename it in the optimizer"
            )


def value_of_parameter(kind: str, name: str, value: Any, *, replicated: bool = False) -> StateTensor:
    """Describe what an optimizer has once per parameter: a tensor, or a number of Python's.

    Args:
        kind: Its key in the optimizer's state.
        name: Name of the parameter.
        value: The tensor or number.
        replicated: Whether every rank holds it.

    Raises:
        ValueError: For a value of another type, or a number of more than 64 bits.
    """
    if isinstance(value, Tensor):
        return StateTensor.of(TensorKey(kind, name, per=Per.SCALAR), value, replicated=replicated)
    key, dtype = TensorKey(kind, name, per=Per.NUMBER), _NUMBERS.get(type(value))
    if dtype is None or (dtype is torch.int64 and not -(2**63) <= value < 2**63):
        raise ValueError(f"{key} must be a tensor, a boolean or a number of 64 bits to be saved, got {value!r}")
    return StateTensor.of(key, torch.tensor(value, dtype=dtype, device="cpu"), replicated=replicated)


def room_for(live: Any, shape: Sequence[int], dtype: str) -> Tensor:
    """Memory that a tensor of a checkpoint is read into: the state's own if it is such a tensor, else new memory."""
    wanted: torch.dtype = getattr(torch, dtype)
    if isinstance(live, Tensor) and live.shape == tuple(shape) and live.dtype == wanted and live.is_contiguous():
        return live
    return torch.empty(tuple(shape), dtype=wanted, device="cpu")
