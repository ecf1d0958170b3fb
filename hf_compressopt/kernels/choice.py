"""The choice of the kernels for a device."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from hf_compressopt.kernels import library, native, operators, reference
from hf_compressopt.kernels.protocol import Kernels

_K = TypeVar("_K")


def on(where: torch.device | Tensor) -> Kernels:
    """Return the kernels for the tensors of a device.

    Args:
        where: The device; or a tensor on it. For a fake tensor, and while torch.compile traces, a tensor gives kernels
            that are operators of torch.
    """
    return one_of(where, native, reference, operators)


def one_of(where: torch.device | Tensor, native_kernels: _K, reference_kernels: _K, torch_operators: _K) -> _K:
    """Return one of three implementations of the same kernels, by the rule of :func:`on`."""
    if isinstance(where, Tensor):
        if torch.compiler.is_compiling() or type(where) is not Tensor:
            return torch_operators
        where = where.device
    return native_kernels if library.available(where) else reference_kernels


def implementation(device: torch.device) -> str:
    """Return the name of the kernels for a device, such as ``"native avx512"`` or ``"reference"``."""
    return f"native {library.instruction_set(device.type)}" if library.available(device) else "reference"
