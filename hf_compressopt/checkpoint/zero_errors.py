"""The worker errors of a ZeroOptimizer with compressed gradients, as a checkpoint sees them: by parameter, in float32.

Every rank has errors of all elements. By parameter they fit slices of any size, and on another number of ranks each
rank takes the mean of all, which keeps the average residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_compressopt.checkpoint.decoded import Decoded
from hf_compressopt.collectives.group_errors import keep_, values_of
from hf_compressopt.format.index import TensorEntry
from hf_compressopt.format.record import StateTensor, TensorKey
from hf_compressopt.zero.parameters import PartitionedParameters

_WORKER = "worker_error"


def error_tensors(partition: PartitionedParameters, called: Sequence[str]) -> Iterator[StateTensor]:
    """Describe this rank's errors; they are decoded when they are written.

    Args:
        partition: The parameters.
        called: Their names.
    """
    for number in _numbers(partition):
        shape = tuple(partition.tensors[number].shape)
        error = Decoded(shape, partial(_error_of, partition, number))
        yield StateTensor.of(_key(partition, called, number), error, of_each_rank=True, is_error=True)


def wanted_errors(
    partition: PartitionedParameters, called: Sequence[str], entries: Mapping[str, TensorEntry], saved_ranks: int
) -> dict[int, StateTensor]:
    """Describe what a checkpoint of ``saved_ranks`` ranks has of these errors, and memory for it, by parameter."""
    found = {}
    for number in _numbers(partition):
        key = _key(partition, called, number)
        if any(str(key.of_rank(rank)) in entries for rank in range(saved_ranks)):
            room = torch.empty(partition.tensors[number].shape, dtype=torch.float32, device="cpu")
            found[number] = StateTensor.of(key, room, of_each_rank=True, is_error=True)
    return found


def take_errors(partition: PartitionedParameters, found: Mapping[int, StateTensor]) -> None:
    """Take over the errors that were read; those of other parameters become zero."""
    for gradients in partition.reducer.slices:
        if gradients.errors is None:
            continue
        values = torch.zeros(gradients.cut.numel, dtype=torch.float32, device="cpu")
        for number, rows in gradients.cut.places.items():
            for begin, span in rows if number in found else ():
                values[begin : begin + span.numel] = found[number].local.view(-1)[span.start : span.stop]
        gradients.errors.drop()
        keep_(gradients.errors.kept, values.to(gradients.errors.kept.device))


def _numbers(partition: PartitionedParameters) -> list[int]:
    """List the parameters that have errors."""
    return sorted({number for g in partition.reducer.slices if g.errors is not None for number in g.cut.places})


def _key(partition: PartitionedParameters, called: Sequence[str], number: int) -> TensorKey:
    return TensorKey(_WORKER, called[number], rank=partition.ranks.everyone.rank)


def _error_of(partition: PartitionedParameters, number: int) -> Tensor:
    """Decode the error of a parameter, [numel] float32."""
    param = partition.tensors[number]
    error = torch.empty(param.numel(), dtype=torch.float32, device=param.device)
    for gradients in partition.reducer.slices:
        if gradients.errors is not None and number in gradients.cut.places:
            values = values_of(gradients.errors.kept)
            for begin, span in gradients.cut.places[number]:
                error[span.start : span.stop] = values[begin : begin + span.numel]
    return error
