"""Save and load: every rank writes one safetensors shard, rank 0 the index, and every rank reads what it will hold.

state -> shards (safetensors) -> index (JSON) -> reshard plan (pure) -> reads
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_compressopt.checkpoint.background import PendingSave, wait_for_saves
from hf_compressopt.checkpoint.files import ShardFiles, absent_shards
from hf_compressopt.checkpoint.index import INDEX_NAME, CheckpointError, CheckpointIndex
from hf_compressopt.checkpoint.reshard import Plan, Wanted, plan_reads
from hf_compressopt.checkpoint.saving import (
    Checkpointable,
    HostCopy,
    Snapshot,
    bytes_of,
    describe_parameters,
    dtype_name,
    run_together,
    take_snapshot,
    write_snapshot,
)
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import StateTensor
from hf_compressopt.optim.flat_optimizer import FlatOptimizer
from hf_compressopt.zero.plain import PlainState
from hf_compressopt.zero.state import ZeroState

DEFAULT_PREFIX = "compressopt"


def has_checkpoint(directory: str | os.PathLike[str], *, prefix: str = DEFAULT_PREFIX) -> bool:
    """Whether a folder holds an index."""
    return (Path(directory) / INDEX_NAME.format(prefix=prefix)).is_file()


def save_state(
    optimizer: torch.optim.Optimizer,
    directory: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> None:
    """Save an optimizer's whole state, every rank's errors included. All ranks call; they return together.

    An earlier checkpoint in the same folder stays loadable until the new one is whole, and goes then.

    Args:
        optimizer: The optimizer. One that is not of this package, such as torch's AdamW, is alike on all ranks, and its
            checkpoint is that of a ZeroOptimizer around it.
        directory: The folder; made where missing.
        names: A name for each trainable parameter, in the optimizer's order; torch's ``param_names`` where None.
        prefix: Start of the files' names, for several optimizers in one folder.

    Raises:
        ValueError: If the names do not fit.
        OSError: If a file cannot be written; then on all ranks, and an earlier checkpoint is as it was.
    """
    write_snapshot(*_begin(optimizer, directory, names, prefix))


def async_save_state(
    optimizer: torch.optim.Optimizer,
    directory: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> PendingSave:
    """As :func:`save_state`, but return as soon as what is to be written is copied to host memory. All ranks call.

    The training may go on, and change everything: what is saved is the state at this call. An earlier save of this
    optimizer, or into these files, is waited for first. The copies take as much memory as this rank writes, pinned
    where it comes from a CUDA device; it is kept for the next time, until the optimizer goes.

    Args:
        optimizer: As in :func:`save_state`.
        directory: As in :func:`save_state`.
        names: As in :func:`save_state`.
        prefix: As in :func:`save_state`.

    Returns:
        The save under way. The next save and load and the end of the process wait for it.

    Raises:
        ValueError: If the names do not fit.
        OSError: If the folder is not writable, or an earlier save in the background has failed; on all ranks.
    """
    snapshot, communicator = _begin(optimizer, directory, names, prefix)
    inner = _innermost(optimizer)
    background = _BACKGROUNDS.pop(inner, None)
    if background is None:
        background = run_together(communicator, lambda: _Background(communicator), snapshot.remove)
    copied = run_together(communicator, lambda: background.copy.take(snapshot), snapshot.remove)
    _BACKGROUNDS[inner] = background
    channel = background.channel
    background.save = PendingSave(snapshot.index_file, lambda: write_snapshot(copied, channel))
    return background.save


class _Background:
    """What an optimizer's saves in the background have: a channel between the ranks, and memory."""

    def __init__(self, communicator: Communicator) -> None:
        self.channel = communicator.duplicate()
        self.copy = HostCopy()
        self.save: PendingSave | None = None


# Of optimizers that may be anybody's, on which nothing is hung.
_BACKGROUNDS: WeakKeyDictionary[torch.optim.Optimizer, _Background] = WeakKeyDictionary()


def _begin(
    optimizer: torch.optim.Optimizer, directory: str | os.PathLike[str], names: Sequence[str] | None, prefix: str
) -> tuple[Snapshot, Communicator]:
    state, folder = _checkpointable(optimizer), Path(directory)
    grouped = state.parameter_names(names)
    background, path = _BACKGROUNDS.get(_innermost(optimizer)), folder / INDEX_NAME.format(prefix=prefix)
    wait_for_saves(lambda save: save.path == path or (background is not None and save is background.save))
    return take_snapshot(state, folder, grouped, prefix), state.communicator


def load_state(
    optimizer: torch.optim.Optimizer,
    directory: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> None:
    """Load what :func:`save_state` wrote, on any number of ranks, into the optimizer's buffers. All ranks call.

    Each rank reads what it will hold, and everything is read and verified before anything is changed. On as many ranks
    as saved it, the run goes on bit for bit. On another number moments, variances, master weights and steps are exact
    too; server errors stay with their elements; what was each rank's own (worker errors, and 0/1 Adam's momentum,
    update and parameters inside a local interval) becomes its mean over the ranks that saved it.

    Args:
        optimizer: The optimizer, made as the saved one was. A ZeroOptimizer may be of another stage and other sizes of
            buckets, and the optimizer that it wraps takes its place, and it that one's, where there are no master
            copies.
        directory: The folder.
        names: As in :func:`save_state`.
        prefix: As in :func:`save_state`.

    Raises:
        CheckpointError: (a ValueError) If the checkpoint is damaged or does not fit; on all ranks, and nothing has
            changed. The message names the file.
    """
    wait_for_saves()
    mine = _checkpointable(optimizer)
    folder = Path(directory)
    path = folder / INDEX_NAME.format(prefix=prefix)

    index, path = _agreed_index(mine.communicator, path)
    places = _places(mine.communicator, folder, index)

    def read() -> list[tuple[StateTensor, Tensor]]:
        grouped = mine.parameter_names(names)
        _check_fits(mine, index, grouped, path)
        with ShardFiles(folder, index) as files:
            described = {name: (getattr(torch, entry.dtype), entry.shape) for name, entry in index.tensors.items()}
            try:
                wanted = mine.wanted_tensors(grouped, index.header, described)
            except (ValueError, TypeError) as error:
                raise CheckpointError(f"{path} does not fit: {error}") from error
            planned = _plan(index, wanted, mine.communicator.world_size, path)
            _check_in_reach(planned, places, mine.communicator.rank, index)
            return [(tensor, _read_tensor(tensor, plan, files, index)) for tensor, plan in planned]

    tensors = run_together(mine.communicator, read, others=CheckpointError)
    brought = {state.name: state.local for state, _ in tensors}
    with torch.no_grad():
        while tensors:  # each value is let go of as soon as it is in place
            state, values = tensors.pop()
            state.local.copy_(values.view(state.local.shape))
    mine.load_checkpoint_header(index.header, brought)


def _checkpointable(optimizer: torch.optim.Optimizer) -> Checkpointable:
    """What a checkpoint sees of an optimizer."""
    optimizer = _innermost(optimizer)
    return optimizer if isinstance(optimizer, (FlatOptimizer, ZeroState)) else PlainState(optimizer)


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer within wrappers such as Accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


# -- finding ----------------------------------------------------------------------------------------------------------


def _agreed_index(communicator: Communicator, path: Path) -> tuple[CheckpointIndex, Path]:
    """The index of the same save on all ranks, and its file.

    A save into several folders may have been cut off when some had their index already: then the others still have it
    under its earlier name, and all have the shards.
    """
    index = run_together(communicator, lambda: CheckpointIndex.read(path), others=CheckpointError)
    saves = communicator.all_gather_object(index.save_id)
    if len(set(saves)) == 1:
        return index, path
    found = {index.save_id: (index, path)}
    aside = path.with_suffix(".tmp")
    with suppress(CheckpointError):
        index = CheckpointIndex.read(aside)
        found[index.save_id] = (index, aside)
    everywhere = set.intersection(*map(set, communicator.all_gather_object(list(found))))
    for save in saves:
        if save in everywhere:
            return found[save]
    hosts = communicator.all_gather_object(gethostname())
    told = [
        f"rank {rank} on {host} has save {save}" for rank, (host, save) in enumerate(zip(hosts, saves, strict=True))
    ]
    raise CheckpointError(f"{path} is of different saves: {', '.join(told)}; bring together the files of one save")


class _Place(NamedTuple):
    """A rank's view of a checkpoint: its machine, its folder, and what is wrong with the shards that are not there."""

    host: str
    folder: str
    absent: dict[int, str]


def _places(communicator: Communicator, folder: Path, index: CheckpointIndex) -> list[_Place]:
    mine = (gethostname(), str(folder.absolute()), list(absent_shards(folder, index).items()))
    return [_Place(host, where, dict(absent)) for host, where, absent in communicator.all_gather_object(mine)]


def _check_in_reach(
    planned: Sequence[tuple[StateTensor, Plan]], places: Sequence[_Place], rank: int, index: CheckpointIndex
) -> None:
    """Check that every shard is with some rank, and that those which this rank needs are with it."""
    mine = places[rank]
    needed = {read.piece.shard for _, plan in planned for reads in plan.sources for read in reads}
    for number, problem in mine.absent.items():
        holders = [(other, place) for other, place in enumerate(places) if number not in place.absent]
        if not holders:
            raise CheckpointError(f"{problem}: the checkpoint is not whole")
        if number in needed:
            other, place = holders[0]
            raise CheckpointError(
                f"{problem}: rank {rank} on {mine.host} needs it, and rank {other} on {place.host} has "
                f"{Path(place.folder, index.shards[number].file)}: copy it, or start the ranks on the machines on "
                "which they were when it was saved"
            )


# -- reading ----------------------------------------------------------------------------------------------------------


def _check_fits(optimizer: Checkpointable, index: CheckpointIndex, names: Sequence[Sequence[str]], path: Path) -> None:
    try:
        saved_ranks = index.header["world_size"]
        if saved_ranks != len(index.shards):
            raise ValueError(f"it was saved by {saved_ranks!r} rank(s) and has {len(index.shards)} shard(s)")
        mine = describe_parameters(optimizer, names)
        if mine != index.parameters:
            raise ValueError(f"it is of another model: {_first_difference(index.parameters, mine)}")
        optimizer.check_checkpoint_header(index.header)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error} in its header") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} does not fit: {error}") from error


def _first_difference(saved: list[list[dict[str, Any]]], mine: list[list[dict[str, Any]]]) -> str:
    if [len(group) for group in saved] != [len(group) for group in mine]:
        counts = [len(group) for group in saved], [len(group) for group in mine]
        return f"its param groups have {counts[0]} trainable parameters, this optimizer's {counts[1]}"
    pairs = ((a, b) for ours, theirs in zip(saved, mine, strict=True) for a, b in zip(ours, theirs, strict=True))
    first = next((a, b) for a, b in pairs if a != b)
    return f"it has the parameter {first[0]} where this optimizer has {first[1]}"


def _plan(
    index: CheckpointIndex, wanted: Sequence[StateTensor], world_size: int, path: Path
) -> list[tuple[StateTensor, Plan]]:
    planned = []
    for tensor in wanted:
        dtype, stop = dtype_name(tensor.local), tensor.start + tensor.local.numel()
        want = Wanted(tensor.name, dtype, tensor.shape, tensor.start, stop, tensor.of_ranks, tensor.is_error)
        try:
            planned.append((tensor, plan_reads(index, want, world_size)))
        except ValueError as error:
            raise CheckpointError(f"{path} {error}") from None
    return planned


def _read_tensor(tensor: StateTensor, plan: Plan, files: ShardFiles, index: CheckpointIndex) -> Tensor:
    values = torch.empty(tensor.local.numel(), dtype=tensor.local.dtype)
    _fill(values, plan, files, index)
    return values


def _fill(values: Tensor, plan: Plan, files: ShardFiles, index: CheckpointIndex) -> None:
    """Read what a plan says into ``values`` [numel], on the CPU; a mean is summed up in float64, in rank order."""
    if len(plan.sources) == 1:
        _read_source(bytes_of(values), plan, 0, files, index)
        return
    values.zero_()
    if not plan.sources:
        return
    start = 0
    for window in plan.windows(index.block_bytes):
        part = torch.empty(window.nbytes // values.element_size(), dtype=values.dtype)
        mean = torch.zeros(part.numel(), dtype=torch.float64)
        for source in range(len(window.sources)):
            _read_source(bytes_of(part), window, source, files, index)
            mean += part
        values[start : start + part.numel()] = mean.div_(len(window.sources))
        start += part.numel()


def _read_source(out: memoryview, plan: Plan, source: int, files: ShardFiles, index: CheckpointIndex) -> None:
    for read in plan.sources[source]:
        part = out[read.offset : read.offset + read.end - read.begin]
        files[read.piece.shard].read_blocks(read.piece, read.entry, index.block_bytes, read.begin, read.end, part)
