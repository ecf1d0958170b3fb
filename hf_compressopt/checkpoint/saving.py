"""What a save writes: each rank a shard of what it holds, and one rank for each folder the index.

The ranks of a machine may have a folder of their own. Which ranks share one is seen in the folder itself, by the files
that all begin there. What all ranks hold alike is written once into every folder, so that a machine that has lost none
of its files needs no others to go on.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.checkpoint.source import bytes_of
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import StateTensor
from hf_compressopt.format.index import (
    BLOCK_BYTES,
    CHECKSUM,
    INDEX_NAME,
    SHARD_NAME,
    CheckpointIndex,
    Piece,
    Shard,
    TensorEntry,
)
from hf_compressopt.format.lock import locked
from hf_compressopt.format.progress import progress
from hf_compressopt.format.writer import ShardWriter, make_folder, publish, write_aside
from hf_compressopt.optim.flat_optimizer import SCALAR, FlatOptimizer
from hf_compressopt.zero.plain import PlainState
from hf_compressopt.zero.state import NUMBER, ZeroState, not_alike

Checkpointable = FlatOptimizer | ZeroState | PlainState
_Result = TypeVar("_Result")
logger = logging.getLogger(__name__)


def gather_together(
    communicator: Communicator,
    action: Callable[[], _Result],
    undo: Callable[[], None] = lambda: None,
    others: type[Exception] = OSError,
) -> list[_Result]:
    """Run ``action`` on every rank; what it returned on each.

    Where it fails on any, undo it and raise on all: ``others`` where it did not. Where a rank is gone nothing is
    undone: what the others know of it already cannot be said.
    """
    try:
        result, error = action(), None
    except Exception as caught:
        result, error = None, caught
    results, failed = communicator.gather_outcomes(result, error)
    if failed:
        undo()
        raise error or others(failed)
    return results


def run_together(
    communicator: Communicator,
    action: Callable[[], _Result],
    undo: Callable[[], None] = lambda: None,
    others: type[Exception] = OSError,
) -> _Result:
    """As :func:`gather_together`; what it returned here."""
    results: list[_Result] = []
    gather_together(communicator, lambda: results.append(action()), undo, others)
    return results[0]


@dataclass(frozen=True)
class Snapshot:
    """What this rank is to write, at one moment of the training.

    Attributes:
        folder: Where to.
        prefix: Start of the files' names.
        save_id: The number in the shards' names.
        rank: This rank.
        peers: For every rank the first of those that write into the same folder.
        tensors: What goes into this rank's shard.
        header: What the index holds beside tensors.
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
        """The index."""
        return self.folder / INDEX_NAME.format(prefix=self.prefix)

    def shard_file(self, rank: int) -> Path:
        """The shard of a rank."""
        name = SHARD_NAME.format(prefix=self.prefix, save_id=self.save_id, rank=rank, world_size=len(self.peers))
        return self.folder / name

    def remove(self) -> None:
        """Remove what this rank has written or begun."""
        for file in (self.shard_file(self.rank), _begun(self.shard_file(self.rank))):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def take_snapshot(state: Checkpointable, folder: Path, names: Sequence[str] | None, prefix: str) -> Snapshot:
    """Begin a save: agree on its number, and on who writes what. All ranks call.

    Args:
        state: The optimizer, as a checkpoint sees it.
        folder: The folder; made where missing.
        names: A name for each trainable parameter; torch's ``param_names`` if None.
        prefix: Start of the files' names.

    Returns:
        What this rank is to write; its tensors share memory with the optimizer.

    Raises:
        ValueError: If the names do not fit; then on all ranks.
        OSError: If the folder is not writable; then on all ranks.
    """
    communicator = state.communicator
    save_id = communicator.all_gather_object(token_hex(8))[0]
    alone = list(range(communicator.world_size))
    empty = Snapshot(folder, prefix, save_id, communicator.rank, alone, [], {}, [])

    grouped: list[list[str]] = []

    def begin() -> None:
        grouped.extend(checked_names(state, names))
        make_folder(folder)
        _begun(empty.shard_file(empty.rank)).touch()

    run_together(communicator, begin, empty.remove)
    described: list[Snapshot] = []

    def describe() -> int:
        """Returns the first rank that writes into this folder."""
        tensors, header = list(state.checkpoint_tensors(grouped)), deepcopy(state.checkpoint_header())
        parameters = describe_parameters(state, grouped)
        described.append(replace(empty, tensors=tensors, header=header, parameters=parameters))
        first = next((rank for rank in alone if _begun(empty.shard_file(rank)).exists()), None)
        if first is None:
            raise _lost(_begun(empty.shard_file(empty.rank)))
        return first

    peers = gather_together(communicator, describe, empty.remove)
    mine, (snapshot,) = [rank for rank in alone if peers[rank] == peers[empty.rank]], described
    tensors = _assigned(snapshot.tensors, mine.index(empty.rank), len(mine))
    return replace(snapshot, peers=peers, tensors=tensors)


def write_snapshot(snapshot: Snapshot, communicator: Communicator, *, quiet: bool = False) -> None:
    """Write shards, then the index; then remove the shards of earlier saves. All ranks call, and return together.

    Args:
        snapshot: What this rank writes.
        communicator: All ranks.
        quiet: Show no progress.

    Raises:
        OSError: If a file cannot be written; then on all ranks, and an earlier checkpoint is as it was.
    """
    with ExitStack() as held:
        _write_snapshot(snapshot, communicator, held, quiet)
        communicator.all_gather_object(None)  # the lock is held until all have removed their older files
    communicator.all_gather_object(None)  # nobody returns, to rename or rotate the folder, before all are done


def _write_snapshot(snapshot: Snapshot, communicator: Communicator, held: ExitStack, quiet: bool) -> None:
    leads, aside = snapshot.peers[snapshot.rank] == snapshot.rank, []

    def write_shard() -> dict[str, Any]:
        if leads:
            held.enter_context(locked(snapshot.index_file))
        return _write_shard(snapshot, quiet)

    shards = gather_together(communicator, write_shard, snapshot.remove)

    def write_index() -> None:
        if leads:
            _check_shards_are_there(snapshot, shards)
            aside.append(write_aside(snapshot.index_file, _make_index(snapshot, shards).to_json().encode()))

    def publish_index() -> None:
        for file in aside:
            publish(file, snapshot.index_file)

    def remove() -> None:
        snapshot.remove()
        for file in aside:
            with suppress(OSError):
                file.unlink(missing_ok=True)

    # every folder has room for its index before any gets it; once one has it, the shards must stay
    run_together(communicator, write_index, remove)
    run_together(communicator, publish_index)
    try:
        _remove_older(snapshot, leads)
    except OSError as error:  # the others wait, and the new checkpoint is whole
        logger.warning("files of an earlier save are left in %s: %s", snapshot.folder, error)


def _check_shards_are_there(snapshot: Snapshot, shards: Sequence[Mapping[str, Any]]) -> None:
    """Check that no other save into this folder has removed what this one has written.

    Raises:
        FileNotFoundError: If one has.
    """
    for number, shard in enumerate(shards):
        file = snapshot.folder / shard["file"]
        if snapshot.peers[number] == snapshot.rank and not file.is_file():
            raise _lost(file)


def _lost(file: Path) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT, "another run has saved into the same files: give each run a folder of its own", str(file)
    )


class HostCopy:
    """Copies of tensors in host memory, pinned where they come from a CUDA device; it is used again every time."""

    def __init__(self) -> None:
        """Hold no memory yet."""
        self._room: dict[str, Tensor] = {}

    def take(self, snapshot: Snapshot) -> Snapshot:
        """The same with copies of its tensors, which stay until the next call."""
        room, devices, tensors = {}, set(), []
        for tensor in snapshot.tensors:
            local, key = tensor.local.detach(), _key(tensor)
            copied = self._room.get(key)
            if copied is None or copied.dtype != local.dtype or copied.shape != local.shape:
                copied = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            kernels.copy_(copied, local)
            room[key] = copied
            devices.add(local.device)
            tensors.append(replace(tensor, local=copied))
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._room = room
        return replace(snapshot, tensors=tensors)


def describe_parameters(state: Checkpointable, names: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
    """Name, shape and dtype of the parameters of each param group, where all ranks hold the same."""
    return [
        [
            {"name": name, "shape": list(param.shape), "dtype": dtype_name(param)}
            for name, param in zip(called, params, strict=False)
        ]
        for called, params in zip(names, state.shared_parameters(), strict=True)
    ]


def checked_names(state: Checkpointable, names: Sequence[str] | None) -> list[list[str]]:
    """Names of the trainable parameters, per group.

    Raises:
        TypeError: If one is no string.
        ValueError: If their number does not fit, or one occurs twice or is no valid Unicode.
    """
    for name in names or ():
        if not isinstance(name, str):
            raise TypeError(f"names must be strings, got {name!r}")
    grouped = state.parameter_names(names)
    for name in chain.from_iterable(grouped):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"the parameter name {name!r} is no valid Unicode, which files cannot hold: give names=..."
            ) from None
    return grouped


def dtype_name(tensor: Tensor) -> str:
    """Torch's name of a tensor's dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _begun(shard: Path) -> Path:
    """The name of a shard that is being written."""
    return shard.with_suffix(".tmp")


def _assigned(tensors: Iterable[StateTensor], place: int, writers: int) -> list[StateTensor]:
    """What one of the writers of a folder writes: its own, and its share by size of what all ranks hold."""
    load = [0] * writers
    mine = []
    for tensor in tensors:
        if tensor.replicated:
            writer = load.index(min(load))
            load[writer] += tensor.local.numel()
        if not tensor.replicated or writer == place:
            mine.append(tensor)
    return mine


def _write_shard(snapshot: Snapshot, quiet: bool) -> dict[str, Any]:
    """Write this rank's shard durably. Returns its size and, for each tensor, what the index says of it."""
    file = snapshot.shard_file(snapshot.rank)
    stored = {_key(tensor): tensor for tensor in snapshot.tensors}
    layout = {key: (dtype_name(t.local), t.shape if _is_whole(t) else (t.local.numel(),)) for key, t in stored.items()}
    shown = False if quiet or snapshot.rank != 0 else None
    with (
        ShardWriter(file, layout, {"format": "pt", "save_id": snapshot.save_id}, _begun(file)) as writer,
        progress(f"saving {file.name}", writer.bytes, shown=shown) as advance,
    ):
        for key in writer.keys:
            data = bytes_of(stored[key].local.detach().cpu().contiguous())
            writer.write(key, data)
            advance(len(data))
        checksums = writer.finish()
    entries = [
        {
            "name": tensor.name,
            "dtype": dtype_name(tensor.local),
            "shape": list(tensor.shape),
            "key": key,
            "start": tensor.start,
            "stop": tensor.start + tensor.local.numel(),
            "checksums": checksums[key],
        }
        for key, tensor in stored.items()
    ]
    return {"file": file.name, "bytes": writer.bytes, "tensors": entries}


def _key(tensor: StateTensor) -> str:
    """What a shard calls this rank's part of a tensor."""
    return tensor.name if _is_whole(tensor) else f"{tensor.name}@{tensor.start}"


def _is_whole(tensor: StateTensor) -> bool:
    return tensor.local.numel() == prod(tensor.shape)


def _make_index(snapshot: Snapshot, shards: Sequence[Mapping[str, Any]]) -> CheckpointIndex:
    """The index of this rank's folder: of what several ranks have written it names the copy there."""
    pieces: dict[str, list[Piece]] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    seen: dict[tuple[str, int, int], list[Any]] = {}
    for number in sorted(range(len(shards)), key=lambda n: snapshot.peers[n] != snapshot.peers[snapshot.rank]):
        for entry in shards[number]["tensors"]:
            part, content = (entry["name"], entry["start"], entry["stop"]), [entry["dtype"], entry["checksums"]]
            if part in seen:
                if content != seen[part] and entry["name"].startswith((SCALAR, NUMBER)):
                    raise ValueError(not_alike(entry["name"]))
                continue
            seen[part] = content
            described[entry["name"]] = (entry["dtype"], tuple(entry["shape"]))
            piece = Piece(number, entry["key"], entry["start"], entry["stop"], tuple(entry["checksums"]))
            pieces.setdefault(entry["name"], []).append(piece)
    return CheckpointIndex(
        save_id=snapshot.save_id,
        block_bytes=BLOCK_BYTES,
        checksum=CHECKSUM,
        header=snapshot.header,
        parameters=snapshot.parameters,
        shards=[Shard(shard["file"], shard["bytes"]) for shard in shards],
        tensors={
            name: TensorEntry(dtype, shape, tuple(sorted(pieces[name], key=lambda piece: piece.start)))
            for name, (dtype, shape) in described.items()
        },
    )


def _remove_older(snapshot: Snapshot, leads: bool) -> None:
    """Remove earlier saves' shards: each rank those of its number, a folder's first also those of nobody in it."""
    shard = re.compile(re.escape(snapshot.prefix) + r"-(?P<save>[0-9a-f]+)-(?P<rank>\d{5})-of-\d{5}\.(safetensors|tmp)")
    here = {rank for rank, first in enumerate(snapshot.peers) if first == snapshot.peers[snapshot.rank]}
    for file in snapshot.folder.iterdir():
        if (found := shard.fullmatch(file.name)) and found["save"] != snapshot.save_id:
            number = int(found["rank"])
            if number == snapshot.rank or (leads and number not in here):
                with suppress(OSError):  # a file too many does no harm
                    file.unlink(missing_ok=True)
