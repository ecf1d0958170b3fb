"""Adam and AdamW over many tensors at once, by native code, torch's fused operator, or the reference."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_compressopt.kernels import library
from hf_compressopt.kernels.adam_native import AdamTable
from hf_compressopt.kernels.adam_operands import AdamStep, AdamTensors
from hf_compressopt.kernels.adam_reference import reference_, torch_fused_
from hf_compressopt.kernels.c_operands import DTYPES
from hf_compressopt.kernels.memory import holds_values, in_memory

_PLAIN = {Tensor, torch.nn.Parameter}  # torch updates other types, such as DTensor
_TORCH_FUSED_DEVICES = ("cpu", "cuda")
_Places = list[tuple[ref[Tensor], int] | None] | None


def adam_(tensors: AdamTensors, step: AdamStep, plan: AdamPlan | None = None) -> AdamPlan:
    """Take one step of Adam or AdamW, in place, with the numbers of torch.optim.

    For each parameter p with gradient g and moments m and v, each operation rounded to float32 (float64 for float64)::

        t <- t + 1;  g <- g / grad_scale * clip_factor, negated if maximize
        L2: g <- g + weight_decay p;  AdamW: p <- p (1 - lr weight_decay)
        m <- m + (1 - beta1) (g - m);  v <- beta2 v + (1 - beta2) g g
        p <- p - (lr / (1 - beta1^t)) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Args:
        tensors: The tensors to update. Parameters may differ in dtype and device.
        step: The options of the step.
        plan: The result of the previous step. It saves time, and changes no number.

    Returns:
        A plan for the next step.

    Raises:
        TypeError: For sparse gradients, or a dtype that is not supported.
        ValueError: For tensors that differ in shape or device.
    """
    given = tensors
    if True in map(Tensor.is_neg, tensors.grads):
        tensors = replace(tensors, grads=[grad.resolve_neg() for grad in tensors.grads])
    if plan is None or not plan.holds(tensors):
        plan = AdamPlan(tensors)
    plan.run(tensors, step)
    if step.write_grads and tensors is not given:
        for grad, resolved in zip(given.grads, tensors.grads, strict=True):
            if grad is not resolved:
                grad.copy_(resolved)
    return plan


class AdamPlan:
    """The choice of an implementation for each tensor, with the tables that native code reads.

    Args:
        tensors: The tensors; they are checked.
    """

    def __init__(self, tensors: AdamTensors) -> None:
        """See the class."""
        parts: dict[tuple[_Kind, torch.device], list[int]] = defaultdict(list)
        seen: set[int] = set()
        for index, row in enumerate(tensors.rows()):
            kind, param = _kind(*row), row[1]
            if id(param) in seen:
                kind = _Kind.OTHER  # a parameter that is in the list twice steps twice, one after the other
            seen.add(id(param))
            parts[kind, param.device].append(index)
        self._parts = [_Part(kind, device, indices, tensors) for (kind, device), indices in parts.items()]
        self._reusable = all(part.kind in (_Kind.NATIVE, _Kind.TORCH) for part in self._parts)
        if self._reusable:
            self._seen = [_seen(*row) for row in tensors.rows()]
            self._masters, self._copies = _places(tensors.masters), _places(tensors.copies)

    def holds(self, tensors: AdamTensors) -> bool:
        """Return whether the plan fits these tensors. Gradients may lie elsewhere; all else must be the same.

        torch gives a gradient the shape and dtype of its parameter, so one look at the gradient is enough. Steps never
        move without their moments. Gradients must not be lazily negated: :func:`adam_` resolves them first.
        """
        if not self._reusable or len(tensors.params) != len(self._seen):
            return False
        columns = tensors.grads, tensors.params, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.steps
        for seen, g, p, m, v, t in zip(self._seen, *columns, strict=True):  # one loop: most of a small step's time
            param, param_at, exp_avg, exp_avg_at, exp_avg_sq, exp_avg_sq_at, step, numel, dtype, strides = seen
            if (
                p is not param
                or m is not exp_avg()
                or v is not exp_avg_sq()
                or t is not step
                or p.data_ptr() != param_at
                or m.data_ptr() != exp_avg_at
                or v.data_ptr() != exp_avg_sq_at
                or g.numel() != numel
                or g.dtype is not dtype
                or (None if g.is_contiguous() else g.stride()) != strides
            ):
                return False
        return _still(tensors.masters, self._masters) and _still(tensors.copies, self._copies)

    def run(self, tensors: AdamTensors, step: AdamStep) -> None:
        """Take the step."""
        for part in self._parts:
            part.run(tensors, step.on(part.device))


class _Kind(Enum):
    """The implementation that can update a tensor, besides the reference."""

    NATIVE = auto()
    TORCH = auto()  # torch's fused operator, for most steps
    SHARDED = auto()  # the same, on DTensors
    OTHER = auto()


class _Part:
    """The tensors of one device that the same implementations can update, by their indices."""

    def __init__(self, kind: _Kind, device: torch.device, indices: list[int], tensors: AdamTensors) -> None:
        self.kind, self.device = kind, device
        self._indices = indices
        part = tensors.take(indices)
        self._table = AdamTable(part) if kind is _Kind.NATIVE else None

    def run(self, tensors: AdamTensors, step: AdamStep) -> None:
        part = tensors.take(self._indices)
        if self._table is not None:
            self._table.run(part.grads, step, self.device)
        elif self.kind is not _Kind.OTHER and step.bias_correction and step.clip_factor is None:
            torch_fused_(part, step)
        else:
            return reference_(part, step)
        increment_version(part.params)  # autograd does not see these writes
        if step.write_grads:
            increment_version(part.grads)
        if part.copies is not None:
            increment_version([copy for copy in part.copies if copy is not None])


def _kind(g: Tensor, p: Tensor, m: Tensor, v: Tensor, t: Tensor, master: Tensor | None, copy: Tensor | None) -> _Kind:
    """Check the tensors of one parameter."""
    if g.layout != torch.strided:
        raise TypeError(f"gradients must be dense, got {g.layout}: torch.optim.SparseAdam takes sparse ones")
    given = {"gradient": g, "exp_avg": m, "exp_avg_sq": v, "master": master, "copy": copy}
    others = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in others.items():
        if tensor.shape != p.shape or tensor.device != p.device:
            raise ValueError(
                f"the {name} of a parameter of shape {tuple(p.shape)} on {p.device} must be shaped like it and lie "
                f"there, got {tuple(tensor.shape)} on {tensor.device}"
            )
    tensors = [p, *others.values()]
    types, dtypes = {type(tensor) for tensor in tensors}, {tensor.dtype for tensor in tensors}
    fits = t.dtype == torch.float32 and t.device == p.device and t.numel() == 1 and type(t) is Tensor
    if not fits or not dtypes <= DTYPES.keys() or m.dtype != v.dtype or not _aligned(tensors):
        return _Kind.OTHER
    if types <= _PLAIN and not all(map(holds_values, (*tensors, t))):
        for name, tensor in others.items():
            in_memory(f"the {name} of a parameter", tensor)
        return _Kind.OTHER
    if types <= _PLAIN and library.available(p.device) and (master is None or master.dtype == torch.float32):
        return _Kind.NATIVE
    suits_torch = p.device.type in _TORCH_FUSED_DEVICES and len(others) == 3 and dtypes == {torch.float32}
    if not suits_torch or library.chosen() == "reference" or not p.is_contiguous():
        return _Kind.OTHER
    if types <= _PLAIN:
        return _Kind.TORCH
    return _Kind.SHARDED if all(map(_is_dtensor, tensors)) else _Kind.OTHER


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Return whether each element lies at the same place in all tensors, without gaps between elements."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    strides = torch.empty_like(tensors[0], device="meta").stride()
    return all(tensor.stride() == strides for tensor in tensors)


def _seen(g: Tensor, p: Tensor, m: Tensor, v: Tensor, t: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    """Return what :meth:`AdamPlan.holds` compares. Weak references let moments move elsewhere to save memory."""
    strides = None if g.is_contiguous() else g.stride()
    places = p, p.data_ptr(), ref(m), m.data_ptr(), ref(v), v.data_ptr()
    return *places, t, g.numel(), g.dtype, strides


def _places(tensors: list[Tensor | None] | None) -> _Places:
    if tensors is None:
        return None
    return [None if tensor is None else (ref(tensor), tensor.data_ptr()) for tensor in tensors]


def _still(tensors: list[Tensor | None] | None, places: _Places) -> bool:
    """Return whether these are the same tensors, at the same addresses."""
    if tensors is None or places is None:
        return tensors is places
    for tensor, place in zip(tensors, places, strict=True):
        if tensor is None or place is None:
            if tensor is not None or place is not None:
                return False
        elif place[0]() is not tensor or place[1] != tensor.data_ptr():
            return False
    return True


__all__ = ["AdamPlan", "AdamStep", "AdamTensors", "adam_"]
