"""The update of one step, bucket by bucket: the parameters of one are sent while the next is updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_compressopt.collectives.exchange import Pipeline
from hf_compressopt.flat import FLOAT_BYTES
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.optim.math import trust_ratio
from hf_compressopt.zero.low_bit import send_differences
from hf_compressopt.zero.parameters import PartitionedParameters
from hf_compressopt.zero.parts import UpdateBucket, hyperparameters
from hf_compressopt.zero.reducer import GradientAverages, gather_parameters


def update_parameters(
    partition: PartitionedParameters, averages: GradientAverages, groups: Sequence[dict[str, Any]]
) -> None:
    """Update this rank's parts with the averages, which are used up, and give all ranks the parameters.

    Args:
        partition: The parameters.
        averages: Their average gradients.
        groups: The users' param groups, with the hyperparameters.

    Raises:
        RuntimeError: Inside ``masters_in_parameters()``.
    """
    partition.require_replicas("step()")
    values = [hyperparameters(group) for group in groups]
    is_lamb = issubclass(partition.optimizer_class, Lamb)
    ratios = _trust_ratios(partition, averages, values) if is_lamb else {}
    pipeline = Pipeline(FLOAT_BYTES * partition.config.gather_numel)
    for bucket in partition.buckets:
        if is_lamb:
            bucket.apply(ratios)
        else:
            bucket.take_hyperparameters(values)
            averages.give_to(bucket)
            bucket.step()
        bucket.give_hyperparameters(groups, values)
        _send(bucket, partition, pipeline)
    pipeline.drain()


def _send(bucket: UpdateBucket, partition: PartitionedParameters, pipeline: Pipeline) -> None:
    """Write a bucket's parts back, drop their gradients, keep the errors, and start sending the parameters."""
    for part in bucket.parts:
        part.tensor.grad = None
        if not part.is_ahead:
            part.write_back(partition.tensors[part.param])
    for number, mine in bucket.slices.items():
        gradients = partition.reducer.slices[number]
        gradients.average = None
        if gradients.errors is not None:
            gradients.errors.keep()
        if gradients.param_form is not None:
            to = gradients.cut, gradients.communicator, gradients.param_form
            send_differences(partition.tensors, mine, *to, pipeline)
        elif gradients.communicator.world_size > 1:
            gather_parameters(partition.tensors, gradients.cut, gradients.communicator, pipeline)


@torch.no_grad()
def share_masters(partition: PartitionedParameters) -> None:
    """Make the parameters of all ranks what the masters round to. All ranks call."""
    for _, part in partition.parts():
        part.write_back(partition.tensors[part.param])
    share_parts(partition)


@torch.no_grad()
def share_parts(partition: PartitionedParameters) -> None:
    """Give all ranks this rank's elements of the parameters, at full precision. All ranks call."""
    pipeline = Pipeline(FLOAT_BYTES * partition.config.gather_numel)
    with partition.communicator.traffic.paused():
        for gradients in partition.reducer.slices:
            if gradients.communicator.world_size > 1:
                gather_parameters(partition.tensors, gradients.cut, gradients.communicator, pipeline)
        pipeline.drain()


def _trust_ratios(
    partition: PartitionedParameters, averages: GradientAverages, values: Sequence[Mapping[str, Any]]
) -> dict[int, torch.Tensor]:
    """Run the first half of Lamb's step; one small all-reduce sums the norms of all tensors over the ranks."""
    squares = torch.zeros(len(partition.known), 2, dtype=torch.float64, device=partition.communicator.device)
    for bucket in partition.buckets:
        bucket.take_hyperparameters(values)
        averages.give_to(bucket)
        for part, square in bucket.measure():
            squares[part.param] += square.to(squares.device)
    for communicator in partition.communicators():
        rows = partition.of_communicator(communicator)
        mine = squares[rows]
        communicator.all_reduce(mine).wait()
        squares[rows] = mine
    options = partition.inner_options
    low, high = options.get("min_coeff", 0.01), options.get("max_coeff", 10.0)
    return {number: trust_ratio(row[0], row[1], low, high) for number, row in enumerate(squares)}
