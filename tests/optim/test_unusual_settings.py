"""Settings of torch and of the surroundings that must not matter: default dtypes and devices, a log that fails."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.oracles.steps import same
from tests.support.family import FAMILY, optimizer_of
from tests.support.harness import on_ranks
from tests.support.logs import log_lines, log_to

STEPS = 7


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def train_under_defaults(name: str, dtype: torch.dtype, device: str | None) -> list[torch.Tensor]:
    params = [nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    grads = [
        [torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + i)) for i in range(3)]
        for step in range(STEPS)
    ]
    mask = torch.ones(4)
    with defaults(dtype, device):
        groups = [{"params": params[:1], "exp_avg_mask": mask}, {"params": params[1:2]}]
        optimizer = optimizer_of(name, [*groups, {"params": params[2:], "non_freeze": True}])
        for step in range(STEPS):
            for param, grad in zip(params, grads[step], strict=True):
                param.grad = grad
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            if step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
        plain = torch.optim.AdamW([{"params": [param]} for param in params])
        optimizer.load_state_dict(plain.state_dict())
    return params


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, None), (torch.float64, None), (torch.float32, "meta")], ids=str
)
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_torchs_defaults_do_not_matter(
    rank: int, world_size: int, name: str, dtype: torch.dtype, device: str | None
) -> None:
    assert same(train_under_defaults(name, dtype, device), train_under_defaults(name, torch.float32, None))


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2)
def test_a_log_that_fails_does_not_stop_a_step(rank: int, world_size: int, name: str) -> None:
    def fail(record: logging.LogRecord) -> None:
        raise ValueError("I/O operation on closed file")

    handler = logging.Handler()
    handler.emit = fail  # type: ignore[method-assign]
    with log_to(handler):
        used, unused = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(4))
        freeze = {"ZeroOneAdam": "var_freeze_step"}.get(name, "freeze_step")
        optimizer = optimizer_of(name, [used, unused], **{freeze: "auto", "max_freeze_step": 3, "min_freeze_step": 1})
        for step in range(STEPS):
            used.grad = torch.full((20,), float("nan") if step == 1 else 1.0 + step)
            optimizer.step()
    assert optimizer.metrics()["step"] == STEPS - 1.0


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(1, 2)
def test_one_rank_alone_is_told_that_nothing_is_compressed(rank: int, world_size: int, name: str) -> None:
    with log_lines() as lines:
        optimizer = optimizer_of(name, [nn.Parameter(torch.ones(20))])
        for step in range(4):
            optimizer.step(grads=[torch.full((20,), 1.0 + step)])
    said = [line for line in lines if "ends, the variance is frozen" in line]
    assert len(said) == (rank == 0)
    for line in said:
        assert ("nothing is compressed" in line and "signs" not in line) == (world_size == 1)
        assert ("is sent as signs" in line) == (world_size == 2)


@pytest.mark.parametrize("bound", [10, 13])
@on_ranks(2)
def test_the_search_sends_only_what_it_can_compare(rank: int, world_size: int, bound: int) -> None:
    """D = 10 steps; gradients are averaged already, so that only the search sends anything."""
    param = nn.Parameter(torch.ones(20))
    search = {"freeze_step": "auto", "max_freeze_step": bound, "min_freeze_step": 1}
    optimizer = optimizer_of("OnebitAdam", [param], betas=(0.5, 0.9), **search)
    for step in range(1, bound + 1):
        param.grad = torch.ones(20)
        optimizer.step()
        sends = optimizer.metrics()["bytes_sent_step"] > 0
        assert sends == (bound == 13 and (step <= 3 or step > 10))  # of 10 steps never two norms to compare


def test_param_groups_on_two_devices_are_refused() -> None:
    here, elsewhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
    for name in FAMILY:
        with pytest.raises(ValueError, match="param group 1, meta: make an optimizer for each device"):
            optimizer_of(name, [{"params": [here]}, {"params": [elsewhere]}])
        with pytest.raises(ValueError, match="got cpu and, in param group 0, meta: make an optimizer"):
            optimizer_of(name, [here, elsewhere])
        optimizer = optimizer_of(name, [here])
        with pytest.raises(ValueError, match="make an optimizer for each device"):
            optimizer.add_param_group({"params": [elsewhere]})
        with pytest.raises(ValueError, match="on one device, .* param group 1"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2)), elsewhere]})
        assert len(optimizer.param_groups) == 1
        optimizer_of(name, [elsewhere])  # what the message says works
        here.grad = torch.ones(2)
        optimizer.step()
