"""Machines without a shared file system: each has a folder of its own, with an index and what its ranks need."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_compressopt import async_save_state, load_state, save_state
from hf_compressopt.checkpoint import save as saving
from tests.checkpoint.test_async_save import made, step
from tests.checkpoint.test_checkpoint import everything, make, train
from tests.support.harness import RankError, run_ranks, run_ranks_expecting_error

STEPS = 8


def state(optimizer: Any) -> list[Any]:
    rows = (optimizer.state.get(p, {}) for p in optimizer.param_groups[0]["params"])
    return [row[key].tolist() for row in rows for key in sorted(row)]


def save_apart(rank: int, world_size: int, name: str, directory: str, per_machine: int) -> list[Any]:
    """Two saves, the second in the background, into the folder of the rank's machine."""
    params, optimizer = made(name, world_size)
    step(rank, world_size, params, optimizer, range(3))
    folder = Path(directory, f"machine{rank // per_machine}")
    save_state(optimizer, folder)
    step(rank, world_size, params, optimizer, range(3, 5))
    async_save_state(optimizer, folder).result()
    torch.save([p.detach() for p in params], folder / f"params-{rank}.pt")
    step(rank, world_size, params, optimizer, range(5, STEPS))
    return [p.tolist() for p in params] + (everything_of(params, optimizer))


def everything_of(params: list[Tensor], optimizer: Any) -> list[Any]:
    return [t.tolist() for t in everything(params, optimizer)] if hasattr(optimizer, "plan") else state(optimizer)


def resume_apart(rank: int, world_size: int, name: str, folders: list[str]) -> list[Any]:
    params, optimizer = made(name, world_size)
    load_state(optimizer, folders[rank])
    with torch.no_grad():
        for p, saved in zip(params, torch.load(f"{folders[rank]}/params-{rank}.pt"), strict=True):
            p.copy_(saved)
    step(rank, world_size, params, optimizer, range(5, STEPS))
    return [p.tolist() for p in params] + (everything_of(params, optimizer))


@pytest.mark.invariant(21)
@pytest.mark.parametrize(
    ("name", "world_size", "per_machine"),
    [("OnebitAdam", 4, 2), ("ZeroOptimizer", 2, 1), ("ZeroOptimizer", 4, 2), ("AdamW", 2, 1)],
)
def test_every_machine_goes_on_from_its_own_folder(
    name: str, world_size: int, per_machine: int, tmp_path: Path
) -> None:
    whole = run_ranks(world_size, save_apart, name, str(tmp_path), per_machine)
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
    params, optimizer = make(world_size)
    train(rank, world_size, params, optimizer, range(2))
    before = everything(params, optimizer)
    try:
        load_state(optimizer, folders[rank])
    except Exception:
        after = everything(params, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the state was changed"
        raise
    return int(optimizer.metrics()["step"])


def test_a_shard_out_of_reach_is_named_with_who_has_it(tmp_path: Path) -> None:
    run_ranks(2, save_apart, "OnebitAdam", str(tmp_path), 1)
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
    params, optimizer = make(world_size)
    train(rank, world_size, params, optimizer, range(3))
    save_state(optimizer, f"{directory}/machine{rank}")
    train(rank, world_size, params, optimizer, range(3, 4))
    publish = saving.publish

    def fail(*_: Any) -> None:
        raise OSError("no power")

    saving.publish = fail if rank == 1 else publish
    try:
        save_state(optimizer, f"{directory}/machine{rank}")
    except OSError:
        return
    finally:
        saving.publish = publish
    raise AssertionError("the save did not fail")


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
