"""Kernels: the hot loops of the optimizers, of message formats and of norms.

:func:`on` returns the kernels of a device: native code if the library for that device works, else
:mod:`hf_compressopt.kernels.reference`, pure PyTorch, which states the contract of each kernel and is the oracle of all
tests. :class:`MessageFormat` is what the collectives know of a message format: :class:`SignFormat`,
:class:`IntegerFormat`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_compressopt.flat import chunk_numel
from hf_compressopt.kernels import adam, library, native, reference, sketch  # noqa: F401  they add their kernels to the self-check
from hf_compressopt.kernels.codec import (
    IntegerFormat,
    MessageFormat,
    SignFormat,
    all_finite,
    any_nan,
    implementation,
    on,
)
from hf_compressopt.kernels.errors import ERROR_BITS, CompactErrors, Errors, like_errors, tensor_of, values_of_errors
from hf_compressopt.kernels.memory import is_direct
from hf_compressopt.kernels.messages import (
    INTEGER_BITS,
    MESSAGE_ALIGNMENT,
    chunk_integer_message_nbytes,
    chunk_message_nbytes,
    chunk_messages,
    integer_message_nbytes,
    message_nbytes,
    num_blocks,
    scales_of,
)
from hf_compressopt.kernels.operands import (
    AdamUpdate,
    AnyAverage,
    Average,
    Combination,
    Descent,
    IntegerAverage,
    LambMoments,
    LambOptions,
    LocalUpdate,
    ParameterSync,
    Segment,
)
from hf_compressopt.kernels.variance import LogVariance, Variance

_CPU = torch.device("cpu")
_LARGE_COPY = 1 << 16  # elements


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


__all__ = [
    "ERROR_BITS",
    "INTEGER_BITS",
    "MESSAGE_ALIGNMENT",
    "AdamUpdate",
    "AnyAverage",
    "Average",
    "Combination",
    "CompactErrors",
    "Descent",
    "Errors",
    "IntegerAverage",
    "IntegerFormat",
    "LambMoments",
    "LambOptions",
    "LocalUpdate",
    "LogVariance",
    "MessageFormat",
    "ParameterSync",
    "Segment",
    "SignFormat",
    "Variance",
    "all_finite",
    "any_nan",
    "chunk_integer_message_nbytes",
    "chunk_message_nbytes",
    "chunk_messages",
    "chunk_numel",
    "copy_",
    "implementation",
    "integer_message_nbytes",
    "like_errors",
    "message_nbytes",
    "num_blocks",
    "on",
    "scales_of",
    "sum_of_squares",
    "tensor_of",
    "values_of_errors",
]
