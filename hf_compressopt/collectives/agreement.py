"""Small messages by which all ranks come to the same decision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator

#: Digests are below this bound, so that sums of their squares over thousands of ranks are exact in float64.
DIGEST_BOUND = 1 << 20


def sum_and_compare(
    values: Sequence[Tensor], digests: Sequence[int], communicator: Communicator
) -> tuple[Tensor, list[bool]]:
    """Sum some values over the ranks, and compare some numbers, in one all-reduce. All ranks call; blocking.

    Args:
        values: [] each, as many on all ranks.
        digests: Numbers in [0, DIGEST_BOUND), as many on all ranks. They are all alike if and only if their mean square
            is the square of their mean.
        communicator: The ranks.

    Returns:
        [len(values)] float64, the sums; and for each digest whether all ranks have the same one.
    """
    device = communicator.device
    squares = [float(number) for digest in digests for number in (digest, digest * digest)]
    head = torch.stack([value.to(device, torch.float64) for value in values])
    message = torch.cat([head, torch.tensor(squares, dtype=torch.float64, device=device)])
    communicator.all_reduce(message).wait()
    sums = [int(number) for number in message[len(values) :].tolist()]
    alike = [communicator.world_size * square == sum_ * sum_ for sum_, square in zip(*[iter(sums)] * 2, strict=True)]
    return message[: len(values)], alike
