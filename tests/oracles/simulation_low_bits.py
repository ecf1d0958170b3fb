"""The warmup stage with gradients as b-bit integers, for the simulations of OnebitAdam, OnebitLamb and ZeroOneAdam.

The exchange is the float32 simulation of simulation_integers.py, everything else stays float64. The errors are the
lists of the compressed stage: [bucket][rank], of float32 numbers while the exchange writes them.
"""

from typing import Any

import numpy as np

from tests.oracles.simulation import Grads, OnebitAdamSimulation, SimulatedGroup, chunk_bounds
from tests.oracles.simulation_integers import Simulation, in_full
from tests.oracles.simulation_lamb import OnebitLambSimulation
from tests.oracles.simulation_zero_one import ZeroOneAdamSimulation, ZeroOneGroup


class Exchange:
    """Averages gradients in place of their full-precision mean."""

    def __init__(self, world_size: int, bits: int, bucket_numel: int) -> None:
        self.world_size, self.bits, self.bucket_numel = world_size, bits, bucket_numel
        self.averages: list[list[Any]] = []  # of the last step, [group][parameter]

    def average(self, groups: list[Any], grads: Grads) -> Grads:
        """The gradients that every rank gets, [rank][group][parameter]."""
        self.averages = []
        for index, group in enumerate(groups):
            local = [rank[index] for rank in grads]
            self.averages.append(self._average_group(group, local))
        return [self.averages] * self.world_size

    def _average_group(self, group: SimulatedGroup, local: list[Any]) -> list[Any]:
        nobody = [all(rank[i] is None for rank in local) for i in range(len(group.params))]
        flat = np.stack([group.flatten(rank).astype(np.float32) for rank in local])
        if group.non_freeze or self.world_size == 1 or not group.numel:
            mean = flat.astype(np.float64).mean(axis=0)
        else:
            exchange = Simulation(group.numel, self.bucket_numel, self.world_size, self.bits)
            small = in_full([p.shape for p in group.params])
            self._move_errors(group, exchange, small, out=False)
            mean = exchange.average(np.where(small, np.float32(0), flat)).astype(np.float64)
            mean[small] = flat[:, small].astype(np.float64).mean(axis=0)
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


def scale_errors(group: Any, factors: np.ndarray) -> None:
    """Multiply the errors of a group by factors [numel]."""
    end = 0
    for workers, servers in zip(group.worker_errors, group.server_errors, strict=True):
        begin, end = end, end + workers[0].size
        for rank, (low, high) in enumerate(chunk_bounds(end - begin, len(workers))):
            workers[rank] = workers[rank] * factors[begin:end]
            servers[rank] = servers[rank] * factors[begin + low : begin + high]


class LowBits:
    """The averaged gradients of a simulation travel as integers."""

    def __init__(self, groups: Any, world_size: int, *, bits: int, **kwargs: Any) -> None:
        super().__init__(groups, world_size, **kwargs)
        self.exchange = Exchange(world_size, bits, self.bucket_numel)

    def step(self, grads: Grads) -> bool:
        if self.reduces_grads(self.step_count + 1):
            grads = self.exchange.average(self.groups, grads)
        return super().step(grads)


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
                scale_errors(group, np.concatenate(stretch))


class LowBitZeroOneAdam(LowBits, ZeroOneAdamSimulation):
    def _one_bit_gradient_step(self, group: ZeroOneGroup, local: list[list[Any]]) -> None:
        mask = group.mask.copy()
        for at in group.slices if self.world_size > 1 else ():
            if group.v[at].size:
                group.v[at] = np.maximum(group.v[at], self.variance_floor * group.v[at].mean())
                group.mask[at] *= group.v[at].any()
        super()._one_bit_gradient_step(group, local)
        group.mask = mask
