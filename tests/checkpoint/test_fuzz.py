"""Malformed files: one clear error that names the file, nothing changed, nothing left behind; never a raw traceback.

A case is a number: it seeds everything that is random in it. The quick tests run the first of them, the others are in
the full suite.
"""

import copy
import io
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_compressopt import load_state
from hf_compressopt.checkpoint.portable import consolidate, import_state
from hf_compressopt.format import inspect
from hf_compressopt.format.index import CheckpointError, CheckpointIndex, sealed
from tests.checkpoint.kinds import KINDS, make, observe, train, written

INDEX = "compressopt.index.json"
LOADED = [name for name, kind in KINDS.items() if 1 in kind.loads_on]
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 7, 10**30, -(10**30), 2**63, 0.5, -0.5, 1e308, math.nan, math.inf, -math.inf,
    "", "x", "0", "../x", "\x00", "\ud800", "float64", "complex64", [], [0], [[]], [None], {}, {"a": 1}, [1e9, "x"],
]  # fmt: skip


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory)


def sealed_anyhow(index: Any) -> bytes:
    """An index with its digest, if it is an object at all."""
    return sealed(index) if isinstance(index, dict) and index else json.dumps(index).encode()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key in value:
            yield (*path, key)
            yield from places(value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        for place in range(len(value)):
            yield (*path, place)
            yield from places(value[place], (*path, place))


def mutated(value: Any, random: random.Random) -> Any:
    """A copy of nested dicts and lists in which one to three things are deleted, replaced, renamed or doubled."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        first = random.choice(list(value) or [None])  # else the longest part takes all
        found = [path for path in places(value) if path[0] == first]
        if not found:
            return value
        *way, last = random.choice(found)
        holder = value
        for key in way:
            holder = holder[key]
        if isinstance(holder, tuple):
            continue
        how = random.choice(("replace", "replace", "replace", "delete", "add", "swap"))
        if how == "replace":
            holder[last] = copy.deepcopy(random.choice(JUNK))
        elif how == "delete":
            del holder[last]
        elif how == "add" and isinstance(holder, dict):
            holder[random.choice(("x", "class", "optimizer", "by_place", "exp_avg/x", 3))] = random.choice(JUNK)
        elif how == "add":
            holder.append(copy.deepcopy(holder[last]))
        elif isinstance(holder, dict):
            other = random.choice(list(holder))
            holder[last], holder[other] = holder[other], holder[last]
    return value


def damaged(data: bytes, random: random.Random) -> bytes:
    """Bytes that are cut, changed, taken out or put in."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        place = random.randrange(len(found) + 1)
        how = random.choice(("flip", "flip", "set", "cut", "insert", "delete"))
        if how == "flip" and place < len(found):
            found[place] ^= 1 << random.randrange(8)
        elif how == "set":
            found[place : place + 4] = random.choice((b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"    ", b"9999"))
        elif how == "cut" and random.random() < 0.3:
            del found[place:]
        elif how == "insert":
            found[place:place] = random.randbytes(random.randrange(1, 9))
        elif how == "delete":
            del found[place : place + random.randrange(1, 9)]
    return bytes(found)


@pytest.fixture
def optimizers() -> Callable[[str], tuple[list[torch.nn.Parameter], Any, dict[str, str]]]:
    """A trained optimizer of each kind, made again after a load that succeeded."""
    made: dict[str, Any] = {}

    def get(name: str, again: bool = False) -> tuple[list[torch.nn.Parameter], Any, dict[str, str]]:
        if again or name not in made:
            params, optimizer = make(KINDS[name])
            train(0, 1, params, optimizer, range(1))
            made[name] = params, optimizer, observe(params, optimizer)
        return made[name]

    return get


def refuse_or_load(folder: Path, name: str, optimizers: Any, where: str) -> bool:
    params, optimizer, before = optimizers(name)
    try:
        load_state(optimizer, folder)
    except CheckpointError as error:
        assert str(folder) in str(error), f"{where}: {error}"
        assert "half loaded" not in str(error), f"{where}: {error}"
        assert observe(params, optimizer) == before, f"{where}: changed by a load that failed with {error}"
        return False
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    optimizers(name, again=True)
    return True


def refuse_or_consolidate(folder: Path, where: str, suffix: str) -> bool:
    before = {path.name for path in folder.iterdir()}
    try:
        consolidate(folder / INDEX, folder / f"out{suffix}")
    except CheckpointError as error:
        assert str(folder) in str(error), f"{where}: {error}"
        assert {path.name for path in folder.iterdir()} == before, f"{where}: files are left"
        return False
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    (folder / f"out{suffix}").unlink()
    return True


def fuzz_index(case: int, kinds: Path, folder: Path, optimizers: Any) -> bool:
    generator, name = random.Random(case), LOADED[case % len(LOADED)]
    target = shutil.copytree(kinds / name, folder / f"index{case}")
    data = (target / INDEX).read_bytes()
    if case % 4 == 0:
        data = damaged(data, generator)
    elif case % 4 == 1:
        data = sealed_anyhow(mutated(json.loads(data), generator))
    else:
        index = json.loads(data)
        data = sealed({**index, "header": mutated(index["header"], generator)})
    (target / INDEX).write_bytes(data)
    return look_at(target, name if case % 3 else generator.choice(LOADED), optimizers, case)


def fuzz_shard(case: int, kinds: Path, folder: Path, optimizers: Any) -> bool:
    generator, name = random.Random(case), LOADED[case % len(LOADED)]
    target = shutil.copytree(kinds / name, folder / f"shard{case}")
    shard = generator.choice(sorted(target.glob("*.safetensors")))
    data = shard.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if case % 3:
        header = json.dumps(mutated(json.loads(data[8 : 8 + size]), generator)).encode()
        shard.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    else:
        shard.write_bytes(damaged(data, generator))
    if case % 2:  # a length that the index knows
        index = json.loads((target / INDEX).read_text())
        for entry in index["shards"]:
            entry["bytes"] = (target / entry["file"]).stat().st_size
        (target / INDEX).write_bytes(sealed(index))
    return look_at(target, name, optimizers, case)


def look_at(target: Path, name: str, optimizers: Any, case: int) -> bool:
    """Load, consolidate and inspect a checkpoint; was it loaded?"""
    loaded = refuse_or_load(target, name, optimizers, f"{target.name}, {name}")
    refuse_or_consolidate(target, f"{target.name}, {name}", (".pt", ".safetensors")[case % 2])
    "\n".join(map(inspect.render, inspect.collect(target, verify=True)))
    shutil.rmtree(target)
    return loaded


def fuzz_import(case: int, kinds: Path, folder: Path, optimizers: Any) -> bool:
    generator, suffix = random.Random(case), (".pt", ".pt", ".safetensors")[case % 3]
    file, out = folder / f"source{case}{suffix}", folder / f"out{case}"
    file.write_bytes(source(kinds, suffix, case % 2 == 0, generator))
    try:
        import_state(file, out)
    except ValueError as error:
        assert str(file) in str(error), f"{file.name}: {error}"
        assert not out.exists(), f"{file.name}: files are left"
        return False
    except Exception as error:
        raise AssertionError(f"{file.name}: {type(error).__name__}: {error}") from error
    return True


def source(kinds: Path, suffix: str, structured: bool, generator: random.Random) -> bytes:
    """A malformed file of AdamW's state: other values in a sound file, or a sound file with damaged bytes."""
    path = kinds / "files" / {".pt": "optimizer.pt", ".safetensors": "adamw_1.safetensors"}[suffix]
    data = path.read_bytes()
    if not structured:
        return damaged(data, generator)
    if suffix == ".pt":
        torch.save(mutated(torch.load(path, weights_only=True), generator), buffer := io.BytesIO())
        return buffer.getvalue()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    groups = json.loads(header["__metadata__"]["param_groups"])
    header["__metadata__"]["param_groups"] = json.dumps(mutated(groups, generator))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cases", [60, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize("fuzz", [fuzz_index, fuzz_shard, fuzz_import])
def test_malformed_files_are_refused_clearly(
    fuzz: Callable[..., bool], cases: int, kinds: Path, tmp_path: Path, optimizers: Any
) -> None:
    outcomes = [fuzz(case, kinds, tmp_path, optimizers) for case in range(cases)]
    assert outcomes.count(False) > cases // 4


@pytest.mark.full
@pytest.mark.parametrize("name", ["onebit_adam_compressed_1", "adamw_1"])
def test_no_bit_of_an_index_can_flip_unseen(name: str, kinds: Path, tmp_path: Path, optimizers: Any) -> None:
    folder = shutil.copytree(kinds / name, tmp_path / name)
    data = bytearray((folder / INDEX).read_bytes())
    params, optimizer, before = optimizers(name)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        (folder / INDEX).write_bytes(data)
        with pytest.raises(CheckpointError, match=INDEX):
            CheckpointIndex.read(folder / INDEX) if bit % 97 else load_state(optimizer, folder)
        if bit % 97 == 0:
            (facts,) = inspect.collect(folder, verify=True)
            assert facts["problems"], f"bit {bit} of {name}"
        data[bit // 8] ^= 1 << bit % 8
    assert observe(params, optimizer) == before
    (folder / INDEX).write_bytes(data)
    load_state(optimizer, folder)


def test_an_index_of_version_4_has_no_digest_and_loads(kinds: Path, tmp_path: Path, optimizers: Any) -> None:
    folder = shutil.copytree(kinds / "adamw_1", tmp_path / "adamw_1")
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "version": 4}))
    assert not refuse_or_load(folder, "adamw_1", optimizers, "a digest in version 4")
    del index["digest"]
    (folder / INDEX).write_text(json.dumps({**index, "version": 4}))
    assert refuse_or_load(folder, "adamw_1", optimizers, "version 4")
    (folder / INDEX).write_text(json.dumps(index))
    assert not refuse_or_load(folder, "adamw_1", optimizers, "version 5 without a digest")
