"""One bucket through the compressed all-reduce, as an optimizer's step takes it, and the errors that all ranks hold."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import BucketErrors, Task, all_reduce, run_tasks


def zero_feedback(numel: int, ranks: Communicator) -> BucketErrors:
    counts = [numel] if ranks.levels is None else [count for count in ranks.topology.sent_numels(numel) if count]
    start, stop = ranks.topology.own_range(numel)
    return BucketErrors(tuple(map(torch.zeros, counts)), torch.zeros(stop - start))


def average_(
    x: torch.Tensor, feedback: BucketErrors, ranks: Communicator, scale_block: int | None = 64
) -> torch.Tensor:
    """Replace x, [n] float32, by the compressed mean over ranks."""

    def task() -> Task[None]:
        z, form = kernels.Combination.of(x), kernels.SignFormat(scale_block)
        (average,) = yield from all_reduce([z], [feedback], form, ranks)
        kernels.on(x).decompress_(average, x)

    run_tasks([task()])
    return x


def errors_everywhere(state: Any, ranks: Communicator) -> tuple[np.ndarray, np.ndarray]:
    """The worker errors that there are, [ranks, numel] with NaN where a rank has none, and all server errors, [numel].

    state: a GradientCompression, or the state of an optimizer's param group.
    """
    found, errors = [], state.errors
    for values, range_of in zip(errors.values(), (errors.sent_range, errors.own_range), strict=True):
        own, at = torch.full((state.layout.numel,), torch.nan), 0
        for bucket in state.layout.buckets if values.numel() else ():
            start, stop = range_of(bucket)
            own[start:stop] = values[at : at + stop - start]
            at += stop - start
        rows = [torch.empty_like(own) for _ in range(ranks.world_size)]
        dist.all_gather(rows, own)
        found.append(torch.stack(rows))
    return found[0].numpy(), found[1].nanmean(dim=0).numpy()
