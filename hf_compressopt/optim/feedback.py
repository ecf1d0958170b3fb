"""The errors of one param group: buffers of float32 values or of messages in 8 bits, and their parts by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import ErrorFeedback, server_numel
from hf_compressopt.flat import FlatLayout, chunk_range
from hf_compressopt.kernels import Combination, CompactErrors, Errors, IntegerFormat, SignFormat
from hf_compressopt.kernels.errors import ERROR_BITS
from hf_compressopt.kernels.integer_messages import IntegerAverage, chunk_integer_message_nbytes


def values_of(error: Errors) -> Tensor:
    """Return the values of errors, [n] float32, decoded by the kernels of their device.

    Do not change them: they may be the errors themselves.
    """
    if isinstance(error, Tensor):
        return error
    values = torch.empty(error.count, dtype=torch.float32, device=error.device)
    stride = max(chunk_integer_message_nbytes(error.count, error.world_size, ERROR_BITS))
    average = IntegerAverage(error.count, error.messages, error.world_size, ERROR_BITS, stride)
    IntegerFormat(ERROR_BITS).decompress_(average, values)
    return values


def keep_(error: Errors, values: Tensor) -> None:
    """Take over new values, [n] float32, encoded by the kernels of their device."""
    if isinstance(error, Tensor):
        error.copy_(values)
    else:
        nothing = Combination(error.count, values.device)  # so that what is compressed is the values
        IntegerFormat(ERROR_BITS).compress_(nothing, values, error.messages, error.world_size)


class GroupErrors:
    """The errors of a param group.

    A single rank has none, except between the load of a checkpoint of more ranks and its first compressed step. Those
    are float32 values.

    Attributes:
        compact: Whether errors lie in 8 bits.
        worker: Worker errors: [numel] float32, or their bytes; [0] if there are none.
        server: Server errors: [elements whose server this rank is] float32, or their bytes; [0] if there are none.
        feedback: One per bucket, views of the two.
    """

    def __init__(
        self,
        layout: FlatLayout,
        form: SignFormat,
        communicator: Communicator,
        device: torch.device,
        *,
        compact: bool,
        used: bool,
    ) -> None:
        """Allocate errors of 0; none unless they are ``used``."""
        self._layout, self._format, self._communicator = layout, form, communicator
        self.compact = compact and communicator.world_size > 1
        dtype = torch.uint8 if self.compact else torch.float32
        sizes = self.sizes_of(dtype) if used and communicator.world_size > 1 else (0, 0)
        self._set(*(torch.zeros(size, dtype=dtype, device=device) for size in sizes))

    def sizes_of(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return the elements of the two buffers in use: uint8 for errors in 8 bits, float32 for values."""
        ranks, buckets = self._communicator, self._layout.buckets
        owned = [server_numel(bucket.numel, ranks) for bucket in buckets]
        if dtype != torch.uint8:
            return self._layout.numel, sum(owned)
        worker = sum(CompactErrors.nbytes(bucket.numel, ranks.world_size) for bucket in buckets)
        return worker, sum(map(CompactErrors.nbytes, owned))

    def _by_bucket(self, worker: Tensor, server: Tensor) -> list[ErrorFeedback]:
        """Return the parts of two buffers, of either form, that belong to each bucket."""
        ranks = self._communicator

        def parts_of(buffer: Tensor, counts: Sequence[int], chunks: int) -> list[Errors]:
            counts = counts if buffer.numel() else [0] * len(counts)
            if buffer.dtype != torch.uint8:
                return list(torch.split(buffer, list(counts)))
            parts = torch.split(buffer, [CompactErrors.nbytes(count, chunks) for count in counts])
            return [CompactErrors(part, count, chunks) for part, count in zip(parts, counts, strict=True)]

        numels = [bucket.numel for bucket in self._layout.buckets]
        owned = [server_numel(numel, ranks) for numel in numels]
        pairs = zip(parts_of(worker, numels, ranks.world_size), parts_of(server, owned, 1), strict=True)
        return [ErrorFeedback(*pair, self._format) for pair in pairs]

    def take(self, worker: Tensor, server: Tensor) -> None:
        """Set the errors that a single rank sends next, [numel] float32 both, or [0] for none."""
        device = self.worker.device
        self._set(worker.to(device), server.to(device))

    def to(self, device: torch.device) -> None:
        """Move the buffers."""
        self._set(self.worker.to(device), self.server.to(device))

    def _set(self, worker: Tensor, server: Tensor) -> None:
        self.worker, self.server = worker, server
        self.feedback = self._by_bucket(worker, server)

    def copy_(self, worker: Tensor, server: Tensor) -> None:
        """Take over the values of two buffers, of either form."""
        if worker.dtype == self.worker.dtype:
            self.worker.copy_(worker)
            self.server.copy_(server)
            return
        device = self.worker.device
        for mine, other in zip(self.feedback, self._by_bucket(worker.to(device), server.to(device)), strict=True):
            keep_(mine.worker_error, values_of(other.worker_error))
            keep_(mine.server_error, values_of(other.server_error))

    def values(self) -> tuple[Tensor, Tensor]:
        """Return the worker errors and the server errors as float32 values."""
        return (
            self._joined([feedback.worker_error for feedback in self.feedback]),
            self._joined([feedback.server_error for feedback in self.feedback]),
        )

    def _joined(self, errors: Sequence[Errors]) -> Tensor:
        joined = torch.empty(sum(error.numel() for error in errors), dtype=torch.float32, device=self.worker.device)
        for part, error in zip(torch.split(joined, [error.numel() for error in errors]), errors, strict=True):
            part.copy_(values_of(error))
        return joined

    def server_parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the server errors of each bucket, and their place among those of all servers.

        Those of all servers, in rank order and bucket by bucket, have the layout of the worker errors.
        """
        ranks, start = self._communicator, 0
        for bucket, feedback in zip(self._layout.buckets, self.feedback, strict=True):
            error = feedback.server_error
            if isinstance(error, Tensor):
                yield start + chunk_range(bucket.numel, ranks.world_size, ranks.rank)[0], error
                start += bucket.numel
            else:
                nbytes = chunk_integer_message_nbytes(bucket.numel, ranks.world_size, ERROR_BITS)
                yield start + sum(nbytes[: ranks.rank]), error.messages
                start += sum(nbytes)

    def room(self, *, compact: bool) -> GroupErrors:
        """Return these errors if they have this form, else others that have it, to be filled."""
        if compact == self.compact:
            return self
        used = self.worker.numel() > 0
        return GroupErrors(
            self._layout, self._format, self._communicator, self.worker.device, compact=compact, used=used
        )

    def zero_(self) -> None:
        """Set all errors to 0."""
        self.worker.zero_()
        self.server.zero_()

    def scale_(self, factors: Sequence[float]) -> None:
        """Multiply the errors of each parameter by its factor."""
        if not self.worker.numel():
            return
        for bucket, feedback in zip(self._layout.buckets, self.feedback, strict=True):
            first, stop = chunk_range(bucket.numel, self._communicator.world_size, self._communicator.rank)
            worker, server = (values_of(error) for error in (feedback.worker_error, feedback.server_error))
            for piece in bucket.pieces:
                start, factor = piece.offset - bucket.start, factors[piece.index]
                end = start + piece.numel
                worker[start:end].mul_(factor)
                server[max(start - first, 0) : max(min(end, stop) - first, 0)].mul_(factor)
            keep_(feedback.worker_error, worker)
            keep_(feedback.server_error, server)
