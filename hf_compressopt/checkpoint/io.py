"""Save and load: every rank writes one safetensors shard, rank 0 the index, and every rank reads what it will hold.

state -> shards (safetensors) -> index (JSON) -> reshard plan (pure) -> reads
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_compressopt.checkpoint.background import PendingSave, wait_for_saves
from hf_compressopt.checkpoint.checkpointable import Checkpointable
from hf_compressopt.checkpoint.compression_state import CompressionState
from hf_compressopt.checkpoint.flat_state import FlatState
from hf_compressopt.checkpoint.loading import load
from hf_compressopt.checkpoint.plain_state import PlainState
from hf_compressopt.checkpoint.saving import write_snapshot
from hf_compressopt.checkpoint.snapshot import HostCopy, Snapshot, take_snapshot
from hf_compressopt.checkpoint.zero_state import PartitionedState
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.format.index import INDEX_NAME, check_prefix
from hf_compressopt.grad_compression import GradientCompression
from hf_compressopt.optim.flat_optimizer import FlatOptimizer
from hf_compressopt.zero.optimizer import ZeroOptimizer

DEFAULT_PREFIX = "compressopt"


def has_checkpoint(directory: str | os.PathLike[str], *, prefix: str = DEFAULT_PREFIX) -> bool:
    """Whether a folder holds an index."""
    return (Path(directory) / INDEX_NAME.format(prefix=prefix)).is_file()


def save_state(
    optimizer: torch.optim.Optimizer | PlainState | GradientCompression,
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
        OSError: If the folder is not writable, or an earlier save in the background has failed; on all ranks. That a
            rank had no memory for its copy is told like the failure of a write: where the save is waited for.
    """
    snapshot, communicator = _begin(optimizer, directory, names, prefix)
    inner = _innermost(optimizer)
    background = _BACKGROUNDS.get(inner)
    if background is None:
        background = communicator.run_together(lambda: _Background(communicator), snapshot.remove)
        _BACKGROUNDS[inner] = background
    copied: Future[Snapshot] = Future()
    try:
        copied.set_result(background.copy.take(snapshot))
    except Exception as error:
        copied.set_exception(error.with_traceback(None))  # whose frames would keep the optimizer
    channel = background.channel

    def write() -> None:  # the ranks hear here, not while training waits, of one that had no memory for its copy
        write_snapshot(channel.run_together(copied.result, snapshot.remove), channel, quiet=True)

    background.save = PendingSave(snapshot.index_file, write)
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
    optimizer: torch.optim.Optimizer | PlainState | GradientCompression,
    directory: str | os.PathLike[str],
    names: Sequence[str] | None,
    prefix: str,
) -> tuple[Snapshot, Communicator]:
    state, folder = checkpointable(optimizer), Path(directory)
    path = folder / INDEX_NAME.format(prefix=check_prefix(prefix))
    background = None if isinstance(optimizer, PlainState) else _BACKGROUNDS.get(_innermost(optimizer))
    wait_for_saves(
        lambda save: save.path.resolve() == path.resolve() or (background is not None and save is background.save)
    )
    return take_snapshot(state, folder, names, prefix), state.communicator


def load_state(
    optimizer: torch.optim.Optimizer | GradientCompression,
    directory: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> None:
    """Load what :func:`save_state` wrote, on any number of ranks, into the optimizer's buffers. All ranks call.

    Each rank reads what it will hold: first to verify it, before anything is changed, and then once more, verified
    again, into the optimizer's memory: state that is there already takes none beside it (but FusedAdam's outside a
    ZeroOptimizer, and what another optimizer saved). On as many ranks as saved it, the run goes on bit for bit. On
    another number moments, variances, master weights and steps are exact too; server errors stay with their elements;
    what was each rank's own (worker errors, and 0/1 Adam's momentum, update and parameters inside a local interval)
    becomes its mean over the ranks that saved it.

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
    check_prefix(prefix)
    wait_for_saves()
    load(checkpointable(optimizer), _innermost(optimizer), Path(directory), names, prefix)


@contextmanager
def state_is_loaded(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, ``optimizer.load_state_dict()`` does nothing: what a host hands it is a stub of what was loaded."""
    inner = _innermost(optimizer)
    inner.load_state_dict = lambda state_dict: None
    try:
        yield
    finally:
        del inner.load_state_dict


def checkpointable(optimizer: torch.optim.Optimizer | PlainState | GradientCompression) -> Checkpointable:
    """An optimizer as a checkpoint sees it."""
    if isinstance(optimizer, PlainState):
        return optimizer
    if isinstance(optimizer, GradientCompression):
        return CompressionState(optimizer)
    inner = _innermost(optimizer)
    if isinstance(inner, FlatOptimizer):
        return FlatState(inner)
    return PartitionedState(inner) if isinstance(inner, ZeroOptimizer) else PlainState(inner)


def _innermost(optimizer: Any) -> Any:
    """The optimizer within wrappers such as Accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
