"""state="compact": its bytes, and what users see of it."""

from typing import Any

import pytest
import torch
from torch import nn

import hf_compressopt
from hf_compressopt.kernels.compact import tensor_of
from tests.support.family import go_on, make
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


@pytest.mark.parametrize("state", ["compact", "float32"])
@on_ranks(2)
def test_all_of_the_state_moves_with_the_parameters(rank: int, world_size: int, state: str) -> None:
    """To "meta", a device that every machine has."""
    (group,) = make(rank, 5, state=state)[1]._states
    group.to(torch.device("meta"))
    tensors = [group.exp_avg, group.exp_avg_sq, group.moments.codes, group.moments.tops]
    tensors += [group.errors.worker, group.errors.server, *(last.messages for last in group.moments.last.values())]
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
