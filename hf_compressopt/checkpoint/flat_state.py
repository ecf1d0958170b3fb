"""A compressed optimizer as a checkpoint sees it: state in one flat buffer per param group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.checkpointable import LoadPlan
from hf_compressopt.checkpoint.decoded import Decoded
from hf_compressopt.checkpoint.header import Header
from hf_compressopt.format.index import TensorEntry
from hf_compressopt.format.record import Per, StateTensor, TensorKey
from hf_compressopt.optim.compact import Moments
from hf_compressopt.optim.feedback import GroupErrors, values_of
from hf_compressopt.optim.flat_optimizer import FlatOptimizer
from hf_compressopt.optim.group_state import GroupState
from hf_compressopt.optim.options import (
    check_group,
    check_mask,
    check_ranks,
    group_from_plain,
    loadable_group,
    plain_group,
)
from hf_compressopt.optim.state_dict import (
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

_MASK, _OPTIMIZER, _WORKER, _SERVER = "exp_avg_mask", "optimizer", "worker_error", "server_error"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatState:
    """The state of a compressed optimizer; FusedAdam is an ordinary one.

    Attributes:
        communicator: All ranks.
    """

    def __init__(self, optimizer: FlatOptimizer) -> None:
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
        tensors = list(self._group_tensors(names, optimizer.last_plan.stage, _Buffers.to_save))
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
        self, names: Sequence[Sequence[str]], stage: Stage, buffers: Callable[[GroupState], _Buffers]
    ) -> Iterator[StateTensor]:
        """The tensors of all param groups, as they are in a stage; ``buffers`` returns where a group's lie."""
        for number, (state, called) in enumerate(zip(self._optimizer._states, names, strict=True)):
            own, mine = self._optimizer.own_tensors.get(stage, ()) if state.compressed else (), buffers(state)
            for name, index in zip(called, range(len(state.params)), strict=True):
                yield from self._parameter_tensors(state, mine, index, name, own)
            yield StateTensor.of(
                TensorKey("step", group=number, rank=state.own_rank), state.steps, replicated=state.own_rank is None
            )
            for extra in state.extras:
                if extra.per != "element":
                    key = TensorKey(extra.name, group=number, rank=state.own_rank)
                    yield StateTensor.of(key, state.extra[extra.name], replicated=state.own_rank is None)
            if state.worker_error.numel():
                yield from self._errors(number, state, mine)

    def _parameter_tensors(
        self, state: GroupState, buffers: _Buffers, index: int, name: str, own: Sequence[str]
    ) -> Iterator[StateTensor]:
        """The tensors of a parameter; ``own`` are each rank's own now, "param" stands for the parameter itself."""
        tensors = buffers.moments_of(index)
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

    def _errors(self, number: int, state: GroupState, buffers: _Buffers) -> Iterator[StateTensor]:
        """The errors of error feedback of a param group."""
        whole = (state.layout.numel,)
        if state.own_rank is not None:
            worker_error, server_error = buffers.errors()
            worker, server = (TensorKey(kind, group=number, rank=state.own_rank) for kind in (_WORKER, _SERVER))
            yield StateTensor.of(worker, worker_error, whole, is_error=True)
            yield StateTensor.of(server, server_error)
            return
        place = self.communicator.topology
        for start, part in buffers.worker_errors():
            if part.numel():
                key = TensorKey(_WORKER, group=number, rank=place.node)
                together = place.node_size
                yield StateTensor.of(key, part, whole, start, of_each_rank=True, is_error=True, node_size=together)
        for bucket, part in zip(state.layout.buckets, buffers.server_errors(), strict=True):
            if part.numel():
                start = state.errors.own_range(bucket)[0]
                key = TensorKey(_SERVER, group=number)
                yield StateTensor.of(key, part, whole, start, is_error=True)

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
        check_tensors(tensors, type(optimizer.schedule).of(header.values["schedule"]))
        alone = self.communicator.world_size == 1
        stage = Stage(header.values["stage"])
        buffers = {state: _Buffers.to_load(state) for state in optimizer._states}
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
                place.commit()
            for number, state in enumerate(optimizer._states if alone else ()):
                found = [error.local for error in errors.get(number, ())]
                state.errors.take(*(found or [torch.empty(0, dtype=torch.float32, device="cpu")] * 2))
            take_tensors(optimizer, tensors)
            load_header(optimizer, header.values)
            optimizer._state_loaded()

        return LoadPlan(wanted, commit)

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
            worker, server = TensorKey(_WORKER, group=number, rank=0), TensorKey(_SERVER, group=number)
            if state.compressed and str(server) in entries:
                rooms = [torch.empty(state.layout.numel, dtype=torch.float32, device="cpu") for _ in range(2)]
                yield (
                    number,
                    [
                        StateTensor.of(worker, rooms[0], of_each_rank=True, is_error=True),
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


class _Buffers:
    """The moments and errors of a param group while a checkpoint is written or read.

    A checkpoint holds them as float32 values, whatever their form in the optimizer, so that any number of ranks and any
    form loads them. What is decoded and encoded again keeps its bits.
    """

    def __init__(self, state: GroupState, moments: Moments, values: GroupErrors) -> None:
        self._state, self._moments, self._errors = state, moments, values

    @classmethod
    def to_save(cls, state: GroupState) -> _Buffers:
        """Return the optimizer's own; what lies in another form is decoded when it is written."""
        return cls(state, state.moments, state.errors)

    @classmethod
    def to_load(cls, state: GroupState) -> _Buffers:
        """Return float32 buffers, the optimizer's own where it has some; :meth:`commit` takes them over."""
        return cls(state, state.moments.as_float32(), state.errors.as_float32())

    def commit(self) -> None:
        """Take over what was read."""
        self._state.moments = self._moments
        if self._errors is not self._state.errors:
            self._state.errors.copy_(self._errors.worker, self._errors.server)

    def moments_of(self, index: int) -> dict[str, Any]:
        """Return the moments of a parameter."""
        state, moments = self._state, self._moments
        shape = state.params[index].shape
        readers = {
            "exp_avg": partial(moments.exp_avg_of, index, state.still[index]),
            "exp_avg_sq": partial(moments.exp_avg_sq_of, index),
        }
        if moments.is_compact:
            return {name: Decoded(shape, read) for name, read in readers.items()}
        return {name: read().view(shape) for name, read in readers.items()}

    def errors(self) -> tuple[Tensor | Decoded, Tensor | Decoded]:
        """Return the worker errors and the server errors."""
        errors = self._errors
        if not errors.compact:
            return errors.worker, errors.server
        sizes = errors.sizes_of(torch.float32)
        return Decoded((sizes[0],), errors.worker_values), Decoded((sizes[1],), errors.server_values)

    def worker_errors(self) -> list[tuple[int, Tensor | Decoded]]:
        """Return the worker errors in runs of the flat buffer, each with its first element."""
        errors, buckets = self._errors, self._state.layout.buckets
        if self._state.communicator.levels is None:
            return [(0, self.errors()[0])]
        ranges = [errors.sent_range(bucket) for bucket in buckets]
        parts: Sequence[Tensor | Decoded]
        if errors.compact:
            parts = [Decoded((f.worker_error.numel(),), partial(values_of, f.worker_error)) for f in errors.feedback]
        else:
            parts = torch.split(errors.worker, [stop - start for start, stop in ranges])
        return [(start, part) for (start, _), part in zip(ranges, parts, strict=True)]

    def server_errors(self) -> list[Tensor | Decoded]:
        """Return the server errors of each bucket."""
        found: list[Tensor | Decoded] = []
        for feedback in self._errors.feedback:
            error = feedback.server_error
            compact = partial(values_of, error)
            found.append(error if isinstance(error, Tensor) else Decoded((error.numel(),), compact))
        return found


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
