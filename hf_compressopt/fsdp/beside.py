"""Trainable parameters beside the units of FSDP2: adapters that are added after ``fully_shard``, and late heads.

FSDP2 neither gives its ranks the same values of them nor averages their gradients, so that every rank would train its
own. Here all ranks take rank 0's values once, and average the gradients over the whole mesh at the end of every
backward pass that sends gradients, behind the messages of the units: whatever order the graphs of the ranks have, the
messages have one.

What each rank shall keep for itself, such as experts, is named as DistributedDataParallel wants it, in
``model._ddp_params_and_buffers_to_ignore``: it is left alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from hf_compressopt.collectives.buffers import broadcast_together
from hf_compressopt.collectives.communicator import all_reduce_bytes
from hf_compressopt.collectives.sender import Hooks, SendRecord, listed
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.fsdp.clipping import teach_torch_to_mix
from hf_compressopt.fsdp.units import Unit, outside
from hf_compressopt.grad_compression import FULL, GradientCompression
from hf_compressopt.optim.math import bit_sum

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class BesideUnits:
    """The parameters of a model that no unit manages, from the moment at which they are found.

    That is where this object is made, or else before the first forward in training: PEFT may add adapters to a model
    that has been prepared. Those that come later nobody averages, and the first step with them raises an error.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        mesh: DeviceMesh,
        compression: str,
        gradient_came: Callable[[], None],
        backward_begins: Callable[[], None],
        **options: Any,
    ) -> None:
        """Find them. All ranks call.

        Args:
            model: The model.
            units: Its units, those without trainable parameters too.
            mesh: All ranks that train the model.
            compression: The form in which the gradients travel, as for GradientCompression.
            gradient_came: Is called for each of their gradients, in every backward pass.
            backward_begins: Is called where a backward pass through the model begins, on all ranks: a rank may have no
                gradient of them, and takes part in averaging those of others.
            **options: Further options of GradientCompression.
        """
        self.averages: GradientCompression | None = None
        self._model, self._units, self._replicated = model, units, mesh.ndim == 2
        self._compression = compression
        self._gradient_came = gradient_came
        self._backward_begins = backward_begins
        self._options = {**options, "process_group": _group_of(mesh)}
        self._own = SendRecord("compress_fsdp")  # of what each rank keeps for itself
        self._told_of_reentrant = False
        self._told_of_unfrozen = False
        self._hooks = Hooks()
        self.find()
        self._late = model.register_forward_pre_hook(self._find_late)
        model.register_forward_hook(self._watch_output)
        _watch_steps()  # to refuse optimizers that average these parameters, or send their gradients, by themselves
        _LIVING.add(self)

    @property
    def are_due(self) -> bool:
        """True if the pass under way is one that sends gradients."""
        return self.averages is not None and all(
            unit.is_synchronizing and not (self._replicated and unit.more_to_come) for unit in self._units
        )

    def unfrozen_in(self, stepped: set[int]) -> list[str]:
        """Name those of some parameters, by id, that have gradients which nobody has averaged over the replicas.

        All parameters of their units were frozen at first, so that no hook has them. Where FSDP2 averages such
        gradients itself, in full precision, a warning says so once.
        """
        if self._compression == FULL:
            return []
        frozen = [unit for unit in self._units if not unit.names]
        apart = [unit for unit in frozen if self._replicated and not unit.is_replicated]
        if names := self._with_gradients(apart, stepped):
            return names
        names = [] if self._told_of_unfrozen else self._with_gradients(frozen, stepped)
        self._told_of_unfrozen = self._told_of_unfrozen or bool(names)
        if names and dist.get_rank() == 0:
            logger.warning(
                "FSDP2 averages the gradients of %s in full precision: all parameters of their units, of one "
                "fully_shard call each, were frozen when grad_compression began. To compress them too, make parameters "
                "trainable before compress_fsdp, or prepare()",
                listed(names),
            )
        return []

    def _with_gradients(self, units: Sequence[Unit], stepped: set[int]) -> list[str]:
        """Name the parameters of units that have gradients and are among those, by id, which a step moves."""
        having = {id(p) for unit in units for p in unit.trainable_now if p.grad is not None} & stepped
        return [name for name, param in self._model.named_parameters() if id(param) in having] if having else []

    def describe(self) -> str:
        """What becomes of them, for a log, to be put behind a sentence; "" if there are none."""
        if self.averages is None:
            return ""
        numel = self.averages.layout.numel
        return (
            f"; {numel:,} trainable parameters beside the shards are rank 0's on all ranks, and their gradients "
            f"{self.averages.form}, {self.averages.communicator}"
        )

    def find(self) -> GradientCompression | None:
        """Find the parameters, give them rank 0's values, and return their averages. All ranks call."""
        named = self._outside(trained=True)
        devices = [param.device for _, param in named] + [unit.device for unit in self._units]
        ranks = TorchCommunicator(self._options["process_group"], device=devices[0] if devices else None)
        rows = [f"{name} {list(param.shape)} {param.dtype}" for name, param in named]
        ranks.require_equal_rows("the trainable parameters beside those that FSDP2 shards", rows)
        if sharded := [name for name, param in named if hasattr(param, "device_mesh")]:
            raise ValueError(
                f"grad_compression cannot average the gradients of {listed(sharded)}, DTensors that no fully_shard "
                f"manages: shard them by fully_shard, freeze them, or name them in model.{_IGNORED} if others do it"
            )
        known = set() if self.averages is None else set(self.averages.params)
        if known == {param for _, param in named}:
            return self.averages
        if self.averages is not None:
            self._hooks.remove()
            self.averages.close()
        teach_torch_to_mix()
        self.averages = GradientCompression(named, self._compression, **self._options)
        self.averages.leave_lines_to_others()
        self._compare(ranks, named)
        broadcast_together(ranks, self.averages.params)
        for param in self.averages.params:
            self._hooks.add(param.register_post_accumulate_grad_hook(self._came))
        return self.averages

    def _outside(self, *, trained: bool) -> list[tuple[str, nn.Parameter]]:
        """The trainable or the frozen parameters beside the units, without those that each rank keeps for itself."""
        ignored = set(getattr(self._model, _IGNORED, ()))
        rows = outside(self._model, self._units, trained=trained)
        self._own.add([row for row in rows if row[0] in ignored], watched=False)
        return [row for row in rows if row[0] not in ignored]

    def _compare(self, ranks: TorchCommunicator, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Warn of parameters that differ: trainable ones, and frozen ones, such as the frozen half of an adapter."""
        rows = [row for row in self._outside(trained=False) if not hasattr(row[1], "device_mesh")]
        mine = {name: int(bit_sum(p.detach())) for name, p in [*named, *rows] if p.is_floating_point()}
        everyone = ranks.all_gather_object(mine)
        different = [name for name in mine if any(each.get(name) != mine[name] for each in everyone)]
        trained = {name for name, _ in named}
        if (moved := [name for name in different if name in trained]) and ranks.rank == 0:
            logger.warning(
                "trainable parameters beside the shards of FSDP2 differ between the ranks: %s. All ranks take rank 0's "
                "values of them, and average their gradients, as is right for adapters. What each rank shall keep for "
                "itself, such as experts or what fully_shard(ignored_params=...) got, belongs into model.%s before",
                listed(moved),
                _IGNORED,
            )
        if (apart := [name for name in different if name not in trained]) and ranks.rank == 0:
            logger.warning(
                "frozen parameters beside the shards of FSDP2 differ between the ranks, and so do their models: %s. "
                "Set one seed on all ranks before such adapters are made, or broadcast them",
                listed(apart),
            )

    def average(self, averages: GradientCompression) -> None:
        """Average the gradients at the end of a pass, which all ranks end."""
        if not self._told_of_reentrant and _is_inside_checkpoint():
            self._told_of_reentrant = True
            if averages.communicator.rank == 0:
                logger.warning(
                    "reentrant checkpointing runs a backward pass for each block, and each averages the gradients of "
                    "all trainable parameters beside the shards of FSDP2: checkpoint with use_reentrant=False, which "
                    "averages once (Trainer: gradient_checkpointing_kwargs={'use_reentrant': False})"
                )
        averages.average_in_pass()

    def _came(self, _: Tensor) -> None:
        self._gradient_came()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _watch_output(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.averages is None or not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._backward_begins())  # type: ignore[no-untyped-call]

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _find_late(self, model: nn.Module, args: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._late.remove()
            self.find()


_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's name for it
_LIVING: WeakSet[BesideUnits] = WeakSet()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before a step with gradients that nobody here has averaged, or that two do; torch calls on all ranks."""
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for names in [found for each in _LIVING if (found := each.unfrozen_in(given))]:
        raise RuntimeError(
            f"grad_compression has not averaged the gradients of {listed(names)}: all parameters of their units, of "
            "one fully_shard call each, were frozen when it began. Make parameters trainable before compress_fsdp, or "
            "prepare(), and freeze for a time by leaving them out of the optimizer's param groups"
        )
    if not hasattr(optimizer, "trainable_parameters"):
        return
    averaged = [each.averages for each in _LIVING if each.averages is not None]
    for averages in averaged:
        if names := [name for name, p in zip(averages.names, averages.params, strict=True) if id(p) in given]:
            raise ValueError(
                f"compress_fsdp averages the gradients of {listed(names)}, and {type(optimizer).__name__} sends them "
                "in a way of its own: use an ordinary optimizer, such as torch.optim.AdamW"
            )


def together(units: dict[str, float], full: float, beside: GradientCompression) -> dict[str, float]:
    """Return the metrics of units, which send ``full`` bytes in a step without compression, and of what is beside."""
    own = beside.metrics()
    node_size = beside.communicator.topology.node_size
    whole = full + all_reduce_bytes(beside.params, beside.communicator.world_size)
    on_link = units["bytes_sent_step"] + own["bytes_sent_step"] * node_size
    found = {name: value + units.get(name, 0.0) for name, value in own.items()}
    found["steps_not_finite"] = max(own["steps_not_finite"], units["steps_not_finite"])  # mostly those of one step
    found["compression_ratio"] = whole / on_link if on_link else 1.0
    found.pop("node_size", None)  # that of the smaller part
    return found


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the process group of all ranks of a mesh; None is the default group. All of them call."""
    group: dist.ProcessGroup | None = None
    if mesh.ndim == 1:
        group = mesh.get_group(0)
    elif (ranks := mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
        group = dist.new_group(ranks, use_local_synchronization=True)
    return group


def _is_inside_checkpoint() -> bool:
    """True inside the backward of a reentrant checkpoint, which runs a backward pass of its own."""
    frame, inside = sys._getframe(), CheckpointFunction.backward.__code__
    while frame.f_code is not inside:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True
