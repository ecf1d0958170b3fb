"""Send gradients while backward runs: hooks fill slices, and full slices are sent in one order that all ranks share.

A pass is one call of backward. In a pass every rank sends every slice once, in the same order. A flush at its end sends
the rest, with zeros for parameters that had no gradient, so that ranks whose graphs differ do not wait for each other.
Late gradients stay in p.grad: a parameter's gradient may come in several portions, as under reentrant checkpointing.
They are sent before the step, after the ranks have agreed that some rank has any.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from hf_compressopt.collectives.backward_pass import inside_another_backward
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.owners import GradientOwner
from hf_compressopt.optim.state import switched
from hf_compressopt.zero.config import LossScale
from hf_compressopt.zero.messages import send_gradients
from hf_compressopt.zero.parts import in_host_memory
from hf_compressopt.zero.slices import SliceGradients
from hf_compressopt.zero.transport import Precision, Window, pack, reduce_scatter

# All reducers of the process, and their numbers in the order of construction, which is the same on all ranks: the order
# of messages is a matter of the process, not of one optimizer.
_LIVING: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
_NUMBERS = count()


class GradientReducer:
    """Sender of gradients to their owners, and keeper of this rank's averages.

    Of several reducers in a process, the one made first sends while backward runs. The others send at the end of
    backward, one after another. So all ranks send in one order, even if their graphs complete the parameters of two
    optimizers in different orders.

    Attributes:
        slices: All slices.
        present: For each parameter, whether this rank had a gradient of it since the last :meth:`clear`.
        fault: The error in a gradient of this rank, to be raised on all ranks together; None if there is none.
        passes: Passes in which gradients were sent.
        arrival: The slices in the order in which they were complete in the first pass, as a hint for the order.
        enabled: Whether gradients are sent, and not left in p.grad.
    """

    def __init__(
        self,
        communicator: Communicator,
        precision: Precision,
        window_bytes: int,
        loss_scale: LossScale,
        *,
        overlap: bool,
        contiguous: bool,
    ) -> None:
        """Start without parameters.

        Args:
            communicator: All ranks.
            precision: The scaling and rounding of gradients.
            window_bytes: The most bytes under way.
            loss_scale: Factor of the loss, to be taken out of what has errors.
            overlap: Whether messages may be under way while backward runs.
            contiguous: Whether a gradient moves to its slice at once, or when the slice is sent.
        """
        self.slices: list[SliceGradients] = []
        self.present: list[bool] = []
        self.fault: Exception | None = None
        self.passes = 0
        self.arrival: list[int] = []
        self.enabled = True
        self._communicator, self._checked = communicator, False
        self._precision, self._window, self._loss_scale = precision, Window(window_bytes), loss_scale
        self._overlap, self._contiguous = overlap, contiguous
        self._params: list[tuple[Tensor, str]] = []
        self._slices_of: list[list[int]] = []
        self._order: list[int] = []
        self._order_known = False
        self._next = 0
        self._open = self._begun = False
        self._outer_task: int | None = None
        self._nested_task: int | None = None
        self._announce: weakref.WeakMethod[Callable[[], Any]] | None = None
        self._owner = GradientOwner("ZeroOptimizer", self.gradient_arrived, self.holds_gradients)
        self._number = next(_NUMBERS)
        self._world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        _LIVING.add(self)

    @property
    def bytes_under_way(self) -> int:
        """Bytes of the messages under way, in both directions."""
        return self._window.nbytes

    def add(self, params: Sequence[tuple[Tensor, str]], slices: Sequence[SliceGradients]) -> None:
        """Add parameters and their slices.

        Args:
            params: The parameters and their names; their numbers follow those of earlier parameters.
            slices: The slices, in the order of backward.
        """
        self._owner.hook([param for param, _ in params])
        self._params += params
        self.present += [False] * len(params)
        self._slices_of += [[] for _ in params]
        for gradients in slices:
            self._order.append(len(self.slices))
            for number in gradients.cut.places:
                self._slices_of[number].append(len(self.slices))
            gradients.begin()
            self.slices.append(gradients)
        self._checked = False

    def check_layout(self) -> None:
        """Check that all ranks have the same slices, unless they were checked. All ranks call.

        Raises:
            ValueError: If they differ, on all ranks.
        """
        if not self._checked:
            layout = [(g.cut.part_numel, len(g.cut.parts), g.sent_dtype, g.kept_dtype, *g.forms) for g in self.slices]
            self._communicator.require_equal(
                "trainable parameters, their sizes or dtypes, bucket size or compression",
                [len(layout), crc32(repr(layout).encode())],
            )
            self._checked = True

    def detach(self) -> None:
        """Remove the hooks from the parameters: gradients stay in p.grad from now on."""
        self._owner.detach()

    def require_attached(self) -> None:
        """Check that the optimizer still gets gradients.

        Raises:
            RuntimeError: If it was detached, or another one has taken over.
        """
        self._owner.require_attached()

    def holds_gradients(self) -> bool:
        """Tell whether gradients were taken that no step has used."""
        return any(self.present)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in p.grad inside the block; the next pass outside sends them with its own."""
        with switched(self, "enabled", False):
            yield

    def announce_passes(self, announce: Callable[[], Any]) -> None:
        """Call a method before each pass, without keeping its object alive."""
        self._announce = weakref.WeakMethod(announce)

    def follow_parameters(self) -> None:
        """Follow the parameters to the devices to which a model was moved after its optimizer was made."""
        for gradients in self.slices:
            gradients.device = self._params[next(iter(gradients.cut.places))][0].device
            gradients.communicator.device = gradients.device
            if gradients.errors is not None:
                gradients.errors.to(gradients.device)
        if self._params:
            self._communicator.device = self._params[0][0].device

    @torch.no_grad()
    def empty_pass(self) -> None:
        """Take part in a pass of the other ranks without gradients of this rank."""
        self._open = self._begun = True
        self.check_layout()
        self.flush()

    def agree_on_order(self) -> None:
        """Send slices, after the first step, in the order in which rank 0 completed them. All ranks call."""
        if not self._order_known and self._communicator.world_size > 1:
            first = self._communicator.all_gather_object(self.arrival)[0]
            self._order = [*first, *(number for number in self._order if number not in set(first))]
        self._order_known = True

    # -- during backward ----------------------------------------------------------------------------------------------

    def gradient_arrived(self, number: int) -> None:
        """Take a parameter's gradient, and send the slices that are full now. Its hook calls."""
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
        if inside_another_backward():
            self._nested_task = task
        else:
            if self._outer_task is not None:
                self.flush()  # that backward raised before its end
            self._outer_task = task
            Variable._execution_engine.queue_callback(self.flush)
        self._open = True

    def _elders(self) -> list[GradientReducer]:
        """List the reducers that send before this one; none if this one has no other rank to send to."""
        if all(gradients.communicator.world_size == 1 for gradients in self.slices):
            return []
        elders = [r for r in _LIVING if r._number < self._number and r._world is self._world and not r._owner.detached]
        return sorted(elders, key=lambda reducer: reducer._number)

    def _begin(self) -> None:
        """Make the collective calls of a pass that come before its messages."""
        if (announce := self._announce and self._announce()) is not None:
            announce()
        self.check_layout()
        self._begun = True

    def _take(self, number: int) -> None:
        """Note that a parameter's gradient has arrived; if its slice was sent before, the gradient stays in p.grad."""
        if self._params[number][0].grad is None or any(self.slices[index].sent for index in self._slices_of[number]):
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
        param, name = self._params[number]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.layout != torch.strided or not grad.is_floating_point():
            self.fault = TypeError(
                f"the gradient of {name} is {grad.dtype}, {grad.layout}; only dense real gradients are "
                "supported: make an embedding with sparse=False"
            )
            return
        self.present[number] = True
        for index in self._slices_of[number]:
            gradients = self.slices[index]
            scale, world_size = self._precision.before, gradients.communicator.world_size
            if scale is None and self._precision.after is None and world_size > 1 and gradients.errors is None:
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
        cut, ranks, kept = gradients.cut, gradients.communicator, gradients.kept_dtype
        handle, average = (
            reduce_scatter(buffer, cut, ranks, self._precision, kept)
            if gradients.errors is None
            else send_gradients(buffer, cut, ranks, gradients.errors, self._loss_scale.of_gradients, kept)
        )

        def arrived() -> None:
            if handle is not None:
                handle.wait()
            part = in_host_memory(average()) if gradients.offload else average()
            gradients.average = part if gradients.average is None else gradients.average.add_(part)

        self._window.add(2 * gradients.nbytes, arrived, handle)
        if not self._overlap:
            self._window.drain()

    # -- after backward -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """End a pass: send the rest, with zeros for missing gradients, and wait for all messages. All ranks call."""
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
        """Tell for each slice whether p.grad holds gradients for it that no pass has sent."""
        left = [False] * len(self.slices)
        for (param, _), mine in zip(self._params, self._slices_of, strict=True):
            if param.grad is not None:
                if not mine:
                    param.grad = None  # no element
                for index in mine:
                    left[index] = True
        return left

    @torch.no_grad()
    def send_leftovers(self, chosen: Sequence[bool]) -> None:
        """Send the slices for which any rank has leftovers. All ranks call, with the same choice."""
        indices = [index for index in self._order if chosen[index]]
        for index in indices:
            self._send(self.slices[index])
        self._finish(indices)

    def _finish(self, indices: Sequence[int]) -> None:
        self._window.drain()
        for index in indices:
            self.slices[index].begin()
        self._next = 0

    def copy_averages(self, other: GradientReducer) -> None:
        """Take copies of the averages and errors of a reducer of the same layout."""
        for mine, theirs in zip(self.slices, other.slices, strict=True):
            mine.average = None if theirs.average is None else theirs.average.clone()
            if mine.errors is not None and theirs.errors is not None:
                mine.errors.copy_from(theirs.errors)
        self.present = list(other.present)

    def clear(self) -> None:
        """Drop all gradients, and the errors of their messages. All ranks call if a pass is open."""
        self.flush()
        for gradients in self.slices:
            gradients.average = None
            if gradients.errors is not None:
                gradients.errors.drop()
        for number, (param, _) in enumerate(self._params):
            self.present[number] = False
            param.grad = None
        self.fault = None
