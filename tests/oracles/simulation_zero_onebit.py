"""OnebitAdam under ZeRO for W ranks in one process, in float64: a warmup stage of its own before the compact one.

Each server keeps the moments of its chunks, and sends the change of the parameters in the place of the mean gradient.
"""

from typing import Any

import numpy as np

from tests.oracles.simulation import (
    Grads,
    SimulatedGroup,
    blocks_of,
    chunk_bounds,
    distance_to_zero,
    quantize,
    sketched_norm,
)
from tests.oracles.simulation_compact import NEGLIGIBLE, CompactOnebitAdam
from tests.oracles.simulation_integers import BLOCK, MOST, TIES, in_full
from tests.oracles.simulation_integers import quantize as to_integers


class ZeroOnebitAdam(CompactOnebitAdam):
    """`bits` are those of gradients and of changes."""

    def __init__(self, groups: Any, world_size: int, *, bits: int, **kwargs: Any) -> None:
        super().__init__(groups, world_size, bits=bits, **kwargs)
        self.bits = bits

    def step(self, grads: Grads) -> bool:
        if self.world_size == 1 or self.step_count >= self.freeze_step:
            return super().step(grads)
        if not all(np.isfinite(g).all() for rank in grads for group in rank for g in group if g is not None):
            return False
        self.step_count += 1
        factor = self._clip_factor(grads, compressed=True)
        for index, group in enumerate(self.groups):
            local = [[None if g is None else factor * np.asarray(g, np.float64) for g in rank[index]] for rank in grads]
            if group.non_freeze or not group.params:
                self._warmup_step(group, local)
                continue
            self._zero_step(group, local)
            if self.step_count == self.freeze_step:
                self._freeze(group)
                self._gather(group)
        return True

    def _message(self, values: np.ndarray) -> np.ndarray:
        sent, most = to_integers(values.astype(np.float32), self.bits).astype(np.float64), MOST[self.bits]
        for start in range(0, values.size, BLOCK):
            block, kept = values[start : start + BLOCK], sent[start : start + BLOCK]
            scale = np.abs(kept).max() / most
            if scale > NEGLIGIBLE:
                away = float(np.min(np.abs(np.abs(block / scale)[:, None] - TIES[self.bits]))) / most
                self.min_distance = min(self.min_distance, away)
        return sent

    def _zero_step(self, group: SimulatedGroup, local: list[list[Any]]) -> None:
        self._update(group, local, self._sent(group, local))

    def _sent(self, group: SimulatedGroup, local: list[list[Any]]) -> np.ndarray:
        """Send the gradients, and return what the servers make of them."""
        whole = [group.flatten(grads) for grads in local]
        small = in_full([p.shape for p in group.params])
        flat = [np.where(small, 0.0, row) for row in whole]
        mean = np.where(small, np.mean(whole, axis=0), 0.0)
        for k, (begin, end) in enumerate(self._buckets(group)):
            for low, high in chunk_bounds(end - begin, self.world_size):
                for rank, errors in enumerate(group.worker_errors[k]):
                    u = flat[rank][begin + low : begin + high] + errors[low:high]
                    sent = self._message(u)
                    errors[low:high] = self._stored(u - sent)
                    here = slice(begin + low, begin + high)
                    mean[here] += np.where(small[here], 0.0, sent / self.world_size)
        return mean

    def _update(self, group: SimulatedGroup, local: list[list[Any]], mean: np.ndarray) -> None:
        present = [any(rank[i] is not None for rank in local) for i in range(len(group.params))]
        changes = []
        for i, g in enumerate(group.unflatten(mean)):
            if not present[i]:
                changes.append(np.zeros_like(g))
                continue
            m, v = self._moments(group, i, g)
            changes.append(-group.lr * m / self._denominator(v, group.eps))
        change = group.flatten(changes)
        for k, (begin, end) in enumerate(self._buckets(group)):
            for rank, (low, high) in enumerate(chunk_bounds(end - begin, self.world_size)):
                place = slice(begin + low, begin + high)
                d = change[place] + group.server_errors[k][rank]
                change[place] = self._message(d)
                group.server_errors[k][rank] = self._stored(d - change[place])
        for i, part in enumerate(group.unflatten(change)):
            decay = 1 - group.lr * group.weight_decay if present[i] else 1.0
            group.params[i] = group.params[i] * decay + part

    def _gather(self, group: SimulatedGroup) -> None:
        momentum = group.flatten(group.exp_avg)
        for k, (begin, end) in enumerate(self._buckets(group)):
            for rank, (low, high) in enumerate(chunk_bounds(end - begin, self.world_size)):
                m = momentum[begin + low : begin + high].copy()
                signs = quantize(m, blocks_of(0, high - low, self.scale_block))
                self.min_distance = min(self.min_distance, distance_to_zero(m))
                momentum[begin + low : begin + high] = signs
                group.server_errors[k][rank] = self._stored(group.betas[0] * (m - signs))
        group.exp_avg = group.unflatten(momentum)


class FreedZeroOnebitAdam(ZeroOnebitAdam):
    """zero_stage=2: the servers clip what they have received, by its norm; then messages are clipped one step late."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last = self.clipped = 1.0

    def step(self, grads: Grads) -> bool:
        if self.world_size == 1:
            return super().step(grads)
        if not all(np.isfinite(g).all() for rank in grads for group in rank for g in group if g is not None):
            return False
        if self.step_count == self.freeze_step:
            for group in self.groups:
                if not group.non_freeze:
                    group.exp_avg_sq = [self._store_variance(v) for v in group.exp_avg_sq]
        self.step_count += 1
        shared = [bool(group.params) and not group.non_freeze for group in self.groups]
        local = [
            [[None if g is None else np.asarray(g, np.float64) for g in rank[i]] for rank in grads]
            for i in range(len(self.groups))
        ]
        first = self.step_count <= self.freeze_step
        means = [
            self._sent(group, rows) if own and first else np.mean([group.flatten(row) for row in rows], axis=0)
            for group, rows, own in zip(self.groups, local, shared, strict=True)
        ]
        if first:
            norm = float(np.linalg.norm(np.concatenate(means)))
        else:
            flat = [[group.flatten(row) for row in rows] for group, rows in zip(self.groups, local, strict=True)]
            norm = sketched_norm([np.concatenate(rows) for rows in zip(*flat, strict=True)], self.step_count)
        now = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
        self.clipped = now
        for group, rows, mean, own in zip(self.groups, local, means, shared, strict=True):
            factor = self.last if own and not first else now
            scaled = [[None if g is None else factor * g for g in row] for row in rows]
            if not own:
                self._warmup_step(group, scaled)
            elif not first:
                self._compressed_step(group, scaled)
                self.store_errors(group)
            else:
                self._update(group, rows, now * mean)
                if self.step_count == self.freeze_step:
                    self._freeze(group)
                    self._gather(group)
        self.last = now
        return True

    def _freeze(self, group: SimulatedGroup) -> None:
        for workers in group.worker_errors:
            for worker in workers:
                worker *= self.clipped  # in place: their gradients had left before they were clipped
        super()._freeze(group)
