"""Save and load: every rank writes one safetensors shard, rank 0 the index, and every rank reads what it holds."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_compressopt.checkpoint.index import (
    INDEX_NAME,
    SHARD_NAME,
    CheckpointError,
    CheckpointIndex,
    Piece,
    Shard,
    TensorEntry,
)
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import StateTensor
from hf_compressopt.optim.flat_optimizer import FlatOptimizer
from hf_compressopt.zero.state import ZeroState

DEFAULT_PREFIX = "compressopt"
Checkpointable = FlatOptimizer | ZeroState
_Result = TypeVar("_Result")


def has_checkpoint(directory: str | os.PathLike[str], *, prefix: str = DEFAULT_PREFIX) -> bool:
    """Whether a folder holds an index."""
    return (Path(directory) / INDEX_NAME.format(prefix=prefix)).is_file()


def save_state(
    optimizer: Checkpointable,
    directory: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> None:
    """Save an optimizer's whole state, every rank's errors included. All ranks call; they return together.

    An earlier checkpoint in the same folder stays loadable until the new one is whole, and goes then.

    Args:
        optimizer: The optimizer.
        directory: The folder; made where missing.
        names: A name for each trainable parameter, in the optimizer's order; torch's ``param_names`` where None.
        prefix: Start of the files' names, for several optimizers in one folder.

    Raises:
        ValueError: If the names do not fit.
        OSError: If a file cannot be written; then on all ranks, and an earlier checkpoint is as it was.
    """
    folder, communicator = Path(directory), optimizer.communicator
    grouped = optimizer.parameter_names(names)
    save_id = communicator.all_gather_object(token_hex(8))[0]
    rank, world_size = communicator.rank, communicator.world_size
    file = folder / SHARD_NAME.format(prefix=prefix, save_id=save_id, rank=rank, world_size=world_size)

    def write_shard() -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        mine = _assigned(optimizer.checkpoint_tensors(grouped), rank, world_size)
        return _write_shard(file, mine, save_id)

    written = _together(communicator, write_shard, lambda: file.unlink(missing_ok=True))
    entries = communicator.all_gather_object(written)

    def write_index() -> None:
        if rank == 0:
            index = _make_index(optimizer, grouped, save_id, entries)
            _write_durably(folder / INDEX_NAME.format(prefix=prefix), index.to_json().encode())

    _together(communicator, write_index, lambda: file.unlink(missing_ok=True))
    _remove_older(folder, prefix, save_id, rank, world_size)
    communicator.all_gather_object(None)  # nobody goes on, to rename or rotate the folder, before all are done


def load_state(
    optimizer: Checkpointable,
    directory: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> None:
    """Load what :func:`save_state` wrote, into the optimizer's buffers. All ranks call.

    Everything is read and verified before anything is changed.

    Args:
        optimizer: The optimizer, made as the saved one was.
        directory: The folder.
        names: As in :func:`save_state`.
        prefix: As in :func:`save_state`.

    Raises:
        CheckpointError: (a ValueError) If the checkpoint is damaged or does not fit; on all ranks, and nothing has
            changed. The message names the file.
    """
    folder = Path(directory)
    path = folder / INDEX_NAME.format(prefix=prefix)

    def read() -> tuple[CheckpointIndex, list[tuple[StateTensor, Tensor]]]:
        index = CheckpointIndex.read(path)
        grouped = optimizer.parameter_names(names)
        _check_fits(optimizer, index, grouped, path)
        wanted = optimizer.wanted_tensors(grouped, index.header, _describe_tensors(index, path))
        return index, _read_tensors(folder, index, wanted, path)

    index, tensors = _together(optimizer.communicator, read, others=CheckpointError)
    with torch.no_grad():
        for state, values in tensors:
            state.local.copy_(values.view(state.local.shape))
    brought = {state.name: state.local for state, _ in tensors}
    optimizer.load_checkpoint_header(index.header, brought)


def _together(
    communicator: Communicator,
    action: Callable[[], _Result],
    undo: Callable[[], None] = lambda: None,
    others: type[Exception] = RuntimeError,
) -> _Result:
    """Run ``action`` on every rank; where it fails on any, undo it and raise on all: ``others`` where it did not."""
    try:
        result, error = action(), None
    except Exception as caught:
        result, error = None, caught
    try:
        communicator.raise_together(error, others)
    except Exception:
        undo()
        raise
    return result  # type: ignore[return-value]


# -- writing ----------------------------------------------------------------------------------------------------------


def _assigned(tensors: Iterable[StateTensor], rank: int, world_size: int) -> list[StateTensor]:
    """The tensors that this rank writes: its own, and its share by size of those that all ranks hold."""
    load = [0] * world_size
    mine = []
    for tensor in tensors:
        if tensor.replicated:
            writer = load.index(min(load))
            load[writer] += tensor.local.numel()
        if not tensor.replicated or writer == rank:
            mine.append(tensor)
    return mine


def _write_shard(file: Path, tensors: Sequence[StateTensor], save_id: str) -> dict[str, Any]:
    """Write a shard durably. Returns its size and, for each tensor, what the index says of it."""
    data, entries = {}, []
    for tensor in tensors:
        local = tensor.local.detach().cpu().contiguous()
        whole = local.numel() == _numel(tensor.shape)
        key = tensor.name if whole else f"{tensor.name}@{tensor.start}"
        data[key] = local.view(tensor.shape) if whole else local.view(-1)
        entries.append(
            {
                "name": tensor.name,
                "dtype": str(local.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "key": key,
                "start": tensor.start,
                "stop": tensor.start + local.numel(),
                "sha256": _sha256(local),
            }
        )
    # safetensors takes views of one flat buffer for tensors that share memory: give each its own
    owned = {key: value.clone() for key, value in data.items()}
    temporary = file.with_suffix(".tmp")
    try:
        save_file(owned, temporary, metadata={"format": "pt", "save_id": save_id})
        _sync(temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(file.parent)
    return {"file": file.name, "bytes": file.stat().st_size, "tensors": entries}


def _make_index(
    optimizer: Checkpointable, names: Sequence[Sequence[str]], save_id: str, shards: Sequence[dict[str, Any]]
) -> CheckpointIndex:
    pieces: dict[str, list[Piece]] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, shard in enumerate(shards):
        for entry in shard["tensors"]:
            described[entry["name"]] = (entry["dtype"], tuple(entry["shape"]))
            piece = Piece(number, entry["key"], entry["start"], entry["stop"], entry["sha256"])
            pieces.setdefault(entry["name"], []).append(piece)
    return CheckpointIndex(
        save_id=save_id,
        header=optimizer.checkpoint_header(),
        parameters=_describe_parameters(optimizer, names),
        shards=[Shard(shard["file"], shard["bytes"]) for shard in shards],
        tensors={
            name: TensorEntry(dtype, shape, tuple(sorted(pieces[name], key=lambda piece: piece.start)))
            for name, (dtype, shape) in described.items()
        },
    )


def _describe_parameters(optimizer: Checkpointable, names: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
    """Name, shape and dtype of the parameters of each param group, where all ranks hold the same."""
    return [
        [
            {"name": name, "shape": list(param.shape), "dtype": str(param.dtype).removeprefix("torch.")}
            for name, param in zip(called, params, strict=False)
        ]
        for called, params in zip(names, optimizer.shared_parameters(), strict=True)
    ]


def _write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(data)
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_older(folder: Path, prefix: str, save_id: str, rank: int, world_size: int) -> None:
    """Remove the shards of earlier saves: each rank those of its number, rank 0 also those of ranks that are gone."""
    shard = re.compile(re.escape(prefix) + r"-(?P<save>[0-9a-f]+)-(?P<rank>\d{5})-of-\d{5}\.(safetensors|tmp)")
    for file in folder.iterdir():
        if (found := shard.fullmatch(file.name)) and found["save"] != save_id:
            number = int(found["rank"])
            if number == rank or (rank == 0 and number >= world_size):
                with suppress(OSError):  # a file too many does no harm
                    file.unlink(missing_ok=True)


# -- reading ----------------------------------------------------------------------------------------------------------


def _check_fits(optimizer: Checkpointable, index: CheckpointIndex, names: Sequence[Sequence[str]], path: Path) -> None:
    try:
        saved_ranks = index.header["world_size"]
        if saved_ranks != optimizer.communicator.world_size:
            raise ValueError(
                f"it was saved by {saved_ranks} rank(s) and this run has {optimizer.communicator.world_size}: resume "
                f"on {saved_ranks} (loading on another number of ranks is not supported yet)"
            )
        mine = _describe_parameters(optimizer, names)
        if mine != index.parameters:
            raise ValueError(f"it is of another model: {_first_difference(index.parameters, mine)}")
        optimizer.check_checkpoint_header(index.header)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error} in its header") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} does not fit: {error}") from error


def _first_difference(saved: list[list[dict[str, Any]]], mine: list[list[dict[str, Any]]]) -> str:
    if [len(group) for group in saved] != [len(group) for group in mine]:
        counts = [len(group) for group in saved], [len(group) for group in mine]
        return f"its param groups have {counts[0]} trainable parameters, this optimizer's {counts[1]}"
    pairs = ((a, b) for ours, theirs in zip(saved, mine, strict=True) for a, b in zip(ours, theirs, strict=True))
    first = next((a, b) for a, b in pairs if a != b)
    return f"it has the parameter {first[0]} where this optimizer has {first[1]}"


def _describe_tensors(index: CheckpointIndex, path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    described = {}
    for name, entry in index.tensors.items():
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{path} gives {name!r} the dtype {entry.dtype!r}, which torch does not have")
        described[name] = (dtype, entry.shape)
    return described


def _read_tensors(
    folder: Path, index: CheckpointIndex, wanted: Sequence[StateTensor], path: Path
) -> list[tuple[StateTensor, Tensor]]:
    for shard in index.shards:
        file = folder / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != shard.bytes:
            state = "is missing" if size is None else f"has {size} bytes, the index says {shard.bytes}"
            raise CheckpointError(f"{file} {state}: the checkpoint is not whole")
    read = []
    for tensor in wanted:
        entry = index.tensors.get(tensor.name)
        if entry is None:
            raise CheckpointError(f"{path} has no tensor {tensor.name!r}")
        dtype = str(tensor.local.dtype).removeprefix("torch.")
        if entry.dtype != dtype or entry.shape != tensor.shape:
            raise CheckpointError(
                f"{path} has {tensor.name!r} as {entry.dtype} {list(entry.shape)}, needed is {dtype} "
                f"{list(tensor.shape)}"
            )
        read.append((tensor, _read_range(folder, index, entry, tensor)))
    return read


def _read_range(folder: Path, index: CheckpointIndex, entry: TensorEntry, tensor: StateTensor) -> Tensor:
    """Elements [start, start + numel) of a tensor, from the pieces that hold them. Returns [numel] on the CPU."""
    start, stop = tensor.start, tensor.start + tensor.local.numel()
    parts = [
        _read_piece(folder / index.shards[piece.shard].file, index.save_id, piece, entry.dtype)[
            max(start - piece.start, 0) : stop - piece.start
        ]
        for piece in entry.pieces
        if piece.start < stop and start < piece.stop
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=tensor.local.dtype)


def _read_piece(file: Path, save_id: str, piece: Piece, dtype: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as shard:
            found = (shard.metadata() or {}).get("save_id")
            if found != save_id:
                raise CheckpointError(f"{file} belongs to save {found!r}, the index is of {save_id!r}")
            if piece.key not in shard.keys():  # safe_open is no mapping
                raise CheckpointError(f"{file} has no tensor {piece.key!r}")
            values: Tensor = shard.get_tensor(piece.key).reshape(-1)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not readable as safetensors: {error}") from error
    if str(values.dtype).removeprefix("torch.") != dtype or values.numel() != piece.stop - piece.start:
        raise CheckpointError(
            f"{file} has {piece.key!r} as {values.dtype} [{values.numel()}], the index says {dtype} "
            f"[{piece.stop - piece.start}]"
        )
    if _sha256(values) != piece.sha256:
        raise CheckpointError(f"{file} is damaged: the checksum of {piece.key!r} is not the index's")
    return values


def _sha256(tensor: Tensor) -> str:
    """SHA-256 of a contiguous CPU tensor's bytes."""
    return hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().data).hexdigest()


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
