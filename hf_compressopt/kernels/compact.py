"""State in 8 bits, or as float32 values: the errors of error feedback, and the frozen variance.

Errors are messages of integers. Variances are on a logarithmic scale, whose grid has eight points in an octave:
2^(k/8), that is float32(2^((k mod 8) / 8)) times 2^floor(k/8). An element is rounded to the point that is nearest by
its logarithm, at most 4.5 % away, and so its square root at most 2.2 %. The code of an element is the distance of its
point from that of the largest element of its tensor; after a refresh, which rounds at random, from the next point. So a
code says the same in any bucket and on any number of ranks, and to encode what codes stand for gives the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_compressopt.kernels.hashing import hashes, next_key
from hf_compressopt.kernels.memory import kept_per_device
from hf_compressopt.kernels.messages import IntegerFormat

# -- errors ------------------------------------------------------------------------------------------------------------

#: The format of errors in 8 bits.
ERROR_FORMAT = IntegerFormat(8)


@dataclass(slots=True)  # not frozen: a step makes many, in half of the time
class CompactErrors:
    """Errors in 8 bits: for each chunk of a bucket a message of integers, as ``IntegerFormat(8)`` describes it.

    An error is what the messages stand for, and a new one is rounded to them: within 1/254 of the largest of a block.
    The error of a server has a ``world_size`` of 1.
    """

    messages: Tensor
    count: int
    world_size: int = 1

    @staticmethod
    def nbytes(count: int, world_size: int = 1) -> int:
        return sum(ERROR_FORMAT.chunk_nbytes(count, world_size))

    @classmethod
    def zeros(cls, count: int, world_size: int = 1, device: torch.device | None = None) -> CompactErrors:
        nbytes = cls.nbytes(count, world_size)
        return cls(torch.zeros(nbytes, dtype=torch.uint8, device=device or "cpu"), count, world_size)

    def numel(self) -> int:
        return self.count

    @property
    def device(self) -> torch.device:
        return self.messages.device


#: Errors in one of two forms: float32 values [n], or 8 bits.
Errors = Tensor | CompactErrors


def tensor_of(error: Errors) -> Tensor:
    return error if isinstance(error, Tensor) else error.messages


def like_errors(error: Errors) -> Errors:
    if isinstance(error, Tensor):
        return torch.empty_like(error)
    return replace(error, messages=torch.empty_like(error.messages))


def values_of_errors(error: Errors) -> Tensor:
    """Return the values of errors, [n] float32. Do not change them: they may be the errors themselves."""
    if isinstance(error, Tensor):
        return error
    values = torch.empty(error.count, dtype=torch.float32, device=error.device)
    for start, stop, message in ERROR_FORMAT.chunks(error.messages, error.count, error.world_size):
        values[start:stop] = ERROR_FORMAT.decode(message, stop - start)
    return values


def keep_errors_(error: Errors, values: Tensor) -> None:
    """Take over new values, [n] float32. They may be the errors themselves."""
    if isinstance(error, Tensor):
        error.copy_(values)
        return
    for start, stop, message in ERROR_FORMAT.chunks(error.messages, error.count, error.world_size):
        ERROR_FORMAT.encode_(values[start:stop], message)


# -- the frozen variance ----------------------------------------------------------------------------------------------


#: Points of the grid in an octave.
POINTS = 8
#: The code of a variance of 0.
ZERO_CODE = 255
#: The largest code of another one, 31.75 octaves below the largest: smaller variances are raised to it.
LAST_CODE = 254
_LOWEST, _HIGHEST = -126 * POINTS, 128 * POINTS - 1  # points that are normal float32 numbers
#: Stands for the point of the largest of variances that are all 0.
NO_TOP = _LOWEST - 1
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127
#: The smallest variance that has a point. Below 2^-126 the mantissa's bits are read as those of larger numbers.
LEAST_VARIANCE = float(torch.tensor(2.0 ** (1 - 0.5 / POINTS), device="cpu") - 1) * 2.0**-126
_FIRST_BITS = 10  # of a mantissa, by which rounding at random tells its point
_PER_HASH = 8  # random bytes in a word of 64 bits
_RUN = 1 << 18  # elements that are taken at once, so that what this needs stays near 5 MiB
_RUN_ON_DEVICE = 1 << 24  # the same where launches count more than memory


@dataclass(frozen=True)
class LogVariance:
    """The variances of a bucket in 8 bits."""

    codes: Tensor  # [n] uint8
    tops: Tensor  # [tensors] int32: the point k of the largest element of each tensor


#: The frozen variance of a bucket in one of two forms: float32 values [n], or 8 bits.
Variance = Tensor | LogVariance


@kept_per_device
def _point_table(device: torch.device) -> Tensor:
    """Return the values of the points, [2032] float32, from 2^-126 on."""
    points = torch.arange(_LOWEST, _HIGHEST + 1, device="cpu")
    exponents = torch.div(points, POINTS, rounding_mode="floor")
    mantissas = (2.0 ** ((points - POINTS * exponents).double() / POINTS)).float()
    patterns = mantissas.view(torch.int32) + (exponents.to(torch.int32) << _MANTISSA_BITS)
    return patterns.view(torch.float32).to(device)


@kept_per_device
def _bounds(device: torch.device) -> Tensor:
    """Return the mantissas, as integers, at which the nearest point changes, [8] int32."""
    bounds = (2.0 ** ((torch.arange(POINTS, dtype=torch.float64, device="cpu") + 0.5) / POINTS)).float()
    return bounds.view(torch.int32).bitwise_and_((1 << _MANTISSA_BITS) - 1).to(device)


def _points(values: Tensor) -> Tensor:
    """Return the nearest point of each value, [n] int32; below all others for a value under 2^-126."""
    patterns = values.contiguous().view(torch.int32)
    mantissas = patterns & ((1 << _MANTISSA_BITS) - 1)
    exponents = (patterns >> _MANTISSA_BITS) - _EXPONENT_BIAS
    found = exponents * POINTS + torch.bucketize(mantissas, _bounds(values.device), right=True, out_int32=True)
    return found.clamp_(max=_HIGHEST)


def highest_points(parts: Sequence[Tensor]) -> Tensor:
    """Return the point of the largest variance of each part, [n > 0] float32: [parts] int32, ``NO_TOP`` for zeros."""
    return _points(torch.stack([part.max() for part in parts])).clamp_(min=NO_TOP)


def tops_of_variances(parts: Sequence[Tensor]) -> list[int]:
    """Return what :func:`highest_points` does, in one fetch, and ``NO_TOP`` for parts without elements."""
    filled = [part for part in parts if part.numel()]
    points = iter(highest_points(filled).tolist() if filled else ())
    return [next(points) if part.numel() else NO_TOP for part in parts]


def elements_at_once(device: torch.device) -> int:
    """Return the number of variances that are encoded, or refreshed, at once."""
    return _RUN if device.type == "cpu" else _RUN_ON_DEVICE


def encode_variance_(values: Tensor, codes: Tensor, top: int | None = None) -> int:
    """Encode the variances of one tensor, [n] float32, as [n] uint8. Returns the point of the largest; 0 if all are 0.

    ``codes`` may lie in the first quarter of the memory of ``values``, or before it. ``top`` is what
    :func:`tops_of_variances` returns for the whole tensor, if it is known; else the host waits for it.
    """
    size = elements_at_once(values.device)
    runs = torch.split(values, size)
    top = tops_of_variances([values])[0] if top is None else top
    if top < _LOWEST:
        codes.fill_(ZERO_CODE)
        return 0
    for start, run in zip(range(0, values.numel(), size), runs, strict=False):
        points = _points(run)
        code = (top - points).clamp_(max=LAST_CODE).masked_fill_(points < _LOWEST, ZERO_CODE)
        codes[start : start + run.numel()] = code.to(torch.uint8)
    return top


def tops_to_dither(largest: Tensor) -> Tensor:
    """Return the tops of tensors of which the largest variances are given, [n] int32, before rounding at random.

    They are one point above the largest, which may be rounded up.
    """
    return (_points(largest) + 1).clamp_(_LOWEST, _HIGHEST)


@kept_per_device
def _places_in_octave(device: torch.device) -> Tensor:
    """Return the points of mantissas whose first bits are 0, 1, 2, ..., from the first of their octave on, int32."""
    mantissas = torch.arange(1 << _FIRST_BITS, device="cpu", dtype=torch.float64) + 0.5
    points = POINTS * torch.log2(1 + mantissas / (1 << _FIRST_BITS))
    return points.round().to(torch.int32).to(device)


@kept_per_device
def dither_table(device: torch.device) -> Tensor:
    """Return the factors by which values are moved at random, up to half of the way to the next point, [256]."""
    places = (torch.arange(256, dtype=torch.float64, device="cpu") + 0.5) / 256 - 0.5
    return (2.0 ** (places / POINTS)).float().to(device)


def dithered_codes(values: Tensor, top: Tensor, key: tuple[int, int], start: int) -> Tensor:
    """Return the codes of variances, rounded at random so that the mean of their logarithms is right, [n] uint8.

    Args:
        values: [n] float32, consecutive elements of a tensor.
        top: [] int32, of the tensor, as :func:`tops_to_dither` returns it.
        key: Numbers >= 0 that stand for the random numbers of a tensor.
        start: The place of the first value in the tensor.
    """
    first, stop = start // _PER_HASH, -(-(start + values.numel()) // _PER_HASH)
    words = hashes(next_key(next_key(key[0]) ^ key[1]), first, stop - first, values.device)
    random = words.view(torch.uint8)[start - first * _PER_HASH :][: values.numel()]
    moved = values * dither_table(values.device).index_select(0, random.to(torch.int32))
    first_bits = moved.view(torch.int32) >> _MANTISSA_BITS - _FIRST_BITS  # of the mantissa, behind the exponent
    points = _places_in_octave(values.device).index_select(0, first_bits & (1 << _FIRST_BITS) - 1)
    points += (first_bits >> _FIRST_BITS) * POINTS
    codes = torch.minimum((top + _EXPONENT_BIAS * POINTS - points).clamp_(0, LAST_CODE), top - _LOWEST)
    return codes.to(torch.uint8).masked_fill_(values == 0, ZERO_CODE)


def check_tops(tops: Tensor) -> None:
    """Check that these are points of the grid; a ValueError if not."""
    if tops.numel() and not _LOWEST <= int(tops.min()) <= int(tops.max()) <= _HIGHEST:
        found = sorted({int(tops.min()), int(tops.max())})
        raise ValueError(f"the tops of a variance must be from {_LOWEST} to {_HIGHEST}, got {found}")


def decode_variance(codes: Tensor, top: int | Tensor) -> Tensor:
    """Return the variances of one tensor. codes: any shape, uint8; top: its largest point. Returns float32."""
    rows = top - _LOWEST - torch.arange(ZERO_CODE + 1, device=codes.device)
    table = _point_table(codes.device)[rows.clamp_(min=0)]
    table[ZERO_CODE] = 0.0
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def values_of_variance(variance: Variance, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the variances of a bucket, [n] float32; unchanged they stay. spans: elements, and index of the tensor."""
    if isinstance(variance, Tensor):
        return variance
    values = torch.empty(variance.codes.numel(), dtype=torch.float32, device=variance.codes.device)
    start = 0
    for numel, index in spans:
        values[start : start + numel] = decode_variance(variance.codes[start : start + numel], variance.tops[index])
        start += numel
    return values
