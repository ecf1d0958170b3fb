"""The owner of each element: pure interval arithmetic, no tensors, no process group.

Parameters that travel together are laid out one after another, each starting at a multiple of ``ALIGN`` elements, and
cut into slices of equal length, across tensor boundaries. A slice is one message. It is cut again into ``world_size``
parts, and part r belongs to rank r. Every cut is a multiple of ``ALIGN`` elements away from the start of its parameter,
so that a vector unit treats each element as it would in the whole tensor: an element-wise optimizer computes the same
bits on the parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_compressopt.flat import Span

#: Elements; a multiple of every vector unit's width and of torch's unrolled loops, in float32 and in 16 bits.
ALIGN = 64
#: Slices of a bucket, under way at the same time: one big gloo all-to-all leaves half of the link unused.
SLICES_PER_BUCKET = 8
#: Elements below which a slice is not made shorter for that reason.
SHORTEST_SLICE = 1 << 16


@dataclass(frozen=True)
class Slice:
    """One message: for each rank a part of ``part_numel`` elements, padding included, and the spans in it.

    The offset of a span is its place in its part.
    """

    part_numel: int
    parts: tuple[tuple[Span, ...], ...]

    @cached_property
    def places(self) -> dict[int, list[tuple[int, Span]]]:
        """The spans of each parameter that has elements here, with their places in the whole slice."""
        return self.places_in(range(len(self.parts)))

    def places_in(self, ranks: Sequence[int]) -> dict[int, list[tuple[int, Span]]]:
        """Return the spans of each parameter in the parts of some ranks, with their places in these parts together."""
        found: dict[int, list[tuple[int, Span]]] = {}
        for turn, rank in enumerate(ranks):
            for span in self.parts[rank]:
                found.setdefault(span.index, []).append((turn * self.part_numel + span.offset, span))
        return found

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The padding of the whole slice, as ranges [start, stop)."""
        filled = sorted((begin, begin + span.numel) for rows in self.places.values() for begin, span in rows)
        ends = [0, *(stop for _, stop in filled)]
        begins = [*(start for start, _ in filled), self.numel]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]

    @property
    def numel(self) -> int:
        """Elements of the whole message, padding included."""
        return self.part_numel * len(self.parts)


def slice_numel(bucket_numel: int, world_size: int) -> int:
    """Return the length of the slices of a bucket, in elements: a multiple of ``ALIGN * world_size``."""
    wanted = max(-(-bucket_numel // SLICES_PER_BUCKET), min(bucket_numel, SHORTEST_SLICE))
    return _round_up(wanted, ALIGN * world_size)


def partition(numels: Sequence[tuple[int, int]], length: int, world_size: int, *, rotate: bool = False) -> list[Slice]:
    """Cut parameters into slices, and each slice into parts for the ranks.

    Args:
        numels: Number and elements of each parameter, in the order in which they travel; 0 elements are legal.
        length: Elements of every slice but the last, a multiple of ``ALIGN * world_size``.
        world_size: Ranks that share a slice.
        rotate: Give the first part of slice i to rank i, modulo the number of ranks, instead of rank 0.
    """
    begins, position = [], 0
    for _, numel in numels:
        begins.append(position)
        position += _round_up(numel, ALIGN)
    slices = []
    for number, low in enumerate(range(0, position, length)):
        part = min(length, _round_up(position - low, ALIGN * world_size)) // world_size
        parts = [
            tuple(_spans(numels, begins, low + turn * part, low + (turn + 1) * part)) for turn in range(world_size)
        ]
        first = number % world_size if rotate else 0
        slices.append(Slice(part, tuple(parts[(rank - first) % world_size] for rank in range(world_size))))
    return slices


def _spans(numels: Sequence[tuple[int, int]], begins: Sequence[int], low: int, high: int) -> Iterator[Span]:
    index = max(bisect_right(begins, low) - 1, 0)
    while index < len(begins) and begins[index] < high:
        (param, numel), begin = numels[index], begins[index]
        first, last = max(begin, low), min(begin + numel, high)
        if first < last:
            yield Span(param, first - begin, last - begin, first - low)
        index += 1


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
