"""Shards, which are safetensors files: verified reads of byte ranges, and durable writes. It needs no torch.

Bytes are read block by block and never mapped, and written as they come: a file of any size takes no memory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, NamedTuple

from hf_compressopt.format.index import (
    BLOCK_BYTES,
    DTYPES,
    CheckpointError,
    CheckpointIndex,
    Piece,
    TensorEntry,
    checksum_of,
)

#: safetensors' own bound on a header.
HEADER_CAP = 100_000_000
#: Shards that are open at a time.
_MOST_OPEN = 32
_ITEMSIZE = dict(DTYPES.values())
Bytes = bytes | bytearray | memoryview
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)
_HELD = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
#: Bytes from which on a bar is shown.
BIG = 10**9


class StoredTensor(NamedTuple):
    """A tensor in the header of a shard; its bytes are [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, key: str, entry: dict[str, Any], start: int) -> StoredTensor:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
            raise ValueError(f"the shape and offsets of {key!r} must be whole numbers >= 0")
        if dtype not in _ITEMSIZE or end - begin != prod(shape) * _ITEMSIZE[dtype]:
            raise ValueError(f"{key!r} has {end - begin} bytes for {dtype!r} {list(shape)}")
        return cls(dtype, shape, start + begin, start + end)


class ShardFile:
    """A shard that is open for reading, with the metadata of its header, and its tensors by key."""

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES, room: memoryview | None = None) -> None:
        """Open the file and check its header; blocks are read into ``room`` [block_bytes], which files may share."""
        self.path, self._block_bytes = path, block_bytes
        self._room = memoryview(bytearray(block_bytes)) if room is None else room
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path} is not readable: {error}") from error
        try:
            self.metadata, self.tensors = self._header(os.fstat(self._file.fileno()).st_size)
        except Exception as error:  # the file can hold anything
            self._file.close()
            raise CheckpointError(f"{path} is not readable as safetensors: {error}") from error

    def close(self) -> None:
        self._file.close()

    def _header(self, size: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        head = bytearray(8)
        length = int.from_bytes(head[: self._fill(0, memoryview(head))], "little")
        if size < 8 or length > min(HEADER_CAP, size - 8):
            raise ValueError(
                f"its header of {length} bytes is longer than {HEADER_CAP} bytes or than the file, which has {size}"
            )
        text = bytearray(length)
        header = json.loads(text[: self._fill(8, memoryview(text))])
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not an object")
        tensors = {key: StoredTensor.of(key, entry, 8 + length) for key, entry in header.items()}
        reached = 8 + length
        for key, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
            if tensor.begin != reached:
                raise ValueError(f"the bytes of {key!r} overlap others or leave a gap")
            reached = max(reached, tensor.end)
        if reached != size:
            raise ValueError(f"its tensors end at byte {reached} of {size}")
        return metadata, tensors

    def check_piece(self, piece: Piece, entry: TensorEntry) -> StoredTensor:
        """Return the stored tensor of a piece, if it is as the index says."""
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
        """Yield bytes [begin, end) of a piece, part by part, with where each begins; valid until the next one.

        Each block that they touch is read whole and verified. ``out``: [end - begin] bytes that they are left in.
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


def absent_shards(folder: Path, index: CheckpointIndex) -> dict[int, str]:
    """Return what is wrong with the shards that are missing in a folder or have another size, by their numbers."""
    problems = {}
    for number, shard in enumerate(index.shards):
        file, size = folder / shard.file, None
        with suppress(OSError):
            size = file.stat().st_size if file.is_file() else None
        if size is None:
            problems[number] = f"{file} is missing"
        elif size != shard.bytes:
            problems[number] = f"{file} has {size} bytes, the index says {shard.bytes}"
    return problems


def not_whole(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem}: the checkpoint is not whole")


class ShardFiles:
    """The shards of a checkpoint; few are open at a time, as a process may open few files. A context manager."""

    def __init__(self, folder: Path, index: CheckpointIndex, out_of_reach: Mapping[int, str] | None = None) -> None:
        self._folder, self._index = folder, index
        self._out_of_reach = out_of_reach or {}
        self._files: dict[int, ShardFile] = {}
        self._open: list[int] = []  # the one that was needed last is the last
        self._room = memoryview(bytearray(index.block_bytes))
        for number, problem in absent_shards(folder, index).items():
            if number not in self._out_of_reach:
                raise not_whole(problem)

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def __getitem__(self, number: int) -> ShardFile:
        if number in self._out_of_reach:
            raise CheckpointError(self._out_of_reach[number])
        if number not in self._files:
            file = ShardFile(self._folder / self._index.shards[number].file, self._index.block_bytes, self._room)
            if (found := file.metadata.get("save_id")) != self._index.save_id:
                file.close()
                raise CheckpointError(f"{file.path} belongs to save {found!r}, the index is of {self._index.save_id!r}")
            self._files[number] = file
        if number in self._open:
            self._open.remove(number)
        elif len(self._open) == _MOST_OPEN:
            self._files[self._open.pop(0)].close()
        self._open.append(number)
        return self._files[number]


def write_shard(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    metadata: Mapping[str, str],
    parts_of: Callable[[str], Iterable[Bytes]],
    *,
    temporary: Path | None = None,
    doing: str = "",
    shown: bool | None = None,
) -> tuple[int, dict[str, tuple[str, ...]]]:
    """Write a safetensors file durably; it replaces the file of that name in one moment, or nothing is left of it.

    ``tensors`` has dtype, by torch's name, and shape of each; ``parts_of`` returns the bytes of one, in parts that are
    valid until the next one. ``temporary`` is the name until the file is whole; None is a new one beside ``path``.
    Returns the size of the file, and the checksums of each tensor, one for every BLOCK_BYTES of it.
    """
    unknown = sorted({dtype for dtype, _ in tensors.values()} - DTYPES.keys())
    if unknown:
        raise ValueError(f"{path}: safetensors has no dtype {unknown[0]!r}; legal are {sorted(DTYPES)}")
    header: dict[str, Any] = {}
    end, checksums = 0, {}
    for key in sorted(tensors, key=lambda key: -DTYPES[tensors[key][0]][1]):  # so that all are aligned
        dtype, shape = tensors[key]
        start, end = end, end + prod(shape) * DTYPES[dtype][1]
        header[key] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": dict(metadata), **header}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_CAP:
        raise ValueError(f"{len(tensors)} tensors make a header of {len(text)} bytes; at most {HEADER_CAP} are legal")
    size = 8 + len(text) + end
    with durable_file(temporary or temporary_name(path), "wb" if temporary else "xb", final=path) as file:
        _allocate(file, size)  # a full disk is met before anything is written
        file.write(len(text).to_bytes(8, "little") + text)
        with progress(f"{doing} {path.name}".strip(), size, shown=shown) as advance:
            for key, entry in header.items():
                start, end = entry["data_offsets"]
                checksums[key] = tuple(_write_blocks(file, end - start, parts_of(key), advance))
    return size, checksums


def _allocate(file: BinaryIO, size: int) -> None:
    try:
        if allocate := getattr(os, "posix_fallocate", None):  # macOS has none
            allocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in _CANNOT_ALLOCATE:
            raise


def _write_blocks(
    file: BinaryIO, nbytes: int, parts: Iterable[Bytes], advance: Callable[[int], object]
) -> Iterator[str]:
    """Write the bytes of a tensor, and yield the checksum of each block."""
    checksum, done = checksum_of(), 0
    for part in parts:
        rest = memoryview(part)
        while rest:
            block = rest[: BLOCK_BYTES - done % BLOCK_BYTES]
            checksum.update(block)
            file.write(block)
            done += len(block)
            if done % BLOCK_BYTES == 0 or done == nbytes:
                yield checksum.hexdigest()
                checksum = checksum_of()
            rest = rest[len(block) :]
            advance(len(block))
    if done != nbytes:
        raise ValueError(f"{done} bytes were given for a tensor of {nbytes}")


@contextmanager
def durable_file(path: Path, mode: str = "xb", *, final: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file to be written; after the block its bytes are on the disk, and its name is ``final``.

    An error in the block removes the file, and a file that was called ``final`` before is as it was. A symbolic link is
    refused: it may lead to any file.
    """
    try:
        with open(path, mode, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666)) as file:
            yield file  # type: ignore[misc]
            file.flush()
            os.fsync(file.fileno())
        if final is not None:
            publish(path, final)
    except BaseException as error:
        with suppress(OSError):  # the error that led here is the one to tell
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def temporary_name(path: Path) -> Path:
    """Return a new name beside ``path`` for a file that is being written; nobody else chooses the same."""
    return path.with_name(f"{path.stem[:200]}.{token_hex(8)}.tmp")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably; a folder that exists is left as it is."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def write_aside(path: Path, data: bytes) -> Path:
    """Write a small file durably under the name that it has before :func:`publish`, and return that name."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # it may be a link to any file
    with durable_file(temporary) as file:
        file.write(data)
    return temporary


def publish(temporary: Path, path: Path) -> None:
    """Give a file its final name, durably; it replaces the file of that name in one moment."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(index_file: Path) -> Iterator[None]:
    """Hold the lock of the checkpoint that has this index; other processes cannot hold it meanwhile."""
    path = index_file.with_suffix(".lock")
    descriptor = _hold(path)
    try:
        yield
    finally:
        with suppress(OSError):  # a file too many does no harm
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _hold(path: Path) -> int:
    """Open the file and lock it, again if the save that had it removes it in between."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(errno.ELOOP, "a lock must not be a symbolic link: remove it", str(path)) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                os.close(descriptor)
                told = "another run is saving into the same files: give each run a folder or a prefix of its own"
                raise BlockingIOError(errno.EWOULDBLOCK, told, str(path)) from None
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


@contextmanager
def progress(what: str, nbytes: int, *, shown: bool | None = None) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr; ``HF_HUB_DISABLE_PROGRESS_BARS=1`` turns it off."""
    if not (sys.stderr.isatty() and nbytes >= BIG if shown is None else shown):
        yield lambda _: None
        return
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, leave=False) as bar:  # type: ignore[no-untyped-call]
        yield bar.update
