"""Ranks that are threads of one process and share a device: a Communicator whose messages are copies.

    world = World(8, device)
    ranks = world.communicators()
    optimizers = [OnebitAdam(params, communicator=ranks[rank]) for rank, params in enumerate(replicas)]
    world.run(lambda rank: optimizers[rank].step())

Optimizers, kernels, errors and messages are the package's; what is missing is the network. The last rank that starts a
collective carries it out for all, so on a GPU the one stream of all threads orders it. Make optimizers in the main
thread. Nothing may send while backward runs, since one thread runs the backward passes of a device: no hooks of DDP, no
ZeRO, no clip="late".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator, Traffic

_Result = TypeVar("_Result")
Operands = tuple[Any, ...]


@dataclass
class Slot:
    """A collective that some ranks have started."""

    kind: str
    operands: dict[int, Operands] = field(default_factory=dict)
    done: bool = False


class World:
    """Threads, one for each rank. seconds: how long a rank waits for the others before it fails."""

    def __init__(self, world_size: int, device: torch.device, seconds: float = 60.0) -> None:
        self.world_size, self.device, self.seconds = world_size, device, seconds
        self.changed = threading.Condition()
        self.slots: dict[tuple[int, int], Slot] = {}  # by channel, and number in the channel
        self.channels = 0
        self.failed: BaseException | None = None
        kernels.implementation(device)  # the check at the first use, once
        self._threads = ThreadPoolExecutor(world_size, "rank", initializer=self._begin_thread)

    def _begin_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def communicators(self) -> list[Loopback]:
        """Return the ranks of a channel of their own: each optimizer needs one, and so does each other sender."""
        self.channels += 1
        return [Loopback(self, self.channels, rank) for rank in range(self.world_size)]

    def run(self, work: Callable[[int], _Result]) -> list[_Result]:
        """Call work(rank) in all threads at once, and return what each returned. The first error ends all ranks."""
        futures = [self._threads.submit(self._run_rank, work, rank) for rank in range(self.world_size)]
        for future in futures:
            future.exception()  # waits: no thread goes on behind an error
        if self.failed is not None:
            raise self.failed
        return [future.result() for future in futures]

    def _run_rank(self, work: Callable[[int], _Result], rank: int) -> _Result:
        try:
            return work(rank)
        except BaseException as error:
            with self.changed:
                self.failed = self.failed or error
                self.changed.notify_all()
            raise

    def start(self, channel: int, number: int, kind: str, rank: int, operands: Operands) -> Slot:
        """Take part in a collective, and carry it out if all others do already."""
        with self.changed:
            slot = self.slots.setdefault((channel, number), Slot(kind))
            if slot.kind != kind:
                raise RuntimeError(f"rank {rank} starts {kind}, and another rank {slot.kind}")
            slot.operands[rank] = operands
            if len(slot.operands) == self.world_size:
                with torch.no_grad():
                    _COLLECTIVES[kind]([slot.operands[rank] for rank in range(self.world_size)])
                del self.slots[channel, number]
                slot.operands.clear()
                slot.done = True
                self.changed.notify_all()
        return slot

    def wait(self, slot: Slot) -> None:
        with self.changed:
            self.changed.wait_for(lambda: slot.done or self.failed is not None, self.seconds)
            if not slot.done:
                missing = sorted(set(range(self.world_size)) - slot.operands.keys())
                raise RuntimeError(f"ranks {missing} did not start {slot.kind}")


class Loopback(Communicator):
    """A rank of a :class:`World`."""

    name = "loopback"

    def __init__(self, world: World, channel: int, rank: int) -> None:
        self.world, self.channel, self.rank, self.world_size = world, channel, rank, world.world_size
        self.device, self.traffic = world.device, Traffic()
        self._count = 0  # collectives that this rank has started: alike on all ranks

    def _start(self, kind: str, *operands: Any) -> Callable[[], None]:
        self._count += 1
        slot = self.world.start(self.channel, self._count, kind, self.rank, operands)
        return lambda: self.world.wait(slot)

    def _all_reduce(self, tensor: Tensor, op: str) -> Callable[[], None]:
        return self._start(op, tensor)

    def _all_to_all(
        self, output: Tensor, inputs: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Callable[[], None]:
        return self._start("all_to_all", output, inputs, input_splits)

    def _all_gather(self, output: Tensor, part: Tensor) -> Callable[[], None]:
        return self._start("all_gather", output, part)

    def _broadcast(self, data: Tensor) -> None:
        self._start("broadcast", data)()

    def duplicate(self) -> Communicator:
        raise ValueError("ranks in one process have no second channel: save with background=False")

    def part(self, ranks: Sequence[int]) -> Communicator:
        raise ValueError("ranks in one process have no parts: give topology='flat'")


def _reduce(operands: list[Operands], combine: Callable[..., Tensor]) -> None:
    """Combine in rank order."""
    (first,), *others = operands
    total = first.clone()
    for (tensor,) in others:
        combine(total, tensor, out=total)
    for (tensor,) in operands:
        tensor.copy_(total)


def _gather(operands: list[Operands]) -> None:
    whole = torch.cat([part.reshape(-1) for _, part in operands])  # a part may lie in its rank's output
    for output, _ in operands:
        output.copy_(whole.view_as(output))


def _exchange(operands: list[Operands]) -> None:
    parts = [torch.split(inputs, splits) for _, inputs, splits in operands]
    for rank, (output, *_) in enumerate(operands):
        torch.cat([sent[rank] for sent in parts], out=output)


def _spread(operands: list[Operands]) -> None:
    (first,), *others = operands
    for (tensor,) in others:
        tensor.copy_(first)


_COLLECTIVES: dict[str, Callable[[list[Operands]], None]] = {
    "sum": lambda operands: _reduce(operands, torch.add),
    "max": lambda operands: _reduce(operands, torch.maximum),
    "all_gather": _gather,
    "all_to_all": _exchange,
    "broadcast": _spread,
}
