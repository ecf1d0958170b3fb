"""Reads of byte ranges of a shard's tensors, each verified by its checksums. It needs no torch.

Bytes are read block by block, never mapped, so that reading takes the memory of one block, however large the file.
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
    DTYPES,
    CheckpointError,
    CheckpointIndex,
    Piece,
    Shard,
    TensorEntry,
    checksum_of,
)

#: safetensors' own bound on a header.
HEADER_CAP = 100_000_000
#: Shards that are open at a time.
_MOST_OPEN = 32
_ITEMSIZE = dict(DTYPES.values())


class StoredTensor(NamedTuple):
    """A tensor in the header of a shard; its bytes are [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class ShardFile:
    """A shard that is open for reading.

    Attributes:
        path: The file.
        metadata: The metadata of its header.
        tensors: Its tensors, by key.
    """

    def __init__(
        self,
        path: Path,
        block_bytes: int = BLOCK_BYTES,
        room: memoryview | None = None,
    ) -> None:
        """Open the file and check its header.

        Args:
            path: The file.
            block_bytes: Bytes under each checksum.
            room: [block_bytes] bytes that blocks are read into. Files that are read one after another may share them.
                None: own ones.

        Raises:
            CheckpointError: If it is not readable, or not a whole safetensors file.
        """
        self.path = path
        self._block_bytes = block_bytes
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
        """Close the file; a read opens it again."""
        self._file.close()

    def _header(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        size = os.fstat(self._file.fileno()).st_size
        head = bytearray(8)
        length = int.from_bytes(head[: self._fill(0, memoryview(head))], "little")
        if size < 8 or length > min(HEADER_CAP, size - 8):
            raise ValueError(
                f"its header of {length} bytes is longer than {HEADER_CAP} bytes or than the file, which has {size}"
            )
        text = bytearray(length)
        header = json.loads(text[: self._fill(8, memoryview(text))], object_pairs_hook=_without_doubles)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not an object")
        tensors = {key: _stored(key, entry, 8 + length) for key, entry in header.items()}
        reached = 8 + length
        for key, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
            if tensor.begin != reached:
                raise ValueError(f"the bytes of {key!r} overlap others or leave a gap")
            reached = max(reached, tensor.end)
        if reached != size:
            raise ValueError(f"its tensors end at byte {reached} of {size}")
        return metadata, tensors

    def check_piece(self, piece: Piece, entry: TensorEntry) -> StoredTensor:
        """Return the stored tensor of a piece, if it is as the index says.

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
        """Read bytes [begin, end) of a piece, a block at a time; each block that they touch is read whole and verified.

        Args:
            piece: The piece.
            entry: The tensor that it is a piece of.
            begin: First byte, from the start of the piece.
            end: One past the last byte; None is the end of the piece.
            out: [end - begin] bytes that they are left in; a whole block is read into these at once.

        Yields:
            The first byte of each part, from the start of the piece, and its bytes. They are valid until the next part.

        Raises:
            CheckpointError: If they are not what was saved; then a part of ``out`` is overwritten.
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
            if checksum_of(block).hexdigest() != piece.checksums[number]:
                raise CheckpointError(f"{self.path} is damaged: the checksum of {piece.key!r} is not that of the index")
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
            raise CheckpointError(f"{self.path} ends before byte {offset + len(part)}: the file has changed meanwhile")

    def _fill(self, offset: int, part: memoryview) -> int:
        """Read until the file ends, since file systems may return fewer bytes than asked for; returns their number."""
        if self._file.closed:
            self._file = open(self.path, "rb", buffering=0)
        self._file.seek(offset)
        done = 0
        while done < len(part) and (count := self._file.readinto(part[done:])):
            done += count
        return done


def check_size(folder: Path, shard: Shard) -> None:
    """Check that a shard exists and has its size.

    Raises:
        CheckpointError: If it is not.
    """
    if problem := _absence(folder, shard):
        raise CheckpointError(f"{problem}: the checkpoint is not whole")


def absent_shards(folder: Path, index: CheckpointIndex) -> dict[int, str]:
    """Return what is wrong with the shards that are missing in a folder or have another size, by their numbers."""
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
    """Open the shard of this number; ``room`` as for :class:`ShardFile`.

    Raises:
        CheckpointError: If it is not a whole safetensors file, or of another save.
    """
    file = ShardFile(folder / index.shards[number].file, index.block_bytes, room)
    if (found := file.metadata.get("save_id")) != index.save_id:
        file.close()
        raise CheckpointError(f"{file.path} belongs to save {found!r}, the index is of {index.save_id!r}")
    return file


class ShardFiles:
    """The shards of a checkpoint, each opened when it is needed; a context manager that closes them.

    Few are open at a time: a process may open 1,024 files on many systems, and a run have more ranks.
    """

    def __init__(self, folder: Path, index: CheckpointIndex, out_of_reach: Mapping[int, str] | None = None) -> None:
        """Check that every shard exists and has its size.

        Args:
            folder: The folder.
            index: Its index.
            out_of_reach: Shards that may be missing, by their numbers, and the error to raise if one is needed. None:
                no shard may be missing.

        Raises:
            CheckpointError: If a shard is missing, or has another size.
        """
        self._folder, self._index = folder, index
        self._out_of_reach = out_of_reach or {}
        self._files: dict[int, ShardFile] = {}
        self._open: list[int] = []  # the one that was needed last is the last
        self._room = memoryview(bytearray(index.block_bytes))
        for number, shard in enumerate(index.shards):
            if number not in self._out_of_reach:
                check_size(folder, shard)

    def __enter__(self) -> ShardFiles:
        """Return the files."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def __getitem__(self, number: int) -> ShardFile:
        """Return the shard of this number; raises as :func:`open_shard` does."""
        if number in self._out_of_reach:
            raise CheckpointError(self._out_of_reach[number])
        if number in self._open:
            self._open.remove(number)
        elif len(self._open) == _MOST_OPEN:
            self._files[self._open.pop(0)].close()
        if number not in self._files:
            self._files[number] = open_shard(self._folder, self._index, number, self._room)
        self._open.append(number)
        return self._files[number]


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _stored(key: str, entry: dict[str, Any], start: int) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
        raise ValueError(f"the shape and offsets of {key!r} must be whole numbers >= 0")
    if dtype not in _ITEMSIZE or end - begin != prod(shape) * _ITEMSIZE[dtype]:
        raise ValueError(f"{key!r} has {end - begin} bytes for {dtype!r} {list(shape)}")
    return StoredTensor(dtype, shape, start + begin, start + end)
