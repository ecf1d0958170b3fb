"""The norm of the gradients that an ordinary optimizer clips to, those of sharded parameters included."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.kernels import sum_of_squares


def grad_square_sum(params: Sequence[Tensor]) -> Tensor | None:
    """Sum the squares of all elements of the gradients.

    Of DTensors (FSDP2, tensor parallelism) each rank sums up its own shards, and the ranks of their mesh add these
    sums: one all-reduce for each mesh and placement. All ranks of the mesh call.

    Args:
        params: The parameters, any shapes; those without a gradient count as 0.

    Returns:
        [] float64 on the device of the first gradient; None if there is none.

    Raises:
        ValueError: For parameters of FSDP1, whose shards do not tell which ranks hold the others.
    """
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
    """Tell whether a tensor is a DTensor, without an import of torch.distributed.tensor."""
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
    mine = [(g if g.placements == placements else g.redistribute(mesh, placements)).to_local() for g in grads]
    square = _local_square(mine) if mine else torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    summed = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    whole: Tensor = DTensor.from_local(square, mesh, summed, run_check=False).full_tensor()
    return whole
