"""The count sketch of a group's gradients: the norm of their mean over ranks, without the mean.

The sketch S(g) of a group's n elements has k = 4096 numbers. S is linear, so the mean of the ranks' sketches is the
sketch of the mean gradient; and E ||S(g)||^2 = ||g||^2 over seeds. The norm's relative standard deviation is about
1 / sqrt(2 k), 1.1 %.

Element i of the group lies in run ``i // 4096``, row ``i // 16 % 256`` and lane ``i % 16``. It is added to, or
subtracted from, one number of the sketch: a run is laid on the sketch with its rows rotated, and the lanes of each row
rotated. Two elements of different runs meet with probability 1 / 4096, two elements of one run never.

* hash(x) is the finalizer of SplitMix64, and G = 0x9E3779B97F4A7C15; sums and products are modulo 2^64.
* key = hash(seed + G) for signs, and hash(key + G) for rotations.
* Bit ``i % 64`` of hash(sign key + ``i // 64`` G) is set if element i is subtracted.
* With h = hash(rotation key + run G), the row moves by ``h % 256`` and the lane by ``h // 256 % 16``.

The sums are taken in float32 over the runs of a span, in order, from +0 on, and in float64 over the spans, in order.
A span has max(16, ceil(runs / 64)) runs, and the first span begins with the first run of the call. So all instruction
sets, devices and numbers of threads leave the same bits.

Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams" (2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels import library, native, reference, selfcheck
from hf_compressopt.kernels.codec import on
from hf_compressopt.kernels.native import Operands, address, mark_written
from hf_compressopt.kernels.operands import Segment

#: Numbers of a sketch, and elements of a run.
SKETCH_NUMEL = 4096

_LANES = 16
_ROWS = SKETCH_NUMEL // _LANES
_SIGNS = 64  # elements whose signs are one hash
_MOST_SPANS, _LEAST_RUNS = 64, 16
_SQUARED = 1 << 20  # elements that become float64 at once
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MASK = 2**64 - 1


def sketch_(segments: Sequence[Segment], offset: int, seed: int, y: Tensor, squares: Tensor) -> None:
    """Add the sketch of consecutive elements of a group: y <- y + S(g); squares <- squares + sum of g^2.

    Args:
        segments: The elements from ``offset`` of the group on, in order. Segments without a tensor count as 0.
        offset: The first element's place in the group.
        seed: A number for each step, the same on all ranks; taken modulo 2^64.
        y: [4096] float32, updated in place; not finite if an element is not.
        squares: [] float64, updated in place, to the accuracy of float32.
    """
    if offset < 0:
        raise ValueError(f"offset must be >= 0, got {offset}")
    is_native = on(y.device) is native or selfcheck.trusted("sketch", y.device)
    sketch = native_sketch_ if is_native else reference_sketch_
    sketch(segments, offset, seed % 2**64, y, squares)


def native_sketch_(segments: Sequence[Segment], offset: int, seed: int, y: Tensor, squares: Tensor) -> None:
    """See :func:`sketch_`. seed: from 0 to 2^64 - 1."""
    use = Operands(y.device, sum(segment.numel for segment in segments))
    table, count, _ = use.segments("gradients", segments, written=False)
    numbers = address("y", y, use.device, torch.float32, SKETCH_NUMEL)
    total = address("squares", squares, use.device, torch.float64, 1)
    library.call("co_sketch", use.device, table, count, offset, seed, numbers, total)
    mark_written([y, squares])


def reference_sketch_(segments: Sequence[Segment], offset: int, seed: int, y: Tensor, squares: Tensor) -> None:
    """See :func:`sketch_`. seed: from 0 to 2^64 - 1."""
    if y.shape != (SKETCH_NUMEL,) or y.dtype != torch.float32 or squares.numel() != 1 or squares.dtype != torch.float64:
        raise ValueError(
            f"y must be [{SKETCH_NUMEL}] float32 and squares [] float64, got {tuple(y.shape)} {y.dtype} and "
            f"{tuple(squares.shape)} {squares.dtype}"
        )
    numel = sum(segment.numel for segment in segments)
    if numel == 0:
        return
    first_run = offset // SKETCH_NUMEL
    runs = -(-(offset + numel) // SKETCH_NUMEL) - first_run
    per_span = max(_LEAST_RUNS, -(-runs // _MOST_SPANS))
    spans = -(-runs // per_span)
    rows = torch.zeros(spans * per_span * SKETCH_NUMEL, dtype=torch.float32, device=y.device)
    start = offset - first_run * SKETCH_NUMEL
    for segment in segments:
        if segment.tensor is not None:
            rows[start : start + segment.numel] = segment.part
        start += segment.numel
    for part in torch.split(rows, _SQUARED):
        squares += torch.dot(wide := part.double(), wide)
    placed = _placed(rows, first_run, seed).view(spans, per_span, SKETCH_NUMEL)
    sums = torch.zeros(spans, SKETCH_NUMEL, dtype=torch.float32, device=y.device)
    for run in range(per_span):
        sums += placed[:, run]
    total = torch.zeros(SKETCH_NUMEL, dtype=torch.float64, device=y.device)
    for span in sums:
        total += span
    y.copy_(y.double() + total)


def _placed(rows: Tensor, first_run: int, seed: int) -> Tensor:
    """Return whole runs with their signs, each number at its place in the sketch. rows: [runs * 4096]; likewise."""
    runs = rows.numel() // SKETCH_NUMEL
    key = _hash(seed + _GOLDEN & _MASK)
    words = _hashes(key, first_run * (SKETCH_NUMEL // _SIGNS), rows.numel() // _SIGNS, rows.device)
    bits = words.unsqueeze(1) >> torch.arange(_SIGNS, device=rows.device) & 1
    signed = torch.where(bits.view(-1).bool(), -rows, rows).view(runs, _ROWS, _LANES)
    rotations = _hashes(_hash(key + _GOLDEN & _MASK), first_run, runs, rows.device).view(-1, 1)
    from_row = (torch.arange(_ROWS, device=rows.device) - (rotations & _ROWS - 1)) % _ROWS  # [runs, rows]
    from_lane = (torch.arange(_LANES, device=rows.device) - (rotations >> 8 & _LANES - 1)) % _LANES  # [runs, lanes]
    run = torch.arange(runs, device=rows.device).view(-1, 1, 1)
    return signed[run, from_row.unsqueeze(2), from_lane.unsqueeze(1)]


def _hash(x: int) -> int:
    """Return the hash of a number. x: from 0 to 2^64 - 1."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        x = (x ^ x >> shift) * factor & _MASK
    return x


def _hashes(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return hash(key + i G) for i from ``first`` on, [count] int64, the bits of numbers without sign."""
    x = torch.arange(first, first + count, dtype=torch.int64, device=device) * _signed(_GOLDEN) + _signed(key)
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return x


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _check(kernels: Any, data: selfcheck.Data) -> selfcheck.Written:
    y, squares = data.zeros(SKETCH_NUMEL, dtype=torch.float32), data.zeros(dtype=torch.float64)
    segments = data.tensors()
    (reference_sketch_ if kernels is reference else native_sketch_)(segments, 5, 7, y, squares)
    yield y, 0.0
    for sum_ in (squares, kernels.sum_of_squares([*selfcheck.tensors_of(segments)], data.device)):
        yield sum_ / data.numel, selfcheck.SUMS


selfcheck.FAMILIES["sketch"] = _check
