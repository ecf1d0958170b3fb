"""A new algorithm is one file (tests/support/sign_momentum.py) and one row of ALGORITHMS; the hosts know it then."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_compressopt
from hf_compressopt import CompressOptPlugin
from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.planner import report
from tests.support import sign_momentum, trainer_runs
from tests.support.harness import run_ranks
from tests.support.trainer_runs import Run, equal_params, logged, losses

FREEZE, STEPS = 3, 48  # two epochs


def train(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    ALGORITHMS["sign_momentum"] = sign_momentum.SignMomentum  # the one line

    hf_compressopt.register()
    try:
        return trainer_runs.train(rank, world_size, run)
    finally:
        del ALGORITHMS["sign_momentum"]


def test_the_file_is_short() -> None:
    assert len(Path(sign_momentum.__file__).read_text().splitlines()) < 80


def test_a_new_algorithm_trains_saves_and_resumes_in_trainer(tmp_path: Path) -> None:
    options = f"freeze_step={FREEZE},scale_block=256,bucket_cap_mb=0.02,clip=local"
    arguments = {"optim": "sign_momentum", "optim_args": options, "max_steps": STEPS, "learning_rate": 5e-3}
    arguments |= {"save_strategy": "steps", "save_steps": 20, "output_dir": str(tmp_path)}
    whole = run_ranks(2, train, Run(arguments), timeout=120)
    for result in whole:
        assert result["optimizer"] == "SignMomentum" and result["alike"] == [True] * STEPS
        assert equal_params(result["params"], whole[0]["params"])
        stages = logged(result, "compressopt/stage") if result is whole[0] else []
        assert stages in ([], [0.0] * FREEZE + [1.0] * (STEPS - FREEZE))
    lost = losses(whole[0])
    first, second = sum(lost[: STEPS // 2]), sum(lost[STEPS // 2 :])
    assert second < first and whole[0]["metrics"]["compression_ratio"] > 10
    other = {**arguments, "output_dir": str(tmp_path / "resumed"), "save_strategy": "no"}
    resumed = run_ranks(2, train, Run(other, resume=str(tmp_path / "checkpoint-20")), timeout=120)
    assert equal_params(resumed[0]["params"], whole[0]["params"])


def test_the_plugin_and_the_planner_know_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "sign_momentum", sign_momentum.SignMomentum)
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    assert isinstance(CompressOptPlugin(optimizer="sign_momentum").convert(plain), sign_momentum.SignMomentum)
    assert "SignMomentum, float32" in report.memory_rows(1000, 2, torch.float32, 2, 25.0)
