"""Shards: what safetensors and we write and read, what nobody should have written, and the progress of big ones."""

import errno
import io
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.utils
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_compressopt import ZeroOptimizer, load_state, save_state
from hf_compressopt.checkpoint.portable import consolidate, save_torch_file
from hf_compressopt.format import shards
from hf_compressopt.format.index import BLOCK_BYTES, DTYPES, CheckpointError, Piece, TensorEntry
from hf_compressopt.format.shards import ShardFile, write_shard
from tests.support.harness import run_ranks
from tests.support.memory import limited


@pytest.mark.parametrize("block_bytes", [7, 64, 4096])
def test_what_safetensors_writes_is_read_range_by_range(block_bytes: int, tmp_path: Path) -> None:
    written = {dtype: torch.arange(30).to(getattr(torch, dtype)).view(5, 6) for dtype in DTYPES if dtype != "bool"}
    written |= {"bool": torch.arange(30).view(5, 6) % 3 == 0, "empty": torch.zeros(0, 3), "one": torch.tensor(2.5)}
    save_file(written, tmp_path / "file", metadata={"save_id": "1"})
    file = ShardFile(tmp_path / "file", block_bytes)
    assert file.metadata == {"save_id": "1"} and file.tensors.keys() == written.keys()
    for key, tensor in written.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        entry = TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), ())
        blocks = [data[low : low + block_bytes] for low in range(0, len(data), block_bytes)]
        piece = Piece(0, key, 0, tensor.numel(), tuple(xxhash.xxh3_128(block).hexdigest() for block in blocks))
        assert [bytes(part) for _, part in file.blocks(piece, entry)] == blocks
        for begin in range(0, len(data), 5):
            for end in range(begin, len(data) + 1, 3):
                out, given = bytearray(end - begin), bytearray(end - begin)
                for offset, part in file.blocks(piece, entry, begin, end):
                    out[offset - begin : offset - begin + len(part)] = part
                for offset, part in file.blocks(piece, entry, begin, end, memoryview(given)):
                    assert part == data[offset : offset + len(part)]
                assert out == given == data[begin:end]
        if data:
            wrong = Piece(0, key, 0, tensor.numel(), (*piece.checksums[:-1], "0" * len(piece.checksums[-1])))
            with pytest.raises(CheckpointError, match="file is damaged"):
                list(file.blocks(wrong, entry))
            with pytest.raises(CheckpointError, match="file is damaged"):
                list(file.blocks(wrong, entry, len(data) - 1, len(data)))
    file.close()


class Sluggish(io.FileIO):
    """A file of a system that gives less than it is asked for, as it may."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:5]) or 0


def test_a_file_system_may_give_less_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(40, dtype=torch.float32)
    save_file({"a": data}, tmp_path / "file", metadata={"save_id": "1"})
    monkeypatch.setattr("builtins.open", lambda path, mode, buffering: Sluggish(path, mode))
    file = ShardFile(tmp_path / "file", 64)
    monkeypatch.undo()
    raw = data.numpy().tobytes()
    sums = tuple(xxhash.xxh3_128(raw[low : low + 64]).hexdigest() for low in range(0, 160, 64))
    piece, entry = Piece(0, "a", 0, 40, sums), TensorEntry("float32", (40,), ())
    assert b"".join(bytes(part) for _, part in file.blocks(piece, entry)) == raw
    file.close()
    with pytest.raises(CheckpointError, match="is not readable"):
        ShardFile(tmp_path)


def shard(header: Any, data: bytes = b"12345678") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: Any, end: Any, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A = json.dumps(entry(0, 4)).encode()


@pytest.mark.invariant(27)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "its header of 0 bytes is longer than 100000000 bytes or than the file, which has 0"),
        (shard({"a": entry(0, 8)})[:12], "its header of"),
        (b"\xff" * 100, "its header of"),
        (shard(b"{"), "not readable as safetensors"),
        (shard(b"[" * 100_000), "not readable as safetensors"),
        (shard([]), "not readable as safetensors"),
        (shard({"__metadata__": 3, "a": entry(0, 8)}), "its metadata is not an object"),
        (shard(b'{"a": %b, "a": %b}' % (A, A.replace(b"[0, 4]", b"[4, 8]"))), "overlap others or leave a gap"),
        (shard({"a": entry(0, 4), "b": entry(0, 4)}), "overlap others or leave a gap"),
        (shard({"a": entry(4, 8)}), "overlap others or leave a gap"),
        (shard({"a": entry(0, 4)}), "its tensors end at byte"),
        (shard({"a": entry(-4, 0)}), "must be whole numbers >= 0"),
        (shard({"a": entry(0.0, 8.0)}), "must be whole numbers >= 0"),
        (shard({"a": entry(0, 8, shape=[-1, -2])}), "must be whole numbers >= 0"),
        (shard({"a": entry(8, 0, shape=[0])}), "-8 bytes for"),
        (shard({"a": entry(0, 8, shape=[3])}), "8 bytes for 'F32' [3]"),
        (shard({"a": entry(0, 8, dtype="F31", shape=[2])}), "8 bytes for 'F31'"),
        (shard({"a": entry(0, 8, shape=[2**70, 2**70])}), "8 bytes for"),
    ],
)
def test_what_is_no_whole_safetensors_file_is_refused_by_name(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(tmp_path / 'file'))} .*{re.escape(said)}"):
        ShardFile(tmp_path / "file")


def save_parts(rank: int, world_size: int, folder: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3000))
    optimizer = ZeroOptimizer([("p", param)], torch.optim.AdamW, betas=(0.0, 0.5))
    param.grad = torch.arange(3000.0)
    optimizer.step()
    save_state(optimizer, folder)


def test_more_shards_than_a_process_may_open_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(4, save_parts, str(tmp_path))
    param = torch.nn.Parameter(torch.zeros(3000))
    optimizer = torch.optim.AdamW([("p", param)])
    monkeypatch.setattr(shards, "_MOST_OPEN", 2)
    opened = len(os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_NOFILE, opened + 2):
        load_state(optimizer, tmp_path)
    with limited(resource.RLIMIT_NOFILE, opened + 3):  # one more, which is written
        consolidate(tmp_path / "compressopt.index.json", tmp_path / "adam.safetensors")
    for loaded in (optimizer.state[param]["exp_avg"], load_file(tmp_path / "adam.safetensors")["exp_avg/p"]):
        assert torch.equal(loaded, torch.arange(3000.0))


def data_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def layout(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for key, tensor in tensors.items()}


@pytest.mark.parametrize("step", [1 << 30, BLOCK_BYTES, 1_000_003])
def test_safetensors_reads_what_was_written_in_whatever_parts(step: int, tmp_path: Path) -> None:
    tensors = {dtype: torch.arange(35).to(getattr(torch, dtype)).view(5, 7) for dtype in DTYPES}
    tensors |= {"empty": torch.zeros(0, 3), "one": torch.tensor(2.5), 'a "name" of ü': torch.ones(3, dtype=torch.int8)}
    tensors["long"] = torch.randn(BLOCK_BYTES // 4 * 2 + 77)
    file = tmp_path / "file.safetensors"
    order = []

    def parts_of(key: str) -> Iterator[bytearray]:
        order.append(tensors[key].element_size())
        data = bytearray(data_of(tensors[key]))
        for low in range(0, len(data), step):
            part = data[low : low + step]
            yield part
            part[:] = bytes(len(part))  # it may be reused at once

    nbytes, sums = write_shard(file, layout(tensors), {"format": "pt", "save_id": "7"}, parts_of)
    assert order == sorted(order, reverse=True) and sums.keys() == tensors.keys()
    assert [path.name for path in tmp_path.iterdir()] == [file.name] and file.stat().st_size == nbytes
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype and loaded[key].shape == tensor.shape
        data = data_of(tensor)
        assert data_of(loaded[key]) == data
        blocks = [data[low : low + BLOCK_BYTES] for low in range(0, len(data), BLOCK_BYTES)]
        assert sums[key] == tuple(xxhash.xxh3_128(block).hexdigest() for block in blocks)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "save_id": "7"}
    ours = ShardFile(file)
    assert all(stored.begin % DTYPES[tensor][1] == 0 for tensor, stored in ours.tensors.items() if tensor in DTYPES)
    ours.close()


def write(path: Path, data: bytes, nbytes: int | None = None) -> None:
    write_shard(path, {"a": ("uint8", (len(data) if nbytes is None else nbytes,))}, {}, lambda _: [data])


def test_a_file_without_tensors_is_one(tmp_path: Path) -> None:
    assert write_shard(tmp_path / "file", {}, {}, lambda _: [])[1] == {}
    assert load_file(tmp_path / "file") == {}


def test_a_wrong_number_of_bytes_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    for data, nbytes in ((bytes(5), 8), (bytes(9), 8), (b"", 1), (b"1", 0)):
        with pytest.raises(ValueError, match=f"{len(data)} bytes were given for a tensor of {nbytes}"):
            write(tmp_path / "file", data, nbytes)
    with pytest.raises(ValueError, match="file: safetensors has no dtype 'float31'; legal are"):
        write_shard(tmp_path / "file", {"a": ("float31", (2,))}, {}, lambda _: [])
    assert list(tmp_path.iterdir()) == []


def cannot_allocate(code: int) -> None:
    raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("allocation", ["of the whole file", "refused", "none"])
def test_a_full_disk_leaves_no_file(allocation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of a file stands for it. Where files are allocated, no byte is given to the writer."""
    if allocation == "refused":
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: cannot_allocate(errno.EOPNOTSUPP))
    elif allocation == "none":
        monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    write(tmp_path / "whole", b"123")
    assert load_file(tmp_path / "whole")["a"].tolist() == [49, 50, 51]

    def parts_of(_: str) -> list[bytes]:
        assert allocation != "of the whole file", "it was begun"
        return [bytes(1 << 21)]

    told = re.escape(str(tmp_path / "file.")) + ".*[.]tmp"
    with limited(resource.RLIMIT_FSIZE, 1 << 20), pytest.raises(OSError, match=told) as caught:
        write_shard(tmp_path / "file", {"a": ("uint8", (1 << 21,))}, {}, parts_of)
    assert caught.value.errno == errno.EFBIG and [path.name for path in tmp_path.iterdir()] == ["whole"]


class Failing(io.FileIO):
    """A file of a system that tells an error of the disk at the close."""

    def close(self) -> None:
        if not self.closed:
            super().close()
            cannot_allocate(errno.EIO)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "shard": lambda path: write(path, b"1"),
    "for torch.load": lambda path: save_torch_file(path, {}),
    "index": lambda path: shards.write_aside(path, b"new"),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("failure", ["sync", "close", "name"])
def test_a_file_is_whole_or_as_it_was(failure: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    if failure == "close":
        monkeypatch.setattr("builtins.open", lambda path, mode, opener: Failing(path, mode, opener=opener))
    else:
        monkeypatch.setattr(os, "fsync" if failure == "sync" else "replace", lambda *_: cannot_allocate(errno.EIO))
    if (failure, kind) == ("name", "index"):  # which gets its name later
        assert WRITERS[kind](path).read_bytes() == b"new"
        (tmp_path / "file.tmp").unlink()
    else:
        with pytest.raises(OSError, match="Input/output.*tmp"):
            WRITERS[kind](path)
    assert path.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_under_way_has_a_name_of_its_own_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("old")
    (tmp_path / "model.tmp").write_text("the user's")

    def write_one(data: Callable[[], bytes]) -> None:
        write_shard(path, {"a": ("float32", (1,))}, {}, lambda _: [data()])

    def interrupted() -> bytes:
        assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 3
        write_one(lambda: data_of(torch.tensor(7.0)))  # another one, meanwhile
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_one(interrupted)
    assert (tmp_path / "model.tmp").read_text() == "the user's"
    assert {path.name for path in tmp_path.iterdir()} == {"model.tmp", path.name}
    assert load_file(path)["a"] == 7


def test_big_checkpoints_show_their_progress_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = torch.nn.Parameter(torch.ones(100_000))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()

    def shown(big: int, terminal: bool) -> str:
        monkeypatch.setattr(shards, "BIG", big)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        save_state(optimizer, tmp_path)
        load_state(optimizer, tmp_path)
        return capsys.readouterr().err

    text = shown(1000, terminal=True)
    assert "saving compressopt-" in text and "loading compressopt.index.json" in text and "800k" in text
    assert shown(10**9, terminal=True) == shown(1000, terminal=False) == ""


def test_a_progress_bar_obeys_hugging_faces_switch(capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> str:
        with shards.progress("adam.pt", 10**10, shown=True) as advance:
            time.sleep(0.15)  # it is drawn at most every 0.1 s
            advance(5 * 10**9)
        return capsys.readouterr().err

    assert "adam.pt:  50%|" in (text := told()) and "5.00G/10.0G" in text
    huggingface_hub.utils.disable_progress_bars()
    try:
        assert told() == ""
    finally:
        huggingface_hub.utils.enable_progress_bars()
