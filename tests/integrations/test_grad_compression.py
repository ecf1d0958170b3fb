"""`grad_compression=int4` in Trainer and Accelerate: any optimizer, in everything that the hosts do with gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.harness import run_ranks
from tests.support.spreading import short
from tests.support.trainer_runs import (
    VARIANTS,
    Run,
    equal_params,
    loads_optimizer_pt,
    losses,
    same_on_all_ranks,
    train,
    use_accelerate,
)

#: Of VARIANTS; the second ones are for the long tests.
SHORT = ("plain", "accumulation", "gradient_checkpointing", "find_unused_parameters", "scaler")
EACH = (*SHORT, "clipping", "bf16_autocast", "evaluate_before_train", "partly_frozen")
OPTIMIZERS = ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "fused_adam", "lamb"]


def run(arguments: dict[str, Any], tmp_path: Path, world_size: int = 2, **more: Any) -> list[dict[str, Any]]:
    return run_ranks(world_size, train, Run({"output_dir": str(tmp_path), **arguments}, **more), timeout=240)


@pytest.mark.parametrize("name", short(EACH, SHORT))
def test_trainer_trains_as_without_compression(name: str, tmp_path: Path) -> None:
    arguments, more = VARIANTS[name]
    arguments = {"optim": "adamw_torch", "adam_epsilon": 1e-5, **arguments}
    plain = run(arguments, tmp_path, **more)[0]
    int4 = run({**arguments, "optim_args": "grad_compression=int4"}, tmp_path, **more)[0]
    assert int4["optimizer"] == "AdamW" and all(int4["alike"]) and len(int4["alike"]) == 8
    assert losses(int4)[0] == losses(plain)[0]
    assert losses(int4) != losses(plain)
    assert losses(int4) == pytest.approx(losses(plain), abs=0.06)
    logged = [row for row in int4["history"] if "loss" in row][-1]
    assert 7.0 < logged["compressopt/compression_ratio"] < 7.8
    assert logged["compressopt/bytes_sent"] > 7 * logged["compressopt/bytes_sent_step"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_compressed_gradients(optimizer: str, tmp_path: Path) -> None:
    arguments = {"optim": optimizer, "max_steps": 4, "optim_args": "grad_compression=int8"}
    ranks = run(arguments, tmp_path, world_size=3)
    for result in ranks:
        assert all(result["alike"])
        assert result["history"][-2]["compressopt/compression_ratio"] > 3.5


def test_the_environment_asks_for_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_ranks(2, train_with_variable, str(tmp_path), timeout=240)[0]
    assert result["history"][-2]["compressopt/compression_ratio"] > 7


def train_with_variable(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSOPT_GRAD_COMPRESSION", "int4")
        return train(rank, world_size, Run({"output_dir": directory, "optim": "adamw_torch", "max_steps": 2}))


def test_an_overflow_is_skipped_by_all_and_changes_no_error(tmp_path: Path) -> None:
    arguments = {"optim": "adamw_torch", "optim_args": "grad_compression=int4", "max_grad_norm": 0.0}
    ranks = run(arguments, tmp_path, scaler=True, overflow=(1, 3))
    assert all(all(result["alike"]) for result in ranks)
    norms = [row["norm"] for row in ranks[0]["rows"]]
    assert norms[3] == norms[2] and norms[4] != norms[3]  # the step with the overflow changes no parameter


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


# -- Accelerate -------------------------------------------------------------------------------------------------------


def loop(rank: int, world_size: int, optimizer: str, accumulate: int) -> dict[str, Any]:
    use_accelerate(rank, world_size)
    from accelerate import DistributedDataParallelKwargs

    from hf_compressopt import CompressOptAccelerator, CompressOptPlugin

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 133), nn.ReLU(), nn.Linear(133, 7))
    accelerator = CompressOptAccelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        compressopt_plugin=CompressOptPlugin(
            grad_compression="int4", bucket_cap_mb=0.002 if optimizer == "SGD" else None
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)],
    )
    stepper: Any = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    model, stepper = accelerator.prepare(model, stepper)
    alike, logged = [], []
    for step in range(6 * accumulate):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(
                model(torch.randn(16, 10, generator=generator)), torch.randn(16, 7, generator=generator)
            )
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            stepper.step()
            stepper.zero_grad()
        alike.append(same_on_all_ranks(model.parameters()))
        logged.append(loss.item())
    (state,) = accelerator._compressopt.models.compressions()
    found = {"bucket_numel": state.layout.bucket_numel, "metrics": state.metrics()}
    return {"class": type(stepper.optimizer).__name__, "alike": alike, **found}


@pytest.mark.parametrize(("optimizer", "accumulate"), [("AdamW", 1), ("SGD", 2)])
def test_accelerate_compresses_for_any_optimizer(optimizer: str, accumulate: int) -> None:
    for result in run_ranks(2, loop, optimizer, accumulate, timeout=120):
        assert result["class"] == optimizer and all(result["alike"])
        assert result["metrics"]["compression_ratio"] > 7
        assert result["metrics"]["bytes_sent"] == 6 * result["metrics"]["bytes_sent_step"]
        cap = 0.002 if optimizer == "SGD" else 1  # else that of DDP
        assert result["bucket_numel"] == int(cap * 2**20 / 4)


# -- DDP's buckets ----------------------------------------------------------------------------------------------------


def in_buckets(rank: int, world_size: int) -> dict[str, tuple[bool, bool, bool]]:
    """Prepare by each plug-in: whether DDP has the option, whether the user's options stay, whether p.grad is there."""
    use_accelerate(rank, world_size)
    from accelerate import DistributedDataParallelKwargs

    from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, OnebitAdam

    plugins: dict[str, Any] = {
        "onebit_adam": CompressOptPlugin(optimizer="onebit_adam", freeze_step=1),
        "int4": CompressOptPlugin(grad_compression="int4"),
        "off": CompressOptPlugin(grad_compression="int4", gradient_as_bucket_view=False),
        "handed over": None,
        "ordinary": None,
    }
    found = {}
    for name, plugin in plugins.items():
        given = DistributedDataParallelKwargs(broadcast_buffers=False)
        accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=plugin, kwargs_handlers=[given])
        model = nn.Linear(8, 8)
        optimizer = OnebitAdam(model.parameters()) if name == "handed over" else torch.optim.AdamW(model.parameters())
        ddp, prepared = accelerator.prepare(model, optimizer)
        for _ in range(3):
            prepared.zero_grad()
            accelerator.backward(ddp(torch.ones(2, 8)).sum())
            prepared.step()
        grads = [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]
        kept = not ddp.broadcast_buffers and not given.gradient_as_bucket_view and accelerator.ddp_handler is given
        found[name] = ddp.gradient_as_bucket_view, kept, len(set(grads)) == 1
    return found


def test_gradients_that_travel_compressed_lie_in_ddps_buckets() -> None:
    expected = {
        "onebit_adam": (True, True, True),
        "int4": (True, True, True),
        "off": (False, True, False),
        "handed over": (True, True, True),
        "ordinary": (False, True, False),
    }
    assert run_ranks(2, in_buckets, timeout=120) == [expected] * 2
