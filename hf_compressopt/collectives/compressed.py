"""The two-phase compressed all-reduce with error feedback (1-bit Adam, arXiv 2102.02888, Algorithm 1 and Figure 3).

Phase 1: every rank sends chunk j of its compressed bucket to rank j, its server (all-to-all).
Phase 2: every server averages what it got, compresses that again, and sends it to all (all-gather).
Both compressions keep what they lost and add it at the next step: the worker error and the server error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator, Handle
from hf_compressopt.flat import chunk_range
from hf_compressopt.kernels import Average, Combination


@dataclass(frozen=True)
class ErrorFeedback:
    """What one rank remembers of one bucket.

    Attributes:
        worker_error: [n] float32, what this rank's messages to the servers missed.
        server_error: [n_own] float32, what this rank's message as the server of its own chunk missed.
        scale_block: Elements per scale, a positive multiple of 8; None for one scale per rank.
    """

    worker_error: Tensor
    server_error: Tensor
    scale_block: int | None


def server_numel(numel: int, communicator: Communicator) -> int:
    """Elements of a bucket of ``numel`` elements whose server this rank is."""
    start, stop = chunk_range(numel, communicator.world_size, communicator.rank)
    return stop - start


def compressed_all_reduce_(x: Tensor, feedback: ErrorFeedback, communicator: Communicator) -> Tensor:
    """Replace x by the compressed mean over ranks, the same bits on all of them. One bucket; all ranks call.

    Args:
        x: [n] float32, contiguous, updated in place. With one rank it stays as it is.
        feedback: The errors of this bucket, updated in place.
        communicator: The ranks.

    Returns:
        x.
    """
    for average in pipelined_compressed_all_reduce([(Combination.of(x), feedback)], communicator):
        kernels.decompress_(average, x)
    return x


def pipelined_compressed_all_reduce(
    buckets: Iterable[tuple[Combination, ErrorFeedback]], communicator: Communicator
) -> Iterator[Average]:
    """The same for many buckets: while one is on the wire the next is taken from ``buckets`` and compressed.

    Args:
        buckets: What this rank wants to send of each bucket, in the same order on all ranks. Taken lazily, so that a
            generator may compute each just before it is compressed.
        communicator: The ranks.

    Yields:
        The compressed mean of each bucket, in order, still as messages: the same bits on all ranks. With one rank what
        was to be sent, as it is; but errors that it has from a run of more ranks are added, and are zero then.
    """
    if communicator.world_size == 1:
        for z, feedback in buckets:
            values = torch.empty(z.numel, device=z.device)
            kernels.combine_(z, values)
            for error in (feedback.worker_error, feedback.server_error):
                if error.numel():
                    values += error
                    error.zero_()
            yield Average.of(values)
        return
    sent: deque[_InFlight] = deque()  # on their way to the servers; at most one, plus the one just started
    returning: deque[_InFlight] = deque()  # on their way back
    for z, feedback in buckets:
        sent.append(_InFlight(z, feedback, communicator))
        if len(sent) > 1:
            returning.append(sent.popleft().serve())
        if len(returning) > 1:
            yield returning.popleft().finish()
    returning.extend(bucket.serve() for bucket in sent)
    for bucket in returning:
        yield bucket.finish()


class _InFlight:
    """One bucket on its way: made (compressed and sent), served, finished, in this order."""

    def __init__(self, z: Combination, feedback: ErrorFeedback, communicator: Communicator) -> None:
        self.numel, self.feedback, self.communicator = z.numel, feedback, communicator
        world_size, rank = communicator.world_size, communicator.rank
        self.nbytes = kernels.chunk_message_nbytes(z.numel, world_size, feedback.scale_block)
        messages = torch.zeros(sum(self.nbytes), dtype=torch.uint8, device=z.device)
        kernels.compress_(z, feedback.worker_error, messages, world_size=world_size, scale_block=feedback.scale_block)
        self._received = messages.new_empty(world_size * self.nbytes[rank])
        self._messages = messages  # kept alive until they have left
        self._handle: Handle = communicator.all_to_all(
            self._received, messages, output_splits=[self.nbytes[rank]] * world_size, input_splits=self.nbytes
        )

    def serve(self) -> _InFlight:
        """Average this rank's chunk, and send it to all. The first chunk is the longest: it sets the stride."""
        self._handle.wait()
        world_size, rank = self.communicator.world_size, self.communicator.rank
        self._messages = self._received.new_zeros(self.nbytes[0])
        kernels.average_compress_(
            self._received,
            self.feedback.server_error,
            self._messages[: self.nbytes[rank]],
            world_size=world_size,
            scale_block=self.feedback.scale_block,
        )
        self._received = self._messages.new_empty(world_size * self.nbytes[0])
        self._handle = self.communicator.all_gather(self._received, self._messages)
        return self

    def finish(self) -> Average:
        """Wait for all chunks."""
        self._handle.wait()
        return Average(
            self.numel,
            messages=self._received,
            world_size=self.communicator.world_size,
            scale_block=self.feedback.scale_block,
            stride=self.nbytes[0],
        )
