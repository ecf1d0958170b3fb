"""The kernels for torch.compile and fake tensors: compression as operators of torch, ``torch.ops.compressopt``.

The operators change their arguments in place. A direct call of the native kernels costs less, so these serve only
while torch traces. The other kernels are the reference's, which torch can trace, and so is compression with errors in
8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels import library, native, reference
from hf_compressopt.kernels.errors import Errors
from hf_compressopt.kernels.operands import Average, Combination
from hf_compressopt.kernels.protocol import Kernels
from hf_compressopt.kernels.reference import (
    apply_adam_,
    combine_,
    commit_,
    compress_only_,
    lamb_apply_,
    lamb_moments_,
    local_step_,
    sum_of_squares,
    sync_parameters_,
)

_LIBRARY: Any = torch.library.Library("compressopt", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("compress(Tensor x, Tensor(a!) error, Tensor(b!) messages, int world_size, int? scale_block) -> ()")
_LIBRARY.define(
    "average_compress(Tensor messages, Tensor(a!) error, Tensor(b!) out, int world_size, int? scale_block) -> ()"
)
_LIBRARY.define("decompress(Tensor messages, Tensor(a!) out, int world_size, int? scale_block, int stride) -> ()")


def compress_(z: Combination, error: Errors, messages: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.compress_`."""
    if not isinstance(error, Tensor):
        return reference.compress_(z, error, messages, world_size, scale_block)
    torch.ops.compressopt.compress(reference.values_of(z), error, messages, world_size, scale_block)


def average_compress_(messages: Tensor, error: Errors, out: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :meth:`Kernels.average_compress_`."""
    if not isinstance(error, Tensor):
        return reference.average_compress_(messages, error, out, world_size, scale_block)
    torch.ops.compressopt.average_compress(messages, error, out, world_size, scale_block)


def decompress_(y: Average, out: Tensor) -> None:
    """See :meth:`Kernels.decompress_`."""
    if y.messages is None:
        reference.decompress_(y, out)
    else:
        torch.ops.compressopt.decompress(y.messages, out, y.world_size, y.scale_block, y.stride)


def _real(tensor: Tensor) -> Kernels:
    return native if library.available(tensor.device) else reference


def _compress(x: Tensor, error: Tensor, messages: Tensor, world_size: int, scale_block: int | None) -> None:
    _real(error).compress_(Combination.of(x), error, messages, world_size, scale_block)


def _average_compress(messages: Tensor, error: Tensor, out: Tensor, world_size: int, scale_block: int | None) -> None:
    _real(error).average_compress_(messages, error, out, world_size, scale_block)


def _decompress(messages: Tensor, out: Tensor, world_size: int, scale_block: int | None, stride: int) -> None:
    _real(out).decompress_(Average(out.numel(), None, messages, world_size, scale_block, stride), out)


def _nothing(*_: object) -> None:
    """Return nothing: what the operators write has its shape already."""


for _name, _function in (("compress", _compress), ("average_compress", _average_compress), ("decompress", _decompress)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compressopt::{_name}", _nothing, lib=_LIBRARY)

__all__ = [
    "apply_adam_",
    "average_compress_",
    "combine_",
    "commit_",
    "compress_",
    "compress_only_",
    "decompress_",
    "lamb_apply_",
    "lamb_moments_",
    "local_step_",
    "sum_of_squares",
    "sync_parameters_",
]
