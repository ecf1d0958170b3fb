"""One flat buffer per param group, cut into buckets and chunks: pure interval arithmetic, no process group.

The flat side of a group is the concatenation of its parameters. It is cut, across tensor boundaries and whatever the
world size is, into buckets of ``bucket_numel`` elements. For the wire a bucket is cut again into ``world_size`` chunks
of a multiple of 8 elements, so that a chunk's signs fill whole bytes; chunk j belongs to rank j. The padding that this
needs is virtual: no buffer holds it, so that it can count in no norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

#: Elements whose signs share a byte.
SIGNS_PER_BYTE = 8
#: Bytes of a float32 value, and of a MiB: sizes of buckets are given in MiB of float32 values.
FLOAT_BYTES = 4
BYTES_PER_MB = 2**20


def chunk_numel(numel: int, world_size: int) -> int:
    """Elements of each chunk of a bucket of ``numel`` elements: a multiple of 8, padding included."""
    return -(-numel // (SIGNS_PER_BYTE * world_size)) * SIGNS_PER_BYTE


def chunk_range(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The real elements [start, stop) of a bucket that belong to ``rank``; empty if the bucket is too short."""
    chunk = chunk_numel(numel, world_size)
    return min(rank * chunk, numel), min((rank + 1) * chunk, numel)


def bucket_numel_of(bucket_cap_mb: float) -> int:
    """Elements of a bucket of ``bucket_cap_mb`` MiB of float32 values, one at least."""
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


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a group's flat buffer, sent together; ``numel`` of them, without padding."""

    start: int
    stop: int
    pieces: tuple[Span, ...]

    @cached_property  # a step asks for it
    def numel(self) -> int:
        return self.stop - self.start


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
        rows = zip(self.numels, self.starts, strict=True)
        return Bucket(0, self.numel, tuple(Span(i, 0, numel, start) for i, (numel, start) in enumerate(rows) if numel))

    @classmethod
    def build(cls, numels: Sequence[int], bucket_numel: int) -> FlatLayout:
        """Lay out parameters of the given sizes."""
        if bucket_numel < 1:
            raise ValueError(f"bucket_numel must be >= 1, got {bucket_numel}")
        starts = tuple(accumulate(numels, initial=0))
        total = starts[-1]
        buckets = tuple(
            Bucket(start, min(start + bucket_numel, total), tuple(_pieces(numels, starts, start, start + bucket_numel)))
            for start in range(0, total, bucket_numel)
        )
        return cls(tuple(numels), bucket_numel, starts[:-1], buckets, total)


def _pieces(numels: Sequence[int], starts: Sequence[int], low: int, high: int) -> Iterator[Span]:
    for index, (begin, numel) in enumerate(zip(starts, numels, strict=False)):
        first, last = max(begin, low), min(begin + numel, high)
        if first < last:
            yield Span(index, first - begin, last - begin, first)
