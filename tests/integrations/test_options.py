"""Options: in --optim_args, in the plug-in and in the environment each reaches its owner, or is refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_compressopt
from hf_compressopt import CompressOptAccelerator, CompressOptPlugin, FusedAdam, OnebitAdam, ZeroOptimizer, attach
from hf_compressopt.grad_compression import MessageOptions
from hf_compressopt.integrations.accelerate import Attachment
from hf_compressopt.integrations.optim_args import read_optim_args
from hf_compressopt.integrations.run_options import RunOptions
from tests.support.harness import on_ranks
from tests.support.trainer_runs import Run, make_trainer, use_accelerate


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("onebit_adam", None, {"optimizer": "onebit_adam"}),
        (
            "onebit_adam",
            " freeze_step = 3 , scale_block=none ",
            {"optimizer": "onebit_adam", "optimizer_options": {"freeze_step": 3, "scale_block": None}},
        ),
        ("onebit_lamb", "max_coeff=2", {"optimizer": "onebit_lamb", "optimizer_options": {"max_coeff": 2.0}}),
        (
            "zero_one_adam",
            "max_update=none",
            {"optimizer": "zero_one_adam", "optimizer_options": {"max_update": None}},
        ),
        ("onebit_adam", "async_save=true", {"optimizer": "onebit_adam", "async_save": True}),
        ("fused_adam", "bias_correction=false", {"optimizer_options": {"bias_correction": False}}),
        (
            "zero2_adamw",
            "bucket_cap_mb=50,async_save=1",
            {"zero": {"stage": 2, "bucket_cap_mb": 50.0}, "async_save": True},
        ),
        ("fused_adam", "zero_stage=1,clip_grad=2", {"zero": {"stage": 1, "clip_grad": 2.0}}),
        ("adamw_torch", "zero_stage=0", {}),
        ("adamw_torch", "fused=true", {"others": "fused=true"}),
        (
            "adamw_torch",
            "grad_compression=int4,node_bits=16",
            {"grad_compression": "int4", "messages": MessageOptions(node_bits=16)},
        ),
        ("galore_adamw", "in;Trainer's own:format", {"others": "in;Trainer's own:format"}),
        ("sgd", "momentum=0.9, zero_stage=2", {"zero": {"stage": 2}, "others": "momentum=0.9"}),
    ],
)
def test_each_option_reaches_its_owner(name: str, text: str | None, found: dict[str, Any]) -> None:
    assert read_optim_args(name, text) == RunOptions(**found)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("zero1_adamw", ["bucket_cap_mb=none", "overlap_comm=true", "async_save=false"]),
        ("onebit_adam", ["warmup_bits=4", "freeze_step=auto", "scale_block=4096", "async_save=false"]),
        ("adamw_torch", ["grad_compression=none", "  node_bits=32", "zero_stage=0"]),
    ],
)
def test_help_prints_every_option_on_a_line_and_ends(
    name: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_optim_args(name, " help ")
    told = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and told[0].startswith(f"--optim {name} ")
    for line in lines:
        assert sum(row.startswith(f"  {line} ") and len(row) > 40 for row in told) == 1


#: ``--optim``, ``--optim_args``, and what the error says.
REFUSED = [
    ("zero2_adamw", "bukcet_cap_mb=50", "zero2_adamw has no option 'bukcet_cap_mb': did you mean 'bucket_cap_mb'"),
    ("fused_adam", "zero_stage=2,bukcet_cap_mb=50", "FusedAdam has no option 'bukcet_cap_mb': did you mean 'bucket_"),
    ("fused_adam", "freeze_step=3", "FusedAdam has no option 'freeze_step', which onebit_adam"),
    ("zero1_adamw", "freeze_step=3", "no option 'freeze_step'"),
    ("zero1_adamw", "stage=2", "no option 'stage'"),
    ("zero1_adamw", "lr=2", "--learning_rate"),
    ("onebit_adam", "betas=0.9", "--adam_beta1"),
    ("onebit_adam", "frezze_step=3", "no option 'frezze_step': did you mean 'freeze_step'"),
    ("onebit_adam", "freeze_step=soon", "freeze_step must be an int >= 1, or 'auto', got 'soon'"),
    ("onebit_adam", "max_freeze_step=soon", "max_freeze_step must be an int or none, got 'soon'"),
    ("onebit_adam", "freeze_step=0", "freeze_step must be >= 1, or 'auto', got 0"),
    ("onebit_adam", "scale_block=12", "scale_block must be a positive multiple of 8"),
    ("onebit_adam", "bias_correction=perhaps", "bias_correction must be true or false"),
    ("onebit_adam", "communicator=carrier_pigeon", "carrier_pigeon"),
    ("onebit_adam", "param_compression=int4", "OnebitAdam has no option 'param_compression'"),
    ("onebit_adam", "grad_compression=int4", "onebit_adam sends gradients in a way of"),
    ("adamw_torch", "grad_compression=int2", "grad_compression must be one of"),
    ("adamw_torch", "grad_compression=int4,bucket_cap_mb=0", "bucket_cap_mb must be > 0"),
    ("adamw_torch", "grad_compression=int4,state=float32", "optim_args: state is no option any more: OnebitAdam,"),
    ("onebit_adam", "state=float32", "gradients of 4 or 8 bits keep their errors, and these two optimizers their"),
    ("adamw_torch", "param_compression=int4", "is an option of ZeRO, whose ranks send"),
    ("adamw_torch", "grad_compression=int4,param_compression=int3", "param_compression must be one of"),
    ("adamw_torch", "grad_compression=int4,param_compression=int4", "FSDP2 gathers them in full precision"),
    ("adamw_torch", "param_compression=exact", "or by param_compression=exact beside grad_compression=int4"),
    ("adamw_torch", "zero_stage=1,grad_compression=int3", "grad_compression must be one of"),
    ("zero2_adamw", "param_compression=int3", "param_compression must be one of"),
    ("adamw_torch", "grad_compresion=int4", "has no option 'grad_compresion': did you mean 'grad_compression'"),
    ("adamw_torch", "zero_stge=2", "has no option 'zero_stge': did you mean 'zero_stage'?"),
    ("adamw_torch", "freeze_step=200", "adamw_torch has no option 'freeze_step', which onebit_adam"),
    ("adamw_torch", "foo=1", "adamw_torch has no option 'foo'."),
    ("lamb", "async_save=true", "async_save=true is not supported with lamb"),
    ("fused_adam", "async_save=yes", "use it with one of ['onebit_adam'"),
    ("onebit_adam", "async_save=maybe", "async_save must be true or false, got 'maybe'"),
    ("adamw_torch", "zero_stage=3", "zero_stage must be 0, 1 or 2, got 3"),
    ("adamw_torch", "zero_stage=two", "zero_stage must be an int"),
    ("zero2_adamw", "zero_stage=1", "part of the optimizer's name"),
    ("onebit_lamb", "zero_stage=2", "--optim zero2_adamw"),
    ("adafactor", "zero_stage=1", "whole rows and columns"),
    ("zero2_adamw", "offload_optimizer=cpu", "no accelerator"),
    ("zero2_adamw", "bucket_cap_mb=50,bucket_cap_mb=60", "given twice"),
    ("zero2_adamw", "bucket_cap_mb", "name=value"),
]


@on_ranks(2, timeout=120)
def test_what_nobody_knows_is_refused_by_trainer_on_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    for name, text, said in REFUSED:
        run = Run({"optim": name, "optim_args": text, "output_dir": str(tmp_path)})
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            make_trainer(rank, world_size, run).create_optimizer()
        assert text != "frezze_step=3" or "variance_floor" not in str(caught.value)


@pytest.mark.parametrize(("optim", "known"), [("adamw_torch", ""), ("sgd", "momentum=0.9,")])
def test_an_option_that_trainers_own_optimizer_ignores_is_refused_under_zero(optim: str, known: str) -> None:
    from transformers import Trainer, TrainingArguments

    hf_compressopt.register()
    given = {"output_dir": "unused", "optim": optim, "use_cpu": True, "report_to": "none"}
    try:
        Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(**given, optim_args=known.rstrip(",") or None))
    except ValueError:
        pytest.skip("the Trainer of this transformers gives SGD no options")
    args = TrainingArguments(**given, optim_args=f"{known}zero_stage=2,bukcet_cap_mb=50")
    with pytest.raises(ValueError, match=f"{optim} has no option 'bukcet_cap_mb': did you mean 'bucket_cap_mb'"):
        Trainer.get_optimizer_cls_and_kwargs(args)
    args.optim_args = f"{known}zero_stage=2,bucket_cap_mb=50"
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    assert cls is ZeroOptimizer and kwargs["bucket_cap_mb"] == 50 and ("momentum" in kwargs) == bool(known)


def made_by_trainer(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], optim: str, optim_args: str) -> Any:
    """The class of the optimizer, and its options."""
    from transformers import Trainer, TrainingArguments

    hf_compressopt.register()
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(f"COMPRESSOPT_{name}", value)
        quiet = {"output_dir": "unused", "use_cpu": True, "report_to": "none"}
        args = TrainingArguments(**quiet, optim=optim, optim_args=optim_args or None)
        return Trainer.get_optimizer_cls_and_kwargs(args)


def test_variables_stand_for_what_optim_args_do_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, str], str, str, dict[str, Any]]] = [
        ({"PARAM_COMPRESSION": "int8"}, "zero2_adamw", "", {"stage": 2, "param_compression": "int8"}),
        ({"PARAM_COMPRESSION": "int8"}, "zero2_adamw", "param_compression=none", {"param_compression": "none"}),
        ({"ZERO_STAGE": "2"}, "fused_adam", "grad_compression=int4", {"stage": 2, "grad_compression": "int4"}),
        ({"BUCKET_CAP_MB": "5"}, "adamw_torch", "zero_stage=1", {"stage": 1, "bucket_cap_mb": 5.0}),
        ({"WARMUP_BITS": "8", "CLIP": "local"}, "onebit_adam", "clip=sketch", {"warmup_bits": 8, "clip": "sketch"}),
    ]
    for variables, optim, optim_args, expected in cases:
        cls, options = made_by_trainer(monkeypatch, variables, optim, optim_args)
        assert (cls is ZeroOptimizer) == ("stage" in options) == (optim != "onebit_adam")
        assert {name: options[name] for name in expected} == expected, (variables, optim_args)
    cls, options = made_by_trainer(monkeypatch, {"ZERO_STAGE": "2"}, "fused_adam", "zero_stage=0")
    assert cls is FusedAdam and "stage" not in options
    for name in ("GRAD_COMPRESSION", "PARAM_COMPRESSION"):
        with pytest.raises(ValueError, match=f"{name.lower()}=int4 is"):
            made_by_trainer(monkeypatch, {name: "int4"}, "onebit_adam", "")


@on_ranks(2)
def test_options_are_read_when_a_trainer_is_made_and_not_again(rank: int, world_size: int, tmp_path: Path) -> None:
    given = {"optim": "onebit_adam", "optim_args": "freeze_step=1", "max_steps": 2, "output_dir": str(tmp_path)}
    trainer = make_trainer(rank, world_size, Run({**given, "save_strategy": "steps", "save_steps": 1}))
    trainer.create_optimizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSOPT_OF_ANOTHER_PROGRAM", "1")
        trainer.args.optim_args = "of_another=1"
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_the_spellings_of_the_ecosystem_mean_what_the_older_ones_mean() -> None:
    params = [torch.nn.Parameter(torch.ones(8))]
    assert OnebitAdam(params, overlap_comm=True)._clip == OnebitAdam(params, clip="late")._clip == "late"
    with pytest.raises(ValueError, match="overlap_comm=True needs clip='sketch', got 'local'"):
        OnebitAdam(params, overlap_comm=True, clip="local")
    with pytest.raises(TypeError, match="overlap_comm must be True or False, got 1"):
        OnebitAdam(params, overlap_comm=1)  # type: ignore[arg-type]
    for inner in (torch.optim.AdamW, torch.optim.SGD):
        assert ZeroOptimizer(params, inner, lr=0.1, max_grad_norm=2.0).clip_grad == 2.0
    with pytest.raises(ValueError, match="max_grad_norm=2.0 and clip_grad=1.0 are two spellings"):
        ZeroOptimizer(params, torch.optim.AdamW, max_grad_norm=2.0, clip_grad=1.0)
    both = [CompressOptPlugin(topology=name).run_options().messages for name in ("hierarchical", "two-level")]
    assert both[0] == both[1] and both[0].topology == "hierarchical"


# -- the plug-in, by its fields and by the environment ----------------------------------------------------------------

NAMES = ("onebit_adam", "zero_one_adam", "onebit_lamb")


def adamw() -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(torch.ones(8))], lr=0.5, weight_decay=0.1)


def make(name: str, **options: Any) -> Any:
    return CompressOptPlugin(optimizer=name, **options).convert(adamw())


ONEBIT: dict[str, Any] = {"optimizer": "onebit_adam"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "zwei_bit"}, "optimizer must be one of"),
        ({"freeze_step": "soon"}, "freeze_step must be an int >= 1, or 'auto', got 'soon'"),
        ({"freeze_step": 0}, "freeze_step must be >= 1, or 'auto', got 0"),
        ({"total_steps": 0}, "total_steps must be >= 1"),
        ({"total_steps": 1.5}, "total_steps must be an int >= 1"),
        ({"grad_compression": "4bit"}, "grad_compression must be one of"),
        ({"grad_compression": "int4", "bucket_cap_mb": 0.0}, "bucket_cap_mb must be > 0"),
        ({"optimizer": "onebit_lamb", "grad_compression": "int4"}, "onebit_lamb sends gradients in a way of its own"),
        ({"param_compression": "int4"}, "param_compression=int4 is an option of ZeRO, whose"),
        ({**ONEBIT, "zero_stage": 1, "param_compression": "int4"}, "param_compression=int4 is an option of ZeRO"),
        ({"zero_stage": 3}, "zero_stage must be 0, 1 or 2, got 3"),
        ({"optimizer": "zero_one_adam", "zero_stage": 2}, "zero_stage=2 is not supported with zero_one_adam"),
        ({**ONEBIT, "zero_stage": 2, "clip": "local"}, "zero_stage=2 needs clip='late'"),
        ({**ONEBIT, "zero_stage": 1, "warmup_bits": 16}, "warmup_bits to be one of"),
    ],
)
def test_what_is_not_legal_is_refused(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        CompressOptPlugin(**options)
    for name, value in options.items():
        monkeypatch.setenv(f"COMPRESSOPT_{name.upper()}", str(value))
    with pytest.raises(ValueError, match=list(options)[-1] if "1.5" not in str(options) else "TOTAL_STEPS"):
        CompressOptPlugin()


def test_fields_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CompressOptPlugin()
    assert (plain.optimizer, plain.freeze_step, plain.total_steps) == ("onebit_adam", "auto", None)
    settings = {"FREEZE_STEP": "77", "SCALE_BLOCK": "none", "VARIANCE_FLOOR": "0.5", "TOTAL_STEPS": "70"}
    for name, value in {**settings, "OPTIMIZER": "none"}.items():
        monkeypatch.setenv(f"COMPRESSOPT_{name}", value)
    plugin = CompressOptPlugin()
    assert (plugin.freeze_step, plugin.scale_block, plugin.variance_floor) == (77, None, 0.5)
    assert (plugin.optimizer, plugin.total_steps) == ("none", 70) and CompressOptPlugin(freeze_step=5).freeze_step == 5
    for text in ("auto", ""):  # an empty variable is none
        monkeypatch.setenv("COMPRESSOPT_FREEZE_STEP", text)
        assert CompressOptPlugin().freeze_step == "auto"
    monkeypatch.setenv("COMPRESSOPT_OPTIM", "zero_one_adam")
    with pytest.raises(ValueError, match="differ: set one of them"):
        CompressOptPlugin()


def test_ordinary_optimizers_stay_under_zero_and_with_compressed_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"zero_stage": 1}, {"grad_compression": "int4"}, {"zero_stage": 2, "grad_compression": "int8"}):
        plugin = CompressOptPlugin(**options)  # type: ignore[arg-type]
        carried = plugin.run_options()
        assert plugin.optimizer == "none" and bool(carried.compresses) == ("zero_stage" not in options) != bool(
            carried.zero
        )
    monkeypatch.setenv("COMPRESSOPT_OPTIM", "onebit_adam")
    for stage in (1, 2):
        monkeypatch.setenv("COMPRESSOPT_ZERO_STAGE", str(stage))
        plugin = CompressOptPlugin()
        assert not plugin.run_options().zero and plugin.convert(adamw()).zero_stage == stage  # type: ignore[attr-defined]


def test_options_reach_the_optimizer_that_the_plugin_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        plain = adamw()
        made: Any = CompressOptPlugin(optimizer=name, freeze_step=7).convert(plain)
        assert made.freeze_step == 7 and made.param_groups[0] is plain.param_groups[0]
        assert type(made).__name__.lower() == name.replace("_", "")
        assert made.compact == (name != "onebit_lamb")
    for name in NAMES:
        assert make(name, max_update=3.0).max_update == 3.0 and not make(name, max_update=None).max_update
    monkeypatch.setenv("COMPRESSOPT_MAX_UPDATE", "2.5")
    assert make("onebit_adam").max_update == 2.5
    monkeypatch.setenv("COMPRESSOPT_STATE", "compact")
    with pytest.raises(ValueError, match="COMPRESSOPT_STATE: state is no option any more: OnebitAdam, .* Leave it"):
        make("onebit_adam")


def test_what_it_can_take_over() -> None:
    class Named(torch.optim.AdamW):
        """An optimizer with defaults of its own, and AdamW's step."""

    plugin, params = CompressOptPlugin(freeze_step=3), [nn.Parameter(torch.ones(8))]
    assert isinstance(plugin.convert(Named(params)), OnebitAdam)
    sgd = torch.optim.SGD(params, lr=0.1)
    assert plugin.convert(sgd) is sgd
    with pytest.raises(ValueError, match="use AdamW"):
        plugin.convert(torch.optim.Adam(params, weight_decay=0.1))
    used = torch.optim.AdamW(params)
    params[0].sum().backward()
    used.step()
    with pytest.raises(ValueError, match="before the first"):
        plugin.convert(used)


@on_ranks(2)
def test_a_plug_in_is_read_until_something_is_prepared(rank: int, world_size: int) -> None:
    """Its fields may be set after an accelerator has it, and one that a Trainer's accelerator is given counts."""
    use_accelerate(rank, world_size)
    plugin = CompressOptPlugin(optimizer="onebit_adam")
    accelerator = CompressOptAccelerator(cpu=True, compressopt_plugin=plugin)
    plugin.freeze_step = 123
    _, optimizer = accelerator.prepare(nn.Linear(2, 2), adamw())
    assert optimizer.optimizer.freeze_step == 123

    trainer = make_trainer(rank, world_size, Run({"max_steps": 1}))
    attach(trainer.accelerator, CompressOptPlugin(optimizer="onebit_adam", freeze_step=7))
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, OnebitAdam) and trainer.optimizer.optimizer.freeze_step == 7


def test_exact_parameters_beside_int4_gradients_go_with_them_in_one_process() -> None:
    attachment = Attachment()
    attachment.take(CompressOptPlugin(grad_compression="int4", param_compression="exact").run_options())
    attachment.leave_gradients_alone()
    assert not attachment.options.compresses and attachment.options.param_compression == "auto"
