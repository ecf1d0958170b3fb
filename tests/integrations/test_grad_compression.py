"""`grad_compression=int4` in Trainer and Accelerate: any optimizer, in everything that the hosts do with gradients."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, OnebitAdam
from tests.support.harness import on_ranks, run_ranks
from tests.support.trainer_runs import (
    Run,
    equal_params,
    loads_optimizer_pt,
    same_on_all_ranks,
    take_steps,
    train,
    use_accelerate,
)

OPTIMIZERS = ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "fused_adam", "lamb"]


def run(arguments: dict[str, Any], tmp_path: Path, world_size: int = 2, **more: Any) -> list[dict[str, Any]]:
    return run_ranks(world_size, train, Run({"output_dir": str(tmp_path), **arguments}, **more), timeout=240)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_compressed_gradients(optimizer: str, tmp_path: Path) -> None:
    arguments = {"optim": optimizer, "max_steps": 4, "optim_args": "grad_compression=int8"}
    ranks = run(arguments, tmp_path, world_size=3)
    for result in ranks:
        assert all(result["alike"])
        assert result["history"][-2]["compressopt/compression_ratio"] > 3.3


@on_ranks(2, timeout=240)
def test_the_environment_asks_for_it_too(rank: int, world_size: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSOPT_GRAD_COMPRESSION", "int4")
        run = Run({"output_dir": str(tmp_path), "optim": "adamw_torch", "max_steps": 2})
        result = train(rank, world_size, run)
    assert rank or result["history"][-2]["compressopt/compression_ratio"] > 5.5


@pytest.mark.invariant(21)
@loads_optimizer_pt
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path: Path) -> None:
    arguments = {"optim": "adamw_torch", "optim_args": "grad_compression=int4", "save_strategy": "steps"}
    whole = run({**arguments, "save_steps": 3, "gradient_accumulation_steps": 2}, tmp_path)
    checkpoint = tmp_path / "checkpoint-3"
    assert (checkpoint / "compressopt_gradients.index.json").is_file() and (checkpoint / "optimizer.pt").is_file()
    again = run({**arguments, "save_steps": 99, "gradient_accumulation_steps": 2}, tmp_path, resume=str(checkpoint))
    for mine, theirs in zip(again, whole, strict=True):
        assert equal_params(mine["params"], theirs["params"])
    three = run({**arguments, "save_steps": 99}, tmp_path, world_size=3, resume=str(checkpoint))
    assert all(all(result["alike"]) for result in three)


def test_a_checkpoint_that_replaces_another_keeps_none_of_its_errors(tmp_path: Path) -> None:
    arguments = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    for options, kept in (("grad_compression=int4", True), (None, False)):
        run({**arguments, "optim_args": options}, tmp_path)
        assert any((tmp_path / "checkpoint-2").glob("compressopt*")) == kept
        for file in (tmp_path / "checkpoint-2").glob("compressopt*"):  # those of a third model, without a second
            shutil.copy(file, file.with_name(file.name.replace("_gradients", "_2_gradients")))


@loads_optimizer_pt
def test_errors_that_a_run_without_this_package_has_left_are_not_loaded(tmp_path: Path) -> None:
    """It knows nothing of the files in the folder into which it saves."""
    arguments = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, "max_steps": 2, "logging_steps": 1}
    checkpoint, beside = tmp_path / "checkpoint-2", tmp_path / "beside"
    beside.mkdir()
    run({**arguments, "optim_args": "grad_compression=int4"}, tmp_path)
    for file in checkpoint.glob("compressopt*"):
        shutil.copy(file, beside)
    run(arguments, tmp_path)
    again = {**arguments, "optim_args": "grad_compression=int4", "save_strategy": "no", "max_steps": 4}
    without = run(again, tmp_path, resume=str(checkpoint))
    for file in beside.iterdir():
        shutil.copy(file, checkpoint)
    with_old_errors = run(again, tmp_path, resume=str(checkpoint))
    for mine, theirs in zip(with_old_errors, without, strict=True):
        assert equal_params(mine["params"], theirs["params"])


@pytest.mark.parametrize(("optimizer", "accumulate"), [("AdamW", 1), ("SGD", 2)])
@on_ranks(2, timeout=120)
def test_accelerate_compresses_for_any_optimizer(rank: int, world_size: int, optimizer: str, accumulate: int) -> None:
    use_accelerate(rank, world_size)
    from accelerate import DistributedDataParallelKwargs

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 133), nn.ReLU(), nn.Linear(133, 7))
    cap = {"bucket_cap_mb": 0.002} if optimizer == "SGD" else {}  # else that of DDP
    accelerator = CompressOptAccelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        compressopt_plugin=CompressOptPlugin(grad_compression="int4", **cap),
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)],
    )
    stepper: Any = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    model, stepper = accelerator.prepare(model, stepper)
    for step in range(6 * accumulate):
        with accelerator.accumulate(model):
            take_steps(accelerator, model, stepper, rank, [step], clip=1.0)
        assert same_on_all_ranks(model.parameters())
    (state,) = accelerator._compressopt.models.compressions()
    metrics = state.metrics()
    assert type(stepper.optimizer).__name__ == optimizer and metrics["compression_ratio"] > 5
    assert metrics["bytes_sent"] == 6 * metrics["bytes_sent_step"]
    assert state.layout.bucket_numel == int(cap.get("bucket_cap_mb", 1) * 2**20 / 4)


@on_ranks(2, timeout=120)
def test_a_checkpoint_without_errors_sets_them_to_zero(rank: int, world_size: int, tmp_path: Path) -> None:
    use_accelerate(rank, world_size)
    model: Any = nn.Linear(100, 100)
    accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=CompressOptPlugin(grad_compression="int4"))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path))
    accelerator.wait_for_everyone()
    if rank == 0:
        for file in tmp_path.glob("compressopt*"):
            file.unlink()
    accelerator.wait_for_everyone()
    accelerator.backward(model(torch.randn(4, 100)).square().sum())
    optimizer.step()
    (state,) = accelerator._compressopt.models.compressions()
    assert state.worker_error.any()
    accelerator.load_state(str(tmp_path))
    assert not state.worker_error.any() and not state.server_error.any()


@on_ranks(2, timeout=120)
def test_gradients_that_travel_compressed_lie_in_ddps_buckets(rank: int, world_size: int) -> None:
    """By each plug-in: whether DDP has the option, whether the user's options stay, whether p.grad is there."""
    use_accelerate(rank, world_size)
    from accelerate import DistributedDataParallelKwargs

    plugins: dict[str, tuple[Any, bool]] = {
        "onebit_adam": (CompressOptPlugin(optimizer="onebit_adam", freeze_step=1), True),
        "int4": (CompressOptPlugin(grad_compression="int4"), True),
        "off": (CompressOptPlugin(grad_compression="int4", gradient_as_bucket_view=False), False),
        "handed over": (None, True),
        "ordinary": (None, False),
    }
    for name, (plugin, views) in plugins.items():
        given = DistributedDataParallelKwargs(broadcast_buffers=False)
        accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=plugin, kwargs_handlers=[given])
        model = nn.Linear(8, 8)
        optimizer = OnebitAdam(model.parameters()) if name == "handed over" else torch.optim.AdamW(model.parameters())
        ddp, prepared = accelerator.prepare(model, optimizer)
        for _ in range(3):
            prepared.zero_grad()
            accelerator.backward(ddp(torch.ones(2, 8)).sum())
            prepared.step()
        grads = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
        assert not ddp.broadcast_buffers and not given.gradient_as_bucket_view, name
        assert accelerator.ddp_handler is given, name
        assert ddp.gradient_as_bucket_view == (len(grads) == 1) == views, name
