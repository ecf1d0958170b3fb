"""Operands of one step of Adam over many tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamStep:
    """The options of one step, alike for all tensors.

    Attributes:
        lr: Learning rate. A tensor of one element is read on its own device, without a host synchronization.
        beta1: Coefficient of the first running average.
        beta2: Coefficient of the second running average.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        adam_w_mode: Decoupled decay (AdamW); else L2 regularization (Adam).
        bias_correction: Whether Adam's bias corrections apply.
        maximize: Whether the gradients are negated.
        grad_scale: [] or [1]; gradients are divided by it.
        found_inf: [] or [1]; if it is not 0, nothing is changed.
        clip_factor: [] or [1]; gradients are multiplied by it.
        write_grads: Whether the divided and multiplied gradients are written back.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adam_w_mode: bool = True
    bias_correction: bool = True
    maximize: bool = False
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    clip_factor: Tensor | None = None
    write_grads: bool = False

    def on(self, device: torch.device) -> AdamStep:
        """Return the options with every tensor [] float32 on a device. An lr on another device becomes a number."""
        lr = self.lr
        if isinstance(lr, Tensor):
            lr = _scalar(lr, device) if lr.device == device and device.type != "cpu" else float(lr)
        scale, inf, clip = self.grad_scale, self.found_inf, self.clip_factor
        if lr is self.lr and scale is None and inf is None and clip is None:
            return self
        return replace(
            self,
            lr=lr,
            grad_scale=None if scale is None else _scalar(scale, device),
            found_inf=None if inf is None else _scalar(inf, device),
            clip_factor=None if clip is None else _scalar(clip, device),
        )


@dataclass
class AdamTensors:
    """The tensors of one step: lists with an entry for each parameter.

    Attributes:
        grads: Any shapes; float32, bfloat16, float16 or float64.
        params: Shaped like the gradients, of the same dtypes. A parameter with a master is only written.
        exp_avgs: Shaped like the parameters; float32, or the parameter's dtype.
        exp_avg_sqs: As exp_avgs.
        steps: [] float32 each, on the parameter's device: its number of steps, counted up.
        masters: float32 weights that are updated in place of the parameter, or None for each. None: no masters.
        copies: Tensors that also receive the new parameter, rounded to their dtype, or None for each. None: no copies.
    """

    grads: list[Tensor]
    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    masters: list[Tensor | None] | None = None
    copies: list[Tensor | None] | None = None

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield gradient, parameter, exp_avg, exp_avg_sq, step, master and copy of each parameter."""
        none = [None] * len(self.params)
        required = (self.grads, self.params, self.exp_avgs, self.exp_avg_sqs, self.steps)
        return zip(*required, self.masters or none, self.copies or none, strict=True)

    def take(self, indices: Sequence[int]) -> AdamTensors:
        """Return the tensors of some parameters."""
        if len(indices) == len(self.params):
            return self
        return AdamTensors(*(values and [values[i] for i in indices] for values in vars(self).values()))


def _scalar(tensor: Tensor, device: torch.device) -> Tensor:
    to_device = device.type != "cpu"  # the host would read a number before its copy from a device ends
    return tensor.detach().to(device, torch.float32, non_blocking=to_device).reshape(()).resolve_neg()
