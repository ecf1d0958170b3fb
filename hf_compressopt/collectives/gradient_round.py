"""The exchange of the gradients of one step, while backward makes them known.

The gradients are divided into slots, each of which travels on its own. Slots leave in a fixed order, alike on all
ranks, each as soon as all its gradients are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.exchange import Pipeline
from hf_compressopt.collectives.slots import Arrived, Slot


class GradientRound:
    """The exchange of the gradients of one step."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Start with no gradient. ``slots`` leave in this order, which must be alike on all ranks."""
        self._slots, self._to_leave = tuple(slots), deque(slots)
        self._params = dict.fromkeys(param for slot in slots for param in slot.members())
        self._grads: dict[Tensor, Tensor | None] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._pipeline = Pipeline()
        self._averages: list[tuple[int, Arrived]] = []

    def add(self, param: Tensor, grad: Tensor | None) -> None:
        """Hand over the gradient of a parameter; :meth:`finish` overwrites it. One that is in no slot stays local."""
        if param not in self._params:
            return
        if grad is not None and not grad.is_contiguous():
            original, grad = grad, grad.contiguous()
            self._copies.append((original, grad))
        self._grads[param] = grad
        while self._to_leave and all(member in self._grads for member in self._to_leave[0].members()):
            self._leave(self._to_leave.popleft())

    def _leave(self, slot: Slot) -> None:
        self._pipeline.add(slot.start(self._grads, lambda average: self._averages.append((slot.owner, average))))

    def hand_over(self) -> bool:
        """Let what has not left leave, and let the owners call :meth:`finish` in their steps.

        Returns:
            Whether they will: False if a slot writes into the gradients, or if there is none.
        """
        if not self._slots or not all(slot.waits_in_step for slot in self._slots):
            return False
        self._leave_all()
        self._copies = []  # what is written into them is nothing
        for slot in self._slots:
            slot.hand_over(self.finish)
        return True

    def _leave_all(self) -> None:
        for param in self._params:
            if param not in self._grads:
                self.add(param, None)

    def finish(self) -> Collection[int]:
        """Exchange what has not left yet, and write the averages into the gradients. A second call does nothing.

        Returns:
            The owners with a gradient that is not finite; their errors stay as before the round.
        """
        self._leave_all()
        self._pipeline.drain()
        averages, self._averages = self._averages, []
        found = [average.not_finite for _, average in averages]
        flags = torch.stack(found).tolist() if found else []
        not_finite = {owner for (owner, _), flag in zip(averages, flags, strict=True) if flag}
        for owner, average in averages:
            average.write(owner not in not_finite)
        for original, copy in self._copies:
            original.copy_(copy)
        self._copies = []
        return not_finite


class BucketRounds:
    """Rounds that take their gradients from DistributedDataParallel's buckets.

    Messages leave as soon as their gradients are there, and travel while backward computes further ones. What is still
    on the way is awaited in the last bucket's call, or in the step if nothing is written into gradients. Nothing is
    ever started from a callback, so that all ranks start their collectives in one order.
    """

    def __init__(self) -> None:
        """Start with no bucket."""
        self._round: GradientRound | None = None
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def add(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        start: Callable[[], GradientRound],
        done: Callable[[Collection[int]], None] = lambda not_finite: None,
    ) -> torch.futures.Future[Tensor]:
        """Take a bucket.

        Args:
            bucket: The bucket.
            start: Makes the round, with the first bucket of a backward pass.
            done: Takes what :meth:`GradientRound.finish` returns, if it is called after the last bucket.

        Returns:
            The bucket's buffer, as DDP expects it: complete after the last bucket.

        Raises:
            RuntimeError: If the first bucket of the backward pass has not come.
        """
        buffer = bucket.buffer()
        future = _future_on(buffer.device)
        if bucket.index() == 0:
            self._round, self._futures = start(), []
        self._futures.append((future, buffer))
        current = self._round
        if current is None:
            raise RuntimeError(
                "a bucket came before the first one of its step: was the hook registered in a backward pass?"
            )
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            current.add(param, _in_order_of(param, grad))
        if bucket.is_last():
            self._round = None
            if not current.hand_over():
                done(current.finish())
            for waiting, gradients in self._futures:
                waiting.set_result(gradients)
            self._futures = []
        return future


def as_it_is(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future whose value is there: a buffer, for DDP hooks that leave it local."""
    future = _future_on(buffer.device)
    future.set_result(buffer)
    return future


def _future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def _in_order_of(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient as DDP stores it, by the strides of a dense parameter: DDP's own view ignores the strides."""
    if param.is_contiguous():
        return grad
    strides = torch.empty_like(param, device="meta").stride()
    return grad.as_strided(param.shape, strides) if strides == param.stride() else grad
