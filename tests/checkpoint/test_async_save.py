"""Saves in the background: the state of the call, failures that nobody loses, and the end of the process."""

import json
import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from hf_compressopt import async_save_state, load_state, save_state, wait_for_saves
from hf_compressopt.checkpoint.io import _BACKGROUNDS
from hf_compressopt.checkpoint.save import HostCopy
from hf_compressopt.format.inspect import collect
from tests.checkpoint.kinds import KINDS, train
from tests.checkpoint.kinds import make as make_kind
from tests.checkpoint.test_checkpoint import make
from tests.support.harness import on_ranks, run_ranks, run_ranks_expecting_error
from tests.support.memory import limited

OPTIMIZERS = {
    "OnebitAdam": KINDS["onebit_adam_compressed_2"],
    "ZeroOneAdam": KINDS["zero_one_adam_local_2"],
    "ZeroOptimizer": KINDS["zero1_adamw_2"],
    "AdamW": KINDS["adamw_2"],
}


class Gate(threading.Event):
    """An event that shards wait for; ``reached`` is set when one does."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


@contextmanager
def held_back() -> Iterator[Gate]:
    """Inside, no shard is begun before the gate is set."""
    gate, allocate = Gate(), os.posix_fallocate

    def wait_and_allocate(*args: Any) -> None:
        gate.reached.set()
        assert gate.wait(30)
        allocate(*args)

    with mock.patch.object(os, "posix_fallocate", wait_and_allocate):
        try:
            yield gate
        finally:
            gate.set()


def contents(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """A checkpoint without what differs between two saves of the same."""
    index = json.loads((folder / "compressopt.index.json").read_text())
    shards = [load_file(folder / shard["file"]) for shard in index["shards"]]
    for key in ("save_id", "shards", "digest"):
        del index[key]
    return index, [{key: tensor.tolist() for key, tensor in shard.items()} for shard in shards]


def save_both_ways(rank: int, world_size: int, name: str, directory: str) -> None:
    params, optimizer = make_kind(OPTIMIZERS[name])
    folder = Path(directory)
    for number in range(2):  # the second time in memory that the first one had
        with held_back() as gate:
            train(rank, world_size, params, optimizer, range(5 * number, 5 * number + 3))
            gate.set()
            save_state(optimizer, folder / f"now{number}")
            gate.clear()
            pending = async_save_state(optimizer, folder / f"later{number}")
            if rank == 0:
                gate.set()  # it waits for the other in the background while both train
            train(rank, world_size, params, optimizer, range(5 * number + 3, 5 * number + 5))
            assert not pending.done() and not (folder / f"later{number}" / "compressopt.index.json").exists()
            gate.set()
            pending.result()
        assert pending.done()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_saved_is_the_state_of_the_call(name: str, tmp_path: Path) -> None:
    run_ranks(2, save_both_ways, name, str(tmp_path))
    for number in range(2):
        assert contents(tmp_path / f"later{number}") == contents(tmp_path / f"now{number}")
    assert contents(tmp_path / "now0")[1] != contents(tmp_path / "now1")[1]
    assert not list(tmp_path.rglob("*.tmp"))


def save_on_and_on(rank: int, world_size: int, directory: str) -> list[int]:
    params, optimizer = make(world_size)
    steps, rooms = [], []
    with held_back() as gate:
        gate.set()
        for number in range(3):  # nobody asks for their results
            train(rank, world_size, params, optimizer, range(3 * number, 3 * number + 3))
            async_save_state(optimizer, directory)
            rooms.append({tensor.data_ptr() for tensor in _BACKGROUNDS[optimizer].copy._memory.values()})
        gate.clear()
        _, other = make(world_size)
        threading.Timer(0.2, gate.set).start()
        async_save_state(optimizer, directory)
        dist.destroy_process_group()  # nor does it need the group of the training any more
    _, other = make(1) if rank == 0 else (None, None)
    if other is not None:
        load_state(other, directory)  # waits for the last one, although it is another optimizer's
        steps.append(other.metrics()["step"])
    assert rooms[1] - {0} <= rooms[2] and len(threading.enumerate()) == threading.active_count()
    return steps


def test_the_next_save_and_a_load_wait_and_memory_is_used_again(tmp_path: Path) -> None:
    assert run_ranks(2, save_on_and_on, str(tmp_path))[0] == [9]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3 and names[0].endswith("-of-00002.safetensors") and names[2] == "compressopt.index.json"


NO_ROOM = resource.RLIMIT_FSIZE, 400


def fail_in_the_background(rank: int, world_size: int, directory: str, then: str) -> None:
    params, optimizer = make(world_size)
    train(rank, world_size, params, optimizer, range(4))
    save_state(optimizer, directory)
    train(rank, world_size, params, optimizer, range(4, 6))
    before = {path.name for path in Path(directory).iterdir()}
    dist.barrier()
    with held_back() as gate:
        pending = async_save_state(optimizer, directory)  # sees nothing of it yet
        if rank == 1:
            with limited(*NO_ROOM):
                gate.set()
                pending._thread.join()
        gate.set()
    pending._thread.join()
    dist.barrier()  # each removes its own
    assert {path.name for path in Path(directory).iterdir()} == before
    try:
        {
            "result": pending.result,
            "save": lambda: save_state(optimizer, directory + "-other"),
            "async save": lambda: async_save_state(optimizer, directory + "-other"),
            "load": lambda: load_state(optimizer, directory),
            "wait": wait_for_saves,
        }[then]()
    finally:
        assert optimizer.metrics()["step"] == 6 and not Path(directory + "-other").exists()
        wait_for_saves()  # it is told once
        load_state(optimizer, directory)
        assert optimizer.metrics()["step"] == 4
        async_save_state(optimizer, directory).result()


@pytest.mark.parametrize("then", ["result", "save", "async save", "load", "wait"])
def test_a_failure_is_raised_on_all_ranks_at_what_comes_next(then: str, tmp_path: Path) -> None:
    errors = run_ranks_expecting_error(2, fail_in_the_background, str(tmp_path / "checkpoint"), then)
    assert errors[0].startswith("OSError: another rank failed") and "rank 1: OSError" in errors[0], errors
    assert errors[1].startswith("OSError: [Errno 27] File too large: '") and ".tmp'" in errors[1], errors


def save_into_a_file(rank: int, world_size: int, directory: str) -> None:
    _, optimizer = make(world_size)
    async_save_state(optimizer, directory if rank else f"{directory}/file/checkpoint")


def test_a_folder_that_cannot_be_is_told_at_once_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = run_ranks_expecting_error(2, save_into_a_file, str(tmp_path))
    assert "Not a directory" in errors[0] and "another rank failed" in errors[1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@on_ranks(2)
def test_a_rank_without_memory_for_its_copy_is_heard_of_on_all(rank: int, world_size: int, tmp_path: Path) -> None:
    params, optimizer = make(world_size)
    train(rank, world_size, params, optimizer, range(3))
    save_state(optimizer, tmp_path)
    fails = {"side_effect": MemoryError("no room for a copy")} if rank == 1 else {"new": HostCopy.take}
    with mock.patch.object(HostCopy, "take", **fails):
        pending = async_save_state(optimizer, tmp_path)
        train(rank, world_size, params, optimizer, range(3, 5))  # nobody waits for anybody
        with pytest.raises(MemoryError if rank == 1 else OSError, match="no room for a copy"):
            pending.result()
    load_state(optimizer, tmp_path)
    assert optimizer.metrics()["step"] == 3
    async_save_state(optimizer, tmp_path).result()
    assert len(list(tmp_path.iterdir())) == 3


def break_the_channel(rank: int, world_size: int, directory: str) -> list[float]:
    """A save for which rank 1 comes too late ends after the timeout of the group; the next one has a new channel."""
    dist.destroy_process_group()
    store = dist.FileStore(directory + "-store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=10))
    params, optimizer = make(world_size)
    train(rank, world_size, params, optimizer, range(3))
    with held_back() as gate:
        start = time.monotonic()
        pending = async_save_state(optimizer, directory)
        if rank == 1:
            store.wait(["rank 0 has failed"], timedelta(seconds=50))
        gate.set()
        with pytest.raises(RuntimeError):
            pending.result()
        waited = time.monotonic() - start
        store.set("rank 0 has failed" if rank == 0 else "rank 1 too", "")
        store.wait(["rank 1 too"], timedelta(seconds=50))
    async_save_state(optimizer, directory).result()
    load_state(optimizer, directory)
    assert optimizer.metrics()["step"] == 3
    return [waited]


def test_a_save_has_the_timeout_of_the_group_and_the_next_one_a_new_channel(tmp_path: Path) -> None:
    ((waited,), _) = run_ranks(2, break_the_channel, str(tmp_path / "checkpoint"), timeout=150)
    assert 9 < waited < 60
    assert len(list((tmp_path / "checkpoint").iterdir())) == 3


def test_a_save_in_an_exit_handler_that_can_start_no_thread_is_done_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    params, optimizer = make_kind(OPTIMIZERS["AdamW"])
    train(0, 1, params, optimizer, range(2))
    monkeypatch.setattr(threading.Thread, "start", start)
    assert async_save_state(optimizer, tmp_path).done()
    load_state(make_kind(OPTIMIZERS["AdamW"])[1], tmp_path)
    with limited(*NO_ROOM), pytest.raises(OSError, match="File too large"):
        async_save_state(optimizer, tmp_path / "other")
    wait_for_saves()  # it was told


SCRIPT = textwrap.dedent(
    """
    import atexit, os, sys, time
    from pathlib import Path

    @atexit.register
    def tell():  # the last exit handler
        rested = time.time() - max(file.stat().st_mtime for file in Path(folder).iterdir())
        os.write(1, b"rested %f\\n" % rested)  # in one piece: two ranks write to this pipe

    import torch, torch.distributed as dist
    from torch import nn
    from hf_compressopt import OnebitAdam, async_save_state, save_state

    ending, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    params = [nn.Parameter(torch.ones(40))]
    optimizer = OnebitAdam(params, lr=1e-2, freeze_step=2)
    optimizer.step(lambda: params[0].square().sum().backward())

    allocate = os.posix_fallocate

    def allocate_late(*args):  # a shard takes longer than the rest of the program
        time.sleep(1.0)
        allocate(*args)

    os.posix_fallocate = allocate_late
    if ending == "exit handler that saves":
        atexit.register(save_state, optimizer, folder)
    elif ending == "exit handler that saves in the background":
        atexit.register(async_save_state, optimizer, folder)
    else:
        async_save_state(optimizer, folder)
    if ending == "error":
        raise ValueError("the training has failed")
    """
)


@pytest.mark.parametrize(
    "ending",
    [
        "last act",
        pytest.param("error", marks=pytest.mark.full),
        pytest.param("exit handler that saves", marks=pytest.mark.full),
        "exit handler that saves in the background",
    ],
)
def test_the_end_of_the_process_waits_for_a_save(ending: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "checkpoint"
    script.write_text(SCRIPT)
    launcher = "--standalone --nproc_per_node=2 --max-restarts=0".split()
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(script), ending, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    (facts,) = collect(folder, verify=True)
    assert not facts["problems"] and facts["step"] == 1 and facts["ranks"] == 2, done.stderr
    assert not list(folder.glob("*.tmp"))
    assert (done.returncode == 0) == (ending != "error"), done.stderr
    assert "RuntimeError" not in done.stderr
    if ending != "error":  # whose second rank the launcher ends
        rests = [float(seconds) for seconds in re.findall(r"rested (\S+)", done.stdout)]
        assert len(rests) == 2 and min(rests) >= 0.2, "gloo's threads may be at work when the interpreter shuts down"
