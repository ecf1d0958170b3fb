"""A bucket whose message leaves during backward, and the clip coefficient that it carries; see ``early_messages``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_compressopt.collectives.exchange import ErrorFeedback, Exchanged, lazy_all_reduce
from hf_compressopt.collectives.phases import Task, WorkerErrors
from hf_compressopt.collectives.settled_exchange import PendingErrors
from hf_compressopt.collectives.slots import Arrived, Slot
from hf_compressopt.flat import Bucket
from hf_compressopt.kernels import Average, Combination, Errors, Segment, all_finite, sum_of_squares
from hf_compressopt.optim.group import GroupState
from hf_compressopt.schedules import StepPlan

#: How much larger than usual a rank's gradient may grow before the rank clips its messages by more than was predicted.
GROWTH = 2.0

Grads = Sequence["Tensor | None"]
Prepare = Callable[[StepPlan, GroupState, Bucket, Grads], Combination]
Key = tuple[int, int]  # number of the param group, first element of the bucket


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


class Backward:
    """One backward pass on one rank: the coefficient of the gradients that leave in it.

    Attributes:
        loss_scale: Factor that the gradients carry.
    """

    def __init__(self, last: LastNorm | None, loss_scale: float, world_size: int) -> None:
        """Begin with no gradient. Without ``last`` gradients are not clipped."""
        self.loss_scale = loss_scale
        self._last, self._squares = last, list[float]()
        # the ranks' own norms are at most so much larger than that of the mean if they are alike
        self._usual = 0.0 if last is None else last.usual
        if last is not None and not math.isfinite(last.usual):
            self._usual = math.sqrt(world_size) * last.norm

    @property
    def square(self) -> float:
        """The sum of squares of gradients that have left, without loss scale, if they are clipped; in any order."""
        return math.fsum(self._squares)

    def coefficient(self, segments: Sequence[Segment], device: torch.device) -> float:
        """Return the clip coefficient of gradients that leave now; they carry the loss scale."""
        if self._last is None:
            return 1.0
        parts = [segment.part for segment in segments if segment.tensor is not None]
        self._squares.append(float(sum_of_squares(parts, device)) / self.loss_scale**2)
        own, norm = math.sqrt(sum(self._squares)), self._last.norm
        if own > GROWTH * self._usual:
            norm = norm * own / self._usual if self._usual > 0 else own
        return min(1.0, self._last.max_norm / (norm + 1e-6))


class Returned(Protocol):
    """A bucket that is back, whose errors are not written yet."""

    @property
    def average(self) -> Average:
        """The compressed mean."""
        ...

    def renewed(self, z: Combination, worker_error: WorkerErrors, server_error: Errors) -> Returned:
        """Return the same for errors that may lie elsewhere now, and for values as they are now."""
        ...

    def commit(self) -> None:
        """Write the errors of the step."""
        ...


@dataclass(frozen=True)
class Settled:
    """A bucket that is back, and whose gradients are freed: its errors are known.

    Attributes:
        average: The compressed mean.
        errors: The new errors.
        places: Where they belong.
    """

    average: Average
    errors: PendingErrors
    places: tuple[WorkerErrors, Errors] | None = None

    def renewed(self, z: Combination, worker_error: WorkerErrors, server_error: Errors) -> Settled:
        """See :class:`Returned`; the values stay those that were sent."""
        return replace(self, places=(worker_error, server_error))

    def commit(self) -> None:
        """Write the errors of the step."""
        if self.places is not None:
            self.errors.commit(*self.places)


@dataclass(frozen=True)
class Early:
    """A bucket whose messages are back before the step.

    Attributes:
        exchanged: What the exchange has brought, and its errors, which are not written yet.
        coefficient: The clip coefficient of this rank's gradients in it.
        finite: Whether the average is finite; alike on all ranks.
    """

    exchanged: Returned
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
        keep: Takes note of a message that leaves, with None, and of one that has arrived.
        later: Takes what awaits the messages, in the step.
    """

    waits_in_step: ClassVar[bool] = True
    plan: StepPlan
    state: GroupState
    feedback: ErrorFeedback
    prepare: Prepare
    backward: Backward
    keep: Callable[[Key, Early | None], None]
    later: Callable[[Callable[[], object]], None]

    @property
    def key(self) -> Key:
        """The number of the param group, and the first element of the bucket."""
        return self.state.number, self.bucket.start

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
        self.keep(self.key, None)
        exchanged = yield from lazy_all_reduce(z, *errors, self.feedback.format, self.communicator)
        return _ArrivedSigns(self, exchanged, coefficient)

    def hand_over(self, finish: Callable[[], object]) -> None:
        """See the base class."""
        self.later(finish)


class _ArrivedSigns(Arrived):
    def __init__(self, slot: SignSlot, exchanged: Exchanged[Average], coefficient: float) -> None:
        self.not_finite = ~all_finite(exchanged.average)
        self._slot, self._exchanged, self._coefficient = slot, exchanged, coefficient

    def write(self, finite: bool) -> None:
        self._slot.keep(self._slot.key, Early(self._exchanged, self._coefficient, finite))
