"""ZeroOneAdam: its schedule and bytes, and parameters that others read or change inside a local interval."""

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import OnebitAdam, ZeroOneAdam, attach_ddp, average_gradients, load_state, save_state
from tests.oracles.cases import (
    MIXED,
    MIXED_GROUPS,
    Case,
    ZeroOneProblem,
    cosine,
    flat_params,
    make_optimizer,
    set_gradients,
)
from tests.oracles.simulation import variance_steps
from tests.oracles.steps import bytes_of_a_compressed_step, different, everything, same, tensors_in
from tests.support.family import draw
from tests.support.harness import on_ranks, same_on_all_ranks
from tests.support.logs import log_lines

FREEZE, STEPS = 8, 24
SCHEDULE = {"var_freeze_step": FREEZE, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}
VARIANCE_STEPS = (1, 2, 4, 6, 8)
SYNCS = (9, 10, 11, 12, 14, 16, 20, 24)  # intervals of 1, 2 and 4

# -- schedule and bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler", [1, 2, 3, 16])
def test_variance_schedule_is_that_of_a_counter(scaler):
    optimizer = ZeroOneAdam([nn.Parameter(torch.ones(3))], var_freeze_step=400, var_update_scaler=scaler)
    learning = [t for t in range(1, 401) if optimizer.plan_at(t).update_variance]
    assert learning == variance_steps(400, scaler)


@on_ranks(2)
def test_metrics_of_local_steps_are_means_since_the_last_line(rank, world_size):
    param = torch.nn.Parameter(torch.zeros(400, 100))
    schedule = {"var_freeze_step": 2, "local_step_scaler": 3, "local_step_clipper": 4}
    optimizer = ZeroOneAdam([param], lr=1e-3, warmup_bits=32, **schedule)
    lines = []
    for step in range(1, 31):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * rank + step))
        average_gradients(optimizer)
        optimizer.step()
        if step in (2, 7, 17, 29, 30):
            lines.append(optimizer.metrics())
            assert lines[-1] == optimizer.metrics()
    for before, line in itertools.pairwise(lines[:-1]):
        steps, sent = line["step"] - before["step"], line["bytes_sent"] - before["bytes_sent"]
        assert sent > 0 and line["bytes_sent_step"] == sent / steps
        assert line["compression_ratio"] == pytest.approx(4 * 40_000 / (sent / steps))
    *_, before, silent = lines  # no sync since the line before
    assert silent["bytes_sent"] == before["bytes_sent"]
    assert silent["bytes_sent_step"] == before["bytes_sent_step"] > 0


@pytest.mark.invariant(33)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks()
def test_rounds_and_bytes_are_those_of_the_schedule(rank, world_size):
    """A full message in every one-bit step and every sync, next to nothing in a variance step, nothing in between."""
    numel = 40_000
    formula = bytes_of_a_compressed_step(numel, world_size, 64)
    p = nn.Parameter(torch.zeros(numel))
    optimizer = ZeroOneAdam([p], scale_block=64, **SCHEDULE)
    total, last, before = 0.0, 0, {}
    for t in range(1, STEPS + 1):
        seed = t if optimizer.plan.reduce_grads else 100 * t + rank
        p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        metrics = optimizer.metrics()
        expected = 0 if t in VARIANCE_STEPS or t > FREEZE and t not in SYNCS else formula
        sent = metrics["bytes_sent"] - total
        assert abs(sent - expected) <= 64 * world_size, t
        if t <= FREEZE or t in SYNCS:  # the mean over the local steps before, and over this one
            assert metrics["bytes_sent_step"] == sent / (1 if t <= FREEZE else t - last), t
            last = t
        else:
            assert sent == 0 and metrics["bytes_sent_step"] == before["bytes_sent_step"], t
            assert metrics["compression_ratio"] == before["compression_ratio"] or t == FREEZE + 1
        if t > FREEZE and t in SYNCS and world_size > 1:
            full = 2 * (world_size - 1) / world_size * 4 * numel
            assert metrics["compression_ratio"] == pytest.approx(full / metrics["bytes_sent_step"])
            assert metrics["compression_ratio"] > 15 * (t - SYNCS[SYNCS.index(t) - 1] if t > SYNCS[0] else 1)
        assert metrics["stage"] == float(t > FREEZE) and metrics["step"] == t
        total, before = metrics["bytes_sent"], metrics
    assert metrics["rounds"] == FREEZE + len(SYNCS)


# -- one set of parameters --------------------------------------------------------------------------------------------

MIXED_CASE = Case("mixed", MIXED_GROUPS, {"lr": 0.02, **SCHEDULE, **MIXED}, steps=STEPS, lrs=cosine(0.02, STEPS))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full), 3])
@on_ranks()
def test_averaged_parameters(rank, world_size):
    """The mean on all ranks, for as long as the context is open, and a run that does not notice it."""
    problem = ZeroOneProblem(MIXED_CASE, world_size, 0)
    optimizer, params = make_optimizer(problem)
    undisturbed, others = make_optimizer(problem)
    settled, alike = make_optimizer(problem)  # at one step inside an interval
    for t in range(1, STEPS + 1):
        for each, tensors in ((optimizer, params), (undisturbed, others), (settled, alike)):
            set_gradients(problem, each, tensors, rank, t)
            each.step()
        own = torch.from_numpy(flat_params(params))
        mean = own.double() / world_size
        dist.all_reduce(mean)
        with optimizer.averaged_parameters():
            seen = torch.from_numpy(flat_params(params))
        assert same_on_all_ranks([seen]), "ranks differ inside"
        torch.testing.assert_close(seen.double(), mean, rtol=0, atol=1e-6)
        assert torch.equal(own, seen) == (t <= FREEZE or t in SYNCS or world_size == 1), f"step {t}"
        with suppress(KeyError), optimizer.averaged_parameters():
            raise KeyError("an evaluation that fails")
        assert different(everything(undisturbed, others), everything(optimizer, params)) == [], t
        if t == 18:
            settled.settle_parameters()
            assert same_on_all_ranks(p for group in alike for p in group)
            assert all(state.own_params is None for state in settled._states)
        elif t == 20:  # the sync after it
            assert different(everything(undisturbed, others), everything(settled, alike)) == []
    assert optimizer.metrics()["bytes_sent"] == undisturbed.metrics()["bytes_sent"]


@pytest.mark.parametrize("steps", [1000, 3000, 20_000])
def test_default_schedules_send_about_half_of_onebit_adams_bytes(steps):
    def bytes_per_element(optimizer):
        optimizer.scale_schedule(steps, given=())
        schedule = optimizer.schedule.expected()
        plans = [schedule.plan(step) for step in range(1, steps + 1)]
        return sum(4 * plan.reduce_grads + (1 / 8 + 4 / optimizer.scale_block) * plan.synchronize for plan in plans)

    zero_one, onebit = (cls([nn.Parameter(torch.zeros(3))], warmup_bits=32) for cls in (ZeroOneAdam, OnebitAdam))
    assert bytes_per_element(zero_one) <= 0.52 * bytes_per_element(onebit)
    assert "var_update_scaler=16" not in zero_one.scale_schedule(steps, given=())
    assert "var_update_scaler=16" in ZeroOneAdam(zero_one.param_groups[0]["params"]).scale_schedule(
        steps, ["var_update_scaler"]
    )


# -- param groups that only some of the ranks fill ---------------------------------------------------------------------

# variance stage up to 2; syncs at 3, 4, 6, 8, 12, 16, 20
SHORT_SCHEDULE = {"var_freeze_step": 2, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4}


@pytest.mark.parametrize(("own", "bad", "skipped"), [(True, False, 0.0), (True, True, 1.0), (False, True, 0.0)])
@on_ranks(2, timeout=30)
def test_an_empty_group_keeps_ranks_together_only_if_others_may_have_parameters(
    rank: int, world_size: int, own: bool, bad: bool, skipped: float
) -> None:
    """A non_freeze group that is empty on rank 0: of a process group of its own, or without parameters anywhere."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    dense = nn.Parameter(torch.ones(11))
    extra = [nn.Parameter(torch.ones(4))] if rank == 1 and own else []
    more = {"process_group": alone} if own else {}
    groups = [{"params": [dense]}, {"params": extra, "non_freeze": True, **more}]
    optimizer = ZeroOneAdam(groups, lr=0.01, scale_block=8, **SHORT_SCHEDULE)
    for step in range(1, 9):
        draw([dense, *extra], optimizer, rank, step)
        if bad and step == 6 and rank == 0:
            dense.grad[0] = torch.nan  # type: ignore[index]
        optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == skipped and dense.isfinite().all()


@on_ranks(2)
def test_param_groups_without_elements_are_harmless(rank: int, world_size: int) -> None:
    """Alone, and beside a group that has some; 1-bit steps between integers of the variance stage included."""
    for numels in ([], [0], [0, 0]), ([0], [7]), ([7], [], [0]):
        groups = [[nn.Parameter(torch.ones(numel)) for numel in group] for group in numels]
        schedule = {**SCHEDULE, "var_freeze_step": 6}
        optimizer = ZeroOneAdam([{"params": group} for group in groups], lr=0.01, scale_block=8, **schedule)
        params = [param for group in groups for param in group]
        for step in range(1, 13):
            draw(params, optimizer, rank, step)
            average_gradients(optimizer)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        optimizer.settle_parameters()
        assert optimizer.metrics()["step"] == 12 and (not params or same_on_all_ranks(params))


INSIDE = 10  # the last step taken: 12 is the next sync


def make(seed: int = 0) -> tuple[nn.Sequential, ZeroOneAdam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    return model, ZeroOneAdam(model.parameters(), lr=0.01, scale_block=8, **SHORT_SCHEDULE)


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


def in_data(write: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    def write_all(model: nn.Module) -> None:
        for param in model.parameters():
            write(param.data)

    return write_all


copy_best = in_data(lambda data: data.copy_(torch.full_like(data, BEST)))
WRITES: dict[str, Callable[[nn.Module], None]] = {
    "load": load_best,
    "clamp": in_data(lambda data: data.clamp_(BEST, BEST + 1)),
    "ema": copy_best,
    "flip": in_data(lambda data: data.neg_()),  # no norm would see it
}


@pytest.mark.parametrize(
    ("world_size", "write", "last", "way"),
    [  # at the switch, after a sync, and before one
        *product([2], WRITES, [2, 8, INSIDE + 1], ["plainly", "averaged", "settled"]),
        *product([2], WRITES, [2, 8], ["replaced"]),
        *product([2], ["load", "clamp", "ema"], [INSIDE], ["replaced"]),  # alike on all ranks
        *product([2], ["load"], [INSIDE], ["plainly", "averaged", "settled"]),  # torch counts these writes
        (1, "load", INSIDE, "plainly"),
    ],
)
@on_ranks()
def test_values_that_others_write_outlive_the_next_sync(
    rank: int, world_size: int, write: str, last: int, way: str
) -> None:
    model, optimizer = make()
    train(model, optimizer, rank, range(last))
    if way == "settled":
        optimizer.settle_parameters()
    with optimizer.averaged_parameters() if way == "averaged" else nullcontext():
        WRITES[write](model)
        written = flat(model)
    if way == "replaced":
        optimizer.parameters_replaced()
        assert not optimizer.ranks_are_apart
    for step in range(last, 16):
        train(model, optimizer, rank, range(step, step + 1))
        if step + 1 in (3, 4, 6, 8, 12, 16):
            assert same_on_all_ranks(model.parameters())
            most = 0.3 if step + 1 == max(3, 12 * (last > 2)) else 1.0  # at the next sync, and later
            assert 0 < (flat(model) - written).abs().max() < most, "the values from before were put back"


def swap(model: nn.Module, optimizer: ZeroOneAdam, last_sync: Tensor) -> None:
    kept = [p.detach().clone() for p in model.parameters()]
    copy_best(model)
    for param, value in zip(model.parameters(), kept, strict=True):
        param.data.copy_(value)


def swap_averaged(model: nn.Module, optimizer: ZeroOneAdam, last_sync: Tensor) -> None:
    with optimizer.averaged_parameters():
        swap(model, optimizer, last_sync)


def settle(model: nn.Module, optimizer: ZeroOneAdam, last_sync: Tensor) -> None:
    optimizer.settle_parameters()
    assert same_on_all_ranks(model.parameters())
    assert all(state.own_params is None for state in optimizer._states)


def save_alone(model: nn.Module, optimizer: ZeroOneAdam, last_sync: Tensor) -> None:
    if dist.get_rank() == 0:
        with optimizer.synced_parameters():
            assert torch.equal(flat(model), last_sync)


@on_ranks(2)
def test_local_steps_do_not_look_at_the_parameters(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of bits are taken and compared before and after a sync alone: four in an interval of four steps."""
    model, optimizer = make()
    train(model, optimizer, rank, range(12))
    looks: list[int] = []
    fingerprint = optimizer._interval._fingerprint

    def counted() -> Tensor:
        looks.append(optimizer.last_plan.step)
        return fingerprint()

    monkeypatch.setattr(optimizer._interval, "_fingerprint", counted)
    train(model, optimizer, rank, range(12, 20))
    assert len(looks) == 8 and not optimizer.ranks_are_apart


@pytest.mark.parametrize("visit", [swap, swap_averaged, settle, save_alone])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks(timeout=30)
def test_what_only_looks_leaves_the_run_as_it_was(
    rank: int, world_size: int, visit: Callable[[nn.Module, ZeroOneAdam, Tensor], None]
) -> None:
    """Weights swapped for an evaluation, parameters settled, and the last sync's, which a rank alone may save."""
    runs = [make() for _ in range(2)]
    for step in range(20):
        for each in runs:
            train(*each, rank, range(step, step + 1))
        if not runs[1][1].ranks_are_apart:
            last_sync = flat(runs[0][0])
        visit(*runs[0], last_sync)
    assert same(*(tensors_in([*model.parameters(), optimizer.state_dict()]) for model, optimizer in runs))


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


@pytest.mark.parametrize("way", ["files", "state dict"])
@pytest.mark.parametrize("writers", [(0, 1), (1,)], ids=str)
@on_ranks(2)
def test_values_written_before_a_save_outlive_the_first_sync_of_the_resumed_run(
    rank: int, world_size: int, writers: tuple[int, ...], way: str, tmp_path: Path
) -> None:
    model, optimizer = make()
    train(model, optimizer, rank, range(INSIDE))
    if rank in writers:
        load_best(model)
    save_state(optimizer, tmp_path)
    packed, own = optimizer.state_dict(), flat(model)
    resumed, other = make()
    if way == "files":
        load_state(other, tmp_path)
    else:
        nn.utils.vector_to_parameters(own.clone(), resumed.parameters())
        other.load_state_dict(packed)
    assert torch.equal(flat(resumed), own)
    for each in ((model, optimizer), (resumed, other)):
        train(*each, rank, range(INSIDE, 16))
    assert torch.equal(flat(model), flat(resumed)) and float(flat(model).mean()) > 1


@on_ranks(2)
def test_code_that_reads_the_parameters_of_one_rank_is_warned(rank, world_size):
    net = nn.Sequential(nn.Linear(9, 9), nn.Tanh())
    model = DistributedDataParallel(net)
    schedule = {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 8}
    optimizer = ZeroOneAdam(net.parameters(), lr=1e-2, **schedule)
    attach_ddp(model, optimizer)
    average = copy.deepcopy(net)  # as for an EMA
    with log_lines() as lines:
        for step in range(12):
            net.train()
            model(
                torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * rank + step))
            ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            net.eval()
            with optimizer.averaged_parameters():
                model(torch.ones(1, 9))
                net.state_dict()
            with optimizer.synced_parameters():
                net.state_dict()
            average.eval()(torch.ones(1, 9))
        assert optimizer.ranks_are_apart and not any("between two syncs" in line for line in lines)
        pickle.loads(pickle.dumps(net)).state_dict()
        for _ in range(2):
            net(torch.ones(1, 9))
            net.state_dict()
    found = [line for line in lines if "between two syncs of ZeroOneAdam" in line]
    assert [line.split(" between")[0] for line in found] == [
        f"rank {rank} evaluates the model",
        f"rank {rank} takes the model's state dict",
    ]
