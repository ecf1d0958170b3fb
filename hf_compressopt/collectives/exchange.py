"""The two-phase compressed all-reduce with error feedback (1-bit Adam, arXiv 2102.02888, Algorithm 1 and Figure 3).

Phase 1: every rank sends chunk j of its compressed bucket to rank j, its server (all-to-all).
Phase 2: every server averages the messages, compresses the average, and sends it to all ranks (all-gather).
Both compressions keep what they lost and add it at the next step: the worker error and the server error.

The exchange of one bucket is a generator. It yields before each wait, so that a :class:`Pipeline` can compress the
next bucket while a message is on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels import AnyAverage, Average, Combination, Commit, Errors, MessageFormat, Segment, SignFormat
from hf_compressopt.kernels.errors import like_errors, tensor_of

_Result = TypeVar("_Result")
#: Work on one bucket: it yields before each wait, and returns a result.
Task = Generator[None, None, _Result]


@dataclass(frozen=True)
class ErrorFeedback:
    """The errors of one bucket on one rank, and the form of its messages.

    Attributes:
        worker_error: n elements, the part of this rank's values that its messages to the servers missed.
        server_error: n_own elements, the part of the average of its own chunk that this rank's message missed.
        format: The form of the messages.
    """

    worker_error: Errors
    server_error: Errors
    format: SignFormat


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
    world_size, form = communicator.world_size, feedback.format
    if world_size == 1:
        return _with_old_errors(z, feedback)
    nbytes = form.chunk_nbytes(z.numel, world_size)

    def compress() -> Tensor:
        messages = torch.zeros(sum(nbytes), dtype=torch.uint8, device=z.device)
        form.compress_with_feedback_(z, feedback.worker_error, messages, world_size)
        return messages

    def serve(received: Tensor, out: Tensor) -> None:
        form.average_with_feedback_(received, feedback.server_error, out, world_size)

    from_servers = yield from _two_phases(compress(), nbytes, serve, communicator)
    return form.average(z.numel, from_servers, world_size, nbytes[0])


def _two_phases(
    to_servers: Tensor, nbytes: Sequence[int], serve: Callable[[Tensor, Tensor], None], communicator: Communicator
) -> Task[Tensor]:
    """Send each server its message, have ``serve(received, out)`` make this server's own, and gather all of these.

    Args:
        to_servers: [sum(nbytes)] uint8, this rank's messages, one after another.
        nbytes: Bytes of the message of each chunk; the first one is the longest.
        serve: Averages the messages of all ranks, [world_size * n] uint8, into one, [n].
        communicator: The ranks.

    Returns:
        [world_size * nbytes[0]] uint8: the message of server j begins at ``j * nbytes[0]``.
    """
    world_size, own = communicator.world_size, nbytes[communicator.rank]
    received = to_servers.new_empty(world_size * own)
    handle = communicator.all_to_all(received, to_servers, output_splits=[own] * world_size, input_splits=nbytes)
    yield
    handle.wait()
    from_servers = received.new_empty(world_size * nbytes[0])
    to_all = from_servers[communicator.rank * nbytes[0] :][: nbytes[0]]
    serve(received, to_all[:own])
    to_all[own:].zero_()
    handle = communicator.all_gather(from_servers, to_all)
    del to_servers, received  # a bucket on its way holds one phase's messages
    yield
    handle.wait()
    return from_servers


def _with_old_errors(z: Combination, feedback: ErrorFeedback) -> Average:
    values = torch.empty(z.numel, dtype=torch.float32, device=z.device)
    kernels.on(values).combine_(z, values)
    for error in (feedback.worker_error, feedback.server_error):
        if error.numel():
            assert isinstance(error, Tensor)  # a single rank's
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


@dataclass(frozen=True)
class Exchanged(Generic[AnyAverage]):
    """A bucket that is back, with the errors of before the step, so that the step can still be dropped.

    Attributes:
        z: What this rank wanted to send; its gradients must not change before :meth:`commit`.
        worker_error: n elements, the worker error before the step.
        server_error: n_own elements, the server error before the step.
        new_server_error: n_own elements, the server error after it.
        sent: This rank's messages to the servers.
        average: The compressed mean: the same bits on all ranks.
        format: The form of the messages.
    """

    z: Combination
    worker_error: Errors
    server_error: Errors
    new_server_error: Errors
    sent: Tensor
    average: AnyAverage
    format: MessageFormat[AnyAverage]

    def commit(self, outputs: Sequence[Segment] = (), scale: float = 1.0) -> None:
        """Write the errors of the step, and the average times ``scale`` into ``outputs``; signs have no outputs."""
        tensor_of(self.server_error).copy_(tensor_of(self.new_server_error))
        self.format.commit_(Commit(self.z, self.worker_error, self.sent, self.average, outputs, scale))

    def discard(self, outputs: Sequence[Segment], scale: float) -> None:
        """Write the average times ``scale`` into ``outputs``, and leave the errors as they are."""
        values = torch.empty(self.average.numel, dtype=torch.float32, device=self.sent.device)
        self.format.decompress_(self.average, values)
        values.mul_(scale)
        for segment, part in zip(outputs, torch.split(values, [s.numel for s in outputs]), strict=True):
            if segment.tensor is not None:
                segment.part.copy_(part)


def lazy_all_reduce(
    z: Combination,
    worker_error: Errors,
    server_error: Errors,
    form: MessageFormat[AnyAverage],
    communicator: Communicator,
) -> Task[Exchanged[AnyAverage]]:
    """Average one bucket over the ranks, and write no errors yet. All ranks call, for the same buckets in one order.

    Args:
        z: What this rank wants to send.
        worker_error: n elements, the part of this rank's values that its messages to the servers missed.
        server_error: n_own elements, the part of the average of its own chunk that this rank's message missed. Errors
            change in :meth:`Exchanged.commit` only.
        form: The form of the messages.
        communicator: The ranks, at least two.

    Returns:
        The average, and what is needed to write the errors.
    """
    world_size = communicator.world_size
    nbytes = form.chunk_nbytes(z.numel, world_size)
    sent = torch.zeros(sum(nbytes), dtype=torch.uint8, device=z.device)
    form.compress_(z, worker_error, sent, world_size)
    new_error = like_errors(server_error)

    def serve(received: Tensor, out: Tensor) -> None:
        form.average_compress_(received, server_error, new_error, out, world_size)

    from_servers = yield from _two_phases(sent, nbytes, serve, communicator)
    average = form.average(z.numel, from_servers, world_size, nbytes[0])
    return Exchanged(z, worker_error, server_error, new_error, sent, average, form)
