"""State dicts and checkpoints of ZeroOptimizer, with small messages and with state of other optimizers too."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_compressopt import ZeroOptimizer, load_state, save_state
from hf_compressopt.checkpoint.partitioned import error_tensors
from hf_compressopt.format.index import CheckpointError
from tests.checkpoint.kinds import observe
from tests.checkpoint.test_checkpoint import Damage, header_with, of_tensors
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.zero_runs import (
    INT4,
    Case,
    Net,
    bits,
    different,
    fresh,
    give_averages,
    loss_of,
    masters_of,
    run_steps,
    train_zero,
)


@pytest.mark.invariant(27)
@on_ranks(2)
def test_what_does_not_fit_is_refused_and_changes_nothing(rank: int, world_size: int, tmp_path: Path) -> None:
    _, optimizer = train_zero(rank, Case(options={"reduce_bucket_size": 500}))
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


HOSTILE: dict[str, Damage] = {
    "a step that is no number": header_with("step", "7"),
    "a negative count": header_with("bytes_sent", -1),
    "no loss scale": header_with("loss_scale", None),
    "a scale of a scaler below zero": header_with("grad_scale", -1.0),
    "a loss scale that is no number": header_with("loss_scale", ["a", 1]),
    "param groups that are none": header_with("param_groups", [3]),
    "a word for a number": header_with("lr", "abc"),
    "a rate that is no number": header_with("lr", math.nan),
    "a decay that is no number": header_with("weight_decay", math.nan),
    "a beta of one": header_with("betas", [0.9, 1.0]),
    "a beta below zero": header_with("betas", [-1.0, 0.999]),
    "amsgrad without its maxima": header_with("amsgrad", True),
    "one beta": header_with("betas", [0.9]),
    "a number for a choice": header_with("amsgrad", 0.5),
    "a transposed moment": of_tensors(lambda tensors: tensors["exp_avg/p"]["shape"].reverse()),
    "a number with a shape": of_tensors(lambda tensors: tensors["scalar:step/p"].update(shape=[1, 2])),
    "a wider moment": of_tensors(lambda tensors: tensors["exp_avg/p"].update(dtype="float64")),
    "a master copy that is missing": of_tensors(lambda tensors: tensors.pop("master/p")),
}


@pytest.mark.invariant(27)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_index_is_refused_by_name_and_changes_nothing(case: str, tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(4, 5, dtype=torch.bfloat16))
    optimizer = ZeroOptimizer([("p", p)], torch.optim.AdamW, lr=0.25)
    for saves in (True, False):
        p.grad = torch.ones_like(p)
        optimizer.step()
        if saves:
            save_state(optimizer, tmp_path)
    HOSTILE[case](tmp_path)
    before, groups = observe([p], optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(CheckpointError, match="compressopt.index.json|.safetensors has"):
        load_state(optimizer, tmp_path)
    assert observe([p], optimizer) == before and optimizer.state_dict()["param_groups"] == groups


@on_ranks(2)
def test_state_loads_into_another_state_dtype(rank: int, world_size: int, tmp_path: Path) -> None:
    """Moments that were kept in 16 bits go on in the weight's 32, and the other way."""
    for saved, loaded in (({"state_dtype": "bf16"}, {}), ({}, {"state_dtype": "bf16"})):
        save_state(train_zero(rank, Case(options=saved))[1], tmp_path)
        case = Case(options=loaded)
        model, optimizer = fresh(case)
        load_state(optimizer, tmp_path)
        run_steps(rank, case, model, optimizer, range(3, 5))
        wanted = torch.bfloat16 if loaded else torch.float32
        assert {part.state["exp_avg"].dtype for part in optimizer.partition.parts() if part.state} == {wanted}


def trained(model: Net) -> list[Tensor]:
    return bits(model, trainable=True)


def errors_of(optimizer: ZeroOptimizer) -> list[Tensor]:
    names = [known.name for known in optimizer.partition.known]
    found = sorted(error_tensors(optimizer.partition, names), key=lambda error: (error.key.owner, error.start))
    return [torch.cat([error.local.detach() for error in found])] if found else []


def continue_from(rank: int, world_size: int, options: dict[str, Any], load: str, save: str) -> tuple[Any, ...]:
    """Load, if there is something, and return what was loaded; then train, save, and return what was saved."""
    model, optimizer = fresh(Case(options={**INT4, **options}))
    loaded: Any = None
    if load:
        model.load_state_dict(torch.load(f"{load}/model.pt"))  # the masters, as a saved model has
        load_state(optimizer, load)
        assert same_on_all_ranks(model.parameters())
        loaded = trained(model), masters_of(model, optimizer), errors_of(optimizer)
    steps = range(optimizer.steps, optimizer.steps + 3)
    run_steps(rank, Case(), model, optimizer, steps)
    save_state(optimizer, save)
    with optimizer.masters_in_parameters():
        torch.save(model.state_dict(), f"{save}/model.pt") if rank == 0 else None
        torch.distributed.barrier()
    return loaded, (trained(model), masters_of(model, optimizer), errors_of(optimizer))


@pytest.mark.invariant(22)
def test_another_number_of_ranks_goes_on_from_the_same_masters_and_parameters(tmp_path: Path) -> None:
    plan = [(2, {"reduce_bucket_size": 600}), (3, {"reduce_bucket_size": 900, "stage": 1}), (2, {}), (1, {})]
    folders = ["", *(str(tmp_path / str(number)) for number in range(len(plan)))]
    saved: list[Any] = []
    for (world_size, options), load, save in zip(plan, folders[:-1], folders[1:], strict=True):
        results = run_ranks(world_size, continue_from, options, load, save)
        for loaded, _ in results if load else ():
            replicas, masters, errors = loaded
            assert list(different(saved[0][1], masters)) == []
            if world_size > 1:
                assert list(different(saved[0][0], replicas)) == [] != list(different(masters, replicas))
                means = [torch.stack(old).mean(0) for old in zip(*(row[2] for row in saved), strict=True)]
                largest = max(float(mean.abs().max()) for mean in means)
                assert largest > 0
                for error, mean in zip(errors, means, strict=True):  # rounded to 8 bits once more, in other blocks
                    assert (error - mean).abs().max() <= largest / 250
            else:
                assert errors == [] and list(different(masters, replicas)) == []
        saved = [result for _, result in results]
    assert all(math.isfinite(float(master.sum())) for master in saved[0][1])


@pytest.mark.invariant(2)
@on_ranks(2)
def test_masters_cross_over_to_adamw_and_back(rank: int, world_size: int, tmp_path: Path) -> None:
    """From small messages to AdamW, and to ZeRO without them, and back."""
    case = Case(options={**INT4, "reduce_bucket_size": 600})
    model, optimizer = train_zero(rank, case)
    masters, replicas = masters_of(model, optimizer), trained(model)
    save_state(optimizer, tmp_path)
    with optimizer.masters_in_parameters(), pytest.raises(RuntimeError, match="save_state.. inside masters_in"):
        save_state(optimizer, tmp_path)
    state = optimizer.state_dict()
    with optimizer.masters_in_parameters():
        with pytest.raises(CheckpointError, match="load_state.. inside masters_in"):
            load_state(optimizer, tmp_path)
        with pytest.raises(RuntimeError, match="load_state_dict.. inside masters_in"):
            optimizer.load_state_dict(state)

    plain_model, (zero_model, zero) = Net(), fresh(Case())
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, weight_decay=0.1)
    for other_model, other in ((plain_model, plain), (zero_model, zero)):
        other_model.load_state_dict(model.state_dict())  # the replicas, which the masters of the checkpoint replace
        load_state(other, tmp_path)
        assert list(different(masters, trained(other_model))) == [] != list(different(replicas, trained(other_model)))
    with pytest.raises(ValueError, match="with masters that are ahead of the parameters: make the optimizer with it"):
        zero.load_state_dict(optimizer.state_dict())
    run_steps(rank, Case(), zero_model, zero, range(3, 5))
    params = [p for p in plain_model.parameters() if p.requires_grad]
    for step in range(3, 5):
        give_averages(loss_of(plain_model, rank, step), params)
        plain.step()
    assert list(different(bits(plain_model), bits(zero_model))) == []

    for saved in (plain, zero):
        save_state(saved, f"{tmp_path}/back")
        again, small = train_zero(rank, replace(case, steps=2))  # errors and masters that have to go
        again.load_state_dict(plain_model.state_dict())
        load_state(small, f"{tmp_path}/back")
        assert list(different(masters_of(again, small), [p.detach() for p in params])) == [] and small.steps == 5
        assert all(float(error.abs().sum()) == 0 for error in errors_of(small))
        run_steps(rank, case, again, small, range(5, 7))
        assert same_on_all_ranks(again.parameters())

    model, optimizer = train_zero(rank, replace(case, dtype=torch.bfloat16))
    save_state(optimizer, f"{tmp_path}/half")
    other_model, other = fresh(Case(dtype=torch.bfloat16))
    other_model.load_state_dict(model.state_dict())
    load_state(other, f"{tmp_path}/half")
    masters = masters_of(model, optimizer)
    assert list(different(masters, masters_of(other_model, other))) == []
    assert list(different([m.bfloat16() for m in masters], trained(other_model))) == []


class Odd(torch.optim.Optimizer):
    """An optimizer whose state is made by a function of the test's."""

    def __init__(self, params: Any, lr: float = 0.1, kind: str = "") -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].update(STATES[self.kind](p))
                    p.sub_(p.grad, alpha=group["lr"])


STATES: dict[str, Any] = {
    "a scale per block": lambda p: {"absmax": torch.ones(-(-p.numel() // 256))},
    "a norm of the part": lambda p: {"norm": p.norm()},
    "a number of the part": lambda p: {"largest": float(p.max())},
    "the name of the master copy": lambda p: {"master": torch.zeros_like(p)},
    "a name with a slash": lambda p: {"exp/avg": torch.zeros_like(p)},
    "a name of our own": lambda p: {"number:seen": 1},
    "a name that is no string": lambda p: {3: torch.zeros_like(p)},
    "words": lambda p: {"mode": "fast"},
    "numbers": lambda p: {"seen": True, "unseen": False, "count": 3, "mean": 0.5, "step": torch.tensor(2.0)},
}
REFUSED = {
    "a scale per block": "'absmax'.*Odd has the shape .*use this optimizer without ZeRO",
    "a norm of the part": "norm/.*is not the same for all parts",
    "a number of the part": "largest/.*is not the same for all parts",
    "the name of the master copy": "'master'.*rename it",
    "a name with a slash": "'exp/avg'.*rename it",
    "a name of our own": "'number:seen'.*rename it",
    "a name that is no string": "state 3.*rename it",
    "words": "must be a tensor.*'fast'",
}


def stepped(kind: str) -> tuple[nn.Parameter, ZeroOptimizer]:
    weight = nn.Parameter(torch.linspace(0, 1, 3000))
    optimizer = ZeroOptimizer([("weight", weight)], Odd, kind=kind)
    weight.sum().backward()
    optimizer.step()
    return weight, optimizer


@on_ranks(2)
def test_state_that_a_checkpoint_cannot_hold_is_refused_on_all_ranks(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    for number, (kind, message) in enumerate(REFUSED.items()):
        _, optimizer = stepped(kind)
        with pytest.raises((ValueError, OSError), match=message):
            save_state(optimizer, tmp_path / str(number))
        torch.distributed.barrier()
        assert not list((tmp_path / str(number)).iterdir())


@on_ranks(2)
def test_numbers_come_back_in_their_own_kind(rank: int, world_size: int, tmp_path: Path) -> None:
    _, optimizer = stepped("numbers")
    save_state(optimizer, tmp_path)
    again = ZeroOptimizer([("weight", nn.Parameter(torch.zeros(3000)))], Odd, kind="numbers")
    load_state(again, tmp_path)
    for part in again.partition.parts():
        state = part.state
        assert torch.equal(state.pop("step"), torch.tensor(2.0))
        assert state == {"seen": True, "unseen": False, "count": 3, "mean": 0.5}
        assert [type(state[key]) for key in ("seen", "unseen", "count", "mean")] == [bool, bool, int, float]


def test_state_in_blocks_of_a_whole_optimizer_does_not_load_into_parts(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3000))
    weight.sum().backward()
    words, blocks = (Odd([("weight", weight)], kind=kind) for kind in ("words", "a scale per block"))
    for optimizer in (words, blocks):
        optimizer.step()
    with pytest.raises(ValueError, match=REFUSED["words"]):
        save_state(words, tmp_path / "refused")
    save_state(blocks, tmp_path)
    again = ZeroOptimizer([("weight", weight)], Odd, kind="a scale per block")
    with pytest.raises(ValueError, match="absmax/weight has shape"):
        load_state(again, tmp_path)
