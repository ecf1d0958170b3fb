"""Buffers of several parameters, cut into buckets and chunks: pure interval arithmetic, no process group.

The flat side of a group is the concatenation of its parameters, those behind the others that travel in full precision.
It is cut, across tensor boundaries and whatever the world size is, into buckets of ``bucket_numel`` elements; what
travels in full has buckets of its own, of whole parameters. For the wire a bucket is cut again into ``world_size``
chunks of a multiple of 8 elements, so that a chunk's signs fill whole bytes; chunk j belongs to rank j. The padding
that this needs is virtual: no buffer holds it, so that it can count in no norm.

Who owns which elements of a bucket is a :class:`Partition`, of the two kinds that there are: :meth:`Bucket.partition`
for the chunks of compressed messages, which both stages of ``zero_stage`` keep their moments in, and :func:`slices_of`
for ZeroOptimizer, whose ordinary optimizers need aligned parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Any

#: Elements whose signs share a byte.
SIGNS_PER_BYTE = 8
#: Bytes of a float32 value, and of a MiB: sizes of buckets are given in MiB of float32 values.
FLOAT_BYTES = 4
BYTES_PER_MB = 2**20
#: The entry of a state dict that lists what this rank has of a parameter: see :meth:`Span.piece`.
PIECES = "pieces"


def chunk_numel(numel: int, world_size: int) -> int:
    """Elements of each chunk of a bucket of ``numel`` elements: a multiple of 8, padding included."""
    return -(-numel // (SIGNS_PER_BYTE * world_size)) * SIGNS_PER_BYTE


def chunk_range(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The real elements [start, stop) of a bucket that belong to ``rank``; empty if the bucket is too short."""
    chunk = chunk_numel(numel, world_size)
    return min(rank * chunk, numel), min((rank + 1) * chunk, numel)


#: MiB of float32 values in a bucket that nobody chose. On a GPU the launches of a bucket are what it costs.
DEFAULT_BUCKET_MB, DEFAULT_BUCKET_MB_ON_CUDA = 25.0, 100.0
#: MiB of gradients in a bucket of DistributedDataParallel, by default.
DDP_BUCKET_MB = 25.0


def bucket_numel_of(bucket_cap_mb: float | None, device_type: str = "cpu") -> int:
    """Elements of a bucket of ``bucket_cap_mb`` MiB of float32 values, one at least; of None, the device's default."""
    if bucket_cap_mb is None:
        bucket_cap_mb = DEFAULT_BUCKET_MB_ON_CUDA if device_type == "cuda" else DEFAULT_BUCKET_MB
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
        raise TypeError(f"bucket_cap_mb must be a number > 0, got {bucket_cap_mb!r}")
    numel = bucket_cap_mb * BYTES_PER_MB / FLOAT_BYTES
    if not 1 <= numel < inf:
        raise ValueError(f"bucket_cap_mb must be > 0, finite, and hold at least one float32 value, got {bucket_cap_mb}")
    return int(numel)


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of the flattened parameter number ``index``, at ``offset`` of a buffer."""

    index: int
    start: int
    stop: int
    offset: int

    @cached_property  # a step asks for it
    def numel(self) -> int:
        return self.stop - self.start

    def piece(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return these elements' values as state dicts have them."""
        return {"start": self.start, "stop": self.stop, **values}


def _within(spans: Iterable[Span], low: int, high: int, origin: int = 0) -> Iterator[Span]:
    """Yield what of spans lies in the elements [low, high) of their buffer, at offsets from ``origin``."""
    for span in spans:
        first, last = max(span.offset, low), min(span.offset + span.numel, high)
        if first < last:
            moved = span.start - span.offset
            yield Span(span.index, first + moved, last + moved, first - origin)


# -- who owns what ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Partition:
    """A bucket of which each rank owns a chunk of ``chunk_numel`` elements.

    ``chunks`` has for each rank the spans of parameters in its chunk, at their offsets in it; the rest is padding.
    ``order`` has the number of each rank's chunk where all of them are gathered, as the topology says.
    """

    chunk_numel: int
    chunks: tuple[tuple[Span, ...], ...]
    order: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """The elements of all chunks, with padding."""
        return self.chunk_numel * len(self.chunks)

    @cached_property
    def owned_numels(self) -> tuple[int, ...]:
        """The elements of each rank's chunk without the padding at its end."""
        return tuple(max((span.offset + span.numel for span in spans), default=0) for spans in self.chunks)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first element of each rank's chunk where all of them are gathered."""
        return tuple(number * self.chunk_numel for number in self.order)

    @cached_property
    def spans(self) -> dict[int, list[Span]]:
        """The spans of each parameter that has elements here, at offsets in all chunks, by rank."""
        return self.spans_in(range(len(self.chunks)))

    def spans_in(self, ranks: Iterable[int]) -> dict[int, list[Span]]:
        """Return the spans of each parameter in the chunks of some ranks, at offsets in these one after another."""
        found: dict[int, list[Span]] = {}
        for turn, rank in enumerate(ranks):
            for span in self.chunks[rank]:
                offset, of_parameter = turn * self.chunk_numel + span.offset, found.setdefault(span.index, [])
                last = of_parameter[-1] if of_parameter else None
                if last is not None and (last.stop, last.offset + last.numel) == (span.start, offset):
                    of_parameter[-1] = replace(last, stop=span.stop)
                else:
                    of_parameter.append(replace(span, offset=offset))
        return found

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The padding in all chunks, by rank, as ranges [start, stop)."""
        filled = sorted((span.offset, span.offset + span.numel) for spans in self.spans.values() for span in spans)
        ends = [0, *(stop for _, stop in filled)]
        begins = [*(start for start, _ in filled), self.numel]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]

    @cached_property
    def gathered(self) -> list[tuple[int, Span | None]]:
        """The elements of all chunks as they are gathered: so many of a span each, or of padding."""
        found: list[tuple[int, Span | None]] = []
        for rank in sorted(range(len(self.chunks)), key=self.order.__getitem__):
            end = 0
            for span in self.chunks[rank]:
                found += [(span.offset - end, None), (span.numel, span)]
                end = span.offset + span.numel
            found.append((self.chunk_numel - end, None))
        return [row for row in found if row[0]]

    @cached_property
    def stretches(self) -> list[tuple[int, int, int]]:
        """The elements here as parameters' numbers, starts and stops, whichever ranks' chunks they lie in."""
        found: list[tuple[int, int, int]] = []
        for index, spans in self.spans.items():
            for span in spans:
                if found and found[-1][0] == index and found[-1][2] == span.start:
                    found[-1] = (index, found[-1][1], span.stop)
                else:
                    found.append((index, span.start, span.stop))
        return found


def slices_of(numels: Sequence[tuple[int, int]], length: int, align: int, order: Sequence[int]) -> list[Partition]:
    """Cut parameters, (number, elements) in their order, into slices of ``length`` elements, across parameters.

    Each parameter begins at a multiple of ``align`` elements, so that every cut is one: a multiple of ``align`` times
    the ranks is ``length``. The last slice is as short as it can be.
    """
    ranks = len(order)
    total = sum(round_up(numel, align) for _, numel in numels)
    sizes = [min(length, round_up(total - low, align * ranks)) // ranks for low in range(0, total, length)]
    spans: list[list[list[Span]]] = [[[] for _ in order] for _ in sizes]
    position = 0  # of the parameter
    for index, numel in numels:
        start = 0
        while start < numel:
            number, inside = divmod(position + start, length)
            rank, offset = divmod(inside, sizes[number])
            stop = min(numel, start + sizes[number] - offset)
            spans[number][rank].append(Span(index, start, stop, offset))
            start = stop
        position += round_up(numel, align)
    return [Partition(size, tuple(map(tuple, parts)), tuple(order)) for size, parts in zip(sizes, spans, strict=True)]


def joined(cuts: Sequence[Partition]) -> Partition:
    """Return partitions as one: each chunk is the rank's chunks of all of them, one after another."""
    start = 0
    chunks: list[tuple[Span, ...]] = [()] * len(cuts[0].chunks)
    for cut in cuts:
        for rank, spans in enumerate(cut.chunks):
            chunks[rank] += tuple(replace(span, offset=span.offset + start) for span in spans)
        start += cut.chunk_numel
    return Partition(start, tuple(chunks), cuts[0].order)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# -- the flat buffer of a param group ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a group's flat buffer, sent together; ``numel`` of them, without padding."""

    start: int
    stop: int
    pieces: tuple[Span, ...]
    in_full: bool = False  # in full precision, beside messages

    @cached_property  # a step asks for it
    def numel(self) -> int:
        return self.stop - self.start

    def spans(self, low: int, high: int) -> tuple[Span, ...]:
        """Return the spans of parameters in the elements [low, high) of the bucket, at their offsets from ``low``."""
        first = self.start + low
        return tuple(_within(self.pieces, first, self.start + high, first))

    def partition(self, order: Sequence[int]) -> Partition:
        """Return who owns what: the rank that serves a chunk, of messages of so many ranks, owns its elements."""
        ranges = [chunk_range(self.numel, len(order), chunk) for chunk in order]
        return Partition(chunk_numel(self.numel, len(order)), tuple(self.spans(*each) for each in ranges), tuple(order))


@dataclass(frozen=True)
class FlatLayout:
    """The places of a group's parameters in its flat buffer (``starts``), and the buckets of that buffer."""

    numels: tuple[int, ...]
    bucket_numel: int
    starts: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    numel: int

    @cached_property
    def whole(self) -> Bucket:
        """All elements as one bucket, with each parameter that has elements in one piece."""
        return Bucket(0, self.numel, tuple(self._pieces(0, self.numel)))

    @cached_property
    def in_messages(self) -> FlatLayout:
        """The part of the layout that travels in compressed messages: all of it but the buckets ``in_full``."""
        buckets = tuple(bucket for bucket in self.buckets if not bucket.in_full)
        return replace(self, buckets=buckets, numel=buckets[-1].stop if buckets else 0)

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """The parameters in the order in which they lie in the buffer."""
        return tuple(sorted(range(len(self.numels)), key=lambda index: (self.starts[index], index)))

    @cached_property
    def _parameters(self) -> tuple[Span, ...]:
        """The parameters in the order in which they lie in the buffer, whole."""
        return tuple(Span(index, 0, self.numels[index], self.starts[index]) for index in self.in_order)

    @classmethod
    def build(cls, numels: Sequence[int], bucket_numel: int, in_full: Sequence[bool] = ()) -> FlatLayout:
        """Lay out parameters of the given sizes; those ``in_full`` lie behind the others."""
        if bucket_numel < 1:
            raise ValueError(f"bucket_numel must be >= 1, got {bucket_numel}")
        flags = list(in_full) or [False] * len(numels)
        order = sorted(range(len(numels)), key=lambda index: flags[index])
        found = accumulate((numels[index] for index in order), initial=0)
        starts = [start for _, start in sorted(zip(order, found, strict=False))]
        total = sum(numels)
        split = total - sum(numel for numel, flag in zip(numels, flags, strict=True) if flag)
        cuts = [*range(0, split, bucket_numel), split]
        layout = cls(tuple(numels), bucket_numel, tuple(starts), (), total)
        buckets = [layout._bucket(start, stop) for start, stop in pairwise(cuts)]
        first = split
        for index in order:
            end = starts[index] + numels[index]
            if flags[index] and end > first + bucket_numel and starts[index] > first:  # of whole parameters
                buckets.append(layout._bucket(first, starts[index], in_full=True))
                first = starts[index]
        if first < total:
            buckets.append(layout._bucket(first, total, in_full=True))
        return replace(layout, buckets=tuple(buckets))

    def _bucket(self, start: int, stop: int, *, in_full: bool = False) -> Bucket:
        return Bucket(start, stop, tuple(self._pieces(start, stop)), in_full)

    def _pieces(self, low: int, high: int) -> Iterator[Span]:
        """Yield the parts of the parameters that lie in the elements [low, high), in their order."""
        return _within(self._parameters, low, high)
