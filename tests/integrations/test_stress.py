"""Random combinations of Trainer's options: ranks end alike, and a resumed run equals the uninterrupted one."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.harness import run_ranks
from tests.support.trainer_runs import OLD_HOST, equal_params, same_on_all_ranks, trainer_arguments, use_accelerate

FEATURES, EXAMPLES = 8, 90  # with 2 or 3 ranks and every size of batch an epoch ends in the midst of an accumulation
EVALUATED = 24  # a batch of 8 for each of 3 ranks: accelerate 1.3 gives a rank without a batch None


class Regression(nn.Module):
    """A few hundred parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh(), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        return {"loss": (out - labels).float().square().mean(), "logits": out}


def examples(poisoned: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(EXAMPLES, FEATURES, generator=generator)
    data = [{"x": row, "labels": row[:3].tanh()} for row in rows]
    if poisoned:
        data[7]["labels"] = torch.full((3,), float("inf"))  # one rank's gradient is not finite once in an epoch
    return data


def draw(seed: int, steps: int) -> dict[str, Any]:
    choose = random.Random(seed)
    name = choose.choice(["onebit_adam", "zero_one_adam", "onebit_lamb"])
    freeze = choose.choice(["", str(choose.randint(1, 60)), "auto", str(steps)])
    options = [f"{'var_' if name == 'zero_one_adam' else ''}freeze_step={freeze}"] if freeze else []
    options += [f"scale_block={choose.choice(['none', 8, 64, 4096])}"] if choose.random() < 0.5 else []
    options += ["bucket_cap_mb=0.0005"] if choose.random() < 0.5 else []  # 131 elements: several buckets
    options += ["async_save=true"] if choose.random() < 0.2 else []
    if name == "zero_one_adam" and choose.random() < 0.6:
        options += [f"local_step_scaler={choose.choice([2, 20])}", f"local_step_clipper={choose.choice([1, 4, 16])}"]
    save_steps = choose.choice([steps // 5, steps // 4, steps // 3 + 1])
    arguments: dict[str, Any] = {
        "optim": name,
        "optim_args": ",".join(options) or None,
        "max_steps": steps,
        "gradient_accumulation_steps": choose.choice([1, 1, 1, 2, 3]) if not OLD_HOST else 1,
        "max_grad_norm": choose.choice([0.0, 0.05, 1.0]),
        "bf16": choose.random() < 0.3,
        "weight_decay": choose.choice([0.0, 0.1]),
        "lr_scheduler_type": choose.choice(["linear", "cosine", "constant_with_warmup"]),
        "warmup_steps": choose.choice([0, steps // 10]),
        "per_device_train_batch_size": choose.choice([2, 4, 7]),
        "dataloader_drop_last": choose.random() < 0.3,
        "seed": seed,
        "save_strategy": "steps",
        "save_steps": save_steps,
        "save_total_limit": choose.choice([None, 2]),
        "eval_strategy": choose.choice(["no", "steps"]),
        "eval_steps": choose.choice([steps // 10 + 1, steps // 3]),
    }
    return {"arguments": arguments, "world_size": choose.choice([2, 2, 3]), "poisoned": choose.random() < 0.3}


def train(rank: int, world_size: int, directory: str, what: dict[str, Any], resume: str | None) -> dict[str, Any]:
    use_accelerate(rank, world_size)
    from transformers import Trainer

    import hf_compressopt.auto  # noqa: F401

    # else DDP orders its bucket anew after a resume, and 3 terms round
    own = {"ddp_find_unused_parameters": world_size > 2, "learning_rate": 1e-2, "logging_steps": 100}
    args = trainer_arguments(output_dir=directory, **own, **what["arguments"])
    torch.manual_seed(0)
    data = examples(what["poisoned"])
    trainer = Trainer(model=Regression(), args=args, train_dataset=data, eval_dataset=examples(False)[:EVALUATED])
    trainer.train(resume_from_checkpoint=resume)
    inner = trainer.optimizer.optimizer
    return {
        "params": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "alike": same_on_all_ranks(trainer.model.parameters()),
        "steps": trainer.state.global_step,
        "taken": inner.metrics()["step"] + inner.metrics()["skipped_steps"],
    }


def check_draw(seed: int, directory: Path, steps: int) -> None:
    what = draw(seed, steps)
    whole = run_ranks(what["world_size"], train, str(directory / "whole"), what, None, timeout=240)
    saved = sorted(directory.glob("whole/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    resume = next(path for path in reversed(saved) if not path.name.endswith(f"-{steps}"))
    again = run_ranks(what["world_size"], train, str(directory / "again"), what, str(resume), timeout=240)
    for result in (*whole, *again):
        assert result["alike"] and result["steps"] == result["taken"] == steps, what
        assert equal_params(result["params"], whole[0]["params"]), (what, resume.name)
        assert all(torch.isfinite(value).all() for value in result["params"].values()), what


@pytest.mark.parametrize("seed", [100, pytest.param(102, marks=pytest.mark.full), 103])
def test_random_combinations_of_options(seed: int, tmp_path: Path) -> None:
    check_draw(seed, tmp_path, 40)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(int(os.environ.get("STRESS_DRAWS", "50"))))
def test_random_combinations_of_options_for_500_steps(seed: int, tmp_path: Path) -> None:
    check_draw(seed, tmp_path, 500)
