"""ZeRO with small messages in Trainer and Accelerate: losses, saved models, resumed runs, ways to ask for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.test_zero_accelerate import loop
from tests.support.harness import run_ranks
from tests.support.trainer_runs import Run, equal_params, make_trainer

INT4 = "grad_compression=int4,param_compression=int4"


def stored(folder: Path, kind: str) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """The parts of the tensors of a kind in a checkpoint, by parameter."""
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in folder.glob("compressopt-*.safetensors"):
        for key, value in load_file(file).items():
            name, _, start = key.partition("@")
            if name.startswith(f"{kind}/"):
                found.setdefault(name.removeprefix(f"{kind}/"), []).append((int(start or 0), value.flatten()))
    return found


def same_as(model: dict[str, torch.Tensor], parts: dict[str, list[tuple[int, torch.Tensor]]]) -> bool:
    flats = {name: model[name].flatten() for name in parts}
    return all(
        torch.equal(flats[name][start : start + value.numel()], value.to(flats[name].dtype))
        for name, rows in parts.items()
        for start, value in rows
    )


def train_and_look(rank: int, world_size: int, runs: list[Run]) -> list[dict[str, Any]]:
    results = []
    for run in runs:
        trainer = make_trainer(rank, world_size, run)
        torch.manual_seed(3)
        trainer.train(resume_from_checkpoint=run.resume)
        inner = trainer.optimizer.optimizer
        params = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        masters = [inner.get_full_param(p) for p in trainer.model.parameters()]
        results.append(
            {
                "alike": trainer.watch.alike,
                "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
                "params": params,
                "settled": all(map(torch.equal, params.values(), masters)),
                "described": inner.describe(),
                "metrics": inner.metrics(),
                "best": trainer.state.best_model_checkpoint,
                "skipped": [row["skipped"] for row in trainer.watch.rows],
            }
        )
    return results


def test_trainer(tmp_path: Path) -> None:
    here = {"max_steps": 8, "learning_rate": 3e-3, "gradient_accumulation_steps": 2, "output_dir": str(tmp_path / "0")}
    small = {**here, "optim": "zero2_adamw", "optim_args": INT4}
    runs = [
        Run({**here, "optim": "zero2_adamw"}, dropout=0.0),
        Run({**small, "save_strategy": "steps", "save_steps": 3, "output_dir": str(tmp_path)}, dropout=0.0),
        Run(small, dropout=0.0, resume=str(tmp_path / "checkpoint-3")),
    ]
    plain, whole, resumed = run_ranks(2, train_and_look, runs, timeout=240)[0]
    for result in (whole, resumed):
        assert all(result["alike"]) and result["settled"]
        assert result["described"].endswith(", gradients as int4, parameters as int4")
    assert whole["losses"] != plain["losses"]
    assert whole["losses"] == pytest.approx(plain["losses"], rel=0.01)
    assert equal_params(whole["params"], resumed["params"])
    assert 4.5 * whole["metrics"]["bytes_sent"] < plain["metrics"]["bytes_sent"]

    model = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    masters, replicas = (stored(tmp_path / "checkpoint-3", kind) for kind in ("master", "replica"))
    assert len(masters) == len(replicas) > 8 and same_as(model, masters) and not same_as(model, replicas)


@pytest.mark.full
def test_trainer_with_stage_1_a_scaler_and_the_best_model(tmp_path: Path) -> None:
    here = {"max_steps": 8, "gradient_accumulation_steps": 2, "output_dir": str(tmp_path)}
    optim_args = f"zero_stage=1,{INT4}"
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {**steps, "load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.3}
    runs = [
        Run({**here, "optim": "zero1_adamw"}, dropout=0.0),
        Run({**here, "optim": "zero1_adamw", "optim_args": INT4}, dropout=0.0),
        Run({**here, "optim": "sgd", "optim_args": optim_args, "max_grad_norm": 0.0}, scaler=True, overflow=(1, 3)),
        Run({**here, "optim": "zero2_adamw", "optim_args": INT4, **best}),
    ]
    plain, small, overflow, loaded = run_ranks(2, train_and_look, runs, timeout=240)[0]
    model = load_file(Path(loaded["best"]) / "model.safetensors")
    assert all(torch.equal(loaded["params"][name], value) for name, value in model.items())
    for result in (small, overflow, loaded):
        assert all(result["alike"]) and result["settled"]
    assert small["losses"] == pytest.approx(plain["losses"], rel=0.05)
    assert 4.5 * small["metrics"]["bytes_sent"] < plain["metrics"]["bytes_sent"]
    assert overflow["skipped"] == [False] * 3 + [True] + [False] * 4


def ask_by_variables(rank: int, world_size: int, *args: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSOPT_GRAD_COMPRESSION", "int8")
        patch.setenv("COMPRESSOPT_PARAM_COMPRESSION", "int4")
        return loop(rank, world_size, *args)


def test_accelerate(tmp_path: Path) -> None:
    plain = run_ranks(2, loop, "plugin2")[0]
    whole = run_ranks(2, ask_by_variables, "plugin2", str(tmp_path))[0]
    resumed = run_ranks(2, ask_by_variables, "plugin2", str(tmp_path), True)[0]
    assert equal_params(whole["params"], resumed["params"]) and not equal_params(plain["params"], whole["params"])
    for name, value in plain["params"].items():
        assert (
            float((whole["params"][name] - value).abs().mean()) < 0.005
        )  # of six steps of Adagrad with a rate of 0.01
    masters, replicas = (stored(tmp_path / "3", kind) for kind in ("master", "replica"))
    model = load_file(tmp_path / "3" / "model.safetensors")
    assert masters and same_as(model, masters) and not same_as(model, replicas)
    index = json.loads((tmp_path / "3" / "compressopt.index.json").read_text())
    assert {name.split("/")[0] for name in index["tensors"]} >= {"worker_error", "master", "replica"}
