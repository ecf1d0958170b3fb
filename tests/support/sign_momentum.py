"""An algorithm as somebody else would add it, by docs/dev/adding_an_algorithm.md: signSGD with momentum.

Source: Bernstein et al. 2018, arXiv 1802.04434 (Signum). With g_r the gradient of rank r and g their mean,

Warmup stage:      m = b1 m + (1 - b1) g                                                    (1)
Compressed stage:  m_r = b1 m + (1 - b1) g_r;  m = compressed_all_reduce(m_r)               (2)
Both:              p <- p (1 - lr wd) - lr sign(m)                                          (3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.bucket_step import BucketStep, Exchange
from hf_compressopt.optim.group import GroupState


class SignMomentum(CompressedOptimizer):
    """SGD that follows the signs of its momentum, which crosses the network as signs after a warmup stage."""

    def _warmup_step(self, state: GroupState, grads: Sequence[Tensor | None]) -> None:
        beta1, _ = state.options["betas"]
        for index, grad in enumerate(grads):
            if grad is not None:
                momentum = state.view(state.exp_avg, index).lerp_(grad.float(), 1 - beta1)  # (1)
                state.view(state.exp_avg_sq, index).fill_(1.0)  # only a parameter with a variance moves
                state.steps[index] += 1
                _descend(state.options, state.params[index], momentum)

    def _compressed(self, step: BucketStep) -> Exchange:
        beta1, _ = step.options["betas"]
        average = yield step.message(step.exp_avg, beta1, 1 - beta1)  # (2)
        momentum = step.exp_avg
        step.kernels.decompress_(average, momentum)
        with step.parameters() as params:
            parts = momentum.split([segment.numel for segment in params])
            for segment, part in zip(params, parts, strict=True):
                if segment.tensor is not None:
                    _descend(step.options, segment.part, part)


def _descend(group: dict[str, Any], param: Tensor, momentum: Tensor) -> None:
    lr = float(group["lr"])
    param.mul_(1 - lr * group["weight_decay"]).add_(torch.sign(momentum).to(param.dtype), alpha=-lr)  # (3)
