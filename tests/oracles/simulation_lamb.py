"""W ranks of OnebitLamb in one process, in float64, written from the papers' equations; its warmup stage is LAMB.

Nothing here uses the package. `min_distance` is as in simulation.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.oracles.simulation import Array, Grads, OnebitAdamSimulation, SimulatedGroup


class TensorScales:
    """The state of one tensor in 1-bit LAMB, without its moments."""

    def __init__(self) -> None:
        self.coeff = 1.0  # of the last step
        self.coeff_average = 0.0  # lamb_coeff_freeze, not corrected
        self.coeff_updates = 0
        self.last_factor = 1.0
        self.scaling_coeff = 1.0
        self.fresh: Array = np.zeros(0)  # v_fresh


class OnebitLambSimulation(OnebitAdamSimulation):
    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        world_size: int,
        *,
        freeze_step: int,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **kwargs: Any,
    ):
        super().__init__(groups, world_size, freeze_step=freeze_step, **kwargs)
        self.max_coeff, self.min_coeff, self.coeff_beta = max_coeff, min_coeff, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        self.scales = [[TensorScales() for _ in group.params] for group in self.groups]

    def step(self, grads: Grads) -> bool:
        taken = super().step(grads)
        if taken and self.step_count == self.freeze_step:
            self._unite_scales()
        self.lamb_coeffs = [scales.coeff for group in self.scales for scales in group]
        return taken

    def _scales_of(self, group: SimulatedGroup) -> list[TensorScales]:
        return next(scales for other, scales in zip(self.groups, self.scales, strict=True) if other is group)

    def _warm(self, group: SimulatedGroup, i: int, m: Array, v: Array) -> None:
        p, scales = group.params[i], self._scales_of(group)[i]
        update = m / self._denominator(v, group.eps) + group.weight_decay * p
        p_norm, update_norm = np.linalg.norm(p), np.linalg.norm(update)
        scales.coeff = 1.0
        if p_norm > 0 and update_norm > 0:
            scales.coeff = float(min(max(p_norm / update_norm, self.min_coeff), self.max_coeff))
        if scales.coeff != 1:
            old = self.coeff_beta * scales.coeff_average
            scales.coeff_average = old + (1 - self.coeff_beta) * scales.coeff
            scales.coeff_updates += 1
        group.params[i] = p - group.lr * scales.coeff * update

    def _unite_scales(self) -> None:
        compressed = [
            (m, scales)
            for group, rows in zip(self.groups, self.scales, strict=True)
            if not group.non_freeze
            for m, scales in zip(group.exp_avg, rows, strict=True)
            if m.size
        ]
        momentum_scales = [float(np.linalg.norm(m)) / np.sqrt(m.size) for m, _ in compressed]
        for momentum_scale, (_, scales) in zip(momentum_scales, compressed, strict=True):
            scales.scaling_coeff = float(np.mean(momentum_scales)) / momentum_scale if momentum_scale > 0 else 1.0
        for group, rows in zip(self.groups, self.scales, strict=True):
            for v, scales in zip(group.exp_avg_sq, rows, strict=True):
                scales.fresh = v.copy()

    def _frozen_coeff(self, scales: TensorScales) -> float:
        if scales.coeff_updates == 0:
            return 1.0
        if self.bias_correction:
            return scales.coeff_average / (1 - self.coeff_beta**scales.coeff_updates)
        return scales.coeff_average

    def _compressed_step(self, group: SimulatedGroup, local: list[list[Any]]) -> None:
        if not group.params:
            return
        b1, b2 = group.betas
        rows = self._scales_of(group)
        stretch = np.concatenate([np.full(p.size, s.scaling_coeff) for p, s in zip(group.params, rows, strict=True)])
        m_flat = group.flatten(group.exp_avg)
        messages = [(b1 * m_flat + (1 - b1) * group.flatten(grads)) * stretch for grads in local]
        new = self._all_reduce(group, messages) / stretch
        for i, (m, scales) in enumerate(zip(group.unflatten(new), rows, strict=True)):
            group.steps[i] += 1
            if not m.size:
                scales.coeff = 1.0
                continue
            m_old, p = group.exp_avg[i], group.params[i]
            group.exp_avg[i] = m = m if group.exp_avg_mask is None else m * group.exp_avg_mask
            reconstructed = (m - b1 * m_old) / (1 - b1)
            scales.fresh = b2 * scales.fresh + (1 - b2) * reconstructed**2
            denominator = self._denominator(group.exp_avg_sq[i], group.eps)
            update = m / denominator + group.weight_decay * p
            factor = float(np.max(denominator / self._denominator(scales.fresh, group.eps)))
            if group.weight_decay > 0:
                norm = np.linalg.norm(update)
                ratio = min(1.0, float(np.linalg.norm(m / denominator) / norm)) if norm > 0 else 1.0
                factor = factor * ratio + 1 - ratio
            factor = min(max(factor, self.factor_min), self.factor_max)
            lowest = scales.last_factor * (1 - self.factor_threshold)
            highest = scales.last_factor * (1 + self.factor_threshold)
            scales.last_factor = min(max(factor, lowest), highest)
            scales.coeff = self._frozen_coeff(scales) * scales.last_factor
            group.params[i] = p - group.lr * scales.coeff * update
