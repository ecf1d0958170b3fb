"""The state of AdamW that a checkpoint stands for, whichever optimizer of the family saved it.

AdamW divides its moments by bias corrections. The moments of a checkpoint are scaled so that this division gives what
the run itself used. With t the steps of a parameter:
    m <- m (1 - b1^t) / c1,  v <- v (1 - b2^t) / c2
Here c1 and c2 are the corrections that the run applies. In its warmup stage they are 1 - b1^t, and 1 - b2^n after n
updates of the variance. They are 1 if the corrections are part of the moments (after the switch) or off. In
full-precision steps both factors are 1, and the moments keep their bits. A tensor that is each rank's own, such as 0/1
Adam's momentum inside a local interval, becomes the mean over the ranks. A parameter that has no variance after the
switch does not move in the run, and is a new one for AdamW.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.compressed import CODE, CompactTensors
from hf_compressopt.checkpoint.state import COMPRESSED, PLAIN, Header, fill
from hf_compressopt.format.index import CheckpointIndex, TensorEntry
from hf_compressopt.format.plan import MASTER, Per, StateTensor, TensorKey, plan_reads
from hf_compressopt.format.shards import ShardFiles

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
_ELEMENTWISE = {**dict.fromkeys((*MOMENTS, "max_exp_avg_sq", MASTER)), "master_param": MASTER}


class Stored:
    """A checkpoint as it was saved: its index, header, and tensors by name."""

    header: Header
    entries: Mapping[str, TensorEntry]

    def __init__(self, index: CheckpointIndex) -> None:
        self.index, self.header, self.entries = index, Header.of(index.header), index.tensors
        self._compact = CompactTensors(index)

    def _decoded(self, tensor: StateTensor, files: ShardFiles) -> Iterator[Tensor] | None:
        """Return the elements in order, part by part, of a tensor that is not read as it was saved."""
        return self._compact.error_parts(tensor, files) if tensor in self._compact else None

    def read(self, tensor: StateTensor, world_size: int, files: ShardFiles, out: Tensor | None) -> None:
        """Read what one of ``world_size`` ranks reads into ``out``, flattened, on any device, or only verify it."""
        if (parts := self._decoded(tensor, files)) is None:
            return fill(out, plan_reads(self.index, tensor, world_size), files, self.index)
        done = 0
        for part in parts:
            if out is not None:
                out[done : done + part.numel()] = part
            done += part.numel()
        return None


@dataclass(frozen=True)
class Entry:
    """A tensor of AdamW's state: "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master" or "step" of a parameter."""

    key: TensorKey
    group: int
    place: int  # of its parameter among the group's
    dtype: str
    shape: tuple[int, ...]  # () for a step
    stored: StateTensor | None = None  # the whole tensor in the checkpoint; None for a step


class AdamView(Stored):
    """A checkpoint as one of AdamW, for an optimizer of Adam's family that did not save it.

    Attributes:
        param_groups: Of each param group the hyperparameters of torch's AdamW.
        found: Its tensors, by ``<kind>/<parameter>``, in the order of the param groups.
        notes: Sentences about what the checkpoint has and AdamW does not.
    """

    def __init__(self, index: CheckpointIndex, optimizer: str = "AdamW") -> None:
        super().__init__(index)
        self.saved, values = self.header, index.header
        if self.saved.optimizer not in (COMPRESSED if self.saved.compressed else PLAIN):
            raise ValueError(
                f"it was saved by {self.saved.title}, which keeps no moments of Adam; supported are "
                f"{', '.join((*COMPRESSED, *PLAIN))}"
            )
        self._groups = self.saved.param_groups(len(index.parameters))
        self._names = {parameter["name"] for group in index.parameters for parameter in group}
        self.param_groups = [self._hyperparameters(group) for group in self._groups]
        self.found = {str(entry.key): entry for entry in self._find()}
        self._check_complete()
        self.notes = list(self._find_notes())
        self._factors: dict[str, dict[str, float]] = {}
        self._by_name = {  # as a checkpoint of AdamW calls them
            str(replace(entry.key, per=Per.SCALAR) if entry.key.kind == STEP else entry.key): entry
            for entry in self.found.values()
        }
        self.entries = {name: TensorEntry(e.dtype, e.shape, ()) for name, e in self._by_name.items()}
        fresh = {"stage": 0, "world_size": len(index.shards), "loss_scale": values.get("loss_scale", [1.0, 0])}
        kept = {name: values[name] for name in ("step", "skipped_steps", "bytes_sent")}
        own = {"class": f"ZeroOptimizer({optimizer})", "param_groups": self.param_groups}
        self.header = Header.of({**own, **fresh, **kept})

    def _decoded(self, tensor: StateTensor, files: ShardFiles) -> Iterator[Tensor]:
        """All ranks read the same."""
        entry = self._by_name.get(str(tensor.key))
        if entry is None:
            raise ValueError(f"the checkpoint has no tensor {str(tensor.key)!r}")
        return self.read_parts(entry, files, tensor.start, tensor.stop)

    def read_parts(self, entry: Entry, files: ShardFiles, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """Read elements [start, stop) of a tensor, flattened, in parts of a few MiB in order."""
        stop = prod(entry.shape) if stop is None else stop
        if (factors := self._factors.get(entry.key.owner)) is None:
            factors = self._factors[entry.key.owner] = self._factors_of(entry, files)
        factor = factors[entry.key.kind]
        if entry.stored is None:
            yield torch.tensor([factor], dtype=torch.float32, device="cpu")[start:stop]
            return
        for part in self._parts(entry.stored, files, start, stop):
            yield part if factor == 1 else part.mul_(factor)

    def _parts(self, stored: StateTensor, files: ShardFiles, start: int, stop: int) -> Iterator[Tensor]:
        """Read elements of a tensor as it was saved, or decoded, or of the mean of each rank's own."""
        if str(stored.key) not in self.index.tensors:
            yield from self._compact.moment_parts(replace(stored, start=start, stop=stop), files)
            return
        dtype: torch.dtype = getattr(torch, stored.dtype)
        wanted = replace(stored, start=start, stop=stop)
        plan = plan_reads(self.index, wanted, 0 if stored.of_each_rank else len(self.index.shards))
        for window in plan.windows(self.index.block_bytes):
            part = torch.empty(window.nbytes // dtype.itemsize, dtype=dtype, device="cpu")
            fill(part, window, files, self.index)
            yield part

    # -- what is there ------------------------------------------------------------------------------------------------

    def _find(self) -> Iterator[Entry]:
        for group, parameters in enumerate(self.index.parameters):
            for place, parameter in enumerate(parameters):
                name, shape = parameter["name"], tuple(parameter["shape"])
                found = []
                for kind, name_of_adamw in _ELEMENTWISE.items():
                    stored = self._stored(kind, name, shape) or self._compact.moment(kind, name, group, shape)
                    if stored is not None and (name_of_adamw or kind) not in found:
                        found.append(name_of_adamw or kind)
                        yield Entry(TensorKey(found[-1], name), group, place, stored.dtype, shape, stored)
                if set(found) - {MASTER}:
                    yield Entry(TensorKey(STEP, name), group, place, "float32", ())

    def _stored(self, kind: str, name: str, shape: tuple[int, ...]) -> StateTensor | None:
        own = self._is_own(kind, name)
        key = TensorKey(kind, name, rank=0 if own else None)
        entry = self.index.tensors.get(str(key))
        return None if entry is None else StateTensor(key, entry.dtype, shape, 0, prod(shape), of_each_rank=own)

    def _is_own(self, kind: str, name: str) -> bool:
        """Return whether each rank has such a tensor of its own; parameters may be called "w" and "rank0/w"."""
        if not self.saved.compressed or str(TensorKey(kind, name, rank=0)) not in self.index.tensors:
            return False
        found = re.fullmatch(r"rank\d+/(.*)", name, re.DOTALL)
        of_another = found is not None and found[1] in self._names and self._is_own(kind, found[1])
        return of_another or str(TensorKey(kind, name)) not in self.index.tensors

    def _check_complete(self) -> None:
        known = {
            str(entry.stored.key.of_rank(rank) if entry.stored.of_each_rank else entry.stored.key)
            for entry in self.found.values()
            if entry.stored is not None
            for rank in range(len(self.index.shards))
        }
        known |= {str(TensorKey(CODE, entry.key.owner)) for entry in self.found.values()}
        for name in self.index.tensors:
            if name.startswith(("exp_avg/", f"{CODE}/")) and name not in known:
                raise ValueError(
                    f"it has {name!r}, of a param group with a process_group of its own: only some of the ranks hold "
                    "such parameters, and no one state dict of AdamW has them all"
                )
        for entry in self.found.values():
            name = entry.key.owner
            missing = [kind for kind in MOMENTS if str(TensorKey(kind, name)) not in self.found]
            if entry.stored is None and missing:
                raise ValueError(f"it has no {missing[0]} of {name!r}, so it is not a state of Adam")
            if entry.stored is None and self._stored_step(entry) is None:
                raise ValueError(f"it has no step of {name!r}, so it is not a state of Adam")

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        decoupled = group.get("decoupled_weight_decay", group.get("adam_w_mode", self.saved.optimizer != "Adam"))
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
        if any(entry.stored is not None and entry.stored.of_each_rank for entry in self.found.values()):
            yield "inside a local interval each rank has a momentum of its own: the mean over the ranks is taken"
        if any(name.startswith("worker_error/") for name in self.index.tensors):
            yield "the error feedback is left out: AdamW has none"
        if any(group.get("eps_inside_sqrt") for group in self._groups):
            yield "eps_inside_sqrt is left out: AdamW adds eps to the square root"
        if any(name.startswith("exp_avg_mask/") for name in self.index.tensors):
            yield "exp_avg_mask is left out: AdamW has none"
        if any(not group["decoupled_weight_decay"] for group in self.param_groups):
            yield "the weight decay is L2 regularization: continue with torch.optim.Adam"

    # -- factors ------------------------------------------------------------------------------------------------------

    def _factors_of(self, entry: Entry, files: ShardFiles) -> dict[str, float]:
        """Return the factor of each kind of tensor of an entry's parameter, and the parameter's step."""
        factors = {name or kind: 1.0 for kind, name in _ELEMENTWISE.items()}
        group = self._groups[entry.group]
        stored = self._stored_step(entry)
        if stored is None:  # a master copy alone
            return factors
        step = updates = self._number(*stored, files)
        if (counted := str(TensorKey("variance_steps", group=entry.group))) in self.index.tensors:
            updates = self._number(counted, entry.place, files)
        switched = self._switched(group)
        if switched and not self._any(self.found[str(TensorKey("exp_avg_sq", entry.key.owner))].stored, files):
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
        """Return whether the bias corrections of this group are part of its moments."""
        if not self.saved.compressed or group.get("non_freeze"):
            return False
        schedule = self.index.header["schedule"]
        freeze_step = schedule["freeze_step" if "freeze_step" in schedule else "var_freeze_step"]
        return isinstance(freeze_step, int) and self.index.header["step"] >= freeze_step

    def _stored_step(self, entry: Entry) -> tuple[str, int] | None:
        if self.saved.compressed:
            return str(TensorKey(STEP, group=entry.group)), entry.place
        names = (str(TensorKey(STEP, entry.key.owner, per=per)) for per in (Per.SCALAR, Per.NUMBER))
        return next(((name, 0) for name in names if name in self.index.tensors), None)

    def _number(self, name: str, place: int, files: ShardFiles) -> float:
        entry = self.index.tensors.get(name)
        if entry is None:
            raise ValueError(f"the checkpoint has no tensor {name!r}")
        stored = StateTensor(TensorKey.parse(name), entry.dtype, entry.shape, 0, entry.numel)
        (value,) = self._parts(stored, files, place, place + 1)
        return float(value)

    def _any(self, stored: StateTensor | None, files: ShardFiles) -> bool:
        return stored is not None and any(bool(part.any()) for part in self._parts(stored, files, 0, stored.stop))


def source_of(index: CheckpointIndex, optimizer: str, groups: Sequence[dict[str, Any]]) -> Stored:
    """Return a checkpoint as an optimizer loads it: as its own class saved it, or else as AdamW's state."""
    stored = Stored(index)
    saved, to_compressed = stored.header.optimizer, optimizer in COMPRESSED
    if saved == optimizer or (stored.header.compressed and to_compressed):
        return stored
    if saved not in (*PLAIN, *COMPRESSED) or optimizer not in (*PLAIN, *COMPRESSED):
        return stored
    view = AdamView(index, "AdamW" if to_compressed else optimizer)
    for number, (found, group) in enumerate(zip(view.param_groups, groups, strict=False)):
        own = group.get("decoupled_weight_decay", group.get("adam_w_mode", optimizer != "Adam"))
        if found["weight_decay"] != 0 and found["decoupled_weight_decay"] != own:
            raise ValueError(
                f"the weight decay of param group {number}, {found['weight_decay']}, is "
                f"{'decoupled' if found['decoupled_weight_decay'] else 'L2 regularization'} in the checkpoint, and not "
                f"in {optimizer}"
            )
    return view
