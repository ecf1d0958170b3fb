"""ZeRO in the warmup stage: each rank has 1/W of the moments, and sends what it has updated in a few bits.

For each bucket, with Q the messages of ``warmup_bits`` bits, chunk j the part that rank j serves, and g_r the clipped
gradient of rank r:

    u_r = g_r + worker_error;  messages <- Q(u_r);  worker_error <- u_r - Q(u_r)                        (1)
    rank j: g = mean_r Q(u_r);  m, v <- Adam's;  d = -lr m^ / (sqrt(v^) + eps) + server_error           (2)
    rank j: messages <- Q(d);  server_error <- d - Q(d)                                                 (3)
    all ranks: p <- p (1 - lr wd) + Q(d)                                                                (4)

Worker errors of parameters without a gradient on any rank stay, since nobody takes their part of the messages.
Gradients of one dimension and of small parameters are summed in full precision instead of (1), without an error; what
travels in full in the compressed stage too is updated in full precision instead of (3). All ranks apply the same
messages, so that the parameters have the same bits everywhere, without masters. The server error is in the unit of the
parameters here. At the end of the stage every rank sends its part of the moments once: the momentum as signs, the
variance in 8 bits. What the signs miss becomes the server error of the next step, whose momentum is b1 m + (1 - b1) g:

    messages <- Q(m);  server_error <- b1 (m - Q(m))                                                    (5)

With zero_stage=2 gradients are sent while backward runs, and freed bucket by bucket. In the warmup stage a bucket is
sent as (1), with a gradient that is not clipped yet. Each server keeps the mean of its chunk, 4/W bytes per parameter,
until ``step()``. There the norm is that of these means: one sum over the ranks of their squares tells it exactly, and
the servers clip:

    u_r = g_r + worker_error;  messages <- Q(u_r);  rank j: g = c mean_r Q(u_r),  c = min(1, max_norm / norm)   (6)

In the compressed stage a bucket is sent as with clip="late" (:mod:`~hf_compressopt.optim.overlap`), by the clip
coefficient of the step before. In both stages errors change where all ranks know that the step is taken.

Sources: ZeRO (arXiv 1910.02054), 1-bit Adam (arXiv 2102.02888), LoCo (arXiv 2407.04480).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.backward import BackwardPasses
from hf_compressopt.collectives.exchange import (
    BucketErrors,
    Task,
    all_gather,
    gather_messages,
    own_message,
    reduce_scatter,
    run_tasks,
    summed,
)
from hf_compressopt.collectives.feedback import keep_
from hf_compressopt.flat import Bucket
from hf_compressopt.kernels import SKETCH_NUMEL, Average, Combination, Errors, IntegerFormat, Segment, sum_of_squares
from hf_compressopt.kernels.adam import AdamTensors
from hf_compressopt.kernels.compact import NO_TOP, encode_variance_, highest_points
from hf_compressopt.kernels.memory import numbers_on
from hf_compressopt.optim.gradients import Gradients, Grads, MeanNorm, find_fault
from hf_compressopt.optim.group import GroupState, ParamGroups
from hf_compressopt.optim.math import adam_step_, correct_bias_, sum_of
from hf_compressopt.optim.moments import CompactMoments, MomentShards, part_of
from hf_compressopt.optim.overlap import UNCLIPPED, Backward, MessageOf, OverlapSender, SignBucket
from hf_compressopt.optim.refresh import Key, Row, VarianceRefresh
from hf_compressopt.schedules import StepPlan

_Counts = tuple[Sequence[float], Sequence[float]]


# -- a step -----------------------------------------------------------------------------------------------------------


def take_sharded_step(
    states: Sequence[GroupState], gradients: Grads, sent: ShardedOverlap | None = None, *, bits: int, fused: bool
) -> None:
    """Take a step of groups with shared moments. A parameter without gradient on any rank does not count the step."""
    present = _present(states, gradients, sent)
    means = {} if sent is None else sent.take_means()
    for state, here in zip(states, present, strict=True):
        if not means and not all(here):  # else the step takes all errors, which it may write in place
            state.errors.begin_sending()
    run_tasks(
        _step_of_bucket(
            state, bucket, gradients[state.number], here, means.pop(bucket.key, None), bits=bits, fused=fused
        )
        for state, here in zip(states, present, strict=True)
        for bucket in _buckets_of(state)
    )
    for state, here in zip(states, present, strict=True):
        state.errors.commit(here)  # nobody took the part of the others' errors that was sent
        state.count_step(here)


class _SharedBucket(NamedTuple):
    """A bucket of a group with shared moments, and its errors: those that are sent, and those that a pass writes."""

    number: int
    key: Key
    bucket: Bucket
    old: BucketErrors
    new: BucketErrors


def _buckets_of(state: GroupState) -> list[_SharedBucket]:
    rows = enumerate(zip(state.layout.buckets, state.feedback, state.new_feedback, strict=True))
    return [
        _SharedBucket(number, (state.number, bucket.start), bucket, old, new) for number, (bucket, old, new) in rows
    ]


def _present(states: Sequence[GroupState], gradients: Grads, sent: ShardedOverlap | None) -> list[list[bool]]:
    """Return for each parameter of each group whether some rank has a gradient of it. All ranks call."""
    communicator = states[0].communicator
    on_this_rank: list[float] = []
    for state in states:
        here = [grad is not None for grad in gradients[state.number]]
        on_this_rank += map(float, here if sent is None else sent.present(state, here))
    flags = numbers_on(communicator.device, on_this_rank)
    communicator.all_reduce(flags, op="max").wait()
    rest = iter(on_this_rank if all(on_this_rank) else flags.tolist())
    return [[next(rest) > 0 for _ in state.params] for state in states]


def _step_of_bucket(
    state: GroupState,
    shared: _SharedBucket,
    grads: Sequence[Tensor | None],
    present: Sequence[bool],
    mean: Tensor | None,
    *,
    bits: int,
    fused: bool,
) -> Task[None]:
    """Take the step of one bucket: send the gradients, update this rank's chunk, apply what all ranks have updated.

    ``mean``: that of the chunk, [n_own], if it was sent during backward.
    """
    bucket, form = shared.bucket, IntegerFormat(bits)
    if mean is None:
        segments = state.gradient_segments(bucket, grads)
        mean = yield from _mean_of_chunk(
            state, shared.number, segments, 1.0, shared.old.worker, shared.new.worker, form
        )
    update = _update(state, shared.number, mean, present, fused=fused) if mean.numel() else mean
    decay = 1 - float(state.options["lr"]) * state.options["weight_decay"]
    if bucket.in_full:
        changes = Average.of((yield from _gather_chunks(state, shared.number, update)))
    else:
        together, message = own_message(bucket.numel, form, state.communicator, state.device)
        if mean.numel():
            error = shared.old.server
            kernels.on(message).compress_(form, Combination.of(update), error, message, 1, error)  # (3)
        changes = yield from gather_messages(bucket.numel, together, form, state.communicator)
    with state.parameter_segments(bucket) as params:  # (4)
        for here, factor in ((True, decay), (False, 1.0)):
            if any(present[segment.index] == here for segment in params):
                chosen = [s if present[s.index] == here else replace(s, tensor=None) for s in params]
                kernels.on(mean).add_(changes, chosen, factor)


def _gather_chunks(state: GroupState, number: int, values: Tensor) -> Task[Tensor]:
    """Gather what each rank has of its chunk of a bucket, and return that of all, [numel]."""
    communicator, partition = state.communicator, _shards_of(state).partitions[number]
    whole = torch.zeros(partition.numel, dtype=values.dtype, device=state.device)
    whole[partition.starts[communicator.rank] :][: values.numel()] = values
    yield from all_gather(whole, communicator, last=None)
    return whole[: state.layout.buckets[number].numel]


def _mean_of_chunk(
    state: GroupState,
    number: int,
    segments: Sequence[Segment],
    factor: float,
    old: Sequence[Errors],
    new: Sequence[Errors],
    form: IntegerFormat,
) -> Task[Tensor]:
    """Average this rank's chunk of the gradients of a bucket times a factor, (1), and return it, [n_own] float32."""
    ranks, device = state.communicator, state.device
    shards = _shards_of(state)
    numel, partition = state.layout.buckets[number].numel, shards.partitions[number]
    in_full = [segment for segment in segments if state.in_full[segment.index]]
    values = torch.empty(sum(segment.numel for segment in in_full), dtype=torch.float32, device=device)
    if in_full:
        kernels.on(values).combine_(Combination(values.numel(), device, grads=in_full, beta=factor), values)
        segments = [replace(s, tensor=None) if state.in_full[s.index] else s for s in segments]
    if state.layout.buckets[number].in_full:
        mean = torch.zeros(partition.owned_numels[ranks.rank], dtype=torch.float32, device=device)
    else:
        task = reduce_scatter(Combination(numel, device, grads=segments, beta=factor), old, new, form, ranks)
        del segments, in_full  # as in all_reduce
        mean = yield from task
    if values.numel():
        numels, order = shards.numels_in_full[number], partition.order
        chunks = torch.split(values, [numels[rank] for rank in sorted(range(len(order)), key=order.__getitem__)])
        by_rank = torch.cat([chunks[chunk] for chunk in order])
        means = yield from summed(by_rank, numels, ranks, 1.0 / ranks.world_size)
        spans = [span for span in shards.spans[number] if state.in_full[span.index]]
        places = [Segment(mean, span.offset, span.numel, span.index) for span in spans]
        kernels.on(mean).add_(Average.of(means), places)
    return mean


def _update(state: GroupState, number: int, mean: Tensor, present: Sequence[bool], *, fused: bool) -> Tensor:
    """Update this rank's moments of a bucket by the averaged gradient, [n_own], and return the parameters' change."""
    shards = _shards_of(state)
    spans = [span for span in shards.spans[number] if present[span.index]]
    change = torch.zeros_like(mean)
    changes = [part_of(change, span) for span in spans]
    means = [part_of(mean, span) for span in spans]
    firsts = [part_of(shards.exp_avg[number], span) for span in spans]
    seconds = [part_of(shards.exp_avg_sq[number], span) for span in spans]
    fused = fused and not state.options["eps_inside_sqrt"]
    counts = [state.steps[span.index].item() for span in spans]
    steps = [*numbers_on(state.device if fused else state.steps.device, counts).unbind()]
    # Adam's step of parameters that are 0 and do not decay is the change
    options = {**state.options, "weight_decay": 0.0}
    adam_step_(AdamTensors(means, changes, firsts, seconds, steps), options, fused=fused)  # (2)
    return change


def _shards_of(state: GroupState) -> MomentShards:
    shards = state.moments.shards
    assert shards is not None
    return shards


def _compact_of(state: GroupState) -> CompactMoments:
    assert isinstance(state.moments, CompactMoments)
    return state.moments


# -- the end of the stage ---------------------------------------------------------------------------------------------


def freeze_moments(states: Iterable[GroupState], counts: Callable[[GroupState], _Counts], floor: float) -> None:
    """Fold the bias corrections into the moments, apply the variance floor, and gather what ranks have shared out.

    ``counts`` returns how often the moments of each parameter were updated. All ranks call.
    """
    for state in states:
        if state.compressed:
            freeze = GroupState.freeze_variance if state.moments.shards is None else _gather
            freeze(state, *counts(state), floor)


def _gather(state: GroupState, first: Sequence[float], second: Sequence[float], floor: float) -> None:
    """Do what :meth:`GroupState.freeze_variance` does, and bring the moments to all ranks, in their compact form."""
    shards, communicator = _shards_of(state), state.communicator
    beta1, beta2 = state.options["betas"]
    if state.options["bias_correction"]:
        for span, exp_avg, exp_avg_sq in shards.parts():
            correct_bias_(exp_avg, first[span.index], beta1)
            correct_bias_(exp_avg_sq, second[span.index], beta2)
    sums = torch.zeros(len(state.params), dtype=torch.float64, device=state.device)
    for span, _, exp_avg_sq in shards.parts():
        sums[span.index] += sum_of(exp_avg_sq)
    communicator.all_reduce(sums).wait()
    total = sums.tolist()
    for span, _, exp_avg_sq in shards.parts():
        if floor > 0:
            exp_avg_sq.clamp_(min=floor * total[span.index] / state.layout.numels[span.index])
    points = _tops(state)
    without_variance = [top <= NO_TOP for top in points]
    rows = enumerate(state.feedback)
    run_tasks(_gather_momentum(state, number, feedback, without_variance) for number, feedback in rows)
    _compact_of(state).make_codes(points)  # in the memory that the momentum has left, on up to four ranks
    run_tasks(_gather_variance(state, number, points) for number in range(len(state.layout.buckets)))
    state.moments.drop_shards()
    state.find_without_variance()


def _tops(state: GroupState) -> list[int]:
    """Return the point of the largest variance of each parameter on any rank. All ranks call."""
    tops = torch.full((len(state.params),), NO_TOP, dtype=torch.float64, device=state.device)
    if parts := list(_shards_of(state).parts()):
        places = numbers_on(state.device, [span.index for span, _, _ in parts], torch.int64)
        points = highest_points([exp_avg_sq for _, _, exp_avg_sq in parts])
        tops.scatter_reduce_(0, places, points.double(), "amax")
    state.communicator.all_reduce(tops, op="max").wait()
    return [int(top) for top in tops.tolist()]


def _gather_momentum(
    state: GroupState, number: int, feedback: BucketErrors, without_variance: Sequence[bool]
) -> Task[None]:
    """Bring the momentum of a bucket to all ranks, as signs (5) or in full; without a variance it has no error."""
    shards, communicator = _shards_of(state), state.communicator
    bucket = state.layout.buckets[number]
    form, exp_avg = state.form, shards.take_exp_avg(number)
    if bucket.in_full:
        values = yield from _gather_chunks(state, number, exp_avg)
        _compact_of(state).store_message(bucket, Average.of(values))
        return
    together, message = own_message(bucket.numel, form, communicator, state.device)
    if exp_avg.numel():
        missed = torch.zeros_like(exp_avg)
        kernels.on(message).compress_(form, Combination.of(exp_avg), missed, message, 1, missed)
        missed.mul_(state.options["betas"][0])
        for span in shards.spans[number]:
            if without_variance[span.index]:
                part_of(missed, span).zero_()
        keep_(feedback.server, missed)
    del exp_avg
    average = yield from gather_messages(bucket.numel, together, form, communicator)
    _compact_of(state).store_message(bucket, average)


def _gather_variance(state: GroupState, number: int, tops: Sequence[int]) -> Task[None]:
    """Make the variance of a bucket codes of 8 bits on all ranks."""
    shards, bucket = _shards_of(state), state.layout.buckets[number]
    exp_avg_sq = shards.take_exp_avg_sq(number)
    codes = torch.empty_like(exp_avg_sq, dtype=torch.uint8)
    for span in shards.spans[number]:
        encode_variance_(part_of(exp_avg_sq, span), part_of(codes, span), tops[span.index])
    del exp_avg_sq
    _compact_of(state).codes[bucket.start : bucket.stop] = yield from _gather_chunks(state, number, codes)


# -- zero_stage=2 -----------------------------------------------------------------------------------------------------


_Sketch = tuple[Tensor, Tensor]  # of gradients with their loss scale, [4096] float32; the sum of their squares, float64


def _empty_sketch(device: torch.device) -> _Sketch:
    y = torch.zeros(SKETCH_NUMEL, dtype=torch.float32, device=device)
    return y, torch.zeros((), dtype=torch.float64, device=device)


@dataclass
class _SentGradients:
    """The gradients that were sent in one backward pass."""

    means: dict[Key, Tensor] = field(default_factory=dict)  # of this rank's chunks, [n_own], in the warmup stage
    present: dict[int, list[bool]] = field(default_factory=dict)  # by param group: where this rank had a gradient
    sketches: dict[int, _Sketch] | None = None  # by bucket, if sketches are taken
    fault: Exception | None = None  # in a gradient of this rank
    is_late: bool = False  # a gradient came after a part of it was sent, or a pass after one that had raised
    refresh: VarianceRefresh | None = None  # if the variance learns from them

    def refresh_in(self, bits: int) -> VarianceRefresh:
        """Return what refreshes the variance, in messages of so many bits; it is made at its first use."""
        if self.refresh is None:
            self.refresh = VarianceRefresh(bits)
        return self.refresh


class ShardedOverlap(OverlapSender):
    """Gradients that are sent and freed during backward: a :class:`~hf_compressopt.collectives.backward.Client`.

    They are those of the groups whose moments are shared out.
    """

    always = True

    def __init__(
        self,
        groups: ParamGroups,
        tensors: dict[str, Tensor],
        message_of: MessageOf,
        begin: Callable[[], StepPlan],
        *,
        bits: int,
        clips: bool,
    ) -> None:
        super().__init__(groups, tensors, message_of)
        self._begin_step = begin
        self._form = IntegerFormat(bits)
        self._clips = clips
        self._scale_of_pass: Callable[[], float] | None = None
        self._passes: BackwardPasses | None = None
        self._sent, self._params = _SentGradients(), list[Tensor]()
        self.clipped = 1.0  # factor of the means of this step
        self._dropped = False  # what was sent for the coming step was dropped since
        self.attach()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but hooks and messages: a copy hooks its parameters in its first step."""
        none: dict[str, Any] = {"_passes": None, "_scale_of_pass": None, "_sent": _SentGradients(), "clipped": 1.0}
        return super().__getstate__() | none | {"_dropped": False}

    def follow_loss_scale(self, loss_scale: Callable[[], float]) -> None:
        """Ask a function for the factor of each coming pass; without one a gradient scaler tells it."""
        self._scale_of_pass = loss_scale

    # -- hooks --------------------------------------------------------------------------------------------------------

    @property
    def states(self) -> list[GroupState]:
        """The param groups whose gradients are sent; alike on all ranks."""
        return [state for state in self._states if state.shared_out]

    def attach(self) -> BackwardPasses:
        """Hook the parameters, if there are new ones."""
        params = [param for state in self.states for param in state.params]
        if self._passes is None or len(self._params) != len(params):
            numbers = {param: number for number, param in enumerate(params)}
            members = [{numbers[param] for param in bucket.members()} for bucket in self._make_buckets()]
            before, name = self._passes, "compressed optimizer (zero_stage=2)"
            if before is not None:
                before.require_attached()
                before.detach()
            counted = None if before is None else before.passes
            self._passes = BackwardPasses(self, name, self._communicator, counted=counted)
            self._passes.add(params, members)
            self._params, self._members = params, members
        return self._passes

    @property
    def passes(self) -> BackwardPasses:
        """The passes, once the parameters are hooked."""
        assert self._passes is not None
        return self._passes

    def _make_buckets(self) -> list[SignBucket]:
        """Return the buckets, the last ones of all groups first, as backward goes."""
        buckets = chain.from_iterable(SignBucket.all_of(state, self) for state in self.states)
        # what travels in full comes from all layers, so that the last gradient completes it
        return sorted(buckets, key=lambda each: (each.bucket.in_full, -each.bucket.start / each.state.layout.numel))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.attach().no_sync()

    def holds_gradients(self) -> bool:
        """Return whether the gradients of the coming step were sent; alike on all ranks."""
        return self._passes is not None and self._passes.done

    @property
    def _was_sent(self) -> bool:
        """True if gradients of the coming step were sent, dropped or not: ranks compare that in the step."""
        return self._dropped or self.holds_gradients()

    def complete(self) -> None:
        passes = self.attach()
        passes.require_attached()
        passes.flush()
        if not self._was_sent:
            passes.empty_pass()
        passes.meet()
        if self._was_sent:
            passes.agree_on_order(self._communicator)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        self._follow()

    def begin_pass(self) -> bool:
        """Begin a pass, and return whether its gradients are sent; alike on all ranks.

        They stay whole in a compressed step of which it is not known by which norm to clip: the first one after the
        load of a checkpoint of a run that clipped otherwise.
        """
        self.forget_clipping()
        plan, last = self._begin_step(), self._last_norm()
        self._sent, self._dropped = _SentGradients(is_late=self._sent.is_late), False
        if not self.states or (plan.stage.number and last is None):
            return False
        self.begin(None if self._scale_of_pass is None else float(self._scale_of_pass()), plan)
        for state in self.states:
            begin = state.errors.begin if plan.stage.number else state.errors.begin_sending
            begin()
        self._buckets = self._make_buckets()
        buckets_of = self.passes.buckets_of
        self._parts_to_send = [len(buckets_of.get(number, ())) for number in range(len(self._params))]
        self._sent.present = {state.number: [False] * len(state.params) for state in self.states}
        if plan.stage.number and (self._clips or last != UNCLIPPED):
            self._sent.sketches = {}
        return True

    def take(self, number: int) -> bool:
        buckets = self.passes.buckets_of.get(number, [])
        came = any(not self.passes.awaits(index, number) for index in buckets)
        self._sent.is_late |= came and self._parts_to_send[number] < len(buckets)
        return True

    def send(self, index: int) -> None:
        due = self._buckets[index]
        sent = self._sent
        tasks = self.passes.tasks
        state, bucket = due.state, due.bucket
        grads: dict[Tensor, Tensor | None] = {}
        for piece in bucket.pieces:
            param = state.params[piece.index]
            fault = find_fault([param], [param.grad], [state.names[piece.index]])
            sent.fault = sent.fault or fault
            if param.grad is not None and fault is None:
                grads[param] = param.grad
                sent.present[state.number][piece.index] = True
        segments = state.gradient_segments(bucket, [grads.get(param) for param in state.params])
        tasks.keep([*grads.values(), *(segment.tensor for segment in segments)])
        if not self._plan.stage.number:
            factor, errors = 1 / self.backward.loss_scale, (due.old.worker, due.new.worker)
            tasks.add(
                self._keep_mean(due.key, _mean_of_chunk(state, due.number, segments, factor, *errors, self._form))
            )
        else:
            if sent.sketches is not None:
                sent.sketches[index] = sketch = _empty_sketch(state.device)
                start = self._start_in_sketch(state) + bucket.start
                kernels.on(state.device).sketch_(segments, start, self._plan.step, *sketch)
            tasks.add(SignBucket.average([due], grads))
            if self._plan.refresh_steps:
                tasks.add(self._refresh(Row.of(state, bucket, segments, 1 / self.backward.loss_scale)))
        for number in self._members[index]:
            self._parts_to_send[number] -= 1
            if not self._parts_to_send[number]:
                self._params[number].grad = None

    def _refresh(self, row: Row) -> Task[None]:
        """Average gradients that refresh the variance, clipped as in the message that is under way."""
        clipped = self.backward.clipped(row.message, row.key)
        task = self._sent.refresh_in(self._form.bits).send([row._replace(message=clipped)])
        del row, clipped  # gradients may be freed while their messages travel
        yield from task

    def _start_in_sketch(self, state: GroupState) -> int:
        """Return the place of a group's first element in the sketch of all ranks' gradients."""
        before = self._states[: state.number]
        return sum(other.layout.numel for other in before if other.communicator is self._communicator)

    def _keep_mean(self, key: Key, mean: Task[Tensor]) -> Task[None]:
        self._sent.means[key] = yield from mean

    def end_pass(self) -> None:
        for param, parts in zip(self._params, self._parts_to_send, strict=True):
            if not parts:
                param.grad = None  # also of parameters of no element
        self.passes.leave_gradients(True)
        self._buckets = []  # they hold errors, old and new, of which the step lets go
        self.note_gradients()

    def interrupted(self) -> None:
        self._sent.is_late = True

    def drop_of(self, numbers: Collection[int]) -> None:
        """See :class:`~hf_compressopt.collectives.backward.Client`: messages hold parts of several parameters."""
        if len(numbers) == len(self._params):
            self.drop()
        elif self.holds_gradients():
            raise RuntimeError(
                f"this zero_grad() would drop gradients of {len(numbers)} parameters, which have left in "
                f"messages with those of the others ({len(self._params)} in all; zero_stage=2): call "
                "optimizer.zero_grad(), or that of the whole model"
            )

    def drop(self) -> None:
        """Drop the gradients that were sent, and keep the errors. All ranks call; else they raise in the step."""
        if self._passes is not None:
            self._passes.flush()
            self._passes.passes.drop()
        dropped, sketches = self._was_sent, self._sent.sketches
        if self.holds_gradients():
            self._forget()
            self.backward = Backward(self._last_norm(), self.backward.loss_scale, self._communicator.world_size)
        self._begin_anew()
        self._dropped = dropped
        self._sent.sketches = None if sketches is None else {}

    def discard(self) -> None:
        super().discard()
        self._begin_anew()

    def end_step(self, *, taken: bool) -> None:
        super().end_step(taken=taken)
        self._begin_anew()
        if self._passes is not None:
            self._passes.passes.end_step()

    def _begin_anew(self) -> None:
        for state in self.states:
            state.errors.drop()
        self._sent = _SentGradients()
        self.clipped = 1.0
        self._dropped = False
        if self._passes is not None:
            self._passes.leave_gradients(False)

    def state_loaded(self) -> None:
        super().state_loaded()
        self.drop()
        self._dropped = False

    # -- the step -----------------------------------------------------------------------------------------------------

    def put_into(self, gradients: Gradients) -> None:
        if self._was_sent:
            gradients.take_sent(self, [state.number for state in self.states], self._sent.fault)
            for state in self.states:
                gradients.note_fault(self._find_late(state))
        super().put_into(gradients)

    def _find_late(self, state: GroupState) -> Exception | None:
        """Return the error if a parameter of a group got a gradient after its gradient had left."""
        late = [name for p, name in zip(state.params, state.names, strict=True) if p.grad is not None]
        if not late and not self._sent.is_late:
            return None
        return ValueError(
            f"{late[0] if late else 'a parameter'} got a gradient after its gradient had left (zero_stage=2): "
            "run all backward passes but the last one of a step inside optimizer.no_sync(), wrap the model in "
            "no DistributedDataParallel, checkpoint activations with use_reentrant=False, and call "
            "optimizer.zero_grad(), which drops what has left, after a backward pass that raised"
        )

    @property
    def signature(self) -> list[Key]:
        return [*super().signature, *sorted(self._sent.means)]

    def agree(self, *, differ: bool) -> None:
        """Check, if the ranks ``differ``, that the same gradients were sent on all of them."""
        if differ:
            self._require_same_messages()
        super().agree(differ=differ)

    def _require_same_messages(self) -> None:
        what = "what has left in backward (did all of them call zero_grad() and backward() alike?)"
        self._communicator.require_equal(what, [list(key) for key in self.signature] if self.holds_gradients() else [])

    @property
    def is_exact(self) -> bool:
        """True if the norm of the mean gradient of these groups is known from their means; alike on all ranks."""
        return self._was_sent and not self._plan.stage.number

    def squares(self) -> dict[float, Tensor]:
        """Return sums of squares, [] float64, by the factor that makes their sum over the ranks a squared norm."""
        device = self._communicator.device
        if self.is_exact:
            return {1.0: sum_of_squares([self._sent.means[key] for key in sorted(self._sent.means)], device)}
        return {1 / self._communicator.world_size: self.backward.square(device)}

    def contribute(self, mean: MeanNorm) -> None:
        """Merge sent gradients into what is measured for the norm of the mean."""
        for share, square in self.squares().items():
            mean.squares[share] = mean.squares.get(share, 0) + square
        number = next(i for i, sketch in enumerate(mean.sketches) if sketch.communicator is self._communicator)
        if self.is_exact:
            mean.add_averaged(mean.squares[1.0])
            others = (state for state in self._states if state.communicator is self._communicator)
            if all(state.shared_out or not state.params for state in others):
                del mean.sketches[number]  # of nothing
        elif self._sent.sketches is not None:
            sketch, scale = mean.sketches[number], self.backward.loss_scale
            total = _empty_sketch(mean.averaged.device)
            for index in sorted(self._sent.sketches):  # the order in which buckets are sent changes no bit
                for whole, part in zip(total, self._sent.sketches[index], strict=True):
                    whole += part
            y, square = total
            mean.sketches[number] = sketch._replace(y=sketch.y + y / scale, square=sketch.square + square / scale**2)

    @property
    def is_measured(self) -> bool:
        """True if the norm of the mean gradient can be measured; alike on all ranks."""
        return self.is_exact or self._sent.sketches is not None

    def scale_(self, factor: float) -> None:
        """Clip the means that have come; messages of the compressed stage were sent with a factor already."""
        self.clipped *= factor
        for mean in self._sent.means.values():
            mean.mul_(factor)

    def present(self, state: GroupState, others: Sequence[bool]) -> Sequence[bool]:
        """Return for each parameter of a group whether this rank had a gradient: as ``others`` say if none was sent."""
        return self._sent.present.get(state.number, others) if self.holds_gradients() else others

    def take_refresh(self, bits: int) -> VarianceRefresh:
        return self._sent.refresh_in(bits)

    def take_means(self) -> dict[Key, Tensor]:
        """Return the means of this rank's chunks, clipped; none if nothing was sent."""
        means, self._sent.means = self._sent.means, {}
        return means

    def note_loss_scale(self, scale: float) -> None:
        """Divide the factor out of what the warmup stage has sent under another one; raise in the compressed stage."""
        self.complete()
        before = self.backward.loss_scale if self.holds_gradients() else scale
        if before != scale and not self.is_exact:
            self.drop()
            self.expect_loss_scale(scale)
            raise ValueError(
                f"gradients have left with a loss scale of {before}, and the scaler used {scale}: do not change the "
                "scale of a hf_compressopt.GradScaler between its update() and backward(). The next step takes it"
            )
        if before != scale:
            self.expect_loss_scale(scale)
            self.backward.carry(scale)
            for mean in self._sent.means.values():
                mean.mul_(before / scale)
            for state in self.states:
                state.errors.rescale(before / scale)
        super().note_loss_scale(scale)
