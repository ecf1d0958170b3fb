"""OnebitAdam under ZeRO in Trainer and Accelerate."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.harness import run_ranks
from tests.support.trainer_runs import Run, equal_params, loads_optimizer_pt, train, use_accelerate

ARGUMENTS = {"optim": "onebit_adam", "max_grad_norm": 0.5, "adam_epsilon": 1e-5}


def run_all(rank: int, world_size: int, runs: list[Run]) -> list[dict[str, Any]]:
    return [train(rank, world_size, run) for run in runs]


@loads_optimizer_pt
def test_trainer_trains_through_the_switch_and_resumes_in_both_stages(tmp_path: Path) -> None:
    """The first stage has 4 of 8 steps; step 6 has an overflow on one rank."""

    def of(stage: int, output: str, **more: Any) -> Run:
        given = f"freeze_step=4,zero_stage={stage}"
        return Run({**ARGUMENTS, "optim_args": given, "output_dir": str(tmp_path / output)}, overflow=(1, 6), **more)

    whole, plain = run_ranks(2, run_all, [of(1, "whole", save_at=(2, 4, 6)), of(0, "plain")], timeout=240)[0]
    assert whole["alike"] == [True] * 8 and whole["optimizer"] == "OnebitAdam"
    assert [row["skipped"] for row in whole["rows"]] == [step == 6 for step in range(8)]
    losses = [[row["loss"] for row in result["history"] if "loss" in row] for result in (whole, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=0.05) and losses[0] != losses[1]
    norms = [[row["grad_norm"] for row in result["history"] if "grad_norm" in row] for result in (whole, plain)]
    assert norms[0][:3] == pytest.approx(norms[1][:3], rel=0.1)
    checkpoints = [str(tmp_path / "whole" / f"checkpoint-{step}") for step in (2, 4)]
    rest = [of(1, f"resumed-{number}", resume=folder) for number, folder in enumerate(checkpoints)]
    for resumed in run_ranks(2, run_all, rest, timeout=240)[0]:
        assert equal_params(whole["params"], resumed["params"])


def with_accelerate(rank: int, world_size: int) -> dict[str, Any]:
    use_accelerate(rank, world_size)
    from hf_compressopt import CompressOptAccelerator, CompressOptPlugin
    from hf_compressopt.amp import innermost

    plugin = CompressOptPlugin(optimizer="onebit_adam", zero_stage=1, freeze_step=2)
    accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(4):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * rank + step))
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    inner = innermost(optimizer)
    found = {"model": type(model).__name__, "stage": inner.zero_stage, "class": type(inner).__name__}
    return {**found, "sum": sum(p.double().sum().item() for p in inner.trainable_parameters)}


def test_accelerate_takes_the_plugin_and_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_compressopt import CompressOptPlugin

    ranks = run_ranks(2, with_accelerate)
    assert ranks[0] == ranks[1]
    assert ranks[0].items() >= {"model": "DistributedDataParallel", "stage": 1, "class": "OnebitAdam"}.items()
    monkeypatch.setenv("COMPRESSOPT_OPTIM", "onebit_adam")
    monkeypatch.setenv("COMPRESSOPT_ZERO_STAGE", "1")
    made = CompressOptPlugin().convert(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))]))
    assert made.zero_stage == 1 and not CompressOptPlugin().partitions
    monkeypatch.setenv("COMPRESSOPT_ZERO_STAGE", "2")
    with pytest.raises(ValueError, match="zero_stage=2 is not supported with OnebitAdam"):
        CompressOptPlugin()
    with pytest.raises(ValueError, match="warmup_bits to be one of"):
        CompressOptPlugin(zero_stage=1, warmup_bits=16)
    with pytest.raises(ValueError, match="param_compression=int4 is an option of ZeRO"):
        CompressOptPlugin(zero_stage=1, param_compression="int4")
