"""Plans of what a rank reads of a checkpoint: interval arithmetic that needs no files and no torch.

Three rules cover every tensor:

1. A tensor that is one for all ranks, whole on each or in parts, is found by offset. A rank reads its own elements from
   the pieces that hold them. These are moments, master copies, and server errors (by their place in the flat buffer).
2. A tensor that is each rank's own is read as it is if as many ranks load as saved. Otherwise each rank reads the mean
   of all, so that the average over the ranks stays as it was. These are worker errors, and what the ranks of 0/1 Adam
   hold of their own inside a local interval. With two levels a node has worker errors in the place of a rank, and each
   of its ranks a part of them; they are read as they are if the nodes are alike too.
3. Errors that a single rank did not save are zero, because it has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_compressopt.format.index import DTYPES, NODE_SIZE, CheckpointIndex, Piece, TensorEntry
from hf_compressopt.format.record import StateTensor


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
    """The reads that fill a tensor: it becomes the mean of the sources, or zeros if there are none.

    Attributes:
        sources: For each tensor to be averaged, usually one, the reads that fill all bytes once, in order.
        nbytes: Bytes of the tensor.
    """

    sources: tuple[tuple[Read, ...], ...]
    nbytes: int

    def windows(self, size: int) -> Iterator[Plan]:
        """Split the plan into consecutive windows of at most ``size`` bytes.

        They begin where the blocks of this size begin in the pieces of the first source, so that each block is read
        once.
        """
        for offset, begin, nbytes in self._runs():
            done = 0
            while done < nbytes:
                high = min(done + size - (begin + done) % size, nbytes)
                yield self._window(offset + done, offset + high)
                done = high

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Offset, place in its piece and bytes of each read of the first source; one run if there is no source."""
        if not self.sources:
            yield 0, 0, self.nbytes
        for read in self.sources[0] if self.sources else ():
            yield read.offset, read.begin, read.end - read.begin

    def _window(self, low: int, high: int) -> Plan:
        return Plan(tuple(tuple(_clip(reads, low, high)) for reads in self.sources), high - low)


def plan_reads(index: CheckpointIndex, wanted: StateTensor, world_size: int) -> Plan:
    """Plan the reads of one of ``world_size`` ranks, by the rules of the module.

    Args:
        index: The checkpoint's index, validated.
        wanted: The part of a tensor that the rank reads.
        world_size: Ranks of the run that reads.

    Raises:
        ValueError: If the checkpoint does not have the tensor in that dtype and shape, or its header is wrong.
    """
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
    reads = []
    for piece in entry.pieces:
        first, last = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
        if first < last:
            begin, end, offset = first - piece.start, last - piece.start, first - wanted.start
            reads.append(Read(entry, piece, begin * entry.itemsize, end * entry.itemsize, offset * entry.itemsize))
    return tuple(reads)


def _clip(reads: tuple[Read, ...], low: int, high: int) -> Iterator[Read]:
    for read in reads:
        first, last = max(read.offset, low), min(read.offset + read.end - read.begin, high)
        if first < last:
            begin = read.begin + first - read.offset
            yield Read(read.entry, read.piece, begin, begin + last - first, first - low)
