"""A compressed optimizer as a checkpoint sees it: state in one flat buffer per param group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.checkpointable import LoadPlan
from hf_compressopt.checkpoint.compact_tensors import TOP
from hf_compressopt.checkpoint.group_buffers import SERVER, GroupBuffers, worker_error
from hf_compressopt.checkpoint.header import Header
from hf_compressopt.format.index import TensorEntry
from hf_compressopt.format.record import Per, StateTensor, TensorKey
from hf_compressopt.kernels.variance import check_tops
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.group import GroupState
from hf_compressopt.optim.options import (
    check_group,
    check_mask,
    check_ranks,
    group_from_plain,
    loadable_group,
    plain_group,
)
from hf_compressopt.optim.state import (
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

_MASK, _OPTIMIZER = "exp_avg_mask", "optimizer"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatState:
    """The state of a compressed optimizer; FusedAdam is an ordinary one.

    Attributes:
        communicator: All ranks.
    """

    def __init__(self, optimizer: CompressedOptimizer) -> None:
        """Wrap an optimizer."""
        self._optimizer, self.communicator = optimizer, optimizer.communicator

    def parameter_names(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """See the protocol."""
        return self._optimizer.parameter_names(names)

    def shared_parameters(self) -> list[list[Tensor]]:
        """See the protocol."""
        return [state.params if state.own_rank is None else [] for state in self._optimizer._states]

    def header(self) -> dict[str, Any]:
        """See the protocol."""
        optimizer = self._optimizer
        return {**header_of(optimizer), "param_groups": [plain_group(group) for group in optimizer.param_groups]}

    def tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """See the protocol; they share memory with the optimizer."""
        optimizer = self._optimizer
        optimizer._follow_parameters()
        tensors = list(self._group_tensors(names, optimizer.last_plan.stage, GroupBuffers.of))
        for number, group in enumerate(optimizer.param_groups):
            if (mask := group.get(_MASK)) is not None:
                tensors.append(self._mask(number, mask))
        for name, tensor in optimizer._tensors.items():
            tensors.append(StateTensor.of(TensorKey(_OPTIMIZER, name), tensor, replicated=True))
        return tensors

    def _mask(self, number: int, mask: Tensor) -> StateTensor:
        own_rank = self._optimizer._states[number].own_rank
        return StateTensor.of(TensorKey(_MASK, group=number, rank=own_rank), mask, replicated=own_rank is None)

    def _group_tensors(
        self, names: Sequence[Sequence[str]], stage: Stage, buffers: Callable[[GroupState], GroupBuffers]
    ) -> Iterator[StateTensor]:
        """The tensors of all param groups, as they are in a stage; ``buffers`` returns where a group's lie."""
        for number, (state, called) in enumerate(zip(self._optimizer._states, names, strict=True)):
            own, mine = self._optimizer.own_tensors.get(stage, ()) if state.compressed else (), buffers(state)
            for name, index in zip(called, range(len(state.params)), strict=True):
                yield from self._parameter_tensors(state, mine, index, name, own)
            yield from mine.of_group()
            yield StateTensor.of(
                TensorKey("step", group=number, rank=state.own_rank), state.steps, replicated=state.own_rank is None
            )
            for extra in state.extras:
                if extra.per != "element":
                    key = TensorKey(extra.name, group=number, rank=state.own_rank)
                    yield StateTensor.of(key, state.extra[extra.name], replicated=state.own_rank is None)
            if mine.errors.worker.numel():
                yield from mine.of_errors(self.communicator.rank)

    def _parameter_tensors(
        self, state: GroupState, buffers: GroupBuffers, index: int, name: str, own: Sequence[str]
    ) -> Iterator[StateTensor]:
        """The tensors of a parameter; ``own`` are each rank's own now, "param" stands for the parameter itself."""
        yield from buffers.pieces(index, name)
        tensors = buffers.of_parameter(index)
        flat = {extra.name: state.extra[extra.name] for extra in state.extras if extra.per == "element"}
        tensors |= {kind: state.view(buffer, index) for kind, buffer in flat.items()}
        if "param" in own:
            tensors["param"] = state.params[index].detach() if state.own_params is None else state.own_params[index]
        for kind, tensor in tensors.items():
            if state.own_rank is not None:  # only some ranks hold it, so that there is no mean over all
                yield StateTensor.of(TensorKey(kind, name, rank=state.own_rank), tensor)
            elif kind in own:
                key = TensorKey(kind, name, rank=self.communicator.rank)
                yield StateTensor.of(key, tensor, of_each_rank=True)
            else:
                yield StateTensor.of(TensorKey(kind, name), tensor, replicated=True)

    # -- loading ------------------------------------------------------------------------------------------------------

    def plan_load(self, names: Sequence[Sequence[str]], header: Header, entries: Mapping[str, TensorEntry]) -> LoadPlan:
        """See the protocol."""
        groups = self._checked_groups(header)
        if not header.compressed:
            return self._plan_plain(names, groups, entries)
        optimizer = self._optimizer
        optimizer._before_load()
        masks, tensors = self._brought(entries)
        for number, mask in masks.items():
            check_mask(mask, optimizer._states[number].params, number)
        schedule = type(optimizer.schedule).of(header.values["schedule"])
        check_tensors(tensors, schedule)
        ranks, stage, coming = (
            self.communicator,
            Stage(header.values["stage"]),
            schedule.plan(header.values["step"] + 1),
        )
        alone = ranks.world_size == 1
        frozen, at = coming.stage.number > 0, ranks.rank
        buffers = {s: GroupBuffers.room(s, header, entries, at, frozen=frozen) for s in optimizer._states}
        wanted = [t for t in self._group_tensors(names, stage, buffers.__getitem__) if not (alone and t.is_error)]
        wanted += [self._mask(number, mask) for number, mask in masks.items()]
        wanted += [StateTensor.of(TensorKey(_OPTIMIZER, name), t, replicated=True) for name, t in tensors.items()]
        errors = dict(self._room_for_errors(entries)) if alone else {}
        wanted += chain.from_iterable(errors.values())

        def commit() -> None:
            load_groups(optimizer, groups)
            for number, mask in masks.items():
                optimizer.param_groups[number][_MASK] = mask.to(optimizer._states[number].device)
            for place in buffers.values():
                place.commit(frozen=frozen)
            for number, state in enumerate(optimizer._states if alone else ()):
                found = [error.local for error in errors.get(number, ())]
                state.errors.take(*(found or [torch.empty(0, dtype=torch.float32, device="cpu")] * 2))
            take_tensors(optimizer, tensors)
            load_header(optimizer, header.values)
            optimizer._state_loaded()

        checks = {tensor.key: check_tops for tensor in wanted if tensor.key.kind == TOP}
        return LoadPlan(wanted, commit, checks)

    def _checked_groups(self, header: Header) -> list[dict[str, Any]]:
        """The hyperparameters of each param group of a header that fits this optimizer.

        Raises:
            ValueError: If the header does not fit.
            TypeError: Likewise.
        """
        optimizer, values = self._optimizer, header.values
        check_header(optimizer, values if header.compressed else plain_header(optimizer, values["step"]))
        own = [number for number, state in enumerate(optimizer._states) if state.own_rank is not None]
        if own and not header.compressed:
            raise ValueError(f"it is of {header.title}, and the param groups {own} have a process_group of their own")
        check_ranks(values["world_size"], self.communicator.world_size, own)
        saved = map(group_from_plain, header.param_groups(len(optimizer.param_groups)))
        groups = [group if header.compressed else loadable_group(group) for group in saved]
        for number, (group, found) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            check_group({**group, **found}, number)
        return groups

    def _brought(self, entries: Mapping[str, TensorEntry]) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """Memory for the masks of the param groups, and for the optimizer-wide tensors, that a checkpoint has."""
        masks, tensors = {}, {}
        for number, state in enumerate(self._optimizer._states):
            entry = entries.get(str(TensorKey(_MASK, group=number, rank=state.own_rank)))
            if entry is not None:
                masks[number] = _room(entry)
        for name, entry in entries.items():
            key = TensorKey.parse(name)
            if key.kind == _OPTIMIZER:
                tensors[key.owner] = _room(entry)
        return masks, tensors

    def _room_for_errors(self, entries: Mapping[str, TensorEntry]) -> Iterator[tuple[int, list[StateTensor]]]:
        """Memory for the worker and the server error that a single rank sends next."""
        for number, state in enumerate(self._optimizer._states):
            server = TensorKey(SERVER, group=number)
            if state.compressed and str(server) in entries:
                rooms = [torch.empty(state.layout.numel, dtype=torch.float32, device="cpu") for _ in range(2)]
                yield (
                    number,
                    [
                        worker_error(number, rooms[0], 0),
                        StateTensor.of(server, rooms[1], is_error=True),
                    ],
                )

    def _plan_plain(
        self, names: Sequence[Sequence[str]], groups: Sequence[dict[str, Any]], entries: Mapping[str, TensorEntry]
    ) -> LoadPlan:
        """Plan the load of the state of an ordinary Adam or AdamW."""
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
        return LoadPlan(wanted, lambda: load_full(optimizer, {"state": rows, "param_groups": packed}, None))


def _plain_tensors(param: Tensor, name: str, entries: Mapping[str, TensorEntry]) -> list[StateTensor]:
    """Memory for the moments and the step of a parameter, if a checkpoint has them.

    Raises:
        ValueError: If it has only some of them, or of another shape.
    """
    keys = [*(TensorKey(kind, name) for kind in _MOMENTS), TensorKey("step", name, per=Per.SCALAR)]
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
        tensors.append(StateTensor.of(key, _room(entry), replicated=True))
    return tensors


def _room(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
