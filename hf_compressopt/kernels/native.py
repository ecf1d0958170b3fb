"""The native kernels, with the names and arguments of :mod:`hf_compressopt.kernels.reference`."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_compressopt.kernels.library import call
from hf_compressopt.kernels.memory import address_of, in_memory, is_direct
from hf_compressopt.kernels.messages import chunk_message_nbytes, message_nbytes
from hf_compressopt.kernels.operands import Average, Combination, Descent, LambOptions, Segment

#: Codes of the dtypes that native code knows.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STILL = 1

# -- the C interface --------------------------------------------------------------------------------------------------


class _Combination(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("grads", c_void_p),
        ("count", c_int64),
        ("factors", c_void_p),
        ("alpha", c_float),
        ("beta", c_float),
    ]


class _Average(ctypes.Structure):
    _fields_ = [
        ("messages", c_void_p),
        ("values", c_void_p),
        ("numel", c_int64),
        ("scale_block", c_int64),
        ("stride", c_int64),
        ("world_size", c_int32),
        ("unused", c_int32),
    ]


class _Descent(ctypes.Structure):
    _fields_ = [("lr", c_float), ("decay", c_float), ("eps", c_float), ("eps_inside_sqrt", c_int32)]


class _LambOptions(ctypes.Structure):
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


def _pointer(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, numel: int | None) -> int:
    """Where a buffer begins. numel: what it must hold; None: any.

    Raises:
        TypeError: For a tensor of another kind, such as a fake one.
        ValueError: For another dtype, device or size, or one that is not contiguous or lazily negated.
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


class _Segments:
    """A table of ``co_segment``: four 64-bit words each. Tensors that are only read may be lazily negated."""

    def __init__(
        self, name: str, segments: Sequence[Segment], device: torch.device, numel: int, *, written: bool = True
    ) -> None:
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


class _Operands:
    """Pointers of one call, and what must outlive it."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self.device, self.numel = device, numel
        self.kept: list[Any] = []

    def read(self, name: str, tensor: Tensor, dtype: torch.dtype = torch.float32, numel: int | None = None) -> int:
        if tensor.is_neg():
            tensor = in_memory(name, tensor)
            self.kept.append(tensor)
        return _pointer(name, tensor, self.device, dtype, numel)

    def floats(self, name: str, tensor: Tensor, *, written: bool = True) -> int:
        if written:
            return _pointer(name, tensor, self.device, torch.float32, self.numel)
        return self.read(name, tensor, numel=self.numel)

    def per_tensor(self, name: str, tensor: Tensor, segments: _Segments, width: int = 1) -> int:
        if tensor.numel() < segments.tensors * width:
            raise ValueError(f"{name} must have {segments.tensors * width} entries or more, got {tensor.numel()}")
        if name == "sums":
            return _pointer(name, tensor, self.device, torch.float64, None)
        return self.read(name, tensor)

    def segments(self, name: str, segments: Sequence[Segment], *, written: bool = True) -> _Segments:
        table = _Segments(name, segments, self.device, self.numel, written=written)
        self.kept.append(table)
        return table

    def combination(self, z: Combination) -> Any:
        x = None if z.x is None else self.floats("x", z.x, written=False)
        grads = count = factors = None
        if z.grads is not None:
            table = self.segments("gradients", z.grads, written=False)
            grads, count = table.address, table.count
            if z.factors is not None:
                factors = self.per_tensor("factors", z.factors, table)
        return ctypes.byref(_Combination(x, grads, count or 0, factors, z.alpha, z.beta))

    def average(self, y: Average) -> Any:
        if y.values is not None:
            return ctypes.byref(_Average(None, self.floats("values", y.values, written=False), y.numel, 0, 0, 1))
        messages, block = y.messages, _block(y.scale_block)
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
        return ctypes.byref(_Average(pointer, None, y.numel, block, y.stride, y.world_size))


def _block(scale_block: int | None) -> int:
    if scale_block is not None and (scale_block <= 0 or scale_block % 8 != 0):
        raise ValueError(f"scale_block must be a positive multiple of 8 or None, got {scale_block}")
    return scale_block or 0


def _descent(descent: Descent) -> Any:
    return ctypes.byref(_Descent(descent.lr, descent.decay, descent.eps, descent.eps_inside_sqrt))


def _lamb_options(o: LambOptions) -> Any:
    betas = o.beta1, 1 - o.beta1, o.beta2, 1 - o.beta2
    return ctypes.byref(_LambOptions(*betas, o.eps, o.weight_decay, o.eps_inside_sqrt))


def _written(flats: Iterable[Tensor], segments: Sequence[Segment] = ()) -> None:
    """Tell autograd what was changed behind its back."""
    tensors = [*flats, *(segment.tensor for segment in segments if segment.tensor is not None)]
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


# -- the kernels ------------------------------------------------------------------------------------------------------


def compress_(z: Combination, error: Tensor, messages: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :func:`hf_compressopt.kernels.compress_`."""
    use, n, block = _Operands(error.device, z.numel), z.numel, _block(scale_block)
    out = _pointer("messages", messages, use.device, torch.uint8, sum(chunk_message_nbytes(n, world_size, scale_block)))
    arguments = use.combination(z), use.floats("error", error), out, n, block, world_size
    call("co_compress", use.device, *arguments)
    _written([error, messages])


def average_compress_(messages: Tensor, error: Tensor, out: Tensor, world_size: int, scale_block: int | None) -> None:
    """See :func:`hf_compressopt.kernels.average_compress_`."""
    use, n, block = _Operands(error.device, error.numel()), error.numel(), _block(scale_block)
    nbytes = message_nbytes(n, scale_block)
    received = use.read("messages", messages, torch.uint8, world_size * nbytes)
    sent = _pointer("out", out, use.device, torch.uint8, nbytes)
    arguments = received, use.floats("error", error), sent, n, block, world_size
    call("co_average_compress", use.device, *arguments)
    _written([error, out])


def decompress_(y: Average, out: Tensor) -> None:
    """See :func:`hf_compressopt.kernels.decompress_`."""
    use = _Operands(out.device, y.numel)
    call("co_decompress", use.device, use.average(y), use.floats("out", out))
    _written([out])


def combine_(z: Combination, out: Tensor) -> None:
    """See :func:`hf_compressopt.kernels.combine_`."""
    use = _Operands(out.device, z.numel)
    call("co_combine", use.device, use.combination(z), use.floats("out", out), z.numel)
    _written([out])


def apply_adam_(
    y: Average,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Segment],
    descent: Descent,
    beta: float,
    corrections: Tensor | None,
) -> None:
    """See :func:`hf_compressopt.kernels.apply_adam_`."""
    use = _Operands(exp_avg.device, y.numel)
    table = use.segments("parameters", params)
    call(
        "co_apply_adam",
        use.device,
        use.average(y),
        use.floats("exp_avg", exp_avg),
        use.floats("exp_avg_sq", exp_avg_sq, written=False),
        table.address,
        table.count,
        None if corrections is None else use.per_tensor("corrections", corrections, table, 2),
        beta,
        _descent(descent),
    )
    _written([exp_avg], params)


def local_step_(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    local_update: Tensor,
    grads: Sequence[Segment] | None,
    params: Sequence[Segment],
    beta1: float,
    descent: Descent,
) -> None:
    """See :func:`hf_compressopt.kernels.local_step_`."""
    use = _Operands(exp_avg.device, exp_avg.numel())
    table = use.segments("parameters", params)
    if grads is not None and len(grads) != table.count:
        raise ValueError(f"gradients and parameters must have the same segments, got {len(grads)} and {table.count}")
    call(
        "co_local_step",
        use.device,
        use.floats("exp_avg", exp_avg),
        use.floats("exp_avg_sq", exp_avg_sq, written=False),
        use.floats("local_update", local_update),
        None if grads is None else use.segments("gradients", grads, written=False).address,
        table.address,
        table.count,
        use.numel,
        beta1,
        1 - beta1,
        _descent(descent),
    )
    _written([exp_avg, local_update], params)


def sync_parameters_(
    y: Average,
    exp_avg: Tensor,
    anchor: Tensor,
    exp_avg_sq: Tensor,
    local_update: Tensor,
    params: Sequence[Segment],
    lr_sum: float,
    descent: Descent,
) -> None:
    """See :func:`hf_compressopt.kernels.sync_parameters_`."""
    use = _Operands(exp_avg.device, y.numel)
    table = use.segments("parameters", params)
    call(
        "co_sync_parameters",
        use.device,
        use.average(y),
        use.floats("exp_avg", exp_avg),
        use.floats("anchor", anchor),
        use.floats("exp_avg_sq", exp_avg_sq, written=False),
        use.floats("local_update", local_update),
        table.address,
        table.count,
        lr_sum,
        _descent(descent),
    )
    _written([exp_avg, anchor, local_update], params)


def lamb_moments_(
    y: Average,
    exp_avg: Tensor,
    exp_avg_sq_fresh: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Segment],
    factors: Tensor,
    sums: Tensor,
    options: LambOptions,
) -> None:
    """See :func:`hf_compressopt.kernels.lamb_moments_`."""
    use = _Operands(exp_avg.device, y.numel)
    table = use.segments("parameters", params, written=False)
    call(
        "co_lamb_moments",
        use.device,
        use.average(y),
        use.floats("exp_avg", exp_avg),
        use.floats("exp_avg_sq_fresh", exp_avg_sq_fresh),
        use.floats("exp_avg_sq", exp_avg_sq, written=False),
        table.address,
        table.count,
        use.per_tensor("factors", factors, table),
        use.per_tensor("sums", sums, table, 3),
        _lamb_options(options),
    )
    _written([exp_avg, exp_avg_sq_fresh, sums])


def lamb_apply_(
    exp_avg: Tensor, exp_avg_sq: Tensor, params: Sequence[Segment], rates: Tensor, options: LambOptions
) -> None:
    """See :func:`hf_compressopt.kernels.lamb_apply_`."""
    use = _Operands(exp_avg.device, exp_avg.numel())
    table = use.segments("parameters", params)
    call(
        "co_lamb_apply",
        use.device,
        use.floats("exp_avg", exp_avg, written=False),
        use.floats("exp_avg_sq", exp_avg_sq, written=False),
        table.address,
        table.count,
        use.numel,
        use.per_tensor("rates", rates, table),
        _lamb_options(options),
    )
    _written([], params)


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """See :func:`hf_compressopt.kernels.sum_of_squares`."""
    flats = [t if is_direct(t) and address_of(t) else in_memory("a tensor", t) for t in tensors]
    for flat in flats:
        if flat.device != device or flat.dtype not in DTYPES:
            raise ValueError(
                f"tensors must be float32, bfloat16 or float16 on {device}, got {flat.dtype} on {flat.device}"
            )
    rows = ((flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], 0) for flat in flats)
    table = array("q", chain.from_iterable(rows))
    sums = torch.zeros(len(flats), dtype=torch.float64, device=device)
    call("co_square_sums", device, table.buffer_info()[0], len(flats), sums.data_ptr())
    return sums.sum()


def copy_(out: Tensor, source: Tensor) -> None:
    """See :func:`hf_compressopt.kernels.copy_`."""
    device, numel = source.device, source.numel()
    read, written = (_pointer(*named, device, torch.float32, numel) for named in (("source", source), ("out", out)))
    call("co_copy", device, read, written, numel)
    _written([out])
