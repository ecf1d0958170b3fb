"""The state of AdamW that a checkpoint stands for, whichever optimizer of the family saved it.

AdamW divides its moments by bias corrections. Those of a checkpoint are scaled so that it finds by them what the run
itself went by: with t the steps of a parameter,
    m <- m (1 - b1^t) / c1,  v <- v (1 - b2^t) / c2
where c1 and c2 are the corrections that the run applies: 1 - b1^t, and 1 - b2^n after n updates of the variance, in its
first stage; 1 where they are part of the moments (from the switch on), or off. In full-precision steps both factors are
1, and the moments keep their bits. What is each rank's own, as 0/1 Adam's momentum inside a local interval, becomes
its mean over the ranks. A parameter that has no variance after the switch keeps still, and for AdamW it is a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.source import Stored, fill
from hf_compressopt.format.index import CheckpointIndex
from hf_compressopt.format.reader import ShardFiles
from hf_compressopt.format.reshard import Plan, Wanted, plan_reads

#: The optimizers whose state is one of Adam's moments: as they are, or inside a ZeroOptimizer.
PLAIN = ("AdamW", "Adam", "FusedAdam", "Lamb")
COMPRESSED = ("OnebitAdam", "ZeroOneAdam", "OnebitLamb")
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP, MASTER, SCALAR = "step", "master", "scalar:"
_FREEZE_STEP = {"OnebitAdam": "freeze_step", "OnebitLamb": "freeze_step", "ZeroOneAdam": "var_freeze_step"}
_ELEMENTWISE = {**dict.fromkeys((*MOMENTS, "max_exp_avg_sq", MASTER)), "master_param": MASTER}
_ZERO = re.compile(r"ZeroOptimizer\((\w+)\)")


@dataclass(frozen=True)
class Entry:
    """A tensor of AdamW's state.

    Attributes:
        kind: "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", or "step".
        group: Number of its param group.
        place: Place of its parameter among the group's.
        name: Name of its parameter.
        dtype: Its dtype, by torch's name.
        shape: Its shape; () for a step.
        of_ranks: Where it is the mean of what the ranks have: their tensors' names, with ``{rank}``. Else "".
        stored: Name of the tensor in the checkpoint, or "".
    """

    kind: str
    group: int
    place: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: str
    of_ranks: str


def kind_of(header: dict[str, Any]) -> tuple[str, bool]:
    """Name of the optimizer's class by a checkpoint's header, without ZeRO, and whether it is a compressed one."""
    if "optimizer" in header:
        return str(header["optimizer"]), True
    found = _ZERO.fullmatch(str(header.get("class")))
    return found[1] if found else str(header.get("class")), False


class AdamView:
    """A checkpoint as one of AdamW.

    Attributes:
        index: The checkpoint's index.
        param_groups: Of each param group the hyperparameters of torch's AdamW.
        entries: Its tensors, by ``<kind>/<parameter>``, in the order of the param groups.
        notes: What the checkpoint has and AdamW does not, in sentences.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        """Find AdamW's tensors.

        Raises:
            ValueError: If the checkpoint cannot be one of AdamW; the message goes on where the index's name ends.
        """
        self.index = index
        self.optimizer, self._compressed = kind_of(index.header)
        if self.optimizer not in (COMPRESSED if self._compressed else PLAIN):
            raise ValueError(
                f"is of {index.header.get('optimizer', index.header.get('class'))}, whose state is none of Adam's; "
                f"legal are {', '.join((*COMPRESSED, *PLAIN))}"
            )
        groups = index.header.get("param_groups")
        if not isinstance(groups, list) or len(groups) != len(index.parameters):
            raise ValueError(f"has {len(index.parameters)} param groups and the hyperparameters {groups!r}")
        self._groups: list[dict[str, Any]] = groups
        self.param_groups = [self._hyperparameters(group) for group in self._groups]
        self.entries = {f"{entry.kind}/{entry.name}": entry for entry in self._find()}
        self._check_complete()
        self.notes = list(self._find_notes())
        self._factors: dict[str, dict[str, float]] = {}

    def read(self, entry: Entry, files: ShardFiles, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """Elements [start, stop) of a tensor, flattened, in parts of a few MiB in order.

        Raises:
            CheckpointError: If they are not what was saved.
        """
        stop = prod(entry.shape) if stop is None else stop
        factor = self._factors_of(entry, files)[entry.kind]
        if entry.kind == STEP:
            yield torch.tensor([factor], dtype=torch.float32)[start:stop]
            return
        dtype = getattr(torch, entry.dtype)
        for window in self._plan(entry, start, stop).windows(self.index.block_bytes):
            part = torch.empty(window.nbytes // dtype.itemsize, dtype=dtype)
            fill(part, window, files, self.index)
            yield part if factor == 1 else part.mul_(factor)

    def _plan(self, entry: Entry, start: int, stop: int) -> Plan:
        wanted = Wanted(entry.stored, entry.dtype, entry.shape, start, stop, entry.of_ranks)
        return plan_reads(self.index, wanted, 0 if entry.of_ranks else len(self.index.shards))

    # -- what is there ------------------------------------------------------------------------------------------------

    def _find(self) -> Iterator[Entry]:
        for group, parameters in enumerate(self.index.parameters):
            for place, parameter in enumerate(parameters):
                name, shape = parameter["name"], tuple(parameter["shape"])
                found = []
                for key, kind in _ELEMENTWISE.items():
                    stored, of_ranks = self._stored(key, name)
                    if stored is not None and (kind or key) not in found:
                        dtype = self.index.tensors[stored].dtype
                        found.append(kind or key)
                        yield Entry(kind or key, group, place, name, dtype, shape, stored, of_ranks)
                if set(found) - {MASTER}:
                    yield Entry(STEP, group, place, name, "float32", (), "", "")

    def _stored(self, key: str, name: str) -> tuple[str | None, str]:
        if f"{key}/{name}" in self.index.tensors:
            return f"{key}/{name}", ""
        first = f"{key}/rank0/{name}"
        if self._compressed and first in self.index.tensors:
            return first, _of_ranks(key, name)
        return None, ""

    def _check_complete(self) -> None:
        known = {(entry.stored, entry.of_ranks)[bool(entry.of_ranks)] for entry in self.entries.values()}
        for name in self.index.tensors:
            own = re.fullmatch(r"exp_avg/rank\d+/(.*)", name)
            if name.startswith("exp_avg/") and not {name, own and _of_ranks("exp_avg", own[1])} & known:
                raise ValueError(
                    f"has {name!r}, of a param group with a process_group of its own: only some of the ranks hold such "
                    "parameters, and no one state dict of AdamW has them all"
                )
        for entry in self.entries.values():
            missing = [kind for kind in MOMENTS if f"{kind}/{entry.name}" not in self.entries]
            if entry.kind == STEP and missing:
                raise ValueError(f"has no {missing[0]} of {entry.name!r}: its state is none of Adam's")
            if entry.kind == STEP and self._stored_step(entry) is None:
                raise ValueError(f"has no step of {entry.name!r}: its state is none of Adam's")

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        decoupled = group.get("decoupled_weight_decay", group.get("adam_w_mode", self.optimizer != "Adam"))
        found = {
            "lr": group["lr"],
            "betas": tuple(group["betas"]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "amsgrad": bool(group.get("amsgrad", False)),
            "maximize": bool(group.get("maximize", False)),
            "decoupled_weight_decay": bool(decoupled),
        }
        return {**found, **({"initial_lr": group["initial_lr"]} if "initial_lr" in group else {})}

    def _find_notes(self) -> Iterator[str]:
        if any(entry.of_ranks for entry in self.entries.values()):
            yield "inside a local interval each rank has a momentum of its own: taken is the mean over the ranks"
        if any(name.startswith("worker_error/") for name in self.index.tensors):
            yield "the error feedback is left out: AdamW has none"
        if any(group.get("eps_inside_sqrt") for group in self._groups):
            yield "eps_inside_sqrt is left out: AdamW adds eps to the root"
        if any(name.startswith("exp_avg_mask/") for name in self.index.tensors):
            yield "exp_avg_mask is left out: AdamW has none"
        if any(not group["decoupled_weight_decay"] for group in self.param_groups):
            yield "the weight decay is L2 regularization: go on with torch.optim.Adam"

    # -- factors ------------------------------------------------------------------------------------------------------

    def _factors_of(self, entry: Entry, files: ShardFiles) -> dict[str, float]:
        """By what each kind of a parameter's tensors is multiplied, and its step."""
        if entry.name not in self._factors:
            self._factors[entry.name] = self._find_factors(entry, files)
        return self._factors[entry.name]

    def _find_factors(self, entry: Entry, files: ShardFiles) -> dict[str, float]:
        factors = {kind: 1.0 for kind in dict.fromkeys(kind or key for key, kind in _ELEMENTWISE.items())}
        group = self._groups[entry.group]
        stored = self._stored_step(entry)
        if stored is None:  # a master copy alone
            return factors
        step = updates = self._number(*stored, files)
        if (counted := f"variance_steps/group{entry.group}") in self.index.tensors:
            updates = self._number(counted, entry.place, files)
        switched = self._switched(group)
        if switched and not self._any(self.entries[f"exp_avg_sq/{entry.name}"], files):
            return {**factors, STEP: 0.0, "exp_avg": 0.0}
        applied = not switched and bool(group.get("bias_correction", True))
        for beta, count, kinds in zip(
            group["betas"], (step, updates), (("exp_avg",), ("exp_avg_sq", "max_exp_avg_sq")), strict=True
        ):
            wanted, own = 1 - beta**step, 1 - beta**count if applied else 1.0
            if wanted != own and wanted > 0 and own > 0:
                factors.update(dict.fromkeys(kinds, wanted / own))
        return {**factors, STEP: step}

    def _switched(self, group: dict[str, Any]) -> bool:
        """Whether the bias corrections of this group are part of its moments."""
        if not self._compressed or group.get("non_freeze"):
            return False
        freeze_step = self.index.header["schedule"][_FREEZE_STEP[self.optimizer]]
        return isinstance(freeze_step, int) and self.index.header["step"] >= freeze_step

    def _stored_step(self, entry: Entry) -> tuple[str, int] | None:
        """Name of the tensor that holds a parameter's step, and its place there."""
        if self._compressed:
            return f"step/group{entry.group}", entry.place
        names = (f"{kind}step/{entry.name}" for kind in (SCALAR, "number:"))
        return next(((name, 0) for name in names if name in self.index.tensors), None)

    def _number(self, name: str, place: int, files: ShardFiles) -> float:
        entry = self.index.tensors.get(name)
        if entry is None:
            raise ValueError(f"has no tensor {name!r}")
        value = torch.empty(1, dtype=getattr(torch, entry.dtype))
        wanted = Wanted(name, entry.dtype, entry.shape, place, place + 1)
        fill(value, plan_reads(self.index, wanted, len(self.index.shards)), files, self.index)
        return float(value)

    def _any(self, entry: Entry, files: ShardFiles) -> bool:
        dtype = getattr(torch, entry.dtype)
        for window in self._plan(entry, 0, prod(entry.shape)).windows(self.index.block_bytes):
            part = torch.empty(window.nbytes // dtype.itemsize, dtype=dtype)
            fill(part, window, files, self.index)
            if part.any():
                return True
        return False


class AdamSource(Stored):
    """A checkpoint as that of an ordinary optimizer of Adam's family, for one that did not save it."""

    def __init__(self, view: AdamView, optimizer: str) -> None:
        """Take its description from the view.

        Args:
            view: The checkpoint.
            optimizer: Name of the class whose checkpoint it is to be.
        """
        super().__init__(view.index)
        self._view = view
        self._entries = {f"{SCALAR if entry.kind == STEP else ''}{name}": entry for name, entry in view.entries.items()}
        self.described = {name: (getattr(torch, e.dtype), e.shape) for name, e in self._entries.items()}
        self.header = {
            "class": f"ZeroOptimizer({optimizer})",
            "stage": 0,
            "step": view.index.header["step"],
            "skipped_steps": view.index.header["skipped_steps"],
            "world_size": len(view.index.shards),
            "loss_scale": view.index.header.get("loss_scale", [1.0, 0]),
            "bytes_sent": view.index.header["bytes_sent"],
            "param_groups": view.param_groups,
        }

    def check(self, wanted: Wanted, world_size: int, files: ShardFiles) -> None:
        """As the base class's; which of the ranks wants it makes no difference."""
        for _ in self._parts(wanted, files):
            pass

    def read(self, wanted: Wanted, world_size: int, files: ShardFiles, out: Tensor) -> None:
        """As the base class's; which of the ranks wants it makes no difference."""
        done = 0
        for part in self._parts(wanted, files):
            out[done : done + part.numel()] = part
            done += part.numel()

    def _parts(self, wanted: Wanted, files: ShardFiles) -> Iterator[Tensor]:
        entry = self._entries.get(wanted.name)
        if entry is None:
            raise ValueError(f"has no tensor {wanted.name!r}")
        return self._view.read(entry, files, wanted.start, wanted.stop)


def source_of(index: CheckpointIndex, optimizer: str, groups: Sequence[dict[str, Any]]) -> Stored:
    """A checkpoint as an optimizer takes it: what its own class saved, or else AdamW's state.

    Compressed optimizers take that of an ordinary one, and an ordinary one of Adam's family that of any of them.

    Args:
        index: The checkpoint's index, validated.
        optimizer: Name of the optimizer's class, of the wrapped one in a ZeroOptimizer.
        groups: Its param groups.

    Raises:
        ValueError: If it cannot be one of AdamW; the message goes on where the index's name ends.
    """
    saved, by_compressed = kind_of(index.header)
    to_compressed = optimizer in COMPRESSED
    if saved == optimizer or (by_compressed and to_compressed):
        return Stored(index)
    if saved not in (*PLAIN, *COMPRESSED) or optimizer not in (*PLAIN, *COMPRESSED):
        return Stored(index)
    view = AdamView(index)
    check_decay(view, groups, optimizer)
    return AdamSource(view, "AdamW" if to_compressed else optimizer)


def _of_ranks(key: str, name: str) -> str:
    return f"{key}/rank{{rank}}/" + name.replace("{", "{{").replace("}", "}}")


def check_decay(view: AdamView, groups: Sequence[dict[str, Any]], optimizer: str) -> None:
    """Check that the weight decay of a checkpoint is of the kind of the optimizer's that takes it over.

    Raises:
        ValueError: If one is decoupled and the other is not, and there is any.
    """
    for number, (saved, group) in enumerate(zip(view.param_groups, groups, strict=False)):
        own = group.get("decoupled_weight_decay", group.get("adam_w_mode", optimizer != "Adam"))
        if saved["weight_decay"] != 0 and saved["decoupled_weight_decay"] != own:
            raise ValueError(
                f"the weight decay of param group {number}, {saved['weight_decay']}, is "
                f"{'decoupled' if saved['decoupled_weight_decay'] else 'L2 regularization'} in the checkpoint, and not "
                f"in {optimizer}"
            )
