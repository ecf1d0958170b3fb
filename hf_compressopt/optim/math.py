"""The mathematics of one tensor, and of gradients: no process group, no optimizer, no state; and a step's closure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hf_compressopt.kernels import sum_of_squares
from hf_compressopt.kernels.adam import AdamPlan, AdamStep, AdamTensors, adam_
from hf_compressopt.kernels.memory import flat_view, in_memory, reads_at_once

_CHUNK = 1 << 18  # elements of which a wider copy may be made
_CHUNK_ON_DEVICE = _CHUNK << 6  # 128 MiB of float64 on a GPU, which counts launches


def evaluate(closure: Callable[[], float] | None) -> float | None:
    """Evaluate the closure of ``step(closure)`` with gradients enabled, and return its loss; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that makes this norm at most ``max_norm``, as torch computes it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def adam_step_(
    tensors: AdamTensors, group: dict[str, Any], *, fused: bool = False, plan: AdamPlan | None = None
) -> AdamPlan | None:
    """Take one step of Adam with decoupled weight decay (AdamW, arXiv 1711.05101, Algorithm 2), in place.

    It is torch's own arithmetic, bit for bit, where torch has the algorithm, unless ``fused``. Parameters of lower
    precision than float32 are updated in float32 and rounded once. Counts of steps lie on the host unless fused, which
    returns a plan for the next step.
    """
    if not tensors.params:
        return plan
    (beta1, beta2), lr = group["betas"], group["lr"]
    shared = {"beta1": float(beta1), "beta2": float(beta2), "eps": group["eps"], "weight_decay": group["weight_decay"]}
    if fused:
        return adam_(tensors, AdamStep(lr=lr, bias_correction=group["bias_correction"], **shared), plan)
    params, steps = tensors.params, tensors.steps
    moments = tensors.exp_avgs, tensors.exp_avg_sqs
    wide = [p if p.dtype == torch.float32 else p.float() for p in params]
    grads = [g if g.dtype == torch.float32 else g.float() for g in tensors.grads]
    if group["bias_correction"] and not group["eps_inside_sqrt"]:
        adamw(wide, grads, *moments, [], steps, amsgrad=False, maximize=False, lr=lr, **shared)
    else:
        for p, g, m, v, step in zip(wide, grads, *moments, steps, strict=True):
            advance_moments_(g, m, v, step, group)
            p.mul_(1 - float(lr) * group["weight_decay"])
            p.addcdiv_(*adam_fraction(m, v, step, group), value=-float(lr))
    for p, result in zip(params, wide, strict=True):
        if p is not result:
            p.copy_(result)
    return plan


def correct_bias_(moment: Tensor, count: float, beta: float) -> None:
    """Fold Adam's bias correction into a moment that was updated ``count`` times, in place: m <- m / (1 - b^k)."""
    if count > 0:
        moment.div_(1 - beta**count)


def floor_variance_(exp_avg_sq: Tensor, floor: float) -> None:
    """Raise every element of one tensor's variance to at least ``floor`` times the tensor's mean, in place."""
    if floor > 0 and exp_avg_sq.numel() > 0:
        exp_avg_sq.clamp_(min=(floor * sum_of(exp_avg_sq) / exp_avg_sq.numel()).to(exp_avg_sq.dtype))


def sum_of(tensor: Tensor) -> Tensor:
    """Return the sum of all elements, [] float64, by chunks: torch makes a float64 copy of the tensor that it sums."""
    numel = _CHUNK if tensor.is_cpu else _CHUNK_ON_DEVICE
    parts = [chunk.sum(dtype=torch.float64) for chunk in torch.split(tensor.detach().view(-1), numel)]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=tensor.device)


def is_zero(tensor: Tensor) -> bool:
    """Return whether all elements are 0, by their extremes: on CPUs any() makes a copy of bools."""
    return tensor.numel() == 0 or not any(map(bool, torch.aminmax(tensor)))


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of all elements' bits, read as integers, [] int64: exact, so that its order does not matter."""
    flat = flat_view(in_memory("the tensor", tensor))
    narrow = torch.int32 if flat.element_size() == 4 else torch.int16
    whole = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()  # elements that fill 8 bytes
    parts = [flat[whole:].view(narrow).sum(dtype=torch.int64)] if whole < flat.numel() or not whole else []
    if whole and flat.storage_offset() * flat.element_size() % 8 == 0:
        parts.append(flat[:whole].view(torch.int64).sum())  # torch makes no copy of integers of this size
    elif whole:
        parts += [chunk.clone().view(torch.int64).sum() for chunk in torch.split(flat[:whole], _CHUNK)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def advance_moments_(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, group: dict[str, Any]) -> None:
    """Update Adam's moments of one tensor in place, and count the step."""
    beta1, beta2 = map(float, group["betas"])
    grad = grad.float()
    step += 1
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)


def runs_of(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the numbers of consecutive tensors of which copies may be made at the same time, one at least."""
    run, total = list[int](), 0
    for number, tensor in enumerate(tensors):
        total += tensor.numel()
        if run and total > (_CHUNK if reads_at_once(tensor.device) else _CHUNK_ON_DEVICE):
            yield run
            run, total = [], tensor.numel()
        run.append(number)
    if run:
        yield run


def advance_all_(
    grads: Sequence[Tensor], moments: Sequence[tuple[Tensor, Tensor, Tensor]], group: dict[str, Any]
) -> None:
    """Do with many tensors what :func:`advance_moments_` does with one, in its bits; on a device in few launches."""
    if not grads or reads_at_once(grads[0].device):
        for grad, (exp_avg, exp_avg_sq, step) in zip(grads, moments, strict=True):
            advance_moments_(grad, exp_avg, exp_avg_sq, step, group)
        return
    beta1, beta2 = map(float, group["betas"])
    for run in runs_of(grads):
        wide, together = [grads[number].float() for number in run], [moments[number] for number in run]
        first, second = [row[0] for row in together], [row[1] for row in together]
        for _, _, step in together:
            step += 1
        torch._foreach_lerp_(first, wide, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, wide, wide, value=1 - beta2)


def adam_fraction(exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return m^ and sqrt(v^) + eps, or sqrt(v^ + eps), after ``step`` steps: Adam's direction is their quotient."""
    if group["bias_correction"]:
        (beta1, beta2), count = group["betas"], float(step)
        exp_avg, exp_avg_sq = exp_avg / (1 - beta1**count), exp_avg_sq / (1 - beta2**count)
    eps = group["eps"]
    return exp_avg, exp_avg_sq.add(eps).sqrt_() if group["eps_inside_sqrt"] else exp_avg_sq.sqrt().add_(eps)


def trust_ratio(weight_square: Tensor, update_square: Tensor, low: float, high: float) -> Tensor:
    """Return LAMB's factors of tensors, float32: ||p|| / ||update|| within [low, high], 1 if a norm is 0."""
    weight_norm, update_norm = weight_square.sqrt().float(), update_square.sqrt().float()
    ratio = (weight_norm / update_norm).clamp(low, high)
    return torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


def apply_update_(param: Tensor, update: Tensor, rate: Tensor) -> None:
    """Update p <- p - rate update, in place, in float32 whatever the parameter's dtype. rate: [] float32."""
    if param.dtype == torch.float32:
        param.addcmul_(update, rate, value=-1)
    else:
        param.copy_(param.float().addcmul_(update, rate, value=-1))


def grad_square_sum(params: Sequence[Tensor]) -> Tensor | None:
    """Sum the squares of all gradients; of DTensors over their mesh: one all-reduce per mesh and placement."""
    if any(getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False) for p in params):
        raise ValueError(
            "max_grad_norm must be 0 for the parameters of torch's FullyShardedDataParallel (FSDP1): each rank would "
            "clip its own shards by the norm of these alone; call model.clip_grad_norm_(max_norm) before step(), or "
            "shard the model with fully_shard (FSDP2)"
        )
    plain = [p.grad for p in params if p.grad is not None and not is_dtensor(p)]
    squares = [_local_square(plain)] if plain else []
    sharded: dict[tuple[Any, ...], list[Any]] = {}
    for param in params:
        if is_dtensor(param):
            sharded.setdefault((param.device_mesh, param.placements), []).append(param)  # type: ignore[attr-defined]
    squares += [_sharded_square(mesh, placements, members) for (mesh, placements), members in sharded.items()]
    if not squares:
        return None
    first = next((p.grad.device for p in params if p.grad is not None), squares[0].device)
    return torch.stack([square.to(first) for square in squares]).sum()


def is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def is_shard(param: Tensor) -> bool:
    """Tell whether a parameter is this rank's shard of a whole one, as FSDP and tensor parallelism make it."""
    return is_dtensor(param) or any(getattr(param, mark, False) for mark in ("_is_flat_param", "_fsdp_flattened"))


def _local_square(grads: Sequence[Tensor]) -> Tensor:
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    first = grads[0].device
    return torch.stack([sum_of_squares(part, device).to(first) for device, part in by_device.items()]).sum()


def _sharded_square(mesh: Any, placements: Any, params: Sequence[Any]) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    grads = [p.grad for p in params if p.grad is not None]
    shards = [(g if g.placements == placements else g.redistribute(mesh, placements)).to_local() for g in grads]
    square = _local_square(shards) if shards else torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    summed = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    whole: Tensor = DTensor.from_local(square, mesh, summed, run_check=False).full_tensor()
    return whole
