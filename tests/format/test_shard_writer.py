"""Our own writer of safetensors: what safetensors reads, whole or not there at all, in little memory."""

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from hf_compressopt.checkpoint.portable import PendingTensor, write_torch_file
from hf_compressopt.format import shards
from hf_compressopt.format.index import BLOCK_BYTES, DTYPES
from hf_compressopt.format.shards import ShardFile, write_shard


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

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(tmp_path / "file.")) + ".*[.]tmp") as caught:
            write_shard(tmp_path / "file", {"a": ("uint8", (1 << 21,))}, {}, parts_of)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_small_files_are_whole_or_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards.publish(shards.write_aside(tmp_path / "index", b"old"), tmp_path / "index")
    aside = shards.write_aside(tmp_path / "index", b"new")
    assert (tmp_path / "index").read_bytes() == b"old" and aside.read_bytes() == b"new"
    aside.unlink()
    monkeypatch.setattr(os, "fsync", lambda _: cannot_allocate(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        shards.write_aside(tmp_path / "index", b"new")
    assert (tmp_path / "index").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_a_close_that_fails_leaves_no_file_and_tells_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = os.close

    def fail(descriptor: int) -> None:
        monkeypatch.undo()
        close(descriptor)  # a descriptor is gone even so
        cannot_allocate(errno.EIO)

    monkeypatch.setattr(os, "close", fail)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "file", b"1")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_given_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        write(tmp_path / "file", b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_under_way_has_a_name_of_its_own_and_the_old_one_stays(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_text("old")
    (tmp_path / "model.tmp").write_text("the user's")

    def write_one(data: Callable[[], bytes]) -> None:
        if suffix == ".pt":
            write_torch_file(path, {"a": PendingTensor(torch.float32, (1,))}, lambda _: [data()])
        else:
            write_shard(path, {"a": ("float32", (1,))}, {}, lambda _: [data()])

    def interrupted() -> bytes:
        assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 3
        write_one(lambda: data_of(torch.tensor(7.0)))  # another one, meanwhile
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_one(interrupted)
    assert (tmp_path / "model.tmp").read_text() == "the user's"
    assert {path.name for path in tmp_path.iterdir()} == {"model.tmp", path.name}
    assert (torch.load if suffix == ".pt" else load_file)(path)["a"] == 7
