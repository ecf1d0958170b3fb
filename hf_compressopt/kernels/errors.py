"""The errors of error feedback, as float32 values or in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_compressopt.kernels.messages import IntegerCode

#: Bits of an error in a message.
ERROR_BITS = 8
#: The code of errors in 8 bits.
ERROR_CODE = IntegerCode(ERROR_BITS)


@dataclass(slots=True)  # not frozen: a step makes many, in half of the time
class CompactErrors:
    """Errors in 8 bits: for each chunk of a bucket a message of integers, as ``IntegerFormat(8)`` describes it.

    An error is what the messages stand for, and a new one is rounded to them: within 1/254 of the largest of a block.
    The error of a server has a ``world_size`` of 1.
    """

    messages: Tensor
    count: int
    world_size: int = 1

    @staticmethod
    def nbytes(count: int, world_size: int = 1) -> int:
        """Return the bytes of the errors of ``count`` elements."""
        return ERROR_CODE.sizes(count, world_size)[1]

    @classmethod
    def zeros(cls, count: int, world_size: int = 1, device: torch.device | None = None) -> CompactErrors:
        """Return errors of 0."""
        nbytes = cls.nbytes(count, world_size)
        return cls(torch.zeros(nbytes, dtype=torch.uint8, device=device or "cpu"), count, world_size)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.count

    @property
    def device(self) -> torch.device:
        """Device of the messages."""
        return self.messages.device


#: Errors in one of two forms: float32 values [n], or 8 bits.
Errors = Tensor | CompactErrors


def tensor_of(error: Errors) -> Tensor:
    """Return the tensor that holds errors."""
    return error if isinstance(error, Tensor) else error.messages


def like_errors(error: Errors) -> Errors:
    """Return memory for errors of the same form."""
    if isinstance(error, Tensor):
        return torch.empty_like(error)
    return replace(error, messages=torch.empty_like(error.messages))


def values_of_errors(error: Errors) -> Tensor:
    """Return the values of errors, [n] float32. Do not change them: they may be the errors themselves."""
    if isinstance(error, Tensor):
        return error
    values = torch.empty(error.count, dtype=torch.float32, device=error.device)
    for start, stop, message in ERROR_CODE.chunks(error.messages, error.count, error.world_size):
        values[start:stop] = ERROR_CODE.decode(message, stop - start)
    return values


def keep_errors_(error: Errors, values: Tensor) -> None:
    """Take over new values, [n] float32. They may be the errors themselves."""
    if isinstance(error, Tensor):
        error.copy_(values)
        return
    for start, stop, message in ERROR_CODE.chunks(error.messages, error.count, error.world_size):
        ERROR_CODE.encode_(values[start:stop], message)
