"""Saves in the background: each has a thread, and no failure goes unnoticed."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread

logger = logging.getLogger(__name__)
_HEAD_START = 0.01  # seconds; otherwise this thread has the interpreter first, and training waits for 5 ms


class PendingSave:
    """A save in the background.

    The process does not end before it is done. A save fails on all ranks together. Every rank raises the error once: in
    :meth:`result`, or in the next save or load. If neither is called, the process ends with exit code 1.

    Attributes:
        path: The index that it writes.
    """

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path, self._work = path, work
        self._error: BaseException | None = None
        self._ended = Event()
        _pending().append(self)
        self._thread = Thread(target=self._run, name=f"save of {path}")  # no daemon: the interpreter waits for it
        try:
            self._thread.start()
        except RuntimeError:
            self._run()
            self.result()

    def done(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.done() and self._error is not None

    def result(self) -> None:
        """Wait until the checkpoint is whole.

        Raises:
            OSError: If a file could not be written, or another rank had no memory for its copy. All ranks raise, and an
                earlier checkpoint is as it was.
            MemoryError: If this rank had no memory for its copy.
            RuntimeError: If another rank is gone.
        """
        self._ended.wait()
        if self in _pending():
            _pending().remove(self)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            time.sleep(_HEAD_START)
            self._work()
        except BaseException as error:
            self._error = error
            logger.error("the save of %s failed: %s: %s", self.path, type(error).__name__, error)
        finally:
            del self._work  # it holds the copies
            self._ended.set()


def wait_for_saves(which: Callable[[PendingSave], bool] = lambda save: True) -> None:
    """Wait until the checkpoints that are being written in the background are whole.

    Call it on all ranks before you rename, copy or remove their folders. Saves, loads and the end of the process wait
    by themselves.

    Args:
        which: The saves to wait for; all by default.

    Raises:
        OSError: If a file could not be written; on all ranks.
    """
    failed = []
    for save in filter(which, tuple(_pending())):
        try:
            save.result()
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]


@cache
def _pending() -> list[PendingSave]:
    """The saves of this process whose outcome nobody has asked for, in the order of their start."""
    return []


def _wait_at_exit() -> None:
    """End the process with exit code 1 if a save has failed that nobody asked about."""
    try:
        wait_for_saves()
    except Exception as error:
        logger.critical("a save in the background failed, so the exit code is 1: %s", error)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)


atexit.register(_wait_at_exit)
