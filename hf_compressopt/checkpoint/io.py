"""Save and load: every rank writes one safetensors shard, rank 0 the index, and every rank reads what it will hold.

state -> shards (safetensors) -> index (JSON) -> reshard plan (pure) -> reads
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from hf_compressopt.checkpoint.adam import source_of
from hf_compressopt.checkpoint.background import PendingSave, wait_for_saves
from hf_compressopt.checkpoint.files import ShardFiles, absent_shards
from hf_compressopt.checkpoint.index import BY_PLACE, INDEX_NAME, CheckpointError, CheckpointIndex, name_by_place
from hf_compressopt.checkpoint.progress import progress
from hf_compressopt.checkpoint.reading import Stored
from hf_compressopt.checkpoint.reshard import Wanted
from hf_compressopt.checkpoint.saving import (
    Checkpointable,
    HostCopy,
    Snapshot,
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
    optimizer: torch.optim.Optimizer | PlainState,
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
    background.save = PendingSave(snapshot.index_file, lambda: write_snapshot(copied, channel, quiet=True))
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
    optimizer: torch.optim.Optimizer | PlainState,
    directory: str | os.PathLike[str],
    names: Sequence[str] | None,
    prefix: str,
) -> tuple[Snapshot, Communicator]:
    state, folder = _checkpointable(optimizer), Path(directory)
    grouped = state.parameter_names(names)
    path = folder / INDEX_NAME.format(prefix=prefix)
    background = None if isinstance(optimizer, PlainState) else _BACKGROUNDS.get(_innermost(optimizer))
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

    Each rank reads what it will hold: first to verify it, before anything is changed, and then once more, verified
    again, into the optimizer's memory, so that a load takes no memory of its own. On as many ranks as saved it, the run
    goes on bit for bit. On another number moments, variances, master weights and steps are exact too; server errors
    stay with their elements; what was each rank's own (worker errors, and 0/1 Adam's momentum, update and parameters
    inside a local interval) becomes its mean over the ranks that saved it.

    Args:
        optimizer: The optimizer, made as the saved one was. A ZeroOptimizer may be of another stage and other sizes of
            buckets, and the optimizer that it wraps takes its place, and it that one's, where there are no master
            copies. AdamW, Adam, FusedAdam and Lamb, inside a ZeroOptimizer or not, go on from each other's moments and
            steps and from those of the compressed optimizers, and these from theirs in a warmup stage, which ends with
            the coming step where it should have ended before.
        directory: The folder.
        names: As in :func:`save_state`.
        prefix: As in :func:`save_state`.

    Raises:
        CheckpointError: (a ValueError) If the checkpoint is damaged or does not fit; on all ranks, and nothing has
            changed. The message names the file. Where a file was damaged between the two readings, it says that the
            state is half loaded.
    """
    wait_for_saves()
    mine = _checkpointable(optimizer)
    folder = Path(directory)
    path = folder / INDEX_NAME.format(prefix=prefix)

    index, path = _agreed_index(mine.communicator, path)
    places = _places(mine.communicator, folder, index)

    with ExitStack() as opened:  # the files stay open, so that what is read is what was checked

        def check() -> _Found:
            inner = _innermost(optimizer)
            grouped = _names_by_place(mine, inner) if index.header.get(BY_PLACE) else mine.parameter_names(names)
            stored = _source(index, inner, path)
            _check_fits(mine, index, stored.header, grouped, path)
            out_of_reach = _out_of_reach(places, mine.communicator.rank, index)
            files = opened.enter_context(ShardFiles(folder, index, out_of_reach))
            try:
                tensors = mine.wanted_tensors(grouped, stored.header, stored.described)
            except (ValueError, TypeError) as error:
                raise CheckpointError(f"{path} does not fit: {error}") from error
            found = _Found(stored, tensors, files, mine.communicator, path)
            found.check()
            return found

        found = run_together(mine.communicator, check, others=CheckpointError)
        run_together(mine.communicator, found.read, others=CheckpointError)
    mine.load_checkpoint_header(found.stored.header, {tensor.name: tensor.local for tensor in found.tensors})


@contextmanager
def state_is_loaded(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, ``optimizer.load_state_dict()`` does nothing: what a host hands it is a stub of what was loaded."""
    inner = _innermost(optimizer)
    inner.load_state_dict = lambda state_dict: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del inner.load_state_dict


def _checkpointable(optimizer: torch.optim.Optimizer | PlainState) -> Checkpointable:
    """What a checkpoint sees of an optimizer."""
    if isinstance(optimizer, PlainState):
        return optimizer
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


def _out_of_reach(places: Sequence[_Place], rank: int, index: CheckpointIndex) -> dict[int, str]:
    """Of the shards that are with other ranks only, by their numbers: what to say where this rank needs one.

    Raises:
        CheckpointError: If a shard is with nobody.
    """
    mine, told = places[rank], {}
    for number, problem in mine.absent.items():
        holders = [(other, place) for other, place in enumerate(places) if number not in place.absent]
        if not holders:
            raise CheckpointError(f"{problem}: the checkpoint is not whole")
        other, place = holders[0]
        told[number] = (
            f"{problem}: rank {rank} on {mine.host} needs it, and rank {other} on {place.host} has "
            f"{Path(place.folder, index.shards[number].file)}: copy it, or start the ranks on the machines on "
            "which they were when it was saved"
        )
    return told


# -- reading ----------------------------------------------------------------------------------------------------------


def _source(index: CheckpointIndex, optimizer: torch.optim.Optimizer, path: Path) -> Stored:
    """The checkpoint as the optimizer takes it."""
    cls = getattr(optimizer, "optimizer_class", type(optimizer))
    known = cls.__module__.startswith(("torch.optim.", "hf_compressopt."))  # others call theirs AdamW too
    try:
        return source_of(index, cls.__name__ if known else f"{cls.__module__}.{cls.__name__}", optimizer.param_groups)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error} in its header") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} {error}") from error


def _names_by_place(optimizer: Checkpointable, inner: torch.optim.Optimizer) -> list[list[str]]:
    """What :data:`BY_PLACE` calls the trainable parameters of each param group: by their places among all of it."""
    names = []
    for number, (group, params) in enumerate(zip(inner.param_groups, optimizer.shared_parameters(), strict=True)):
        places = {param: place for place, param in enumerate(group["params"])}
        names.append([name_by_place(number, places[param]) for param in params])
    return names


def _check_fits(
    optimizer: Checkpointable,
    index: CheckpointIndex,
    header: dict[str, Any],
    names: Sequence[Sequence[str]],
    path: Path,
) -> None:
    try:
        saved_ranks = index.header["world_size"]
        if saved_ranks != len(index.shards):
            raise ValueError(f"it was saved by {saved_ranks!r} rank(s) and has {len(index.shards)} shard(s)")
        mine = describe_parameters(optimizer, names)
        if index.header.get(BY_PLACE):
            _check_places(index.parameters, mine)
        elif mine != index.parameters:
            raise ValueError(f"it is of another model: {_first_difference(index.parameters, mine)}")
        optimizer.check_checkpoint_header(header)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error} in its header") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} does not fit: {error}") from error


def _check_places(saved: list[list[dict[str, Any]]], mine: list[list[dict[str, Any]]]) -> None:
    """Check that every saved parameter is one of ``mine``; others have no state in the checkpoint, and start anew."""
    if len(saved) != len(mine):
        raise ValueError(f"it has {len(saved)} param groups, this optimizer {len(mine)}")
    for theirs, ours in zip(saved, mine, strict=True):
        shapes = {parameter["name"]: parameter["shape"] for parameter in ours}
        for parameter in theirs:
            if shapes.get(parameter["name"]) != parameter["shape"]:
                raise ValueError(
                    f"it is of another model: its parameter {parameter['name']} has shape {parameter['shape']}, this "
                    f"optimizer's {shapes.get(parameter['name'], 'is not trainable, or not there')}"
                )


def _first_difference(saved: list[list[dict[str, Any]]], mine: list[list[dict[str, Any]]]) -> str:
    if [len(group) for group in saved] != [len(group) for group in mine]:
        counts = [len(group) for group in saved], [len(group) for group in mine]
        return f"its param groups have {counts[0]} trainable parameters, this optimizer's {counts[1]}"
    pairs = ((a, b) for ours, theirs in zip(saved, mine, strict=True) for a, b in zip(ours, theirs, strict=True))
    first = next((a, b) for a, b in pairs if a != b)
    return f"it has the parameter {first[0]} where this optimizer has {first[1]}"


@dataclass(frozen=True)
class _Found:
    """What a rank loads of a checkpoint, and where it is."""

    stored: Stored
    tensors: Sequence[StateTensor]
    files: ShardFiles
    communicator: Communicator
    path: Path

    def check(self) -> None:
        """Read and verify it all, and change nothing."""
        ranks = self.communicator.world_size
        self._each("checking", lambda tensor: self.stored.check(_wanted(tensor), ranks, self.files))

    @torch.no_grad()
    def read(self) -> None:
        """Read it all once more, from memory where the system has kept it there, into the tensors."""
        ranks = self.communicator.world_size

        def read(tensor: StateTensor) -> None:
            self.stored.read(_wanted(tensor), ranks, self.files, tensor.local.detach().view(-1))

        try:
            self._each("loading", read)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; it was whole when checked; the state is half loaded: load again"
            ) from error

    def _each(self, doing: str, action: Callable[[StateTensor], None]) -> None:
        nbytes = sum(tensor.local.nbytes for tensor in self.tensors)
        shown = None if self.communicator.rank == 0 else False
        with progress(f"{doing} {self.path.name}", nbytes, shown=shown) as advance:
            for tensor in self.tensors:
                try:
                    action(tensor)
                except CheckpointError:
                    raise
                except ValueError as error:
                    raise CheckpointError(f"{self.path} {error}") from None
                advance(tensor.local.nbytes)


def _wanted(tensor: StateTensor) -> Wanted:
    dtype, stop = dtype_name(tensor.local), tensor.start + tensor.local.numel()
    return Wanted(tensor.name, dtype, tensor.shape, tensor.start, stop, tensor.of_ranks, tensor.is_error)
