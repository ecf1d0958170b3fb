"""OnebitAdam under ZeRO: its memory, its state, and what it refuses."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import GradScaler, OnebitAdam, attach_ddp, load_state, save_state
from hf_compressopt.optim import sharded
from hf_compressopt.optim.group import mean_variance_norm
from tests.checkpoint.test_resharding import stored
from tests.optim.test_compact_state import bytes_per_parameter
from tests.oracles.steps import same, tensors_in
from tests.support.family import go_on, make
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.memory import MIB, peak_beyond

# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_bytes_of_the_state_and_of_the_switch(rank: int, world_size: int) -> None:
    """After each step, and while the moments are gathered."""
    params = [nn.Parameter(torch.zeros(300, 200)) for _ in range(4)]
    optimizer = OnebitAdam(params, freeze_step=3, zero_stage=1, bucket_cap_mb=0.25)
    during, after = [], [bytes_per_parameter(optimizer)]

    def watched(gather: Callable[..., Any]) -> Callable[..., Any]:
        def measure(*args: Any, **options: Any) -> Any:
            during.append(bytes_per_parameter(optimizer))
            return (yield from gather(*args, **options))

        return measure

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "gather_messages"):
            patch.setattr(sharded, name, watched(getattr(sharded, name)))
        for step in range(6):
            go_on(rank, params, optimizer, [step])
            after.append(bytes_per_parameter(optimizer))
    assert max(after[:3]) <= 8 / world_size + 1.03 * (1 + 1 / world_size)
    assert max(after[3:]) <= 1 + 1 / 8 + 1.03 * (1 + 1 / world_size) + 0.01
    # of each of four buckets a message in every step, and two at the switch
    assert len(during) == 5 * 4 and max(during) <= max(after[:3])


def peak_of_a_run(rank: int, world_size: int, stage: int) -> float:
    """Bytes per parameter by which a run, through the switch, raises the memory of the process; stage 0 is AdamW."""

    def run(width: int, model: nn.Module) -> None:
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(rank))
        if stage < 2:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        if stage:
            optimizer = OnebitAdam(model.parameters(), freeze_step=2, zero_stage=stage, bucket_cap_mb=2)
        if stage == 1:
            attach_ddp(model, optimizer)
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def layers(width: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))

    run(8, layers(8))  # which loads what a process loads once
    model = layers(1024)
    return 4 + peak_beyond(lambda: run(1024, model)) * MIB / (8 * 1024**2)  # the parameters are there before


@pytest.mark.full
def test_the_peak_of_a_run_is_a_third_below_adamw() -> None:
    adamw, first, second = (run_ranks(4, peak_of_a_run, stage) for stage in (0, 1, 2))
    assert max(first) <= 0.72 * min(adamw) and max(first) <= 4 + 4 + 8 / 4 + 1.03 * (1 + 1 / 4) + 1.5, (first, adamw)
    assert max(second) <= min(adamw) * 2 / 3, (second, adamw)


# -- state ------------------------------------------------------------------------------------------------------------

ZERO = {"zero_stage": 1}


def everything(params: list[nn.Parameter], optimizer: OnebitAdam) -> list[torch.Tensor]:
    return tensors_in([*params, optimizer.state_dict()])


def whole_moments(rank: int, params: list[nn.Parameter], optimizer: OnebitAdam) -> list[torch.Tensor]:
    """Both moments of all parameters; all ranks call."""
    found = []
    for p in params:
        entry = optimizer.state[p]
        if "pieces" not in entry:
            found += [entry["exp_avg"].clone(), entry["exp_avg_sq"].clone()]
            continue
        for name in ("exp_avg", "exp_avg_sq"):
            whole = torch.zeros(p.numel())
            for piece in entry["pieces"]:
                whole[piece["start"] : piece["stop"]] = piece[name]
            dist.all_reduce(whole)
            found.append(whole.view(p.shape))
    return found


def save_both(rank: int, world_size: int, folder: str, stop: int, stage: int) -> list[torch.Tensor]:
    params, optimizer = make(rank, stop, zero_stage=stage)
    save_state(optimizer, f"{folder}/zero")
    save_state(make(rank, stop)[1], f"{folder}/plain")
    return whole_moments(rank, params, optimizer)


def load_all(rank: int, world_size: int, folder: str, stop: int, stage: int, saved_by: int) -> list[torch.Tensor]:
    zero: Any = {"zero_stage": stage}
    found = []
    for source, options in (("zero", zero), ("zero", {}), ("plain", zero), ("plain", {})):
        params, optimizer = make(rank, 0, **options)
        load_state(optimizer, f"{folder}/{source}")
        found.append(whole_moments(rank, params, optimizer))
        errors = optimizer._states[0].errors
        crossed = (source == "zero") != bool(options) and stop < 3
        if world_size > 1 and saved_by > 1:
            assert errors.worker.any() and errors.server.any().item() != crossed
        go_on(rank, params, optimizer, range(stop, stop + 3))
        assert same_on_all_ranks(params) and all(p.isfinite().all() for p in params)
    adamw = torch.optim.AdamW(params)
    load_state(adamw, f"{folder}/zero")
    assert all(entry["exp_avg"].isfinite().all() for entry in adamw.state.values())
    assert same(found[0], found[1]) and same(found[2], found[3])
    return found[0]


@pytest.mark.invariant(22)
@pytest.mark.parametrize(
    ("stop", "stage", "saved_by"),
    [
        *((2, 1, 3), (5, 1, 2), (2, 2, 3), (5, 2, 3)),
        *(pytest.param(stop, 1, ranks, marks=pytest.mark.full) for stop, ranks in [(2, 1), (2, 2), (5, 1), (5, 3)]),
    ],
)
def test_any_number_of_ranks_loads_with_and_without_zero(saved_by: int, stage: int, stop: int, tmp_path: Path) -> None:
    saved = run_ranks(saved_by, save_both, str(tmp_path), stop, stage)
    if stop < 3:
        zero, plain = (stored(tmp_path / name).keys() for name in ("zero", "plain"))
        assert zero - {"optimizer/late_clip"} == plain
    for loaded_by in (1, 2, 4):
        for moments in run_ranks(loaded_by, load_all, str(tmp_path), stop, stage, saved_by):
            assert same(moments, saved[0])


# -- the rest ---------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_two_levels_share_out_the_moments_among_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    """Two nodes of two ranks with the same gradients take the steps of a flat exchange, but for rounding."""
    runs = []
    for options in ({}, {"topology": "two-level", "node_size": 2}):
        params, optimizer = make(rank, 0, **ZERO, **options)
        go_on(rank // 2, params, optimizer, range(6))
        assert same_on_all_ranks(params)
        runs.append([*params, *whole_moments(rank, params, optimizer)])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*runs, strict=True))
    for stop in (2, 5):
        params, optimizer = make(rank, stop, **ZERO, **options)
        save_state(optimizer, f"{tmp_path}/{stop}")
        for topology in (options, {}):
            loaded_params, loaded = make(rank, 0, **ZERO, **topology)
            load_state(loaded, f"{tmp_path}/{stop}")
            moments = whole_moments(rank, params, optimizer)
            assert same(moments, whole_moments(rank, loaded_params, loaded))
            assert not topology or same(everything([], optimizer), everything([], loaded))
    shards, errors = make(rank, 1, **ZERO, **options)[1]._states[0].moments.shards, optimizer._states[0].errors
    numel = sum(p.numel() for p in params)
    assert sum(m.numel() for m in shards.exp_avg) <= numel // 4 + 64 and errors.worker.numel() <= 0.55 * numel + 400


@on_ranks(2)
def test_other_settings(rank: int, world_size: int) -> None:
    """16-bit parameters, a gradient scaler, a parameter that nobody uses, and the search for the freeze step."""
    torch.manual_seed(3)
    params = [nn.Parameter(torch.randn(40, 9, dtype=torch.bfloat16)), nn.Parameter(torch.randn(5))]
    unused = params[1].detach().clone()
    optimizer = OnebitAdam(
        params, lr=1e-2, freeze_step="auto", max_freeze_step=4, min_freeze_step=4, weight_decay=0.5, **ZERO
    )
    scaler = GradScaler("cpu", init_scale=64.0)
    twin_params = copy.deepcopy(params)
    twin = OnebitAdam(twin_params, lr=1e-2, freeze_step=4, weight_decay=0.5, **ZERO)
    for step in range(6):
        norm = mean_variance_norm(optimizer._states, optimizer._bias_counts, optimizer.communicator)
        expected = sum(float(v.sum()) / (1 - 0.999**step) for v in whole_moments(rank, params, optimizer)[1:2] if step)
        if step < 4:
            assert norm == pytest.approx(expected, rel=1e-5)
        start = params[0].detach().clone()
        grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(10 * rank + step)).bfloat16()
        twin_params[0].grad = grad.clone()
        twin.step()
        scaler.scale(torch.zeros(()))
        params[0].grad = grad * 64.0
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(params[0], start)
        if step < 4:  # then weight decay moves what gradients do not
            assert torch.equal(params[1], unused)
        assert torch.equal(params[0], twin_params[0])
        assert optimizer.plan_at(step + 1).reduce_grads is False
    assert optimizer.freeze_step == 4 and optimizer.metrics()["rounds"] == 6
    sent = optimizer.metrics()["compression_ratio"]
    assert sent > 1, sent


@on_ranks(2)
def test_under_ddp(rank: int, world_size: int) -> None:
    """Gradients stay local, and with clip="late" messages of the second stage leave during backward."""
    left, ends = [], []
    for options in ({"clip": "late"}, {}, {"fused_warmup": True}):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5)))
        optimizer = OnebitAdam(model.parameters(), lr=1e-2, freeze_step=3, max_grad_norm=0.05, **ZERO, **options)
        attach_ddp(model, optimizer)
        for step in range(6):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * rank + step))
            model(x).square().mean().backward()
            left.append(bool(optimizer.early_messages.signature))
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        assert same_on_all_ranks(model.parameters())
    assert left == [False] * 4 + [True] * 2 + [False] * 12
    assert torch.equal(ends[0], ends[1]) and torch.allclose(ends[1], ends[2], atol=2e-3), "the warmup stage is the same"
    assert "zero_stage=1" in optimizer.describe()


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(3)
def test_unusual_groups(rank: int, world_size: int, stage: int) -> None:
    """No elements, groups that come later, an optimizer that follows another one, copies, and another device."""
    zero: dict[str, Any] = {"zero_stage": stage}
    empty = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))]
    nothing = OnebitAdam([{"params": empty}, {"params": []}], freeze_step=2, **zero)
    others = [nn.Parameter(torch.ones(count)) for count in (2, 3, 4)]
    replaced = OnebitAdam(others, **zero)
    mixed = OnebitAdam([{"params": others[:1]}, {"params": others[1:2], "non_freeze": True}], freeze_step=2, **zero)
    mixed.add_param_group({"params": others[2:]})
    assert [state.moments.shards is None for state in mixed._states] == [False, True, False]
    for _ in range(4):
        sum(p.sum() for p in (*empty, *others)).backward()
        assert [p.grad is None for p in (*others, *empty)] == [stage == 2, False, stage == 2, stage == 2, stage == 2]
        nothing.step()
        mixed.step()
        nothing.zero_grad()
        mixed.zero_grad()
    assert stage == 1 or not replaced.freed.holds_gradients()  # type: ignore[union-attr]
    assert all(torch.allclose(p, p.new_full((), 1 - 4e-3), atol=1e-5) for p in others)
    assert all(state.moments.shards is None for state in (*nothing._states, *mixed._states))
    copied_params, copied = copy.deepcopy((others, mixed))
    for params, optimizer in ((others, mixed), (copied_params, copied)):
        for _ in range(2):
            sum(p.sum() * (rank + 1) for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(others, copied_params)  # type: ignore[arg-type]
    (state,) = make(rank, 2, **zero)[1]._states
    state.to(torch.device("meta"))
    assert {moment.device.type for moment in state.moments.shards.exp_avg + state.moments.shards.exp_avg_sq} == {"meta"}


@on_ranks(2)
def test_state_of_other_ranks_is_refused(rank: int, world_size: int) -> None:
    _, optimizer = make(rank, 2, **ZERO)
    state_dict = optimizer.state_dict()
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, state_dict)
    for options, given in ((ZERO, everyone[1 - rank]), ({}, state_dict)):
        params, other = make(rank, 2, **options)
        before = everything(params, other)
        with pytest.raises(ValueError, match=r"one rank's part of moments|was saved by rank"):
            other.load_state_dict(given)
        assert same(before, everything(params, other))
