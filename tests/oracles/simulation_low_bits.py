"""Messages of b-bit integers, the compact state, and ZeRO, for the simulations of the family.

The exchange of integers is the float32 simulation of simulation_integers.py, everything else stays float64. The errors
are the lists of the compressed stage: [bucket][rank], of float32 numbers while the exchange writes them.

The compact state has errors in 8 bits, and a frozen variance of eight points an octave. A stored number next to a tie
may be rounded the other way by a float32 run, so `min_distance` also tells how far from a tie the roundings have been.
"""

from typing import Any

import numpy as np

from tests.oracles.simulation import (
    Array,
    Grads,
    OnebitAdamSimulation,
    OnebitLambSimulation,
    SimulatedGroup,
    ZeroOneAdamSimulation,
    ZeroOneGroup,
    blocks_of,
    chunk_bounds,
    distance_to_zero,
    quantize,
    scaled,
    sketched_norm,
)
from tests.oracles.simulation_integers import BLOCK, MOST, TIES, Simulation, in_full
from tests.oracles.simulation_integers import quantize as to_integers

POINTS = 8  # of the variance, in an octave
RANGE = 254  # points below the largest of a tensor
NEGLIGIBLE = 1e-6  # a step of a stored error that no comparison sees


# -- gradients as integers ---------------------------------------------------------------------------------------------


def scale_errors(group: Any, factors: np.ndarray) -> None:
    """Multiply the errors of a group by factors [numel]."""
    end = 0
    for workers, servers in zip(group.worker_errors, group.server_errors, strict=True):
        begin, end = end, end + workers[0].size
        for rank, (low, high) in enumerate(chunk_bounds(end - begin, len(workers))):
            workers[rank] = workers[rank] * factors[begin:end]
            servers[rank] = servers[rank] * factors[begin + low : begin + high]


class LowBits:
    """Mixin before a simulation: its averaged gradients travel as integers."""

    def __init__(self, groups: Any, world_size: int, *, bits: int, **kwargs: Any) -> None:
        super().__init__(groups, world_size, **kwargs)
        self.bits = bits

    def step(self, grads: Grads) -> bool:
        if self.reduces_grads(self.step_count + 1):
            averages = [self._average(group, [rank[i] for rank in grads]) for i, group in enumerate(self.groups)]
            grads = [averages] * self.world_size
        return super().step(grads)

    def _average(self, group: SimulatedGroup, local: list[Any]) -> list[Any]:
        """The gradients of a group that every rank gets."""
        nobody = [all(rank[i] is None for rank in local) for i in range(len(group.params))]
        flat = np.stack([group.flatten(rank).astype(np.float32) for rank in local])
        if group.non_freeze or self.world_size == 1 or not group.numel:
            mean = flat.astype(np.float64).mean(axis=0)
        else:
            places, whole = self._sent_as_signs(group), in_full([p.shape for p in group.params])
            small, mean = whole[places], flat.astype(np.float64).mean(axis=0)
            exchange = Simulation(places.size, self.bucket_numel, self.world_size, self.bits, node_size=self.node_size)
            self._move_errors(group, exchange, small, out=False)
            averages = exchange.average(np.where(small, np.float32(0), flat[:, places])).astype(np.float64)
            mean[places[~small]] = averages[~small]
            self._move_errors(group, exchange, small, out=True)
        parts = group.unflatten(mean) if group.params else []
        return [None if missing else part for part, missing in zip(parts, nobody, strict=True)]

    def _move_errors(self, group: Any, exchange: Simulation, small: np.ndarray, *, out: bool) -> None:
        for k, bucket in enumerate(exchange.buckets):
            if small[bucket].all():
                continue  # it is not sent as integers
            chunks = chunk_bounds(bucket.stop - bucket.start, self.world_size)
            for rank, (begin, end) in enumerate(chunks):
                place = slice(bucket.start + begin, bucket.start + end)
                if out:
                    group.worker_errors[k][rank] = exchange.worker_error[rank, bucket].astype(np.float64)
                    group.server_errors[k][rank] = exchange.server_error[place].astype(np.float64)
                else:
                    exchange.worker_error[rank, bucket] = group.worker_errors[k][rank]
                    exchange.server_error[place] = group.server_errors[k][rank]


class LowBitOnebitAdam(LowBits, OnebitAdamSimulation):
    def _freeze(self, group: SimulatedGroup) -> None:
        super()._freeze(group)
        scale_errors(group, np.full(group.numel, 1 - group.betas[0]))


class LowBitOnebitLamb(LowBitOnebitAdam, OnebitLambSimulation):
    def _unite_scales(self) -> None:
        super()._unite_scales()
        for group, rows in zip(self.groups, self.scales, strict=True):
            if not group.non_freeze and group.params:
                stretch = [np.full(p.size, s.scaling_coeff) for p, s in zip(group.params, rows, strict=True)]
                scale_errors(group, np.concatenate(stretch)[self._sent_as_signs(group)])


class LowBitZeroOneAdam(LowBits, ZeroOneAdamSimulation):
    """Integers are sent before gradients are clipped, signs afterwards: between them errors change their unit."""

    coefficient, errors_are_clipped = 1.0, False

    def step(self, grads: Grads) -> bool:
        t = self.step_count + 1
        averaged = self.reduces_grads(t)
        if averaged:
            self._clip_errors(False)
        taken = super().step(grads)
        if taken and averaged and not self.reduces_grads(t + 1) and not self.in_local_stage(t + 1):
            self.coefficient, self.errors_are_clipped = self.factor, False
        return taken

    def _clip_factors(self, grads: Grads, t: int) -> list[float]:
        factors = super()._clip_factors(grads, t)
        self.factor = factors[0]
        return factors

    def _clip_errors(self, clipped: bool) -> None:
        if self.errors_are_clipped == clipped or self.coefficient == 1:
            return
        self.errors_are_clipped = clipped
        for group in self.groups:
            if not group.non_freeze:
                scale_errors(group, np.full(group.numel, self.coefficient if clipped else 1 / self.coefficient))

    def _one_bit_gradient_step(self, group: ZeroOneGroup, local: list[list[Any]]) -> None:
        self._clip_errors(True)
        mask = group.mask.copy()
        for at in group.slices if self.world_size > 1 else ():
            if group.v[at].size:
                group.v[at] = np.maximum(group.v[at], self.variance_floor * group.v[at].mean())
                group.mask[at] *= group.v[at].any()
        super()._one_bit_gradient_step(group, local)
        group.mask = mask


# -- the compact state -------------------------------------------------------------------------------------------------


class Compact:
    """Mixin before a low-bit simulation. A single rank has no errors."""

    def _average(self, group: Any, local: list[Any]) -> list[Any]:
        averages, before = super()._average(group, local), self.min_distance
        self.store_errors(group)
        self.min_distance = before  # float32 numbers of the same bits are rounded alike, ties too
        return averages

    def store_errors(self, group: Any) -> None:
        for workers, servers in zip(group.worker_errors, group.server_errors, strict=True):
            for rank, (begin, end) in enumerate(chunk_bounds(workers[0].size, len(workers))):
                servers[rank] = self._stored(servers[rank])
                for worker in workers:
                    worker[begin:end] = self._stored(worker[begin:end])

    def _note(self, distance: float) -> None:
        self.min_distance = min(self.min_distance, distance)

    def _stored(self, error: np.ndarray) -> np.ndarray:
        """The error of one chunk as it is stored; distances from a tie are shares of the largest error."""
        kept = to_integers(error.astype(np.float32), 8).astype(np.float64)
        for start in range(0, error.size, BLOCK):
            block, stored = error[start : start + BLOCK], kept[start : start + BLOCK]
            step = np.abs(stored).max() / 127  # the largest element of a block is always 127 steps
            if step > NEGLIGIBLE and not np.array_equal(block, stored):
                self._note(float(np.min(0.5 - np.abs(block - stored) / step)) / 127)
        return kept

    def _stored_variance(self, v: np.ndarray) -> np.ndarray:
        """The variance of one tensor as it is stored; distances from a tie are in float32's units."""
        live, rounded = v > 0, np.zeros_like(v)
        if live.any():
            exact = POINTS * np.log2(v[live])
            points = np.rint(exact)
            self._note(float(np.min(0.5 - np.abs(exact - points))) / 16)
            points = np.maximum(points, points.max() - RANGE)
            octaves = np.floor(points / POINTS)
            mantissas = np.float32(2.0 ** (points / POINTS - octaves)).astype(np.float64)  # rounded to float32
            rounded[live] = mantissas * 2.0**octaves
        return rounded

    def _freeze(self, group: SimulatedGroup) -> None:
        super()._freeze(group)
        self.store_errors(group)
        if isinstance(self, LowBitZeroOneAdam):
            for at in group.slices:
                group.v[at] = self._stored_variance(group.v[at])

    def step(self, grads: Grads) -> bool:
        if not isinstance(self, LowBitZeroOneAdam) and self.step_count == self.freeze_step:
            for group in self.groups:
                if not group.non_freeze:
                    group.exp_avg_sq = [self._stored_variance(v) for v in group.exp_avg_sq]
        taken = super().step(grads)
        for group in self.groups:
            if not group.non_freeze:
                self.store_errors(group)
        return taken


class CompactOnebitAdam(Compact, LowBitOnebitAdam):
    pass


class CompactZeroOneAdam(Compact, LowBitZeroOneAdam):
    def _clip_errors(self, clipped: bool) -> None:
        before = self.errors_are_clipped
        super()._clip_errors(clipped)
        if self.errors_are_clipped != before:
            for group in self.groups:
                self.store_errors(group)


# -- OnebitAdam under ZeRO ---------------------------------------------------------------------------------------------


class ZeroOnebitAdam(CompactOnebitAdam):
    """A warmup stage of its own on several ranks: `bits` are those of gradients and of changes.

    Each server keeps the moments of its chunks, and sends the change of the parameters in place of the mean gradient.
    """

    def reduces_grads(self, t: int) -> bool:
        return self.world_size == 1 and super().reduces_grads(t)

    def _factors(self, grads: Grads, compressed: bool) -> list[float]:
        return super()._factors(grads, compressed or self.world_size > 1)

    def _warmup_step(self, group: SimulatedGroup, local: list[list[Any]]) -> None:
        if self.world_size == 1 or group.non_freeze or not group.params:
            super()._warmup_step(group, local)
        else:
            self._update(group, local, self._mean(group, local))

    def _freeze(self, group: SimulatedGroup) -> None:
        super()._freeze(group)
        if self.world_size > 1 and group.params:
            self._gather(group)

    def _message(self, values: np.ndarray) -> np.ndarray:
        sent, most = to_integers(values.astype(np.float32), self.bits).astype(np.float64), MOST[self.bits]
        for start in range(0, values.size, BLOCK):
            block, kept = values[start : start + BLOCK], sent[start : start + BLOCK]
            scale = np.abs(kept).max() / most
            if scale > NEGLIGIBLE:
                self._note(float(np.min(np.abs(np.abs(block / scale)[:, None] - TIES[self.bits]))) / most)
        return sent

    def _mean(self, group: SimulatedGroup, local: list[list[Any]]) -> np.ndarray:
        return self._sent(group, local)

    def _sent(self, group: SimulatedGroup, local: list[list[Any]]) -> np.ndarray:
        """Send the gradients, and return what the servers make of them."""
        whole = [group.flatten(grads) for grads in local]
        small = in_full([p.shape for p in group.params])
        flat = [np.where(small, 0.0, row) for row in whole]
        mean, places = np.where(small, np.mean(whole, axis=0), 0.0), self._sent_as_signs(group)
        for k, (begin, end) in enumerate(self._buckets(group)):
            for low, high in chunk_bounds(end - begin, self.world_size):
                for rank, errors in enumerate(group.worker_errors[k]):
                    here = places[begin + low : begin + high]
                    u = flat[rank][here] + errors[low:high]
                    sent = self._message(u)
                    errors[low:high] = self._stored(u - sent)
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
        change, places = group.flatten(changes), self._sent_as_signs(group)
        for k, (begin, end) in enumerate(self._buckets(group)):
            for rank, (low, high) in enumerate(chunk_bounds(end - begin, self.world_size)):
                place = places[begin + low : begin + high]
                d = change[place] + group.server_errors[k][rank]
                change[place] = self._message(d)
                group.server_errors[k][rank] = self._stored(d - change[place])
        for i, part in enumerate(group.unflatten(change)):
            decay = 1 - group.lr * group.weight_decay if present[i] else 1.0
            group.params[i] = group.params[i] * decay + part

    def _gather(self, group: SimulatedGroup) -> None:
        momentum, places = group.flatten(group.exp_avg), self._sent_as_signs(group)
        for k, (begin, end) in enumerate(self._buckets(group)):
            for rank, (low, high) in enumerate(chunk_bounds(end - begin, self.world_size)):
                here = places[begin + low : begin + high]
                m = momentum[here]
                signs = quantize(m, blocks_of(0, high - low, self.scale_block))
                self._note(distance_to_zero(m))
                momentum[here] = signs
                group.server_errors[k][rank] = self._stored(group.betas[0] * (m - signs))
        group.exp_avg = group.unflatten(momentum)


class FreedZeroOnebitAdam(ZeroOnebitAdam):
    """zero_stage=2: the servers clip what they have received, by its norm; then messages are clipped one step late."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.now = 1.0  # the factor of the last step
        self.means: dict[int, Array] = {}  # of the gradients of each group, by id

    def _factors(self, grads: Grads, compressed: bool) -> list[float]:
        if self.world_size == 1:
            return super()._factors(grads, compressed)
        late, own = self.now, [bool(group.params) and not group.non_freeze for group in self.groups]
        if compressed:
            norm = sketched_norm([flat[self._in_buckets()] for flat in self._flat(grads)], self.step_count)
        else:
            for index, group in enumerate(self.groups):
                local = scaled(grads, index, [1.0] * self.world_size)
                whole = [group.flatten(row) for row in local]
                self.means[id(group)] = self._sent(group, local) if own[index] else np.mean(whole, axis=0)
            norm = float(np.linalg.norm(np.concatenate([*self.means.values()])))
        self.now = self._clip_factor(norm)
        return [late if compressed and shared else self.now for shared in own]

    def _in_buckets(self) -> np.ndarray:
        """The places of all elements in the order of the buckets, in which they are sketched."""
        orders, start = [], 0
        for group in self.groups:
            places = np.arange(group.numel)
            first = places if group.non_freeze else self._sent_as_signs(group)
            orders += [start + first, start + np.setdiff1d(places, first)]
            start += group.numel
        return np.concatenate(orders)

    def _mean(self, group: SimulatedGroup, local: list[list[Any]]) -> np.ndarray:
        return self.now * self.means[id(group)]

    def _freeze(self, group: SimulatedGroup) -> None:
        for workers in group.worker_errors:
            for worker in workers:
                worker *= self.now  # in place: their gradients had left before they were clipped
        super()._freeze(group)


# -- the hierarchical topology -----------------------------------------------------------------------------------------


def own_errors(group: Any, node_size: int, rank: int) -> tuple[Array, Array]:
    """The worker errors of a rank's shards, and the server errors of its chunks, bucket by bucket."""
    place, node = rank % node_size, rank // node_size
    worker, server = [np.zeros(0)], [np.zeros(0)]
    for workers, servers in zip(group.worker_errors, group.server_errors, strict=True):
        nodes = len(workers) // node_size
        shard = chunk_bounds(workers[0].size, len(workers))[place * nodes : (place + 1) * nodes]
        worker.append(workers[rank][shard[0][0] : shard[-1][1]])
        server.append(servers[place * nodes + node])
    return np.concatenate(worker), np.concatenate(server)
