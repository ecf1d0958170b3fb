"""Gradients that are sent while backward runs: passes, hooks, and buckets that are sent in one order on all ranks.

A pass is one call of backward. In a pass a bucket is sent as soon as all its gradients are there, and the buckets
before it in the order were sent. At the end of the pass the rest is sent, with zeros for missing gradients, so that
ranks whose graphs differ do not wait for each other.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol
from weakref import WeakMethod, WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hf_compressopt.collectives.communicator import Communicator

logger = logging.getLogger(__name__)

_NESTED = BackwardCFunction.apply.__code__  # the frame in which an autograd function of the user's calls backward


class Order:
    """Buckets that are sent in one order, each once its members' gradients are there; ``of`` has each member's."""

    def __init__(self, buckets: Iterable[Iterable[Hashable]] = ()) -> None:
        """Send buckets of these members in the order in which they are given."""
        self.of: dict[Hashable, list[int]] = {}
        self._members: list[frozenset[Hashable]] = []
        self._sequence: list[int] = []
        self._completed: dict[int, None] = {}  # in the order in which their gradients came, until the ranks agree
        self._is_agreed = False
        self.add(buckets)

    def add(self, buckets: Iterable[Iterable[Hashable]]) -> None:
        """Add buckets behind the others."""
        for members in map(frozenset, buckets):
            for member in members:
                self.of.setdefault(member, []).append(len(self._members))
            self._sequence.append(len(self._members))
            self._members.append(members)
        self.begin()

    def begin(self) -> None:
        """Begin a pass."""
        self._awaited = [set(members) for members in self._members]
        self._next = 0

    def awaits(self, index: int, member: Hashable) -> bool:
        """Return whether the gradient of a member of a bucket has not come in this pass."""
        return member in self._awaited[index]

    def arrived(self, member: Hashable) -> None:
        """Record that the gradient of a member is there."""
        for index in self.of.get(member, ()):
            awaited = self._awaited[index]
            awaited.discard(member)
            if not awaited and not self._is_agreed:
                self._completed.setdefault(index)

    def due(self) -> Iterator[int]:
        """Yield the numbers of the buckets that are to be sent now."""
        while self._next < len(self._sequence) and not self._awaited[self._sequence[self._next]]:
            self._next += 1
            yield self._sequence[self._next - 1]

    def rest(self) -> Iterator[int]:
        """Yield the numbers of the buckets that have not been sent in this pass."""
        while self._next < len(self._sequence):
            self._next += 1
            yield self._sequence[self._next - 1]

    def chosen(self, choice: Sequence[bool]) -> list[int]:
        """Return the numbers of the buckets that are chosen, in order."""
        return [index for index in self._sequence if choice[index]]

    def agree(self, communicator: Communicator) -> None:
        """Send buckets from now on in the order in which they were complete on rank 0. All ranks call, after passes."""
        if self._is_agreed or communicator.world_size == 1:
            return
        first = communicator.all_gather_object(list(self._completed))[0]
        self._sequence = [*first, *(number for number in self._sequence if number not in set(first))]
        self._is_agreed, self._completed = bool(first), {}


class PassMarks:
    """The autograd tasks of a pass under way, and of the backward that an autograd function inside it has called."""

    def __init__(self) -> None:
        self._outer: int | None = None
        self._nested: int | None = None

    def end(self) -> None:
        """Record that the pass is over."""
        self._outer = self._nested = None

    def enter(self, at_end: Callable[[], None], interrupted: Callable[[], object]) -> bool:
        """Record the task under way, and return whether it is new; ``interrupted`` if the pass before has raised."""
        task = torch._C._current_graph_task_id()
        if task == self._outer or task == self._nested:
            return False
        if _inside_another_backward():
            self._nested = task
        else:
            if self._outer is not None:
                interrupted()
            self._outer = task
            Variable._execution_engine.queue_callback(at_end)
        return True


def _inside_another_backward() -> bool:
    """Tell whether an autograd function inside another backward called this one, as reentrant checkpointing does."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NESTED:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# -- hooks ------------------------------------------------------------------------------------------------------------

_ATTACHED: WeakSet[GradientOwner] = WeakSet()
_steps_are_watched = False


class GradientOwner:
    """The hooks of one object on parameters. They do not keep it alive, and they go when it is gone.

    A parameter has one owner at most. A new one takes over, with a warning. An ordinary optimizer is not seen before
    its first step: if the owner has taken the gradients which that step should have used, the step raises an error.
    Where ``detached``, gradients stay in ``p.grad``.
    """

    def __init__(self, name: str, arrived: Callable[[int], None], holds: Callable[[], bool]) -> None:
        self.name, self.detached = name, False
        self._arrived, self._holds = WeakMethod(arrived), WeakMethod(holds)
        self._handles: list[RemovableHandle] = []
        self._owned: set[int] = set()  # by id: the owner of the methods keeps the parameters alive
        finalize(arrived.__self__, _remove, self._handles).atexit = False  # type: ignore[attr-defined]

    def hook(self, params: Sequence[Tensor]) -> None:
        """Own more parameters; their numbers follow those of earlier ones."""
        global _steps_are_watched
        take_over(params, self.name)
        for number, param in enumerate(params, start=len(self._handles)):
            hook = _hook(self._arrived, number)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._owned.update(map(id, params))
        _ATTACHED.add(self)
        if not _steps_are_watched:
            register_optimizer_step_post_hook(_check_step)
            _steps_are_watched = True

    def detach(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)
        self.detached = True
        _ATTACHED.discard(self)

    def require_attached(self) -> None:
        """Check that the owner still gets gradients."""
        if self.detached:
            raise RuntimeError(
                f"this {self.name} gets no gradients any more: it was detached, or another optimizer of some of its "
                "parameters followed; use the newer one, and give each parameter to one optimizer only"
            )

    @property
    def holds_gradients(self) -> bool:
        """True if gradients were taken that no step has used."""
        holds = self._holds()
        return holds is not None and holds()

    def owned_of(self, params: Iterable[Tensor]) -> int:
        """Count the parameters that are owned."""
        return sum(id(param) in self._owned for param in params)


def _hook(arrived: WeakMethod[Callable[[int], None]], number: int) -> Callable[[Tensor], None]:
    def gradient_arrived(_: Tensor) -> None:
        if (method := arrived()) is not None:
            method(number)

    return gradient_arrived


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _owners_of(params: Sequence[Tensor]) -> list[GradientOwner]:
    return [owner for owner in list(_ATTACHED) if owner.owned_of(params)]


def are_owned(params: Iterable[Tensor]) -> bool:
    """Return whether the gradient of one of the parameters is taken away while backward runs."""
    return bool(_ATTACHED and _owners_of(list(params)))


def take_over(params: Sequence[Tensor], name: str) -> None:
    """Detach the owners of parameters, because an optimizer or averaging of this name follows."""
    for owner in _owners_of(params):
        owner.detach()
        logger.warning(
            "%s takes over parameters of an earlier %s that is still alive: that one gets no more gradients, and its "
            "step() raises an error",
            name,
            owner.name,
        )


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error after the step of an optimizer whose gradients a living owner has taken; torch calls this."""
    for owner in [owner for owner in _ATTACHED if owner.holds_gradients]:
        taken = owner.owned_of(param for group in optimizer.param_groups for param in group["params"])
        if taken:
            owner.detach()
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() moved {taken} of its parameters not at all: a {owner.name} that is "
                "still alive took their gradients during backward. It is detached now: run backward again, and the "
                "next step has them. Give each parameter to one optimizer only, and delete an optimizer, or call its "
                "detach(), before another one of the same parameters follows"
            )


# -- passes -----------------------------------------------------------------------------------------------------------


class Sender(Protocol):
    """An object that sends the gradients of passes. All ranks call its methods in one order, but for ``take``."""

    def begin_pass(self) -> bool:
        """Begin a pass, and return whether buckets are sent in it; alike on all ranks."""
        ...

    def take(self, number: int) -> bool:
        """Take the gradient of a parameter; False leaves it for later."""
        ...

    def send(self, index: int) -> None:
        """Send a bucket."""
        ...

    def end_pass(self) -> None:
        """End a pass in which all buckets were sent."""
        ...

    def interrupted(self) -> None:
        """Handle a backward pass that raised before its end."""
        ...

    def holds_gradients(self) -> bool:
        """Return whether gradients were taken that no step has used."""
        ...


# The order of messages is a matter of the process, not of one optimizer. Numbers are alike on all ranks.
_LIVING: WeakSet[BackwardPasses] = WeakSet()
_NUMBERS = count()


class BackwardPasses:
    """The backward passes of some parameters, whose gradients a sender takes by hooks.

    Of several in a process, the one made first sends while backward runs. The others send at its end, one after
    another: even if graphs complete the parameters of two optimizers in different orders, all ranks send in one.
    Gradients stay in ``p.grad`` if it is not ``enabled``, or ``done`` until the next step.
    """

    def __init__(self, sender: Sender, name: str, communicator: Communicator) -> None:
        self.order, self.enabled, self.done = Order(), True, False
        self.hooks = GradientOwner(name, self.gradient_arrived, sender.holds_gradients)
        self._sender, self._communicator = ref(sender), communicator
        self._marks = PassMarks()
        self._open = self._begun = self._sends = False
        self._number = next(_NUMBERS)
        self._world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        _LIVING.add(self)

    def add(self, params: Sequence[Tensor], buckets: Iterable[Iterable[int]]) -> None:
        """Add parameters, whose numbers follow those of earlier ones, and buckets of the numbers of their members."""
        self.hooks.hook(params)
        self.order.add(buckets)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in ``p.grad`` inside; the next pass outside sends them with its own."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @torch.no_grad()
    def gradient_arrived(self, number: int) -> None:
        """Take the gradient of a parameter, and send the buckets that are complete now. Its hook calls."""
        if not self.enabled or self.done:
            return
        sender = self._owner()
        if self._marks.enter(self.flush, sender.interrupted) and not self._open:
            if not self._elders():
                self._begin()
            self._open = True
        if self._begun and not self._sends:
            return
        if sender.take(number):
            self.order.arrived(number)
            if self._begun:
                for index in self.order.due():
                    sender.send(index)

    @torch.no_grad()
    def flush(self) -> None:
        """End a pass: send the rest. All ranks call."""
        if not self._open:
            return
        for elder in self._elders():
            elder.flush()
        if not self._begun:
            self._begin()
        self._marks.end()
        self._open = self._begun = False
        if self._sends:
            for index in self.order.rest():
                self._owner().send(index)
            self._owner().end_pass()
        self.order.begin()

    def empty_pass(self) -> None:
        """Take part in a pass without gradients that come now. All ranks call, or have a pass."""
        self._open = True
        self.flush()

    def _owner(self) -> Sender:
        sender = self._sender()
        assert sender is not None  # it owns this object
        return sender

    def _begin(self) -> None:
        self._sends, self._begun = self._owner().begin_pass(), True

    def _elders(self) -> list[BackwardPasses]:
        """Return those that send before this one."""
        if self._communicator.world_size == 1 or len(_LIVING) == 1:
            return []
        elders = [each for each in _LIVING if each._number < self._number and each._world is self._world]
        return sorted((each for each in elders if not each.hooks.detached), key=lambda each: each._number)
