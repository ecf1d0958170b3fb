"""What `make test-gpu` runs on a GPU, on the CPU; and the self-test of an installation."""

import json

import pytest
import torch

from hf_compressopt import cli, selftest
from tests.support.device_suite import DeviceSuite


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


class TestTraining(DeviceSuite):
    """The suite, on the CPU."""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_self_test_prints_json_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and not any(found["kernels"]["different"].values())
    assert found["training"]["optimizers"].keys() == selftest.OPTIMIZERS.keys()
    for result in found["training"]["optimizers"].values():
        assert result["ranks_alike"] and result["loss_falls"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_self_test_of_a_gpu_says_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--gpu"]) == 2
    assert "there is no GPU" in capsys.readouterr().err
