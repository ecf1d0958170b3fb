"""Checkpoints cross over between ZeroOptimizer and the optimizer that it wraps."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import FusedAdam, Lamb, OnebitAdam, ZeroOptimizer, load_state, save_state
from hf_compressopt.format.index import CheckpointError, sealed
from tests.checkpoint.test_portable import SHAPES, train
from tests.support.family import assign
from tests.support.harness import on_ranks
from tests.support.trainer_runs import use_accelerate

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "FusedAdam": (FusedAdam, {"lr": 0.01}),
    "Lamb": (Lamb, {"lr": 0.01}),
}


def make(name: str, zero: bool, **options: Any) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    named = [(f"p{i}", nn.Parameter(torch.randn(shape), requires_grad=i != 1)) for i, shape in enumerate(SHAPES)]
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.02}]
    cls, settings = OPTIMIZERS[name]
    params = [p for _, p in named]
    return params, ZeroOptimizer(groups, cls, **settings, **options) if zero else cls(groups, **settings)


@pytest.mark.invariant(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_the_next_steps_agree_after_crossing_over_either_way(
    rank: int, world_size: int, name: str, tmp_path: Path
) -> None:
    """Three steps of one, then of both, bit for bit; in between ZeRO takes a checkpoint, or a state dict, or gives."""
    for number, (first_is_zero, in_files) in enumerate(((True, True), (False, True), (False, False))):
        params, optimizer = make(name, first_is_zero)
        train(0, params, optimizer, range(3))
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        others, other = make(name, not first_is_zero)
        assign(others, params)
        if in_files:
            save_state(optimizer, tmp_path / str(number))
            load_state(other, tmp_path / str(number))
        else:
            other.load_state_dict(optimizer.state_dict())
        assert [group["lr"] for group in other.param_groups] == [0.005, 0.01]
        for made, its in ((optimizer, params), (other, others)):
            train(0, its, made, range(3, 6))
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True)), number


OUT_OF_RANGE = [
    ("lr", "much", "lr must be of the kind of"),
    ("lr", math.nan, "lr of param group 1 must be >= 0, got nan"),
    ("lr", math.inf, "lr of param group 1 must be finite"),
    ("weight_decay", math.nan, "weight_decay of param group 1 must be >= 0, got nan"),
    ("eps", -1.0, "eps of param group 1 must be >= 0, got -1"),
    ("betas", [1.0, 0.9], r"betas\[0\] must be in \[0, 1\), got"),
    ("amsgrad", True, "amsgrad of param group 1 is True, and there is no max_exp_avg_sq/"),
]


@pytest.mark.invariant(27)
def test_what_a_plain_optimizer_cannot_be_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    params, optimizer = make("AdamW", zero=False)
    train(0, params, optimizer, range(2))
    before = [value.clone() for p in params for value in optimizer.state.get(p, {}).values()]
    halves = [("p", nn.Parameter(torch.ones(4, dtype=torch.bfloat16)))]
    for folder, other in (("onebit", OnebitAdam([nn.Parameter(torch.ones(3))])), ("sgd", make("SGD", zero=True)[1])):
        save_state(other, tmp_path / folder)
        with pytest.raises(CheckpointError, match="compressopt.index.json does not fit"):
            load_state(optimizer, tmp_path / folder)
    save_state(ZeroOptimizer(halves, torch.optim.AdamW), tmp_path / "halves")
    with pytest.raises(CheckpointError, match="master copy of p"):
        load_state(torch.optim.AdamW(halves), tmp_path / "halves")
    save_state(optimizer, tmp_path / "plain")
    file = tmp_path / "plain" / "compressopt.index.json"
    saved = json.loads(file.read_text())
    for key, value, said in OUT_OF_RANGE:
        index = copy.deepcopy(saved)
        index["header"]["param_groups"][1][key] = value
        file.write_bytes(sealed(index))
        with pytest.raises(CheckpointError, match=said):
            load_state(optimizer, tmp_path / "plain")
    after = [value for p in params for value in optimizer.state.get(p, {}).values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@on_ranks(1)
def test_accelerates_wrapper_is_looked_into(rank: int, world_size: int, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    use_accelerate(rank, world_size)
    Accelerator(cpu=True)
    optimizer = AcceleratedOptimizer(OnebitAdam([nn.Parameter(torch.ones(3))]))
    save_state(optimizer, tmp_path)
    load_state(optimizer, tmp_path)
    assert json.loads((tmp_path / "compressopt.index.json").read_text())["header"]["optimizer"] == "OnebitAdam"


def test_what_the_optimizer_itself_refuses_changes_nothing(tmp_path: Path) -> None:
    params, optimizer = make("AdamW", False)
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    train(0, params, optimizer, range(3))
    save_state(optimizer, tmp_path)
    others, fused = make("FusedAdam", False)
    train(0, others, fused, range(2))
    before = {name: {p: state[name].clone() for p, state in fused.state.items()} for name in ("exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match="amsgrad must be False"):
        load_state(fused, tmp_path)
    for name, tensors in before.items():
        assert all(torch.equal(fused.state[p][name], tensor) for p, tensor in tensors.items())

    def refuse(*_: Any) -> None:
        raise ValueError("not today")

    _, again = make("AdamW", False)
    train(0, _, again, range(2))
    kept = [state["exp_avg"].clone() for state in again.state.values()]
    again.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(ValueError, match="not today"):
        load_state(again, tmp_path)
    assert all(torch.equal(state["exp_avg"], old) for state, old in zip(again.state.values(), kept, strict=True))
