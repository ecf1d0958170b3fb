"""The exchange of the gradients of one step, while backward makes them known.

The gradients are divided into slots, each of which travels on its own: in messages of integers with error feedback, or
as they are. Slots leave in a fixed order, alike on all ranks, each as soon as all its gradients are there.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import Exchanged, Pipeline, lazy_all_reduce
from hf_compressopt.collectives.phases import Task, WorkerErrors
from hf_compressopt.collectives.settled_exchange import PendingErrors, settled_all_reduce
from hf_compressopt.flat import Bucket, FlatLayout
from hf_compressopt.kernels import Combination, Errors, IntegerAverage, Segment
from hf_compressopt.kernels.integers import IntegerFormat, any_nan

_Grads = Mapping[Tensor, Tensor | None]


class Arrived(ABC):
    """The gradients of a slot, back from their exchange.

    Attributes:
        not_finite: [] bool, whether one of them is not finite; alike on all ranks.
    """

    not_finite: Tensor

    @abstractmethod
    def write(self, finite: bool) -> None:
        """Write the average into the gradients, and if the step is ``finite`` its errors into the buffers."""


@dataclass(frozen=True)
class Slot(ABC):
    """Gradients that travel together.

    Attributes:
        bucket: Their elements, as runs of parameters.
        params: The parameters that the indices in ``bucket`` stand for.
        communicator: The ranks.
        owner: Number of the optimizer that takes the gradients. All gradients of an owner are dropped together.
        waits_in_step: Whether nothing is written into the gradients, so that the step may await the average.
    """

    waits_in_step: ClassVar[bool] = False
    bucket: Bucket
    params: Sequence[Tensor]
    communicator: Communicator
    owner: int

    def members(self) -> Iterator[Tensor]:
        """Iterate over the parameters in the slot."""
        return (self.params[piece.index] for piece in self.bucket.pieces)

    @abstractmethod
    def form(self) -> str:
        """Name the form of the messages."""

    def start(self, grads: _Grads, done: Callable[[Arrived], None]) -> Task[None]:
        """Average the slot's gradients, and hand the average over. ``grads`` has every parameter of the slot."""
        segments = [
            Segment(grads[self.params[piece.index]], piece.start, piece.numel, piece.index)
            for piece in self.bucket.pieces
        ]
        done((yield from self._exchange(segments)))

    def hand_over(self, finish: Callable[[], object]) -> None:
        """Take what the owner calls in its step to await the average, if the slot ``waits_in_step``."""
        raise NotImplementedError("abstract")

    @abstractmethod
    def _exchange(self, segments: Sequence[Segment]) -> Task[Arrived]:
        """Average the gradients over the ranks."""

    def _scaled(self, segments: Sequence[Segment], factor: float) -> Combination:
        return Combination(self.bucket.numel, self.communicator.device, grads=segments, beta=factor)


@dataclass(frozen=True)
class IntegerSlot(Slot):
    """Gradients that travel as integers with error feedback.

    Attributes:
        errors: The worker error and the server error, as :class:`~hf_compressopt.collectives.exchange.ErrorFeedback`
            has them, in the unit of a gradient without loss scale.
        bits: Bits per element, 4 or 8.
        loss_scale: Factor that the gradients carry.
        new_errors: Where the new errors are written as soon as they are known, for an owner that takes them if all its
            gradients are finite. The average then takes the gradients' place at once. None to change ``errors`` when
            all gradients are back.
    """

    errors: tuple[WorkerErrors, Errors]
    bits: int
    loss_scale: float = 1.0
    new_errors: tuple[WorkerErrors, Errors] | None = None

    def form(self) -> str:
        """See the base class."""
        return f"int{self.bits}"

    def _exchange(self, segments: Sequence[Segment]) -> Task[Arrived]:
        z, form = self._scaled(segments, 1.0 / self.loss_scale), IntegerFormat(self.bits)
        if self.new_errors is not None:
            pending = PendingErrors.at(*self.new_errors)
            average, _ = yield from settled_all_reduce(z, *self.errors, form, self.communicator, pending)
            form.add_(average, segments, scale=self.loss_scale)
            return _Written(any_nan(average))
        exchanged = yield from lazy_all_reduce(z, *self.errors, form, self.communicator)
        return _ArrivedIntegers(exchanged, segments, self.loss_scale)


class _ArrivedIntegers(Arrived):
    def __init__(self, exchanged: Exchanged[IntegerAverage], outputs: Sequence[Segment], loss_scale: float) -> None:
        self.not_finite = any_nan(exchanged.average)
        self._exchanged, self._outputs, self._loss_scale = exchanged, outputs, loss_scale

    def write(self, finite: bool) -> None:
        write = self._exchanged.commit if finite else self._exchanged.discard
        write(self._outputs, self._loss_scale)


@dataclass(frozen=True)
class _Written(Arrived):
    not_finite: Tensor

    def write(self, finite: bool) -> None:
        """Leave everything as it is."""


@dataclass(frozen=True)
class PlainSlot(Slot):
    """Gradients that travel by an all-reduce, without error feedback.

    Attributes:
        dtype: Their dtype on the wire.
    """

    dtype: torch.dtype

    def form(self) -> str:
        """See the base class."""
        return str(self.dtype)

    def _exchange(self, segments: Sequence[Segment]) -> Task[Arrived]:
        values = torch.empty(self.bucket.numel, dtype=torch.float32, device=self.communicator.device)
        # times 1/W first, as DDP does
        kernels.on(values).combine_(self._scaled(segments, 1.0 / self.communicator.world_size), values)
        values = values.to(self.dtype)
        handle = self.communicator.all_reduce(values)
        yield
        handle.wait()
        return _ArrivedPlain(values, segments)


class _ArrivedPlain(Arrived):
    def __init__(self, values: Tensor, outputs: Sequence[Segment]) -> None:
        self.not_finite = ~values.isfinite().all()
        self._values, self._outputs = values, outputs

    def write(self, finite: bool) -> None:
        parts = torch.split(self._values, [segment.numel for segment in self._outputs])
        for segment, part in zip(self._outputs, parts, strict=True):
            if segment.tensor is not None:
                segment.part.copy_(part)


def plain_slots(
    params: Sequence[Tensor],
    communicator: Communicator,
    owner: int,
    *,
    bucket_numel: int = 25 * 2**18,
    dtype: torch.dtype | None = None,
) -> list[Slot]:
    """Return slots for gradients without error feedback.

    Args:
        params: The parameters.
        communicator: The ranks.
        owner: See :class:`Slot`.
        bucket_numel: Elements that travel together.
        dtype: Dtype on the wire; None takes that of the parameters.
    """
    slots: list[Slot] = []
    for own, members in groupby(params, key=lambda param: param.dtype):
        alike = list(members)
        layout = FlatLayout.build([param.numel() for param in alike], bucket_numel)
        slots += [PlainSlot(bucket, alike, communicator, owner, dtype or own) for bucket in layout.buckets]
    return slots


def require_same_slots(slots: Sequence[Slot], communicator: Communicator, checked: str) -> str:
    """Check that all ranks have the same slots, if they are others than those that were checked before.

    Args:
        slots: The slots. All ranks call.
        communicator: The ranks.
        checked: What the last call returned; "" if there was none.

    Returns:
        What has been checked, for the next call.

    Raises:
        ValueError: If the ranks differ, on all ranks.
    """
    rows = [(slot.form(), slot.owner, [(p.index, p.start, p.stop) for p in slot.bucket.pieces]) for slot in slots]
    mine = repr(rows)
    if mine != checked:
        forms = sorted({slot.form() for slot in slots})
        communicator.require_equal(
            "warmup_bits, bucket_cap_mb, or the parameters whose gradients they average",
            [forms, len(slots), zlib.crc32(mine.encode())],
        )
    return mine


class GradientRound:
    """The exchange of the gradients of one step."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Start with no gradient. ``slots`` leave in this order, which must be alike on all ranks."""
        self._slots, self._to_leave = tuple(slots), deque(slots)
        self._params = dict.fromkeys(param for slot in slots for param in slot.members())
        self._grads: dict[Tensor, Tensor | None] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._pipeline = Pipeline()
        self._averages: list[tuple[int, Arrived]] = []

    def add(self, param: Tensor, grad: Tensor | None) -> None:
        """Hand over the gradient of a parameter; :meth:`finish` overwrites it. One that is in no slot stays local."""
        if param not in self._params:
            return
        if grad is not None and not grad.is_contiguous():
            original, grad = grad, grad.contiguous()
            self._copies.append((original, grad))
        self._grads[param] = grad
        while self._to_leave and all(member in self._grads for member in self._to_leave[0].members()):
            self._leave(self._to_leave.popleft())

    def _leave(self, slot: Slot) -> None:
        self._pipeline.add(slot.start(self._grads, lambda average: self._averages.append((slot.owner, average))))

    def hand_over(self) -> bool:
        """Let what has not left leave, and let the owners call :meth:`finish` in their steps.

        Returns:
            Whether they will: False if a slot writes into the gradients, or if there is none.
        """
        if not self._slots or not all(slot.waits_in_step for slot in self._slots):
            return False
        self._leave_all()
        self._copies = []  # what is written into them is nothing
        for slot in self._slots:
            slot.hand_over(self.finish)
        return True

    def _leave_all(self) -> None:
        for param in self._params:
            if param not in self._grads:
                self.add(param, None)

    def finish(self) -> Collection[int]:
        """Exchange what has not left yet, and write the averages into the gradients. A second call does nothing.

        Returns:
            The owners with a gradient that is not finite; their errors stay as before the round.
        """
        self._leave_all()
        self._pipeline.drain()
        averages, self._averages = self._averages, []
        found = [average.not_finite for _, average in averages]
        flags = torch.stack(found).tolist() if found else []
        not_finite = {owner for (owner, _), flag in zip(averages, flags, strict=True) if flag}
        for owner, average in averages:
            average.write(owner not in not_finite)
        for original, copy in self._copies:
            original.copy_(copy)
        self._copies = []
        return not_finite


class BucketRounds:
    """Rounds that take their gradients from DistributedDataParallel's buckets.

    Messages leave as soon as their gradients are there, and travel while backward computes further ones. What is still
    on the way is awaited in the last bucket's call, or in the step if nothing is written into gradients. Nothing is
    ever started from a callback, so that all ranks start their collectives in one order.
    """

    def __init__(self) -> None:
        """Start with no bucket."""
        self._round: GradientRound | None = None
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def add(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        start: Callable[[], GradientRound],
        done: Callable[[Collection[int]], None] = lambda not_finite: None,
    ) -> torch.futures.Future[Tensor]:
        """Take a bucket.

        Args:
            bucket: The bucket.
            start: Makes the round, with the first bucket of a backward pass.
            done: Takes what :meth:`GradientRound.finish` returns, if it is called after the last bucket.

        Returns:
            The bucket's buffer, as DDP expects it: complete after the last bucket.

        Raises:
            RuntimeError: If the first bucket of the backward pass has not come.
        """
        buffer = bucket.buffer()
        future = _future_on(buffer.device)
        if bucket.index() == 0:
            self._round, self._futures = start(), []
        self._futures.append((future, buffer))
        current = self._round
        if current is None:
            raise RuntimeError(
                "a bucket came before the first one of its step: was the hook registered in a backward pass?"
            )
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            current.add(param, _in_order_of(param, grad))
        if bucket.is_last():
            self._round = None
            if not current.hand_over():
                done(current.finish())
            for waiting, gradients in self._futures:
                waiting.set_result(gradients)
            self._futures = []
        return future


def as_it_is(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future whose value is there: a buffer, for DDP hooks that leave it local."""
    future = _future_on(buffer.device)
    future.set_result(buffer)
    return future


def _future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def _in_order_of(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient as DDP stores it, by the strides of a dense parameter: DDP's own view ignores the strides."""
    if param.is_contiguous():
        return grad
    strides = torch.empty_like(param, device="meta").stride()
    return grad.as_strided(param.shape, strides) if strides == param.stride() else grad
