"""The collectives of the ranks of one node, through memory that they share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from socket import gethostname

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator, Handle
from hf_compressopt.collectives.node_memory import Claim, NodeMemory
from hf_compressopt.collectives.node_pipes import NodePipes
from hf_compressopt.collectives.sums import sum_of_rows
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.flat import FLOAT_BYTES

logger = logging.getLogger(__name__)

#: The most bytes of a rank's blocks.
_LIMIT = 1 << 30


def in_shared_memory(node: Communicator, everyone: Communicator, limit: int = _LIMIT) -> Communicator:
    """Return the ranks of a node with shared memory between them; ``node`` itself if one of the nodes cannot have it.

    They need gloo, tensors on the CPU, one host, and the right to open each other's files. The reason why they go
    without it is logged at the level INFO. All ranks call, and all have it or none has: they start their collectives in
    one order.

    Args:
        node: The ranks of this rank's node.
        everyone: The ranks of all nodes.
        limit: The most bytes of each rank's blocks.
    """
    if not (isinstance(node, TorchCommunicator) and node.name == "gloo" and node.device.type == "cpu"):
        return node
    memory, error = NodeMemory(node.world_size, node.rank, limit), None
    pipes = NodePipes(node.world_size, node.rank, node.timeout())
    try:
        rows = node.gather_together(lambda: (asdict(memory.claim(gethostname())), pipes.make()))
        claims, made = [Claim(**row) for row, _ in rows], [ends for _, ends in rows]
        node.run_together(lambda: memory.open(claims))
        node.run_together(lambda: pipes.open([claim.process for claim in claims], made))
    except OSError as caught:
        error = caught
    if not (reason := everyone.gather_errors(error)):
        return NodeCommunicator(node, memory, pipes)
    if everyone.rank == 0:
        logger.info("the ranks of a node send each other values by gloo, without shared memory: %s", error or reason)
    return node


class NodeCommunicator(Communicator):
    """The ranks of one host. What they sum and gather goes through shared memory, all else through gloo.

    A rank writes what it sends into a block of its own, and sends the others a ticket through pipes; these read it
    where it is. If a rank has no memory for an operation, its ticket says so: then all ranks send this one, and all
    later ones, by gloo.
    """

    shares_memory = True

    def __init__(self, ranks: TorchCommunicator, memory: NodeMemory, pipes: NodePipes) -> None:
        """Take the ranks, the memory in which they have opened each other's first blocks, and the pipes likewise."""
        self.name, self.rank, self.world_size, self.device = ranks.name, ranks.rank, ranks.world_size, ranks.device
        self.process_group, self.traffic = ranks.process_group, ranks.traffic
        self._gloo, self._memory, self._pipes = ranks, memory, pipes

    def sum_parts(
        self, sizes: Sequence[int], write: Callable[[Tensor], object], like: Tensor, factor: float = 1.0
    ) -> tuple[Handle, Callable[[], Tensor]]:
        """See the base class. Bytes: those of an all-to-all."""
        if self._memory.off or like.device.type != "cpu":
            return self._counted().sum_parts(sizes, write, like, factor)
        self.traffic.sent("all_to_all", (sum(sizes) - sizes[self.rank]) * like.element_size())
        operation = self._operation(sum(sizes), like.dtype, write)
        start, own = sum(sizes[: self.rank]), sizes[self.rank]
        instead: list[Callable[[], Tensor]] = []

        def wait() -> None:
            if not operation.arrived():
                gloo = self._uncounted()
                handle, total = gloo.sum_parts(sizes, operation.copy_to, like, factor)
                handle.wait()
                instead.append(total)

        def total() -> Tensor:
            if instead:
                return instead.pop()()
            summed = sum_of_rows([row[start : start + own] for row in operation.rows], factor)
            operation.finish()
            return summed

        return Handle(wait, "all_to_all", self.traffic), total

    @property
    def trades(self) -> bool:
        """True if there are two ranks, with shared memory: those of :meth:`traded`. Alike on both."""
        return self.world_size == 2 and not self._memory.off

    @contextmanager
    def traded(self, sizes: Sequence[int], write: Callable[[Tensor], object]) -> Iterator[Tensor]:
        """Give the other one of two ranks its part, and get this rank's part from it, to be read inside.

        Bytes: those of :meth:`sum_parts`.

        Args:
            sizes: Elements of the part of each rank.
            write: Writes the other rank's part into a float32 tensor that it is given.
        """
        other, own = 1 - self.rank, sizes[self.rank]
        self.traffic.sent("all_to_all", FLOAT_BYTES * sizes[other])
        operation = self._operation(max(sizes), torch.float32, lambda values: write(values[: sizes[other]]))
        instead: list[Tensor] = []

        def wait() -> None:
            if not operation.arrived():
                sent, received = torch.empty(max(sizes)), torch.empty(own)
                operation.copy_to(sent)
                given, got = ([size if rank == other else 0 for rank in range(2)] for size in (sizes[other], own))
                gloo, sent = self._uncounted(), sent[: sizes[other]]
                gloo.all_to_all(received, sent, input_splits=given, output_splits=got).wait()
                instead.append(received)

        Handle(wait, "all_to_all", self.traffic).wait()
        try:
            yield instead[0] if instead else operation.rows[other][:own]
        finally:
            if not instead:
                operation.finish()

    def all_gather(self, output: Tensor, part: Tensor) -> Handle:
        """See the base class. Bytes: the part, to every other rank."""
        if self._memory.off or part.device.type != "cpu":
            return self._counted().all_gather(output, part)
        self.traffic.sent("all_gather", (self.world_size - 1) * part.numel() * part.element_size())
        operation = self._operation(part.numel(), part.dtype, lambda values: values.copy_(part))
        places = torch.split(output, [part.numel()] * self.world_size)

        def wait() -> None:
            if not operation.arrived():
                self._uncounted().all_gather(output, part).wait()
                return
            for rank, (place, row) in enumerate(zip(places, operation.rows, strict=True)):
                if rank != self.rank or place.data_ptr() != part.data_ptr():
                    place.copy_(row)
            operation.finish()

        return Handle(wait, "all_gather", self.traffic)

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Handle:
        """See the base class."""
        return self._counted().all_reduce(tensor, op=op)

    def all_to_all(
        self, output: Tensor, inputs: Tensor, *, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        """See the base class."""
        return self._counted().all_to_all(output, inputs, output_splits=output_splits, input_splits=input_splits)

    def duplicate(self) -> Communicator:
        """See the base class."""
        return self._gloo.duplicate()

    def part(self, ranks: Sequence[int]) -> Communicator:
        """See the base class: some of the ranks, without shared memory."""
        return self._counted().part(ranks)

    def _operation(self, numel: int, dtype: torch.dtype, write: Callable[[Tensor], object]) -> _Operation:
        return _Operation(self._memory, self._pipes, numel, dtype, write)

    def _counted(self) -> TorchCommunicator:
        """Return the ranks over gloo, with the counters of this communicator."""
        gloo = copy(self._gloo)
        gloo.traffic = self.traffic
        return gloo

    def _uncounted(self) -> TorchCommunicator:
        gloo = copy(self._gloo)
        gloo.traffic = Traffic()
        return gloo


class _Operation:
    """One write of each rank, which the others read."""

    def __init__(
        self,
        memory: NodeMemory,
        pipes: NodePipes,
        numel: int,
        dtype: torch.dtype,
        write: Callable[[Tensor], object],
    ) -> None:
        """Have ``numel`` values written, and tell the other ranks."""
        nbytes = numel * dtype.itemsize
        block = memory.block(nbytes)
        own = torch.empty(nbytes, dtype=torch.uint8) if block is None else block.memory[:nbytes]
        self._own, self._memory, self._pipes = own.view(dtype), memory, pipes
        try:
            write(self._own)
        except BaseException:
            if block is not None:
                memory.give_back(block)
            raise
        self._number, self._ticket = memory.begin(block)
        pipes.send(2 * self._number, self._ticket)
        self.rows: list[Tensor] = []

    def arrived(self) -> bool:
        """Wait for all ranks, and fill ``rows`` with what each has written; False if one had no memory for it."""
        tickets = self._pipes.receive(2 * self._number, self._ticket)
        blocks = self._memory.rows(tickets)
        if self._memory.any_new(tickets):  # without it a rank might end before another one has opened its block
            self._pipes.send(2 * self._number + 1, self._ticket)
            self._pipes.receive(2 * self._number + 1, self._ticket)
        if blocks is None:
            if not self._memory.off and self._memory.rank == 0:
                logger.info("the ranks of a node go on without shared memory: one of them cannot get more of it")
            self._memory.off = True
            self.finish()
            return False
        self.rows = [block[: self._own.numel() * self._own.element_size()].view(self._own.dtype) for block in blocks]
        return True

    def copy_to(self, values: Tensor) -> None:
        """Copy what this rank has written."""
        values.copy_(self._own)

    def finish(self) -> None:
        """Let the blocks be used again: this rank has read what it needs."""
        self.rows = []
        self._memory.finish(self._number)
