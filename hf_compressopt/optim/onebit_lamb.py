"""1-bit LAMB (Li et al. 2021, arXiv 2104.06069).

Warmup stage, t <= freeze_step: LAMB, and for every tensor whose coefficient is not 1
    c = coeff_beta c + (1 - coeff_beta) coeff                                               (1)
At the end of step freeze_step, once: bias corrections and variance floor as in 1-bit Adam; v_fresh = v; per tensor
    momentum_scale = ||m|| / sqrt(numel);  scaling_coeff = mean(momentum_scale) / momentum_scale  (2)
Compressed stage, t > freeze_step:
    m_r = b1 m + (1 - b1) g_r;  m' = compressed_all_reduce(m_r scaling_coeff) / scaling_coeff     (3)
    g' = (m' - b1 m) / (1 - b1);  v_fresh = b2 v_fresh + (1 - b2) g'^2                            (4)
    factor = max((sqrt(v) + eps) / (sqrt(v_fresh) + eps)), bounded                                (5)
    update = m' / (sqrt(v) + eps) + wd p;  p <- p - lr c factor update                            (6)
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.flat import Bucket
from hf_compressopt.optim.freezing import FreezingOptimizer
from hf_compressopt.optim.functional import adam_options, apply_update_, denominator
from hf_compressopt.optim.group_state import ExtraState, GroupState
from hf_compressopt.optim.lamb import check_coefficients, lamb_step_
from hf_compressopt.optim.options import check_at_least
from hf_compressopt.stages import StepPlan


class OnebitLamb(FreezingOptimizer):
    """LAMB whose momentum crosses the network as signs, after a warmup stage in full precision.

    Norms, coefficients and factors stay on the device: a step synchronises with the host no more often for many
    tensors than for one.

    Args:
        params: As for OnebitAdam.
        lr: Learning rate.
        max_coeff: Upper bound of the trust ratio in the warmup stage.
        min_coeff: Lower bound of it, >= 0.
        coeff_beta: Coefficient of its running average, in [0, 1).
        factor_max: Upper bound of the factor on that average in the compressed stage.
        factor_min: Lower bound of it, >= 0.
        factor_threshold: Largest relative change of the factor in one step, >= 0.
        **options: See :class:`~hf_compressopt.optim.freezing.FreezingOptimizer` (``freeze_step``) and
            :class:`~hf_compressopt.optim.compressed.CompressedOptimizer`.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters that no option can make work.
    """

    extra_state = (
        ExtraState("exp_avg_sq_fresh", "element"),
        ExtraState("scaling_coeff", "parameter", 1.0),
        ExtraState("lamb_coeff_freeze", "parameter"),
        ExtraState("lamb_coeff_updates", "parameter"),
        ExtraState("last_factor", "parameter", 1.0),
        ExtraState("lamb_coeff", "parameter", 1.0, always=True),
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **options: Any,
    ) -> None:
        """See the class."""
        check_coefficients(min_coeff, max_coeff)
        check_at_least("factor_min", factor_min, 0)
        check_at_least("factor_max", factor_max, factor_min)
        check_at_least("factor_threshold", factor_threshold, 0)
        if not 0 <= coeff_beta < 1:
            raise ValueError(f"coeff_beta must be in [0, 1), got {coeff_beta}")
        self.max_coeff, self.min_coeff, self.coeff_beta = max_coeff, min_coeff, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        super().__init__(params, lr, **options)

    def get_lamb_coeffs(self) -> list[float]:
        """The last coefficients, one per trainable tensor, group by group: a copy."""
        return list(chain.from_iterable(state.extra["lamb_coeff"].tolist() for state in self._states))

    def _uncompressed_step(self, group: dict[str, Any], state: GroupState, grads: list[Tensor | None]) -> None:
        options = adam_options(group)
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            moments = state.view(state.exp_avg, index), state.view(state.exp_avg_sq, index)
            param, step = state.params[index], state.steps[index]
            coeff = lamb_step_(param, grad, *moments, step, options, self.min_coeff, self.max_coeff)
            state.extra["lamb_coeff"][index] = coeff
            if not state.compressed:
                continue
            moved = coeff != 1
            average = state.extra["lamb_coeff_freeze"][index]
            average.copy_(torch.where(moved, self.coeff_beta * average + (1 - self.coeff_beta) * coeff, average))  # (1)
            state.extra["lamb_coeff_updates"][index] += moved

    def _end_warmup(self, plan: StepPlan) -> None:
        super()._end_warmup(plan)
        scales: list[Tensor] = []
        places: list[tuple[GroupState, int]] = []
        for state in self._states:
            if not state.compressed:
                continue
            state.extra["exp_avg_sq_fresh"].copy_(state.exp_avg_sq)
            for index, numel in enumerate(state.layout.numels):
                if numel:
                    norm = torch.linalg.vector_norm(state.view(state.exp_avg, index).double())
                    scales.append(norm / numel**0.5)
                    places.append((state, index))
        if not scales:
            return
        united = torch.stack(scales).mean()
        for scale, (state, index) in zip(scales, places, strict=True):
            one = torch.ones_like(scale)
            state.extra["scaling_coeff"][index] = torch.where(scale > 0, united / scale, one).float()  # (2)

    def _prepare(self, group: dict[str, Any], state: GroupState, bucket: Bucket, grads: list[Tensor | None]) -> Tensor:
        beta1, _ = group["betas"]
        message: Tensor = state.exp_avg[bucket.start : bucket.stop] * beta1
        for piece in bucket.pieces:
            part = message[piece.offset - bucket.start :][: piece.stop - piece.start]
            if (grad := grads[piece.index]) is not None:
                part.add_(grad.reshape(-1)[piece.start : piece.stop], alpha=1 - beta1)
            part.mul_(state.extra["scaling_coeff"][piece.index])  # (3)
        return message

    def _apply(self, group: dict[str, Any], state: GroupState, bucket: Bucket, message: Tensor) -> None:
        beta1, beta2 = group["betas"]
        exp_avg = state.exp_avg[bucket.start : bucket.stop]
        fresh = state.extra["exp_avg_sq_fresh"][bucket.start : bucket.stop]
        for piece in bucket.pieces:
            part = message[piece.offset - bucket.start :][: piece.stop - piece.start]
            part.div_(state.extra["scaling_coeff"][piece.index])  # (3)
        gradient = exp_avg.mul_(-beta1).add_(message).div_(1 - beta1)  # (4)
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        exp_avg.copy_(message)
        for piece in bucket.pieces:
            if piece.stop == state.layout.numels[piece.index] and state.params[piece.index].requires_grad:
                self._apply_tensor(group, state, piece.index)  # all of it has come back

    def _apply_tensor(self, group: dict[str, Any], state: GroupState, index: int) -> None:
        eps, inside, decay = group["eps"], group["eps_inside_sqrt"], group["weight_decay"]
        param = state.params[index]
        frozen = denominator(state.view(state.exp_avg_sq, index), eps, inside)
        fresh = denominator(state.view(state.extra["exp_avg_sq_fresh"], index), eps, inside)
        factor = (frozen / fresh).max()  # (5)
        direction = state.view(state.exp_avg, index) / frozen
        if state.still[index]:  # with eps = 0 both are 0 / 0
            direction.zero_()
            factor = torch.ones_like(factor)
        update = direction
        if decay > 0:
            update = direction.add(param, alpha=decay)
            norm = torch.linalg.vector_norm(update)
            share = (torch.linalg.vector_norm(direction) / norm).clamp(max=1.0)
            share = torch.where(norm > 0, share, torch.ones_like(share))
            factor = factor * share + 1 - share
        last = state.extra["last_factor"][index]
        factor = factor.clamp(self.factor_min, self.factor_max)
        factor = factor.clamp(last * (1 - self.factor_threshold), last * (1 + self.factor_threshold))
        last.copy_(factor)
        coeff = self._frozen_coeff(group, state, index) * factor
        state.extra["lamb_coeff"][index] = coeff
        apply_update_(param, update, coeff * group["lr"])  # (6)

    def _frozen_coeff(self, group: dict[str, Any], state: GroupState, index: int) -> Tensor:
        average: Tensor = state.extra["lamb_coeff_freeze"][index]
        updates = state.extra["lamb_coeff_updates"][index]
        if group["bias_correction"]:
            average = average / (1 - self.coeff_beta**updates)
        coeff: Tensor = torch.where(updates > 0, average, torch.ones_like(average))
        return coeff
