"""The warmup stage with gradients of 4, 8 and 16 bits: simulations, AdamW, and DDP's hook beside a plain loop."""

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
from tests.oracles.cases import bucket_cap
from tests.oracles.simulation_integers import Simulation, in_full
from tests.oracles.steps import same
from tests.support.ddp_runs import attached, hook_beside_loop
from tests.support.ddp_runs import make as make_model
from tests.support.exchanging import errors_everywhere
from tests.support.family import assign, through_a_file
from tests.support.forms import in_form
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.logs import log_lines
from tests.support.recording import CAP, Recording, check_overlap, events_of_backward
from tests.support.spreading import Share, spread

# -- bits -------------------------------------------------------------------------------------------------------------

SHAPES = [(9, 33), (129,), (0,), (1,), (64, 5)]  # two that travel as integers
SMALL = in_full(SHAPES)
NUMEL = len(SMALL)


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator) * 10.0 ** (i % 3 - 1) for i, shape in enumerate(SHAPES)]


def flat(tensors: list[torch.Tensor]) -> np.ndarray:
    return torch.cat([t.detach().reshape(-1).float() for t in tensors]).numpy().copy()


def make(
    bits: int, *, dtype: torch.dtype = torch.float32, form: str | None = None, **options: Any
) -> tuple[list[nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    settings = {"lr": 1e-2, "weight_decay": 0.1, "freeze_step": 5, "bucket_cap_mb": bucket_cap(300), **options}
    return params, in_form(hf_compressopt.OnebitAdam, form)(params, warmup_bits=bits, **settings)


def give(params: list[nn.Parameter], rank: int, step: int, scale: float = 1.0) -> None:
    for p, grad in zip(params, gradients(rank, step), strict=True):
        p.grad = (grad * scale).to(p.dtype)


def warmup_stage(rank: int, world_size: int, bits: int, dtype: torch.dtype, form: str | None = None) -> dict[str, Any]:
    params, optimizer = make(bits, dtype=dtype, form=form, fused_warmup=False)
    history, averages = [], []
    for step in range(4):
        give(params, rank, step)
        average_gradients(optimizer)
        averages.append(flat([p.grad for p in params]))
        optimizer.step()
        history.append(flat(params))
    state = optimizer._states[0]
    errors = state.errors.worker.numpy(), state.errors.server.numpy()
    return {"averages": averages, "history": history, "errors": errors, "metrics": optimizer.metrics()}


def adamw(averages: list[np.ndarray]) -> list[np.ndarray]:
    params, _ = make(32)
    optimizer, history = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1), []
    for average in averages:
        parts = torch.split(torch.from_numpy(average), [p.numel() for p in params])
        for p, part in zip(params, parts, strict=True):
            p.grad = part.view(p.shape)
        optimizer.step()
        history.append(flat(params))
    return history


@pytest.mark.invariant(28, 29, 33)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_have_the_simulations_bits_and_steps_adamws(world_size: int, bits: int) -> None:
    simulation, expected = Simulation(NUMEL, 300, world_size, bits), []
    ranks = run_ranks(world_size, warmup_stage, bits, torch.float32, "float32")
    for step in range(4):
        grads = np.stack([flat(gradients(rank, step)) for rank in range(world_size)])
        expected.append(simulation.average(np.where(SMALL, np.float32(0), grads)))
        reduced = ranks[0]["averages"][step][SMALL]  # in the order of the transport
        np.testing.assert_allclose(reduced, grads[:, SMALL].mean(axis=0, dtype=np.float64), rtol=0, atol=1e-5)
        expected[step][SMALL] = reduced
    steps = adamw(expected)
    for rank, result in enumerate(ranks):
        for mine, theirs in zip([*result["averages"], *result["history"]], [*expected, *steps], strict=True):
            assert mine.tobytes() == theirs.tobytes()
        assert result["errors"][0].tobytes() == simulation.worker_error[rank].tobytes()
    held = np.sort(np.concatenate([result["errors"][1] for result in ranks]))
    assert held.tobytes() == np.sort(simulation.server_error).tobytes()


@pytest.mark.parametrize("world_size", [2, 3])
def test_16_bits_are_bfloat16(world_size: int) -> None:
    ranks = run_ranks(world_size, warmup_stage, 16, torch.float32)
    for step in range(4):
        halves = [(torch.from_numpy(flat(gradients(rank, step))) / world_size) for rank in range(world_size)]
        if world_size == 2:
            expected = sum(half.bfloat16() for half in halves).float().numpy()
            assert np.array_equal(ranks[0]["averages"][step], expected)
        largest = torch.stack([half.abs() for half in halves]).sum(dim=0).numpy()
        assert np.all(np.abs(ranks[0]["averages"][step] - sum(halves).numpy()) <= 3 * 2.0**-8 * largest)
        assert all(result["averages"][step].tobytes() == ranks[0]["averages"][step].tobytes() for result in ranks)
    assert ranks[0]["metrics"]["compression_ratio"] == pytest.approx(2.0, rel=0.02)


def test_16_bit_parameters_get_the_same_average_rounded() -> None:
    for result in run_ranks(2, warmup_stage, 4, torch.bfloat16, "float32"):
        simulation = Simulation(NUMEL, 300, 2, 4)
        for step in range(4):
            grads = np.stack([flat([grad.bfloat16() for grad in gradients(rank, step)]) for rank in range(2)])
            expected = torch.from_numpy(simulation.average(np.where(SMALL, np.float32(0), grads))).bfloat16()
            one, two = (torch.from_numpy(row[SMALL] / 2).bfloat16() for row in grads)
            expected[torch.from_numpy(SMALL)] = one + two
            assert result["averages"][step].tobytes() == expected.float().numpy().tobytes()


@pytest.mark.invariant(33)
@pytest.mark.parametrize(("bits", "sent"), [(4, 4 + 16 / 128), (8, 8 + 16 / 128), (16, 16), (32, 32)])
@pytest.mark.parametrize(("weights", "biases"), [(100_000, 0), (100_000, 999), (0, 999)])
@on_ranks(3)
def test_bytes_are_those_of_the_formula(
    rank: int, world_size: int, weights: int, biases: int, bits: int, sent: float
) -> None:
    """Beside weights, the places of biases in the messages are sent too."""
    both_ways = 2 * (world_size - 1) / world_size
    formula = both_ways * (weights * sent / 8 + biases * (2 if bits == 16 else 4))
    most = 1.01 * formula + 32 + both_ways * (biases * sent / 8 if weights and bits < 16 else 0)
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((weights // 100, 100), (biases,))]
    optimizer = hf_compressopt.OnebitAdam(params, warmup_bits=bits)
    for step in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * rank + step))
        average_gradients(optimizer)
        optimizer.step()
    found = optimizer.metrics()
    assert formula - 3 <= found["bytes_sent_step"] <= most and found["bytes_sent"] == 3 * found["bytes_sent_step"]


# -- faults -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_that_differ_fail_together(rank: int, world_size: int) -> None:
    for bits, numel in ((4 if rank else 8, 300), (4, 300 + rank)):
        params, optimizer = make(bits, bucket_cap_mb=bucket_cap(numel))
        give(params, rank, 0)
        with pytest.raises(ValueError, match="differ from rank 0 in the optimizer, its step or its options"):
            average_gradients(optimizer)


@on_ranks(2)
def test_a_loop_that_averages_by_itself_is_told_once(rank: int, world_size: int) -> None:
    with log_lines() as lines:
        params, optimizer = make(4)
        for step in range(3):
            give(params, rank, step)
            for p in params:
                dist.all_reduce(p.grad.div_(world_size))
            optimizer.step()
    assert sum("warmup_bits=4 is not in use" in line for line in lines) == (rank == 0)


# -- loss scales ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "at_once"), [("told", True), ("told", False), ("found", True)])
@on_ranks(2)
def test_errors_do_not_carry_the_loss_scale(rank: int, world_size: int, how: str, at_once: bool) -> None:
    """Scales are powers of two: the bits of a run without a scaler. A scale that is told overflows once.

    Not ``at_once``, as on a GPU, the host does not know of it when errors are kept.
    """
    ends = []
    for scaled in (True, False):
        params, optimizer = make(4)
        growth = 3 if how == "told" else 1000
        scaler = hf_compressopt.GradScaler("cpu", init_scale=1024.0, growth_interval=growth, enabled=scaled)
        scaler.scale(torch.ones(()))  # makes the scale
        for step in range(8):
            for bad in (True, False) if how == "told" and scaled and step == 2 else (False,):
                give(params, rank, step, scaler.get_scale())
                if bad and rank == 0:
                    params[0].grad[0, 0] = float("inf")
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("hf_compressopt.collectives.gradients.reads_at_once", lambda device: at_once)
                    average_gradients(optimizer, loss_scale=scaler.get_scale() if how == "told" and scaled else None)
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        assert optimizer.metrics()["step"] == 8
        ends.append([*params, optimizer._states[0].errors.worker])
    assert same(*ends)


@pytest.mark.parametrize("way", ["files", "state dict"])
@on_ranks(2)
def test_a_loss_scale_that_a_scaler_told_is_in_the_checkpoint(
    rank: int, world_size: int, way: str, tmp_path: Path
) -> None:
    """Not told to average_gradients, which takes the last one that a scaler has told."""
    ends = []
    for resumed in (False, True):
        params, optimizer = make(4)
        scaler = hf_compressopt.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        scaler.scale(torch.ones(()))  # makes the scale
        for step in range(6):
            if step == 4 and resumed:
                hf_compressopt.save_state(optimizer, tmp_path)
                state, trained = optimizer.state_dict(), params
                params, optimizer = make(4)
                assign(params, trained)
                if way == "files":
                    hf_compressopt.load_state(optimizer, tmp_path)
                else:
                    optimizer.load_state_dict(through_a_file(state))
            give(params, rank, step, scaler.get_scale())
            average_gradients(optimizer)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append([*params, optimizer._states[0].errors.worker])
    assert same(*ends)


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("own", [False, True])
@on_ranks(2)
def test_gradients_of_any_layout_are_averaged_as_plain_ones(rank: int, world_size: int, bits: int, own: bool) -> None:
    """Lazily negated, expanded, without memory, and transposed: by an optimizer's form, and as parameters."""
    shape = (64, 80)

    def draw_into(params: list[nn.Parameter], strange: bool) -> None:
        generator = torch.Generator().manual_seed(rank)
        values = [torch.randn(shape, generator=generator) for _ in params]
        values[1], values[2] = values[1][:1].expand(shape), torch.zeros(shape)
        if strange:
            values[0], values[2] = (-values[0])._neg_view(), torch._efficientzerotensor(shape)
            values[3] = values[3].t().contiguous().t()
        else:
            values[1] = values[1].contiguous()
        for param, value in zip(params, values, strict=True):
            param.grad = value

    ends = []
    for strange in (False, True):
        params = [nn.Parameter(torch.ones(shape)) for _ in range(4)]
        draw_into(params, strange)
        average_gradients(hf_compressopt.OnebitAdam(params, warmup_bits=bits) if own else params)
        ends.append([param.grad for param in params])
        if bits < 32 and not own:
            draw_into(params, strange)
            hf_compressopt.GradientCompression(params, f"int{bits}").average_gradients()
            ends[-1] += [param.grad for param in params]
    for plain, other in zip(*ends, strict=True):
        torch.testing.assert_close(plain, other, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["optimizer", "step", "torch", "torch in a copy"])
@on_ranks(2)
def test_errors_of_unclipped_gradients_are_clipped_as_the_momentum_at_the_switch(
    rank: int, world_size: int, way: str
) -> None:
    errors = []
    for limit in (1e9, 1.0):
        options = {"max_grad_norm": limit} if way == "step" else {}
        params, optimizer = make(4, **options)
        if way == "torch in a copy":
            params, optimizer = copy.deepcopy((params, optimizer))
        norm = 0.0
        for step in range(optimizer.freeze_step):
            give(params, rank, step)
            average_gradients(optimizer)
            norm = float(torch.cat([p.grad.flatten() for p in params]).norm())
            if way == "optimizer":
                optimizer.clip_grad_norm_(limit)
            elif way != "step":
                torch.nn.utils.clip_grad_norm_(params, limit)
            optimizer.step()
        assert optimizer.plan.stage.number == 1
        errors.append(optimizer._states[0].errors.worker_values())
    assert norm > 2 and errors[0].abs().max() > 0
    torch.testing.assert_close(errors[1], errors[0] / norm, rtol=1e-2, atol=1e-7)


@on_ranks(2)
def test_clipping_another_model_before_backward_leaves_errors_as_they_are(rank: int, world_size: int) -> None:
    errors = []
    for clips in (False, True):
        params, optimizer = make(4)
        other = nn.Parameter(torch.ones(9))
        for step in range(optimizer.freeze_step):
            optimizer.zero_grad()
            other.grad = torch.full_like(other, 100.0)
            if clips:
                torch.nn.utils.clip_grad_norm_([other], 1.0)
            give(params, rank, step)
            average_gradients(optimizer)
            optimizer.step()
        errors.append(optimizer._states[0].errors.worker_values())
    assert errors[0].abs().max() > 0
    torch.testing.assert_close(errors[1], errors[0], rtol=0, atol=0)


@pytest.mark.parametrize("way", ["optimizer", "torch"])
@on_ranks(2)
def test_clipping_a_batch_that_is_thrown_away_leaves_the_errors_of_the_next_one(
    rank: int, world_size: int, way: str
) -> None:
    errors = []
    for limit in (1e9, 1.0):
        params, optimizer = make(4)
        for step in range(optimizer.freeze_step):
            for is_thrown_away in (True, False):
                give(params, rank, step)
                average_gradients(optimizer)
                if is_thrown_away:
                    if way == "optimizer":
                        optimizer.clip_grad_norm_(limit)
                    else:
                        torch.nn.utils.clip_grad_norm_(params, limit)
                    optimizer.zero_grad()
            optimizer.step()
        assert optimizer.plan.stage.number == 1
        errors.append(optimizer._states[0].errors.worker_values())
    assert errors[0].abs().max() > 0
    torch.testing.assert_close(errors[1], errors[0], rtol=0, atol=0)


@pytest.mark.parametrize("limit", [1e9, 6.0])
@on_ranks(2)
def test_integers_before_clipping_and_signs_after_it_share_their_errors(
    rank: int, world_size: int, limit: float, tmp_path: Path
) -> None:
    """0/1 Adam's variance stage: what it applies adds up to the clipped averages, also after a resume."""

    def make_it() -> hf_compressopt.ZeroOneAdam:
        param = nn.Parameter(torch.zeros(64, 100))
        return hf_compressopt.ZeroOneAdam([param], lr=0.01, freeze_step=40, var_update_scaler=2)

    optimizer = make_it()
    missed = torch.zeros(64, 100)
    for step in range(14):
        if step in (3, 10):  # a sign was the last message, and integers
            hf_compressopt.save_state(optimizer, tmp_path / str(step))
            optimizer = make_it()
            hf_compressopt.load_state(optimizer, tmp_path / str(step))
        (param,) = optimizer.trainable_parameters
        shared, own = (
            torch.randn(64, 100, generator=torch.Generator().manual_seed(s)) for s in (step, 20 + 2 * step + rank)
        )
        param.grad = shared + own
        mean = param.grad.clone()
        dist.all_reduce(mean.div_(world_size))
        average_gradients(optimizer)
        coefficient = min(1.0, limit / float(optimizer.clip_grad_norm_(limit)))
        before = optimizer.state[param]["exp_avg"].clone()
        optimizer.step()
        missed += coefficient * mean - (optimizer.state[param]["exp_avg"] - 0.9 * before) / 0.1
        assert missed.norm() < 1.2 * coefficient * mean.norm(), step
    assert step == 13


# -- errors change where a step uses the gradients ---------------------------------------------------------------------


class Matrices(nn.Module):
    """Two matrices with the gradients that they are given, one of which is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))

    def forward(self, scale: float, rank: int, step: int, second: bool = True) -> torch.Tensor:
        return sum(((p * noise(rank, step, p)).sum() for p in (self.first, self.second)[: 1 + second]), 0) * scale


def noise(rank: int, step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1000 * rank + step))


@pytest.mark.parametrize("hook", [True, False])
@on_ranks(2)
def test_errors_change_only_where_a_step_takes_the_gradients(rank: int, world_size: int, hook: bool) -> None:
    """Larger gradients are dropped by zero_grad(); one parameter is used in every second step."""
    for name, schedule in (
        ("OnebitAdam", {"freeze_step": 1000}),
        ("OnebitLamb", {"freeze_step": 1000}),
        ("ZeroOneAdam", {"var_freeze_step": 1000, "var_update_scaler": 1000}),
    ):
        net = Matrices()
        optimizer = getattr(hf_compressopt, name)(net.parameters(), warmup_bits=4, **schedule)
        model = DistributedDataParallel(net, find_unused_parameters=True) if hook else net
        if hook:
            attach_ddp(model, optimizer)
        missed = [torch.zeros(64, 64) for _ in range(2)]
        for step in range(40):
            used = step % 2 == 0
            for dropped in (True, False):
                model(100.0 if dropped else 1.0, rank, step + 500 * dropped, used).backward()
                if not hook:
                    average_gradients(optimizer)
                if dropped:
                    optimizer.zero_grad()
            for error, p in zip(missed, net.parameters(), strict=True):
                if p.grad is not None:
                    error += p.grad - sum(noise(r, step, p) for r in range(world_size)) / world_size
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.warmup_gradients.in_use
        assert all(float(error.square().mean().sqrt()) < 0.3 for error in missed), (name, missed)


@on_ranks(2)
def test_a_gradient_that_is_dropped_leaves_the_errors_of_other_groups(rank: int, world_size: int) -> None:
    """Of a last layer, say, before the step."""
    found = []
    for drop in (False, True):
        params = [nn.Parameter(torch.ones(64, 64)) for _ in range(3)]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        optimizer = hf_compressopt.OnebitAdam(groups, warmup_bits=4, freeze_step=1000)
        for step in range(2):
            for number, param in enumerate(params):
                param.grad = noise(rank, 10 * step + number, param)
            average_gradients(optimizer)
            if drop:
                params[2].grad = None
            optimizer.step()
        found.append([state.errors.worker_values().clone() for state in optimizer._states])
    (alone, both), (other, part) = found
    assert bool(alone.any()) and torch.equal(other, alone)
    assert torch.count_nonzero(part) < 0.6 * torch.count_nonzero(both)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def take_steps(rank: int, params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        give(params, rank, step)
        average_gradients(optimizer)
        optimizer.step()


def save_in_the_warmup_stage(rank: int, world_size: int, folder: str) -> tuple[np.ndarray, np.ndarray]:
    params, optimizer = make(4, form="float32")
    take_steps(rank, params, optimizer, range(3))
    hf_compressopt.save_state(optimizer, folder)
    return errors_everywhere(optimizer._states[0], optimizer.communicator)


def resume_in_the_warmup_stage(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Return the errors, and the momentum before and after the first compressed step."""
    params, optimizer = make(4, form="float32")
    hf_compressopt.load_state(optimizer, folder)
    errors, momenta = errors_everywhere(optimizer._states[0], optimizer.communicator), []
    for steps in (range(3, 5), range(5, 6)):
        take_steps(rank, params, optimizer, steps)
        momenta.append(flat([optimizer.state[p]["exp_avg"] for p in params]))
    return {"errors": errors, "momenta": momenta, "alike": same_on_all_ranks(params)}


@pytest.mark.invariant(22)
def test_a_run_that_other_ranks_resume_in_the_warmup_stage(tmp_path: Path) -> None:
    """One rank exchanges nothing, and sends the errors with its first momentum, which has 0.1 of a gradient."""
    workers, server = run_ranks(2, save_in_the_warmup_stage, str(tmp_path))[0]
    assert server.any() and all(row.any() for row in workers)
    for world_size in (3, 1):
        for result in run_ranks(world_size, resume_in_the_warmup_stage, str(tmp_path)):
            assert np.array_equal(result["errors"][1], server) and result["alike"]
            for worker in result["errors"][0]:
                np.testing.assert_allclose(worker, workers.mean(axis=0), atol=1e-6)
    before, after = result["momenta"]
    sent = flat(gradients(0, 5)) + workers.mean(axis=0) + server
    np.testing.assert_allclose(after, 0.9 * before + 0.1 * sent, rtol=1e-5, atol=1e-6)


# -- DDP --------------------------------------------------------------------------------------------------------------

HOOK_STEPS = 6
#: Options of DDP, of the run, and of the optimizer.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "bucket views": ({"gradient_as_bucket_view": True}, {}, {}),
    "static graph": ({"static_graph": True}, {}, {}),
    "unused parameters": ({"find_unused_parameters": True}, {"sometimes": True}, {}),
    "accumulation": ({}, {"accumulate": 3}, {}),
    "bfloat16": ({}, {}, {"dtype": torch.bfloat16}),
    "16 bits": ({}, {}, {"warmup_bits": 16}),
    "lamb": ({}, {}, {"name": "OnebitLamb", "warmup_bits": 8}),
    "zero-one": ({}, {}, {"name": "ZeroOneAdam", "var_freeze_step": 4, "var_update_scaler": 2}),
}
NODES: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = ({}, {}, {"node_size": 2})


@pytest.mark.parametrize(("world_size", "share"), [*spread(shared=(2, 3)), (4, None)])
@on_ranks(timeout=240)
def test_the_hook_has_the_bits_of_the_plain_loop(rank: int, world_size: int, share: Share | None) -> None:
    for name in share.of(VARIANTS) if share else ["nodes"]:
        ddp_options, run, options = VARIANTS.get(name, NODES)
        schedule = {} if name == "zero-one" else {"freeze_step": 4}
        options = {"warmup_bits": 4, "mixed": True, **schedule, **options}
        ddp, hooked, with_hook = attached(ddp=ddp_options, **options)
        plain, without = make_model(**options)
        pair = (with_hook, without)
        same = hook_beside_loop(rank, (ddp, plain), pair, lambda own=without: average_gradients(own), HOOK_STEPS, **run)
        if name != "unused parameters":  # DDP leaves out what no rank has used, the loop what no rank has
            assert same == [True] * HOOK_STEPS, name
            errors = ([e for state in o._states for e in (state.errors.worker, state.errors.server)] for o in pair)
            assert all(torch.equal(one, other) for one, other in zip(*errors, strict=True)), name
        assert same_on_all_ranks(hooked.parameters()), name


def recorded(communicator: Any) -> list[tuple[str, int]]:
    """The messages of a communicator from now on: their kinds, and how many bytes they have."""
    rows: list[tuple[str, int]] = []

    def recording(name: str, original: Any) -> Any:
        return lambda tensor, *args, **options: rows.append((name, tensor.nbytes)) or original(tensor, *args, **options)

    for name in ("all_to_all", "all_gather", "all_reduce"):
        setattr(communicator, name, recording(name, getattr(communicator, name)))
    return rows


@on_ranks(2)
def test_each_parameter_travels_as_its_owner_says(rank: int, world_size: int) -> None:
    """One model of two optimizers, of which one is in its compressed stage, and a parameter that nobody owns."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 3))
    ddp = DistributedDataParallel(net)
    low = hf_compressopt.OnebitAdam(net[0].parameters(), warmup_bits=4)
    late = hf_compressopt.OnebitAdam(net[1].parameters(), warmup_bits=4, freeze_step=1)
    sync = attach_ddp(ddp, low, late)
    for optimizer in (low, late):
        optimizer.require_same_options()  # whose messages do not count below
    for step, expected in enumerate(([True, "exact"] * 2, [True, "exact", "local", "local"])):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * rank + step))
        messages = [recorded(communicator) for communicator in (low.communicator, late.communicator)]
        plain = recorded(sync.communicator)
        grads = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
        ddp(x).square().mean().backward()
        rows: list[Any] = []
        for p, local in zip(net.parameters(), grads, strict=True):
            mean = local.clone()
            dist.all_reduce(mean)
            mean /= world_size
            near = float((p.grad - mean).abs().max()) < 0.2 * float(mean.abs().max())
            rows.append("local" if torch.equal(p.grad, local) else "exact" if torch.equal(p.grad, mean) else near)
        assert rows == [*expected, "exact", "exact"]
        sent = [sum(nbytes for _, nbytes in each) for each in messages]
        if step == 0:  # of the parameters that nobody owns, beside what compares the ranks
            large = [row for row in plain if row[0] == "all_reduce" and row[1] > 64]
            assert large == [("all_reduce", 123 * 4)]
            assert 0 < sent[0] == sent[1] < 1640 * 4 / 3
        else:
            assert sent[1] == 0
        for optimizer in (low, late):
            optimizer.step()
        net.zero_grad()


@on_ranks(2)
def test_groups_of_several_models_travel_in_full_precision(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    one, two = nn.Linear(20, 20), nn.Linear(20, 20)
    params = [*one.parameters(), *two.parameters()]
    optimizer = hf_compressopt.OnebitAdam(params, warmup_bits=4)
    models = [DistributedDataParallel(net) for net in (one, two)]
    for model in models:
        attach_ddp(model, optimizer)
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(rank))
    local = torch.autograd.grad(two(one(x)).sum(), params)
    models[1](models[0](x)).sum().backward()
    for p, grad in zip(params, local, strict=True):
        dist.all_reduce(grad.div_(world_size))
        assert torch.equal(p.grad, grad)


@on_ranks(2)
def test_the_first_message_leaves_before_the_last_gradient_is_there(rank: int, world_size: int) -> None:
    def attach(ddp: DistributedDataParallel, communicator: Recording) -> Any:
        options = {"warmup_bits": 4, "bucket_cap_mb": CAP, "communicator": communicator}
        optimizer = hf_compressopt.OnebitAdam(ddp.parameters(), **options)
        attach_ddp(ddp, optimizer)
        return optimizer.step

    check_overlap(events_of_backward(attach))
