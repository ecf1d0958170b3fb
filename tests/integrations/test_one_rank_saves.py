"""Inside a local interval of 0/1 Adam every rank has its own parameters, and one rank alone may save a model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_compressopt import CompressOptAccelerator, ZeroOneAdam
from tests.support.harness import on_ranks, run_ranks
from tests.support.trainer_runs import (
    Run,
    equal_params,
    make_trainer,
    network,
    params_of,
    same_on_all_ranks,
    take_steps,
    use_accelerate,
)

ZERO_ONE = {"optim": "zero_one_adam", "optim_args": "var_freeze_step=3,local_step_scaler=1,local_step_clipper=4"}


def train_and_save(rank: int, world_size: int, directory: str, arguments: dict[str, Any], saves: bool) -> Any:
    """Train; rank 0 alone saves its model after every step, and at the end."""
    from transformers import TrainerCallback

    trainer = make_trainer(rank, world_size, Run({**ZERO_ONE, **arguments, "output_dir": directory}, dropout=0.0))
    synced: dict[int, list[torch.Tensor]] = {}

    class SaveOnRank0(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if trainer.watch.alike[-1]:
                synced[state.global_step] = [p.detach().clone() for p in model.parameters()]
            if saves and rank == 0:
                trainer.save_model(f"{directory}/step-{state.global_step}")

    trainer.add_callback(SaveOnRank0())
    trainer.train()
    alike = same_on_all_ranks(trainer.model.parameters())
    if saves and rank == 0:
        trainer.save_model(f"{directory}/last")
    names = [name for name, _ in trainer.model.named_parameters()]
    return {
        "params": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "synced": {step: dict(zip(names, params, strict=True)) for step, params in synced.items()},
        "alike": alike,
        "apart": trainer.watch.alike.count(False),
        "best": trainer.state.best_model_checkpoint,
    }


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if name != "lm_head.weight"}


@pytest.mark.parametrize("best", [pytest.param(False, marks=pytest.mark.full), True])
def test_rank_0_alone_saves_in_callbacks_and_after_the_training(best: bool, tmp_path: Path) -> None:
    watched = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    arguments = {"max_steps": 10, **({**watched, "load_best_model_at_end": True} if best else {})}
    found = run_ranks(2, train_and_save, str(tmp_path), arguments, True, timeout=120)
    plain = run_ranks(2, train_and_save, str(tmp_path / "plain"), arguments, False, timeout=120)
    assert found[0]["apart"] > 3 and found[0]["alike"] and found[1]["alike"]
    for a, b in zip(found, plain, strict=True):
        assert equal_params(a["params"], b["params"])  # a save changes nothing
    last_sync = 0
    for step in range(1, 11):  # each save has the parameters of the last sync
        last_sync = step if step in found[0]["synced"] else last_sync
        assert equal_params(saved(tmp_path / f"step-{step}"), found[0]["synced"][last_sync]), step
    assert equal_params(saved(tmp_path / "last"), found[0]["params"])
    if best:
        assert equal_params(saved(Path(found[0]["best"])), found[0]["params"])


@on_ranks(2)
def test_accelerate_saves_and_returns_the_parameters_of_the_last_sync(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    use_accelerate(rank, world_size)
    accelerator, inner = CompressOptAccelerator(cpu=True), network()
    intervals = {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}
    model, optimizer = accelerator.prepare(inner, ZeroOneAdam(inner.parameters(), lr=1e-2, **intervals))
    synced: dict[str, torch.Tensor] = {}
    apart = 0
    for step in range(8):
        take_steps(accelerator, model, optimizer, rank, [step])
        alike, own = same_on_all_ranks(inner.parameters()), params_of(accelerator, model)
        synced, apart = own if alike else synced, apart + (not alike)
        if rank == 0:  # alone
            assert equal_params(dict(accelerator.get_state_dict(model)), synced)
            accelerator.save_model(model, f"{tmp_path}/{step}")
            assert equal_params(load_file(f"{tmp_path}/{step}/model.safetensors"), synced)
        assert equal_params(own, dict(inner.named_parameters()))
    assert apart > 2
