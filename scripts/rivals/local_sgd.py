"""Local SGD (Stich 2018, arXiv 1805.09767), as Accelerate's LocalSGD: parameters are averaged every H steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from rivals.rival import Rival, joined, write


class LocalSGD(Rival):
    """Ranks that step alone, and take the mean of their parameters every ``interval`` steps."""

    def __init__(self, params: Iterable[Tensor], communicator: Communicator, *, interval: int = 8) -> None:
        """Begin with the parameters as they are."""
        super().__init__(params, communicator)
        self._interval, self._step = interval, 0

    @torch.no_grad()
    def parameters(self, *, last: bool) -> None:
        """Average the parameters, if it is time."""
        self._step += 1
        if last or self._step % self._interval == 0:
            write(self.mean_(joined(self.params)), self.params)
