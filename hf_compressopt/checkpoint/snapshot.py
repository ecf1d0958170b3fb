"""The state that a save writes, described at one moment: which rank writes what, and copies of it in host memory.

The ranks of a machine may have a folder of their own. The ranks find out which of them share a folder by looking into
it: every rank begins a file there. What all ranks hold alike is written once into every folder, so that a machine that
has kept its files needs no others to resume.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.checkpoint.checkpointable import Checkpointable, checked_names, describe_parameters
from hf_compressopt.format.index import INDEX_NAME, SHARD_NAME
from hf_compressopt.format.record import Per, StateTensor
from hf_compressopt.format.writer import make_folder


@dataclass(frozen=True)
class Snapshot:
    """The state that this rank writes, at one moment of the training.

    Attributes:
        folder: The folder.
        prefix: Start of the files' names.
        save_id: The number in the shards' names.
        rank: This rank.
        peers: For every rank the first of those that write into the same folder.
        tensors: The tensors of this rank's shard.
        header: The header of the index.
        parameters: Name, shape and dtype of the parameters of each param group.
    """

    folder: Path
    prefix: str
    save_id: str
    rank: int
    peers: list[int]
    tensors: list[StateTensor]
    header: dict[str, Any]
    parameters: list[list[dict[str, Any]]]

    @property
    def index_file(self) -> Path:
        """The index of the folder."""
        return self.folder / INDEX_NAME.format(prefix=self.prefix)

    def shard_file(self, rank: int) -> Path:
        """The shard of a rank."""
        name = SHARD_NAME.format(prefix=self.prefix, save_id=self.save_id, rank=rank, world_size=len(self.peers))
        return self.folder / name

    def remove(self) -> None:
        """Remove the files that this rank has written or begun."""
        for file in (self.shard_file(self.rank), begun(self.shard_file(self.rank))):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def take_snapshot(state: Checkpointable, folder: Path, names: Sequence[str] | None, prefix: str) -> Snapshot:
    """Begin a save: agree on its number, and on which rank writes what. All ranks call.

    Args:
        state: The optimizer, as a checkpoint sees it.
        folder: The folder; it is made if it is missing.
        names: A name for each trainable parameter; torch's ``param_names`` if None.
        prefix: Start of the files' names.

    Returns:
        The state that this rank writes; its tensors share memory with the optimizer.

    Raises:
        ValueError: If the names do not fit, or if a checkpoint cannot hold the state. All ranks raise.
        OSError: If the folder is not writable. All ranks raise.
    """
    communicator = state.communicator
    save_id = communicator.all_gather_object(token_hex(8))[0]
    alone = list(range(communicator.world_size))
    empty = Snapshot(folder, prefix, save_id, communicator.rank, alone, [], {}, [])

    grouped: list[list[str]] = []

    def begin() -> None:
        grouped.extend(checked_names(state, names))
        make_folder(folder)
        begun(empty.shard_file(empty.rank)).touch()

    communicator.run_together(begin, empty.remove)
    described: list[Snapshot] = []

    def describe() -> int:
        """Describe the state; returns the first rank that writes into this folder."""
        tensors, header = state.tensors(grouped), deepcopy(state.header())
        _check_different(tensors)
        parameters = describe_parameters(state, grouped)
        described.append(replace(empty, tensors=tensors, header=header, parameters=parameters))
        first = next((rank for rank in alone if begun(empty.shard_file(rank)).exists()), None)
        if first is None:
            raise lost(begun(empty.shard_file(empty.rank)))
        return first

    peers = communicator.gather_together(describe, empty.remove)
    mine, (snapshot,) = [rank for rank in alone if peers[rank] == peers[empty.rank]], described
    tensors = _assigned(snapshot.tensors, mine.index(empty.rank), len(mine))
    return replace(snapshot, peers=peers, tensors=tensors)


class HostCopy:
    """Copies of tensors in host memory. It is pinned for tensors of a CUDA device, and used again for the next save."""

    def __init__(self) -> None:
        """Hold no memory yet."""
        self._room: dict[str, Tensor] = {}

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Copy the tensors of a snapshot; the copies are valid until the next call."""
        room, devices, tensors = {}, set(), []
        for tensor in snapshot.tensors:
            local, key = tensor.local.detach(), tensor.shard_key
            copied = self._room.get(key)
            if copied is None or copied.dtype != local.dtype or copied.shape != local.shape:
                copied = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            kernels.copy_(copied, local)
            room[key] = copied
            devices.add(local.device)
            tensors.append(replace(tensor, local=copied))
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._room = room
        return replace(snapshot, tensors=tensors)


def begun(shard: Path) -> Path:
    """The name of a shard that is being written."""
    return shard.with_suffix(".tmp")


def lost(file: Path) -> FileNotFoundError:
    """The error for a file of a save that is gone: only another save into the folder removes it."""
    return FileNotFoundError(
        errno.ENOENT, "another run has saved into the same files: give each run a folder of its own", str(file)
    )


def _check_different(tensors: Iterable[StateTensor]) -> None:
    """Check that no two tensors have one name.

    Raises:
        ValueError: If some have, such as each rank's own of "w" and the one for all ranks of "rank0/w".
    """
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.shard_key in seen and tensor.key.per is Per.ELEMENT:
            raise ValueError(f"two tensors of the state are called {tensor.shard_key!r}: give other names=...")
        seen.add(tensor.shard_key)


def _assigned(tensors: Iterable[StateTensor], place: int, writers: int) -> list[StateTensor]:
    """The tensors that one writer of a folder writes: its own, and its share by size of those that all ranks hold."""
    load = [0] * writers
    mine = []
    for tensor in tensors:
        if tensor.replicated:
            writer = load.index(min(load))
            load[writer] += tensor.local.nbytes
        if not tensor.replicated or writer == place:
            mine.append(tensor)
    return mine
