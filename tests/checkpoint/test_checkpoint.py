"""save_state and load_state: exact, whole or refused, and nothing changed by a refusal."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import nn

import hf_compressopt
from hf_compressopt import OnebitAdam, load_state, save_state
from hf_compressopt.checkpoint import load as loading
from hf_compressopt.checkpoint.portable import consolidate
from hf_compressopt.format.index import CheckpointError, checksum_of, sealed
from hf_compressopt.format.shards import ShardFile
from hf_compressopt.kernels import messages
from tests.checkpoint import kinds
from tests.checkpoint.kinds import Kind, observe, train
from tests.support.family import assign
from tests.support.harness import on_ranks, run_ranks, run_ranks_expecting_error

SHAPES = [(30, 7), (11,), (0, 4), (5, 3, 2), (1,)]


def make(
    world_size: int, shapes: list[tuple[int, ...]] = SHAPES, optimizer: str = "OnebitAdam", **options: Any
) -> tuple[list[nn.Parameter], Any]:
    options = {"freeze_step": 3, "bucket_cap_mb": 0.0003, "scale_block": 16, **options}
    return kinds.make(Kind(optimizer, options, world_size, 0, shapes=tuple(shapes)))


def save_two_runs(rank: int, world_size: int, directory: str) -> None:
    for run in ("one", "other"):
        params, optimizer = make(world_size)
        for at in (4, 6):
            train(rank, world_size, params, optimizer, range(at - 2, at))
            save_state(optimizer, f"{directory}/{run}")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(2, save_two_runs, str(folder))
    return folder


@pytest.fixture
def saved(two_runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(two_runs / "one", tmp_path / "saved")


def read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "compressopt.index.json").read_text())


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write an index of someone who has edited it, and computed its digest again."""
    (folder / "compressopt.index.json").write_bytes(sealed(index))


def test_the_files_are_those_of_the_last_save_and_open_with_safetensors(saved: Path) -> None:
    index = read_index(saved)
    names = sorted(path.name for path in saved.iterdir())
    assert names == sorted(["compressopt.index.json", *(shard["file"] for shard in index["shards"])])
    assert index["header"]["step"] == 4 and index["header"]["world_size"] == 2
    seen: set[str] = set()
    for shard in index["shards"]:
        with safe_open(saved / shard["file"], framework="pt") as file:
            seen |= set(file.keys())
            assert file.metadata()["save_id"] == index["save_id"]
    assert {"exp_avg/layer.0", "exp_avg_sq/layer.4", "worker_error/group0/rank1"} <= seen
    assert {"exp_avg_message/group1", "exp_avg_sq_code/layer.3", "exp_avg_sq_top/group1"} <= seen


def load_and_compare(rank: int, world_size: int, directory: str, options: dict[str, Any]) -> None:
    """Load into an optimizer that has state; whatever happens, it must be unchanged after an error."""
    params, optimizer = make(world_size, **options)
    train(rank, world_size, params, optimizer, range(5))
    before = observe(params, optimizer)
    try:
        load_state(optimizer, directory)
    finally:
        assert observe(params, optimizer) == before, "the state was changed"


Damage = Callable[[Path], str]
INDEX = "compressopt.index.json"


def in_shard(number: int, change: Callable[[bytearray], Any], *, known: bool = False) -> Damage:
    """Change the bytes of a shard; ``known``: someone has told the index the new size. Returns what an error names."""

    def damage(folder: Path) -> str:
        index = read_index(folder)
        file = folder / index["shards"][number]["file"]
        data = bytearray(file.read_bytes())
        change(data)
        file.write_bytes(data)
        if known:
            index["shards"][number]["bytes"] = len(data)
            write_index(folder, index)
        return file.name

    return damage


def in_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytearray], None]:
    def changed(data: bytearray) -> None:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        data[: 8 + length] = len(text).to_bytes(8, "little") + text

    return changed


def in_index(change: Callable[[dict[str, Any]], Any], said: str = INDEX) -> Damage:
    def damage(folder: Path) -> str:
        index = read_index(folder)
        change(index)
        write_index(folder, index)
        return said

    return damage


def header_with(key: str, value: Any, said: str = INDEX) -> Damage:
    def change(index: dict[str, Any]) -> None:
        header = index["header"]
        places = (header, header.get("schedule", {}), header["param_groups"][0])
        next((place for place in places if key in place), header)[key] = value

    return in_index(change, said)


def name_a_file(name: str) -> Damage:
    def change(index: dict[str, Any]) -> None:
        index["shards"][0]["file"] = name.format(file=index["shards"][0]["file"])

    return in_index(change, f"{INDEX} is not a valid index: a shard must have a plain name")


def entry_of(header: dict[str, Any]) -> dict[str, Any]:
    """The entry of a shard's first tensor of more than one element, in the order of their bytes."""
    entries = [entry for key, entry in header.items() if key != "__metadata__" and len(entry["shape"]) > 0]
    found = (e for e in entries if e["data_offsets"][1] > e["data_offsets"][0] + 8)
    return min(found, key=lambda e: e["data_offsets"])


def remove_a_shard(folder: Path, number: int = 1) -> str:
    file = folder / read_index(folder)["shards"][number]["file"]
    file.unlink()
    return file.name


def swap_the_shards(folder: Path) -> str:
    first, second = (folder / shard["file"] for shard in read_index(folder)["shards"])
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    return "compressopt-"


def shard_of_another_save(folder: Path) -> str:
    in_index(lambda index: index.update(save_id="0123456789abcdef"))(folder)
    return read_index(folder)["shards"][0]["file"]


def shard_of_another_run(folder: Path) -> str:
    """One of the same size, with the same tensors."""
    file = folder / read_index(folder)["shards"][1]["file"]
    other = folder.parents[1] / "runs0" / "other"
    shutil.copy(other / read_index(other)["shards"][1]["file"], file)
    return file.name


def shards_in_another_order(folder: Path) -> str:
    in_index(lambda index: index["shards"].reverse())(folder)
    return read_index(folder)["shards"][0]["file"]


def header_over_the_cap(folder: Path) -> str:
    """In a file that is long enough for it, and as long as the index says."""
    index = read_index(folder)
    file = folder / index["shards"][0]["file"]
    with open(file, "r+b") as opened:
        opened.write((100_000_001).to_bytes(8, "little"))
        opened.truncate(200_000_000)  # takes no room on the disk
    index["shards"][0]["bytes"] = 200_000_000
    write_index(folder, index)
    return file.name


def index_text(change: Callable[[str], str]) -> Damage:
    def damage(folder: Path) -> str:
        (folder / INDEX).write_text(change((folder / INDEX).read_text()))
        return INDEX

    return damage


def flip(data: bytearray) -> None:
    data[-3] ^= 4


def in_a_piece(change: Callable[[dict[str, Any], dict[str, Any]], Any], said: str = INDEX) -> Damage:
    """Change the only piece of a tensor of 11 elements."""

    def changed(index: dict[str, Any]) -> None:
        entry = index["tensors"]["exp_avg_sq_code/layer.1"]
        change(entry, entry["pieces"][0])

    return in_index(changed, said)


def longer_piece(entry: dict[str, Any], piece: dict[str, Any]) -> None:
    """A range that goes beyond the end of its shard, in a tensor to match."""
    entry["shape"], piece["stop"] = [10**9], 10**9


def split(entry: dict[str, Any], piece: dict[str, Any]) -> None:
    """Two pieces that are the same tensor of a shard."""
    entry["pieces"] = [{**piece, "stop": 4}, {**piece, "start": 4}]


def overlap_the_pieces(index: dict[str, Any]) -> None:
    entry = next(entry for entry in index["tensors"].values() if len(entry["pieces"]) > 1)
    entry["pieces"][1]["start"] -= 1


def of_tensors(change: Callable[[dict[str, Any]], Any], said: str = INDEX) -> Damage:
    return in_index(lambda index: change(index["tensors"]), said)


def top_off_the_grid(folder: Path) -> str:
    """The exponent of no variance, under a checksum that fits."""
    index = read_index(folder)
    piece = index["tensors"]["exp_avg_sq_top/group1"]["pieces"][0]
    shard = folder / index["shards"][piece["shard"]]["file"]
    place, data = ShardFile(shard).tensors[piece["key"]], bytearray(shard.read_bytes())
    data[place.begin : place.begin + 4] = (1024).to_bytes(4, "little")
    shard.write_bytes(data)
    piece["checksums"] = [checksum_of(data[place.begin : place.end]).hexdigest()]
    write_index(folder, index)
    return "from -1008 to 1023, got [0, 1024]"


#: Of the tensors of a compact state.
COMPACT: dict[str, Damage] = {
    "a top off the grid": top_off_the_grid,
    "signed codes": of_tensors(lambda tensors: tensors["exp_avg_sq_code/layer.0"].update(dtype="int8"), "as int8"),
    "signed errors": of_tensors(lambda tensors: tensors["server_error/group0"].update(dtype="int8"), "as int8"),
    "codes of another shape": of_tensors(lambda t: t["exp_avg_sq_code/layer.0"]["shape"].reverse(), "[7, 30]"),
    "no tops": of_tensors(lambda tensors: tensors.pop("exp_avg_sq_top/group0"), "no tensor 'exp_avg_sq"),
    "no message": of_tensors(lambda tensors: tensors.pop("exp_avg_message/group1"), "no tensor 'exp_avg/"),
    "messages of another shape": of_tensors(lambda t: t["exp_avg_message/group1"]["shape"].append(1), "needed is"),
    "blocks of no length": header_with(
        "scale_block", 12, "scale_block must be a positive multiple of 8, or None, got 12"
    ),
}
DIVIDE, BAD_SIZES = "node_size must divide the 2 ranks of the checkpoint", (0, -1, 3, 2.0, "2", True, None)
HOSTILE: dict[str, Damage] = {
    "freeze_step": header_with("freeze_step", -5),
    "step": header_with("step", "7"),
    "betas": header_with("betas", [2, 3]),
    "lr": header_with("lr", float("nan")),
    "stage": header_with("stage", "abc"),
    "world_size": header_with("world_size", 3),
    "param_groups": header_with("param_groups", [1, 2, 3]),
    "no schedule": in_index(lambda index: index["header"].pop("schedule")),
    "amsgrad": in_index(lambda index: index["header"]["param_groups"][0].update(amsgrad=True)),
    "a bit": in_shard(0, flip),
    "no shard": remove_a_shard,
    "swapped shards": swap_the_shards,
    "a shard of another save": shard_of_another_save,
    "a shard of another run": shard_of_another_run,
    "another order": shards_in_another_order,
    "a header over the cap": header_over_the_cap,
    "half an index": index_text(lambda text: text[: len(text) // 2]),
    "a deep index": index_text(lambda text: "[" * 200_000),
    "a later format": in_index(lambda index: index.update(version=99)),
    "an unknown checksum": in_index(lambda index: index.update(checksum=["md5"])),
    "no checksum": in_index(lambda index: index.pop("checksum")),
    "blocks too big for memory": in_index(lambda index: index.update(block_bytes=1 << 60)),
    "a file in the folder above": name_a_file("../{file}"),
    "an absolute path": name_a_file("/tmp/{file}"),
    "no file": name_a_file(""),
    "two names": name_a_file("{file}\n"),
    "truncated": in_shard(1, lambda data: data.__delitem__(slice(-5, None))),
    "truncated, and the index knows": in_shard(1, lambda data: data.__delitem__(slice(-4, None)), known=True),
    "longer": in_shard(0, lambda data: data.extend(b"more"), known=True),
    "a header of 1 TiB": in_shard(0, lambda data: data.__setitem__(slice(8), (2**40).to_bytes(8, "little"))),
    "a header that is no JSON": in_shard(0, lambda data: data.__setitem__(8, ord("}")), known=True),
    "another dtype": in_shard(0, in_header(lambda header: entry_of(header).update(dtype="I32")), known=True),
    "another shape": in_shard(0, in_header(lambda header: entry_of(header)["shape"].append(1)), known=True),
    "no metadata": in_shard(1, in_header(lambda header: header.pop("__metadata__")), known=True),
    "a piece beyond its shard": in_a_piece(longer_piece),
    "overlapping pieces": in_index(overlap_the_pieces, "overlap, leave gaps or are in no shard"),
    "a piece of no shard": in_a_piece(lambda entry, piece: piece.update(shard=2), "leave gaps or are in no shard"),
    "a gap": in_a_piece(lambda entry, piece: piece.update(start=1), "leave gaps"),
    "too few elements": in_a_piece(lambda entry, piece: piece.update(stop=10), "pieces of 10 of its 11 elements"),
    "too few checksums": in_a_piece(lambda entry, piece: piece["checksums"].pop(), "has 0 checksums for 1 blocks"),
    "a piece twice": in_a_piece(split, "no room for a piece"),
    **{f"nodes of {bad!r}": header_with("node_size", bad, f"{DIVIDE}, got {bad!r}") for bad in BAD_SIZES},
    "a transposed tensor": of_tensors(lambda tensors: tensors["exp_avg/layer.0"]["shape"].reverse()),
    "a mask that does not fit": of_tensors(lambda tensors: tensors["exp_avg_mask/group0"].update(shape=[7, 1])),
    "a tensor of nobody": of_tensors(lambda tensors: tensors.update({"optimizer/abc": tensors.pop("step/group0")})),
    "a wider moment": of_tensors(lambda tensors: tensors["exp_avg/layer.0"].update(dtype="float64")),
    "no error": of_tensors(lambda tensors: tensors.pop("worker_error/group0/rank1")),
    **COMPACT,
}
ON_OTHER_RANKS = ["a bit", "no shard", "no error", "another dtype", "a top off the grid"]


@pytest.mark.invariant(27)
@pytest.mark.parametrize(
    ("case", "ranks"),
    [*((case, 2) for case in HOSTILE), *((case, ranks) for case in ON_OTHER_RANKS for ranks in (1, 3))],
)
def test_what_is_damaged_is_refused_by_all_ranks_and_changes_nothing(case: str, ranks: int, saved: Path) -> None:
    said = HOSTILE[case](saved)
    errors = run_ranks_expecting_error(ranks, load_and_compare, str(saved), {})
    assert all(text.startswith("CheckpointError") and said in text for text in errors.values()), errors


@pytest.mark.parametrize("case", ["a top off the grid", "no tops", "messages of another shape"])
def test_a_consolidated_file_needs_whole_moments(case: str, saved: Path, tmp_path: Path) -> None:
    said = HOSTILE[case](saved).partition(", got")[0]
    with pytest.raises(CheckpointError, match="no tensor" if case == "no tops" else said):
        consolidate(saved / INDEX, tmp_path / "adam.pt")


def damage_after_check(rank: int, world_size: int, directory: str) -> None:
    """Another process flips a bit of rank 1's shard when all of it has been checked and nothing is loaded yet."""
    read, turns = loading._read, []

    def damage_and_read(*arguments: Any) -> None:
        turns.append(arguments)
        if rank == 0:
            HOSTILE["a bit"](Path(directory))
        torch.distributed.barrier()
        read(*arguments)

    _, optimizer = make(world_size)
    try:
        with mock.patch.object(loading, "_read", damage_and_read):
            load_state(optimizer, directory)
    finally:
        assert len(turns) == 1


@pytest.mark.invariant(27)
def test_what_is_damaged_between_check_and_load_is_not_loaded_silently(saved: Path) -> None:
    errors = run_ranks_expecting_error(2, damage_after_check, str(saved))
    assert all("is damaged" in text and "the state is half loaded" in text for text in errors.values()), errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": "OnebitLamb"}, "this optimizer is OnebitLamb"),
        ({"shapes": [(30, 7), (12,), (0, 4), (5, 3, 2), (1,)]}, "another model"),
        ({"shapes": [(30, 7), (11,), (5, 3, 2), (1,)]}, "another model"),
        ({"bucket_cap_mb": 0.001}, "bucket_cap_mb=0.000"),
    ],
    ids=["optimizer", "shape", "count", "buckets"],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], expected: str, saved: Path) -> None:
    errors = run_ranks_expecting_error(2, load_and_compare, str(saved), options)
    assert all("compressopt.index.json" in text and expected in text for text in errors.values()), errors
    if "bucket_cap_mb" in options:  # the advice can be followed
        run_ranks(2, load_with_buckets, str(saved), float(errors[0].rsplit("bucket_cap_mb=", 1)[1]))


def test_names_that_occur_twice_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizer = OnebitAdam([{"params": list(module.named_parameters())} for module in modules])
    with pytest.raises(ValueError, match="4 trainable parameters, got 4 names, 2 different ones: give names"):
        save_state(optimizer, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    save_state(optimizer, tmp_path / "checkpoint", names=["a", "b", "c", "d"])
    assert "exp_avg/c" in read_index(tmp_path / "checkpoint")["tensors"]


def load_with_buckets(rank: int, world_size: int, directory: str, bucket_cap_mb: float) -> None:
    _, optimizer = make(world_size, bucket_cap_mb=bucket_cap_mb)
    load_state(optimizer, directory)
    assert optimizer.metrics()["step"] == 4


RESUMED_IN_FULL: list[tuple[str, dict[str, Any]]] = [
    ("OnebitAdam", {"freeze_step": 4}),
    ("OnebitAdam", {"freeze_step": 4, "zero_stage": 1}),
    ("OnebitLamb", {"freeze_step": 4}),
    ("ZeroOneAdam", {"var_freeze_step": 4, "local_step_scaler": 2, "local_step_clipper": 4}),
]


@on_ranks(2)
def test_small_tensors_that_travel_in_full_resume_bitwise(rank: int, world_size: int, tmp_path: Path) -> None:
    """Where other tensors travel in full the state is refused."""
    messages.OWN_BLOCKS = 2  # as it is in the package
    for number, (name, options) in enumerate(RESUMED_IN_FULL):
        found = []
        for saves_at in (None, 2, 7, 8):
            params, optimizer = _beside_signs(name, options)
            for step in range(12):
                if step == saves_at:
                    save_state(optimizer, folder := tmp_path / f"{number}-{step}")
                    own = [param.detach().clone() for param in params]
                    params, optimizer = _beside_signs(name, options)
                    assign(params, own)
                    load_state(optimizer, folder)
                for index, param in enumerate(params):
                    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
                    param.grad = torch.randn(param.shape, generator=generator) * 10.0 ** (index - 2)
                hf_compressopt.average_gradients(optimizer)
                optimizer.step()
            found.append(torch.cat([param.detach().reshape(-1) for param in params]))
        for resumed in found[1:]:
            assert torch.equal(resumed, found[0]), (name, options)
    other = _beside_signs("OnebitAdam", {"freeze_step": 4, "scale_block": None})[1]
    with pytest.raises(Exception, match="small tensors beside its messages.*give scale_block=16"):
        load_state(other, tmp_path / "0-8")


def _beside_signs(name: str, options: dict[str, Any]) -> tuple[list[torch.nn.Parameter], Any]:
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5,), (20, 17), (3, 2), (130,), (9, 11))]
    return params, getattr(hf_compressopt, name)(
        params, **{"lr": 1e-2, "scale_block": 16, "bucket_cap_mb": 0.0008, **options}
    )
