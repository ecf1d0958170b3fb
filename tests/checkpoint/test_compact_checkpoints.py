"""Checkpoints of a compact state: bytes on as many ranks; on others what stays exact, and what is rounded once more."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_compressopt
from hf_compressopt.checkpoint.portable import consolidate
from hf_compressopt.format.index import CheckpointError, checksum_of, sealed
from hf_compressopt.format.shards import ShardFile
from tests.checkpoint.kinds import KINDS, load_in_form, observe, written
from tests.checkpoint.test_checkpoint import in_index
from tests.checkpoint.test_resharding import contents, stored
from tests.support.family import SHAPES, go_on, make
from tests.support.harness import on_ranks, run_ranks

NAMES = {"OnebitAdam": {}, "OnebitLamb": {}, "ZeroOneAdam": {"var_freeze_step": 3, "local_step_clipper": 1}}
STOP = 5


def made(rank: int, name: str, stop: int, **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    return make(rank, stop, name=name, **{"state": "compact", **(NAMES[name] or {"freeze_step": 3}), **options})


def shown(params: list[torch.nn.Parameter], optimizer: Any) -> list[Tensor]:
    return [optimizer.state[p][key].clone() for p in params for key in ("exp_avg", "exp_avg_sq")]


def save(rank: int, world_size: int, folder: str) -> dict[str, list[Tensor]]:
    found = {}
    for name in NAMES:
        params, optimizer = made(rank, name, STOP)
        hf_compressopt.save_state(optimizer, f"{folder}/{name}")
        found[name] = shown(params, optimizer)
    return found


def load(rank: int, world_size: int, folder: str) -> dict[str, tuple[list[Tensor], tuple[Tensor, Tensor], bool]]:
    found = {}
    for name in NAMES:
        params, optimizer = made(rank, name, 0)
        hf_compressopt.load_state(optimizer, f"{folder}/{name}")
        before = shown(params, optimizer)
        errors = optimizer._states[0].errors.values()
        go_on(rank, params, optimizer, range(STOP, STOP + 3))
        alike = optimizer.communicator.all_gather_object([p.double().sum().item() for p in params])
        found[name] = before, errors, all(sums == alike[0] for sums in alike)
    return found


@pytest.mark.parametrize("saved_by", [pytest.param(2, marks=pytest.mark.full), 3])
def test_any_number_of_ranks_loads(saved_by: int, tmp_path: Path) -> None:
    saved = run_ranks(saved_by, save, str(tmp_path))
    for loaded_by in (1, 2, 3, 4):
        check_loaded(saved_by, saved, loaded_by, run_ranks(loaded_by, load, str(tmp_path)), tmp_path)


def check_loaded(saved_by: int, saved: list[Any], loaded_by: int, loaded: list[Any], tmp_path: Path) -> None:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    for name in NAMES:
        workers = [contents(tmp_path / name)[f"worker_error/group0/rank{rank}"] for rank in range(saved_by)]
        mean = torch.stack(workers).double().mean(0)
        assert mean.any()
        for rank in range(loaded_by):
            before, (worker, server), alike = loaded[rank][name]
            assert alike, "the ranks have drifted apart"
            assert all(torch.equal(a, b) for a, b in zip(before, saved[0][name], strict=True))
            assert worker.numel() == numel and (server.numel() == numel) == (loaded_by == 1)
            if loaded_by == saved_by:
                assert torch.equal(worker, workers[rank])
            else:  # within half a step of a block
                assert (worker - mean).abs().max() <= mean.abs().max() / 253


def held(optimizer: Any) -> list[Tensor]:
    """The tensors of a compact state, as they lie in memory."""
    found = []
    for state in optimizer._states:
        moments, errors = state.moments, state.errors
        messages = [average.messages for _, average in sorted(moments.last.items())]
        found += [moments.exp_avg, moments.exp_avg_sq, moments.codes, moments.tops, *messages, errors.worker]
        found += [errors.server, *state.extra.values(), state.steps]
    return [tensor.clone() for tensor in found]


def bytes_of_a_save(rank: int, world_size: int, folder: str) -> dict[str, list[Tensor]]:
    """Save, load, and save again: memory, files, and memory again hold the same bytes."""
    shown = {}
    for name in NAMES:
        params, optimizer = made(rank, name, STOP)
        before = shown[name] = held(optimizer)
        hf_compressopt.save_state(optimizer, f"{folder}/{name}")
        for stop in (0, 2, STOP + 2):  # into a state of either stage
            _, other = made(rank, name, stop)
            hf_compressopt.load_state(other, f"{folder}/{name}")
            other._states[0].moments.settle()
            assert all(torch.equal(a, b) for a, b in zip(before, held(other), strict=True))
        hf_compressopt.save_state(other, f"{folder}/{name}-again")
        _, optimizer = made(rank, name, 0, scale_block=16)  # which cuts messages otherwise
        hf_compressopt.load_state(optimizer, f"{folder}/{name}")
        assert not optimizer._states[0].moments.last
        hf_compressopt.save_state(optimizer, f"{folder}/{name}-decoded")
    return shown


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_files_hold_what_memory_holds(world_size: int, tmp_path: Path) -> None:
    ranks = run_ranks(world_size, bytes_of_a_save, str(tmp_path))
    for name in NAMES:
        found, again = stored(tmp_path / name), stored(tmp_path / f"{name}-again")
        assert found.keys() == again.keys() and all(torch.equal(found[key], again[key]) for key in found)
        exp_avg, exp_avg_sq, codes, tops, *messages = ranks[0][name]
        assert exp_avg_sq.numel() == 0 and torch.equal(found["exp_avg_sq_top/group0"], tops)
        parts = [found[f"exp_avg_sq_code/group0.{index}"].view(-1) for index in range(len(SHAPES))]
        assert torch.equal(torch.cat(parts), codes)
        if name == "OnebitAdam":
            assert exp_avg.numel() == 0 and not any(key.startswith("exp_avg/") for key in found)
            whole = found["exp_avg_message/group0"]
            assert torch.equal(whole, torch.cat(messages)[: whole.numel()])
        for rank in range(world_size):
            error = found[f"worker_error/group0/rank{rank}"]
            assert error.dtype == torch.uint8 and any(torch.equal(error, tensor) for tensor in ranks[rank][name])
        decoded, values = contents(tmp_path / f"{name}-decoded"), contents(tmp_path / name)
        assert decoded.keys() == values.keys() and all(torch.equal(decoded[key], values[key]) for key in values)


@on_ranks(2)
def test_param_groups_with_a_process_group_of_their_own(rank: int, world_size: int, tmp_path: Path) -> None:
    def new(state: str, stop: int) -> tuple[list[nn.Parameter], Any]:
        torch.manual_seed(rank)
        params = [nn.Parameter(torch.randn(40)), nn.Parameter(torch.randn(7))]
        groups = [{"params": params[:1]}, {"params": params[1:], "process_group": whole}]
        optimizer = hf_compressopt.OnebitAdam(groups, lr=1e-2, freeze_step=2, state=state, warmup_bits=32)
        with torch.no_grad():
            for p in params:
                dist.broadcast(p, 0)
        go_on(rank, params, optimizer, range(stop))
        return params, optimizer

    whole = dist.new_group(list(range(world_size)))
    params, optimizer = new("compact", 4)
    hf_compressopt.save_state(optimizer, tmp_path)
    other_params, other = new("compact", 0)
    _, wide = new("float32", 0)
    for loaded in (other, wide):
        hf_compressopt.load_state(loaded, tmp_path)
    assert len(other._states[1].moments.last) == 1 and not wide._states[1].moments.last
    for first, second in zip(optimizer._states, wide._states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first.errors.values(), second.errors.values(), strict=True))
    for p, q, r in zip(*(o.trainable_parameters for o in (optimizer, other, wide)), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            values = optimizer.state[p][key]
            assert torch.equal(values, other.state[q][key]) and torch.equal(values, wide.state[r][key])
        q.data.copy_(p.data)
    for pair in ((params, optimizer), (other_params, other)):
        go_on(rank, *pair, range(4, 6))
    assert all(torch.equal(p, q) for p, q in zip(params, other_params, strict=True))
    with pytest.raises(CheckpointError, match="process_group of its own"):
        hf_compressopt.load_state(torch.optim.AdamW(params), tmp_path)


def entry(name: str, **values: Any) -> Callable[[Path], None]:
    """Other values in the index; a dtype of the same size is changed in the shards too."""

    def change(folder: Path) -> None:
        index = json.loads((folder / "compressopt.index.json").read_text())
        index["tensors"][name] |= values
        (folder / "compressopt.index.json").write_bytes(sealed(index))
        if "dtype" in values:
            for shard in folder.glob("*.safetensors"):
                head, found, tail = shard.read_bytes().partition(f'"{name}":{{"dtype":"U8"'.encode())
                shard.write_bytes(head + found.replace(b"U8", b"I8") + tail)

    return change


def gone(name: str) -> Callable[[Path], Any]:
    return in_index(lambda index: index["tensors"].pop(name))


def bytes_at(name: str, place: int, data: bytes = b"", *, known: bool = False) -> Callable[[Path], None]:
    """Other bytes in a shard, a flipped bit if none are given; if they are ``known``, the index has their checksum."""

    def change(folder: Path) -> None:
        path = folder / "compressopt.index.json"
        index = json.loads(path.read_text())
        piece = index["tensors"][name]["pieces"][0]
        shard = folder / index["shards"][piece["shard"]]["file"]
        where = ShardFile(shard).tensors[piece["key"]]
        whole = bytearray(shard.read_bytes())
        whole[where.begin + place] ^= 0 if data else 4
        whole[where.begin + place : where.begin + place + len(data)] = data
        shard.write_bytes(whole)
        if known:
            piece["checksums"] = [checksum_of(whole[where.begin : where.end]).hexdigest()]
            path.write_bytes(sealed(index))

    return change


#: Changes to a checkpoint of two ranks, what the error says, and whether a load on one rank meets it too.
DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a code": (bytes_at("exp_avg_sq_code/layer.0", 3), "is damaged"),
    "a scale of an error": (bytes_at("worker_error/group0/rank1", 24), "is damaged"),
    "a sign": (bytes_at("exp_avg_message/group1", 4), "is damaged"),
    "a top": (bytes_at("exp_avg_sq_top/group1", 0), "is damaged"),
    "a top off the grid": (
        bytes_at("exp_avg_sq_top/group1", 0, b"\x00\x04\x00\x00", known=True),
        r"from -1008 to 1023, got \[.*1024\]",
    ),
    "signed codes": (entry("exp_avg_sq_code/layer.0", dtype="int8"), "as int8"),
    "signed errors": (entry("server_error/group0", dtype="int8"), "as int8|int8"),
    "codes of another shape": (entry("exp_avg_sq_code/layer.0", shape=[7, 5]), r"\[7, 5\]"),
    "no tops": (gone("exp_avg_sq_top/group0"), "no tensor 'exp_avg_sq"),
    "no message": (gone("exp_avg_message/group1"), "no tensor 'exp_avg/"),
    "messages of another shape": (entry("exp_avg_message/group1", shape=[16, 2]), r"uint8 \[16, 2\], needed is"),
    "blocks of no length": (
        in_index(lambda index: index["header"].update(scale_block=12)),
        "scale_block must be a positive multiple of 8, or None, got 12",
    ),
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    saved = shutil.copytree(written(tmp_path_factory) / "onebit_adam_compact_2", folder / "onebit_adam_compact_2")
    for case, (change, _) in DAMAGED.items():
        change(shutil.copytree(saved, folder / case))
    return folder


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_damage_is_found_before_anything_changes(rank: int, world_size: int, damaged: Path) -> None:
    name = "onebit_adam_compact_2"
    for form in ("compact", "float32"):
        params, optimizer = load_in_form(form, KINDS[name], f"{damaged}/{name}")
        before = observe(params, optimizer)
        for case, (_, text) in DAMAGED.items():
            with pytest.raises(CheckpointError) as caught:
                hf_compressopt.load_state(optimizer, damaged / case)
                raise AssertionError(case)
            told = str(caught.value)
            assert re.search(text, told) or "another rank" in told, f"{case}: {told}"
            assert str(damaged) in told and "half loaded" not in told, f"{case}: {told}"
            assert observe(params, optimizer) == before, case


def test_a_consolidated_file_needs_whole_moments(damaged: Path) -> None:
    for case in ("a code", "a sign", "a top", "a top off the grid", "no tops", "messages of another shape"):
        with pytest.raises(CheckpointError, match="no tensor" if case == "no tops" else DAMAGED[case][1]):
            consolidate(damaged / case / "compressopt.index.json", damaged / "adam.pt")
