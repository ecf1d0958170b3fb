"""LAMB (You et al. 2020, arXiv 1904.00962), with the moments and decay of Adam and one trust ratio per tensor.

For every tensor:
    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    update = m^ / (sqrt(v^) + eps) + wd p
    coeff = clamp(||p|| / ||update||, min_coeff, max_coeff), and 1 if a norm is 0
    p <- p - lr coeff update
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels import sum_of_squares
from hf_compressopt.optim.base import evaluate
from hf_compressopt.optim.math import (
    AdamOptions,
    adam_options,
    advance_moments_,
    apply_update_,
    corrected_moments,
    denominator,
    trust_ratio,
)
from hf_compressopt.optim.options import check_at_least, check_last_group


class Lamb(torch.optim.Optimizer):
    """LAMB for averaged gradients: an ordinary optimizer, and the warmup stage of OnebitLamb.

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
        """See the class."""
        check_coefficients(min_coeff, max_coeff)
        self.max_coeff, self.min_coeff = max_coeff, min_coeff
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group.

        Raises:
            ValueError: For an option outside its range.
            TypeError: For a parameter of another dtype than float32, bfloat16 or float16.
        """
        super().add_param_group(param_group)
        check_last_group(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything, so that a copy has the bounds too."""
        return dict(self.__dict__)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. Returns the closure's return value."""
        loss = evaluate(closure)
        for group in self.param_groups:
            options = adam_options(group)
            for param in group["params"]:
                if param.grad is not None:
                    moments, step = self._moments(param)
                    ratio = lamb_step_(param, param.grad, *moments, step, options, self.min_coeff, self.max_coeff)
                    self.state[param]["trust_ratio"] = ratio
        return loss

    def _moments(self, param: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        return (state["exp_avg"], state["exp_avg_sq"]), state["step"]

    @torch.no_grad()
    def measure(self) -> list[tuple[Tensor, Tensor]]:
        """Take the first half of a step, for parameters that are parts of larger tensors: all except the update itself.

        Returns:
            Each parameter that has a gradient, and [2] float64: the squares of the norms of it and of its update,
            to be summed over the parts of a tensor.
        """
        measured = []
        for group in self.param_groups:
            options = adam_options(group)
            for param in group["params"]:
                if param.grad is not None:
                    moments, step = self._moments(param)
                    advance_moments_(param.grad, *moments, step, options)
                    update = lamb_update(param, *moments, step, options)
                    measured.append((param, torch.stack([_square(param), _square(update)])))
        return measured

    @torch.no_grad()
    def apply(self, ratios: dict[Tensor, Tensor]) -> None:
        """Take the second half of a step: the update, with these trust ratios ([] float32 each)."""
        for group in self.param_groups:
            options = adam_options(group)
            for param in group["params"]:
                if param.grad is not None:
                    moments, step = self._moments(param)
                    update = lamb_update(param, *moments, step, options)
                    apply_update_(param, update, ratios[param] * options.lr)
                    self.state[param]["trust_ratio"] = ratios[param]

    def get_lamb_coeffs(self) -> list[float]:
        """Return the last trust ratio of every tensor that has taken a step."""
        params = (param for group in self.param_groups for param in group["params"])
        ratios = [ratio for param in params if (ratio := self.state.get(param, {}).get("trust_ratio")) is not None]
        return torch.stack(ratios).tolist() if ratios else []

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does; the moments stay float32 for parameters of any dtype."""
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for param, key in zip(params, keys, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name != "step":
                    self.state[param][name] = value.detach().to(param.device, torch.float32, copy=True)


def lamb_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    options: AdamOptions,
    min_coeff: float,
    max_coeff: float,
) -> Tensor:
    """Take one step of LAMB on one tensor, in place, without a host synchronisation.

    Args:
        param: Any shape; float32, bfloat16 or float16.
        grad: Shaped like param.
        exp_avg: float32, shaped like param.
        exp_avg_sq: float32, shaped like param.
        step: [] float32 on the CPU: steps of the parameter so far; incremented.
        options: The group's hyperparameters.
        min_coeff: Lower bound of the trust ratio.
        max_coeff: Upper bound of the trust ratio.

    Returns:
        [] float32, the trust ratio.
    """
    advance_moments_(grad, exp_avg, exp_avg_sq, step, options)
    update = lamb_update(param, exp_avg, exp_avg_sq, step, options)
    coeff = trust_ratio(_square(param), _square(update), min_coeff, max_coeff)
    apply_update_(param, update, coeff * options.lr)
    return coeff


def lamb_update(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, options: AdamOptions) -> Tensor:
    """Return LAMB's update of a tensor or of a part of one, before the trust ratio: float32, shaped like param."""
    m_hat, v_hat = corrected_moments(exp_avg, exp_avg_sq, step, options)
    update = m_hat / denominator(v_hat, options.eps, options.eps_inside_sqrt)
    if options.weight_decay != 0:
        update.add_(param, alpha=options.weight_decay)
    return update


def _square(tensor: Tensor) -> Tensor:
    return sum_of_squares([tensor], tensor.device)


def check_coefficients(min_coeff: float, max_coeff: float) -> None:
    """Check the bounds of the trust ratio.

    Raises:
        ValueError: If min_coeff is negative or max_coeff less than min_coeff.
    """
    check_at_least("min_coeff", min_coeff, 0)
    check_at_least("max_coeff", max_coeff, min_coeff)
