"""Operands of the kernels: what a rank sends, the average that comes back, and the steps that take it.

The dataclasses are not frozen: a step makes hundreds, in half of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from hf_compressopt.kernels.compact import Variance
from hf_compressopt.kernels.messages import IntegerCode, SignCode


@lru_cache
def _sign_code(scale_block: int | None) -> SignCode:  # a function: torch.compile follows no cache of a class
    return SignCode(scale_block)


@lru_cache
def _integer_code(bits: int) -> IntegerCode:
    return IntegerCode(bits)


@dataclass(slots=True)
class Segment:
    """Consecutive elements of one tensor. The segments of a bucket, in order, cover it without gaps."""

    #: The whole tensor, contiguous (float32, bfloat16 or float16). None: no gradient, or a parameter that stays.
    tensor: Tensor | None
    start: int  # within the flattened tensor
    numel: int
    index: int  # the tensor's entry in per-tensor arrays (factors, corrections, rates, sums)
    still: bool = False  # the tensor stands still because it has no variance: its average counts as 0

    @property
    def part(self) -> Tensor:
        """The elements, [numel]; they share memory with the tensor, which must not be None."""
        assert self.tensor is not None
        return self.tensor.detach().view(-1)[self.start : self.start + self.numel]


@dataclass(slots=True)
class Average:
    """The average of a bucket over the ranks: as messages, or as ``values``, [numel] float32.

    The message of chunk j of ``world_size`` begins at byte ``j * stride`` of ``messages``; ``scale_block`` is a
    positive multiple of 8, or None.
    """

    numel: int
    values: Tensor | None = None
    messages: Tensor | None = None
    world_size: int = 1
    scale_block: int | None = None
    stride: int = 0

    @property
    def code(self) -> SignCode:
        return _sign_code(self.scale_block)

    @classmethod
    def of(cls, values: Tensor) -> Average:
        """Return the average whose values are known, [n] float32."""
        return cls(values.numel(), values)


@dataclass(slots=True)
class IntegerAverage:
    """The average of a bucket over the ranks, as messages of b-bit integers.

    The message of chunk j of ``world_size`` begins at byte ``j * stride``; the stride is a multiple of 16.
    """

    numel: int
    messages: Tensor
    world_size: int
    bits: int
    stride: int

    @property
    def code(self) -> IntegerCode:
        return _integer_code(self.bits)


#: The average of a bucket, in the messages of a format.
AnyAverage = TypeVar("AnyAverage", Average, IntegerAverage)


@dataclass(slots=True)
class Combination:
    """The values of a bucket that a rank sends: z = (alpha x + beta g) * factor, each operation in float32."""

    numel: int
    device: torch.device
    x: Tensor | None = None  # [numel] float32; None leaves the term out unless there is ``last``
    alpha: float = 1.0
    grads: Sequence[Segment] | None = None  # None leaves the term out, as does a segment without a tensor
    beta: float = 1.0
    factors: Tensor | None = None  # [tensors] float32
    #: If x is None: an average in messages, whose values are x; x counts as 0 where a segment stands still.
    last: Average | None = None

    @classmethod
    def of(cls, x: Tensor) -> Combination:
        """Return the combination whose values are x, [n] float32."""
        return cls(x.numel(), x.device, x)


@dataclass(slots=True)
class Descent:
    """The step along a direction d: p <- p * decay - lr * bounded(d), where ``decay`` is 1 - lr * weight_decay.

    With a decay of exactly 1.0 p is not multiplied. Elements of d are cut to +-``bound``; infinity changes nothing, and
    NaN stays. ``eps_inside_sqrt`` is sqrt(v + eps) instead of sqrt(v) + eps.
    """

    lr: float
    decay: float
    eps: float
    eps_inside_sqrt: bool
    bound: float = math.inf


@dataclass(slots=True)
class LambOptions:
    """The hyperparameters of one param group that 1-bit LAMB's kernels take."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    eps_inside_sqrt: bool


@dataclass(slots=True)
class AdamUpdate:
    """Operands of :func:`~hf_compressopt.kernels.reference.apply_adam_`.

    y, n elements, may have ``exp_avg`` itself as its values. m, [n] float32, is written, or None if ``beta`` is 1 and
    nobody needs it beyond y; v is read. Segments without a tensor move no parameter. ``corrections``, [tensors, 2]
    float32, divide m and v: infinity as the first one stands for a direction of 0, None for m and v as they are.
    """

    y: Average
    exp_avg: Tensor | None
    exp_avg_sq: Variance
    params: Sequence[Segment]
    descent: Descent
    beta: float = 1.0
    corrections: Tensor | None = None


@dataclass(slots=True)
class LocalUpdate:
    """Operands of :func:`~hf_compressopt.kernels.reference.local_step_`.

    m and u, [n] float32, are updated in place, v is read. Without ``grads`` m stays as it is.
    """

    exp_avg: Tensor
    exp_avg_sq: Variance
    local_update: Tensor
    grads: Sequence[Segment] | None
    params: Sequence[Segment]
    beta1: float
    descent: Descent


@dataclass(slots=True)
class ParameterSync:
    """Operands of :func:`~hf_compressopt.kernels.reference.sync_parameters_`.

    y may have ``local_update`` itself as its values. m is written, the anchor (the parameters at the last sync) updated
    in place, and u set to 0; all [n] float32. Segments without a tensor change neither anchor nor parameter. ``lr_sum``
    is the sum of the learning rates of the interval, not 0; ``descent.decay`` the product over the interval, its
    ``bound`` that of y / denominator(v), and its ``lr`` is not used.
    """

    y: Average
    exp_avg: Tensor
    anchor: Tensor
    exp_avg_sq: Variance
    local_update: Tensor
    params: Sequence[Segment]
    lr_sum: float
    descent: Descent


@dataclass(slots=True)
class LambMoments:
    """Operands of :func:`~hf_compressopt.kernels.reference.lamb_moments_`.

    m and the fresh v, [n] float32, are updated in place, the frozen v is read. A segment without a tensor counts as
    p = 0. ``factors`` are [tensors] float32; ``sums``, [tensors, 3] float64, are 0 before a tensor's first segment.
    """

    y: Average
    exp_avg: Tensor
    exp_avg_sq_fresh: Tensor
    exp_avg_sq: Variance
    params: Sequence[Segment]
    factors: Tensor
    sums: Tensor
    options: LambOptions
