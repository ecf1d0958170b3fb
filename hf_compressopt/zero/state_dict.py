"""State dicts of a ZeroOptimizer: this rank's parts in its own, or cut out of one of the wrapped optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.flat import PIECES
from hf_compressopt.format.plan import MASTER, REPLICA
from hf_compressopt.optim.options import check_count
from hf_compressopt.optim.state import STATE_KEY, HasGroups, load_groups, make_stub, matching_groups
from hf_compressopt.zero.config import ZeroConfig
from hf_compressopt.zero.parameters import PartitionedParameters
from hf_compressopt.zero.parts import OWN_KEYS, Part, element_state
from hf_compressopt.zero.reducer import LossScale

#: Hyperparameters that choose an implementation: those of a saved state are left alone.
FUNCTIONAL = ("foreach", "fused", "capturable", "differentiable")


class Partitioned(HasGroups, Protocol):
    """A ZeroOptimizer, as its state dicts and the report of its memory see it."""

    optimizer_class: type[torch.optim.Optimizer]
    config: ZeroConfig
    partition: PartitionedParameters
    communicator: Communicator
    loss_scale: LossScale
    traffic: Traffic
    stage: int
    steps: int
    skipped_steps: int

    def resume(self, steps: int, skipped_steps: int) -> None: ...  # take over the counts of a saved state


def header_of(optimizer: Partitioned) -> dict[str, Any]:
    scaler = {} if optimizer.config.grad_form is None else {"grad_scale": optimizer.loss_scale.of_scaler}
    return {
        **scaler,
        "class": f"ZeroOptimizer({optimizer.optimizer_class.__name__})",
        "stage": optimizer.stage,
        "step": optimizer.steps,
        "skipped_steps": optimizer.skipped_steps,
        "world_size": optimizer.communicator.world_size,
        "loss_scale": [optimizer.loss_scale.value, optimizer.loss_scale.good_steps],
        "bytes_sent": optimizer.traffic.total_bytes,
    }


def check_header(optimizer: Partitioned, header: dict[str, Any]) -> None:
    wanted = header_of(optimizer)["class"]
    if header.get("class") != wanted:
        raise ValueError(f"the state is of class {header.get('class')!r}, this optimizer of {wanted!r}")
    for name in ("step", "skipped_steps", "world_size", "bytes_sent"):
        check_count(name, header.get(name), low=0)
    scale = header.get("loss_scale")
    if not isinstance(scale, list) or len(scale) != 2 or not float(scale[0]) > 0 or int(scale[1]) < 0:
        raise ValueError(f"loss_scale in the state must be a number > 0 and a count, got {scale!r}")
    scaler = header.get("grad_scale", 1.0)
    if not isinstance(scaler, (int, float)) or not 0 < scaler < inf:
        raise ValueError(f"grad_scale in the state must be a number > 0, got {scaler!r}")


def load_header(optimizer: Partitioned, header: dict[str, Any]) -> None:
    optimizer.resume(int(header["step"]), int(header["skipped_steps"]))
    value, good_steps = header["loss_scale"]
    optimizer.loss_scale.resume(float(value), int(good_steps), float(header.get("grad_scale", 1.0)))
    optimizer.traffic.restore(int(header["bytes_sent"]))
    optimizer.partition.check_ranks_again()


# -- the parts --------------------------------------------------------------------------------------------------------

#: A part and its values: "state" is the wrapped optimizer's, "master" a copy of the parameter's elements, and "replica"
#: what the parameter has while the master is ahead of it.
Row = tuple[Part, dict[str, Any]]


def rows_of(optimizer: Partitioned) -> Iterator[Row]:
    """Yield everything that this rank holds, for state dicts and for files; the values are the optimizer's own."""
    for part in optimizer.partition.parts():
        row: dict[str, Any] = {"state": part.state}
        row |= {} if part.direct else {MASTER: part.tensor}
        row |= {REPLICA: part.replica} if part.is_ahead else {}
        yield part, row


def take_rows(optimizer: Partitioned, rows: Iterable[Row], groups: Sequence[dict[str, Any]]) -> None:
    """Take over the values of all parts, and hyperparameters in place, since schedulers hold the groups."""
    of_torch = optimizer.optimizer_class.__module__.startswith("torch.optim.")
    for part, row in rows:
        state = row["state"]
        if MASTER in row:
            part.tensor.copy_(row[MASTER].reshape(-1))
            if part.is_ahead:
                part.expect(row.get(REPLICA, part.replica))
        else:
            part.read_back()
        for name in element_state(state, part):
            value, dtype = state[name], optimizer.config.kept_state
            if dtype is None and value.is_floating_point():
                dtype = part.tensor.dtype if of_torch else torch.promote_types(value.dtype, part.tensor.dtype)
            state[name] = value.to(part.tensor.device, dtype or value.dtype)
        part.take_state(state)
    load_groups(optimizer, groups, (*OWN_KEYS, *FUNCTIONAL))


# -- saving -----------------------------------------------------------------------------------------------------------


def pack(optimizer: Partitioned, packed: dict[str, Any], *, in_shards: bool) -> dict[str, Any]:
    """Complete torch's state dict, which knows the param groups alone; make it a stub if the state is in shards."""
    for group in packed["param_groups"]:
        group.pop("process_group", None)
    if in_shards:
        return make_stub(packed, optimizer.steps)
    optimizer.partition.require_replicas("state_dict()")
    optimizer.partition.take_written_values()
    numbers = {id(tensor): number for number, tensor in enumerate(dict.fromkeys(_all_parameters(optimizer)))}
    for part, row in rows_of(optimizer):
        row |= {REPLICA: row[REPLICA].clone()} if part.is_ahead else {}
        entry = packed["state"].setdefault(numbers[id(part.real)], {PIECES: []})
        entry[PIECES].append(part.span.piece(row))
    packed[STATE_KEY] = {**header_of(optimizer), "rank": optimizer.communicator.rank}
    if errors := _errors(optimizer):
        packed[STATE_KEY]["worker_errors"] = errors
    return packed


def _errors(optimizer: Partitioned) -> list[Tensor]:
    slices = optimizer.partition.reducer.slices
    return [gradients.errors.messages for gradients in slices if gradients.errors is not None]


def _all_parameters(optimizer: Partitioned) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


# -- loading ----------------------------------------------------------------------------------------------------------


def load(optimizer: Partitioned, state_dict: dict[str, Any], own: dict[str, Any] | None) -> None:
    """Load a state dict of this rank and layout, or a whole one without header; nothing changes if it does not fit."""
    partition = optimizer.partition
    partition.require_replicas("load_state_dict()")
    saved_groups = matching_groups(optimizer, state_dict)
    if own is not None:
        _check_own(optimizer, own)
    keys = chain.from_iterable(group["params"] for group in saved_groups)
    numbers = dict(zip(map(id, _all_parameters(optimizer)), keys, strict=True))
    rows: list[Row] = []
    for part in partition.parts():
        row = state_dict["state"].get(numbers[id(part.real)], {})
        found = _whole_state(row, part) if own is None else _own_state(row, part)
        state = {key: v.clone() if isinstance(v, Tensor) else v for key, v in found["state"].items()}
        rows.append((part, {**found, "state": state}))
    take_rows(optimizer, rows, saved_groups)
    saved_errors = None if own is None else own.get("worker_errors")
    for gradients in partition.reducer.slices:
        gradients.drop_errors()
    for number, messages in enumerate(_errors(optimizer)):
        messages.copy_(torch.tensor(0) if saved_errors is None else saved_errors[number])
    if own is not None:
        load_header(optimizer, own)
    else:
        steps = [int(row["step"]) for row in state_dict["state"].values() if "step" in row]
        optimizer.resume(max(steps, default=0), optimizer.skipped_steps)


def _check_own(optimizer: Partitioned, own: dict[str, Any]) -> None:
    check_header(optimizer, own)
    rank, world_size = optimizer.communicator.rank, optimizer.communicator.world_size
    if (own["rank"], own["world_size"]) != (rank, world_size):
        raise ValueError(
            f"the state dict is of rank {own['rank']} and world_size {own['world_size']}, this is rank {rank} of "
            f"{world_size}, and each rank has state of its own: save and load with hf_compressopt.save_state and "
            "load_state, which take any number of ranks"
        )
    mine, saved = _errors(optimizer), own.get("worker_errors")
    if saved is not None and mine:
        if len(saved) != len(mine):
            raise ValueError(f"the state dict has worker errors of {len(saved)} slices, this optimizer has {len(mine)}")
        for wanted, messages in zip(mine, saved, strict=True):
            if messages.shape != wanted.shape or messages.dtype != wanted.dtype:
                raise ValueError(
                    f"worker errors of {messages.dtype} {list(messages.shape)} do not fit a slice whose errors are "
                    f"uint8 {list(wanted.shape)}: were they saved with the same bucket size, number of ranks and "
                    "topology?"
                )


def _own_state(row: dict[str, Any], part: Part) -> dict[str, Any]:
    saved: list[dict[str, Any]] = row.get(PIECES, [])
    if any("replica" in entry for entry in saved) and not part.is_ahead:
        raise ValueError(
            "the state dict is of param_compression, with masters that are ahead of the parameters: make the optimizer "
            "with it, or load with hf_compressopt.load_state"
        )
    rows = {(entry["start"], entry["stop"]): entry for entry in saved}
    if (part.span.start, part.span.stop) not in rows:
        raise ValueError(
            f"the state dict has pieces {[*rows]} of a parameter of which this rank has elements {part.span.start} to "
            f"{part.span.stop}: make the optimizer with the bucket size and compression of the saved one, or load with "
            "hf_compressopt.load_state"
        )
    return rows[part.span.start, part.span.stop]


def _whole_state(row: dict[str, Any], part: Part) -> dict[str, Any]:
    state, param = {}, part.real
    for name, value in row.items():
        if isinstance(value, Tensor) and value.shape == param.shape and (value.dim() > 0 or name != "step"):
            value = value.reshape(-1)[part.span.start : part.span.stop].to(part.tensor.dtype)
        elif isinstance(value, Tensor) and value.dim() > 0:
            raise ValueError(f"{name} of shape {tuple(value.shape)} does not fit a parameter of {tuple(param.shape)}")
        state[name] = value
    return {"state": state}
