"""ZeRO with low-bit messages, flat and hierarchical: the arithmetic, what skipped steps leave, and the bytes."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_compressopt import GradScaler, ZeroOptimizer, load_state, save_state
from hf_compressopt.kernels.compact import values_of_errors
from hf_compressopt.zero.memory import estimate_zero_memory, memory_report
from tests.oracles.simulation_integers import ZeroSimulation
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.spreading import Share, spread
from tests.support.zero_runs import (
    INT4,
    Case,
    Net,
    bits,
    different,
    fresh,
    gradients,
    loss_of,
    masters_of,
    run_steps,
    train_zero,
)

BITS = {"int4": 4, "int8": 8, "none": 0}
SMALL = Case(options={**INT4, "reduce_bucket_size": 600})


def added(grads: Sequence[Tensor | None]) -> Tensor | None:
    present = [grad for grad in grads if grad is not None]
    return sum(present[1:], present[0]) if present else None


def simulated(world_size: int, case: Case, sizes: tuple[int, int], node_size: int = 1) -> tuple[Net, ZeroSimulation]:
    model = Net(case.dtype)
    params = [p for p in model.parameters() if p.requires_grad]
    simulation = ZeroSimulation(params, world_size, sizes, case.options["reduce_bucket_size"], node_size)
    optimizer = torch.optim.AdamW(simulation.masters, lr=1e-2, weight_decay=0.1)
    for step in range(case.steps):
        passes = [
            [gradients(model, loss_of(model, rank, step, number)) for rank in range(world_size)]
            for number in range(case.passes)
        ]
        if case.hold:
            held = [[added(pair) for pair in zip(*rows, strict=True)] for rows in zip(*passes, strict=True)]
            passes = [held]
        assert simulation.step(optimizer, passes)
        if sizes[1] and world_size > 1 and case.dtype == torch.float32:
            assert simulation.worst_lag <= 1.01 * simulation.finest > 0
    return model, simulation


SIMULATED = [
    ("int4", "int4", Case(steps=20, options={"reduce_bucket_size": 500})),
    ("int8", "none", Case(steps=4, options={"reduce_bucket_size": 10**6, "overlap_comm": False})),
    ("none", "int4", Case(steps=4, options={"reduce_bucket_size": 700, "loss_scale": 8.0})),
    ("int4", "int8", Case(steps=4, passes=2, options={"reduce_bucket_size": 900, "loss_scale": 4.0})),
    ("int4", "int4", Case(steps=4, passes=2, hold=True, options={"reduce_bucket_size": 900, "stage": 1})),
    ("int4", "int4", Case(steps=6, dtype=torch.bfloat16, options={"reduce_bucket_size": 600})),
]


def against_the_simulation(rank: int, world_size: int, share: Share, node_size: int = 1) -> list[list[str]]:
    found = []
    for grads, params, case in share.of(SIMULATED):
        case.options |= {"grad_compression": grads, "param_compression": params, "node_size": node_size}
        model, optimizer = train_zero(rank, case)
        oracle, simulation = simulated(world_size, case, (BITS[grads], BITS[params]), node_size)
        masters = masters_of(model, optimizer)
        found.append([*different(bits(oracle), bits(model)), *different(simulation.masters, masters)])
        assert same_on_all_ranks(model.parameters())
        if world_size > 1 and params != "none":
            assert list(different(bits(model, trainable=True), [master.to(case.dtype) for master in masters]))
    return found


@pytest.mark.invariant(8, 29)
@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3, 4, 1)))
def test_real_ranks_leave_the_bits_of_the_simulation(world_size: int, share: Share) -> None:
    for found in run_ranks(world_size, against_the_simulation, share):
        assert found == [[]] * len(share.of(SIMULATED))


@pytest.mark.parametrize(
    ("nodes", "size", "share"),
    [
        (2, 2, Share(1, 3)),
        (3, 2, Share(5, 6)),
        (1, 4, Share(3, 6)),
        *(pytest.param(*nodes, Share(0, 1), marks=pytest.mark.full) for nodes in ((2, 2), (2, 3), (3, 2))),
    ],
)
def test_two_levels_leave_the_bits_of_the_simulation(nodes: int, size: int, share: Share) -> None:
    """The nodes are as ranks, and what they send is the mean of their ranks."""
    for found in run_ranks(nodes * size, against_the_simulation, share, size):
        assert found == [[]] * len(share.of(SIMULATED))


@pytest.mark.invariant(13)
@on_ranks(2)
def test_a_step_that_is_not_taken_leaves_no_trace(rank: int, world_size: int) -> None:
    (plain, _), (model, optimizer) = train_zero(rank, replace(SMALL, steps=6)), train_zero(rank, SMALL)
    before, sent = bits(model), optimizer.metrics()["bytes_sent"]
    (loss_of(model, rank, 50) * (float("inf") if rank == 1 else 1.0)).backward()
    optimizer.step()
    assert optimizer.step_was_skipped and optimizer.steps == 3 and same_on_all_ranks(model.parameters())
    assert list(different(before, bits(model))) == [] and optimizer.metrics()["bytes_sent"] > sent
    loss_of(model, rank, 51).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="step.. inside masters_in_parameters"), optimizer.masters_in_parameters():
        loss_of(model, rank, 52).backward()
        optimizer.step()
    optimizer.zero_grad()
    run_steps(rank, SMALL, model, optimizer, range(3, 6))
    assert list(different(bits(plain), bits(model))) == []

    scaled, other = fresh(SMALL)  # the factors are powers of two, so that they change no bit
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, scale in ((0, 1024), (1, 2048), (53, 1024), (2, 1024), (3, 2048), (4, 2048), (5, 4096)):
        scaler.scale(loss_of(scaled, rank, step) * (float("nan") if (step, rank) == (53, 0) else 1.0)).backward()
        scaler.step(other)
        scaler.update()
        assert scaler.get_scale() == scale == other.loss_scale.of_scaler and other.step_was_skipped == (step == 53)
    assert list(different(bits(plain), bits(scaled))) == []

    second, _ = train_zero(rank, replace(SMALL, steps=6, options={**SMALL.options, "stage": 1}))
    assert list(different(bits(plain), bits(second))) == []


@pytest.mark.parametrize("node_size", [1, pytest.param(2, marks=pytest.mark.full)])
@on_ranks(4)
def test_what_no_rank_uses_in_every_second_step_keeps_its_errors(rank: int, world_size: int, node_size: int) -> None:
    """Of 50 gradients each; both parameters in one slice, and each in its own."""
    for options in ({}, {"reduce_bucket_size": 64 * 64}, {"stage": 1}):
        always, other = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
        given = {"grad_compression": "int4", "node_size": node_size, **options}
        optimizer = ZeroOptimizer([always, other], torch.optim.SGD, lr=1.0, **given)
        mean = torch.zeros(64, 64)
        for step in range(100):
            grads = [torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * r + step)) for r in range(4)]
            (always * grads[rank]).sum().backward()
            if step % 2 == 0:
                (other * grads[rank]).sum().backward()
                mean += sum(grads) / world_size
            optimizer.step()
        assert float((other + mean).square().mean().sqrt()) < 0.3, options


@on_ranks(3)
def test_masters_are_read_written_and_lent(rank: int, world_size: int) -> None:
    """Masters are what is read, written and lent; values that other code writes into parameters reach them."""
    for dtype in (torch.float32, torch.bfloat16):
        case = replace(SMALL, dtype=dtype, options={**SMALL.options, "weight_decay": 0.01})
        (model, optimizer), (twin, other) = (train_zero(rank, replace(case, steps=steps)) for steps in (4, 2))
        replicas, masters = bits(twin), [master.to(dtype) for master in masters_of(twin, other)]
        assert list(different(bits(twin, trainable=True), masters)) != []
        with other.masters_in_parameters(), other.masters_in_parameters():
            assert list(different(masters, bits(twin, trainable=True))) == [] and same_on_all_ranks(twin.parameters())
            with pytest.raises(RuntimeError, match="state_dict.. inside masters_in_parameters"):
                other.state_dict()
        assert list(different(replicas, bits(twin))) == []
        run_steps(rank, case, twin, other, range(2, 4))
        assert list(different(bits(model), bits(twin))) == []  # nothing of it changes the run

        value = torch.full(model.first.weight.shape, 0.123456789)
        optimizer.set_full_param(model.first.weight, value)
        assert torch.equal(optimizer.get_full_param(model.first.weight), value)
        model.second.weight.data[3, 5] = 7.0  # by every rank
        assert float(optimizer.get_full_param(model.second.weight)[3, 5]) == 7.0
        with torch.no_grad():
            for part in optimizer.partition.find(model.embedding.weight)[2]:
                part.tensor.add_(1.0)  # masters that are ahead of the parameters
        lag = []
        for _ in range(3):
            optimizer.step()  # without gradients nothing but differences travels
            apart = (optimizer.get_full_param(model.embedding.weight) - model.embedding.weight.float()).detach().abs()
            lag.append(float(apart.max()))
        assert 1.0 > 7 * lag[0] and (lag[0] > 7 * lag[1] > 0 or dtype == torch.bfloat16) and lag[2] < 0.01
        optimizer.settle_parameters()
        masters = [master.to(dtype) for master in masters_of(model, optimizer)]
        assert list(different(masters, bits(model, trainable=True))) == [] and same_on_all_ranks(model.parameters())


@pytest.mark.invariant(33)
@on_ranks(2, 3)
def test_bytes_and_memory_are_those_of_the_formulas(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(640, 700), nn.Tanh(), nn.Linear(700, 300, bias=False))
    numel = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    for size, grads, params in ((4, "int4", "int4"), (8, "int8", "int8"), (0, "int4", "none")):
        options = {"grad_compression": grads, "param_compression": params}
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, **options)
        for _ in range(2):
            model(torch.randn(4, 640)).square().sum().backward()
            optimizer.step()
        down = 1.03 * numel * size / 8 if size else 4 * numel
        expected = (1.03 * numel * BITS[grads] / 8 + down) * (world_size - 1) / world_size
        assert expected <= optimizer.traffic.step_bytes * 1.02 and optimizer.traffic.step_bytes <= expected * 1.02
        report = memory_report(optimizer)
        assert 1.01 * numel < report.errors < 1.04 * numel
        assert report.masters == pytest.approx(4 * numel / world_size if size else 0, rel=0.02)
        estimate = estimate_zero_memory(model, world_size, 2, **options)
        assert estimate.states == pytest.approx(report.states + report.masters, rel=0.02)
        model(torch.randn(4, 640)).square().sum().backward()
        assert memory_report(optimizer).errors == 2 * report.errors == pytest.approx(estimate.errors, rel=0.02)
        words = f", gradients as {grads}" + (f", parameters as {params}" if size else "")
        assert optimizer.describe().endswith(words)


@on_ranks(3)
def test_what_zero_can_it_can_with_small_messages(rank: int, world_size: int) -> None:
    model, lamb = train_zero(rank, Case("lamb", {**INT4, "reduce_bucket_size": 700}, groups=True))
    assert same_on_all_ranks(model.parameters()) and lamb.steps == 3

    model, optimizer = train_zero(rank, case := Case(options=INT4, steps=4))
    model.frozen.requires_grad_(True)
    run_steps(rank, case, model, optimizer, range(3))
    assert same_on_all_ranks(model.parameters())
    assert not torch.equal(model.frozen.weight, Net().frozen.weight)


# -- two levels: M nodes of g ranks on one machine ---------------------------------------------------------------------


@on_ranks(4)
def test_skips_and_copies_in_two_levels(rank: int, world_size: int) -> None:
    case = Case(options={"node_size": 2, "clip_grad": 1.0}, steps=2)
    (whole, _), (model, optimizer) = train_zero(rank, replace(case, steps=4)), train_zero(rank, case)
    (loss_of(model, rank, 5) * (float("inf") if rank == 3 else 1.0)).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    model, optimizer = copy.deepcopy((model, optimizer))
    run_steps(rank, case, model, optimizer, range(2, 4))
    assert list(different(bits(whole), bits(model))) == [] and optimizer.communicator.topology.node_size == 2


@pytest.mark.invariant(33)
@pytest.mark.parametrize(("options", "nbytes", "of_errors"), [({}, 4, 0.0), (INT4, 33 / 64, (1 + 2 / 128) / 2)])
@on_ranks(4)
def test_bytes_in_two_levels_are_those_of_the_formulas(
    rank: int, world_size: int, options: dict[str, Any], nbytes: float, of_errors: float
) -> None:
    """Between nodes a ring of ``nbytes`` an element each way; inside float32 gradients and such parameters."""
    p = nn.Parameter(torch.zeros(400, 500))
    optimizer = ZeroOptimizer([p], torch.optim.AdamW, lr=1e-2, node_size=2, **options)
    assert "hierarchical on 2 nodes" in optimizer.describe()
    for _ in range(2):
        inside = optimizer.metrics().get("bytes_sent_in_node", 0.0)
        (p * rank).sum().backward()
        optimizer.step()
    metrics, errors = optimizer.metrics(), memory_report(optimizer).errors
    ring, within = 2 / 2 * nbytes * p.numel(), (4 + nbytes) / 2 * p.numel()  # of M = 2 nodes, of g = 2 ranks
    assert 1 <= 2 * metrics["bytes_sent_step"] / ring < 1.05
    assert 1 <= (metrics["bytes_sent_in_node"] - inside) / within < 1.05
    assert errors / p.numel() == pytest.approx(of_errors, rel=0.02)


def errors_and_moments(optimizer: ZeroOptimizer) -> tuple[dict[int, np.ndarray], list[Tensor]]:
    """The errors of each parameter that has any, nan for elements whose errors other ranks have; and the moments."""
    found = {}
    for own in optimizer.partition.reducer.slices:
        if own.errors is not None:
            values = values_of_errors(own.errors)
            for number in own.cut.spans:
                error = found.setdefault(number, np.full(optimizer.partition.tensors[number].numel(), np.nan, "f4"))
                for span in own.error_spans.get(number, ()):
                    error[span.start : span.stop] = values[span.offset : span.offset + span.numel]
    return found, [optimizer.get_full_state(optimizer.partition.tensors[number], "exp_avg_sq") for number in found]


def saved_errors(rank: int, world_size: int, folder: str) -> tuple[dict[int, np.ndarray], list[Tensor]]:
    options = {"grad_compression": "int4", "param_compression": "int8", "node_size": 2, "reduce_bucket_size": 600}
    _, optimizer = train_zero(rank, Case(options=options))
    save_state(optimizer, folder)
    return errors_and_moments(optimizer)


def loaded_errors(rank: int, world_size: int, folder: str) -> tuple[dict[int, np.ndarray], list[Tensor]]:
    _, optimizer = fresh(Case(options={"grad_compression": "int4"}))
    load_state(optimizer, folder)
    return errors_and_moments(optimizer)


def test_errors_of_nodes_go_on_in_any_topology(tmp_path: Path) -> None:
    saved = run_ranks(4, saved_errors, str(tmp_path))
    loaded = [found for ranks in (4, 2) for found in run_ranks(ranks, loaded_errors, str(tmp_path))]
    assert len(saved[0][0]) == 4
    for number, moment in zip(saved[0][0], saved[0][1], strict=True):
        rows = np.stack([errors[number] for errors, _ in saved])
        nodes = [np.where(np.isnan(rows[2 * node]), rows[2 * node + 1], rows[2 * node]) for node in range(2)]
        assert np.isfinite(nodes).all() and np.isnan(rows).sum() == rows.size / 2  # the ranks of a node share them
        mean = np.mean(nodes, axis=0)
        for errors, moments in loaded:
            assert errors[number] == pytest.approx(mean, abs=float(np.abs(mean).max()) / 127)
            assert torch.equal(moments[[*errors].index(number)], moment)


@on_ranks(3)
def test_nodes_that_cannot_be_are_refused(rank: int, world_size: int) -> None:
    refused = [({"node_size": 2}, "divide the number of ranks, 3, got 2"), ({"topology": "two-level"}, "two nodes")]
    for topology, text in refused:
        with pytest.raises(ValueError, match=text):
            fresh(Case(options=topology))
