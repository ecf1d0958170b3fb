"""Adam and AdamW over many tensors at once, by native code, torch's fused operator, or the reference."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_compressopt.kernels import library, reference, selfcheck
from hf_compressopt.kernels.memory import address_of, holds_values, in_memory, with_memory
from hf_compressopt.kernels.native import DTYPES, call

_PLAIN = {Tensor, torch.nn.Parameter}  # torch updates other types, such as DTensor
_TORCH_FUSED_DEVICES = ("cpu", "cuda")
_Places = list[tuple[ref[Tensor], int] | None] | None


@dataclass(frozen=True)
class AdamStep:
    """The options of one step, alike for all tensors. lr may be a tensor, which is read on its own device.

    grad_scale divides the gradients, clip_factor multiplies them, and found_inf, if not 0, leaves everything as it is;
    each is [] or [1]. With write_grads the scaled gradients are written back. adam_w_mode is decoupled decay, else L2.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adam_w_mode: bool = True
    bias_correction: bool = True
    maximize: bool = False
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    clip_factor: Tensor | None = None
    write_grads: bool = False

    def on(self, device: torch.device) -> AdamStep:
        """Return the options with every tensor [] float32 on a device. An lr on another device becomes a number."""
        lr = self.lr
        if isinstance(lr, Tensor):
            lr = _scalar(lr, device) if lr.device == device and device.type != "cpu" else float(lr)
        given = dict(grad_scale=self.grad_scale, found_inf=self.found_inf, clip_factor=self.clip_factor)
        scalars: dict[str, Any] = {name: _scalar(t, device) for name, t in given.items() if t is not None}
        return replace(self, lr=lr, **scalars) if scalars or lr is not self.lr else self


@dataclass
class AdamTensors:
    """The tensors of one step: lists with an entry for each parameter, of its shape."""

    grads: list[Tensor]  # float32, bfloat16, float16 or float64
    params: list[Tensor]  # of the same dtypes; one with a master is only written
    exp_avgs: list[Tensor]  # float32, or the parameter's dtype; so are exp_avg_sqs
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]  # [] float32 each, on the parameter's device, counted up
    masters: list[Tensor | None] | None = None  # float32 weights that are updated in place of the parameter
    copies: list[Tensor | None] | None = None  # they also receive the new parameter, rounded to their dtype

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield gradient, parameter, exp_avg, exp_avg_sq, step, master and copy of each parameter."""
        none = [None] * len(self.params)
        required = (self.grads, self.params, self.exp_avgs, self.exp_avg_sqs, self.steps)
        return zip(*required, self.masters or none, self.copies or none, strict=True)

    def take(self, indices: Sequence[int]) -> AdamTensors:
        if len(indices) == len(self.params):
            return self
        return AdamTensors(*(values and [values[i] for i in indices] for values in vars(self).values()))


def _scalar(tensor: Tensor, device: torch.device) -> Tensor:
    to_device = device.type != "cpu"  # the host would read a number before its copy from a device ends
    return tensor.detach().to(device, torch.float32, non_blocking=to_device).reshape(()).resolve_neg()


# -- a step -----------------------------------------------------------------------------------------------------------


def adam_(tensors: AdamTensors, step: AdamStep, plan: AdamPlan | None = None) -> AdamPlan:
    """Take one step of Adam or AdamW, in place, with the numbers of torch.optim. Returns a plan for the next step.

    For each parameter p with gradient g and moments m and v, each operation rounded to float32 (float64 for float64)::

        t <- t + 1;  g <- g / grad_scale * clip_factor, negated if maximize
        L2: g <- g + weight_decay p;  AdamW: p <- p (1 - lr weight_decay)
        m <- m + (1 - beta1) (g - m);  v <- beta2 v + (1 - beta2) g g
        p <- p - (lr / (1 - beta1^t)) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    ``plan``, the result of the step before, saves time and changes no number. Sparse gradients and unknown dtypes are a
    TypeError, tensors that differ in shape or device a ValueError.
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
    """The choice of an implementation for each tensor, with the tables that native code reads."""

    def __init__(self, tensors: AdamTensors) -> None:
        parts: dict[tuple[_Kind, torch.device], list[int]] = defaultdict(list)
        seen: set[int] = set()
        for index, row in enumerate(tensors.rows()):
            kind, param = _kind(*row), row[1]
            if id(param) in seen:
                kind = _Kind.OTHER  # a parameter that is in the list twice steps twice, one after the other
            seen.add(id(param))
            parts[kind, param.device].append(index)
        self._parts = [
            (kind, device, indices, AdamTable(tensors.take(indices)) if kind is _Kind.NATIVE else None)
            for (kind, device), indices in parts.items()
        ]
        self._reusable = not any(kind in (_Kind.SHARDED, _Kind.OTHER) for kind, _ in parts)
        if self._reusable:
            self._seen = [_seen(*row) for row in tensors.rows()]
            self._masters, self._copies = _places(tensors.masters), _places(tensors.copies)

    def holds(self, tensors: AdamTensors) -> bool:
        """Return whether the plan fits these tensors, whose gradients may lie elsewhere and are not lazily negated."""
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
                or p.is_contiguous() is not (strides is None)
                or g.numel() != numel
                or g.dtype is not dtype
                or (None if g.is_contiguous() else g.stride()) != strides
            ):
                return False
        return _still(tensors.masters, self._masters) and _still(tensors.copies, self._copies)

    def run(self, tensors: AdamTensors, step: AdamStep) -> None:
        for kind, device, indices, table in self._parts:
            part, options = tensors.take(indices), step.on(device)
            if table is not None:
                table.run(part.grads, options, device)
            elif kind is not _Kind.OTHER and step.bias_correction and step.clip_factor is None:
                torch_fused_(part, options)
            else:
                reference_(part, options)
                continue
            increment_version(part.params)  # autograd does not see these writes
            if step.write_grads:
                increment_version(part.grads)
            if part.copies is not None:
                increment_version([copy for copy in part.copies if copy is not None])


class _Kind(Enum):
    """The implementation that can update a tensor, besides the reference."""

    NATIVE = auto()
    TORCH = auto()  # torch's fused operator, for most steps
    SHARDED = auto()  # the same, on DTensors
    OTHER = auto()


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
        return _Kind.NATIVE if selfcheck.trusted("adam", p.device) else _Kind.OTHER
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
    if tensors is None or places is None:
        return tensors is places
    for tensor, place in zip(tensors, places, strict=True):
        if tensor is None or place is None:
            if tensor is not None or place is not None:  # a tensor that is gone is not one that never was
                return False
        elif tensor is not place[0]() or tensor.data_ptr() != place[1]:
            return False
    return True


# -- in PyTorch -------------------------------------------------------------------------------------------------------


def torch_fused_(tensors: AdamTensors, step: AdamStep) -> None:
    """Take the step by torch's operator: on one device, float32, with bias corrections, no clipping, master or copy."""
    torch._foreach_add_(tensors.steps, 1)
    operator = torch._fused_adamw_ if step.adam_w_mode else torch._fused_adam_
    found_inf = None if step.found_inf is None else step.found_inf.ne(0).float()
    columns = tensors.params, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs
    names = ("lr", "beta1", "beta2", "weight_decay", "eps", "maximize", "grad_scale")
    options = {name: getattr(step, name) for name in names}
    operator(*columns, [], tensors.steps, amsgrad=False, found_inf=found_inf, **options)
    if found_inf is not None:
        torch._foreach_sub_(tensors.steps, [found_inf] * len(tensors.steps))


def reference_(tensors: AdamTensors, step: AdamStep) -> None:
    """Take the step on one device, in PyTorch: the specification, and the fallback for all tensors."""
    if step.found_inf is not None and bool(step.found_inf):
        return
    lr = step.lr.double() if isinstance(step.lr, Tensor) else step.lr
    for g, p, m, v, t, master, copy in tensors.rows():
        t += 1
        weights = _wide(p if master is None else master)
        direction = _direction_(weights, _gradient_(g, step).to(weights.dtype), m, v, t, lr, step)
        if step.adam_w_mode and step.weight_decay != 0:
            weights.mul_(1 - lr * step.weight_decay)
        weights.sub_(direction)
        for target in (p, copy):
            if target is not None and target is not weights:
                target.copy_(weights)


def _gradient_(grad: Tensor, step: AdamStep) -> Tensor:
    if grad._is_zerotensor():  # torch's operators cannot write to one
        grad = grad.clone()
    wide = _wide(grad)
    if step.grad_scale is not None:
        wide = wide / step.grad_scale
    if step.clip_factor is not None:
        wide = wide * step.clip_factor
    if step.write_grads and wide is not grad:
        grad.copy_(wide)
    return -wide if step.maximize else wide


def _direction_(
    weights: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    t: Tensor,
    lr: float | Tensor,
    step: AdamStep,
) -> Tensor:
    """Update the moments in place. Returns lr m^ / (sqrt(v^) + eps)."""
    if not step.adam_w_mode and step.weight_decay != 0:
        grad = grad + weights * step.weight_decay
    m, v = _wide(exp_avg), _wide(exp_avg_sq)
    m.add_((grad - m).mul_(1 - step.beta1))
    v.mul_(step.beta2).add_((grad * (1 - step.beta2)).mul_(grad))
    for moment, wide in ((exp_avg, m), (exp_avg_sq, v)):
        if moment is not wide:
            moment.copy_(wide)
    denominator = v.double().sqrt().to(v.dtype)  # torch calls MKL's float32 square root, which is not correctly rounded
    if step.bias_correction:
        count = float(t) if t.device.type == "cpu" else t.double()  # a GPU's host does not wait
        lr = lr / (1 - step.beta1**count)
        denominator.div_((1 - step.beta2**count) ** 0.5)
    return (m * lr).div_(denominator.add_(step.eps))


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


# -- by native code ---------------------------------------------------------------------------------------------------


_Row = library.record(
    "co_adam_tensor",
    (ctypes.c_void_p, "param grad exp_avg exp_avg_sq master copy step"),
    (ctypes.c_int64, "numel"),
    (ctypes.c_int32, "param_dtype grad_dtype moment_dtype copy_dtype"),
)
_Options = library.record(
    "co_adam_options",
    (ctypes.c_double, "lr beta1 beta2 eps weight_decay"),
    (ctypes.c_void_p, "lr_pointer grad_scale found_inf clip_factor"),
    (ctypes.c_int32, "adam_w_mode bias_correction maximize write_grads"),
)


class AdamTable:
    """The addresses of one device's tensors, as native code reads them: same strides for each parameter, no gaps."""

    def __init__(self, tensors: AdamTensors) -> None:
        self._rows = (_Row * len(tensors.params))(*(_row(*row) for row in tensors.rows()))
        words = memoryview(self._rows).cast("B").cast("Q")
        self._grads = words[_Row.grad.offset // 8 :: ctypes.sizeof(_Row) // 8]
        self._grads_at = self._grads.tolist()

    def run(self, grads: list[Tensor], step: AdamStep, device: torch.device) -> None:
        """Take a step with gradients of the table's dtypes and strides; a RuntimeError if the device fails."""
        grads_at = _addresses(grads)
        if 0 in grads_at:
            grads = [with_memory("a gradient", grad) for grad in grads]
            grads_at = _addresses(grads)
        if grads_at != self._grads_at:
            self._grads[:], self._grads_at = array("Q", grads_at), grads_at
        lr, lr_at = (0.0, step.lr) if isinstance(step.lr, Tensor) else (step.lr, None)
        numbers = lr, step.beta1, step.beta2, step.eps, step.weight_decay
        places = map(_pointer, (lr_at, step.grad_scale, step.found_inf, step.clip_factor))
        flags = step.adam_w_mode, step.bias_correction, step.maximize, step.write_grads
        options = _Options(*numbers, *places, *flags)
        call("co_adam", device, self._rows, len(self._rows), ctypes.byref(options))


def _addresses(tensors: list[Tensor]) -> list[int]:
    try:
        return [*map(Tensor.data_ptr, tensors)]
    except RuntimeError:  # one of them has no memory
        return [*map(address_of, tensors)]


def _row(g: Tensor, p: Tensor, m: Tensor, v: Tensor, t: Tensor, master: Tensor | None, copy: Tensor | None) -> Any:
    dtypes = DTYPES[p.dtype], DTYPES[g.dtype], DTYPES[m.dtype], 0 if copy is None else DTYPES[copy.dtype]
    return _Row(*map(_pointer, (p, g, m, v, master, copy, t)), p.numel(), *dtypes)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# -- the check of the first use ---------------------------------------------------------------------------------------


def _check(kernels: Any, data: selfcheck.Data) -> selfcheck.Written:
    for adam_w in (True, False):
        step, sizes = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1, adam_w, maximize=not adam_w), data.sizes()
        grads, params = ([data.normal(n, selfcheck.DTYPES[k % 3]) for k, n in enumerate(sizes)] for _ in range(2))
        moments, squares = [data.normal(n) for n in sizes], [data.positive(n) for n in sizes]
        steps = [data.zeros(dtype=torch.float32) for _ in sizes]
        tensors = AdamTensors(grads, params, moments, squares, steps)
        table = None if kernels is reference else AdamTable(tensors)
        for _ in range(2):
            reference_(tensors, step) if table is None else table.run(grads, step, data.device)
        yield from ((tensor, 0.0) for tensor in (*params, *moments, *squares, *steps))


selfcheck.FAMILIES["adam"] = _check
