"""ZeRO with small messages on W ranks, in one process: gradients up with error feedback, differences down.

The messages are numpy's, rounded to float32 as docs/algorithms.md says, so that real ranks must leave the same bits.
AdamW is torch's, on whole masters.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tests.oracles.simulation_integers import in_order, quantize

ALIGN, SHORTEST = 64, 1 << 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class ZeroSimulation:
    """Masters and replicas of one model, and the errors of W ranks.

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
