"""What travels: slices of gradients to their owners, and slices of parameters back to everybody."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator, Handle
from hf_compressopt.zero.partition import Slice

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Precision:
    """How gradients are scaled and rounded on their way; see ZeroOptimizer for the options behind it.

    Attributes:
        sent: dtype on the wire; None is the parameter's.
        kept: dtype of the averages; None is the parameter's.
        before: Gradients are multiplied with this before they leave; None is 1 / world size.
        after: And their sum, multiplied with 1 / world size, with this; None is no scaling at all.
    """

    sent: torch.dtype | None = None
    kept: torch.dtype | None = None
    before: float | None = None
    after: float | None = None


class Window:
    """Messages under way, completed in order, and never more than ``limit`` bytes of them.

    Attributes:
        nbytes: Bytes under way.
    """

    def __init__(self, limit: int) -> None:
        """Start with nothing under way."""
        self.limit = limit
        self.nbytes = 0
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()

    def room_for(self, nbytes: int) -> None:
        """Complete the oldest messages until ``nbytes`` more fit, or none is left."""
        while self._queue and self.nbytes + nbytes > self.limit:
            self._complete()

    def add(self, nbytes: int, complete: Callable[[], None]) -> None:
        """Take note of a message under way, and of what there is to do when it has arrived."""
        self._queue.append((nbytes, complete))
        self.nbytes += nbytes

    def drain(self) -> None:
        """Complete all messages."""
        while self._queue:
            self._complete()

    def forget(self) -> None:
        """Let go of messages that will never arrive."""
        self._queue.clear()
        self.nbytes = 0

    def _complete(self) -> None:
        nbytes, complete = self._queue.popleft()
        self.nbytes -= nbytes
        complete()


def pack(buffer: Tensor, cut: Slice, param: int, values: Tensor, scale: float | None, *, add: bool) -> None:
    """Put a parameter's gradient where it belongs in a slice.

    Args:
        buffer: [world_size * part_numel], the slice.
        cut: Its layout.
        param: The parameter.
        values: Its gradient, any shape.
        scale: What the gradient is multiplied with; None is 1.
        add: Whether to add to what is there.
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

    The sum is taken by the owner, in rank order, in float32: neither the backend nor the number of messages has a say
    in its bits. An all-to-all moves what a reduce-scatter should; gloo's own moves twice that.

    Args:
        buffer: [world_size * part_numel], this rank's gradients, scaled.
        cut: The layout of the slice.
        communicator: The ranks.
        precision: How the sum is scaled.
        kept: dtype of the average.

    Returns:
        The handle, None where there is one rank only; and what makes the average [part_numel] once it was waited for.
    """
    world_size = communicator.world_size
    scale = None if precision.after is None else precision.after / world_size
    if world_size == 1:
        alone = buffer if scale is None else buffer * scale
        return None, lambda: alone.to(kept)
    received = torch.empty_like(buffer)
    splits = [cut.part_numel] * world_size
    handle = communicator.all_to_all(received, buffer, output_splits=splits, input_splits=splits)

    def average() -> Tensor:
        messages = received.view(world_size, cut.part_numel)
        wide = messages if messages.dtype in (torch.float32, torch.float64) else messages.float()
        total = wide[0] + wide[1]
        for message in wide[2:]:
            total += message
        return (total if scale is None else total.mul_(scale)).to(kept)

    return handle, average


def gather_parameters(
    params: Sequence[Tensor], cut: Slice, communicator: Communicator, window: Window, after: Callable[[], None]
) -> None:
    """Start giving everybody the parameters' elements that this rank has updated; done once ``window`` is drained.

    Args:
        params: All parameters, by their numbers in the layout; contiguous or not.
        cut: The layout of the slice.
        communicator: The ranks that share it.
        window: Where the message is completed.
        after: Called when the slice has arrived.
    """
    rank = communicator.rank
    example = params[next(iter(cut.places))]
    nbytes = cut.numel * example.element_size()
    window.room_for(nbytes)
    part = torch.empty(cut.part_numel, dtype=example.dtype, device=example.device)  # padding is of no use to anybody
    for span in cut.parts[rank]:
        part[span.offset : span.offset + span.numel] = params[span.param].detach().reshape(-1)[span.start : span.stop]
    gathered = part.new_empty(cut.numel)
    handle = communicator.all_gather(gathered, part)

    def arrived(_keep: Tensor = part) -> None:
        handle.wait()
        for owner, spans in enumerate(cut.parts):
            for span in spans if owner != rank else ():
                begin = owner * cut.part_numel + span.offset
                write_span(params[span.param], span.start, span.stop, gathered[begin : begin + span.numel])
        after()

    window.add(nbytes, arrived)


@torch.no_grad()
def write_span(param: Tensor, start: int, stop: int, values: Tensor) -> None:
    """Write elements [start, stop) of the flattened parameter, contiguous or not, rounded to its dtype."""
    if param.is_contiguous():
        param.detach().view(-1)[start:stop] = values
    else:
        flat = param.detach().reshape(-1)  # a copy
        flat[start:stop] = values
        param.copy_(flat.view(param.shape))


def in_host_memory(tensor: Tensor) -> Tensor:
    """A copy in page-locked host memory."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
