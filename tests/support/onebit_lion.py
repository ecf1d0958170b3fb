"""An algorithm as somebody else would add it, by docs/dev/adding_an_algorithm.md: Lion with 1-bit messages.

Sources: Chen et al. 2023, arXiv 2302.06675, Algorithm 2 (Lion); the compressed all-reduce is that of arXiv 2102.02888.
With g_r the gradient of rank r and g their mean:

Warmup stage, t <= freeze_step:
    c = b1 m + (1 - b1) g                                                                   (1)
Compressed stage, t > freeze_step:
    c_r = b1 m + (1 - b1) g_r;  c = compressed_all_reduce(c_r)                              (2)
Both, where (c - b1 m) / (1 - b1) is g, or what the messages tell of it:
    p <- p (1 - lr wd) - lr sign(c)                                                         (3)
    m <- b2 m + (1 - b2) (c - b1 m) / (1 - b1)                                              (4)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.group import BucketStep, Exchange, GroupState


class OnebitLion(CompressedOptimizer):
    """Lion whose interpolated momentum crosses the network as signs, after a warmup stage of averaged gradients."""

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-4, *, betas: tuple[float, float] = (0.9, 0.99), **options: Any
    ) -> None:
        super().__init__(params, lr, betas=betas, **options)

    def _warmup_step(self, state: GroupState, grads: Sequence[Tensor | None]) -> None:
        beta1, _ = state.options["betas"]
        for index, (param, grad) in enumerate(zip(state.params, grads, strict=True)):
            if grad is not None:
                m = state.view(state.exp_avg, index)
                c = torch.lerp(grad.float(), m, beta1)  # (1)
                _descend_(param, c, state.options)
                _learn_(m, c, state.options)
                state.steps[index] += 1

    def _compressed(self, step: BucketStep) -> Exchange:
        beta1, _ = step.options["betas"]
        average = yield step.message(step.exp_avg, beta1, 1 - beta1)  # (2)
        c = torch.empty_like(step.exp_avg)
        step.kernels.decompress_(average, c)
        with step.parameters() as params:
            for segment, direction in zip(params, c.split([each.numel for each in params]), strict=True):
                if segment.tensor is not None:
                    _descend_(segment.part, direction, step.options)
        _learn_(step.exp_avg, c, step.options)


def _descend_(param: Tensor, c: Tensor, group: dict[str, Any]) -> None:
    lr = float(group["lr"])
    param.mul_(1 - lr * group["weight_decay"]).add_(torch.sign(c).to(param.dtype), alpha=-lr)  # (3)


def _learn_(m: Tensor, c: Tensor, group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    m.mul_(beta2 - beta1 * (1 - beta2) / (1 - beta1)).add_(c, alpha=(1 - beta2) / (1 - beta1))  # (4)
