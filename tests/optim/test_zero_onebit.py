"""OnebitAdam under ZeRO: its arithmetic against a float64 simulation, its memory, its state, and what it refuses."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import GradScaler, OnebitAdam, OnebitLamb, ZeroOneAdam, attach_ddp, load_state, save_state
from hf_compressopt.optim import sharded
from hf_compressopt.optim.group import mean_variance_norm
from tests.checkpoint.test_resharding import stored
from tests.optim.test_compact_state import go_on, make, same
from tests.oracles.cases import (
    Case,
    Problem,
    first_safe,
    flat_params,
    make_params,
    run_simulation,
    set_gradients,
    shared_cases,
    simulated_params,
)
from tests.oracles.simulation_zero_onebit import ZeroOnebitAdam
from tests.support.harness import run_ranks
from tests.support.memory import MIB, peak_beyond
from tests.support.spreading import Share, spread

CASES = [
    *shared_cases(),
    Case("blocks", [{"shapes": [(11, 13), (150,)]}], {"scale_block": 64, "lr": 0.01, "eps": 1e-3}),
]


def solve(rank: int, problem: Problem, bits: int, stage: int = 1) -> dict[str, Any]:
    params, groups = make_params(problem)
    options = {"freeze_step": problem.case.freeze_step, "zero_stage": stage, "warmup_bits": bits, "max_update": 0}
    optimizer = OnebitAdam(groups, **options, **problem.case.kwargs)
    history = []
    for t in range(1, problem.case.steps + 1):
        set_gradients(problem, optimizer, params, rank, t)
        optimizer.step()
        history.append(flat_params(params))
    errors = [[error.numpy() for error in state.errors.values()] for state in optimizer._states]
    return {"history": np.stack(history), "errors": errors}


def solve_all(rank: int, world_size: int, rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [solve(rank, *row) for row in rows]


def simulate(problem: Problem, bits: int) -> tuple[Any, list[Any]]:
    options = {"freeze_step": problem.case.freeze_step, "bits": bits}
    return run_simulation(problem, ZeroOnebitAdam, simulated_params, **options)


@pytest.mark.invariant(8)
@pytest.mark.invariant(29)
@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3, 4, 1)))
def test_equals_the_simulation_in_both_stages(world_size: int, share: Share) -> None:
    rows, expected = [], []
    for number, case in share.of(enumerate(CASES)):
        bits = (4, 8)[number % 5 == 0]
        problem, *solution = first_safe(case, world_size, Problem, partial(simulate, bits=bits))
        rows.append((problem, bits))
        expected.append(solution)
    ranks = run_ranks(world_size, solve_all, rows, timeout=240)
    for (problem, _), (simulation, history), results in zip(rows, expected, zip(*ranks, strict=True), strict=True):
        for rank, got in enumerate(results):
            context = f"case {problem.case.name}, rank {rank}"
            assert np.array_equal(got["history"], results[0]["history"]), context
            np.testing.assert_allclose(got["history"], np.stack(history), rtol=0, atol=5e-6, err_msg=context)
            for g, group in enumerate(simulation.groups if world_size > 1 else ()):
                for number, key in enumerate(("worker_errors", "server_errors")):
                    errors = np.concatenate([np.zeros(0), *(bucket[rank] for bucket in getattr(group, key))])
                    np.testing.assert_allclose(got["errors"][g][number], errors, rtol=1e-5, atol=5e-6, err_msg=context)


# -- memory -----------------------------------------------------------------------------------------------------------


def bytes_per_parameter(optimizer: OnebitAdam) -> float:
    """Bytes of all storages that the state lies in, each counted once."""
    tensors = [*optimizer._tensors.values()]
    for state in optimizer._states:
        moments, errors, shards = state.moments, state.errors, state.moments.shards
        messages = [average.messages for average in moments.last.values()]
        tensors += [moments.exp_avg, moments.exp_avg_sq, moments.codes, moments.tops, errors.worker, errors.server]
        tensors += [*messages, *state.extra.values(), *(() if shards is None else shards.exp_avg + shards.exp_avg_sq)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / sum(p.numel() for p in optimizer.trainable_parameters)


def memory_of_a_run(rank: int, world_size: int, freeze: int) -> tuple[list[float], list[float]]:
    """After each step, and while the moments are gathered."""
    params = [nn.Parameter(torch.zeros(300, 200)) for _ in range(4)]
    optimizer = OnebitAdam(params, freeze_step=freeze, zero_stage=1, bucket_cap_mb=0.25)
    during, after = [], [bytes_per_parameter(optimizer)]

    def watched(gather: Callable[..., Any]) -> Callable[..., Any]:
        def measure(*args: Any, **options: Any) -> Any:
            during.append(bytes_per_parameter(optimizer))
            return (yield from gather(*args, **options))

        return measure

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "gather_messages"):
            patch.setattr(sharded, name, watched(getattr(sharded, name)))
        for step in range(2 * freeze):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * rank + step))
            optimizer.step()
            after.append(bytes_per_parameter(optimizer))
    return during, after


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_of_the_state_and_of_the_switch(world_size: int) -> None:
    freeze = 3
    for during, after in run_ranks(world_size, memory_of_a_run, freeze):
        first, then = after[:freeze], after[freeze:]
        assert max(first) <= 8 / world_size + 1.03 * (1 + 1 / world_size)
        assert max(then) <= 1 + 1 / 8 + 1.03 * (1 + 1 / world_size) + 0.01
        # of each of four buckets a message in every step, and two at the switch
        assert len(during) == (freeze + 2) * 4 and max(during) <= max(first)


def peak_of_a_run(rank: int, world_size: int, zero: bool) -> float:
    """Bytes per parameter by which a run under DDP, through the switch, raises the memory of the process."""

    def run(width: int, model: nn.Module) -> None:
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(rank))
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(wrapped.parameters())
        if zero:
            optimizer = OnebitAdam(wrapped.parameters(), freeze_step=2, zero_stage=1, bucket_cap_mb=2)
            attach_ddp(wrapped, optimizer)
        for _ in range(4):
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def layers(width: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))

    run(8, layers(8))  # which loads what a process loads once
    model = layers(1024)
    return 4 + peak_beyond(lambda: run(1024, model)) * MIB / (8 * 1024**2)  # the parameters are there before


@pytest.mark.full
def test_the_peak_of_a_run_is_a_third_below_adamw() -> None:
    ours, adamw = (run_ranks(4, peak_of_a_run, zero) for zero in (True, False))
    assert max(ours) <= 0.72 * min(adamw) and max(ours) <= 4 + 4 + 8 / 4 + 1.03 * (1 + 1 / 4) + 1.5, (ours, adamw)


# -- state ------------------------------------------------------------------------------------------------------------

ZERO = {"zero_stage": 1}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of nested dicts and lists, copied."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    rows = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for row in rows for tensor in tensors_in(row)]


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


def copy_and_load(rank: int, world_size: int, stops: list[int], folder: str, stage: int = 1) -> None:
    """A deep copy, a state dict and a checkpoint go on bit for bit, into a state of either stage."""
    for stop in stops:
        params, optimizer = make(rank, stop, zero_stage=stage)
        copied_params, copied = copy.deepcopy((params, optimizer))
        state_dict = copy.deepcopy(optimizer.state_dict())
        assert ("pieces" in state_dict["state"][0]) == (stop < 3)
        save_state(optimizer, f"{folder}/{stop}")
        runs = [(params, optimizer), (copied_params, copied)]
        for in_the_way in (0, 5):
            for from_folder in (True, False):
                loaded_params, loaded = make(rank, in_the_way, zero_stage=stage)
                with torch.no_grad():
                    for p, q in zip(loaded_params, params, strict=True):
                        p.copy_(q)
                load_state(loaded, f"{folder}/{stop}") if from_folder else loaded.load_state_dict(state_dict)
                assert same(everything(loaded_params, loaded), everything(params, optimizer))
                runs.append((loaded_params, loaded))
        for run in runs:
            go_on(rank, *run, range(stop, 7))
        assert all(same(everything(*runs[0]), everything(*run)) for run in runs[1:])


@pytest.mark.invariant(20)
@pytest.mark.invariant(21)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_copies_state_dicts_and_checkpoints_go_on(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, copy_and_load, [0, 2, 3, 5], str(tmp_path))


def save_both(rank: int, world_size: int, folder: str, stop: int) -> list[torch.Tensor]:
    params, optimizer = make(rank, stop, **ZERO)
    save_state(optimizer, f"{folder}/zero")
    plain_params, plain = make(rank, stop)
    save_state(plain, f"{folder}/plain")
    return whole_moments(rank, params, optimizer)


def load_all(rank: int, world_size: int, folder: str, stop: int, saved_by: int) -> tuple[list[torch.Tensor], ...]:
    """The moments that loads of a checkpoint give, with and without zero_stage."""
    found = []
    for source, options in (("zero", ZERO), ("zero", {}), ("plain", ZERO), ("plain", {})):
        params, optimizer = make(rank, 0, **options)
        load_state(optimizer, f"{folder}/{source}")
        found.append(whole_moments(rank, params, optimizer))
        errors = optimizer._states[0].errors
        crossed = (source == "zero") != bool(options) and stop < 3
        if world_size > 1 and saved_by > 1:
            assert errors.worker.any() and errors.server.any().item() != crossed
        go_on(rank, params, optimizer, range(stop, stop + 3))
        sums = optimizer.communicator.all_gather_object([p.detach().double().sum().item() for p in params])
        assert all(row == sums[0] for row in sums) and all(p.isfinite().all() for p in params)
    adamw = torch.optim.AdamW(params)
    load_state(adamw, f"{folder}/zero")
    assert all(entry["exp_avg"].isfinite().all() for entry in adamw.state.values())
    return tuple(found)


@pytest.mark.invariant(22)
@pytest.mark.parametrize(
    ("stop", "saved_by"),
    [(2, 3), (5, 2), (5, 3), *(pytest.param(*row, marks=pytest.mark.full) for row in [(2, 1), (2, 2), (5, 1)])],
)
def test_any_number_of_ranks_loads_with_and_without_zero(saved_by: int, stop: int, tmp_path: Path) -> None:
    saved = run_ranks(saved_by, save_both, str(tmp_path), stop)
    if stop < 3:
        assert stored(tmp_path / "zero").keys() == stored(tmp_path / "plain").keys()
    for loaded_by in (1, 2, 4):
        for zero, without, of_plain, plain in run_ranks(loaded_by, load_all, str(tmp_path), stop, saved_by):
            assert same(zero, saved[0]) and same(without, zero) and same(of_plain, plain)


def with_a_bad_gradient(rank: int, world_size: int, stage: int = 1) -> None:
    for stop in (2, 3, 5):
        params, optimizer = make(rank, stop, zero_stage=stage)
        before = everything(params, optimizer)
        for p in params:
            p.grad = torch.ones_like(p)
        if rank == world_size - 1:
            params[0].grad.view(-1)[7] = torch.nan  # type: ignore[union-attr]
        optimizer.step()
        assert optimizer.step_was_skipped and optimizer.skipped_steps == 1
        after = everything(params, optimizer)
        assert len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.invariant(13)
def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    run_ranks(2, with_a_bad_gradient)


# -- the rest ---------------------------------------------------------------------------------------------------------


def in_two_levels(rank: int, world_size: int, folder: str) -> None:
    """Two nodes of two ranks with the same gradients take the steps of a flat exchange, but for rounding."""
    runs = []
    for options in ({}, {"topology": "two-level", "node_size": 2}):
        params, optimizer = make(rank, 0, **ZERO, **options)
        go_on(rank // 2, params, optimizer, range(6))
        sums = optimizer.communicator.all_gather_object([p.detach().double().sum().item() for p in params])
        assert all(row == sums[0] for row in sums)
        runs.append([*params, *whole_moments(rank, params, optimizer)])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*runs, strict=True))
    for stop in (2, 5):
        params, optimizer = make(rank, stop, **ZERO, **options)
        save_state(optimizer, f"{folder}/{stop}")
        for topology in (options, {}):
            loaded_params, loaded = make(rank, 0, **ZERO, **topology)
            load_state(loaded, f"{folder}/{stop}")
            moments = whole_moments(rank, params, optimizer)
            assert same(moments, whole_moments(rank, loaded_params, loaded))
            assert not topology or same(everything([], optimizer), everything([], loaded))
    shards, errors = make(rank, 1, **ZERO, **options)[1]._states[0].moments.shards, optimizer._states[0].errors
    numel = sum(p.numel() for p in params)
    assert sum(m.numel() for m in shards.exp_avg) <= numel // 4 + 64 and errors.worker.numel() <= 0.55 * numel + 400


def test_two_levels_share_out_the_moments_among_all_ranks(tmp_path: Path) -> None:
    run_ranks(4, in_two_levels, str(tmp_path))


def other_settings(rank: int, world_size: int) -> None:
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


def test_other_settings() -> None:
    run_ranks(2, other_settings)


def under_ddp(rank: int, world_size: int) -> None:
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
        sums = optimizer.communicator.all_gather_object([p.detach().double().sum().item() for p in model.parameters()])
        assert all(row == sums[0] for row in sums)
    assert left == [False] * 4 + [True] * 2 + [False] * 12
    assert torch.equal(ends[0], ends[1]) and torch.allclose(ends[1], ends[2], atol=2e-3), "the first stage is the same"
    assert "zero_stage=1" in optimizer.describe()


def test_under_ddp() -> None:
    run_ranks(2, under_ddp)


def unusual_groups(rank: int, world_size: int) -> None:
    """Groups without elements, groups that come later, and a state that moves to another device."""
    empty = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))]
    optimizer = OnebitAdam([{"params": empty}, {"params": []}], freeze_step=2, **ZERO)
    others = [nn.Parameter(torch.ones(count)) for count in (2, 3, 4)]
    mixed = OnebitAdam([{"params": others[:1]}, {"params": others[1:2], "non_freeze": True}], freeze_step=2, **ZERO)
    mixed.add_param_group({"params": others[2:]})
    assert [state.moments.shards is None for state in mixed._states] == [False, True, False]
    for _ in range(4):
        for p in (*empty, *others):
            p.grad = torch.ones_like(p)
        optimizer.step()
        mixed.step()
    assert all(torch.allclose(p, p.new_full((), 1 - 4e-3), atol=1e-5) for p in others)
    assert all(state.moments.shards is None for state in (*optimizer._states, *mixed._states))
    (state,) = make(rank, 2, **ZERO)[1]._states
    state.to(torch.device("meta"))
    assert {moment.device.type for moment in state.moments.shards.exp_avg + state.moments.shards.exp_avg_sq} == {"meta"}


def test_unusual_groups() -> None:
    run_ranks(3, unusual_groups)


def refused(rank: int, world_size: int) -> None:
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
    params, optimizer = make(rank, 0, zero_stage=rank)
    with pytest.raises(ValueError, match="differ"):
        go_on(rank, params, optimizer, range(1))


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (OnebitAdam, {"zero_stage": 3}, r"zero_stage must be one of \[0, 1, 2\], got 3"),
        (OnebitAdam, {"zero_stage": 2, "clip": "local"}, "zero_stage=2 needs clip='late'"),
        (OnebitAdam, {"zero_stage": 1, "state": "float32"}, "zero_stage=1 needs state='compact', got 'float32'"),
        (OnebitAdam, {"zero_stage": 1, "warmup_bits": 32}, r"warmup_bits to be one of \[4, 8\], got 32"),
        (ZeroOneAdam, {"zero_stage": 1}, "zero_stage=1 is not supported with ZeroOneAdam"),
        (OnebitLamb, {"zero_stage": 1}, "zero_stage=1 is not supported with OnebitLamb"),
    ],
)
def test_what_cannot_be_had_is_refused(cls: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls([nn.Parameter(torch.zeros(3))], **options)
    with pytest.raises(TypeError, match="zero_stage must be an int"):
        cls([nn.Parameter(torch.zeros(3))], zero_stage=True)


def test_state_of_other_ranks_is_refused() -> None:
    run_ranks(2, refused)
