"""One flat buffer per param group, cut into buckets and chunks: pure interval arithmetic, no process group.

The flat side of a group is the concatenation of its parameters, those behind the others that travel in full precision.
It is cut, across tensor boundaries and whatever the world size is, into buckets of ``bucket_numel`` elements; what
travels in full has buckets of its own, of whole parameters. For the wire a bucket is cut again into ``world_size``
chunks of a multiple of 8 elements, so that a chunk's signs fill whole bytes; chunk j belongs to rank j. The padding
that this needs is virtual: no buffer holds it, so that it can count in no norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
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
        for index in self.in_order:
            begin = self.starts[index]
            first, last = max(begin, low), min(begin + self.numels[index], high)
            if first < last:
                yield Span(index, first - begin, last - begin, first)
