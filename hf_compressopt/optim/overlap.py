"""clip="late": messages of signs that are sent during backward, from DistributedDataParallel's hook.

The message of a bucket is sent as soon as its gradients are there, and travels while backward computes further ones:

    u = b1 m + (1 - b1) c g_r + worker_error;  messages <- Q(u)                                 (1)

The norm of g is not known then. So c is the clip coefficient of the last step that was taken, min(1, max_norm / norm).
A rank whose gradient grows beyond twice the usual one meanwhile clips its further messages as if the norm had grown as
much. The new errors count where ``step()`` commits them: all ranks know then that the step is taken. There the
messages are awaited, too: the norm is measured while the last ones travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from hf_compressopt.collectives.exchange import BucketErrors, Task, all_reduce
from hf_compressopt.collectives.gradients import GradientBucket
from hf_compressopt.flat import Bucket
from hf_compressopt.kernels import Average, Combination, Segment, all_finite, sum_of_squares
from hf_compressopt.kernels.memory import reads_at_once
from hf_compressopt.optim.gradients import Gradients
from hf_compressopt.optim.group import GroupState, ParamGroups
from hf_compressopt.optim.math import clip_factor
from hf_compressopt.optim.refresh import Key, Row, VarianceRefresh
from hf_compressopt.schedules import StepPlan

#: Name of the tensor that holds what the next step's messages follow from: :class:`LastNorm`, and the loss scale.
LATE_CLIP = "late_clip"
#: How much larger than usual a rank's gradient may grow before the rank clips its messages by more than was predicted.
GROWTH = 2.0

Grads = Sequence["Tensor | None"]
MessageOf = Callable[[StepPlan, GroupState, Bucket, BucketErrors, Grads], Combination]


class LastNorm(NamedTuple):
    """The norms that clipping found in the last step that was taken, alike on all ranks."""

    norm: float  # of the mean gradient, before clipping
    max_norm: float  # that it was clipped to
    usual: float  # the root of the mean square of the ranks' own norms; NaN if it was not measured


class Backward:
    """One backward pass on one rank: the coefficient of its gradients, which are not clipped without ``last``."""

    def __init__(self, last: LastNorm | None, loss_scale: float, world_size: int) -> None:
        self.loss_scale = loss_scale  # that the gradients carry
        self._last, self._squares = last, dict[Key, Tensor]()
        self._growth = dict[Key, Tensor]()  # what growth() has returned
        self._total: Tensor | None = None
        # the ranks' own norms are at most so much larger than that of the mean if they are alike
        self._usual = 0.0 if last is None else last.usual
        if last is not None and not math.isfinite(last.usual):
            self._usual = math.sqrt(world_size) * last.norm

    def carry(self, loss_scale: float) -> None:
        """Take it that the gradients carry another loss scale than was told before."""
        self.loss_scale = loss_scale

    def square(self, device: torch.device) -> Tensor:
        """Return the sum of squares of sent gradients, [] float64, without loss scale, if they are clipped, else 0."""
        squares = [self._squares[key].to(device) for key in sorted(self._squares)]  # buckets come in any order
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)

    def coefficient(self) -> float:
        """Return the clip coefficient of gradients that have not grown."""
        return 1.0 if self._last is None else min(1.0, self._last.max_norm / (self._last.norm + 1e-6))

    def growth(self, key: Key, segments: Sequence[Segment], device: torch.device) -> Tensor | None:
        """Return the factor, [] float64, that growth of scaled gradients takes off the coefficient; None unclipped."""
        if self._last is None:
            return None
        parts = [segment.part for segment in segments if segment.tensor is not None]
        square = sum_of_squares(parts, device) / self.loss_scale**2
        self._squares[key] = square
        self._total = square if self._total is None else square + self._total.to(device)
        own, known = self._total.sqrt(), self._last.norm
        norm = known * own / self._usual if self._usual > 0 else own
        coefficient = clip_factor(norm, self._last.max_norm)
        self._growth[key] = torch.where(own > GROWTH * self._usual, coefficient / self.coefficient(), 1.0)
        return self._growth[key]

    def clipped(self, z: Combination, key: Key) -> Combination:
        """Return a combination whose gradients, without loss scale, are clipped as in the message of a bucket."""
        z, growth = replace(z, beta=z.beta * self.coefficient()), self._growth.get(key)
        if growth is None:
            return z
        if reads_at_once(growth.device):  # which takes less than a pass over the gradients
            return replace(z, beta=z.beta * float(growth))
        return replace(z, grads=_times(z.grads or (), growth))


def _times(segments: Sequence[Segment], factor: Tensor) -> list[Segment]:
    """Return copies of gradients times a number of their device."""
    parts = [segment.part for segment in segments if segment.tensor is not None]
    products = iter(torch._foreach_mul(parts, factor.float()) if parts else ())
    return [s if s.tensor is None else replace(s, tensor=next(products), start=0) for s in segments]


class SentAverage(NamedTuple):
    """A bucket whose messages are back before the step."""

    average: Average
    finite: Tensor  # [] bool, whether the average is; alike on all ranks


@dataclass
class SignBucket(GradientBucket):
    """A bucket of a param group whose momentum is sent, as signs or in full; gradients and errors stay as they are."""

    completes_in_step: ClassVar[bool] = True
    state: GroupState
    number: int  # among the buckets of the group
    messages: OverlapSender
    old: BucketErrors
    new: BucketErrors

    @classmethod
    def all_of(cls, state: GroupState, messages: OverlapSender, owner: int = 0) -> list[SignBucket]:
        """Return the buckets of a group, with its errors, and the new ones of the pass that has begun."""
        rows = enumerate(zip(state.layout.buckets, state.feedback, state.new_feedback, strict=True))
        of = state.params, state.communicator, owner, state
        return [cls(bucket, *of, number, messages, old, new) for number, (bucket, old, new) in rows]

    def form(self) -> str:
        return "float32, of signs" if self.bucket.in_full else f"signs, {self.state.form.scale_block} to a scale"

    @classmethod
    def average(cls, run: Sequence[SignBucket], grads: Mapping[Tensor, Tensor | None]) -> Task[tuple[None, Any]]:
        messages, old, new = run[0].messages, [b.old for b in run], [b.new for b in run]
        zs = [
            messages.message(b.state, b.bucket, errors, [grads.get(param) for param in b.params])
            for b, errors in zip(run, old, strict=True)
        ]
        for bucket in run:
            messages.keep(bucket.key, None)
        task = all_reduce(zs, old, run[0].state.form_of(run[0].bucket), run[0].communicator, new)
        del zs, grads  # gradients may be freed while their messages travel
        averages = yield from task
        for bucket, average in zip(run, averages, strict=True):
            finite = all_finite(average) if average.values is None else average.values.isfinite().all()
            messages.keep(bucket.key, SentAverage(average, finite))
        return None, lambda dropped: None

    @property
    def key(self) -> Key:
        return self.state.number, self.bucket.start

    def set_completion(self, finish: Callable[[], object]) -> None:
        self.messages.await_by(finish)


#: What stands for no clipping: any gradient is below this.
UNCLIPPED = LastNorm(0.0, math.inf, math.inf)


_Made = tuple["ref[Tensor]", int]  # a gradient as backward has left it behind, and its version


def _as_made(params: Sequence[Tensor]) -> list[_Made | None]:
    return [None if p.grad is None else (ref(p.grad), p.grad._version) for p in params]


def _is_unchanged(made: _Made | None, grad: Tensor | None) -> bool:
    if made is None or grad is None:
        return made is None and grad is None
    return made[0]() is grad and made[1] == grad._version


class OverlapSender:
    """The messages of one optimizer that are sent during backward.

    A step takes a param group's messages only if all of them were sent in the backward pass before it, and if its
    gradients are on all ranks those that the backward pass has computed: the same tensors, which nobody has changed but
    a gradient scaler. Else, and in every other step, messages are made in ``step()``. A change after the ranks have
    agreed on that, as they do when they clip, comes too late for the step.
    """

    a_hook_sends = False  # DistributedDataParallel's, after the ranks have compared their passes
    always = False  # whether the messages of every step are, so that a step without clipping says so

    def __init__(self, groups: ParamGroups, tensors: dict[str, Tensor], message_of: MessageOf) -> None:
        self._tensors, self._message_of = tensors, message_of
        self._states, self._communicator, self._follow = groups
        self.agreed = True  # the ranks have agreed on the messages that count, or there are none
        self._arrived: dict[Key, SentAverage | None] = {}  # those that count; None while one is on its way
        self._finite: dict[Key, Tensor | None] = {}  # of all that were sent, whether they still count or not
        self._finish_round: Callable[[], object] | None = None  # awaits what is on its way
        self._made_from: dict[int, list[_Made | None]] = {}  # the gradients after backward, by param group
        self._noted: LastNorm | None = None  # in the step under way
        self._plan: StepPlan  # of the coming step
        self.backward: Backward  # of the pass under way
        self._unclipped = False  # the last step of this process was not clipped
        self._taken = set[int]()  # param groups whose messages the step under way takes
        self._loss_scale = self._assumed_scale = 1.0

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but messages: those of a copy are made in its step."""
        none: dict[str, Any] = {"agreed": True, "_arrived": {}, "_finite": {}, "_finish_round": None, "_made_from": {}}
        return self.__dict__ | none

    # -- backward -----------------------------------------------------------------------------------------------------

    def due(self, plan: StepPlan, before: StepPlan) -> bool:
        """Return whether messages are sent in the coming backward pass; alike on all ranks.

        They are in all compressed steps but the first, before which replicas may still be made alike, if it is known by
        which norm to clip, or that gradients are not clipped.
        """
        self._plan = plan
        sends = plan.agree and plan.synchronize and not plan.reduce_grads and before.stage is plan.stage
        sends = sends and not plan.update_variance
        if not sends or self._communicator.world_size == 1:
            return False
        return self._unclipped if LATE_CLIP not in self._tensors else self._last_norm() is not None

    def sent_by_hook(self) -> None:
        """Note that a hook sends the messages from now on."""
        self.a_hook_sends = True

    def buckets(self, loss_scale: float | None, *, owner: int, present: Collection[Tensor]) -> list[GradientBucket]:
        """Return the buckets that are sent, and drop what an earlier backward pass has sent of these param groups."""
        self.begin(loss_scale, self._plan)
        here = set(present)
        found: list[GradientBucket] = []
        for state in self._states:
            if state.compressed and state.own_rank is None and here.issuperset(state.params):
                self._drop(state)
                self._made_from.pop(state.number, None)
                state.errors.begin()
                found += SignBucket.all_of(state, self, owner)
        return sorted(found, key=lambda bucket: bucket.bucket.in_full)  # those last, as they come from all layers

    def forget_clipping(self) -> None:
        """Forget the norm of gradients that were clipped, and that no step has taken: a backward pass begins."""
        self._noted = None

    def begin(self, loss_scale: float | None, plan: StepPlan) -> None:
        """Begin a backward pass, of the step of a plan."""
        self._await()
        self._follow()
        self.agreed = False
        self._assumed_scale = self._loss_scale if loss_scale is None else loss_scale
        self._plan = plan
        self.backward = Backward(self._last_norm(), self._assumed_scale, self._communicator.world_size)

    def message(self, state: GroupState, bucket: Bucket, errors: BucketErrors, grads: Grads) -> Combination:
        """Return what is sent of a bucket, (1): of gradients with the loss scale."""
        z, key = self._message_of(self._plan, state, bucket, errors, grads), (state.number, bucket.start)
        self.backward.growth(key, z.grads or (), state.device)
        return self.backward.clipped(replace(z, beta=z.beta / self.backward.loss_scale), key)

    def keep(self, key: Key, early: SentAverage | None) -> None:
        """Record a sent message (None) or its result, unless the message has been dropped."""
        if early is None or key in self._arrived:
            self._arrived[key] = early
        if early is None or key in self._finite:
            self._finite[key] = None if early is None else early.finite

    def await_by(self, finish: Callable[[], object]) -> None:
        """Take what awaits the messages that are on their way."""
        self._finish_round = finish

    def _await(self) -> None:
        """Await the sent messages. All ranks call this at the same places, also ranks that dropped some."""
        if self._finish_round is not None:
            finish, self._finish_round = self._finish_round, None
            finish()

    def note_gradients(self) -> None:
        """Record the gradients of the messages, as DistributedDataParallel has computed them after backward."""
        for state in self._states:
            new = state.number not in self._made_from
            if new and any(number == state.number for number, _ in self._arrived):
                self._made_from[state.number] = _as_made(state.params)

    # -- the step -----------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Send what the coming step needs, if it was not sent. All ranks call."""

    def put_into(self, gradients: Gradients) -> None:
        """Merge what was sent into this step."""
        gradients.note_left(self.left(gradients.groups))

    def left(self, gradients: Sequence[Grads]) -> frozenset[int]:
        """Return the ids of the gradients, one list per param group, that are in messages already.

        What was sent of a param group without the rest of its buckets is dropped on this rank, and, until the ranks
        have agreed, what was made of other gradients; see :meth:`agree`.
        """
        found: set[int] = set()
        for state in self._states if self._arrived else ():
            grads = gradients[state.number] if gradients else []
            whole = all((state.number, bucket.start) in self._arrived for bucket in state.layout.buckets)
            if whole and (self.agreed or not gradients or self._made_from_these(state, grads)):
                found |= {id(grad) for grad in grads if grad is not None}
            else:
                self._drop(state)
        return frozenset(found)

    def _made_from_these(self, state: GroupState, grads: Grads) -> bool:
        made = self._made_from.get(state.number, [])
        return len(made) == len(grads) and all(map(_is_unchanged, made, grads))

    def agree(self, *, differ: bool) -> None:
        """Note that the ranks have agreed on what counts. If they ``differ``, drop what another one has dropped."""
        if differ:
            self._drop_what_others_lack()
        self.agreed = True

    def _drop_what_others_lack(self) -> None:
        with self._communicator.traffic.paused():
            everyone = self._communicator.all_gather_object([list(key) for key in self.signature])
        lost = {key[0] for key in self._arrived if any(list(key) not in keys for keys in everyone)}
        for number in lost:
            self._drop(self._states[number])

    def overflow(self) -> Tensor | None:
        """Await the sent messages; return infinity if an average is not finite, else 0, [] float64; None without any.

        All ranks ask at the same places, and get the same answer, whether the averages still count or not.
        """
        self._await()
        finite = [flag.to(self._communicator.device) for flag in self._finite.values() if flag is not None]
        return torch.where(torch.stack(finite).all(), 0.0, math.inf).double() if finite else None

    @property
    def signature(self) -> list[Key]:
        """The buckets whose sent messages count, for ranks to compare."""
        return sorted(self._arrived)

    def commit(self, states: Sequence[GroupState]) -> None:
        """Await the sent messages, and take over the errors of those that the step under way uses."""
        self._await()
        self._taken = {number for number, _ in self._arrived}
        for state in states:
            if state.number in self._taken:
                state.errors.commit()

    def clip_row(self, row: Row) -> Row:
        """Return gradients of a refresh, clipped as in the message that the step under way takes, if it had left."""
        if row.state.number not in self._taken:
            return row
        return row._replace(message=self.backward.clipped(row.message, row.key))

    def take_refresh(self, bits: int) -> VarianceRefresh:
        """Return the averages that refresh the variance in the step under way, as far as they were sent."""
        return VarianceRefresh(bits)

    def take_average(self, state: GroupState, bucket: Bucket) -> Average | None:
        """Return the compressed mean of a bucket whose messages were sent; None if none were."""
        early = self._arrived.pop((state.number, bucket.start), None)
        return None if early is None else early.average

    def note_norm(self, norm: float, max_norm: float, usual: float, *, whole: bool) -> None:
        """Take up what clipping finds in the step under way; the norm must be that of the ``whole`` gradient."""
        if self._noted is None:
            self._noted = LastNorm(norm if whole else math.nan, max_norm, usual)
        else:  # clipped twice: by the smaller norm
            first = self._noted.norm if whole else math.nan
            self._noted = LastNorm(first, min(self._noted.max_norm, max_norm), self._noted.usual)

    def note_loss_scale(self, scale: float) -> None:
        """Take over the factor that the gradients of the step under way carried, as a gradient scaler knows it."""
        if scale != self._assumed_scale:
            self._forget()  # they are sent once more, in the step
        self._loss_scale = self._assumed_scale = scale
        for state in self._states if self._made_from else ():
            if not self._made_from_these(state, [param.grad for param in state.params]):
                self._made_from.pop(state.number, None)

    def expect_loss_scale(self, scale: float) -> None:
        """Take over the factor that the gradients of the coming backward pass carry."""
        self._loss_scale = self._assumed_scale = scale
        if LATE_CLIP in self._tensors:
            self._tensors[LATE_CLIP][3] = scale

    def note_unscaled(self) -> None:
        """Record that a gradient scaler has changed the gradients since :meth:`note_loss_scale`."""
        self._made_from = {number: _as_made(self._states[number].params) for number in self._made_from}

    def drop(self) -> None:
        """Drop the sent messages, and keep the errors. The next step or backward pass awaits them."""
        self._forget()

    def discard(self) -> None:
        """Drop the sent messages, because the step under way is given other gradients. All ranks call."""
        self.drop()

    def _forget(self) -> None:
        for number in {number for number, _ in self._arrived}:
            self._states[number].errors.drop()
        self._arrived, self._finite, self._made_from = {}, {}, {}
        self.agreed = True

    def _drop(self, state: GroupState) -> None:
        left = {key: early for key, early in self._arrived.items() if key[0] != state.number}
        if len(left) < len(self._arrived):
            self._arrived = left
            state.errors.drop()

    def end_step(self, *, taken: bool) -> None:
        """Close a step: keep the norm of one that was taken, and drop the rest."""
        noted = UNCLIPPED if self._noted is None and self.always else self._noted
        if taken and noted is not None:
            numbers = [*noted, self._loss_scale]
            self._tensors[LATE_CLIP] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        elif taken:
            self._tensors.pop(LATE_CLIP, None)
        self._unclipped = self._noted is None if taken else self._unclipped
        self._noted, self._taken = None, set()
        self._await()
        self._forget()

    def state_loaded(self) -> None:
        """Drop everything that is not in the state that was loaded."""
        self._forget()
        self._noted, self._unclipped = None, False
        if LATE_CLIP in self._tensors:
            self._loss_scale = float(self._tensors[LATE_CLIP][3])

    def _last_norm(self) -> LastNorm | None:
        """Return what the last clipping has found, alike on all ranks; None if no norm to clip by is known."""
        if LATE_CLIP not in self._tensors:
            return None
        last = LastNorm(*self._tensors[LATE_CLIP][:3].tolist())
        return last if math.isfinite(last.norm) and last.max_norm > 0 else None
