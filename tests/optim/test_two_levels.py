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
from hf_compressopt.collectives import topology
from hf_compressopt.format.index import CheckpointError
from tests.optim.test_late_clip import FIRST as LATE_FIRST
from tests.optim.test_late_clip import tensors_of
from tests.oracles.cases import bucket_cap
from tests.oracles.steps import same
from tests.support.ddp_runs import STEPS as LATE_STEPS
from tests.support.ddp_runs import attached, backward, end_step
from tests.support.ddp_runs import make as late_clip
from tests.support.exchanging import errors_everywhere
from tests.support.family import SHAPES, assign, go_on, make
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.logs import log_lines

Form = tuple[str, str]  # the optimizer, form of the state


NUMEL = sum(int(np.prod(shape)) for shape in SHAPES)
FREEZE = 3
# the second half is that of the long tests
FORMS = [("OnebitAdam", "compact"), ("OnebitLamb", "float32"), ("ZeroOneAdam", "compact"), ("OnebitAdam", "float32")]
TWO = {"node_size": 2}


def two_nodes(rank: int, world_size: int, forms: list[Form], folder: str) -> dict[Any, Any]:
    """Runs of each form, and their saves in both stages."""
    found = {}
    for name, form in forms:
        params, optimizer = build(name, state=form, **TWO)
        for start, stop in ((0, 2), (2, FREEZE + 2)):  # one in each stage
            go_on(rank, params, optimizer, range(start, stop))
            where = f"{folder}/{name}-{form}-{stop}"
            hf_compressopt.save_state(optimizer, where)
            if rank == 0:
                torch.save([p.detach() for p in params], f"{where}/params.pt")
            found[name, form, stop] = errors_everywhere(optimizer._states[0], optimizer.communicator)
        with pytest.raises(ValueError, match="node_size=2, this one has 1"):
            build(name, state=form)[1].load_state_dict(optimizer.state_dict())
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
        found[name, form, "flat"] = errors_everywhere(optimizer._states[0], optimizer.communicator)
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
            found[name, form, stop] = errors_everywhere(optimizer._states[0], optimizer.communicator)
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


@pytest.mark.invariant(22)
@pytest.mark.parametrize("forms", [FORMS[:1], pytest.param(FORMS[1:], marks=pytest.mark.full)], ids=["some", "rest"])
def test_resumes_in_any_other_topology(forms: list[Form], tmp_path: Path) -> None:
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


# -- resumes with topology="auto" -------------------------------------------------------------------------------------

WARMUP = pytest.param("warmup", marks=pytest.mark.full)


def measured_run(kind: str, hierarchical: bool, values: list[torch.Tensor] | None = None) -> tuple[Any, Any]:
    """Parameters and an optimizer with topology="auto" whose measurement said so, on two nodes of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "nodes_pay", lambda *seconds: hierarchical)
        patch.setattr(topology, "gethostname", lambda: "ab"[dist.get_rank() // 2])
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        params, optimizer = build(zero_stage=2 * (kind == "zero_stage"))
        if kind == "gradients":
            optimizer = hf_compressopt.GradientCompression(params, bucket_cap_mb=bucket_cap(200))
        elif kind.startswith("zero") and kind != "zero_stage":
            compression = {"grad_compression": "int4"} if "int4" in kind else {}
            optimizer = hf_compressopt.ZeroOptimizer(params, torch.optim.AdamW, lr=1e-2, **compression)
    if values is not None:
        assign(params, values)
    return params, optimizer


def train(kind: str, params: list[nn.Parameter], optimizer: Any, rank: int, steps: range) -> list[torch.Tensor]:
    for step in steps:
        if kind in ("warmup", "compressed", "zero_stage"):
            go_on(rank, params, optimizer, [step])
            continue
        for index, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * rank + 10 * step + index))
        if kind == "gradients":
            optimizer.average_gradients()
            with torch.no_grad():
                torch._foreach_sub_(params, [p.grad for p in params], alpha=0.1)
        else:
            optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.invariant(21)
@pytest.mark.parametrize("kind", [WARMUP, "compressed", "zero_stage", "gradients", "zero", "zero int4"])
@on_ranks(4, timeout=240)
def test_a_resume_takes_the_topology_of_the_checkpoint_whatever_auto_measures(
    rank: int, world_size: int, kind: str, tmp_path: Path
) -> None:
    """In bits, and in errors; a load that fails leaves the topology that was measured, and the errors."""
    stop = FREEZE + 2 if kind == "compressed" else 2
    for saved in (True, False):
        params, optimizer = measured_run(kind, saved)
        values = train(kind, params, optimizer, rank, range(stop))
        hf_compressopt.save_state(optimizer, tmp_path / str(saved))
        ends = [train(kind, params, optimizer, rank, range(stop, stop + 3))]
        for measured in (True, False):
            params, again = measured_run(kind, measured, values)
            with log_lines() as lines:
                hf_compressopt.load_state(again, tmp_path / str(saved))
            assert (again.communicator.levels is not None) == saved
            told = [line for line in lines if "as the run that saved the checkpoint" in line]
            assert len(told) == (measured != saved and rank == 0) and not any("bit for bit" in line for line in lines)
            params, again = copy.deepcopy((params, again))  # a copy is in the topology that was taken
            ends.append(train(kind, params, again, rank, range(stop, stop + 3)))
        assert all(same(ends[0], end) for end in ends[1:])
    if rank == 0:
        for shard in (tmp_path / "True").glob("*.safetensors"):
            shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    dist.barrier()
    runs = [measured_run(kind, False) for _ in range(2)]
    for params, optimizer in runs:
        train(kind, params, optimizer, rank, range(stop))
    with pytest.raises(CheckpointError):
        hf_compressopt.load_state(runs[0][1], tmp_path / "True")
    assert runs[0][1].communicator.levels is None
    ends = [train(kind, *run, rank, range(stop, stop + 2)) for run in runs]
    assert same(*ends)
