"""A compressed optimizer as a checkpoint sees it: state in one flat buffer per param group, of floats or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.state import Entries, Header, LoadPlan, Names, State
from hf_compressopt.flat import FlatLayout
from hf_compressopt.format.index import TensorEntry
from hf_compressopt.format.plan import Kind, Per, StateTensor, TensorKey
from hf_compressopt.kernels import Average, SignFormat
from hf_compressopt.optim import options
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.describe import GroupTensors, describe, errors_of_one_rank
from hf_compressopt.optim.group import GroupState
from hf_compressopt.optim.moments import MOMENTS
from hf_compressopt.optim.state import (
    WRITTEN,
    StateToLoad,
    check_header,
    check_tensors,
    header_of,
    load_full,
    plain_header,
    variance_is_frozen,
)
from hf_compressopt.schedules import Stage


def empty_messages(
    layout: FlatLayout, bucket_numel: int, world_size: int, scale_block: int | None, device: torch.device
) -> dict[int, Average]:
    """Return memory for the messages of a param group's buckets, and for what travels in full, by first elements."""
    options.check_count("bucket_numel", bucket_numel)
    options.check_scale_block(scale_block)
    form = SignFormat(scale_block)
    numel = layout.in_messages.numel
    averages: dict[int, Average] = {}
    for bucket in layout.buckets:
        if bucket.in_full:
            averages[bucket.start] = Average.of(torch.empty(bucket.numel, dtype=torch.float32, device=device))
    for start in range(0, numel, bucket_numel):
        count = min(bucket_numel, numel - start)
        stride = form.chunk_nbytes(count, world_size)[0]
        messages = torch.empty(world_size * stride, dtype=torch.uint8, device=device)
        averages[start] = Average(count, form, messages, world_size, stride)
    return averages


def _group_to_fill(state: GroupState, header: Header, entries: Entries, rank: int, *, frozen: bool) -> GroupTensors:
    """Return memory for a param group in the form that a checkpoint has."""
    key = partial(TensorKey, group=state.number, rank=state.own_rank)
    ranks = state.communicator.world_size
    saved_ranks = header.values["world_size"] if state.own_rank is None else ranks
    messages = None
    if str(key(Kind.MESSAGE)) in entries:
        bucket_numel, scale_block = header.values["bucket_numel"], header.values.get("scale_block")
        messages = empty_messages(state.layout, bucket_numel, saved_ranks, scale_block, state.device)
    if ranks == 1:
        served = state.compressed and str(TensorKey(Kind.SERVER, group=state.number)) in entries
        errors = errors_of_one_rank(state.errors, state.layout.in_messages.numel if served else 0)
    else:
        error = entries.get(str(TensorKey(Kind.WORKER, group=state.number, rank=rank)))
        in_bytes = error is not None and error.dtype == "uint8"
        alike = saved_ranks == ranks and state.communicator.levels is None
        errors = state.errors.to_fill(compact=in_bytes and alike and state.errors.worker.numel() > 0)
    mask = None
    if (entry := entries.get(str(key(Kind.MASK)))) is not None:
        mask = _empty(entry)
        options.check_mask(mask, state.params, state.number)
    codes = str(key(Kind.TOP)) in entries
    return GroupTensors.to_fill(state, frozen=frozen, codes=codes, messages=messages, errors=errors, mask=mask)


class FlatState(State):
    """The state of a compressed optimizer; FusedAdam is an ordinary one."""

    def __init__(self, optimizer: CompressedOptimizer) -> None:
        self._optimizer = optimizer
        groups = optimizer._states
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
        groups = [GroupTensors.of(state) for state in optimizer._states]
        return self._describe(names, optimizer.last_plan.stage, groups, optimizer.tensors_of_all_groups())

    def _describe(
        self, names: Names, stage: Stage, groups: Sequence[GroupTensors], tensors: Mapping[str, Tensor]
    ) -> list[StateTensor]:
        own_kinds = self._optimizer.own_tensors.get(stage, ())
        return list(describe(groups, names, own_kinds, tensors, self.communicator.rank))

    # -- loading ------------------------------------------------------------------------------------------------------

    def plan_load(self, names: Names, header: Header, entries: Entries) -> LoadPlan:
        groups = self._checked_groups(header)
        optimizer = self._optimizer
        if not header.compressed:
            if not optimizer.has_variance:
                raise ValueError(f"it is of {header.title}, and {type(optimizer).__name__} has no variance")
            return self._plan_plain(names, groups, entries)
        optimizer._before_load()
        keys = {TensorKey.parse(name): entry for name, entry in entries.items()}
        tensors = {key.owner: _empty(entry) for key, entry in keys.items() if key.kind == Kind.OPTIMIZER}
        schedule = type(optimizer.schedule).of(header.values["schedule"])
        check_tensors(tensors, schedule, has_variance=optimizer.has_variance)
        frozen, rank = variance_is_frozen(optimizer, header.values), self.communicator.rank
        to_fill = [_group_to_fill(state, header, entries, rank, frozen=frozen) for state in optimizer._states]
        described = self._describe(names, Stage(header.values["stage"]), to_fill, tensors)
        return described, StateToLoad(optimizer, header.values, groups, to_fill, tensors).commit

    def _checked_groups(self, header: Header) -> list[dict[str, Any]]:
        optimizer, values = self._optimizer, header.values
        check_header(optimizer, values if header.compressed else plain_header(optimizer, values["step"]))
        with_ranks = [number for number, state in enumerate(optimizer._states) if state.own_rank is not None]
        if with_ranks and not header.compressed:
            raise ValueError(
                f"it is of {header.title}, and the param groups {with_ranks} have a process_group of their own"
            )
        options.check_ranks(values["world_size"], self.communicator.world_size, with_ranks)
        saved = map(options.group_from_plain, header.param_groups(len(optimizer.param_groups)))
        groups = [group if header.compressed else options.loadable_group(group) for group in saved]
        for number, (group, loaded) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            options.check_group({**group, **loaded}, number)
        return groups

    def _plan_plain(self, names: Names, groups: Sequence[dict[str, Any]], entries: Entries) -> LoadPlan:
        optimizer = self._optimizer
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        numbers = {param: number for number, param in enumerate(params)}
        rows: dict[int, dict[str, Tensor]] = {}
        tensors: list[StateTensor] = []
        for state, names_of_group in zip(optimizer._states, names, strict=True):
            for param, name in zip(state.params, names_of_group, strict=True):
                for tensor in _plain_tensors(param, name, entries):
                    rows.setdefault(numbers[param], {})[tensor.key.kind] = tensor.local
                    tensors.append(tensor)
        packed = [
            {**saved, "params": [numbers[param] for param in group["params"]]}
            for group, saved in zip(optimizer.param_groups, groups, strict=True)
        ]
        return tensors, lambda: load_full(optimizer, {"state": rows, "param_groups": packed}, None)


def _plain_tensors(param: Tensor, name: str, entries: Entries) -> list[StateTensor]:
    keys = [*(TensorKey(kind, name) for kind in MOMENTS), TensorKey(Kind.STEP, name, per=Per.SCALAR)]
    stored = [entries.get(str(key)) for key in keys]
    if not any(stored):
        return []
    tensors = []
    for key, entry in zip(keys, stored, strict=True):
        shape = () if key.per is Per.SCALAR else tuple(param.shape)
        if entry is None:
            raise ValueError(f"it must have {' and '.join(map(str, keys))}, or none of them")
        if entry.shape != shape:
            raise ValueError(f"{key} has shape {list(entry.shape)}, the parameter {list(param.shape)}")
        tensors.append(StateTensor.of(key, _empty(entry), replicated=True))
    return tensors


def _empty(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
