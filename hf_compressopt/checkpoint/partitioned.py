"""An ordinary optimizer as a checkpoint sees it: whole on every rank, or inside a ZeroOptimizer, in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.checkpoint.state import Entries, Header, LoadPlan, Names, State, not_alike
from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.collectives.feedback import keep_, values_of
from hf_compressopt.collectives.torch_dist import make_communicator
from hf_compressopt.format.index import NODE_SIZE, TensorEntry, name_by_place
from hf_compressopt.format.plan import MASTER, REPLICA, Kind, Per, StateTensor, TensorKey, dtype_name, keys_by_parameter
from hf_compressopt.kernels import CompactErrors
from hf_compressopt.optim.options import check_count, check_plain, check_ranks, group_from_plain, plain_group
from hf_compressopt.zero.optimizer import ZeroOptimizer
from hf_compressopt.zero.parameters import PartitionedParameters
from hf_compressopt.zero.parts import element_state, write_span
from hf_compressopt.zero.reducer import SliceGradients
from hf_compressopt.zero.state_dict import FUNCTIONAL, Row, check_header, header_of, load_header, rows_of, take_rows

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


# -- both -------------------------------------------------------------------------------------------------------------


def _groups_to_load(
    groups: Sequence[dict[str, Any]], header: Header, names: Names, entries: Entries
) -> list[dict[str, Any]]:
    saved = header.param_groups(len(groups))
    for number, (group, values) in enumerate(zip(groups, saved, strict=True)):
        check_plain(group, values, number)
        if values.get("amsgrad"):
            for name in names[number]:
                if f"exp_avg_sq/{name}" in entries and f"max_exp_avg_sq/{name}" not in entries:
                    raise ValueError(f"amsgrad of param group {number} is True, and there is no max_exp_avg_sq/{name}")
    return [group_from_plain(values) for values in saved]


def _check_keys(state: Mapping[Any, Any], optimizer: str, reserved: Sequence[str] = (MASTER, REPLICA)) -> None:
    for key in state:
        named = isinstance(key, str) and "/" not in key and key not in reserved
        if not named or TensorKey.parse(key).per is not Per.ELEMENT:
            raise ValueError(
                f"the state {key!r} of {optimizer} cannot be saved by this name: a key must be a string without '/', "
                f"other than {MASTER!r} and {REPLICA!r}, that does not begin with {Per.SCALAR.value!r} or "
                f"{Per.NUMBER.value!r}; rename it in the optimizer"
            )


def _value_of_parameter(kind: str, name: str, value: Any, *, replicated: bool = False) -> StateTensor:
    """Describe what an optimizer has once per parameter: a tensor, or a number of Python's."""
    if isinstance(value, Tensor):
        return StateTensor.of(TensorKey(kind, name, per=Per.SCALAR), value, replicated=replicated)
    key, dtype = TensorKey(kind, name, per=Per.NUMBER), _NUMBERS.get(type(value))
    if dtype is None or (dtype is torch.int64 and not -(2**63) <= value < 2**63):
        raise ValueError(f"{key} must be a tensor, a boolean or a number of 64 bits to be saved, got {value!r}")
    return StateTensor.of(key, torch.tensor(value, dtype=dtype, device="cpu"), replicated=replicated)


def _memory_for(live: Any, shape: Sequence[int], dtype: str) -> Tensor:
    """Return memory for a tensor of a checkpoint: the state's own if it is such a tensor, else new memory."""
    saved_dtype: torch.dtype = getattr(torch, dtype)
    if isinstance(live, Tensor) and live.shape == tuple(shape) and live.dtype == saved_dtype and live.is_contiguous():
        return live
    return torch.empty(tuple(shape), dtype=saved_dtype, device="cpu")


def _misfit(key: TensorKey, entry: TensorEntry, param: Tensor) -> ValueError:
    return ValueError(f"{key} has shape {list(entry.shape)}, the parameter {list(param.shape)}")


# -- whole on every rank ----------------------------------------------------------------------------------------------


class PlainState(State):
    """The state of an ordinary optimizer, which every rank holds alike, as that of a ZeroOptimizer around it."""

    reserved: tuple[str, ...] = (MASTER, REPLICA)  # names that no state of the optimizer's own may have

    def __init__(self, optimizer: torch.optim.Optimizer, communicator: Communicator | None = None) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "the state of LBFGS belongs to no parameter, so that a checkpoint cannot hold it: save "
                "optimizer.state_dict() with torch.save"
            )
        self._optimizer, self._name = optimizer, type(optimizer).__name__
        params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        if self._name == "ZeroRedundancyOptimizer" or any(hasattr(p, "placements") for p in params):
            raise TypeError(
                f"the state of {self._name} must be alike on all ranks, and here each has a part of it: "
                "use ZeroOptimizer, or save it as its own documentation says"
            )
        device = next((param.device for param in params), torch.device("cpu"))
        names: list[list[str]] = []
        trainable: list[list[Tensor]] = []
        for index, group in enumerate(optimizer.param_groups):
            called = group.get("param_names", [name_by_place(index, place) for place in range(len(group["params"]))])
            rows = [(param, name) for param, name in zip(group["params"], called, strict=True) if param.requires_grad]
            names.append([name for _, name in rows])
            trainable.append([param for param, _ in rows])
        ranks = communicator or make_communicator(None, None, device=device, traffic=Traffic())
        super().__init__(ranks, names, trainable)

    def _called(self, names: Names) -> Iterator[tuple[Tensor, str]]:
        return zip(chain.from_iterable(self.params), chain.from_iterable(names), strict=True)

    def tensors(self, names: Names) -> list[StateTensor]:
        tensors = []
        for param, name in self._called(names):
            state = self._optimizer.state.get(param, {})
            _check_keys(state, self._name, self.reserved)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == param.shape and (value.dim() > 0 or key != "step"):
                    tensors.append(StateTensor.of(TensorKey(key, name), value, replicated=True))
                elif value is not None:
                    tensors.append(_value_of_parameter(key, name, value, replicated=True))
        return tensors

    def header(self) -> dict[str, Any]:
        steps = [int(state["step"]) for state in self._optimizer.state.values() if "step" in state]
        return {
            "class": f"ZeroOptimizer({self._name})",
            "stage": 0,
            "step": max(steps, default=0),
            "skipped_steps": 0,
            "world_size": self.communicator.world_size,
            "loss_scale": [1.0, 0],
            "bytes_sent": 0,
            "param_groups": [plain_group(group) for group in self._optimizer.param_groups],
        }

    def plan_load(self, names: Names, header: Header, entries: Entries) -> LoadPlan:
        if header.values.get("class") != f"ZeroOptimizer({self._name})":
            raise ValueError(f"the state is of {header.title}, this optimizer is {self._name}")
        check_count("world_size", header.values.get("world_size"))
        groups = _groups_to_load(self._optimizer.param_groups, header, names, entries)
        rows = list(self._rows(names, entries))
        return [tensor for _, tensor in rows], lambda: self._commit(rows, groups)

    def _rows(self, names: Names, entries: Entries) -> Iterator[tuple[Tensor, StateTensor]]:
        of_parameter = keys_by_parameter(entries)
        # a load_state_dict of the optimizer's own may refuse what was read, and then the state must be as it was
        in_place = type(self._optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        in_place = in_place and not self._optimizer._optimizer_load_state_dict_pre_hooks
        for param, name in self._called(names):
            for key in (key for key in of_parameter.get(name, []) if key.kind != REPLICA):
                entry, local = entries[str(key)], param.detach()
                fits = entry.shape == tuple(param.shape)
                if key.kind == MASTER and not (fits and entry.dtype == dtype_name(param)):
                    raise ValueError(f"it has a master copy of {name}, which an optimizer without ZeRO does not use")
                if key.per is Per.ELEMENT and not fits:
                    raise _misfit(key, entry, param)
                if key.kind != MASTER:  # which the parameter lagged behind
                    in_use = in_place and key.per is Per.ELEMENT
                    live = self._optimizer.state.get(param, {}).get(key.kind) if in_use else None
                    local = _memory_for(live, entry.shape, entry.dtype)
                yield param, StateTensor.of(key, local, entry.shape)

    def _commit(self, rows: Sequence[tuple[Tensor, StateTensor]], groups: Sequence[dict[str, Any]]) -> None:
        packed = self._optimizer.state_dict()
        params = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        numbers = {param: number for number, param in enumerate(params)}
        state: dict[int, dict[str, Any]] = {}
        for param, tensor in rows:
            kind, value = tensor.key.kind, tensor.local
            if kind != MASTER:
                row = state.setdefault(numbers[param], {})
                row[kind] = value.item() if tensor.key.per is Per.NUMBER else value
        for group, saved in zip(packed["param_groups"], groups, strict=True):
            for name, value in saved.items():
                if name in group and name not in FUNCTIONAL:
                    group[name] = torch.full_like(group[name], value) if isinstance(group[name], Tensor) else value
        self._optimizer.load_state_dict({**packed, "state": state})


# -- error feedback of a ZeroOptimizer --------------------------------------------------------------------------------


class _Decoded:
    """Stands for some of a slice's errors, as float32, which are decoded when a save writes them."""

    dtype = torch.float32

    def __init__(self, errors: CompactErrors, place: int, numel: int) -> None:
        self.shape = (numel,)
        self._errors, self._place = errors, place

    def numel(self) -> int:
        return self.shape[0]

    def detach(self) -> Tensor:
        return values_of(self._errors)[self._place : self._place + self.numel()]


def error_tensors(partition: PartitionedParameters, called: Sequence[str]) -> Iterator[StateTensor]:
    for gradients in partition.reducer.slices:
        if gradients.errors is not None:
            yield from _errors_of_slice(partition, called, gradients, partial(_Decoded, gradients.errors))


def _errors_of_slice(
    partition: PartitionedParameters, called: Sequence[str], gradients: SliceGradients, local: Callable[[int, int], Any]
) -> Iterator[StateTensor]:
    """Describe this rank's errors of a slice; ``local`` returns some of them by their place and number."""
    everyone = partition.communicator
    for number, spans in gradients.error_spans.items():
        flat = partition.known[number].communicator.levels is None  # as in groups of only some ranks
        key = TensorKey(Kind.WORKER, called[number], rank=everyone.rank if flat else everyone.topology.node)
        of_sender: dict[str, Any] = {"of_each_rank": True, "node_size": everyone.topology.node_size, "is_error": True}
        shape = tuple(partition.tensors[number].shape)
        for span in spans:
            yield StateTensor.of(key, local(span.offset, span.numel), shape, span.start, **of_sender)


# -- inside a ZeroOptimizer -------------------------------------------------------------------------------------------


class PartitionedState(State):
    """The state of a ZeroOptimizer, of which each rank holds some parts."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer, partition = optimizer, optimizer.partition
        shared: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for number in partition.in_order():
            if partition.known[number].owner is None:
                shared[partition.known[number].group].append(partition.tensors[number])
        super().__init__(optimizer.communicator, optimizer.parameter_names(), shared)

    def header(self) -> dict[str, Any]:
        optimizer = self._optimizer
        size = self.communicator.topology.node_size
        nodes = {NODE_SIZE: size} if size > 1 else {}
        return {**header_of(optimizer), **nodes, "param_groups": [plain_group(g) for g in optimizer.param_groups]}

    def tensors(self, names: Names) -> list[StateTensor]:
        optimizer, called = self._optimizer, self._qualified(names)
        optimizer.partition.require_replicas("save_state()")
        optimizer.partition.take_written_values()
        tensors = list(error_tensors(optimizer.partition, called))
        singles: dict[TensorKey, str] = {}
        for part, row in rows_of(optimizer):
            state = row.pop("state")
            shape, name = part.real.shape, called[part.param]
            _check_keys(state, optimizer.optimizer_class.__name__)
            whole = {key: state[key] for key in element_state(state, part)} | row
            for kind, value in whole.items():
                tensors.append(StateTensor.of(TensorKey(kind, name), value, tuple(shape), part.span.start))
            for kind, value in state.items():  # a value per parameter is beside every part of it
                if kind not in whole and value is not None:
                    single = self._single(kind, name, value)
                    same = repr(single.local.item())
                    if singles.setdefault(single.key, same) != same:
                        raise ValueError(not_alike(single.key))
                    tensors.append(single)
        return tensors

    def _single(self, kind: str, name: str, value: Any) -> StateTensor:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"the state {kind!r} of {self._optimizer.optimizer_class.__name__} has the shape {list(value.shape)} "
                f"for a part of {name}: it is neither one value for each element nor one number, so that a checkpoint "
                "cannot cut it into other parts; use this optimizer without ZeRO, or save optimizer.state_dict() on "
                "every rank"
            )
        return _value_of_parameter(kind, name, value)

    def _qualified(self, names: Names) -> list[str]:
        """One name per parameter; if only some ranks hold copies of it, with the first of them."""
        partition = self._optimizer.partition
        rest = [iter(group) for group in names]
        result = [""] * len(partition.known)
        for number in partition.in_order():
            known = partition.known[number]
            result[number] = ("" if known.owner is None else f"from{known.owner}.") + next(rest[known.group])
        return result

    # -- loading ------------------------------------------------------------------------------------------------------

    def plan_load(self, names: Names, header: Header, entries: Entries) -> LoadPlan:
        optimizer, partition = self._optimizer, self._optimizer.partition
        called = self._qualified(names)
        partition.require_replicas("load_state()")
        check_header(optimizer, header.values)
        groups_of = enumerate(optimizer.param_groups)
        with_ranks = [number for number, group in groups_of if group.get("process_group") is not None]
        check_ranks(header.values["world_size"], self.communicator.world_size, with_ranks)
        groups = _groups_to_load(optimizer.param_groups, header, names, entries)
        rows: list[Row] = [(part, {"state": {}}) for part in partition.parts()]
        staged = list(self._staged(rows, called, header, entries))
        tensors = [tensor for _, tensor in staged]
        ranks = range(int(header.values["world_size"]))
        loaded: list[tuple[SliceGradients, CompactErrors, Tensor]] = []
        for gradients in partition.reducer.slices:
            if gradients.errors is None:
                continue
            values = torch.zeros(gradients.errors.numel(), dtype=torch.float32, device="cpu")
            loaded.append((gradients, gradients.errors, values))
            for error in _errors_of_slice(partition, called, gradients, partial(values.narrow, 0)):
                if any(str(error.key.of_rank(rank)) in entries for rank in ranks):  # others become zero
                    tensors.append(error)

        def commit() -> None:
            for gradients, before, values in loaded:
                gradients.drop_errors()
                keep_(before, values.to(before.device))
            for (part, row), tensor in staged:
                key, local = tensor.key, tensor.local
                if key.kind in (MASTER, REPLICA):
                    row[key.kind] = local
                elif key.per is Per.ELEMENT and not part.direct and header.values.get("stage") == 0:
                    row["state"][key.kind] = local.to(part.tensor.dtype)  # it was a 16-bit parameter's
                else:
                    row["state"][key.kind] = local.item() if key.per is Per.NUMBER else local
            take_rows(optimizer, rows, groups)
            load_header(optimizer, header.values)
            self._synchronize(rows, {TensorKey.parse(name).kind for name in entries})

        return tensors, commit

    def _staged(
        self, rows: Sequence[Row], called: Sequence[str], header: Header, entries: Entries
    ) -> Iterator[tuple[Row, StateTensor]]:
        of_parameter = keys_by_parameter(entries)
        for row in rows:
            part, _ = row
            name, param = called[part.param], part.real
            keys, master = of_parameter.get(name, []), TensorKey(MASTER, name)
            if part.tensor.dtype != param.dtype and master not in keys and header.values.get("stage") != 0:
                keys = [*keys, master]  # its absence is an error; an ordinary optimizer has none to save
            for key in keys:
                if key.kind == REPLICA and not part.is_ahead:
                    continue
                entry = entries.get(str(key)) or TensorEntry(dtype_name(part.tensor), tuple(param.shape), ())
                shape, start = entry.shape, 0
                live = None
                if key.per is Per.ELEMENT:
                    fits = shape == tuple(param.shape)
                    shape, start = (part.span.numel,), part.span.start
                    live = part.tensor if key.kind == MASTER else part.state.get(key.kind)
                elif key.per is Per.NUMBER:
                    fits = shape == ()
                else:
                    fits = prod(shape) == 1
                if not fits:
                    raise _misfit(key, entry, param)
                yield row, StateTensor.of(key, _memory_for(live, shape, entry.dtype), entry.shape, start)

    def _synchronize(self, rows: Sequence[Row], kinds: set[str]) -> None:
        """Give all ranks the parameters that belong to the masters of a checkpoint with these kinds of tensors."""
        partition = self._optimizer.partition
        direct = MASTER in kinds and any(part.direct and MASTER in row for part, row in rows)
        if MASTER not in kinds or not (
            partition.has_replicas or REPLICA in kinds or any(self.communicator.all_gather_object(direct))
        ):
            return
        for part in partition.parts():
            part.write_back()
        for part, row in rows:
            if REPLICA in row:
                write_span(part.real, part.span.start, part.span.stop, row[REPLICA])
        partition.share_parts()
        for part in partition.parts():
            if part.is_ahead:
                part.expect(part.replica)
