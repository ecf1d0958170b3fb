"""W ranks in one process: gradients averaged by integer messages with error feedback, in numpy.

Every operation is rounded to float32 as docs/algorithms.md says, so that real ranks must leave the same bits.
"""

import numpy as np

BLOCK = 128


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """To nearest, ties away from 0. x is not negative."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


def quantize(u: np.ndarray, bits: int) -> np.ndarray:
    """The float32 values that the message of one chunk stands for."""
    levels = np.float32(2 ** (bits - 1) - 1)
    out = np.empty_like(u)
    for start in range(0, len(u), BLOCK):
        block = u[start : start + BLOCK]
        if not np.isfinite(block).all():
            out[start : start + BLOCK] = np.nan
            continue
        scale = round_to_bfloat16(np.array([np.abs(block).max() / levels], np.float32))[0]
        if scale < np.float32(2.0**-120):
            out[start : start + BLOCK] = 0
            continue
        q = np.rint(block * (np.float32(1) / scale)).astype(np.float32) + np.float32(0)  # an integer has no -0
        out[start : start + BLOCK] = q * scale
    return out


def chunks(numel: int, world_size: int) -> list[slice]:
    size = -(-numel // (8 * world_size)) * 8
    return [slice(min(j * size, numel), min((j + 1) * size, numel)) for j in range(world_size)]


def sum_in_groups(rows: list[np.ndarray]) -> np.ndarray:
    sums = []
    for start in range(0, len(rows), 4):
        total = rows[start].copy()
        for row in rows[start + 1 : start + 4]:
            total += row
        sums.append(total)
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return total


def in_full(shapes: list[tuple[int, ...]]) -> np.ndarray:
    """Which elements of tensors, [numel], travel in full precision beside messages of integers."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    small = [len(shape) < 2 or size < 2 * BLOCK for shape, size in zip(shapes, sizes, strict=True)]
    return np.repeat(small, sizes) if shapes else np.zeros(0, bool)


class Simulation:
    """The errors of W ranks for one flat buffer that is cut into buckets; compact errors are rounded to 8 bits."""

    def __init__(self, numel: int, bucket_numel: int, world_size: int, bits: int, *, compact: bool = False) -> None:
        self.world_size, self.bits, self.compact = world_size, bits, compact
        self.buckets = [slice(i, min(i + bucket_numel, numel)) for i in range(0, numel, bucket_numel)]
        self.worker_error = np.zeros((world_size, numel), np.float32)
        self.server_error = np.zeros(numel, np.float32)

    def average(self, grads: np.ndarray) -> np.ndarray:
        """Return the average of gradients [W, numel] that every rank gets; errors change only if it is finite."""
        worker_error, server_error = self.worker_error.copy(), self.server_error.copy()
        out = np.empty(grads.shape[1], np.float32)
        for bucket in self.buckets:
            numel = bucket.stop - bucket.start
            for chunk in chunks(numel, self.world_size):
                place = slice(bucket.start + chunk.start, bucket.start + chunk.stop)
                if place.start == place.stop:
                    continue
                sent = []
                for rank in range(self.world_size):
                    u = grads[rank, place] + worker_error[rank, place]
                    sent.append(quantize(u, self.bits))
                    worker_error[rank, place] = self._stored(u - sent[-1])
                mean = sum_in_groups(sent) * np.float32(1.0 / self.world_size)
                a = mean + server_error[place]
                out[place] = quantize(a, self.bits)
                server_error[place] = self._stored(a - out[place])
        if np.isfinite(out).all():
            self.worker_error, self.server_error = worker_error, server_error
        return out

    def _stored(self, error: np.ndarray) -> np.ndarray:
        return quantize(error, 8) if self.compact else error
