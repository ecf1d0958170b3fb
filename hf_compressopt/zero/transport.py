"""The messages of ZeRO: slices of gradients to their owners, and slices of parameters back to all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_compressopt.collectives import scattering
from hf_compressopt.collectives.communicator import Communicator, Handle
from hf_compressopt.zero.parts import Slice, write_span


@dataclass(frozen=True)
class Precision:
    """The scaling and rounding of gradients.

    Attributes:
        sent: dtype on the wire; None is the parameter's.
        kept: dtype of the averages; None is the parameter's.
        before: Factor of gradients before they are sent. None is 1 / world size if ``after`` is None, and else 1.
        after: Factor of the sum of the gradients, beside 1 / world size; None leaves the sum as it is.
    """

    sent: torch.dtype | None = None
    kept: torch.dtype | None = None
    before: float | None = None
    after: float | None = None


class Window:
    """A queue of the messages under way, completed in order, of at most ``limit`` bytes in all.

    Attributes:
        nbytes: Bytes under way.
    """

    def __init__(self, limit: int) -> None:
        """Start with no message."""
        self.limit = limit
        self.nbytes = 0
        self._queue: deque[tuple[int, Callable[[], None], Handle | None]] = deque()

    def room_for(self, nbytes: int) -> None:
        """Complete the oldest messages until ``nbytes`` more fit or none is left."""
        while self._queue and self.nbytes + nbytes > self.limit:
            self._complete()

    def add(self, nbytes: int, complete: Callable[[], None], handle: Handle | None) -> None:
        """Add a message, and let earlier ones go on to their second collective, if they have one.

        Args:
            nbytes: Its bytes.
            complete: Waits for it and uses it.
            handle: The message; None if there is only one rank.
        """
        self._advance()
        self._queue.append((nbytes, complete, handle))
        self.nbytes += nbytes

    def drain(self) -> None:
        """Complete all messages."""
        self._advance()
        while self._queue:
            self._complete()

    def _advance(self) -> None:
        for _, _, handle in self._queue:
            if handle is not None:
                handle.advance()

    def _complete(self) -> None:
        nbytes, complete, _ = self._queue.popleft()
        self.nbytes -= nbytes
        complete()


def pack(buffer: Tensor, cut: Slice, param: int, values: Tensor, scale: float | None, *, add: bool) -> None:
    """Copy a parameter's gradient to its places in a slice.

    Args:
        buffer: [world_size * part_numel], the slice.
        cut: Its layout.
        param: The parameter.
        values: Its gradient, any shape.
        scale: Factor of the gradient; None is 1.
        add: Whether to add to the values in the slice.
    """
    flat = values.detach().reshape(-1)
    for begin, span in cut.places[param]:
        place, part = buffer[begin : begin + span.numel], flat[span.start : span.stop]
        if add:
            place.add_(part.to(place.dtype) if scale is None else part.to(place.dtype) * scale)
        elif scale is None:
            place.copy_(part)
        elif part.dtype == place.dtype:
            torch.mul(part, scale, out=place)
        else:
            place.copy_(part).mul_(scale)


def reduce_scatter(
    buffer: Tensor, cut: Slice, communicator: Communicator, precision: Precision, kept: torch.dtype
) -> tuple[Handle | None, Callable[[], Tensor]]:
    """Start sending every rank its part of a slice.

    The owner sums in float32, in the order of :mod:`hf_compressopt.collectives.scattering`, so that the bits depend
    neither on the backend nor on the number of messages. An all-to-all moves as much as a reduce-scatter should; gloo's
    own reduce-scatter moves twice that.

    Args:
        buffer: [world_size * part_numel], this rank's gradients, scaled.
        cut: The layout of the slice.
        communicator: The ranks.
        precision: The scaling of the sum.
        kept: dtype of the average.

    Returns:
        The handle, or None if there is only one rank; and a function that returns the average [part_numel] after the
        handle was waited for.
    """
    world_size = communicator.world_size
    scale = None if precision.after is None else precision.after / world_size
    if world_size == 1:
        alone = buffer if scale is None else buffer * scale
        return None, lambda: alone.to(kept)
    handle, total = scattering.reduce_scatter(buffer, communicator)

    def average() -> Tensor:
        summed = total()
        return (summed if scale is None else summed.mul_(scale)).to(kept)

    return handle, average


def gather_parameters(params: Sequence[Tensor], cut: Slice, communicator: Communicator, window: Window) -> None:
    """Start giving all ranks the elements of the parameters that this rank has updated.

    They have arrived when ``window`` is drained.

    Args:
        params: All parameters, by their numbers in the layout; contiguous or not.
        cut: The layout of the slice.
        communicator: The ranks that share it.
        window: The queue that completes the message.
    """
    rank, place_of = communicator.rank, communicator.topology.chunk_of
    example = params[next(iter(cut.places))]
    nbytes = cut.numel * example.element_size()
    window.room_for(nbytes)
    gathered = torch.empty(cut.numel, dtype=example.dtype, device=example.device)  # padding is sent as it is
    part = gathered[place_of(rank) * cut.part_numel :][: cut.part_numel]
    for span in cut.parts[rank]:
        part[span.offset : span.offset + span.numel] = params[span.index].detach().reshape(-1)[span.start : span.stop]
    handle = scattering.all_gather(gathered, part, communicator)

    def arrived() -> None:
        handle.wait()
        for owner, spans in enumerate(cut.parts):
            for span in spans if owner != rank else ():
                begin = place_of(owner) * cut.part_numel + span.offset
                write_span(params[span.index], span.start, span.stop, gathered[begin : begin + span.numel])

    window.add(nbytes, arrived, handle)
