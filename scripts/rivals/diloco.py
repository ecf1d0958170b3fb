"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1): AdamW inside, Nesterov's momentum outside.

Every H steps, with theta the parameters at the last exchange and theta_r those of rank r now:
    d = mean_r (theta - theta_r);  theta <- Nesterov SGD of theta by d;  theta_r <- theta
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from rivals.rival import Rival, joined, write


class DiLoCo(Rival):
    """Ranks that step alone, and take a step together every ``interval`` steps."""

    def __init__(
        self,
        params: Iterable[Tensor],
        communicator: Communicator,
        *,
        interval: int = 32,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        """Begin with the parameters as they are; ``outer_lr`` and ``momentum`` belong to the step together."""
        super().__init__(params, communicator)
        self._interval, self._step = interval, 0
        self._together = joined(self.params).clone().requires_grad_()
        self._outer = torch.optim.SGD([self._together], lr=outer_lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def parameters(self, *, last: bool) -> None:
        """Take a step together, if it is time."""
        self._step += 1
        if last or self._step % self._interval == 0:
            self._together.grad = self.mean_(self._together - joined(self.params))
            self._outer.step()
            write(self._together, self.params)
