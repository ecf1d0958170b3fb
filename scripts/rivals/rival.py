"""The base of the rivals: other methods to keep ranks together, around an ordinary optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator


class Rival:
    """One rank's part of a method that sends less than an all-reduce in float32.

    A loop calls :meth:`gradients` after the backward pass, before clipping, and :meth:`parameters` after the
    optimizer's step. All ranks call.

    Attributes:
        params: The parameters, alike on all ranks at the start.
        communicator: The ranks.
    """

    def __init__(self, params: Iterable[Tensor], communicator: Communicator) -> None:
        self.params, self.communicator = list(params), communicator

    def gradients(self) -> None:
        """Exchange the gradients, in place."""

    def parameters(self, *, last: bool) -> None:
        """Exchange the parameters, in place; ``last`` says that no step follows."""

    def mean_(self, flat: Tensor) -> Tensor:
        """Replace a tensor by its mean over the ranks: times 1/W, then the sum."""
        flat.mul_(1 / self.communicator.world_size)
        self.communicator.all_reduce(flat).wait()
        return flat


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """The elements of all tensors, one after another."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def write(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """Write what :func:`joined` has read."""
    start = 0
    for tensor in tensors:
        tensor.detach().copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
