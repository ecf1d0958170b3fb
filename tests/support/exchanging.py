"""One bucket through the compressed all-reduce, in place, as an optimizer's step takes it."""

import torch

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import ErrorFeedback, Task, all_reduce, run_tasks


def zero_feedback(numel: int, ranks: Communicator, *, compact: bool = False) -> ErrorFeedback:
    def zeros(count: int, chunks: int = 1) -> kernels.Errors:
        return kernels.CompactErrors.zeros(count, chunks) if compact else torch.zeros(count)

    worker = (zeros(numel, ranks.world_size),)
    if ranks.levels is not None:
        worker = tuple(zeros(count) for count in ranks.topology.sent_numels(numel) if count)
    start, stop = ranks.topology.own_range(numel)
    return ErrorFeedback(worker, zeros(stop - start))


def average_(
    x: torch.Tensor, feedback: ErrorFeedback, ranks: Communicator, scale_block: int | None = 64
) -> torch.Tensor:
    """Replace x, [n] float32, by the compressed mean over ranks."""

    def task() -> Task[None]:
        z, form = kernels.Combination.of(x), kernels.SignFormat(scale_block)
        (average,) = yield from all_reduce([z], [feedback], form, ranks)
        kernels.on(x).decompress_(average, x)

    run_tasks([task()])
    return x
