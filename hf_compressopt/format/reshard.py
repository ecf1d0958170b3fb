"""What a rank reads of a checkpoint, saved by any number of ranks: pure interval arithmetic, no files, no torch.

Three rules cover every tensor:

1. What is one tensor for all ranks, whole on each or in parts, is found by offset: a rank reads its own elements, from
   whichever pieces hold them. So are moments, masters, and server errors (by their place in the flat buffer).
2. What is each rank's own is read as it is by as many ranks as saved it. On another number of ranks each reads the
   mean of all: the average over the ranks, by which the training goes on, stays as it was. So are worker errors, and
   what the ranks of 0/1 Adam hold of their own inside a local interval.
3. Errors that a single rank did not save are zero: it has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_compressopt.format.index import DTYPES, CheckpointIndex, Piece, TensorEntry


@dataclass(frozen=True)
class Wanted:
    """Elements [start, stop) of a flattened tensor, as a rank wants them.

    Attributes:
        name: The tensor's name.
        dtype: Its dtype, by torch's name.
        shape: Shape of the whole tensor.
        start: First element.
        stop: One past the last element.
        of_ranks: Where it is each rank's own: its name, with ``{rank}`` for the rank's number. Else "".
        is_error: Whether it is an error of error feedback.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    of_ranks: str = ""
    is_error: bool = False


@dataclass(frozen=True)
class Read:
    """Bytes [begin, end) of a piece of a tensor, which go to byte ``offset`` of what is wanted."""

    entry: TensorEntry
    piece: Piece
    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Plan:
    """How what is wanted is found: the mean of the sources; zeros where there is none.

    Attributes:
        sources: For each tensor to be averaged, usually one, the reads that fill all bytes once, in order.
        nbytes: Bytes of what is wanted.
    """

    sources: tuple[tuple[Read, ...], ...]
    nbytes: int

    def windows(self, size: int) -> Iterator[Plan]:
        """The same in consecutive windows of at most ``size`` bytes.

        They begin where the blocks of this size do in the pieces of the first source, so that each is read once.
        """
        for offset, begin, nbytes in self._runs():
            done = 0
            while done < nbytes:
                high = min(done + size - (begin + done) % size, nbytes)
                yield self._window(offset + done, offset + high)
                done = high

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Offset, place in its piece and bytes of each read of the first source; all at once where there is none."""
        if not self.sources:
            yield 0, 0, self.nbytes
        for read in self.sources[0] if self.sources else ():
            yield read.offset, read.begin, read.end - read.begin

    def _window(self, low: int, high: int) -> Plan:
        return Plan(tuple(tuple(_clip(reads, low, high)) for reads in self.sources), high - low)


def plan_reads(index: CheckpointIndex, wanted: Wanted, world_size: int) -> Plan:
    """Plan the reading of what one of ``world_size`` ranks wants, by the rules of the module.

    Args:
        index: The checkpoint's index, validated.
        wanted: What the rank wants.
        world_size: Ranks of the run that reads.

    Raises:
        ValueError: If the checkpoint does not have it in that dtype and shape; the message goes on where the name of
            the index file ends.
    """
    saved_ranks = len(index.shards)
    names = [wanted.name]
    if wanted.of_ranks and world_size != saved_ranks:
        names = [wanted.of_ranks.format(rank=rank) for rank in range(saved_ranks)]
    if wanted.is_error and saved_ranks == 1 and not any(name in index.tensors for name in names):
        names = []
    sources = [_reads(_fitting(index, name, wanted), wanted) for name in names]
    return Plan(tuple(sources), (wanted.stop - wanted.start) * DTYPES[wanted.dtype][1])


def _fitting(index: CheckpointIndex, name: str, wanted: Wanted) -> TensorEntry:
    entry = index.tensors.get(name)
    if entry is None:
        raise ValueError(f"has no tensor {name!r}")
    if entry.dtype != wanted.dtype or entry.shape != wanted.shape:
        raise ValueError(
            f"has {name!r} as {entry.dtype} {list(entry.shape)}, needed is {wanted.dtype} {list(wanted.shape)}"
        )
    if not 0 <= wanted.start <= wanted.stop <= entry.numel:
        raise ValueError(f"has {name!r} with {entry.numel} elements, needed are {wanted.start} to {wanted.stop}")
    return entry


def _reads(entry: TensorEntry, wanted: Wanted) -> tuple[Read, ...]:
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
