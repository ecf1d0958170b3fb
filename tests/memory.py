"""Peaks of resident memory, as Linux counts it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20


def peak_beyond(action: Callable[[], object]) -> float:
    """MiB by which resident memory rises at most while an action runs."""
    ctypes.CDLL(None).malloc_trim(0)  # so that nothing is taken from what was freed earlier
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at the present size
    before = _kilobytes("VmRSS:")
    action()
    return (_kilobytes("VmHWM:") - before) / 1024


def _kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))
