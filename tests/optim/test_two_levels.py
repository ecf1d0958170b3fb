"""The exchange in two levels inside the optimizers, on real ranks: M nodes of g ranks on one machine.

The oracle is the float64 simulation of M nodes, and the flat topology where both must agree.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_compressopt
from hf_compressopt import average_gradients
from tests.optim.test_late_clip import FIRST as LATE_FIRST
from tests.optim.test_late_clip import tensors_of
from tests.oracles.cases import bucket_cap
from tests.oracles.steps import same, tensors_in
from tests.support.ddp_runs import STEPS as LATE_STEPS
from tests.support.ddp_runs import attached, backward, end_step, scaler_of
from tests.support.ddp_runs import data as late_data
from tests.support.ddp_runs import make as late_clip
from tests.support.family import SHAPES, assign, go_on, make
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks

Form = tuple[str, str]  # the optimizer, form of the state


NUMEL = sum(int(np.prod(shape)) for shape in SHAPES)
FREEZE = 3
# the second half is that of the long tests
FORMS = [("OnebitAdam", "compact"), ("OnebitLamb", "float32"), ("ZeroOneAdam", "compact"), ("OnebitAdam", "float32")]
TWO = {"node_size": 2}


def everywhere(optimizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """The worker errors that there are, [ranks, numel] with NaN where a rank has none, and all server errors."""
    (state,), ranks = optimizer._states, optimizer.communicator
    worker = torch.full((ranks.world_size, NUMEL), torch.nan)
    server = torch.full((ranks.world_size, NUMEL), torch.nan)
    for errors, whole, range_of in (
        (state.errors.worker_values(), worker, state.errors.sent_range),
        (state.errors.server_values(), server, state.errors.own_range),
    ):
        at = 0
        for bucket in state.layout.buckets:
            start, stop = range_of(bucket)
            whole[ranks.rank, start:stop] = errors[at : at + stop - start]
            at += stop - start
    for whole in (worker, server):
        rows = list(whole.unbind())
        dist.all_gather(rows, whole[ranks.rank].clone())
        whole.copy_(torch.stack(rows))
    return worker.numpy(), np.nanmean(server.numpy(), axis=0)


def two_nodes(rank: int, world_size: int, forms: list[Form], folder: str) -> dict[Any, Any]:
    """Runs of each form: their saves in both stages, and the same runs resumed from saves and dicts."""
    found = {}
    for name, form in forms:
        params, optimizer = build(name, state=form, **TWO)
        for start, stop in ((0, 2), (2, FREEZE + 2)):  # one in each stage
            go_on(rank, params, optimizer, range(start, stop))
            where = f"{folder}/{name}-{form}-{stop}"
            hf_compressopt.save_state(optimizer, where)
            values = [p.detach().clone() for p in params]
            kept = copy.deepcopy(optimizer.state_dict())
            if rank == 0:
                torch.save(values, f"{where}/params.pt")
            found[name, form, stop] = everywhere(optimizer)
            ends = []
            for source in ("copy", "files", "dict"):
                if source == "copy":
                    mine, own = copy.deepcopy((params, optimizer))
                else:
                    mine, own = build(name, state=form, **TWO)
                    assign(mine, values)
                if source == "files":
                    hf_compressopt.load_state(own, where)
                elif source == "dict":
                    own.load_state_dict(kept)
                go_on(rank, mine, own, range(stop, stop + 3))
                ends.append(tensors_in([mine, own.state_dict()]))
            assert all(same(ends[0], end) for end in ends[1:])
        with pytest.raises(ValueError, match="node_size=2, this one has 1"):
            build(name, state=form)[1].load_state_dict(kept)
    dist.barrier()
    return found


def build(name: str = "OnebitAdam", **options: Any) -> tuple[list[nn.Parameter], Any]:
    schedule = {"var_freeze_step": FREEZE, "local_step_clipper": 1} if name == "ZeroOneAdam" else {}
    return make(0, 0, name, scale_block=64, **schedule, **options)


def flat_run(rank: int, world_size: int, forms: list[Form], folder: str) -> dict[str, Any]:
    """A run in the flat topology that saves what two levels load."""
    found = {}
    for name, form in forms:
        params, optimizer = build(name, state=form)
        go_on(rank, params, optimizer, range(FREEZE + 2))
        hf_compressopt.save_state(optimizer, f"{folder}/{name}-{form}-flat")
        if rank == 0:
            torch.save([p.detach() for p in params], f"{folder}/{name}-{form}-flat/params.pt")
        found[name, form, "flat"] = everywhere(optimizer)
    return found


def loads(
    rank: int, world_size: int, forms: list[Form], folder: str, stops: list[Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Load the saves in another topology or on other ranks, take a step, and return what was loaded."""
    found = {}
    for name, form in forms:
        for stop in stops:
            params, optimizer = build(name, state=form, **options)
            where = f"{folder}/{name}-{form}-{stop}"
            assign(params, torch.load(f"{where}/params.pt"))
            hf_compressopt.load_state(optimizer, where)
            found[name, form, stop] = everywhere(optimizer)
            go_on(rank, params, optimizer, range(2))
            assert all(bool(p.isfinite().all()) for p in params)
    return found


def check_loaded(saved: dict[Any, Any], loaded: dict[Any, Any], tolerance: float) -> None:
    """Worker errors are the mean of all that there were for an element, server errors are found by place."""
    assert loaded
    for (name, form, stop), (worker, server) in loaded.items():
        before, servers = saved[name, form, stop]
        assert np.abs(before[~np.isnan(before)]).max() > 0
        exact = 1e-6 if form == "float32" else tolerance
        for row in worker:
            here = ~np.isnan(row)
            np.testing.assert_allclose(
                row[here], np.nanmean(before, axis=0)[here], atol=exact, err_msg=str((name, stop))
            )
        np.testing.assert_allclose(server, servers, atol=exact)


@pytest.mark.invariant(21)
@pytest.mark.parametrize("forms", [FORMS[:1], pytest.param(FORMS[1:], marks=pytest.mark.full)], ids=["some", "rest"])
def test_resumes_bit_for_bit_and_in_any_other_topology(forms: list[Form], tmp_path: Path) -> None:
    """Errors in 8 bits are rounded once more where their blocks are other ones."""
    saved = run_ranks(4, two_nodes, forms, str(tmp_path), timeout=240)[0]
    flat = run_ranks(4, flat_run, forms, str(tmp_path), timeout=240)
    stops, rounding = [2, FREEZE + 2], 0.02
    for options, world_size in (({}, 4), ({}, 2), ({"node_size": 4}, 4), ({}, 1)):
        results = run_ranks(world_size, loads, forms, str(tmp_path), stops, options, timeout=240)
        if world_size > 1:
            check_loaded(saved, results[0], rounding)
    for options, world_size in (({"node_size": 2}, 4), ({"node_size": 3}, 3)):
        check_loaded(flat[0], run_ranks(world_size, loads, forms, str(tmp_path), ["flat"], options)[0], rounding)


@pytest.mark.parametrize("form", [pytest.param("float32", marks=pytest.mark.full), "compact"])
@on_ranks(4, timeout=240)
def test_ddp_and_early_messages_have_the_bits_of_a_plain_loop(rank: int, world_size: int, form: str) -> None:
    """DDP's hook beside a plain loop, and messages that leave during backward beside those that leave in the step."""
    runs = [attached(clip, state=form, **TWO) for clip in ("late", "sketch")]
    net, optimizer = late_clip(state=form, **TWO)
    runs.append((net, net, optimizer))
    for step in range(LATE_STEPS):
        for model, net, optimizer in runs:
            backward(model, rank, step)
            if optimizer is runs[0][2]:
                assert (len(optimizer.early_messages.signature) > 0) == (step + 1 >= LATE_FIRST)
            if model is net:
                average_gradients(optimizer)
            end_step(optimizer)
        late, *others = (tensors_of(net, optimizer) for _, net, optimizer in runs)
        assert all(same(late, other) for other in others), step
    assert same_on_all_ranks(runs[0][1].parameters())


@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.full)])
@on_ranks(4, timeout=120)
def test_a_value_that_is_not_finite_on_one_rank_changes_no_error(rank: int, world_size: int, bad: float) -> None:
    """One gradient that is not finite, on the last rank: in each stage under a scaler, clipped late, and compressed."""
    for clip in ("sketch", "late"):
        scaler = scaler_of(16.0)
        ddp, _, optimizer = attached(clip, loss_scale=scaler.get_scale, **TWO)
        for step in range(LATE_STEPS):
            spoilt = step in (1, LATE_STEPS - 1)
            before = [e.clone() for group in optimizer._states for e in (group.worker_error, group.server_error)]
            inputs = late_data(rank, step) * (bad if spoilt and rank == world_size - 1 else 1.0)
            scaler.scale(ddp(inputs).square().mean()).backward()
            end_step(optimizer, scaler)
            after = [error for group in optimizer._states for error in (group.worker_error, group.server_error)]
            assert optimizer.step_was_skipped == spoilt, (clip, step)
            assert not spoilt or same(before, after), (clip, step)
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    state = hf_compressopt.GradientCompression(params, bucket_cap_mb=bucket_cap(200), **TWO)
    for step in range(2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * rank + step))
        if step and rank == 3:
            params[0].grad.view(-1)[17] = bad  # type: ignore[union-attr]
        before = [state.worker_error.clone(), state.server_error.clone()]
        state.average_gradients()
    assert same(before, [state.worker_error, state.server_error]) and state.skipped_steps == 1
    assert not params[0].grad.isfinite().all() and state.worker_error.any()  # type: ignore[union-attr]


def compression(
    rank: int, world_size: int, folder: str, node_size: int | None, load: bool, form: str
) -> dict[str, Any]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    options: dict[str, Any] = {"bucket_cap_mb": bucket_cap(200), "node_size": node_size, "state": form}
    state = hf_compressopt.GradientCompression(params, **options)
    if load:
        hf_compressopt.load_state(state, folder)
    found = {"errors": [e.numpy().copy() for e in (state.worker_error, state.server_error)], "step": state.steps}
    for step in range(state.steps, state.steps + 3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * rank + step))
        state.average_gradients()
        if step == 2:
            hf_compressopt.save_state(state, folder)
            found["saved"] = [e.numpy().copy() for e in (state.worker_error, state.server_error)]
    found["grads"] = [p.grad.numpy().copy() for p in params]  # type: ignore[union-attr]
    found["places"] = [
        [bucket.start + edge for edge in state.communicator.topology.sent_range(bucket.numel)]
        for bucket in state.layout.buckets
    ]
    if not load:
        again = copy.deepcopy(state.state_dict())
        state.load_state_dict(again)
    return found


@pytest.mark.parametrize(("form", "rounding"), [("float32", 1e-6), ("compact", 1e-3)])
def test_compressed_gradients_resume_in_any_topology(form: str, rounding: float, tmp_path: Path) -> None:
    saved = run_ranks(4, compression, str(tmp_path), 2, False, form)
    bound = 4 * (NUMEL / 2 + NUMEL / 4) + 4 * 8 * 4 * 6  # bytes of errors, and chunks that are not full
    for result in saved:
        assert sum(error.nbytes for error in result["errors"]) <= bound
    nodes = []
    for pair in (saved[:2], saved[2:]):
        whole = np.full(NUMEL, np.nan)
        for result in pair:
            parts = np.split(result["saved"][0], np.cumsum([stop - start for start, stop in result["places"]])[:-1])
            for (start, stop), part in zip(result["places"], parts, strict=True):
                whole[start:stop] = part
        assert not np.isnan(whole).any()
        nodes.append(whole)
    again = run_ranks(4, compression, str(tmp_path), 2, True, form)
    for result, before in zip(again, saved, strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(result["errors"], before["saved"], strict=True))
    for world_size, size in ((4, None), (2, None), (3, 3)):
        for result in run_ranks(world_size, compression, str(tmp_path), size, True, form):
            expected = np.concatenate([np.mean(nodes, axis=0)[start:stop] for start, stop in result["places"]])
            np.testing.assert_allclose(result["errors"][0], expected, atol=rounding)
