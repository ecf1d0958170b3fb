"""State tensors that the optimizer holds in another form than a checkpoint does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor


class Decoded:
    """Stands for a float32 tensor that is decoded when a save writes it.

    Attributes:
        shape: Its shape.
        dtype: float32.
    """

    dtype = torch.float32

    def __init__(self, shape: Sequence[int], decode: Callable[[], Tensor]) -> None:
        """Take the function that returns its values, which need not have the shape."""
        self.shape, self._decode = tuple(shape), decode

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def detach(self) -> Tensor:
        """Return the values, decoded now."""
        return self._decode().view(self.shape)
