"""grad_compression with FSDP2 through Accelerate and Trainer: 2 replicas of 2 shards, or 4 shards, on gloo ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_compressopt import CompressOptPlugin, OnebitAdam, attach
from tests.support.harness import on_ranks, run_ranks
from tests.support.trainer_runs import OLD_HOST, Run, make_trainer, small_model, tokens, use_accelerate

pytestmark = pytest.mark.skipif(OLD_HOST, reason="this accelerate has no ParallelismConfig")


def as_on_gpus(accelerator: Any, world_size: int, replicas: int, version: int = 2) -> None:
    """Give an accelerator the state that it has on GPUs: Accelerate itself offers FSDP on accelerators only."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    state, config = accelerator.state, ParallelismConfig(replicas, world_size // replicas)
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False)
    state.parallelism_config, state.device_mesh = config, config.get_device_mesh("cpu")


def accelerator_of(rank: int, world_size: int, replicas: int, version: int = 2, **options: Any) -> Any:
    use_accelerate(rank, world_size)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    as_on_gpus(accelerator, world_size, replicas, version)
    return attach(accelerator, CompressOptPlugin(**options))


def train(rank: int, world_size: int, folder: str, resumed: bool, replicas: int) -> dict[str, Any]:
    options = {} if replicas > 1 else {"param_compression": "int4"}
    accelerator = accelerator_of(rank, world_size, replicas, grad_compression="int4", **options)
    model = small_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = tokens()
    if resumed:
        accelerator.load_state(folder)
    losses = []
    for step in range(6 if resumed else 0, 12):
        mine = rows[(8 * step + 2 * rank) % 88 :][:2]
        batch = {key: torch.stack([row[key] for row in mine]) for key in mine[0]}
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        if step == 5 and not resumed:
            accelerator.save_state(folder)
    (state,) = accelerator._compressopt.models.compressions()
    weights = torch.cat([p.detach().to_local().reshape(-1) for p in model.parameters()])
    return {"weights": weights.numpy(), "losses": losses, "steps": state.steps, **state.metrics()}


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.full), 1])
def test_accelerate_compresses_and_resumes(replicas: int, tmp_path: Path) -> None:
    ranks = run_ranks(4, train, str(tmp_path), False, replicas, timeout=240)
    for rank in (0, 1) if replicas > 1 else ():
        assert ranks[rank]["weights"].tobytes() == ranks[rank + 2]["weights"].tobytes()
    assert all(result["steps"] == 6 and result["compression_ratio"] > 7 for result in ranks)
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0]
    for result, again in zip(ranks, run_ranks(4, train, str(tmp_path), True, replicas, timeout=240), strict=True):
        assert again["losses"] == result["losses"][6:]
        assert again["weights"].tobytes() == result["weights"].tobytes()
        assert again["steps"] == result["steps"]


@on_ranks(4, timeout=120)
def test_accelerate_refuses_by_name(rank: int, world_size: int) -> None:
    int4 = {"grad_compression": "int4"}
    rows: list[tuple[str, dict[str, Any], bool]] = [
        ("needs a mesh of 1 dimension", {"replicas": 2, "param_compression": "int4", **int4}, False),
        ("fsdp_version=2", {"replicas": 1, "version": 1, **int4}, False),
        ("node_bits=16", {"replicas": 2, "node_bits": 16, **int4}, False),
        ("ZeroOptimizer works with DistributedDataParallel", {"replicas": 2, "zero_stage": 2, **int4}, False),
        ("OnebitAdam works with DistributedDataParallel", {"replicas": 2, "optimizer": "none"}, True),
    ]
    for text, options, ours in rows:
        accelerator, model = accelerator_of(rank, world_size, **options), small_model()
        params = model.parameters()
        optimizer = OnebitAdam(params, freeze_step=2) if ours else torch.optim.AdamW(params)
        with pytest.raises(ValueError, match=text):
            accelerator.prepare(model, optimizer)


def train_with_trainer(
    rank: int, world_size: int, folder: str, resume: str | None, replicas: int, options: str
) -> dict[str, Any]:
    arguments = {"output_dir": folder, "optim_args": f"grad_compression=int4{options}", "bf16": replicas == 1}
    arguments |= {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(rank, world_size, Run(arguments, dropout=0.0))
    trainer.remove_callback(trainer.watch)
    as_on_gpus(trainer.accelerator, world_size, replicas)
    trainer.is_fsdp_enabled = True
    trainer.train(resume_from_checkpoint=resume)
    (state,) = trainer.accelerator._compressopt.models.compressions()
    weights = torch.cat([p.detach().to_local().reshape(-1) for p in trainer.model.parameters()])
    return {"weights": weights.numpy(), "history": trainer.state.log_history, "steps": state.steps}


@pytest.mark.full
@pytest.mark.parametrize(("replicas", "options"), [(2, ""), (1, ""), (1, ",param_compression=int4")])
def test_trainer_compresses_and_resumes(replicas: int, options: str, tmp_path: Path) -> None:
    how = replicas, options
    ranks = run_ranks(4, train_with_trainer, str(tmp_path), None, *how, timeout=240)
    again = run_ranks(4, train_with_trainer, str(tmp_path / "again"), str(tmp_path / "checkpoint-4"), *how, timeout=240)
    for rank, (result, other) in enumerate(zip(ranks, again, strict=True)):
        if replicas > 1:
            assert result["weights"].tobytes() == ranks[rank % 2]["weights"].tobytes()
        assert result["weights"].tobytes() == other["weights"].tobytes()
        assert result["steps"] == other["steps"] == 8
    last = [row for row in ranks[0]["history"] if "loss" in row][-1]
    assert last["compressopt/compression_ratio"] > 7
