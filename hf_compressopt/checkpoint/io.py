"""Save and load: every rank writes one safetensors shard, rank 0 the index, and every rank reads what it will hold.

state -> shards (safetensors) -> index (JSON) -> reshard plan (pure) -> reads
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_compressopt.checkpoint.files import ShardFiles
from hf_compressopt.checkpoint.index import (
    BLOCK_BYTES,
    INDEX_NAME,
    SHARD_NAME,
    CheckpointError,
    CheckpointIndex,
    Piece,
    Shard,
    TensorEntry,
)
from hf_compressopt.checkpoint.reshard import Plan, Wanted, plan_reads
from hf_compressopt.checkpoint.writer import ShardWriter, write_durably
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import StateTensor
from hf_compressopt.optim.flat_optimizer import FlatOptimizer
from hf_compressopt.zero.plain import PlainState
from hf_compressopt.zero.state import ZeroState

DEFAULT_PREFIX = "compressopt"
Checkpointable = FlatOptimizer | ZeroState | PlainState
_Result = TypeVar("_Result")


def has_checkpoint(directory: str | os.PathLike[str], *, prefix: str = DEFAULT_PREFIX) -> bool:
    """Whether a folder holds an index."""
    return (Path(directory) / INDEX_NAME.format(prefix=prefix)).is_file()


def save_state(
    optimizer: torch.optim.Optimizer,
    directory: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> None:
    """Save an optimizer's whole state, every rank's errors included. All ranks call; they return together.

    An earlier checkpoint in the same folder stays loadable until the new one is whole, and goes then.

    Args:
        optimizer: The optimizer. One that is not of this package, such as torch's AdamW, is alike on all ranks, and its
            checkpoint is that of a ZeroOptimizer around it.
        directory: The folder; made where missing.
        names: A name for each trainable parameter, in the optimizer's order; torch's ``param_names`` where None.
        prefix: Start of the files' names, for several optimizers in one folder.

    Raises:
        ValueError: If the names do not fit.
        OSError: If a file cannot be written; then on all ranks, and an earlier checkpoint is as it was.
    """
    state = _checkpointable(optimizer)
    folder, communicator = Path(directory), state.communicator
    grouped = state.parameter_names(names)
    save_id = communicator.all_gather_object(token_hex(8))[0]
    rank, world_size = communicator.rank, communicator.world_size
    file = folder / SHARD_NAME.format(prefix=prefix, save_id=save_id, rank=rank, world_size=world_size)

    def write_shard() -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        mine = _assigned(state.checkpoint_tensors(grouped), rank, world_size)
        return _write_shard(file, mine, save_id)

    written = _together(communicator, write_shard, lambda: file.unlink(missing_ok=True))
    entries = communicator.all_gather_object(written)

    def write_index() -> None:
        if rank == 0:
            index = _make_index(state, grouped, save_id, entries)
            write_durably(folder / INDEX_NAME.format(prefix=prefix), index.to_json().encode())

    _together(communicator, write_index, lambda: file.unlink(missing_ok=True))
    _remove_older(folder, prefix, save_id, rank, world_size)
    communicator.all_gather_object(None)  # nobody goes on, to rename or rotate the folder, before all are done


def load_state(
    optimizer: torch.optim.Optimizer,
    directory: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> None:
    """Load what :func:`save_state` wrote, on any number of ranks, into the optimizer's buffers. All ranks call.

    Each rank reads what it will hold, and everything is read and verified before anything is changed. On as many ranks
    as saved it, the run goes on bit for bit. On another number moments, variances, master weights and steps are exact
    too; server errors stay with their elements; what was each rank's own (worker errors, and 0/1 Adam's momentum,
    update and parameters inside a local interval) becomes its mean over the ranks that saved it.

    Args:
        optimizer: The optimizer, made as the saved one was. A ZeroOptimizer may be of another stage and other sizes of
            buckets, and the optimizer that it wraps takes its place, and it that one's, where there are no master
            copies.
        directory: The folder.
        names: As in :func:`save_state`.
        prefix: As in :func:`save_state`.

    Raises:
        CheckpointError: (a ValueError) If the checkpoint is damaged or does not fit; on all ranks, and nothing has
            changed. The message names the file.
    """
    mine = _checkpointable(optimizer)
    folder = Path(directory)
    path = folder / INDEX_NAME.format(prefix=prefix)

    def read() -> tuple[CheckpointIndex, list[tuple[StateTensor, Tensor]]]:
        index = CheckpointIndex.read(path)
        grouped = mine.parameter_names(names)
        _check_fits(mine, index, grouped, path)
        with ShardFiles(folder, index) as files:
            described = {name: (getattr(torch, entry.dtype), entry.shape) for name, entry in index.tensors.items()}
            try:
                wanted = mine.wanted_tensors(grouped, index.header, described)
            except (ValueError, TypeError) as error:
                raise CheckpointError(f"{path} does not fit: {error}") from error
            return index, _read_tensors(files, index, wanted, mine.communicator.world_size, path)

    index, tensors = _together(mine.communicator, read, others=CheckpointError)
    brought = {state.name: state.local for state, _ in tensors}
    with torch.no_grad():
        while tensors:  # each value is let go of as soon as it is in place
            state, values = tensors.pop()
            state.local.copy_(values.view(state.local.shape))
    mine.load_checkpoint_header(index.header, brought)


def _checkpointable(optimizer: torch.optim.Optimizer) -> Checkpointable:
    """What a checkpoint sees of an optimizer, also of one inside a wrapper such as Accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer if isinstance(optimizer, (FlatOptimizer, ZeroState)) else PlainState(optimizer)


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
    stored = {_key(tensor): tensor for tensor in tensors}
    layout = {key: (_dtype(t.local), t.shape if _is_whole(t) else (t.local.numel(),)) for key, t in stored.items()}
    with ShardWriter(file, layout, {"format": "pt", "save_id": save_id}) as writer:
        for key in writer.keys:
            writer.write(key, _bytes(stored[key].local.detach().cpu().contiguous()))
        checksums = writer.finish()
    entries = [
        {
            "name": tensor.name,
            "dtype": _dtype(tensor.local),
            "shape": list(tensor.shape),
            "key": key,
            "start": tensor.start,
            "stop": tensor.start + tensor.local.numel(),
            "sha256": checksums[key],
        }
        for key, tensor in stored.items()
    ]
    return {"file": file.name, "bytes": writer.bytes, "tensors": entries}


def _key(tensor: StateTensor) -> str:
    """What a shard calls this rank's part of a tensor."""
    return tensor.name if _is_whole(tensor) else f"{tensor.name}@{tensor.start}"


def _is_whole(tensor: StateTensor) -> bool:
    return tensor.local.numel() == prod(tensor.shape)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _make_index(
    optimizer: Checkpointable, names: Sequence[Sequence[str]], save_id: str, shards: Sequence[dict[str, Any]]
) -> CheckpointIndex:
    pieces: dict[str, list[Piece]] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, shard in enumerate(shards):
        for entry in shard["tensors"]:
            described[entry["name"]] = (entry["dtype"], tuple(entry["shape"]))
            piece = Piece(number, entry["key"], entry["start"], entry["stop"], tuple(entry["sha256"]))
            pieces.setdefault(entry["name"], []).append(piece)
    return CheckpointIndex(
        save_id=save_id,
        block_bytes=BLOCK_BYTES,
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
            {"name": name, "shape": list(param.shape), "dtype": _dtype(param)}
            for name, param in zip(called, params, strict=False)
        ]
        for called, params in zip(names, optimizer.shared_parameters(), strict=True)
    ]


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
        if saved_ranks != len(index.shards):
            raise ValueError(f"it was saved by {saved_ranks!r} rank(s) and has {len(index.shards)} shard(s)")
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


def _read_tensors(
    files: ShardFiles, index: CheckpointIndex, wanted: Sequence[StateTensor], world_size: int, path: Path
) -> list[tuple[StateTensor, Tensor]]:
    read = []
    for tensor in wanted:
        local = tensor.local
        dtype, stop = _dtype(local), tensor.start + local.numel()
        want = Wanted(tensor.name, dtype, tensor.shape, tensor.start, stop, tensor.of_ranks, tensor.is_error)
        try:
            plan = plan_reads(index, want, world_size)
        except ValueError as error:
            raise CheckpointError(f"{path} {error}") from None
        values = torch.empty(local.numel(), dtype=local.dtype)
        _fill(values, plan, files, index)
        read.append((tensor, values))
    return read


def _fill(values: Tensor, plan: Plan, files: ShardFiles, index: CheckpointIndex) -> None:
    """Read what a plan says into ``values`` [numel], on the CPU; a mean is summed up in float64, in rank order."""
    if len(plan.sources) == 1:
        _read_source(_bytes(values), plan, 0, files, index)
        return
    values.zero_()
    if not plan.sources:
        return
    start = 0
    for window in plan.windows(index.block_bytes):
        part = torch.empty(window.nbytes // values.element_size(), dtype=values.dtype)
        mean = torch.zeros(part.numel(), dtype=torch.float64)
        for source in range(len(window.sources)):
            _read_source(_bytes(part), window, source, files, index)
            mean += part
        values[start : start + part.numel()] = mean.div_(len(window.sources))
        start += part.numel()


def _read_source(out: memoryview, plan: Plan, source: int, files: ShardFiles, index: CheckpointIndex) -> None:
    for read in plan.sources[source]:
        part = out[read.offset : read.offset + read.end - read.begin]
        files[read.piece.shard].read_blocks(read.piece, read.entry, index.block_bytes, read.begin, read.end, part)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
