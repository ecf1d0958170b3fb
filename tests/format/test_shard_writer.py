"""Our own writer of safetensors: what safetensors reads, whole or not there at all, in little memory."""

import errno
import os
import re
import resource
import threading
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from hf_compressopt.checkpoint.portable import PendingTensor, write_torch_file
from hf_compressopt.format import shards as writer
from hf_compressopt.format.index import BLOCK_BYTES, DTYPES
from hf_compressopt.format.shards import ShardFile, ShardWriter


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
    with ShardWriter(file, layout(tensors), {"format": "pt", "save_id": "7"}) as shard:
        sizes = [tensors[key].element_size() for key in shard.keys]
        assert sizes == sorted(sizes, reverse=True) and set(shard.keys) == tensors.keys()
        for key in shard.keys:
            data = bytearray(data_of(tensors[key]))
            for low in range(0, len(data), step):
                part = data[low : low + step]
                shard.write(key, part)
                part[:] = bytes(len(part))  # it may be reused at once
        sums = shard.finish()
    assert [path.name for path in tmp_path.iterdir()] == [file.name] and file.stat().st_size == shard.bytes
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


def test_a_file_without_tensors_is_one(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "file", {}, {}) as shard:
        assert shard.finish() == {}
    assert load_file(tmp_path / "file") == {}


def test_bytes_that_are_not_due_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    tensors = {"a": ("float32", (2,)), "none": ("float32", (0,)), "b": ("float32", (1,))}
    threads = threading.active_count()
    for key, count, said in [
        ("b", 4, "4 bytes of 'b', but 8 of 'a' are due"),
        ("a", 9, "9 bytes of 'a', but 8 of 'a' are due"),
        ("c", 4, "4 bytes of 'c'"),
    ]:
        with pytest.raises(ValueError, match=said), ShardWriter(tmp_path / "file", tensors, {}) as shard:
            shard.write(key, bytes(count))
    with pytest.raises(ValueError, match="'a' was given 5 of its 8 bytes"):
        with ShardWriter(tmp_path / "file", tensors, {}) as shard:
            shard.write("a", bytes(5))
            shard.finish()
    with pytest.raises(ValueError, match="4 bytes of 'b', but none are due"):
        with ShardWriter(tmp_path / "file", tensors, {}) as shard:
            shard.write("a", bytes(8))
            shard.write("b", bytes(4))
            shard.write("b", bytes(4))
    with pytest.raises(ValueError, match="file: safetensors has no dtype 'float31'; legal are"):
        ShardWriter(tmp_path / "file", {"a": ("float31", (2,))}, {})
    assert list(tmp_path.iterdir()) == [] and threading.active_count() == threads


def test_a_file_that_was_there_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), ShardWriter(file, {"a": ("uint8", (3,))}, {}) as shard:
        shard.write("a", b"123")
        assert file.read_text() == "old"
        raise KeyboardInterrupt
    assert file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_full_disk_is_met_before_anything_is_written(tmp_path: Path) -> None:
    """The limit on the size of a file stands for the full disk: no byte of the data is given to the writer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(tmp_path / "file.")) + ".*[.]tmp") as caught:
            with ShardWriter(tmp_path / "file", {"a": ("uint8", (1 << 21,))}, {}):
                raise AssertionError("the file was begun")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []


def cannot_allocate(code: int) -> None:
    raise OSError(code, os.strerror(code))


def test_a_file_system_that_cannot_take_room_tells_of_a_full_disk_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: cannot_allocate(errno.EOPNOTSUPP))
    with ShardWriter(tmp_path / "whole", {"a": ("uint8", (3,))}, {}) as shard:
        shard.write("a", b"123")
        shard.finish()
    assert load_file(tmp_path / "whole")["a"].tolist() == [49, 50, 51]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(tmp_path / "file.")) + ".*[.]tmp") as caught:
            with ShardWriter(tmp_path / "file", {"a": ("uint8", (1 << 21,))}, {}) as shard:
                shard.write("a", bytes(1 << 21))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_small_files_are_whole_or_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.publish(writer.write_aside(tmp_path / "index", b"old"), tmp_path / "index")
    aside = writer.write_aside(tmp_path / "index", b"new")
    assert (tmp_path / "index").read_bytes() == b"old" and aside.read_bytes() == b"new"
    aside.unlink()
    monkeypatch.setattr(os, "fsync", lambda _: cannot_allocate(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        writer.write_aside(tmp_path / "index", b"new")
    assert (tmp_path / "index").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_without_posix_fallocate_files_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    with ShardWriter(tmp_path / "file", {"a": ("uint8", (3,))}, {}) as shard:
        shard.write("a", b"123")
        shard.finish()
    assert load_file(tmp_path / "file")["a"].tolist() == [49, 50, 51]


def test_a_close_that_fails_leaves_no_file_and_tells_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = os.close
    with pytest.raises(OSError, match="Input/output"), ShardWriter(tmp_path / "file", {"a": ("uint8", (1,))}, {}) as f:
        f.write("a", b"1")

        def fail(descriptor: int) -> None:
            monkeypatch.undo()
            close(descriptor)  # a descriptor is gone even so
            cannot_allocate(errno.EIO)

        monkeypatch.setattr(os, "close", fail)
        f.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_given_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError), ShardWriter(tmp_path / "file", {"a": ("uint8", (1,))}, {}) as shard:
        shard.write("a", b"1")
        shard.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_under_way_have_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "model.tmp").write_text("the user's")
    writers = [ShardWriter(tmp_path / "model.safetensors", {"a": ("uint8", (1,))}, {}) for _ in range(3)]
    with writers[0] as one, writers[1] as other:
        for file in (one, other):
            file.write("a", b"1")
            file.finish()
    with pytest.raises(KeyboardInterrupt), writers[2]:
        raise KeyboardInterrupt

    def interrupted(tensor: PendingTensor) -> list[bytes]:
        write_torch_file(tmp_path / "model.pt", {"a": 1}, lambda _: [])  # another one, meanwhile
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_torch_file(tmp_path / "model.pt", PendingTensor(torch.float32, (2,)), interrupted)
    assert (tmp_path / "model.tmp").read_text() == "the user's"
    assert {path.name for path in tmp_path.iterdir()} == {"model.tmp", "model.safetensors", "model.pt"}
    assert load_file(tmp_path / "model.safetensors")["a"] == 49 and torch.load(tmp_path / "model.pt") == {"a": 1}
