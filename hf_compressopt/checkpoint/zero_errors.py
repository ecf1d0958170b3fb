"""The worker errors of a ZeroOptimizer with compressed gradients, as a checkpoint sees them: by parameter, in float32.

Every rank has errors of all elements; in two levels the ranks of a node have them together. By parameter they fit
slices of any size. On another number of ranks or nodes each takes the mean of all, which keeps the average residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_compressopt.checkpoint.decoded import Decoded
from hf_compressopt.collectives.group_errors import keep_, values_of
from hf_compressopt.format.index import TensorEntry
from hf_compressopt.format.record import StateTensor, TensorKey
from hf_compressopt.zero.parameters import PartitionedParameters

_WORKER = "worker_error"


class ReadErrors(NamedTuple):
    """The errors of a parameter in a checkpoint.

    Attributes:
        values: [numel] float32 on the host.
        tensors: The ranges of it that this rank reads.
    """

    values: Tensor
    tensors: list[StateTensor]


def error_tensors(partition: PartitionedParameters, called: Sequence[str]) -> Iterator[StateTensor]:
    """Describe this rank's errors; they are decoded when they are written.

    Args:
        partition: The parameters.
        called: Their names.
    """
    for number in _numbers(partition):
        for start, stop in _ranges(partition, number):
            error = Decoded((stop - start,), partial(_errors_of, partition, number, start, stop))
            yield _described(partition, called, number, error, start)


def wanted_errors(
    partition: PartitionedParameters, called: Sequence[str], entries: Mapping[str, TensorEntry], saved_ranks: int
) -> dict[int, ReadErrors]:
    """Describe what a checkpoint of ``saved_ranks`` ranks has of these errors, and memory for it, by parameter."""
    found = {}
    for number in _numbers(partition):
        key = _key(partition, called, number)
        if any(str(key.of_rank(rank)) in entries for rank in range(saved_ranks)):
            room = torch.empty(partition.tensors[number].numel(), dtype=torch.float32, device="cpu")
            parts = [
                _described(partition, called, number, room[start:stop], start)
                for start, stop in _ranges(partition, number)
            ]
            found[number] = ReadErrors(room, parts)
    return found


def take_errors(partition: PartitionedParameters, found: Mapping[int, ReadErrors]) -> None:
    """Take over the errors that were read; those of other parameters become zero."""
    for gradients in partition.reducer.slices:
        if gradients.errors is None:
            continue
        values = torch.zeros(gradients.errors.kept.numel(), dtype=torch.float32, device="cpu")
        for number, rows in gradients.error_places.items():
            for begin, span in rows if number in found else ():
                values[begin : begin + span.numel] = found[number].values[span.start : span.stop]
        gradients.errors.drop()
        keep_(gradients.errors.kept, values.to(gradients.errors.kept.device))


def _numbers(partition: PartitionedParameters) -> list[int]:
    """List the parameters that have errors on this rank."""
    return sorted({number for g in partition.reducer.slices if g.errors is not None for number in g.error_places})


def _ranges(partition: PartitionedParameters, number: int) -> list[tuple[int, int]]:
    """List the elements [start, stop) of a parameter that have errors on this rank, in order."""
    slices = (gradients for gradients in partition.reducer.slices if gradients.errors is not None)
    spans = sorted((span.start, span.stop) for g in slices for _, span in g.error_places.get(number, ()))
    found = spans[:1]
    for start, stop in spans[1:]:
        if start == found[-1][1]:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _described(
    partition: PartitionedParameters, called: Sequence[str], number: int, error: Decoded | Tensor, start: int
) -> StateTensor:
    return StateTensor.of(
        _key(partition, called, number),
        error,
        tuple(partition.tensors[number].shape),
        start,
        of_each_rank=True,
        is_error=True,
        node_size=partition.communicator.topology.node_size,
    )


def _key(partition: PartitionedParameters, called: Sequence[str], number: int) -> TensorKey:
    """Return the name of a parameter's errors: of this node in two levels, which groups of some ranks have not."""
    levels = partition.known[number].communicator.levels
    everyone = partition.communicator
    return TensorKey(_WORKER, called[number], rank=everyone.rank if levels is None else everyone.topology.node)


def _errors_of(partition: PartitionedParameters, number: int, start: int, stop: int) -> Tensor:
    """Decode the errors of elements [start, stop) of a parameter, float32."""
    error = torch.empty(stop - start, dtype=torch.float32, device=partition.tensors[number].device)
    for gradients in partition.reducer.slices:
        spans = [] if gradients.errors is None else gradients.error_places.get(number, [])
        spans = [(begin, span) for begin, span in spans if start <= span.start < stop]
        if spans and gradients.errors is not None:
            values = values_of(gradients.errors.kept)
            for begin, span in spans:
                error[span.start - start : span.stop - start] = values[begin : begin + span.numel]
    return error
