"""The check at the first use of native kernels on a device: each family against the reference, on 2003 elements.

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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_compressopt.kernels import library, native, reference
from hf_compressopt.kernels.errors import CompactErrors, Errors, keep_errors_, values_of_errors
from hf_compressopt.kernels.messages import IntegerCode, SignCode
from hf_compressopt.kernels.operands import (
    AdamUpdate,
    Average,
    Combination,
    Commit,
    Descent,
    IntegerAverage,
    LambMoments,
    LambOptions,
    LocalUpdate,
    ParameterSync,
    Segment,
)
from hf_compressopt.kernels.variance import LogVariance, encode_variance_

logger = logging.getLogger(__name__)

#: What a family writes, and by how much it may differ; 0: not in a bit.
Written = Iterator[tuple[Tensor, float]]

_ULPS = 1e-6  # what sums over many elements may differ by, and what follows from them
_CPU = torch.device("cpu")
_WORLD_SIZE = 6  # more than a group of messages that are summed by themselves
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_failed: dict[torch.device, frozenset[str]] = {}
_mixed: dict[frozenset[str], SimpleNamespace] = {}


class Data:
    """Operands on a device, the same for a seed wherever they lie.

    Args:
        device: Where they lie.
        numel: Elements of a bucket.
        shift: Elements between the begin of an allocation and that of a tensor, up to 3.
        seed: Of all numbers.
    """

    def __init__(self, device: torch.device, numel: int, shift: int = 0, seed: int = 0) -> None:
        """See the class."""
        self.device, self.numel, self.shift = device, numel, shift
        self.random = torch.Generator().manual_seed(seed)

    def normal(self, numel: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normal numbers, [numel]."""
        count = self.numel if numel is None else numel
        values = torch.randn(count, generator=self.random, dtype=torch.float32)
        place = torch.zeros(count + self.shift, dtype=dtype, device=self.device)[self.shift :]
        return place.copy_(values)

    def positive(self, numel: int | None = None) -> Tensor:
        """Return numbers above 0.01."""
        return self.normal(numel).abs_().add_(0.01)

    def tensors(self) -> list[Segment]:
        """Return segments of three dtypes and odd lengths that cover a bucket, the third without a tensor."""
        cuts = [0, self.numel // 3 + 1, self.numel // 2 + 1, self.numel // 2 + 2, self.numel]
        spans = [*zip(cuts, cuts[1:], strict=False)] if self.numel > 5 else [(0, self.numel)]
        found = []
        for k, (start, stop) in enumerate(spans):
            tensor = self.normal(stop - start + k, _DTYPES[k % 3])
            found.append(Segment(None if k == 2 else tensor, k if k != 2 else 0, stop - start, k))
        return found

    def combination(self) -> Combination:
        """Return what is to be sent of gradients and of a first term."""
        return Combination(self.numel, self.device, self.normal(), 0.9, self.tensors(), 0.1)

    def errors(self, world_size: int, compact: bool) -> Errors:
        """Return errors, as values or in 8 bits."""
        values = self.normal()
        if not compact:
            return values
        errors = CompactErrors.zeros(self.numel, world_size)
        keep_errors_(errors, values.cpu())
        return replace(errors, messages=errors.messages.to(self.device))

    def messages(self, code: SignCode | IntegerCode, numel: int, count: int) -> Tensor:
        """Return the messages of a chunk of ``numel`` elements of ``count`` ranks."""
        messages = torch.zeros(count * code.nbytes(numel), dtype=torch.uint8)
        for message in messages.view(count, -1) if numel else ():
            values = torch.randn(numel, generator=self.random, dtype=torch.float32)
            code.encode_(values, message, code.common_scale(values))
        return messages.to(self.device)


def _compress(kernels: Any, data: Data) -> Written:
    for block in (512, 24, None):
        for compact in (False, True):
            code = SignCode(block)
            error, messages = data.errors(3, compact), _zeros(data, code.sizes(data.numel, 3)[1])
            kernels.compress_(code, data.combination(), error, messages, 3, error)
            for start, stop, message in code.chunks(messages, data.numel, 3):
                yield from _message(code, message, stop - start)
            yield values_of_errors(error), 0.05 if compact else 10 * _ULPS  # rounded to 1/127 of the largest


def _average(kernels: Any, data: Data) -> Written:
    for block, compact in ((512, False), (24, True)):
        code = SignCode(block)
        error, out = data.errors(1, compact), _zeros(data, code.nbytes(data.numel))
        messages = data.messages(code, data.numel, _WORLD_SIZE)
        kernels.average_compress_(code, messages, error, error, out, _WORLD_SIZE)
        yield from _message(code, out, data.numel)
        yield values_of_errors(error), 0.05 if compact else 10 * _ULPS


def _apply(kernels: Any, data: Data) -> Written:
    descent, options = Descent(1e-2, 0.99, 1e-8, False, 3.0), LambOptions(0.9, 0.999, 1e-6, 0.1, False)
    m, v, u, out = data.normal(), data.positive(), data.normal(), data.normal()
    kernels.combine_(data.combination(), out)
    yield out, 0.0
    code = SignCode(512)
    chunk = -(-data.numel // 16) * 8
    stride = code.nbytes(chunk)
    y = Average(data.numel, None, data.messages(code, chunk, 2), 2, 512, stride) if data.numel > chunk else None
    y = y or Average.of(data.normal())
    params = data.tensors()
    kernels.decompress_(y, out)
    kernels.apply_adam_(AdamUpdate(y, m, v, params, descent, 0.1))
    codes = torch.zeros(data.numel, dtype=torch.uint8)
    top = encode_variance_(v.cpu(), codes)
    tops = torch.full((len(params),), top, dtype=torch.int32, device=data.device)
    kernels.apply_adam_(AdamUpdate(y, m, LogVariance(codes.to(data.device), tops), params, descent))
    kernels.local_step_(LocalUpdate(m, v, u, data.tensors(), params, 0.9, descent))
    kernels.sync_parameters_(ParameterSync(y, m, out, v, u, params, 0.03, descent))
    yield from ((tensor, 0.0) for tensor in (out, m, u, *_tensors(params)))
    fresh, factors, rates = data.positive(), data.positive(len(params)), data.positive(len(params))
    sums = torch.zeros(len(params), 3, dtype=torch.float64, device=data.device)
    kernels.lamb_moments_(LambMoments(y, m, fresh, v, params, factors, sums, options))
    kernels.lamb_apply_(m, v, params, rates, options)
    yield from ((tensor, 0.0) for tensor in (m, fresh, *_tensors(params)))
    yield sums / (1 + data.numel), _ULPS


def _integers(kernels: Any, data: Data) -> Written:
    for bits, compact in ((4, False), (8, True)):
        code = IntegerCode(bits)
        z, error = data.combination(), data.errors(3, compact)
        left, messages = data.errors(3, compact), _zeros(data, code.sizes(data.numel, 3)[1])
        kernels.compress_(code, z, error, messages, 3, left)
        y = IntegerAverage(data.numel, messages, 3, bits, max(code.sizes(data.numel, 3)[0]))
        outputs = data.tensors()
        if z.grads is not None:
            outputs = [replace(s, index=g.index) for s, g in zip(outputs, z.grads, strict=True)]
        if min(code.sizes(data.numel, 3)[0]):  # chunks that are all there
            kernels.add_(y, outputs, 0.5, 2.0)
        received, out, mean = data.messages(code, data.numel, _WORLD_SIZE), _zeros(data, code.nbytes(data.numel)), z.x
        server = data.errors(1, compact)
        kernels.average_compress_(code, received, server, server, out, _WORLD_SIZE)
        assert mean is not None
        kernels.mean_(code, received, mean, _WORLD_SIZE, 0.5)
        for tensor in (messages, values_of_errors(left), out, values_of_errors(server), mean, *_tensors(outputs)):
            yield tensor, 0.0


def _adam(kernels: Any, data: Data) -> Written:
    from hf_compressopt.kernels.adam import AdamStep, AdamTable, AdamTensors, reference_

    for step in (AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1), AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1, False, maximize=True)):
        sizes = [data.numel, 1, 7, 100]
        grads = [data.normal(n, _DTYPES[k % 3]) for k, n in enumerate(sizes)]
        params = [data.normal(n, _DTYPES[k % 3]) for k, n in enumerate(sizes)]
        moments, squares = [data.normal(n) for n in sizes], [data.positive(n) for n in sizes]
        steps = [torch.zeros((), dtype=torch.float32, device=data.device) for _ in sizes]
        tensors = AdamTensors(grads, params, moments, squares, steps)
        table = None if kernels is reference else AdamTable(tensors)
        for _ in range(2):
            reference_(tensors, step) if table is None else table.run(grads, step, data.device)
        yield from ((tensor, 0.0) for tensor in (*params, *moments, *squares, *steps))


def _sketch(kernels: Any, data: Data) -> Written:
    from hf_compressopt.kernels.sketch import SKETCH_NUMEL, native_sketch_, reference_sketch_

    y = torch.zeros(SKETCH_NUMEL, dtype=torch.float32, device=data.device)
    squares = torch.zeros((), dtype=torch.float64, device=data.device)
    segments = data.tensors()
    (reference_sketch_ if kernels is reference else native_sketch_)(segments, 5, 7, y, squares)
    yield y, 0.0
    yield squares / (1 + data.numel), _ULPS
    yield kernels.sum_of_squares([*_tensors(segments)], data.device) / (1 + data.numel), _ULPS


#: The kernels by what switches to the reference together.
FAMILIES: dict[str, Callable[[Any, Data], Written]] = {
    "compress": _compress,
    "average": _average,
    "apply": _apply,
    "integers": _integers,
    "adam": _adam,
    "sketch": _sketch,
}
_FAMILY = {"compress_": "compress", "average_compress_": "average", "mean_": "integers", "add_": "integers"}


def _zeros(data: Data, nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=data.device)


def _tensors(segments: Sequence[Segment]) -> Iterator[Tensor]:
    return (segment.tensor for segment in segments if segment.tensor is not None)


def _message(code: SignCode, message: Tensor, numel: int) -> Written:
    """Yield the scales of a message, which are sums, and its signs."""
    first, count = code.scales_at(numel)
    yield code.scales(message, numel), _ULPS
    yield message[first + count * code.scale_dtype.itemsize :], 0.0


def difference(family: str, device: torch.device, numel: int = 2003, shift: int = 1, seed: int = 0) -> str:
    """Run the kernels of a family on a device, and the reference on the CPU. Returns in what they differ, or ""."""
    run = FAMILIES[family]
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        try:
            expected = list(run(reference, Data(_CPU, numel, shift, seed)))
            got = list(run(native, Data(device, numel, shift, seed)))
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
    if failed not in _mixed:
        names = [name for name in vars(native) if name in vars(reference) and name.endswith(("_", "_squares"))]
        _mixed[failed] = SimpleNamespace(**{name: _choosing(name, failed) for name in names})
    return _mixed[failed]


def _choosing(name: str, failed: frozenset[str]) -> Callable[..., Any]:
    """Return a kernel that is the reference's for operands of a family that failed."""

    def kernel(first: Any, *rest: Any) -> Any:
        integers = (
            isinstance(first, IntegerCode | IntegerAverage)
            or isinstance(rest[:1], tuple)
            and bool(rest and isinstance(rest[0], Commit) and isinstance(rest[0].y, IntegerAverage))
        )
        family = "integers" if integers else "sketch" if name == "sum_of_squares" else _FAMILY.get(name, "apply")
        return getattr(reference if family in failed else native, name)(first, *rest)

    return kernel


def trusted(family: str, device: torch.device) -> bool:
    """Return whether there are native kernels of a family that passed the check, which the first call makes."""
    return library.available(device) and family not in failures(device)


def failures(device: torch.device) -> frozenset[str]:
    """Return the families that differ from the reference on a device that has native kernels.

    Raises:
        RuntimeError: If one does, and ``HF_COMPRESSOPT_KERNELS`` is "native".
    """
    found = _failed.get(device)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return frozenset()  # a graph can hold no check; the next call makes it
        found = _failed[device] = _first_use(device)
    return found


def _first_use(device: torch.device) -> frozenset[str]:
    key, passed = _key(device), _cache()
    if key in passed:
        return frozenset()
    with library.on_one_thread():
        found = {family: words for family in FAMILIES if (words := difference(family, device))}
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


def _key(device: torch.device) -> str:
    """Return what a result holds for: the library, the machine code in it that runs, the device and its driver."""
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
