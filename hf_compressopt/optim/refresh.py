"""Refreshes of a frozen variance: it learns from gradients that are averaged beside the messages of a step.

Beside every ``variance_interval``-th message, with c the factor by which its step clips gradients, and k the number of
steps that the refresh stands for (``StepPlan.refresh_steps``):
    g = mean_r Q(c g_r)                                                                     (1)
    v <- b v + (1 - b) g^2, b = max(b2^k, 7/8);  in each tensor v <- max(v, variance_floor mean(v))  (2)
The steps that follow divide by it. Q are messages of 4 or 8 bits, as ``warmup_bits`` says, without error feedback (the
errors are those of the momentum), which the servers round once more: what they round to 0 is below the floor, but for
ends of tensors that share a block of 128 with others. With 16 and 32 bits, and in what travels in full, g is exact.
Codes of a variance (:mod:`~hf_compressopt.kernels.compact`) are rounded at random, up or down, so that their mean is
right: in a refresh most of them change by less than half of a code. Equal numbers fall on all ranks.

A tensor keeps its v if its g is 0 everywhere or not finite, if it has no variance, and if it is one of the small ones
that the warmup stage averages in full, but travels in messages of signs. While a refresh lasts, a rank holds its
averages, 0.5 bytes per parameter with 4 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.exchange import BucketErrors, Task, all_reduce, in_runs, run_tasks
from hf_compressopt.flat import Bucket
from hf_compressopt.kernels import INTEGER_BITS, Average, Combination, IntegerFormat, Segment, like_errors, tensor_of
from hf_compressopt.kernels.compact import elements_at_once
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


@dataclass
class VarianceRefresh:
    """The averages of one step by which variances learn, kept as messages until all have come."""

    bits: int  # of gradients in the warmup stage
    _averages: dict[Key, Average] = field(default_factory=dict)

    def send(self, run: Sequence[Row]) -> Task[None]:
        """Average (1) of buckets of the same form and communicator, which travel together. All ranks call."""
        first = run[0].state
        in_messages = self.bits in INTEGER_BITS and not run[0].bucket.in_full
        form = IntegerFormat(self.bits) if in_messages else None
        errors = [_no_errors(row) if in_messages else _NOTHING for row in run]
        task = all_reduce([row.message for row in run], errors, form, first.communicator)
        keys = [row.key for row in run]
        del run, errors  # gradients may be freed while their messages travel
        averages = yield from task
        self._averages.update(zip(keys, averages, strict=True))

    def send_all(self, rows: Iterable[Row]) -> None:
        """Average (1) of what was not sent during backward. All ranks call."""
        due = [row for row in rows if row.key not in self._averages]
        run_tasks(self.send(run) for run in _runs_of(due))

    def take(self, states: Sequence[GroupState], step: int, steps: int, floor: float) -> None:
        """Take (2) of param groups, of which all averages have come, in a step that stands for so many ``steps``."""
        for state in states:
            averages = [self._averages.pop((state.number, bucket.start)) for bucket in state.layout.buckets]
            if averages:
                memory = max(LEAST_MEMORY, state.options["betas"][1] ** steps)
                rounded = self.bits in INTEGER_BITS and state.communicator.world_size > 1
                _learn(state, averages, memory, floor, step, rounded=rounded)


_NOTHING = BucketErrors((), torch.empty(0, device="cpu"))


def _no_errors(row: Row) -> BucketErrors:
    """Errors of 0 in the form of a bucket's, which the messages of a refresh write over."""
    state = row.state
    if state.communicator.world_size == 1:
        return _NOTHING
    like = state.feedback[state.layout.buckets.index(row.bucket)]
    made = BucketErrors(tuple(map(like_errors, like.worker)), like_errors(like.server))
    for error in (*made.worker, made.server):
        tensor_of(error).zero_()
    return made


def _runs_of(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for communicator, together in by_communicator(row.state for row in rows):
        numbers = {state.number for state in together}
        for in_full in (False, True):
            kind = [row for row in rows if row.state.number in numbers and row.bucket.in_full is in_full]
            yield from in_runs(kind, lambda row: row.bucket.numel, communicator)


def _learn(
    state: GroupState, averages: Sequence[Average], memory: float, floor: float, step: int, *, rounded: bool
) -> None:
    """Take (2) of a group: once to see each tensor's mean and largest variance, and once to store it.

    ``rounded``: gradients have travelled as integers, in which larger neighbours may have rounded small tensors to 0.
    """
    layout, moments = state.layout, state.moments
    device, count = state.device, len(layout.numels)
    size, largest = torch.zeros(2, count, dtype=torch.float32, device=device).unbind()
    total = torch.zeros(count, dtype=torch.float64, device=device)
    decoded = torch.empty(max(bucket.numel for bucket in layout.buckets), dtype=torch.float32, device=device)

    def learnt() -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield parameter, first element, gradient and new variance of each run of elements."""
        for bucket, average in zip(layout.buckets, averages, strict=True):
            values = average.values
            if values is None:
                values = decoded[: bucket.numel]
                kernels.on(values).decompress_(average, values)
            for piece in bucket.pieces:
                whole = values[piece.offset - bucket.start :][: piece.numel]
                start = piece.start
                for grad in torch.split(whole, elements_at_once(device)):
                    before = moments.variance_of(piece.index, start, start + grad.numel())
                    # one rounding after another: instruction sets would fuse addcmul_ in different ways
                    yield piece.index, start, grad, before.mul(memory).add_(grad.square().mul_(1 - memory))
                    start += grad.numel()

    for index, _, grad, fresh in learnt():
        size[index] = torch.maximum(size[index], grad.abs().amax())
        largest[index] = torch.maximum(largest[index], fresh.amax())
        total[index] += fresh.sum(dtype=torch.float64)
    numels = numbers_on(device, [max(1, numel) for numel in layout.numels], torch.float64)
    floors = (floor * total / numels).float()
    beside = {piece.index for bucket in layout.buckets if bucket.in_full for piece in bucket.pieces}
    small = [rounded and in_full and index not in beside for index, in_full in enumerate(state.in_full)]
    kept = [float(still or each) for still, each in zip(state.without_variance, small, strict=True)]
    learns = (numbers_on(device, kept) == 0) & (size > 0) & size.isfinite() & largest.isfinite()
    with moments.refreshed(torch.maximum(largest, floors), learns, step) as store:
        for index, start, _, fresh in learnt():
            store(index, start, fresh.clamp_(min=floors[index]))


def rows_of(state: GroupState, grads: Sequence[Sequence[Tensor | None]] | None) -> Iterator[Row]:
    """Yield the rows of all buckets of a param group; ``grads`` as a step has them, None without usable ones."""
    for bucket in state.layout.buckets:
        segments = None if grads is None else state.gradient_segments(bucket, grads[state.number])
        yield Row.of(state, bucket, segments)
