"""Durable writes of files; a shard is written and hashed in one pass. It needs no torch.

The header of a safetensors file is written first, since dtypes and shapes are known beforehand. No data is kept, so
that a file of any size takes no memory.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any

from hf_compressopt.format.index import BLOCK_BYTES, DTYPES, checksum_of
from hf_compressopt.format.reader import HEADER_CAP

#: A flag that refuses symbolic links: they may lead to any file.
NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
Bytes = bytes | bytearray | memoryview
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


class ShardWriter:
    """A safetensors file that is being written; a context manager.

    The whole file is allocated first, if the file system supports it, so that a full disk is met before anything is
    written. The file has a temporary name until :meth:`finish`. It is removed if the context ends without that call.

        with ShardWriter(path, {"a": ("float32", (2, 3))}, {"format": "pt"}) as writer:
            for key in writer.keys:
                writer.write(key, data[key])
            checksums = writer.finish()

    Attributes:
        path: The final name of the file.
        keys: The tensors in the order in which their bytes must come. Those with larger elements come first, so that
            all are aligned; otherwise the given order is kept.
        bytes: Size of the file.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        metadata: Mapping[str, str],
        temporary: Path | None = None,
    ) -> None:
        """Lay out the file; nothing is written before the context is entered.

        Args:
            path: The file's name.
            tensors: Dtype, by torch's name, and shape of every tensor.
            metadata: Metadata of the header.
            temporary: The name until :meth:`finish`; a file of that name is replaced. None: a new name beside ``path``.

        Raises:
            ValueError: For a dtype that safetensors does not have, or a header that is too long.
        """
        unknown = sorted({dtype for dtype, _ in tensors.values()} - DTYPES.keys())
        if unknown:
            raise ValueError(f"{path}: safetensors has no dtype {unknown[0]!r}; legal are {sorted(DTYPES)}")
        self.path = path
        self.keys = tuple(sorted(tensors, key=lambda key: -DTYPES[tensors[key][0]][1]))
        self._sizes = {key: prod(tensors[key][1]) * DTYPES[tensors[key][0]][1] for key in self.keys}
        self._header = _header({key: tensors[key] for key in self.keys}, self._sizes, metadata)
        self.bytes = len(self._header) + sum(self._sizes.values())
        self._temporary = temporary or temporary_name(path)
        self._flags = os.O_WRONLY | os.O_CREAT | NO_LINKS | (os.O_EXCL if temporary is None else os.O_TRUNC)
        self._checksums: dict[str, list[str]] = {key: [] for key in self.keys}
        self._due = [key for key in reversed(self.keys) if self._sizes[key]]  # the last is next
        self._done = 0  # bytes of it
        self._checksum = checksum_of()
        self._descriptor = -1
        self._finished = False

    def __enter__(self) -> ShardWriter:
        """Allocate the file and write the header.

        Raises:
            OSError: If the disk is full, or the folder not writable.
        """
        self._descriptor = os.open(self._temporary, self._flags, 0o666)
        try:
            self._allocate()
            _write_all(self._descriptor, self._header)
        except BaseException as error:
            self._discard()
            raise self._named(error) from None
        return self

    def write(self, key: str, data: Bytes) -> None:
        """Write the next bytes of a tensor, all of them or a part; ``data`` may be reused when this returns.

        Raises:
            ValueError: If the bytes of another tensor are due, or if these are too many.
            OSError: If they cannot be written.
        """
        rest = memoryview(data)
        if rest.nbytes == 0:
            return
        rest = rest.cast("B")
        self._check_due(key, len(rest))
        while rest:
            block = rest[: BLOCK_BYTES - self._done % BLOCK_BYTES]
            self._checksum.update(block)
            try:
                _write_all(self._descriptor, block)
            except OSError as error:
                raise self._named(error) from None
            self._done += len(block)
            if self._done % BLOCK_BYTES == 0 or self._done == self._sizes[key]:
                self._checksums[key].append(self._checksum.hexdigest())
                self._checksum = checksum_of()
            if self._done == self._sizes[key]:
                self._due.pop()
                self._done = 0
            rest = rest[len(block) :]

    def finish(self) -> dict[str, tuple[str, ...]]:
        """Make the file durable, and give it its final name.

        Returns:
            The checksums of each tensor, one for every BLOCK_BYTES of it.

        Raises:
            ValueError: If bytes are missing.
            OSError: If the file cannot be made durable.
        """
        if self._due:
            key = self._due[-1]
            raise ValueError(f"{self.path}: {key!r} was given {self._done} of its {self._sizes[key]} bytes")
        try:
            os.fsync(self._descriptor)
            self._close()
            publish(self._temporary, self.path)
        except OSError as error:
            raise self._named(error) from None
        self._finished = True
        return {key: tuple(checksums) for key, checksums in self._checksums.items()}

    def __exit__(self, *_: object) -> None:
        """Remove the file if it was not finished."""
        if not self._finished:
            self._discard()

    def _allocate(self) -> None:
        allocate = getattr(os, "posix_fallocate", None)  # macOS and Windows have none
        if allocate is None:
            return
        try:
            allocate(self._descriptor, 0, self.bytes)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise

    def _check_due(self, key: str, nbytes: int) -> None:
        due = self._due[-1] if self._due else None
        if key != due or nbytes > self._sizes[key] - self._done:
            left = "none" if due is None else f"{self._sizes[due] - self._done} of {due!r}"
            raise ValueError(f"{self.path}: {nbytes} bytes of {key!r}, but {left} are due")

    def _close(self) -> None:
        """Close the descriptor; it is gone even if the close fails."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _discard(self) -> None:
        with suppress(OSError):
            self._close()
        with suppress(OSError):  # the error that led here is the one to tell
            self._temporary.unlink(missing_ok=True)

    def _named(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError) and error.filename is None:
            return OSError(error.errno, error.strerror, str(self._temporary))
        return error


def temporary_name(path: Path) -> Path:
    """Return a new name beside ``path`` for a file that is being written; nobody else chooses the same."""
    return path.with_name(f"{path.stem[:200]}.{token_hex(8)}.tmp")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably; a folder that exists is left as it is.

    Raises:
        OSError: If it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def write_aside(path: Path, data: bytes) -> Path:
    """Write a small file durably under the name that it has before :func:`publish`, and return that name.

    Raises:
        OSError: If it cannot be written; then nothing of it is left.
    """
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # it may be a link to any file
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def publish(temporary: Path, path: Path) -> None:
    """Give a file its final name, durably; it replaces the file of that name in one moment.

    Raises:
        OSError: If that fails.
    """
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable.

    Raises:
        OSError: If that fails.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], sizes: Mapping[str, int], metadata: Mapping[str, str]
) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for key, (dtype, shape) in tensors.items():
        end = offset + sizes[key]
        header[key] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_CAP:
        raise ValueError(f"{len(tensors)} tensors make a header of {len(text)} bytes; at most {HEADER_CAP} are legal")
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, data: Bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
