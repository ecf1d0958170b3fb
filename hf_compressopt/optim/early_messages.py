"""clip="late": messages of signs that leave during backward, from DistributedDataParallel's hook.

The message of a bucket leaves as soon as its gradients are there, and travels while backward computes further ones:

    u = b1 m + (1 - b1) c g_r + worker_error;  messages <- Q(u)                                 (1)

The norm of g is not known then. So c is the clip coefficient of the last step that was taken, min(1, max_norm / norm).
A rank whose gradient grows beyond twice the usual one meanwhile clips its further messages as if the norm had grown as
much. :meth:`EarlyMessages.average` writes the errors in ``step()``, where all ranks know that the step is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import (
    ErrorFeedback,
    Exchanged,
    compressed_all_reduce,
    lazy_all_reduce,
)
from hf_compressopt.collectives.gradient_round import Arrived, Slot
from hf_compressopt.collectives.phases import Task
from hf_compressopt.flat import Bucket
from hf_compressopt.kernels import Average, Combination, Segment, all_finite, sum_of_squares
from hf_compressopt.optim.group_state import GroupState
from hf_compressopt.schedules import StepPlan

#: Name of the tensor that holds what the next step's messages follow from: :class:`LastNorm`, and the loss scale.
LATE_CLIP = "late_clip"
#: How much larger than usual a rank's gradient may grow before the rank clips its messages by more than was predicted.
GROWTH = 2.0

_Grads = Sequence["Tensor | None"]
_Prepare = Callable[[StepPlan, GroupState, Bucket, _Grads], Combination]
_Key = tuple[int, int]  # number of the param group, first element of the bucket


class LastNorm(NamedTuple):
    """The norms that clipping found in the last step that was taken, alike on all ranks.

    Attributes:
        norm: The norm of the mean gradient, before clipping.
        max_norm: The norm that it was clipped to.
        usual: The root of the mean square of the ranks' own norms; NaN if it was not measured.
    """

    norm: float
    max_norm: float
    usual: float


class _Backward:
    """One backward pass on one rank: the coefficient of the gradients that leave in it."""

    def __init__(self, last: LastNorm | None, loss_scale: float, world_size: int) -> None:
        """Begin with no gradient. Without ``last`` gradients are not clipped."""
        self.loss_scale = loss_scale
        self._last, self._square = last, 0.0
        # the ranks' own norms are at most so much larger than that of the mean if they are alike
        self._usual = 0.0 if last is None else last.usual
        if last is not None and not math.isfinite(last.usual):
            self._usual = math.sqrt(world_size) * last.norm

    def coefficient(self, segments: Sequence[Segment], device: torch.device) -> float:
        """Return the clip coefficient of gradients that leave now; they carry the loss scale."""
        if self._last is None:
            return 1.0
        parts = [segment.part for segment in segments if segment.tensor is not None]
        self._square += float(sum_of_squares(parts, device)) / self.loss_scale**2
        own, norm = math.sqrt(self._square), self._last.norm
        if own > GROWTH * self._usual:
            norm = norm * own / self._usual if self._usual > 0 else own
        return min(1.0, self._last.max_norm / (norm + 1e-6))


@dataclass(frozen=True)
class _Early:
    """A bucket whose messages are back before the step.

    Attributes:
        exchanged: What the exchange has brought, and its errors, which are not written yet.
        coefficient: The clip coefficient of this rank's gradients in it.
        finite: Whether the average is finite; alike on all ranks.
    """

    exchanged: Exchanged[Average]
    coefficient: float
    finite: bool


@dataclass(frozen=True)
class SignSlot(Slot):
    """A bucket of a param group whose momentum leaves as signs. Nothing is written into the gradients.

    Attributes:
        plan: Plan of the coming step.
        state: The param group.
        feedback: The errors of the bucket, which are read only.
        prepare: Makes the message's values from gradients without loss scale.
        backward: The backward pass.
        keep: Takes what has arrived.
    """

    plan: StepPlan
    state: GroupState
    feedback: ErrorFeedback
    prepare: _Prepare
    backward: _Backward
    keep: Callable[[_Key, _Early], None]

    def form(self) -> str:
        """See the base class."""
        return f"signs, {self.feedback.format.scale_block} to a scale"

    def _exchange(self, segments: Sequence[Segment]) -> Task[Arrived]:
        coefficient = self.backward.coefficient(segments, self.state.device)
        grads: list[Tensor | None] = [None] * len(self.params)
        for segment in segments:
            grads[segment.index] = segment.tensor
        z = self.prepare(self.plan, self.state, self.bucket, grads)
        z = replace(z, beta=z.beta * coefficient / self.backward.loss_scale)
        errors = self.feedback.worker_error, self.feedback.server_error
        exchanged = yield from lazy_all_reduce(z, *errors, self.feedback.format, self.communicator)
        return _ArrivedSigns(self, exchanged, coefficient)


class _ArrivedSigns(Arrived):
    def __init__(self, slot: SignSlot, exchanged: Exchanged[Average], coefficient: float) -> None:
        self.not_finite = ~all_finite(exchanged.average)
        self._slot, self._exchanged, self._coefficient = slot, exchanged, coefficient

    def write(self, finite: bool) -> None:
        key = self._slot.state.number, self._slot.bucket.start
        self._slot.keep(key, _Early(self._exchanged, self._coefficient, finite))


class EarlyMessages:
    """The messages of one optimizer that leave during backward.

    A step takes a param group's messages only if all of them have left in the backward pass before it; else, and in
    every other step, they are made in ``step()``.

    Attributes:
        enabled: Whether messages may leave early at all; in one rank's run none do.
    """

    def __init__(
        self,
        enabled: bool,
        states: Sequence[GroupState],
        communicator: Communicator,
        follow: Callable[[], None],
        tensors: dict[str, Tensor],
        prepare: _Prepare,
    ) -> None:
        """Begin with no message.

        Args:
            enabled: See the class.
            states: The param groups, a list that may grow.
            communicator: All ranks.
            follow: Moves the state to where the parameters are.
            tensors: State that is alike on all ranks, for checkpoints.
            prepare: See :class:`SignSlot`.
        """
        self.enabled = enabled
        self._states, self._communicator, self._tensors = states, communicator, tensors
        self._prepare, self._follow = prepare, follow
        self._arrived: dict[_Key, _Early] = {}
        self._noted: LastNorm | None = None  # in the step under way
        self._plan: StepPlan  # of the coming step, which due() gets
        self._unclipped = False  # the last step of this process was not clipped
        self._loss_scale = self._assumed_scale = 1.0

    # -- backward -----------------------------------------------------------------------------------------------------

    def due(self, plan: StepPlan, before: StepPlan) -> bool:
        """Return whether messages leave in the coming backward pass; alike on all ranks.

        They do in all compressed steps but the first, before which replicas may still be made alike, if it is known by
        which norm to clip, or that gradients are not clipped.

        Args:
            plan: Plan of the coming step.
            before: Plan of the last step.
        """
        self._plan = plan
        sends = plan.agree and plan.synchronize and not plan.reduce_grads and before.stage is plan.stage
        if not self.enabled or not sends or self._communicator.world_size == 1:
            return False
        return self._unclipped if LATE_CLIP not in self._tensors else self._last_norm() is not None

    def slots(
        self, loss_scale: float | None = None, *, owner: int = 0, present: Collection[Tensor] | None = None
    ) -> list[Slot]:
        """Return the slots in which messages leave, and drop what an earlier backward pass has sent of these groups.

        Args:
            loss_scale: Factor that the gradients carry; None for the one that a gradient scaler has found before.
            owner: Number of the optimizer.
            present: The parameters whose gradients come in the round; None for all.
        """
        self._follow()
        self._assumed_scale = self._loss_scale if loss_scale is None else loss_scale
        here = None if present is None else set(present)
        backward = _Backward(self._last_norm(), self._assumed_scale, self._communicator.world_size)
        slots: list[Slot] = []
        for state in self._states:
            if not state.compressed or state.own_rank is not None:
                continue
            if here is not None and not here.issuperset(state.params):
                continue
            self._drop(state)
            for bucket, feedback in zip(state.layout.buckets, state.feedback, strict=True):
                place = bucket, state.params, state.communicator, owner
                slots.append(
                    SignSlot(*place, self._plan, state, feedback, self._prepare, backward, self._arrived.__setitem__)
                )
        return slots

    # -- the step -----------------------------------------------------------------------------------------------------

    def left(self, gradients: Sequence[_Grads]) -> frozenset[int]:
        """Return the ids of the gradients, one list per param group, that are in messages already.

        What has arrived of a param group without the rest of its buckets is dropped.
        """
        found: set[int] = set()
        for state in self._states if self._arrived else ():
            if all((state.number, bucket.start) in self._arrived for bucket in state.layout.buckets):
                found |= {id(grad) for grad in gradients[state.number] if grad is not None} if gradients else set()
            else:
                self._drop(state)
        return frozenset(found)

    @property
    def not_finite(self) -> bool:
        """True if an average that has arrived is not finite; alike on all ranks."""
        return not all(early.finite for early in self._arrived.values())

    @property
    def signature(self) -> list[_Key]:
        """The buckets whose messages have arrived, for ranks to compare."""
        return sorted(self._arrived)

    def average(self, state: GroupState, bucket: Bucket, z: Combination, feedback: ErrorFeedback) -> Task[Average]:
        """Return the compressed mean of a bucket, and write its errors: of messages that have left, or that leave now.

        Args:
            state: The param group.
            bucket: The bucket.
            z: What this rank wants to send, by its gradients as they are now. If they were changed since the message
                left, the error takes up the difference; in two levels the difference is lost.
            feedback: The errors of this bucket, updated in place.
        """
        early = self._arrived.pop((state.number, bucket.start), None)
        if early is None:
            return (yield from compressed_all_reduce(z, feedback, state.communicator))
        sent = replace(z, beta=z.beta * early.coefficient)
        early.exchanged.renewed(sent, feedback.worker_error, feedback.server_error).commit()
        return early.exchanged.average

    def note_norm(self, norm: float, max_norm: float, usual: float, *, whole: bool) -> None:
        """Take up what clipping finds in the step under way; the norm must be that of the ``whole`` gradient.

        Args:
            norm: See :class:`LastNorm`.
            max_norm: See :class:`LastNorm`.
            usual: See :class:`LastNorm`.
            whole: Whether all parameters of the optimizer were clipped together. Alike on all ranks.
        """
        if self._noted is None:
            self._noted = LastNorm(norm if whole else math.nan, max_norm, usual)
        else:  # clipped twice: by the smaller norm
            first = self._noted.norm if whole else math.nan
            self._noted = LastNorm(first, min(self._noted.max_norm, max_norm), self._noted.usual)

    def note_loss_scale(self, scale: float) -> None:
        """Take over the factor that the gradients of the step under way carried, as a gradient scaler knows it.

        Messages that have left under another one are dropped: they leave once more, in the step.
        """
        if scale != self._assumed_scale:
            self.drop()
        self._loss_scale = self._assumed_scale = scale

    def drop(self) -> None:
        """Drop what has arrived; errors are as before."""
        self._arrived.clear()

    def _drop(self, state: GroupState) -> None:
        for key in [key for key in self._arrived if key[0] == state.number]:
            del self._arrived[key]

    def end_step(self, *, taken: bool) -> None:
        """Close a step: keep the norm of one that was taken, and drop the rest."""
        if taken and self.enabled and self._noted is not None:
            numbers = [*self._noted, self._loss_scale]
            self._tensors[LATE_CLIP] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        elif taken:
            self._tensors.pop(LATE_CLIP, None)
        self._unclipped = self._noted is None if taken else self._unclipped
        self._noted = None
        self.drop()

    def state_loaded(self) -> None:
        """Drop everything that is not in the state that was loaded."""
        self.drop()
        self._noted, self._unclipped = None, False
        if LATE_CLIP in self._tensors:
            self._loss_scale = float(self._tensors[LATE_CLIP][3])

    def _last_norm(self) -> LastNorm | None:
        """Return what the last clipping has found; None if gradients are not clipped, or by no known norm."""
        if LATE_CLIP not in self._tensors:
            return None
        last = LastNorm(*self._tensors[LATE_CLIP][:3].tolist())
        return last if math.isfinite(last.norm) and last.max_norm > 0 else None


def check_late_clip(tensor: Tensor) -> None:
    """Check the last norm of a checkpoint.

    Raises:
        ValueError: If no run could have saved it.
    """
    if tensor.dtype != torch.float64 or tensor.shape != (4,):
        raise ValueError(f"{LATE_CLIP!r} must be float64 [4], got {tensor.dtype} {list(tensor.shape)}")
