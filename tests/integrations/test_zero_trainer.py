"""Trainer with `--optim zero1_adamw` and `zero2_adamw` beside its default AdamW under DDP."""

from pathlib import Path

import pytest
import torch

from tests.support.harness import run_ranks
from tests.support.spreading import short
from tests.support.trainer_runs import VARIANTS, Run, logged, losses, train, train_all

#: Of VARIANTS; the second ones are for the long tests.
SHORT = ("plain", "accumulation", "gradient_checkpointing", "find_unused_parameters", "scaler")
EACH = (*SHORT, "clipping", "bf16_autocast", "reentrant", "torch_compile", "partly_frozen", "evaluate_before_train")


@pytest.mark.parametrize("name", short(EACH, SHORT))
def test_losses_and_weights_are_those_of_adamw_under_ddp(name: str, tmp_path: Path) -> None:
    arguments, more = VARIANTS[name]
    arguments = {"output_dir": str(tmp_path), "max_steps": 6, "learning_rate": 1e-3, **arguments}
    runs = [
        Run(arguments, **{**more, "evaluate_first": False}),
        Run({**arguments, "optim": "zero1_adamw"}, **more),
        Run({**arguments, "optim": "zero2_adamw", "optim_args": "reduce_bucket_size=3000"}, **more),
    ]
    plain, *partitioned = run_ranks(2, train_all, *runs, timeout=240)[0]
    assert plain["optimizer"] == "AdamW" and plain["model_class"] == "DistributedDataParallel"
    for result in partitioned:
        assert result["fused"] == plain["fused"] is True
        assert result["optimizer"] == "ZeroOptimizer" and result["model_class"] != "DistributedDataParallel"
        # a norm of shards is rounded in another way than torch's: a clipped step may differ in its last bit
        assert losses(result) == pytest.approx(losses(plain), abs=5e-7) and len(losses(plain)) == 6
        assert [f"{loss:.4g}" for loss in losses(result)] == [f"{loss:.4g}" for loss in losses(plain)]
        assert result["alike"] == [True] * 6
        worst = max(float((result["params"][k] - v).abs().max()) for k, v in plain["params"].items() if v.numel())
        assert worst <= (1e-5 if name == "bf16_autocast" else 1e-6), worst
        if name == "scaler":
            continue  # Accelerate's own reports the norm of scaled gradients here
        norms = [logged(r, "grad_norm") for r in (result, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    arguments = {"output_dir": str(tmp_path), "optim": "zero2_adamw", "max_grad_norm": 0.0}
    for scaler in (True, False):
        results = run_ranks(2, train, Run(arguments, scaler=scaler, overflow=(1, 3)), timeout=240)
        for result in results:
            assert result["alike"] == [True] * 8
            assert [row["skipped"] for row in result["rows"]] == [False] * 3 + [True] + [False] * 4
            assert result["rows"][3]["norm"] == result["rows"][2]["norm"] != result["rows"][4]["norm"]
            assert result["metrics"]["skipped_steps"] == 1


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
