"""Compression as operators of torch, ``torch.ops.compressopt``, so that torch.compile and fake tensors take it.

The operators change their arguments in place, as the wrappers of :mod:`hf_compressopt.kernels` do, which use them where
tensors are not plain ones, or are being traced; a direct call costs less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels import library, native, reference
from hf_compressopt.kernels.operands import Average, Combination

_LIBRARY: Any = torch.library.Library("compressopt", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("compress(Tensor x, Tensor(a!) error, Tensor(b!) messages, int world_size, int? scale_block) -> ()")
_LIBRARY.define(
    "average_compress(Tensor messages, Tensor(a!) error, Tensor(b!) out, int world_size, int? scale_block) -> ()"
)
_LIBRARY.define("decompress(Tensor messages, Tensor(a!) out, int world_size, int? scale_block, int stride) -> ()")


def needed(tensor: Tensor) -> bool:
    """Whether a call must go through the operators: it is traced, or the tensor holds no data of its own."""
    return torch.compiler.is_compiling() or type(tensor) is not Tensor


def implementation_for(device: torch.device) -> Any:
    """The module whose functions work on the tensors of a device."""
    return native if library.available(device) else reference


def _compress(x: Tensor, error: Tensor, messages: Tensor, world_size: int, scale_block: int | None) -> None:
    implementation_for(error.device).compress_(Combination.of(x), error, messages, world_size, scale_block)


def _average_compress(messages: Tensor, error: Tensor, out: Tensor, world_size: int, scale_block: int | None) -> None:
    implementation_for(error.device).average_compress_(messages, error, out, world_size, scale_block)


def _decompress(messages: Tensor, out: Tensor, world_size: int, scale_block: int | None, stride: int) -> None:
    y = Average(out.numel(), None, messages, world_size, scale_block, stride)
    implementation_for(out.device).decompress_(y, out)


def _nothing(*_: object) -> None:
    """The operators return nothing, and what they write is there already."""


for _name, _function in (("compress", _compress), ("average_compress", _average_compress), ("decompress", _decompress)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compressopt::{_name}", _nothing, lib=_LIBRARY)
