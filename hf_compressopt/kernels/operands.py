"""Operands of the kernels: runs of tensors, the values that a rank sends, and the average that comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Combination:
    """The values of a bucket that a rank sends: z = (alpha x + beta g) * factor, each operation rounded to float32.

    Attributes:
        numel: Elements of the bucket.
        device: Device of the bucket.
        x: [numel] float32, or None to leave the term out unless there is ``last``.
        alpha: Coefficient of x.
        grads: Segments that cover the bucket, or None to leave the term out, as for a segment without a tensor.
        beta: Coefficient of the gradients.
        factors: [tensors] float32, one factor per tensor, or None.
        last: If x is None: an average in messages, whose values are x; x counts as 0 where a segment stands still.
    """

    numel: int
    device: torch.device
    x: Tensor | None = None
    alpha: float = 1.0
    grads: Sequence[Segment] | None = None
    beta: float = 1.0
    factors: Tensor | None = None
    last: Average | None = None

    @classmethod
    def of(cls, x: Tensor) -> Combination:
        """Return the combination whose values are x, [n] float32."""
        return cls(x.numel(), x.device, x)
