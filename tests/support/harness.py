"""Run a function on real ranks: a pool of worker processes joined in a gloo process group.

    results = run_ranks(2, work, argument)     # work(rank, world_size, argument), a module-level function

    @on_ranks(2)
    def test_something(rank, world_size, tmp_path): ...

The workers are forked once per test session, from a process that has imported torch, and reused: importing torch costs
more than most tests. Every call makes a process group of its own and destroys it afterwards. Arguments and results
travel through pickle.
"""

import atexit
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import pytest
from torch.distributed import TCPStore

from tests.support.forking import forked

MAX_WORLD_SIZE = 8
_TOGETHER = 1 << 16  # as it is in the package


class Failure(NamedTuple):
    type: str
    message: str
    traceback: str


class RankError(Exception):
    """At least one rank raised; `errors` maps each such rank to its Failure."""

    def __init__(self, errors: dict[int, Failure]):
        self.errors = errors
        super().__init__("\n".join(f"--- rank {rank} ---\n{errors[rank].traceback}" for rank in sorted(errors)))


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Results of `fn(rank, world_size, *args)` by rank; RankError if a rank raised, TimeoutError if one hung."""
    outcomes = _pool.run(world_size, fn, args, timeout)
    errors = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}
    if errors:
        raise RankError(errors)
    return outcomes


def on_ranks(*world_sizes: int, timeout: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of `fn(rank, world_size, ...)` on ranks; without world sizes `world_size` is pytest's too."""

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            own = (given.pop("world_size"),) if not world_sizes else ()
            for world_size in world_sizes or own:
                run_ranks(world_size, _run_test, fn.__module__, fn.__name__, given, timeout=timeout)

        test.__name__, test.__qualname__, test.__module__ = fn.__name__, fn.__qualname__, fn.__module__
        test.__doc__, test.on_each_rank = fn.__doc__, fn
        test.__signature__ = inspect.Signature([*inspect.signature(fn).parameters.values()][2 if world_sizes else 1 :])
        return test

    return decorate


def same_on_all_ranks(tensors: Any) -> bool:
    """True if every rank's tensors, one after the other in float32, have the same bits."""
    import torch
    import torch.distributed as dist

    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    return all(torch.equal(gathered[0].view(torch.int32), other.view(torch.int32)) for other in gathered)


def _run_test(rank: int, world_size: int, module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).on_each_rank(rank, world_size, **given)


def run_ranks_of_which_one_dies(world_size: int, fn: Callable[..., Any], *args: Any) -> None:
    """Run ranks of which one ends its process. The others are to end by themselves: the caller kills the pool then."""
    _pool.kill = lambda: None  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="died"):
            run_ranks(world_size, fn, *args)
    finally:
        del _pool.kill  # type: ignore[method-assign]


def run_ranks_expecting_error(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> dict[int, str]:
    """The error of every rank, as "TypeName: message"; AssertionError if any rank got through."""
    outcomes = _pool.run(world_size, fn, args, timeout)
    unharmed = [rank for rank, outcome in enumerate(outcomes) if not isinstance(outcome, Failure)]
    assert not unharmed, f"ranks {unharmed} of {world_size} raised no error"
    return {rank: f"{outcome.type}: {outcome.message}" for rank, outcome in enumerate(outcomes)}


class RankPool:
    def __init__(self) -> None:
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.connections: list[Connection] = []
        self.store: TCPStore | None = None  # of all runs: a store of files would make ranks wait in steps of 10 ms
        self.runs = 0

    def run(self, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size must be in [1, {MAX_WORLD_SIZE}], got {world_size}")
        try:
            self._start(world_size)
            self.runs += 1
            for rank in range(world_size):
                self.connections[rank].send_bytes(pickle.dumps((fn, rank, world_size, args, self.runs, timeout)))
            outcomes = self._collect(world_size, timeout)
            for rank in range(world_size):  # nobody's connections close while another rank may still be reading
                self.connections[rank].send_bytes(b"leave")
            for rank in range(world_size):
                self.connections[rank].recv_bytes()
            return outcomes
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self.connections:
            connection.close()
        self.processes, self.connections, self.store = [], [], None

    def _start(self, world_size: int) -> None:
        self.store = self.store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(len(self.processes), world_size):
            ours, theirs = multiprocessing.Pipe()
            process = forked(_serve, theirs, self.store.port)
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def _collect(self, world_size: int, timeout: float) -> list[Any]:
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < world_size:
            waiting = {self.connections[rank]: rank for rank in range(world_size) if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failed = [f"rank {rank}: {o.message}" for rank, o in outcomes.items() if isinstance(o, Failure)]
                raise TimeoutError(
                    f"ranks {sorted(waiting.values())} of {world_size} gave no result within {timeout:g} s"
                    + (f"; {'; '.join(failed)}" if failed else "")
                )
            for connection in ready:
                rank = waiting[connection]
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    raise RuntimeError(f"the process of rank {rank} died (exit or signal) inside the test") from None
        return [outcomes[rank] for rank in range(world_size)]


def _serve(connection: Connection, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, OSError):  # the session is over
            return
        outcome = pickle.dumps(_run_task(task, store))
        gc.collect()  # a failed rank must let go of its group, or the others wait for it
        gc.freeze()  # what is left are modules that the test imported
        connection.send_bytes(outcome)
        connection.recv_bytes()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        connection.send_bytes(b"left")


def _run_task(task: bytes, connected: TCPStore) -> Any:
    import torch
    import torch.distributed as dist

    from hf_compressopt.collectives import exchange
    from hf_compressopt.kernels import messages

    environment = dict(os.environ)
    try:
        fn, rank, world_size, args, number, timeout = pickle.loads(task)
        torch.manual_seed(0)
        store = dist.PrefixStore(f"{number}", connected)
        store.set_timeout(timedelta(seconds=timeout))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        if store.add("joined", 1) == world_size:  # a rank that fails early must not break another one's start
            store.set("all_joined", "1")
        store.wait(["all_joined"])
        # models of tests are so small that all their buckets would be sent together: on two ranks they are sent apart
        exchange.TOGETHER = _TOGETHER if world_size > 2 else 1
        messages.OWN_BLOCKS = 0  # and so small that none of their tensors would be sent as signs
        outcome = fn(rank, world_size, *args)
        pickle.dumps(outcome)  # a result that does not pickle is the rank's own error
        return outcome
    except BaseException as error:
        # A thread of gloo may wait for the interpreter's lock, to let go of its last collective's tensors: who drops
        # the group holds the lock and waits for the thread.
        time.sleep(0.1)
        if dist.is_initialized():
            dist.destroy_process_group()
        return Failure(type(error).__name__, str(error), traceback.format_exc())
    finally:  # the next task must not find what this one has set, such as Trainer's WORLD_SIZE
        os.environ.clear()
        os.environ.update(environment)


_pool = RankPool()
atexit.register(_pool.kill)
