"""What of the gradients of one step travels together: in messages of integers with error feedback, or as it is."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import Exchanged, lazy_all_reduce
from hf_compressopt.collectives.phases import Task, WorkerErrors
from hf_compressopt.collectives.settled_exchange import PendingErrors, settled_all_reduce
from hf_compressopt.flat import Bucket, FlatLayout
from hf_compressopt.kernels import Combination, Errors, IntegerAverage, IntegerFormat, Segment, any_nan

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
