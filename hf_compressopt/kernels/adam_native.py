"""The native Adam of ``csrc/compressopt.h``: its tables of tensors, kept from step to step."""

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
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("copy", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("param_dtype", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("moment_dtype", ctypes.c_int32),
        ("copy_dtype", ctypes.c_int32),
    ]


class _Options(ctypes.Structure):
    """``co_adam_options``."""

    _fields_ = [
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("lr_pointer", ctypes.c_void_p),
        ("grad_scale", ctypes.c_void_p),
        ("found_inf", ctypes.c_void_p),
        ("clip_factor", ctypes.c_void_p),
        ("adam_w_mode", ctypes.c_int32),
        ("bias_correction", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
        ("write_grads", ctypes.c_int32),
    ]


class AdamTable:
    """Where the tensors of one device lie, as native code reads it.

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
        """Take a step with these gradients, which have the dtypes and strides of the table's.

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
