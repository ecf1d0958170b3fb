"""The units of a model that FSDP2 shards: the parameters of one ``fully_shard`` call, which it reduces together.

FSDP2 has public hooks for the exchange between replicas and for its reduce-scatter, but tells them neither whose
gradients they get, nor that more are to come. This file alone reads that from its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


_FLOATS = {torch.float32, torch.bfloat16, torch.float16}  # dtypes that messages can carry


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 reduces together."""

    names: tuple[str, ...]  # of the trainable parameters, in the order of their gradients; none if all are frozen
    numels: tuple[int, ...]  # elements of this rank's shard of each, padding included
    trained: tuple[int, ...]  # their places among FSDP2's parameters of the unit
    module: FSDPModule  # one of the unit
    group: Any  # FSDP2's own state of the unit

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of this rank's shards of all gradients, in the dtype in which FSDP2 reduces them."""
        policy, rows = self.group.mp_policy, zip(self.numels, self.params, strict=True)
        return sum(numel * (policy.reduce_dtype or policy.param_dtype or p.dtype).itemsize for numel, p in rows)

    @property
    def device(self) -> torch.device:
        return torch.device(self.group.device)

    @property
    def more_to_come(self) -> bool:
        """True if ``set_requires_all_reduce(False)`` asks to keep the gradients for a later pass."""
        return not self.group.all_reduce_grads

    @property
    def is_synchronizing(self) -> bool:
        """False after ``set_requires_gradient_sync(False)``, which asks to keep gradients local."""
        return bool(self.group.reduce_grads)

    @property
    def is_replicated(self) -> bool:
        """True if FSDP2 itself averages gradients between replicas."""
        return _replicates(self.group)

    @property
    def params(self) -> list[Any]:
        """The parameters of these names, as DTensors; they may be frozen meanwhile."""
        return [_parameter_of(self.group.fsdp_params[place]) for place in self.trained]

    @property
    def trainable_now(self) -> list[Any]:
        """The parameters that are trainable now."""
        return [param for param in map(_parameter_of, self.group.fsdp_params) if param.requires_grad]

    def places(self, shard: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield for each parameter its name, the place and number of its elements in a shard, and the first of them."""
        offset = 0
        for name, padded, param in zip(self.names, self.numels, self.params, strict=True):
            if not param.placements[-1].is_shard(0):
                raise ValueError(f"{name} is not cut by its first dimension: save the errors by state_dict()")
            yield name, offset, min(padded, max(0, param.numel() - shard * padded)), shard * padded
            offset += padded

    def set_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Have FSDP2 call a hook with this rank's reduced gradients, flat and in place, in every pass that syncs.

        An all-reduce between the replicas of its own, as a 2-D mesh has it, is left out from now on.
        """
        mesh_info = self.group.mesh_info
        if _replicates(self.group):
            from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

            known = {field.name: getattr(mesh_info, field.name) for field in fields(FSDPMeshInfo) if field.init}
            self.group.mesh_info = FSDPMeshInfo(**{**known, "replicate_mesh_dim": None})
            if self.group.post_forward_mesh_info is mesh_info:  # FSDP2 compares the two
                self.group.post_forward_mesh_info = self.group.mesh_info
        self.module.set_all_reduce_hook(hook)
        self._reduce_all()

    def set_reduce_scatter(self, reduce_scatter: Any) -> None:
        """Have FSDP2 call a reduce-scatter in place of its own, in every pass that syncs."""
        self.module.set_custom_reduce_scatter(reduce_scatter)
        self._reduce_all()

    @property
    def gathered_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which FSDP2 gathers the parameters, frozen ones too."""
        policy = self.group.mp_policy
        return {policy.param_dtype or _parameter_of(param).dtype for param in self.group.fsdp_params}

    @property
    def gathers_its_own_way(self) -> bool:
        """True if a parameter is a tensor subclass that says itself what is gathered of it, as for float8."""
        return any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in self.group.fsdp_params)

    @property
    def gathers_in_parts(self) -> bool:
        """True if backward gathers among other ranks than forward."""
        return self.group.post_forward_mesh_info not in (None, self.group.mesh_info)

    @property
    def takes_all_gather(self) -> bool:
        return hasattr(self.module, "set_custom_all_gather")

    @property
    def all_gather(self) -> str | None:
        """The name of what FSDP2 gathers by; None where this torch does not tell."""
        known = getattr(self.group, "_all_gather_comm", None)
        return None if known is None else type(known).__name__

    def set_all_gather(self, all_gather: Any) -> None:
        """Have FSDP2 call an all-gather in place of its own."""
        self.module.set_custom_all_gather(all_gather)

    @property
    def versions(self) -> list[int]:
        """How often each parameter and this rank's shard of it were written, as torch counts both apart."""
        params = self.group.fsdp_params
        return [_parameter_of(p)._version for p in params] + [p._sharded_param_data._version for p in params]

    def rounded_shard(self) -> Tensor:
        """Return what this rank would gather of all parameters now, [n], padding included, as a new tensor."""
        (dtype,) = self.gathered_dtypes
        parts = [param._sharded_param_data for param in self.group.fsdp_params]
        return torch.cat([part.to(self.device, dtype, non_blocking=True).view(-1) for part in parts])

    def _reduce_all(self) -> None:
        """Have FSDP2 reduce parameters without a gradient too, so that all ranks send as much; from torch 2.13 on."""
        if hasattr(self.module, "set_reduce_scatter_unused_params"):
            self.module.set_reduce_scatter_unused_params(True, recurse=False)

    def divisor(self, op: Any, ranks: int) -> float:
        """Return the number by which a reduce-scatter of FSDP2's divides the sum of the gradients of all ranks."""
        if op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            return float(ranks) if op == dist.ReduceOp.AVG else 1.0
        return float(self.group.gradient_divide_factor)


def _parameter_of(param: Any) -> Any:
    """Return the parameter that a module has: loading may replace it, which FSDP2 notices in the next forward pass."""
    from torch.distributed.tensor import DTensor

    own = getattr(param._module_info.module, param._module_info.param_name, None)
    return own if isinstance(own, DTensor) else param.sharded_param


def units_of(model: nn.Module, mesh: DeviceMesh) -> list[Unit]:
    from torch.distributed.fsdp import FSDPModule  # seconds, for those who use it

    if mesh.ndim > 2:
        raise ValueError(
            f"mesh must have 1 dimension, the shards, or 2, the replicas and the shards of each, got {mesh.ndim}: give "
            "init_device_mesh(device_type, (nodes, ranks_per_node), mesh_dim_names=('replicate', 'shard'))"
        )
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} is not sharded by FSDP2: call fully_shard(model, mesh=mesh['shard']) first "
            "(torch.distributed.fsdp.fully_shard; FSDP1's FullyShardedDataParallel has no hook for this)"
        )
    setter = "set_all_reduce_hook" if mesh.ndim == 2 else "set_custom_reduce_scatter"
    if not hasattr(FSDPModule, setter):
        raise RuntimeError(f"torch {torch.__version__} has no FSDPModule.{setter}: install a newer torch, such as 2.13")
    names = {param: name for name, param in model.named_parameters()}
    found: dict[int, Unit] = {}
    for module in modules:
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # older versions have one at most
        groups = [g for g in (groups if groups is not None else [state._fsdp_param_group]) if g is not None]
        if len(groups) > 1:
            raise ValueError(
                f"{type(module).__name__} has parameters on several meshes (shard_placement_fn): FSDP2 has no hook for "
                "that, so that grad_compression cannot work there"
            )
        for group in groups:
            places = tuple(at for at, p in enumerate(group.fsdp_params) if _parameter_of(p).requires_grad)
            params = [group.fsdp_params[place] for place in places]
            if params or mesh.ndim == 1:
                _check(group, module, mesh)
            for param in map(_parameter_of, params):
                if param.dtype not in _FLOATS:
                    name = names.get(param, "a parameter")
                    raise TypeError(f"{name} must be float32, bfloat16 or float16, got {param.dtype}")
            known = tuple(names.get(_parameter_of(p), "?") for p in params)
            numels = tuple(p.padded_sharded_param_size.numel() for p in params)
            found.setdefault(id(group), Unit(known, numels, places, module, group))
    return list(found.values())


def outside(model: nn.Module, units: Iterable[Unit], *, trained: bool = True) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters, or the frozen ones, with their names, that FSDP2 does not manage."""
    managed: set[tuple[int, str]] = set()
    for info in (param._module_info for unit in units for param in unit.group.fsdp_params):
        managed.add((id(info.module), info.param_name))
        managed.update(zip(map(id, info.shared_modules), info.shared_param_names, strict=True))
    found: list[tuple[str, nn.Parameter]] = []
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad == trained and (id(module), name) not in managed:
                found.append((f"{prefix}.{name}" if prefix else name, param))
    return found


def _check(group: Any, module: nn.Module, mesh: DeviceMesh) -> None:
    name, info, last = type(module).__name__, group.mesh_info, mesh.get_group(mesh.ndim - 1)
    shard, wanted = (dist.get_process_group_ranks(g) for g in (info.shard_process_group, last))
    if shard != wanted:
        raise ValueError(
            f"{name} is sharded over the ranks {shard}, and the last dimension of the mesh has {wanted}: shard it by "
            f"fully_shard(module, mesh=mesh['shard']) or mesh=mesh, with the mesh that grad_compression gets"
        )
    if mesh.ndim == 1:
        if _replicates(group):
            raise ValueError(f"{name} has replicas: give the mesh of 2 dimensions by which it is sharded")
        if type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
            raise ValueError(f"{name} has a custom reduce-scatter already: grad_compression needs it for itself")
        return
    if _replicates(group) and dist.get_process_group_ranks(info.replicate_process_group) != (
        dist.get_process_group_ranks(mesh.get_group(0))
    ):
        raise ValueError(
            f"{name} is replicated over other ranks than the first dimension of the mesh has: give both the same mesh"
        )
    if _replicates(group) and group.gradient_divide_factor is not None:
        raise ValueError(
            f"{name} divides gradients by {group.gradient_divide_factor} (set_gradient_divide_factor), which on a 2-D "
            "mesh counts all ranks, while low-bit messages are averaged: shard it by mesh['shard'], where it counts "
            "those of one replica"
        )
    if group._all_reduce_hook is not None:
        raise ValueError(f"{name} has an all-reduce hook already: grad_compression needs it for itself")


def _replicates(group: Any) -> bool:
    return getattr(group.mesh_info, "replicate_mesh_dim", None) is not None
