"""Kernels: the hot loops of the optimizers, of message formats and of norms.

:func:`on` returns the kernels of a device: native code if the library for that device works, else
:mod:`hf_compressopt.kernels.reference`, pure PyTorch, which states the contract of each kernel and is the oracle of all
tests. The collectives know message formats: :class:`SignFormat`, :class:`IntegerFormat`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels import adam, changes, library, native, reference, selfcheck  # two add to the self-check
from hf_compressopt.kernels.compact import (
    ERROR_FORMAT,
    CompactErrors,
    Errors,
    LogVariance,
    Variance,
    like_errors,
    tensor_of,
    values_of_errors,
)
from hf_compressopt.kernels.memory import is_direct
from hf_compressopt.kernels.messages import INTEGER_BITS, MESSAGE_ALIGNMENT, IntegerFormat, MessageFormat, SignFormat
from hf_compressopt.kernels.reference import (
    SKETCH_NUMEL,
    AdamUpdate,
    Average,
    Combination,
    Descent,
    LambMoments,
    LambOptions,
    LocalUpdate,
    ParameterSync,
    Segment,
    VarianceUpdate,
    all_finite,
)

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
