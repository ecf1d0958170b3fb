"""Save and load an optimizer's state; all ranks call each function.

Every rank writes one safetensors shard, and one rank per folder the index. Every rank reads the tensors that it holds.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_compressopt.checkpoint.compressed import FlatState
from hf_compressopt.checkpoint.load import Part, load
from hf_compressopt.checkpoint.partitioned import PartitionedState, PlainState
from hf_compressopt.checkpoint.save import HostCopy, Snapshot, remove_saved, take_snapshot, write_snapshot
from hf_compressopt.checkpoint.state import CompressionState, FSDPState, State
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.sender import listed
from hf_compressopt.format.index import BESIDE, INDEX_NAME, CheckpointError, CheckpointIndex, StrPath, check_prefix
from hf_compressopt.format.index import DEFAULT_PREFIX as DEFAULT_PREFIX
from hf_compressopt.fsdp.compression import FSDPCompression
from hf_compressopt.grad_compression import GradientCompression
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.zero.optimizer import ZeroOptimizer

logger = logging.getLogger(__name__)

#: The objects whose state a checkpoint can hold.
Saved = torch.optim.Optimizer | PlainState | GradientCompression | FSDPCompression


def has_checkpoint(directory: StrPath, *, prefix: str = DEFAULT_PREFIX) -> bool:
    """Return whether a folder holds a checkpoint."""
    return (Path(directory) / INDEX_NAME.format(prefix=prefix)).is_file()


def save_state(
    optimizer: Saved, directory: StrPath, *, names: Sequence[str] | None = None, prefix: str = DEFAULT_PREFIX
) -> None:
    """Save an optimizer's whole state, with every rank's errors. All ranks call, and return together.

    An earlier checkpoint in the same folder stays loadable until the new one is whole, and is removed then::

        save_state(optimizer, "checkpoint", names=[name for name, _ in model.named_parameters()])

    Args:
        optimizer: The optimizer. An optimizer of another package, such as torch's AdamW, must have the same state on
            all ranks; its checkpoint is that of a ZeroOptimizer around it.
        directory: The folder; it is made if it is missing.
        names: A name for each trainable parameter, in the optimizer's order; torch's ``param_names`` if None.
        prefix: Start of the files' names, for several optimizers in one folder.

    Raises:
        ValueError, TypeError: If the names or the prefix cannot be used, or if a checkpoint cannot hold the state.
        OSError: If a file cannot be written, or if another run saves into the same files. All ranks raise, and an
            earlier checkpoint is as it was, except that errors beside the shards of FSDP2 may be the new ones.
    """
    snapshot, communicator = _begin(optimizer, directory, names, prefix)
    if isinstance(optimizer, FSDPCompression) and optimizer.beside is not None:
        try:  # first, so that the main index, which says that there is a checkpoint, is the last file
            save_state(optimizer.beside, directory, prefix=_prefix_beside(prefix))
        except BaseException:
            snapshot.remove()
            raise
    write_snapshot(snapshot, communicator)


def async_save_state(
    optimizer: torch.optim.Optimizer,
    directory: StrPath,
    *,
    names: Sequence[str] | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> PendingSave:
    """Save as :func:`save_state` does, but return when the state is copied to host memory. All ranks call.

    Training may continue and change everything. An earlier save of this optimizer, or into these files, is waited for.
    The copies take as much memory as this rank writes, pinned for tensors of a CUDA device. The memory is kept for the
    next save, until the optimizer is freed.

    Returns:
        The save in the background. The next save and load and the end of the process wait for it.

    Raises:
        ValueError, TypeError: As :func:`save_state`; a TypeError too for an FSDPCompression whose model has trainable
            parameters beside the shards.
        OSError: If the folder is not writable, or an earlier save in the background has failed; on all ranks. If a rank
            has no memory for its copy, the error comes when the save is waited for, as that of a failed write.
    """
    if isinstance(optimizer, FSDPCompression) and optimizer.beside is not None:
        raise TypeError(
            f"the model has trainable parameters beside the shards of FSDP2 ({listed(optimizer.beside.names)}), whose "
            "errors are a checkpoint of their own, and no save in the background writes two: call save_state()"
        )
    snapshot, communicator = _begin(optimizer, directory, names, prefix)
    background = _BACKGROUNDS.setdefault(_innermost(optimizer), _Background())
    # a rank that has failed may have broken the channel, and the others need not know
    failed = background.save is not None and background.save.failed
    if any(communicator.all_gather_object(background.channel is None or failed)):
        background.channel = None
        background.channel = communicator.run_together(communicator.duplicate, snapshot.remove)
    channel = background.channel
    assert channel is not None
    copied: Future[Snapshot] = Future()
    try:
        copied.set_result(background.copy.take(snapshot))
    except Exception as error:
        copied.set_exception(error.with_traceback(None))  # the frames of a traceback would keep the optimizer

    def write() -> None:  # here, not while training waits, the ranks learn of one that had no memory for its copy
        write_snapshot(channel.run_together(copied.result, snapshot.remove), channel, quiet=True)

    background.save = PendingSave(snapshot.index_file, write)
    return background.save


class _Background:
    """Resources for one optimizer's saves in the background: a communicator and reusable host memory."""

    def __init__(self) -> None:
        self.channel: Communicator | None = None
        self.copy = HostCopy()
        self.save: PendingSave | None = None


# Keyed by optimizer, since no attribute is hung on an optimizer of another package.
_BACKGROUNDS: WeakKeyDictionary[torch.optim.Optimizer, _Background] = WeakKeyDictionary()


def _begin(
    optimizer: Saved, directory: StrPath, names: Sequence[str] | None, prefix: str
) -> tuple[Snapshot, Communicator]:
    state, folder = checkpointable(optimizer), Path(directory)
    path = folder / INDEX_NAME.format(prefix=check_prefix(prefix))
    background = None if isinstance(optimizer, PlainState) else _BACKGROUNDS.get(_innermost(optimizer))
    wait_for_saves(
        lambda save: save.path.resolve() == path.resolve() or (background is not None and save is background.save)
    )
    return take_snapshot(state, folder, names, prefix), state.communicator


def load_state(
    optimizer: Saved, directory: StrPath, *, names: Sequence[str] | None = None, prefix: str = DEFAULT_PREFIX
) -> None:
    """Load what :func:`save_state` wrote, on any number of ranks, into the optimizer's buffers. All ranks call.

    Each rank reads its part twice: it verifies all of it, and then reads it into the optimizer's memory, so that state
    that exists needs no second copy. (Exceptions are FusedAdam outside a ZeroOptimizer, and checkpoints of another
    optimizer class.) On as many ranks as saved it, the run continues bit for bit. On another number of ranks moments,
    variances, master copies and steps are exact too, and server errors stay with their elements. A tensor that was each
    rank's own becomes the mean over the ranks that saved it: worker errors, and 0/1 Adam's momentum, update and
    parameters inside a local interval.

    Args:
        optimizer: The optimizer, made as the saved one was. A ZeroOptimizer may have another stage and other sizes of
            buckets. It loads the checkpoint of the optimizer that it wraps, and that optimizer loads its checkpoint if
            there are no master copies. AdamW, Adam, FusedAdam and Lamb, inside a ZeroOptimizer or not, continue from
            each other's moments and steps and from those of the compressed optimizers. The compressed optimizers
            continue from theirs in the warmup stage, which ends with the coming step if it should have ended before.
        directory: The folder.
        names: As in :func:`save_state`.
        prefix: As in :func:`save_state`.

    Raises:
        CheckpointError: (a ValueError) If the checkpoint is damaged or does not fit. All ranks raise, and nothing has
            changed, unless the message says that a file was damaged between the two reads. It names the file.
        ValueError, TypeError: If the prefix cannot be used.
    """
    check_prefix(prefix)
    wait_for_saves()
    parts = [Part(checkpointable(optimizer), _innermost(optimizer), names, prefix)]
    beside = optimizer.find_beside() if isinstance(optimizer, FSDPCompression) else None
    if beside is None:
        load(parts, Path(directory))
        return
    ranks = beside.communicator
    saved = any(ranks.all_gather_object(_has_beside(Path(directory), prefix)))
    if saved:
        parts.append(Part(checkpointable(beside), _innermost(beside), None, _prefix_beside(prefix)))
    load(parts, Path(directory))
    if not saved:
        beside.errors.zero_()
        if ranks.rank == 0:
            logger.warning(
                "%s holds no errors of the parameters beside the shards of FSDP2, %s (was it saved before they came?): "
                "they start at zero",
                directory,
                listed(beside.names),
            )


def zero_errors(state: GradientCompression | FSDPCompression) -> None:
    """Set the errors of compressed gradients to zero, for a checkpoint that holds none."""
    if isinstance(state, GradientCompression):
        state.errors.zero_()
        return
    for unit in state.units:
        unit.kept.zero_()
    if state.beside is not None:
        state.beside.errors.zero_()


def _prefix_beside(prefix: str) -> str:
    return f"{prefix}_beside"


def _has_beside(folder: Path, prefix: str) -> bool:
    """Return whether a checkpoint of FSDP2 has one beside it, which no save has left there that it has replaced."""
    with suppress(CheckpointError):  # which the load itself raises
        if not CheckpointIndex.read(folder / INDEX_NAME.format(prefix=prefix)).header.get(BESIDE, True):
            return False
    return has_checkpoint(folder, prefix=_prefix_beside(prefix))


def remove_checkpoint(directory: StrPath, *, prefix: str) -> None:
    """Remove a checkpoint that a save has left which a later one replaces by nothing. All ranks call."""
    try:
        remove_saved(Path(directory), prefix)
    except OSError as error:  # the other ranks go on
        logger.warning("files of an earlier save are left in %s: %s", directory, error)


@contextmanager
def state_is_loaded(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Ignore ``optimizer.load_state_dict()`` inside the block: the host passes a stub of the state that was loaded."""
    inner = _innermost(optimizer)
    inner.load_state_dict = lambda state_dict: None
    try:
        yield
    finally:
        del inner.load_state_dict


def checkpointable(optimizer: Saved) -> State:
    """Return an optimizer as a checkpoint sees it."""
    if isinstance(optimizer, PlainState):
        return optimizer
    if isinstance(optimizer, GradientCompression):
        return CompressionState(optimizer)
    if isinstance(optimizer, FSDPCompression):
        return FSDPState(optimizer)
    inner = _innermost(optimizer)
    if isinstance(inner, CompressedOptimizer):
        return FlatState(inner)
    return PartitionedState(inner) if isinstance(inner, ZeroOptimizer) else PlainState(inner)


def _innermost(optimizer: Any) -> Any:
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


# -- saves in the background ------------------------------------------------------------------------------------------


class PendingSave:
    """A save in the background.

    The process does not end before it is done. A save fails on all ranks together. Every rank raises the error once: in
    :meth:`result`, or in the next save or load. If neither is called, the process ends with exit code 1.

    Attributes:
        path: The index that it writes.
    """

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path, self._work = path, work
        self._error: BaseException | None = None
        self._ended = Event()
        _pending.append(self)
        self._thread = Thread(target=self._run, name=f"save of {path}")  # no daemon: the interpreter waits for it
        try:
            self._thread.start()
        except RuntimeError:
            self._run()
            self.result()

    def done(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """Return whether it has ended with an error."""
        return self.done() and self._error is not None

    def result(self) -> None:
        """Wait until the checkpoint is whole.

        Raises:
            OSError: If a file could not be written, or another rank had no memory for its copy. All ranks raise, and an
                earlier checkpoint is as it was.
            MemoryError: If this rank had no memory for its copy.
            RuntimeError: If another rank is gone.
        """
        self._ended.wait()
        if self in _pending:
            _pending.remove(self)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            time.sleep(0.01)  # else this thread has the interpreter first, and training waits for 5 ms
            self._work()
        except BaseException as error:
            self._error = error
            logger.error("the save of %s failed: %s: %s", self.path, type(error).__name__, error)
        finally:
            del self._work  # it holds the copies
            self._ended.set()


#: The saves of this process whose outcome nobody has asked for, in the order of their start.
_pending: list[PendingSave] = []


def wait_for_saves(which: Callable[[PendingSave], bool] = lambda save: True) -> None:
    """Wait until the checkpoints that are being written in the background are whole.

    Call it on all ranks before you rename, copy or remove their folders. Saves, loads and the end of the process wait
    by themselves.

    Args:
        which: The saves to wait for; all by default.

    Raises:
        OSError: If a file could not be written; on all ranks.
    """
    failed = []
    for save in filter(which, tuple(_pending)):
        try:
            save.result()
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _wait_at_exit() -> None:
    """End the process with exit code 1 if a save has failed that nobody asked about."""
    try:
        wait_for_saves()
    except Exception as error:
        logger.critical("a save in the background failed, so the exit code is 1: %s", error)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)


atexit.register(_wait_at_exit)
