"""ZeroOptimizer's state dicts and checkpoints."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_compressopt import ZeroOptimizer, load_state, save_state
from hf_compressopt.format.index import CheckpointError, sealed
from tests.support.harness import on_ranks
from tests.support.zero_runs import (
    OPTIMIZERS,
    Case,
    Net,
    param_groups,
    run_steps,
    train_zero,
)


def fresh(case: Case, model: Net | None = None) -> tuple[Net, ZeroOptimizer]:
    model = model or Net(case.dtype)
    cls, options = OPTIMIZERS[case.optimizer]
    return model, ZeroOptimizer(param_groups(model, case.groups), cls, **{**options, **case.options})


@pytest.mark.invariant(27)
@on_ranks(2)
def test_what_does_not_fit_is_refused_and_changes_nothing(rank: int, world_size: int, tmp_path: Path) -> None:
    case = Case("adamw", {"reduce_bucket_size": 500})
    _, optimizer = train_zero(rank, case)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    other = fresh(Case("sgd"))[1]
    with pytest.raises(ValueError, match=r"class 'ZeroOptimizer\(SGD\)'"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="rank"):
        state = optimizer.state_dict()
        optimizer.load_state_dict({**state, "compressopt": {**state["compressopt"], "rank": 1 - rank}})
    with pytest.raises(ValueError, match="world_size"):
        optimizer.load_state_dict({**state, "compressopt": {**state["compressopt"], "world_size": 5}})
    with optimizer.state_in_shards():
        stub = optimizer.state_dict()
        assert not stub["state"]
        optimizer.load_state_dict(stub)
    with pytest.raises(ValueError, match="stub"):
        optimizer.load_state_dict(stub)
    with pytest.raises(ValueError, match="parameter groups"):
        torch.optim.AdamW(Net().parameters()).load_state_dict(stub)
    save_state(optimizer, tmp_path)
    with pytest.raises(CheckpointError, match="class"):
        load_state(other, tmp_path)
    for key, row in optimizer.state_dict()["state"].items():
        for now, then in zip(row["pieces"], before[key]["pieces"], strict=True):
            assert all(torch.equal(now["state"][n], then["state"][n]) for n in then["state"])


def header(key: str, value: Any) -> Any:
    return lambda index: index["header"].__setitem__(key, value)


def hyperparameter(key: str, value: Any) -> Any:
    return lambda index: index["header"]["param_groups"][0].__setitem__(key, value)


def tensor(name: str, key: str, value: Any) -> Any:
    return lambda index: index["tensors"][name].__setitem__(key, value)


HOSTILE = {
    "a step that is no number": header("step", "7"),
    "a negative count": header("bytes_sent", -1),
    "no loss scale": header("loss_scale", None),
    "a scale of a scaler below zero": header("grad_scale", -1.0),
    "a loss scale that is no number": header("loss_scale", ["a", 1]),
    "param groups that are none": header("param_groups", [3]),
    "a word for a number": hyperparameter("lr", "abc"),
    "a rate that is no number": hyperparameter("lr", math.nan),
    "a decay that is no number": hyperparameter("weight_decay", math.nan),
    "a beta of one": hyperparameter("betas", [0.9, 1.0]),
    "a beta below zero": hyperparameter("betas", [-1.0, 0.999]),
    "amsgrad without its maxima": hyperparameter("amsgrad", True),
    "one beta": hyperparameter("betas", [0.9]),
    "a number for a choice": hyperparameter("amsgrad", 0.5),
    "a transposed moment": tensor("exp_avg/p", "shape", [5, 4]),
    "a number with a shape": tensor("scalar:step/p", "shape", [1, 2]),
    "a wider moment": tensor("exp_avg/p", "dtype", "float64"),
    "a master copy that is missing": lambda index: index["tensors"].pop("master/p"),
}


@pytest.mark.invariant(27)
@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_index_is_refused_by_name_and_changes_nothing(damage: Any, tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(4, 5, dtype=torch.bfloat16))
    optimizer = ZeroOptimizer([("p", p)], torch.optim.AdamW, lr=0.25)
    p.grad = torch.ones_like(p)
    optimizer.step()
    save_state(optimizer, tmp_path)
    file = tmp_path / "compressopt.index.json"
    index = json.loads(file.read_text())
    damage(index)
    file.write_bytes(sealed(index))
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="compressopt.index.json|.safetensors has"):
        load_state(optimizer, tmp_path)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"] and after["compressopt"] == before["compressopt"]
    mine, its = (saved["state"][0]["pieces"][0] for saved in (before, after))
    assert torch.equal(mine["master"], its["master"])
    assert all(torch.equal(mine["state"][name], its["state"][name]) for name in mine["state"])


@on_ranks(2)
def test_state_loads_into_another_state_dtype(rank: int, world_size: int, tmp_path: Path) -> None:
    """Moments that were kept in 16 bits go on in the weight's 32, and the other way."""
    for saved, loaded in (({"state_dtype": "bf16"}, {}), ({}, {"state_dtype": "bf16"})):
        case = Case("adamw", saved)
        model, optimizer = fresh(case)
        run_steps(rank, case, model, optimizer, range(3))
        save_state(optimizer, tmp_path)
        case = Case("adamw", loaded)
        model, optimizer = fresh(case)
        load_state(optimizer, tmp_path)
        run_steps(rank, case, model, optimizer, range(3, 5))
        wanted = torch.bfloat16 if loaded else torch.float32
        states = (bucket.state_of(piece) for bucket, piece in optimizer.partition.parts())
        assert {state["exp_avg"].dtype for state in states if state} == {wanted}
