"""The index of a checkpoint: the tensors that were saved, and the place of each.

Format: docs/dev/checkpoint_format.md. A checkpoint is a folder with an index, which is written last, and a shard of
each rank, a safetensors file. The index names for each tensor the pieces that cover it: elements [start, stop) of the
flattened tensor are a tensor of a shard. Every ``block_bytes`` of a piece have a checksum, so that a part of a tensor
can be read and verified alone, and the index has a digest of itself. They find damage; they are no signature, because
who can write the shards can write the index too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import xxhash

INDEX_NAME = "{prefix}.index.json"
SHARD_NAME = "{prefix}-{save_id}-{rank:05d}-of-{world_size:05d}.safetensors"
FORMAT, VERSION = "hf_compressopt", 5
#: Key of a header: ranks per node, if the exchange was hierarchical.
NODE_SIZE = "node_size"
#: Key of a header: True if parameters are called by their places in the param groups, because they have no names.
BY_PLACE = "by_place"
#: Key of a header: False if no checkpoint of parameters beside the shards of FSDP2 belongs to this one.
BESIDE = "beside"
#: Bytes under one checksum, and the most that a reader accepts, since it holds one block in memory.
BLOCK_BYTES, MOST_BLOCK_BYTES = 1 << 22, 1 << 26
#: The checksum. It is as fast as memory; SHA-256 would be slower than disks.
CHECKSUM, checksum_of = "xxh3_128", xxhash.xxh3_128

#: The names of torch's dtypes in safetensors, and the bytes of an element.
DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}

StrPath = str | os.PathLike[str]
#: Start of the file names that Trainer, Accelerate and save_state use by default.
DEFAULT_PREFIX = "compressopt"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def find_indices(folder: Path, prefix: str | None = None) -> list[Path]:
    """Return the indices of a folder's checkpoints: of this prefix, or of any, damaged ones too."""
    if prefix is not None:
        path = folder / INDEX_NAME.format(prefix=prefix)
        return [path] if path.is_file() else []
    return [path for path in sorted(folder.glob(INDEX_NAME.format(prefix="*"))) if path.is_file() and _is_ours(path)]


def _is_ours(index: Path) -> bool:
    """Tell an index from that of a big model, even if it is damaged: by its name, its text, or its shards' names."""
    prefix = index.name.removesuffix(INDEX_NAME.format(prefix=""))
    if prefix.startswith(DEFAULT_PREFIX) or f'"{FORMAT}"'.encode() in index.read_bytes():
        return True
    shard = re.compile(re.escape(prefix) + r"-[0-9a-f]{16}-\d{5}-of-\d{5}\.safetensors")
    return any(shard.fullmatch(file.name) for file in index.parent.iterdir())


def name_by_place(group: int, place: int) -> str:
    return f"group{group}.{place}"


def check_prefix(prefix: str) -> str:
    """Check that files whose names start with ``prefix`` can be saved and loaded, and return it."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string, got {prefix!r}")
    if not _PLAIN_NAME.fullmatch(prefix):
        raise ValueError(
            f"prefix must be a plain name of letters, digits, '_', '-' and '.' that starts with a letter, a digit or "
            f"'_', got {prefix!r}: give the folder as the directory, and a prefix such as 'compressopt_discriminator'"
        )
    return prefix


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit; the message names the file."""


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Turn every error of a malformed file, inside the block, into one that names the file."""
    try:
        yield
    except (CheckpointError, MemoryError, OSError):
        raise
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error} in its header") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} does not fit: {error}") from error
    except Exception as error:  # a header can hold anything
        raise CheckpointError(f"{path} is malformed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened tensor: the tensor ``key`` of shard number ``shard``."""

    shard: int
    key: str
    start: int
    stop: int
    checksums: tuple[str, ...]  # of its blocks, in order


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint, and the pieces that cover it in order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def read(cls, values: dict[str, Any]) -> TensorEntry:
        if values["dtype"] not in DTYPES:
            raise ValueError(f"the dtype {values['dtype']!r} is not supported")
        shape = tuple(map(_count, values["shape"]))
        return cls(values["dtype"], shape, tuple(map(_piece, values["pieces"])))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Shard:
    file: str
    bytes: int


@dataclass(frozen=True)
class CheckpointIndex:
    save_id: str
    block_bytes: int
    header: dict[str, Any]
    parameters: list[list[dict[str, Any]]]
    shards: list[Shard]
    tensors: dict[str, TensorEntry]

    def to_json(self) -> bytes:
        return sealed({"format": FORMAT, "version": VERSION, "checksum": CHECKSUM, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> CheckpointIndex:
        try:
            text = path.read_bytes()
            data = json.loads(text)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: the folder holds no whole checkpoint of the optimizer") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not an index of {FORMAT}")
        if data.get("version") not in (4, VERSION):
            raise CheckpointError(f"{path} is of format version {data.get('version')!r}; legal are 4 and {VERSION}")
        if not _is_whole(text) if data["version"] == VERSION else "digest" in data:
            raise CheckpointError(f"{path} is damaged, or was edited: its digest is not that of its contents")
        try:
            if data["checksum"] != CHECKSUM:
                raise ValueError(f"checksum must be {CHECKSUM!r}, got {data['checksum']!r}")
            index = cls(
                save_id=str(data["save_id"]),
                block_bytes=_count(data["block_bytes"], low=1),
                header=dict(data["header"]),
                parameters=[[_parameter(parameter) for parameter in group] for group in data["parameters"]],
                shards=[Shard(str(shard["file"]), _count(shard["bytes"])) for shard in data["shards"]],
                tensors={name: TensorEntry.read(entry) for name, entry in data["tensors"].items()},
            )
            index.validate()
        except Exception as error:  # the file can hold anything
            told = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path} is not a valid index: {told}") from error
        return index

    def validate(self) -> None:
        """Check names and sizes, and that the pieces of every tensor cover it once and fit into shards."""
        if self.block_bytes > MOST_BLOCK_BYTES:
            raise ValueError(f"block_bytes must be from 1 to {MOST_BLOCK_BYTES}, got {self.block_bytes}")
        for shard in self.shards:
            if not _PLAIN_NAME.fullmatch(shard.file):
                raise ValueError(f"a shard must have a plain name, of a file beside the index, got {shard.file!r}")
        room = [shard.bytes for shard in self.shards]
        keys: set[tuple[int, str]] = set()
        for name, entry in self.tensors.items():
            reached = 0
            for piece in entry.pieces:
                if piece.start != reached or piece.stop < piece.start or not 0 <= piece.shard < len(self.shards):
                    raise ValueError(f"the pieces of tensor {name!r} overlap, leave gaps or are in no shard")
                reached, nbytes = piece.stop, (piece.stop - piece.start) * entry.itemsize
                room[piece.shard] -= nbytes
                if room[piece.shard] < 0 or (piece.shard, piece.key) in keys:
                    raise ValueError(f"shard {piece.shard} has no room for a piece of tensor {name!r}")
                keys.add((piece.shard, piece.key))
                blocks = -(-nbytes // self.block_bytes)
                if len(piece.checksums) != blocks:
                    raise ValueError(f"tensor {name!r} has {len(piece.checksums)} checksums for {blocks} blocks")
            if reached != entry.numel:
                raise ValueError(f"tensor {name!r} has pieces of {reached} of its {entry.numel} elements")


def sealed(values: dict[str, Any]) -> bytes:
    """Return the file of an index with these values, and with its digest."""
    body = json.dumps({key: value for key, value in values.items() if key != "digest"}, indent=1).encode()[:-2]
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return f',\n "digest": "{checksum_of(body).hexdigest()}"\n}}\n'.encode()


def _is_whole(text: bytes) -> bool:
    body = text[: -len(_seal(b""))]
    return text == body + _seal(body)


def _count(value: Any, low: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"a whole number >= {low} is needed, got {value!r}")
    return value


def _parameter(entry: dict[str, Any]) -> dict[str, Any]:
    shape = list(map(_count, entry["shape"]))
    return {"name": str(entry["name"]), "shape": shape, "dtype": str(entry["dtype"])}


def _piece(piece: dict[str, Any]) -> Piece:
    start, stop, checksums = _count(piece["start"]), _count(piece["stop"]), tuple(map(str, piece["checksums"]))
    return Piece(_count(piece["shard"]), str(piece["key"]), start, stop, checksums)
