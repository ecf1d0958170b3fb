"""Parameters inside a local interval of 0/1 Adam that others freeze, write, replace, load or save."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_compressopt import ZeroOneAdam, load_state, save_state
from tests.support.harness import run_ranks

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


def everyones(model: nn.Module, world_size: int) -> list[Tensor]:
    mine = flat(model)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return gathered


def are_alike(model: nn.Module, world_size: int) -> bool:
    gathered = everyones(model, world_size)
    return all(torch.equal(gathered[0], other) for other in gathered)


def freeze_inside(rank: int, world_size: int) -> list[bool]:
    model, optimizer = make()
    train(model, optimizer, rank, range(INSIDE))
    assert not are_alike(model, world_size)
    for param in model[0].parameters():
        param.requires_grad_(False)
    found, frozen = [], []
    for step in range(INSIDE, 20):
        train(model, optimizer, rank, range(step, step + 1))
        if step + 1 in (12, 16, 20):
            found.append(are_alike(model, world_size))
            frozen.append(flat(model[0]))
    found.append(torch.equal(frozen[0], frozen[1]) and torch.equal(frozen[1], frozen[2]))  # frozen is frozen
    for param in model[0].parameters():
        param.requires_grad_(True)
    train(model, optimizer, rank, range(20, 24))
    return [*found, are_alike(model, world_size), not torch.equal(flat(model[0]), frozen[0])]


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_that_are_frozen_inside_an_interval_are_alike_at_the_next_sync(world_size: int) -> None:
    assert run_ranks(world_size, freeze_inside) == [[True] * 6] * world_size


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


@torch.no_grad()
def flip_signs(model: nn.Module) -> None:
    """No change that a norm would see."""
    for param in model.parameters():
        param.data.neg_()


WRITES: dict[str, Callable[[nn.Module], None]] = {"load": load_best, "clamp": clamp_data, "ema": copy_data}


def write_inside(rank: int, world_size: int, write: str, last: int, way: str) -> tuple[list[bool], float]:
    """Write other values after step ``last``, and look at the next sync and at the one after it."""
    model, optimizer = make()
    train(model, optimizer, rank, range(last))
    if way == "averaged":
        with optimizer.averaged_parameters():
            WRITES[write](model)
    elif way == "settled":
        optimizer.settle_parameters()
        WRITES[write](model)
    else:
        WRITES[write](model)
    alike, distance = [], 0.0
    for step in range(last, 16):
        train(model, optimizer, rank, range(step, step + 1))
        if step + 1 in (3, 4, 6, 8, 12, 16):
            alike.append(are_alike(model, world_size))
            distance = max(distance, float((flat(model) - BEST).abs().max()))
    return alike, distance


@pytest.mark.parametrize("way", ["plainly", "averaged", "settled"])
@pytest.mark.parametrize("last", [2, 8, INSIDE], ids=["at the switch", "after a sync", "inside"])
@pytest.mark.parametrize("write", WRITES)
def test_values_that_others_write_outlive_the_next_sync(write: str, last: int, way: str) -> None:
    for alike, distance in run_ranks(2, write_inside, write, last, way):
        assert all(alike)
        assert distance < 1.0, "the values from before were put back"


def test_values_that_others_write_outlive_the_next_sync_of_one_rank_alone() -> None:
    ((_, distance),) = run_ranks(1, write_inside, "load", INSIDE, "plainly")
    assert distance < 1.0


def flip_inside(rank: int, world_size: int) -> tuple[bool, float]:
    model, optimizer = make()
    train(model, optimizer, rank, range(INSIDE))
    before = flat(model)
    flip_signs(model)
    train(model, optimizer, rank, range(INSIDE, 12))
    return are_alike(model, world_size), float((flat(model) + before).abs().max())


def test_signs_that_others_flip_stay_flipped() -> None:
    for alike, distance in run_ranks(2, flip_inside):
        assert alike and distance < 0.2


def evaluate_with_an_average(rank: int, world_size: int, way: str) -> bool:
    """Swap other weights in for an evaluation and back again: the run does not notice."""
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
    return torch.equal(flat(runs[0][0]), flat(runs[1][0]))


@pytest.mark.parametrize("way", ["averaged", "plainly"])
def test_weights_that_are_swapped_for_an_evaluation_leave_the_run_as_it_was(way: str) -> None:
    assert run_ranks(2, evaluate_with_an_average, way) == [True] * 2


def replace(rank: int, world_size: int) -> tuple[list[bool], float, int]:
    model, optimizer = make()
    train(model, optimizer, rank, range(INSIDE))
    load_best(model)
    optimizer.parameters_replaced()
    assert not optimizer.ranks_are_apart
    alike = []
    for step in range(INSIDE, 16):
        train(model, optimizer, rank, range(step, step + 1))
        if step + 1 in (12, 16):
            alike.append(are_alike(model, world_size))
    sent = optimizer.metrics()["bytes_sent_step"]
    return alike, float((flat(model) - BEST).abs().max()), int(sent)


def test_replaced_parameters_are_the_start_of_an_interval() -> None:
    for alike, distance, sent in run_ranks(2, replace):
        assert alike == [True, True] and 0 < distance < 1.0 and sent > 0


def save_alone(rank: int, world_size: int) -> tuple[Tensor, Tensor, bool, bool]:
    """Rank 0 alone looks at the parameters of the last sync: nobody else takes part, nothing changes."""
    model, optimizer = make()
    other, undisturbed = make()
    for each in ((model, optimizer), (other, undisturbed)):
        train(*each, rank, range(8))
    at_sync = flat(model)
    for each in ((model, optimizer), (other, undisturbed)):
        train(*each, rank, range(8, INSIDE))
    apart = optimizer.ranks_are_apart and not torch.equal(flat(model), at_sync)
    seen = at_sync
    if rank == 0:
        with optimizer.synced_parameters():
            seen = flat(model)
    for each in ((model, optimizer), (other, undisturbed)):
        train(*each, rank, range(INSIDE, 13))
    return seen, at_sync, apart, torch.equal(flat(model), flat(other))


def test_a_rank_alone_can_save_the_parameters_of_the_last_sync() -> None:
    for seen, at_sync, apart, undisturbed in run_ranks(2, save_alone, timeout=30):
        assert apart and undisturbed and torch.equal(seen, at_sync)


def load_while_others_stand_in(rank: int, world_size: int, directory: str, way: str) -> bool:
    """A load inside averaged_parameters() wins over what was put aside for the end of the context."""
    model, optimizer = make()
    train(model, optimizer, rank, range(INSIDE))
    save_state(optimizer, directory)
    state, own = optimizer.state_dict(), flat(model)
    train(model, optimizer, rank, range(INSIDE, 15))
    context = optimizer.averaged_parameters()
    context.__enter__()
    if way == "files":
        load_state(optimizer, directory)
    else:
        nn.utils.vector_to_parameters(own.clone(), model.parameters())
        optimizer.load_state_dict(state)
    context.__exit__(None, None, None)
    return torch.equal(flat(model), own)


@pytest.mark.parametrize("way", ["files", "state dict"])
def test_a_load_drops_the_parameters_that_were_put_aside(way: str, tmp_path: Path) -> None:
    assert run_ranks(2, load_while_others_stand_in, str(tmp_path), way) == [True] * 2
