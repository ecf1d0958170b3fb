"""Settings of torch and of the surroundings that must not matter: default dtypes and devices, a log that fails."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hf_compressopt
from tests.support.harness import run_ranks
from tests.support.logs import log_lines, log_to

OPTIONS: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 2},
    "ZeroOneAdam": {"var_freeze_step": 2, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 2},
    "OnebitLamb": {"freeze_step": 2},
}
STEPS = 7


def optimizer_of(name: str, params: Any, **options: Any) -> Any:
    return getattr(hf_compressopt, name)(params, **{"lr": 0.01, "scale_block": 8, **OPTIONS[name], **options})


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def train_under_defaults(
    rank: int, world_size: int, name: str, dtype: torch.dtype, device: str | None
) -> list[torch.Tensor]:
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
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, None), (torch.float64, None), (torch.float32, "meta")], ids=str
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_defaults_do_not_matter(name: str, dtype: torch.dtype, device: str | None, world_size: int) -> None:
    expected = run_ranks(world_size, train_under_defaults, name, torch.float32, None)
    for found, known in zip(run_ranks(world_size, train_under_defaults, name, dtype, device), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, known, strict=True))


class FailingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("I/O operation on closed file")


def train_with_a_failing_log(rank: int, world_size: int, name: str) -> float:
    with log_to(FailingHandler()):
        used, unused = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(4))
        freeze = {"ZeroOneAdam": "var_freeze_step"}.get(name, "freeze_step")
        optimizer = optimizer_of(name, [used, unused], **{freeze: "auto", "max_freeze_step": 3, "min_freeze_step": 1})
        for step in range(STEPS):
            used.grad = torch.full((20,), float("nan") if step == 1 else 1.0 + step)
            optimizer.step()
        return float(optimizer.metrics()["step"])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_log_that_fails_does_not_stop_a_step(name: str) -> None:
    assert run_ranks(2, train_with_a_failing_log, name) == [STEPS - 1.0] * 2


def hear_switch(rank: int, world_size: int, name: str) -> list[str]:
    with log_lines() as lines:
        param = nn.Parameter(torch.ones(20))
        optimizer = optimizer_of(name, [param])
        for step in range(4):
            optimizer.step(grads=[torch.full((20,), 1.0 + step)])
    return [line for line in lines if "ends, the variance is frozen" in line]


@pytest.mark.parametrize("name", OPTIONS)
def test_one_rank_alone_is_told_that_nothing_is_compressed(name: str) -> None:
    ((line,),) = run_ranks(1, hear_switch, name)
    assert "nothing is compressed" in line and "signs" not in line
    (line,), nothing = run_ranks(2, hear_switch, name)
    assert "is sent as signs" in line and nothing == []


def variance_norms_sent(rank: int, world_size: int, bound: int) -> list[float]:
    """Bytes of each step of a warmup whose gradients are averaged already: only the search sends anything."""
    param = nn.Parameter(torch.ones(20))
    search = {"freeze_step": "auto", "max_freeze_step": bound, "min_freeze_step": 1}
    optimizer = optimizer_of("OnebitAdam", [param], betas=(0.5, 0.9), **search)
    sent = []
    for _ in range(bound):
        param.grad = torch.ones(20)
        optimizer.step()
        sent.append(optimizer.metrics()["bytes_sent_step"])
    return sent


def test_the_search_sends_only_what_it_can_compare() -> None:
    for sent in run_ranks(2, variance_norms_sent, 10):  # D = 10 steps: never two norms to compare
        assert sent == [0.0] * 10
    for sent in run_ranks(2, variance_norms_sent, 13):
        assert [nbytes > 0 for nbytes in sent] == [step <= 3 or step > 10 for step in range(1, 14)]


def test_param_groups_on_two_devices_are_refused() -> None:
    here, elsewhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
    for name in OPTIONS:
        with pytest.raises(ValueError, match="param group 1, meta: make an optimizer for each device"):
            optimizer_of(name, [{"params": [here]}, {"params": [elsewhere]}])
        with pytest.raises(ValueError, match="got cpu and meta: make an optimizer for each device"):
            optimizer_of(name, [here, elsewhere])
        optimizer = optimizer_of(name, [here])
        with pytest.raises(ValueError, match="make an optimizer for each device"):
            optimizer.add_param_group({"params": [elsewhere]})
        with pytest.raises(ValueError, match="param group 1 must be on one device"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2)), elsewhere]})
        assert len(optimizer.param_groups) == 1
        optimizer_of(name, [elsewhere])  # what the message says works
        here.grad = torch.ones(2)
        optimizer.step()
