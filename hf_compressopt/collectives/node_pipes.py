"""Short messages between the ranks of one host, through pipes.

A pipe wakes the thread that waits, and no other one. Gloo has three threads of each rank woken for a message, one of
which may run in a loop until another one lets it go on: with several ranks on few cores, at the cost of what these
compute.
"""

from __future__ import annotations

import os
import select
import struct
import weakref
from collections.abc import Sequence
from datetime import timedelta

#: Numbers of a message, beside its key.
NUMBERS = 5
_MESSAGE = struct.Struct(f"={1 + NUMBERS}q")  # shorter than PIPE_BUF: it comes whole, or not at all


class NodePipes:
    """A pipe from each rank of a node to each other one.

    A rank makes the pipes that it reads, and the others open them through its process.
    """

    def __init__(self, ranks: int, rank: int, timeout: timedelta | None) -> None:
        """Start without pipes.

        Args:
            ranks: Ranks of the node.
            rank: This rank's number among them.
            timeout: How long a rank waits for another one; None is forever.
        """
        self._rank, self._others = rank, [other for other in range(ranks) if other != rank]
        self._timeout = None if timeout is None else max(1, int(1000 * timeout.total_seconds()))
        self._from: dict[int, int] = {}
        self._to: dict[int, int] = {}
        self._early: dict[int, dict[int, list[int]]] = {other: {} for other in self._others}
        weakref.finalize(self, _close, self._from, self._to)

    def make(self) -> dict[str, int]:
        """Make this rank's pipes, and return the descriptors of the ends that it reads, by the rank that writes.

        Raises:
            OSError: If the system has no more of them.
        """
        for other in self._others:
            self._from[other], writing = os.pipe()
            os.close(writing)  # the other rank opens one of its own: the pipe ends when that rank does
        return {str(other): descriptor for other, descriptor in self._from.items()}  # as JSON has it

    def open(self, processes: Sequence[int], made: Sequence[dict[str, int]]) -> None:
        """Open the pipes to the other ranks.

        Args:
            processes: Each rank's process, by rank.
            made: What :meth:`make` returned, by rank.

        Raises:
            OSError: If this process may not.
        """
        for other in self._others:
            path = f"/proc/{processes[other]}/fd/{made[other][str(self._rank)]}"
            self._to[other] = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def send(self, key: int, numbers: Sequence[int]) -> None:
        """Send a message of NUMBERS numbers to every other rank.

        Raises:
            RuntimeError: If a rank has ended, or if it reads nothing.
        """
        message = _MESSAGE.pack(key, *numbers)
        for other, descriptor in self._to.items():
            while True:
                try:
                    os.write(descriptor, message)
                    break
                except BlockingIOError:
                    self._wait(other, descriptor, select.POLLOUT)
                except OSError as error:
                    raise _ended(other) from error

    def receive(self, key: int, own: Sequence[int]) -> list[list[int]]:
        """Return every rank's message with this key, by rank; ``own`` is that of this rank. Others may come first.

        Raises:
            RuntimeError: If a rank has ended, or if it sends nothing.
        """
        rows = {self._rank: list(own)}
        for other in self._others:
            early = self._early[other]
            while key not in early:
                number, *numbers = self._next(other)
                early[number] = numbers
            rows[other] = early.pop(key)
        return [rows[rank] for rank in range(len(rows))]

    def _next(self, other: int) -> tuple[int, ...]:
        self._wait(other, self._from[other], select.POLLIN)
        message = os.read(self._from[other], _MESSAGE.size)
        if not message:
            raise _ended(other)
        return _MESSAGE.unpack(message)

    def _wait(self, other: int, descriptor: int, event: int) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(self._timeout):
            assert self._timeout is not None
            raise RuntimeError(f"rank {other} of the node has not answered for {self._timeout / 1000:g} s")


def _ended(rank: int) -> RuntimeError:
    return RuntimeError(f"rank {rank} of the node has ended, or closed its connection")


def _close(*descriptors: dict[int, int]) -> None:
    for ends in descriptors:
        for descriptor in ends.values():
            os.close(descriptor)
