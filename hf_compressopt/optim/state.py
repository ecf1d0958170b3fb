"""The state of a compressed optimizer as a state dict, and the header that goes with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_compressopt.announce import write_log
from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.flat import BYTES_PER_MB, FLOAT_BYTES, PIECES
from hf_compressopt.format.index import NODE_SIZE
from hf_compressopt.format.plan import Kind
from hf_compressopt.optim.describe import GroupTensors
from hf_compressopt.optim.gradients import NOISE
from hf_compressopt.optim.group import GroupState
from hf_compressopt.optim.math import is_zero
from hf_compressopt.optim.moments import MOMENTS, check_pieces
from hf_compressopt.optim.options import check_at_least, check_count, check_group, loadable_group
from hf_compressopt.optim.overlap import LATE_CLIP
from hf_compressopt.optim.warmup import ERROR_CLIP, LOSS_SCALE, WarmupGradients
from hf_compressopt.schedules import AUTO, Schedule, Stage, StepPlan, Warmup

logger = logging.getLogger(__name__)

#: Key of a state dict for everything that torch's own state dicts have no place for.
STATE_KEY = "compressopt"
#: The text of a stub in place of an optimizer's state.
STUB_NOTE = "a stub: the state is in compressopt.index.json and the safetensors files beside this one"


def make_stub(packed: dict[str, Any], step: int) -> dict[str, Any]:
    packed["state"] = {}
    # torch's own optimizers refuse one group too many; they would take an empty state for a fresh one
    packed["param_groups"].append({"params": [], STATE_KEY: STUB_NOTE})
    packed[STATE_KEY] = {"stub": True, "step": step}
    return packed


class HasGroups(Protocol):
    param_groups: list[dict[str, Any]]


def load_with_hooks(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any], dict[str, Any] | None], None],
    *,
    in_shards: bool,
) -> None:
    """Load a state dict between the hooks that torch calls around a load."""
    state_dict = state_dict.copy()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    entry = state_dict.get(STATE_KEY)
    if entry is not None and entry.get("stub") and not in_shards:
        raise ValueError(
            "this state dict is a stub: the state lies beside it, in compressopt.index.json and safetensors files; use "
            "hf_compressopt.load_state(optimizer, directory), or Trainer or Accelerate with hf_compressopt registered"
        )
    if not in_shards:
        load(state_dict, entry)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def matching_groups(optimizer: HasGroups, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the param groups of a state dict, which must be as large as the optimizer's."""
    groups: list[dict[str, Any]] = state_dict["param_groups"]
    sizes, saved = ([len(group["params"]) for group in each] for each in (optimizer.param_groups, groups))
    if sizes != saved:
        raise ValueError(f"the state dict has param groups of {saved} parameters, this optimizer of {sizes}")
    return groups


def load_groups(optimizer: HasGroups, saved: Sequence[dict[str, Any]], left_alone: Collection[str] = ()) -> None:
    """Take over hyperparameters, in place: schedulers keep hold of the groups."""
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            if key == "lr" and isinstance(group.get(key), Tensor):
                group[key].fill_(float(value))
            elif key not in left_alone:
                group[key] = value


@contextmanager
def switched(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute of an object inside the block, and restore it afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


#: Name of the tensor that holds the norms that "auto" compares.
HISTORY = "freeze_history"
#: Key of a header that says that averaged gradients have travelled as ``warmup_bits`` say.
TRAVELLED = "warmup_gradients"
#: Key of a header that says that others have written parameters since the last sync of 0/1 Adam, on some rank.
WRITTEN = "parameters_written"
#: Key of a header that says that the ranks shared out the moments: server errors were those of updates then.
SHARED_OUT = "moments_shared_out"
#: Name in a header of how many elements of each param group travel in full beside signs.
IN_FULL = "in_full"
_LENGTHS = {
    HISTORY: None,
    NOISE: 2,
    LATE_CLIP: 4,
    LOSS_SCALE: 1,
    ERROR_CLIP: 2,
}  # of the tensors that belong to no group
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Progress:
    """The counts of a run so far, which the header of a state has beside options."""

    step: int
    lr_warmup: Warmup
    rounds: int
    skipped_steps: int
    bytes_sent: int
    gradients_travelled: bool  # averaged gradients have travelled as ``warmup_bits`` say
    parameters_written: bool  # others had written parameters since the last sync of 0/1 Adam


class Stateful(HasGroups, Protocol):
    """A compressed optimizer, as what describes and loads its state sees it."""

    communicator: Communicator
    lr_warmup: Warmup
    traffic: Traffic
    warmup_gradients: WarmupGradients
    bucket_numel: int
    scale_block: int | None
    rounds: int
    skipped_steps: int
    _step: int
    _states: list[GroupState]
    _tensors: dict[str, Tensor]

    @property
    def schedule(self) -> Schedule: ...
    @property
    def last_plan(self) -> StepPlan: ...
    def tensors_of_all_groups(self) -> dict[str, Tensor]: ...
    def _parameters_were_replaced(self) -> bool: ...
    def _resume(self, progress: Progress, schedule: Schedule) -> None: ...
    def _state_loaded(self) -> None: ...


# -- the header -------------------------------------------------------------------------------------------------------


def _shares_out(optimizer: Stateful) -> bool:
    return any(state.moments.shards is not None for state in optimizer._states)


def header_of(optimizer: Stateful) -> dict[str, Any]:
    others: dict[str, Any] = {TRAVELLED: True} if optimizer.warmup_gradients.ever_in_use else {}
    others |= {SHARED_OUT: True} if _shares_out(optimizer) else {}
    others |= {} if optimizer.communicator.levels is None else {NODE_SIZE: optimizer.communicator.topology.node_size}
    return {
        "optimizer": type(optimizer).__name__,
        "step": optimizer._step,
        "stage": optimizer.last_plan.stage.value,
        "world_size": optimizer.communicator.world_size,
        "schedule": optimizer.schedule.options(),
        "lr_warmup": [optimizer.lr_warmup.rate, optimizer.lr_warmup.step],
        "bucket_numel": optimizer.bucket_numel,
        "scale_block": optimizer.scale_block,
        IN_FULL: _in_full(optimizer),
        "skipped_steps": optimizer.skipped_steps,
        "rounds": optimizer.rounds,
        "bytes_sent": optimizer.traffic.total_bytes,
        **others,
    }


def check_header(optimizer: Stateful, header: dict[str, Any]) -> None:
    if header.get("optimizer") != type(optimizer).__name__:
        raise ValueError(f"the state is {header.get('optimizer')}'s, this optimizer is {type(optimizer).__name__}")
    for name in ("step", "skipped_steps", "rounds", "bytes_sent", "bucket_numel", "world_size"):
        check_count(name, header.get(name), low=0)
    if header.get("stage") not in {stage.value for stage in Stage}:
        raise ValueError(f"stage must be one of {[stage.value for stage in Stage]}, got {header.get('stage')!r}")
    type(optimizer.schedule).of(header.get("schedule"))
    _lr_warmup_of(optimizer, header)
    if (saved := header.get(IN_FULL, [0] * len(_in_full(optimizer)))) != _in_full(optimizer):
        raise ValueError(
            f"the state was made with {saved} elements of small tensors beside its messages, by param group, this "
            f"optimizer has {_in_full(optimizer)}: "
            + (
                f"give scale_block={header.get('scale_block')!r}, with which it was saved"
                if IN_FULL in header
                else "it is of an earlier version, which sent them as signs; go on with that version"
            )
        )
    if optimizer.communicator.world_size > 1 and header["bucket_numel"] != optimizer.bucket_numel:
        cap = (header["bucket_numel"] + 0.5) * FLOAT_BYTES / BYTES_PER_MB
        raise ValueError(
            f"the state was made with buckets of {header['bucket_numel']} elements, this optimizer has "
            f"{optimizer.bucket_numel}: give bucket_cap_mb={cap!r}"
        )


def _in_full(optimizer: Stateful) -> list[int]:
    """Return the elements of each param group that travel in full beside signs; 0 if not all ranks hold the group."""
    shared = [(state.layout, state.own_rank is None) for state in optimizer._states]
    return [layout.numel - layout.in_messages.numel if everyone else 0 for layout, everyone in shared]


def load_header(optimizer: Stateful, header: dict[str, Any]) -> None:
    """Take over a header that was checked, after the tensors."""
    if bool(header.get(SHARED_OUT)) != _shares_out(optimizer):
        for state in optimizer._states:
            state.errors.server.zero_()
    before = optimizer.schedule.options()
    progress = Progress(
        step=header["step"],
        lr_warmup=_lr_warmup_of(optimizer, header),
        rounds=header["rounds"],
        skipped_steps=header["skipped_steps"],
        bytes_sent=header["bytes_sent"],
        gradients_travelled=bool(header.get(TRAVELLED)),
        parameters_written=bool(header.get(WRITTEN)),
    )
    optimizer._resume(progress, type(optimizer.schedule).of(header["schedule"]))
    replaced = optimizer.schedule.options() != before and AUTO not in before.values()
    if replaced and optimizer.communicator.rank == 0:
        message = "the schedule of the loaded state, %s, replaces %s"
        write_log(logger, logging.WARNING, message, header["schedule"], before)


def _lr_warmup_of(optimizer: Stateful, header: dict[str, Any]) -> Warmup:
    """Return the learning rate's warmup of a header; without one, the rate rises no more unless it rises later."""
    saved = header.get("lr_warmup", [float(optimizer.param_groups[0]["lr"]), 0])
    try:
        rate, step = saved
        check_at_least("lr_warmup", rate, 0)
        check_count("lr_warmup", step, low=0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"lr_warmup must be a rate and a step, got {saved!r}") from error
    return Warmup(rate, step)


def plain_header(optimizer: Stateful, step: int) -> dict[str, Any]:
    ended = step >= optimizer.schedule.last_warmup_step
    schedule = (optimizer.schedule.frozen_at(step + 1) if ended else optimizer.schedule).options()
    header = header_of(optimizer)
    del header["lr_warmup"]  # what was imported does not tell it
    return {**header, "schedule": schedule, "step": step, "skipped_steps": 0, "rounds": step, "bytes_sent": 0}


def check_tensors(tensors: dict[str, Tensor], schedule: Schedule, *, has_variance: bool = True) -> None:
    for name, tensor in tensors.items():
        if name not in _LENGTHS:
            raise ValueError(f"{name!r} is not a tensor of a compressed optimizer")
        length, numel = _LENGTHS[name], tensor.numel()
        fits = tensor.dim() == 1 and (numel == length or (length is None and numel >= 2))
        if tensor.dtype != torch.float64 or not fits:
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name!r} must be float64 [{length or '2 or more'}], got {got}")
    if HISTORY not in tensors and schedule.freeze_step == AUTO and has_variance:
        raise ValueError(f"freeze_step is 'auto', and there is no {HISTORY!r}")


@dataclass(frozen=True)
class StateToLoad:
    """A checked state on its way into an optimizer, from a state dict or from files: what is filled, and taken over."""

    optimizer: Stateful
    header: dict[str, Any]
    param_groups: Sequence[dict[str, Any]]  # hyperparameters
    groups: Sequence[GroupTensors]  # which a load fills
    tensors: dict[str, Tensor]  # that belong to no group, likewise

    def commit(self) -> None:
        """Take over what was filled."""
        optimizer = self.optimizer
        load_groups(optimizer, self.param_groups)
        frozen = variance_is_frozen(optimizer, self.header)
        for group in self.groups:
            group.commit(frozen=frozen)
        optimizer._tensors.clear()  # in place: others hold the dict
        optimizer._tensors.update(self.tensors)
        load_header(optimizer, self.header)
        optimizer._state_loaded()


def variance_is_frozen(optimizer: Stateful, header: dict[str, Any]) -> bool:
    """Return whether the variance is frozen in the step that follows a state, refreshed or not."""
    schedule = type(optimizer.schedule).of(header["schedule"])
    return schedule.plan(header["step"] + 1).stage.number > 0


# -- state dicts ------------------------------------------------------------------------------------------------------


def own_state(optimizer: Stateful) -> dict[str, Any]:
    states = optimizer._states
    return {
        **header_of(optimizer),
        **({WRITTEN: True} if optimizer._parameters_were_replaced() else {}),
        "rank": optimizer.communicator.rank,
        Kind.WORKER: [state.errors.worker for state in states],
        Kind.SERVER: [state.errors.server for state in states],
        "group_tensors": [state.beside_moments("group") for state in states],
        "tensors": dict(optimizer.tensors_of_all_groups()),
    }


def load_full(optimizer: Stateful, state_dict: dict[str, Any], entry: dict[str, Any] | None) -> None:
    """Load a state dict with its header, or a plain one of torch's Adam; nothing changes if it does not fit."""
    rows = _matching_rows(optimizer, state_dict)
    if entry is None:
        steps = [int(row[Kind.STEP]) for _, _, row in rows if row]
        header = plain_header(optimizer, max(steps, default=0))
    else:
        header = entry
        _check_errors(optimizer, entry)
    check_header(optimizer, header)
    saved_groups = [loadable_group(group) for group in state_dict["param_groups"]]
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        check_group({**group, **saved}, number)
    frozen = variance_is_frozen(optimizer, header)
    groups = [GroupTensors.to_fill(state, frozen=frozen) for state in optimizer._states]
    of_this_rank = header.get("rank") == optimizer.communicator.rank
    for number, index, row in rows:
        check_pieces(row, groups[number].moments.shards if of_this_rank else None, index)
    for number, index, row in rows:
        groups[number].fill_parameter(index, row)
    for number, group_tensors in enumerate(groups):
        group_tensors.fill_group({} if entry is None else entry["group_tensors"][number])
    _load_errors(optimizer, entry)
    if entry is not None:
        tensors = {name: tensor.clone() for name, tensor in entry["tensors"].items()}
    else:  # a plain state has no norms yet
        tensors = {HISTORY: torch.zeros_like(optimizer._tensors[HISTORY])} if HISTORY in optimizer._tensors else {}
    StateToLoad(optimizer, header, saved_groups, groups, tensors).commit()


def _matching_rows(optimizer: Stateful, state_dict: dict[str, Any]) -> list[tuple[int, int, dict[str, Any]]]:
    """Return the saved state of each trainable parameter, with its group and its place; {} if there is none for it."""
    saved_groups, rows = matching_groups(optimizer, state_dict), []
    for group, saved_group, state in zip(optimizer.param_groups, saved_groups, optimizer._states, strict=True):
        key = dict(zip(group["params"], saved_group["params"], strict=True))
        for index, param in enumerate(state.params):
            row = state_dict["state"].get(key[param], {})
            if row:
                _check_row(row, state.shapes(index), key[param], whole=STATE_KEY in state_dict)
            rows.append((state.number, index, row))
    return rows


def _check_row(row: dict[str, Any], shapes: dict[str, tuple[int, ...]], key: Any, *, whole: bool) -> None:
    """Check the shapes in the saved state of a parameter. ``whole``: it is of this class, and not a plain Adam's."""
    for name, shape in shapes.items():
        expected = whole or name in (Kind.STEP, *MOMENTS)
        if not expected or (PIECES in row and name in MOMENTS):
            continue
        saved = tuple(getattr(row[name], "shape", ())) if name in row else "nothing"
        if saved != shape:
            raise ValueError(f"{name} of parameter {key} must have shape {shape}, the state dict has {saved}")


def _check_errors(optimizer: Stateful, entry: dict[str, Any]) -> None:
    ranks = optimizer.communicator
    for name, saved, present in (
        ("world_size", entry["world_size"], ranks.world_size),
        (NODE_SIZE, entry.get(NODE_SIZE, 1), ranks.topology.node_size),
    ):
        if saved != present:
            raise ValueError(
                f"the state dict was saved with {name}={saved}, this one has {present}: resume on as many ranks and in "
                "the same topology, or use hf_compressopt.save_state and load_state, which work on any ranks and nodes"
            )
    if entry["rank"] != ranks.rank and not all(map(is_zero, [*entry[Kind.WORKER], *entry[Kind.SERVER]])):
        raise ValueError(
            f"the state dict was saved by rank {entry['rank']}, whose errors differ from those of rank {ranks.rank}: "
            "use hf_compressopt.save_state and load_state, which keep the errors of every rank"
        )
    for place, name in enumerate((Kind.WORKER, Kind.SERVER)):
        saved = [error.numel() for error in entry[name]]
        sizes = [
            state.errors.sizes_of(error.dtype)[place]
            if state.compressed and (state.communicator.world_size > 1 or error.numel())
            else 0
            for state, error in zip(optimizer._states, entry[name], strict=True)
        ]
        if entry["rank"] == optimizer.communicator.rank and sizes != saved:
            raise ValueError(f"{name} must have {sizes} elements per param group, the state dict has {saved}")


def _load_errors(optimizer: Stateful, entry: dict[str, Any] | None) -> None:
    """Take over the errors of a state dict that was checked; zeros if it has none, or is another rank's."""
    for number, state in enumerate(optimizer._states):
        saved = None
        if entry is not None and entry["rank"] == optimizer.communicator.rank:
            saved = entry[Kind.WORKER][number], entry[Kind.SERVER][number]
        if optimizer.communicator.world_size == 1:
            worker, server = saved or (_NOTHING, _NOTHING)
            state.errors.take(worker.clone(), server.clone())
        elif saved is not None:
            state.errors.copy_(*saved)
        else:
            state.errors.zero_()
