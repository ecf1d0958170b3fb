"""The length of the run reaches the schedule, and the log says once what is compressed, or that nothing is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import (
    CompressOptAccelerator,
    CompressOptPlugin,
    GradientCompression,
    OnebitAdam,
    ZeroOneAdam,
    ZeroOptimizer,
    attach_ddp,
    average_gradients,
    compress_hook,
)
from hf_compressopt.integrations.log import fit
from hf_compressopt.schedules import ZeroOneSchedule
from tests.support.harness import on_ranks, run_ranks
from tests.support.logs import log_lines
from tests.support.trainer_runs import Run, loss_of, make_trainer, network, take_steps, use_accelerate


def plug_in(
    rank: int, world_size: int, options: dict[str, Any], steps: int, scheduler: str, cls: str
) -> dict[str, Any]:
    use_accelerate(rank, world_size)
    from transformers import get_linear_schedule_with_warmup

    plugin, each = CompressOptPlugin(**options), scheduler != "manual"
    accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=plugin, step_scheduler_with_optimizer=each)
    model, kinds = network(), {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Own": OwnStep}
    optimizer: Any = kinds[cls](model.parameters(), lr=0.1)
    prepared = [model, optimizer]
    if scheduler == "onecycle":
        total = steps * world_size
        prepared.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total, cycle_momentum=False))
    elif scheduler == "silent":  # one that does not tell a length
        prepared.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    elif scheduler != "none":  # Accelerate takes num_processes steps of a scheduler in each
        count = steps if scheduler == "manual" else steps * world_size
        prepared.append(get_linear_schedule_with_warmup(optimizer, 0, count))
    with log_lines() as lines:
        model, wrapped = accelerator.prepare(*prepared)[:2]
        inner = wrapped.optimizer
        if cls == "AdamW":
            accelerator.backward(loss_of(model, rank, 0))
            wrapped.step()
    schedule = getattr(inner, "schedule", None)
    fitted = [getattr(schedule, name, None) for name in ("freeze_step", "max_freeze_step", "local_step_scaler")]
    return {"class": type(inner).__name__, "fitted": fitted, "lines": lines}


class OwnStep(torch.optim.AdamW):
    """A subclass of AdamW that steps in a way of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("scheduler", ["auto", "manual", "onecycle", "total_steps"])
def test_the_plugin_fits_the_schedule_to_the_run(scheduler: str, world_size: int) -> None:
    options, kind = ({"total_steps": 50}, "none") if scheduler == "total_steps" else ({}, scheduler)
    for found in run_ranks(world_size, plug_in, {**options, "warmup_bits": 32}, 50, kind, "AdamW"):
        assert found["fitted"][:2] == ["auto", 10]  # 20 % of the run


@pytest.mark.parametrize("scheduler", ["auto", "total_steps"])
def test_a_freeze_step_that_is_given_leaves_the_intervals_to_the_run(scheduler: str) -> None:
    options = {"optimizer": "zero_one_adam", "freeze_step": 8}
    options, kind = ({**options, "total_steps": 40}, "none") if scheduler == "total_steps" else (options, scheduler)
    for found in run_ranks(2, plug_in, options, 40, kind, "AdamW"):
        assert found["fitted"] == [8, ZeroOneSchedule().max_freeze_step, 4]
    made = ZeroOneAdam([torch.nn.Parameter(torch.ones(9))], freeze_step=8)  # given to Trainer, or to prepare
    fit(made, 40)
    assert made.schedule.local_step_scaler == 4 and made.freeze_step == 8
    own = ZeroOneAdam([torch.nn.Parameter(torch.ones(9))], freeze_step=8, local_step_scaler=7)
    fit(own, 40)
    assert own.schedule.local_step_scaler == 7


def test_the_plugins_default_is_auto_and_says_when_it_knows_no_length() -> None:
    for scheduler in ("none", "silent"):
        found = run_ranks(2, plug_in, {}, 50, scheduler, "AdamW")
        assert found[0]["fitted"][0] == "auto" and any("not know the length" in line for line in found[0]["lines"])
    assert not any("not know the length" in line for line in run_ranks(2, plug_in, {}, 50, "auto", "AdamW")[0]["lines"])


@pytest.mark.parametrize("cls", ["SGD", "Own"])
def test_what_the_plugin_leaves_alone_is_said_once(cls: str) -> None:
    found = run_ranks(2, plug_in, {"freeze_step": 3}, 50, "none", cls)
    assert [rank["class"] for rank in found] == [{"Own": "OwnStep"}.get(cls, cls)] * 2
    assert [sum("stays as it is" in line for line in rank["lines"]) for rank in found] == [1, 0]


def trainer_run(rank: int, world_size: int, directory: str, arguments: dict[str, Any], fails: int) -> dict[str, Any]:
    """A run, of which so many sizes of batches fail for want of memory."""
    sizes: set[int] = set()

    def training_step(*args: Any, **kwargs: Any) -> Any:
        sizes.add(trainer._train_batch_size)
        if len(sizes) <= fails:
            raise RuntimeError("CUDA out of memory.")
        return step(*args, **kwargs)

    with log_lines() as lines:
        trainer = make_trainer(rank, world_size, Run({**arguments, "output_dir": directory}))
        step = trainer.training_step
        trainer.training_step = training_step
        trainer.train()
    found = {"steps": trainer.state.max_steps, "size": trainer._train_batch_size, "lines": lines}
    if schedule := getattr(trainer.optimizer.optimizer, "schedule", None):
        found |= {"schedule": schedule.options(), "stage": trainer.optimizer.optimizer.last_plan.stage.number}
    return found


@pytest.mark.parametrize("name", ["onebit_adam", pytest.param("zero_one_adam", marks=pytest.mark.full)])
def test_auto_find_batch_size_fits_the_schedule_to_the_run_that_is_taken(name: str, tmp_path: Path) -> None:
    epoch = {"max_steps": -1, "num_train_epochs": 1, "optim": name}
    trying = {**epoch, "auto_find_batch_size": True, "per_device_train_batch_size": 4}
    found = run_ranks(2, trainer_run, str(tmp_path), trying, 2, timeout=120)[0]
    fresh = {**epoch, "per_device_train_batch_size": found["size"]}
    plain = run_ranks(2, trainer_run, str(tmp_path), fresh, 0, timeout=120)[0]
    assert found["steps"] == plain["steps"] > 20 and found["schedule"] == plain["schedule"]


def resumed_for_longer(rank: int, world_size: int, directory: str, name: str) -> list[dict[str, Any]]:
    """The schedules of a trial run of 6 steps, and of the same run, resumed for 3,000, at its seventh step."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 7

    found = []
    for steps, resume in ((6, None), (3000, f"{directory}/checkpoint-6")):
        arguments = {"optim": name, "max_steps": steps, "output_dir": directory, "save_strategy": "steps"}
        trainer = make_trainer(rank, world_size, Run({**arguments, "save_steps": 6}))
        trainer.add_callback(Stop())
        trainer.train(resume_from_checkpoint=resume)
        found.append({**trainer.optimizer.optimizer.schedule.options(), "step": trainer.optimizer.optimizer._step})
    return found


@pytest.mark.parametrize("name", ["onebit_adam", "zero_one_adam"])
def test_a_trial_run_of_trainers_that_is_resumed_for_longer_is_fitted_anew(name: str, tmp_path: Path) -> None:
    trial, resumed = run_ranks(2, resumed_for_longer, str(tmp_path), name, timeout=120)[0]
    assert trial["max_freeze_step"] == 7 and resumed["step"] == 7
    assert resumed["max_freeze_step"] == 600 and resumed["min_freeze_step"] == 100
    assert name == "onebit_adam" or (resumed["var_update_scaler"], resumed["local_step_scaler"]) == (3000, 300)


@pytest.mark.parametrize("resume", [False, True])
@on_ranks(2)
def test_a_scheduler_that_is_stepped_once_an_epoch_does_not_tell_the_length_of_the_run(
    rank: int, world_size: int, resume: bool, tmp_path: Path
) -> None:
    """20 epochs of 5 steps; beside it a scheduler that is stepped with the optimizer."""
    for each, steps in (("epoch", 20), ("step", 2000)):
        use_accelerate(rank, world_size)
        found, folder = [], str(tmp_path / each)
        with log_lines() as lines:
            for stop, load in ((11, False), (14, True)) if resume else ((11, False),):
                accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=CompressOptPlugin(warmup_bits=32))
                model = network()
                adam = torch.optim.AdamW(model.parameters(), lr=0.01)
                scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
                    adam, steps * (world_size if each == "step" else 1)
                )
                model, optimizer, scheduler = accelerator.prepare(model, adam, scheduler)
                if load:
                    accelerator.load_state(folder)
                for step in range(optimizer.optimizer._step, stop):
                    take_steps(accelerator, model, optimizer, rank, [step])
                    if each == "step" or step % 5 == 4:
                        scheduler.step()
                accelerator.save_state(folder)
                found.append(optimizer.optimizer)
        said = sum("is not stepped with the optimizer" in line for line in lines)
        assert said == (len(found) if each == "epoch" and rank == 0 else 0)
        for optimizer in found:
            assert optimizer.plan.stage.number == 0
            assert optimizer.schedule.max_freeze_step == (100_000 if each == "epoch" else 400)


@pytest.mark.parametrize(
    ("world_size", "freeze_step", "said"), [(2, 8, "compresses nothing"), (2, 7, ""), (1, 2, "runs on one rank")]
)
def test_trainer_says_once_that_nothing_is_compressed(
    world_size: int, freeze_step: int, said: str, tmp_path: Path
) -> None:
    options = f"freeze_step={freeze_step},warmup_bits=32"
    arguments = {"optim": "onebit_adam", "optim_args": options, "max_steps": 8}
    found = run_ranks(world_size, trainer_run, str(tmp_path), arguments, 0, timeout=120)
    for words in ("compresses nothing", "runs on one rank"):
        counts = [sum(words in line for line in rank["lines"]) for rank in found]
        assert counts == [int(words == said)] + [0] * (world_size - 1)


@pytest.mark.parametrize(
    ("name", "steps", "bits", "lr_warmup", "beta2", "switch"),
    [
        ("onebit_adam", 20, 4, 0, 0.999, None),
        ("zero_one_adam", 30, 8, 3, 0.999, None),
        ("onebit_lamb", 30, 32, 0, 0.999, 6),
        ("zero_one_adam", 30, 32, 3, 0.999, 6),  # the bound is 3, and yields to the learning rate's warmup
        pytest.param("onebit_adam", 400, 4, 60, 0.999, None, marks=pytest.mark.full),
        pytest.param("onebit_adam", 400, 4, 60, 0.99, 120, marks=pytest.mark.full),
        pytest.param("zero_one_adam", 310, 4, 0, 0.99, 100, marks=pytest.mark.full),
    ],
)
def test_trainer_ends_the_warmup_stage_by_the_length_of_the_run(
    name: str, steps: int, bits: int, lr_warmup: int, beta2: float, switch: int | None, tmp_path: Path
) -> None:
    arguments = {"optim": name, "optim_args": f"warmup_bits={bits}", "max_steps": steps, "warmup_steps": lr_warmup}
    arguments["adam_beta2"] = beta2
    found = run_ranks(2, trainer_run, str(tmp_path), {**arguments, "save_strategy": "no"}, 0, timeout=300)
    said = [sum(f"the warmup stage takes all {steps} steps" in line for line in rank["lines"]) for rank in found]
    switches = [sum(f"freeze_step=auto: found {switch} " in line for line in rank["lines"]) for rank in found]
    assert (said, switches) == (([0, 0], [1, 0]) if switch else ([1, 0], [0, 0]))
    assert [rank["schedule"]["freeze_step"] for rank in found] == [switch or "auto"] * 2
    assert [rank["stage"] for rank in found] == [float(switch is not None)] * 2
    assert not any("compresses nothing" in line or "learnt little" in line for rank in found for line in rank["lines"])


def test_the_log_says_once_what_was_attached_and_after_a_step_what_it_saves(tmp_path: Path) -> None:
    trying = {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "num_train_epochs": 3, "max_steps": -1}
    rows = [
        ({"optim": "onebit_adam", "optim_args": "freeze_step=5"}, 0, "OnebitAdam", "compressed from step 6"),
        ({"optim": "onebit_adam", "optim_args": "warmup_bits=8"}, 0, "OnebitAdam", "takes all 8 steps"),
        ({"optim": "onebit_adam", **trying, "optim_args": "freeze_step=5"}, 2, "OnebitAdam", "compressed from step 6"),
        ({"optim_args": "grad_compression=int4", **trying}, 2, "GradientCompression", "int4"),
        ({"optim": "zero2_adamw", "optim_args": "grad_compression=int8"}, 0, "ZeRO stage 2", "gradients as int8"),
    ]
    for arguments, fails, name, said in rows:
        ranks = [rank["lines"] for rank in run_ranks(2, trainer_run, str(tmp_path), arguments, fails, timeout=120)]
        found = [[line for line in lines if "attached" in line or "fewer" in line] for lines in ranks]
        assert found[1] == [] and len(found[0]) == 3, found
        assert found[0][2].startswith("sent ") and " on a link of 1 Gbit/s" in found[0][2]
        assert found[0][0].startswith(f"attached {name}") and said in found[0][0]
        ratio = "3.5x" if "warmup_bits=8" in str(arguments) else "5.9x" if "int4" in said else "6.1x"  # 4 % are vectors
        assert found[0][1].startswith("DDP would send 65 kB a step, this run sends "), found[0][1]
        saved = f"({ratio} fewer)" if "ZeRO" not in name else "(1.4x fewer); 81.1 kB of state on this rank, not 130 kB"
        assert found[0][1].endswith(saved), found[0][1]


def plain_loop(rank: int, world_size: int, how: str) -> list[str]:
    """Train in a loop without a host, with torch's clipping, and return the lines of the log."""
    net, options = torch.nn.Linear(96, 96, bias=False), {"freeze_step": 2, "scale_block": 512}
    torch.nn.init.ones_(net.weight)
    model: Any = net if how in ("ZeroOptimizer", "loop") else DistributedDataParallel(net)
    with log_lines() as lines:
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        if how == "GradientCompression":
            model.register_comm_hook(GradientCompression(net.named_parameters(), "int4"), compress_hook)
        elif how == "ZeroOptimizer":
            optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, stage=1, grad_compression="int4")
        else:
            optimizer = OnebitAdam(net.parameters(), **({} if how == "OnebitAdam, auto" else options))
        if how.startswith("OnebitAdam"):
            attach_ddp(model, optimizer)
        for _ in range(4):
            model(torch.full((2, 96), float(rank + 1))).square().mean().backward()
            if how == "loop":
                average_gradients(optimizer)
            if how != "ZeroOptimizer":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return lines


def test_plain_loops_have_the_lines_of_trainer_and_a_warning_of_clipping_that_differs() -> None:
    for how in ("GradientCompression", "ZeroOptimizer", "loop", "OnebitAdam", "OnebitAdam, auto"):
        lines, others = run_ranks(2, plain_loop, how)
        name = {"loop": "OnebitAdam", "ZeroOptimizer": "ZeRO stage 1"}.get(how, how.partition(",")[0])
        assert sum(line.startswith(f"attached {name}") for line in lines) == 1, lines
        assert sum("DDP would send 36.9 kB a step, this run sends" in line for line in lines) == 1, lines
        assert not any("attached" in line or "fewer" in line for line in others)
        unknown = sum("does not know the length of the run: give total_steps" in line for line in lines)
        assert unknown == (how == "OnebitAdam, auto")
        for said in (lines, others):  # from the compressed stage on, on each rank
            apart = sum("torch.nn.utils clips each rank by the norm of its own gradients" in line for line in said)
            assert apart == (how in ("OnebitAdam", "loop")), (how, said)


def savings(rank: int, world_size: int, *rows: tuple[torch.dtype, dict[str, Any], int]) -> list[tuple[Any, list[str]]]:
    """The metrics of the last step, and the lines of the log, for weights of a dtype and so many micro-batches."""
    found = []
    for dtype, options, accumulation in rows:
        use_accelerate(rank, world_size)
        plugin = CompressOptPlugin(total_steps=50, **options)
        accelerator: Any = CompressOptAccelerator(
            cpu=True, compressopt_plugin=plugin, gradient_accumulation_steps=accumulation
        )
        layers = torch.nn.Linear(256, 512, bias=False, dtype=dtype)
        model, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters(), lr=1e-3))
        with log_lines() as lines:
            for _ in range(3 * accumulation):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 256, dtype=dtype)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            states = [*accelerator.our_optimizers(), *accelerator._compressopt.models.compressions()]
            metrics = states[0].metrics()
            if len(found) == len(rows) - 1:
                accelerator.end_training()  # destroys the process group
        found.append((metrics, lines))
    return found


def test_savings_are_against_what_ddp_would_send_for_gradients_of_the_same_dtype() -> None:
    wide, half = torch.float32, torch.bfloat16
    int4, zero = {"grad_compression": "int4"}, {"zero_stage": 2, "param_compression": "none"}
    rows = [(wide, int4, 1), (half, int4, 4), (half, {"optimizer": "onebit_adam"}, 1), (half, zero, 1), (half, zero, 4)]
    (of_wide, of_half, of_adam, of_zero, of_many), others = run_ranks(2, savings, *rows)
    assert [round(metrics["compression_ratio"], 1) for metrics, _ in (of_wide, of_half)] == [7.8, 3.9]
    assert of_adam[0]["compression_ratio"] == pytest.approx(3.9, rel=0.02)
    assert of_zero[0]["compression_ratio"] == pytest.approx(1, rel=1e-3) and not any(
        "x fewer" in line for line in of_zero[1]
    )
    numel = 256 * 512
    for (metrics, lines), said in ((of_wide, "524 kB"), (of_half, "262 kB"), (of_adam, "262 kB")):
        assert sum(f"DDP would send {said} a step" in line for line in lines) == 1, lines
        assert metrics["bytes_uncompressed"] == 3 * numel * (4 if said == "524 kB" else 2)
        assert metrics["bytes_on_link"] == metrics["bytes_sent"] > 0
    # ZeRO-2 sends every micro-batch: gradients of four, and the parameters once, each way the half of 262 kB
    assert of_many[0]["compression_ratio"] == pytest.approx(2 / 5, rel=1e-3)
    more = [line for line in of_many[1] if "2.5x more than DDP, which would send 262 kB" in line]
    assert len(more) == 1 and "zero_stage=1 sends once a step" in more[0], of_many[1]
    assert not any("more than DDP" in line for _, lines in (of_wide, of_half, of_zero, *others) for line in lines)
    assert of_many[1][-1] == "sent 1.97 MB, DDP would have sent 786 kB" and others[-1][1] == []


@pytest.mark.parametrize("scaled", [False, True])
@on_ranks(2)
def test_a_skipped_step_holds_the_scheduler_of_its_own_optimizer_only(rank: int, world_size: int, scaled: bool) -> None:
    use_accelerate(rank, world_size)
    accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=CompressOptPlugin(freeze_step=2))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    models = [network(), network()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1.0) for model in models]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
    prepared = accelerator.prepare(*models, *optimizers, *schedulers)
    models, optimizers, schedulers = prepared[:2], prepared[2:4], prepared[4:]
    for step in range(6):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss = model(torch.ones(2, 10)).sum()
            accelerator.backward(loss * float("inf") if step == 4 and index == 0 and rank == 1 else loss)
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert [optimizer.optimizer.skipped_steps for optimizer in optimizers] == [1, 0]
    rates = [scheduler.get_last_lr()[0] for scheduler in schedulers]
    assert rates == pytest.approx([1 / 11, 1 / 13])  # two steps of each scheduler a step
