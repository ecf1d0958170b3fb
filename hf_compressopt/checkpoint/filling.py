"""Reads of the tensors of a checkpoint into memory, as a plan says."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_compressopt.format.index import CheckpointIndex
from hf_compressopt.format.reader import ShardFiles
from hf_compressopt.format.reshard import Plan


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
