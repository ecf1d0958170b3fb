"""The compact tensors of a checkpoint, and the float32 values that they stand for.

Momentum and errors of a param group are messages, bucket by bucket. The header says how long a bucket is and how many
ranks have cut it into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from hf_compressopt.checkpoint.filling import fill
from hf_compressopt.collectives.group_errors import values_of
from hf_compressopt.flat import chunk_range
from hf_compressopt.format.index import CheckpointIndex
from hf_compressopt.format.reader import ShardFiles
from hf_compressopt.format.record import StateTensor, TensorKey
from hf_compressopt.format.reshard import plan_reads
from hf_compressopt.kernels import Average, CompactErrors, chunk_integer_message_nbytes, on
from hf_compressopt.kernels.errors import ERROR_BITS
from hf_compressopt.kernels.messages import chunk_message_nbytes
from hf_compressopt.kernels.variance import check_tops, decode_variance
from hf_compressopt.optim.options import check_count, check_scale_block

#: Kinds of tensors: codes of the variance, their tops, and messages that are the momentum.
CODE, TOP, MESSAGE = "exp_avg_sq_code", "exp_avg_sq_top", "exp_avg_message"
#: Dtype of what is bytes.
BYTES = "uint8"


def room_for_messages(
    numel: int, bucket_numel: int, world_size: int, scale_block: int | None, device: torch.device
) -> dict[int, Average]:
    """Return memory for the messages of a param group's buckets, by their first elements.

    Args:
        numel: Elements of the group.
        bucket_numel: Elements of every bucket but the last.
        world_size: Ranks that have cut the buckets into chunks.
        scale_block: Elements per scale, or None.
        device: Device of the messages.

    Raises:
        ValueError: If ``bucket_numel`` or ``scale_block`` is outside its range.
        TypeError: If one is no number.
    """
    check_count("bucket_numel", bucket_numel)
    check_scale_block(scale_block)
    found = {}
    for start in range(0, numel, bucket_numel):
        count = min(bucket_numel, numel - start)
        stride = chunk_message_nbytes(count, world_size, scale_block)[0]
        messages = torch.empty(world_size * stride, dtype=torch.uint8, device=device)
        found[start] = Average(count, None, messages, world_size, scale_block, stride)
    return found


class CompactTensors:
    """The compact tensors of a checkpoint, decoded part by part."""

    def __init__(self, index: CheckpointIndex) -> None:
        """Take the index of the checkpoint, validated."""
        self._index, self._ranks = index, len(index.shards)
        self._recent: tuple[int, int, Tensor] | None = None  # the part of a momentum that was decoded last

    def __contains__(self, wanted: StateTensor) -> bool:
        """Return whether the checkpoint has a wanted error, [n] float32, as messages."""
        key = wanted.key.of_rank(0) if wanted.of_each_rank else wanted.key
        entry = self._index.tensors.get(str(key))
        return wanted.is_error and wanted.dtype == "float32" and entry is not None and entry.dtype == BYTES

    def error_parts(self, wanted: StateTensor, files: ShardFiles) -> Iterator[Tensor]:
        """Yield the elements of an error in order, [n] float32 each: the mean of all ranks' if each has its own.

        Raises:
            CheckpointError: If a file is not what was saved.
            ValueError: If the tensor does not fit.
        """
        (numel,), keys = wanted.shape, [wanted.key]
        if wanted.of_each_rank:
            keys = [wanted.key.of_rank(rank) for rank in range(self._ranks)]
        whole = self._place_of(numel, numel, self._error_nbytes)
        for bucket, count in self._buckets(numel, wanted.start, wanted.stop):
            byte = self._place_of(bucket, numel, self._error_nbytes)
            for rank, nbytes in enumerate(chunk_integer_message_nbytes(count, self._ranks, ERROR_BITS)):
                first, last = (bucket + place for place in chunk_range(count, self._ranks, rank))
                low, high = max(first, wanted.start), min(last, wanted.stop)
                if low < high:
                    total = torch.zeros(high - low, dtype=torch.float64, device="cpu")
                    for key in keys:
                        message = self._bytes(key, whole, byte, byte + nbytes, files)
                        total += values_of(CompactErrors(message, last - first))[low - first : high - first]
                    yield total.div_(len(keys)).float()
                byte += nbytes

    def moment(self, kind: str, name: str, group: int, shape: tuple[int, ...]) -> StateTensor | None:
        """Return the description of a moment of a parameter that lies in a compact form, or None if it does not."""
        keys = {"exp_avg": TensorKey(MESSAGE, group=group), "exp_avg_sq": TensorKey(CODE, name)}
        if kind not in keys or str(keys[kind]) not in self._index.tensors:
            return None
        return StateTensor(TensorKey(kind, name), "float32", shape, 0, prod(shape))

    def moment_parts(self, wanted: StateTensor, files: ShardFiles) -> Iterator[Tensor]:
        """Yield the elements of a moment that :meth:`moment` describes, in order, [n] float32 each.

        Raises:
            CheckpointError: If a file is not what was saved.
            ValueError: If the tensors do not fit.
        """
        group, place, start = self._place(wanted.key.owner)
        if wanted.key.kind == "exp_avg_sq":
            return self._variance_parts(wanted, group, place, files)
        return self._momentum_parts(wanted, group, start, files)

    def _variance_parts(self, wanted: StateTensor, group: int, place: int, files: ShardFiles) -> Iterator[Tensor]:
        count = len(self._index.parameters[group])
        top = torch.empty(1, dtype=torch.int32, device="cpu")
        described = StateTensor(TensorKey(TOP, group=group), "int32", (count,), place, place + 1)
        fill(top, plan_reads(self._index, described, self._ranks), files, self._index)
        check_tops(top)
        codes = replace(wanted, key=TensorKey(CODE, wanted.key.owner), dtype=BYTES)
        for window in plan_reads(self._index, codes, self._ranks).windows(self._index.block_bytes):
            part = torch.empty(window.nbytes, dtype=torch.uint8, device="cpu")
            fill(part, window, files, self._index)
            yield decode_variance(part, top)

    def _momentum_parts(self, wanted: StateTensor, group: int, start: int, files: ShardFiles) -> Iterator[Tensor]:
        low, high = start + wanted.start, start + wanted.stop
        numel = sum(prod(parameter["shape"]) for parameter in self._index.parameters[group])
        for first, count in self._buckets(numel, low, high):
            values = self._momentum(group, first, count, numel, files)
            yield values[max(low - first, 0) : high - first].clone()

    def _momentum(self, group: int, first: int, count: int, numel: int, files: ShardFiles) -> Tensor:
        if self._recent is None or self._recent[:2] != (group, first):
            start, stop, whole = (self._place_of(n, numel, self._message_nbytes) for n in (first, first + count, numel))
            messages = self._bytes(TensorKey(MESSAGE, group=group), whole, start, stop, files)
            scale_block, values = self._scale_block, torch.empty(count, dtype=torch.float32, device="cpu")
            stride = (stop - start) // self._ranks
            on(values).decompress_(Average(count, None, messages, self._ranks, scale_block, stride), values)
            self._recent = group, first, values
        return self._recent[2]

    def _bytes(self, key: TensorKey, whole: int, start: int, stop: int, files: ShardFiles) -> Tensor:
        wanted = StateTensor(key, BYTES, (whole,), start, stop)
        found = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        fill(found, plan_reads(self._index, wanted, self._ranks), files, self._index)
        return found

    @property
    def _bucket_numel(self) -> int:
        numel: int = self._index.header["bucket_numel"]
        check_count("bucket_numel", numel)
        return numel

    @property
    def _scale_block(self) -> int | None:
        block: int | None = self._index.header["scale_block"]
        check_scale_block(block)
        return block

    def _buckets(self, numel: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the first element and the elements of the buckets that hold the elements [start, stop)."""
        size = self._bucket_numel
        for first in range(start // size * size, stop, size) if start < stop else ():
            yield first, min(size, numel - first)

    def _place_of(self, element: int, numel: int, nbytes_of: Callable[[int], int]) -> int:
        """Return the byte at which the bucket that begins with an element begins, or at which the last one ends."""
        size = min(self._bucket_numel, numel)
        full, rest = divmod(element, size) if size else (0, 0)
        return full * nbytes_of(size) + nbytes_of(rest)

    def _error_nbytes(self, numel: int) -> int:
        return CompactErrors.nbytes(numel, self._ranks)

    def _message_nbytes(self, numel: int) -> int:
        return self._ranks * chunk_message_nbytes(numel, self._ranks, self._scale_block)[0]

    def _place(self, name: str) -> tuple[int, int, int]:
        """Return the param group of a parameter, its place in the group, and its first element there."""
        for group, parameters in enumerate(self._index.parameters):
            start = 0
            for place, parameter in enumerate(parameters):
                if parameter["name"] == name:
                    return group, place, start
                start += prod(parameter["shape"])
        raise ValueError(f"the checkpoint has no parameter {name!r}")
