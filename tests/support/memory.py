"""Peaks of resident memory, as Linux counts it, and limits on what a process may take."""

import ctypes
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20
_M_MMAP_THRESHOLD = -3


def peak_beyond(action: Callable[[], object]) -> float:
    """MiB by which resident memory rises at most while an action runs."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # a tensor that is freed is gone, whatever this process did before
    libc.malloc_trim(0)  # so that nothing is taken from what was freed earlier
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at the present size
    before = _kilobytes("VmRSS:")
    action()
    return (_kilobytes("VmHWM:") - before) / 1024


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Inside the block a resource of this process is limited, such as the size of a file: resource.RLIMIT_FSIZE."""
    limits = resource.getrlimit(what)
    resource.setrlimit(what, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, limits)


def _kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))
