"""A checkpoint as it was saved, and as the state of AdamW that it stands for, whichever optimizer saved it.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_compressopt.checkpoint.state import COMPRESSED, PLAIN, Header
from hf_compressopt.collectives.errors import values_of
from hf_compressopt.flat import chunk_range
from hf_compressopt.format.index import CheckpointIndex, TensorEntry
from hf_compressopt.format.plan import MASTER, Per, Plan, Read, StateTensor, TensorKey, plan_reads
from hf_compressopt.format.shards import ShardFiles
from hf_compressopt.kernels import CompactErrors, SignFormat
from hf_compressopt.kernels.compact import ERROR_CODE, check_tops, decode_variance
from hf_compressopt.optim.options import check_count, check_scale_block

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
_ELEMENTWISE = {**dict.fromkeys((*MOMENTS, "max_exp_avg_sq", MASTER)), "master_param": MASTER}
#: Kinds of tensors: codes of the variance, their tops, and messages that are the momentum.
CODE, TOP, MESSAGE = "exp_avg_sq_code", "exp_avg_sq_top", "exp_avg_message"
#: Dtype of what is bytes.
BYTES = "uint8"


# -- values -----------------------------------------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def fill(values: Tensor | None, plan: Plan, files: ShardFiles, index: CheckpointIndex) -> None:
    """Read what a plan says into ``values`` [numel], on any device, or only verify it."""
    if values is None or len(plan.sources) == 1:
        for reads in plan.sources:
            _read_source(values, reads, files)
        return
    start = 0
    for part in parts_of(plan, values.dtype, files, index):
        values[start : start + part.numel()] = part
        start += part.numel()


def parts_of(plan: Plan, dtype: torch.dtype, files: ShardFiles, index: CheckpointIndex) -> Iterator[Tensor]:
    """Read what a plan says in parts of a few MiB, in order. A mean is summed in float64, in rank order."""
    for window in plan.windows(index.block_bytes):
        part = torch.zeros(window.nbytes // dtype.itemsize, dtype=dtype, device="cpu")
        mean = torch.zeros(part.numel(), dtype=torch.float64, device="cpu") if len(window.sources) > 1 else None
        for reads in window.sources:
            _read_source(part, reads, files)
            if mean is not None:
                mean += part
        yield part if mean is None else mean.div_(len(window.sources)).to(dtype)


def _read_source(values: Tensor | None, reads: Sequence[Read], files: ShardFiles) -> None:
    for read in reads:
        out = None if values is None else values.view(torch.uint8)[read.offset : read.offset + read.end - read.begin]
        memory = out.numpy().data if out is not None and out.device.type == "cpu" else None
        for begin, part in files[read.piece.shard].blocks(read.piece, read.entry, read.begin, read.end, memory):
            if out is not None and memory is None:
                offset = begin - read.begin
                out[offset : offset + len(part)] = torch.frombuffer(part, dtype=torch.uint8)


# -- as it was saved --------------------------------------------------------------------------------------------------


class Stored:
    """A checkpoint as it was saved: its index, header, and tensors by name. Compact ones are decoded part by part."""

    header: Header
    entries: Mapping[str, TensorEntry]

    def __init__(self, index: CheckpointIndex) -> None:
        self.index, self.header, self.entries = index, Header.of(index.header), index.tensors
        self._ranks = len(index.shards)
        self._recent: tuple[int, int, Tensor] | None = None  # the part of a momentum that was decoded last
        self.places: dict[str, tuple[int, int, int]] = {}  # of parameters: group, place and first element in it
        for group, parameters in enumerate(index.parameters):
            starts = accumulate((prod(parameter["shape"]) for parameter in parameters), initial=0)
            for place, (parameter, start) in enumerate(zip(parameters, starts, strict=False)):
                self.places.setdefault(parameter["name"], (group, place, start))

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

    def _decoded(self, tensor: StateTensor, files: ShardFiles) -> Iterator[Tensor] | None:
        """Return the elements of a tensor that is not read as it was saved: a float32 error that lies in messages."""
        entry = self.index.tensors.get(str(tensor.key.of_rank(0) if tensor.of_each_rank else tensor.key))
        in_bytes = tensor.is_error and tensor.dtype == "float32" and entry is not None and entry.dtype == BYTES
        return self._error_parts(tensor, files) if in_bytes else None

    def _error_parts(self, wanted: StateTensor, files: ShardFiles) -> Iterator[Tensor]:
        """Yield the elements of an error in order, [n] float32 each: the mean of all ranks' if each has its own."""
        (numel,), keys = wanted.shape, [wanted.key]
        if wanted.of_each_rank:
            keys = [wanted.key.of_rank(rank) for rank in range(self._ranks)]
        nbytes_of = partial(CompactErrors.nbytes, world_size=self._ranks)
        whole = self._place_of(numel, numel, nbytes_of)
        for bucket, count in self._buckets(numel, wanted.start, wanted.stop):
            byte = self._place_of(bucket, numel, nbytes_of)
            for rank, nbytes in enumerate(ERROR_CODE.chunk_nbytes(count, self._ranks)):
                first, last = (bucket + place for place in chunk_range(count, self._ranks, rank))
                low, high = max(first, wanted.start), min(last, wanted.stop)
                if low < high:
                    total = torch.zeros(high - low, dtype=torch.float64, device="cpu")
                    for key in keys:
                        message = self._bytes(key, whole, byte, byte + nbytes, files)
                        total += values_of(CompactErrors(message, last - first))[low - first : high - first]
                    yield total.div_(len(keys)).float()
                byte += nbytes

    def _variance_parts(self, wanted: StateTensor, files: ShardFiles) -> Iterator[Tensor]:
        """Yield the elements of a second moment that lies in codes, in order, [n] float32 each."""
        group, place, _ = self.places[wanted.key.owner]
        described = (len(self.index.parameters[group]),), place, place + 1
        top = torch.cat([*self._parts(StateTensor(TensorKey(TOP, group=group), "int32", *described), files)])
        check_tops(top)
        codes = replace(wanted, key=TensorKey(CODE, wanted.key.owner), dtype=BYTES)
        for part in self._parts(codes, files):
            yield decode_variance(part, top)

    def _momentum_parts(self, wanted: StateTensor, files: ShardFiles) -> Iterator[Tensor]:
        """Yield the elements of a first moment that lies in messages, in order, [n] float32 each."""
        group, _, start = self.places[wanted.key.owner]
        low, high = start + wanted.start, start + wanted.stop
        numel = sum(prod(parameter["shape"]) for parameter in self.index.parameters[group])
        for first, count in self._buckets(numel, low, high):
            values = self._momentum(group, first, count, numel, files)
            yield values[max(low - first, 0) : high - first].clone()

    def _momentum(self, group: int, first: int, count: int, numel: int, files: ShardFiles) -> Tensor:
        if self._recent is None or self._recent[:2] != (group, first):
            start, stop, whole = (self._place_of(n, numel, self._message_nbytes) for n in (first, first + count, numel))
            messages = self._bytes(TensorKey(MESSAGE, group=group), whole, start, stop, files)
            form, values = SignFormat(self._scale_block), torch.empty(count, dtype=torch.float32, device="cpu")
            form.decompress_(form.average(count, messages, self._ranks, (stop - start) // self._ranks), values)
            self._recent = group, first, values
        return self._recent[2]

    def _bytes(self, key: TensorKey, whole: int, start: int, stop: int, files: ShardFiles) -> Tensor:
        found = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        wanted = StateTensor(key, BYTES, (whole,), start, stop)
        fill(found, plan_reads(self.index, wanted, self._ranks), files, self.index)
        return found

    def _parts(self, wanted: StateTensor, files: ShardFiles) -> Iterator[Tensor]:
        """Read a tensor, of which all ranks read the same, as it was saved; the mean if each rank has its own."""
        plan = plan_reads(self.index, wanted, 0 if wanted.of_each_rank else self._ranks)
        return parts_of(plan, getattr(torch, wanted.dtype), files, self.index)

    @property
    def _bucket_numel(self) -> int:
        numel: int = self.index.header["bucket_numel"]
        check_count("bucket_numel", numel)
        return numel

    @property
    def _scale_block(self) -> int | None:
        block: int | None = self.index.header["scale_block"]
        check_scale_block(block)
        return block

    def _buckets(self, numel: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the first element and the elements of the buckets that hold the elements [start, stop)."""
        size = self._bucket_numel
        for first in range(start // size * size, stop, size) if start < stop else ():
            yield first, min(size, numel - first)

    def _place_of(self, element: int, numel: int, nbytes_of: Callable[[int], int]) -> int:
        """Return the byte at which the bucket that begins with an element begins, or at which the last one ends."""
        size = min(self._bucket_numel, numel)
        full, rest = divmod(element, size) if size else (0, 0)
        return full * nbytes_of(size) + nbytes_of(rest)

    def _message_nbytes(self, numel: int) -> int:
        return self._ranks * SignFormat(self._scale_block).chunk_nbytes(numel, self._ranks)[0]


# -- as one of AdamW -------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A tensor of AdamW's state: "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master" or "step" of a parameter."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]  # () for a step
    stored: StateTensor | None = None  # the whole tensor in the checkpoint; None for a step


class AdamView(Stored):
    """A checkpoint as one of AdamW, for an optimizer of Adam's family that did not save it."""

    def __init__(self, index: CheckpointIndex, optimizer: str = "AdamW") -> None:
        super().__init__(index)
        self.saved, values = self.header, index.header
        if self.saved.optimizer not in (COMPRESSED if self.saved.compressed else PLAIN):
            raise ValueError(
                f"it was saved by {self.saved.title}, which keeps no moments of Adam; supported are "
                f"{', '.join((*COMPRESSED, *PLAIN))}"
            )
        self._groups = self.saved.param_groups(len(index.parameters))
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
        for part in self._moment_parts(replace(entry.stored, start=start, stop=stop), files):
            yield part if factor == 1 else part.mul_(factor)

    def _moment_parts(self, wanted: StateTensor, files: ShardFiles) -> Iterator[Tensor]:
        if str(wanted.key) in self.index.tensors:
            return self._parts(wanted, files)
        return (self._variance_parts if wanted.key.kind == "exp_avg_sq" else self._momentum_parts)(wanted, files)

    # -- what is there ------------------------------------------------------------------------------------------------

    def _find(self) -> Iterator[Entry]:
        for group, parameters in enumerate(self.index.parameters):
            for parameter in parameters:
                name, shape = parameter["name"], tuple(parameter["shape"])
                found = []
                for kind, name_of_adamw in _ELEMENTWISE.items():
                    stored = self._stored(kind, name, group, shape)
                    if stored is not None and (name_of_adamw or kind) not in found:
                        found.append(name_of_adamw or kind)
                        yield Entry(TensorKey(found[-1], name), stored.dtype, shape, stored)
                if set(found) - {MASTER}:
                    yield Entry(TensorKey(STEP, name), "float32", ())

    def _stored(self, kind: str, name: str, group: int, shape: tuple[int, ...]) -> StateTensor | None:
        own = self._is_own(kind, name)
        key = TensorKey(kind, name, rank=0 if own else None)
        compact = {"exp_avg": TensorKey(MESSAGE, group=group), "exp_avg_sq": TensorKey(CODE, name)}.get(kind)
        if (entry := self.index.tensors.get(str(key))) is not None:
            return StateTensor(key, entry.dtype, shape, 0, prod(shape), of_each_rank=own)
        in_compact_form = compact is not None and str(compact) in self.index.tensors
        return StateTensor(TensorKey(kind, name), "float32", shape, 0, prod(shape)) if in_compact_form else None

    def _is_own(self, kind: str, name: str) -> bool:
        """Return whether each rank has such a tensor of its own; parameters may be called "w" and "rank0/w"."""
        if not self.saved.compressed or str(TensorKey(kind, name, rank=0)) not in self.index.tensors:
            return False
        found = re.fullmatch(r"rank\d+/(.*)", name, re.DOTALL)
        of_another = found is not None and found[1] in self.places and self._is_own(kind, found[1])
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
        number, place, _ = self.places[entry.key.owner]
        group = self._groups[number]
        stored = self._stored_step(entry)
        if stored is None:  # a master copy alone
            return factors
        step = updates = self._number(*stored, files)
        if (counted := str(TensorKey("variance_steps", group=number))) in self.index.tensors:
            updates = self._number(counted, place, files)
        switched = self._switched(group)
        variance = self.found[str(TensorKey("exp_avg_sq", entry.key.owner))].stored if switched else None
        if variance is not None and not any(bool(part.any()) for part in self._moment_parts(variance, files)):
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
        if not self.saved.compressed or group.get("non_freeze"):
            return False
        schedule = self.index.header["schedule"]
        freeze_step = schedule["freeze_step" if "freeze_step" in schedule else "var_freeze_step"]
        return isinstance(freeze_step, int) and self.index.header["step"] >= freeze_step

    def _stored_step(self, entry: Entry) -> tuple[str, int] | None:
        if self.saved.compressed:
            group, place, _ = self.places[entry.key.owner]
            return str(TensorKey(STEP, group=group)), place
        names = (str(TensorKey(STEP, entry.key.owner, per=per)) for per in (Per.SCALAR, Per.NUMBER))
        return next(((name, 0) for name in names if name in self.index.tensors), None)

    def _number(self, name: str, place: int, files: ShardFiles) -> float:
        entry = self.index.tensors.get(name)
        if entry is None:
            raise ValueError(f"the checkpoint has no tensor {name!r}")
        wanted = StateTensor(TensorKey.parse(name), entry.dtype, entry.shape, place, place + 1)
        (value,) = self._parts(wanted, files)
        return float(value)


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
