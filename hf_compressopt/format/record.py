"""The description of a state tensor on its way into a checkpoint and back. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

#: Kind of the float32 copy of a 16-bit parameter.
MASTER = "master"
#: Kind of a parameter that lags behind its master.
REPLICA = "replica"


class Per(Enum):
    """Unit for which a parameter has one value; the value of a member begins the tensor's name."""

    ELEMENT = ""  # one value per element: a tensor shaped like the parameter
    SCALAR = "scalar:"  # one value per parameter, a tensor in the optimizer
    NUMBER = "number:"  # one value per parameter, a number of Python's in the optimizer


@dataclass(frozen=True)
class TensorKey:
    """The name of a tensor in a checkpoint, which ``str()`` writes.

    Attributes:
        kind: What it holds, such as "exp_avg".
        owner: The parameter that it belongs to; "" for a tensor of a param group.
        group: Number of the param group that it belongs to, or None.
        rank: The rank whose own it is; None if it is one tensor for all ranks.
        per: What the parameter has a value for.
    """

    kind: str
    owner: str = ""
    group: int | None = None
    rank: int | None = None
    per: Per = Per.ELEMENT

    def __str__(self) -> str:
        """The name, such as "exp_avg/rank1/weight" or "worker_error/group0/rank1"."""
        own = [] if self.rank is None else [f"rank{self.rank}"]
        if self.group is not None:
            return "/".join([self.kind, f"group{self.group}", *own])
        return "/".join([self.per.value + self.kind, *own, self.owner])

    def of_rank(self, rank: int) -> TensorKey:
        """The key of another rank's own tensor of this kind."""
        return replace(self, rank=rank)

    @classmethod
    def parse(cls, name: str) -> TensorKey:
        """The key of a tensor that belongs to a parameter and is one for all ranks."""
        kind, _, owner = name.partition("/")
        per = next(per for per in (Per.SCALAR, Per.NUMBER, Per.ELEMENT) if kind.startswith(per.value))
        return cls(kind.removeprefix(per.value), owner, per=per)


@dataclass(frozen=True)
class StateTensor:
    """One rank's part of a state tensor: what a save writes, and what a load reads.

    Attributes:
        key: Name of the whole tensor, the same on all ranks that hold a part of it.
        dtype: Its dtype, by torch's name, such as "float32".
        shape: Shape of the whole tensor.
        start: First element of this part in the flattened whole.
        stop: One past its last element.
        local: The part itself, a tensor of torch's, often the optimizer's own memory; None if there is no memory yet.
        replicated: Every rank holds the same whole tensor, so that any of them may write it.
        of_each_rank: Each rank has a tensor of its own. On another number of ranks a load reads the mean of all.
        is_error: It is an error of error feedback, which a run of one rank does not have.
        node_size: Ranks that have parts of one such tensor together, if each node has its own; 1 if each rank has.
    """

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    local: Any = None
    replicated: bool = False
    of_each_rank: bool = False
    is_error: bool = False
    node_size: int = 1

    @classmethod
    def of(
        cls,
        key: TensorKey,
        local: Any,
        shape: tuple[int, ...] | None = None,
        start: int = 0,
        *,
        replicated: bool = False,
        of_each_rank: bool = False,
        is_error: bool = False,
        node_size: int = 1,
    ) -> StateTensor:
        """Describe a tensor of torch's, by default as a whole one.

        Args:
            key: Name of the whole tensor.
            local: This rank's part.
            shape: Shape of the whole; that of ``local`` if None.
            start: Where the part begins in the flattened whole.
            replicated: See the class.
            of_each_rank: See the class.
            is_error: See the class.
            node_size: See the class.
        """
        whole = tuple(local.shape) if shape is None else shape
        stop = start + local.numel()
        return cls(key, dtype_name(local), whole, start, stop, local, replicated, of_each_rank, is_error, node_size)

    @property
    def is_whole(self) -> bool:
        """True if the part is the whole tensor."""
        return self.stop - self.start == prod(self.shape)

    @property
    def shard_key(self) -> str:
        """The name of this part in its shard."""
        return str(self.key) if self.is_whole else f"{self.key}@{self.start}"


def dtype_name(tensor: Any) -> str:
    """Torch's name of a tensor's dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def keys_by_parameter(names: Iterable[str]) -> dict[str, list[TensorKey]]:
    """Group the keys of a checkpoint's tensors by the parameter that they belong to."""
    found: dict[str, list[TensorKey]] = {}
    for key in map(TensorKey.parse, names):
        found.setdefault(key.owner, []).append(key)
    return found
