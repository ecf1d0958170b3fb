"""Accelerate without Trainer: the plug-in, the accelerator class, and an accelerator that exists already."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, OnebitAdam, ZeroOneAdam, attach, register
from tests.support import trainer_runs as hosts
from tests.support.harness import on_ranks, run_ranks, run_ranks_expecting_error

STEPS, FREEZE = 8, 3


def make(how: str) -> tuple[Any, Any, Any, Any]:
    """accelerator, model, optimizer, scheduler, prepared; `how` says by which of the three ways."""
    from accelerate import Accelerator

    model, options = hosts.network(), {"cpu": True, "step_scheduler_with_optimizer": False}
    if how == "zero_one_adam":
        accelerator: Any = CompressOptAccelerator(**options)
        intervals = {"var_freeze_step": 3, "local_step_scaler": 1, "local_step_clipper": 4}
        optimizer: Any = ZeroOneAdam(model.parameters(), lr=1e-2, weight_decay=0.1, scale_block=64, **intervals)
    elif how in ("plugin", "async"):
        plugin = CompressOptPlugin(freeze_step=FREEZE, scale_block=64, async_save=how == "async")
        accelerator = CompressOptAccelerator(compressopt_plugin=plugin, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    else:
        accelerator = CompressOptAccelerator(**options) if how == "class" else attach(Accelerator(**options))
        optimizer = OnebitAdam(model.parameters(), lr=1e-2, weight_decay=0.1, freeze_step=FREEZE, scale_block=64)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if how == "attach":  # the order must not matter, nor whether all are given at once
        optimizer = accelerator.prepare(optimizer)
        return accelerator, accelerator.prepare(model), optimizer, accelerator.prepare(scheduler)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler))


def loop(
    rank: int,
    world_size: int,
    how: str,
    directory: str = "",
    save_at: int = 0,
    resume_at: int = 0,
    make: Callable[[str], tuple[Any, ...]] = make,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train with clipping, accumulation and a log; save and load in between."""
    hosts.use_accelerate(rank, world_size)
    accelerator, model, optimizer, scheduler = make(how)
    if resume_at:
        accelerator.load_state(f"{directory}/{resume_at}")
    alike, norms, logged = [], [], []
    accelerator.trackers = [Recorder(logged)]
    for step in range(resume_at, steps):
        for number in range(accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                loss = hosts.loss_of(model, rank, 10 * step + number)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step() if accelerator.sync_gradients else None
                optimizer.zero_grad()
        alike.append(hosts.same_on_all_ranks(model.parameters()))
        accelerator.log({"loss": loss.item()}, step=step)
        if save_at == step + 1:
            accelerator.save_state(f"{directory}/{save_at}")
            accelerator.wait_for_everyone()
    inner = optimizer.optimizer
    return {
        "params": hosts.params_of(accelerator, model),
        "alike": alike,
        "norms": norms,
        "logged": logged,
        "class": type(inner).__name__,
        "lr": inner.param_groups[0]["lr"],
        "wrapper": type(model).__name__,
        "messages": inner.traffic.bytes["all_to_all"] if hasattr(inner, "traffic") else 0,
    }


@on_ranks(2)
def test_parameters_whose_gradients_are_freed_have_the_models_names(rank: int, world_size: int) -> None:
    hosts.use_accelerate(rank, world_size)
    plugin = CompressOptPlugin(optimizer="onebit_adam", zero_stage=2, total_steps=10)
    accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=plugin)
    model = hosts.network()
    _, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    labels = optimizer.optimizer._states[0].labels
    assert labels == [name for name, _ in model.named_parameters()], labels


class Recorder:
    """A tracker, as accelerate calls it."""

    name = "recorder"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append({**values, "step": step})


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_three_ways_in_give_the_same_bits(world_size: int) -> None:
    results = {how: run_ranks(world_size, loop, how) for how in ("plugin", "class", "attach")}
    for result in results.values():
        assert result[0]["class"] == "OnebitAdam"
        assert result[0]["lr"] == pytest.approx(1e-2 / (1 + STEPS))
        for rank in result:
            assert rank["alike"] == [True] * STEPS and rank["norms"] == result[0]["norms"]
            assert hosts.equal_params(rank["params"], results["class"][0]["params"])
        stages = [row["compressopt/stage"] for row in result[0]["logged"]]
        assert stages == [0.0] * FREEZE + [1.0] * (STEPS - FREEZE)
        assert all("loss" in row for row in result[0]["logged"])
        assert result[0]["wrapper"] == "DistributedDataParallel" or world_size == 1


@pytest.mark.invariant(21)
@pytest.mark.parametrize(
    ("how", "step"),
    [
        *((how, step) for how in ("plugin", "attach", "async") for step in (2, FREEZE, 5)),
        *(("zero_one_adam", step) for step in (2, 5, 6, 7)),  # syncs at 4 and 8
    ],
)
def test_load_state_resumes_the_uninterrupted_run(how: str, step: int, tmp_path: Path) -> None:
    whole = run_ranks(2, loop, how, str(tmp_path), step)
    assert whole[0]["alike"] == ([True] * 4 + [False] * 3 + [True] if how == "zero_one_adam" else [True] * STEPS)
    resumed = run_ranks(2, loop, how, str(tmp_path), 0, step)
    for before, after in zip(whole, resumed, strict=True):
        assert hosts.equal_params(before["params"], after["params"])
        assert before["norms"][step:] == after["norms"] and before["lr"] == after["lr"]
    folder = tmp_path / str(step)
    assert (folder / "compressopt.index.json").is_file() and len(list(folder.glob("compressopt-*.safetensors"))) == 2
    assert torch.load(folder / "optimizer.bin", weights_only=True)["state"] == {}


@pytest.mark.parametrize("order", ["first", "last", "apart"])
@on_ranks(2)
def test_a_second_optimizer_of_another_kind_on_the_same_model_is_refused(
    rank: int, world_size: int, order: str
) -> None:
    hosts.use_accelerate(rank, world_size)
    model = hosts.network()
    onebit = OnebitAdam(list(model[0].parameters()), freeze_step=2)
    other = torch.optim.SGD(list(model[2].parameters()), lr=0.1)
    accelerator = CompressOptAccelerator(cpu=True)
    if order == "apart":
        accelerator.prepare(onebit)
        prepared = accelerator.prepare(model)
        assert prepared.module is model
    objects = {"first": (model, other, onebit), "last": (model, onebit, other), "apart": (other,)}[order]
    with pytest.raises(ValueError, match="non_freeze"):
        accelerator.prepare(*objects)


@on_ranks(2)
def test_a_model_goes_on_with_another_optimizer_and_averaged_gradients(rank: int, world_size: int) -> None:
    hosts.use_accelerate(rank, world_size)
    accelerator, inner = CompressOptAccelerator(cpu=True), hosts.network()
    model, optimizer = accelerator.prepare(inner, OnebitAdam(inner.parameters(), lr=1e-2, freeze_step=2))
    hosts.take_steps(accelerator, model, optimizer, rank, range(4))
    first = ref(accelerator.optimizers_inside()[0])
    accelerator.free_memory()
    del optimizer
    gc.collect()
    assert first() is None
    optimizer = accelerator.prepare(torch.optim.AdamW(inner.parameters(), lr=1e-2))
    hosts.take_steps(accelerator, model, optimizer, rank, range(4, 8))
    assert hosts.same_on_all_ranks(inner.parameters())


def test_a_stub_without_its_shards_is_refused(tmp_path: Path) -> None:
    run_ranks(2, loop, "class", str(tmp_path), 5)
    (tmp_path / "5" / "compressopt.index.json").unlink()
    errors = run_ranks_expecting_error(2, loop, "class", str(tmp_path), 0, 5)
    assert all("stub" in text and "compressopt.index.json" in text for text in errors.values()), errors


@on_ranks(2)
def test_a_state_that_replaced_one_in_shards_is_the_one_that_is_loaded(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    from accelerate import Accelerator

    register()

    def prepared(ours: bool) -> tuple[Any, Any, Any]:
        hosts.use_accelerate(rank, world_size)
        accelerator, model = Accelerator(cpu=True), hosts.network()
        own = OnebitAdam(model.parameters(), lr=1e-2) if ours else torch.optim.AdamW(model.parameters(), lr=1e-3)
        return accelerator, *accelerator.prepare(model, own)

    for ours in (True, False):
        accelerator, model, optimizer = prepared(ours)
        hosts.take_steps(accelerator, model, optimizer, rank, range(2))
        accelerator.save_state(str(tmp_path))
        accelerator.wait_for_everyone()
    accelerator, _, loaded = prepared(False)
    accelerator.load_state(str(tmp_path))
    kept, found = ([row["exp_avg"] for row in each.optimizer.state.values()] for each in (optimizer, loaded))
    assert found and all(map(torch.equal, kept, found)) and loaded.param_groups[0]["lr"] == 1e-3
    assert (tmp_path / "compressopt.index.json").exists()


def test_two_models_with_an_optimizer_each_train_clip_and_resume(tmp_path: Path) -> None:
    whole = run_ranks(2, two_models, str(tmp_path), 0)
    resumed = run_ranks(2, two_models, str(tmp_path), 4)
    for before, after in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before["params"], after["params"], strict=True))
        assert before["norms"][4:] == after["norms"]
    assert max(whole[0]["norms"]) < 100  # an SGD beside it is clipped with it, in both stages


def two_models(rank: int, world_size: int, directory: str, resume_at: int) -> dict[str, Any]:
    hosts.use_accelerate(rank, world_size)
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = CompressOptAccelerator(cpu=True, project_config=project)
    models = [hosts.network(), hosts.network(), hosts.network()]
    optimizers: list[Any] = [
        OnebitAdam(models[0].parameters(), lr=1e-2, freeze_step=2),
        OnebitAdam(models[1].parameters(), lr=1e-2, freeze_step=3, scale_block=None),
        torch.optim.SGD(models[2].parameters(), lr=0.1),
    ]
    prepared = accelerator.prepare(*models, *optimizers)
    models, optimizers, norms = prepared[:3], prepared[3:], []
    params = [p for model in models for p in model.parameters()]
    if resume_at:
        accelerator.load_state()
    for step in range(resume_at, 8):
        accelerator.backward(sum(hosts.loss_of(model, rank, step) for model in models))
        norms.append(float(accelerator.clip_grad_norm_(params, 0.3)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if not resume_at and step in (2, 3):
            accelerator.save_state()
            accelerator.wait_for_everyone()
    assert hosts.same_on_all_ranks(params)
    return {"params": [p.detach().clone() for p in params], "norms": norms}


@pytest.mark.parametrize("way", ["accelerate", "ddp"])
@on_ranks(2)
def test_a_comm_hook_of_the_users_own_is_refused_on_all(rank: int, world_size: int, way: str) -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    hosts.use_accelerate(rank, world_size)
    own = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = CompressOptAccelerator(cpu=True, kwargs_handlers=[own] if way == "accelerate" else [])
    model = hosts.network()
    optimizer = OnebitAdam(model.parameters(), freeze_step=2)
    with pytest.raises(ValueError, match="comm_hook"):
        prepared = accelerator.prepare(model)
        if way == "ddp":
            prepared.register_comm_hook(None, fp16_compress_hook)
        accelerator.prepare(optimizer)


@on_ranks(2)
def test_with_a_foreign_optimizer_it_is_accelerates_own(rank: int, world_size: int) -> None:
    from accelerate import Accelerator

    found = []
    for attached in (False, True):
        hosts.use_accelerate(rank, world_size)
        accelerator: Any = Accelerator(cpu=True)
        if attached:
            attach(accelerator)
        model = hosts.network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        hosts.take_steps(accelerator, model, optimizer, rank, range(4), clip=1.0)
        found.append(hosts.params_of(accelerator, model))
    assert hosts.equal_params(*found)


@on_ranks(2)
def test_uneven_inputs_are_refused_by_name_unless_gradients_alone_are_compressed(rank: int, world_size: int) -> None:
    for options, name in (
        ({"optimizer": "onebit_adam"}, "OnebitAdam"),
        ({"optimizer": "zero_one_adam"}, "ZeroOneAdam"),
        ({"optimizer": "onebit_adam", "zero_stage": 2}, "OnebitAdam"),
        ({"optimizer": "none", "zero_stage": 1}, "ZeroOptimizer"),
        ({"grad_compression": "int4"}, ""),
    ):
        hosts.use_accelerate(rank, world_size)
        accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=CompressOptPlugin(**options))
        model = hosts.network()
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        said = f"^{name} does not support uneven inputs.*Accelerate's join_uneven_inputs.*drop_last=True"
        with pytest.raises(ValueError, match=said) if name else nullcontext():
            with accelerator.join_uneven_inputs([model], even_batches=False):
                pass
