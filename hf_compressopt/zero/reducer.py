"""Gradients leave while backward runs: hooks fill slices, full slices are sent in one order that all ranks share.

A pass is one call of backward. In it every slice is sent once, by every rank, in the same order; at its end a flush
sends what is left, with zeros for parameters that had no gradient, so that ranks whose graphs differ do not wait for
each other. What comes late (a parameter whose gradient comes in several portions, as under reentrant checkpointing)
stays in p.grad and is sent when the ranks agree before the step that some rank has such gradients.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.zero.messages import Precision, Window, in_host_memory, pack, reduce_scatter
from hf_compressopt.zero.partition import Slice

logger = logging.getLogger(__name__)

#: All reducers of the process, and their numbers in the order in which they were made, which all ranks share.
_LIVING: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
_NUMBERS = count()
_NESTED = BackwardCFunction.apply.__code__  # the frame in which an autograd function of the user's calls backward


@dataclass
class SliceGradients:
    """The gradients of one slice on their way to their owners.

    Attributes:
        cut: The layout of the slice.
        communicator: The ranks that share it.
        sent_dtype: dtype on the wire.
        kept_dtype: dtype of the average.
        device: Where the gradients are.
        offload: Whether averages go to host memory.
        average: [part_numel] of kept_dtype, this rank's part summed over the passes; None before the first.
        buffer: [cut.numel] of sent_dtype, what is to be sent.
        filled: Parameters whose gradients are in the buffer.
        awaited: Parameters whose gradients have not come in this pass.
        sent: Whether it has left in this pass.
    """

    cut: Slice
    communicator: Communicator
    sent_dtype: torch.dtype
    kept_dtype: torch.dtype
    device: torch.device
    offload: bool = False
    average: Tensor | None = None
    buffer: Tensor | None = None
    filled: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    sent: bool = False

    def begin(self) -> None:
        """Be ready for a pass."""
        self.buffer, self.sent = None, False
        self.filled, self.awaited = set(), set(self.cut.places)

    def room(self) -> Tensor:
        """The buffer, allocated when the first gradient comes."""
        if self.buffer is None:
            self.buffer = torch.empty(self.cut.numel, dtype=self.sent_dtype, device=self.device)
        return self.buffer

    def close(self) -> Tensor:
        """The buffer as it is sent: zero where there is padding, or no gradient has come."""
        buffer, self.buffer, self.sent = self.room(), None, True
        for start, stop in self.cut.gaps:
            buffer[start:stop] = 0
        for number, rows in self.cut.places.items():
            for begin, span in rows if number not in self.filled else ():
                buffer[begin : begin + span.numel] = 0
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return self.cut.numel * self.sent_dtype.itemsize


class _GradientHook:
    """Tells a reducer, which it does not keep alive, that the gradient of a parameter is there."""

    def __init__(self, reducer: GradientReducer, number: int) -> None:
        self._reducer, self._number = weakref.ref(reducer), number

    def __call__(self, _: Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer._gradient_is_there(self._number)

    @property
    def reducer(self) -> GradientReducer | None:
        """The reducer, if it lives."""
        return self._reducer()


def reducers_of(params: Iterable[Tensor]) -> list[GradientReducer]:
    """The living reducers that take the gradients of any of these parameters."""
    found: dict[int, GradientReducer] = {}
    for param in params:
        for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            if isinstance(hook, _GradientHook) and (reducer := hook.reducer) is not None:
                found[id(reducer)] = reducer
    return list(found.values())


class GradientReducer:
    """Sends gradients to their owners and keeps this rank's averages.

    Of several reducers in a process the one that was made first sends while backward runs. The others send at its end,
    one after another: ranks whose graphs complete the parameters of two optimizers in another order send alike.

    Attributes:
        slices: All slices.
        present: For each parameter, whether this rank has met a gradient of it since the last :meth:`clear`.
        fault: What is wrong with a gradient of this rank's; to be raised on all ranks together.
        passes: Passes in which gradients were sent.
        arrival: The slices in the order in which they were complete in the first pass, as a hint for the order.
    """

    def __init__(
        self,
        communicator: Communicator,
        precision: Precision,
        window_bytes: int,
        *,
        overlap: bool,
        contiguous: bool,
    ) -> None:
        """See ZeroOptimizer for the options.

        Args:
            communicator: All ranks.
            precision: How gradients are scaled and rounded.
            window_bytes: The most bytes under way.
            overlap: Whether messages may be under way while backward goes on.
            contiguous: Whether a gradient moves to its slice at once, or when the slice is sent.
        """
        self.slices: list[SliceGradients] = []
        self.present: list[bool] = []
        self.fault: Exception | None = None
        self.passes = 0
        self.arrival: list[int] = []
        self.enabled = True
        self._communicator, self._checked = communicator, False
        self._precision, self._window = precision, Window(window_bytes)
        self._overlap, self._contiguous = overlap, contiguous
        self._params: list[Tensor] = []
        self._names: list[str] = []
        self._slices_of: list[list[int]] = []
        self._order: list[int] = []
        self._next = 0
        self._open = False
        self._outer_task: int | None = None
        self._nested_task: int | None = None
        self._announce: weakref.WeakMethod[Callable[[], Any]] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.detached = False
        self._begun = False
        self._number = next(_NUMBERS)
        self._world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        _LIVING.add(self)

    @property
    def bytes_under_way(self) -> int:
        """Bytes of the messages under way, both ways."""
        return self._window.nbytes

    def add(self, params: Sequence[Tensor], names: Sequence[str], slices: Sequence[SliceGradients]) -> None:
        """Take on parameters, whose numbers follow those that there are, and their slices, in the order of backward."""
        first = len(self._params)
        for param in params:
            number = len(self._params)
            hook = _GradientHook(self, number)
            self._params.append(param)
            self._names.append(names[number - first])
            self.present.append(False)
            self._slices_of.append([])
            self._hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        for gradients in slices:
            self._order.append(len(self.slices))
            for number in gradients.cut.places:
                self._slices_of[number].append(len(self.slices))
            gradients.begin()
            self.slices.append(gradients)
        self._checked = False

    def check_layout(self) -> None:
        """Before anything is sent: all ranks must have the same slices. All ranks call.

        Raises:
            ValueError: If they have not, on all ranks.
        """
        if not self._checked:
            layout = [(g.cut.part_numel, len(g.cut.parts), g.sent_dtype, g.kept_dtype) for g in self.slices]
            self._communicator.require_equal(
                "trainable parameters, their sizes or dtypes, or bucket size",
                [len(layout), crc32(repr(layout).encode())],
            )
            self._checked = True

    def detach(self) -> None:
        """Take the hooks off the parameters: gradients stay where autograd puts them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.detached = [], True
        _LIVING.discard(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate in p.grad; they are sent with those of the next pass outside."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def announce_passes(self, announce: Callable[[], Any]) -> None:
        """Have a method called before each pass, without keeping its object alive."""
        self._announce = weakref.WeakMethod(announce)

    def follow_parameters(self) -> None:
        """Go where the parameters are, if a model was moved after its optimizer was made."""
        for gradients in self.slices:
            gradients.device = self._params[next(iter(gradients.cut.places))].device
        if self._params:
            self._communicator.device = self._params[0].device

    @torch.no_grad()
    def empty_pass(self) -> None:
        """Take part in a pass of the others without gradients of this rank's own."""
        self._open = self._begun = True
        self.check_layout()
        self.flush()

    def use_order(self, order: Sequence[int]) -> None:
        """Send slices in this order from the next pass on; those that it leaves out come last. Alike on all ranks."""
        rest = [number for number in self._order if number not in set(order)]
        self._order = [*order, *rest]

    # -- during backward ----------------------------------------------------------------------------------------------

    def _gradient_is_there(self, number: int) -> None:
        if not self.enabled:
            return
        self._enter_pass()
        self._take(number)
        if self._begun:
            self._send_full_slices()

    def _enter_pass(self) -> None:
        task = torch._C._current_graph_task_id()
        if task in (self._outer_task, self._nested_task):
            return
        if not self._open:
            self.follow_parameters()
            if not self._elders():
                self._begin()
        if _inside_another_backward():
            self._nested_task = task
        else:
            if self._outer_task is not None:
                self.flush()  # that backward raised before its end
            self._outer_task = task
            Variable._execution_engine.queue_callback(self.flush)
        self._open = True

    def _elders(self) -> list[GradientReducer]:
        """The reducers that send before this one, in their order; none if this one has nobody to send to."""
        if all(gradients.communicator.world_size == 1 for gradients in self.slices):
            return []
        elders = [r for r in _LIVING if r._number < self._number and r._world is self._world]
        return sorted(elders, key=lambda reducer: reducer._number)

    def _begin(self) -> None:
        """Make the collective calls of a pass that come before its messages."""
        if (announce := self._announce and self._announce()) is not None:
            announce()
        self.check_layout()
        self._begun = True

    def _take(self, number: int) -> None:
        """Note that a parameter's gradient has come; where it comes after its slice was sent, it stays in p.grad."""
        if self._params[number].grad is None or any(self.slices[index].sent for index in self._slices_of[number]):
            return
        if self._contiguous:
            self._fill(number)
        for index in self._slices_of[number]:
            gradients = self.slices[index]
            gradients.awaited.discard(number)
            if not gradients.awaited and self.passes == 0 and index not in self.arrival:
                self.arrival.append(index)

    def _fill(self, number: int) -> None:
        """Move a gradient from p.grad to all of its slices."""
        param = self._params[number]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.layout != torch.strided or not grad.is_floating_point():
            self.fault = TypeError(
                f"the gradient of {self._names[number]} is {grad.dtype}, {grad.layout}; only dense real gradients are "
                "supported: make an embedding with sparse=False"
            )
            return
        self.present[number] = True
        for index in self._slices_of[number]:
            gradients = self.slices[index]
            scale, world_size = self._precision.before, gradients.communicator.world_size
            if scale is None and self._precision.after is None and world_size > 1:
                scale = 1.0 / world_size
            pack(gradients.room(), gradients.cut, number, grad, scale, add=number in gradients.filled)
            gradients.filled.add(number)

    def _send_full_slices(self) -> None:
        while self._next < len(self._order):
            gradients = self.slices[self._order[self._next]]
            if gradients.awaited:
                break
            self._send(gradients)
            self._next += 1

    def _send(self, gradients: SliceGradients) -> None:
        self._window.room_for(2 * gradients.nbytes)
        for number in gradients.cut.places:
            if number not in gradients.filled:
                self._fill(number)
        buffer = gradients.close()
        handle, average = reduce_scatter(
            buffer, gradients.cut, gradients.communicator, self._precision, gradients.kept_dtype
        )

        def arrived(_keep: Tensor = buffer) -> None:
            if handle is not None:
                handle.wait()
            part = in_host_memory(average()) if gradients.offload else average()
            gradients.average = part if gradients.average is None else gradients.average.add_(part)

        self._window.add(2 * gradients.nbytes, arrived)
        if not self._overlap:
            self._window.drain()

    # -- after backward -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """End a pass: send what was not, zeros where there is no gradient, and wait for all. All ranks call."""
        if not self._open:
            return
        for elder in self._elders():
            elder.flush()
        if not self._begun:
            self._begin()
        self._outer_task = self._nested_task = None
        self._open = self._begun = False
        for index in self._order[self._next :]:
            self._send(self.slices[index])
        self._finish(self._order)
        self.passes += 1

    def leftovers(self) -> list[bool]:
        """For each slice, whether there are gradients for it in p.grad that no pass has sent."""
        left = [False] * len(self.slices)
        for param, mine in zip(self._params, self._slices_of, strict=True):
            if param.grad is not None:
                if not mine:
                    param.grad = None  # no element
                for index in mine:
                    left[index] = True
        return left

    @torch.no_grad()
    def send_leftovers(self, chosen: Sequence[bool]) -> None:
        """Send the slices that any rank has leftovers for. All ranks call, with the same choice."""
        indices = [index for index in self._order if chosen[index]]
        for index in indices:
            self._send(self.slices[index])
        self._finish(indices)

    def _finish(self, indices: Sequence[int]) -> None:
        self._window.drain()
        for index in indices:
            self.slices[index].begin()
        self._next = 0

    def clear(self) -> None:
        """Drop all gradients. All ranks call, if a pass is open."""
        self.flush()
        for gradients in self.slices:
            gradients.average = None
        for number, param in enumerate(self._params):
            self.present[number] = False
            param.grad = None
        self.fault = None


def _inside_another_backward() -> bool:
    """Whether this backward was called by an autograd function within another one (reentrant checkpointing)."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NESTED:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
