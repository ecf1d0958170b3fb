"""OnebitAdam under ZeRO in Trainer and Accelerate."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, OnebitAdam
from hf_compressopt.amp import innermost
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.trainer_runs import Run, equal_params, loads_optimizer_pt, logged, losses, train_all, use_accelerate

ARGUMENTS = {"optim": "onebit_adam", "max_grad_norm": 0.5, "adam_epsilon": 1e-5}


@loads_optimizer_pt
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2])
def test_trainer_trains_through_the_switch_and_resumes_in_both_stages(stage: int, tmp_path: Path) -> None:
    """The warmup stage has 4 of 8 steps; step 6 has an overflow on one rank."""

    def of(used: int, output: str, **more: Any) -> Run:
        given = {"optim_args": f"freeze_step=4,zero_stage={used},bucket_cap_mb=0.02"}
        given["output_dir"] = str(tmp_path / output)
        return Run({**ARGUMENTS, "gradient_accumulation_steps": stage, **given}, overflow=(1, 6), **more)

    whole, plain = run_ranks(2, train_all, of(stage, "whole", save_at=(2, 4, 6)), of(0, "plain"), timeout=240)[0]
    assert whole["alike"] == [True] * 8 and whole["optimizer"] == "OnebitAdam"
    assert [row["skipped"] for row in whole["rows"]] == [step == 6 for step in range(8)]
    assert losses(whole) == pytest.approx(losses(plain), abs=0.05) and losses(whole) != losses(plain)
    norms = [logged(result, "grad_norm") for result in (whole, plain)]
    assert norms[0][:3] == pytest.approx(norms[1][:3], rel=0.1)
    checkpoints = [str(tmp_path / "whole" / f"checkpoint-{step}") for step in (2, 4, 6)]
    rest = [of(stage, f"resumed-{number}", resume=folder) for number, folder in enumerate(checkpoints)]
    for resumed in run_ranks(2, train_all, *rest, timeout=240)[0]:
        assert equal_params(whole["params"], resumed["params"])


@on_ranks(2)
def test_accelerate_takes_the_plugin(rank: int, world_size: int) -> None:
    sums = []
    for stage, wrapper in ((1, "DistributedDataParallel"), (2, "Linear")):
        use_accelerate(rank, world_size)
        plugin = CompressOptPlugin(optimizer="onebit_adam", zero_stage=stage, freeze_step=2)
        accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=plugin, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        inner = innermost(optimizer)
        assert type(model).__name__ == wrapper and isinstance(inner, OnebitAdam) and inner.zero_stage == stage
        for step in range(8):
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * rank + step))
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                freed = all(p.grad is None for p in inner.trainable_parameters)
                assert freed == (stage == 2 and step % 2 == 1)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
        assert same_on_all_ranks(inner.trainable_parameters)
        sums.append(sum(p.double().sum().item() for p in inner.trainable_parameters))
    assert sums[0] == sums[1], "nothing is clipped"
    alone = CompressOptAccelerator(cpu=True)
    wrapped = alone.prepare_model(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="give both to one prepare"):
        alone.prepare_optimizer(OnebitAdam(wrapped.parameters(), zero_stage=2))
