"""ZeRO with small messages: the arithmetic, what a step that is skipped leaves, and the bytes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_compressopt import GradScaler, ZeroOptimizer
from hf_compressopt.zero.memory import estimate_zero_memory, memory_report
from tests.oracles.simulation_zero import ZeroSimulation
from tests.support.harness import on_ranks, run_ranks
from tests.support.spreading import Share, spread
from tests.support.trainer_runs import same_on_all_ranks
from tests.support.zero_runs import INT4, Case, Net, bits, different, gradients, loss_of, train_zero

BITS = {"int4": 4, "int8": 8, "none": 0}


def fresh(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Net, ZeroOptimizer]:
    model = Net(dtype)
    return model, ZeroOptimizer(model.parameters(), torch.optim.AdamW, **{"lr": 1e-2, **options})


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
        trained = [p for p in model.parameters() if p.requires_grad]
        masters = [optimizer.get_full_param(p) for p in trained]
        found.append([*different(bits(oracle), bits(model)), *different(simulation.masters, masters)])
        assert same_on_all_ranks(p.float() for p in model.parameters())
        if world_size > 1 and params != "none":
            assert any(not torch.equal(p, m.to(p.dtype)) for p, m in zip(trained, masters, strict=True))
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


def steps_with(model: Net, optimizer: ZeroOptimizer, rank: int, steps: Any, scaler: Any = None) -> None:
    for step in steps:
        loss = loss_of(model, rank, step)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.invariant(13)
@on_ranks(2)
def test_a_step_that_is_not_taken_leaves_no_trace(rank: int, world_size: int) -> None:
    options = {**INT4, "reduce_bucket_size": 600}
    (plain, undisturbed), (model, optimizer) = fresh(options), fresh(options)
    steps_with(plain, undisturbed, rank, range(6))
    steps_with(model, optimizer, rank, range(3))
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
    steps_with(model, optimizer, rank, range(3, 6))
    assert list(different(bits(plain), bits(model))) == []

    scaled, other = fresh(options)  # the factors are powers of two, so that they change no bit
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    steps_with(scaled, other, rank, range(2), scaler)
    scaler.scale(loss_of(scaled, rank, 53) * (float("nan") if rank == 0 else 1.0)).backward()
    scaler.step(other)
    scaler.update()
    assert scaler.get_scale() == 1024.0 == other.loss_scale.of_scaler and other.step_was_skipped
    steps_with(scaled, other, rank, range(2, 6), scaler)
    assert scaler.get_scale() == 4096.0 == other.loss_scale.of_scaler
    assert list(different(bits(plain), bits(scaled))) == []

    second, stage1 = fresh({**options, "stage": 1})
    steps_with(second, stage1, rank, range(6))
    assert list(different(bits(plain), bits(second))) == []


def masters_of(model: nn.Module, optimizer: ZeroOptimizer) -> list[Tensor]:
    return [optimizer.get_full_param(p).to(p.dtype) if p.requires_grad else p.detach() for p in model.parameters()]


@on_ranks(3)
def test_masters_are_read_written_and_lent(rank: int, world_size: int) -> None:
    """Masters are what is read, written and lent; values that other code writes into parameters reach them."""
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = fresh({**INT4, "reduce_bucket_size": 600}, dtype)
        twin, other = fresh({**INT4, "reduce_bucket_size": 600}, dtype)
        steps_with(model, optimizer, rank, range(4))
        steps_with(twin, other, rank, range(2))
        replicas, masters = bits(twin), masters_of(twin, other)
        assert list(different(replicas, masters)) != []
        with other.masters_in_parameters(), other.masters_in_parameters():
            assert list(different(masters, bits(twin))) == [] and same_on_all_ranks(
                p.float() for p in twin.parameters()
            )
            with pytest.raises(RuntimeError, match="state_dict.. inside masters_in_parameters"):
                other.state_dict()
        assert list(different(replicas, bits(twin))) == []
        steps_with(twin, other, rank, range(2, 4))
        assert list(different(bits(model), bits(twin))) == []  # nothing of it changes the run

        value = torch.full(model.first.weight.shape, 0.123456789)
        optimizer.set_full_param(model.first.weight, value)
        assert torch.equal(optimizer.get_full_param(model.first.weight), value)
        model.second.weight.data[3, 5] = 7.0  # by every rank
        assert float(optimizer.get_full_param(model.second.weight)[3, 5]) == 7.0
        known = optimizer.get_local_param(model.embedding.weight)
        optimizer.set_local_param(model.embedding.weight, known + 1.0)
        lag = []
        for _ in range(3):
            optimizer.step()  # without gradients nothing but differences travels
            apart = (optimizer.get_full_param(model.embedding.weight) - model.embedding.weight.float()).detach().abs()
            lag.append(float(apart.max()))
        assert 1.0 > 7 * lag[0] and (lag[0] > 7 * lag[1] > 0 or dtype == torch.bfloat16) and lag[2] < 0.01
        optimizer.settle_parameters()
        assert list(different(masters_of(model, optimizer), bits(model))) == []
        assert same_on_all_ranks(p.float() for p in model.parameters())


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
    _, lamb = (pair := train_zero(rank, Case("lamb", {**INT4, "reduce_bucket_size": 700}, groups=True)))
    assert same_on_all_ranks(pair[0].parameters()) and lamb.steps == 3

    (model, optimizer), twin = fresh(INT4), Net()
    steps_with(model, optimizer, rank, range(4))
    model.frozen.requires_grad_(True)
    steps_with(model, optimizer, rank, range(3))
    assert same_on_all_ranks(model.parameters())
    assert not torch.equal(model.frozen.weight, twin.frozen.weight)


@on_ranks(2)
def test_ranks_that_differ(rank: int, world_size: int) -> None:
    option = {"grad_compression": "int4"} if rank else {"param_compression": "int4"}
    optimizer = ZeroOptimizer([dense := nn.Parameter(torch.ones(8, 8))], torch.optim.SGD, lr=0.1, **option)
    with pytest.raises((ValueError, RuntimeError), match="bucket size or compression"):
        dense.sum().backward()
        optimizer.step()
