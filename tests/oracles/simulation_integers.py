"""W ranks in one process: gradients averaged by integer messages with error feedback, and ZeRO with low-bit messages.

The messages are numpy's. Every operation is rounded to float32 as docs/algorithms.md says, so that real ranks must
leave the same bits.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.oracles.simulation import chunk_bounds

BLOCK = 128
ALIGN, SHORTEST = 64, 1 << 16  # of ZeRO's slices
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

    Averages that are not served to all ranks are those of a reduce-scatter: each stays with the owner of its chunk. The
    ranks of a node average in float32 first, and have the same errors.
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
        node_size: int = 1,
    ) -> None:
        self.world_size, self.bits, self.compact, self.served = world_size, bits, compact, served
        self.nodes = [slice(first, first + node_size) for first in range(0, world_size, node_size)]
        self.buckets = [slice(i, min(i + bucket_numel, numel)) for i in range(0, numel, bucket_numel)]
        self.worker_error = np.zeros((world_size, numel), np.float32)
        self.server_error = np.zeros(numel, np.float32)

    def average(self, grads: np.ndarray) -> np.ndarray:
        """Return the average of gradients [W, numel] that every rank gets; errors change only if it is finite."""
        worker_error, server_error = self.worker_error.copy(), self.server_error.copy()
        inside = [in_order(grads[ranks]) * np.float32(1.0 / len(grads[ranks])) for ranks in self.nodes]
        out = np.empty(grads.shape[1], np.float32)
        for bucket in self.buckets:
            for begin, end in chunk_bounds(bucket.stop - bucket.start, self.world_size):
                if begin == end:
                    continue
                place = slice(bucket.start + begin, bucket.start + end)
                sent = []
                for ranks, values in zip(self.nodes, inside, strict=True):
                    u = values[place] + worker_error[ranks, place][0]
                    sent.append(quantize(u, self.bits))
                    worker_error[ranks, place] = self._stored(u - sent[-1])
                mean = sum_in_groups(sent) * np.float32(1.0 / len(sent))
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


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class ZeroSimulation:
    """Masters and replicas of one model, and the errors of W ranks: gradients go up, differences come down.

    AdamW is torch's, on whole masters.

    Args:
        params: The trainable parameters, which become the replicas.
        world_size: W.
        bits: Bits per element of gradients and of parameters; 0 is full precision.
        bucket: ``reduce_bucket_size``.
        node_size: Ranks of a node, which sum their gradients in full precision first.
    """

    def __init__(
        self, params: Sequence[Tensor], world_size: int, bits: tuple[int, int], bucket: int, node_size: int = 1
    ) -> None:
        self.params, self.world_size, self.bits, self.node_size = list(params), world_size, bits, node_size
        self.nodes = world_size // node_size
        if world_size == 1:
            self.bits = (0, 0)
        self.masters = [torch.nn.Parameter(p.detach().float().contiguous().clone()) for p in params]
        self.begins, position = {}, 0
        for number in reversed(range(len(params))):
            if params[number].dim() > 1:
                self.begins[number] = position
                position += _round_up(params[number].numel(), ALIGN)
        length = _round_up(max(-(-bucket // 8), min(bucket, SHORTEST)), ALIGN * world_size)
        self.chunks = []  # (start, stop) of each part of each slice
        for low in range(0, position, length):
            part = min(length, _round_up(position - low, ALIGN * world_size)) // world_size
            self.chunks += [(low + j * part, low + (j + 1) * part) for j in range(world_size)]
        self.numel = self.chunks[-1][1]
        self.errors = np.zeros((self.nodes, self.numel), np.float32)
        self.worst_lag = self.finest = 0.0

    def flat(self, values: Sequence[Tensor | None]) -> np.ndarray:
        out = np.zeros(self.numel, np.float32)
        for number, begin in self.begins.items():
            if (value := values[number]) is not None and value.numel():
                out[begin : begin + value.numel()] = value.detach().float().reshape(-1).numpy()
        return out

    def send(self, errors: np.ndarray, grads: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
        """Average the gradients of one pass, [W][parameters], and update the errors."""
        world_size, nodes, size = self.world_size, self.nodes, self.node_size
        averages = []
        for number, param in enumerate(self.params):
            rows = [
                torch.zeros(param.numel())
                if g[number] is None
                else (g[number] * (1.0 / world_size)).reshape(-1).float()
                for g in grads
            ]
            inside = [in_order(rows[node * size : (node + 1) * size]) for node in range(nodes)]
            total = in_order(inside if size == 1 else [values.to(param.dtype).float() for values in inside])
            averages.append(total.to(param.dtype).view(param.shape))
        if not self.bits[0]:
            return averages
        flats, out = [self.flat(g) for g in grads], np.zeros(self.numel, np.float32)
        if size > 1:
            inside = [in_order(flats[node * size : (node + 1) * size]) for node in range(nodes)]
            flats = [values * np.float32(1.0 / size) for values in inside]
        for start, stop in self.chunks:
            rows = []
            for node in range(nodes):
                u = flats[node][start:stop] + errors[node, start:stop]
                rows.append(quantize(u, self.bits[0]))
                errors[node, start:stop] = quantize(u - rows[-1], 8)
            out[start:stop] = in_order(rows) * np.float32(1.0 / nodes)
        for number, begin in self.begins.items():
            param = self.params[number]
            values = torch.from_numpy(out[begin : begin + param.numel()].copy())
            averages[number] = values.to(param.dtype).view(param.shape)
        return averages

    def step(self, optimizer: torch.optim.Optimizer, passes: Sequence[Sequence[Sequence[Tensor | None]]]) -> bool:
        """Take a step with the gradients of some passes, [passes][W][parameters]. Returns False if it is skipped."""
        errors, totals = self.errors.copy(), None
        for grads in passes:
            averages = self.send(errors, grads)
            totals = averages if totals is None else [a + b for a, b in zip(totals, averages, strict=True)]
        if not all(total.isfinite().all() for total in totals):
            return False
        self.errors = errors
        for number, (master, total) in enumerate(zip(self.masters, totals, strict=True)):
            present = any(g[number] is not None for grads in passes for g in grads)
            master.grad = total.float() if present else None
        optimizer.step()
        self.bring_down()
        return True

    def bring_down(self) -> None:
        small = self.begins if self.bits[1] else {}
        with torch.no_grad():
            for number, (param, master) in enumerate(zip(self.params, self.masters, strict=True)):
                if number not in small:
                    param.copy_(master)
        if not small:
            return
        ahead = self.flat(self.masters) - self.flat(self.params)
        values = np.concatenate([quantize(ahead[start:stop], self.bits[1]) for start, stop in self.chunks])
        self.finest = float(np.abs(ahead).max()) * (6.5 / 49 if self.bits[1] == 4 else 0.5 / 127)  # half a gap
        with torch.no_grad():
            for number, begin in small.items():
                param = self.params[number]
                add = torch.from_numpy(values[begin : begin + param.numel()]).view(param.shape)
                param.copy_(param.float() + add)
        self.worst_lag = float(np.abs(self.flat(self.masters) - self.flat(self.params)).max())
