"""W ranks in one process, in float64: the compressed all-reduce, OnebitAdam, OnebitLamb, LAMB, and ZeroOneAdam.

All is written from the papers' equations; of the package only the sketch is used. Simulations report `min_distance`,
how close any element of a message came to a change of sign: a float32 run may differ there by two scales, so tests
choose seeds that keep it well above rounding. Exact zeros do not count, their sign is +1 by rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hf_compressopt.kernels import Segment
from hf_compressopt.kernels.reference import sketch_

Array = NDArray[np.float64]
Grads = Sequence[Sequence[Sequence[Any]]]  # [rank][group][parameter], None for no gradient


class Compressed(NamedTuple):
    mean: Array  # [numel], alike on all ranks
    worker_errors: list[Array]  # [world_size] of [numel]
    server_errors: list[Array]  # [world_size] of [numel of the rank's chunk]
    min_distance: float


def chunk_bounds(numel: int, world_size: int) -> list[tuple[int, int]]:
    """Begin and end of each rank's chunk among the real elements; empty chunks begin where they end."""
    chunk = -(-numel // (8 * world_size)) * 8
    return [(min(j * chunk, numel), min((j + 1) * chunk, numel)) for j in range(world_size)]


def quantize(values: Array, blocks: list[tuple[int, int]]) -> Array:
    """RMS of each block times the sign of its elements."""
    quantized = np.zeros_like(values)
    for begin, end in blocks:
        block = values[begin:end]
        scale = np.sqrt(np.sum(block * block) / block.size)
        quantized[begin:end] = np.where(block < 0, -scale, scale)
    return quantized


def blocks_of(begin: int, end: int, scale_block: int | None) -> list[tuple[int, int]]:
    if begin == end:
        return []
    length = scale_block or end - begin
    return [(at, min(at + length, end)) for at in range(begin, end, length)]


def distance_to_zero(values: Array) -> float:
    nonzero = np.abs(values[values != 0])
    return float(nonzero.min()) if nonzero.size else np.inf


def simulate_compressed_all_reduce(
    xs: Sequence[Array],
    worker_errors: Sequence[Array],
    server_errors: Sequence[Array],
    scale_block: int | None,
    *,
    node_size: int = 1,
) -> Compressed:
    """One bucket: xs and worker_errors are [world_size] of [numel], server_errors one array per chunk.

    The ranks of a node average in full precision first, and each of them has the node's worker error.
    """
    world_size, numel = len(xs), xs[0].size
    if world_size == 1:
        mean = xs[0] + worker_errors[0] + server_errors[0]
        return Compressed(mean, [np.zeros(numel)], [np.zeros(numel)], np.inf)
    chunks = chunk_bounds(numel, world_size)
    if scale_block is None:
        worker_blocks = blocks_of(0, numel, None)  # one scale per worker for the whole bucket
    else:
        worker_blocks = [block for begin, end in chunks for block in blocks_of(begin, end, scale_block)]

    total, min_distance = np.zeros(numel), np.inf
    new_worker_errors, new_server_errors, mean = [], [], np.zeros(numel)
    for first in range(0, world_size, node_size):
        u = np.mean(xs[first : first + node_size], axis=0, dtype=np.float64) + worker_errors[first]
        q = quantize(u, worker_blocks)
        new_worker_errors += [u - q] * node_size
        total += q
        min_distance = min(min_distance, distance_to_zero(u))
    for (begin, end), error in zip(chunks, server_errors, strict=True):
        a = total[begin:end] / (world_size // node_size) + error
        y = quantize(a, blocks_of(0, end - begin, scale_block))
        new_server_errors.append(a - y)
        mean[begin:end] = y
        min_distance = min(min_distance, distance_to_zero(a))
    return Compressed(mean, new_worker_errors, new_server_errors, min_distance)


@dataclass
class SimulatedGroup:
    params: list[Array]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    exp_avg_mask: Any = None
    non_freeze: bool = False
    exp_avg: list[Array] = field(init=False)
    exp_avg_sq: list[Array] = field(init=False)
    steps: list[int] = field(init=False)
    worker_errors: list[list[Array]] = field(init=False)  # [bucket][rank], which the simulation makes
    server_errors: list[list[Array]] = field(init=False)  # [bucket][rank]

    def __post_init__(self) -> None:
        self.params = [np.array(p, dtype=np.float64) for p in self.params]
        self.exp_avg = [np.zeros_like(p) for p in self.params]
        self.exp_avg_sq = [np.zeros_like(p) for p in self.params]
        self.steps = [0] * len(self.params)

    @property
    def numel(self) -> int:
        return sum(p.size for p in self.params)

    def flatten(self, tensors: Sequence[Any]) -> Array:
        pieces = [
            np.zeros(p.size) if t is None else np.ravel(np.asarray(t, np.float64))
            for t, p in zip(tensors, self.params, strict=True)
        ]
        return np.concatenate([np.zeros(0), *pieces])

    def unflatten(self, flat: Array) -> list[Array]:
        ends = np.cumsum([p.size for p in self.params])[:-1]
        return [piece.reshape(p.shape) for piece, p in zip(np.split(flat, ends), self.params, strict=True)]


def sketched_norm(flat: list[Array], step: int) -> float:
    """The norm of the mean of the ranks' gradients, from their sketches, folded as those of small models are."""
    if len(flat) == 1:
        return float(np.linalg.norm(flat[0]))
    size = 64
    while size < min(4096, flat[0].size // 32 + 1):
        size *= 2
    sketches = []
    for gradient in flat:
        y, square = torch.zeros(4096), torch.zeros((), dtype=torch.float64)
        sketch_([Segment(torch.from_numpy(gradient).float(), 0, gradient.size, 0)], 0, step, y, square)
        sketches.append(y.double().numpy().reshape(-1, size).sum(axis=0))
    return float(np.linalg.norm(np.mean(sketches, axis=0)))


def is_finite(rank: Sequence[Sequence[Any]]) -> bool:
    return all(np.isfinite(g).all() for group in rank for g in group if g is not None)


def scaled(grads: Grads, index: int, factors: Sequence[float]) -> list[list[Any]]:
    """Every rank's gradients of a group, times the rank's factor."""
    return [
        [None if g is None else factor * np.asarray(g, np.float64) for g in rank[index]]
        for factor, rank in zip(factors, grads, strict=True)
    ]


class Simulation:
    """What the simulations of all algorithms share."""

    group_class = SimulatedGroup

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        world_size: int,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_grad_norm: float = 0.0,
        clip: str = "sketch",
        scale_block: int | None = 4096,
        variance_floor: float = 0.01,
        max_update: float | None = 2.0,
        bucket_numel: int = 6_553_600,
        node_size: int = 1,
        own_blocks: int = 0,
        variance_interval: int = 0,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.groups = [self.group_class(**{**defaults, **group}) for group in groups]
        self.world_size, self.bucket_numel, self.max_update = world_size, bucket_numel, max_update or np.inf
        self.variance_interval = variance_interval  # of refreshes, whose gradients are averaged exactly
        self.own_blocks = own_blocks  # smaller tensors travel in full precision
        self.node_size = node_size  # of the hierarchical topology; a rank's worker error is its node's
        self.bias_correction, self.eps_inside_sqrt, self.clip = bias_correction, eps_inside_sqrt, clip
        self.max_grad_norm, self.scale_block, self.variance_floor = max_grad_norm, scale_block, variance_floor
        self.step_count, self.min_distance = 0, np.inf
        self.lamb_coeffs: list[float] = []
        for group in self.groups:
            self._reset_errors(group)

    def _reset_errors(self, group: SimulatedGroup) -> None:
        lengths = [end - begin for begin, end in self._buckets(group)]
        group.worker_errors = [[np.zeros(n) for _ in range(self.world_size)] for n in lengths]
        group.server_errors = [[np.zeros(e - b) for b, e in chunk_bounds(n, self.world_size)] for n in lengths]

    def _buckets(self, group: SimulatedGroup) -> list[tuple[int, int]]:
        return [] if group.non_freeze else blocks_of(0, self._sent_as_signs(group).size, self.bucket_numel)

    def _sent_as_signs(self, group: SimulatedGroup) -> NDArray[np.int64]:
        """The places of the elements that messages hold: all, or those of tensors of two blocks."""
        blocks = [0 if self.scale_block is None else self.own_blocks * self.scale_block for _ in group.params]
        least = [
            block if p.ndim < 2 else min(block, self.own_blocks * 128)
            for block, p in zip(blocks, group.params, strict=True)
        ]
        large = [np.full(p.size, p.size >= size) for size, p in zip(least, group.params, strict=True)]
        return np.flatnonzero(np.concatenate([np.zeros(0, bool), *large]))

    def _flat(self, grads: Grads) -> list[Array]:
        """Every rank's gradients of all groups, flat."""
        rows = ([group.flatten(own) for group, own in zip(self.groups, rank, strict=True)] for rank in grads)
        return [np.concatenate([np.zeros(0), *row]) for row in rows]

    def _clip_factor(self, norm: float) -> float:
        """As torch's clip_grad_norm_."""
        return float(min(1.0, self.max_grad_norm / (norm + 1e-6))) if self.max_grad_norm > 0 else 1.0

    def _denominator(self, v: Array, eps: float) -> Array:
        return np.sqrt(v + eps) if self.eps_inside_sqrt else np.sqrt(v) + eps

    def _refreshes(self, interval: int = 1) -> bool:
        """Return whether the step refreshes the variance; there are messages every ``interval`` steps."""
        return self.variance_interval > 0 and self.step_count % (self.variance_interval * interval) == 0

    def _refreshed(self, v: Array, grads: Sequence[Any], beta2: float, interval: int = 1) -> Array:
        """A tensor's frozen variance after a refresh by all ranks' gradients; without a variance it stays so."""
        mean = sum(np.zeros_like(v) if g is None else g.reshape(v.shape) for g in grads) / self.world_size
        if not v.any() or not mean.any() or not np.isfinite(mean).all():
            return v
        steps = self.variance_interval * interval
        old, new = beta2**steps * (1 - beta2 ** (self.step_count - steps)), 1 - beta2**steps
        memory = max(old / (old + new) if self.bias_correction else beta2**steps, 7 / 8)
        v = memory * v + (1 - memory) * mean * mean
        return np.maximum(v, self.variance_floor * v.mean())

    def _all_reduce(self, group: SimulatedGroup, messages: Sequence[Array]) -> Array:
        mean, places = np.mean(messages, axis=0), self._sent_as_signs(group)
        for k, (begin, end) in enumerate(self._buckets(group)):
            here = places[begin:end]
            parts, errors = [x[here] for x in messages], (group.worker_errors[k], group.server_errors[k])
            result = simulate_compressed_all_reduce(parts, *errors, self.scale_block, node_size=self.node_size)
            mean[here] = result.mean
            group.worker_errors[k], group.server_errors[k] = result.worker_errors, result.server_errors
            self.min_distance = min(self.min_distance, result.min_distance)
        return mean


# -- OnebitAdam --------------------------------------------------------------------------------------------------------


class OnebitAdamSimulation(Simulation):
    def __init__(self, groups: Sequence[dict[str, Any]], world_size: int, *, freeze_step: int, **kwargs: Any):
        super().__init__(groups, world_size, **kwargs)
        self.freeze_step = freeze_step

    def reduces_grads(self, t: int) -> bool:
        return t <= self.freeze_step

    def params_of(self, rank: int) -> Array:
        return np.concatenate([group.flatten(group.params) for group in self.groups])

    def moments_of(self, group: SimulatedGroup, rank: int) -> tuple[Array, Array]:
        return group.flatten(group.exp_avg), group.flatten(group.exp_avg_sq)

    def step(self, grads: Grads) -> bool:
        """One step from every rank's local gradients; False when it was skipped because one is not finite."""
        if not all(map(is_finite, grads)):
            return False
        self.step_count += 1
        compressed = self.step_count > self.freeze_step
        for index, (group, factor) in enumerate(zip(self.groups, self._factors(grads, compressed), strict=True)):
            local = scaled(grads, index, [factor] * self.world_size)
            if compressed and not group.non_freeze:
                self._compressed_step(group, local)
                for i, v in enumerate(group.exp_avg_sq if self._refreshes() else ()):
                    group.exp_avg_sq[i] = self._refreshed(v, [rank[i] for rank in local], group.betas[1])
            else:
                self._warmup_step(group, local)
                if self.step_count == self.freeze_step and not group.non_freeze:
                    self._freeze(group)
        return True

    def _factors(self, grads: Grads, compressed: bool) -> list[float]:
        """The factors that clip the gradients of each group."""
        if self.max_grad_norm <= 0:
            return [1.0] * len(self.groups)
        flat = self._flat(grads)
        if compressed and self.clip == "local":
            norm = np.sqrt(np.mean([np.sum(f * f) for f in flat]))
        elif compressed:
            norm = sketched_norm(flat, self.step_count)
        else:
            norm = np.linalg.norm(np.mean(flat, axis=0))
        return [self._clip_factor(norm)] * len(self.groups)

    def _moments(self, group: SimulatedGroup, i: int, g: Array) -> tuple[Array, Array]:
        """The corrected moments of tensor i after a gradient."""
        b1, b2 = group.betas
        group.steps[i] += 1
        group.exp_avg[i] = m = b1 * group.exp_avg[i] + (1 - b1) * g
        group.exp_avg_sq[i] = v = b2 * group.exp_avg_sq[i] + (1 - b2) * g * g
        if self.bias_correction:
            return m / (1 - b1 ** group.steps[i]), v / (1 - b2 ** group.steps[i])
        return m, v

    def _warmup_step(self, group: SimulatedGroup, local: list[list[Any]]) -> None:
        for i, p in enumerate(group.params):
            grads = [rank[i] for rank in local]
            if any(g is not None for g in grads):
                mean = sum(np.zeros(p.shape) if g is None else g for g in grads) / self.world_size
                self._warm(group, i, *self._moments(group, i, mean))

    def _warm(self, group: SimulatedGroup, i: int, m: Array, v: Array) -> None:
        decayed = group.params[i] * (1 - group.lr * group.weight_decay)
        group.params[i] = decayed - group.lr * m / self._denominator(v, group.eps)

    def _freeze(self, group: SimulatedGroup) -> None:
        b1, b2 = group.betas
        for i, steps in enumerate(group.steps):
            if self.bias_correction and steps:
                group.exp_avg[i] = group.exp_avg[i] / (1 - b1**steps)
                group.exp_avg_sq[i] = group.exp_avg_sq[i] / (1 - b2**steps)
            if group.exp_avg_sq[i].size:
                floor = self.variance_floor * group.exp_avg_sq[i].mean()
                group.exp_avg_sq[i] = np.maximum(group.exp_avg_sq[i], floor)

    def _compressed_step(self, group: SimulatedGroup, local: list[list[Any]]) -> None:
        b1, _ = group.betas
        m_flat = group.flatten(group.exp_avg)
        new = self._all_reduce(group, [b1 * m_flat + (1 - b1) * group.flatten(grads) for grads in local])
        for i, m in enumerate(group.unflatten(new) if group.params else ()):
            group.steps[i] += 1
            group.exp_avg[i] = m if group.exp_avg_mask is None else m * group.exp_avg_mask
            update = group.exp_avg[i] / self._denominator(group.exp_avg_sq[i], group.eps)
            update = np.clip(update, -self.max_update, self.max_update)
            group.params[i] = group.params[i] * (1 - group.lr * group.weight_decay) - group.lr * update


# -- OnebitLamb, whose warmup stage is LAMB ----------------------------------------------------------------------------


class TensorScales:
    """The state of one tensor in 1-bit LAMB, without its moments."""

    def __init__(self) -> None:
        self.coeff = 1.0  # of the last step
        self.coeff_average = 0.0  # lamb_coeff_freeze, not corrected
        self.coeff_updates = 0
        self.last_factor = 1.0
        self.scaling_coeff = 1.0
        self.ratios: list[float] = []  # at the switch
        self.fresh: Array = np.zeros(0)  # v_fresh


class OnebitLambSimulation(OnebitAdamSimulation):
    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        world_size: int,
        *,
        freeze_step: int,
        trust_ratio: str = "measured",
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **kwargs: Any,
    ):
        super().__init__(groups, world_size, freeze_step=freeze_step, **kwargs)
        self.trust_ratio = trust_ratio
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

    def _measured(self, scales: TensorScales, p_norm: float, update_norm: float) -> float:
        average = self._frozen_coeff(scales)
        if not (p_norm > 0 and update_norm > 0):
            return average
        ratio = p_norm / update_norm
        if len(scales.ratios) < 20:
            scales.ratios.append(ratio)
            return average
        return min(max(average * ratio / float(np.mean(scales.ratios)), self.min_coeff), self.max_coeff)

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
            direction = np.clip(m / denominator, -self.max_update, self.max_update)
            update = direction + group.weight_decay * p
            if self.trust_ratio == "measured":
                scales.coeff = self._measured(scales, float(np.linalg.norm(p)), float(np.linalg.norm(update)))
                group.params[i] = p - group.lr * scales.coeff * update
                continue
            factor = float(np.max(denominator / self._denominator(scales.fresh, group.eps)))
            if group.weight_decay > 0:
                norm = np.linalg.norm(update)
                ratio = min(1.0, float(np.linalg.norm(direction) / norm)) if norm > 0 else 1.0
                factor = factor * ratio + 1 - ratio
            factor = min(max(factor, self.factor_min), self.factor_max)
            lowest = scales.last_factor * (1 - self.factor_threshold)
            highest = scales.last_factor * (1 + self.factor_threshold)
            scales.last_factor = min(max(factor, lowest), highest)
            scales.coeff = self._frozen_coeff(scales) * scales.last_factor
            group.params[i] = p - group.lr * scales.coeff * update


# -- ZeroOneAdam -------------------------------------------------------------------------------------------------------


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
                every = self.local_interval(t)
                for i, at in enumerate(group.slices if self._refreshes(every) else ()):
                    used = [rank[i] if usable else None for rank, usable in zip(local, finite, strict=True)]
                    group.v[at] = self._refreshed(group.v[at], used, group.betas[1], every)
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
