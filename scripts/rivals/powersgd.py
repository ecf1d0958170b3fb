"""PowerSGD (Vogels et al. 2019, arXiv 1905.09727, Algorithm 1 and 2): gradients of low rank, with error feedback.

For each matrix M (n x m) of a gradient plus what its message missed before, and Q (m x r) of the step before:
    P <- mean_r M Q;  P <- orthonormal(P);  Q <- mean_r M^T P;  g <- P Q^T;  error <- M - g
Vectors travel as they are. As in torch's hook, the first steps send gradients in full precision.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from rivals.rival import Rival, joined, write


class PowerSGD(Rival):
    """The gradients' mean, of rank ``rank``."""

    def __init__(self, params: Iterable[Tensor], communicator: Communicator, *, rank: int = 1, start: int = 10) -> None:
        """Begin with errors of 0 and random factors, alike on all ranks."""
        super().__init__(params, communicator)
        self._start, self._step = start, 0
        generator = torch.Generator().manual_seed(0)
        self._matrices = [param for param in self.params if param.ndim > 1]
        self._vectors = [param for param in self.params if param.ndim <= 1]
        views = [param.detach().reshape(param.shape[0], -1) for param in self._matrices]
        self._factors = [torch.randn(view.shape[1], min(rank, *view.shape), generator=generator) for view in views]
        self._errors = [torch.zeros_like(view) for view in views]

    @torch.no_grad()
    def gradients(self) -> None:
        """Exchange the gradients, in place."""
        self._step += 1
        if self._step <= self._start:
            grads = gradients_of(self.params)
            write(self.mean_(joined(grads)), grads)
            return
        grads, vectors = gradients_of(self._matrices), gradients_of(self._vectors)
        inputs = [grad.reshape(error.shape) + error for grad, error in zip(grads, self._errors, strict=True)]
        left = [value @ factor for value, factor in zip(inputs, self._factors, strict=True)]
        first = [*left, *vectors]
        write(self.mean_(joined(first)), first)
        left = [torch.linalg.qr(value).Q for value in left]
        right = [value.T @ basis for value, basis in zip(inputs, left, strict=True)]
        write(self.mean_(joined(right)), right)
        for grad, value, basis, factor, error in zip(grads, inputs, left, right, self._errors, strict=True):
            mean = basis @ factor.T
            torch.sub(value, mean, out=error)
            grad.copy_(mean.view_as(grad))
        self._factors = right


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters, which all have one."""
    return [param.grad for param in params if param.grad is not None]
