"""OnebitAdam and its family: the warmup stage, the switch, skipped steps, bytes, low precision, resumes."""

import copy
import math
import os
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_compressopt import Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam, ZeroOptimizer, average_gradients
from hf_compressopt.kernels import adam, library
from hf_compressopt.kernels.compact import tensor_of
from tests.oracles.cases import (
    ODD,
    Case,
    LambProblem,
    PlainLambProblem,
    Problem,
    ZeroOneProblem,
    make_optimizer,
    set_gradients,
)
from tests.oracles.steps import bytes_of_a_compressed_step, check_low_precision, everything
from tests.support.family import go_on, make
from tests.support.harness import on_ranks, same_on_all_ranks
from tests.support.logs import log_lines

ZERO_ONE = {"var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}


# -- the warmup stage -------------------------------------------------------------------------------------------------


@pytest.mark.invariant(12, 32)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_warmup_is_adamw_bit_for_bit(rank, world_size):
    """Over 20 steps; parameter 1 has a gradient in every third step only."""
    settings = ({}, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}, {"lr": torch.tensor(0.003)})
    for kwargs, exact in product(settings, ({"warmup_bits": 32}, {"fused_warmup": False})):
        generator = torch.Generator().manual_seed(5)
        ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ODD]
        theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
        optimizer = OnebitAdam(ours, freeze_step=100, **{"lr": 0.01, **kwargs, **exact})
        adamw = torch.optim.AdamW(theirs, **{"lr": 0.01, "weight_decay": 0.0, **kwargs})
        generator = torch.Generator().manual_seed(100 + rank)
        for t in range(1, 21):
            assert optimizer.plan.reduce_grads and optimizer.plan.update_variance and not optimizer.plan.synchronize
            for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
                grad = torch.randn(p.shape, generator=generator) / world_size
                dist.all_reduce(grad)
                p.grad = None if i == 1 and t % 3 else grad
                q.grad = None if p.grad is None else grad.clone()
            for group in (*optimizer.param_groups, *adamw.param_groups):
                group["lr"] = group["lr"] * 0.97
            optimizer.step()
            adamw.step()
            for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
                for name, value in {"": p, **optimizer.state[p]}.items():
                    other = adamw.state[q].get(name, torch.zeros_like(value)) if name else q
                    assert torch.equal(value, other), (kwargs, exact, t, i, name)


# -- the switch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])  # on a GPU steps are counted there and on the host
def test_fused_warmup_prepares_once(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    monkeypatch.setattr("hf_compressopt.optim.moments.reads_at_once", lambda device: at_once)
    runs = []
    for anew in (False, True):
        params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in ((7, 5), (12,), (3,))]
        optimizer, made = OnebitAdam(params, lr=1e-2, fused_warmup=True, freeze_step=100), []
        for step in range(12):
            if step == 11:
                optimizer = copy.deepcopy(optimizer)
                params = optimizer.param_groups[0]["params"]
            for number, param in enumerate(params):
                param.grad = None if step == 4 and number == 1 else torch.full_like(param, 0.1 * step - 0.3)
            if step == 7:
                params[0].data = params[0].data.clone()
            for param in params if step == 9 else ():
                optimizer.state[param]["step"] += 3
            if step == 10:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if anew:
                optimizer._states[0].moments._adam = None
            with mock.patch.object(adam, "AdamPlan", wraps=adam.AdamPlan) as plan:
                optimizer.step()
            made.append(plan.call_count)
        runs.append([*params, *(value for row in optimizer.state.values() for value in row.values())])
        # at 4 and 5 other parameters have a gradient, at 7 one lies elsewhere, at 9 counts do, from 10 on everything
        expected = range(12) if anew else [0, 4, 5, 7, *([] if at_once else [9]), 10, 11]
        assert [step for step, count in enumerate(made) if count] == list(expected)
    assert all(map(torch.equal, *runs))


@pytest.mark.invariant(36)
@on_ranks(2)
def test_rows_never_seen_in_warmup_stay_near(rank, world_size):
    """With the floor f no element moves by more than lr * scale / (sqrt(f mean(v)) + eps) in a step; without, far."""
    lr, floor, largest = 1e-3, 0.01, 3.0  # gradients are drawn from [-largest, largest]
    for used in (floor, 0.0):
        moves, scales, mean_variance = train_embedding(rank, world_size, lr, used, largest)
        bound = lr * scales / (math.sqrt(floor * mean_variance) + 1e-8)
        if used:
            assert np.all(moves <= 1.0001 * bound) and np.all(moves > 0)
            assert moves.max() <= lr * largest / (math.sqrt(floor * mean_variance) + 1e-8), "a bound known beforehand"
        else:
            assert moves.max() > 100 * bound.max(), "the problem must be one that needs the floor"


def train_embedding(rank, world_size, lr, floor, largest):
    """Largest move and largest |m| of each of 100 compressed steps, and mean(v) as it was before the floor."""
    freeze_step, (rows, columns) = 20, (64, 16)
    p = torch.nn.Parameter(torch.zeros(rows, columns))
    options = {"variance_floor": floor, "scale_block": 64, "max_update": 0, "variance_interval": 0}
    optimizer = OnebitAdam([p], lr=lr, freeze_step=freeze_step, **options)
    generator = torch.Generator().manual_seed(rank)
    variance = torch.zeros(rows, columns, dtype=torch.float64)
    moves, scales = [], []
    for t in range(1, freeze_step + 101):
        grad = torch.empty(rows, columns).uniform_(-largest, largest, generator=generator)
        grad[1::2] = 0  # never seen
        grad[1] = 1e-4 if t == 3 else 0  # seen once, hardly
        if optimizer.plan.reduce_grads:
            grad /= world_size
            dist.all_reduce(grad)
            variance = 0.999 * variance + 0.001 * grad.double() ** 2
        before = p.detach().clone()
        p.grad = grad
        optimizer.step()
        if t > freeze_step:
            moves.append(float((p.detach() - before).abs().max()))
            scales.append(float(optimizer.state[p]["exp_avg"].abs().max()))
    return np.array(moves), np.array(scales), float((variance / (1 - 0.999**freeze_step)).mean())


@pytest.mark.invariant(36)
@pytest.mark.parametrize(
    ("kind", "first_seen"), [(OnebitAdam, None), (OnebitLamb, 11), *((ZeroOneAdam, t) for t in (3, 5, 9, 13))]
)
@pytest.mark.parametrize("options", [{}, {"eps": 0.0}, {"weight_decay": 0.1}], ids=str)
@on_ranks(2)
def test_parameter_without_variance_keeps_still(rank, world_size, kind, first_seen, options):
    """Its neighbours' scale must not throw it away; weight decay alone may move it. 0/1 Adam may learn it later."""
    used, unused = torch.nn.Parameter(torch.ones(20)), torch.nn.Parameter(torch.ones(20))
    schedule = ZERO_ONE if kind is ZeroOneAdam else {"freeze_step": 3}
    optimizer = kind([used, unused], lr=0.01, **schedule, **options)
    generator = torch.Generator().manual_seed(0)
    still, learnt = 0.0, False
    for t in range(1, 25):
        used.grad = torch.randn(20, generator=generator)
        seen = first_seen is not None and t >= first_seen
        unused.grad = torch.randn(20, generator=generator) if seen else None
        learnt |= optimizer.plan.update_variance and seen
        optimizer.step()
        if not learnt:
            still = max(still, float((unused.detach() - 1).abs().max()))
    assert used.isfinite().all() and unused.isfinite().all()
    decayed = 24 * 0.01 * options.get("weight_decay", 0.0) * 10
    assert still <= 1e-6 + decayed
    assert float((unused.detach() - 1).abs().max()) <= (1.0 if kind is ZeroOneAdam else 1e-6) + decayed


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(34)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("clip", ["sketch", "local"])
@on_ranks()
def test_clip_grad_norm(rank, world_size, clip):
    p = torch.nn.Parameter(torch.zeros(9))
    optimizer = OnebitAdam([p], freeze_step=1, clip=clip)
    p.grad = torch.ones(9)
    assert float(optimizer.clip_grad_norm_(1.5)) == pytest.approx(3.0)
    assert float(p.grad.norm()) == pytest.approx(1.5)
    optimizer.step()
    p.grad = torch.full((9,), float(rank + 1))
    norms = [3 * (other + 1) for other in range(world_size)]
    local = float(optimizer.clip_grad_norm_(1.5))
    assert local == pytest.approx(np.mean(norms) if clip == "sketch" else math.sqrt(np.mean(np.square(norms))))
    factor = float(p.grad[0]) / (rank + 1)
    assert same_on_all_ranks([torch.tensor(local)]), "the norm must be the same number on all ranks"
    assert factor == pytest.approx(1.5 / local, rel=1e-5), "and the factor too"
    assert float(optimizer.clip_grad_norm_(math.inf)) == pytest.approx(1.5)
    assert float(p.grad[0]) / (rank + 1) == factor, "an infinite norm only measures"


@pytest.mark.invariant(30)
@on_ranks(2)
def test_huge_finite_gradient_leaves_no_poison(rank, world_size):
    """Its square is beyond float32: whether the step is taken or skipped, nothing may become NaN or stay infinite."""
    problem = Problem(Case("huge", [{"shapes": ODD}], {"lr": 0.01}, 3, 8), world_size, 0)
    optimizer, params = make_optimizer(problem)
    for t in range(1, problem.case.steps + 1):
        set_gradients(problem, optimizer, params, rank, t)
        if t == 5 and rank == 1:
            params[0][1].grad[0, 0] = 1e25
        optimizer.step()
    assert [key for key, value in everything(optimizer, params).items() if not value.isfinite().all()] == []


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(33)
@pytest.mark.parametrize("kind", [OnebitAdam, OnebitLamb])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks()
def test_metrics_count_bytes(rank, world_size, kind):
    numel = 40_000
    formula = bytes_of_a_compressed_step(numel, world_size, 64)
    p = torch.nn.Parameter(torch.ones(numel // 50, 50))
    optimizer = kind([p], freeze_step=1, scale_block=64, variance_interval=4)
    seen = []
    for _ in range(4):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(rank))
        average_gradients(optimizer)
        optimizer.step()
        seen.append(optimizer.metrics())
    warmup, _, compressed, refreshed = seen
    beside = refreshed["bytes_sent_step"] - compressed["bytes_sent_step"]  # gradients as in the warmup stage
    assert abs(beside - warmup["bytes_sent_step"]) <= 64 * world_size
    assert warmup["stage"] == 0.0 and compressed["stage"] == 1.0
    assert compressed["step"] == 3.0 and compressed["skipped_steps"] == 0.0
    assert all(isinstance(value, float) for value in compressed.values())
    assert abs(compressed["bytes_sent_step"] - formula) <= 64 * world_size
    if world_size > 1:
        full = 2 * (world_size - 1) / world_size * 4 * numel
        assert compressed["compression_ratio"] == pytest.approx(full / compressed["bytes_sent_step"])
        assert compressed["compression_ratio"] > 15


# -- lower precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Problem, LambProblem, ZeroOneProblem, PlainLambProblem])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_low_precision_parameters_follow_float32_moments(rank, world_size, dtype, kind):
    options, steps = (ZERO_ONE, 24) if kind is ZeroOneProblem else ({}, 8)
    case = Case("low", [{"shapes": ODD}], {"lr": 0.01, "weight_decay": 0.1, **options}, 3, steps)
    check_low_precision(kind(case, world_size, 0), rank, dtype)


@pytest.mark.skipif(not library.available(torch.device("cpu")), reason="there is no native library to mix with")
@on_ranks(2)
def test_ranks_whose_norms_would_differ_are_refused_together(rank, world_size):
    with mock.patch.dict(os.environ, {"HF_COMPRESSOPT_KERNELS": "reference"} if rank == 1 else {}):
        p = torch.nn.Parameter(torch.ones(5))
        p.grad = torch.ones(5)
        with pytest.raises(
            (ValueError, RuntimeError), match=r"(?s)kernels=native.*kernels=reference|kernels=reference.*kernels=native"
        ):
            OnebitLamb([p]).step()


# -- the compact state -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_state_shows_decoded_moments(rank: int, world_size: int) -> None:
    params, optimizer = make(rank, 6)
    state = optimizer._states[0]
    assert state.exp_avg.numel() == state.exp_avg_sq.numel() == 0
    for number, p in enumerate(params):
        entry = optimizer.state[p]
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq"] == list(dict(entry)) == [k for k, _ in entry.items()]
        assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == p.shape and entry["step"] == 6
        assert entry.get("nothing") is None and (entry["exp_avg_sq"] > 0).all()
        assert len(entry.values()) == 3 and entry["exp_avg"].abs().unique().numel() <= 3 * world_size
        saved = optimizer.state_dict()["state"][number]
        assert type(saved) is dict and all(torch.equal(saved[name], entry[name]) for name in entry)
    with pytest.raises(KeyError):
        optimizer.state[params[0]]["nothing"]


@pytest.mark.parametrize("form", ["compact", "float32"])
@on_ranks(2)
def test_all_of_the_state_moves_with_the_parameters(rank: int, world_size: int, form: str) -> None:
    """To "meta", a device that every machine has."""
    (group,) = make(rank, 5, form=form)[1]._states
    group.to(torch.device("meta"))
    tensors = [group.exp_avg, group.exp_avg_sq, group.errors.worker, group.errors.server]
    tensors += [group.moments.codes, group.moments.tops] if form == "compact" else []
    tensors += [last.messages for last in group.moments.messages]
    tensors += [tensor_of(error) for part in group.feedback for error in (*part.worker, part.server)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@on_ranks(2)
def test_a_mask_may_come_and_go(rank: int, world_size: int) -> None:
    params, optimizer = make(rank, 5)
    optimizer.param_groups[0]["exp_avg_mask"] = torch.zeros(1)
    go_on(rank, params, optimizer, range(5, 7))
    assert all(not optimizer.state[p]["exp_avg"].any() for p in params)
    assert optimizer._states[0].exp_avg.numel() == sum(p.numel() for p in params)
    del optimizer.param_groups[0]["exp_avg_mask"]
    go_on(rank, params, optimizer, range(7, 9))
    assert all(optimizer.state[p]["exp_avg"].all() for p in params)
    assert optimizer._states[0].exp_avg.numel() == 0
    entry = optimizer.state[params[0]]
    assert torch.equal(entry.copy()["exp_avg"], entry["exp_avg"]) and (entry | {"more": 1})["step"] == 9


# -- coefficients of LAMB, and of the warmup stage of OnebitLamb -------------------------------------------------------

LAMBS = pytest.mark.parametrize("kind", [Lamb, OnebitLamb])


@LAMBS
def test_coefficients_are_clamped_and_copied(kind):
    """They have an entry for each trainable tensor, one without elements included."""
    values = (torch.full((4,), 3.0), torch.full((4,), 5.0), torch.full((4,), 0.2), torch.zeros(0), torch.ones(8))
    params = [torch.nn.Parameter(value) for value in values]
    params[1].requires_grad_(False)
    optimizer = kind(params, lr=0.0, max_coeff=1.2, min_coeff=0.9)
    for p in params:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    coeffs = optimizer.get_lamb_coeffs()
    assert coeffs == pytest.approx([1.2, 0.9, 1.0, 1.0]) and all(isinstance(value, float) for value in coeffs)
    coeffs[0] = 5.0
    assert optimizer.get_lamb_coeffs()[0] == pytest.approx(1.2)


@LAMBS
def test_coefficient_is_one_where_a_norm_is_zero(kind):
    zero, idle = torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.ones(8))
    frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    optimizer = kind([zero, frozen, idle], lr=0.1)
    zero.grad, idle.grad = torch.ones(8), torch.zeros(8)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0, 1.0]
    torch.testing.assert_close(zero.detach(), torch.full((8,), -0.1))
    assert torch.equal(idle.detach(), torch.ones(8)) and torch.equal(frozen.detach(), torch.ones(8))


@LAMBS
def test_coefficients_keep_the_order_of_the_parameters(kind):
    """The first tensor has its first gradient later than the second."""
    p, q = torch.nn.Parameter(torch.full((4,), 3.0)), torch.nn.Parameter(torch.full((4,), 2.0))
    optimizer = kind([p, q], lr=0.0)
    for grad in (None, torch.ones(4)):
        p.grad, q.grad = grad, torch.ones(4)
        optimizer.step()
    assert optimizer.get_lamb_coeffs() == pytest.approx([3.0, 2.0])


# -- weights of few bits ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_weights_in_bfloat16_lose_small_steps_which_a_warning_says(rank, world_size):
    """torch's AdamW loses them too; ZeroOptimizer keeps float32 weights."""
    for cls in (OnebitAdam, ZeroOneAdam, OnebitLamb):
        param = torch.nn.Parameter(torch.ones(64, 8, dtype=torch.bfloat16))
        with log_lines() as lines:
            optimizer = cls([param], lr=1e-5, freeze_step=4)
            for _ in range(8):
                param.grad = torch.ones_like(param)
                average_gradients(optimizer)
                optimizer.step()
        assert bool((param == 1).all())
        said = [line for line in lines if "keeps no float32 copy of bfloat16 weights" in line]
        assert len(said) == (rank == 0) and all("1/512" in line and "zero_stage=1 or 2" in line for line in said)
    optimizer = ZeroOptimizer([param], torch.optim.AdamW, stage=2, lr=1e-5)
    with log_lines() as lines:
        for _ in range(8):
            (param * torch.ones_like(param)).sum().backward()
            optimizer.step()
    assert float(optimizer.get_full_param(param).max()) < 1 - 7e-5 and not any("float32 copy" in line for line in lines)
