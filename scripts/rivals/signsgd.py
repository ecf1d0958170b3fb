"""signSGD with majority vote and momentum, "Signum" (Bernstein et al. 2018, arXiv 1802.04434, Algorithm 3; 1810.05291).

    m_r <- beta m_r + (1 - beta) g_r;  p <- p (1 - lr wd) - lr sign(sum_r sign(m_r))
Each rank counts the votes on a part of the elements, as in the two phases of a compressed all-reduce. A tie counts as
positive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from rivals.rival import joined


class SignSGD(torch.optim.Optimizer):
    """Descent by the sign that most ranks vote for."""

    def __init__(self, params: Any, lr: float, *, communicator: Communicator, beta: float = 0.9) -> None:
        """Begin with a momentum of 0."""
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._communicator, self._beta = communicator, beta

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step, on all ranks together."""
        rows = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, param in rows:
            self.state[param].setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 1 - self._beta)
        votes = self._vote(joined(self.state[param]["momentum"] for _, param in rows))
        for group, param in rows:
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(votes[: param.numel()].view_as(param), alpha=-group["lr"])
            votes = votes[param.numel() :]

    def _vote(self, values: Tensor) -> Tensor:
        """The sign of most ranks of each element, 1 or -1."""
        world_size, numel = self._communicator.world_size, values.numel()
        part = -(-numel // (8 * world_size))  # bytes
        ballots = torch.zeros(world_size * part, dtype=torch.uint8)
        bits = packed(values < 0)
        ballots[: bits.numel()] = bits
        received, result = torch.empty_like(ballots), torch.empty_like(ballots)
        splits = [part] * world_size
        if world_size == 1:
            return 1.0 - 2.0 * unpacked(ballots)[:numel]
        self._communicator.all_to_all(received, ballots, output_splits=splits, input_splits=splits).wait()
        negative = sum(unpacked(row) for row in received.view(world_size, part))
        self._communicator.all_gather(result, packed(negative > world_size / 2)).wait()
        return 1.0 - 2.0 * unpacked(result)[:numel]


def packed(bits: Tensor) -> Tensor:
    """Booleans as bytes, eight in each."""
    return torch.from_numpy(np.packbits(bits.numpy()))


def unpacked(data: Tensor) -> Tensor:
    """The bits of bytes, as 0 and 1 in float32."""
    return torch.from_numpy(np.unpackbits(data.numpy())).float()
