"""ZeroOptimizer, with and without compressed messages, and OnebitAdam under ZeRO, in Trainer and Accelerate."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, OnebitAdam, ZeroOptimizer, attach, register
from hf_compressopt.amp import innermost
from tests.checkpoint.test_resharding import stored
from tests.integrations.test_accelerate import loop as accelerate_loop
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.trainer_runs import (
    Run,
    equal_params,
    loads_optimizer_pt,
    logged,
    loss_of,
    losses,
    make_trainer,
    network,
    train_all,
    trainer_arguments,
    use_accelerate,
)

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
    save_at, resume_at = 3 * bool(directory and not resume), 3 * resume
    found = accelerate_loop(rank, world_size, how, directory, save_at, resume_at, make, STEPS)
    assert all(found["alike"])
    return found


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
def test_gradients_of_another_optimizer_are_clipped_with_those_of_zero(rank: int, world_size: int) -> None:
    """By the norm of all of them, as Accelerate clips them."""
    found = []
    for partitioned in (False, True):
        use_accelerate(rank, world_size)
        accelerator, first, second = CompressOptAccelerator(cpu=True), network(), network()
        own: Any = torch.optim.SGD(first.parameters(), lr=0.1)
        if partitioned:
            own = ZeroOptimizer(first.parameters(), torch.optim.SGD, lr=0.1, stage=1)
        models = accelerator.prepare(first, own)[0], accelerator.prepare(second)
        optimizers = own, accelerator.prepare(torch.optim.SGD(second.parameters(), lr=0.1))
        params, norms = [*first.parameters(), *second.parameters()], []
        for step in range(2):
            loss = loss_of(models[0], rank, step) + 100 * loss_of(models[1], rank, step)
            accelerator.backward(loss)
            norms.append(float(accelerator.clip_grad_norm_(params, 0.5)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append((norms, [p.detach().clone() for p in params]))
    (plain_norms, plain), (norms, params) = found
    assert norms == pytest.approx(plain_norms, rel=1e-5) and same_on_all_ranks(params)
    for p, q in zip(plain, params, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@on_ranks(2)
def test_a_loss_scale_of_zero_beside_another_optimizer_is_refused(rank: int, world_size: int) -> None:
    use_accelerate(rank, world_size)
    accelerator, first, second = CompressOptAccelerator(cpu=True), network(), network()
    model, _ = accelerator.prepare(first, ZeroOptimizer(first.parameters(), torch.optim.SGD, lr=0.1, loss_scale=8.0))
    other, _ = accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="loss_scale of 8.0 scales the gradients of SGD too"):
        accelerator.backward(loss_of(model, rank, 0) + loss_of(other, rank, 0))


def train_again(rank: int, world_size: int, optim: str, text: str) -> tuple[list[float], list[float]]:
    """The losses of a training, and of one that follows a training which was interrupted in its first step."""
    found = []
    for interrupted in (False, True):
        arguments = {"optim": optim, "optim_args": text, "gradient_accumulation_steps": 2, "max_steps": 3}
        trainer = make_trainer(rank, world_size, Run({**arguments, "max_grad_norm": 0.0}, dropout=0.0))
        if interrupted:
            step = trainer.training_step

            def training_step(*args: Any, step: Any = step, **kwargs: Any) -> Any:
                step(*args, **kwargs)
                raise KeyError("stop")

            trainer.training_step = training_step
            trainer.args.gradient_accumulation_steps = 2 if optim == "zero2_adamw" else 1
            with pytest.raises(KeyError, match="stop"):
                trainer.train()
            trainer.training_step, trainer.args.gradient_accumulation_steps = step, 2
        trainer.train()
        found.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    return found[0], found[1]


@pytest.mark.parametrize(("optim", "text"), [("zero2_adamw", ""), ("onebit_adam", "zero_stage=2")])
def test_gradients_of_an_interrupted_training_are_not_those_of_the_next(optim: str, text: str) -> None:
    for whole, again in run_ranks(2, train_again, optim, text, timeout=120):
        assert len(whole) == 3 and whole == again


@on_ranks(2)
def test_what_cannot_be_had_is_refused(rank: int, world_size: int) -> None:
    def model_first(model: nn.Module, accelerator: Any) -> list[Any]:
        return [accelerator.prepare(model), ZeroOptimizer(model.parameters(), torch.optim.AdamW)]

    for plugin, objects, message in (
        (None, model_first, "give both to one prepare"),
        (2, lambda model, _: [torch.optim.LBFGS(model.parameters())], "LBFGS cannot be partitioned"),
    ):
        use_accelerate(rank, world_size)
        own = CompressOptPlugin(zero_stage=plugin) if plugin else None
        accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=own)
        with pytest.raises(ValueError, match=message):
            accelerator.prepare(*objects(network(), accelerator))


def test_zero_stage_in_optim_args_wraps_element_wise_optimizers_and_lamb(tmp_path: Path) -> None:
    names = ["sgd", "adagrad", "rmsprop", "adamw_torch_fused", "fused_adam", "lamb"]
    here = {"output_dir": str(tmp_path), "max_steps": 3, "learning_rate": 1e-3, "adam_epsilon": 1e-5}
    runs = [
        Run({**here, "optim": name, **extra})
        for name in names
        for extra in ({}, {"optim_args": "zero_stage=2, bucket_cap_mb=0.1"})
    ]
    results = run_ranks(2, train_all, *runs, timeout=240)[0]
    for plain, partitioned in zip(results[::2], results[1::2], strict=True):
        assert partitioned["optimizer"] == "ZeroOptimizer"
        assert losses(plain) == pytest.approx(losses(partitioned), abs=5e-7)
        assert all(torch.allclose(v, partitioned["params"][k], atol=1e-6) for k, v in plain["params"].items())


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


INT4 = "grad_compression=int4,param_compression=int4"


def kept(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a kind in a checkpoint, by parameter."""
    return {name.partition("/")[2]: value for name, value in stored(folder).items() if name.startswith(f"{kind}/")}


def same_as(model: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(model[name], value.to(model[name].dtype)) for name, value in tensors.items())


def test_trainer_with_small_messages(tmp_path: Path) -> None:
    here = {"max_steps": 8, "learning_rate": 3e-3, "gradient_accumulation_steps": 2, "output_dir": str(tmp_path / "0")}
    small = {**here, "optim": "zero2_adamw", "optim_args": INT4}
    runs = [
        Run({**here, "optim": "zero2_adamw"}, dropout=0.0),
        Run({**small, "save_strategy": "steps", "save_steps": 3, "output_dir": str(tmp_path)}, dropout=0.0),
        Run(small, dropout=0.0, resume=str(tmp_path / "checkpoint-3")),
    ]
    plain, whole, resumed = run_ranks(2, train_all, *runs, timeout=240)[0]
    for result in (whole, resumed):
        assert all(result["alike"]) and result["settled"]
        assert result["described"].endswith(", gradients as int4, parameters as int4")
    assert losses(whole) != losses(plain)
    assert losses(whole) == pytest.approx(losses(plain), rel=0.01)
    assert equal_params(whole["params"], resumed["params"])
    assert 4.5 * whole["metrics"]["bytes_sent"] < plain["metrics"]["bytes_sent"]

    model = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    masters, replicas = (kept(tmp_path / "checkpoint-3", kind) for kind in ("master", "replica"))
    assert len(masters) == len(replicas) > 8 and same_as(model, masters) and not same_as(model, replicas)


@pytest.mark.full
def test_trainer_with_small_messages_a_scaler_and_the_best_model(tmp_path: Path) -> None:
    here = {"max_steps": 8, "gradient_accumulation_steps": 2, "output_dir": str(tmp_path)}
    optim_args = f"zero_stage=1,{INT4}"
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {**steps, "load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.3}
    runs = [
        Run({**here, "optim": "sgd", "optim_args": optim_args, "max_grad_norm": 0.0}, scaler=True, overflow=(1, 3)),
        Run({**here, "optim": "zero2_adamw", "optim_args": INT4, **best}),
    ]
    overflow, loaded = run_ranks(2, train_all, *runs, timeout=240)[0]
    model = load_file(Path(loaded["best"]) / "model.safetensors")
    assert all(torch.equal(loaded["params"][name], value) for name, value in model.items())
    for result in (overflow, loaded):
        assert all(result["alike"]) and result["settled"]
    assert [row["skipped"] for row in overflow["rows"]] == [False] * 3 + [True] + [False] * 4


def ask_by_variables(rank: int, world_size: int, *args: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSOPT_GRAD_COMPRESSION", "int8")
        patch.setenv("COMPRESSOPT_PARAM_COMPRESSION", "int4")
        return loop(rank, world_size, *args)


def test_accelerate_with_small_messages(tmp_path: Path) -> None:
    plain = run_ranks(2, loop, "plugin2")[0]
    whole = run_ranks(2, ask_by_variables, "plugin2", str(tmp_path))[0]
    resumed = run_ranks(2, ask_by_variables, "plugin2", str(tmp_path), True)[0]
    assert equal_params(whole["params"], resumed["params"]) and not equal_params(plain["params"], whole["params"])
    for name, value in plain["params"].items():
        assert (
            float((whole["params"][name] - value).abs().mean()) < 0.005
        )  # of six steps of Adagrad with a rate of 0.01
    masters, replicas = (kept(tmp_path / "3", kind) for kind in ("master", "replica"))
    model = load_file(tmp_path / "3" / "model.safetensors")
    assert masters and same_as(model, masters) and not same_as(model, replicas)
    index = json.loads((tmp_path / "3" / "compressopt.index.json").read_text())
    assert {name.split("/")[0] for name in index["tensors"]} >= {"worker_error", "master", "replica"}


class Centred(nn.Module):
    """A model whose forward reads what forward before it has written: statistics, and a centre that moves."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) + x[:, :4]  # the ranks' inputs are apart
        with torch.no_grad():
            self.centre += 0.1 * (y.mean(0) - self.centre)
            self.calls += 1
        return (y - self.centre).square().mean()


def train_centred(rank: int, how: str, *, resume: str = "", save: str = "", broadcast: bool = True) -> list[Any]:
    """Train by Accelerate over 8 micro-batches, two a step. Returns the model's state dict, and this rank's buffers."""
    from accelerate.utils import DistributedDataParallelKwargs

    use_accelerate(rank, 2)
    stage = 2 if how.endswith("zero") else 0
    options = {"optimizer": "onebit_adam", "freeze_step": 2} if how.startswith("onebit") else {"optimizer": "none"}
    accelerator = CompressOptAccelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        compressopt_plugin=CompressOptPlugin(zero_stage=stage, **options),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=broadcast)],
    )
    made = Centred()
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
    assert (model is made) == bool(stage)
    if resume:
        accelerator.load_state(resume)
    for step in range(4 if resume else 0, 8):
        generator = torch.Generator().manual_seed(10 * step + rank)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(5, 8, generator=generator) + 3 * rank))
            optimizer.step()
            optimizer.zero_grad()
        if save and step == 3:
            accelerator.save_state(save)
    copied = copy.deepcopy(made)
    if rank == 0:  # alone: a model in evaluation, and a copy in training
        made.eval()(torch.ones(2, 8))
        copied(torch.ones(2, 8))
    made.train()
    accelerator.free_memory()
    if rank == 0:
        made(torch.ones(2, 8))
    return [[p.detach().clone() for p in made.parameters()], [b.clone() for b in made.buffers()]]


@pytest.mark.parametrize("how", ["adamw", "onebit"])
@on_ranks(2)
def test_buffers_are_those_of_rank_0_as_with_ddp(rank: int, world_size: int, how: str, tmp_path: Path) -> None:
    zero = f"{how}_zero"
    whole = train_centred(rank, zero, save=str(tmp_path))
    resumed = train_centred(rank, zero, resume=str(tmp_path))
    assert all(map(torch.equal, whole[0] + whole[1], resumed[0] + resumed[1]))
    local = train_centred(rank, zero, broadcast=False)
    assert not all(map(torch.equal, whole[0], local[0]))
    if how == "adamw":
        for broadcast in (True, False):
            found, expected = (train_centred(rank, name, broadcast=broadcast) for name in (zero, how))
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


class CentredForTrainer(Centred):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x), "logits": labels}


def train_centred_by_trainer(rank: int, optim: str, optim_args: str = "", **given: Any) -> list[torch.Tensor]:
    """Train, with evaluations between the steps. Returns the parameters, and this rank's buffers."""
    from transformers import Trainer

    use_accelerate(rank, 2)
    register()
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(96, 8, generator=generator) + 3 * (torch.arange(96) % 2)[:, None]
    data = [{"x": row, "labels": row[:1]} for row in rows]
    more = {"max_steps": 6, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 4}
    more["per_device_train_batch_size"] = 8
    arguments = trainer_arguments(
        output_dir="unused", learning_rate=1e-2, optim=optim, optim_args=optim_args, **more, **given
    )
    trainer = Trainer(CentredForTrainer(), arguments, train_dataset=data, eval_dataset=data[:12])
    trainer.train()
    return [tensor.detach().clone() for tensor in (*trainer.model.parameters(), *trainer.model.buffers())]


@on_ranks(2)
def test_a_model_with_statistics_trains_by_trainer_as_without_this_package(rank: int, world_size: int) -> None:
    """DistributedDataParallel shares rank 0's buffers before each forward, or not; so does what takes its place."""
    for broadcast in (True, False):
        options = {"ddp_broadcast_buffers": broadcast}
        expected = train_centred_by_trainer(rank, "adamw_torch", **options)
        assert len(expected) == 10 and same_on_all_ranks(expected[:5]) and not same_on_all_ranks(expected[5:])
        found = {
            "warmup": train_centred_by_trainer(rank, "onebit_adam", "warmup_bits=32,freeze_step=100", **options),
            "ZeRO-1": train_centred_by_trainer(rank, "zero1_adamw", **options),
            "ZeRO-2": train_centred_by_trainer(rank, "zero2_adamw", **options),
        }
        # ZeRO evaluates by rank 0's buffers on all ranks, and so at the end: they are the ones that are saved
        count = len(expected) if rank == 0 or not broadcast else 5
        for name, tensors in found.items():
            torch.testing.assert_close(
                tensors[:count], expected[:count], rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
