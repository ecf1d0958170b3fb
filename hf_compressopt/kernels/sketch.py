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

from torch import Tensor

from hf_compressopt.kernels import library, sketch_native, sketch_reference
from hf_compressopt.kernels.operands import Segment
from hf_compressopt.kernels.sketch_reference import SKETCH_NUMEL


def sketch_(segments: Sequence[Segment], offset: int, seed: int, y: Tensor, squares: Tensor) -> None:
    """Add the sketch of consecutive elements of a group: y <- y + S(g); squares <- squares + sum of g^2.

    Args:
        segments: The elements from ``offset`` on, in order, read. Segments without a tensor count as 0.
        offset: The first element's place in the group.
        seed: A number for each step, the same on all ranks; taken modulo 2^64.
        y: [4096] float32, updated in place. It is not finite if an element is not.
        squares: [] float64, updated in place, to the accuracy of float32. Its last bits may depend on the device.

    Raises:
        ValueError: If ``offset`` is negative, or ``y`` or ``squares`` have another size or dtype.
    """
    if offset < 0:
        raise ValueError(f"offset must be >= 0, got {offset}")
    kernels = sketch_native if library.available(y.device) else sketch_reference
    kernels.sketch_(segments, offset, seed % 2**64, y, squares)


__all__ = ["SKETCH_NUMEL", "sketch_"]
