"""The noise in the ranks' gradients, measured while they are clipped.

A rank's gradient g_r is the true gradient G and noise: E ||g_r||^2 = |G|^2 + S, where S is the trace of the noise's
covariance. The mean g of W of them has E ||g||^2 = |G|^2 + S / W. With A, the mean over ranks of ||g_r||^2,
    common = (||g||^2 - A / W) / (A - A / W)                                      (1)
estimates |G|^2 / (|G|^2 + S), the share of A that the ranks have in common, whatever W is. From its moving average:
    S / |G|^2 = (1 - common) / common                                             (2)
    ||g||^2 / A = common + (1 - common) / W                                       (3)
(2) is the simple noise scale of McCandlish et al. 2018, arXiv 1812.06162, in units of the batch of one rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Name of the tensor that holds the moving average.
NOISE = "gradient_noise"
#: Share of the moving average that stays at each measurement.
MEMORY = 0.95


class GradientNoise:
    """The moving average of (1), alike on all ranks, and what follows from it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """Keep the average in a dict: [2] float64, the weighted sum of the measurements and the sum of the weights."""
        self._tensors = tensors

    def add(self, common: float) -> None:
        """Take up a measurement of (1), alike on all ranks; NaN and infinity are none."""
        if math.isfinite(common):
            state = self._tensors.setdefault(NOISE, torch.zeros(2, dtype=torch.float64, device="cpu"))
            state.mul_(MEMORY).add_(torch.tensor([common, 1.0], dtype=torch.float64, device="cpu"), alpha=1 - MEMORY)

    @property
    def common(self) -> float | None:
        """The moving average of (1), or None before the first measurement."""
        total, weight = self._tensors[NOISE].tolist() if NOISE in self._tensors else (0.0, 0.0)
        return total / weight if weight > 0 else None

    @property
    def scale(self) -> float | None:
        """The noise scale (2), >= 0. None before the first measurement, or if noise hides the true gradient."""
        common = self.common
        return max(0.0, (1 - common) / common) if common is not None and common > 0 else None

    def square_ratio(self, share: float) -> float:
        """Return (3) for 1 / W = ``share``, in [share, 1]; 1 before the first measurement."""
        common = min(1.0, max(0.0, 1.0 if self.common is None else self.common))
        return common + (1 - common) * share


def check_noise(tensor: Tensor) -> None:
    """Check the moving average of a checkpoint.

    Raises:
        ValueError: If no run could have saved it.
    """
    if tensor.dtype != torch.float64 or tensor.shape != (2,):
        raise ValueError(f"{NOISE!r} must be float64 [2], got {tensor.dtype} {list(tensor.shape)}")
