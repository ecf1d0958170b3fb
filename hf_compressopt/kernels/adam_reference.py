"""Adam over many tensors in PyTorch: torch's fused operator, and the reference for all else."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_compressopt.kernels.adam_operands import AdamStep, AdamTensors


def torch_fused_(tensors: AdamTensors, step: AdamStep) -> None:
    """Take the step by torch's operator: on one device, float32, with bias corrections, no clipping, master or copy."""
    torch._foreach_add_(tensors.steps, 1)
    operator = torch._fused_adamw_ if step.adam_w_mode else torch._fused_adam_
    found_inf = None if step.found_inf is None else step.found_inf.ne(0).float()
    columns = tensors.params, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs
    names = ("lr", "beta1", "beta2", "weight_decay", "eps", "maximize", "grad_scale")
    options = {name: getattr(step, name) for name in names}
    operator(*columns, [], tensors.steps, amsgrad=False, found_inf=found_inf, **options)
    if found_inf is not None:
        torch._foreach_sub_(tensors.steps, [found_inf] * len(tensors.steps))


def reference_(tensors: AdamTensors, step: AdamStep) -> None:
    """Take the step on one device, in PyTorch: the specification, and the fallback for all tensors."""
    if step.found_inf is not None and bool(step.found_inf):
        return
    lr = step.lr.double() if isinstance(step.lr, Tensor) else step.lr
    for g, p, m, v, t, master, copy in tensors.rows():
        t += 1
        weights = _wide(p if master is None else master)
        direction = _direction_(weights, _gradient_(g, step).to(weights.dtype), m, v, t, lr, step)
        if step.adam_w_mode and step.weight_decay != 0:
            weights.mul_(1 - lr * step.weight_decay)
        weights.sub_(direction)
        for target in (p, copy):
            if target is not None and target is not weights:
                target.copy_(weights)


def _gradient_(grad: Tensor, step: AdamStep) -> Tensor:
    if grad._is_zerotensor():  # torch's operators cannot write to one
        grad = grad.clone()
    wide = _wide(grad)
    if step.grad_scale is not None:
        wide = wide / step.grad_scale
    if step.clip_factor is not None:
        wide = wide * step.clip_factor
    if step.write_grads and wide is not grad:
        grad.copy_(wide)
    return -wide if step.maximize else wide


def _direction_(
    weights: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    t: Tensor,
    lr: float | Tensor,
    step: AdamStep,
) -> Tensor:
    """Update the moments in place. Returns lr m^ / (sqrt(v^) + eps)."""
    if not step.adam_w_mode and step.weight_decay != 0:
        grad = grad + weights * step.weight_decay
    m, v = _wide(exp_avg), _wide(exp_avg_sq)
    m.add_((grad - m).mul_(1 - step.beta1))
    v.mul_(step.beta2).add_((grad * (1 - step.beta2)).mul_(grad))
    for moment, wide in ((exp_avg, m), (exp_avg_sq, v)):
        if moment is not wide:
            moment.copy_(wide)
    denominator = v.double().sqrt().to(v.dtype)  # torch calls MKL's float32 square root, which is not correctly rounded
    if step.bias_correction:
        count = float(t) if t.device.type == "cpu" else t.double()  # a GPU's host does not wait
        lr = lr / (1 - step.beta1**count)
        denominator.div_((1 - step.beta2**count) ** 0.5)
    return (m * lr).div_(denominator.add_(step.eps))


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
