"""Ranks that run out of inputs before the others, in torch's Join context."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.zero.parameters import PartitionedParameters


class JoinsUnevenInputs(Joinable):
    """Methods of a ZeroOptimizer by which ``with Join([optimizer]):`` takes it.

    A rank without inputs goes on to update its part of the parameters, with zero gradients of its own; averages are
    still taken over all ranks. Inside, every rank runs one pass that sends (others under ``no_sync``) per step.

    Attributes:
        communicator: All ranks.
        partition: The parameters.
    """

    communicator: Communicator
    partition: PartitionedParameters

    @abstractmethod
    def step(self, closure: None = None) -> None:
        """Take one step."""

    def _notify_join_context(self) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the steps that a rank without inputs takes."""
        return _ShadowSteps(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the Join context's own small tensors."""
        return self.communicator.device

    @property
    def join_process_group(self) -> Any:
        """The ranks."""
        return getattr(self.communicator, "process_group", None) or torch.distributed.group.WORLD


class _ShadowSteps(JoinHook):
    """The steps of a rank without inputs."""

    def __init__(self, optimizer: JoinsUnevenInputs) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take part in one pass and one step, without gradients of this rank."""
        self._optimizer.partition.reducer.empty_pass()
        self._optimizer.step()
