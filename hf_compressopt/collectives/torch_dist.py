"""Any backend of torch.distributed: gloo, NCCL, HCCL, XCCL and others, by its device-neutral calls."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import cache, partial
from queue import SimpleQueue
from secrets import token_hex
from threading import Thread
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore

from hf_compressopt.collectives.communicator import Communicator, Traffic
from hf_compressopt.collectives.mpi import MpiCommunicator

# torch 2.13 renamed it, and warns of the old name
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: Of messages between two ranks; other programs hardly take them.
_TAGS = {"all_to_all": 0x636F01, "all_gather": 0x636F02, "tickets": 0x636F03, "opened": 0x636F04}
#: Bytes of a message up to which gloo's own collectives serve: a thread of our own would take longer than they do.
_SMALL = 1 << 14
#: The groups of some ranks of a process group: all optimizers of the group share them, since none can be given back.
_PARTS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def announced(name: str, least: int = 1) -> int:
    """Read a whole number from a launcher's environment variable; a variable that is not set is ``least``."""
    text = os.environ.get(name, str(least))
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {text!r}: a launcher sets it")
    return int(text)


@contextmanager
def _splitting_nothing() -> Iterator[None]:
    """Let NCCL make a group by itself inside: a split off the default group is a call that all its ranks must make."""
    world = dist.distributed_c10d._get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


class TorchCommunicator(Communicator):
    """A torch.distributed process group, or one rank alone if torch.distributed is not in use."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        traffic: Traffic | None = None,
        alone: bool = False,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.traffic = traffic or Traffic()
        self.process_group = process_group
        if alone or (process_group is None and not (dist.is_available() and dist.is_initialized())):
            ranks = 1 if alone else announced("WORLD_SIZE")
            if ranks > 1:
                raise RuntimeError(
                    f"WORLD_SIZE is {ranks}, but torch.distributed is not initialized: call "
                    "torch.distributed.init_process_group() (Trainer and Accelerate do) before making the optimizer"
                )
            self.name, self.rank, self.world_size = "none", 0, 1
            return
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this rank is not a member of process_group: make the optimizer on its members only")
        self.name = backend_of(process_group, self.device)
        if self.name == "gloo":
            _sender(os.getpid())  # an exit handler could not start it

    def duplicate(self) -> TorchCommunicator:
        """See the base class: a gloo group with the timeout of this one, whatever carries this one."""
        duplicate = copy(self)
        duplicate.device, duplicate.traffic = torch.device("cpu"), Traffic()
        if self.world_size > 1:
            if not dist.is_gloo_available():
                raise ValueError("a second channel between the ranks needs gloo, which this torch was built without")
            # not by new_group: those would end with destroy_process_group(), under a save that is not done
            prefix = f"compressopt/{self.all_gather_object(token_hex(8))[0]}"
            store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
            group = dist.ProcessGroup(store, self.rank, self.world_size)
            timeout = self.timeout() or default_pg_timeout
            gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
            group._register_backend(duplicate.device, dist.ProcessGroup.BackendType.GLOO, gloo)
            duplicate.process_group = group
            duplicate.name = "gloo"
            _sender(os.getpid())  # an exit handler could not start it
        return duplicate

    def part(self, ranks: Sequence[int]) -> TorchCommunicator:
        """See the base class: a group that ends with ``destroy_process_group()``, with the timeout of this one."""
        everyone = dist.get_process_group_ranks(self.process_group)
        if everyone != sorted(everyone):
            raise ValueError(f"the hierarchical topology needs a process_group whose ranks ascend, got {everyone}")
        chosen, found = tuple(everyone[rank] for rank in ranks), copy(self)
        made = _PARTS.setdefault(self._group, {})
        if chosen not in made:
            with _splitting_nothing():
                made[chosen] = dist.new_group(list(chosen), timeout=self.timeout(), use_local_synchronization=True)
        found.process_group = made[chosen]
        found.rank, found.world_size = dist.get_rank(found.process_group), len(ranks)
        return found

    def timeout(self) -> timedelta | None:
        """Return how long a collective may take before it fails; None if the backend does not tell."""
        try:
            return self._group._get_backend(self.reached().device).options._timeout
        except (RuntimeError, AttributeError):
            return None

    def reached(self) -> TorchCommunicator:
        """See the base class: NCCL does not send the tensors of a model that is still on the CPU."""
        if self.name != "nccl" or self.device.type == "cuda":
            return self
        found = copy(self)
        found.device = torch.device("cuda", torch.cuda.current_device())
        return found

    def _all_reduce(self, tensor: Tensor, op: str) -> Callable[[], Any]:
        if self.world_size == 1:
            return lambda: None
        work: Any = dist.all_reduce(tensor, _OPS[op], group=self.process_group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def all_reduce_future(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Start summing ``tensor`` over the ranks in place; the future's value is the tensor. For DDP hooks."""
        self._count_all_reduce(tensor)
        work = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        future = cast("dist.Work", work).get_future()
        return cast("torch.futures.Future[Tensor]", future.then(lambda done: done.value()[0]))

    def _all_to_all(
        self, output: Tensor, inputs: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Callable[[], Any]:
        work: Any
        if not self._sends_apart(inputs):
            work = dist.all_to_all_single(
                output, inputs, output_splits, input_splits, group=self.process_group, async_op=True
            )
        elif 0 < inputs.nbytes <= _SMALL:
            work = self._group.alltoall_base(output, inputs, output_splits, input_splits)
        else:
            return self._exchange(torch.split(output, output_splits), torch.split(inputs, input_splits), "all_to_all")
        return work.wait  # type: ignore[no-any-return]

    def _all_gather(self, output: Tensor, part: Tensor) -> Callable[[], Any]:
        work: Any
        if not self._sends_apart(part):
            work = _all_gather_single(output, part, group=self.process_group, async_op=True)
        elif 0 < part.nbytes <= _SMALL:
            work = self._group._allgather_base(output, part)
        else:
            places = torch.split(output, [part.numel()] * self.world_size)
            return self._exchange(places, [part] * self.world_size, "all_gather")
        return work.wait  # type: ignore[no-any-return]

    def _broadcast(self, data: Tensor) -> None:
        self._group.broadcast(data, 0).wait()

    @property
    def _group(self) -> dist.ProcessGroup:
        return cast("dist.ProcessGroup", dist.group.WORLD if self.process_group is None else self.process_group)

    def _sends_apart(self, tensor: Tensor) -> bool:
        """Return whether :meth:`_exchange` carries tensors like this one."""
        return self.name == "gloo" and tensor.device.type == "cpu"

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], kind: str) -> Callable[[], None]:
        """Start sending ``inputs[j]`` to rank j, and receiving its part for this rank into ``outputs[j]``.

        gloo announces a receive on the connection that carries data to that peer, and behind the data the announcement
        comes late. So all receives start before the first send. Sends take milliseconds: a thread of its own starts
        them, in order.
        """
        started = _sender(os.getpid()).submit(partial(self._start, outputs, inputs, kind))

        def wait() -> None:
            for work in started.result():
                work.wait()

        return wait

    def _start(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], kind: str) -> list[dist.Work]:
        """Start all receives and then all sends, and copy this rank's own part."""
        group = self._group
        peers, tag = [(self.rank + step) % self.world_size for step in range(1, self.world_size)], _TAGS[kind]
        works = [group.recv([outputs[peer]], peer, tag) for peer in reversed(peers) if outputs[peer].numel()]
        works += [group.send([inputs[peer]], peer, tag) for peer in peers if inputs[peer].numel()]
        if outputs[self.rank].data_ptr() != inputs[self.rank].data_ptr():
            outputs[self.rank].copy_(inputs[self.rank])
        return works


class _Sender:
    """A daemon thread that starts sends, in order; executors end before exit handlers, in which saves still send."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], list[dist.Work]], Future[list[dist.Work]]]] = SimpleQueue()
        Thread(target=self._run, name=f"compressopt-sender-{os.getpid()}", daemon=True).start()

    def submit(self, start: Callable[[], list[dist.Work]]) -> Future[list[dist.Work]]:
        started: Future[list[dist.Work]] = Future()
        self._queue.put((start, started))
        return started

    def _run(self) -> None:
        while True:
            start, started = self._queue.get()
            try:
                started.set_result(start())
            except BaseException as error:
                started.set_exception(error)
            del start, started  # they hold tensors


@cache
def _sender(process: int) -> _Sender:
    """Return the sender of a process: a forked one has no threads of its parent's."""
    return _Sender()


@atexit.register
def _rest_at_exit() -> None:
    """Let gloo's threads come to rest, after all other exit handlers, before the interpreter shuts down.

    They take the interpreter's lock to let go of a collective's tensors (seen in torch 2.13), which aborts a process
    that is shutting down. A handler that sleeps gives the lock away in time.
    """
    if _sender.cache_info().currsize:
        time.sleep(0.2)


def backend_of(process_group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Name of the backend that carries tensors of this device, such as "gloo" in a "cpu:gloo,cuda:nccl" group."""
    config = dist.get_backend_config(process_group)
    pairs = dict(part.split(":", 1) for part in str(config).split(",") if ":" in part)
    return pairs.get(device.type, str(dist.get_backend(process_group)))


def make_communicator(
    name: str | Communicator | None,
    process_group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    traffic: Traffic,
    cuda_aware: bool = False,
) -> Communicator:
    """Return the communicator for the ``communicator`` option; None, "auto" and "compressed" are any backend."""
    if isinstance(name, Communicator):
        return name.taken(traffic)
    if name == "mpi":
        return MpiCommunicator(process_group, device=device, traffic=traffic, cuda_aware=cuda_aware)
    communicator = TorchCommunicator(process_group, device=device, traffic=traffic)
    if name in (None, "auto", "compressed") or name == communicator.name:
        return communicator
    if communicator.name == "none":  # one rank alone sends nothing: any transport that torch knows will do
        if name in dist.Backend.backend_list:
            return communicator
        legal = sorted({"auto", "mpi", *dist.Backend.backend_list})
        raise ValueError(f"communicator must be one of {legal}, got {name!r}")
    raise ValueError(
        f"communicator={name!r} is not the backend of the process group: for {device.type} tensors it has "
        f"{communicator.name!r}; legal are 'auto', {communicator.name!r} and 'mpi', or make a process group with "
        f"backend={name!r} and pass it as process_group"
    )
