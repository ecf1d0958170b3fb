"""The index of a checkpoint: what was saved, and where every tensor lies.

**Format, version 1.** A checkpoint is a folder that holds

1. ``compressopt.index.json``, UTF-8 JSON, written last: a folder without it holds no checkpoint;
2. ``compressopt-<save id>-<rank>-of-<ranks>.safetensors``, one per rank, numbers with five digits. Each is an ordinary
   safetensors file, and its metadata holds ``save_id``.

The index is an object with these keys:

- ``format``: "hf_compressopt"; ``version``: 1; ``save_id``: the hexadecimal number in the shards' names;
- ``header``: the optimizer's class, step, stage, schedule, world_size, and the hyperparameters of each param group;
- ``parameters``: for each param group a list of ``{"name", "shape", "dtype"}``;
- ``shards``: for each rank ``{"file", "bytes"}``; files are plain names, beside the index;
- ``tensors``: for each tensor ``{"dtype", "shape", "pieces"}``; dtype is torch's name, such as "float32".

A piece is ``{"shard", "key", "start", "stop", "sha256"}``: elements [start, stop) of the flattened tensor are the
tensor ``key`` of shard number ``shard``, and sha256 is that of its bytes. The pieces of a tensor are in order and
cover it.

Tensors are ``exp_avg/<parameter>``, ``exp_avg_sq/<parameter>`` and others of an algorithm's own in this form;
``step/group<g>`` and others with one value per parameter of a group; ``exp_avg_mask/group<g>``; ``optimizer/<name>``;
``worker_error/group<g>/rank<r>`` (flat, the parameters of a group one after another); ``server_error/group<g>``
(likewise). ``rank<r>/`` before a parameter's name marks what is rank r's own.

Of a partitioned optimizer the tensors are those of the wrapped one's state, such as ``exp_avg/<parameter>``, each in
the pieces that its owners hold; ``master/<parameter>``, a float32 copy of a 16-bit parameter;
``scalar:<name>/<parameter>`` and ``number:<name>/<parameter>``, what has one value per parameter, a tensor or a number
in the wrapped optimizer. ``from<r>.`` before a parameter's name says that rank r is the first that holds a copy of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INDEX_NAME = "{prefix}.index.json"
SHARD_NAME = "{prefix}-{save_id}-{rank:05d}-of-{world_size:05d}.safetensors"
FORMAT, VERSION = "hf_compressopt", 1

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit; the message names the file."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened tensor: the tensor ``key`` of shard number ``shard``."""

    shard: int
    key: str
    start: int
    stop: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint, and the pieces that cover it in order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Shard:
    """A shard's file, beside the index, and its size."""

    file: str
    bytes: int


@dataclass(frozen=True)
class CheckpointIndex:
    """The whole index; see the module's docstring for the meaning of its fields."""

    save_id: str
    header: dict[str, Any]
    parameters: list[list[dict[str, Any]]]
    shards: list[Shard]
    tensors: dict[str, TensorEntry]

    def to_json(self) -> str:
        """The index as the file holds it."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def read(cls, path: Path) -> CheckpointIndex:
        """Read and validate an index.

        Raises:
            CheckpointError: If it is missing, damaged, of another format, or inconsistent.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: the folder holds no whole checkpoint of the optimizer") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no index of {FORMAT}")
        if data.get("version") != VERSION:
            raise CheckpointError(f"{path} is of format version {data.get('version')!r}; this version reads {VERSION}")
        try:
            index = cls(
                save_id=str(data["save_id"]),
                header=dict(data["header"]),
                parameters=[list(group) for group in data["parameters"]],
                shards=[Shard(**shard) for shard in data["shards"]],
                tensors={name: _tensor_entry(entry) for name, entry in data["tensors"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} lacks what an index must have: {type(error).__name__}: {error}") from error
        index.validate(path)
        return index

    def validate(self, path: Path) -> None:
        """Check that names are plain, and that the pieces of every tensor cover it once.

        Raises:
            CheckpointError: If not.
        """
        for shard in self.shards:
            if not isinstance(shard.file, str) or not _PLAIN_NAME.fullmatch(shard.file):
                raise CheckpointError(f"{path} names the shard {shard.file!r}; legal are plain names beside the index")
        for name, entry in self.tensors.items():
            numel, reached = 1, 0
            for size in entry.shape:
                numel *= size
            for piece in entry.pieces:
                if piece.start != reached or piece.stop < piece.start or not 0 <= piece.shard < len(self.shards):
                    raise CheckpointError(
                        f"{path} gives tensor {name!r} pieces that overlap, leave gaps or are nowhere"
                    )
                reached = piece.stop
            if reached != numel or numel < 0:
                raise CheckpointError(f"{path} gives tensor {name!r} {reached} of its {numel} elements")


def _tensor_entry(entry: dict[str, Any]) -> TensorEntry:
    shape = tuple(entry["shape"])
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}")
    pieces = tuple(Piece(**piece) for piece in entry["pieces"])
    if not all(isinstance(value, int) for piece in pieces for value in (piece.shard, piece.start, piece.stop)):
        raise TypeError("a piece whose shard, start and stop are not whole numbers")
    return TensorEntry(str(entry["dtype"]), shape, pieces)
