"""Trainer with two (or three) real processes: the compressed optimizers in everything that it can be asked to do."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

from hf_compressopt import CompressOptAccelerator, ZeroOneAdam
from hf_compressopt.optim.overlap import OverlapSender
from tests.support.harness import on_ranks, run_ranks
from tests.support.spreading import short
from tests.support.trainer_runs import (
    VARIANTS,
    Run,
    equal_params,
    loads_optimizer_pt,
    logged,
    losses,
    make_trainer,
    network,
    params_of,
    same_on_all_ranks,
    take_steps,
    train,
    train_all,
    use_accelerate,
)

FREEZE = 3
FUSED = TrainingArguments.default_optim == "adamw_torch_fused"
ONEBIT = {"optim": "onebit_adam", "optim_args": f"freeze_step={FREEZE}, bucket_cap_mb=0.02, scale_block=256"}

#: The others are for the long tests: those that compile take half a minute each.
SHORT = ("plain", "accumulation", "gradient_checkpointing", "find_unused_parameters", "uneven_last_window", "scaler")
EACH = short(VARIANTS, SHORT)


def run_variant(name: str, arguments: dict[str, Any], world_size: int = 2, **more: Any) -> list[dict[str, Any]]:
    variant_arguments, variant_run = VARIANTS[name]
    run = Run({**variant_arguments, **arguments}, **{**variant_run, **more})
    return run_ranks(world_size, train, run, timeout=240)


#: Optimizers that train as adamw_torch does, and how far their parameters may be from its.
BESIDE: dict[str, tuple[dict[str, Any], float]] = {
    "OnebitAdam": ({"optim": "onebit_adam", "optim_args": "freeze_step=100,warmup_bits=32"}, 0.0),
    "ZeRO-1": ({"optim": "zero1_adamw"}, 1e-6),
    "ZeRO-2": ({"optim": "zero2_adamw", "optim_args": "reduce_bucket_size=3000"}, 1e-6),
    "FusedAdam": ({"optim": "fused_adam"}, 1e-6),
    "int4": ({"optim": "adamw_torch", "optim_args": "grad_compression=int4"}, math.inf),
}


@pytest.mark.invariant(1, 32)
@pytest.mark.parametrize("name", EACH)
def test_every_method_trains_as_adamw_torch_under_ddp(name: str, tmp_path: Path) -> None:
    """With gradients in 4 bits the losses are near; with all others the parameters are the same, but for rounding."""
    arguments, more = VARIANTS[name]
    # The gradient of an attention's key bias is nothing but rounding, which Adam would blow up to steps of full size.
    here = {"output_dir": str(tmp_path), "max_steps": 6, "adam_epsilon": 1e-5, "optim": "adamw_torch", **arguments}
    more = {**more, "overflow": (1, 2)} if name == "scaler" else more
    rounds = name == "bf16_autocast"  # in forward and backward, which turns a last bit into more
    here |= {"learning_rate": 1e-3} if rounds else {}
    stock = {**more, "evaluate_first": False}  # a compiled model would stay without DDP: Trainer's own mistake
    runs = [Run({**here, **own}, **(stock if method == "FusedAdam" else more)) for method, (own, _) in BESIDE.items()]
    plain, *others = run_ranks(2, train_all, Run(here, **stock), *runs, timeout=480)[0]
    found, rates = dict(zip(BESIDE, others, strict=True)), [row["lr"] for row in plain["rows"]]
    assert plain["optimizer"] == "AdamW" and plain["model_class"] == "DistributedDataParallel"
    for method, result in found.items():
        zero, far = method.startswith("ZeRO"), BESIDE[method][1]
        assert result["optimizer"] == ("ZeroOptimizer" if zero else "AdamW" if method == "int4" else method)
        assert (result["model_class"] == "DistributedDataParallel") == (not zero)
        assert result["alike"] == [True] * 6 and len(losses(result)) == 6
        assert [row["lr"] for row in result["rows"]] == rates, "the scheduler waits at a skipped step, with all"
        assert losses(result) == pytest.approx(losses(plain), rel=0, abs=0.06 if method == "int4" else far / 2)
        for key, value in plain["params"].items():
            limit = 10 * far if rounds and zero else far
            assert (result["params"][key] - value).abs().amax() <= limit if value.numel() else True, (method, key)
        if name == "scaler":
            assert result["rows"][2]["norm"] == result["rows"][1]["norm"] != result["rows"][3]["norm"]
        elif zero:  # Accelerate's own norm is of scaled gradients with a scaler
            assert logged(result, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-4)
    assert all(found[zero]["fused"] == FUSED for zero in ("ZeRO-1", "ZeRO-2"))
    assert losses(found["int4"])[0] == losses(plain)[0] and losses(found["int4"]) != losses(plain)
    last = [row for row in found["int4"]["history"] if "loss" in row][-1]
    assert 5.5 < last["compressopt/compression_ratio"] < 7.8  # small tensors travel in full
    assert last["compressopt/bytes_sent"] > 5 * last["compressopt/bytes_sent_step"]


def test_the_logged_norm_does_not_leap_at_the_switch(tmp_path: Path) -> None:
    """With a learning rate of 0 the gradients are those of adamw_torch in every step, and so must their norms be."""
    here = {"output_dir": str(tmp_path), "learning_rate": 0.0, "max_steps": 7}

    def log_of(optim: str, options: str) -> tuple[list[float], int]:
        history = run_variant("plain", {**here, "optim": optim, "optim_args": options}, dropout=0.0)[0]["history"]
        rows = [row for row in history if "loss" in row]
        return [row["grad_norm"] for row in rows], sum("compressopt/gradient_noise_scale" in row for row in rows)

    true, _ = log_of("adamw_torch", "")
    sketched, noisy = log_of("onebit_adam", "freeze_step=3,warmup_bits=32")
    assert sketched[:3] == pytest.approx(true[:3], rel=1e-6)
    assert sketched[3:] == pytest.approx(true[3:], rel=0.04)
    assert noisy > 0
    local, noisy = log_of("onebit_adam", "freeze_step=3,clip=local")
    assert all(1.1 * mine < theirs for mine, theirs in zip(sketched[3:], local[3:], strict=True)) and noisy == 0


def test_a_trainer_trains_twice(tmp_path: Path) -> None:
    for arguments in (ONEBIT, {"optim": "onebit_adam", "optim_args": "warmup_bits=32"}):
        result = run_variant("plain", {**arguments, "output_dir": str(tmp_path)}, twice=True)[0]
        assert result["alike"] == [True] * 16 and result["metrics"]["step"] == 16
        assert result["metrics"]["stage"] == 1.0 and result["freeze_step"] == (FREEZE if arguments is ONEBIT else 1)


#: Resumes of each variant in the compressed stage, and of some in the warmup stage and at its end too.
RESUMES = [pytest.param(*row.values, (5,), marks=row.marks, id=row.values[0]) for row in EACH]
RESUMES += [pytest.param("plain", (2, FREEZE), id="plain, early")]
RESUMES += [
    pytest.param(name, (2, FREEZE), id=f"{name}, early", marks=pytest.mark.full) for name in ("accumulation", "scaler")
]


@pytest.mark.invariant(8, 21)
@pytest.mark.parametrize(("name", "saved"), RESUMES)
def test_resume_is_the_uninterrupted_run_and_replicas_stay_alike(
    name: str, saved: tuple[int, ...], tmp_path: Path
) -> None:
    whole = run_variant(name, {**ONEBIT, "output_dir": str(tmp_path)}, save_at=saved)
    for result in whole:
        assert result["alike"] == [True] * 8
        assert equal_params(result["params"], whole[0]["params"])
    assert whole[0]["metrics"]["stage"] == 1.0 and whole[0]["model_class"] == "DistributedDataParallel"
    assert whole[0]["metrics"]["compression_ratio"] > 2
    stages = logged(whole[0], "compressopt/stage")
    assert stages == [0.0] * FREEZE + [1.0] * (8 - FREEZE)
    for step in saved:
        arguments = {**ONEBIT, "output_dir": str(tmp_path / "resumed")}
        resumed = run_variant(name, arguments, resume=str(tmp_path / f"checkpoint-{step}"))
        assert equal_params(resumed[0]["params"], whole[0]["params"]), f"resumed at step {step}"
        assert len(resumed[0]["rows"]) == 8 - step


ADAMW = {"optim": "adamw_torch", "optim_args": None}


@pytest.mark.parametrize(
    ("arguments", "more", "freeze_step"),
    [
        ({"max_steps": -1, "num_train_epochs": 1}, {}, 4),  # 20 % of 96 examples / (2 ranks x 2) = 24 steps
        ({}, {"own_scheduler": True}, 1),
        (ADAMW, {"optimizer": "cls_and_kwargs"}, "auto"),  # 4 bits: it stays there
        (ADAMW, {"optimizer": "instance"}, 3),  # its own
        (ADAMW, {"optimizer": "create_optimizer"}, 1),
        (ADAMW, {"optimizer": "layers"}, 1),
    ],
)
def test_the_schedule_follows_the_run_however_the_optimizer_is_made(
    arguments: dict[str, Any], more: dict[str, Any], freeze_step: int | str, tmp_path: Path
) -> None:
    here = {"output_dir": str(tmp_path), "optim": "onebit_adam", "optim_args": "warmup_bits=32", **arguments}
    result = run_variant("plain", here, **more)[0]
    assert result["optimizer"] == "OnebitAdam" and result["freeze_step"] == freeze_step and all(result["alike"])
    assert result["metrics"]["stage"] == float(freeze_step != "auto")


def test_traffic_falls_to_a_sixth_and_to_a_thirty_second_and_the_logs_say_so(tmp_path: Path) -> None:
    # a sketch is larger than this model's messages
    optim = {"optim": "onebit_adam", "optim_args": f"freeze_step={FREEZE},clip=local"}
    saving = {"save_strategy": "steps", "save_steps": 8, "report_to": "tensorboard"}
    arguments = {**optim, **saving, "output_dir": str(tmp_path)}
    result = run_variant("plain", arguments)[0]
    rows = [row for row in result["history"] if "loss" in row]
    numel = sum(p.numel() for p in result["params"].values())
    vectors = sum(p.numel() for p in result["params"].values() if p.dim() == 1)  # in full precision
    warmup, compressed = rows[1]["compressopt/bytes_sent_step"], rows[-1]["compressopt/bytes_sent_step"]
    assert warmup == pytest.approx((numel - vectors) * (4 + 16 / 128) / 8 + 4 * vectors, rel=0.01)
    assert rows[1]["compressopt/compression_ratio"] == pytest.approx(4 * numel / warmup, abs=1e-3)
    assert compressed == pytest.approx(numel / 8 + 4 * numel / 4096, rel=0.05)
    assert rows[-1]["compressopt/compression_ratio"] > 30
    sent = [row["compressopt/bytes_sent"] for row in rows]
    assert sent == sorted(sent) and sent[-1] > 0
    assert all(isinstance(row["compressopt/bytes_sent"], int) for row in rows)
    last, steps = result["history"][-1], len(rows)
    assert last["compressopt/bytes_uncompressed"] == 4 * numel * steps  # of two ranks
    assert last["compressopt/bytes_on_link"] == sent[-1] and "train_runtime" in last
    saved = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert saved["log_history"][-1]["compressopt/stage"] == 1.0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = [EventAccumulator(str(path.parent)) for path in tmp_path.rglob("events.out.tfevents*")]
    tags = {tag for event in events if event.Reload() for tag in event.Tags()["scalars"]}
    assert {"train/compressopt/stage", "train/compressopt/bytes_sent", "train/compressopt/compression_ratio"} <= tags


@pytest.mark.invariant(13)
@pytest.mark.parametrize(
    ("optim", "scaler", "step"),
    [*((ONEBIT, scaler, step) for scaler in (True, False) for step in (1, 5)), ({"optim": "zero2_adamw"}, False, 3)],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    optim: dict[str, Any], scaler: bool, step: int, tmp_path: Path
) -> None:
    arguments = {**optim, "output_dir": str(tmp_path), "lr_scheduler_type": "linear", "warmup_steps": 0}
    for result in run_variant("plain", arguments, scaler=scaler, overflow=(1, step)):
        assert result["alike"] == [True] * 8
        rows = result["rows"]
        assert [row["skipped"] for row in rows] == [number == step for number in range(8)]
        assert rows[step]["norm"] == rows[step - 1]["norm"], "the step changed the parameters"
        assert rows[step + 1]["norm"] != rows[step]["norm"], "training did not go on"
        assert rows[step]["lr"] == rows[step - 1]["lr"] > rows[step + 1]["lr"], "the lr schedule moved"
        assert result["metrics"]["step"] == 7 and result["metrics"]["skipped_steps"] == 1
        assert all(torch.isfinite(p).all() for p in result["params"].values())


def test_best_model_rotation_and_model_only_saves(tmp_path: Path) -> None:
    watched = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "save_total_limit": 2}
    arguments = {**ONEBIT, **watched, **best, "output_dir": str(tmp_path)}
    result = run_variant("plain", arguments)[0]
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert Path(result["best"]).name in kept and "checkpoint-8" in kept and len(kept) == 2
    for name in kept:
        assert len(list((tmp_path / name).glob("compressopt-*.safetensors"))) == 2
        stub = torch.load(tmp_path / name / "optimizer.pt", weights_only=True)
        assert stub["state"] == {} and (tmp_path / name / "optimizer.pt").stat().st_size < 10_000
    only = run_variant("plain", {**arguments, "output_dir": str(tmp_path / "only"), "save_only_model": True})[0]
    assert equal_params(only["params"], result["params"])
    assert not list((tmp_path / "only").rglob("compressopt*"))


FAMILY = {
    "zero_one_adam": "var_freeze_step=4,var_update_scaler=1,local_step_scaler=2,local_step_clipper=4",
    "onebit_lamb": "freeze_step=3",
}


@pytest.mark.invariant(21, 37)
@pytest.mark.parametrize("name", ["zero_one_adam", pytest.param("onebit_lamb", marks=pytest.mark.full)])
def test_the_family_trains_evaluates_saves_and_resumes(name: str, tmp_path: Path) -> None:
    arguments = {"optim": name, "optim_args": FAMILY[name] + ",scale_block=256,bucket_cap_mb=0.02", "max_steps": 14}

    def run(directory: str, *save_at: int, resume: str | None = None, **more: Any) -> list[dict[str, Any]]:
        given = {**arguments, **more, "output_dir": str(tmp_path / directory)}
        # no dropout: an evaluation draws random numbers
        return run_variant("plain", given, resume=resume, dropout=0.0, save_at=save_at)

    plain = run("plain")
    watched = run("watched", 3, 4, 9, 11, eval_strategy="steps", eval_steps=3)
    assert plain[0]["metrics"]["stage"] == 1.0
    for result in (*plain, *watched):  # after the training all ranks hold the same, and watching changes no bit
        assert equal_params(result["params"], plain[0]["params"])
    if name == "zero_one_adam":
        assert plain[0]["alike"][:4] == [True] * 4
        assert plain[0]["alike"][8:12] == [False, False, False, True]  # step 12 is a sync, 9 to 11 are not
    else:
        assert plain[0]["alike"] == [True] * 14
    for step in (3, 4, 9, 11):
        resumed = run("resumed", resume=str(tmp_path / "watched" / f"checkpoint-{step}"))
        assert equal_params(resumed[0]["params"], plain[0]["params"]), f"resumed at step {step}"


def run_watched(rank: int, world_size: int, clip: str, arguments: dict[str, Any], overflow: bool) -> dict[str, Any]:
    early: list[bool] = []
    end_step, left = OverlapSender.end_step, OverlapSender.left

    def watched_end(self: OverlapSender, *, taken: bool) -> None:
        end_step(self, taken=taken)
        early.append(self.seen)  # type: ignore[attr-defined]

    def watched_left(self: OverlapSender, gradients: Any) -> frozenset[int]:
        found = left(self, gradients)
        self.seen = len(found) > 0  # type: ignore[attr-defined]
        return found

    options = {"optim": "onebit_adam", "optim_args": f"freeze_step=3,clip={clip}", "max_grad_norm": 0.5, **arguments}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlapSender, "end_step", watched_end)
        patch.setattr(OverlapSender, "left", watched_left)
        result = train(rank, world_size, Run(options, overflow=(1, 5) if overflow else None, scaler=overflow))
    skipped = [row["skipped"] for row in result["rows"]]
    return {**result, "early": early, "norms": logged(result, "grad_norm"), "skipped": skipped}


@pytest.mark.parametrize(
    ("arguments", "overflow"), [({}, False), ({"gradient_accumulation_steps": 2}, False), ({}, True)]
)
def test_trainer_overlaps_and_logs_the_norm(arguments: dict[str, Any], overflow: bool) -> None:
    ranks = run_ranks(2, run_watched, "late", arguments, overflow, timeout=240)
    sketch = run_ranks(2, run_watched, "sketch", arguments, overflow, timeout=240)[0]
    assert not any(sketch["early"])
    for result in ranks:
        assert result["early"][-8:] == [False] * 4 + [True] * 4
        assert all(result["alike"]) and result["norms"] == ranks[0]["norms"]
        assert result["skipped"] == [overflow and step == 5 for step in range(8)]
        assert len(result["norms"]) == 8 and all(norm > 0.5 for norm in result["norms"][:3])
        assert losses(result) == pytest.approx(losses(sketch), rel=0.005)
        assert result["norms"][:4] == sketch["norms"][:4]  # of the next step on parameters differ


IN_TWO_LEVELS = {
    "onebit_adam": "freeze_step=3,topology=hierarchical,node_size=2,node_bits=16",
    "adamw_torch": "grad_compression=int4,node_size=2",
    "zero2_adamw": "bucket_cap_mb=25,node_size=2",
}


@pytest.mark.parametrize("optim", IN_TWO_LEVELS)
def test_trainer_trains_in_two_levels(optim: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"output_dir": str(tmp_path), "optim": optim, "adam_epsilon": 1e-5}
    given = (IN_TWO_LEVELS[optim].partition(",")[0], IN_TWO_LEVELS[optim])
    ranks = run_ranks(4, train_all, *(Run({**arguments, "optim_args": own}) for own in given), timeout=240)
    assert all(all(levels["alike"]) for _, levels in ranks)
    flat, levels = ranks[0]
    if optim != "zero2_adamw":  # which sums in another order only
        assert losses(levels) != losses(flat)
    assert losses(levels) == pytest.approx(losses(flat), abs=0.1)
    one, two = ([row for row in result["history"] if "loss" in row][-1] for result in (flat, levels))
    assert "compressopt/bytes_sent_in_node" not in one and two["compressopt/bytes_sent_in_node"] > 0
    assert "compressopt/node_size" not in one and two["compressopt/node_size"] == 2
    if optim != "onebit_adam":  # OnebitAdam's sketch is most of what it sends for so small a model
        # a rank's part to 1 other rank instead of to 3, beside small tensors in full
        assert two["compressopt/bytes_sent_step"] < 0.5 * one["compressopt/bytes_sent_step"]


# -- inside a local interval of 0/1 Adam every rank has its own parameters, and one rank alone may save ---------------


ZERO_ONE = {"optim": "zero_one_adam", "optim_args": "var_freeze_step=3,local_step_scaler=1,local_step_clipper=4"}


def train_and_read(rank: int, world_size: int, directory: str) -> tuple[list[bool], list[bool]]:
    """Whether the parameters are alike on all ranks after each step: as they are, and for a method of TRL's."""
    from transformers import TrainerCallback

    trainer = make_trainer(rank, world_size, Run({**ZERO_ONE, "output_dir": directory}, dropout=0.0))
    seen: list[bool] = []

    class Reader(TrainerCallback):
        def sync_target_model(self, model: Any) -> None:
            seen.append(same_on_all_ranks(model.parameters()))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.sync_target_model(model)

    trainer.add_callback(Reader())
    trainer.train()
    return trainer.watch.alike, seen


def test_code_of_trl_that_reads_parameters_between_syncs_finds_those_of_the_last_one(tmp_path: Path) -> None:
    for alike, seen in run_ranks(2, train_and_read, str(tmp_path), timeout=120):
        assert not all(alike) and seen == [True] * 8


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


def save_by_rank_0(rank: int, world_size: int, directory: str, runs: list[dict[str, Any]]) -> None:
    """Train by a plain Trainer, and by one whose save_model calls Trainer's on rank 0 only."""
    for number, arguments in enumerate(runs):
        for guarded in (False, True):
            folder = f"{directory}/{number}-{guarded}"
            saving = {"save_strategy": "steps", "save_steps": 5, "max_steps": 5, "output_dir": folder}
            trainer = make_trainer(rank, world_size, Run({**arguments, **saving}, dropout=0.0))
            if guarded:
                cls = type(trainer)

                def save_model(self: Any, *args: Any, super_class: Any = cls, **kwargs: Any) -> None:
                    if self.args.should_save:
                        super_class.save_model(self, *args, **kwargs)

                trainer.__class__ = type("SavesOnRank0", (cls,), {"save_model": save_model})
            trainer.train()
            assert "save_model" not in vars(trainer)


def test_a_subclass_that_saves_its_model_on_rank_0_alone_saves_what_all_ranks_have(tmp_path: Path) -> None:
    """Inside a checkpoint that is the average over the ranks, and the masters."""
    masters = {"optim": "zero2_adamw", "optim_args": "param_compression=int4,bucket_cap_mb=0.02"}
    runs = [{"optim": "onebit_adam"}, {**ZERO_ONE, "learning_rate": 1e-2}, masters]
    run_ranks(2, save_by_rank_0, str(tmp_path), runs, timeout=120)
    for number in range(len(runs)):
        plain, guarded = (saved(tmp_path / f"{number}-{own}" / "checkpoint-5") for own in (False, True))
        assert equal_params(plain, guarded)


def save_twice(rank: int, world_size: int, directory: str) -> bool:
    """Save by OnebitAdam, then by AdamW into the same folder; return True if AdamW resumes from its own state."""
    watched = {"save_strategy": "steps", "save_steps": 2, "output_dir": directory}
    for optim, rate in (("onebit_adam", 1e-2), ("adamw_torch", 1e-3)):
        run = Run({**watched, "optim": optim, "learning_rate": rate, "max_steps": 2}, dropout=0.0)
        trainer = make_trainer(rank, world_size, run)
        trainer.train()
    kept = [row["exp_avg"].clone() for row in trainer.optimizer.optimizer.state.values()]
    trainer = make_trainer(rank, world_size, run)
    seen: list[torch.Tensor] = []

    def training_step(*_: Any, **__: Any) -> Any:
        seen.extend(row["exp_avg"].clone() for row in trainer.optimizer.optimizer.state.values())
        raise KeyError("stop")

    trainer.training_step, trainer.args.max_steps = training_step, 4
    with pytest.raises(KeyError, match="stop"):
        trainer.train(resume_from_checkpoint=True)
    return len(seen) > 0 and all(map(torch.equal, seen, kept))


@loads_optimizer_pt
def test_a_checkpoint_that_replaced_one_in_shards_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(2, save_twice, str(tmp_path), timeout=120) == [True, True]
    assert (tmp_path / "checkpoint-2" / "compressopt.index.json").exists()


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
