"""Operands as the C interface takes them: structures, tables of segments, and addresses that were checked."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_compressopt.kernels.errors import CompactErrors, Errors
from hf_compressopt.kernels.memory import address_of, in_memory, is_direct
from hf_compressopt.kernels.messages import chunk_message_nbytes
from hf_compressopt.kernels.operands import Average, Combination, Segment
from hf_compressopt.kernels.updates import Descent, LambOptions
from hf_compressopt.kernels.variance import Variance

#: Codes of the dtypes that native code knows.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STILL = 1

# -- the C interface --------------------------------------------------------------------------------------------------


class ErrorsRecord(ctypes.Structure):
    """``co_errors``."""

    _fields_ = [("values", c_void_p), ("messages", c_void_p)]


class VarianceRecord(ctypes.Structure):
    """``co_variance``."""

    _fields_ = [("values", c_void_p), ("codes", c_void_p), ("tops", c_void_p)]


class CombinationRecord(ctypes.Structure):
    """``co_combination``."""

    _fields_ = [
        ("x", c_void_p),
        ("last", c_void_p),
        ("grads", c_void_p),
        ("count", c_int64),
        ("factors", c_void_p),
        ("alpha", c_float),
        ("beta", c_float),
        ("rest", c_void_p),
    ]


class AverageRecord(ctypes.Structure):
    """``co_average``."""

    _fields_ = [
        ("messages", c_void_p),
        ("values", c_void_p),
        ("numel", c_int64),
        ("scale_block", c_int64),
        ("stride", c_int64),
        ("world_size", c_int32),
        ("unused", c_int32),
    ]


class DescentRecord(ctypes.Structure):
    """``co_descent``."""

    _fields_ = [
        ("lr", c_float),
        ("decay", c_float),
        ("eps", c_float),
        ("eps_inside_sqrt", c_int32),
        ("bound", c_float),
    ]


class LambRecord(ctypes.Structure):
    """``co_lamb_options``."""

    _fields_ = [
        ("beta1", c_float),
        ("one_minus_beta1", c_float),
        ("beta2", c_float),
        ("one_minus_beta2", c_float),
        ("eps", c_float),
        ("weight_decay", c_float),
        ("eps_inside_sqrt", c_int32),
        ("unused", c_int32),
    ]


# -- tensors as C sees them -------------------------------------------------------------------------------------------


def pointer_to(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, numel: int | None) -> int:
    """Return the address of a buffer.

    Args:
        name: Name of the argument, for the message.
        tensor: The buffer.
        device: Its device.
        dtype: Its dtype.
        numel: Its number of elements; None for any.

    Raises:
        TypeError: For a tensor without memory, such as a fake one.
        ValueError: For another dtype, device or size, or a buffer that is not contiguous or that is lazily negated.
    """
    if tensor.dtype != dtype or tensor.device != device or not is_direct(tensor):
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor on {device}, got {tensor.dtype} on {tensor.device}, "
            f"{_state(tensor)}"
        )
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, got {tensor.numel()}")
    return _address(name, tensor)


def _address(name: str, tensor: Tensor) -> int:
    address = address_of(tensor)
    if address == 0 and tensor.numel() > 0:
        raise TypeError(f"{name} is a {type(tensor).__name__} without memory: native kernels need real data")
    return address


def _state(tensor: Tensor) -> str:
    if not tensor.is_contiguous():
        return "not contiguous"
    return "contiguous" if is_direct(tensor) else "negated lazily: call resolve_neg() first"


class SegmentTable:
    """A table of ``co_segment``: four 64-bit words for each segment.

    Args:
        name: Name of the argument, for messages.
        segments: The segments, which cover ``numel`` elements.
        device: Device of their tensors.
        numel: Elements of the bucket.
        written: Whether the tensors are written. Tensors that are only read may be lazily negated.

    Attributes:
        address: Address of the table.
        count: Number of segments.
        tensors: Entries that a per-tensor array needs.

    Raises:
        ValueError: For segments that do not cover the bucket, or tensors that native code cannot take.
    """

    def __init__(
        self, name: str, segments: Sequence[Segment], device: torch.device, numel: int, *, written: bool = True
    ) -> None:
        """See the class."""
        words: list[int] = []
        self._copies: list[Tensor] = []
        covered, last = 0, -1
        for segment in segments:
            address, code, tensor = 0, 0, segment.tensor
            if tensor is not None:
                if not written and tensor.is_neg():
                    tensor = in_memory(name, tensor)
                    self._copies.append(tensor)
                code = _code(name, segment, tensor, device)
                address = _address(name, tensor) + segment.start * tensor.element_size()
            words += (address, segment.numel, segment.index << 32 | code, _STILL if segment.still else 0)
            covered += segment.numel
            last = max(last, segment.index)
        if covered != numel:
            raise ValueError(f"the segments of {name} must cover {numel} elements, got {covered}")
        self._words = array("q", words)
        self.address = self._words.buffer_info()[0]
        self.count, self.tensors = len(segments), last + 1


def _code(name: str, segment: Segment, tensor: Tensor, device: torch.device) -> int:
    code = DTYPES.get(tensor.dtype)
    if code is None or tensor.device != device or not is_direct(tensor):
        raise ValueError(
            f"{name} must be contiguous float32, bfloat16 or float16 tensors on {device}, got {tensor.dtype} on "
            f"{tensor.device} with shape {tuple(tensor.shape)} and strides {tensor.stride()}, {_state(tensor)}"
        )
    if segment.start < 0 or segment.numel < 0 or segment.start + segment.numel > tensor.numel():
        stop = segment.start + segment.numel
        raise ValueError(f"{name}: elements {segment.start} to {stop} of a tensor of {tensor.numel()}")
    return code


class Operands:
    """The checked operands of one call. It keeps their tables and copies alive until the call returns.

    Args:
        device: Device of all tensors.
        numel: Elements of the bucket.
    """

    def __init__(self, device: torch.device, numel: int) -> None:
        """See the class."""
        self.device, self.numel = device, numel
        self.kept: list[Any] = []

    def read(self, name: str, tensor: Tensor, dtype: torch.dtype = torch.float32, numel: int | None = None) -> int:
        """Return the address of a buffer that is only read. It may be lazily negated."""
        if tensor.is_neg():
            tensor = in_memory(name, tensor)
            self.kept.append(tensor)
        return pointer_to(name, tensor, self.device, dtype, numel)

    def floats(self, name: str, tensor: Tensor, *, written: bool = True) -> int:
        """Return the address of a float32 buffer with the elements of the bucket."""
        if written:
            return pointer_to(name, tensor, self.device, torch.float32, self.numel)
        return self.read(name, tensor, numel=self.numel)

    def per_tensor(self, name: str, tensor: Tensor, segments: SegmentTable, width: int = 1) -> int:
        """Return the address of an array with ``width`` entries per tensor of a table."""
        if tensor.numel() < segments.tensors * width:
            raise ValueError(f"{name} must have {segments.tensors * width} entries or more, got {tensor.numel()}")
        if name == "sums":
            return pointer_to(name, tensor, self.device, torch.float64, None)
        return self.read(name, tensor)

    def segments(self, name: str, segments: Sequence[Segment], *, written: bool = True) -> SegmentTable:
        """Return the table of some segments."""
        table = SegmentTable(name, segments, self.device, self.numel, written=written)
        self.kept.append(table)
        return table

    def errors(self, name: str, error: Errors, world_size: int, *, written: bool = True) -> Any:
        """Return a ``co_errors`` by reference."""
        if isinstance(error, Tensor):
            return ctypes.byref(ErrorsRecord(self.floats(name, error, written=written), None))
        if error.count != self.numel or error.world_size != world_size:
            raise ValueError(
                f"{name} must be of {self.numel} elements in {world_size} chunk(s), got {error.count} in "
                f"{error.world_size}"
            )
        nbytes = CompactErrors.nbytes(self.numel, world_size)
        return ctypes.byref(ErrorsRecord(None, pointer_to(name, error.messages, self.device, torch.uint8, nbytes)))

    def variance(self, variance: Variance, segments: SegmentTable) -> Any:
        """Return a ``co_variance`` by reference."""
        name = "exp_avg_sq"
        if isinstance(variance, Tensor):
            return ctypes.byref(VarianceRecord(self.floats(name, variance, written=False), None, None))
        if variance.tops.numel() < segments.tensors:
            raise ValueError(f"tops must have {segments.tensors} entries or more, got {variance.tops.numel()}")
        codes = pointer_to(name, variance.codes, self.device, torch.uint8, self.numel)
        tops = pointer_to("tops", variance.tops, self.device, torch.int32, None)
        return ctypes.byref(VarianceRecord(None, codes, tops))

    def combination(self, z: Combination) -> Any:
        """Return a ``co_combination`` by reference."""
        x = None if z.x is None else self.floats("x", z.x, written=False)
        last = None
        if z.x is None and z.last is not None:
            if z.last.messages is None or z.last.numel != z.numel:
                raise ValueError(f"last must hold messages of {z.numel} elements")
            last = self.average(z.last)
            self.kept.append(last)
        grads = count = factors = None
        if z.grads is not None:
            table = self.segments("gradients", z.grads, written=False)
            grads, count = table.address, table.count
            if z.factors is not None:
                factors = self.per_tensor("factors", z.factors, table)
        last = None if last is None else ctypes.cast(last, c_void_p)
        rest = None if z.rest is None else self.floats("rest", z.rest, written=False)
        return ctypes.byref(CombinationRecord(x, last, grads, count or 0, factors, z.alpha, z.beta, rest))

    def average(self, y: Average) -> Any:
        """Return a ``co_average`` by reference."""
        if y.values is not None:
            return ctypes.byref(AverageRecord(None, self.floats("values", y.values, written=False), y.numel, 0, 0, 1))
        messages, block = y.messages, block_argument(y.scale_block)
        if messages is None:
            raise ValueError("an average needs messages or values")
        nbytes = chunk_message_nbytes(y.numel, y.world_size, y.scale_block)
        if max(nbytes) > y.stride and y.world_size > 1:
            raise ValueError(f"the messages are {max(nbytes)} bytes long, and the stride is {y.stride}")
        last = max((rank for rank, size in enumerate(nbytes) if size), default=0)
        if messages.numel() < last * y.stride + nbytes[last]:
            raise ValueError(
                f"messages must have {last * y.stride + nbytes[last]} bytes or more, got {messages.numel()}"
            )
        pointer = self.read("messages", messages, torch.uint8)
        return ctypes.byref(AverageRecord(pointer, None, y.numel, block, y.stride, y.world_size))


def block_argument(scale_block: int | None) -> int:
    """Check a scale block. Returns 0 for None.

    Raises:
        ValueError: If it is not a positive multiple of 8 or None.
    """
    if scale_block is not None and (scale_block <= 0 or scale_block % 8 != 0):
        raise ValueError(f"scale_block must be a positive multiple of 8 or None, got {scale_block}")
    return scale_block or 0


def descent_record(descent: Descent) -> Any:
    """Return a ``co_descent`` by reference."""
    return ctypes.byref(DescentRecord(descent.lr, descent.decay, descent.eps, descent.eps_inside_sqrt, descent.bound))


def lamb_record(o: LambOptions) -> Any:
    """Return a ``co_lamb_options`` by reference."""
    betas = o.beta1, 1 - o.beta1, o.beta2, 1 - o.beta2
    return ctypes.byref(LambRecord(*betas, o.eps, o.weight_decay, o.eps_inside_sqrt))


def mark_written(flats: Iterable[Tensor], segments: Sequence[Segment] = ()) -> None:
    """Tell autograd that native code has written to tensors."""
    tensors = [*flats, *(segment.tensor for segment in segments if segment.tensor is not None)]
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])
