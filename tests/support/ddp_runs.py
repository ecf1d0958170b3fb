"""A small model with everything that DDP has to handle, an optimizer for it, and their backward passes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import attach_ddp
from tests.oracles.cases import bucket_cap
from tests.oracles.steps import tensors_in
from tests.support.forms import in_form

STEPS, FREEZE = 8, 3
CLIP = 0.01  # smaller than all norms


class Net(nn.Module):
    """Layers of odd sizes, one of them frozen, two that share a weight, and one that is used in even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = nn.Linear(13, 37), nn.Linear(37, 37), nn.Linear(37, 37)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.third, self.sometimes = nn.Linear(37, 13), nn.Linear(37, 37)

    def forward(self, x: torch.Tensor, also: bool = True) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.tied(torch.tanh(self.second(torch.tanh(self.first(x)))))))
        return self.third(self.sometimes(h) if also else h)


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def make(
    clip: str = "sketch",
    max_grad_norm: float = 0.0,
    *,
    name: str = "OnebitAdam",
    dtype: torch.dtype = torch.float32,
    mixed: bool = False,
    form: str | None = None,
    **options: Any,
) -> tuple[Net, Any]:
    """The model and its optimizer. mixed: One of its parameters is in a group that is never compressed."""
    net = make_net(dtype)
    biases = [p for name, p in net.named_parameters() if name.endswith("bias") and p.requires_grad]
    kept = list(net.third.parameters())[: int(mixed)]
    weights = [p for p in net.parameters() if not any(p is other for other in (*biases, *kept))]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    groups += [{"params": kept, "non_freeze": True}] if mixed else []
    schedule = {} if name == "ZeroOneAdam" else {"freeze_step": FREEZE}
    settings = {"lr": 1e-2, "weight_decay": 0.1, "scale_block": 64, "bucket_cap_mb": bucket_cap(500), **schedule}
    settings |= {} if name == "OnebitLamb" else {"variance_interval": 2}
    settings |= {"clip": clip, "max_grad_norm": max_grad_norm, **options}
    return net, in_form(getattr(hf_compressopt, name), form)(groups, **settings)


def attached(*args: Any, loss_scale: Any = None, ddp: Any = None, **options: Any) -> tuple[Any, Net, Any]:
    """The model in DDP, the model, and its optimizer, which DDP's hook knows."""
    net, optimizer = make(*args, **options)
    model = DistributedDataParallel(net, bucket_cap_mb=0.005, **(ddp or {}))
    attach_ddp(model, optimizer, loss_scale=loss_scale)
    return model, net, optimizer


def scaler_of(init_scale: float, enabled: bool = True, growth_interval: int = 2000) -> Any:
    return hf_compressopt.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval, enabled=enabled)


def tensors_of(net: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Copies of the parameters, the state and the errors."""
    errors = [list(state.errors.values()) for state in optimizer._states]
    return tensors_in([list(net.parameters()), optimizer.state_dict()["state"], errors])


def data(rank: int, step: int, part: int = 0) -> torch.Tensor:
    return torch.randn(8, 13, generator=torch.Generator().manual_seed(10_000 * part + 100 * rank + step))


def loss_of(model: nn.Module, rank: int, step: int, part: int = 0, also: bool = True) -> torch.Tensor:
    x = data(rank, step, part).to(next(model.parameters()).dtype)
    return model(x, also).square().mean()


def backward(
    model: Any, rank: int, step: int, *, accumulate: int = 1, also: bool = True, sync: bool = False, scaler: Any = None
) -> None:
    """The backward passes of a step; only the last one sends gradients, or with ``sync`` each."""
    for part in range(accumulate):
        sends = sync or part == accumulate - 1 or not hasattr(model, "no_sync")
        with nullcontext() if sends else model.no_sync():
            loss = loss_of(model, rank, step, part, also)
            (loss if scaler is None else scaler.scale(loss)).backward()


def end_step(optimizer: Any, scaler: Any = None) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def hook_beside_loop(
    rank: int,
    models: tuple[Any, Any],
    optimizers: Sequence[Any],
    average: Callable[[], Any],
    steps: int,
    *,
    accumulate: int = 1,
    sometimes: bool = False,
) -> list[bool]:
    """Train a model in DDP and a plain one, whose gradients ``average`` averages: are they the same after each step?"""
    same = []
    for step in range(steps):
        for model in models:
            backward(model, rank, step, accumulate=accumulate, also=not sometimes or step % 2 == 0)
        average()
        for optimizer in optimizers:
            end_step(optimizer)
        pairs = zip(*(model.parameters() for model in models), strict=True)
        same.append(all(torch.equal(one, other) for one, other in pairs))
    return same
