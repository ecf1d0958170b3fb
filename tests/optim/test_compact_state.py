"""state="compact": its bytes, and what users see of it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hf_compressopt
from hf_compressopt.kernels.errors import tensor_of
from tests.oracles.steps import same
from tests.support.family import assign, go_on, make
from tests.support.harness import on_ranks


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


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_bytes_of_the_state_and_of_the_peak(rank: int, world_size: int) -> None:
    """After each step, and in each step just before what it has used up is freed."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(300, 200)) for _ in range(4)]
    optimizer = hf_compressopt.OnebitAdam(params, freeze_step=3, state="compact", bucket_cap_mb=0.25)
    before, after = [], []
    for state in optimizer._states:
        settle = state.moments.settle

        def watched(settle: Any = settle) -> None:
            before.append(bytes_per_parameter(optimizer))
            settle()

        state.moments.settle = watched  # type: ignore[method-assign]
    for step in range(6):
        go_on(rank, params, optimizer, [step])
        after.append(bytes_per_parameter(optimizer))
    assert max(after[3:]) <= 2.2 + 1.1 / world_size, "after the switch"
    assert max([*before, *after[:3]]) <= 8 + 2.2, "AdamW holds 8"
    assert max(before) <= max(after[:3]) + 0.13, "the switch adds the messages, and nothing else"


def values_of(params: list[nn.Parameter], optimizer: Any) -> list[torch.Tensor]:
    entries = [dict(optimizer.state[p]) for p in params]
    errors = [error for state in optimizer._states for error in state.errors.values()]
    return [*(p.detach().clone() for p in params), *(t.clone() for e in entries for t in e.values()), *errors]


@on_ranks(2)
def test_the_state_shows_decoded_moments(rank: int, world_size: int) -> None:
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


@pytest.mark.invariant(20)
@pytest.mark.parametrize("stop", [2, 3, 4, 6])
@pytest.mark.parametrize(("saved_as", "loaded_as"), [("compact",) * 2, ("compact", "float32"), ("float32", "compact")])
@on_ranks(3)
def test_copies_and_state_dicts_go_on(rank: int, world_size: int, stop: int, saved_as: str, loaded_as: str) -> None:
    params, optimizer = make(rank, stop, state=saved_as)
    copied_params, copied = copy.deepcopy((params, optimizer))
    state_dict = copy.deepcopy(optimizer.state_dict())
    fresh_params, fresh = make(rank, 5, state=loaded_as)  # a state that is in the way
    assign(fresh_params, params)
    fresh.load_state_dict(state_dict)
    runs = [(params, optimizer), (copied_params, copied), (fresh_params, fresh)]
    for run in runs:
        go_on(rank, *run, range(stop, 7))
    whole, of_copy, of_load = (values_of(*run) for run in runs)
    assert same(whole, of_copy) and (same(whole, of_load) or saved_as != loaded_as)
    for one, other in zip(params, fresh_params, strict=True):
        assert (one - other).abs().sum() <= 5e-3 * one.numel()


@pytest.mark.parametrize("state", ["compact", "float32"])
@on_ranks(2)
def test_all_of_the_state_moves_with_the_parameters(rank: int, world_size: int, state: str) -> None:
    """To "meta", a device that every machine has."""
    (group,) = make(rank, 5, state=state)[1]._states
    group.to(torch.device("meta"))
    tensors = [group.exp_avg, group.exp_avg_sq, group.moments.codes, group.moments.tops]
    tensors += [group.worker_error, group.server_error, *(last.messages for last in group.moments.last.values())]
    tensors += [tensor_of(error) for part in group.feedback for error in (*part.worker, part.server)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@on_ranks(2)
def test_a_mask_may_come_and_go(rank: int, world_size: int) -> None:
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
