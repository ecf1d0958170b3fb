"""Peaks of resident memory, as Linux counts it."""

import ctypes
from collections.abc import Callable
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


def _kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))
