"""Training on a GPU: each optimizer, hooks, scalers, FSDP2, Trainer, and the self-test. Run by `make test-gpu` only."""

import pytest
import torch

from hf_compressopt import selftest
from tests.support.device_suite import DeviceSuite


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


class TestTraining(DeviceSuite):
    """The suite, on the GPU."""


@pytest.mark.timeout(900)
def test_the_self_test_passes_on_the_gpu() -> None:
    """Two processes: over NCCL where there are two GPUs, else over gloo."""
    found = selftest.run(gpu=True)
    assert found["passed"], found
    assert found["kernels"]["native"], found["kernels"]["because"]
