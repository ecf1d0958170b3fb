"""Saves that cannot be, what a failure leaves behind, and machines with folders of their own."""

import copy
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from hf_compressopt import (
    FusedAdam,
    GradientCompression,
    Lamb,
    MuonAdamW,
    ZeroOneAdam,
    ZeroOptimizer,
    async_save_state,
    average_gradients,
    load_state,
    save_state,
)
from hf_compressopt.checkpoint import save as saving
from hf_compressopt.checkpoint.portable import import_state
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.checkpoint.kinds import make as make_kind
from tests.checkpoint.kinds import observe, train
from tests.checkpoint.test_async_save import OPTIMIZERS, held_back
from tests.checkpoint.test_checkpoint import make
from tests.support.family import FAMILY, assign, optimizer_of
from tests.support.harness import RankError, on_ranks, run_ranks, run_ranks_expecting_error
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


@on_ranks(2, timeout=30)
def test_an_error_while_older_files_are_removed_stops_nobody(rank: int, world_size: int, tmp_path: Path) -> None:
    params, optimizer = make(world_size)
    train(rank, world_size, params, optimizer, range(2))
    save_state(optimizer, tmp_path)
    train(rank, world_size, params, optimizer, range(2, 3))
    fails = {"side_effect": OSError("Input/output error")} if rank == 1 else {"new": Path.iterdir}
    with mock.patch.object(Path, "iterdir", **fails):
        save_state(optimizer, tmp_path)
    _, other = make(world_size)
    load_state(other, tmp_path)
    assert other.metrics()["step"] == 3


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


def writing(write: Callable[..., Any]) -> Any:
    """Inside, a shard is written by ``write(before, snapshot, quiet)``."""
    return mock.patch.object(saving, "_write_shard", partial(write, saving._write_shard))


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


STEPS = 8


def save_on_machines(rank: int, world_size: int, name: str, directory: str, per_machine: int) -> dict[str, str]:
    """Two saves, the second in the background, into the folder of the rank's machine."""
    params, optimizer = make_kind(OPTIMIZERS[name])
    train(rank, world_size, params, optimizer, range(3))
    folder = Path(directory, f"machine{rank // per_machine}")
    save_state(optimizer, folder)
    train(rank, world_size, params, optimizer, range(3, 5))
    async_save_state(optimizer, folder).result()
    torch.save([p.detach() for p in params], folder / f"params-{rank}.pt")
    train(rank, world_size, params, optimizer, range(5, STEPS))
    return {**observe(params, optimizer), "bytes_sent": ""}  # each index has those of a rank of its folder


def resume_apart(rank: int, world_size: int, name: str, folders: list[str]) -> dict[str, str]:
    params, optimizer = make_kind(OPTIMIZERS[name])
    load_state(optimizer, folders[rank])
    assign(params, torch.load(f"{folders[rank]}/params-{rank}.pt"))
    train(rank, world_size, params, optimizer, range(5, STEPS))
    return {**observe(params, optimizer), "bytes_sent": ""}


@pytest.mark.invariant(21)
@pytest.mark.parametrize(
    ("name", "world_size", "per_machine"),
    [("OnebitAdam", 4, 2), ("ZeroOptimizer", 2, 1), ("ZeroOptimizer", 4, 2), ("AdamW", 2, 1)],
)
def test_every_machine_goes_on_from_its_own_folder(
    name: str, world_size: int, per_machine: int, tmp_path: Path
) -> None:
    whole = run_ranks(world_size, save_on_machines, name, str(tmp_path), per_machine)
    folders = [str(tmp_path / f"machine{rank // per_machine}") for rank in range(world_size)]
    assert run_ranks(world_size, resume_apart, name, folders) == whole
    indexes = []
    for machine in range(2):
        ranks = range(machine * per_machine, (machine + 1) * per_machine)
        files = [path.name for path in (tmp_path / f"machine{machine}").iterdir() if path.suffix != ".pt"]
        assert len(files) == 1 + per_machine, "shards of the first save, or begun ones, are still there"
        indexes.append(json.loads((tmp_path / f"machine{machine}" / "compressopt.index.json").read_text()))
        here = {shard["file"] for number, shard in enumerate(indexes[-1]["shards"]) if number in ranks}
        assert {*here, "compressopt.index.json"} == set(files)
    assert indexes[0]["save_id"] == indexes[1]["save_id"] and indexes[0]["shards"] == indexes[1]["shards"]
    together = tmp_path / "together"  # whoever copies all files into one folder has a checkpoint of the usual kind
    for machine in range(2):
        shutil.copytree(tmp_path / f"machine{machine}", together, dirs_exist_ok=True)
    assert run_ranks(world_size, resume_apart, name, [str(together)] * world_size) == whole


def load_from(rank: int, world_size: int, folders: list[str]) -> int:
    params, optimizer = make_kind(OPTIMIZERS["OnebitAdam"])
    train(rank, world_size, params, optimizer, range(2))
    before = observe(params, optimizer)
    try:
        load_state(optimizer, folders[rank])
    except Exception:
        assert observe(params, optimizer) == before, "the state was changed"
        raise
    return int(optimizer.metrics()["step"])


def test_a_shard_out_of_reach_is_named_with_who_has_it(tmp_path: Path) -> None:
    run_ranks(2, save_on_machines, "OnebitAdam", str(tmp_path), 1)
    folders = [str(tmp_path / "machine0"), str(tmp_path / "machine1")]
    errors = run_ranks_expecting_error(2, load_from, folders[::-1])  # each on the other's machine
    for rank, text in errors.items():
        file = f"-0000{rank}-of-00002.safetensors"
        assert text.startswith(f"CheckpointError: {folders[1 - rank]}/compressopt-") and f"{file} is missing" in text
        assert f": rank {rank} on " in text and f" needs it, and rank {1 - rank} on " in text
        assert f"has {folders[rank]}/compressopt-" in text and "copy it, or start the ranks" in text
    shutil.copytree(folders[0], tmp_path / "both")
    shard = next((tmp_path / "machine1").glob("*.safetensors"))
    with pytest.raises(RankError, match=f"{shard.name} is missing: the checkpoint is not whole\\n"):
        run_ranks(1, load_from, [str(tmp_path / "both")])
    shutil.copy(shard, tmp_path / "both")
    assert run_ranks(1, load_from, [str(tmp_path / "both")]) == [5]
    (tmp_path / "machine1" / "compressopt.index.json").unlink()
    errors = run_ranks_expecting_error(2, load_from, folders)
    assert "machine1/compressopt.index.json is missing" in errors[1] and "machine1" in errors[0]


def save_cut_off(rank: int, world_size: int, directory: str) -> None:
    """The second machine loses power when the first one has given the index its name."""
    params, optimizer = make_kind(OPTIMIZERS["OnebitAdam"])
    train(rank, world_size, params, optimizer, range(3))
    save_state(optimizer, f"{directory}/machine{rank}")
    train(rank, world_size, params, optimizer, range(3, 4))
    fails = {"side_effect": OSError("no power")} if rank == 1 else {"new": saving.publish}
    with mock.patch.object(saving, "publish", **fails), pytest.raises(OSError):
        save_state(optimizer, f"{directory}/machine{rank}")


def test_a_save_that_some_machines_finished_is_loaded_by_all_or_refused_by_all(tmp_path: Path) -> None:
    run_ranks(2, save_cut_off, str(tmp_path))
    folders = [str(tmp_path / "machine0"), str(tmp_path / "machine1")]
    saves = [json.loads(Path(folder, "compressopt.index.json").read_text())["save_id"] for folder in folders]
    assert saves[0] != saves[1]
    assert run_ranks(2, load_from, folders) == [4, 4]
    (tmp_path / "machine1" / "compressopt.index.tmp").unlink()
    errors = run_ranks_expecting_error(2, load_from, folders)
    for text in errors.values():
        assert "is of different saves: rank 0 on " in text and all(f"has save {save}" in text for save in saves)


class ByTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3, bias=False)


KEPT_BY_TORCH: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "FusedAdam": lambda model: FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1, master_weights=True),
    "Lamb": lambda model: Lamb(model.parameters(), lr=0.01),
    "MuonAdamW": lambda model: MuonAdamW(
        [{"params": [model.body.weight], "muon": True}, {"params": [model.body.bias, model.head.weight], "muon": False}]
    ),
}
LOST_BY_TORCH: dict[str, Callable[[nn.Module], Any]] = {
    **{name: partial(optimizer_of, name) for name in FAMILY},
    "zero_stage=1": partial(optimizer_of, "OnebitAdam", zero_stage=1),
    "zero_stage=2": partial(optimizer_of, "OnebitAdam", zero_stage=2),
    "ZeroOptimizer, stage 1": partial(ZeroOptimizer, optimizer_class=torch.optim.AdamW, lr=0.01, stage=1),
    "ZeroOptimizer": partial(ZeroOptimizer, optimizer_class=torch.optim.AdamW, lr=0.01),
    "ZeroOptimizer, int4": partial(ZeroOptimizer, optimizer_class=torch.optim.AdamW, lr=0.01, grad_compression="int4"),
    "GradientCompression": GradientCompression,
}


TORCHS_OPTIONS = [
    None,
    StateDictOptions(full_state_dict=True, cpu_offload=True),
    StateDictOptions(flatten_optimizer_state_dict=True),
]


@pytest.mark.parametrize("kind", [*KEPT_BY_TORCH, *LOST_BY_TORCH])
@on_ranks(2)
def test_torchs_own_checkpoints_hold_a_state_bitwise_or_refuse_it(rank: int, world_size: int, kind: str) -> None:
    def go_on(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank * (kind in LOST_BY_TORCH)))
            model.head(model.body(x)).square().sum().backward()
            if kind == "GradientCompression":
                optimizer.average_gradients()
                continue
            if kind in FAMILY:
                average_gradients(optimizer)
            optimizer.step()
            optimizer.zero_grad()

    model, twin = ByTorch(), ByTorch()
    if kind in KEPT_BY_TORCH:
        if kind == "MuonAdamW" and not hasattr(torch.optim, "Muon"):
            return
        optimizer, fresh = KEPT_BY_TORCH[kind](model), KEPT_BY_TORCH[kind](twin)
        go_on(model, optimizer, range(3))
        twin.load_state_dict(model.state_dict())
        set_optimizer_state_dict(twin, fresh, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
        go_on(model, optimizer, range(3, 6))
        go_on(twin, fresh, range(3, 6))
    else:
        make, params = LOST_BY_TORCH[kind], (lambda m: m.parameters())
        optimizer, fresh = make(params(model)), make(params(twin))
        for steps in (range(4), range(4, 6)):  # before the first step too
            calls: list[Callable[[], Any]] = [lambda: dcp.save({"optimizer": optimizer}, checkpoint_id="nowhere")]
            if kind != "GradientCompression":
                calls += [partial(get_optimizer_state_dict, model, optimizer, options=each) for each in TORCHS_OPTIONS]
                calls += [lambda: get_state_dict(model, optimizer)]
            for call in calls:
                with pytest.raises(
                    RuntimeError, match="would lose a part of the state of .* hf_compressopt.save_state"
                ):
                    call()
            go_on(model, optimizer, steps)
            go_on(twin, fresh, steps)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    if kind == "GradientCompression":
        assert torch.equal(model.body.weight.grad, twin.body.weight.grad)
