"""Tensors whose memory holds their values, as native code reads it, and copies of tensors whose memory does not.

``data_ptr()`` alone is not enough. A tensor may be negated or conjugated lazily: its memory holds the values before
that. It may have gaps, or no memory at all: zeros that are never stored, the pending result of a collective, a wrapper
of torch.func or of a tensor subclass.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float
from functools import lru_cache, wraps

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

_PLAIN = (Tensor, torch.nn.Parameter)


def kept_per_device(make: Callable[[torch.device], Tensor]) -> Callable[[torch.device], Tensor]:
    """Keep the table that a function makes for a device; no fake one, and none of a graph that is traced."""
    tables: dict[torch.device, Tensor] = {}

    @wraps(make)
    def table(device: torch.device) -> Tensor:
        # FakeTensorMode takes no real tensor, and dynamo traces no question for modes
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            return make(device)
        if device not in tables:
            tables[device] = make(device)
        return tables[device]

    return table


def dense_values(name: str, tensor: Tensor) -> Tensor:
    """Return a strided tensor's values in contiguous memory: itself if its memory holds them in order."""
    return tensor if is_direct(tensor) and address_of(tensor) else in_memory(name, tensor)


def in_memory(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor if its memory holds its values in order, else a copy; a TypeError if it has no plain values."""
    tensor = tensor.detach()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    if (problem := why_not_dense(tensor)) is None:
        return with_memory(name, tensor if tensor.is_contiguous() else tensor.contiguous())
    raise _no_values(name, problem)


def with_memory(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor if it has memory or no elements, else a copy of the same strides; or raise a TypeError."""
    if address_of(tensor) or tensor.numel() == 0 or tensor.is_meta:
        return tensor
    copy = tensor.clone()  # stores lazy zeros, and waits for the pending result of a collective
    if address_of(copy) and copy.stride() == tensor.stride():
        return copy
    raise _no_values(name, f"a {type(tensor).__name__} without memory of its own")


def _no_values(name: str, problem: str) -> TypeError:
    return TypeError(f"{name} must hold its values in dense memory, got {problem}: give a plain dense tensor")


def flat_view(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as [n] in the same memory, with a stride of 1: one element may have any other."""
    flat = tensor.view(-1)
    return flat if flat.stride() == (1,) else flat.as_strided((flat.numel(),), (1,))


def holds_values(tensor: Tensor) -> bool:
    """Return whether the memory of a real strided tensor holds its values, with or without gaps."""
    return not tensor.is_neg() and (address_of(tensor) != 0 or tensor.numel() == 0)


def is_direct(tensor: Tensor) -> bool:
    """Return whether a real tensor is contiguous, and its memory holds its values rather than their negatives."""
    return tensor.is_contiguous() and not tensor.is_neg()


def overwrite_(tensor: Tensor, values: Tensor) -> None:
    """Write values of the same shape and dtype; a tensor whose elements share memory, or have none, gets new memory."""
    repeated = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if repeated or (tensor.numel() and not address_of(tensor)):
        tensor.data = values
    else:
        tensor.copy_(values)


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's first element; 0 if it has no memory."""
    if type(tensor) not in _PLAIN and isinstance(tensor, FakeTensor):  # torch's isinstance takes as long as an operator
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # tensors inside torch.func.vmap and torch.func.grad
        return 0


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers as a tensor on a device, [n]. The host does not wait for the device, as torch.tensor does."""
    if not numbers:
        return torch.empty(0, dtype=dtype, device=device)
    here = torch.frombuffer(array("d", numbers), dtype=torch.float64).to(dtype)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


def numbers_in_place(device: torch.device, numbers: array[float]) -> Tensor:
    """Return float32 numbers on a device, [n]; in host memory ``numbers`` itself, where the host reads what comes."""
    if numbers and reads_at_once(device):
        return torch.frombuffer(numbers, dtype=torch.float32)
    return numbers_on(device, numbers)


def in_float32(number: float) -> float:
    """Return a number as float32 rounds it."""
    return c_float(number).value


@lru_cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@lru_cache
def _stream_of_messages(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class SideStream:
    """A stream of a GPU beside the one on which backward runs, which does not wait for messages that are awaited here.

    There is one per device, so that work of several senders keeps its order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream_of_messages(device)

    def __reduce__(self) -> tuple[type[SideStream], tuple[torch.device]]:
        return SideStream, (self._device,)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, work is queued here, behind all that is queued on the current stream now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let later work of the current stream wait for all that is queued here now."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor, if it is freed, until what is queued here by then has read it."""
        tensor.record_stream(self._stream)


def side_stream_of(device: torch.device) -> SideStream | None:
    """Return the side stream of a device; None where the host does the work itself."""
    return SideStream(device) if device.type == "cuda" else None


def fetch_later(tensor: Tensor, *, beside: bool = False) -> Callable[[], Tensor]:
    """Begin to copy a tensor to host memory, and return what returns the copy: it waits for no work queued later.

    ``beside``: On a stream of its own, so that a large copy holds up no kernel.
    """
    if tensor.device.type != "cuda":
        here = tensor.detach().to("cpu", copy=True)
        return lambda: here
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    now = torch.cuda.current_stream(tensor.device)
    stream = _stream_of_copies(tensor.device) if beside else now
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        here.copy_(tensor.detach(), non_blocking=True)
        copied.record(stream)
    if beside:
        tensor.record_stream(stream)

    def fetched() -> Tensor:
        copied.synchronize()
        return here

    return fetched


def reads_at_once(device: torch.device) -> bool:
    """Return whether the host reads numbers of the device without waiting for work that is queued there."""
    return device.type == "cpu"


def why_not_dense(tensor: Tensor) -> str | None:
    """Return what a tensor is that no optimizer of this package reads or updates; None for a dense one."""
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})"
    return None
