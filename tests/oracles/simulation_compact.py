"""The compact state for the simulations of the family: errors in 8 bits, a frozen variance of eight points an octave.

What is stored is rounded; everything else stays float64. A stored number next to a tie may be rounded the other way by
a float32 run, so `min_distance` also tells how far from a tie the roundings have been.
"""

from typing import Any

import numpy as np

from tests.oracles.simulation import Grads, SimulatedGroup, chunk_bounds
from tests.oracles.simulation_integers import BLOCK, quantize
from tests.oracles.simulation_low_bits import Exchange, LowBitOnebitAdam, LowBitOnebitLamb, LowBitZeroOneAdam

POINTS = 8  # of the variance, in an octave
RANGE = 254  # points below the largest of a tensor
NEGLIGIBLE = 1e-6  # a step of a stored error that no comparison sees


def round_error(error: np.ndarray) -> tuple[np.ndarray, float]:
    """The error of one chunk as it is stored, and its distance from a tie, as a share of the largest error."""
    kept = quantize(error.astype(np.float32), 8).astype(np.float64)
    distance = np.inf
    for start in range(0, error.size, BLOCK):
        block, stored = error[start : start + BLOCK], kept[start : start + BLOCK]
        step = np.abs(stored).max() / 127  # the largest element of a block is always 127 steps
        if step > NEGLIGIBLE and not np.array_equal(block, stored):
            distance = min(distance, float(np.min(0.5 - np.abs(block - stored) / step)) / 127)
    return kept, distance


def round_variance(v: np.ndarray) -> tuple[np.ndarray, float]:
    """The variance of one tensor as it is stored, and how far the nearest element is from a tie, in float32's units."""
    live = v > 0
    if not live.any():
        return v.copy(), np.inf
    octaves = np.log2(v[live])
    nearest = np.rint(POINTS * octaves)
    # the mantissa of a point is rounded to float32
    whole = np.floor(nearest / POINTS)
    values = np.float32(2.0 ** (nearest / POINTS - whole)).astype(np.float64) * 2.0**whole
    lowest = nearest.max() - RANGE
    floor = np.floor(lowest / POINTS)
    least = float(np.float32(2.0 ** (lowest / POINTS - floor))) * 2.0**floor
    rounded = np.zeros_like(v)
    rounded[live] = np.maximum(values, least)
    return rounded, float(np.min(0.5 - np.abs(POINTS * octaves - nearest))) / 16


class CompactExchange(Exchange):
    def __init__(self, *args: Any, owner: Any) -> None:
        super().__init__(*args)
        self.owner = owner

    def _average_group(self, group: Any, local: list[Any]) -> list[Any]:
        averages = super()._average_group(group, local)
        before = self.owner.min_distance
        self.owner.store_errors(group)
        self.owner.min_distance = before  # float32 numbers of the same bits are rounded alike, ties too
        return averages


class Compact:
    """Mixin before a low-bit simulation. A single rank has no errors."""

    def __init__(self, groups: Any, world_size: int, *, bits: int, **kwargs: Any) -> None:
        super().__init__(groups, world_size, bits=bits, **kwargs)
        exchange = self.exchange
        self.exchange = CompactExchange(world_size, bits, exchange.bucket_numel, owner=self)

    def store_errors(self, group: Any) -> None:
        for workers, servers in zip(group.worker_errors, group.server_errors, strict=True):
            for rank, (begin, end) in enumerate(chunk_bounds(workers[0].size, len(workers))):
                servers[rank] = self._stored(servers[rank])
                for worker in workers:
                    worker[begin:end] = self._stored(worker[begin:end])

    def _stored(self, error: np.ndarray) -> np.ndarray:
        kept, distance = round_error(error)
        self.min_distance = min(self.min_distance, distance)
        return kept

    def _store_variance(self, v: np.ndarray) -> np.ndarray:
        kept, distance = round_variance(v)
        self.min_distance = min(self.min_distance, distance)
        return kept

    def _freeze(self, group: SimulatedGroup) -> None:
        super()._freeze(group)
        self.store_errors(group)
        if isinstance(self, LowBitZeroOneAdam):
            for at in group.slices:
                group.v[at] = self._store_variance(group.v[at])

    def step(self, grads: Grads) -> bool:
        if not isinstance(self, LowBitZeroOneAdam) and self.step_count == self.freeze_step:
            for group in self.groups:
                if not group.non_freeze:
                    group.exp_avg_sq = [self._store_variance(v) for v in group.exp_avg_sq]
        taken = super().step(grads)
        for group in self.groups:
            if not group.non_freeze:
                self.store_errors(group)
        return taken


class CompactOnebitAdam(Compact, LowBitOnebitAdam):
    pass


class CompactOnebitLamb(Compact, LowBitOnebitLamb):
    pass


class CompactZeroOneAdam(Compact, LowBitZeroOneAdam):
    pass
