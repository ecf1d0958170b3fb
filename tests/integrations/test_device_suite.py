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
def test_the_self_test_passes(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--json"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert "[hf_compressopt]" not in err
    assert found["passed"] and not any(found["kernels"]["different"].values())
    assert found["training"]["optimizers"].keys() == selftest.OPTIMIZERS.keys()
    for result in found["training"]["optimizers"].values():
        assert result["ranks_alike"] and result["loss_falls"]


def test_the_self_test_has_a_line_for_each_item(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"ranks_alike": True, "loss_falls": True, "bits_of_the_reference": False, "losses": [2.0, 1.0]}
    kernels = {"native": True, "different": {"adam": [], "messages": ["9 elements, 1 off: other bits"]}}
    rows = {"AdamW int4": good, "Lamb": {**good, "loss_falls": False}}
    training = {"backend": "gloo", "ranks": 2, "optimizers": rows}
    for passed in (True, False):
        found = {"passed": passed, "device": "cpu", "kernels": kernels, "training": training}
        monkeypatch.setattr(selftest, "run", lambda gpu, found=found: found)
        assert cli.main(["selftest"]) == (0 if passed else 1)
        *lines, verdict = capsys.readouterr().out.splitlines()
        assert [line[:4] for line in lines] == ["PASS", "FAIL", "PASS", "FAIL"]
        assert "not loss_falls" in lines[-1] and ("all passed" in verdict) is passed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_self_test_of_a_gpu_says_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--gpu"]) == 2
    assert "there is no GPU" in capsys.readouterr().err
