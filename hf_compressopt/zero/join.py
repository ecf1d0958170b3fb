"""Ranks that run out of inputs before the others: torch's Join context (``torch.distributed.algorithms.Join``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from hf_compressopt.zero.access import ZeroAccess


class JoinableZero(ZeroAccess, Joinable):
    """A partitioned optimizer that ``with Join([optimizer]):`` takes.

    A rank without inputs goes on to update its part of the parameters, with gradients of zero of its own; averages are
    still taken over all ranks. Inside, every rank runs one pass that sends (others under ``no_sync``) per step.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class."""
        ZeroAccess.__init__(self, *args, **options)
        Joinable.__init__(self)
        self._reducer.announce_passes(self._notify_join_context)

    def _notify_join_context(self) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does for each step of the others."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Where the Join context's own small tensors must lie."""
        return self.communicator.device

    @property
    def join_process_group(self) -> Any:
        """The ranks."""
        return getattr(self.communicator, "process_group", None) or torch.distributed.group.WORLD


class _Shadow(JoinHook):
    def __init__(self, optimizer: JoinableZero) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """One pass and one step, without gradients of this rank's own."""
        self._optimizer._reducer.empty_pass()
        self._optimizer.step()
