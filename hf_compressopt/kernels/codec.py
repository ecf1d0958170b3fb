"""Message formats, in which the values of a bucket travel from rank to rank, and the choice of kernels for a device."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

import torch
from torch import Tensor

from hf_compressopt.kernels import library, native, reference, selfcheck
from hf_compressopt.kernels.compact import Errors
from hf_compressopt.kernels.memory import is_direct
from hf_compressopt.kernels.messages import Code, IntegerCode, SignCode
from hf_compressopt.kernels.operands import AnyAverage, Average, Combination, IntegerAverage, Segment

_CPU = torch.device("cpu")
_LARGE_COPY = 1 << 16  # elements


def on(where: torch.device | Tensor) -> Any:
    """Return the kernels for the tensors of a device: the functions of :mod:`hf_compressopt.kernels.reference`.

    A fake tensor, or any while torch.compile traces, gives the reference, which torch can trace.
    """
    if isinstance(where, Tensor):
        if type(where) is not Tensor or torch.compiler.is_compiling():
            return reference
        where = where.device
    key = where, os.environ.get(library.VARIABLE)
    found = _known.get(key)
    if found is None:
        found = selfcheck.kernels(where) if library.available(where) else reference
        if found is not reference and where in selfcheck.checked:
            _known[key] = found
    return found


_known: dict[tuple[torch.device, str | None], Any] = {}  # devices with native kernels, by the choice of the environment


def implementation(device: torch.device) -> str:
    """Return the name of the kernels for a device, such as ``"native avx512"`` or ``"reference"``."""
    if not library.available(device):
        return "reference"
    failed = ", ".join(sorted(selfcheck.failures(device)))
    return f"native {library.instruction_set(device.type)}" + (f", reference for {failed}" if failed else "")


class MessageFormat(Code, Generic[AnyAverage]):
    """A message format with error feedback: its code, and its kernels (:mod:`hf_compressopt.kernels.reference`).

    New errors may be written beside the old ones, so that a step can be dropped that turns out not finite.
    """

    def compress_(
        self, z: Combination, error: Errors, messages: Tensor, world_size: int, new_error: Errors | None = None
    ) -> None:
        """Compress a bucket: u = z + error; messages <- Q(u); new_error, which may be error, <- u - Q(u)."""
        on(messages).compress_(self, z, error, messages, world_size, new_error)

    def average_compress_(
        self, messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int
    ) -> None:
        """Average a chunk on its server: a = mean of messages + error; out <- Q(a); new_error <- a - Q(a)."""
        on(messages).average_compress_(self, messages, error, new_error, out, world_size)

    @abstractmethod
    def average(self, numel: int, messages: Tensor, world_size: int, stride: int) -> AnyAverage:
        """Return the messages of a bucket's averaged chunks, ``stride`` bytes apart, as an operand of kernels."""

    def decompress_(self, y: AnyAverage, out: Tensor) -> None:
        """Write the values of an average: out <- y. out: [n] float32, written."""
        on(out).decompress_(y, out)


class SignFormat(SignCode, MessageFormat[Average]):
    """Signs, and a scale per block. See :class:`~hf_compressopt.kernels.messages.SignCode`."""

    def average(self, numel: int, messages: Tensor, world_size: int, stride: int) -> Average:
        return Average(numel, None, messages, world_size, self.scale_block, stride)


class IntegerFormat(IntegerCode, MessageFormat[IntegerAverage]):
    """Integers of 4 or 8 bits, and a scale per block. See :class:`~hf_compressopt.kernels.messages.IntegerCode`."""

    def average(self, numel: int, messages: Tensor, world_size: int, stride: int) -> IntegerAverage:
        return IntegerAverage(numel, messages, world_size, self.bits, stride)

    def mean_(self, messages: Tensor, out: Tensor, world_size: int, factor: float) -> None:
        """Sum the messages of one chunk: out <- sum * factor."""
        on(out).mean_(self, messages, out, world_size, factor)

    def add_(self, y: IntegerAverage, outputs: Sequence[Segment], decay: float = 0.0, scale: float = 1.0) -> None:
        """Add an average to tensors: outputs <- outputs * decay + y * scale."""
        on(y.messages).add_(y, outputs, decay, scale)


def all_finite(y: Average) -> Tensor:
    """Return whether all scales of an average are finite, [] bool; a ValueError if it is not in messages."""
    return reference.largest_scale(y).isfinite()


def any_nan(*averages: IntegerAverage) -> Tensor:
    """Return whether a block of some averages is not finite, [] bool, from their scales."""
    found: Tensor = on(averages[0].messages).any_nan(*averages)
    return found


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum the squares of all elements of some tensors: [] float64 on ``device``; not finite if an element is not.

    Squares of float32 values are exact in float64. The sum has so many digits to spare that, rounded to float32, it
    does not depend on the order of the elements: parts of a tensor may be summed on different ranks.
    """
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return reference.sum_of_squares(tensors, device)
    total: Tensor = on(device).sum_of_squares(tensors, device)
    return total


def copy_(out: Tensor, source: Tensor) -> None:
    """Copy a tensor that is not read again soon into one of its shape and dtype, on any device.

    Large float32 tensors on the CPU are copied past its caches, which saves a third of the memory traffic.
    """
    alike = out.dtype == source.dtype == torch.float32 and out.device == source.device == _CPU
    large = source.numel() >= _LARGE_COPY and out.shape == source.shape
    if alike and large and is_direct(out) and is_direct(source) and library.available(_CPU):
        native.copy_(out, source)
    else:
        out.copy_(source, non_blocking=True)
