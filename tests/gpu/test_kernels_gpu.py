"""The kernels and OnebitAdam on a CUDA device against the same on the CPU. Run by `make test-gpu` only."""

import pytest
import torch

from hf_compressopt import OnebitAdam, kernels


@pytest.mark.parametrize("scale_block", [None, 8, 4096])
@pytest.mark.parametrize("numel", [1, 7, 4096, 100_003])
def test_compression_gives_the_same_message_and_error_as_the_cpu(numel: int, scale_block: int | None) -> None:
    world_size = 3
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    error = torch.randn(numel, generator=torch.Generator().manual_seed(numel + 1))
    form = kernels.SignFormat(scale_block)
    nbytes = sum(form.chunk_nbytes(numel, world_size))
    results = {}
    for device in ("cpu", "cuda"):
        feedback = error.to(device, copy=True)
        messages = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        kernels.on(messages).compress_(
            form, kernels.Combination.of(x.to(device)), feedback, messages, world_size, feedback
        )
        results[device] = (messages.cpu(), feedback.cpu())
    torch.testing.assert_close(results["cuda"][1], results["cpu"][1], rtol=1e-5, atol=1e-5)
    assert results["cuda"][0].shape == results["cpu"][0].shape


def test_a_model_moved_after_its_optimizer_was_made_takes_the_state_along() -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = OnebitAdam(model.parameters(), lr=0.1, freeze_step=2)
    model.cuda()
    for _ in range(4):
        model(torch.ones(2, 5, device="cuda")).sum().backward()
        optimizer.step()
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
    assert optimizer.metrics()["stage"] == 1.0
