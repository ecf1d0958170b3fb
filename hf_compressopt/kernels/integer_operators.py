"""The kernels of b-bit integers for torch.compile and fake tensors: operators of torch, ``torch.ops.compressopt``.

:func:`commit_`, :func:`mean_` and :func:`add_` are the reference's, which torch can trace. So are all others with
errors in 8 bits, and :func:`compress_` with new errors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels import integer_native, integer_reference, library, reference
from hf_compressopt.kernels.errors import Errors
from hf_compressopt.kernels.integer_messages import IntegerAverage
from hf_compressopt.kernels.integer_protocol import IntegerKernels
from hf_compressopt.kernels.integer_reference import add_, commit_, mean_
from hf_compressopt.kernels.operands import Combination

_LIBRARY: Any = torch.library.Library("compressopt", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("compress_integers(Tensor x, Tensor error, Tensor(a!) messages, int world_size, int bits) -> ()")
_LIBRARY.define(
    "average_integers(Tensor messages, Tensor error, Tensor(a!) new_error, Tensor(b!) out, int world_size, int bits)"
    " -> ()"
)
_LIBRARY.define("decode_integers(Tensor messages, Tensor(a!) out, int world_size, int bits, int stride) -> ()")


def compress_(
    z: Combination, error: Errors, messages: Tensor, world_size: int, bits: int, new_error: Errors | None = None
) -> None:
    """See :meth:`IntegerKernels.compress_`."""
    if not isinstance(error, Tensor) or new_error is not None:
        return integer_reference.compress_(z, error, messages, world_size, bits, new_error)
    torch.ops.compressopt.compress_integers(reference.values_of(z), error, messages, world_size, bits)


def average_compress_(
    messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int, bits: int
) -> None:
    """See :meth:`IntegerKernels.average_compress_`. ``new_error`` may not be ``error`` itself here."""
    if not isinstance(error, Tensor):
        return integer_reference.average_compress_(messages, error, new_error, out, world_size, bits)
    torch.ops.compressopt.average_integers(messages, error, new_error, out, world_size, bits)


def decompress_(y: IntegerAverage, out: Tensor) -> None:
    """See :meth:`IntegerKernels.decompress_`."""
    torch.ops.compressopt.decode_integers(y.messages, out, y.world_size, y.bits, y.stride)


def _real(tensor: Tensor) -> IntegerKernels:
    return integer_native if library.available(tensor.device) else integer_reference


def _compress(x: Tensor, error: Tensor, messages: Tensor, world_size: int, bits: int) -> None:
    _real(error).compress_(Combination.of(x), error, messages, world_size, bits)


def _average(messages: Tensor, error: Tensor, new_error: Tensor, out: Tensor, world_size: int, bits: int) -> None:
    _real(error).average_compress_(messages, error, new_error, out, world_size, bits)


def _decode(messages: Tensor, out: Tensor, world_size: int, bits: int, stride: int) -> None:
    _real(out).decompress_(IntegerAverage(out.numel(), messages, world_size, bits, stride), out)


def _nothing(*_: object) -> None:
    """Return nothing: what the operators write has its shape already."""


_FUNCTIONS = {"compress_integers": _compress, "average_integers": _average, "decode_integers": _decode}
for _name, _function in _FUNCTIONS.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compressopt::{_name}", _nothing, lib=_LIBRARY)

__all__ = ["add_", "average_compress_", "commit_", "compress_", "decompress_", "mean_"]
