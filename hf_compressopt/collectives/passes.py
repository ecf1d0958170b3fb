"""The number of backward passes in a step, which the ranks compare: a rank that runs one more is an error on all.

Its messages would meet those of the others' step, and be averaged with another gradient, or hang. So the ranks compare
eight numbers, 32 bytes, at the beginning of a pass that sends gradients, and before a step that uses them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels.memory import fetch_later, numbers_on, reads_at_once


class StepPasses:
    """The backward passes since the last step that send gradients: all ranks run as many, or all raise an error.

    A rank that runs one more meets the others' next step, or their next pass: its gradients would get there.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.before = 0  # since the last step, and up to it since the one before
        self.in_loop: Communicator | None = None  # the ranks of a plain loop, whose next message is that of a pass
        self.members = 0  # the number of the parameters, once it has changed between passes
        self.are_known = False  # somebody has counted one
        self.held = 0  # those of them whose gradients were not thrown away since
        self._posted: _Posted | None = None
        self._ranks: Sequence[Communicator] = ()  # those who compared the last pass

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a message under way."""
        return self.__dict__ | {"_posted": None, "_ranks": (), "in_loop": None}

    def run_in_loop(self, ranks: Communicator) -> None:
        """Note that a plain loop of these ranks averages gradients: its next message is that of a pass."""
        self.in_loop = ranks

    def begin(self) -> None:
        """Count a pass."""
        self.are_known = True
        self.count += 1
        self.held += 1

    def note_members(self, number: int) -> None:
        """Note the number of the parameters, if there were passes: before the first one other messages compare it."""
        if self.are_known:
            self.members = number

    def forget(self) -> None:
        """Begin anew after another error of all ranks."""
        self._posted = None
        self.count = self.held = 0

    def drop(self) -> None:
        """Note that what the passes have sent was thrown away."""
        self.held = 0

    def end_step(self) -> None:
        if self.count:
            self.before = self.count
        self.count = self.held = 0

    def post(self, *communicators: Communicator, in_step: bool = False, joined: bool = False, doing: str = "") -> None:
        """Start comparing the passes with those of the other ranks, by a message that is the same in a step.

        Several communicators reach all ranks one after another, as those of a mesh's dimensions do. A rank that has
        ``joined`` has no inputs left, and follows the others (torch's Join): its own passes count for nothing.
        """
        self.check()  # what the host has not waited for
        wide = [each for each in dict.fromkeys(communicators) if each.world_size > 1]
        if not wide:
            return
        self._ranks = wide
        numbers = [float(self.count), float(self.held), float(in_step), float(self.members)]
        both = [-math.inf] * 8 if joined else [*numbers, *(-number for number in numbers)]
        here, device = array("f", both), wide[0].reached().device
        message = torch.frombuffer(here, dtype=torch.float32) if reads_at_once(device) else numbers_on(device, here)
        arrive = partial(_arrived, _largest(wide[0], message), wide[1:], message)
        self._posted = _Posted(wide, arrive, here, doing or self._describe(in_step))

    def check(self, *, now: bool = True) -> None:
        """Raise an error on all ranks if they differ in what was posted.

        Unless ``now``, the host does not wait for a GPU, and the next call raises.
        """
        if self._posted is None:
            return
        ranks, arrive, here, mine = self._posted
        found = arrive()
        shared = found.data_ptr() == here.buffer_info()[0]  # in host memory, where nothing is awaited
        if not now and not shared and not reads_at_once(found.device):
            self._posted = _Posted(ranks, fetch_later(found), here, mine)
            return
        self._posted = None
        largest = list(here) if shared else found.tolist()
        most, least = largest[: len(largest) // 2], largest[len(largest) // 2 :]
        if all(high == -low for high, low in zip(most, least, strict=True)):
            return
        self.count = self.held = 0  # a script that catches the error begins anew
        everyone = [f"rank {dist.get_rank() if len(ranks) > 1 else ranks[0].rank} {mine}"]
        for communicator in ranks:
            everyone = [each for found in communicator.all_gather_object(everyone) for each in found]
        raise RuntimeError(
            "the ranks have different numbers of backward passes in a step, of parameters, or of gradients to send, or "
            f"not all have thrown gradients away ({self.name}): {'; '.join(sorted(everyone))}. Give all ranks as many "
            "batches and micro-batches (drop_last=True), run all passes but the last one of a step inside no_sync(), "
            "and call zero_grad() and add_param_group() on all ranks or on none"
        )

    def compare(self, *communicators: Communicator, in_step: bool = False) -> None:
        """Raise an error on all ranks if they differ in their passes. All ranks call."""
        self.post(*communicators, in_step=in_step)
        self.check()

    def tell(self, doing: str) -> None:
        """Raise an error on all ranks of a plain loop, if the others do not what this rank does, which may not."""
        if self.in_loop is not None:
            self.post(self.in_loop, in_step=True, doing=doing)
            self.check()

    def close(self, doing: str) -> None:
        """Raise an error on all ranks if one is still in a pass: where a training ends no step tells it. All call."""
        if self._ranks:
            self.post(*self._ranks, in_step=True, doing=doing)
            self.check()

    def _describe(self, in_step: bool) -> str:
        dropped = f", {self.count - self.held} of them thrown away by zero_grad()" if self.held != self.count else ""
        if in_step:
            of = f" of {self.members} parameters" if self.members else ""
            return f"takes a step after {self.count} pass{'es' * (self.count != 1)}{of}{dropped}"
        before = f" of {self.members} parameters" if self.members else ""
        before += f" ({self.before} in the step before)" if self.before else ""
        return f"is in pass {self.count}{before}{dropped}"


class _Posted(NamedTuple):
    """A message of :class:`StepPasses` that is under way."""

    ranks: Sequence[Communicator]
    arrive: Callable[[], Tensor]  # returns the largest numbers of all ranks
    here: array[float]  # this rank's numbers; in their place the largest ones, if messages lie in host memory
    mine: str  # what this rank does, in words


def _largest(communicator: Communicator, message: Tensor) -> Callable[[], object]:
    """Start taking the largest numbers of all ranks, and return what awaits them."""
    with communicator.traffic.paused():  # metrics count the training's messages, and no checks
        return communicator.all_reduce(message, op="max").wait


def _arrived(wait: Callable[[], object], others: Sequence[Communicator], message: Tensor) -> Tensor:
    """Await a message, and take it to the ranks of the other communicators too."""
    wait()
    for each in others:
        _largest(each, message)()
    return message
