"""DeepSpeed's configurations in our terms: what comes out is taken by Trainer and Accelerate, and nothing gets lost."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_compressopt
from hf_compressopt import FusedAdam, Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam, ZeroOptimizer, cli
from hf_compressopt.integrations.deepspeed import LOST, RULES, SAME, accelerate_code, translate
from hf_compressopt.integrations.optim_args import text_options

hf_compressopt.register()


def with_optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


NCCL = {"cuda_aware": False, "comm_backend_name": "nccl"}
ONEBIT_ADAM = {
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 16,
    "steps_per_print": 100,
    **with_optimizer("OneBitAdam", lr=4e-4, weight_decay=0.01, freeze_step=23000, bias_correction=False, **NCCL),
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
}
INTERVALS = {"var_update_scaler": 20, "local_step_scaler": 30000, "local_step_clipper": 8}
DECAY = {"warmup_num_steps": 200, "total_num_steps": 3000, "warmup_max_lr": 2e-3, "warmup_type": "linear"}
ADAM = {"lr": 1e-3, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.01, "eps_inside_sqrt": True}
ZERO_ONE_ADAM = {
    "train_micro_batch_size_per_gpu": 64,
    **with_optimizer("ZeroOneAdam", **ADAM, var_freeze_step=12500, **INTERVALS),
    "scheduler": {"type": "WarmupDecayLR", "params": DECAY},
    "bf16": {"enabled": True},
}
FACTORS = {"coeff_beta": 0.8, "factor_max": 3.0, "factor_min": 0.25, "factor_threshold": 0.2}
COEFFICIENTS = {"max_coeff": 0.3, "min_coeff": 0.01, **FACTORS}
ONEBIT_LAMB = {
    "train_batch_size": 1024,
    "gradient_accumulation_steps": 8,
    **with_optimizer("OneBitLamb", lr=11e-3, freeze_step=1000, max_grad_norm=0.5, **COEFFICIENTS),
}
ZERO_2 = {  # as in Transformers' documentation
    "bf16": {"enabled": "auto"},
    **with_optimizer("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto"),
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 3e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
LAMB_1 = {
    **with_optimizer("Lamb", lr=2e-3, max_coeff=5.0, min_coeff=0.1, bias_correction=False),
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    "communication_data_type": "fp16",
    "data_types": {"grad_accum_dtype": "fp32"},
    "gradient_predivide_factor": 2.0,
    "prescale_gradients": False,
}
CONFIGS = {
    "1-bit Adam": ONEBIT_ADAM,
    "0/1 Adam": ZERO_ONE_ADAM,
    "1-bit LAMB": ONEBIT_LAMB,
    "ZeRO-2": ZERO_2,
    "LAMB under ZeRO-1": LAMB_1,
}


def optimizer_of(config: dict[str, Any], tmp_path: Path, ranks: int = 2) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer that Trainer makes of the printed flags, and Trainer's arguments."""
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    words = translate(config, ranks=ranks).arguments()
    words += ["--output_dir", str(tmp_path), "--use_cpu"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    if args.optim in ("onebit_adam", "zero_one_adam", "onebit_lamb"):
        args.optim_args = (args.optim_args or "").replace("communicator=nccl", "communicator=gloo")
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    return cls([torch.nn.Parameter(torch.ones(8))], **kwargs), args


def leaves(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


# -- what Trainer makes of it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "cls", "own", "flags"),
    [
        (
            "1-bit Adam",
            64,
            OnebitAdam,
            {"freeze_step": 23000, "lr": 4e-4, "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": False},
            {"weight_decay": 0.01, "max_grad_norm": 1.0, "logging_steps": 100, "per_device_train_batch_size": 16}
            | {"gradient_accumulation_steps": 4, "fp16": False, "bf16": False},
        ),
        (
            "0/1 Adam",
            2,
            ZeroOneAdam,
            {"freeze_step": 12500, **INTERVALS, "betas": (0.9, 0.98), "eps": 1e-7, "eps_inside_sqrt": True},
            {"learning_rate": 2e-3, "lr_scheduler_type": "linear", "warmup_steps": 200, "max_steps": 3000, "bf16": True}
            | {"per_device_train_batch_size": 64, "max_grad_norm": 0.0},  # the scheduler's rate has the last word
        ),
        (
            "1-bit LAMB",
            16,
            OnebitLamb,
            {"freeze_step": 1000, **COEFFICIENTS},
            # DeepSpeed ignored the norm, and the report says so
            {"max_grad_norm": 0.5, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8},
        ),
    ],
)
def test_compressed_optimizers_as_trainer_makes_them(
    name: str, ranks: int, cls: type, own: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    optimizer, args = optimizer_of(CONFIGS[name], tmp_path, ranks)
    assert type(optimizer) is cls
    found = {**vars(optimizer), **optimizer.schedule.options(), **optimizer.param_groups[0]}  # type: ignore[attr-defined]
    assert {option: found[option] for option in own} == own
    assert {flag: getattr(args, flag) for flag in flags} == flags


def test_zero_2_with_auto_values_leaves_trainers_flags_alone(tmp_path: Path) -> None:
    translation = translate(ZERO_2)
    assert translation.lost == [] and set(translation.flags) == {"--lr_scheduler_type"}
    optimizer, args = optimizer_of(ZERO_2, tmp_path)
    assert isinstance(optimizer, ZeroOptimizer) and optimizer.stage == 2
    assert args.learning_rate == 5e-5 and args.max_grad_norm == 1.0 and args.optim == "fused_adam"
    for option in ("reduce_bucket_size=300000000", "allgather_bucket_size=200000000"):
        assert option in translation.optim_args_text
    without_effect = {row.option for row in translation.rows if "without effect" in row.remark}
    assert {"zero_optimization.contiguous_gradients", "zero_optimization.round_robin_gradients"} <= without_effect


def test_lamb_under_zero_1(tmp_path: Path) -> None:
    optimizer, _ = optimizer_of(LAMB_1, tmp_path)
    assert isinstance(optimizer, ZeroOptimizer) and optimizer.stage == 1
    text = translate(LAMB_1).optim_args_text
    for option in ("max_coeff=5.0", "min_coeff=0.1", "bias_correction=false", "communication_data_type=fp16"):
        assert option in text.split(",")
    for option in ("gradient_accumulation_dtype=fp32", "postscale_gradients=true", "gradient_predivide_factor=2.0"):
        assert option in text.split(",")
    assert "reduce_bucket_size" not in text


@pytest.mark.parametrize(
    ("config", "optim", "cls"),
    [
        (with_optimizer("Adam"), "fused_adam", FusedAdam),
        (with_optimizer("FusedAdam", adam_w_mode=False), "fused_adam", FusedAdam),
        (with_optimizer("AdamW", torch_adam=True), "adamw_torch", torch.optim.AdamW),
        (with_optimizer("Lamb"), "lamb", Lamb),
        ({**with_optimizer("AdamW", torch_adam=True), "zero_optimization": {"stage": 1}}, "zero1_adamw", ZeroOptimizer),
        ({"zero_optimization": {"stage": 2}}, "zero2_adamw", ZeroOptimizer),
        (with_optimizer("SGD", lr=0.1), "sgd", torch.optim.SGD),
        (with_optimizer("Adagrad"), "adagrad", torch.optim.Adagrad),
    ],
)
def test_ordinary_optimizers(config: dict[str, Any], optim: str, cls: type, tmp_path: Path) -> None:
    translation = translate(config)
    assert translation.optim == optim and translation.lost == []
    optimizer, _ = optimizer_of(config, tmp_path)
    assert type(optimizer) is cls
    if "adam_w_mode" in translation.optim_args:
        assert optimizer.param_groups[0].get("adam_w_mode", optimizer.defaults.get("adam_w_mode")) is False


# -- defaults and differences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["OneBitAdam", "onebitadam", "ZeroOneAdam", "OneBitLamb"])
def test_deepspeeds_defaults_are_written_out_where_trainers_would_differ(kind: str, tmp_path: Path) -> None:
    optimizer, args = optimizer_of(with_optimizer(kind), tmp_path)
    assert optimizer.freeze_step == 100_000  # type: ignore[attr-defined]
    assert args.learning_rate == 1e-3 and args.max_grad_norm == 0.0 and args.weight_decay == 0.0
    if isinstance(optimizer, ZeroOneAdam):
        assert (
            optimizer.schedule.options().items()
            >= {"var_update_scaler": 16, "local_step_scaler": 32678, "local_step_clipper": 16}.items()
        )
    not_given = {row.option for row in translate(with_optimizer(kind)).rows if not row.given}
    assert {"optimizer.params.lr", "gradient_clipping", "optimizer.params.scale_block"} < not_given


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_the_same_arithmetic(kind: str) -> None:
    """The options under which the oracles recorded from DeepSpeed are met, in test_simulations.py."""
    config = with_optimizer(kind, bias_correction=True, eps_inside_sqrt=True, max_grad_norm=0.5)
    translation = translate(config, same_arithmetic=True)
    wanted = {"scale_block": None, "variance_floor": 0, "bias_correction": False, "eps_inside_sqrt": False}
    wanted |= {"warmup_bits": 32, "max_update": 0, "variance_interval": 0}
    wanted |= {"trust_ratio": "frozen"} if kind == "OneBitLamb" else {}
    assert wanted.items() <= translation.optim_args.items()
    assert translation.flags["--max_grad_norm"] == 0.0  # it was without effect there
    assert "scale_block=none" in translation.optim_args_text
    plain = translate(config)
    assert plain.optim_args["eps_inside_sqrt"] is True and plain.flags["--max_grad_norm"] == 0.5
    assert "scale_block" not in plain.optim_args and "trust_ratio" not in plain.optim_args
    if kind == "OneBitLamb":  # its factors have their effect
        assert translate(with_optimizer(kind, factor_max=3.0)).optim_args["trust_ratio"] == "frozen"


def test_mpi_masks_auto_and_sections_that_are_off() -> None:
    translation = translate(
        with_optimizer("OneBitAdam", comm_backend_name="mpi", cuda_aware=True, exp_avg_mask=[1, 0], freeze_step="auto")
    )
    assert translation.optim_args["communicator"] == "mpi" and translation.optim_args["cuda_aware"] is True
    assert "freeze_step" not in translation.optim_args
    (row,) = [row for row in translation.rows if row.option.endswith("exp_avg_mask")]
    assert "param group" in row.remark
    off = {"flops_profiler": {"detailed": True, "enabled": False}, "wandb": {"enabled": False, "team": "x"}}
    rows = [row for row in translate(off).rows if row.given]
    assert {row.kind for row in rows} == {SAME} and len(rows) == 4


def test_loss_scales_are_had_in_accelerate_alone() -> None:
    translation = translate({"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500}})
    assert translation.scaler == {"init_scale": 4096.0, "growth_interval": 500}
    assert [row.option for row in translation.lost] == ["fp16.initial_scale_power", "fp16.loss_scale_window"]
    assert "GradScalerKwargs(init_scale=4096.0, growth_interval=500)" in accelerate_code(translation)
    constant = translate({"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 500}})
    assert constant.scaler == {"init_scale": 128.0, "growth_interval": 2**31 - 1}
    off = translate({"fp16": {"enabled": False, "loss_scale": 128}})
    assert off.lost == [] and off.scaler == {}


def test_schedules(tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments, get_scheduler

    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 900, "warmup_min_ratio": 0.1}}
    translation = translate({"scheduler": cosine})
    assert translation.flags["--lr_scheduler_type"] == "cosine_with_min_lr"
    words = [*translation.arguments(), "--output_dir", str(tmp_path), "--use_cpu"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    kwargs = args.lr_scheduler_kwargs
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, 2000, kwargs)
    rates = [schedule.lr_lambdas[0](step) for step in (500, 1000, 2000)]  # DeepSpeed's defaults: 1000 steps, to 1e-4
    assert rates == pytest.approx([0.5, 1.0, 1e-4])
    assert [row.option for row in translation.lost] == ["scheduler.params.warmup_min_ratio"]
    logarithmic = translate({"scheduler": {"type": "WarmupLR"}})
    assert [row.option for row in logarithmic.lost] == ["scheduler.params.warmup_type"]
    assert logarithmic.flags["--learning_rate"] == 1e-3 and logarithmic.flags["--warmup_steps"] == 1000
    other = translate({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}})
    assert [row.option for row in other.lost] == ["scheduler.type", "scheduler.params.cycle_min_lr"]


@pytest.mark.parametrize(
    ("config", "option", "reason"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "FSDP"),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}}, "stage3_max_live_parameters", "ZeRO"),
        ({"zero_optimization": {"stage": 2, "sub_group_size": 1e9}}, "sub_group_size", "stage 3"),
        ({"zero_optimization": {"stage": 2, "reduce_scatter": False}}, "reduce_scatter", "twice as much"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "device", "host memory only"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "device", "FSDP"),
        ({**with_optimizer("OneBitLamb"), "zero_optimization": {"stage": 1}}, "stage", "cannot be partitioned"),
        (with_optimizer("Lion"), "optimizer.type", "the optimizers here are"),
        (with_optimizer("OneBitAdam", amsgrad=True), "amsgrad", "refused"),
        (with_optimizer("OneBitAdam", momentum=0.9), "momentum", "no such option"),
        (with_optimizer("AdamW", comm_backend_name="nccl"), "comm_backend_name", "sends nothing"),
        (with_optimizer("OneBitLamb", adam_w_mode=False), "adam_w_mode", "L2"),
        ({"train_batch_size": 64}, "train_batch_size", "give --ranks"),
        ({"fp16": {"enabled": True, "hysteresis": 2}}, "fp16.hysteresis", "every overflow"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled", "torch.profiler"),
        ({"train_micro_batch_size": 4}, "train_micro_batch_size", "no such option"),
    ],
)
def test_what_has_no_counterpart_is_named_with_a_reason(config: dict[str, Any], option: str, reason: str) -> None:
    found = {row.option: row.remark for row in translate(config).lost}
    (name,) = [name for name in found if name.endswith(option) and reason in found[name]]
    assert name in set(leaves(config))


ZERO_OPTIONS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
)


def test_every_option_is_accounted_for() -> None:
    named = [(rule.section, name) for rule in RULES if isinstance(rule.options, str) for name in rule.options.split()]
    paths = {section + name.rstrip("*.") for section, name in named}
    sections = {name[:-2] for section, name in named if name.endswith(".*") and not section}
    everything = {name: dict.fromkeys(("enabled", "something"), True) for name in sections}
    zero = {path.split(".")[1]: True for path in paths if path.startswith("zero_optimization.") and "stage" not in path}
    zero |= dict.fromkeys(ZERO_OPTIONS, "auto")
    assert len(sections) > 20 and len(zero) >= 15
    configs = [*CONFIGS.values(), {"zero_optimization": {"stage": 2, **zero}, **everything}]
    configs += [with_optimizer(kind, **dict.fromkeys(text_options(cls), "auto")) for kind, cls in KINDS.items()]
    configs += [{"flops_profiler": {"detailed": True, "enabled": False}, "tensorboard": {"enabled": True, "job": "a"}}]
    for config in configs:
        before = copy.deepcopy(config)
        for same in (False, True):
            rows = [row for row in translate(config, ranks=64, same_arithmetic=same).rows if row.given]
            assert sorted(row.option for row in rows) == sorted(leaves(config))
            assert all(row.here or row.remark for row in rows)
        assert config == before


KINDS = {"OneBitAdam": OnebitAdam, "ZeroOneAdam": ZeroOneAdam, "OneBitLamb": OnebitLamb, "Lamb": Lamb}


# -- Accelerate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_the_printed_code_runs(name: str) -> None:
    from accelerate.state import AcceleratorState

    config = copy.deepcopy(CONFIGS[name])
    config.get("optimizer", {}).get("params", {}).pop("comm_backend_name", None)  # this process has no NCCL
    translation = translate(config, ranks=64, same_arithmetic=name == "1-bit LAMB")
    scope: dict[str, Any] = {"model": torch.nn.Linear(3, 2)}
    AcceleratorState._reset_state(reset_partial_state=True)
    exec(accelerate_code(translation), scope)
    AcceleratorState._reset_state(reset_partial_state=True)
    optimizer = scope["optimizer"].optimizer
    kinds = {"1-bit Adam": OnebitAdam, "0/1 Adam": ZeroOneAdam, "1-bit LAMB": OnebitLamb}
    assert type(optimizer) is kinds.get(name, ZeroOptimizer)
    if name == "1-bit Adam":
        assert optimizer.freeze_step == 23000 and optimizer.param_groups[0]["lr"] == 4e-4
    if name == "1-bit LAMB":
        assert optimizer.scale_block is None and optimizer.variance_floor == 0
        assert optimizer.param_groups[0]["bias_correction"] is False


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ONEBIT_ADAM))
    assert cli.main(["from-deepspeed", str(path), "--ranks", "64"]) == 0
    text = capsys.readouterr().out
    for line in (
        "    --optim onebit_adam\n",
        "    --optim_args communicator=nccl,freeze_step=23000,bias_correction=false\n",
        "    --gradient_accumulation_steps 4\n",
        "optimizer.params.bias_correction (false) -> --optim_args bias_correction=false: had no effect in DeepSpeed",
    ):
        assert line in text
    assert "No counterpart" not in text
    path.write_text(json.dumps({**ONEBIT_ADAM, "sparse_gradients": True}))
    assert cli.main(["from-deepspeed", str(path), "--json", "--ranks", "64"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["lost"] == ["sparse_gradients"]
    assert facts["trainer"] == translate(ONEBIT_ADAM, ranks=64).arguments()
    assert [row["kind"] for row in facts["options"] if row["option"] == "sparse_gradients"] == [LOST]


def test_names_in_a_configuration_cannot_change_what_a_terminal_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = "\x1b[2J\u202e\nWhat becomes what:\r"
    optimizer = {"type": forged, "params": {forged: forged, "lr": 1e-3}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"optimizer": optimizer, forged: {"enabled": True, forged: forged}}))
    cli.main(["from-deepspeed", str(path)])
    lines = capsys.readouterr().out.split("\n")
    assert sum(r"\x1b[2J" in line for line in lines) >= 2 and all(map(str.isprintable, lines))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a DeepSpeed configuration in JSON: Expecting value"),
        ("[1]", "it must be an object, got list"),
        ('{"fp16": {}, "fp16": {}}', "fp16 given twice"),
        ('{"optimizer": "OneBitAdam"}', "optimizer must be an object with options, got 'OneBitAdam'"),
        ('{"zero_optimization": {"stage": 5}}', "zero_optimization.stage must be 0, 1, 2 or 3, got 5"),
        ('{"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": "soon"}}}', "freeze_step must be"),
        ('{"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 0}}}', "freeze_step must be"),
        ('{"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}', "optimizer.params.lr must be a finite number"),
        ('{"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}', "optimizer.params.betas must be 2 numbers"),
        ('{"optimizer": {"type": "OneBitLamb", "params": {"max_coeff": true}}}', "max_coeff must be a float"),
        ('{"train_batch_size": 5}', "must be a multiple of 2, by 2 rank(s), got 5"),
    ],
)
def test_what_is_no_configuration_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    assert cli.main(["from-deepspeed", str(path), "--ranks", "2"]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["from-deepspeed", str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err
