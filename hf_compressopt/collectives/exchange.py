"""The two-phase compressed all-reduce with error feedback (1-bit Adam, arXiv 2102.02888, Algorithm 1 and Figure 3).

Phase 1: every rank sends chunk j of its compressed bucket to rank j, its server (all-to-all).
Phase 2: every server averages the messages, compresses the average, and sends it to all ranks (all-gather).
Both compressions keep what they lost and add it at the next step: the worker error and the server error.

The exchange of one bucket is a generator. It yields before each wait, so that a :class:`Pipeline` can compress the
next bucket while a message is on the wire.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels import Average, Combination, MessageFormat

_Result = TypeVar("_Result")
#: Work on one bucket: it yields before each wait, and returns a result.
Task = Generator[None, None, _Result]


@dataclass(frozen=True)
class ErrorFeedback:
    """The errors of one bucket on one rank, and the form of its messages.

    Attributes:
        worker_error: [n] float32, the part of this rank's values that its messages to the servers missed.
        server_error: [n_own] float32, the part of the average of its own chunk that this rank's message missed.
        format: The form of the messages.
    """

    worker_error: Tensor
    server_error: Tensor
    format: MessageFormat


def server_numel(numel: int, communicator: Communicator) -> int:
    """Elements of a bucket of ``numel`` elements whose server this rank is."""
    start, stop = chunk_range(numel, communicator.world_size, communicator.rank)
    return stop - start


class Pipeline:
    """Tasks in flight: while one waits for the network, later ones compute.

    Each new task runs to its first wait. Then every earlier task continues to its next wait, the newest first. The
    order of all steps depends on the tasks alone, so that ranks with the same tasks start their collectives in the
    same order.
    """

    def __init__(self) -> None:
        """Start with no task."""
        self._tasks: list[Task[None]] = []  # the newest first

    def add(self, task: Task[None]) -> None:
        """Start a task, and advance the others."""
        self._tasks.insert(0, task)
        self._advance()

    def drain(self) -> None:
        """Finish all tasks."""
        while self._tasks:
            self._advance()

    def _advance(self) -> None:
        self._tasks = [task for task in self._tasks if _is_waiting(task)]


def _is_waiting(task: Task[None]) -> bool:
    """Continue a task to its next wait. Returns False if the task ended instead."""
    for _ in task:
        return True
    return False


def compressed_all_reduce(z: Combination, feedback: ErrorFeedback, communicator: Communicator) -> Task[Average]:
    """Average one bucket over the ranks by compressed messages. All ranks call, for the same buckets in one order.

    Args:
        z: What this rank wants to send.
        feedback: The errors of this bucket, updated in place.
        communicator: The ranks.

    Returns:
        The compressed mean, still as messages: the same bits on all ranks. A single rank gets what it wanted to send,
        plus the errors of a run on more ranks, which become zero.
    """
    world_size, rank, form = communicator.world_size, communicator.rank, feedback.format
    if world_size == 1:
        return _with_old_errors(z, feedback)
    nbytes = form.chunk_nbytes(z.numel, world_size)
    to_servers = torch.zeros(sum(nbytes), dtype=torch.uint8, device=z.device)
    form.compress_(z, feedback.worker_error, to_servers, world_size)
    from_workers = to_servers.new_empty(world_size * nbytes[rank])
    handle = communicator.all_to_all(
        from_workers, to_servers, output_splits=[nbytes[rank]] * world_size, input_splits=nbytes
    )
    yield
    handle.wait()
    stride = nbytes[0]  # the first chunk is the longest
    to_all = from_workers.new_zeros(stride)
    form.average_compress_(from_workers, feedback.server_error, to_all[: nbytes[rank]], world_size)
    from_servers = to_all.new_empty(world_size * stride)
    handle = communicator.all_gather(from_servers, to_all)
    del to_servers, from_workers  # a bucket on its way holds one phase's messages
    yield
    handle.wait()
    return form.average(z.numel, from_servers, world_size, stride)


def _with_old_errors(z: Combination, feedback: ErrorFeedback) -> Average:
    values = torch.empty(z.numel, dtype=torch.float32, device=z.device)
    kernels.on(values).combine_(z, values)
    for error in (feedback.worker_error, feedback.server_error):
        if error.numel():
            values += error
            error.zero_()
    return Average.of(values)


def compressed_all_reduce_(x: Tensor, feedback: ErrorFeedback, communicator: Communicator) -> Tensor:
    """Replace x by the compressed mean over ranks, the same bits on all of them. One bucket; all ranks call.

    Args:
        x: [n] float32, contiguous, updated in place. With one rank x does not change.
        feedback: The errors of this bucket, updated in place.
        communicator: The ranks.

    Returns:
        x.
    """

    def task() -> Task[None]:
        average = yield from compressed_all_reduce(Combination.of(x), feedback, communicator)
        kernels.on(x).decompress_(average, x)

    pipeline = Pipeline()
    pipeline.add(task())
    pipeline.drain()
    return x
