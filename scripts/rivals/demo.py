"""DeMo (Peng et al. 2024, arXiv 2411.19870, Algorithm 1): the momentum's largest components in frequency space.

    m_r <- beta m_r + g_r;  q_r <- the k largest components of the DCT of each chunk of m_r;  m_r <- m_r - DCT^-1(q_r)
    p <- p (1 - lr wd) - lr sign(DCT^-1(mean_r q_r))
A chunk is a hypercube of at most 64 elements a side, by the largest divisors of the tensor's sides. A component travels
as a bfloat16 value and a 16-bit index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator

SIDE = 64


class DeMo(torch.optim.Optimizer):
    """Sign descent along decoupled momentum."""

    def __init__(self, params: Any, lr: float, *, communicator: Communicator, k: int = 32, beta: float = 0.999) -> None:
        """Begin with a momentum of 0."""
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._communicator, self._k, self._beta = communicator, k, beta

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step, on all ranks together."""
        rows = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        messages, layouts = [], []
        for _, param in rows:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
            momentum.mul_(self._beta).add_(param.grad)
            chunks = transform(momentum)  # [chunks, elements]
            k = min(self._k, chunks.shape[1])
            index = chunks.abs().topk(k, dim=1, sorted=False).indices
            values = chunks.gather(1, index).to(torch.bfloat16)
            kept = torch.zeros_like(chunks).scatter_(1, index, values.float())
            momentum.sub_(inverse(kept, param.shape))
            layouts.append((chunks.shape, k))
            messages.append(torch.stack([values.view(torch.int16), index.to(torch.int32).short()]).view(-1))
        mine = torch.cat(messages)
        world_size = self._communicator.world_size
        everyone = mine.new_empty(world_size * mine.numel())
        if world_size > 1:
            self._communicator.all_gather(everyone.view(torch.uint8), mine.view(torch.uint8)).wait()
        else:
            everyone.copy_(mine)
        start = 0
        for (group, param), (shape, k) in zip(rows, layouts, strict=True):
            count = 2 * shape[0] * k
            total = torch.zeros(shape)
            for rank in range(world_size):
                part = everyone[rank * mine.numel() + start :][:count].view(2, shape[0], k)
                total.scatter_add_(1, part[1].long() & 0xFFFF, part[0].view(torch.bfloat16).float())
            start += count
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(inverse(total, param.shape).sign_(), alpha=-group["lr"])


def transform(values: Tensor) -> Tensor:
    """The DCT of each chunk, [chunks, elements of a chunk]."""
    sides = sides_of(values.shape)
    split = [size for whole, side in zip(values.shape, sides, strict=True) for size in (whole // side, side)]
    chunks = values.reshape(split).permute(order(len(sides))).reshape(-1, *sides)
    for axis, side in enumerate(sides, start=1):
        chunks = torch.tensordot(chunks, basis(side), dims=([axis], [1])).movedim(-1, axis)
    return chunks.reshape(len(chunks), -1)


def inverse(chunks: Tensor, shape: torch.Size) -> Tensor:
    """The tensor whose chunks' DCT this is."""
    sides = sides_of(shape)
    values = chunks.reshape(-1, *sides)
    for axis, side in enumerate(sides, start=1):
        values = torch.tensordot(values, basis(side), dims=([axis], [0])).movedim(-1, axis)
    counts = [whole // side for whole, side in zip(shape, sides, strict=True)]
    return values.reshape(*counts, *sides).permute(inverse_of(order(len(sides)))).reshape(shape)


def order(dims: int) -> list[int]:
    """From (count, side) for each dimension to all counts, then all sides."""
    return [2 * axis for axis in range(dims)] + [2 * axis + 1 for axis in range(dims)]


def inverse_of(permutation: Iterable[int]) -> list[int]:
    """The permutation that undoes another."""
    return torch.argsort(torch.tensor(list(permutation))).tolist()


@cache
def sides_of(shape: torch.Size) -> tuple[int, ...]:
    """The sides of a chunk: of each dimension the largest divisor up to SIDE."""
    return tuple(max(side for side in range(1, min(SIDE, size) + 1) if size % side == 0) for size in shape)


@cache
def basis(side: int) -> Tensor:
    """The orthonormal DCT-II, [frequencies, places]."""
    place = torch.arange(side, dtype=torch.float64)
    rows = torch.cos(math.pi / side * (place + 0.5) * place[:, None]) * math.sqrt(2 / side)
    rows[0] /= math.sqrt(2)
    return rows.float()
