"""The errors of error feedback of a flat layout, such as a param group's, as float32 values or in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import BucketErrors
from hf_compressopt.flat import Bucket, FlatLayout
from hf_compressopt.kernels import Average, Combination, CompactErrors, Errors
from hf_compressopt.kernels.compact import ERROR_FORMAT


def values_of(error: Errors) -> Tensor:
    """Return the values of errors, [n] float32, by their device's kernels. They may be the errors themselves."""
    if isinstance(error, Tensor):
        return error
    values = torch.empty(error.count, dtype=torch.float32, device=error.device)
    stride = max(ERROR_FORMAT.chunk_nbytes(error.count, error.world_size))
    average = Average(error.count, ERROR_FORMAT, error.messages, error.world_size, stride)
    kernels.on(values).decompress_(average, values)
    return values


def keep_(error: Errors, values: Tensor) -> None:
    """Take over new values, [n] float32, encoded by the kernels of their device."""
    if isinstance(error, Tensor):
        error.copy_(values)
    else:
        nothing = Combination(error.count, values.device)  # so that what is compressed is the values
        kernels.on(values).compress_(ERROR_FORMAT, nothing, values, error.messages, error.world_size)


def scale_(errors: Iterable[Errors], factor: float) -> None:
    for error in errors:
        keep_(error, values_of(error) * factor)


class ErrorFeedback:
    """The errors of the buckets of a flat layout, by bucket in ``feedback``, which are views of two buffers.

    A single rank has none, except between the load of a checkpoint of more ranks and its first compressed step; those
    are float32 values. Averages that are not ``served`` to other ranks, those of a reduce-scatter, have no server
    errors. New errors may lie in ``pending`` until it is known whether the step is taken.
    """

    worker: Tensor
    server: Tensor
    feedback: list[BucketErrors]
    _pending: ErrorFeedback | None

    def __init__(
        self,
        layout: FlatLayout,
        communicator: Communicator,
        device: torch.device,
        *,
        compact: bool,
        used: bool,
        served: bool = True,
    ) -> None:
        self._layout, self._communicator, self._served = layout, communicator, served
        self.compact = compact and communicator.world_size > 1
        self._used = used and communicator.world_size > 1
        self._set(*self._zeros(device))

    def _zeros(self, device: torch.device) -> list[Tensor]:
        dtype = torch.uint8 if self.compact else torch.float32
        sizes = self.sizes_of(dtype) if self._used else (0, 0)
        return [torch.zeros(size, dtype=dtype, device=device) for size in sizes]

    def sizes_of(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return the elements of the two buffers in use: uint8 for errors in 8 bits, float32 for values."""
        worker, server = list(chain.from_iterable(self._sent())), self._owned()
        if dtype != torch.uint8:
            return sum(worker), sum(server)
        return sum(map(CompactErrors.nbytes, worker)), sum(map(CompactErrors.nbytes, server))

    def _sent(self) -> list[list[int]]:
        """Return for each bucket the elements of the chunks that this rank sends."""
        return [self._communicator.topology.sent_numels(bucket.numel) for bucket in self._layout.buckets]

    def _owned(self) -> list[int]:
        """Return for each bucket the elements whose server this rank is."""
        ranges = (self.own_range(bucket) for bucket in self._layout.buckets)
        return [stop - start if self._served else 0 for start, stop in ranges]

    def _by_bucket(self, worker: Tensor, server: Tensor) -> list[BucketErrors]:
        """Return the parts of two buffers, of either form, that belong to each bucket."""
        servers = _errors_in(server, self._owned())
        if self._communicator.levels is None:
            numels = [bucket.numel for bucket in self._layout.buckets]
            workers = _errors_in(worker, numels, self._communicator.world_size)
            return [BucketErrors((sent,), served) for sent, served in zip(workers, servers, strict=True)]
        sent = self._sent()
        each = iter(_errors_in(worker, list(chain.from_iterable(sent))))
        shards = [tuple(error for error in islice(each, len(chunks)) if error.numel()) for chunks in sent]
        return [BucketErrors(shard, served) for shard, served in zip(shards, servers, strict=True)]

    def sent_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return the elements [start, stop) of the flat buffer, of one bucket, whose worker errors this rank has."""
        start, stop = self._communicator.topology.sent_range(bucket.numel)
        return bucket.start + start, bucket.start + stop

    def own_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return the elements [start, stop) of the flat buffer, of one bucket, whose server this rank is."""
        start, stop = self._communicator.topology.own_range(bucket.numel)
        return bucket.start + start, bucket.start + stop

    def take(self, worker: Tensor, server: Tensor) -> None:
        """Set the errors that a single rank sends next, [numel] float32 both, or [0] for none."""
        device = self.worker.device
        self._set(worker.to(device), server.to(device))

    def to(self, device: torch.device) -> None:
        self._set(self.worker.to(device), self.server.to(device))

    def _set(self, worker: Tensor, server: Tensor) -> None:
        self.worker, self.server, self._pending = worker, server, None
        self.feedback = self._by_bucket(worker, server)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what the next step makes anew."""
        return self.__dict__ | {"_pending": None}

    @property
    def pending(self) -> ErrorFeedback:
        """Memory for the errors of the step under way, which :meth:`end_step` takes over or drops."""
        if self._pending is None:
            new = copy(self)
            new._set(torch.empty_like(self.worker), torch.empty_like(self.server))
            self._pending = new
        return self._pending

    def end_step(self, dropped: bool | Tensor) -> None:
        """Take over the pending errors unless the step is ``dropped``, bool or [] bool. No GPU is waited for."""
        new = self.pending
        if isinstance(dropped, Tensor) and dropped.device.type != "cpu":
            self.worker.copy_(torch.where(dropped, self.worker, new.worker))
            self.server.copy_(torch.where(dropped, self.server, new.server))
        elif not dropped:
            self.worker, new.worker = new.worker, self.worker
            self.server, new.server = new.server, self.server
            self.feedback, new.feedback = new.feedback, self.feedback
        if self.worker.device.type != "cpu":  # where memory is scarce, and new memory costs no time
            self._pending = None

    def copy_(self, worker: Tensor, server: Tensor) -> None:
        """Take over the values of two buffers, of either form."""
        if worker.dtype == self.worker.dtype:
            self.worker.copy_(worker)
            self.server.copy_(server)
            return
        device = self.worker.device
        for mine, other in zip(self.feedback, self._by_bucket(worker.to(device), server.to(device)), strict=True):
            for error, values in zip((*mine.worker, mine.server), (*other.worker, other.server), strict=True):
                keep_(error, values_of(values))

    def values(self) -> tuple[Tensor, Tensor]:
        return self.worker_values(), self.server_values()

    def worker_values(self) -> Tensor:
        return self.joined(list(chain.from_iterable(errors.worker for errors in self.feedback)))

    def server_values(self) -> Tensor:
        return self.joined([errors.server for errors in self.feedback])

    def joined(self, errors: Sequence[Errors]) -> Tensor:
        """Return the float32 values of some of the errors, one after another."""
        joined = torch.empty(sum(error.numel() for error in errors), dtype=torch.float32, device=self.worker.device)
        for part, error in zip(torch.split(joined, [error.numel() for error in errors]), errors, strict=True):
            part.copy_(values_of(error))
        return joined

    def stored_worker(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the worker errors as a checkpoint has them, and their places among those of the whole group."""
        if self._communicator.levels is None:
            yield 0, self.worker
            return
        ranges = [self.sent_range(bucket) for bucket in self._layout.buckets]
        parts: Iterable[Tensor] = (self.joined(errors.worker) for errors in self.feedback)
        if not self.compact:  # views, which a load fills
            parts = torch.split(self.worker, [stop - start for start, stop in ranges])
        for (start, _), part in zip(ranges, parts, strict=True):
            yield start, part

    def stored_server(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the server errors of each bucket likewise; those of all servers have the layout of worker errors."""
        flat, rank, start = self._communicator.levels is None, self._communicator.rank, 0
        for bucket, errors in zip(self._layout.buckets, self.feedback, strict=True):
            error = errors.server
            if isinstance(error, Tensor) or not flat:
                yield self.own_range(bucket)[0], values_of(error)
            else:
                nbytes = ERROR_FORMAT.chunk_nbytes(bucket.numel, self._communicator.world_size)
                yield start + sum(nbytes[:rank]), error.messages
                start += sum(nbytes)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.worker.shape) if self._communicator.levels is None else (self._layout.numel,)

    def room(self, *, compact: bool) -> ErrorFeedback:
        """Return these errors if they have this form, else others that have it, to be filled."""
        if compact == self.compact:
            return self
        options = {"compact": compact, "used": self._used, "served": self._served}
        return ErrorFeedback(self._layout, self._communicator, self.worker.device, **options)

    def zero_(self) -> None:
        self.worker.zero_()
        self.server.zero_()

    def scale_(self, factors: Sequence[float]) -> None:
        """Multiply the errors of each parameter by its factor."""
        if not self.worker.numel():
            return
        for bucket, errors in zip(self._layout.buckets, self.feedback, strict=True):
            first = self.sent_range(bucket)[0]
            for error in errors.worker:
                _scale_parameters_(error, bucket, first, factors)
                first += error.numel()
            _scale_parameters_(errors.server, bucket, self.own_range(bucket)[0], factors)


def _scale_parameters_(error: Errors, bucket: Bucket, first: int, factors: Sequence[float]) -> None:
    """Multiply the errors of elements from ``first`` on by the factors of their parameters."""
    values, stop = values_of(error), first + error.numel()
    for piece in bucket.pieces:
        start, end = max(piece.offset, first), min(piece.offset + piece.numel, stop)
        if start < end:
            values[start - first : end - first].mul_(factors[piece.index])
    keep_(error, values)


def _errors_in(buffer: Tensor, counts: Sequence[int], chunks: int = 1) -> list[Errors]:
    """Return the parts of a buffer, of either form, that hold so many errors each; 0 each if the buffer is empty."""
    counts = list(counts) if buffer.numel() else [0] * len(counts)
    if buffer.dtype != torch.uint8:
        return list(torch.split(buffer, counts))
    parts = torch.split(buffer, [CompactErrors.nbytes(count, chunks) for count in counts])
    return [CompactErrors(part, count, chunks) for part, count in zip(parts, counts, strict=True)]
