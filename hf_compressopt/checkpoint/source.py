"""Tensors of a checkpoint, read into memory as a plan says."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_compressopt.checkpoint.compact_tensors import CompactTensors
from hf_compressopt.checkpoint.filling import fill
from hf_compressopt.checkpoint.header import Header
from hf_compressopt.format.index import CheckpointIndex, TensorEntry
from hf_compressopt.format.reader import ShardFiles
from hf_compressopt.format.record import StateTensor
from hf_compressopt.format.reshard import plan_reads


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
        self._compact = CompactTensors(index)

    def check(self, tensor: StateTensor, world_size: int, files: ShardFiles) -> None:
        """Read and verify what one of ``world_size`` ranks reads, and keep nothing of it.

        Raises:
            ValueError: If the checkpoint does not have the tensor.
            CheckpointError: If a file is not what was saved.
        """
        if tensor in self._compact:
            for _ in self._compact.error_parts(tensor, files):
                pass
            return
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
        if tensor in self._compact:
            done = 0
            for part in self._compact.error_parts(tensor, files):
                out[done : done + part.numel()] = part
                done += part.numel()
            return
        fill(out, plan_reads(self.index, tensor, world_size), files, self.index)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
