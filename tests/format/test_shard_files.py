"""Shards read by our own reader: what safetensors writes, and what nobody should have written."""

import io
import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from hf_compressopt import load_state
from hf_compressopt.checkpoint.partitioned import PlainState
from hf_compressopt.checkpoint.portable import consolidate
from hf_compressopt.format.index import DTYPES, CheckpointError, CheckpointIndex, Piece, Shard, TensorEntry
from hf_compressopt.format.shards import ShardFile, write_shard


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

    def read(self, size: int | None = -1) -> bytes:
        return super().read(5) or b""


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


def shard(header: Any, data: bytes = b"12345678") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: Any, end: Any, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.invariant(27)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "its header of 0 bytes is longer than 100000000 bytes or than the file, which has 0"),
        (b"1234", "or than the file, which has 4"),
        (shard({"a": entry(0, 8)})[:12], "its header of"),
        (b"\xff" * 100, "its header of"),
        (shard(b"{"), "not readable as safetensors"),
        (shard(b"\xff\xfe"), "not readable as safetensors"),
        (shard(b"[" * 100_000), "not readable as safetensors"),
        (shard([]), "not readable as safetensors"),
        (shard({"a": 3}), "not readable as safetensors"),
        (shard({"__metadata__": 3, "a": entry(0, 8)}), "its metadata is not an object"),
        (shard(b'{"a": 1, "a": 1}'), "has a name twice"),
        (shard({"a": entry(0, 4), "b": entry(0, 4)}), "overlap others or leave a gap"),
        (shard({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "overlap others or leave a gap"),
        (shard({"a": entry(4, 8)}), "overlap others or leave a gap"),
        (shard({"a": entry(0, 4)}), "its tensors end at byte"),
        (shard({"a": entry(0, 8, shape=[2]), "b": entry(8, 12)}), "its tensors end at byte"),
        (shard({"a": entry(-4, 0)}), "must be whole numbers >= 0"),
        (shard({"a": entry(0.0, 8.0)}), "must be whole numbers >= 0"),
        (shard({"a": entry(0, 8, shape=[-1, -2])}), "must be whole numbers >= 0"),
        (shard({"a": entry(8, 0, shape=[0])}), "-8 bytes for"),
        (shard({"a": entry(0, 8, shape=[3])}), "8 bytes for 'F32' [3]"),
        (shard({"a": entry(0, 8, dtype="F31", shape=[2])}), "8 bytes for 'F31'"),
        (shard({"a": entry(0, 8, dtype=[1], shape=[2])}), "not readable as safetensors"),
        (shard({"a": entry(0, 8, shape=[2**70, 2**70])}), "8 bytes for"),
    ],
)
def test_what_is_no_whole_safetensors_file_is_refused_by_name(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(tmp_path / 'file'))} .*{re.escape(said)}"):
        ShardFile(tmp_path / "file")


def test_a_folder_is_no_shard(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not readable"):
        ShardFile(tmp_path)


def test_more_shards_than_a_process_may_open_files_are_read(tmp_path: Path) -> None:
    ranks, param = 300, torch.nn.Parameter(torch.zeros(300))
    shards, pieces = [], {"exp_avg": [], "exp_avg_sq": []}
    for rank in range(ranks):
        shard = tmp_path / f"shard{rank}"
        parts = {f"{kind}/p@{rank}": ("float32", (1,)) for kind in pieces}
        step = {"scalar:step/p": ("float32", ())} if rank == 0 else {}
        value = torch.tensor([float(rank)]).numpy().data
        nbytes, sums = write_shard(shard, {**parts, **step}, {"save_id": "1"}, lambda _, value=value: [value])
        for kind in pieces:
            pieces[kind].append(Piece(rank, f"{kind}/p@{rank}", rank, rank + 1, sums[f"{kind}/p@{rank}"]))
        if step:
            first = sums["scalar:step/p"]
        shards.append(Shard(shard.name, nbytes))
    tensors = {f"{kind}/p": TensorEntry("float32", (ranks,), tuple(found)) for kind, found in pieces.items()}
    tensors["scalar:step/p"] = TensorEntry("float32", (), (Piece(0, "scalar:step/p", 0, 1, first),))
    optimizer = torch.optim.AdamW([("p", param)])
    header = {**PlainState(optimizer).header(), "world_size": ranks}
    index = CheckpointIndex(
        "1", 1 << 22, header, [[{"name": "p", "shape": [ranks], "dtype": "float32"}]], shards, tensors
    )
    (tmp_path / "compressopt.index.json").write_bytes(index.to_json())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    try:
        load_state(optimizer, tmp_path)
        consolidate(tmp_path / "compressopt.index.json", tmp_path / "out.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for found in (optimizer.state[param], torch.load(tmp_path / "out.pt")["state"][0]):
        assert found["exp_avg"].tolist() == found["exp_avg_sq"].tolist() == list(range(ranks))
