"""Saves that cannot be: what is refused, what a failure leaves behind, and who hears of it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_compressopt import ZeroOneAdam, load_state, save_state
from hf_compressopt.checkpoint import save as saving
from hf_compressopt.checkpoint.portable import import_state
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.checkpoint.test_async_save import held_back
from tests.checkpoint.test_checkpoint import make, train
from tests.support.harness import run_ranks, run_ranks_expecting_error
from tests.support.launching import environment, run_python


def adamw(*names: str) -> torch.optim.Optimizer:
    named = [(name, nn.Parameter(torch.ones(3))) for name in names or ("weight",)]
    optimizer = torch.optim.AdamW(named)
    for _, param in named:
        param.grad = torch.ones(3)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("prefix", ["", ".hidden", "../a", "ü", "a\n", "-a", "a*"])
def test_a_prefix_that_no_load_accepts_is_refused(prefix: str, tmp_path: Path) -> None:
    for call in (save_state, load_state, lambda *a, **k: import_state(tmp_path / "optimizer.pt", a[1], **k)):
        with pytest.raises(ValueError, match="prefix must be a plain name .* give the folder as the directory"):
            call(adamw(), tmp_path / "out", prefix=prefix)
    assert not (tmp_path / "out").exists()


def test_every_prefix_that_is_saved_is_loaded(tmp_path: Path) -> None:
    for prefix in ("a", "_", "0", "compressopt_2", "a.b-c"):
        saved, loaded = adamw(), adamw()
        state = saved.state[saved.param_groups[0]["params"][0]]
        state["exp_avg"].fill_(len(prefix))
        save_state(saved, tmp_path, prefix=prefix)
        load_state(loaded, tmp_path, prefix=prefix)
        assert loaded.state_dict()["state"][0]["exp_avg"].tolist() == [len(prefix)] * 3


def save_with_names(rank: int, world_size: int, directory: str, names: list[Any]) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in names]
    save_state(torch.optim.AdamW(params), directory, names=names if rank == 1 else [f"p{i}" for i in range(len(names))])


@pytest.mark.parametrize(
    ("name", "said"), [("a\ud800b", "'a\\ud800b' is not valid Unicode"), (3, "names must be strings, got 3")]
)
def test_names_that_files_cannot_hold_are_refused_by_all(name: Any, said: str, tmp_path: Path) -> None:
    errors = run_ranks_expecting_error(2, save_with_names, str(tmp_path / "out"), ["a", name])
    assert said in errors[1] and "another rank failed" in errors[0]
    assert not list(tmp_path.rglob("compressopt*"))


def test_the_state_of_lbfgs_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match="LBFGS belongs to no parameter.*torch.save"):
        save_state(optimizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_new_folder_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def watched(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    save_state(adamw(), tmp_path / "runs" / "checkpoint")
    assert {str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "checkpoint")} <= set(synced)


def save_while_the_folder_cannot_be_listed(rank: int, world_size: int, directory: str) -> int:
    params, optimizer = make(world_size)
    train(rank, world_size, params, optimizer, range(2))
    save_state(optimizer, directory)
    train(rank, world_size, params, optimizer, range(2, 3))
    listing = Path.iterdir

    def fail(path: Path) -> Any:
        raise OSError("Input/output error")

    if rank == 1:
        Path.iterdir = fail  # type: ignore[method-assign]
    try:
        save_state(optimizer, directory)
    finally:
        Path.iterdir = listing  # type: ignore[method-assign]
    _, other = make(world_size)
    load_state(other, directory)
    return other.metrics()["step"]


def test_an_error_while_older_files_are_removed_stops_nobody(tmp_path: Path) -> None:
    assert run_ranks(2, save_while_the_folder_cannot_be_listed, str(tmp_path), timeout=30) == [3, 3]


def save_apart(rank: int, world_size: int, directory: str) -> list[str]:
    """Two runs of one rank each that save into one folder at the same time; rank 0's goes on when rank 1's is done."""
    groups = [dist.new_group([number]) for number in range(world_size)]
    _, optimizer = make(1, communicator=TorchCommunicator(groups[rank]))
    told = []
    dist.barrier()
    if rank == 0:
        with held_back() as gate:
            thread = threading.Thread(target=lambda: told.extend(outcome(optimizer, directory)))
            thread.start()
            while not gate.reached.wait(0.01) and thread.is_alive():
                pass  # the file of a shard is there before the lock is held; its room is allocated after it
            dist.barrier()
            dist.barrier()
            gate.set()
            thread.join()
    else:
        dist.barrier()
        told = outcome(optimizer, directory)
        dist.barrier()
    dist.barrier()
    _, other = make(1, communicator=TorchCommunicator(groups[rank]))
    load_state(other, directory)
    return told


def outcome(optimizer: Any, directory: str) -> list[str]:
    try:
        save_state(optimizer, directory)
        return ["saved"]
    except OSError as error:
        return [str(error)]


def test_two_savers_into_one_folder_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_state(adamw(), folder, prefix="other")
    told = run_ranks(2, save_apart, str(folder))
    assert told[0] == ["saved"], told
    assert "another run is saving into the same files: give each run a folder or a prefix of its own" in told[1][0]
    assert len(list(folder.glob("compressopt*"))) == 2 and len(list(folder.iterdir())) == 4


@contextmanager
def writing(write: Callable[..., Any]) -> Iterator[None]:
    """Inside, a shard is written by ``write(before, snapshot, quiet)``."""
    before = saving._write_shard
    saving._write_shard = partial(write, before)
    try:
        yield
    finally:
        saving._write_shard = before


def save_what_another_removed(rank: int, world_size: int, directory: str) -> None:
    """Without a lock: what this save has written is gone when it would publish its index."""

    def write_and_lose(write: Any, snapshot: Any, quiet: bool) -> Any:
        written = write(snapshot, quiet)
        if rank == 1:
            (snapshot.folder / written["file"]).unlink()
        return written

    params, optimizer = make(world_size)
    save_state(optimizer, directory)
    train(rank, world_size, params, optimizer, range(2))
    try:
        with writing(write_and_lose):
            save_state(optimizer, directory)
    finally:
        dist.barrier()
        _, other = make(world_size)
        load_state(other, directory)
        assert other.metrics()["step"] == 0


def test_a_save_whose_files_another_one_removed_fails_on_all_ranks(tmp_path: Path) -> None:
    errors = run_ranks_expecting_error(2, save_what_another_removed, str(tmp_path))
    assert "another run has saved into the same files: give each run a folder of its own" in errors[0]
    assert "another rank failed" in errors[1]


END = """
import resource, sys, torch
from torch import nn
from hf_compressopt import ZeroOneAdam, async_save_state, wait_for_saves
param = nn.Parameter(torch.ones(1000))
optimizer = torch.optim.AdamW([param])
param.grad = torch.ones(1000)
optimizer.step()
resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
pending = async_save_state(optimizer, sys.argv[1])
print("trained")
if len(sys.argv) > 2:
    try:
        pending.result()
    except OSError:
        print("known")
"""


@pytest.mark.full
def test_a_failed_save_that_nobody_asked_about_gives_an_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-c", END, str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert (ended.returncode, ended.stdout) == (1, "trained\n")
    assert "a save in the background failed, so the exit code is 1" in ended.stderr and "too large" in ended.stderr
    asked = run_python(["-c", END, str(tmp_path / "out"), "ask"])
    assert (asked.returncode, asked.stdout) == (0, "trained\nknown\n"), asked.stderr


def test_import_needs_no_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    torch.save(adamw().state_dict(), tmp_path / "optimizer.pt")
    import_state(tmp_path / "optimizer.pt", tmp_path)
    index = json.loads((tmp_path / "compressopt.index.json").read_text())
    assert len(index["shards"]) == 1 and index["header"]["world_size"] == 1


def test_a_save_follows_no_link(tmp_path: Path) -> None:
    """The names of the index under way and of the lock can be foreseen: who may write there could redirect a save."""
    folder, precious = tmp_path / "out", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("precious")
    (folder / "compressopt.index.tmp").symlink_to(precious)
    save_state(adamw(), folder)
    assert precious.read_text() == "precious" and not (folder / "compressopt.index.json").is_symlink()
    (folder / "compressopt.index.lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="a lock must not be a symbolic link: remove it"):
        save_state(adamw(), folder)
    assert not (tmp_path / "made").exists()
    (folder / "compressopt.index.lock").unlink()
    save_state(adamw(), folder)
    load_state(adamw(), folder)


def test_a_shard_follows_no_link(tmp_path: Path) -> None:
    """A link takes the place of a shard that is begun."""

    def link_and_write(write: Any, snapshot: Any, quiet: bool) -> Any:
        shard = saving.begun(snapshot.shard_file(0))
        shard.unlink()
        shard.symlink_to(tmp_path / "precious")
        return write(snapshot, quiet)

    (tmp_path / "precious").write_text("precious")
    with writing(link_and_write), pytest.raises(OSError, match="symbolic links"):
        save_state(adamw(), tmp_path / "out")
    assert (tmp_path / "precious").read_text() == "precious"


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    """Each rank's own momentum of "w", inside a local interval, and the one for all ranks of "rank0/w"."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": [("w", params[0])]}, {"params": [("rank0/w", params[1])], "non_freeze": True}]
    optimizer = ZeroOneAdam(groups, lr=0.1, var_freeze_step=2)
    for _ in range(5):
        for param in params:
            param.grad = torch.ones(3)
        optimizer.step()
    with pytest.raises(ValueError, match="two tensors of the state are called 'exp_avg/rank0/w': give other names"):
        save_state(optimizer, tmp_path)
    save_state(optimizer, tmp_path, names=["v", "w"])
