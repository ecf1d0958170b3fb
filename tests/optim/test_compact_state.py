"""state="compact": its bytes, and what users see of it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_compressopt
from hf_compressopt import average_gradients
from hf_compressopt.kernels.errors import tensor_of
from tests.oracles.cases import (
    bucket_cap,
)
from tests.oracles.steps import same
from tests.support.harness import run_ranks

# -- bytes ------------------------------------------------------------------------------------------------------------


def bytes_per_parameter(optimizer: Any) -> float:
    """Bytes of all storages that the state of a run lies in, each counted once."""
    tensors = [*optimizer._tensors.values()]
    for state in optimizer._states:
        moments, errors, shards = state.moments, state.errors, state.moments.shards
        messages = [average.messages for average in moments.last.values()]
        tensors += [moments.exp_avg, moments.exp_avg_sq, moments.codes, moments.tops, errors.worker, errors.server]
        tensors += [*messages, *state.extra.values(), *(() if shards is None else shards.exp_avg + shards.exp_avg_sq)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / sum(p.numel() for p in optimizer.trainable_parameters)


def memory_of_a_run(rank: int, world_size: int, freeze: int) -> tuple[list[float], list[float]]:
    """After each step, and in each step just before what it has used up is freed."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(300, 200)) for _ in range(4)]
    optimizer = hf_compressopt.OnebitAdam(params, freeze_step=freeze, state="compact", bucket_cap_mb=0.25)
    before, after = [], []
    for state in optimizer._states:
        settle = state.moments.settle

        def watched(settle: Any = settle) -> None:
            before.append(bytes_per_parameter(optimizer))
            settle()

        state.moments.settle = watched  # type: ignore[method-assign]
    for step in range(2 * freeze):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * rank + step))
        average_gradients(optimizer)
        optimizer.step()
        after.append(bytes_per_parameter(optimizer))
    return before, after


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_of_the_state_and_of_the_peak(world_size: int) -> None:
    freeze = 3
    for before, after in run_ranks(world_size, memory_of_a_run, freeze):
        first, then = after[:freeze], after[freeze:]
        assert max(then) <= 2.2 + 1.1 / world_size, "after the switch"
        assert max([*before, *first]) <= 8 + 2.2, "AdamW holds 8"
        assert max(before) <= max(first) + 0.13, "the switch adds the messages, and nothing else"


# -- what users see ---------------------------------------------------------------------------------------------------

SHAPES = [(20, 17), (64,), (0, 3), (130,)]


def make(rank: int, stop: int, name: str = "OnebitAdam", **options: Any) -> tuple[list[nn.Parameter], Any]:
    """An optimizer after some steps; the warmup stage ends with step 3."""
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    settings = {"lr": 1e-2, "bucket_cap_mb": bucket_cap(200), "state": "compact", **options}
    if name != "ZeroOneAdam":
        settings.setdefault("freeze_step", 3)
    optimizer = getattr(hf_compressopt, name)(params, **settings)
    go_on(rank, params, optimizer, range(stop))
    return params, optimizer


def go_on(rank: int, params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        for index, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * rank + 10 * step + index))
        average_gradients(optimizer)
        optimizer.step()


def values_of(params: list[nn.Parameter], optimizer: Any) -> list[torch.Tensor]:
    entries = [dict(optimizer.state[p]) for p in params]
    errors = [error for state in optimizer._states for error in state.errors.values()]
    return [*(p.detach().clone() for p in params), *(t.clone() for e in entries for t in e.values()), *errors]


def look_at_the_state(rank: int, world_size: int) -> None:
    params, optimizer = make(rank, 6)
    state = optimizer._states[0]
    assert state.exp_avg.numel() == state.exp_avg_sq.numel() == 0
    for number, p in enumerate(params):
        entry = optimizer.state[p]
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq"] == list(dict(entry)) == [k for k, _ in entry.items()]
        assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == p.shape and entry["step"] == 6
        assert entry.get("nothing") is None and (entry["exp_avg_sq"] > 0).all()
        assert len(entry.values()) == 3 and entry["exp_avg"].abs().unique().numel() <= 3 * world_size
        saved = optimizer.state_dict()["state"][number]
        assert type(saved) is dict and all(torch.equal(saved[name], entry[name]) for name in entry)
    with pytest.raises(KeyError):
        optimizer.state[params[0]]["nothing"]


def test_the_state_shows_decoded_moments() -> None:
    run_ranks(2, look_at_the_state)


def copy_and_load(rank: int, world_size: int, stop: int, saved_as: str, loaded_as: str) -> list[bool]:
    """Train on with the optimizer, with its deep copy, and with another one that has loaded its state dict."""
    params, optimizer = make(rank, stop, state=saved_as)
    copied_params, copied = copy.deepcopy((params, optimizer))
    state_dict = copy.deepcopy(optimizer.state_dict())
    fresh_params, fresh = make(rank, 5, state=loaded_as)  # a state that is in the way
    with torch.no_grad():
        for p, q in zip(fresh_params, params, strict=True):
            p.copy_(q)
    fresh.load_state_dict(state_dict)
    runs = [(params, optimizer), (copied_params, copied), (fresh_params, fresh)]
    for run in runs:
        go_on(rank, *run, range(stop, 7))
    whole, of_copy, of_load = (values_of(*run) for run in runs)
    close = all(bool((a - b).abs().sum() <= 5e-3 * a.numel()) for a, b in zip(whole[:4], of_load[:4], strict=True))
    return [same(whole, of_copy), same(whole, of_load), close]


@pytest.mark.invariant(20)
@pytest.mark.parametrize("stop", [2, 3, 4, 6])
@pytest.mark.parametrize(("saved_as", "loaded_as"), [("compact",) * 2, ("compact", "float32"), ("float32", "compact")])
def test_copies_and_state_dicts_go_on(stop: int, saved_as: str, loaded_as: str) -> None:
    for of_copy, of_load, close in run_ranks(3, copy_and_load, stop, saved_as, loaded_as):
        assert of_copy and close and (of_load or saved_as != loaded_as)


def crossing(rank: int, world_size: int, folder: str, stop: int) -> list[bool]:
    """Checkpoints load into the other form, and into AdamW, with the moments that the optimizer showed."""
    found = []
    for name, other in (("compact", "float32"), ("float32", "compact")):
        params, optimizer = make(rank, stop, state=name)
        hf_compressopt.save_state(optimizer, f"{folder}/{name}")
        shown = [optimizer.state[p][key].clone() for p in params for key in ("exp_avg", "exp_avg_sq")]
        loaded_params, loaded = make(rank, 5, state=other)
        hf_compressopt.load_state(loaded, f"{folder}/{name}")
        loaded_shown = [loaded.state[p][key] for p in loaded_params for key in ("exp_avg", "exp_avg_sq")]
        found.append(all(torch.equal(a, b) for a, b in zip(shown, loaded_shown, strict=True)))
        adamw = torch.optim.AdamW(params)
        hf_compressopt.load_state(adamw, f"{folder}/{name}")
        entries = [adamw.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq") if p in adamw.state]
        found.append(len(entries) >= 6 and all(t.isfinite().all() for t in entries))
        go_on(rank, loaded_params, loaded, range(stop, 7))
        found.append(all(p.isfinite().all().item() for p in loaded_params))
    return found


@pytest.mark.parametrize("stop", [2, 5])
def test_checkpoints_cross_to_the_other_form_and_to_adamw(stop: int, tmp_path: Path) -> None:
    for found in run_ranks(2, crossing, str(tmp_path), stop):
        assert all(found)


def refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"state must be one of \['compact', 'float32'\], got 'small'"):
        make(rank, 0, state="small")
    params, optimizer = make(rank, 0, state=("compact", "float32")[rank])
    with pytest.raises(ValueError, match="differ"):
        go_on(rank, params, optimizer, range(1))


def test_bad_values_are_refused() -> None:
    run_ranks(2, refused)


def moved(rank: int, world_size: int, state: str) -> set[str]:
    """The devices of a state after its model was moved; "meta" is a device that every machine has."""
    _, optimizer = make(rank, 5, state=state)
    group = optimizer._states[0]
    group.to(torch.device("meta"))
    messages = [average.messages for average in group.moments.last.values()]
    tensors = [group.exp_avg, group.exp_avg_sq, group.moments.codes, group.moments.tops, *messages]
    tensors += [group.worker_error, group.server_error]
    tensors += [tensor_of(error) for part in group.feedback for error in (*part.worker, part.server)]
    return {tensor.device.type for tensor in tensors}


@pytest.mark.parametrize("state", ["compact", "float32"])
def test_all_of_the_state_moves_with_the_parameters(state: str) -> None:
    assert run_ranks(2, moved, state) == [{"meta"}] * 2


def with_a_mask_later(rank: int, world_size: int) -> None:
    """A mask that comes, and goes, after messages have taken the momentum's place."""
    params, optimizer = make(rank, 5)
    optimizer.param_groups[0]["exp_avg_mask"] = torch.zeros(1)
    go_on(rank, params, optimizer, range(5, 7))
    assert all(not optimizer.state[p]["exp_avg"].any() for p in params)
    assert optimizer._states[0].exp_avg.numel() == sum(p.numel() for p in params)
    del optimizer.param_groups[0]["exp_avg_mask"]
    go_on(rank, params, optimizer, range(7, 9))
    assert all(optimizer.state[p]["exp_avg"].all() for p in params)
    assert optimizer._states[0].exp_avg.numel() == 0
    entry = optimizer.state[params[0]]
    assert torch.equal(entry.copy()["exp_avg"], entry["exp_avg"]) and (entry | {"more": 1})["step"] == 9


def test_a_mask_may_come_and_go() -> None:
    run_ranks(2, with_a_mask_later)
