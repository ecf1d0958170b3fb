"""Every option of the compressed optimizers, by itself and in random combinations with those of Trainer."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_compressopt import average_gradients, load_state, save_state
from hf_compressopt.integrations.algorithms import ALGORITHMS
from hf_compressopt.integrations.optim_args import text_options
from tests.support.harness import run_ranks
from tests.support.trainer_runs import OLD_HOST, equal_params, same_on_all_ranks, trainer_arguments, use_accelerate

STEPS, SAVES = 8, (2, 6)  # of the saves one is in each stage
CLIP = 0.05  # below the norm of the gradients
ALL_RANKS = "all ranks"  # stands for their number
ONEBIT, ZERO_ONE, LAMB = "onebit_adam", "zero_one_adam", "onebit_lamb"
ALL = {"scale_block": 8, "warmup_bits": 32, "clip": "sketch"}
BASE: dict[str, dict[str, Any]] = {
    ONEBIT: {"freeze_step": 3, **ALL},
    ZERO_ONE: {"var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 2, **ALL},
    LAMB: {"freeze_step": 3, **ALL},
}
AUTO = {"freeze_step": "auto", "max_freeze_step": 4, "min_freeze_step": 1}
#: Option, optimizer, what is given beside or instead of BASE, and whether it changes the parameters.
FROZEN = {"trust_ratio": "frozen"}
TABLE: list[tuple[str, str, dict[str, Any], bool]] = [
    ("freeze_step", ONEBIT, {"freeze_step": 4}, True),
    ("freeze_step", LAMB, {"freeze_step": 4}, True),
    ("var_freeze_step", ZERO_ONE, {"var_freeze_step": 4}, True),
    ("max_freeze_step", ONEBIT, AUTO, True),
    ("max_freeze_step", ZERO_ONE, {"var_freeze_step": "auto", "max_freeze_step": 4, "min_freeze_step": 1}, True),
    ("min_freeze_step", ONEBIT, {"freeze_step": "auto", "max_freeze_step": 2, "min_freeze_step": 4}, True),
    ("freeze_threshold", ONEBIT, {**AUTO, "freeze_threshold": 0.5}, True),
    *(("warmup_bits", name, {"warmup_bits": bits}, True) for name in BASE for bits in (4, 8, 16)),
    ("clip", ONEBIT, {"clip": "local"}, True),
    ("clip", ZERO_ONE, {"clip": "local"}, True),
    ("overlap_comm", ONEBIT, {"overlap_comm": True}, False),  # without DDP nothing is sent during backward
    ("clip", LAMB, {"clip": "local"}, True),
    ("max_update", ONEBIT, {"max_update": 0.05}, True),
    ("max_update", ZERO_ONE, {"max_update": 0.05}, True),
    *(("variance_interval", name, {"variance_interval": 1}, True) for name in (ONEBIT, ZERO_ONE, LAMB)),
    ("bias_correction", ONEBIT, {"bias_correction": False}, True),
    ("eps_inside_sqrt", ONEBIT, {"eps_inside_sqrt": True}, True),
    ("scale_block", ONEBIT, {"scale_block": None}, True),
    ("variance_floor", ONEBIT, {"variance_floor": 0.9}, True),
    ("bucket_cap_mb", ONEBIT, {"bucket_cap_mb": 0.0002}, True),
    ("zero_stage", ONEBIT, {"zero_stage": 1, "warmup_bits": 4}, True),
    ("communicator", ONEBIT, {"communicator": "gloo"}, False),
    ("comm_backend_name", ONEBIT, {"comm_backend_name": "gloo"}, False),
    ("topology", ONEBIT, {"topology": "two-level", "node_size": ALL_RANKS}, True),
    ("node_size", ONEBIT, {"node_size": ALL_RANKS}, True),
    ("node_bits", ONEBIT, {"node_size": ALL_RANKS, "node_bits": 16}, True),
    ("fused_warmup", ONEBIT, {"fused_warmup": True}, True),  # by rounding
    ("var_update_scaler", ZERO_ONE, {"var_update_scaler": 1}, True),
    ("local_step_scaler", ZERO_ONE, {"local_step_scaler": 1}, True),
    ("local_step_clipper", ZERO_ONE, {"local_step_clipper": 1}, True),
    ("max_coeff", LAMB, {"max_coeff": 0.05}, True),
    ("min_coeff", LAMB, {"min_coeff": 5.0}, True),
    ("trust_ratio", LAMB, FROZEN, True),
    ("coeff_beta", LAMB, {"coeff_beta": 0.5}, True),
    ("factor_max", LAMB, FROZEN | {"factor_max": 0.9, "factor_min": 0.9}, True),
    ("factor_min", LAMB, FROZEN | {"factor_min": 1.5}, True),
    ("factor_threshold", LAMB, FROZEN | {"factor_threshold": 0.0001}, True),
]
#: Options with one legal value here: amsgrad must be False, cuda_aware needs a GPU, Trainer knows the total_steps.
ONE_VALUE = {"amsgrad", "cuda_aware", "total_steps"}
ROWS = [*((name, name, {}, False) for name in BASE), *TABLE]
FEW = len(BASE) + 2


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


def batch(rank: int, step: int) -> dict[str, Tensor]:
    rows = examples(False)[(step * 7 + rank * 31) % 80 :][:4]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def network() -> Regression:
    torch.manual_seed(0)
    model = Regression()
    width = 32  # a matrix of 256 elements is the smallest that travels as integers in the warmup stage
    model.layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
    return model


def train(rank: int, world_size: int, name: str, given: dict[str, Any], folder: str, resume: int) -> Tensor:
    model = network()
    optimizer = ALGORITHMS[name](model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=CLIP, **given)
    if resume:
        model.load_state_dict(torch.load(f"{folder}/{resume}/model-{rank}.pt"))
        load_state(optimizer, f"{folder}/{resume}")
    for step in range(resume + 1, STEPS + 1):
        optimizer.zero_grad()
        model(**batch(rank, step))["loss"].backward()
        average_gradients(optimizer)
        optimizer.step()
        if step in SAVES and not resume:
            save_state(optimizer, f"{folder}/{step}")
            torch.save(model.state_dict(), f"{folder}/{step}/model-{rank}.pt")
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def run_rows(rank: int, world_size: int, directory: str, count: int) -> list[tuple[Tensor, list[bool]]]:
    """The parameters of each row's run, and whether the runs that were resumed in each stage end with them."""
    results = []
    for number, (_, name, own, _) in enumerate(ROWS[:count]):
        given = {key: world_size if value == ALL_RANKS else value for key, value in {**BASE[name], **own}.items()}
        row = rank, world_size, name, given, f"{directory}/{number}"
        whole = train(*row, 0)
        results.append((whole, [torch.equal(train(*row, step), whole) for step in SAVES]))
    return results


@pytest.mark.timeout(900)
@pytest.mark.invariant(21)
@pytest.mark.parametrize(
    ("world_size", "count"), [(2, FEW), *(pytest.param(ranks, len(ROWS), marks=pytest.mark.full) for ranks in (2, 3))]
)
def test_every_option_works(world_size: int, count: int, tmp_path: Path) -> None:
    ranks = run_ranks(world_size, run_rows, str(tmp_path), count, timeout=840)
    bases = {name: ranks[0][number][0] for number, name in enumerate(BASE)}
    wrong = []
    for number, (option, name, own, changes) in enumerate(ROWS[:count]):
        params, resumed = ranks[0][number]
        if not all(torch.equal(rank[number][0], params) for rank in ranks) or not params.isfinite().all():
            wrong.append((option, name, own, "the ranks differ, or are not finite"))
        if not all(all(rank[number][1]) for rank in ranks):
            wrong.append((option, name, own, f"resumed after {SAVES}: {resumed}"))
        if torch.equal(params, bases[name]) == changes:
            wrong.append((option, name, own, "no effect" if changes else "an effect"))
    assert not wrong, "\n".join(map(str, wrong))


def test_every_option_that_text_can_set_has_a_row() -> None:
    legal = {option for cls in ALGORITHMS.values() for option in text_options(cls)}
    assert legal - ONE_VALUE == {option for option, *_ in TABLE}


# -- random combinations of options in Trainer ------------------------------------------------------------------------


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


def train_by_trainer(
    rank: int, world_size: int, directory: str, what: dict[str, Any], resume: str | None
) -> dict[str, Any]:
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
    whole = run_ranks(what["world_size"], train_by_trainer, str(directory / "whole"), what, None, timeout=240)
    saved = sorted(directory.glob("whole/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    resume = next(path for path in reversed(saved) if not path.name.endswith(f"-{steps}"))
    again = run_ranks(what["world_size"], train_by_trainer, str(directory / "again"), what, str(resume), timeout=240)
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
