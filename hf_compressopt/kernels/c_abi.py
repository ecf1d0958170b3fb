"""Operands as the C interface takes them: structures, tables of segments, and addresses that were checked."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from ctypes import addressof, byref, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_compressopt.kernels.errors import ERROR_CODE, Errors
from hf_compressopt.kernels.memory import address_of, in_memory, is_direct
from hf_compressopt.kernels.messages import Code, IntegerCode, SignCode
from hf_compressopt.kernels.operands import Average, Combination, Descent, IntegerAverage, LambOptions, Segment
from hf_compressopt.kernels.variance import Variance

#: Codes of the dtypes that native code knows.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SIZES = (4, 2, 2)
_STILL = 1


def _record(name: str, **fields: type[Any]) -> type[ctypes.Structure]:
    """Return the class of a structure of ``compressopt.h``."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items()), "__doc__": f"``{name}``."})


ErrorsRecord = _record("co_errors", values=c_void_p, messages=c_void_p)
VarianceRecord = _record("co_variance", values=c_void_p, codes=c_void_p, tops=c_void_p)
CombinationRecord = _record(
    "co_combination",
    x=c_void_p,
    last=c_void_p,
    grads=c_void_p,
    count=c_int64,
    factors=c_void_p,
    alpha=c_float,
    beta=c_float,
)
AverageRecord = _record(
    "co_average",
    messages=c_void_p,
    values=c_void_p,
    numel=c_int64,
    scale_block=c_int64,
    stride=c_int64,
    world_size=c_int32,
    unused=c_int32,
)
IntegersRecord = _record(
    "co_integers", messages=c_void_p, numel=c_int64, stride=c_int64, world_size=c_int32, bits=c_int32
)
DescentRecord = _record("co_descent", lr=c_float, decay=c_float, eps=c_float, eps_inside_sqrt=c_int32, bound=c_float)
LambRecord = _record(
    "co_lamb_options",
    beta1=c_float,
    one_minus_beta1=c_float,
    beta2=c_float,
    one_minus_beta2=c_float,
    eps=c_float,
    weight_decay=c_float,
    eps_inside_sqrt=c_int32,
    unused=c_int32,
)


def address(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, numel: int | None = None) -> int:
    """Return the address of a contiguous buffer of this device, dtype and size, or raise an error that names it."""
    if tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor on {device}, got {tensor.dtype} on {tensor.device}, "
            f"{_state(tensor)}"
        )
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, got {tensor.numel()}")
    return address_of(tensor) or _none(name, tensor)


def _none(name: str, tensor: Tensor) -> int:
    if tensor.numel():
        raise TypeError(f"{name} is a {type(tensor).__name__} without memory: native kernels need real data")
    return 0


def _state(tensor: Tensor) -> str:
    if not tensor.is_contiguous():
        return "not contiguous"
    return "contiguous" if is_direct(tensor) else "negated lazily: call resolve_neg() first"


class Operands:
    """The checked operands of one call. It keeps their tables and copies alive until the call returns.

    Args:
        device: Device of all tensors.
        numel: Elements of the bucket.
    """

    __slots__ = ("device", "kept", "numel")

    def __init__(self, device: torch.device, numel: int) -> None:
        """See the class."""
        self.device, self.numel = device, numel
        self.kept: list[Any] = []

    def read(self, name: str, tensor: Tensor, dtype: torch.dtype = torch.float32, numel: int | None = None) -> int:
        """Return the address of a buffer that is only read. It may be lazily negated."""
        if tensor.is_neg():
            tensor = in_memory(name, tensor)
            self.kept.append(tensor)
        return address(name, tensor, self.device, dtype, numel)

    def floats(self, name: str, tensor: Tensor, *, written: bool = True) -> int:
        """Return the address of a float32 buffer with the elements of the bucket."""
        if written:
            return address(name, tensor, self.device, torch.float32, self.numel)
        return self.read(name, tensor, torch.float32, self.numel)

    def per_tensor(self, name: str, tensor: Tensor, entries: int) -> int:
        """Return the address of an array of float32 with this number of entries or more, which is read."""
        if tensor.numel() < entries:
            raise ValueError(f"{name} must have {entries} entries or more, got {tensor.numel()}")
        return self.read(name, tensor)

    def segments(self, name: str, segments: Sequence[Segment], *, written: bool = True) -> tuple[int, int, int]:
        """Make the table of segments that cover the bucket, four 64-bit words for each.

        Returns the address of the table, the number of segments, and the entries that a per-tensor array needs. Tensors
        that are only read may be lazily negated.
        """
        words: list[int] = []
        covered, last, device = 0, -1, self.device
        for segment in segments:
            tensor, start, numel, index = segment.tensor, segment.start, segment.numel, segment.index
            place = code = 0
            if tensor is not None:
                negated = tensor.is_neg()
                if negated and not written:
                    tensor, negated = in_memory(name, tensor), False
                    self.kept.append(tensor)
                code = DTYPES.get(tensor.dtype, -1)
                if code < 0 or negated or tensor.device != device or not tensor.is_contiguous():
                    raise ValueError(
                        f"{name} must be contiguous float32, bfloat16 or float16 tensors on {device}, got "
                        f"{tensor.dtype} on {tensor.device} with shape {tuple(tensor.shape)} and strides "
                        f"{tensor.stride()}, {_state(tensor)}"
                    )
                if start < 0 or numel < 0 or start + numel > tensor.numel():
                    raise ValueError(f"{name}: elements {start} to {start + numel} of a tensor of {tensor.numel()}")
                place = (address_of(tensor) or _none(name, tensor)) + start * _SIZES[code]
            words += (place, numel, index << 32 | code, _STILL if segment.still else 0)
            covered += numel
            if index > last:
                last = index
        if covered != self.numel:
            raise ValueError(f"the segments of {name} must cover {self.numel} elements, got {covered}")
        table = array("q", words)
        self.kept.append(table)
        return table.buffer_info()[0], len(segments), last + 1

    def errors(self, name: str, error: Errors, world_size: int, *, written: bool = True) -> Any:
        """Return a ``co_errors`` by reference."""
        if isinstance(error, Tensor):
            return byref(ErrorsRecord(self.floats(name, error, written=written), None))
        if error.count != self.numel or error.world_size != world_size:
            raise ValueError(
                f"{name} must be of {self.numel} elements in {world_size} chunk(s), got {error.count} in "
                f"{error.world_size}"
            )
        nbytes = bytes_of(ERROR_CODE, self.numel, world_size)
        return byref(ErrorsRecord(None, address(name, error.messages, self.device, torch.uint8, nbytes)))

    def variance(self, variance: Variance, tensors: int) -> Any:
        """Return a ``co_variance`` by reference. tensors: the entries that a per-tensor array needs."""
        if isinstance(variance, Tensor):
            return byref(VarianceRecord(self.floats("exp_avg_sq", variance, written=False), None, None))
        if variance.tops.numel() < tensors:
            raise ValueError(f"tops must have {tensors} entries or more, got {variance.tops.numel()}")
        codes = address("exp_avg_sq", variance.codes, self.device, torch.uint8, self.numel)
        return byref(VarianceRecord(None, codes, address("tops", variance.tops, self.device, torch.int32)))

    def combination(self, z: Combination) -> Any:
        """Return a ``co_combination`` by reference."""
        x = last = grads = factors = None
        count = tensors = 0
        if z.x is not None:
            x = self.floats("x", z.x, written=False)
        elif z.last is not None:
            if z.last.messages is None or z.last.numel != z.numel:
                raise ValueError(f"last must hold messages of {z.numel} elements")
            record = self._average(z.last)
            self.kept.append(record)
            last = addressof(record)
        if z.grads is not None:
            grads, count, tensors = self.segments("gradients", z.grads, written=False)
            if z.factors is not None:
                factors = self.per_tensor("factors", z.factors, tensors)
        return byref(CombinationRecord(x, last, grads, count, factors, z.alpha, z.beta))

    def average(self, y: Average | IntegerAverage) -> Any:
        """Return a ``co_average``, or of integers a ``co_integers``, by reference."""
        return byref(self._average(y))

    def _average(self, y: Average | IntegerAverage) -> ctypes.Structure:
        if isinstance(y, Average) and y.values is not None:
            return AverageRecord(None, self.floats("values", y.values, written=False), y.numel, 0, 0, 1)
        if y.messages is None:
            raise ValueError("an average needs messages or values")
        block, bits = (y.scale_block, 0) if isinstance(y, Average) else (None, y.bits)
        needed = _bytes_of_average(block, bits, y.numel, y.world_size, y.stride)
        if y.messages.numel() < needed:
            raise ValueError(f"messages must have {needed} bytes or more, got {y.messages.numel()}")
        messages = self.read("messages", y.messages, torch.uint8)
        if isinstance(y, Average):
            return AverageRecord(messages, None, y.numel, y.scale_block or 0, y.stride, y.world_size)
        return IntegersRecord(messages, y.numel, y.stride, y.world_size, y.bits)

    @staticmethod
    def descent(descent: Descent) -> Any:
        """Return a ``co_descent`` by reference."""
        return _descent(descent.lr, descent.decay, descent.eps, descent.eps_inside_sqrt, descent.bound)

    @staticmethod
    def lamb(o: LambOptions) -> Any:
        """Return a ``co_lamb_options`` by reference."""
        betas = o.beta1, 1 - o.beta1, o.beta2, 1 - o.beta2
        return byref(LambRecord(*betas, o.eps, o.weight_decay, o.eps_inside_sqrt))


@lru_cache
def _descent(*numbers: float) -> Any:
    return byref(DescentRecord(*numbers))


@lru_cache(maxsize=4096)
def bytes_of(code: Code, numel: int, world_size: int = 1) -> int:
    """Return the bytes of the messages of all chunks of a bucket."""
    return code.sizes(numel, world_size)[1]


@lru_cache(maxsize=4096)
def _bytes_of_average(scale_block: int | None, bits: int, numel: int, world_size: int, stride: int) -> int:
    """Return the bytes that the messages of an average take, a stride apart. bits: 0 for signs."""
    code = IntegerCode(bits) if bits else SignCode(scale_block)
    sizes, _ = code.sizes(numel, world_size)
    if max(sizes) > stride and world_size > 1:
        raise ValueError(f"stride must be at least {max(sizes)}, the length of a message, got {stride}")
    last = max((rank for rank, size in enumerate(sizes) if size), default=0)
    return last * stride + sizes[last]


def mark_written(flats: Iterable[Tensor], segments: Sequence[Segment] = ()) -> None:
    """Tell autograd that native code has written to tensors."""
    tensors = [*flats, *(segment.tensor for segment in segments if segment.tensor is not None)]
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])
