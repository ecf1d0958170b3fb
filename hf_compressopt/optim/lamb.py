"""LAMB (You et al. 2020, arXiv 1904.00962), and 1-bit LAMB (Li et al. 2021, arXiv 2104.06069).

LAMB has the moments and decay of Adam and one trust ratio per tensor. For every tensor:
    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    update = m^ / (sqrt(v^) + eps) + wd p
    coeff = clamp(||p|| / ||update||, min_coeff, max_coeff), and 1 if a norm is 0
    p <- p - lr coeff update

1-bit LAMB:

Warmup stage, t <= freeze_step: LAMB, and for every tensor whose coefficient is not 1
    c = coeff_beta c + (1 - coeff_beta) coeff                                               (1)
At the end of step freeze_step, once: bias corrections and variance floor as in 1-bit Adam; v_fresh = v; per tensor
    momentum_scale = ||m|| / sqrt(numel);  scaling_coeff = mean(momentum_scale) / momentum_scale  (2)
Compressed stage, t > freeze_step:
    m_r = b1 m + (1 - b1) g_r;  m' = compressed_all_reduce(m_r scaling_coeff) / scaling_coeff     (3)
    g' = (m' - b1 m) / (1 - b1);  v_fresh = b2 v_fresh + (1 - b2) g'^2                            (4)
    update = bounded(m' / (sqrt(v) + eps)) + wd p;  p <- p - lr coeff update                      (5)
With trust_ratio="measured":
    r = ||p|| / ||update||;  coeff = clamp(c r / r_switch, min_coeff, max_coeff)                  (6)
where r_switch is the mean of r over the first 20 compressed steps, in which coeff = c. With "frozen", as published:
    coeff = c factor, factor = max((sqrt(v) + eps) / (sqrt(v_fresh) + eps)), bounded              (7)
where bounded(d) cuts every element of d to +-max_update. A message of signs is several times as long as the momentum
that it stands for, so that r tells by how much LAMB's coefficient changes, and not what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.kernels import LambMoments, LambOptions, sum_of_squares
from hf_compressopt.kernels.memory import numbers_on
from hf_compressopt.optim.compressed_adam import CompressedAdam
from hf_compressopt.optim.group import BucketStep, Exchange, ExtraState, GroupState, has_own_groups
from hf_compressopt.optim.math import (
    adam_fraction,
    advance_all_,
    advance_moments_,
    apply_update_,
    evaluate,
    runs_of,
    trust_ratio,
)
from hf_compressopt.optim.options import check_at_least, check_last_group
from hf_compressopt.schedules import Schedule, StepPlan

#: Legal values of OnebitLamb's ``trust_ratio``.
MEASURED, FROZEN = TRUST_RATIOS = ("measured", "frozen")
#: Its options that only "frozen" heeds.
FROZEN_OPTIONS = ("factor_max", "factor_min", "factor_threshold")
#: Compressed steps by whose ratios "measured" knows what a ratio was at the switch.
SWITCH_STEPS = 20
#: Share of the mean momentum scale up to which a tensor's counts as none: it is not scaled to the others' in messages.
_NO_MOMENTUM = 2.0**-24


class Lamb(torch.optim.Optimizer):
    """LAMB for averaged gradients: an ordinary optimizer, and the warmup stage of OnebitLamb.

    Source: arXiv 1904.00962, Algorithm 2.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer.
        lr: Learning rate, >= 0.
        min_coeff: Lower bound of the trust ratio, >= 0.
        max_coeff: Upper bound of the trust ratio.
        betas: Coefficients of the running averages, each in [0, 1).
        eps: Added to the denominator, >= 0.
        eps_inside_sqrt: Use sqrt(v + eps) instead of sqrt(v) + eps.
        bias_correction: Apply Adam's bias corrections.
        weight_decay: Weight decay, >= 0; a part of the update that the trust ratio scales.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters of another dtype than float32, bfloat16 or float16.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        bias_correction: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        _check_coefficients(min_coeff, max_coeff)
        self.max_coeff, self.min_coeff = max_coeff, min_coeff
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        check_last_group(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the step of this optimizer itself, which a scheduler has put here."""
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. Returns the closure's return value."""
        loss = evaluate(closure)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for run in runs_of(params):
                rows = [params[number] for number in run]
                moments = [self._moments(param) for param in rows]
                coeffs = _step_of_tensors(rows, [p.grad for p in rows], moments, group, self.min_coeff, self.max_coeff)
                for param, ratio in zip(rows, coeffs.unbind(), strict=True):
                    self.state[param]["trust_ratio"] = ratio.clone()  # not all of them with each
        return loss

    def _moments(self, param: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return exp_avg, exp_avg_sq and step of a parameter, which begin with its first gradient."""
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]

    def _updates(self, *, advance: bool) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        """Yield the group, the parameter and the update of each gradient, after it has moved the moments."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                moments = self._moments(param)
                if advance:
                    advance_moments_(param.grad, *moments, group)
                yield group, param, _lamb_update(param, *moments, group)

    def _apply(self, group: dict[str, Any], param: Tensor, update: Tensor, ratio: Tensor) -> None:
        apply_update_(param, update, ratio * group["lr"])
        self.state[param]["trust_ratio"] = ratio

    @torch.no_grad()
    def measure(self) -> list[tuple[Tensor, Tensor]]:
        """Take the first half of a step, for parameters that are parts of larger tensors: all except the update itself.

        Returns:
            Each parameter that has a gradient, and [2] float64: the squares of the norms of it and of its update,
            to be summed over the parts of a tensor.
        """
        rows = self._updates(advance=True)
        return [(param, torch.stack([_square(param), _square(update)])) for _, param, update in rows]

    @torch.no_grad()
    def apply(self, ratios: dict[Tensor, Tensor]) -> None:
        """Take the second half of a step: the update, with these trust ratios ([] float32 each)."""
        for group, param, update in self._updates(advance=False):
            self._apply(group, param, update, ratios[param])

    def get_lamb_coeffs(self) -> list[float]:
        """Return the last trust ratio of every tensor that has taken a step."""
        params = (param for group in self.param_groups for param in group["params"])
        ratios = [ratio for param in params if (ratio := self.state.get(param, {}).get("trust_ratio")) is not None]
        return torch.stack(ratios).tolist() if ratios else []

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, which is copied; the moments stay float32 for parameters of any dtype."""
        hooked: list[dict[str, Any]] = []  # the state dict as other hooks before the load have changed it
        last = self.register_load_state_dict_pre_hook(lambda _, changed: hooked.append(changed))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        state_dict = hooked[0]
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for param, key in zip(params, keys, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                device = torch.device("cpu") if name == "step" else param.device
                self.state[param][name] = value.detach().to(device, torch.float32, copy=True)


def _lamb_update(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, group: dict[str, Any]) -> Tensor:
    """Return LAMB's update of a tensor or of a part of one, before the trust ratio: float32, shaped like param."""
    m_hat, denominator = adam_fraction(exp_avg, exp_avg_sq, step, group)
    update = m_hat / denominator
    if group["weight_decay"] != 0:
        update.add_(param, alpha=group["weight_decay"])
    return update


def _step_of_tensors(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor, Tensor]],
    group: dict[str, Any],
    low: float,
    high: float,
) -> Tensor:
    """Take LAMB's step of some tensors, in few launches on a device. Returns their trust ratios, [n] float32."""
    advance_all_(grads, moments, group)
    updates = [_lamb_update(param, *row, group) for param, row in zip(params, moments, strict=True)]
    weights, sizes = (torch.stack(list(map(_square, tensors))) for tensors in (params, updates))
    coeffs = trust_ratio(weights, sizes, low, high)
    for param, update, rate in zip(params, updates, (coeffs * group["lr"]).unbind(), strict=True):
        apply_update_(param, update, rate)
    return coeffs


def _square(tensor: Tensor) -> Tensor:
    return sum_of_squares([tensor], tensor.device)


def _check_coefficients(min_coeff: float, max_coeff: float) -> None:
    check_at_least("min_coeff", min_coeff, 0)
    check_at_least("max_coeff", max_coeff, min_coeff)


def _check_frozen_options(trust_ratio: str, values: dict[str, float]) -> None:
    """Refuse values of ``FROZEN_OPTIONS`` that would be without effect."""
    defaults = signature(OnebitLamb).parameters
    changed = [f"{name}={value}" for name, value in values.items() if value != defaults[name].default]
    if changed and trust_ratio == MEASURED:
        raise ValueError(
            f"{', '.join(changed)} must be left out with trust_ratio='measured', which has no such factor: give "
            "trust_ratio='frozen', or leave out"
        )


@dataclass(frozen=True)
class OnebitLambSchedule(Schedule):
    """The schedule of 1-bit Adam, with a longer warmup if that sends low-bit gradients: it learns trust ratios too."""

    low_bit_freeze_share: ClassVar[float] = 0.3


@dataclass
class _Shared:
    """Hyperparameters and sums of a param group in a compressed step: see :func:`kernels.lamb_moments_`."""

    options: LambOptions
    sums: Tensor  # [parameters, 3] float64


class OnebitLamb(CompressedAdam):
    """LAMB whose momentum crosses the network as signs, after a warmup stage of averaged gradients.

    Source: arXiv 2104.06069, Algorithm 1. Use it as :class:`~hf_compressopt.optim.onebit_adam.OnebitAdam`.
    Norms, coefficients and factors stay on the device: a step synchronises with the host no more often for many
    tensors than for one.

    Args:
        params: As for OnebitAdam.
        lr: Learning rate, >= 0.
        trust_ratio: Those of the compressed stage begin with the average of the warmup stage's. "measured" follows the
            norms of a tensor and of its update; "frozen", as published, takes a factor.
        max_coeff: Upper bound of a trust ratio, but for that factor.
        min_coeff: Lower bound of it, >= 0.
        coeff_beta: Coefficient of the running average, in [0, 1).
        factor_max: Upper bound of the factor, with trust_ratio="frozen".
        factor_min: Lower bound of it, >= 0.
        factor_threshold: Largest relative change of it in one step, >= 0.
        **options: See :class:`~hf_compressopt.optim.compressed_adam.CompressedAdam`.

    Raises:
        ValueError: For an option outside its range; the message names value and range.
        TypeError: For parameters that no option can make work.
    """

    schedule_class = OnebitLambSchedule
    default_variance_interval = 0
    extra_state = (
        ExtraState("exp_avg_sq_fresh", "element"),
        ExtraState("scaling_coeff", "parameter", 1.0),
        ExtraState("lamb_coeff_freeze", "parameter"),
        ExtraState("lamb_coeff_updates", "parameter"),
        ExtraState("ratio_at_switch", "parameter"),
        ExtraState("ratio_steps", "parameter"),
        ExtraState("last_factor", "parameter", 1.0),
        ExtraState("lamb_coeff", "parameter", 1.0, always=True),
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        trust_ratio: str = MEASURED,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **options: Any,
    ) -> None:
        _check_coefficients(min_coeff, max_coeff)
        check_at_least("factor_min", factor_min, 0)
        check_at_least("factor_max", factor_max, factor_min)
        check_at_least("factor_threshold", factor_threshold, 0)
        if not 0 <= coeff_beta < 1:
            raise ValueError(f"coeff_beta must be in [0, 1), got {coeff_beta}")
        if trust_ratio not in TRUST_RATIOS:
            raise ValueError(f"trust_ratio must be one of {list(TRUST_RATIOS)}, got {trust_ratio!r}")
        if trust_ratio == FROZEN and options.get("variance_interval"):
            raise ValueError(
                f"trust_ratio='frozen' needs variance_interval=0, got {options['variance_interval']}: its factors "
                "compare later gradients with the variance at the switch"
            )
        values = factor_max, factor_min, factor_threshold
        _check_frozen_options(trust_ratio, dict(zip(FROZEN_OPTIONS, values, strict=True)))
        self.trust_ratio = trust_ratio
        self.max_coeff, self.min_coeff = max_coeff, min_coeff
        self.coeff_beta = coeff_beta
        self.factor_max, self.factor_min = factor_max, factor_min
        self.factor_threshold = factor_threshold
        self._rows: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        super().__init__(params, lr, **options)

    def _alike(self) -> list[Any]:
        # native kernels and the reference round LAMB's norms differently
        implementation = kernels.implementation(self.communicator.device).split()[0]
        return [*super()._alike(), f"kernels={implementation}", f"trust_ratio={self.trust_ratio}"]

    def get_lamb_coeffs(self) -> list[float]:
        """Return a copy of the last coefficients, one per trainable tensor, group by group."""
        return list(chain.from_iterable(state.extra["lamb_coeff"].tolist() for state in self._states))

    def _warmup_step(self, state: GroupState, grads: Sequence[Tensor | None]) -> None:
        indices = [index for index, grad in enumerate(grads) if grad is not None]
        present = [grad for grad in grads if grad is not None]
        for run in runs_of(present):
            rows = [indices[number] for number in run]
            params, moments = [state.params[index] for index in rows], [state.moments_of(index) for index in rows]
            run_grads = [present[number] for number in run]
            coeffs = _step_of_tensors(params, run_grads, moments, state.options, self.min_coeff, self.max_coeff)
            self._note_coefficients(state, numbers_on(state.device, rows, torch.int64), coeffs)

    def _note_coefficients(self, state: GroupState, rows: Tensor, coeffs: Tensor) -> None:
        """Take up the trust ratios of the parameters at these places, [n] int64, in a step of the warmup stage."""
        state.extra["lamb_coeff"].index_copy_(0, rows, coeffs)
        if state.compressed:
            moved, average = coeffs != 1, state.extra["lamb_coeff_freeze"].index_select(0, rows)
            learnt = self.coeff_beta * average + (1 - self.coeff_beta) * coeffs
            state.extra["lamb_coeff_freeze"].index_copy_(0, rows, torch.where(moved, learnt, average))  # (1)
            state.extra["lamb_coeff_updates"].index_add_(0, rows, moved.float())

    def _end_warmup(self, plan: StepPlan) -> None:
        super()._end_warmup(plan)
        compressed = [state for state in self._states if state.compressed]
        rows: list[tuple[GroupState, int, Tensor]] = []
        for state in compressed:
            state.extra["exp_avg_sq_fresh"].copy_(state.exp_avg_sq)
            for index, numel in enumerate(state.layout.numels):
                if numel:
                    rows.append((state, index, (_square(state.view(state.exp_avg, index)) / numel).sqrt()))
        united = self._united_scale(rows)
        for state, index, scale in rows:
            one = torch.ones_like(scale)
            has_momentum = scale > _NO_MOMENTUM * united
            state.extra["scaling_coeff"][index] = torch.where(has_momentum, united / scale, one).float()  # (2)
        for state in compressed:
            state.errors.scale_(state.extra["scaling_coeff"].tolist())  # as the momentum that is sent

    def _united_scale(self, rows: Sequence[tuple[GroupState, int, Tensor]]) -> Tensor:
        """Return the mean of the tensors' momentum scales; a tensor that only some of the ranks hold counts once."""
        total = torch.zeros(2, dtype=torch.float64, device=self.communicator.device)
        if not has_own_groups(self._states):
            return torch.stack([scale for _, _, scale in rows]).mean() if rows else total[0]
        for state, _, scale in rows:
            once = torch.stack([scale.to(total.device), torch.ones_like(total[0])])
            total += once * (1 / state.communicator.world_size)
        self.communicator.all_reduce(total).wait()
        return total[0] / total[1]

    def _begin_group(self, plan: StepPlan, state: GroupState) -> _Shared:
        group, (beta1, beta2) = state.options, state.options["betas"]
        bound = float(self.max_update or math.inf)
        options = LambOptions(beta1, beta2, group["eps"], group["weight_decay"], group["eps_inside_sqrt"], bound)
        return _Shared(options, torch.zeros(len(state.params), 3, dtype=torch.float64, device=state.device))

    def _compressed(self, step: BucketStep) -> Exchange:
        """Take (3) and (4) of a bucket, and the sums of (6) and (7): :meth:`_end_group` moves whole tensors."""
        beta1, _ = step.options["betas"]
        scaling = step.state.extra["scaling_coeff"]
        average = yield step.message(step.exp_avg, beta1, 1 - beta1, scaling)  # (3)
        moments = step.exp_avg, step.extra("exp_avg_sq_fresh"), step.variance
        with step.parameters() as params:
            update = LambMoments(average, *moments, params, scaling, step.shared.sums, step.shared.options)
            step.kernels.lamb_moments_(update)  # (3), (4)

    def _end_group(self, plan: StepPlan, state: GroupState, shared: _Shared) -> None:
        """Move the tensors of a group, with coefficients that are computed for all of them at once."""
        layout = state.layout
        options, sums = shared.options, shared.sums
        if not layout.numel:
            return
        moving = [i for i, p in enumerate(state.params) if layout.numels[i] and p.requires_grad]
        if not moving:
            return
        key = tuple(moving), state.device
        if (rows := self._rows.get(key)) is None:  # the device gets the numbers of tensors once
            rows = self._rows[key] = torch.tensor(moving, dtype=torch.int64, device=state.device)
        average, updates = state.extra["lamb_coeff_freeze"][rows], state.extra["lamb_coeff_updates"][rows]
        if state.options["bias_correction"]:
            average = average / (1 - self.coeff_beta**updates)
        average = torch.where(updates > 0, average, 1.0)
        if self.trust_ratio == MEASURED:
            weights = torch.stack([_square(state.params[index]) for index in moving])
            coeff = self._measured(state, rows, average, weights, sums[rows, 1])
        else:
            coeff = average * self._factor(state, rows, sums[rows])  # (7)
        state.extra["lamb_coeff"][rows] = coeff
        rates = torch.zeros_like(state.extra["lamb_coeff"])
        rates[rows] = coeff * state.options["lr"]
        whole = layout.whole
        with state.parameter_segments(whole, moving) as params:
            kernels.on(state.device).lamb_apply_(state.exp_avg, state.variance(whole), params, rates, options)  # (5)

    def _measured(self, state: GroupState, rows: Tensor, average: Tensor, weights: Tensor, updates: Tensor) -> Tensor:
        """Return (6), [n] float32, of the parameters at these places, from the squares of norms, [n] float64 each."""
        ratio, at_switch = (weights / updates).sqrt().float(), state.extra["ratio_at_switch"][rows]
        steps = state.extra["ratio_steps"][rows]
        known = (weights > 0) & (updates > 0)
        begins = known & (steps < SWITCH_STEPS)
        at_switch = torch.where(begins, at_switch + (ratio - at_switch) / (steps + 1), at_switch)
        state.extra["ratio_at_switch"][rows], state.extra["ratio_steps"][rows] = at_switch, steps + begins
        measured = (average * ratio / at_switch).clamp(self.min_coeff, self.max_coeff)  # (6)
        return torch.where(known & ~begins, measured, average)

    def _factor(self, state: GroupState, rows: Tensor, sums: Tensor) -> Tensor:
        """Return the factor of (7), [n] float32, of the parameters at these places, from the sums of a step, [n, 3]."""
        direction, update, factor = sums.unbind(dim=1)
        if state.options["weight_decay"] > 0:
            share = torch.where(update > 0, (direction / update).sqrt().clamp(max=1.0), 1.0)
            factor = factor * share + 1 - share
        last = state.extra["last_factor"][rows]
        factor = factor.float().clamp(self.factor_min, self.factor_max)
        factor = factor.clamp(last * (1 - self.factor_threshold), last * (1 + self.factor_threshold))
        state.extra["last_factor"][rows] = factor
        return factor
