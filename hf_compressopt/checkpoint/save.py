"""Saves: the state at one moment, which rank writes what, and the files.

The ranks of a machine may have a folder of their own. The ranks find out which of them share a folder by looking into
it: every rank begins a file there. What all ranks hold alike is written once into every folder, so that a machine that
has kept its files needs no others to resume.
"""

from __future__ import annotations

import errno
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.checkpoint.state import State, not_alike
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.format.index import BLOCK_BYTES, INDEX_NAME, SHARD_NAME, CheckpointIndex, Piece, Shard, TensorEntry
from hf_compressopt.format.plan import Per, StateTensor, TensorKey
from hf_compressopt.format.shards import locked, make_folder, publish, write_aside, write_shard
from hf_compressopt.kernels.memory import flat_view

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """The state that this rank writes, at one moment of the training."""

    folder: Path
    prefix: str
    save_id: str  # the number in the shards' names
    rank: int
    peers: list[int]  # for every rank the first of those that write into the same folder
    tensors: Sequence[StateTensor]  # of this rank's shard
    header: dict[str, Any]
    parameters: list[list[dict[str, Any]]]

    @property
    def index_file(self) -> Path:
        return self.folder / INDEX_NAME.format(prefix=self.prefix)

    def shard_file(self, rank: int) -> Path:
        name = SHARD_NAME.format(prefix=self.prefix, save_id=self.save_id, rank=rank, world_size=len(self.peers))
        return self.folder / name

    def remove(self) -> None:
        for file in (self.shard_file(self.rank), begun(self.shard_file(self.rank))):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def take_snapshot(state: State, folder: Path, names: Sequence[str] | None, prefix: str) -> Snapshot:
    """Begin a save: agree on its number, and on which rank writes what. All ranks call."""
    communicator = state.communicator
    save_id = communicator.all_gather_object(token_hex(8))[0]
    ranks, described = list(range(communicator.world_size)), list[Snapshot]()
    empty = Snapshot(folder, prefix, save_id, communicator.rank, ranks, [], {}, [])

    def begin() -> list[list[str]]:
        grouped = state.parameter_names(names)
        make_folder(folder)
        begun(empty.shard_file(empty.rank)).touch()
        return grouped

    grouped = communicator.run_together(begin, empty.remove)

    def describe() -> tuple[int, list[str]]:
        """Describe the state; returns the first rank that writes into this folder, and this rank's marks."""
        tensors, header = state.tensors(grouped), deepcopy(state.header())
        counts = Counter(tensor.shard_key for tensor in tensors)
        for tensor in tensors:
            if counts[tensor.shard_key] > 1 and tensor.key.per is Per.ELEMENT:
                raise ValueError(f"two tensors of the state are called {tensor.shard_key!r}: give other names=...")
        described.append(replace(empty, tensors=tensors, header=header, parameters=state.described(grouped)))
        first = next((rank for rank in ranks if begun(empty.shard_file(rank)).exists()), None)
        if first is None:
            raise lost(begun(empty.shard_file(empty.rank)))
        return first, state.marks()

    answers = communicator.gather_together(describe, empty.remove)
    peers, (snapshot,) = [first for first, _ in answers], described
    snapshot.header.update(dict.fromkeys((mark for _, marks in answers for mark in marks), True))
    here = [rank for rank in ranks if peers[rank] == peers[empty.rank]]
    return replace(snapshot, peers=peers, tensors=_assigned(snapshot.tensors, here.index(empty.rank), len(here)))


class HostCopy:
    """Copies of tensors in host memory. It is pinned for tensors of a CUDA device, and used again for the next save."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Copy the tensors of a snapshot; the copies are valid until the next call."""
        memory: dict[str, Tensor] = {}
        devices: set[torch.device] = set()
        tensors: list[StateTensor] = []
        for tensor in snapshot.tensors:
            local, key = tensor.local.detach(), tensor.shard_key
            copied = self._memory.get(key)
            if copied is None or copied.dtype != local.dtype or copied.shape != local.shape:
                copied = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            kernels.copy_(copied, local)
            memory[key] = copied
            devices.add(local.device)
            tensors.append(replace(tensor, local=copied))
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._memory = memory
        return replace(snapshot, tensors=tensors)


def bytes_of(tensor: Tensor) -> memoryview:
    return flat_view(tensor).view(torch.uint8).numpy().data


def begun(shard: Path) -> Path:
    return shard.with_suffix(".tmp")


def lost(file: Path) -> FileNotFoundError:
    """The error for a file of a save that is gone: only another save into the folder removes it."""
    return FileNotFoundError(
        errno.ENOENT, "another run has saved into the same files: give each run a folder of its own", str(file)
    )


def _assigned(tensors: Iterable[StateTensor], place: int, writers: int) -> list[StateTensor]:
    """The tensors that one writer of a folder writes: its own, and its share by size of those that all ranks hold."""
    load = [0] * writers
    assigned: list[StateTensor] = []
    for tensor in tensors:
        if tensor.replicated:
            writer = load.index(min(load))
            load[writer] += tensor.local.nbytes
        if not tensor.replicated or writer == place:
            assigned.append(tensor)
    return assigned


def write_snapshot(snapshot: Snapshot, communicator: Communicator, *, quiet: bool = False) -> None:
    """Write shards, then the index; then remove the shards of earlier saves. All ranks call, and return together."""
    leads = snapshot.peers[snapshot.rank] == snapshot.rank
    aside: list[Path] = []
    lock = ExitStack()

    def write_shard() -> dict[str, Any]:
        if leads:
            lock.enter_context(locked(snapshot.index_file))
        return _write_shard(snapshot, quiet)

    def write_index() -> None:
        for number, shard in enumerate(shards if leads else ()):
            if snapshot.peers[number] == snapshot.rank and not (snapshot.folder / shard["file"]).is_file():
                raise lost(snapshot.folder / shard["file"])
        if leads:
            aside.append(write_aside(snapshot.index_file, _make_index(snapshot, shards).to_json()))

    def publish_index() -> None:
        for file in aside:
            publish(file, snapshot.index_file)

    def remove() -> None:
        snapshot.remove()
        for file in aside:
            with suppress(OSError):
                file.unlink(missing_ok=True)

    with lock:
        shards = communicator.gather_together(write_shard, snapshot.remove)
        # every folder has room for its index before any gets it; when one has it, the shards must stay
        communicator.run_together(write_index, remove)
        communicator.run_together(publish_index)
        try:
            _remove_older(snapshot, leads)
        except OSError as error:  # the other ranks wait, and the new checkpoint is whole
            logger.warning("files of an earlier save are left in %s: %s", snapshot.folder, error)
        communicator.all_gather_object(None)  # the lock is held until all have removed their older files
    communicator.all_gather_object(None)  # nobody returns, to rename or rotate the folder, before all are done


def _write_shard(snapshot: Snapshot, quiet: bool) -> dict[str, Any]:
    file = snapshot.shard_file(snapshot.rank)
    stored = {tensor.shard_key: tensor for tensor in snapshot.tensors}
    layout = {key: (t.dtype, t.shape if t.is_whole else (t.stop - t.start,)) for key, t in stored.items()}
    nbytes, checksums = write_shard(
        file,
        layout,
        {"format": "pt", "save_id": snapshot.save_id},
        lambda key: [bytes_of(stored[key].local.detach().cpu().resolve_neg().contiguous())],
        temporary=begun(file),
        doing="saving",
        shown=False if quiet or snapshot.rank != 0 else None,
    )
    entries: dict[str, dict[str, Any]] = {}
    for key, tensor in stored.items():
        piece = Piece(snapshot.rank, key, tensor.start, tensor.stop, checksums[key])
        entry = entries.setdefault(str(tensor.key), {"dtype": tensor.dtype, "shape": tensor.shape, "pieces": []})
        entry["pieces"].append(asdict(piece))
    return {"file": file.name, "bytes": nbytes, "tensors": entries}


def _make_index(snapshot: Snapshot, shards: Sequence[Mapping[str, Any]]) -> CheckpointIndex:
    """Make the index of this rank's folder; of a piece that several ranks have written it names the copy there."""
    merged: dict[str, tuple[TensorEntry, dict[tuple[int, int], Piece]]] = {}
    for number in sorted(range(len(shards)), key=lambda n: snapshot.peers[n] != snapshot.peers[snapshot.rank]):
        for name, values in shards[number]["tensors"].items():
            entry = TensorEntry.read(values)
            first, pieces = merged.setdefault(name, (entry, {}))
            for piece in entry.pieces:
                known = pieces.setdefault((piece.start, piece.stop), piece)
                alike = (entry.dtype, piece.checksums) == (first.dtype, known.checksums)
                if not alike and TensorKey.parse(name).per is not Per.ELEMENT:
                    raise ValueError(not_alike(name))
    return CheckpointIndex(
        save_id=snapshot.save_id,
        block_bytes=BLOCK_BYTES,
        header=snapshot.header,
        parameters=snapshot.parameters,
        shards=[Shard(shard["file"], shard["bytes"]) for shard in shards],
        tensors={
            name: TensorEntry(entry.dtype, entry.shape, tuple(pieces[part] for part in sorted(pieces)))
            for name, (entry, pieces) in merged.items()
        },
    )


def _remove_older(snapshot: Snapshot, leads: bool) -> None:
    """Remove the shards of earlier saves: each rank those of its number, the leader also those of absent ranks."""
    here = {rank for rank, first in enumerate(snapshot.peers) if first == snapshot.peers[snapshot.rank]}
    for file, save_id, number in _shards_in(snapshot.folder, snapshot.prefix):
        if save_id != snapshot.save_id and (number == snapshot.rank or (leads and number not in here)):
            with suppress(OSError):  # a file that is left does no harm
                file.unlink(missing_ok=True)


def remove_saved(folder: Path, prefix: str) -> None:
    """Remove a checkpoint, its index first; other ranks may do the same."""
    (folder / INDEX_NAME.format(prefix=prefix)).unlink(missing_ok=True)
    for file, _, _ in _shards_in(folder, prefix):
        file.unlink(missing_ok=True)


def _shards_in(folder: Path, prefix: str) -> Iterator[tuple[Path, str, int]]:
    """Yield the shards in a folder, whole or not, with the numbers of their save and their rank."""
    shard = re.compile(re.escape(prefix) + r"-(?P<save>[0-9a-f]+)-(?P<rank>\d{5})-of-\d{5}\.(safetensors|tmp)")
    for file in folder.iterdir():
        if match := shard.fullmatch(file.name):
            yield file, match["save"], int(match["rank"])
