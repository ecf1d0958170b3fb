"""A ZeroOptimizer as a checkpoint sees it: the parts of each parameter's state, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_compressopt.checkpoint.state import (
    Decoded,
    Header,
    LoadPlan,
    State,
    check_keys,
    groups_to_load,
    not_alike,
    room_for,
    value_of_parameter,
)
from hf_compressopt.collectives.errors import keep_, values_of
from hf_compressopt.format.index import NODE_SIZE, TensorEntry
from hf_compressopt.format.plan import MASTER, REPLICA, Per, StateTensor, TensorKey, dtype_name, keys_by_parameter
from hf_compressopt.optim.options import check_ranks, plain_group
from hf_compressopt.zero.optimizer import ZeroOptimizer
from hf_compressopt.zero.parameters import PartitionedParameters
from hf_compressopt.zero.parts import Part, UpdateBucket, element_state, write_span
from hf_compressopt.zero.state_dict import check_header, header_of, load_groups, load_header, set_state
from hf_compressopt.zero.update import share_parts

_WORKER = "worker_error"


def error_tensors(partition: PartitionedParameters, called: Sequence[str]) -> Iterator[StateTensor]:
    """Describe this rank's errors; they are decoded when they are written."""
    for number in _numbers(partition):
        for start, stop in _ranges(partition, number):
            error = Decoded((stop - start,), partial(_errors_of, partition, number, start, stop))
            yield _described(partition, called, number, error, start)


def wanted_errors(
    partition: PartitionedParameters, called: Sequence[str], entries: Mapping[str, TensorEntry], saved_ranks: int
) -> tuple[dict[int, Tensor], list[StateTensor]]:
    """Return memory for the errors that a checkpoint of ``saved_ranks`` ranks has, by parameter, and what to read."""
    rooms, wanted = {}, []
    for number in _numbers(partition):
        key = _key(partition, called, number)
        if any(str(key.of_rank(rank)) in entries for rank in range(saved_ranks)):
            rooms[number] = room = torch.empty(partition.tensors[number].numel(), dtype=torch.float32, device="cpu")
            for start, stop in _ranges(partition, number):
                wanted.append(_described(partition, called, number, room[start:stop], start))
    return rooms, wanted


def take_errors(partition: PartitionedParameters, rooms: Mapping[int, Tensor]) -> None:
    """Take over the errors that were read; those of other parameters become zero."""
    for gradients in partition.reducer.slices:
        if gradients.errors is None:
            continue
        values = torch.zeros(gradients.errors.kept.numel(), dtype=torch.float32, device="cpu")
        for number, rows in gradients.error_places.items():
            for begin, span in rows if number in rooms else ():
                values[begin : begin + span.numel] = rooms[number][span.start : span.stop]
        gradients.errors.drop()
        keep_(gradients.errors.kept, values.to(gradients.errors.kept.device))


def _numbers(partition: PartitionedParameters) -> list[int]:
    """List the parameters that have errors on this rank."""
    return sorted({number for g in partition.reducer.slices if g.errors is not None for number in g.error_places})


def _ranges(partition: PartitionedParameters, number: int) -> list[tuple[int, int]]:
    """List the elements [start, stop) of a parameter that have errors on this rank, in order."""
    slices = (gradients for gradients in partition.reducer.slices if gradients.errors is not None)
    spans = sorted((span.start, span.stop) for g in slices for _, span in g.error_places.get(number, ()))
    found = spans[:1]
    for start, stop in spans[1:]:
        if start == found[-1][1]:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _described(
    partition: PartitionedParameters, called: Sequence[str], number: int, error: Decoded | Tensor, start: int
) -> StateTensor:
    own: dict[str, Any] = {"of_each_rank": True, "node_size": partition.communicator.topology.node_size}
    shape = tuple(partition.tensors[number].shape)
    return StateTensor.of(_key(partition, called, number), error, shape, start, is_error=True, **own)


def _key(partition: PartitionedParameters, called: Sequence[str], number: int) -> TensorKey:
    """Return the name of a parameter's errors: of this node in two levels, which groups of some ranks have not."""
    levels = partition.known[number].communicator.levels
    everyone = partition.communicator
    return TensorKey(_WORKER, called[number], rank=everyone.rank if levels is None else everyone.topology.node)


def _errors_of(partition: PartitionedParameters, number: int, start: int, stop: int) -> Tensor:
    """Decode the errors of elements [start, stop) of a parameter, float32."""
    error = torch.empty(stop - start, dtype=torch.float32, device=partition.tensors[number].device)
    for gradients in partition.reducer.slices:
        spans = [] if gradients.errors is None else gradients.error_places.get(number, [])
        spans = [(begin, span) for begin, span in spans if start <= span.start < stop]
        if spans and gradients.errors is not None:
            values = values_of(gradients.errors.kept)
            for begin, span in spans:
                error[span.start - start : span.stop - start] = values[begin : begin + span.numel]
    return error


class _Staged(NamedTuple):
    """Values that were read for a part of a parameter, by the key of its state."""

    bucket: UpdateBucket
    part: Part
    key: TensorKey
    local: Tensor


class PartitionedState(State):
    """The state of a ZeroOptimizer, of which each rank holds some parts."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        """Wrap an optimizer."""
        self._optimizer, partition = optimizer, optimizer.partition
        shared: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for number in partition.in_order():
            if partition.known[number].owner is None:
                shared[partition.known[number].group].append(partition.tensors[number])
        super().__init__(optimizer.communicator, partition.names_by_group(None, len(shared)), shared)

    def header(self) -> dict[str, Any]:
        """See the base class."""
        optimizer = self._optimizer
        size = self.communicator.topology.node_size
        errors = {NODE_SIZE: size} if size > 1 and optimizer.config.grad_form is not None else {}
        return {**header_of(optimizer), **errors, "param_groups": [plain_group(g) for g in optimizer.param_groups]}

    def tensors(self, names: Sequence[Sequence[str]]) -> list[StateTensor]:
        """See the protocol; tensors with a value per element share memory with the optimizer."""
        optimizer, called = self._optimizer, self._qualified(names)
        optimizer.partition.require_replicas("save_state()")
        tensors = list(error_tensors(optimizer.partition, called))
        singles: dict[TensorKey, str] = {}
        for bucket, part in optimizer.partition.parts():
            state = bucket.state_of(part)
            shape, name = tuple(optimizer.partition.tensors[part.param].shape), called[part.param]
            check_keys(state, optimizer.optimizer_class.__name__)
            whole = {key: state[key] for key in element_state(state, part)}
            if not part.direct:
                whole[MASTER] = part.tensor
            if part.is_ahead:
                whole[REPLICA] = part.replica_in(optimizer.partition.tensors[part.param])
            for kind, value in whole.items():
                tensors.append(StateTensor.of(TensorKey(kind, name), value, shape, part.span.start))
            for kind, value in state.items():  # a value per parameter is beside every part of it
                if kind not in whole and value is not None:
                    single = self._single(kind, name, value)
                    same = repr(single.local.item())
                    if singles.setdefault(single.key, same) != same:
                        raise ValueError(not_alike(single.key))
                    tensors.append(single)
        return tensors

    def _single(self, kind: str, name: str, value: Any) -> StateTensor:
        """Describe the values that the wrapped optimizer has once per parameter."""
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"the state {kind!r} of {self._optimizer.optimizer_class.__name__} has the shape {list(value.shape)} "
                f"for a part of {name}: it is neither one value for each element nor one number, so that a checkpoint "
                "cannot cut it into other parts; use this optimizer without ZeRO, or save optimizer.state_dict() on "
                "every rank"
            )
        return value_of_parameter(kind, name, value)

    def _qualified(self, names: Sequence[Sequence[str]]) -> list[str]:
        """One name per parameter; if only some ranks hold copies of it, with the first of them."""
        partition = self._optimizer.partition
        rest = [iter(group) for group in names]
        result = [""] * len(partition.known)
        for number in partition.in_order():
            known = partition.known[number]
            result[number] = ("" if known.owner is None else f"from{known.owner}.") + next(rest[known.group])
        return result

    # -- loading ------------------------------------------------------------------------------------------------------

    def plan_load(self, names: Sequence[Sequence[str]], header: Header, entries: Mapping[str, TensorEntry]) -> LoadPlan:
        """See the base class."""
        optimizer = self._optimizer
        optimizer.partition.require_replicas("load_state()")
        check_header(optimizer, header.values)
        own = [number for number, group in enumerate(optimizer.param_groups) if group.get("process_group") is not None]
        check_ranks(header.values["world_size"], self.communicator.world_size, own)
        groups = groups_to_load(optimizer.param_groups, header, names, entries)
        rows = list(self._wanted(names, header, entries))
        staged, wanted = [row for row, _ in rows], [tensor for _, tensor in rows]
        ranks = int(header.values["world_size"])
        errors, of_errors = wanted_errors(optimizer.partition, self._qualified(names), entries, ranks)

        def commit() -> None:
            take_errors(optimizer.partition, errors)
            self._commit(staged, header, groups)
            self._settle_parameters(staged, {key.kind for keys in keys_by_parameter(entries).values() for key in keys})

        return LoadPlan([*wanted, *of_errors], commit)

    def _wanted(
        self, names: Sequence[Sequence[str]], header: Header, entries: Mapping[str, TensorEntry]
    ) -> Iterator[tuple[_Staged, StateTensor]]:
        """Describe what a checkpoint holds of this rank's parts, and memory for it."""
        optimizer, of_parameter, called = self._optimizer, keys_by_parameter(entries), self._qualified(names)
        for bucket, part in optimizer.partition.parts():
            name, param = called[part.param], optimizer.partition.tensors[part.param]
            keys, master = of_parameter.get(name, []), TensorKey(MASTER, name)
            if part.tensor.dtype != param.dtype and master not in keys and header.is_partitioned:
                keys = [*keys, master]  # its absence is an error; an ordinary optimizer has none to save
            if not part.is_ahead:
                keys = [key for key in keys if key.kind != REPLICA]
            for key in keys:
                entry = entries.get(str(key)) or TensorEntry(dtype_name(part.tensor), tuple(param.shape), ())
                shape, start = entry.shape, 0
                if key.per is Per.ELEMENT:
                    fits, shape, start = shape == tuple(param.shape), (part.span.numel,), part.span.start
                else:
                    fits = shape == () if key.per is Per.NUMBER else prod(shape) == 1
                if not fits:
                    raise ValueError(f"{key} has shape {list(entry.shape)}, the parameter {list(param.shape)}")
                live = bucket.state_of(part).get(key.kind) if key.per is Per.ELEMENT else None
                local = room_for(part.tensor if key.kind == MASTER else live, shape, entry.dtype)
                yield _Staged(bucket, part, key, local), StateTensor.of(key, local, entry.shape, start)

    def _commit(self, staged: Sequence[_Staged], header: Header, groups: Sequence[dict[str, Any]]) -> None:
        optimizer = self._optimizer
        states: dict[int, dict[str, Any]] = {id(part): {} for _, part in optimizer.partition.parts()}
        with_master = {id(part) for _, part, key, _ in staged if key.kind == MASTER}
        for _, part in optimizer.partition.parts():
            if id(part) not in with_master:
                part.read_from(optimizer.partition.tensors[part.param])
        for _, part, key, local in staged:
            if key.kind == MASTER:
                part.tensor.copy_(local)
            elif key.kind == REPLICA:
                continue
            elif key.per is Per.NUMBER:
                states[id(part)][key.kind] = local.item()
            elif key.per is Per.ELEMENT and not part.direct and not header.is_partitioned:
                states[id(part)][key.kind] = local.to(part.tensor.dtype)  # it was a 16-bit parameter's
            else:
                states[id(part)][key.kind] = local
        for bucket, part in optimizer.partition.parts():
            set_state(optimizer, bucket, part, states[id(part)])
        load_groups(optimizer.param_groups, groups)
        load_header(optimizer, header.values)

    def _settle_parameters(self, staged: Sequence[_Staged], kinds: set[str]) -> None:
        """Give all ranks the parameters that belong to the masters of a checkpoint with these kinds of tensors."""
        partition = self._optimizer.partition
        direct = MASTER in kinds and any(row.part.direct and row.key.kind == MASTER for row in staged)
        if MASTER not in kinds or not (
            partition.has_replicas or REPLICA in kinds or any(self.communicator.all_gather_object(direct))
        ):
            return
        for _, part in partition.parts():
            part.write_back(partition.tensors[part.param])
        for _, part, key, local in staged:
            if key.kind == REPLICA:
                write_span(partition.tensors[part.param], part.span.start, part.span.stop, local)
        share_parts(partition)
        for _, part in partition.parts():
            if part.is_ahead:
                part.note_replica(partition.tensors[part.param])
