"""Accelerate without Trainer: a partitioned optimizer by the plug-in, and one given as such."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, ZeroOptimizer, attach
from tests.integrations.test_accelerate import Recorder
from tests.support.harness import on_ranks, run_ranks
from tests.support.trainer_runs import equal_params, loss_of, network, params_of, same_on_all_ranks, use_accelerate

STEPS = 6


def make(how: str) -> tuple[Any, ...]:
    from accelerate import Accelerator

    torch.manual_seed(int(os.environ["RANK"]))  # prepare() is to make the models alike, as DDP does
    model = network()
    options: dict[str, Any] = {"cpu": True, "step_scheduler_with_optimizer": False, "gradient_accumulation_steps": 2}
    if how == "ddp":
        accelerator: Any = Accelerator(**options)
        optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    elif how.startswith("plugin"):
        plugin = CompressOptPlugin(zero_stage=int(how[-1]), bucket_cap_mb=0.001)
        accelerator = CompressOptAccelerator(compressopt_plugin=plugin, **options)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    else:
        accelerator = attach(Accelerator(**options))
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.Adagrad, lr=1e-2, loss_scale=8.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if how == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        return accelerator, accelerator.prepare(model), optimizer, accelerator.prepare(scheduler)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler))


def loop(rank: int, world_size: int, how: str, directory: str = "", resume: bool = False) -> dict[str, Any]:
    use_accelerate(rank, world_size)
    accelerator, model, optimizer, scheduler = make(how)
    if resume:
        accelerator.load_state(f"{directory}/3")
    logged: list[dict[str, Any]] = []
    accelerator.trackers = [Recorder(logged)]
    alike = []
    for step in range(3 if resume else 0, STEPS):
        for number in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, rank, 10 * step + number))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step() if accelerator.sync_gradients else None
                optimizer.zero_grad()
        alike.append(same_on_all_ranks(model.parameters()))
        accelerator.log({"loss": 0.0}, step=step)
        if directory and not resume and step == 2:
            accelerator.save_state(f"{directory}/3")
            accelerator.wait_for_everyone()
    assert all(alike)
    inner = optimizer.optimizer
    return {
        "params": params_of(accelerator, model),
        "class": type(inner).__name__,
        "lr": inner.param_groups[0]["lr"],
        "logged": logged,
        "messages": inner.traffic.bytes["all_to_all"] if hasattr(inner, "traffic") else 0,
    }


def test_every_way_in_gives_ddps_numbers(tmp_path: Path) -> None:
    ways = ["ddp", "plugin1", "plugin2", "together", "optimizer first"]
    found = {how: run_ranks(2, loop, how)[0] for how in ways}
    plain = found.pop("ddp")
    for how, result in found.items():
        assert result["class"] == "ZeroOptimizer" and result["lr"] == plain["lr"], how
        for name, value in plain["params"].items():
            torch.testing.assert_close(result["params"][name], value, rtol=0, atol=1e-6)
        assert result["logged"][-1]["compressopt/zero_stage"] == (1.0 if how == "plugin1" else 2.0)
    # stage 1 holds whole gradients over the two micro-batches, stage 2 sends those of each
    assert found["plugin2"]["messages"] == 2 * found["plugin1"]["messages"]


@pytest.mark.parametrize("how", ["plugin1", "optimizer first"])
def test_save_state_and_load_state(how: str, tmp_path: Path) -> None:
    whole = run_ranks(2, loop, how, str(tmp_path))
    assert (tmp_path / "3" / "compressopt.index.json").is_file()
    resumed = run_ranks(2, loop, how, str(tmp_path), True)
    assert equal_params(whole[0]["params"], resumed[0]["params"])


@on_ranks(2)
def test_what_cannot_be_had_is_refused(rank: int, world_size: int) -> None:
    def half(model: nn.Module, accelerator: Any) -> list[Any]:
        adamw = torch.optim.AdamW(model[2].parameters())
        return [model, ZeroOptimizer(model[0].parameters(), torch.optim.AdamW), adamw]

    def model_first(model: nn.Module, accelerator: Any) -> list[Any]:
        return [accelerator.prepare(model), ZeroOptimizer(model.parameters(), torch.optim.AdamW)]

    for plugin, objects, message in (
        (None, half, "nobody would average"),
        (None, lambda *given: half(*given)[::-1], "nobody would average"),
        (None, model_first, "give both to one prepare"),
        (2, lambda model, _: [torch.optim.LBFGS(model.parameters())], "LBFGS cannot be partitioned"),
    ):
        use_accelerate(rank, world_size)
        own = CompressOptPlugin(zero_stage=plugin) if plugin else None
        accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=own)
        with pytest.raises(ValueError, match=message):
            accelerator.prepare(*objects(network(), accelerator))
