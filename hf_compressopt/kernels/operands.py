"""Operands of the kernels: runs of tensors, the values that a rank sends, and the average that comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_range


@dataclass(slots=True)  # not frozen: a step makes hundreds, in half of the time
class Segment:
    """Consecutive elements of one tensor. The segments of a bucket, in order, cover it without gaps.

    Attributes:
        tensor: The whole tensor, contiguous (float32, bfloat16 or float16). None if there is no gradient, or if the
            parameter must not change.
        start: First element, within the flattened tensor.
        numel: Elements.
        index: The tensor's entry in per-tensor arrays (factors, corrections, rates, sums).
        still: Whether the tensor stands still because it has no variance: its average counts as 0.
    """

    tensor: Tensor | None
    start: int
    numel: int
    index: int
    still: bool = False

    @property
    def part(self) -> Tensor:
        """The elements, [numel]; they share memory with the tensor, which must not be None."""
        assert self.tensor is not None
        return self.tensor.detach().view(-1)[self.start : self.start + self.numel]


def cut_segments(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """Return the segments of the elements [start, stop) of a bucket."""
    found, begin = [], 0
    for segment in segments:
        first, last = max(start - begin, 0), min(stop - begin, segment.numel)
        if first < last:
            found.append(replace(segment, start=segment.start + first, numel=last - first))
        begin += segment.numel
    return found


@dataclass(frozen=True)
class Average:
    """The average of a bucket over the ranks: as messages, or as the values themselves.

    Attributes:
        numel: Elements of the bucket.
        values: [numel] float32, or None.
        messages: [world_size * stride] uint8, the message of chunk j begins at ``j * stride``; None if there are
            values.
        world_size: Number of chunks.
        scale_block: Elements per scale, a positive multiple of 8, or None.
        stride: Bytes from one message to the next.
    """

    numel: int
    values: Tensor | None = None
    messages: Tensor | None = None
    world_size: int = 1
    scale_block: int | None = None
    stride: int = 0

    @classmethod
    def of(cls, values: Tensor) -> Average:
        """Return the average whose values are known, [n] float32."""
        return cls(values.numel(), values)

    def chunk(self, number: int) -> Average:
        """Return the average of a chunk.

        Raises:
            ValueError: If the average is not in messages.
        """
        if self.messages is None:
            raise ValueError("a chunk of an average needs messages, got values")
        start, stop = chunk_range(self.numel, self.world_size, number)
        message = self.messages[number * self.stride :][: self.stride]
        return replace(self, numel=stop - start, messages=message, world_size=1)


@dataclass(frozen=True)
class Combination:
    """The values of a bucket that a rank sends: z = (alpha x + beta g) * factor + rest, each operation in float32.

    Attributes:
        numel: Elements of the bucket.
        device: Device of the bucket.
        x: [numel] float32, or None to leave the term out unless there is ``last``.
        alpha: Coefficient of x.
        grads: Segments that cover the bucket, or None to leave the term out, as for a segment without a tensor.
        beta: Coefficient of the gradients.
        factors: [tensors] float32, one factor per tensor, or None.
        last: If x is None: an average in messages, whose values are x; x counts as 0 where a segment stands still.
        rest: [numel] float32, or None. On the CPU only.
    """

    numel: int
    device: torch.device
    x: Tensor | None = None
    alpha: float = 1.0
    grads: Sequence[Segment] | None = None
    beta: float = 1.0
    factors: Tensor | None = None
    last: Average | None = None
    rest: Tensor | None = None

    def chunk(self, number: int, world_size: int) -> Combination:
        """Return the values of a chunk, of ``world_size``: as many as ``last`` has, if there is one."""
        start, stop = chunk_range(self.numel, world_size, number)
        return replace(
            self,
            numel=stop - start,
            x=None if self.x is None else self.x[start:stop],
            grads=None if self.grads is None else cut_segments(self.grads, start, stop),
            last=None if self.last is None else self.last.chunk(number),
            rest=None if self.rest is None else self.rest[start:stop],
        )

    @classmethod
    def of(cls, x: Tensor) -> Combination:
        """Return the combination whose values are x, [n] float32."""
        return cls(x.numel(), x.device, x)
