"""What the kernels work on: runs of the user's tensors, what a rank wants to send, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of one tensor. The segments of a bucket, in order, cover it without gaps.

    Attributes:
        tensor: The whole tensor, contiguous (float32, bfloat16 or float16); None where there is no gradient, or where
            the parameter is to be left alone.
        start: First element, within the flattened tensor.
        numel: Elements.
        index: The tensor's entry in per-tensor arrays (factors, corrections, rates, sums).
        still: Whether the tensor has no variance: what comes back for it counts as 0.
    """

    tensor: Tensor | None
    start: int
    numel: int
    index: int
    still: bool = False

    @property
    def part(self) -> Tensor:
        """The elements, [numel], sharing memory with the tensor, which must not be None."""
        assert self.tensor is not None
        return self.tensor.detach().view(-1)[self.start : self.start + self.numel]


@dataclass(frozen=True)
class Combination:
    """What a rank wants to send of a bucket: z = (alpha x + beta g) * factor, each operation rounded to float32.

    Attributes:
        numel: Elements of the bucket.
        device: Where it lies.
        x: [numel] float32, or None: the term is left out.
        alpha: Its coefficient.
        grads: Segments that cover the bucket, or None: the term is left out, as for a segment without a tensor.
        beta: Their coefficient.
        factors: [tensors] float32, one factor per tensor, or None.
    """

    numel: int
    device: torch.device
    x: Tensor | None = None
    alpha: float = 1.0
    grads: Sequence[Segment] | None = None
    beta: float = 1.0
    factors: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> Combination:
        """The values of x, [n] float32, themselves."""
        return cls(x.numel(), x.device, x)


@dataclass(frozen=True)
class Average:
    """The average of a bucket over the ranks: as messages, or as the values themselves.

    Attributes:
        numel: Elements of the bucket.
        values: [numel] float32, or None.
        messages: [world_size * stride] uint8, the message of chunk j begins at ``j * stride``; None where values are
            given.
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
        """Values, [n] float32, that are known."""
        return cls(values.numel(), values)


@dataclass(frozen=True)
class Descent:
    """How a parameter follows a direction d: p <- p * decay - lr * d.

    Attributes:
        lr: Learning rate.
        decay: 1 - lr * weight_decay; with exactly 1.0 p is not multiplied.
        eps: Added to the denominator.
        eps_inside_sqrt: sqrt(v + eps) instead of sqrt(v) + eps.
    """

    lr: float
    decay: float
    eps: float
    eps_inside_sqrt: bool


@dataclass(frozen=True)
class LambOptions:
    """The hyperparameters of one param group that 1-bit LAMB's kernels take."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    eps_inside_sqrt: bool


@dataclass(frozen=True)
class AdamUpdate:
    """Operands of :meth:`Kernels.apply_adam_`.

    Attributes:
        y: n elements, read. Its values may be ``exp_avg`` itself.
        exp_avg: [n] float32, m, written.
        exp_avg_sq: [n] float32, v, read.
        params: Segments that cover the bucket. Segments without a tensor move no parameter; m is written for them.
        descent: The rate and the denominator of the step.
        beta: 1.0, or the rate of the momentum.
        corrections: [tensors, 2] float32. m^ and v^ are m and v divided by a tensor's two corrections; infinity as the
            first one stands for a direction of 0. None: m^ and v^ are m and v.
    """

    y: Average
    exp_avg: Tensor
    exp_avg_sq: Tensor
    params: Sequence[Segment]
    descent: Descent
    beta: float = 1.0
    corrections: Tensor | None = None


@dataclass(frozen=True)
class LocalUpdate:
    """Operands of :meth:`Kernels.local_step_`.

    Attributes:
        exp_avg: [n] float32, m, updated in place.
        exp_avg_sq: [n] float32, v, read.
        local_update: [n] float32, u, updated in place.
        grads: Segments that cover the bucket, read. None leaves m as it is.
        params: Segments that cover the bucket. Segments without a tensor move no parameter.
        beta1: Coefficient of the momentum.
        descent: The rate and the denominator of the step.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    local_update: Tensor
    grads: Sequence[Segment] | None
    params: Sequence[Segment]
    beta1: float
    descent: Descent


@dataclass(frozen=True)
class ParameterSync:
    """Operands of :meth:`Kernels.sync_parameters_`.

    Attributes:
        y: n elements, read. Its values may be ``local_update`` itself.
        exp_avg: [n] float32, m, written.
        anchor: [n] float32, the parameters at the last sync, updated in place.
        exp_avg_sq: [n] float32, v, read.
        local_update: [n] float32, u, set to 0.
        params: Segments that cover the bucket. Segments without a tensor change neither anchor nor parameter.
        lr_sum: Sum of the learning rates of the interval, not 0.
        descent: ``decay`` is the product over the interval; ``lr`` is not used.
    """

    y: Average
    exp_avg: Tensor
    anchor: Tensor
    exp_avg_sq: Tensor
    local_update: Tensor
    params: Sequence[Segment]
    lr_sum: float
    descent: Descent


@dataclass(frozen=True)
class LambMoments:
    """Operands of :meth:`Kernels.lamb_moments_`.

    Attributes:
        y: n elements, read.
        exp_avg: [n] float32, m, updated in place.
        exp_avg_sq_fresh: [n] float32, updated in place.
        exp_avg_sq: [n] float32, the frozen v, read.
        params: Segments that cover the bucket, read. A segment without a tensor counts as p = 0.
        factors: [tensors] float32, read.
        sums: [tensors, 3] float64, updated in place; 0 before a tensor's first segment.
        options: Hyperparameters.
    """

    y: Average
    exp_avg: Tensor
    exp_avg_sq_fresh: Tensor
    exp_avg_sq: Tensor
    params: Sequence[Segment]
    factors: Tensor
    sums: Tensor
    options: LambOptions
