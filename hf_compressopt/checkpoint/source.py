"""Tensors of a checkpoint, read into memory as a plan says."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_compressopt.checkpoint.header import Header
from hf_compressopt.format.index import CheckpointIndex, TensorEntry
from hf_compressopt.format.reader import ShardFiles
from hf_compressopt.format.record import StateTensor
from hf_compressopt.format.reshard import Plan, plan_reads


class Stored:
    """A checkpoint as it was saved.

    Attributes:
        header: What the optimizer checks and takes over beside tensors.
        entries: Its tensors, by name.
    """

    header: Header
    entries: Mapping[str, TensorEntry]

    def __init__(self, index: CheckpointIndex) -> None:
        """Take the description from the index."""
        self.index, self.header, self.entries = index, Header.of(index.header), index.tensors

    def check(self, tensor: StateTensor, world_size: int, files: ShardFiles) -> None:
        """Read and verify what one of ``world_size`` ranks reads, and keep nothing of it.

        Raises:
            ValueError: If the checkpoint does not have the tensor.
            CheckpointError: If a file is not what was saved.
        """
        for source in plan_reads(self.index, tensor, world_size).sources:
            for read in source:
                for _ in files[read.piece.shard].blocks(read.piece, read.entry, read.begin, read.end):
                    pass

    def read(self, tensor: StateTensor, world_size: int, files: ShardFiles, out: Tensor) -> None:
        """Read what one of ``world_size`` ranks reads into ``out``, flattened, of its dtype, on any device.

        Raises:
            ValueError: As :meth:`check`.
            CheckpointError: As :meth:`check`; a part of ``out`` is overwritten.
        """
        fill(out, plan_reads(self.index, tensor, world_size), files, self.index)


def fill(values: Tensor, plan: Plan, files: ShardFiles, index: CheckpointIndex) -> None:
    """Read what a plan says into ``values`` [numel], on any device. A mean is summed in float64, in rank order.

    Raises:
        CheckpointError: If a file is not what was saved.
    """
    if len(plan.sources) == 1:
        _read_source(values, plan, 0, files)
        return
    values.zero_()
    if not plan.sources:
        return
    start = 0
    for window in plan.windows(index.block_bytes):
        part = torch.empty(window.nbytes // values.element_size(), dtype=values.dtype, device="cpu")
        mean = torch.zeros(part.numel(), dtype=torch.float64, device="cpu")
        for source in range(len(window.sources)):
            _read_source(part, window, source, files)
            mean += part
        values[start : start + part.numel()] = mean.div_(len(window.sources))
        start += part.numel()


def _read_source(values: Tensor, plan: Plan, source: int, files: ShardFiles) -> None:
    for read in plan.sources[source]:
        out = values.view(torch.uint8)[read.offset : read.offset + read.end - read.begin]
        memory = out.numpy().data if out.device.type == "cpu" else None
        file = files[read.piece.shard]
        for begin, part in file.blocks(read.piece, read.entry, read.begin, read.end, memory):
            if memory is None:
                offset = begin - read.begin
                out[offset : offset + len(part)] = torch.frombuffer(part, dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
