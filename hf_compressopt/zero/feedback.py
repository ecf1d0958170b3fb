"""The worker errors of one slice of gradients, from one step that is taken to the next."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_compressopt.kernels import CompactErrors, IntegerFormat, chunk_messages, scales_of
from hf_compressopt.kernels.errors import ERROR_BITS


class SliceErrors:
    """The errors of this rank's messages of a slice, in 8 bits, in the unit of a gradient without loss scale.

    The errors of the passes since the last step lie beside those of that step, until the step is taken or dropped: a
    step is dropped if a gradient is not finite on any rank, and its errors with it. Each lot takes 1.02 bytes per
    element.

    Attributes:
        form: The form of the messages.
        kept: The errors of the last step that was taken.
    """

    def __init__(self, form: IntegerFormat, numel: int, world_size: int, device: torch.device) -> None:
        """Start with errors of 0 for ``numel`` elements of a slice, which are sent to ``world_size`` ranks."""
        self.form, self.kept = form, CompactErrors.zeros(numel, world_size, device)
        self._pending: CompactErrors | None = None

    @property
    def latest(self) -> CompactErrors:
        """The errors that the next message takes up."""
        return self.kept if self._pending is None else self._pending

    def pending(self) -> CompactErrors:
        """Return the errors since the last step, to be written; they are :attr:`latest` if there are any."""
        if self._pending is None:
            self._pending = replace(self.kept, messages=torch.empty_like(self.kept.messages))
        return self._pending

    def keep(self) -> None:
        """Make the errors since the last step those of a step that was taken."""
        self.kept, self._pending = self.latest, None

    def drop(self) -> None:
        """Drop the errors since the last step."""
        self._pending = None

    def rescale(self, factor: float) -> None:
        """Multiply the errors since the last step, whose unit turned out to be another one."""
        if self._pending is not None:
            errors, bits = self._pending, ERROR_BITS
            for start, stop, message in chunk_messages(errors.messages, errors.count, errors.world_size, bits):
                scales_of(message, stop - start, bits).mul_(factor)

    def to(self, device: torch.device) -> None:
        """Move the errors."""
        if device != self.kept.device:
            self.kept = replace(self.kept, messages=self.kept.messages.to(device))
            if self._pending is not None:
                self._pending = replace(self._pending, messages=self._pending.messages.to(device))

    def take(self, messages: Tensor) -> None:
        """Take over the bytes of errors that :attr:`kept` had, and drop those since.

        Raises:
            ValueError: If they are of another number of elements, ranks or nodes.
        """
        self.check(messages)
        self.kept.messages.copy_(messages)
        self._pending = None

    def check(self, messages: Tensor) -> None:
        """Check that bytes are errors of this slice.

        Raises:
            ValueError: If they are of another number of elements, ranks or nodes.
        """
        wanted = self.kept.messages
        if messages.shape != wanted.shape or messages.dtype != wanted.dtype:
            raise ValueError(
                f"worker errors of {messages.dtype} {list(messages.shape)} do not fit a slice whose errors are uint8 "
                f"{list(wanted.shape)}: were they saved with the same bucket size, number of ranks and topology?"
            )

    def copy_from(self, other: SliceErrors) -> None:
        """Copy the errors of a slice of the same layout."""
        self.take(other.kept.messages)
        if other._pending is not None:
            self.pending().messages.copy_(other._pending.messages)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(errors.messages.numel() for errors in (self.kept, self._pending) if errors is not None)
