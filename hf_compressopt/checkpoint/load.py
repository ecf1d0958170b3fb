"""Loads: the ranks agree on an index, check that it fits, and read their tensors, verified.

A checkpoint is read as it was saved, or as the state of AdamW that it stands for, whichever optimizer saved it. AdamW
divides its moments by bias corrections. The moments of a checkpoint are scaled so that this division gives what the run
itself used. With t the steps of a parameter:
    m <- m (1 - b1^t) / c1,  v <- v (1 - b2^t) / c2
Here c1 and c2 are the corrections that the run applies. In its warmup stage they are 1 - b1^t, and 1 - b2^n after n
updates of the variance. They are 1 if the corrections are part of the moments (after the switch) or off. In
full-precision steps both factors are 1, and the moments keep their bits. A tensor that is each rank's own, such as 0/1
Adam's momentum inside a local interval, becomes the mean over the ranks. A parameter that has no variance after the
switch does not move in the run, and is a new one for AdamW.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.checkpoint.state import (
    COMPRESSED,
    PLAIN,
    Entries,
    FSDPState,
    Header,
    Names,
    State,
)
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.feedback import values_of
from hf_compressopt.collectives.topology import FLAT, TWO_LEVELS
from hf_compressopt.flat import FlatLayout, chunk_range
from hf_compressopt.format.index import (
    BY_PLACE,
    INDEX_NAME,
    NODE_SIZE,
    CheckpointError,
    CheckpointIndex,
    TensorEntry,
    errors_naming,
    name_by_place,
)
from hf_compressopt.format.plan import MASTER, Kind, Per, Plan, Read, StateTensor, TensorKey, plan_reads
from hf_compressopt.format.shards import ShardFiles, absent_shards, not_whole, progress
from hf_compressopt.kernels import Average, CompactErrors, SignFormat
from hf_compressopt.kernels.compact import ERROR_FORMAT, check_tops, decode_variance
from hf_compressopt.kernels.memory import flat_view, is_direct
from hf_compressopt.kernels.messages import travels_beside_signs
from hf_compressopt.optim.moments import MOMENTS
from hf_compressopt.optim.options import check_count, check_scale_block
from hf_compressopt.optim.state import IN_FULL

logger = logging.getLogger(__name__)

_ELEMENTWISE = {**dict.fromkeys((*MOMENTS, "max_exp_avg_sq", MASTER)), "master_param": MASTER}


class Part(NamedTuple):
    """One checkpoint of those that a load reads together: its prefix, and the state that it is of."""

    state: State
    optimizer: torch.optim.Optimizer
    names: Sequence[str] | None
    prefix: str


class _Checked(NamedTuple):
    """A checkpoint of which all that this rank reads is verified."""

    state: State
    source: Stored
    path: Path
    tensors: Sequence[StateTensor]
    commit: Callable[[], None]


def load(parts: Sequence[Part], folder: Path) -> None:
    """Read checkpoints of one folder into their states, when all of them are verified. All ranks call."""
    with ExitStack() as opened:  # the files stay open, so that what is read is what was checked
        checked = [_check(part, folder, opened) for part in parts]
        for each in checked:
            each.state.communicator.run_together(partial(_read, each), others=CheckpointError)
    for each in checked:
        each.state.communicator.run_together(partial(_commit, each), others=CheckpointError)
        _warn_of_topology(each.source.header, each.state)


def _check(part: Part, folder: Path, opened: ExitStack) -> _Checked:
    """Verify what this rank reads of a checkpoint, whose files stay open. All ranks call."""
    state, optimizer, names, prefix = part
    ranks = state.communicator
    index, path = _agreed_index(ranks, folder / INDEX_NAME.format(prefix=prefix))
    absent = absent_shards(folder, index)
    places = ranks.all_gather_object((gethostname(), str(folder.absolute()), list(absent.items())))

    def check() -> _Checked:
        with errors_naming(path):
            by_place = index.header.get(BY_PLACE)
            grouped = _names_by_place(state, optimizer) if by_place else state.parameter_names(names)
            out_of_reach = {
                number: _out_of_reach(number, problem, index.shards[number].file, places, ranks.rank)
                for number, problem in absent.items()
            }
            files = opened.enter_context(ShardFiles(folder, index, out_of_reach))
            source = source_of(index, files, _class_of(optimizer), optimizer.param_groups)
            _check_model(state, index, grouped)
            tensors, commit = state.plan_load(grouped, source.header, source.entries)
            for tensor in _shown("checking", path, tensors, ranks):
                source.check(tensor, ranks.world_size)
        return _Checked(state, source, path, tensors, commit)

    return ranks.run_together(check, others=CheckpointError)


@torch.no_grad()
def _read(checked: _Checked) -> None:
    """Read everything once more, from the system's cache if it is still there, into the tensors."""
    state, source, path, tensors, _ = checked
    communicator = state.communicator
    try:
        for tensor in _shown("loading", path, tensors, communicator):
            local = tensor.local.detach()
            direct = is_direct(local)
            values = flat_view(local) if direct else torch.empty(local.numel(), dtype=local.dtype, device="cpu")
            source.read(tensor, communicator.world_size, values)
            if not direct:
                local.copy_(values.view(local.shape))
    except Exception as error:
        told = error if isinstance(error, CheckpointError) else f"{path}: {type(error).__name__}: {error}"
        raise CheckpointError(
            f"{told}: the first check found no error, and now the state is half loaded; load again"
        ) from error


def _commit(checked: _Checked) -> None:
    with errors_naming(checked.path):  # an optimizer's own load_state_dict may refuse what the index says
        checked.commit()


def _shown(doing: str, path: Path, tensors: Sequence[StateTensor], communicator: Communicator) -> Iterator[StateTensor]:
    """Yield the tensors, and show on rank 0 how many bytes of them were dealt with."""
    shown = None if communicator.rank == 0 else False
    with progress(f"{doing} {path.name}", sum(tensor.local.nbytes for tensor in tensors), shown=shown) as advance:
        for tensor in tensors:
            yield tensor
            advance(tensor.local.nbytes)


def _warn_of_topology(header: Header, state: State) -> None:
    """Warn of a checkpoint of another topology, which has other bits."""
    ranks, saved = state.communicator, header.values.get(NODE_SIZE, 1)
    alike = header.title == Header.of(state.header()).title and header.values.get("world_size") == ranks.world_size
    if alike and not isinstance(state, FSDPState) and saved != ranks.topology.node_size and ranks.rank == 0:
        logger.warning(
            "the checkpoint was saved with a node_size of %s, and this run has %d: the run is resumed, but not bit for "
            "bit. For equal bits give topology='%s'",
            saved,
            ranks.topology.node_size,
            FLAT if saved == 1 else TWO_LEVELS,
        )


def _agreed_index(communicator: Communicator, path: Path) -> tuple[CheckpointIndex, Path]:
    """Return the index of the same save on all ranks, and its file."""
    index = communicator.run_together(lambda: CheckpointIndex.read(path), others=CheckpointError)
    saves = communicator.all_gather_object(index.save_id)
    if len(set(saves)) == 1:
        return index, path
    at_hand = {index.save_id: (index, path)}
    aside = path.with_suffix(".tmp")
    with suppress(CheckpointError):
        index = CheckpointIndex.read(aside)
        at_hand[index.save_id] = (index, aside)
    everywhere = set.intersection(*map(set, communicator.all_gather_object(list(at_hand))))
    for save in saves:
        if save in everywhere:
            return at_hand[save]
    hosts = communicator.all_gather_object(gethostname())
    told = [
        f"rank {rank} on {host} has save {save}" for rank, (host, save) in enumerate(zip(hosts, saves, strict=True))
    ]
    raise CheckpointError(f"{path} is of different saves: {', '.join(told)}; bring together the files of one save")


def _out_of_reach(number: int, problem: str, file: str, places: Sequence[tuple[str, str, Any]], rank: int) -> str:
    for other, (host, folder, absent) in enumerate(places):
        if number not in dict(absent):
            return (
                f"{problem}: rank {rank} on {places[rank][0]} needs it, and rank {other} on {host} has "
                f"{Path(folder, file)}: copy it, or start the ranks on the machines on which they were when it was "
                "saved"
            )
    raise not_whole(problem)


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    cls = getattr(optimizer, "optimizer_class", type(optimizer))
    known = cls.__module__.startswith(("torch.optim.", "hf_compressopt."))
    return cls.__name__ if known else f"{cls.__module__}.{cls.__name__}"


def _names_by_place(state: State, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the trainable parameters of each param group by their places, as for :data:`BY_PLACE`."""
    names = []
    for number, (group, params) in enumerate(zip(optimizer.param_groups, state.params, strict=True)):
        places = {param: place for place, param in enumerate(group["params"])}
        names.append([name_by_place(number, places[param]) for param in params])
    return names


def _check_model(state: State, index: CheckpointIndex, names: Names) -> None:
    saved_ranks = index.header["world_size"]
    if saved_ranks != len(index.shards):
        raise ValueError(f"it was saved by {saved_ranks!r} rank(s) and has {len(index.shards)} shard(s)")
    present, by_place = state.described(names), index.header.get(BY_PLACE)
    counts = [list(map(len, groups)) for groups in (index.parameters, present)]
    if len(counts[0]) != len(counts[1]) if by_place else counts[0] != counts[1]:
        raise ValueError(
            f"it is of another model: its param groups have {counts[0]} trainable parameters, this optimizer's "
            f"{counts[1]}"
        )
    for saved, ours in zip(index.parameters, present, strict=True):
        if by_place:  # others have no saved state, and start from zero
            shapes = {parameter["name"]: parameter["shape"] for parameter in ours}
            for name, shape in ((parameter["name"], parameter["shape"]) for parameter in saved):
                if (here := shapes.get(name, "is not trainable, or not there")) != shape:
                    raise ValueError(
                        f"it is of another model: its parameter {name} has shape {shape}, this optimizer's {here}"
                    )
            continue
        for theirs, here in zip(saved, ours, strict=True):
            if theirs != here:
                raise ValueError(
                    f"it is of another model: it has the parameter {theirs} in the place of this optimizer's {here}"
                )


# -- as it was saved --------------------------------------------------------------------------------------------------


class Stored:
    """A checkpoint as it was saved: its index, header, and tensors by name. Compact ones are decoded part by part."""

    header: Header
    entries: Entries

    def __init__(self, index: CheckpointIndex, files: ShardFiles) -> None:
        self.index = index
        self.header = Header.of(index.header)
        self.entries = index.tensors
        self._files, self._ranks = files, len(index.shards)
        self._recent: tuple[int, int, Tensor] | None = None  # the part of a momentum that was decoded last
        self.places: dict[str, tuple[int, int, int]] = {}  # of parameters: group, place and first element in it
        for group, parameters in enumerate(index.parameters):
            starts = self._layout_of(group).starts
            for place, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
                self.places.setdefault(parameter["name"], (group, place, start))

    def _layout_of(self, group: int) -> FlatLayout:
        """Return the places of the parameters of a group in its flat buffer; buckets do not matter."""
        shapes = [parameter["shape"] for parameter in self.index.parameters[group]]
        in_full = self.index.header.get(IN_FULL)
        known = isinstance(in_full, list) and group < len(in_full) and in_full[group]
        scale_block = self.index.header.get("scale_block") if known else None
        check_scale_block(scale_block)
        beside = [travels_beside_signs(shape, scale_block) for shape in shapes]
        return FlatLayout.build([*map(prod, shapes)], max(1, sum(map(prod, shapes))), beside)

    def check(self, tensor: StateTensor, world_size: int) -> None:
        """Verify what :meth:`read` reads, and that no other value of it is one that no run could have saved."""
        tops = torch.empty_like(tensor.local, device="cpu") if tensor.key.kind == Kind.TOP else None
        self.read(tensor, world_size, tops)
        if tops is not None:
            check_tops(tops)

    def read(self, tensor: StateTensor, world_size: int, out: Tensor | None) -> None:
        """Read what one of ``world_size`` ranks reads into ``out``, flattened, on any device, or only verify it."""
        if (parts := self._decoded(tensor)) is not None:
            _put(out, parts)
        else:
            self._fill(out, plan_reads(self.index, tensor, world_size))

    def _decoded(self, tensor: StateTensor) -> Iterator[Tensor] | None:
        """Return the elements of a tensor that is not read as it was saved: a float32 error that lies in messages."""
        entry = self.index.tensors.get(str(tensor.key.of_rank(0) if tensor.of_each_rank else tensor.key))
        in_bytes = tensor.is_error and tensor.dtype == "float32" and entry is not None and entry.dtype == "uint8"
        return self._error_parts(tensor) if in_bytes else None

    def _error_parts(self, tensor: StateTensor) -> Iterator[Tensor]:
        """Yield the elements of an error in order, [n] float32 each: the mean of all ranks' if each has its own."""
        (numel,), keys = tensor.shape, [tensor.key]
        if tensor.of_each_rank:
            keys = [tensor.key.of_rank(rank) for rank in range(self._ranks)]
        for bucket, count, byte, whole in self._buckets(
            numel, tensor.start, tensor.stop, partial(CompactErrors.nbytes, world_size=self._ranks)
        ):
            for rank, nbytes in enumerate(ERROR_FORMAT.chunk_nbytes(count, self._ranks)):
                first, last = (bucket + place for place in chunk_range(count, self._ranks, rank))
                low, high = max(first, tensor.start), min(last, tensor.stop)
                if low < high:
                    total = torch.zeros(high - low, dtype=torch.float64, device="cpu")
                    for key in keys:
                        message = self._bytes(key, whole, byte, byte + nbytes)
                        total += values_of(CompactErrors(message, last - first))[low - first : high - first]
                    yield total.div_(len(keys)).float()
                byte += nbytes

    def _variance_parts(self, tensor: StateTensor) -> Iterator[Tensor]:
        """Yield the elements of a second moment that lies in codes, in order, [n] float32 each."""
        group, place, _ = self.places[tensor.key.owner]
        described = (len(self.index.parameters[group]),), place, place + 1
        top = torch.cat([*self._parts(StateTensor(TensorKey(Kind.TOP, group=group), "int32", *described))])
        check_tops(top)
        for part in self._parts(replace(tensor, key=TensorKey(Kind.CODE, tensor.key.owner), dtype="uint8")):
            yield decode_variance(part, top)

    def _momentum_parts(self, tensor: StateTensor) -> Iterator[Tensor]:
        """Yield the elements of a first moment that lies in messages, in order, [n] float32 each."""
        scale_block: int | None = self.index.header["scale_block"]
        check_scale_block(scale_block)
        form, ranks = SignFormat(scale_block), self._ranks

        def nbytes_of(count: int) -> int:
            return ranks * form.chunk_nbytes(count, ranks)[0]

        group, _, start = self.places[tensor.key.owner]
        low, high = start + tensor.start, start + tensor.stop
        numel = self._layout_of(group).in_messages.numel
        for first, count, byte, whole in self._buckets(numel, low, high, nbytes_of):
            if self._recent is None or self._recent[:2] != (group, first):
                values, nbytes = torch.empty(count, dtype=torch.float32, device="cpu"), nbytes_of(count)
                messages = self._bytes(TensorKey(Kind.MESSAGE, group=group), whole, byte, byte + nbytes)
                average = Average(count, form, messages, ranks, nbytes // ranks)
                kernels.on(values).decompress_(average, values)
                self._recent = group, first, values
            yield self._recent[2][max(low - first, 0) : high - first].clone()

    def _buckets(
        self, numel: int, start: int, stop: int, nbytes_of: Callable[[int], int]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield the buckets that hold the elements [start, stop) of a group, whose messages have so many bytes.

        They are given as first element, elements and first byte; the fourth number is the bytes of all buckets.
        """
        size: int = self.index.header["bucket_numel"]
        check_count("bucket_numel", size)
        size = min(size, numel)
        whole = numel // size * nbytes_of(size) + nbytes_of(numel % size) if size else 0
        if start < stop:
            for first in range(start // size * size, stop, size):
                yield first, min(size, numel - first), first // size * nbytes_of(size), whole

    def _bytes(self, key: TensorKey, whole: int, start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        self._fill(values, plan_reads(self.index, StateTensor(key, "uint8", (whole,), start, stop), self._ranks))
        return values

    def _parts(self, tensor: StateTensor) -> Iterator[Tensor]:
        """Read a tensor, of which all ranks read the same, as it was saved; the mean if each rank has its own."""
        plan = plan_reads(self.index, tensor, 0 if tensor.of_each_rank else self._ranks)
        return self._parts_of(plan, getattr(torch, tensor.dtype))

    def _fill(self, values: Tensor | None, plan: Plan) -> None:
        """Read what a plan says into ``values`` [numel], on any device, or only verify it."""
        if values is None or len(plan.sources) == 1:
            for reads in plan.sources:
                self._read_source(values, reads)
        else:
            _put(values, self._parts_of(plan, values.dtype))

    def _parts_of(self, plan: Plan, dtype: torch.dtype) -> Iterator[Tensor]:
        """Read what a plan says in parts of a few MiB, in order. A mean is summed in float64, in rank order."""
        for window in plan.windows(self.index.block_bytes):
            part = torch.zeros(window.nbytes // dtype.itemsize, dtype=dtype, device="cpu")
            mean = torch.zeros(part.numel(), dtype=torch.float64, device="cpu") if len(window.sources) > 1 else None
            for reads in window.sources:
                self._read_source(part, reads)
                if mean is not None:
                    mean += part
            yield part if mean is None else mean.div_(len(window.sources)).to(dtype)

    def _read_source(self, values: Tensor | None, reads: Sequence[Read]) -> None:
        for read in reads:
            end = read.offset + read.end - read.begin
            out = None if values is None else values.view(torch.uint8)[read.offset : end]
            memory = out.numpy().data if out is not None and out.device.type == "cpu" else None
            file = self._files[read.piece.shard]
            for begin, part in file.blocks(read.piece, read.entry, read.begin, read.end, memory):
                if out is not None and memory is None:
                    offset = begin - read.begin
                    out[offset : offset + len(part)] = torch.frombuffer(part, dtype=torch.uint8)


def _put(values: Tensor | None, parts: Iterable[Tensor]) -> None:
    """Write parts one after another into ``values``, if there are any."""
    start = 0
    for part in parts:
        if values is not None:
            values[start : start + part.numel()] = part
        start += part.numel()


# -- as one of AdamW -------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A tensor of AdamW's state: "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master" or "step" of a parameter."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]  # () for a step
    stored: StateTensor | None = None  # the whole tensor in the checkpoint; None for a step


class AdamView(Stored):
    """A checkpoint as one of AdamW, for an optimizer of Adam's family that did not save it.

    Attributes:
        found: The tensors by kind and parameter, such as "step/weight".
        notes: Sentences about what the checkpoint has and AdamW does not.
    """

    def __init__(self, index: CheckpointIndex, files: ShardFiles, optimizer: str = "AdamW") -> None:
        super().__init__(index, files)
        self.saved, values = self.header, index.header
        if self.saved.optimizer not in (COMPRESSED if self.saved.compressed else PLAIN):
            raise ValueError(
                f"it was saved by {self.saved.title}, which keeps no moments of Adam; supported are "
                f"{', '.join((*COMPRESSED, *PLAIN))}"
            )
        self._groups = self.saved.param_groups(len(index.parameters))
        self.param_groups = [self._hyperparameters(group) for group in self._groups]
        self.found = {f"{entry.key.kind}/{entry.key.owner}": entry for entry in self._find()}
        self._check_complete()
        self.notes = list(self._find_notes())
        self._factors: dict[str, dict[str, float]] = {}
        self._by_name = {str(entry.key): entry for entry in self.found.values()}
        self.entries = {name: TensorEntry(e.dtype, e.shape, ()) for name, e in self._by_name.items()}
        fresh = {"stage": 0, "world_size": len(index.shards), "loss_scale": values.get("loss_scale", [1.0, 0])}
        kept = {name: values[name] for name in ("step", "skipped_steps", "bytes_sent")}
        as_adamw = {"class": f"ZeroOptimizer({optimizer})", "param_groups": self.param_groups}
        self.header = Header.of({**as_adamw, **fresh, **kept})

    def _decoded(self, tensor: StateTensor) -> Iterator[Tensor] | None:
        """All ranks read the same."""
        entry = self._by_name.get(str(tensor.key))
        if entry is None:
            raise ValueError(f"the checkpoint has no tensor {str(tensor.key)!r}")
        return self.read_parts(entry, tensor.start, tensor.stop)

    def read_parts(self, entry: Entry, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """Read elements [start, stop) of a tensor, flattened, in parts of a few MiB in order."""
        stop = prod(entry.shape) if stop is None else stop
        if (factors := self._factors.get(entry.key.owner)) is None:
            factors = self._factors[entry.key.owner] = self._factors_of(entry)
        factor = factors[entry.key.kind]
        if entry.stored is None:
            yield torch.tensor([factor], dtype=torch.float32, device="cpu")[start:stop]
            return
        for part in self._moment_parts(replace(entry.stored, start=start, stop=stop)):
            yield part if factor == 1 else part.mul_(factor)

    def _moment_parts(self, tensor: StateTensor) -> Iterator[Tensor]:
        if str(tensor.key) in self.index.tensors:
            return self._parts(tensor)
        return (self._variance_parts if tensor.key.kind == "exp_avg_sq" else self._momentum_parts)(tensor)

    # -- what is there ------------------------------------------------------------------------------------------------

    def _find(self) -> Iterator[Entry]:
        for group, parameters in enumerate(self.index.parameters):
            for parameter in parameters:
                name, shape = parameter["name"], tuple(parameter["shape"])
                kinds: list[str] = []
                for kind, name_of_adamw in _ELEMENTWISE.items():
                    stored = self._stored(kind, name, group, shape)
                    if stored is not None and (name_of_adamw or kind) not in kinds:
                        kinds.append(name_of_adamw or kind)
                        yield Entry(TensorKey(kinds[-1], name), stored.dtype, shape, stored)
                if set(kinds) - {MASTER}:
                    yield Entry(TensorKey(Kind.STEP, name, per=Per.SCALAR), "float32", ())

    def _stored(self, kind: str, name: str, group: int, shape: tuple[int, ...]) -> StateTensor | None:
        of_each_rank = self._is_own(kind, name)
        key = TensorKey(kind, name, rank=0 if of_each_rank else None)
        compact = {"exp_avg": TensorKey(Kind.MESSAGE, group=group), "exp_avg_sq": TensorKey(Kind.CODE, name)}.get(kind)
        if (entry := self.index.tensors.get(str(key))) is not None:
            return StateTensor(key, entry.dtype, shape, 0, prod(shape), of_each_rank=of_each_rank)
        in_compact_form = compact is not None and str(compact) in self.index.tensors
        return StateTensor(TensorKey(kind, name), "float32", shape, 0, prod(shape)) if in_compact_form else None

    def _is_own(self, kind: str, name: str) -> bool:
        """Return whether each rank has such a tensor of its own; parameters may be called "w" and "rank0/w"."""
        if not self.saved.compressed or str(TensorKey(kind, name, rank=0)) not in self.index.tensors:
            return False
        match = re.fullmatch(r"rank\d+/(.*)", name, re.DOTALL)
        of_another = match is not None and match[1] in self.places and self._is_own(kind, match[1])
        return of_another or str(TensorKey(kind, name)) not in self.index.tensors

    def _check_complete(self) -> None:
        stored = [entry.stored for entry in self.found.values() if entry.stored is not None]
        known = {str(tensor.key) for tensor in stored if not tensor.of_each_rank}
        known |= {str(t.key.of_rank(rank)) for t in stored if t.of_each_rank for rank in range(self._ranks)}
        known |= {str(TensorKey(Kind.CODE, entry.key.owner)) for entry in self.found.values()}
        for name in self.index.tensors:
            if name.startswith(("exp_avg/", f"{Kind.CODE}/")) and name not in known:
                raise ValueError(
                    f"it has {name!r}, of a param group with a process_group of its own: only some of the ranks hold "
                    "such parameters, and no one state dict of AdamW has them all"
                )
        for entry in self.found.values():
            if entry.stored is None:
                name = entry.key.owner
                missing = [kind for kind in MOMENTS if f"{kind}/{name}" not in self.found]
                missing += [] if self._stored_step(entry) else [Kind.STEP]
                if missing:
                    raise ValueError(f"it has no {missing[0]} of {name!r}, so it is not a state of Adam")

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        values = {
            "lr": group["lr"],
            "betas": tuple(group["betas"]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "amsgrad": bool(group.get("amsgrad", False)),
            "maximize": bool(group.get("maximize", False)),
            "decoupled_weight_decay": bool(is_decoupled(group, self.saved.optimizer)),
        }
        if "initial_lr" in group:
            values["initial_lr"] = group["initial_lr"]
        return values

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

    def _factors_of(self, entry: Entry) -> dict[str, float]:
        """Return the factor of each kind of tensor of an entry's parameter, and the parameter's step."""
        factors = {name or kind: 1.0 for kind, name in _ELEMENTWISE.items()}
        number, place, _ = self.places[entry.key.owner]
        group = self._groups[number]
        stored = self._stored_step(entry)
        if stored is None:  # a master copy alone
            return factors
        step = updates = self._number(*stored)
        if (counted := str(TensorKey("variance_steps", group=number))) in self.index.tensors:
            updates = self._number(counted, place)
        switched = self._switched(group)
        variance = self.found[f"exp_avg_sq/{entry.key.owner}"].stored if switched else None
        if variance is not None and not any(bool(part.any()) for part in self._moment_parts(variance)):
            return {**factors, Kind.STEP: 0.0, "exp_avg": 0.0}
        applied = not switched and bool(group.get("bias_correction", True))
        for beta, count, kinds in zip(
            group["betas"], (step, updates), (("exp_avg",), ("exp_avg_sq", "max_exp_avg_sq")), strict=True
        ):
            of_adamw = 1 - beta**step
            of_run = 1 - beta**count if applied else 1.0
            if of_adamw != of_run and of_adamw > 0 and of_run > 0:
                factors.update(dict.fromkeys(kinds, of_adamw / of_run))
        return {**factors, Kind.STEP: step}

    def _switched(self, group: dict[str, Any]) -> bool:
        if not self.saved.compressed or group.get("non_freeze"):
            return False
        schedule = self.index.header["schedule"]
        freeze_step = schedule["freeze_step" if "freeze_step" in schedule else "var_freeze_step"]
        return isinstance(freeze_step, int) and self.index.header["step"] >= freeze_step

    def _stored_step(self, entry: Entry) -> tuple[str, int] | None:
        if self.saved.compressed:
            group, place, _ = self.places[entry.key.owner]
            return str(TensorKey(Kind.STEP, group=group)), place
        names = (str(TensorKey(Kind.STEP, entry.key.owner, per=per)) for per in (Per.SCALAR, Per.NUMBER))
        return next(((name, 0) for name in names if name in self.index.tensors), None)

    def _number(self, name: str, place: int) -> float:
        entry = self.index.tensors.get(name)
        if entry is None:
            raise ValueError(f"the checkpoint has no tensor {name!r}")
        (value,) = self._parts(StateTensor(TensorKey.parse(name), entry.dtype, entry.shape, place, place + 1))
        return float(value)


def is_decoupled(group: Mapping[str, Any], optimizer: str) -> Any:
    """Return whether the weight decay of a param group is decoupled, as in AdamW."""
    return group.get("decoupled_weight_decay", group.get("adam_w_mode", optimizer != "Adam"))


def source_of(index: CheckpointIndex, files: ShardFiles, optimizer: str, groups: Sequence[dict[str, Any]]) -> Stored:
    """Return a checkpoint as an optimizer loads it: as its own class saved it, or else as AdamW's state."""
    stored = Stored(index, files)
    saved, to_compressed = stored.header.optimizer, optimizer in COMPRESSED
    if saved == optimizer or (stored.header.compressed and to_compressed):
        return stored
    known = (*PLAIN, *COMPRESSED)
    if optimizer not in known or (saved not in known and not to_compressed):
        return stored  # an AdamView refuses what keeps no moments
    view = AdamView(index, files, "AdamW" if to_compressed else optimizer)
    for number, (saved_group, group) in enumerate(zip(view.param_groups, groups, strict=False)):
        decay, decoupled = saved_group["weight_decay"], saved_group["decoupled_weight_decay"]
        if decay != 0 and decoupled != is_decoupled(group, optimizer):
            raise ValueError(
                f"the weight decay of param group {number}, {decay}, is "
                f"{'decoupled' if decoupled else 'L2 regularization'} in the checkpoint, and not in {optimizer}"
            )
    return view
