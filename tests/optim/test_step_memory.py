"""A step takes no second copy of the model: beside what it holds between steps it needs buckets, as /proc counts."""

import sys
from typing import Any

import pytest
import torch

from hf_compressopt import FusedAdam, Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam
from tests.support.harness import run_ranks
from tests.support.memory import MIB, peak_beyond

NUMEL = 5 * MIB  # 20 MiB of float32 parameters, in tensors of 1 MiB
TENSORS = 20
BUCKET_CAP_MB = 1
MOST = 6  # MiB: buckets under way
MOST_BY_TORCH = 12  # temporaries of a few tensors where PyTorch steps
BY_TORCH = {"OnebitAdam, warmup", "Lamb"}

# class, options, steps before the one that is measured
STEPS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    "OnebitAdam, warmup": (OnebitAdam, {"freeze_step": 100}, 2),
    "OnebitAdam, fused warmup": (OnebitAdam, {"freeze_step": 100, "fused_warmup": True}, 2),
    "OnebitAdam, compressed": (OnebitAdam, {"freeze_step": 1}, 3),
    "ZeroOneAdam, full-precision step": (ZeroOneAdam, {"var_freeze_step": 100, "var_update_scaler": 100}, 2),
    "ZeroOneAdam, 1-bit gradients": (ZeroOneAdam, {"var_freeze_step": 100, "var_update_scaler": 1}, 4),
    "ZeroOneAdam, local step": (ZeroOneAdam, {"var_freeze_step": 1, "local_step_scaler": 1}, 8),
    "ZeroOneAdam, sync": (ZeroOneAdam, {"var_freeze_step": 1, "local_step_scaler": 100}, 3),
    "OnebitLamb, compressed": (OnebitLamb, {"freeze_step": 1}, 3),
    "Lamb": (Lamb, {}, 2),
    "FusedAdam": (FusedAdam, {}, 2),
}


def peaks_of_steps(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    found = {"a copy": peak_beyond(lambda: torch.ones(NUMEL))}
    for name in names:
        cls, options, steps = STEPS[name]
        params = [torch.nn.Parameter(torch.ones(NUMEL // TENSORS)) for _ in range(TENSORS)]
        for number, param in enumerate(params):
            param.grad = torch.full_like(param, 0.01 * (number + 1))
        if hasattr(cls, "schedule_class"):
            options = {"bucket_cap_mb": BUCKET_CAP_MB, **options}
        optimizer = cls(params, lr=1e-4, **options)
        for _ in range(steps):
            optimizer.step()
        found[name] = peak_beyond(optimizer.step)
    return found


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from Linux's /proc")
def test_peak_of_a_step_is_buckets() -> None:
    for found in run_ranks(2, peaks_of_steps, list(STEPS), timeout=120):
        assert 19 <= found.pop("a copy") <= 32, found  # the measure itself
        beyond = {name: peak for name, peak in found.items() if peak > (MOST_BY_TORCH if name in BY_TORCH else MOST)}
        assert not beyond, found
