"""Training on a GPU: each optimizer, hooks, scalers, FSDP2, Trainer, and the self-test. Run by `make test-gpu` only."""

from typing import Any

import pytest
import torch

from hf_compressopt import selftest
from tests.support.device_suite import PATHS, DeviceSuite, run_paths


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


class TestTraining(DeviceSuite):
    """The suite, on the GPU."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", PATHS)
def test_every_path_between_ranks_that_share_the_gpu(device: torch.device, ranks: int) -> None:
    rows: list[dict[str, Any]] = []
    run_paths(ranks, device, rows.append)
    assert [row for row in rows if not row["ok"]] == []
    assert [row["path"] for row in rows] == list(PATHS[ranks])


@pytest.mark.timeout(900)
def test_the_self_test_passes_on_the_gpu() -> None:
    """Two processes: over NCCL where there are two GPUs, else over gloo."""
    found = selftest.run(gpu=True)
    assert found["passed"], found
    assert found["kernels"]["native"], found["kernels"]["because"]
