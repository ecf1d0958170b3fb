"""The check at the first use of native kernels on a device: each family against the reference, on 2003 elements.

Tables of many tensors are read by kernels of their own on a GPU, so each family runs with few tensors and with many.

A family that differs gets the reference from then on, with a WARNING that says what to report;
``HF_COMPRESSOPT_KERNELS=native`` makes it an error. What passed is remembered by the library's digest and the device,
in the user's cache folder (``XDG_CACHE_HOME``): later processes check nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_compressopt.kernels import library, native, reference
from hf_compressopt.kernels.compact import (
    CompactErrors,
    Errors,
    LogVariance,
    encode_variance_,
    keep_errors_,
    values_of_errors,
)
from hf_compressopt.kernels.messages import IntegerFormat, MessageFormat, SignFormat

logger = logging.getLogger(__name__)

#: What a family writes, and by how much it may differ; 0: not in a bit.
Written = Iterator[tuple[Tensor, float]]

SUMS = 1e-6  # what sums over many elements may differ by
_CPU = torch.device("cpu")
_RANKS = 6  # more than a group of messages that are summed by themselves
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Tensors of a bucket beside the few of an ordinary case: they fill one of a GPU's large tables, and several.
MANY_TENSORS = (100, 800)
checked: dict[torch.device, frozenset[str]] = {}  # the families that differ


class Data:
    """Operands on a device, the same for a seed wherever they lie.

    shift: of tensors in their memory, in elements. count: tensors of a bucket, or 0 for a few.
    """

    def __init__(self, device: torch.device, numel: int, shift: int = 0, seed: int = 0, count: int = 0) -> None:
        self.device, self.numel, self.shift, self.count = device, numel, shift, count
        self.random = torch.Generator().manual_seed(seed)

    def normal(self, numel: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        count = self.numel if numel is None else numel
        memory = torch.zeros(count + self.shift, dtype=dtype, device=self.device)
        return memory[self.shift :].copy_(torch.randn(count, generator=self.random, dtype=torch.float32))

    def positive(self, numel: int | None = None) -> Tensor:
        return self.normal(numel).abs_().add_(0.01)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def tensors(self) -> list[reference.Segment]:
        """Return segments of three dtypes and odd lengths that cover a bucket, every tenth without a tensor."""
        cuts = self._cuts()
        found = []
        for k, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
            before = k % 4
            tensor = None if k % 10 == 2 else self.normal(stop - start + before, DTYPES[k % 3])
            found.append(reference.Segment(tensor, 0 if tensor is None else before, stop - start, k))
        return found

    def _cuts(self) -> list[int]:
        """Return where the tensors of a bucket begin, and its end."""
        if self.count:
            return [k * self.numel // self.count for k in range(self.count + 1)]
        if self.numel <= 5:
            return [0, self.numel]
        third, half = self.numel // 3 + 1, self.numel // 2 + 1
        return [0, third, half, half + 1, self.numel]

    def sizes(self) -> list[int]:
        """Return the elements of tensors that are in no bucket."""
        return [1 + k % 7 for k in range(self.count)] if self.count else [self.numel, 1, 7, 100]

    def combination(self) -> reference.Combination:
        return reference.Combination(self.numel, self.device, self.normal(), 0.9, self.tensors(), 0.1)

    def errors(self, world_size: int, compact: bool) -> Errors:
        values = self.normal()
        if not compact:
            return values
        errors = CompactErrors.zeros(self.numel, world_size)
        keep_errors_(errors, values.cpu())
        return replace(errors, messages=errors.messages.to(self.device))

    def messages(self, form: MessageFormat, numel: int, count: int) -> Tensor:
        messages = torch.zeros(count * form.nbytes(numel), dtype=torch.uint8)
        for message in messages.view(count, -1):
            values = torch.randn(numel, generator=self.random, dtype=torch.float32)
            form.encode_(values, message, form.common_scale(values))
        return messages.to(self.device)


def _signs(form: SignFormat, messages: Tensor, error: Errors, chunks: int) -> Written:
    """Yield scales, which are sums, signs, and errors; those in 8 bits are rounded to 1/127 of the largest."""
    for start, stop, message in form.chunks(messages, error.numel(), chunks):
        scales = form.scales(message, stop - start)
        yield scales, SUMS
        yield message[scales.nbytes :], 0.0
    yield values_of_errors(error), 0.05 if isinstance(error, CompactErrors) else 10 * SUMS


def _compress(kernels: Any, data: Data) -> Written:
    for block, compact in product((512, 24, None), (False, True)):
        form, error = SignFormat(block), data.errors(3, compact)
        messages = data.zeros(sum(form.chunk_nbytes(data.numel, 3)))
        kernels.compress_(form, data.combination(), error, messages, 3, error)
        yield from _signs(form, messages, error, 3)


def _average(kernels: Any, data: Data) -> Written:
    for block, compact in ((512, False), (24, True)):
        form, error = SignFormat(block), data.errors(1, compact)
        out, received = data.zeros(form.nbytes(data.numel)), data.messages(form, data.numel, _RANKS)
        kernels.average_compress_(form, received, error, error, out, _RANKS)
        yield from _signs(form, out, error, 1)


def _apply(kernels: Any, data: Data) -> Written:
    descent = reference.Descent(1e-2, 0.99, 1e-8, False, 3.0)
    options = reference.LambOptions(0.9, 0.999, 1e-6, 0.1, False, 3.0)
    m, v, u, out, anchor = data.normal(), data.positive(), data.normal(), data.normal(), data.normal()
    kernels.combine_(data.combination(), out)
    form, chunk, params = SignFormat(512), -(-data.numel // 16) * 8, data.tensors()
    y, sums = reference.Average.of(out), data.zeros(len(params), 3, dtype=torch.float64)
    if data.numel > chunk:
        y = reference.Average(data.numel, form, data.messages(form, chunk, 2), 2, form.nbytes(chunk))
    codes = torch.zeros(data.numel, dtype=torch.uint8)
    tops = data.zeros(len(params), dtype=torch.int32).fill_(encode_variance_(v.cpu(), codes))
    kernels.apply_adam_(reference.AdamUpdate(y, m, v, params, descent, 0.1))
    kernels.apply_adam_(reference.AdamUpdate(y, m, LogVariance(codes.to(data.device), tops), params, descent))
    kernels.local_step_(reference.LocalUpdate(m, v, u, data.tensors(), params, 0.9, descent))
    kernels.sync_parameters_(reference.ParameterSync(y, m, anchor, v, u, params, 0.03, descent))
    fresh, factors, rates = data.positive(), data.positive(len(params)), data.positive(len(params))
    kernels.lamb_moments_(reference.LambMoments(y, m, fresh, v, params, factors, sums, options))
    kernels.lamb_apply_(m, v, params, rates, options)
    segments = data.tensors()
    floors = data.positive(len(params)) * 0.1
    floors[::3] = torch.nan
    refreshed = data.positive()
    in_codes = LogVariance(codes.to(data.device), tops)
    of_tensors = data.zeros(len(params), 3, dtype=torch.float64)
    for variance, mean in ((refreshed, reference.Average.of(out)), (in_codes, _low_bits(data))):
        update = reference.VarianceUpdate(mean, variance, segments, 0.9)
        kernels.variance_sums_(update, of_tensors)
        kernels.refresh_variance_(update, floors, tops + 9, 5)
    yield of_tensors / data.numel, SUMS
    outputs = data.tensors()
    kernels.add_(reference.Average.of(out), outputs, 0.0, 0.5)
    kernels.add_(y, outputs, 0.5, 2.0)
    values = data.normal()
    kernels.decompress_(y, values)
    for dtype, factor in zip(DTYPES, (1.0, 0.3, 1.0), strict=True):
        total = data.normal()
        kernels.sum_rows_(data.normal(_RANKS * data.numel, dtype).view(_RANKS, -1), total, factor)
        yield total, 0.0
    written = out, values, m, u, anchor, fresh, refreshed, in_codes.codes, *tensors_of([*params, *outputs])
    yield from ((tensor, 0.0) for tensor in written)
    yield sums / data.numel, SUMS


def _low_bits(data: Data) -> reference.Average:
    """Return an average in messages of 4 bits, of two chunks where there are so many elements."""
    form, chunk = IntegerFormat(4), -(-data.numel // 16) * 8
    chunks = 2 if data.numel > chunk else 1
    nbytes = form.nbytes(chunk if chunks > 1 else data.numel)
    return reference.Average(data.numel, form, data.messages(form, chunk, chunks), chunks, nbytes)


def _integers(kernels: Any, data: Data) -> Written:
    for bits, compact in ((4, False), (8, True)):
        form, z, outputs, mean = IntegerFormat(bits), data.combination(), data.tensors(), data.normal()
        sizes, error, left = form.chunk_nbytes(data.numel, 3), data.errors(3, compact), data.errors(3, compact)
        messages = data.zeros(sum(sizes))
        kernels.compress_(form, z, error, messages, 3, left)
        if min(sizes):  # chunks that are all there
            y = reference.Average(data.numel, form, messages, 3, max(sizes))
            kernels.add_(y, outputs, 0.5, 2.0)
            yield kernels.any_nan(y), 0.0
        received, server = data.messages(form, data.numel, _RANKS), data.errors(1, compact)
        out = data.zeros(form.nbytes(data.numel))
        kernels.average_compress_(form, received, server, server, out, _RANKS)
        kernels.mean_(form, received, mean, _RANKS, 0.5)
        for tensor in (messages, values_of_errors(left), out, values_of_errors(server), mean, *tensors_of(outputs)):
            yield tensor, 0.0


def _sketch(kernels: Any, data: Data) -> Written:
    y, squares = data.zeros(reference.SKETCH_NUMEL, dtype=torch.float32), data.zeros(dtype=torch.float64)
    segments = data.tensors()
    kernels.sketch_(segments, 5, 7, y, squares)
    yield y, 0.0
    for sum_ in (squares, kernels.sum_of_squares([*tensors_of(segments)], data.device)):
        yield sum_ / data.numel, SUMS


def tensors_of(segments: Sequence[reference.Segment]) -> Iterator[Tensor]:
    return (segment.tensor for segment in segments if segment.tensor is not None)


#: The kernels by what switches to the reference together; adam.py adds its own.
FAMILIES: dict[str, Callable[[Any, Data], Written]] = dict(
    compress=_compress, average=_average, apply=_apply, integers=_integers, sketch=_sketch
)
#: The families of kernels that take no integers; "apply" is that of the others.
_FAMILY = dict(compress_="compress", average_compress_="average", sum_of_squares="sketch", sketch_="sketch")


def difference(
    family: str, device: torch.device, numel: int = 2003, shift: int = 1, seed: int = 0, count: int = 0
) -> str:
    """Run the kernels of a family on a device, and the reference on the CPU. Returns in what they differ, or "".

    count: Tensors of a bucket, or 0 for a few.
    """
    run = FAMILIES[family]
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        try:
            expected = list(run(reference, Data(_CPU, numel, shift, seed, count)))
            got = list(run(native, Data(device, numel, shift, seed, count)))
        except RuntimeError as error:
            return f"{error}"
    for k, ((wanted, most), (found, _)) in enumerate(zip(expected, got, strict=True)):
        here = found.cpu()
        if most:
            wrong = ~torch.isclose(here.double(), wanted.double(), rtol=most, atol=most)
        else:
            wrong = here.reshape(-1).view(torch.uint8) != wanted.reshape(-1).view(torch.uint8)
        if bool(wrong.any()):
            return f"result {k}: {int(wrong.sum())} of {wrong.numel()} places are different"
    return ""


def kernels(device: torch.device) -> Any:
    """Return the kernels of a device that has native ones: those, with the reference for families that failed."""
    failed = failures(device)
    if not failed:
        return native
    names = [name for name in vars(native) if name in vars(reference) and name.endswith(("_", "_nan", "_squares"))]
    return SimpleNamespace(**{name: _choosing(name, failed) for name in names})


def _choosing(name: str, failed: frozenset[str]) -> Callable[..., Any]:
    """Return a kernel that is the reference's for operands of a family that failed."""

    def kernel(first: Any, *rest: Any, **options: Any) -> Any:
        form = first.form if isinstance(first, reference.Average) else first
        family = "integers" if isinstance(form, IntegerFormat) else _FAMILY.get(name, "apply")
        return getattr(reference if family in failed else native, name)(first, *rest, **options)

    return kernel


def trusted(family: str, device: torch.device) -> bool:
    """Return whether there are native kernels of a family that passed the check, which the first call makes."""
    return library.available(device) and family not in failures(device)


def failures(device: torch.device) -> frozenset[str]:
    """Return the families that differ from the reference on a device; a RuntimeError if the user wants "native"."""
    found = checked.get(device)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return frozenset()  # a graph can hold no check; the next call makes it
        found = checked[device] = _first_use(device)
    return found


def _first_use(device: torch.device) -> frozenset[str]:
    key, passed = _key(device), _cache()
    if key in passed:
        return frozenset()
    with native.on_one_thread():
        found = {family: words for family in FAMILIES if (words := _first_difference(family, device))}
    if not found:
        _remember(passed, key)
        return frozenset()
    message = (
        f"native kernels differ from the reference on {device} ({key}): "
        + "; ".join(f"{family}: {words}" for family, words in found.items())
        + ". Please report this with the output of `hf-compressopt selftest`"
    )
    if library.chosen() == "native":
        raise RuntimeError(f"{library.VARIABLE}=native, but {message}")
    logger.warning("%s. The reference, in PyTorch and slower, replaces these kernels", message)
    errors_too = ("compress", "average") if "integers" in found else ()  # errors in 8 bits are integers
    return frozenset((*found, *errors_too))


def _first_difference(family: str, device: torch.device) -> str:
    """Return in what a family differs from the reference with few tensors, or else with many, or ""."""
    for count in (0, *MANY_TENSORS):
        if words := difference(family, device, count=count):
            return f"{words}, {count} tensors" if count else words
    return ""


def _key(device: torch.device) -> str:
    digest = hashlib.sha256(library.path_of(device.type).read_bytes()).hexdigest()[:16]
    if device.type == "cpu":
        return f"{digest} {library.instruction_set('cpu')}"
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)()  # builds of torch without CUDA lack it
    return f"{digest} {torch.cuda.get_device_name(device)} driver {driver}"


def _place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_compressopt" / "selfcheck.json"


def _cache() -> list[str]:
    try:
        found = json.loads(_place().read_text())
    except (OSError, ValueError, RuntimeError):  # there is none, it is damaged, or the user has no home
        return []
    return [str(key) for key in found] if isinstance(found, list) else []


def _remember(passed: list[str], key: str) -> None:
    """Keep the result of the last hundred libraries. Where nothing can be written, the next process checks again."""
    try:
        place = _place()
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.with_name(f"{place.name}.{os.getpid()}")
        fresh.write_text(json.dumps([*passed, key][-100:]))
        fresh.replace(place)
    except (OSError, RuntimeError):
        logger.debug("the result of the check of native kernels cannot be kept", exc_info=True)
