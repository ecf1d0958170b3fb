"""W ranks in one process: gradients averaged by integer messages with error feedback, in numpy.

Every operation is rounded to float32 as docs/algorithms.md says, so that real ranks must leave the same bits.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from tests.oracles.simulation import chunk_bounds

BLOCK = 128
MOST = {4: 49, 8: 127}  # steps of a block's largest element
TIES = {4: np.arange(7) * np.arange(1, 8) + 0.5, 8: np.arange(127) + 0.5}  # between steps


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """To nearest, ties away from 0. x is not negative."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


def quantize(u: np.ndarray, bits: int) -> np.ndarray:
    """The float32 values that the message of one chunk stands for."""
    out = np.empty_like(u)
    for start in range(0, len(u), BLOCK):
        block = u[start : start + BLOCK]
        if not np.isfinite(block).all():
            out[start : start + BLOCK] = np.nan
            continue
        scale = round_to_bfloat16(np.array([np.abs(block).max() / np.float32(MOST[bits])], np.float32))[0]
        if scale < np.float32(2.0**-120):
            out[start : start + BLOCK] = 0
            continue
        steps = np.rint(block * (np.float32(1) / scale)).astype(np.float32) + np.float32(0)  # an integer has no -0
        if bits == 4:  # squares
            squares = np.arange(8) ** 2
            nearest = np.abs(np.abs(steps)[:, None] - squares).argmin(axis=1)  # there are no ties
            steps = np.where(steps < 0, -squares[nearest], squares[nearest]).astype(np.float32)
        out[start : start + BLOCK] = steps * scale
    return out


def in_order(rows: Sequence[Any]) -> Any:
    """Sum in the order of the rows."""
    return reduce(add, rows)


def sum_in_groups(rows: list[np.ndarray]) -> np.ndarray:
    return in_order([in_order(rows[start : start + 4]) for start in range(0, len(rows), 4)])


def in_full(shapes: list[tuple[int, ...]]) -> np.ndarray:
    """Which elements of tensors, [numel], travel in full precision beside messages of integers."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    small = [len(shape) < 2 or size < 2 * BLOCK for shape, size in zip(shapes, sizes, strict=True)]
    return np.repeat(small, sizes) if shapes else np.zeros(0, bool)


class Simulation:
    """The errors of W ranks for one flat buffer that is cut into buckets; compact errors are rounded to 8 bits.

    Averages that are not served to all ranks are those of a reduce-scatter: each stays with the owner of its chunk.
    """

    def __init__(
        self,
        numel: int,
        bucket_numel: int,
        world_size: int,
        bits: int,
        *,
        compact: bool = False,
        served: bool = True,
    ) -> None:
        self.world_size, self.bits, self.compact, self.served = world_size, bits, compact, served
        self.buckets = [slice(i, min(i + bucket_numel, numel)) for i in range(0, numel, bucket_numel)]
        self.worker_error = np.zeros((world_size, numel), np.float32)
        self.server_error = np.zeros(numel, np.float32)

    def senders(self, grads: np.ndarray) -> list[tuple[slice, np.ndarray]]:
        """What is sent, and the ranks whose worker errors it has."""
        return [(slice(rank, rank + 1), grads[rank]) for rank in range(self.world_size)]

    def average(self, grads: np.ndarray) -> np.ndarray:
        """Return the average of gradients [W, numel] that every rank gets; errors change only if it is finite."""
        worker_error, server_error = self.worker_error.copy(), self.server_error.copy()
        out, senders = np.empty(grads.shape[1], np.float32), self.senders(grads)
        for bucket in self.buckets:
            for begin, end in chunk_bounds(bucket.stop - bucket.start, self.world_size):
                if begin == end:
                    continue
                place = slice(bucket.start + begin, bucket.start + end)
                sent = []
                for ranks, values in senders:
                    u = values[place] + worker_error[ranks, place][0]
                    sent.append(quantize(u, self.bits))
                    worker_error[ranks, place] = self._stored(u - sent[-1])
                mean = sum_in_groups(sent) * np.float32(1.0 / len(senders))
                if not self.served:
                    out[place] = mean
                    continue
                a = mean + server_error[place]
                out[place] = quantize(a, self.bits)
                server_error[place] = self._stored(a - out[place])
        if np.isfinite(out).all():
            self.worker_error, self.server_error = worker_error, server_error
        return out

    def _stored(self, error: np.ndarray) -> np.ndarray:
        return quantize(error, 8) if self.compact else error
