"""Operands of the kernels that take an optimizer's step on a bucket of n elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_compressopt.kernels.operands import Average, Segment
from hf_compressopt.kernels.variance import Variance


@dataclass(frozen=True)
class Descent:
    """The rate, the denominator and the bound of a step along a direction d: p <- p * decay - lr * bounded(d).

    Attributes:
        lr: Learning rate.
        decay: 1 - lr * weight_decay; with exactly 1.0 p is not multiplied.
        eps: Added to the denominator.
        eps_inside_sqrt: sqrt(v + eps) instead of sqrt(v) + eps.
        bound: Largest size of an element of d, > 0; larger ones are cut to it. Infinity changes nothing; NaN stays.
    """

    lr: float
    decay: float
    eps: float
    eps_inside_sqrt: bool
    bound: float = math.inf


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
        exp_avg: [n] float32, m, written; None if ``beta`` is 1 and nobody needs m beyond y.
        exp_avg_sq: n elements, v, read.
        params: Segments that cover the bucket. Segments without a tensor move no parameter; m is written for them.
        descent: The rate and the denominator of the step.
        beta: 1.0, or the rate of the momentum.
        corrections: [tensors, 2] float32. m^ and v^ are m and v divided by a tensor's two corrections; infinity as the
            first one stands for a direction of 0. None: m^ and v^ are m and v.
    """

    y: Average
    exp_avg: Tensor | None
    exp_avg_sq: Variance
    params: Sequence[Segment]
    descent: Descent
    beta: float = 1.0
    corrections: Tensor | None = None


@dataclass(frozen=True)
class LocalUpdate:
    """Operands of :meth:`Kernels.local_step_`.

    Attributes:
        exp_avg: [n] float32, m, updated in place.
        exp_avg_sq: n elements, v, read.
        local_update: [n] float32, u, updated in place.
        grads: Segments that cover the bucket, read. None leaves m as it is.
        params: Segments that cover the bucket. Segments without a tensor move no parameter.
        beta1: Coefficient of the momentum.
        descent: The rate and the denominator of the step.
    """

    exp_avg: Tensor
    exp_avg_sq: Variance
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
        exp_avg_sq: n elements, v, read.
        local_update: [n] float32, u, set to 0.
        params: Segments that cover the bucket. Segments without a tensor change neither anchor nor parameter.
        lr_sum: Sum of the learning rates of the interval, not 0.
        descent: ``decay`` is the product over the interval, ``bound`` that of y / denominator(v); ``lr`` is not used.
    """

    y: Average
    exp_avg: Tensor
    anchor: Tensor
    exp_avg_sq: Variance
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
        exp_avg_sq: n elements, the frozen v, read.
        params: Segments that cover the bucket, read. A segment without a tensor counts as p = 0.
        factors: [tensors] float32, read.
        sums: [tensors, 3] float64, updated in place; 0 before a tensor's first segment.
        options: Hyperparameters.
    """

    y: Average
    exp_avg: Tensor
    exp_avg_sq_fresh: Tensor
    exp_avg_sq: Variance
    params: Sequence[Segment]
    factors: Tensor
    sums: Tensor
    options: LambOptions
