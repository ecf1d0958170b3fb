"""The choice of the kernels for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_compressopt.kernels import library, native, operators, reference
from hf_compressopt.kernels.protocol import Kernels


def on(where: torch.device | Tensor) -> Kernels:
    """Return the kernels for the tensors of a device.

    Args:
        where: The device; or a tensor on it. For a fake tensor, and while torch.compile traces, a tensor gives kernels
            that are operators of torch.
    """
    if isinstance(where, Tensor):
        if torch.compiler.is_compiling() or type(where) is not Tensor:
            return operators
        where = where.device
    return native if library.available(where) else reference


def implementation(device: torch.device) -> str:
    """Return the name of the kernels for a device, such as ``"native avx512"`` or ``"reference"``."""
    return f"native {library.instruction_set(device.type)}" if library.available(device) else "reference"
