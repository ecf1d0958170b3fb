"""A new algorithm is one file (tests/support/onebit_lion.py) and one row of ALGORITHMS; the hosts know it then."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_compressopt
from hf_compressopt import CompressOptPlugin
from hf_compressopt.format.index import CheckpointError
from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.planner.memory import memory_rows
from tests.support import onebit_lion, trainer_runs
from tests.support.harness import run_ranks
from tests.support.trainer_runs import Run, equal_params, logged, losses

FREEZE, STEPS = 3, 48  # two epochs


def train(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    ALGORITHMS["onebit_lion"] = onebit_lion.OnebitLion  # the one line

    hf_compressopt.register()
    try:
        return trainer_runs.train(rank, world_size, run)
    finally:
        del ALGORITHMS["onebit_lion"]


def test_it_is_lion() -> None:
    """On one rank nothing is compressed: both stages are Lion, written here from its paper."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(7, 300))
    expected, m = param.detach().double().clone(), torch.zeros(7, 300, dtype=torch.float64)
    optimizer = onebit_lion.OnebitLion([param], lr=1e-2, weight_decay=0.1, freeze_step=3)
    for _ in range(8):
        param.grad = torch.randn(7, 300)
        optimizer.step()
        grad = param.grad.double()
        expected = expected * (1 - 1e-3) - 1e-2 * torch.sign(0.9 * m + 0.1 * grad)
        m = 0.99 * m + 0.01 * grad
    assert optimizer.plan.stage.value == "compressed" and set(optimizer.state[param]) == {"step", "exp_avg"}
    torch.testing.assert_close(param.detach().double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"].double(), m, rtol=0, atol=1e-6)


def test_what_needs_a_variance_is_refused_by_name(tmp_path: Path) -> None:
    param = torch.nn.Parameter(torch.randn(7, 300))
    hf_compressopt.save_state(hf_compressopt.FusedAdam([param]), tmp_path)
    with pytest.raises(CheckpointError, match="OnebitLion has no variance"):
        hf_compressopt.load_state(onebit_lion.OnebitLion([param]), tmp_path)


def test_a_new_algorithm_trains_saves_and_resumes_in_trainer(tmp_path: Path) -> None:
    options = f"freeze_step={FREEZE},scale_block=256,bucket_cap_mb=0.02,clip=local"
    arguments = {"optim": "onebit_lion", "optim_args": options, "max_steps": STEPS, "learning_rate": 2e-3}
    arguments |= {"save_strategy": "steps", "save_steps": 20, "output_dir": str(tmp_path)}
    whole = run_ranks(2, train, Run(arguments), timeout=120)
    for result in whole:
        assert result["optimizer"] == "OnebitLion" and result["alike"] == [True] * STEPS
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
    monkeypatch.setitem(ALGORITHMS, "onebit_lion", onebit_lion.OnebitLion)
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    assert isinstance(CompressOptPlugin(optimizer="onebit_lion").convert(plain), onebit_lion.OnebitLion)
    with pytest.raises(ValueError, match="onebit_lion has no variance_floor, got variance_floor=0.5"):
        CompressOptPlugin(optimizer="onebit_lion", variance_floor=0.5).convert(plain)
    assert "OnebitLion" in memory_rows(1000, 2, torch.float32, 2, 25.0)
