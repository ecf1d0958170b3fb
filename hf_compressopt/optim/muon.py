"""Muon for the matrices of a model, and AdamW for the rest, as one optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_compressopt.optim.math import evaluate

logger = logging.getLogger(__name__)
_MUON = "muon"  # the key of a param group that says which optimizer steps it
_OF_MUON = ("lr", "weight_decay", "momentum")
_OF_ADAMW = ("lr", "weight_decay", "betas", "eps")


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for matrices; torch's AdamW for embeddings, heads, and everything that is no matrix.

    Both follow one learning rate and one weight decay, those of AdamW, because Muon's updates are scaled to the size
    of AdamW's (``adjust_lr_fn="match_rms_adamw"``; Liu et al. 2025, arXiv 2502.16982). Tied heads are heads, and so are
    those that PEFT trains beside its adapters. A tensor of three dimensions, such as fused experts, is no matrix; a
    warning names it. Parameters of one dimension have no weight decay.
    Whole matrices are needed, so ZeRO refuses it; ``grad_compression`` carries its gradients.

    Args:
        params: A Transformers model, whose parameters are divided as above; or param groups with ``muon=True`` or
            ``muon=False``, and any options of torch's optimizers, such as ``ns_steps``.
        lr: Learning rate, >= 0.
        betas: AdamW's coefficients of the running averages, each in [0, 1).
        eps: Added to AdamW's denominator, >= 0.
        weight_decay: Decoupled weight decay, >= 0.
        momentum: Muon's coefficient of the running average.

    Raises:
        ValueError: For a torch without Muon (before 2.9), for params that do not say what is a matrix, and for an
            option outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"muon needs torch.optim.Muon, which torch 2.9 has first, and this is torch {torch.__version__}: "
                "update torch, or use --optim adamw_torch"
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(_divided(params) if isinstance(params, nn.Module) else params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with ``muon=True`` or ``muon=False``; options that it leaves out are the optimizer's."""
        muon = param_group.get(_MUON) if isinstance(param_group, dict) else None
        if not isinstance(muon, bool):
            raise ValueError(
                "every param group of MuonAdamW must say muon=True or muon=False, because a parameter does not show "
                f"whether it is an embedding or a head; got muon={muon!r}. Or give the Transformers model itself"
            )
        names = _OF_MUON if muon else _OF_ADAMW
        options = {name: self.defaults[name] for name in names}
        options |= {"adjust_lr_fn": "match_rms_adamw"} if muon else {}
        _stepper(muon, [param_group], **options)  # checks the group, and fills in what it leaves out
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. Returns the closure's return value."""
        loss = evaluate(closure)
        for muon in (True, False):
            if groups := [group for group in self.param_groups if group[_MUON] is muon]:
                stepper = _stepper(muon, groups)  # of the same groups, and of the same state
                stepper.state = self.state
                stepper.step()
        return loss


def _stepper(muon: bool, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups, **options) if muon else torch.optim.AdamW(groups, **options)


def _divided(model: nn.Module) -> list[dict[str, Any]]:
    """Return the param groups of a Transformers model: matrices, other parameters with weight decay, those without."""
    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"MuonAdamW finds the head of a Transformers model, got {type(model).__name__}: give the model without "
            "DistributedDataParallel, or param groups with muon=True for matrices and muon=False for the rest"
        )
    adapted: Any = getattr(model, "get_base_model", None)  # PEFT's: the model in which the adapters are
    inner = model if adapted is None else adapted()
    apart = {id(p) for module in model.modules() if _is_embedding(module) for p in module.parameters()}
    get_head: Any = inner.get_output_embeddings
    if (head := get_head()) is not None:
        apart |= {id(p) for p in head.parameters()}
    inside = {id(p) for p in getattr(inner, "base_model", inner).parameters()}  # other heads are outside of it
    rows = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for _, p in rows if p.ndim == 2 and id(p) in inside and id(p) not in apart]
    known = {id(p) for p in matrices}
    rest = [p for _, p in rows if id(p) not in known]
    filters = {id(m.weight) for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)}
    _warn_of_fused([(n, p) for n, p in rows if p.ndim > 2 and id(p) in inside and id(p) not in filters], rows)
    groups = (
        {"params": matrices, _MUON: True},
        {"params": [p for p in rest if p.ndim > 1], _MUON: False},
        {"params": [p for p in rest if p.ndim <= 1], _MUON: False, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


def _is_embedding(module: nn.Module) -> bool:
    """True for an embedding, and for PEFT's adapter of one."""
    return isinstance(module, nn.Embedding) or isinstance(getattr(module, "base_layer", None), nn.Embedding)


def _warn_of_fused(fused: Sequence[tuple[str, Tensor]], trainable: Sequence[tuple[str, Tensor]]) -> None:
    """Warn of tensors of three dimensions that are no filters: they hold matrices that Muon does not step."""
    if not fused or (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        return
    numel, everything = (sum(p.numel() for _, p in rows) for rows in (fused, trainable))
    name, example = fused[0]
    logger.warning(
        "AdamW steps %d tensors of more than two dimensions, %.0f %% of the trainable parameters, in place of Muon, "
        "which takes matrices only: %s of shape %s is the first. In a mixture of experts these are fused experts; a "
        "model with a matrix per expert has all of them stepped by Muon",
        len(fused),
        100 * numel / everything,
        name,
        list(example.shape),
    )
