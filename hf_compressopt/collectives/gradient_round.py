"""The exchange of the gradients of one step in messages of integers, while the gradients become known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import Exchanged, Pipeline, Task, integer_all_reduce
from hf_compressopt.flat import Bucket, FlatLayout
from hf_compressopt.kernels import Combination, Segment
from hf_compressopt.kernels.integers import IntegerFormat, any_nan


class GradientRound:
    """The exchange of the gradients of one step.

    Buckets leave in the order of the layout, each as soon as all its gradients are there.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: FlatLayout,
        errors: Sequence[tuple[Tensor, Tensor]],
        communicator: Communicator,
        *,
        form: IntegerFormat,
        loss_scale: float,
    ) -> None:
        """Start with no gradient.

        Args:
            params: The parameters, in the order of the layout.
            layout: Their place in the flat buffer.
            errors: For each bucket of the layout, the worker error and the server error.
            communicator: The ranks.
            form: The form of the messages.
            loss_scale: Factor that the gradients carry; errors do not.
        """
        self._index = {param: index for index, param in enumerate(params)}
        self._communicator, self._form, self._loss_scale = communicator, form, loss_scale
        self._to_leave = deque(zip(layout.buckets, errors, strict=True))
        self._grads: dict[int, Tensor | None] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._pipeline = Pipeline()
        self._exchanged: list[tuple[Exchanged, list[Segment]]] = []

    def add(self, param: Tensor, grad: Tensor | None) -> None:
        """Hand over the gradient of a parameter; it is overwritten by :meth:`finish`."""
        if grad is not None and not grad.is_contiguous():
            original, grad = grad, grad.contiguous()
            self._copies.append((original, grad))
        self._grads[self._index[param]] = grad
        while self._to_leave and all(piece.index in self._grads for piece in self._to_leave[0][0].pieces):
            self._pipeline.add(self._exchange(*self._to_leave.popleft()))

    def finish(self) -> bool:
        """Exchange what has not left yet, and write the averages into the gradients.

        Returns:
            Whether all of them are finite. If not, the errors stay as before the round.
        """
        for param, index in self._index.items():
            if index not in self._grads:
                self.add(param, None)
        self._pipeline.drain()
        found = [any_nan(exchanged.average) for exchanged, _ in self._exchanged]
        finite = not (found and bool(torch.stack(found).any()))
        for exchanged, outputs in self._exchanged:
            if finite:
                exchanged.commit(outputs, self._loss_scale)
            else:
                exchanged.discard(outputs, self._loss_scale)
        for original, copy in self._copies:
            original.copy_(copy)
        return finite

    def _exchange(self, bucket: Bucket, errors: tuple[Tensor, Tensor]) -> Task[None]:
        segments = [Segment(self._grads[p.index], p.start, p.numel, p.index) for p in bucket.pieces]
        z = Combination(bucket.numel, self._communicator.device, grads=segments, beta=1.0 / self._loss_scale)
        exchanged = yield from integer_all_reduce(z, *errors, self._form, self._communicator)
        self._exchanged.append((exchanged, segments))
