"""The files of a save: each rank writes a shard, and one rank for each folder the index."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from hf_compressopt.checkpoint.snapshot import Snapshot, begun, lost
from hf_compressopt.checkpoint.source import bytes_of
from hf_compressopt.checkpoint.zero_state import not_alike
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.format.index import BLOCK_BYTES, CheckpointIndex, Piece, Shard, TensorEntry
from hf_compressopt.format.lock import locked
from hf_compressopt.format.progress import progress
from hf_compressopt.format.record import Per, TensorKey
from hf_compressopt.format.writer import ShardWriter, publish, write_aside

logger = logging.getLogger(__name__)


def write_snapshot(snapshot: Snapshot, communicator: Communicator, *, quiet: bool = False) -> None:
    """Write shards, then the index; then remove the shards of earlier saves. All ranks call, and return together.

    Args:
        snapshot: The state that this rank writes.
        communicator: All ranks.
        quiet: Show no progress.

    Raises:
        OSError: If a file cannot be written. All ranks raise, and an earlier checkpoint is as it was.
        ValueError: If a checkpoint cannot hold the state; likewise.
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

    shards = communicator.gather_together(write_shard, snapshot.remove)

    def write_index() -> None:
        if leads:
            _check_shards_are_there(snapshot, shards)
            aside.append(write_aside(snapshot.index_file, _make_index(snapshot, shards).to_json()))

    def publish_index() -> None:
        for file in aside:
            publish(file, snapshot.index_file)

    def remove() -> None:
        snapshot.remove()
        for file in aside:
            with suppress(OSError):
                file.unlink(missing_ok=True)

    # every folder has room for its index before any gets it; when one has it, the shards must stay
    communicator.run_together(write_index, remove)
    communicator.run_together(publish_index)
    try:
        _remove_older(snapshot, leads)
    except OSError as error:  # the other ranks wait, and the new checkpoint is whole
        logger.warning("files of an earlier save are left in %s: %s", snapshot.folder, error)


def _check_shards_are_there(snapshot: Snapshot, shards: Sequence[Mapping[str, Any]]) -> None:
    """Check that no other save into this folder has removed what this one has written.

    Raises:
        FileNotFoundError: If one has.
    """
    for number, shard in enumerate(shards):
        file = snapshot.folder / shard["file"]
        if snapshot.peers[number] == snapshot.rank and not file.is_file():
            raise lost(file)


def _write_shard(snapshot: Snapshot, quiet: bool) -> dict[str, Any]:
    """Write this rank's shard durably.

    Returns:
        The file's name and size, and this rank's part of the index: the tensors with this rank's pieces of them.
    """
    file = snapshot.shard_file(snapshot.rank)
    stored = {tensor.shard_key: tensor for tensor in snapshot.tensors}
    layout = {key: (t.dtype, t.shape if t.is_whole else (t.stop - t.start,)) for key, t in stored.items()}
    shown = False if quiet or snapshot.rank != 0 else None
    with (
        ShardWriter(file, layout, {"format": "pt", "save_id": snapshot.save_id}, begun(file)) as writer,
        progress(f"saving {file.name}", writer.bytes, shown=shown) as advance,
    ):
        for key in writer.keys:
            data = bytes_of(stored[key].local.detach().cpu().contiguous())
            writer.write(key, data)
            advance(len(data))
        checksums = writer.finish()
    entries: dict[str, dict[str, Any]] = {}
    for key, tensor in stored.items():
        piece = Piece(snapshot.rank, key, tensor.start, tensor.stop, checksums[key])
        entry = entries.setdefault(str(tensor.key), asdict(TensorEntry(tensor.dtype, tensor.shape, ())))
        entry["pieces"] = [*entry["pieces"], asdict(piece)]
    return {"file": file.name, "bytes": writer.bytes, "tensors": entries}


def _make_index(snapshot: Snapshot, shards: Sequence[Mapping[str, Any]]) -> CheckpointIndex:
    """Make the index of this rank's folder; of a piece that several ranks have written it names the copy there.

    Raises:
        ValueError: If ranks have different values for what a parameter has once.
    """
    found: dict[str, tuple[TensorEntry, dict[tuple[int, int], Piece]]] = {}
    for number in sorted(range(len(shards)), key=lambda n: snapshot.peers[n] != snapshot.peers[snapshot.rank]):
        for name, values in shards[number]["tensors"].items():
            entry = TensorEntry.read(values)
            first, pieces = found.setdefault(name, (entry, {}))
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
            for name, (entry, pieces) in found.items()
        },
    )


def _remove_older(snapshot: Snapshot, leads: bool) -> None:
    """Remove the shards of earlier saves: each rank those of its number, the leader also those of absent ranks."""
    shard = re.compile(re.escape(snapshot.prefix) + r"-(?P<save>[0-9a-f]+)-(?P<rank>\d{5})-of-\d{5}\.(safetensors|tmp)")
    here = {rank for rank, first in enumerate(snapshot.peers) if first == snapshot.peers[snapshot.rank]}
    for file in snapshot.folder.iterdir():
        if (found := shard.fullmatch(file.name)) and found["save"] != snapshot.save_id:
            number = int(found["rank"])
            if number == snapshot.rank or (leads and number not in here):
                with suppress(OSError):  # a file that is left does no harm
                    file.unlink(missing_ok=True)
