"""--optim_args: every option reaches its owner, and one that nobody knows is refused."""

import re
from pathlib import Path

import pytest
import torch

import hf_compressopt
from hf_compressopt import CompressOptPlugin, OnebitAdam, ZeroOptimizer
from hf_compressopt.integrations.plugin import OptimArgs, read_optim_args
from hf_compressopt.integrations.trainer import attachment_of
from tests.support.harness import on_ranks
from tests.support.trainer_runs import Run, make_trainer


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("onebit_adam", None, OptimArgs()),
        ("onebit_adam", " freeze_step = 3 , scale_block=none ", OptimArgs({"freeze_step": 3, "scale_block": None})),
        ("onebit_lamb", "state=compact", OptimArgs({"state": "compact"})),
        ("onebit_adam", "max_update=3.5", OptimArgs({"max_update": 3.5})),
        ("zero_one_adam", "max_update=none", OptimArgs({"max_update": None})),
        ("onebit_adam", "async_save=true", OptimArgs(async_save=True)),
        ("fused_adam", "bias_correction=false", OptimArgs({"bias_correction": False})),
        (
            "zero2_adamw",
            "bucket_cap_mb=50,async_save=1",
            OptimArgs(zero={"stage": 2, "bucket_cap_mb": 50.0}, async_save=True),
        ),
        ("fused_adam", "zero_stage=1,clip_grad=2", OptimArgs(zero={"stage": 1, "clip_grad": 2.0})),
        ("adamw_torch", "fused=true", OptimArgs(others="fused=true")),
        (
            "adamw_torch",
            "grad_compression=int4,state=float32",
            OptimArgs(grad_compression="int4", messages={"state": "float32"}),
        ),
        ("galore_adamw", "in;Trainer's own:format", OptimArgs(others="in;Trainer's own:format")),
        ("sgd", "momentum=0.9, zero_stage=2", OptimArgs(zero={"stage": 2}, others="momentum=0.9")),
    ],
)
def test_each_option_reaches_its_owner(name: str, text: str | None, found: OptimArgs) -> None:
    assert read_optim_args(name, text) == found


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("zero1_adamw", ["bucket_cap_mb=none", "overlap_comm=true", "async_save=false"]),
        ("onebit_adam", ["warmup_bits=4", "freeze_step=auto", "scale_block=4096", "async_save=false"]),
        ("adamw_torch", ["grad_compression=none", "  node_bits=32", "  state=compact", "zero_stage=0"]),
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


@on_ranks(2)
def test_the_state_of_compressed_gradients_reaches_them(rank: int, world_size: int, tmp_path: Path) -> None:
    for text, compact in (("", True), (",state=float32", False)):
        trainer = make_trainer(rank, world_size, Run({"optim_args": f"grad_compression=int4{text}", "max_steps": 1}))
        trainer.train()
        (found,) = attachment_of(trainer).models.compressions()
        assert found.errors.compact is compact


#: ``--optim``, ``--optim_args``, and what the error says.
REFUSED = [
    ("zero2_adamw", "bukcet_cap_mb=50", "zero2_adamw has no option 'bukcet_cap_mb': did you mean 'bucket_cap_mb'"),
    ("fused_adam", "zero_stage=2,bukcet_cap_mb=50", "FusedAdam has no option 'bukcet_cap_mb': did you mean 'bucket_"),
    ("fused_adam", "freeze_step=3", "FusedAdam has no option 'freeze_step', which onebit_adam"),
    ("zero1_adamw", "freeze_step=3", "no option 'freeze_step'"),
    ("zero1_adamw", "stage=2", "no option 'stage'"),
    ("zero1_adamw", "lr=2", "--learning_rate"),
    ("onebit_adam", "betas=0.9", "--adam_beta1"),
    ("onebit_lamb", "max_update=5", "OnebitLamb has no option 'max_update', which onebit_adam and zero_one"),
    ("onebit_adam", "frezze_step=3", "no option 'frezze_step': did you mean 'freeze_step'"),
    ("onebit_adam", "freeze_step=soon", "freeze_step must be an int >= 1, or 'auto', got 'soon'"),
    ("onebit_adam", "max_freeze_step=soon", "max_freeze_step must be an int or none, got 'soon'"),
    ("onebit_adam", "freeze_step=0", "freeze_step must be >= 1, got 0"),
    ("onebit_adam", "scale_block=12", "scale_block must be a positive multiple of 8"),
    ("onebit_adam", "bias_correction=perhaps", "bias_correction must be true or false"),
    ("onebit_adam", "communicator=carrier_pigeon", "carrier_pigeon"),
    ("onebit_adam", "param_compression=int4", "OnebitAdam has no option 'param_compression'"),
    ("onebit_adam", "grad_compression=int4", "onebit_adam sends gradients in a way of"),
    ("adamw_torch", "grad_compression=int2", "grad_compression must be one of"),
    ("adamw_torch", "grad_compression=int4,bucket_cap_mb=0", "bucket_cap_mb must be > 0"),
    ("adamw_torch", "grad_compression=int4,state=small", "state must be one of ['compact', 'float32'], got 'small'"),
    ("adamw_torch", "param_compression=int4", "is an option of ZeRO and of FSDP2"),
    ("adamw_torch", "grad_compression=int4,param_compression=int3", "param_compression must be one of"),
    ("adamw_torch", "zero_stage=1,grad_compression=int3", "grad_compression must be one of"),
    ("zero2_adamw", "param_compression=int3", "param_compression must be one of"),
    ("adamw_torch", "grad_compresion=int4", "has no option 'grad_compresion': did you mean 'grad_compression'"),
    ("adamw_torch", "zero_stge=2", "has no option 'zero_stge': did you mean 'zero_stage'?"),
    ("adamw_torch", "freeze_step=200", "adamw_torch has no option 'freeze_step', which onebit_adam"),
    ("adamw_torch", "foo=1", "adamw_torch has no option 'foo'."),
    ("lamb", "async_save=true", "async_save=true is not supported with lamb"),
    ("fused_adam", "async_save=yes", "use it with one of ['onebit_adam'"),
    ("onebit_adam", "async_save=maybe", "async_save must be true or false, got 'maybe'"),
    ("adamw_torch", "zero_stage=3", "stage must be 1 or 2, got 3"),
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
    both = [CompressOptPlugin(topology=name).message_options() for name in ("hierarchical", "two-level")]
    assert both[0] == both[1] and both[0].topology == "hierarchical"
