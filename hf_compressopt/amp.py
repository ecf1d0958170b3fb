"""A GradScaler whose decisions are alike on all ranks.

In the compressed stage gradients are local: an overflow on one rank is visible to that rank alone. torch's scaler would
skip the step on that rank and take it on the others, and the ranks would wait for each other for ever. A partitioned
optimizer keeps its gradients to itself: torch's scaler would find none.

torch.amp.GradScaler has no public way to give another found_inf: two of its private methods are overridden, as
torch's ShardedGradScaler does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hf_compressopt.kernels.memory import fetch_later, reads_at_once
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.zero.optimizer import ZeroOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, whose found_inf is alike on all ranks if gradients are local or partitioned.

    For any other optimizer it is torch's. Arguments are those of :class:`torch.amp.GradScaler`.
    """

    # those that divide the scale out of errors while backward runs; hosts call no __init__
    _told: WeakSet[ZeroOptimizer | CompressedOptimizer] | None = None

    _noted: tuple[Tensor, int, Callable[[], Tensor]] | None = None  # the scale and its version, and its copy

    def get_scale(self) -> float:
        """Return the scale, without a wait for what was queued since the last update: backward may be under way."""
        scale = getattr(self, "_scale", None)  # a scaler that is not enabled has none
        if (
            self._noted is not None
            and scale is not None
            and scale is self._noted[0]
            and scale._version == self._noted[1]
        ):
            return float(self._noted[2]())
        return float(super().get_scale())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale as torch does, and tell it to the optimizers that keep errors of gradients."""
        super().update(new_scale)
        scale = getattr(self, "_scale", None)
        if scale is not None and not reads_at_once(scale.device):
            self._noted = scale, scale._version, fetch_later(scale)
        for optimizer in self._told or ():
            if isinstance(optimizer, ZeroOptimizer):
                optimizer.partition.reducer.note_scaler(self.get_scale())
            else:
                optimizer.expect_loss_scale(self.get_scale())

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the scaler has: it does not know the optimizers."""
        return {key: value for key, value in super().__getstate__().items() if key not in ("_told", "_noted")}

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        inner = innermost(optimizer)
        if isinstance(inner, ZeroOptimizer):
            if inner.config.grad_compression != "none":
                self._told = WeakSet([inner, *(self._told or ())])
            return {found_inf.device: torch.full_like(found_inf, float(inner.unscale_(float(inv_scale))))}
        if not isinstance(inner, CompressedOptimizer):
            found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            return found
        scale = 1.0 / float(inv_scale)
        if inner.sharded_overlap is not None:
            self._told = WeakSet([inner, *(self._told or ())])
        inner.note_loss_scale(scale)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        is_local = inner.local_gradients
        inner.note_unscaled(is_local and any(map(bool, found.values())))
        if not is_local:
            return found
        return found or {found_inf.device: found_inf}

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        inner, found = innermost(optimizer), optimizer_state["found_inf_per_device"]
        if isinstance(inner, CompressedOptimizer) and inner.local_gradients:
            # all ranks agree here, or have agreed while clipping: torch itself looks at this rank's gradients only
            agreed = float(inner.overflow_anywhere())
            found.update({device: torch.full_like(value, agreed) for device, value in found.items()})
        if isinstance(inner, (CompressedOptimizer, ZeroOptimizer)) and any(map(bool, found.values())):
            inner.skip_step()
        result: float | None = super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        return result


def innermost(optimizer: Any) -> Any:
    """Return the optimizer within wrappers such as Accelerate's AcceleratedOptimizer."""
    while not isinstance(optimizer, (CompressedOptimizer, ZeroOptimizer)) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
