"""The two-phase compressed all-reduce with error feedback (1-bit Adam, arXiv 2102.02888, Algorithm 1 and Figure 3).

Phase 1: every rank sends chunk j of its compressed bucket to rank j, its server (all-to-all).
Phase 2: every server averages the messages, compresses the average, and sends it to all ranks (all-gather).
Both compressions keep what they lost and add it at the next step: the worker error and the server error.

Who sends which chunk to whom is up to the topology (:mod:`hf_compressopt.collectives.phases`): flat, as above, or in
two levels.

The exchange of one bucket is a generator. It yields before each wait, so that a :class:`Pipeline` can compress the
next bucket while a message is on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.phases import (
    Part,
    ShardErrors,
    Task,
    WorkerErrors,
    averaged,
    messages_of,
    parts_to_send,
    with_messages,
)
from hf_compressopt.kernels import (
    AnyAverage,
    Average,
    Combination,
    Commit,
    Errors,
    IntegerAverage,
    IntegerFormat,
    MessageFormat,
    Segment,
    SignFormat,
)
from hf_compressopt.kernels.errors import like_errors, tensor_of


@dataclass(frozen=True)
class ErrorFeedback:
    """The errors of one bucket on one rank, and the form of its messages.

    Attributes:
        worker_error: n elements, the part of this rank's values that its messages to the servers missed; in two levels
            those of its shard, and the part of the node's mean.
        server_error: n_own elements, the part of the average of its own chunk that this rank's message missed.
        format: The form of the messages.
    """

    worker_error: WorkerErrors
    server_error: Errors
    format: SignFormat


def server_numel(numel: int, communicator: Communicator) -> int:
    """Elements of a bucket of ``numel`` elements whose server this rank is."""
    start, stop = communicator.topology.own_range(numel)
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


def run_tasks(tasks: Iterable[Task[None]]) -> None:
    """Start tasks one after another, as a :class:`Pipeline` does, and finish them all."""
    pipeline = Pipeline()
    for task in tasks:
        pipeline.add(task)
    pipeline.drain()


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
    parts = yield from parts_to_send(z, feedback.worker_error, form, communicator)
    to_servers = messages_of(parts, form.compress_with_feedback_, z.device)
    del parts

    def serve(received: Tensor, out: Tensor) -> None:
        form.average_with_feedback_(received, feedback.server_error, out, communicator.topology.nodes)

    return (yield from averaged(z.numel, form, to_servers, serve, communicator))


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

    run_tasks([task()])
    return x


@dataclass(frozen=True)
class Exchanged(Generic[AnyAverage]):
    """A bucket that is back, with the errors of before the step, so that the step can still be dropped.

    Attributes:
        parts: What this rank has sent, and the worker errors of before the step. Gradients in it must not change before
            :meth:`commit`; in two levels there are none, but the node's mean.
        server_error: n_own elements, the server error before the step.
        new_server_error: n_own elements, the server error after it.
        sent: This rank's messages to the servers.
        average: The compressed mean: the same bits on all ranks.
        format: The form of the messages.
    """

    parts: tuple[Part, ...]
    server_error: Errors
    new_server_error: Errors
    sent: Tensor
    average: AnyAverage
    format: MessageFormat[AnyAverage]

    def renewed(self, z: Combination, worker_error: WorkerErrors, server_error: Errors) -> Exchanged[AnyAverage]:
        """Return the same for errors that may lie elsewhere now, and for values as they are now.

        In two levels the values stay those that were sent, since the other ranks of the node have a part in them.
        """
        if isinstance(worker_error, ShardErrors):
            rows = zip(self.parts, worker_error.sent(), strict=True)
            parts = tuple(replace(part, error=error) for part, error in rows)
        else:
            parts = (replace(self.parts[0], z=z, error=worker_error),)
        return replace(self, parts=parts, server_error=server_error)

    def commit(self, outputs: Sequence[Segment] = (), scale: float = 1.0) -> None:
        """Write the errors of the step, and the average times ``scale`` into ``outputs``; signs have no outputs."""
        tensor_of(self.server_error).copy_(tensor_of(self.new_server_error))
        for part, sent in with_messages(self.parts, self.sent):
            if part.chunks == self.average.world_size:  # the whole bucket, in one pass
                self.format.commit_(Commit(part.z, part.error, sent, self.average, outputs, scale))
                return
            numel = part.z.numel
            own = self.format.average(numel, sent, 1, part.nbytes)
            nothing = [Segment(None, 0, numel, 0)] if outputs else []
            self.format.commit_(Commit(part.z, part.error, sent, own, nothing))
        self.discard(outputs, scale)

    def discard(self, outputs: Sequence[Segment], scale: float) -> None:
        """Write the average times ``scale`` into ``outputs``, and leave the errors as they are."""
        if outputs:  # of integers: signs have none
            assert isinstance(self.format, IntegerFormat) and isinstance(self.average, IntegerAverage)
            self.format.add_(self.average, outputs, scale=scale)


def lazy_all_reduce(
    z: Combination,
    worker_error: WorkerErrors,
    server_error: Errors,
    form: MessageFormat[AnyAverage],
    communicator: Communicator,
) -> Task[Exchanged[AnyAverage]]:
    """Average one bucket over the ranks, and write no errors yet. All ranks call, for the same buckets in one order.

    Args:
        z: What this rank wants to send.
        worker_error: See :class:`ErrorFeedback`.
        server_error: n_own elements, the part of the average of its own chunk that this rank's message missed. Errors
            change in :meth:`Exchanged.commit` only.
        form: The form of the messages.
        communicator: The ranks, at least two.

    Returns:
        The average, and what is needed to write the errors.
    """
    parts = yield from parts_to_send(z, worker_error, form, communicator)
    sent = messages_of(parts, form.compress_, z.device)
    new_error = like_errors(server_error)

    def serve(received: Tensor, out: Tensor) -> None:
        form.average_compress_(received, server_error, new_error, out, communicator.topology.nodes)

    average = yield from averaged(z.numel, form, sent, serve, communicator)
    return Exchanged(parts, server_error, new_error, sent, average, form)
