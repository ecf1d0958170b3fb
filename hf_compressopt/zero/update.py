"""The update of one step, bucket by bucket: the parameters of one are sent while the next is updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_compressopt.flat import FLOAT_BYTES
from hf_compressopt.optim.functional import trust_ratio
from hf_compressopt.optim.lamb import Lamb
from hf_compressopt.zero.averages import GradientAverages
from hf_compressopt.zero.parameters import PartitionedParameters
from hf_compressopt.zero.parts import UpdateBucket
from hf_compressopt.zero.transport import Window, gather_parameters


def update_parameters(
    partition: PartitionedParameters, averages: GradientAverages, groups: Sequence[dict[str, Any]]
) -> None:
    """Update this rank's parts with the averages, and gather all parameters. All ranks call.

    Args:
        partition: The parameters.
        averages: Their average gradients; used up.
        groups: The users' param groups, with the hyperparameters.
    """
    before = [dict(group) for group in groups]
    if issubclass(partition.optimizer_class, Lamb):
        update = _measure_lamb(partition, averages, before)
    else:

        def update(bucket: UpdateBucket) -> None:
            bucket.take_hyperparameters(before)
            averages.give_to(bucket)
            bucket.step()

    window = Window(FLOAT_BYTES * partition.config.gather_numel)
    for bucket in partition.buckets:
        update(bucket)
        bucket.give_hyperparameters(groups)
        _send(bucket, partition, window)
    window.drain()


def _send(bucket: UpdateBucket, partition: PartitionedParameters, window: Window) -> None:
    """Write a bucket's parts back, drop their gradients, and start gathering its slices."""
    for part in bucket.parts:
        part.tensor.grad = None
        part.write_back(partition.tensors[part.param])
    for number in bucket.slices:
        gradients = partition.reducer.slices[number]
        gradients.average = None
        if gradients.communicator.world_size > 1:
            gather_parameters(partition.tensors, gradients.cut, gradients.communicator, window)


def _measure_lamb(
    partition: PartitionedParameters, averages: GradientAverages, groups: Sequence[dict[str, Any]]
) -> Callable[[UpdateBucket], None]:
    """Run the first half of Lamb's step, and sum its norms over the ranks in one small all-reduce for all tensors.

    Returns:
        The second half of the step, for one bucket.
    """
    squares = torch.zeros(len(partition.known), 2, dtype=torch.float64, device=partition.ranks.everyone.device)
    for bucket in partition.buckets:
        bucket.take_hyperparameters(groups)
        averages.give_to(bucket)
        for part, square in bucket.measure():
            squares[part.param] += square.to(squares.device)
    for communicator in partition.ranks.each():
        rows = partition.of_communicator(communicator)
        mine = squares[rows]
        communicator.all_reduce(mine).wait()
        squares[rows] = mine
    options = partition.inner_options
    low, high = options.get("min_coeff", 0.01), options.get("max_coeff", 10.0)
    ratios = {number: trust_ratio(row[0], row[1], low, high) for number, row in enumerate(squares)}
    return lambda bucket: bucket.apply(ratios)
