"""The sum of the rows of several ranks, in their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements of a piece of all rows per thread: a few pieces fit into a core's own cache.
_PIECE = 1 << 15


def sum_of_rows(rows: Sequence[Tensor], factor: float = 1.0) -> Tensor:
    """Return the sum of ``rows`` in their order, times ``factor``: [n] float64 of float64 values, else float32.

    Args:
        rows: At least one, [n] each, of one dtype.
        factor: Of the sum.
    """
    first = rows[0]
    total = torch.empty(first.numel(), dtype=sum_dtype(first.dtype), device=first.device)
    piece = _PIECE * torch.get_num_threads() if first.device.type == "cpu" else max(1, first.numel())
    for parts in zip(*(torch.split(values, piece) for values in (total, *rows)), strict=True):
        out, head, *others = parts
        if others and head.dtype == out.dtype:
            torch.add(head, others.pop(0), out=out)
        else:
            out.copy_(head)
        for other in others:
            out += other
        if factor != 1:
            out *= factor
    return total


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a sum of values of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
