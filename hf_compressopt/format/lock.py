"""A lock that one save at a time holds on the files of a prefix in a folder. It needs no torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_compressopt.format.writer import NO_LINKS

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_HELD = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)


@contextmanager
def locked(index_file: Path) -> Iterator[None]:
    """Hold the lock of the checkpoint that has this index; other processes cannot hold it meanwhile.

    The lock is a file beside the index. It is released when its process ends, however that happens. File systems
    without locks give none.

    Raises:
        BlockingIOError: If another save holds it.
        OSError: If the file cannot be made.
    """
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
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(errno.ELOOP, "a lock must not be a symbolic link: remove it", str(path)) from None
        try:
            _lock(descriptor, path)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                "another run is saving into the same files: give each run a folder or a prefix of its own",
                str(path),
            ) from None
