"""The native kernels: calls of the C interface, ``csrc/compressopt.h``, with operands whose addresses were checked.

The functions are those of :mod:`hf_compressopt.kernels.reference`, whose contracts hold for them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, byref, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_compressopt.kernels.compact import ERROR_FORMAT, Errors, Variance, dither_table, like_errors
from hf_compressopt.kernels.library import index_of, loaded, record
from hf_compressopt.kernels.memory import address_of, dense_values, in_memory, is_direct
from hf_compressopt.kernels.messages import IntegerFormat, MessageFormat, SignFormat
from hf_compressopt.kernels.reference import (
    SKETCH_NUMEL,
    AdamUpdate,
    Average,
    Combination,
    Descent,
    LambMoments,
    LambOptions,
    LocalUpdate,
    ParameterSync,
    Segment,
    VarianceUpdate,
)

#: Codes of the dtypes that native code knows.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SIZES = (4, 2, 2)
_STILL = 1


_Exec = record("co_exec", (c_int32, "threads device"), (c_void_p, "stream allocate"))
ErrorsRecord = record("co_errors", (c_void_p, "values messages"))
VarianceRecord = record("co_variance", (c_void_p, "values codes tops"))
CombinationRecord = record(
    "co_combination", (c_void_p, "x last grads"), (c_int64, "count"), (c_void_p, "factors"), (c_float, "alpha beta")
)
AverageRecord = record(
    "co_average", (c_void_p, "messages values"), (c_int64, "numel scale_block stride"), (c_int32, "world_size unused")
)
IntegersRecord = record("co_integers", (c_void_p, "messages"), (c_int64, "numel stride"), (c_int32, "world_size bits"))
RefreshRecord = record("co_refresh", (c_void_p, "y values"), (c_int64, "numel"), (c_float, "memory rest"))
DescentRecord = record("co_descent", (c_float, "lr decay eps"), (c_int32, "eps_inside_sqrt"), (c_float, "bound"))
LambRecord = record(
    "co_lamb_options",
    (c_float, "beta1 one_minus_beta1 beta2 one_minus_beta2 eps weight_decay"),
    (c_int32, "eps_inside_sqrt"),
    (c_float, "bound"),
)


_EMPTY_AVERAGE = "an average needs messages of a format, or values"


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
    """The checked operands of one call on a bucket. It keeps their tables and copies alive until the call returns."""

    __slots__ = ("device", "kept", "numel")

    def __init__(self, device: torch.device, numel: int) -> None:
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

    def per_tensor(self, name: str, tensor: Tensor, entries: int, dtype: torch.dtype = torch.float32) -> int:
        if tensor.numel() < entries:
            raise ValueError(f"{name} must have {entries} entries or more, got {tensor.numel()}")
        return self.read(name, tensor, dtype)

    def segments(self, name: str, segments: Sequence[Segment], *, written: bool = True) -> tuple[int, int, int]:
        """Make the table of segments that cover the bucket: its address, their number, and per-tensor entries."""
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

    def places(self, segments: Sequence[Segment]) -> tuple[int, int, int]:
        """Make a table of segments whose tensors are not read: as :meth:`segments`, with places in the tensors."""
        covered = sum(segment.numel for segment in segments)
        if covered != self.numel:
            raise ValueError(f"the segments of parameters must cover {self.numel} elements, got {covered}")
        rows = ((segment.start, segment.numel, segment.index << 32, 0) for segment in segments)
        table = array("q", chain.from_iterable(rows))
        self.kept.append(table)
        return table.buffer_info()[0], len(segments), 1 + max((segment.index for segment in segments), default=-1)

    def errors(self, name: str, error: Errors, world_size: int, *, written: bool = True) -> Any:
        if isinstance(error, Tensor):
            return byref(ErrorsRecord(self.floats(name, error, written=written), None))
        if error.count != self.numel or error.world_size != world_size:
            raise ValueError(
                f"{name} must be of {self.numel} elements in {world_size} chunk(s), got {error.count} in "
                f"{error.world_size}"
            )
        nbytes = bytes_of(ERROR_FORMAT, self.numel, world_size)
        return byref(ErrorsRecord(None, address(name, error.messages, self.device, torch.uint8, nbytes)))

    def variance(self, variance: Variance, tensors: int) -> Any:
        """Return a ``co_variance`` by reference. tensors: the entries that a per-tensor array needs."""
        if isinstance(variance, Tensor):
            return byref(VarianceRecord(self.floats("exp_avg_sq", variance, written=False), None, None))
        codes = address("exp_avg_sq", variance.codes, self.device, torch.uint8, self.numel)
        return byref(VarianceRecord(None, codes, self.per_tensor("tops", variance.tops, tensors, torch.int32)))

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

    def average(self, y: Average) -> Any:
        return byref(self._average(y))

    def _average(self, y: Average) -> Any:
        if y.values is not None:
            return AverageRecord(None, self.floats("values", y.values, written=False), y.numel, 0, 0, 1)
        if y.messages is None or y.form is None:
            raise ValueError(_EMPTY_AVERAGE)
        needed = _bytes_of_average(y.form, y.numel, y.world_size, y.stride)
        if y.messages.numel() < needed:
            raise ValueError(f"messages must have {needed} bytes or more, got {y.messages.numel()}")
        messages = self.read("messages", y.messages, torch.uint8)
        if isinstance(y.form, SignFormat):
            return AverageRecord(messages, None, y.numel, y.form.scale_block or 0, y.stride, y.world_size)
        return IntegersRecord(messages, y.numel, y.stride, y.world_size, y.form.bits)

    def refresh(self, update: VarianceUpdate) -> tuple[Any, Any, int, int, int]:
        """Return a ``co_refresh`` and a ``co_variance`` by reference, and what :meth:`segments` returns."""
        if update.y.values is None and not isinstance(update.y.form, IntegerFormat):
            raise ValueError("the gradients of a refresh must be an average in integers or in values")
        table, count, tensors = self.places(update.params)
        y = self._average(update.y)
        self.kept.append(y)
        given = (addressof(y), None) if update.y.values is None else (None, y.values)
        operands = RefreshRecord(*given, self.numel, update.memory, 1 - update.memory)
        return byref(operands), self.variance(update.exp_avg_sq, tensors), table, count, tensors

    @staticmethod
    def descent(descent: Descent) -> Any:
        return _descent(descent.lr, descent.decay, descent.eps, descent.eps_inside_sqrt, descent.bound)

    @staticmethod
    def lamb(o: LambOptions) -> Any:
        betas = o.beta1, 1 - o.beta1, o.beta2, 1 - o.beta2
        return byref(LambRecord(*betas, o.eps, o.weight_decay, o.eps_inside_sqrt, o.bound))


@lru_cache
def _descent(*numbers: float) -> Any:
    return byref(DescentRecord(*numbers))


@lru_cache(maxsize=4096)
def bytes_of(form: MessageFormat, numel: int, world_size: int = 1) -> int:
    return sum(form.chunk_nbytes(numel, world_size))


@lru_cache(maxsize=4096)
def _bytes_of_average(form: MessageFormat, numel: int, world_size: int, stride: int) -> int:
    """Return the bytes that the messages of an average take, a stride apart."""
    sizes = form.chunk_nbytes(numel, world_size)
    if max(sizes) > stride and world_size > 1:
        raise ValueError(f"stride must be at least {max(sizes)}, the length of a message, got {stride}")
    last = max((rank for rank, size in enumerate(sizes) if size), default=0)
    return last * stride + sizes[last]


def mark_written(flats: Iterable[Tensor], segments: Sequence[Segment] = ()) -> None:
    """Tell autograd that native code has written to tensors."""
    tensors = [*flats, *(segment.tensor for segment in segments if segment.tensor is not None)]
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


# -- calls ------------------------------------------------------------------------------------------------------------


def call(function: str, device: torch.device, *arguments: Any) -> None:
    """Call a function of the C interface with torch's threads or the current stream; a RuntimeError if it fails."""
    kind = device.type
    library = loaded(kind)
    if kind == "cpu":
        threads = 1 if _one_thread else torch.get_num_threads()
        where = _exec(threads, 0, _host_threads() if threads > 1 else None)
    else:
        index = index_of(device)
        if index != torch.cuda.current_device():  # torch makes it current, and leaves no context on the other one
            with torch.cuda.device(index):
                return call(function, device, *arguments)
        where = _exec(1, index, torch.cuda.current_stream(device).cuda_stream)
    failed = getattr(library, function)(*arguments, where)
    if _scratch.tensors:
        _scratch.tensors.clear()  # whoever gets the memory next uses it after these kernels, on the same stream
    if _scratch.error is not None:
        error, _scratch.error = _scratch.error, None
        raise error
    if failed:
        raise RuntimeError(library.co_last_error().decode())


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Let kernels on the CPU use the caller's thread alone, and leave open which threads later ones use."""
    global _one_thread
    _one_thread += 1
    try:
        yield
    finally:
        _one_thread -= 1


_one_thread = 0


@lru_cache
def _exec(threads: int, device: int, where: int | None) -> Any:
    return ctypes.byref(_Exec(threads, device, where, ctypes.cast(_allocate, c_void_p)))


class _Scratch(threading.local):
    """The memory that a call of this thread was given, and what went wrong with it."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.error: Exception | None = None


_scratch = _Scratch()


def _give_scratch(device: int, nbytes: int) -> int | None:
    """Give a kernel memory of torch's allocator, on the current stream, until its call returns."""
    try:
        tensor = _new_scratch(device, nbytes)
    except Exception as error:  # out of memory; nothing may be raised through C
        _scratch.error = error
        return None
    _scratch.tensors.append(tensor)
    return tensor.data_ptr()


_allocate = ctypes.CFUNCTYPE(c_void_p, c_int32, c_int64)(_give_scratch)


def _new_scratch(device: int, nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))


@lru_cache
def _host_threads() -> int | None:
    """Return the address of GOMP_parallel of torch's OpenMP runtime, or None if its threads do not run.

    They spin after each operator, and would compete with a second pool. A child of fork() has none, and the runtime
    would wait for them forever. The number of threads of the process, at the first kernel on several, shows it.
    """
    if _forked or "OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        if len(os.listdir("/proc/self/task")) < torch.get_num_threads():
            return None
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None


def _after_fork() -> None:
    global _forked
    _forked = True
    _host_threads.cache_clear()


_forked = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- the kernels -------------------------------------------------------------------------------------------------------


def compress_(
    form: MessageFormat,
    z: Combination,
    error: Errors,
    messages: Tensor,
    world_size: int,
    new_error: Errors | None = None,
) -> None:
    use = Operands(messages.device, z.numel)
    written = address("messages", messages, use.device, torch.uint8, bytes_of(form, z.numel, world_size))
    values = use.combination(z)
    if isinstance(form, IntegerFormat):
        old = use.errors("error", error, world_size, written=False)
        new = None if new_error is None else use.errors("new_error", new_error, world_size)
        call("co_compress_integers", use.device, values, old, new, written, z.numel, form.bits, world_size)
    else:
        place = like_errors(error) if new_error is None else new_error  # alive until the call has been made
        new = _updated(use, error, place, world_size)
        call("co_compress", use.device, values, new, written, z.numel, form.scale_block or 0, world_size)
    mark_written([messages] if new_error is None else [messages, _tensor(new_error)])


def average_compress_(
    form: MessageFormat, messages: Tensor, error: Errors, new_error: Errors, out: Tensor, world_size: int
) -> None:
    numel = error.numel() if isinstance(error, Tensor) else error.count
    use, nbytes = Operands(out.device, numel), bytes_of(form, numel)
    received = use.read("messages", messages, torch.uint8, world_size * nbytes)
    sent = address("out", out, use.device, torch.uint8, nbytes)
    if isinstance(form, IntegerFormat):
        old, new = use.errors("error", error, 1, written=False), use.errors("new_error", new_error, 1)
        call("co_average_integers", use.device, received, old, new, sent, numel, form.bits, world_size)
    else:
        new = _updated(use, error, new_error, 1)
        call("co_average_compress", use.device, received, new, sent, numel, form.scale_block or 0, world_size)
    mark_written([_tensor(new_error), out])


def _updated(use: Operands, error: Errors, new_error: Errors, world_size: int) -> Any:
    """Return the errors that kernels of signs update in place: the new ones, which begin as the old ones."""
    new = use.errors("new_error", new_error, world_size)
    if _tensor(new_error) is not _tensor(error):
        use.errors("error", error, world_size, written=False)
        _tensor(new_error).copy_(_tensor(error))
    return new


def _tensor(error: Errors) -> Tensor:  # here: a step enters one module less
    return error if isinstance(error, Tensor) else error.messages


def mean_(form: IntegerFormat, messages: Tensor, out: Tensor, world_size: int, factor: float) -> None:
    use = Operands(out.device, out.numel())
    received = use.read("messages", messages, torch.uint8, world_size * form.nbytes(use.numel))
    call("co_mean_integers", use.device, received, use.floats("out", out), use.numel, form.bits, world_size, factor)
    mark_written([out])


def add_(y: Average, outputs: Sequence[Segment], decay: float = 0.0, scale: float = 1.0) -> None:
    given = y.messages if y.values is None else y.values
    if given is None:
        raise ValueError(_EMPTY_AVERAGE)
    use = Operands(given.device, y.numel)
    name = "co_add_integers" if isinstance(y.form, IntegerFormat) else "co_add_average"
    table, count, _ = use.segments("outputs", outputs)
    call(name, use.device, use.average(y), table, count, decay, scale)
    mark_written([], outputs)


def decompress_(y: Average, out: Tensor) -> None:
    use = Operands(out.device, y.numel)
    name = "co_decode_integers" if isinstance(y.form, IntegerFormat) else "co_decompress"
    call(name, use.device, use.average(y), use.floats("out", out))
    mark_written([out])


def any_nan(*averages: Average) -> Tensor:
    assert averages[0].messages is not None
    device = averages[0].messages.device
    found = torch.empty(len(averages), dtype=torch.bool, device=device)
    for number, y in enumerate(averages):
        call("co_any_nan", device, Operands(device, y.numel).average(y), found.data_ptr() + number)
    return found.any() if len(averages) > 1 else found[0]


def combine_(z: Combination, out: Tensor) -> None:
    use = Operands(out.device, z.numel)
    call("co_combine", use.device, use.combination(z), use.floats("out", out), z.numel)
    mark_written([out])


def sum_rows_(rows: Tensor, out: Tensor, factor: float = 1.0) -> None:
    use = Operands(out.device, out.numel())
    code = DTYPES.get(rows.dtype)
    if code is None:
        raise ValueError(f"rows must be float32, bfloat16 or float16, got {rows.dtype}")
    read = use.read("rows", rows, rows.dtype, rows.shape[0] * use.numel)
    call("co_sum_rows", use.device, read, code, rows.shape[0], use.floats("out", out), use.numel, factor)
    mark_written([out])


def apply_adam_(update: AdamUpdate) -> None:
    m, v, given = update.exp_avg, update.exp_avg_sq, update.corrections
    use = Operands((v if isinstance(v, Tensor) else v.codes).device, update.y.numel)
    if m is None and update.beta != 1:
        raise ValueError(f"beta must be 1 without exp_avg, got {update.beta}")
    table, count, tensors = use.segments("parameters", update.params)
    moments = None if m is None else use.floats("exp_avg", m), use.variance(v, tensors)
    corrections = None if given is None else use.per_tensor("corrections", given, 2 * tensors)
    rest = table, count, corrections, update.beta, use.descent(update.descent)
    call("co_apply_adam", use.device, use.average(update.y), *moments, *rest)
    mark_written([] if m is None else [m], update.params)


def local_step_(update: LocalUpdate) -> None:
    use = Operands(update.exp_avg.device, update.exp_avg.numel())
    table, count, tensors = use.segments("parameters", update.params)
    grads = None
    if update.grads is not None:
        grads, given, _ = use.segments("gradients", update.grads, written=False)
        if given != count:
            raise ValueError(f"gradients and parameters must have the same segments, got {given} and {count}")
    moments = use.floats("exp_avg", update.exp_avg), use.variance(update.exp_avg_sq, tensors)
    local_update = use.floats("local_update", update.local_update)
    rest = table, count, use.numel, update.beta1, 1 - update.beta1, use.descent(update.descent)
    call("co_local_step", use.device, *moments, local_update, grads, *rest)
    mark_written([update.exp_avg, update.local_update], update.params)


def sync_parameters_(sync: ParameterSync) -> None:
    use = Operands(sync.exp_avg.device, sync.y.numel)
    table, count, tensors = use.segments("parameters", sync.params)
    written = use.floats("exp_avg", sync.exp_avg), use.floats("anchor", sync.anchor)
    flats = *written, use.variance(sync.exp_avg_sq, tensors), use.floats("local_update", sync.local_update)
    rest = table, count, sync.lr_sum, use.descent(sync.descent)
    call("co_sync_parameters", use.device, use.average(sync.y), *flats, *rest)
    mark_written([sync.exp_avg, sync.anchor, sync.local_update], sync.params)


def lamb_moments_(moments: LambMoments) -> None:
    use = Operands(moments.exp_avg.device, moments.y.numel)
    table, count, tensors = use.segments("parameters", moments.params, written=False)
    flats = use.floats("exp_avg", moments.exp_avg), use.floats("exp_avg_sq_fresh", moments.exp_avg_sq_fresh)
    frozen = use.variance(moments.exp_avg_sq, tensors)
    factors = use.per_tensor("factors", moments.factors, tensors)
    if moments.sums.numel() < 3 * tensors:
        raise ValueError(f"sums must have {3 * tensors} entries or more, got {moments.sums.numel()}")
    sums = address("sums", moments.sums, use.device, torch.float64)
    rest = table, count, factors, sums, use.lamb(moments.options)
    call("co_lamb_moments", use.device, use.average(moments.y), *flats, frozen, *rest)
    mark_written([moments.exp_avg, moments.exp_avg_sq_fresh, moments.sums])


def lamb_apply_(
    exp_avg: Tensor, exp_avg_sq: Variance, params: Sequence[Segment], rates: Tensor, options: LambOptions
) -> None:
    use = Operands(exp_avg.device, exp_avg.numel())
    table, count, tensors = use.segments("parameters", params)
    read = use.floats("exp_avg", exp_avg, written=False), use.variance(exp_avg_sq, tensors)
    rest = table, count, use.numel, use.per_tensor("rates", rates, tensors), use.lamb(options)
    call("co_lamb_apply", use.device, *read, *rest)
    mark_written([], params)


def variance_sums_(update: VarianceUpdate, sums: Tensor) -> None:
    use = Operands(sums.device, update.y.numel)
    *operands, tensors = use.refresh(update)
    if sums.numel() < 3 * tensors:
        raise ValueError(f"sums must have {3 * tensors} entries or more, got {sums.numel()}")
    call("co_variance_sums", use.device, *operands, address("sums", sums, use.device, torch.float64))
    mark_written([sums])


def refresh_variance_(update: VarianceUpdate, floors: Tensor, tops: Tensor | None = None, key: int = 0) -> None:
    use = Operands(floors.device, update.y.numel)
    *operands, tensors = use.refresh(update)
    v = update.exp_avg_sq
    written = v if isinstance(v, Tensor) else v.codes
    rounding: tuple[int | None, int | None] = None, None
    if not isinstance(v, Tensor):
        if tops is None:
            raise ValueError("tops must be given for a variance in 8 bits")
        factors = dither_table(use.device)
        use.kept.append(factors)  # which nobody else may keep
        rounding = use.per_tensor("tops", tops, tensors, torch.int32), address_of(factors)
    address("exp_avg_sq", written, use.device, written.dtype, use.numel)  # lazily negated it can be read alone
    call("co_refresh_variance", use.device, *operands, use.per_tensor("floors", floors, tensors), *rounding, key)
    mark_written([written])


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    flats = [dense_values("a tensor", t) for t in tensors]
    for flat in flats:
        if flat.device != device or flat.dtype not in DTYPES:
            raise ValueError(
                f"tensors must be float32, bfloat16 or float16 on {device}, got {flat.dtype} on {flat.device}"
            )
    table = array("q", chain.from_iterable((flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], 0) for flat in flats))
    sums = torch.zeros(len(flats), dtype=torch.float64, device=device)
    call("co_square_sums", device, table.buffer_info()[0], len(flats), sums.data_ptr())
    return sums.sum()


def sketch_(segments: Sequence[Segment], offset: int, seed: int, y: Tensor, squares: Tensor) -> None:
    use = Operands(y.device, sum(segment.numel for segment in segments))
    table, count, _ = use.segments("gradients", segments, written=False)
    numbers = address("y", y, use.device, torch.float32, SKETCH_NUMEL)
    total = address("squares", squares, use.device, torch.float64, 1)
    call("co_sketch", use.device, table, count, offset, seed, numbers, total)
    mark_written([y, squares])


def copy_(out: Tensor, source: Tensor) -> None:
    """Copy a large tensor past the caches. Both: [n] float32 on the CPU."""
    device, numel = source.device, source.numel()
    read, written = (address(*named, device, torch.float32, numel) for named in (("source", source), ("out", out)))
    call("co_copy", device, read, written, numel)
    mark_written([out])
