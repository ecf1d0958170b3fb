"""Small buckets that are sent together: the bits and the bytes of buckets that are sent apart, in fewer messages."""

from collections.abc import Callable
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch

from hf_compressopt import GradientCompression, OnebitAdam, OnebitLamb, ZeroOneAdam, ZeroOptimizer, average_gradients
from hf_compressopt.collectives import exchange
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.support.harness import run_ranks

SHAPES = ((100,), (3,), (7, 41), (1,), (16, 32), (40,), (3, 3))
CAP = {"bucket_cap_mb": 4 * 128 / 2**20}  # 128 elements
Steps = Callable[[], None]


def compressed(cls: Any, params: list[torch.Tensor], **options: Any) -> tuple[Any, Steps]:
    optimizer = cls([{"params": params[:3]}, {"params": params[3:]}], lr=1e-2, scale_block=16, **CAP, **options)

    def step() -> None:
        average_gradients(optimizer)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    return optimizer, step


def int4(params: list[torch.Tensor]) -> tuple[Any, Steps]:
    state, inner = GradientCompression(params, **CAP), torch.optim.SGD(params, lr=1e-2)

    def step() -> None:
        state.average_gradients()
        if all(param.grad is not None and param.grad.isfinite().all() for param in params):
            inner.step()

    return state, step


def zero(params: list[torch.Tensor]) -> tuple[Any, Steps]:
    optimizer = ZeroOptimizer(params, torch.optim.AdamW, stage=2, lr=1e-2, **CAP)
    return optimizer, optimizer.step


CASES: dict[str, Callable[[list[torch.Tensor]], tuple[Any, Steps]]] = {
    "OnebitAdam": lambda params: compressed(OnebitAdam, params, freeze_step=2),
    "ZeroOneAdam": lambda params: compressed(ZeroOneAdam, params, freeze_step=2, local_step_clipper=2),
    "OnebitLamb": lambda params: compressed(OnebitLamb, params, freeze_step=2),
    "int4": int4,
    "zero": zero,
}


def train(rank: int, world_size: int, name: str, most: int) -> tuple[list[torch.Tensor], int, int]:
    """The parameters after some steps with these buckets, the bytes sent, and the messages of the last step."""
    generator = torch.Generator().manual_seed(rank)
    params = [torch.nn.Parameter(torch.linspace(-1, 1, prod(shape)).view(shape)) for shape in SHAPES]
    started = [0]

    def counted(method: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            started[0] += 1
            return method(*args, **kwargs)

        return count

    names = ("all_to_all", "all_gather")
    watched = {name: counted(getattr(TorchCommunicator, name)) for name in names}
    with mock.patch.object(exchange, "TOGETHER", most), mock.patch.multiple(TorchCommunicator, **watched):
        optimizer, step = CASES[name](params)
        for number in range(7):
            started[0] = 0
            loss = sum((param * torch.randn(param.shape, generator=generator)).sum() for param in params)
            if number == 4 and rank == 0 and name != "zero":
                loss = loss + params[4][0, 7] * float("inf")  # a skipped step keeps all errors
            loss.backward()
            step()
            for param in params:
                param.grad = None
    return [param.detach() for param in params], optimizer.traffic.total_bytes, started[0]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_small_buckets_have_the_bits_and_bytes_together_that_they_have_apart(name: str, world_size: int) -> None:
    together, apart = (run_ranks(world_size, train, name, most) for most in (400, 1))
    for (mine, nbytes, messages), (theirs, others, single) in zip(together, apart, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert nbytes <= others and messages < single
