"""Torch's clipping of gradients, for parameters of which FSDP2 shards some and not others.

``torch.nn.utils.clip_grad_norm_`` refuses such a mixture, for which DTensors have no common norm. Both parts of it are
taught here to take one: what finds the norm, and what scales the gradients. Hosts call the same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MARK = "_compressopt_mixes"


def teach_torch_to_mix() -> None:
    """Have torch clip whole gradients and shards by the norm of all of them. All ranks clip together, as with shards.

    Torch looks its two functions up at each call, so that this reaches what has imported ``clip_grad_norm_`` before.
    """
    modules = (torch.nn.utils.clip_grad, torch.nn.utils)
    for name, made in (("_get_total_norm", _total_norm), ("_clip_grads_with_norm_", _clip_with_norm)):
        original = getattr(modules[0], name, None)
        if original is None or hasattr(original, _MARK):
            continue
        taught = made(original)
        setattr(taught, _MARK, True)
        for module in modules:
            for alias in [alias for alias, value in vars(module).items() if value is original]:
                setattr(module, alias, taught)


def _total_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def total_norm(tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        known = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        parts = _by_mesh(known, known)
        if not _are_mixed(parts):
            return original(known, norm_type, *args, **kwargs)
        norms = [original(part, norm_type, *args, **kwargs) for part in parts.values()]
        whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(whole[0].device) for norm in whole]), float(norm_type)
        )
        return total

    return total_norm


def _clip_with_norm(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clip_with_norm(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        known = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        parts = _by_mesh(known, [param.grad for param in known])
        if not _are_mixed(parts):
            original(known, max_norm, total_norm, *args, **kwargs)
            return
        from torch.distributed.tensor import DTensor

        for mesh, part in parts.items():
            norm = total_norm if mesh is None else DTensor.from_local(total_norm, mesh)
            original(part, max_norm, norm, *args, **kwargs)

    return clip_with_norm


def _are_mixed(parts: Collection[DeviceMesh | None]) -> bool:
    """True for shards of one mesh and whole gradients. Of several meshes torch says itself whether it clips them."""
    return None in parts and len(parts) == 2


def _by_mesh(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[DeviceMesh | None, list[Tensor]]:
    """Divide the tensors that have a gradient by the meshes of their gradients; None is no mesh."""
    parts: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor, grad in zip(tensors, grads, strict=True):
        if grad is not None:
            parts.setdefault(getattr(grad, "device_mesh", None), []).append(tensor)
    return parts
