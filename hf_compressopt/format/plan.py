"""Plans of what a rank reads of a checkpoint: interval arithmetic that needs no files and no torch.

Three rules cover every tensor:

1. A tensor that is one for all ranks, whole on each or in parts, is found by offset. A rank reads its own elements from
   the pieces that hold them. These are moments, master copies, and server errors (by their place in the flat buffer).
2. A tensor that is each rank's own is read as it is if as many ranks load as saved. Otherwise each rank reads the mean
   of all, so that the average over the ranks stays as it was. These are worker errors, and what the ranks of 0/1 Adam
   hold of their own inside a local interval. In the hierarchical topology a node has worker errors in the place of a
   rank, and each of its ranks a part of them; they are read as they are if the nodes are alike too.
3. Errors that a single rank did not save are zero, because it has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

from hf_compressopt.format.index import DTYPES, NODE_SIZE, CheckpointIndex, Piece, TensorEntry

#: Kind of the float32 copy of a 16-bit parameter.
MASTER = "master"
#: Kind of a parameter that lags behind its master.
REPLICA = "replica"


class Kind:
    """Kinds of tensors other than moments and what algorithms add to them."""

    WORKER = "worker_error"
    SERVER = "server_error"
    STEP = "step"
    CODE = "exp_avg_sq_code"  # of a variance in 8 bits
    TOP = "exp_avg_sq_top"
    MESSAGE = "exp_avg_message"  # which is the momentum
    MASK = "exp_avg_mask"  # of a param group
    OPTIMIZER = "optimizer"  # of tensors that belong to no group


class Per(Enum):
    """Unit for which a parameter has one value; the value of a member begins the tensor's name."""

    ELEMENT = ""  # one value per element: a tensor shaped like the parameter
    SCALAR = "scalar:"  # one value per parameter, a tensor in the optimizer
    NUMBER = "number:"  # one value per parameter, a number of Python's in the optimizer


@dataclass(frozen=True)
class TensorKey:
    """The name of a tensor, as ``str()`` writes it: "exp_avg/rank1/weight", "worker_error/group0/rank1"."""

    kind: str  # what it holds, such as "exp_avg"
    owner: str = ""  # the parameter that it belongs to; "" for a tensor of a param group
    group: int | None = None  # the number of the param group that it belongs to
    rank: int | None = None  # the rank whose own it is; None if it is one tensor for all ranks
    per: Per = Per.ELEMENT  # what the parameter has a value for

    def __str__(self) -> str:
        own = [] if self.rank is None else [f"rank{self.rank}"]
        if self.group is not None:
            return "/".join([self.kind, f"group{self.group}", *own])
        return "/".join([self.per.value + self.kind, *own, self.owner])

    def of_rank(self, rank: int) -> TensorKey:
        return replace(self, rank=rank)

    @classmethod
    def parse(cls, name: str) -> TensorKey:
        """The key of a tensor that belongs to a parameter and is one for all ranks."""
        kind, _, owner = name.partition("/")
        per = next(per for per in (Per.SCALAR, Per.NUMBER, Per.ELEMENT) if kind.startswith(per.value))
        return cls(kind.removeprefix(per.value), owner, per=per)


@dataclass(frozen=True)
class StateTensor:
    """One rank's part of a state tensor: what a save writes, and what a load reads."""

    key: TensorKey  # of the whole tensor, the same on all ranks that hold a part of it
    dtype: str  # by torch's name, such as "float32"
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # first element of this part in the flattened whole
    stop: int  # one past its last element
    local: Any = None  # the part itself, a tensor of torch's, often the optimizer's own; None if there is no memory yet
    replicated: bool = False  # every rank holds the same whole tensor, so that any of them may write it
    of_each_rank: bool = False  # each rank has one of its own; on another number of ranks a load reads the mean of all
    is_error: bool = False  # it is an error of error feedback, which a run of one rank does not have
    node_size: int = 1  # ranks that have parts of one such tensor together, if each node has its own

    @classmethod
    def of(
        cls, key: TensorKey, local: Any, shape: tuple[int, ...] | None = None, start: int = 0, **kind: Any
    ) -> StateTensor:
        """Describe a tensor of torch's, by default as a whole one; ``kind`` are the fields from ``replicated`` on."""
        whole = tuple(local.shape) if shape is None else shape
        return cls(key, dtype_name(local), whole, start, start + local.numel(), local, **kind)

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == prod(self.shape)

    @property
    def shard_key(self) -> str:
        return str(self.key) if self.is_whole else f"{self.key}@{self.start}"


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def keys_by_parameter(names: Iterable[str]) -> dict[str, list[TensorKey]]:
    """Group the keys of a checkpoint's tensors by the parameter that they belong to."""
    found: dict[str, list[TensorKey]] = {}
    for key in map(TensorKey.parse, names):
        found.setdefault(key.owner, []).append(key)
    return found


@dataclass(frozen=True)
class Read:
    """Bytes [begin, end) of a piece of a tensor, which go to byte ``offset`` of the tensor to be read."""

    entry: TensorEntry
    piece: Piece
    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Plan:
    """The reads that fill a tensor: it becomes the mean of the sources, or zeros if there are none."""

    sources: tuple[tuple[Read, ...], ...]  # of each tensor to be averaged: they fill all bytes once, in order
    nbytes: int

    def windows(self, size: int) -> Iterator[Plan]:
        """Split the plan into consecutive windows of at most ``size`` bytes, along the blocks of the first source."""
        runs = [(read.offset, read.begin, read.end - read.begin) for reads in self.sources[:1] for read in reads]
        for offset, begin, nbytes in runs if self.sources else [(0, 0, self.nbytes)]:
            done = 0
            while done < nbytes:
                high = min(done + size - (begin + done) % size, nbytes)
                cut = [tuple(_clip(reads, offset + done, offset + high)) for reads in self.sources]
                yield Plan(tuple(cut), high - done)
                done = high


def plan_reads(index: CheckpointIndex, wanted: StateTensor, world_size: int) -> Plan:
    """Plan the reads of one of ``world_size`` ranks; a ValueError if dtype, shape or header are wrong."""
    saved_ranks = len(index.shards)
    names, saved_together = [str(wanted.key)], _node_size(index) if wanted.is_error else 1
    if wanted.of_each_rank and (world_size, wanted.node_size) != (saved_ranks, saved_together):
        names = [str(wanted.key.of_rank(rank)) for rank in range(saved_ranks // saved_together)]
    if wanted.is_error and saved_ranks == 1 and not any(name in index.tensors for name in names):
        names = []
    sources = [_reads(_fitting(index, name, wanted), wanted) for name in names]
    return Plan(tuple(sources), (wanted.stop - wanted.start) * DTYPES[wanted.dtype][1])


def _node_size(index: CheckpointIndex) -> int:
    """Ranks per node in the exchange of the run that saved; 1 if it was flat."""
    size = index.header.get(NODE_SIZE, 1)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or len(index.shards) % size:
        raise ValueError(f"{NODE_SIZE} must divide the {len(index.shards)} ranks of the checkpoint, got {size!r}")
    return size


def _fitting(index: CheckpointIndex, name: str, wanted: StateTensor) -> TensorEntry:
    entry = index.tensors.get(name)
    if entry is None:
        raise ValueError(f"the checkpoint has no tensor {name!r}")
    if entry.dtype != wanted.dtype or entry.shape != wanted.shape:
        raise ValueError(
            f"the checkpoint has {name!r} as {entry.dtype} {list(entry.shape)}, needed is {wanted.dtype} "
            f"{list(wanted.shape)}"
        )
    if not 0 <= wanted.start <= wanted.stop <= entry.numel:
        raise ValueError(
            f"the checkpoint has {name!r} with {entry.numel} elements, needed are {wanted.start} to {wanted.stop}"
        )
    return entry


def _reads(entry: TensorEntry, wanted: StateTensor) -> tuple[Read, ...]:
    size = entry.itemsize
    whole = (Read(entry, p, 0, (p.stop - p.start) * size, p.start * size) for p in entry.pieces)
    return tuple(_clip(whole, wanted.start * size, wanted.stop * size))


def _clip(reads: Iterable[Read], low: int, high: int) -> Iterator[Read]:
    """Yield what of the reads goes to bytes [low, high), as reads of these alone."""
    for read in reads:
        first, last = max(read.offset, low), min(read.offset + read.end - read.begin, high)
        if first < last:
            begin = read.begin + first - read.offset
            yield Read(read.entry, read.piece, begin, begin + last - first, first - low)
