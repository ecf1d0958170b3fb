"""A compressed optimizer as a checkpoint sees it: state in one flat buffer per param group, of floats or messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.state import MOMENTS, Entries, Header, Kind, LoadPlan, Names, State, errors_of_group
from hf_compressopt.collectives.feedback import ErrorFeedback
from hf_compressopt.flat import FlatLayout
from hf_compressopt.format.index import TensorEntry
from hf_compressopt.format.plan import Per, StateTensor, TensorKey
from hf_compressopt.kernels import Average, SignFormat
from hf_compressopt.optim import options
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.group import GroupState
from hf_compressopt.optim.moments import Moments
from hf_compressopt.optim.state import (
    WRITTEN,
    check_header,
    check_tensors,
    header_of,
    load_full,
    load_groups,
    load_header,
    plain_header,
    take_tensors,
)
from hf_compressopt.schedules import Stage

#: Kinds of the mask of a group, and of the tensors of the whole optimizer.
_MASK, _OPTIMIZER = "exp_avg_mask", "optimizer"


def empty_messages(
    layout: FlatLayout, bucket_numel: int, world_size: int, scale_block: int | None, device: torch.device
) -> dict[int, Average]:
    """Return memory for the messages of a param group's buckets, and for what travels in full, by first elements."""
    options.check_count("bucket_numel", bucket_numel)
    options.check_scale_block(scale_block)
    form, found = SignFormat(scale_block), {}
    numel = layout.in_messages.numel
    for bucket in layout.buckets:
        if bucket.in_full:
            found[bucket.start] = Average.of(torch.empty(bucket.numel, dtype=torch.float32, device=device))
    for start in range(0, numel, bucket_numel):
        count = min(bucket_numel, numel - start)
        stride = form.chunk_nbytes(count, world_size)[0]
        messages = torch.empty(world_size * stride, dtype=torch.uint8, device=device)
        found[start] = Average(count, form, messages, world_size, stride)
    return found


@dataclass(frozen=True)
class GroupBuffers:
    """Tensors of a param group: the optimizer's own, or, in the stored form, those that a load fills."""

    state: GroupState
    moments: Moments
    errors: ErrorFeedback
    mask: Tensor | None

    @classmethod
    def room(cls, state: GroupState, header: Header, entries: Entries, rank: int, *, frozen: bool) -> GroupBuffers:
        key, last = partial(TensorKey, group=state.number, rank=state.own_rank), None
        ranks = state.communicator.world_size
        saved = header.values["world_size"] if state.own_rank is None else ranks
        if str(key(Kind.MESSAGE)) in entries:
            cut = header.values["bucket_numel"], saved, header.values.get("scale_block")
            last = empty_messages(state.layout, *cut, state.device)
        held = state.moments.shards
        mine = held is not None and held.topology is state.communicator.topology
        shards = None if frozen else held if mine else state.new_shards()
        moments = state.moments.to_fill(codes=str(key(Kind.TOP)) in entries, last=last, shards=shards)
        error = entries.get(str(TensorKey(Kind.WORKER, group=state.number, rank=rank)))
        in_bytes = error is not None and error.dtype == "uint8"
        alike = saved == ranks and state.communicator.levels is None
        as_saved = in_bytes and alike and state.errors.worker.numel() > 0
        errors = state.errors.to_fill(compact=as_saved)
        if ranks == 1:  # it has errors only if it loads those of several ranks
            served = state.compressed and str(TensorKey(Kind.SERVER, group=state.number)) in entries
            numel, errors = state.layout.in_messages.numel if served else 0, copy(state.errors)
            errors.take(*(torch.zeros(numel, dtype=torch.float32, device="cpu") for _ in range(2)))
        mask = None if (entry := entries.get(str(key(_MASK)))) is None else _empty(entry)
        if mask is not None:
            options.check_mask(mask, state.params, state.number)
        return cls(state, moments, errors, mask)

    def tensors(self, names: Sequence[str], own: Sequence[str], rank: int) -> Iterator[StateTensor]:
        """Yield the tensors of the group. ``own``: the kinds that are each rank's own; "param" is the parameter."""
        for index, name in zip(range(len(self.state.params)), names, strict=True):
            yield from self._of_parameter(index, name, own, rank)
        yield from self._of_group()
        if self.errors.worker.numel():
            yield from self._of_errors(rank)

    def _of_parameter(self, index: int, name: str, own: Sequence[str], rank: int) -> Iterator[StateTensor]:
        state, moments, param, tensors = self.state, self.moments, self.state.params[index], dict[str, Tensor]()
        for piece in [] if moments.shards is None else moments.shards.pieces(index):
            for kind in MOMENTS:
                yield StateTensor.of(TensorKey(kind, name), piece[kind], tuple(param.shape), piece["start"])
        if moments.shards is None or not param.numel():
            tensors = {kind: stored.view(param.shape) for kind, stored in moments.stored_of(index).items()}
        tensors |= {kind: state.view(flat, index) for kind, flat in state.beside_moments("element").items()}
        if "param" in own:
            tensors["param"] = param.detach() if state.own_params is None else state.own_params[index]
        for kind, tensor in tensors.items():
            if state.own_rank is not None:  # only some ranks hold it, so that there is no mean over all
                yield StateTensor.of(TensorKey(kind, name, rank=state.own_rank), tensor)
            elif kind in own:
                yield StateTensor.of(TensorKey(kind, name, rank=rank), tensor, of_each_rank=True)
            else:
                yield StateTensor.of(TensorKey(kind, name), tensor, replicated=True)

    def _of_group(self) -> Iterator[StateTensor]:
        """Yield what belongs to no one parameter: the rest of compact moments, counts, and the mask."""
        state, moments = self.state, self.moments
        key, replicated = partial(TensorKey, group=state.number, rank=state.own_rank), state.own_rank is None
        if (tops := moments.tops_of_codes) is not None:
            yield StateTensor.of(key(Kind.TOP), tops, replicated=replicated)
        found = [average.messages for average in moments.messages if average.messages is not None]
        whole, start = (sum(messages.numel() for messages in found),), 0
        for messages in found:
            yield StateTensor.of(key(Kind.MESSAGE), messages, whole, start, replicated=replicated)
            start += messages.numel()
        for kind, values in {**state.beside_moments("parameter"), **state.beside_moments("group")}.items():
            yield StateTensor.of(key(kind), values, replicated=replicated)
        if self.mask is not None:
            yield StateTensor.of(key(_MASK), self.mask, replicated=replicated)

    def _of_errors(self, rank: int) -> Iterator[StateTensor]:
        number, errors = self.state.number, self.errors
        if self.state.own_rank is None:
            yield from errors_of_group(errors, number, self.state.communicator)
        else:
            yield StateTensor.of(TensorKey(Kind.WORKER, group=number, rank=rank), errors.worker, is_error=True)
            yield StateTensor.of(TensorKey(Kind.SERVER, group=number, rank=rank), errors.server)

    def commit(self, *, frozen: bool) -> None:
        """Take over what was read. ``frozen``: whether the variance does not change in the coming step."""
        state, ranks = self.state, self.state.communicator.world_size
        state.moments = state.moments.loaded(self.moments, frozen=frozen, world_size=ranks, form=state.form)
        if ranks == 1:
            state.errors.take(self.errors.worker, self.errors.server)
        elif self.errors is not state.errors:
            state.errors.copy_(self.errors.worker, self.errors.server)
        if self.mask is not None:
            state.options[_MASK] = self.mask.to(state.device)


class FlatState(State):
    """The state of a compressed optimizer; FusedAdam is an ordinary one."""

    def __init__(self, optimizer: CompressedOptimizer) -> None:
        self._optimizer, groups = optimizer, optimizer._states
        shared = [group.params if group.own_rank is None else [] for group in groups]
        super().__init__(optimizer.communicator, [group.names for group in groups], shared)

    def header(self) -> dict[str, Any]:
        groups = map(options.plain_group, self._optimizer.param_groups)
        return {**header_of(self._optimizer), "param_groups": list(groups)}

    def marks(self) -> list[str]:
        return [WRITTEN] if self._optimizer._parameters_were_replaced() else []

    def tensors(self, names: Names) -> list[StateTensor]:
        optimizer = self._optimizer
        optimizer._follow_parameters()
        states = optimizer._states
        buffers = [GroupBuffers(state, state.moments, state.errors, state.options.get(_MASK)) for state in states]
        return list(self._described(names, optimizer.last_plan.stage, buffers, optimizer.tensors_of_all_groups()))

    def _described(
        self, names: Names, stage: Stage, buffers: Sequence[GroupBuffers], tensors: Mapping[str, Tensor]
    ) -> Iterator[StateTensor]:
        """The tensors of the param groups, as they are in a stage, and those of the whole optimizer."""
        for group, called in zip(buffers, names, strict=True):
            own = self._optimizer.own_tensors.get(stage, ()) if group.state.compressed else ()
            yield from group.tensors(called, own, self.communicator.rank)
        for name, tensor in tensors.items():
            yield StateTensor.of(TensorKey(_OPTIMIZER, name), tensor, replicated=True)

    # -- loading ------------------------------------------------------------------------------------------------------

    def plan_load(self, names: Names, header: Header, entries: Entries) -> LoadPlan:
        groups = self._checked_groups(header)
        optimizer = self._optimizer
        if not header.compressed:
            if not optimizer.has_variance:
                raise ValueError(f"it is of {header.title}, and {type(optimizer).__name__} has no variance")
            return self._plan_plain(names, groups, entries)
        optimizer._before_load()
        found = {TensorKey.parse(name): entry for name, entry in entries.items()}
        tensors = {key.owner: _empty(entry) for key, entry in found.items() if key.kind == _OPTIMIZER}
        schedule = type(optimizer.schedule).of(header.values["schedule"])
        check_tensors(tensors, schedule, has_variance=optimizer.has_variance)
        frozen, at = schedule.plan(header.values["step"] + 1).stage.number > 0, self.communicator.rank
        buffers = [GroupBuffers.room(state, header, entries, at, frozen=frozen) for state in optimizer._states]

        def commit() -> None:
            load_groups(optimizer, groups)
            for place in buffers:
                place.commit(frozen=frozen)
            take_tensors(optimizer, tensors)
            load_header(optimizer, header.values)
            optimizer._state_loaded()

        return list(self._described(names, Stage(header.values["stage"]), buffers, tensors)), commit

    def _checked_groups(self, header: Header) -> list[dict[str, Any]]:
        optimizer, values = self._optimizer, header.values
        check_header(optimizer, values if header.compressed else plain_header(optimizer, values["step"]))
        own = [number for number, state in enumerate(optimizer._states) if state.own_rank is not None]
        if own and not header.compressed:
            raise ValueError(f"it is of {header.title}, and the param groups {own} have a process_group of their own")
        options.check_ranks(values["world_size"], self.communicator.world_size, own)
        saved = map(options.group_from_plain, header.param_groups(len(optimizer.param_groups)))
        groups = [group if header.compressed else options.loadable_group(group) for group in saved]
        for number, (group, found) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            options.check_group({**group, **found}, number)
        return groups

    def _plan_plain(self, names: Names, groups: Sequence[dict[str, Any]], entries: Entries) -> LoadPlan:
        optimizer = self._optimizer
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        numbers = {param: number for number, param in enumerate(params)}
        rows: dict[int, dict[str, Tensor]] = {}
        wanted = []
        for state, called in zip(optimizer._states, names, strict=True):
            for param, name in zip(state.params, called, strict=True):
                for tensor in _plain_tensors(param, name, entries):
                    rows.setdefault(numbers[param], {})[tensor.key.kind] = tensor.local
                    wanted.append(tensor)
        packed = [
            {**saved, "params": [numbers[param] for param in group["params"]]}
            for group, saved in zip(optimizer.param_groups, groups, strict=True)
        ]
        return wanted, lambda: load_full(optimizer, {"state": rows, "param_groups": packed}, None)


def _plain_tensors(param: Tensor, name: str, entries: Entries) -> list[StateTensor]:
    keys = [*(TensorKey(kind, name) for kind in MOMENTS), TensorKey(Kind.STEP, name, per=Per.SCALAR)]
    found = [entries.get(str(key)) for key in keys]
    if not any(found):
        return []
    tensors = []
    for key, entry in zip(keys, found, strict=True):
        shape = () if key.per is Per.SCALAR else tuple(param.shape)
        if entry is None:
            raise ValueError(f"it must have {' and '.join(map(str, keys))}, or none of them")
        if entry.shape != shape:
            raise ValueError(f"{key} has shape {list(entry.shape)}, the parameter {list(param.shape)}")
        tensors.append(StateTensor.of(key, _empty(entry), replicated=True))
    return tensors


def _empty(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
