"""Gradients that leave while backward runs: hooks on parameters, and buckets that leave in one order on all ranks.

A pass is one call of backward. A bucket leaves as soon as all its gradients are there, and the buckets before it have
left. Then ``p.grad`` of a parameter is freed whose elements have all left. At the end of the pass the rest leaves, with
zeros for missing gradients, so that ranks whose graphs differ do not wait for each other.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.owners import GradientOwner

_NESTED = BackwardCFunction.apply.__code__  # the frame in which an autograd function of the user's calls backward


def inside_another_backward() -> bool:
    """Tell whether an autograd function inside another backward called this one, as reentrant checkpointing does."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NESTED:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class TakesBuckets(Protocol):
    """What takes the gradients of a pass."""

    def begin_pass(self) -> bool:
        """Begin a pass, and return whether buckets leave in it; alike on all ranks, which all call."""
        ...

    def leave(self, number: int) -> None:
        """Take the gradients of a bucket. All ranks call, for the same buckets in one order."""
        ...

    def end_pass(self) -> None:
        """End a pass in which all buckets have left. All ranks call."""
        ...


class BackwardPass:
    """The backward passes of one optimizer's parameters.

    Attributes:
        done: Whether the gradients of the coming step have left. Later ones stay in ``p.grad``.
        hooks: The hooks on the parameters.
        late: Whether a part of a gradient came after a part of the same gradient had left, or a pass after one that
            had raised.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        buckets: Sequence[Collection[int]],
        communicator: Communicator,
        owner: TakesBuckets,
        name: str,
    ) -> None:
        """Hook the parameters.

        Args:
            params: The parameters.
            buckets: The numbers of the parameters in each bucket. In the first pass buckets leave in this order, from
                the second one on in the order in which they were complete on rank 0.
            communicator: The ranks.
            owner: Takes the buckets.
            name: The kind of optimizer, for messages.
        """
        self.done = self.late = False
        self._enabled = True
        self._params, self._owner, self._communicator = list(params), owner, communicator
        self._members = [frozenset(bucket) for bucket in buckets]
        self._buckets_of: list[list[int]] = [[] for _ in params]
        for number, members in enumerate(self._members):
            for member in members:
                self._buckets_of[member].append(number)
        self._order, self._order_is_known = list(range(len(buckets))), False
        self._arrival: list[int] = []  # buckets, as they were complete
        self._open = self._sends = False
        self._outer_task: int | None = None
        self._nested_task: int | None = None
        self._begin()
        self.hooks = GradientOwner(name, self.gradient_arrived, self.holds_gradients)
        self.hooks.hook(self._params)

    def _begin(self) -> None:
        self._awaited = [set(members) for members in self._members]
        self._to_leave = [len(buckets) for buckets in self._buckets_of]
        self._next = 0

    def holds_gradients(self) -> bool:
        """Tell whether gradients have left that no step has used."""
        return self.done

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in ``p.grad`` inside; the next pass outside sends them with its own."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    # -- during backward ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gradient_arrived(self, number: int) -> None:
        """Take note of a parameter's gradient, and let the buckets leave that are complete now. Its hook calls."""
        if not self._enabled or self.done:
            return
        self._enter()
        if not self._sends:
            return
        mine = self._buckets_of[number]
        self.late |= any(number not in self._awaited[index] for index in mine) and self._to_leave[number] < len(mine)
        for index in mine:
            if self._awaited[index] == {number}:
                self._arrival.append(index)
            self._awaited[index].discard(number)
        while self._next < len(self._order) and not self._awaited[self._order[self._next]]:
            self._leave_next()

    def _enter(self) -> None:
        task = torch._C._current_graph_task_id()
        if task in (self._outer_task, self._nested_task):
            return
        if inside_another_backward():
            self._nested_task = task
        else:
            self.late |= self._outer_task is not None  # that backward raised before its end
            self._outer_task = task
            Variable._execution_engine.queue_callback(self.flush)
        if not self._open:
            self._sends, self._arrival = self._owner.begin_pass(), []
            self._open = True

    def _leave_next(self) -> None:
        index = self._order[self._next]
        self._next += 1
        self._owner.leave(index)
        for number in self._members[index]:
            self._to_leave[number] -= 1
            if not self._to_leave[number]:
                self._params[number].grad = None

    # -- after backward -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """End a pass: the rest leaves. All ranks call."""
        self._outer_task = self._nested_task = None
        if not self._open:
            return
        self._open = False
        if self._sends:
            while self._next < len(self._order):
                self._leave_next()
            for param, buckets in zip(self._params, self._buckets_of, strict=True):
                if not buckets:
                    param.grad = None  # no element
            self.done = True
            self._owner.end_pass()
        self._begin()

    def complete(self) -> None:
        """Let the gradients of the coming step leave, if they have not. All ranks call."""
        self.flush()
        if not self.done:
            self._sends, self._arrival = self._owner.begin_pass(), []
            self._open = True
            self.flush()
        if self.done and not self._order_is_known:
            with self._communicator.traffic.paused():
                first = self._communicator.all_gather_object(self._arrival)[0]
            self._order_is_known = bool(first)
            self._order = [*first, *(number for number in self._order if number not in set(first))]
            self._arrival = []

    def forget(self) -> None:
        """Forget that gradients have left: those of another step come next."""
        self.done = self.late = False
