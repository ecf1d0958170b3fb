"""The state of a compressed optimizer as a state dict, and the header that goes with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_compressopt.announce import write_log
from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.flat import BYTES_PER_MB, FLOAT_BYTES
from hf_compressopt.format.index import NODE_SIZE
from hf_compressopt.optim.gradients import NOISE
from hf_compressopt.optim.group import GroupState
from hf_compressopt.optim.math import is_zero
from hf_compressopt.optim.moments import MOMENTS, PIECES, check_pieces, take_pieces
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
    own = state_dict.get(STATE_KEY)
    if own is not None and own.get("stub") and not in_shards:
        raise ValueError(
            "this state dict is a stub: the state lies beside it, in compressopt.index.json and safetensors files; use "
            "hf_compressopt.load_state(optimizer, directory), or Trainer or Accelerate with hf_compressopt registered"
        )
    if not in_shards:
        load(state_dict, own)
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


class Stateful(HasGroups, Protocol):
    """A compressed optimizer, as what describes and loads its state sees it."""

    communicator: Communicator
    schedule: Schedule
    lr_warmup: Warmup
    traffic: Traffic
    warmup_gradients: WarmupGradients
    bucket_numel: int
    scale_block: int | None
    rounds: int
    skipped_steps: int
    step_was_skipped: bool
    _step: int
    _states: list[GroupState]
    _tensors: dict[str, Tensor]
    _replaced_before: bool

    @property
    def last_plan(self) -> StepPlan: ...
    def tensors_of_all_groups(self) -> dict[str, Tensor]: ...
    def _parameters_were_replaced(self) -> bool: ...
    def _take_schedule(self, saved: Schedule) -> None: ...
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
    mine, schedule = optimizer.schedule.options(), type(optimizer.schedule).of(header["schedule"])
    optimizer._step = header["step"]
    optimizer._take_schedule(schedule)
    replaced = optimizer.schedule.options() != mine and "auto" not in mine.values()
    if replaced and optimizer.communicator.rank == 0:
        message = "the schedule of the loaded state, %s, replaces %s"
        write_log(logger, logging.WARNING, message, header["schedule"], mine)
    optimizer.lr_warmup = _lr_warmup_of(optimizer, header)
    optimizer.skipped_steps = header["skipped_steps"]
    optimizer.rounds = header["rounds"]
    optimizer.traffic.restore(header["bytes_sent"])
    optimizer.warmup_gradients.ever_in_use = bool(header.get(TRAVELLED))
    optimizer.step_was_skipped = False
    optimizer._replaced_before = bool(header.get(WRITTEN))


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
    mine = header_of(optimizer)
    del mine["lr_warmup"]  # what was imported does not tell it
    return {**mine, "schedule": schedule, "step": step, "skipped_steps": 0, "rounds": step, "bytes_sent": 0}


def check_tensors(tensors: dict[str, Tensor], schedule: Schedule, *, has_variance: bool = True) -> None:
    for name, tensor in tensors.items():
        if name not in _LENGTHS:
            raise ValueError(f"{name!r} is not a tensor of a compressed optimizer")
        length, numel = _LENGTHS[name], tensor.numel()
        fits = tensor.dim() == 1 and (numel == length or (length is None and numel >= 2))
        if tensor.dtype != torch.float64 or not fits:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name!r} must be float64 [{length or '2 or more'}], got {found}")
    if HISTORY not in tensors and schedule.freeze_step == AUTO and has_variance:
        raise ValueError(f"freeze_step is 'auto', and there is no {HISTORY!r}")


def take_tensors(optimizer: Stateful, tensors: dict[str, Tensor]) -> None:
    """Take over optimizer-wide tensors that were checked, in place: others hold the dict."""
    optimizer._tensors.clear()
    optimizer._tensors.update(tensors)


# -- state dicts ------------------------------------------------------------------------------------------------------


def own_state(optimizer: Stateful) -> dict[str, Any]:
    states = optimizer._states
    return {
        **header_of(optimizer),
        **({WRITTEN: True} if optimizer._parameters_were_replaced() else {}),
        "rank": optimizer.communicator.rank,
        "worker_error": [state.errors.worker for state in states],
        "server_error": [state.errors.server for state in states],
        "group_tensors": [dict(state.group_extra) for state in states],
        "tensors": dict(optimizer.tensors_of_all_groups()),
    }


def load_full(optimizer: Stateful, state_dict: dict[str, Any], own: dict[str, Any] | None) -> None:
    rows = _matching_rows(optimizer, state_dict)
    if own is None:
        steps = [int(row["step"]) for _, _, row in rows if row]
        header = plain_header(optimizer, max(steps, default=0))
    else:
        header = own
        _check_errors(optimizer, own)
    check_header(optimizer, header)
    saved_groups = [loadable_group(group) for group in state_dict["param_groups"]]
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        check_group({**group, **saved}, number)
    frozen = type(optimizer.schedule).of(header["schedule"]).plan(header["step"] + 1).stage.number > 0
    shards = {state: None if frozen else state.new_shards() for state in optimizer._states}
    for state, index, row in rows:
        check_pieces(row, shards[state] if header.get("rank") == optimizer.communicator.rank else None, index)
    for state in optimizer._states:
        state.moments = state.moments.to_fill(shards=shards[state])
    for state, index, row in rows:
        initial = {extra.name: row.get(extra.plain, extra.initial) for extra in state.extras}
        for name, target in state.torch_state(index).items():
            put = take_pieces if name == PIECES else _assign
            put(target, row if name == PIECES else row.get(name, initial.get(name, 0.0)))
    for number, state in enumerate(optimizer._states):
        for extra in state.extras:
            if extra.per == "group":
                value = extra.initial if own is None else own["group_tensors"][number][extra.name]
                _assign(state.group_extra[extra.name], value)
    _load_errors(optimizer, own)
    if own is not None:
        take_tensors(optimizer, {name: tensor.clone() for name, tensor in own["tensors"].items()})
    else:
        for tensor in optimizer._tensors.values():
            tensor.zero_()
    load_groups(optimizer, saved_groups)
    load_header(optimizer, header)
    optimizer._state_loaded()


def _matching_rows(optimizer: Stateful, state_dict: dict[str, Any]) -> list[tuple[GroupState, int, dict[str, Any]]]:
    """Return each trainable parameter with its saved state; {} if a plain state dict has none for it."""
    saved_groups, rows = matching_groups(optimizer, state_dict), []
    for group, saved_group, state in zip(optimizer.param_groups, saved_groups, optimizer._states, strict=True):
        key = dict(zip(group["params"], saved_group["params"], strict=True))
        for index, param in enumerate(state.params):
            row = state_dict["state"].get(key[param], {})
            for name, shape in state.shapes(index).items() if row else ():
                expected = STATE_KEY in state_dict or name in ("step", *MOMENTS)  # a plain Adam has no others
                if not expected or (PIECES in row and name in MOMENTS):
                    continue
                found = tuple(getattr(row[name], "shape", ())) if name in row else "nothing"
                if found != shape:
                    raise ValueError(
                        f"{name} of parameter {key[param]} must have shape {shape}, the state dict has {found}"
                    )
            rows.append((state, index, row))
    return rows


def _check_errors(optimizer: Stateful, own: dict[str, Any]) -> None:
    ranks = optimizer.communicator
    for name, saved, mine in (
        ("world_size", own["world_size"], ranks.world_size),
        (NODE_SIZE, own.get(NODE_SIZE, 1), ranks.topology.node_size),
    ):
        if saved != mine:
            raise ValueError(
                f"the state dict was saved with {name}={saved}, this one has {mine}: resume on as many ranks and in "
                "the same topology, or use hf_compressopt.save_state and load_state, which work on any ranks and nodes"
            )
    if own["rank"] != ranks.rank and not all(map(is_zero, [*own["worker_error"], *own["server_error"]])):
        raise ValueError(
            f"the state dict was saved by rank {own['rank']}, whose errors differ from those of rank {ranks.rank}: use "
            "hf_compressopt.save_state and load_state, which keep the errors of every rank"
        )
    for place, name in enumerate(("worker_error", "server_error")):
        saved = [error.numel() for error in own[name]]
        sizes = [
            state.errors.sizes_of(error.dtype)[place]
            if state.compressed and (state.communicator.world_size > 1 or error.numel())
            else 0
            for state, error in zip(optimizer._states, own[name], strict=True)
        ]
        if own["rank"] == optimizer.communicator.rank and sizes != saved:
            raise ValueError(f"{name} must have {sizes} elements per param group, the state dict has {saved}")


def _load_errors(optimizer: Stateful, own: dict[str, Any] | None) -> None:
    """Take over the errors of a state dict that was checked; zeros if it has none, or is another rank's."""
    mine = own if own is not None and own["rank"] == optimizer.communicator.rank else None
    for number, state in enumerate(optimizer._states):
        saved = (_NOTHING, _NOTHING) if mine is None else (mine["worker_error"][number], mine["server_error"][number])
        if optimizer.communicator.world_size == 1:
            state.errors.take(*(error.clone() for error in saved))
        elif mine is not None:
            state.errors.copy_(*saved)
        else:
            state.errors.zero_()


def _assign(target: Tensor, value: Any) -> None:
    target.copy_(value) if isinstance(value, Tensor) else target.fill_(float(value))
