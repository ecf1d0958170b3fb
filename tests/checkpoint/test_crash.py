"""Saves that are killed or meet a full disk: the folder holds one whole checkpoint, the last or the one before.

The kills: a process that has imported everything forks two ranks, which save again and again. At a random moment, by
the clock or at a random call into the file system, one of them is killed, and then the other.
"""

import errno
import io
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_compressopt import async_save_state, load_state, save_state
from hf_compressopt.checkpoint.compressed import empty_messages
from hf_compressopt.format.index import CheckpointError
from hf_compressopt.optim.moments import CompactMoments
from tests.checkpoint.kinds import train
from tests.checkpoint.test_checkpoint import make
from tests.checkpoint.test_resharding import stored
from tests.support.forking import forked
from tests.support.harness import run_ranks
from tests.support.memory import limited

KILLS, SEED = 96, 20
HOW = ("now", "async", "now, rotating", "async, rotating", "now, compact", "async, compact, rotating")
CALLS = ("open", "write", "posix_fallocate", "fsync", "replace", "unlink", "mkdir")
RENAME = ("replace",)  # after which others see a file


def fill(optimizer: Any, version: float) -> None:
    """Give every tensor of the state, every error and the step this value, and bytes the value of :func:`marker`."""
    for state in optimizer._states:
        moments = state.moments
        averages = [each.values if each.messages is None else each.messages for each in moments.messages]
        codes = [moments.codes, moments.tops] if isinstance(moments, CompactMoments) else []
        for tensor in (state.errors.worker, state.errors.server, *codes, *averages):
            tensor.fill_(marker(version, tensor))
    for group in optimizer.param_groups:
        for param in group["params"]:
            for tensor in optimizer.state[param].values():
                tensor.fill_(version)
    optimizer._step = 0 if math.isnan(version) else int(version)


def marker(version: float, tensor: torch.Tensor) -> float:
    """The value that stands for a version in a tensor of this dtype."""
    return version if tensor.is_floating_point() else 250 if math.isnan(version) else int(version) % 250


def take_compact_form(optimizer: Any) -> None:
    """Put codes and messages where a compressed step puts them."""
    for state in optimizer._states:
        if isinstance(state.moments, CompactMoments):
            cut = optimizer.bucket_numel, state.communicator.world_size, optimizer.scale_block
            state.moments.freeze()
            state.moments.last = empty_messages(state.layout, *cut, state.device)
            state.moments.free_float32()


def kill_at(number: int, names: Sequence[str]) -> None:
    """Die in the call of this number among these into the file system: before it, amid a write, or after it."""
    calls = 0

    def watched(call: Callable[..., Any], before: bool) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < number:
                return call(*args, **kwargs)
            if call.__name__ == "write":
                call(args[0], memoryview(args[1])[: len(args[1]) // 2])
            elif not before:
                call(*args, **kwargs)
            return os.kill(os.getpid(), signal.SIGKILL)

        return counting

    for place, name in enumerate(names):
        owner: Any = Watched if name == "write" else os
        setattr(owner, name, watched(getattr(owner, name), before=len(names) > 1 and (number + place) % 2 == 0))
    mock.patch("builtins.open", opened).start()


class Watched(io.FileIO):
    """A file that a save writes; :func:`kill_at` watches its ``write``."""

    write = io.FileIO.write


def opened(path: Any, mode: str = "r", *args: Any, opener: Any = None, open: Any = open, **kwargs: Any) -> Any:
    if opener is None:
        return open(path, mode, *args, **kwargs)
    return io.BufferedWriter(Watched(path, mode.replace("b", ""), opener=opener))


BEGUN, FINISHED = 1, 2  # places of versions in memory that outlives a rank; 0 and 3 tell that a rank is ready


def save_again_and_again(
    rank: int, store: str, folder: Path, how: str, version: int, progress: Any, death: Any
) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    _, optimizer = make(2, form="compact" if "compact" in how else "float32")
    if "compact" in how:
        take_compact_form(optimizer)
    progress[3 * rank] = 1
    if death is not None:
        kill_at(*death)
    pending = None
    while True:
        version += 1
        directory = folder / f"checkpoint-{version}" if "rotating" in how else folder
        fill(optimizer, version)
        progress[BEGUN] = version
        if "async" in how:
            if pending is not None:
                pending.result()
                progress[FINISHED] = version - 1
            pending = async_save_state(optimizer, directory)
            fill(optimizer, math.nan)
        else:
            save_state(optimizer, directory)
            progress[FINISHED] = version
        if "rotating" in how and rank == 0:
            shutil.rmtree(folder / f"checkpoint-{version - 2}", ignore_errors=True)


def one_life(folder: Path, how: str, version: int, chance: random.Random) -> tuple[int, int]:
    """Start two ranks, kill them. Returns the last versions that were begun and finished."""
    progress, store = multiprocessing.RawArray("q", 4), f"{folder}.store"
    progress[BEGUN] = progress[FINISHED] = version
    victim, by = chance.randrange(2), chance.choices(("clock", "call", "rename"), (3, 4, 3))[0]
    death = {"clock": None, "call": (chance.randrange(1, 40), CALLS), "rename": (chance.randrange(1, 7), RENAME)}[by]
    ranks = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            try:
                save_again_and_again(rank, store, folder, how, version, progress, death if rank == victim else None)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(1)
        ranks.append(child)
    try:
        deadline = time.monotonic() + 30
        while not (progress[0] and progress[3]) and time.monotonic() < deadline:
            time.sleep(0.001)
        if death is not None:
            _, status = os.waitpid(ranks[victim], 0)
            assert os.WIFSIGNALED(status), "the rank ended by itself"
            time.sleep(chance.choice([0, 0.05]))
        else:
            time.sleep(chance.uniform(0, 0.1))
            os.kill(ranks[victim], signal.SIGKILL)
            os.waitpid(ranks[victim], 0)
            time.sleep(chance.choice([0, 0, 0.05]))
    finally:
        os.kill(ranks[1 - victim], signal.SIGKILL)
        os.waitpid(ranks[1 - victim], 0)
        Path(store).unlink(missing_ok=True)
    return progress[BEGUN], progress[FINISHED]


def load_version(folder: Path) -> int | None:
    """The version that a folder holds, whole and not mixed; None where it is refused because a file is missing."""
    _, optimizer = make(1)
    try:
        load_state(optimizer, folder)
    except CheckpointError as error:
        assert "is missing: the" in str(error), error  # the index; or a shard, of a folder that was being removed
        return None
    files = stored(folder)
    if any(tensor.dtype == torch.uint8 for tensor in files.values()):
        for name, tensor in files.items():
            whole = tensor == marker(optimizer._step, tensor)
            assert whole.all() or name.startswith("exp_avg_mask/"), f"{name} is mixed, at step {optimizer._step}"
        return int(optimizer._step)
    values = {v.item() for state in optimizer.state.values() for t in state.values() for v in t.unique()}
    for state in optimizer._states:
        values |= {v.item() for error in (state.errors.worker, state.errors.server) for v in error.unique()}
    assert values == {float(optimizer._step)}, f"the values {values} are mixed, at step {optimizer._step}"
    return int(optimizer._step)


def newest(folder: Path, how: str) -> int | None:
    if "rotating" not in how:
        return load_version(folder)
    numbers = sorted((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), reverse=True)
    found = [load_version(folder / f"checkpoint-{number}") for number in numbers]
    assert all(version in (None, number) for version, number in zip(found, numbers, strict=True)), (numbers, found)
    return next((version for version in found if version is not None), None)


def kill_savers(connection: Any, directory: str) -> None:
    """Kill savers again and again. Runs in a process of its own, without threads."""
    torch.set_num_threads(1)
    chance, outcomes = random.Random(SEED), []
    try:
        for kill in range(KILLS):
            how = HOW[kill % len(HOW)]
            folder = Path(directory, how)
            if kill // len(HOW) % 4 == 0:  # from nothing
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            before = newest(folder, how) or 0
            begun, finished = one_life(folder, how, before, chance)
            version = newest(folder, how)
            where = f"seed {SEED}, kill {kill} ({how}): {before} before, {finished} finished, {begun} begun"
            if version is None:
                assert before == finished == 0, f"{where}, none is there"
            else:
                assert max(before, finished) <= version <= begun, f"{where}, {version} is there"
            outcomes.append((how, finished - before, version))
        connection.send(outcomes)
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.full
def test_a_killed_save_leaves_one_whole_checkpoint(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    ours, theirs = multiprocessing.Pipe()
    process = forked(kill_savers, theirs, str(tmp_path))
    try:
        assert ours.poll(240), "the kills came to no end"
        outcomes = ours.recv()
    finally:
        process.kill()
        process.join()
    assert isinstance(outcomes, list), outcomes
    assert len(outcomes) == KILLS
    assert {how for how, *_ in outcomes} == {*HOW}
    assert any(version is None for *_, version in outcomes), "no kill came before the first save was done"
    assert sum(count > 0 for _, count, _ in outcomes) > 5, "hardly a kill came after a finished save"
    run_ranks(2, save_once_more, str(tmp_path / "now"))
    assert len(list((tmp_path / "now").iterdir())) == 3, "what the killed ones left is still there"


def save_once_more(rank: int, world_size: int, directory: str) -> None:
    _, optimizer = make(world_size)
    save_state(optimizer, directory)


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 512 kB at the folder, where this user may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def save_until_full(rank: int, world_size: int, directory: str, mounted: bool, background: bool) -> list[str]:
    folder, told = Path(directory, "checkpoint"), []
    params, optimizer = make(world_size, shapes=[(300, 7), (11,), (0, 4), (5, 3, 2), (1,)])
    train(rank, world_size, params, optimizer, range(4))
    save_state(optimizer, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    train(rank, world_size, params, optimizer, range(4, 6))
    junk, room = Path(directory, "junk"), resource.getrlimit(resource.RLIMIT_FSIZE)[0] if mounted else 10_000
    dist.barrier()
    if mounted and rank == 0:
        with pytest.raises(OSError, match="No space left"):  # all but the last 12 kB
            with open(junk, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        os.truncate(junk, junk.stat().st_size - 12_288)
    dist.barrier()
    try:
        with limited(resource.RLIMIT_FSIZE, room):
            async_save_state(optimizer, folder).result() if background else save_state(optimizer, folder)
    except OSError as error:
        told = [type(error).__name__, str(error), str(error.errno)]
    dist.barrier()
    if rank == 0:
        junk.unlink(missing_ok=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    _, other = make(world_size, shapes=[(300, 7), (11,), (0, 4), (5, 3, 2), (1,)])
    load_state(other, folder)
    assert other.metrics()["step"] == 4
    save_state(optimizer, folder)  # there is room again
    load_state(other, folder)
    assert other.metrics()["step"] == 6
    return told


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_fails_on_all_ranks_and_leaves_the_earlier_checkpoint(background: bool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as mounted:
        told = run_ranks(2, save_until_full, str(tmp_path / "disk"), mounted, background, timeout=120)
    code = str(errno.ENOSPC if mounted else errno.EFBIG)
    assert any(number == code and ".tmp'" in text for _, text, number in told), told
    for name, text, number in told:
        assert number == code or (
            name == "OSError" and "another rank failed" in text and os.strerror(int(code)) in text
        )
