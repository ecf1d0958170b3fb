"""Gradients that a step uses after several backward passes, each of which has sent its own, for every method.

The loss is linear in the parameters, so that gradients are what a test gives.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import GradientCompression, ZeroOptimizer, attach_ddp, average_gradients, compress_hook
from tests.oracles.simulation_integers import Simulation, in_full
from tests.support.harness import on_ranks

SHAPES = [(9, 33), (129,), (), (64, 5), (20, 17)]  # three that travel as integers, and share blocks at their ends
NUMEL = sum(int(np.prod(shape)) for shape in SHAPES)
PASSES, STEPS = 3, 6


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def forward(self, factors: Sequence[Tensor]) -> Tensor:
        return torch.stack([(weight * x).sum() for weight, x in zip(self.weights, factors, strict=True)]).sum()


def factors(rank: int, step: int, number: int) -> list[Tensor]:
    """Small integers, whose sums and averages are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    return [torch.randint(-9, 10, shape, generator=generator).float() for shape in SHAPES]


def sums(rank: int, step: int, passes: int = PASSES) -> list[Tensor]:
    rows = [factors(rank, step, number) for number in range(passes)]
    return [torch.stack(row).sum(0) for row in zip(*rows, strict=True)]


def flat(tensors: Sequence[Tensor]) -> np.ndarray:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy().copy()


# -- in full precision, and where gradients stay each rank's own ------------------------------------------------------

Made = tuple[nn.Module, Any, Callable[[], Any]]  # what is called, the optimizer, and what follows each backward


def in_ddp(kind: str, **options: Any) -> Made:
    model = Linear()
    optimizer = getattr(hf_compressopt, kind)(model.parameters(), lr=0.01, **options)
    ddp = DistributedDataParallel(model)
    attach_ddp(ddp, optimizer)
    return ddp, optimizer, lambda: None


def in_a_loop(kind: str, **options: Any) -> Made:
    model = Linear()
    optimizer = getattr(hf_compressopt, kind)(model.parameters(), lr=0.01, **options)
    return model, optimizer, lambda: average_gradients(optimizer)


def by_hook(compression: str) -> Made:
    model = Linear()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(GradientCompression(model.named_parameters(), compression), compress_hook)
    return ddp, torch.optim.AdamW(model.parameters(), lr=0.01), lambda: None


def in_zero(stage: int) -> Made:
    model = Linear()
    return model, ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, stage=stage), lambda: None


def train(made: Made, rank: int, *, passes: int) -> np.ndarray:
    model, optimizer, average = made
    for step in range(STEPS):
        for number in range(passes):
            model(sums(rank, step) if passes == 1 else factors(rank, step, number)).backward()
            average()
        clip = getattr(optimizer, "clip_grad_norm_", None)
        if clip is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 50.0)
        else:
            clip(50.0)
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(optimizer, "settle_parameters"):
        optimizer.settle_parameters()
    return flat(list(model.parameters()))


ADAM: dict[str, Any] = {"freeze_step": 2, "warmup_bits": 32}
ZERO_ONE = {**ADAM, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 2}
EXACT: dict[str, Callable[[], Made]] = {
    "no compression": partial(by_hook, "float32"),
    "ZeRO, stage 1": partial(in_zero, 1),
    "ZeRO, stage 2": partial(in_zero, 2),
    "onebit_adam": partial(in_ddp, "OnebitAdam", **ADAM),
    "onebit_adam, a loop": partial(in_a_loop, "OnebitAdam", **ADAM),
    "onebit_adam, clip=local": partial(in_ddp, "OnebitAdam", **ADAM, clip="local"),
    "onebit_adam, clip=late": partial(in_ddp, "OnebitAdam", **ADAM, clip="late"),
    "onebit_adam, zero_stage=1": partial(in_ddp, "OnebitAdam", freeze_step=2, zero_stage=1),  # sends in its step
    "zero_one_adam, variance stage": partial(in_ddp, "ZeroOneAdam", **{**ZERO_ONE, "freeze_step": 4}),
    "zero_one_adam, local steps": partial(in_ddp, "ZeroOneAdam", **ZERO_ONE),
    "onebit_lamb": partial(in_ddp, "OnebitLamb", **ADAM),
}


@on_ranks(2)
def test_several_passes_are_one_pass_with_the_sum_of_their_gradients(rank: int, world_size: int) -> None:
    """In bits, where gradients travel in full precision, and where they stay each rank's own."""
    for name, make in EXACT.items():
        together, apart = (train(make(), rank, passes=passes) for passes in (1, PASSES))
        assert together.tobytes() == apart.tobytes(), name


# -- as integers: each pass sends the sum so far, with the errors of the pass before -----------------------------------

WARMUP = {"freeze_step": 100}
INTEGERS: dict[str, tuple[Callable[[], Made], int, int]] = {  # and bits, and the order of parameters in buckets
    "int4": (partial(by_hook, "int4"), 4, -1),
    "int8": (partial(by_hook, "int8"), 8, -1),
    "onebit_adam": (partial(in_ddp, "OnebitAdam", **WARMUP), 4, 1),
    "onebit_adam, a loop": (partial(in_a_loop, "OnebitAdam", **WARMUP), 4, 1),
    "onebit_adam, 8 bits": (partial(in_ddp, "OnebitAdam", **WARMUP, warmup_bits=8), 8, 1),
    "zero_one_adam": (partial(in_ddp, "ZeroOneAdam", **WARMUP), 4, 1),
    "onebit_lamb": (partial(in_ddp, "OnebitLamb", **WARMUP), 4, 1),
}


@on_ranks(2)
def test_the_gradients_of_several_passes_are_those_of_the_simulation(rank: int, world_size: int) -> None:
    for name, (make, bits, order) in INTEGERS.items():
        model, optimizer, average = make()
        params = list(model.parameters())[::order]
        small = in_full(SHAPES[::order])
        simulation = Simulation(NUMEL, NUMEL, world_size, bits, compact=name != "onebit_lamb")
        for step in range(STEPS):
            expected = np.zeros(NUMEL, np.float32)
            for number in range(PASSES):
                model(factors(rank, step, number)).backward()
                average()
                own = [flat(factors(each, step, number)[::order]) for each in range(world_size)]
                so_far = expected + np.stack(own)
                expected = simulation.average(np.where(small, np.float32(0), so_far))
                expected[small] = so_far.mean(axis=0)[small]
            assert flat([param.grad for param in params]).tobytes() == expected.tobytes(), (name, step)
            optimizer.step()
            optimizer.zero_grad()
