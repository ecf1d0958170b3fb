"""The gradients of one slice, from the first that arrives until its owners have the average."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import Span
from hf_compressopt.kernels import IntegerFormat
from hf_compressopt.zero.feedback import SliceErrors
from hf_compressopt.zero.parts import Slice


@dataclass
class SliceGradients:
    """The gradients of one slice on their way to their owners.

    Attributes:
        cut: The layout of the slice.
        communicator: The ranks that share it.
        sent_dtype: dtype on the wire.
        kept_dtype: dtype of the average.
        device: Device of the gradients.
        offload: Whether averages are moved to host memory.
        param_form: Form of the messages of the parameters; None is full precision.
        errors: The worker errors, and the form of the messages, of compressed gradients; None is full precision.
        average: [part_numel] of kept_dtype, this rank's part summed over the passes; None before the first.
        buffer: [cut.numel] of sent_dtype, to be sent.
        filled: Parameters whose gradients are in the buffer.
        awaited: Parameters whose gradients have not arrived in this pass.
        sent: Whether it was sent in this pass.
    """

    cut: Slice
    communicator: Communicator
    sent_dtype: torch.dtype
    kept_dtype: torch.dtype
    device: torch.device
    offload: bool = False
    param_form: IntegerFormat | None = None
    errors: SliceErrors | None = None
    average: Tensor | None = None
    buffer: Tensor | None = None
    filled: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    sent: bool = False

    def begin(self) -> None:
        """Prepare for a pass."""
        self.buffer, self.sent = None, False
        self.filled, self.awaited = set(), set(self.cut.places)

    def room(self) -> Tensor:
        """Return the buffer; it is allocated when the first gradient arrives."""
        if self.buffer is None:
            self.buffer = torch.empty(self.cut.numel, dtype=self.sent_dtype, device=self.device)
        return self.buffer

    def close(self) -> Tensor:
        """Return the buffer as it is sent, with zeros for padding and for gradients that have not arrived."""
        buffer, self.buffer, self.sent = self.room(), None, True
        for start, stop in self.cut.gaps:
            buffer[start:stop] = 0
        for number, rows in self.cut.places.items():
            for begin, span in rows if number not in self.filled else ():
                buffer[begin : begin + span.numel] = 0
        return buffer

    def average_of(self, span: Span) -> Tensor | None:
        """Return the average of a span of this rank's part, sharing memory; None before the first pass."""
        return None if self.average is None else self.average[span.offset : span.offset + span.numel]

    def settable_average_of(self, span: Span) -> Tensor:
        """Return the average of a span, sharing memory; it begins as zeros if there is none."""
        if self.average is None:
            self.average = torch.zeros(self.cut.part_numel, dtype=self.kept_dtype, device=self.device)
        return self.average[span.offset : span.offset + span.numel]

    @property
    def error_places(self) -> dict[int, list[tuple[int, Span]]]:
        """The spans of each parameter that have errors on this rank, with their places in the errors."""
        place = self.communicator.topology
        return self.cut.places_in(range(place.place, place.world_size, place.node_size))

    @property
    def forms(self) -> tuple[IntegerFormat | None, IntegerFormat | None]:
        """Forms of the messages of gradients and of parameters; None is full precision."""
        return None if self.errors is None else self.errors.form, self.param_form

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return self.cut.numel * self.sent_dtype.itemsize
