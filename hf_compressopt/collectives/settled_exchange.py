"""The compressed all-reduce for gradients that are freed, or overwritten, as soon as their message is made.

Nothing is made of the gradients again. So the new errors are made with the message, and wait until all ranks know
whether the step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_compressopt.collectives import phases
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.phases import Part, ShardErrors, Task, WorkerErrors
from hf_compressopt.kernels import AnyAverage, Combination, Errors, MessageFormat
from hf_compressopt.kernels.errors import like_errors, tensor_of


def send_(
    parts: Sequence[Part],
    form: MessageFormat[AnyAverage],
    device: torch.device,
    new_errors: Sequence[Errors] | None = None,
) -> Tensor:
    """Compress parts, write what their messages miss, and return the messages, one after another, uint8.

    Args:
        parts: What this rank sends.
        form: The form of the messages.
        device: Device of the messages.
        new_errors: Where the new worker error of each part is written, in the form of the old one; None to overwrite
            the old ones.
    """
    places = [part.error for part in parts] if new_errors is None else new_errors
    return phases.messages_of(parts, _writing(places, form), device)


def _writing(
    new_errors: Iterable[Errors], form: MessageFormat[AnyAverage]
) -> Callable[[Combination, Errors, Tensor, int], None]:
    """Return what compresses one part after another, and writes what their messages miss."""
    places = iter(new_errors)

    def compress_(z: Combination, error: Errors, messages: Tensor, chunks: int) -> None:
        form.compress_settled_(z, error, next(places), messages, chunks)

    return compress_


@dataclass(frozen=True)
class PendingErrors:
    """The errors of a bucket whose message has left, until all ranks know whether the step is taken.

    Attributes:
        worker: The new worker error of each part that was sent.
        server: The new server error; None if the server has sent nothing yet.
    """

    worker: tuple[Errors, ...]
    server: Errors | None = None

    @classmethod
    def at(cls, worker_error: WorkerErrors, server_error: Errors | None = None) -> PendingErrors:
        """Return errors that are written into these."""
        return cls(_sent(worker_error), server_error)

    @classmethod
    def like(cls, worker_error: WorkerErrors, server_error: Errors | None = None) -> PendingErrors:
        """Return memory for errors of the same form."""
        found = map(like_errors, _sent(worker_error))
        return cls(tuple(found), None if server_error is None else like_errors(server_error))

    def commit(self, worker_error: WorkerErrors, server_error: Errors) -> None:
        """Write the errors to where they belong."""
        rows = zip(_sent(worker_error), self.worker, strict=True)
        for place, new in [*rows, *([] if self.server is None else [(server_error, self.server)])]:
            tensor_of(place).copy_(tensor_of(new))


def _sent(worker_error: WorkerErrors) -> tuple[Errors, ...]:
    return tuple(worker_error.sent()) if isinstance(worker_error, ShardErrors) else (worker_error,)


def settled_all_reduce(
    z: Combination,
    worker_error: WorkerErrors,
    server_error: Errors,
    form: MessageFormat[AnyAverage],
    communicator: Communicator,
    pending: PendingErrors | None = None,
) -> Task[tuple[AnyAverage, PendingErrors]]:
    """Average one bucket as :func:`lazy_all_reduce` does, and keep nothing of ``z``: its gradients may be freed.

    They are used up where the task first waits; in two levels where it waits for the second time. All ranks call, for
    the same buckets in one order.

    Args:
        z: What this rank wants to send.
        worker_error: See :class:`~hf_compressopt.collectives.exchange.ErrorFeedback`; read only.
        server_error: Likewise.
        form: The form of the messages.
        communicator: The ranks, at least two.
        pending: Where the new errors are written, of both kinds; None for memory of their own.

    Returns:
        The average, and the new errors.
    """
    numel, new = z.numel, pending or PendingErrors.like(worker_error, server_error)
    new_error = new.server
    assert new_error is not None
    parts = yield from phases.parts_to_send(z, worker_error, form, communicator)
    sent = phases.messages_of(parts, _writing(new.worker, form), z.device)
    del z, parts

    def serve(received: Tensor, out: Tensor) -> None:
        form.average_compress_(received, server_error, new_error, out, communicator.topology.nodes)

    return (yield from phases.averaged(numel, form, sent, serve, communicator)), new
