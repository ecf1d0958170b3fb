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
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import attach_ddp, average_gradients
from tests.optim.test_late_clip import FIRST as LATE_FIRST
from tests.optim.test_late_clip import STEPS as LATE_STEPS
from tests.optim.test_late_clip import data as late_data
from tests.optim.test_late_clip import make as late_clip
from tests.optim.test_late_clip import tensors_of
from tests.oracles.cases import bucket_cap
from tests.oracles.steps import same
from tests.support.harness import run_ranks

Form = tuple[str, str]  # the optimizer, form of the state


# -- one run of two nodes of two ranks --------------------------------------------------------------------------------

SHAPES = [(20, 17), (64,), (0, 3), (130,), (1,)]
NUMEL = sum(int(np.prod(shape)) for shape in SHAPES)
FREEZE = 3
# the second half is that of the long tests
FORMS = [("OnebitAdam", "compact"), ("OnebitLamb", "float32"), ("ZeroOneAdam", "compact"), ("OnebitAdam", "float32")]
TWO = {"node_size": 2}


def make(name: str = "OnebitAdam", **options: Any) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    freeze = {"var_freeze_step": FREEZE, "local_step_clipper": 1} if name == "ZeroOneAdam" else {"freeze_step": FREEZE}
    settings = {"lr": 1e-2, "bucket_cap_mb": bucket_cap(200), "scale_block": 64, **freeze, **options}
    return params, getattr(hf_compressopt, name)(params, **settings)


def go_on(rank: int, params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * rank + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        average_gradients(optimizer)
        optimizer.step()


def bits(params: list[nn.Parameter], optimizer: Any) -> list[torch.Tensor]:
    """Everything that is this rank's."""
    state = copy.deepcopy(optimizer.state_dict())
    moments = [torch.as_tensor(value) for row in state["state"].values() for value in row.values()]
    own = state["compressopt"]
    return [*(p.detach().clone() for p in params), *moments, *own["worker_error"], *own["server_error"]]


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


def two_nodes(rank: int, world_size: int, forms: list[Form], folder: str) -> dict[str, Any]:
    """Runs of each form: their saves in both stages, their ends, and the same runs resumed from saves and dicts."""
    found: dict[str, Any] = {"resumed": [], "errors": {}}
    for name, form in forms:
        params, optimizer = make(name, state=form, **TWO)
        for stop in (2, FREEZE + 2):  # one in each stage
            go_on(rank, params, optimizer, range(optimizer.last_plan.step if stop > 2 else 0, stop))
            where = f"{folder}/{name}-{form}-{stop}"
            hf_compressopt.save_state(optimizer, where)
            values = [p.detach().clone() for p in params]
            kept = copy.deepcopy(optimizer.state_dict())
            if rank == 0:
                torch.save(values, f"{where}/params.pt")
            found["errors"][name, form, stop] = everywhere(optimizer)
            again = []
            for source in (where, kept):
                other_params, other = make(name, state=form, **TWO)
                with torch.no_grad():
                    for p, value in zip(other_params, values, strict=True):
                        p.copy_(value)
                if source is where:
                    hf_compressopt.load_state(other, where)
                else:
                    other.load_state_dict(kept)
                go_on(rank, other_params, other, range(stop, stop + 3))
                again.append(bits(other_params, other))
            mine, copied = copy.deepcopy((params, optimizer))
            go_on(rank, mine, copied, range(stop, stop + 3))
            end = bits(mine, copied)
            found["resumed"].append(all(same(end, other) for other in again))
        with pytest.raises(ValueError, match="node_size=2, this one has 1"):
            make(name, state=form)[1].load_state_dict(kept)
    dist.barrier()
    return found


def flat_run(rank: int, world_size: int, forms: list[Form], folder: str) -> dict[str, Any]:
    """A run in the flat topology that saves what two levels load."""
    found = {}
    for name, form in forms:
        params, optimizer = make(name, state=form)
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
            params, optimizer = make(name, state=form, **options)
            where = f"{folder}/{name}-{form}-{stop}"
            with torch.no_grad():
                for p, value in zip(params, torch.load(f"{where}/params.pt"), strict=True):
                    p.copy_(value)
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
    found = run_ranks(4, two_nodes, forms, str(tmp_path), timeout=240)
    for result in found:
        assert result["resumed"] == [True] * 2 * len(forms)
    flat = run_ranks(4, flat_run, forms, str(tmp_path), timeout=240)
    stops, rounding = [2, FREEZE + 2], 0.02
    saved = found[0]["errors"]
    for options, world_size in (({}, 4), ({}, 2), ({"node_size": 4}, 4), ({}, 1)):
        results = run_ranks(world_size, loads, forms, str(tmp_path), stops, options, timeout=240)
        if world_size > 1:
            check_loaded(saved, results[0], rounding)
    for options, world_size in (({"node_size": 2}, 4), ({"node_size": 3}, 3)):
        check_loaded(flat[0], run_ranks(world_size, loads, forms, str(tmp_path), ["flat"], options)[0], rounding)


# -- gradients on their way -------------------------------------------------------------------------------------------


def without_ddp(rank: int, world_size: int, form: str) -> dict[str, Any]:
    """DDP's hook beside a plain loop, and messages that leave during backward beside those that leave in the step."""
    runs: dict[str, tuple[Any, Any, Any]] = {}
    for name in ("late", "sketch", "plain"):
        net, optimizer = late_clip(("sketch" if name == "plain" else name), state=form, **TWO)
        ddp = net if name == "plain" else DistributedDataParallel(net, bucket_cap_mb=0.005)
        if name != "plain":
            attach_ddp(ddp, optimizer)
        runs[name] = (net, ddp, optimizer)
    equal, left = [], []
    for step in range(LATE_STEPS):
        for net, ddp, optimizer in runs.values():
            ddp(late_data(rank, step)).square().mean().backward()
            if optimizer is runs["late"][2]:
                left.append(len(optimizer.early_messages.signature) > 0)
            if ddp is net:
                average_gradients(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        late, *others = (tensors_of(net, optimizer) for net, _, optimizer in runs.values())
        equal.append([same(late, other) for other in others])
    return {"equal": equal, "left": left, "params": [p.detach().numpy() for p in runs["late"][0].parameters()]}


@pytest.mark.parametrize("form", [pytest.param("float32", marks=pytest.mark.full), "compact"])
def test_ddp_and_early_messages_have_the_bits_of_a_plain_loop(form: str) -> None:
    ranks = run_ranks(4, without_ddp, form, timeout=240)
    for result in ranks:
        assert result["equal"] == [[True, True]] * LATE_STEPS
        assert result["left"] == [step + 1 >= LATE_FIRST for step in range(LATE_STEPS)]
        for mine, first in zip(result["params"], ranks[0]["params"], strict=True):
            assert mine.tobytes() == first.tobytes()


def spoilt(rank: int, world_size: int, bad: float) -> dict[str, bool]:
    """One gradient that is not finite, on the last rank: in each stage under a scaler, clipped late, and compressed."""
    found = {}
    for clip in ("sketch", "late"):
        net, optimizer = late_clip(clip, **TWO)
        ddp, scaler = DistributedDataParallel(net), hf_compressopt.GradScaler("cpu", init_scale=16.0)
        attach_ddp(ddp, optimizer, loss_scale=scaler.get_scale)
        for step in range(LATE_STEPS):
            spoil = step in (1, LATE_STEPS - 1) and rank == world_size - 1
            before = [e.clone() for group in optimizer._states for e in (group.worker_error, group.server_error)]
            scaler.scale(ddp(late_data(rank, step) * (bad if spoil else 1.0)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = [error for group in optimizer._states for error in (group.worker_error, group.server_error)]
            if step in (1, LATE_STEPS - 1):
                found[f"{clip}, step {step}"] = same(before, after) and optimizer.step_was_skipped
            assert optimizer.step_was_skipped == (step in (1, LATE_STEPS - 1)), (clip, step)
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    state = hf_compressopt.GradientCompression(params, bucket_cap_mb=bucket_cap(200), **TWO)
    for step in range(2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * rank + step))
        if step and rank == 3:
            params[0].grad.view(-1)[17] = bad  # type: ignore[union-attr]
        before = [state.worker_error.clone(), state.server_error.clone()]
        state.average_gradients()
    found["compression"] = same(before, [state.worker_error, state.server_error]) and state.skipped_steps == 1
    found["spread"] = not bool(params[0].grad.isfinite().all())  # type: ignore[union-attr]
    found["moved"] = bool(state.worker_error.any())
    return found


@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.full)])
def test_a_value_that_is_not_finite_on_one_rank_changes_no_error(bad: float) -> None:
    for found in run_ranks(4, spoilt, bad, timeout=120):
        assert all(found.values()), found


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
