"""Ranks for compare_convergence.py: threads of this process, or gloo processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from _convergence_runs import Job
from _convergence_training import Texts, train
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator, Handle, Traffic
from hf_compressopt.collectives.torch_dist import TorchCommunicator

_Result = TypeVar("_Result")
_Operands = tuple[Any, ...]


class Ranks(Protocol):
    """The ranks of one world size, which take one job after the other."""

    def run(self, job: Job) -> dict[str, Any]:
        """Return the row of rank 0."""

    def close(self, *, at_once: bool) -> None:
        """End the ranks."""


# -- threads ----------------------------------------------------------------------------------------------------------


class Room:
    """The threads of one process that are ranks. One of them runs at a time, until it waits for the others.

    So each rank can have torch's generator of random numbers to itself, and a run gives the same bits every time.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._gates = [threading.Semaphore(0) for _ in range(world_size)]
        self._random = [torch.get_rng_state() for _ in range(world_size)]
        self._running = list(range(world_size))
        self._posted, self._completed = [0] * world_size, 0
        self._operations: dict[int, dict[int, _Operands]] = {}
        self._error: BaseException | None = None

    def run(self, action: Callable[[int], _Result]) -> list[_Result]:
        """Run ``action`` on every rank and return their results.

        Raises:
            BaseException: The first error of any rank; the other ranks stop too.
        """
        results: dict[int, _Result] = {}
        threads = [
            threading.Thread(target=self._run, args=(rank, action, results), daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(self.world_size)]

    def _run(self, rank: int, action: Callable[[int], _Result], results: dict[int, _Result]) -> None:
        torch.set_num_threads(1)  # of this thread
        self._gates[rank].acquire()
        try:
            if self._error is None:
                torch.set_rng_state(self._random[rank])
                results[rank] = action(rank)
        except BaseException as error:
            self._error = self._error or error
        following = self._after(rank)
        self._running.remove(rank)
        if following is not None:
            self._gates[following].release()

    def _after(self, rank: int) -> int | None:
        others = [(other - rank) % self.world_size for other in self._running if other != rank]
        return (rank + min(others)) % self.world_size if others else None

    def post(self, rank: int, operands: _Operands) -> int:
        """Take part in the next collective of this rank, and return its number; the last rank to come carries it out.

        Until :meth:`wait` has returned, the tensors of a collective belong to it.
        """
        number = self._posted[rank]
        self._posted[rank] += 1
        everyone = self._operations.setdefault(number, {})
        everyone[rank] = operands
        if len(everyone) == self.world_size:
            carry_out([everyone[other] for other in range(self.world_size)])
            del self._operations[number]
            self._completed = number + 1
        return number

    def wait(self, rank: int, number: int) -> None:
        """Let the other ranks run until a collective is done.

        Raises:
            RuntimeError: If another rank failed, or none is left that could take part.
        """
        while number >= self._completed:
            following = self._after(rank)
            if following is None:
                raise RuntimeError(f"rank {rank} waits for ranks that have ended")
            self._random[rank] = torch.get_rng_state()
            self._gates[following].release()
            self._gates[rank].acquire()
            if self._error is not None:
                raise RuntimeError("another rank failed")
            torch.set_rng_state(self._random[rank])


@torch.no_grad()
def carry_out(operands: Sequence[_Operands]) -> None:
    """Carry out a collective, given the operands of every rank: its kind, and what the communicator's method takes.

    Raises:
        RuntimeError: If the ranks differ in the kind.
    """
    kinds = {kind for kind, *_ in operands}
    if len(kinds) > 1:
        raise RuntimeError(f"the ranks started different collectives: {sorted(kinds)}")
    kind = kinds.pop()
    if kind == "all_gather":
        everything = torch.cat([part.view(-1) for _, _, part in operands])
        for _, output, _ in operands:
            output.view(-1).copy_(everything)
    elif kind == "all_to_all":
        sent = [inputs.split(splits) for _, _, inputs, splits in operands]
        for rank, (_, output, _, _) in enumerate(operands):
            torch.cat([parts[rank] for parts in sent], out=output)
    else:
        combine = torch.add if kind == "sum" else torch.maximum
        result = operands[0][1].clone()
        for _, tensor in operands[1:]:
            combine(result, tensor, out=result)
        for _, tensor in operands:
            tensor.copy_(result)


class InProcess(Communicator):
    """One rank of a :class:`Room`. Bytes are counted as for a torch.distributed process group."""

    name = "in-process"

    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.world_size, self.device = rank, room.world_size, torch.device("cpu")
        self.traffic, self._room = Traffic(), room

    def __deepcopy__(self, memo: dict[int, Any]) -> InProcess:
        copied = InProcess(self._room, self.rank)
        memo[id(self)] = copied
        return copied

    def _start(self, counted: str, nbytes: int, *operands: Any) -> Handle:
        self.traffic.sent(counted, nbytes)
        number = self._room.post(self.rank, operands)
        return Handle(lambda: self._room.wait(self.rank, number), counted, self.traffic)

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Handle:
        nbytes = 2 * (self.world_size - 1) * tensor.numel() * tensor.element_size() // self.world_size
        return self._start("all_reduce", nbytes, op, tensor)

    def all_to_all(
        self, output: Tensor, inputs: Tensor, *, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        nbytes = (inputs.numel() - input_splits[self.rank]) * inputs.element_size()
        return self._start("all_to_all", nbytes, "all_to_all", output, inputs, list(input_splits))

    def all_gather(self, output: Tensor, part: Tensor) -> Handle:
        nbytes = (self.world_size - 1) * part.numel() * part.element_size()
        return self._start("all_gather", nbytes, "all_gather", output, part)

    def _broadcast(self, data: Tensor) -> None:
        everyone = data.new_empty(self.world_size * data.numel())
        with self.traffic.paused():
            self.all_gather(everyone, data).wait()
        data.copy_(everyone[: data.numel()])

    def duplicate(self) -> InProcess:
        raise ValueError("the ranks of one process have one channel: save in the foreground")


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, world_size: int, texts: Texts) -> None:
        self._world_size, self._texts = world_size, texts

    def run(self, job: Job) -> dict[str, Any]:
        """Return the row of rank 0."""
        room = Room(self._world_size)
        return room.run(lambda rank: train(job, lambda: InProcess(room, rank), self._texts))[0]

    def close(self, *, at_once: bool) -> None:
        """Nothing runs between two jobs."""


# -- processes --------------------------------------------------------------------------------------------------------


def serve(rank: int, world_size: int, store: str, texts: Texts, connection: Connection) -> None:
    """One rank: takes jobs until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its ranks
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        while True:
            connection.send(train(connection.recv(), TorchCommunicator, texts))
    except EOFError:
        dist.destroy_process_group()


class Processes:
    """Ranks that are gloo processes."""

    def __init__(self, world_size: int, texts: Texts, directory: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = os.path.join(directory, f"store{world_size}")
            process = context.Process(target=serve, args=(rank, world_size, store, texts, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, job: Job) -> dict[str, Any]:
        """Return the row of rank 0.

        Raises:
            RuntimeError: If a rank died.
        """
        for connection in self.connections:
            connection.send(job)
        try:
            return [connection.recv() for connection in self.connections][0]
        except EOFError:
            raise RuntimeError(f"a rank of {job.run.name} at {job.world_size} ranks died; see its traceback") from None

    def close(self, *, at_once: bool) -> None:
        """End the ranks."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            if not at_once:
                process.join(timeout=20)
            process.kill()
            process.join()
