"""--optim_args: every option reaches its owner, and one that nobody knows is refused."""

import pytest

from hf_compressopt.integrations.plugin import OptimArgs, read_optim_args


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
        ("galore_adamw", "in;Trainer's own:format", OptimArgs(others="in;Trainer's own:format")),
        ("sgd", "momentum=0.9, zero_stage=2", OptimArgs(zero={"stage": 2}, others="momentum=0.9")),
    ],
)
def test_each_option_reaches_its_owner(name: str, text: str | None, found: OptimArgs) -> None:
    assert read_optim_args(name, text) == found


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("zero2_adamw", "bukcet_cap_mb=50", "zero2_adamw has no option 'bukcet_cap_mb': did you mean 'bucket_cap_mb'"),
        (
            "fused_adam",
            "zero_stage=2,bukcet_cap_mb=50",
            "FusedAdam has no option 'bukcet_cap_mb': did you mean 'bucket_cap_mb'",
        ),
        ("zero1_adamw", "freeze_step=3", "no option 'freeze_step'"),
        ("zero1_adamw", "stage=2", "no option 'stage'"),
        ("zero1_adamw", "help", "the options of zero1_adamw are allgather_bucket_size .an int or none; default None"),
        ("onebit_adam", "help", "warmup_bits .an int; default 4"),
        ("adamw_torch", "help", "grad_compression .a name; default none.*zero_stage"),
        ("zero1_adamw", "lr=2", "--learning_rate"),
        (
            "onebit_lamb",
            "max_update=5",
            "OnebitLamb has no option 'max_update', which onebit_adam and zero_one",
        ),
        ("lamb", "async_save=true", "async_save=true is not supported with lamb"),
        ("adamw_torch", "zero_stage=3", "stage must be 1 or 2, got 3"),
        ("adamw_torch", "zero_stage=two", "zero_stage must be an int"),
        ("zero2_adamw", "bucket_cap_mb=50,bucket_cap_mb=60", "given twice"),
        ("zero2_adamw", "bucket_cap_mb", "name=value"),
    ],
)
def test_what_nobody_knows_is_refused(name: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", "[(]")):
        read_optim_args(name, text)


@pytest.mark.parametrize(("optim", "known"), [("adamw_torch", ""), ("sgd", "momentum=0.9,")])
def test_an_option_that_trainers_own_optimizer_ignores_is_refused_under_zero(optim: str, known: str) -> None:
    from transformers import Trainer, TrainingArguments

    import hf_compressopt
    from hf_compressopt import ZeroOptimizer

    hf_compressopt.register()
    given = {"output_dir": "unused", "optim": optim, "use_cpu": True, "report_to": "none"}
    alone = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(**given, optim_args=known.rstrip(",") or None))[1]
    if known and "momentum" not in alone:
        pytest.skip("the Trainer of this transformers gives SGD no options")
    args = TrainingArguments(**given, optim_args=f"{known}zero_stage=2,bukcet_cap_mb=50")
    with pytest.raises(ValueError, match=f"{optim} has no option 'bukcet_cap_mb': did you mean 'bucket_cap_mb'"):
        Trainer.get_optimizer_cls_and_kwargs(args)
    args.optim_args = f"{known}zero_stage=2,bucket_cap_mb=50"
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    assert cls is ZeroOptimizer and kwargs["bucket_cap_mb"] == 50 and ("momentum" in kwargs) == bool(known)


def test_the_spellings_of_the_ecosystem_mean_what_the_older_ones_mean() -> None:
    import torch

    from hf_compressopt import CompressOptPlugin, OnebitAdam, ZeroOptimizer

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
