"""Shards on disk: byte ranges of the tensors in a safetensors file, each verified by its checksums; knows no torch.

Bytes are read block by block, never mapped, so that reading takes the memory of a block, however large the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from hf_compressopt.format.index import (
    BLOCK_BYTES,
    CHECKSUM,
    CHECKSUMS,
    DTYPES,
    CheckpointError,
    CheckpointIndex,
    Piece,
    Shard,
    TensorEntry,
)

#: safetensors' own bound on a header.
HEADER_CAP = 100_000_000
_ITEMSIZE = dict(DTYPES.values())


class StoredTensor(NamedTuple):
    """What a shard's header says of a tensor; its bytes are [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class ShardFile:
    """A shard that is open for reading.

    Attributes:
        path: The file.
        metadata: What its header holds beside tensors.
        tensors: What it holds, by key.
    """

    def __init__(
        self,
        path: Path,
        checksum: str = CHECKSUM,
        block_bytes: int = BLOCK_BYTES,
        room: memoryview | None = None,
    ) -> None:
        """Open the file and check its header.

        Args:
            path: The file.
            checksum: Of its blocks, by a name of :data:`CHECKSUMS`.
            block_bytes: Bytes under each.
            room: [block_bytes] bytes, where a block is read; files that are read by turns may share it. None: its own.

        Raises:
            CheckpointError: If it is not readable, or no whole safetensors file.
        """
        self.path = path
        self._checksum, self._block_bytes = CHECKSUMS[checksum], block_bytes
        self._room = memoryview(bytearray(block_bytes)) if room is None else room
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path} is not readable: {error}") from error
        try:
            self.metadata, self.tensors = self._header()
        except Exception as error:  # the file can hold anything
            self._file.close()
            raise CheckpointError(f"{path} is not readable as safetensors: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _header(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        size = os.fstat(self._file.fileno()).st_size
        head = bytearray(8)
        length = int.from_bytes(head[: self._fill(0, memoryview(head))], "little")
        if size < 8 or length > min(HEADER_CAP, size - 8):
            raise ValueError(
                f"a header of {length} bytes in a file of {size}, where at most {HEADER_CAP} and the file are legal"
            )
        text = bytearray(length)
        header = json.loads(text[: self._fill(8, memoryview(text))], object_pairs_hook=_without_doubles)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError("metadata that is no object")
        tensors = {key: _stored(key, entry, 8 + length) for key, entry in header.items()}
        reached = 8 + length
        for key, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
            if tensor.begin != reached:
                raise ValueError(f"the bytes of {key!r} overlap others or leave a gap")
            reached = max(reached, tensor.end)
        if reached != size:
            raise ValueError(f"tensors that end at byte {reached} of {size}")
        return metadata, tensors

    def check_piece(self, piece: Piece, entry: TensorEntry) -> StoredTensor:
        """The stored tensor that a piece of a tensor is, if it is what the index says.

        Raises:
            CheckpointError: If it is missing, or of another dtype or shape.
        """
        found = self.tensors.get(piece.key)
        if found is None:
            raise CheckpointError(f"{self.path} has no tensor {piece.key!r}")
        numel = piece.stop - piece.start
        shape = entry.shape if numel == entry.numel else (numel,)
        if (found.dtype, found.shape) != (DTYPES[entry.dtype][0], shape):
            raise CheckpointError(
                f"{self.path} has {piece.key!r} as {found.dtype} {list(found.shape)}, the index says "
                f"{DTYPES[entry.dtype][0]} {list(shape)}"
            )
        return found

    def blocks(
        self, piece: Piece, entry: TensorEntry, begin: int = 0, end: int | None = None, out: memoryview | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """Bytes [begin, end) of a piece, a block at a time; every block that they touch is read whole and verified.

        Args:
            piece: The piece.
            entry: The tensor that it is a piece of.
            begin: First byte, from the start of the piece.
            end: One past the last byte; None is the piece's last.
            out: [end - begin] bytes, where they are left; a whole block is read there at once.

        Yields:
            Where each part begins, from the start of the piece, and its bytes, until the next is taken.

        Raises:
            CheckpointError: If they are not what was saved; ``out`` is then overwritten in part.
        """
        stored = self.check_piece(piece, entry)
        nbytes, size = stored.end - stored.begin, self._block_bytes
        end = nbytes if end is None else end
        for number in range(begin // size, -(-end // size) if begin < end else 0):
            low, high = number * size, min((number + 1) * size, nbytes)
            first, last = max(low, begin), min(high, end)
            at_once = out is not None and (first, last) == (low, high)
            block = out[low - begin : high - begin] if out is not None and at_once else self._room[: high - low]
            self._read(stored.begin + low, block)
            if self._checksum(block).hexdigest() != piece.checksums[number]:
                raise CheckpointError(f"{self.path} is damaged: the checksum of {piece.key!r} is not the index's")
            part = block[first - low : last - low]
            if out is not None and not at_once:
                out[first - begin : last - begin] = part
            yield first, part

    def _read(self, offset: int, part: memoryview) -> None:
        try:
            count = self._fill(offset, part)
        except OSError as error:
            raise CheckpointError(f"{self.path} is not readable: {error}") from error
        if count != len(part):
            raise CheckpointError(f"{self.path} ends before byte {offset + len(part)}: it has changed meanwhile")

    def _fill(self, offset: int, part: memoryview) -> int:
        """Read until the file ends; file systems may give less than asked for. Returns how many bytes came."""
        self._file.seek(offset)
        done = 0
        while done < len(part) and (count := self._file.readinto(part[done:])):
            done += count
        return done


def check_size(folder: Path, shard: Shard) -> None:
    """Check that a shard is there in its size.

    Raises:
        CheckpointError: If it is not.
    """
    if problem := _absence(folder, shard):
        raise CheckpointError(f"{problem}: the checkpoint is not whole")


def absent_shards(folder: Path, index: CheckpointIndex) -> dict[int, str]:
    """Of the shards that are not in a folder in their size, by their numbers: what is wrong, in words."""
    problems = {number: _absence(folder, shard) for number, shard in enumerate(index.shards)}
    return {number: problem for number, problem in problems.items() if problem}


def _absence(folder: Path, shard: Shard) -> str:
    file = folder / shard.file
    try:
        size = file.stat().st_size if file.is_file() else None
    except OSError:
        size = None
    if size == shard.bytes:
        return ""
    return f"{file} is missing" if size is None else f"{file} has {size} bytes, the index says {shard.bytes}"


def open_shard(folder: Path, index: CheckpointIndex, number: int, room: memoryview | None = None) -> ShardFile:
    """Open the shard of this number; ``room`` as :class:`ShardFile` has it.

    Raises:
        CheckpointError: If it is no whole safetensors file, or of another save.
    """
    file = ShardFile(folder / index.shards[number].file, index.checksum, index.block_bytes, room)
    if (found := file.metadata.get("save_id")) != index.save_id:
        file.close()
        raise CheckpointError(f"{file.path} belongs to save {found!r}, the index is of {index.save_id!r}")
    return file


class ShardFiles:
    """The shards of a checkpoint, each opened when it is first needed; a context manager that closes them."""

    def __init__(self, folder: Path, index: CheckpointIndex, out_of_reach: Mapping[int, str] | None = None) -> None:
        """Look whether every shard is there in its size.

        Args:
            folder: The folder.
            index: Its index.
            out_of_reach: Shards that are not, by their numbers, and what to say where one is needed all the same; None:
                all have to be there.

        Raises:
            CheckpointError: If one is not.
        """
        self._folder, self._index = folder, index
        self._out_of_reach = out_of_reach or {}
        self._open: dict[int, ShardFile] = {}
        self._room = memoryview(bytearray(index.block_bytes))
        for number, shard in enumerate(index.shards):
            if number not in self._out_of_reach:
                check_size(folder, shard)

    def __enter__(self) -> ShardFiles:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close what was opened."""
        for file in self._open.values():
            file.close()

    def __getitem__(self, number: int) -> ShardFile:
        """The shard of this number; errors as :func:`open_shard`."""
        if number in self._out_of_reach:
            raise CheckpointError(self._out_of_reach[number])
        if number not in self._open:
            self._open[number] = open_shard(self._folder, self._index, number, self._room)
        return self._open[number]


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a header that names something twice")
    return found


def _stored(key: str, entry: dict[str, Any], start: int) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
        raise ValueError(f"{key!r} has a shape or offsets that are no whole numbers >= 0")
    if dtype not in _ITEMSIZE or end - begin != prod(shape) * _ITEMSIZE[dtype]:
        raise ValueError(f"{key!r} has {end - begin} bytes for {dtype!r} {list(shape)}")
    return StoredTensor(dtype, shape, start + begin, start + end)
