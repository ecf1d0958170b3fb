"""The native Adam of ``csrc/compressopt.h``, and its tables of tensors, which stay from step to step."""

from __future__ import annotations

import ctypes
from array import array

import torch
from torch import Tensor

from hf_compressopt.kernels import library
from hf_compressopt.kernels.adam_operands import AdamStep, AdamTensors
from hf_compressopt.kernels.c_operands import DTYPES
from hf_compressopt.kernels.memory import address_of, in_memory


class _Row(ctypes.Structure):
    """``co_adam_tensor``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("param", "grad", "exp_avg", "exp_avg_sq", "master", "copy", "step")),
        ("numel", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("param_dtype", "grad_dtype", "moment_dtype", "copy_dtype")),
    ]


class _Options(ctypes.Structure):
    """``co_adam_options``."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        *((name, ctypes.c_void_p) for name in ("lr_pointer", "grad_scale", "found_inf", "clip_factor")),
        *((name, ctypes.c_int32) for name in ("adam_w_mode", "bias_correction", "maximize", "write_grads")),
    ]


class AdamTable:
    """The addresses of the tensors of one device, as native code reads them.

    Args:
        tensors: Tensors with the same strides for each parameter, none of them with gaps.
    """

    def __init__(self, tensors: AdamTensors) -> None:
        """See the class."""
        self._rows = (_Row * len(tensors.params))(*(_row(*row) for row in tensors.rows()))
        words = memoryview(self._rows).cast("B").cast("Q")
        self._grads = words[_Row.grad.offset // 8 :: ctypes.sizeof(_Row) // 8]
        self._grads_at = self._grads.tolist()

    def run(self, grads: list[Tensor], step: AdamStep, device: torch.device) -> None:
        """Take a step with gradients that have the dtypes and strides of the table.

        Raises:
            RuntimeError: If the device reports an error.
        """
        grads_at = _addresses(grads)
        if 0 in grads_at:
            grads = [in_memory("a gradient", grad) for grad in grads]
            grads_at = _addresses(grads)
        if grads_at != self._grads_at:
            self._grads[:], self._grads_at = array("Q", grads_at), grads_at
        lr = step.lr
        options = _Options(
            0.0 if isinstance(lr, Tensor) else lr,
            step.beta1,
            step.beta2,
            step.eps,
            step.weight_decay,
            lr.data_ptr() if isinstance(lr, Tensor) else None,
            _pointer(step.grad_scale),
            _pointer(step.found_inf),
            _pointer(step.clip_factor),
            step.adam_w_mode,
            step.bias_correction,
            step.maximize,
            step.write_grads,
        )
        library.call("co_adam", device, self._rows, len(self._rows), ctypes.byref(options))


def _addresses(tensors: list[Tensor]) -> list[int]:
    try:
        return [*map(Tensor.data_ptr, tensors)]
    except RuntimeError:  # one of them has no memory
        return [*map(address_of, tensors)]


def _row(g: Tensor, p: Tensor, m: Tensor, v: Tensor, t: Tensor, master: Tensor | None, copy: Tensor | None) -> _Row:
    codes = DTYPES
    return _Row(
        param=p.data_ptr(),
        grad=g.data_ptr(),
        exp_avg=m.data_ptr(),
        exp_avg_sq=v.data_ptr(),
        master=_pointer(master),
        copy=_pointer(copy),
        step=t.data_ptr(),
        numel=p.numel(),
        param_dtype=codes[p.dtype],
        grad_dtype=codes[g.dtype],
        moment_dtype=codes[m.dtype],
        copy_dtype=0 if copy is None else codes[copy.dtype],
    )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
