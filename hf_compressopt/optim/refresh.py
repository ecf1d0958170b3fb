"""Refreshes of a frozen variance: it learns from gradients that are averaged beside the messages of a step.

Beside every ``variance_interval``-th message, in step t, with c the factor by which the step clips gradients, and k the
number of steps that the refresh stands for (``StepPlan.refresh_steps``):
    g = mean_r Q(c g_r)                                                                     (1)
    v <- b v + (1 - b) g^2, b = max(a, 7/8);  in each tensor v <- max(v, variance_floor mean(v))  (2)
a = b2^k (1 - b2^(t-k)) / (1 - b2^t) is what Adam's corrected variance keeps of itself in k steps, b2^k what it keeps
without ``bias_correction``. The steps that follow divide by v. Q are messages of 4 or 8 bits, as ``warmup_bits`` says,
without error feedback (the errors are those of the momentum), which the servers round once more: what they round to 0
is below the floor, but for ends of tensors that share a block of 128 with others. With 16 and 32 bits g is exact, and
so it is of what travels in full, or has done so in the warmup stage.
Codes of a variance (:mod:`~hf_compressopt.kernels.compact`) are rounded at random, up or down, so that their mean is
right: in a refresh most of them change by less than half of a code. Equal numbers fall on all ranks.

A tensor keeps its v if its g^2 is 0 everywhere or not finite, and if it has no variance. While a refresh lasts, a rank
holds its averages, 0.5 bytes per parameter with 4 bits, and of one bucket float32 values if it has such in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.exchange import BucketErrors, Task, all_reduce, in_runs, run_tasks
from hf_compressopt.flat import Bucket, Span
from hf_compressopt.kernels import (
    INTEGER_BITS,
    Average,
    Combination,
    Errors,
    IntegerFormat,
    Segment,
    VarianceUpdate,
    tensor_of,
)
from hf_compressopt.kernels.compact import tops_to_dither
from hf_compressopt.kernels.memory import numbers_on
from hf_compressopt.optim.group import GroupState, by_communicator

Key = tuple[int, int]  # number of the param group, first element of the bucket
#: What a variance keeps of itself in a refresh at least, so that it is the mean of 15 of them, and not of one or two.
LEAST_MEMORY = 7 / 8


class Row(NamedTuple):
    """The gradients of one bucket on this rank, of which an average refreshes the variance."""

    state: GroupState
    bucket: Bucket
    message: Combination

    @classmethod
    def of(cls, state: GroupState, bucket: Bucket, segments: Sequence[Segment] | None, factor: float = 1.0) -> Row:
        """Return a row of gradients times a factor; None counts as 0."""
        return cls(state, bucket, Combination(bucket.numel, state.device, grads=segments, beta=factor))

    @property
    def key(self) -> Key:
        return self.state.number, self.bucket.start

    def divided(self) -> tuple[Combination, Tensor | None]:
        """Return what travels in a message of integers, and this rank's values of :func:`_in_full`, [n] float32."""
        pieces, grads = _in_full(self.state, self.bucket), self.message.grads
        if not pieces:
            return self.message, None
        whole, numel = {piece.index for piece in pieces}, sum(piece.numel for piece in pieces)
        rest, own = None, None
        if grads is not None:
            rest = [segment if segment.index not in whole else replace(segment, tensor=None) for segment in grads]
            own = [segment for segment in grads if segment.index in whole]
        values = torch.empty(numel, dtype=torch.float32, device=self.state.device)
        kernels.on(values).combine_(replace(self.message, numel=numel, grads=own), values)
        return replace(self.message, grads=rest), values


def _in_full(state: GroupState, bucket: Bucket) -> list[Span]:
    """Pieces of a bucket in messages of signs of which the warmup stage averages gradients in full, as a refresh does.

    Larger neighbours in a block of integers would round them to 0.
    """
    return [] if bucket.in_full else [piece for piece in bucket.pieces if state.in_full[piece.index]]


@dataclass
class VarianceRefresh:
    """The averages of one step by which variances learn, kept as messages until all have come."""

    bits: int  # of gradients in the warmup stage
    _averages: dict[Key, Average] = field(default_factory=dict)
    _exact: dict[Key, Average] = field(default_factory=dict)  # of what is averaged in full beside them
    _zeros: Tensor | None = None  # as many bytes as the errors of the largest bucket so far

    def send(self, run: Sequence[Row]) -> Task[None]:
        """Average (1) of buckets of the same form and communicator, which travel together. All ranks call."""
        first = run[0].state
        in_messages = self.bits in INTEGER_BITS and not run[0].bucket.in_full
        form = IntegerFormat(self.bits) if in_messages else None
        errors = [self._no_errors(row) if in_messages else _NOTHING for row in run]
        in_parts = in_messages and first.communicator.world_size > 1
        parts = [row.divided() if in_parts else (row.message, None) for row in run]
        task = all_reduce([message for message, _ in parts], errors, form, first.communicator, keep=False)
        keys = [row.key for row in run]
        exact = {key: values for key, (_, values) in zip(keys, parts, strict=True) if values is not None}
        del run, parts, errors  # gradients may be freed while their messages travel
        averages = yield from task
        self._averages.update(zip(keys, averages, strict=True))
        if exact:
            zs = [Combination.of(values) for values in exact.values()]
            averages = yield from all_reduce(zs, [_NOTHING] * len(zs), None, first.communicator)
            self._exact.update(zip(exact, averages, strict=True))

    def _no_errors(self, row: Row) -> BucketErrors:
        """Errors of 0 in the form of a bucket's, which nobody writes: views of one buffer."""
        state = row.state
        if state.communicator.world_size == 1:
            return _NOTHING
        like = state.feedback[state.layout.buckets.index(row.bucket)]
        return BucketErrors(tuple(map(self._zero_like, like.worker)), self._zero_like(like.server))

    def _zero_like(self, error: Errors) -> Errors:
        own = tensor_of(error)
        if self._zeros is None or self._zeros.numel() < own.nbytes or self._zeros.device != own.device:
            self._zeros = torch.zeros(own.nbytes, dtype=torch.uint8, device=own.device)
        zeros = self._zeros[: own.nbytes].view(own.dtype)
        return zeros if isinstance(error, Tensor) else replace(error, messages=zeros)

    def send_all(self, rows: Iterable[Row]) -> None:
        """Average (1) of what was not sent during backward. All ranks call."""
        due = [row for row in rows if row.key not in self._averages]
        run_tasks(self.send(run) for run in _runs_of(due))

    def take(self, states: Sequence[GroupState], step: int, steps: int, floor: float) -> None:
        """Take (2) of param groups, of which all averages have come, in a step that stands for so many ``steps``."""
        for state in states:
            keys = [(state.number, bucket.start) for bucket in state.layout.buckets]
            means = [_Mean(state, self._averages.pop(key), self._exact.pop(key, None)) for key in keys]
            if means:
                _learn(state, means, _memory(state, step, steps), floor, step)


def _memory(state: GroupState, step: int, steps: int) -> float:
    """The share of itself that a variance keeps in the refresh of a step, which stands for so many: b of (2)."""
    beta2: float = state.options["betas"][1]
    kept = beta2**steps
    if state.options["bias_correction"]:
        kept *= (1 - beta2 ** (step - steps)) / (1 - beta2**step)
    return max(LEAST_MEMORY, kept)


class _Mean(NamedTuple):
    """The mean gradient of a bucket, and of what was averaged in full beside it."""

    state: GroupState
    average: Average
    exact: Average | None

    def of(self, bucket: Bucket) -> Average:
        """Return both as one: as values, if there is something in full."""
        if self.exact is None or self.exact.values is None:
            return self.average
        values = torch.empty(bucket.numel, dtype=torch.float32, device=self.state.device)
        kernels.on(values).decompress_(self.average, values)
        pieces = _in_full(self.state, bucket)
        for piece, own in zip(pieces, torch.split(self.exact.values, [p.numel for p in pieces]), strict=True):
            values[piece.offset - bucket.start :][: piece.numel] = own
        return Average.of(values)


_NOTHING = BucketErrors((), torch.empty(0, device="cpu"))


def _runs_of(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for communicator, together in by_communicator(row.state for row in rows):
        numbers = {state.number for state in together}
        for in_full in (False, True):
            kind = [row for row in rows if row.state.number in numbers and row.bucket.in_full is in_full]
            yield from in_runs(kind, lambda row: row.bucket.numel, communicator)


def _learn(state: GroupState, means: Sequence[_Mean], memory: float, floor: float, step: int) -> None:
    """Take (2) of a group: once to see each tensor's mean and largest variance, and once to store it."""
    layout, device = state.layout, state.device
    sums = torch.zeros(len(layout.numels), 3, dtype=torch.float64, device=device)

    def updates() -> Iterator[VarianceUpdate]:
        """Yield one after another, since a mean as values takes memory."""
        for bucket, mean in zip(layout.buckets, means, strict=True):
            segments = [Segment(None, piece.start, piece.numel, piece.index) for piece in bucket.pieces]
            yield VarianceUpdate(mean.of(bucket), state.moments.variance(bucket.start, bucket.stop), segments, memory)

    for update in updates():
        kernels.on(sums).variance_sums_(update, sums)
    total, largest, square = sums.unbind(1)
    numels = numbers_on(device, [max(1, numel) for numel in layout.numels], torch.float64)
    floors = (floor * total / numels).float()
    varies = numbers_on(device, [float(not still) for still in state.without_variance]) > 0
    learns = varies & (square > 0) & largest.isfinite()
    floors.masked_fill_(~learns, nan)
    before = state.moments.tops_of_codes
    tops = None
    if before is not None:
        tops = torch.where(learns, tops_to_dither(torch.fmax(largest.float(), floors)), before)
    for update in updates():
        kernels.on(sums).refresh_variance_(update, floors, tops, step)
    if before is not None and tops is not None:
        before.copy_(tops)


def rows_of(state: GroupState, grads: Sequence[Sequence[Tensor | None]] | None) -> Iterator[Row]:
    """Yield the rows of all buckets of a param group; ``grads`` as a step has them, None without usable ones."""
    for bucket in state.layout.buckets:
        segments = None if grads is None else state.gradient_segments(bucket, grads[state.number])
        yield Row.of(state, bucket, segments)
