"""Buffers of a model that no DistributedDataParallel wraps: rank 0's for all ranks before each forward in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels.memory import flat_view, in_memory


class SharedBuffers:
    """A forward pre-hook of a model that gives all ranks the buffers of rank 0, as DistributedDataParallel does.

    That is before each forward in training with gradients, but for those that follow one whose gradients were not sent.
    DistributedDataParallel shares them before an evaluation too; here one rank alone may evaluate. A copy of the model
    has no such hook.
    """

    def __init__(
        self, model: nn.Module, communicator: Communicator, sends_gradients: Callable[[], bool] = lambda: True
    ) -> None:
        """Register the hook.

        Args:
            model: The model, whose ranks all call it alike.
            communicator: The ranks.
            sends_gradients: Whether the gradients of the coming backward pass are sent; alike on all ranks.
        """
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))  # torch's name for it
        self._model = ref(model)  # it owns the hook
        self._places: list[tuple[ref[nn.Module], str]] = []
        for prefix, module in model.named_modules():
            for name in module._buffers:
                if f"{prefix}.{name}".lstrip(".") not in ignored:
                    self._places.append((ref(module), name))
        self._communicator, self._sends_gradients = communicator, sends_gradients
        self._due = True
        self._handle = model.register_forward_pre_hook(self, prepend=True)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(self, model: nn.Module, args: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        if self._due:
            self.share()
        self._due = self._sends_gradients()

    def share(self) -> None:
        """Copy rank 0's buffers to all ranks. All ranks call."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for place, name in self._places:
            module = place()
            buffer = None if module is None else module._buffers.get(name)
            if buffer is not None:
                by_device.setdefault(buffer.device, []).append(buffer)
        for buffers in by_device.values():
            broadcast_together(self._communicator, buffers)

    def belongs_to(self, model: nn.Module) -> bool:
        return self._model() is model

    def remove(self) -> None:
        self._handle.remove()

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _make_nothing, ()


@torch.no_grad()
def broadcast_together(communicator: Communicator, tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's tensors, of one device and any dtypes, to all ranks, in one message."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.element_size())  # so that all are aligned
    values = [flat_view(in_memory("a buffer", tensor)).view(torch.uint8) for tensor in ordered]
    if communicator.world_size == 1 or not any(value.numel() for value in values):
        return
    message = torch.cat(values)
    communicator.broadcast(message)
    if communicator.rank > 0:
        parts = torch.split(message, [value.numel() for value in values])
        for tensor, part in zip(ordered, parts, strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _make_nothing() -> Callable[[nn.Module, Any], None]:
    return _do_nothing


def _do_nothing(model: nn.Module, args: Any) -> None:
    """Stand for the hook in a copy of a model."""
