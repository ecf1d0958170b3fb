"""The compressed optimizers, with schedules of a few steps, and their gradients."""

import io
from collections.abc import Iterable
from typing import Any

import torch

import hf_compressopt
from tests.oracles.cases import bucket_cap
from tests.support.forms import in_form

FAMILY: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 2},
    "ZeroOneAdam": {"var_freeze_step": 2, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4},
    "OnebitLamb": {"freeze_step": 2},
}


def optimizer_of(name: str, params: Any, **options: Any) -> Any:
    return getattr(hf_compressopt, name)(params, **{"lr": 0.01, "scale_block": 8, **FAMILY[name], **options})


def draw(params: Iterable[torch.Tensor], optimizer: Any, rank: int, step: int) -> None:
    """Set gradients that are alike on all ranks where the step wants averages, else each rank's own."""
    seed = step if optimizer.plan.reduce_grads else 100 * step + rank + 1
    for param in params:
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))


SHAPES = [(20, 17), (64,), (0, 3), (130,)]


def make(
    rank: int, stop: int, name: str = "OnebitAdam", *, form: str | None = None, **options: Any
) -> tuple[list[torch.nn.Parameter], Any]:
    """An optimizer after some steps; the warmup stage ends with step 3."""
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    schedule = {"variance_interval": 1} if name == "ZeroOneAdam" else {"freeze_step": 3, "variance_interval": 2}
    settings = {"lr": 1e-2, "bucket_cap_mb": bucket_cap(200), **schedule, **options}
    optimizer = in_form(getattr(hf_compressopt, name), form)(params, **settings)
    go_on(rank, params, optimizer, range(stop))
    return params, optimizer


def go_on(rank: int, params: list[torch.nn.Parameter], optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        for index, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * rank + 10 * step + index))
        hf_compressopt.average_gradients(optimizer)
        optimizer.step()


@torch.no_grad()
def assign(params: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


def through_a_file(value: Any, weights_only: bool = True) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
