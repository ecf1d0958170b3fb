"""Parameters inside a local interval of 0/1 Adam that others freeze, write, replace, load or save."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_compressopt import ZeroOneAdam, load_state, save_state
from tests.support.harness import on_ranks, same_on_all_ranks

# variance stage up to 2; syncs at 3, 4, 6, 8, 12, 16, 20
SCHEDULE = {"var_freeze_step": 2, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4}
INSIDE = 10  # the last step taken: 12 is the next sync


def make(seed: int = 0) -> tuple[nn.Sequential, ZeroOneAdam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    return model, ZeroOneAdam(model.parameters(), lr=0.01, scale_block=8, **SCHEDULE)


def train(model: nn.Module, optimizer: ZeroOneAdam, rank: int, steps: range) -> None:
    for step in steps:
        seed = step if optimizer.plan.reduce_grads else 100 * step + rank + 1
        for number, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10_000 * number + seed))
            param.grad = grad if param.requires_grad else None
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_parameters_that_are_frozen_inside_an_interval_are_alike_at_the_next_sync(rank: int, world_size: int) -> None:
    model, optimizer = make()
    train(model, optimizer, rank, range(INSIDE))
    assert not same_on_all_ranks(model.parameters())
    model[0].requires_grad_(False)
    frozen = []
    for start, sync in ((INSIDE, 12), (12, 16), (16, 20)):
        train(model, optimizer, rank, range(start, sync))
        assert same_on_all_ranks(model.parameters())
        frozen.append(flat(model[0]))
    assert torch.equal(frozen[0], frozen[1]) and torch.equal(frozen[1], frozen[2])
    model[0].requires_grad_(True)
    train(model, optimizer, rank, range(20, 24))
    assert same_on_all_ranks(model.parameters()) and not torch.equal(flat(model[0]), frozen[0])


BEST = 3.0


@torch.no_grad()
def load_best(model: nn.Module) -> None:
    model.load_state_dict({name: torch.full_like(value, BEST) for name, value in model.state_dict().items()})


@torch.no_grad()
def clamp_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(BEST, BEST + 1)


@torch.no_grad()
def copy_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.copy_(torch.full_like(param, BEST))


WRITES: dict[str, Callable[[nn.Module], None]] = {"load": load_best, "clamp": clamp_data, "ema": copy_data}


def write_inside(rank: int, write: str, last: int, way: str) -> None:
    """Write other values after step ``last``, and look at the next sync and at the one after it."""
    model, optimizer = make()
    train(model, optimizer, rank, range(last))
    if way == "settled":
        optimizer.settle_parameters()
    with optimizer.averaged_parameters() if way == "averaged" else nullcontext():
        WRITES[write](model)
    for step in range(last, 16):
        train(model, optimizer, rank, range(step, step + 1))
        if step + 1 in (3, 4, 6, 8, 12, 16):
            assert same_on_all_ranks(model.parameters())
            assert (flat(model) - BEST).abs().max() < 1.0, "the values from before were put back"


@pytest.mark.parametrize("way", ["plainly", "averaged", "settled"])
@pytest.mark.parametrize("last", [2, 8, INSIDE], ids=["at the switch", "after a sync", "inside"])
@pytest.mark.parametrize("write", WRITES)
@on_ranks(2)
def test_values_that_others_write_outlive_the_next_sync(
    rank: int, world_size: int, write: str, last: int, way: str
) -> None:
    write_inside(rank, write, last, way)


@on_ranks(1)
def test_values_that_others_write_outlive_the_next_sync_of_one_rank_alone(rank: int, world_size: int) -> None:
    write_inside(rank, "load", INSIDE, "plainly")


@on_ranks(2)
def test_signs_that_others_flip_stay_flipped(rank: int, world_size: int) -> None:
    """No change that a norm would see."""
    model, optimizer = make()
    train(model, optimizer, rank, range(INSIDE))
    before = flat(model)
    with torch.no_grad():
        for param in model.parameters():
            param.data.neg_()
    train(model, optimizer, rank, range(INSIDE, 12))
    assert same_on_all_ranks(model.parameters()) and (flat(model) + before).abs().max() < 0.2


@pytest.mark.parametrize("way", ["averaged", "plainly"])
@on_ranks(2)
def test_weights_that_are_swapped_for_an_evaluation_leave_the_run_as_it_was(
    rank: int, world_size: int, way: str
) -> None:
    runs = [make() for _ in range(2)]
    for step in range(16):
        for model, optimizer in runs:
            train(model, optimizer, rank, range(step, step + 1))
        model, optimizer = runs[0]
        with optimizer.averaged_parameters() if way == "averaged" else nullcontext():
            kept = [p.detach().clone() for p in model.parameters()]
            copy_data(model)
            for param, value in zip(model.parameters(), kept, strict=True):
                param.data.copy_(value)
    assert torch.equal(flat(runs[0][0]), flat(runs[1][0]))


@on_ranks(2)
def test_replaced_parameters_are_the_start_of_an_interval(rank: int, world_size: int) -> None:
    model, optimizer = make()
    train(model, optimizer, rank, range(INSIDE))
    load_best(model)
    optimizer.parameters_replaced()
    assert not optimizer.ranks_are_apart
    for start, sync in ((INSIDE, 12), (12, 16)):
        train(model, optimizer, rank, range(start, sync))
        assert same_on_all_ranks(model.parameters())
    assert optimizer.metrics()["bytes_sent_step"] > 0 and 0 < (flat(model) - BEST).abs().max() < 1.0


@on_ranks(2, timeout=30)
def test_a_rank_alone_can_save_the_parameters_of_the_last_sync(rank: int, world_size: int) -> None:
    runs = [make() for _ in range(2)]
    for each in runs:
        train(*each, rank, range(8))
    (model, optimizer), (other, _) = runs
    at_sync = flat(model)
    for each in runs:
        train(*each, rank, range(8, INSIDE))
    assert optimizer.ranks_are_apart and not torch.equal(flat(model), at_sync)
    if rank == 0:
        with optimizer.synced_parameters():
            assert torch.equal(flat(model), at_sync)
    for each in runs:
        train(*each, rank, range(INSIDE, 13))
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize("way", ["files", "state dict"])
@on_ranks(2)
def test_a_load_drops_the_parameters_that_were_put_aside(rank: int, world_size: int, way: str, tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, rank, range(INSIDE))
    save_state(optimizer, tmp_path)
    state, own = optimizer.state_dict(), flat(model)
    train(model, optimizer, rank, range(INSIDE, 15))
    context = optimizer.averaged_parameters()
    context.__enter__()
    if way == "files":
        load_state(optimizer, tmp_path)
    else:
        nn.utils.vector_to_parameters(own.clone(), model.parameters())
        optimizer.load_state_dict(state)
    context.__exit__(None, None, None)
    assert torch.equal(flat(model), own)
