"""W ranks of ZeroOneAdam in one process, in float64, written from the paper's equations.

Nothing here uses the package. `min_distance` is as in simulation.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.oracles.simulation import Array, Grads, SimulatedGroup, Simulation, is_finite, scaled, sketched_norm


def variance_steps(last: int, scaler: int, first: int = 1) -> list[int]:
    """The variance steps in [first, last]: one per interval, which doubles after every `scaler` of them."""
    steps: list[int] = []
    for t in range(first, last + 1):
        if t % 2 ** (len(steps) // scaler) == 0:
            steps.append(t)
    return steps


class ZeroOneGroup(SimulatedGroup):
    """A group as flat arrays, one of each rank; `params` and the moments of SimulatedGroup are not kept up."""

    def start(self, world_size: int) -> None:
        flat = self.flatten(self.params)
        self.p = [flat.copy() for _ in range(world_size)]
        self.m = [np.zeros_like(flat) for _ in range(world_size)]
        self.v = np.zeros_like(flat)
        self.variance_counts = [0] * len(self.params)
        sizes = [p.size for p in self.params]
        self.slices = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        masks = [
            np.ones(p.size) if self.exp_avg_mask is None else np.broadcast_to(self.exp_avg_mask, p.shape).ravel()
            for p in self.params
        ]
        self.mask = np.concatenate([np.zeros(0), *masks])
        self.accumulated = [np.zeros_like(flat) for _ in range(world_size)]  # u
        self.anchor, self.lrs, self.decay = flat.copy(), 0.0, 1.0


class ZeroOneAdamSimulation(Simulation):
    """first_step: the number of the first step, 2 in the original, whose first step only counts."""

    group_class = ZeroOneGroup

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        world_size: int,
        *,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        first_step: int = 1,
        **kwargs: Any,
    ):
        super().__init__(groups, world_size, **kwargs)
        for group in self.groups:
            group.start(world_size)
        self.var_freeze_step, self.shares = var_freeze_step, list[float]()
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self.variance_steps = set(variance_steps(var_freeze_step, var_update_scaler, first_step))
        self.step_count = first_step - 1

    def reduces_grads(self, t: int) -> bool:
        return t in self.variance_steps

    def in_local_stage(self, t: int) -> bool:
        return t > self.var_freeze_step

    def ranks_step_alone(self, t: int) -> bool:
        """Return True if only a sync connects the ranks: a `non_freeze` group is averaged in every step."""
        return self.in_local_stage(t) and not any(group.non_freeze and group.params for group in self.groups)

    def local_interval(self, t: int) -> int:
        doublings = (t - self.var_freeze_step - 1) // self.local_step_scaler
        return min(self.local_step_clipper, 2 ** min(doublings, 60))

    def is_sync(self, t: int) -> bool:
        return self.in_local_stage(t) and t % self.local_interval(t) == 0

    def params_of(self, rank: int) -> Array:
        return np.concatenate([group.p[rank] for group in self.groups])

    def moments_of(self, group: ZeroOneGroup, rank: int) -> tuple[Array, Array]:
        return group.m[rank], group.v

    def step(self, grads: Grads) -> bool:
        """One step from every rank's local gradients.

        False when it was skipped because one is not finite, which happens where ranks do not step alone.
        """
        t = self.step_count + 1
        finite = [is_finite(rank) for rank in grads]
        if not all(finite) and not self.ranks_step_alone(t):
            return False
        self.step_count = t
        factors = self._clip_factors(grads, t)
        for index, group in enumerate(self.groups):
            local = scaled(grads, index, factors)
            if self.reduces_grads(t) or group.non_freeze:
                self._uncompressed_step(group, local)
            elif not self.in_local_stage(t):
                self._one_bit_gradient_step(group, local)
            else:
                self._local_step(group, local, finite)
                if self.is_sync(t) and group.lrs > 0:
                    self._synchronize(group)
            if t == self.var_freeze_step and not group.non_freeze:
                self._freeze(group)
        return True

    def _clip_factors(self, grads: Grads, t: int) -> list[float]:
        if self.max_grad_norm <= 0:
            return [1.0] * self.world_size
        flat = self._flat(grads)
        own = [float(np.linalg.norm(f)) for f in flat]
        exact = self.reduces_grads(t) or not all(np.isfinite(own))
        mean = float(np.linalg.norm(np.mean(flat, axis=0))) if exact else sketched_norm(flat, t)
        ratio = 1.0 if self.clip == "local" else self.usual_ratio()
        if self.reduces_grads(t) or (self.clip == "sketch" and not self.ranks_step_alone(t)):
            norms = [mean] * self.world_size
        elif self.ranks_step_alone(t):
            norms = [norm * ratio for norm in own]
        else:
            norms = [float(np.sqrt(np.mean(np.square(own))))] * self.world_size
        measured = not self.ranks_step_alone(t) or self.is_sync(t)
        if measured and not self.reduces_grads(t) and self.world_size > 1 and np.isfinite(own).all():
            square = float(np.mean(np.square(own)))
            self.shares.append((mean**2 / square - 1 / self.world_size) / (1 - 1 / self.world_size))
        return [self._clip_factor(norm) for norm in norms]

    def usual_share(self) -> float:
        """Of a rank's squared norm, the share that all ranks have in common: later measurements weigh more."""
        weights = 0.95 ** np.arange(len(self.shares))[::-1]
        return float(np.sum(weights * self.shares) / np.sum(weights)) if self.shares else 1.0

    def usual_ratio(self) -> float:
        """The norm of the mean over the root of the mean of the ranks' squared norms."""
        share = min(1.0, max(0.0, self.usual_share()))
        return float(np.sqrt(share + (1 - share) / self.world_size))

    def _adam(self, group: ZeroOneGroup, i: int, bound: float = np.inf) -> None:
        """Move tensor i, which is alike on all ranks, by `bound` learning rates at most."""
        b1, b2 = group.betas
        at = group.slices[i]
        m, v = group.m[0][at], group.v[at]
        if self.bias_correction:
            m, v = m / (1 - b1 ** group.steps[i]), v / (1 - b2 ** max(group.variance_counts[i], 1))
        update = np.clip(m / self._denominator(v, group.eps), -bound, bound)
        moved = group.p[0][at] * (1 - group.lr * group.weight_decay) - group.lr * update
        for p in group.p:
            p[at] = moved

    def _uncompressed_step(self, group: ZeroOneGroup, local: list[list[Any]]) -> None:
        b1, b2 = group.betas
        for i, at in enumerate(group.slices):
            grads = [rank[i] for rank in local]
            if all(g is None for g in grads):
                continue
            g = sum(np.zeros(at.stop - at.start) if g is None else g.ravel() for g in grads) / self.world_size
            group.steps[i] += 1
            group.variance_counts[i] += 1
            for m in group.m:
                m[at] = b1 * m[at] + (1 - b1) * g
            group.v[at] = b2 * group.v[at] + (1 - b2) * g * g
            self._adam(group, i)

    def _one_bit_gradient_step(self, group: ZeroOneGroup, local: list[list[Any]]) -> None:
        b1, _ = group.betas
        g = self._all_reduce(group, [group.flatten(grads) for grads in local]) * group.mask
        group.m = [b1 * m + (1 - b1) * g for m in group.m]
        for i in range(len(group.slices)):
            group.steps[i] += 1
            self._adam(group, i, self.max_update)

    def _freeze(self, group: ZeroOneGroup) -> None:
        b1, b2 = group.betas
        for i, at in enumerate(group.slices):
            if self.bias_correction and group.variance_counts[i]:
                for m in group.m:
                    m[at] /= 1 - b1 ** group.steps[i]
                group.v[at] /= 1 - b2 ** group.variance_counts[i]
            if group.v[at].size:
                group.v[at] = np.maximum(group.v[at], self.variance_floor * group.v[at].mean())
        self._reset_errors(group)
        group.anchor = group.p[0].copy()

    def _local_step(self, group: ZeroOneGroup, local: list[list[Any]], finite: list[bool]) -> None:
        b1, _ = group.betas
        denominator = self._denominator(group.v, group.eps)
        decay = 1 - group.lr * group.weight_decay
        for rank, grads in enumerate(local):
            if finite[rank]:
                group.m[rank] = b1 * group.m[rank] + (1 - b1) * group.flatten(grads)
            update = np.clip(group.m[rank] / denominator, -self.max_update, self.max_update)
            group.p[rank] = group.p[rank] * decay - group.lr * update
            group.accumulated[rank] = group.accumulated[rank] + group.lr * group.m[rank]
        group.lrs += group.lr
        group.decay *= decay
        for i in range(len(group.slices)):
            group.steps[i] += 1

    def _synchronize(self, group: ZeroOneGroup) -> None:
        y = self._all_reduce(group, group.accumulated) * group.mask
        bound = self.max_update * group.lrs
        group.anchor = group.decay * group.anchor - np.clip(y / self._denominator(group.v, group.eps), -bound, bound)
        group.p = [group.anchor.copy() for _ in group.p]
        group.m = [y / group.lrs for _ in group.m]
        group.accumulated = [np.zeros_like(u) for u in group.accumulated]
        group.lrs, group.decay = 0.0, 1.0
