"""The native count sketch: a call of the C interface, ``csrc/compressopt.h``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_compressopt.kernels.c_operands import Operands, mark_written, pointer_to
from hf_compressopt.kernels.library import call
from hf_compressopt.kernels.operands import Segment
from hf_compressopt.kernels.sketch_reference import SKETCH_NUMEL


def sketch_(segments: Sequence[Segment], offset: int, seed: int, y: Tensor, squares: Tensor) -> None:
    """See :func:`hf_compressopt.kernels.sketch.sketch_`. seed: from 0 to 2^64 - 1."""
    use = Operands(y.device, sum(segment.numel for segment in segments))
    table = use.segments("gradients", segments, written=False)
    numbers = pointer_to("y", y, use.device, torch.float32, SKETCH_NUMEL)
    total = pointer_to("squares", squares, use.device, torch.float64, 1)
    call("co_sketch", use.device, table.address, table.count, offset, seed, numbers, total)
    mark_written([y, squares])
