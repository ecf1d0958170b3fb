"""ZeroOptimizer on a CUDA device, and models that move to one. Run by `make test-gpu` only."""

from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import OnebitAdam, ZeroOptimizer
from hf_compressopt.zero.memory import memory_report


def train(dtype: torch.dtype, steps: int = 4, away: bool = False, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 257), nn.Tanh(), nn.Linear(257, 5)).to("cuda", dtype)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, reduce_bucket_size=1000, **options)
    for step in range(steps):
        generator = torch.Generator("cuda").manual_seed(step)
        model(torch.randn(8, 33, device="cuda", dtype=dtype, generator=generator)).square().mean().backward()
        if away:
            optimizer.offload_states()
            states = [s for part in optimizer.partition.parts() for s in part.state.values()]
            assert all(state.is_cpu for state in states)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_offloaded_states_give_the_same_training(dtype: torch.dtype, tolerance: float) -> None:
    here, optimizer = train(dtype)
    there, offloaded = train(dtype, offload_optimizer="cpu")
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    assert all(part.tensor.is_cpu and part.tensor.is_pinned() for part in offloaded.partition.parts())
    assert memory_report(offloaded).masters == 4 * sum(p.numel() for p in there.parameters())
    assert memory_report(optimizer).device_allocated > 0
    away, _ = train(dtype, away=True)
    assert all(torch.equal(p, q) for p, q in zip(here.parameters(), away.parameters(), strict=True))


def test_a_model_moved_after_its_optimizer_was_made_takes_the_state_along() -> None:
    model = nn.Linear(65, 3)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 65)).sum().backward()
    optimizer.step()
    model.cuda()
    model(torch.ones(2, 65, device="cuda")).sum().backward()
    optimizer.step()
    for part in optimizer.partition.parts():
        assert part.tensor.is_cuda and part.state["exp_avg"].is_cuda


def test_a_model_moved_after_its_compressed_optimizer_was_made_takes_the_state_along() -> None:
    model = nn.Linear(5, 3)
    optimizer = OnebitAdam(model.parameters(), lr=0.1, freeze_step=2)
    model.cuda()
    for _ in range(4):
        model(torch.ones(2, 5, device="cuda")).sum().backward()
        optimizer.step()
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
    assert optimizer.metrics()["stage"] == 1.0
