"""Low-bit gradients on real gloo ranks: equal to a simulation in bits, through DDP's hook and in plain loops."""

import copy
import json
import pickle
import unittest.mock
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hf_compressopt import (
    FusedAdam,
    GradientCompression,
    OnebitAdam,
    attach_ddp,
    average_gradients,
    compress_hook,
    ddp_hook,
    load_state,
    save_state,
)
from hf_compressopt.format.index import CheckpointError, CheckpointIndex, sealed
from tests.oracles.simulation_integers import Simulation, in_full
from tests.support.ddp_runs import backward, hook_beside_loop, make_net
from tests.support.exchanging import errors_everywhere
from tests.support.forms import in_form
from tests.support.harness import on_ranks, run_ranks, run_ranks_expecting_error, same_on_all_ranks
from tests.support.logs import log_lines
from tests.support.recording import CAP, Recording, check_overlap, events_of_backward

SHAPES = [(9, 33), (129,), (0,), (1,), (64, 5), (3, 1, 2)]  # two that travel as integers
SMALL = in_full(SHAPES[::-1])
BUCKET = 300  # elements, so that buckets cut tensors


def cap(numel: int = BUCKET) -> float:
    return numel * 4 / 2**20


def gradients(rank: int, step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator) * 10.0 ** (i % 3 - 1) for i, shape in enumerate(shapes)]


def flat(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Concatenated as the state lays them out: the last parameter first."""
    return torch.cat([t.reshape(-1).float() for t in reversed(list(tensors))]).numpy()


def zeros() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def params_of(state: GradientCompression) -> list[nn.Parameter]:
    return state.params[::-1]


def run(state: GradientCompression, rank: int, steps: Iterable[int], scale: float = 1.0) -> list[np.ndarray]:
    """Take steps of a plain loop, and return the gradients after each."""
    found = []
    for step in steps:
        for p, grad in zip(params_of(state), gradients(rank, step), strict=True):
            p.grad = grad * scale
        state.average_gradients()
        state.step_taken()
        found.append(flat([p.grad for p in params_of(state)]))
    return found


def in_a_plain_loop(
    rank: int, world_size: int, compression: str, form: str, steps: int
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    state = in_form(GradientCompression, form)(zeros(), compression, bucket_cap_mb=cap())
    return run(state, rank, range(steps)), state.worker_error.numpy(), state.server_error.numpy()


@pytest.mark.parametrize("compression", ["int4", "int8"])
@pytest.mark.parametrize("form", ["compact", "float32"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_the_simulation_in_bits(world_size: int, compression: str, form: str) -> None:
    steps = 4
    numel = sum(int(np.prod(shape)) for shape in SHAPES)
    simulation = Simulation(numel, BUCKET, world_size, int(compression[3:]), compact=form == "compact")
    expected = []
    for step in range(steps):
        grads = np.stack([flat(gradients(rank, step)) for rank in range(world_size)])
        average = simulation.average(np.where(SMALL, np.float32(0), grads)) if world_size > 1 else grads[0]
        expected.append(np.where(SMALL, grads.astype(np.float64).mean(axis=0), average).astype(np.float32))
    ranks = run_ranks(world_size, in_a_plain_loop, compression, form, steps)
    for rank, (results, worker_error, _) in enumerate(ranks):
        for mine, theirs in zip(results, expected, strict=True):
            assert mine[~SMALL].tobytes() == theirs[~SMALL].tobytes()
            np.testing.assert_allclose(mine[SMALL], theirs[SMALL], rtol=1e-6, atol=1e-6)
        if world_size > 1:
            assert worker_error.tobytes() == simulation.worker_error[rank].tobytes()
    if world_size > 1:
        held = np.sort(np.concatenate([server for *_, server in ranks]))
        assert held.tobytes() == np.sort(simulation.server_error).tobytes()


@pytest.mark.parametrize(
    ("world_size", "numel", "bits", "most"),
    [(3, 100_000, 4, 0.05), (3, 100_000, 8, 0.005), (2, 4096, 4, 0.05), (2, 4096, 8, 0.005)],
)
@on_ranks()
def test_bytes_are_those_of_the_formula_and_what_messages_miss_comes_later(
    rank: int, world_size: int, numel: int, bits: int, most: float
) -> None:
    shape = numel // 32, 32
    own = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    p, mean, received, errors = nn.Parameter(torch.zeros(shape)), sum(own) / world_size, torch.zeros(shape), []
    state = GradientCompression([p], f"int{bits}")
    for step in range(9):
        before = state.traffic.total_bytes
        p.grad = own[rank].clone()
        state.average_gradients()
        state.step_taken()
        if step:  # the first one also compares the ranks
            received += p.grad
            errors.append(float((received / step - mean).norm() / mean.norm()))
    formula = 2 * (world_size - 1) / world_size * numel * (bits + 16 / 128) / 8
    sent = state.traffic.total_bytes - before
    assert formula <= sent <= 1.01 * formula or numel < 10_000
    assert errors[-1] < 0.3 * errors[0] and errors[-1] < most


@pytest.mark.parametrize(
    ("ddp_options", "options"),
    [
        ({}, {}),
        ({"gradient_as_bucket_view": True}, {}),
        ({"static_graph": True}, {}),
        ({"find_unused_parameters": True}, {"sometimes": True}),
        ({}, {"accumulate": 3}),
        ({}, {"dtype": torch.bfloat16}),
    ],
    ids=["plain", "bucket views", "static graph", "unused parameters", "accumulation", "bfloat16"],
)
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_the_hook_has_the_bits_of_the_plain_loop(
    rank: int, world_size: int, ddp_options: dict[str, Any], options: dict[str, Any]
) -> None:
    given = dict(options)
    nets = [make_net(given.get("dtype", torch.float32)) for _ in range(2)]
    given.pop("dtype", None)
    ddp = DistributedDataParallel(nets[0], bucket_cap_mb=0.005, **ddp_options)
    states = [GradientCompression(net.named_parameters(), "int4", bucket_cap_mb=cap(500)) for net in nets]
    ddp.register_comm_hook(states[0], compress_hook)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    same = hook_beside_loop(rank, (ddp, nets[1]), optimizers, states[1].average_gradients, 5, **given)
    assert same == [True] * 5
    assert same_on_all_ranks(nets[0].parameters())


def not_finite(rank: int, world_size: int, bad: float, steps: list[int], **options: Any) -> GradientCompression:
    """A run whose gradients are not finite in the steps 1 and 2: all ranks get that, and no error changes."""
    state = GradientCompression(zeros(), bucket_cap_mb=cap(), **options)
    for number in steps:
        before = state.worker_error.clone(), state.server_error.clone()
        for p, grad in zip(params_of(state), gradients(rank, number), strict=True):
            p.grad = grad.clone()
        if number in (1, 2) and rank == world_size - 1:
            params_of(state)[4 * (number == 1)].grad.view(-1)[17] = bad  # of the first bucket, then of the last one
        state.average_gradients()
        state.step_taken()
        assert all(bool(p.grad.isfinite().all()) for p in state.params) == (number not in (1, 2))
        assert number not in (1, 2) or all(map(torch.equal, before, (state.worker_error, state.server_error)))
    return state


@pytest.mark.parametrize(("world_size", "node_size"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@on_ranks()
def test_a_value_that_is_not_finite_reaches_all_and_changes_no_error(
    rank: int, world_size: int, node_size: int, bad: float
) -> None:
    runs = ([0, 1, 2, 3, 4], [0, 3, 4])
    with log_lines() as lines:
        spoilt, well = (not_finite(rank, world_size, bad, steps, node_size=node_size) for steps in runs)
    said = [line for line in lines if "are not finite, and so are their averages" in line]
    assert len(said) == (2 if rank == 0 else 0)
    for step, line in zip((2, 3), said, strict=False):  # the ranks of a node average before they send
        assert line.startswith(f"step {step}: gradients of rank ") and (
            node_size > 1 or f"rank {world_size - 1} are" in line
        )
    assert (spoilt.steps_not_finite, well.steps_not_finite) == (2, 0)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(spoilt.params, well.params, strict=True))
    assert same_on_all_ranks(p.grad for p in spoilt.params)


@on_ranks(2)
def test_a_flag_that_lies_on_a_device_is_read_in_the_next_step(rank: int, world_size: int) -> None:
    """As on a GPU, which the host would wait for: errors are the same, and the log tells of it one step later."""
    runs = []
    for late in (False, True):
        where = "hf_compressopt.collectives.{}.reads_at_once"
        with (
            log_lines() as lines,
            unittest.mock.patch(where.format("gradients"), return_value=not late),
            unittest.mock.patch(where.format("feedback"), return_value=not late),
        ):
            state = not_finite(rank, world_size, float("nan"), [0, 1, 3, 4, 2])
            said = [line for line in lines if "are not finite, and so are their averages" in line]
            assert len(said) == (0 if rank else 2 - late)
            assert (state.steps_not_finite, pickle.loads(pickle.dumps(state)).steps_not_finite) == (2, 2)
            said = [line for line in lines if "are not finite, and so are their averages" in line]
            assert [line.split(":")[0] for line in said] == ([] if rank else ["step 2", "step 5"])
        runs.append(state)
    assert all(torch.equal(a, b) for a, b in zip(*(state.errors.buffers() for state in runs), strict=True))


@on_ranks(2)
def test_a_model_that_moved_to_another_device_is_followed(rank: int, world_size: int) -> None:
    """Made beside a model in other memory, before model.cuda()."""
    weight = nn.Parameter(torch.zeros(64, 64))
    state = GradientCompression([weight], "int8")
    state.communicator.device = torch.device("meta")
    weight.grad = torch.full_like(weight, 1.0 + rank)
    state.average_gradients()
    assert state.communicator.device == state.errors.worker.device == weight.device
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 1.5), rtol=0.01, atol=0)


# -- errors change where a step uses the gradients ---------------------------------------------------------------------


def pieces(rank: int, step: int, numel: int) -> torch.Tensor:
    return torch.randn(numel // 64, 64, generator=torch.Generator().manual_seed(1000 * rank + step))


class Linear(nn.Module):
    """A matrix whose gradient is what it is given, and another one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))

    def forward(self, grad: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        loss = (self.weight * grad).sum()
        return loss if other is None else loss + (self.other * other).sum()


def averaging(net: nn.Module, bits: str, **options: Any) -> tuple[Any, Callable[[], None]]:
    """The net with the hook, or as it is for a plain loop, and what averages its gradients after backward."""
    state = GradientCompression(net.parameters(), bits)
    if options.pop("with_errors", False):
        old = state.state_dict()
        state.load_state_dict({**old, "worker_error": torch.ones_like(old["worker_error"])})
    if options.pop("loop", False):
        return net, state.average_gradients
    ddp = DistributedDataParallel(net, **options)
    ddp.register_comm_hook(state, compress_hook)
    return ddp, lambda: None


@pytest.mark.parametrize(("bits", "most"), [("int4", 0.3), ("int8", 0.02)])
@on_ranks(2)
def test_gradients_that_are_dropped_leave_no_error_behind(rank: int, world_size: int, bits: str, most: float) -> None:
    """As a discriminator's of the generator's pass: 100 times larger, and thrown away by zero_grad()."""
    for options, to_none in (
        ({}, True),
        ({}, False),
        ({"gradient_as_bucket_view": True}, True),
        ({"loop": True}, True),
    ):
        net = Linear()
        model, average = averaging(net, bits, **options)
        optimizer, applied, mean = torch.optim.SGD(net.parameters(), lr=1.0), torch.zeros(64, 64), torch.zeros(64, 64)
        for step in range(60):
            model(100 * pieces(rank, 1000 + step, 4096), pieces(rank, step, 4096)).backward()
            average()
            optimizer.zero_grad(set_to_none=to_none)
            model(pieces(rank, step, 4096), pieces(rank, step, 4096)).backward()
            average()
            applied += net.weight.grad
            mean += sum(pieces(r, step, 4096) for r in range(world_size)) / world_size
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        assert torch.equal(net.weight, -applied) or torch.allclose(net.weight, -applied, atol=1e-3)
        error = float((applied - mean).square().mean().sqrt())
        assert error < most, (options, to_none, error)


@on_ranks(2)
def test_one_optimizer_zeroes_its_gradients_where_those_of_another_accumulate(rank: int, world_size: int) -> None:
    """Errors of zeroed gradients are dropped; those of gradients that accumulate are carried into the next pass."""
    for options in ({}, {"loop": True}):
        for zeroed in ("weight", "other"):
            net = Linear()
            model, average = averaging(net, "int4", **options)
            missed = {name: torch.zeros(64, 64) for name in ("weight", "other")}
            optimizers = {name: torch.optim.SGD([param], lr=1.0) for name, param in net.named_parameters()}
            for step in range(60):
                for scale, number in ((100, 1000 + step), (1, step)):
                    gradient = scale * pieces(rank, number, 4096)
                    model(gradient, gradient).backward()
                    average()
                    mean = scale * sum(pieces(r, number, 4096) for r in range(world_size)) / world_size
                    for name in missed:
                        missed[name] -= mean
                    if scale == 100:
                        missed[zeroed] += mean
                        optimizers[zeroed].zero_grad(set_to_none=False)
                for name, param in net.named_parameters():
                    missed[name] += param.grad
                    optimizers[name].step()
                    optimizers[name].zero_grad(set_to_none=False)
            for name, value in missed.items():
                error = float(value.square().mean().sqrt())
                assert error < (0.3 if name == zeroed else 30), (options, zeroed, name, error)


@pytest.mark.parametrize(("bits", "most"), [("int4", 0.3), ("int8", 0.02)])
@on_ranks(2)
def test_what_no_rank_uses_in_every_second_step_keeps_its_errors(
    rank: int, world_size: int, bits: str, most: float
) -> None:
    unused = {"find_unused_parameters": True}
    for options, to_none in (
        (unused, True),
        (unused, False),
        ({**unused, "gradient_as_bucket_view": True}, False),
        ({"loop": True}, True),
    ):
        net = Linear()
        model, average = averaging(net, bits, **options)
        optimizer, mean = torch.optim.SGD(net.parameters(), lr=1.0), torch.zeros(64, 64)
        for step in range(100):
            used = step % 2 == 0
            model(pieces(rank, 1000 + step, 4096), pieces(rank, step, 4096) if used else None).backward()
            average()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            mean += used * sum(pieces(r, step, 4096) for r in range(world_size)) / world_size
        assert float((net.other + mean).square().mean().sqrt()) < most, (options, to_none)


@on_ranks(2)
def test_a_step_that_a_fused_optimizer_skips_changes_no_error(rank: int, world_size: int) -> None:
    """A gradient scaler calls it all the same; what is not finite lies in a parameter that travels otherwise."""
    weight, other = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(3))
    state, scaler = GradientCompression([weight], "int4"), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = FusedAdam([weight, other], lr=1e-2)
    for step in range(3):
        before, errors = weight.detach().clone(), state.worker_error.clone()
        scaler.scale((weight * pieces(rank, step, 4096)).sum() + other.sum()).backward()
        state.average_gradients()
        if step == 1:
            other.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(weight.detach(), before) == torch.equal(state.worker_error, errors) == (step == 1)


@on_ranks(2)
def test_what_is_frozen_in_the_first_step_is_averaged_once_it_is_trainable(rank: int, world_size: int) -> None:
    for loop in (True, False):
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        model, average = averaging(net, "int4", **({"loop": True} if loop else {"find_unused_parameters": True}))
        for step in range(4):
            net[1].requires_grad_(step > 1)
            torch.manual_seed(10 * step + rank)
            model(torch.randn(4, 32)).square().sum().backward()
            average()
            grads = [param.grad for param in net.parameters() if param.grad is not None]
            assert len(grads) == (4 if step > 1 else 2) and same_on_all_ranks(grads), (loop, step)
            net.zero_grad()


@pytest.mark.parametrize(("bits", "most"), [("int4", 0.03), ("int8", 0.003)])
@on_ranks(2)
def test_a_rank_without_inputs_follows_the_others(rank: int, world_size: int, bits: str, most: float) -> None:
    """torch's Join: it sends zeros, and what its messages have missed before."""
    net, inputs = Linear(), torch.randn(64, 64, generator=torch.Generator().manual_seed(rank))
    model = DistributedDataParallel(net)
    model.register_comm_hook(GradientCompression(net.named_parameters(), bits), compress_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    start = net.weight.detach().clone()

    def take_steps(count: int) -> None:
        for _ in range(count):
            model(inputs, 0 * inputs).backward()
            optimizer.step()
            optimizer.zero_grad()

    with Join([model]):
        take_steps(3 if rank else 30)
    take_steps(2)
    assert same_on_all_ranks(net.parameters())
    steps = torch.tensor([32.0, 5.0])[rank]
    moved = steps * inputs / 2
    dist.all_reduce(moved)
    assert (start - net.weight.detach() - moved).norm() < most * moved.norm()


class Small(nn.Module):
    """Small tensors beside a matrix, with the gradients that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.logit_scale = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(()))
        self.q_norm = nn.Parameter(torch.zeros(16))

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * grad).sum() for p, grad in zip(self.parameters(), grads, strict=True))


@on_ranks(2)
def test_small_tensors_beside_large_ones_move_as_uncompressed_ones(rank: int, world_size: int) -> None:
    """Also where an earlier version has left errors of theirs behind."""
    rows = ("int4", 100.0, False), ("int4", 1e4, True), ("int8", 100.0, True), ("int8", 1e4, False)
    for bits, factor, loop in rows:
        net, exact = Small(), Small()
        model, average = averaging(net, bits, loop=loop, with_errors=loop)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0.0) for each in (net, exact)]
        for step in range(20):
            every = [
                [torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) for p in net.parameters()]
                for seed in range(100 * step, 100 * step + world_size)
            ]
            for grads in every:
                grads[0] *= factor
                grads[1] += 0.3
            model(every[rank]).backward()
            average()
            for p, *grads in zip(exact.parameters(), *every, strict=True):
                p.grad = sum(grads) / world_size
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert float(exact.logit_scale.abs()) > 1e-3
        for name in ("logit_scale", "q_norm"):
            torch.testing.assert_close(getattr(net, name), getattr(exact, name), rtol=1e-3, atol=1e-6)


@on_ranks(2)
def test_a_save_between_backward_and_step_changes_no_bit(rank: int, world_size: int, tmp_path: Path) -> None:
    """Neither of the run that goes on nor of one that resumes there, and makes the gradients again."""
    nets, found = [Linear() for _ in range(3)], []
    for number, net in enumerate(nets):
        state = GradientCompression(net.named_parameters(), "int4")
        model = DistributedDataParallel(net)
        model.register_comm_hook(state, compress_hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        if number == 2:
            load_state(state, tmp_path)
            net.load_state_dict(torch.load(tmp_path / f"model{rank}.pt"))
        for step in range(3 if number == 2 else 0, 6):
            model(pieces(rank, step, 4096), pieces(rank, 50 + step, 4096)).backward()
            if number == 1 and step == 3:
                save_state(state, tmp_path)
                torch.save(net.state_dict(), tmp_path / f"model{rank}.pt")
                state.state_dict()
            optimizer.step()
            optimizer.zero_grad()
        found.append([*(p.detach() for p in net.parameters()), state.worker_error, state.server_error])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@on_ranks(2)
def test_errors_do_not_carry_the_loss_scale(rank: int, world_size: int) -> None:
    found = []
    for scale in (1.0, 1024.0):
        state = GradientCompression(zeros(), bucket_cap_mb=cap(), loss_scale=lambda own=scale: own)
        found.append([run(state, rank, range(3), scale)[-1] / scale, state.worker_error.numpy()])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


@on_ranks(2)
def test_the_first_message_leaves_before_the_last_gradient_is_there(rank: int, world_size: int) -> None:
    def attach(ddp: DistributedDataParallel, communicator: Recording) -> Callable[[], None]:
        state = GradientCompression(ddp.parameters(), bucket_cap_mb=CAP, communicator=communicator)
        ddp.register_comm_hook(state, compress_hook)
        return lambda: None

    check_overlap(events_of_backward(attach))


def errors_in_nodes(
    rank: int, world_size: int, folder: str, node_size: int, buckets: int, saved_in: str = ""
) -> tuple[np.ndarray, np.ndarray, int]:
    """The errors of a run that saves, or of a float32 state that loads what it saved, and its steps."""
    cls = in_form(GradientCompression, saved_in or "float32")
    state = cls(zeros(), bucket_cap_mb=cap(buckets), node_size=node_size)
    if saved_in:
        run(state, rank, range(3))
        save_state(state, folder)
    else:
        load_state(state, folder)
    return (*errors_everywhere(state, state.communicator), state.steps)


Place = tuple[int, int]  # ranks, and those of a node


@pytest.mark.invariant(22)
@pytest.mark.parametrize(
    ("before", "after", "form"),
    [
        *(((2, 1), (3, 1), "float32"), ((3, 1), (2, 1), "float32"), ((4, 1), (1, 1), "float32")),
        *(((1, 1), (2, 1), "float32"), ((2, 1), (3, 1), "compact"), ((2, 1), (1, 1), "compact")),
        *(((2, 1), (2, 1), "compact"), ((4, 2), (4, 2), "compact"), ((4, 2), (4, 1), "float32")),
        *(((4, 2), (2, 1), "compact"), ((4, 2), (3, 3), "float32")),
    ],
)
def test_errors_go_over_to_other_ranks_and_nodes(before: Place, after: Place, form: str, tmp_path: Path) -> None:
    """A compact state that is saved has the values that it stands for; here float32 buffers load both."""
    workers, servers, _ = run_ranks(before[0], errors_in_nodes, str(tmp_path), before[1], BUCKET, form)[0]
    buckets = 170 if after[1] == before[1] == 1 else BUCKET  # other buckets than those of the save
    for worker, server, steps in run_ranks(after[0], errors_in_nodes, str(tmp_path), after[1], buckets):
        assert steps == 3 * (before[0] > 1)
        if after[0] == 1:
            assert np.isnan(worker).all() and np.isnan(server).all()
        elif before[0] == 1:
            assert not worker.any() and not server.any()
        else:
            mean = np.nanmean(workers.astype(np.float64), axis=0)
            alike = before == after and buckets == BUCKET
            expected = workers if alike else np.where(np.isnan(worker), np.nan, mean)
            np.testing.assert_allclose(worker, expected, rtol=0, atol=0 if alike else 1e-6)
            assert np.array_equal(server, servers)


@on_ranks(2)
def test_a_state_goes_on_with_the_same_bits_from_files_a_dict_and_a_pickle(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Its errors take a quarter of the bytes; a float32 state has the values that the files stand for."""
    whole = GradientCompression(zeros(), bucket_cap_mb=cap())
    run(whole, rank, range(3))
    save_state(whole, tmp_path)
    saved, pickled = copy.deepcopy(whole.state_dict()), pickle.dumps(whole)
    errors, expected = [whole.worker_error, whole.server_error], run(whole, rank, range(3, 6))
    with pytest.raises(ValueError, match="bits=4, this rank 8"):
        GradientCompression(zeros(), "int8", bucket_cap_mb=cap()).load_state_dict(saved)
    for way in ("dict", "pickle", "files", "files, float32"):
        form = "float32" if "float32" in way else "compact"
        again = in_form(GradientCompression, form)(zeros(), bucket_cap_mb=cap())
        if way == "dict":
            again.load_state_dict(saved)
        elif way == "pickle":
            again = pickle.loads(pickled)
        else:
            load_state(again, tmp_path)
        assert torch.equal(again.worker_error, errors[0]) and torch.equal(again.server_error, errors[1]), way
        assert form == "float32" or np.array_equal(run(again, rank, range(3, 6)), expected), way
    per_element = sum(buffer.nbytes for buffer in (whole.errors.worker, whole.errors.server)) / whole.layout.numel
    assert per_element < 1.2 * (1 + 1 / world_size)  # 1.03 in large buckets
    tensors = CheckpointIndex.read(tmp_path / "compressopt.index.json").tensors
    assert {entry.dtype for entry in tensors.values()} == {"uint8"}
    stored = sum(entry.shape[0] for entry in tensors.values())
    assert stored / whole.layout.numel < 1.2 * (world_size + 1)


@on_ranks(2)
def test_a_checkpoint_of_several_ranks_without_their_errors_is_refused(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    state = GradientCompression(zeros(), bucket_cap_mb=cap())
    run(state, rank, range(3))
    save_state(state, tmp_path)
    path, before = tmp_path / "compressopt.index.json", state.worker_error
    if rank == 0:
        path.write_bytes(sealed({**json.loads(path.read_text()), "tensors": {}}))
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="it holds no errors, and the messages of 2 ranks or nodes had some"):
        load_state(state, tmp_path)
    assert torch.equal(state.worker_error, before)


@on_ranks(2)
def test_a_resume_in_another_topology_is_warned_of(rank: int, world_size: int, tmp_path: Path) -> None:
    """topology="auto" measures, and so may choose another one than before."""
    logs = TestCase().assertLogs if rank == 0 else TestCase().assertNoLogs
    for saved, resumed, advice in ((2, 1, "hierarchical"), (1, 2, "flat")):
        save_state(GradientCompression(zeros(), bucket_cap_mb=cap(), node_size=saved), tmp_path)
        with logs("hf_compressopt", "WARNING") as found:
            load_state(GradientCompression(zeros(), bucket_cap_mb=cap(), node_size=resumed), tmp_path)
        assert rank or f"topology='{advice}'" in found.output[0]
        with TestCase().assertNoLogs("hf_compressopt", "WARNING"):
            load_state(GradientCompression(zeros(), bucket_cap_mb=cap(), node_size=saved), tmp_path)


@on_ranks(2)
def test_ranks_that_differ_fail_together(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="differ from rank 0 in the options or parameters"):
        GradientCompression([nn.Parameter(torch.zeros(3 + rank))]).average_gradients()


@on_ranks(2)
def test_the_average_of_other_parameters_on_a_rank_fails_on_all(rank: int, world_size: int) -> None:
    """Other numbers, shapes and orders; then a right call works."""
    rows = [nn.Parameter(torch.full((5, 3), float(number))) for number in range(3)]
    other = [nn.Parameter(torch.zeros(3, 5)), *rows[1:]]
    of_rank_1 = {"same": rows, "fewer": rows[:2], "none": [], "shape": other, "order": rows[::-1], "again": rows}
    for step, (case, given) in enumerate(of_rank_1.items()):
        mine = rows if rank == 0 else given
        for param in mine:
            param.grad = torch.full_like(param, rank + step)
        if case in ("same", "again"):
            average_gradients(mine)
            assert all(bool((param.grad == step + 0.5).all()) for param in mine)
        else:
            words = "in another order" if case == "order" else "number, the order or the shapes"
            with pytest.raises(ValueError, match=words):
                average_gradients(mine)
    with pytest.raises(ValueError, match="number, the order or the shapes"):
        average_gradients(OnebitAdam(rows[: 2 + rank], warmup_bits=32))


@on_ranks(2)
def test_pythons_reducer_is_refused(rank: int, world_size: int) -> None:
    """It gives a hook single gradients, as a tuple."""
    for hook in (compress_hook, ddp_hook):
        with pytest.raises(ValueError, match="python_reducer"):
            hook(GradientCompression(zeros()), (torch.zeros(3), nn.Parameter(torch.zeros(3))))


@pytest.mark.full
@on_ranks(2, timeout=120)
def test_pythons_reducer_of_torch_compile_is_refused_in_the_first_backward(rank: int, world_size: int) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        for how in ("compress_hook", "attach_ddp"):
            net = make_net()
            model = DistributedDataParallel(net)
            if how == "attach_ddp":
                attach_ddp(model, OnebitAdam(net.parameters(), freeze_step=2))
            else:
                model.register_comm_hook(GradientCompression(net.named_parameters()), compress_hook)
            compiled = torch.compile(model, backend="aot_eager")
            with pytest.raises(ValueError, match="python_reducer.*leave it at its default"):
                backward(compiled, rank, 0)


@on_ranks(2)
def test_a_gradient_that_nobody_has_stays_none(rank: int, world_size: int) -> None:
    params = [nn.Parameter(torch.zeros(40)) for _ in range(3)]
    for p in params[: 2 - rank]:
        p.grad = torch.ones(40)
    GradientCompression(params).average_gradients()
    assert torch.allclose(params[1].grad, torch.full((40,), 0.5), atol=0.08)
    assert [p.grad is None for p in params] == [False, False, True]


class WithoutElements(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.empty = nn.Parameter(torch.ones(40, 40)), nn.Parameter(torch.zeros(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square().mean() + self.empty.sum()


@on_ranks(2)
def test_of_a_parameter_without_elements_nothing_is_sent(rank: int, world_size: int) -> None:
    model = WithoutElements()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(GradientCompression(model.named_parameters()), compress_hook)
    ddp(torch.full((4, 40), 1.0 + rank)).backward()
    assert same_on_all_ranks([model.weight.grad])


# -- a state that is older than the process group, as in a strategy of Lightning -------------------------------------


class Strategy:
    """What Lightning's DDPStrategy does with ``ddp_comm_state`` and ``ddp_comm_hook``, in its order."""

    def __init__(self, ddp_comm_state: Any, ddp_comm_hook: Any) -> None:
        self.state, self.hook = ddp_comm_state, ddp_comm_hook

    def setup(self, module: nn.Module) -> DistributedDataParallel:
        model = DistributedDataParallel(module)
        model.register_comm_hook(state=self.state, hook=self.hook)
        return model


def made_early(rank: int, world_size: int, how: str) -> tuple[list[torch.Tensor], dict[str, float], str]:
    """Train by a state that is made before the process group is there (or after it), and return what came of it."""
    net, said = make_net(), ""
    with unittest.mock.patch.object(dist, "is_initialized", lambda: how == "after"):
        with unittest.mock.patch.dict("os.environ", {"WORLD_SIZE": "2"} if how == "torchrun" else {}):
            state = GradientCompression(net.named_parameters(), "int4", bucket_cap_mb=CAP)
            said = state.describe()
            if how == "used":
                assert state.communicator.world_size == 1
    if how == "spawn":  # the strategy and the module are pickled together
        state, net = pickle.loads(pickle.dumps((state, net)))
    model = Strategy(state, compress_hook).setup(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], state.metrics(), said


def test_a_state_that_is_older_than_the_process_group_takes_its_ranks_at_the_first_use() -> None:
    expected, sent, _ = run_ranks(2, made_early, "after")[0]
    for how in ("torchrun", "fork", "spawn"):
        for params, metrics, said in run_ranks(2, made_early, how):
            assert all(map(torch.equal, params, expected)) and said.endswith("between ranks that the first step finds")
            assert metrics["bytes_sent"] == sent["bytes_sent"] > 0 and metrics["compression_ratio"] > 3
    for error in run_ranks_expecting_error(2, made_early, "used").values():
        assert "was used before torch.distributed had its 2 ranks, and would average nothing" in error
