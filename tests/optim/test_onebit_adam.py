"""OnebitAdam on real gloo ranks, against the float64 simulation, recorded trajectories and torch's AdamW."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_compressopt import Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam
from tests.optim.test_oracle_simulation import RECORDED, TENSORS, recorded_kwargs
from tests.oracles.cases import (
    ODD,
    Case,
    Problem,
    make_optimizer,
    make_params,
    safe_problem,
    set_gradients,
    shared_cases,
)
from tests.oracles.comparing import (
    assert_errors_close,
    assert_follows,
    assert_moments_close,
    follow_recording,
    run_on_rank,
)
from tests.oracles.steps import (
    bytes_of_a_compressed_step,
    check_low_precision,
    everything,
    problems_of_a_skip,
)
from tests.support.harness import run_ranks
from tests.support.spreading import spread

CASES = [
    *(Case(f"block_{block}", [{"shapes": ODD}], {"lr": 0.01, "scale_block": block}) for block in (None, 8, 64, 4096)),
    *shared_cases(),
    Case("no_bias_correction", [{"shapes": ODD}], {"bias_correction": False, "scale_block": 8}),
    Case(
        "eps_inside_no_correction",
        [{"shapes": ODD}],
        {"eps_inside_sqrt": True, "eps": 0.05, "bias_correction": False, "weight_decay": 0.1},
    ),
    Case("bounded", [{"shapes": ODD}], {"max_update": 0.4, "variance_floor": 0.0, "weight_decay": 0.1, "lr": 0.01}),
    *(
        Case(f"large_{block}", [{"shapes": [(131, 133), (9,)]}], {"scale_block": block}, freeze_step=2, steps=5)
        for block in (None, 4096)
    ),
]
ZERO_ONE = {"var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}


def solve_all(rank, world_size, problems):
    return [run_on_rank(rank, problem) for problem in problems]


@pytest.mark.invariant(29)
@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3, 4, 1)))
def test_equals_simulation(world_size, share):
    solved = [safe_problem(case, world_size) for case in share.of(CASES)]
    by_rank = run_ranks(world_size, solve_all, [problem for problem, _, _ in solved])
    for index, (problem, simulation, history) in enumerate(solved):
        for rank in range(world_size):
            got = by_rank[rank][index]
            context = f"case {problem.case.name}, rank {rank}"
            assert got["history"].tobytes() == by_rank[0][index]["history"].tobytes(), f"{context}: ranks differ"
            np.testing.assert_allclose(got["history"], history, rtol=0, atol=2e-6, err_msg=context)
            compare_state(got, simulation, rank, context)


def compare_state(got, simulation, rank, context):
    assert got["steps"] == [group.steps for group in simulation.groups], context
    assert_moments_close(got, simulation, context, atol=2e-6)
    assert_errors_close(got, simulation, rank, context, rtol=0)


@pytest.mark.invariant(29)
@pytest.mark.parametrize("name", RECORDED)
def test_equals_recorded_trajectory(name):
    for history, states, _ in run_ranks(2, follow, name):
        recorded = np.load(Path(__file__).parents[1] / "oracles" / f"{name}.npz")
        assert_follows(recorded, 0, history, states)


def follow(rank, world_size, name):
    recorded = np.load(Path(__file__).parents[1] / "oracles" / f"{name}.npz")
    params = [torch.nn.Parameter(torch.from_numpy(recorded[f"init_param{i}"].copy())) for i in TENSORS]
    optimizers = []
    for i, p in enumerate(params):
        kwargs, mask = recorded_kwargs(recorded, i, name)
        group = {"params": [p]} if mask is None else {"params": [p], "exp_avg_mask": torch.from_numpy(mask)}
        optimizers.append(OnebitAdam([group], state="float32", **kwargs))
    return follow_recording(recorded, optimizers, params, rank)


# -- the warmup stage -------------------------------------------------------------------------------------------------


@pytest.mark.invariant(32)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_warmup_is_adamw_bit_for_bit(world_size):
    for rank, mismatches in enumerate(run_ranks(world_size, compare_with_adamw)):
        assert mismatches == [], f"rank {rank}"


def compare_with_adamw(rank, world_size):
    """Differences to torch's AdamW over 20 steps; parameter 1 has a gradient in every third step only."""
    mismatches = []
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
                same = torch.equal(p, q) and all(
                    torch.equal(
                        optimizer.state[p][key], adamw.state[q].get(key, torch.zeros_like(optimizer.state[p][key]))
                    )
                    for key in ("exp_avg", "exp_avg_sq", "step")
                )
                mismatches += [] if same else [(str((kwargs, exact)), t, i)]
    return mismatches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_warmup_is_adamw_but_for_rounding(dtype):
    results = []
    for fused in (False, True):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, n).to(dtype)) for n in (5, 130, 0, 3)]
        optimizer = OnebitAdam(params, lr=0.01, weight_decay=0.1, freeze_step=8, fused_warmup=fused, state="float32")
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            for p in params[: 4 - step % 2]:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[p] for p in params]
        results.append(([p.detach().float() for p in params], [s["exp_avg_sq"] for s in states]))
        assert [float(s["step"]) for s in states] == [10, 10, 10, 6]
    assert not all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True)), "took torch's way"
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for plain, fused in zip(results[0], results[1], strict=True):
        for one, other in zip(plain, fused, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_first_gradient_counts():
    """The original only counted in its first step()."""
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = OnebitAdam([p], lr=0.1, freeze_step=3)
    p.grad = torch.tensor([1.0, -2, 3, -4])
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.tensor([-0.1, 0.1, -0.1, 0.1]))
    assert float(optimizer.state[p]["step"]) == 1


def trajectory(**kwargs):
    """Eight steps of one rank alone, three of them warmup, from the same start with the same gradients."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(20, generator=generator))
    optimizer = OnebitAdam([p], **{"lr": 0.01, "freeze_step": 3, **kwargs})
    history = []
    for _ in range(8):
        p.grad = torch.randn(20, generator=generator)
        optimizer.step()
        history.append(p.detach().clone())
    return torch.stack(history)


def test_bias_correction_outside_the_fast_path_agrees_with_it():
    """eps inside the root, of 1e-30, is no eps at all: the same numbers as torch's own arithmetic with eps = 0."""
    torch.testing.assert_close(trajectory(eps_inside_sqrt=True, eps=1e-30), trajectory(eps=0.0), rtol=0, atol=2e-6)


# -- the switch -------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(36)
def test_rows_never_seen_in_warmup_stay_near():
    """With the floor f no element moves by more than lr * scale / (sqrt(f mean(v)) + eps) in a step; without, far."""
    lr, floor, largest = 1e-3, 0.01, 3.0  # gradients are drawn from [-largest, largest]
    for moves, scales, mean_variance in run_ranks(2, train_embedding, lr, floor, largest):
        bound = lr * scales / (math.sqrt(floor * mean_variance) + 1e-8)
        assert np.all(moves <= 1.0001 * bound)
        assert moves.max() <= lr * largest / (math.sqrt(floor * mean_variance) + 1e-8), "a bound known beforehand"
        assert np.all(moves > 0)
    for moves, scales, mean_variance in run_ranks(2, train_embedding, lr, 0.0, largest):
        bound = lr * scales / (math.sqrt(floor * mean_variance) + 1e-8)
        assert moves.max() > 100 * bound.max(), "the problem must be one that needs the floor"


def train_embedding(rank, world_size, lr, floor, largest):
    """Largest move and largest |m| of each of 100 compressed steps, and mean(v) as it was before the floor."""
    freeze_step, (rows, columns) = 20, (64, 16)
    p = torch.nn.Parameter(torch.zeros(rows, columns))
    optimizer = OnebitAdam([p], lr=lr, freeze_step=freeze_step, variance_floor=floor, scale_block=64)
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
    ("kind", "first_seen"),
    [(OnebitAdam, None), (OnebitLamb, 11), *((ZeroOneAdam, t) for t in (3, 5, 9, 13))],
)
@pytest.mark.parametrize("options", [{}, {"eps": 0.0}, {"weight_decay": 0.1}], ids=str)
def test_parameter_without_variance_keeps_still(kind, first_seen, options):
    """Its neighbours' scale must not throw it away; weight decay alone may move it. 0/1 Adam may learn it later."""
    for still, farthest, finite in run_ranks(2, train_beside_unused_parameter, kind, first_seen, options):
        assert finite
        decayed = 24 * 0.01 * options.get("weight_decay", 0.0) * 10
        assert still <= 1e-6 + decayed
        assert farthest <= (1.0 if kind is ZeroOneAdam else 1e-6) + decayed


def train_beside_unused_parameter(rank, world_size, kind, first_seen, options):
    """How far the parameter moves before it has a variance, and at most; it has a gradient from first_seen on."""
    used, unused = torch.nn.Parameter(torch.ones(20)), torch.nn.Parameter(torch.ones(20))
    schedule = {**ZERO_ONE, "var_update_scaler": 2} if kind is ZeroOneAdam else {"freeze_step": 3}
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
    finite = bool(used.isfinite().all() and unused.isfinite().all())
    return still, float((unused.detach() - 1).abs().max()), finite


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(34)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("clip", ["sketch", "local"])
def test_clip_grad_norm(world_size, clip):
    """Averaged gradients: their norm. Local ones: that of their mean, or sqrt(mean of the squared norms)."""
    rows = run_ranks(world_size, clip_on_a_rank, clip)
    norms = [3 * (rank + 1) for rank in range(world_size)]
    expected = np.mean(norms) if clip == "sketch" else math.sqrt(np.mean(np.square(norms)))
    for averaged, clipped, local, _, again, _ in rows:
        assert averaged == pytest.approx(3.0)
        assert clipped == pytest.approx(1.5)
        assert local == pytest.approx(expected)
        assert again == pytest.approx(1.5)
    assert len({row[2] for row in rows}) == 1, "the norm must be the same number on all ranks"
    assert rows[0][5] == pytest.approx(rows[-1][5]), "the factor must be the same on all ranks"


def clip_on_a_rank(rank, world_size, clip):
    p = torch.nn.Parameter(torch.zeros(9))
    optimizer = OnebitAdam([p], freeze_step=1, clip=clip)
    p.grad = torch.ones(9)
    averaged = float(optimizer.clip_grad_norm_(1.5))
    clipped = float(p.grad.norm())
    optimizer.step()
    p.grad = torch.full((9,), float(rank + 1))
    local = float(optimizer.clip_grad_norm_(1.5))
    factor = float(p.grad[0]) / (rank + 1)
    again = float(optimizer.clip_grad_norm_(math.inf))
    assert float(p.grad[0]) / (rank + 1) == factor, "an infinite norm only measures"
    return averaged, clipped, local, factor, again, factor


CLIPPINGS = ["none", "max_grad_norm", "clip_grad_norm_"]


@pytest.mark.invariant(13)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_gradient_that_is_not_finite_skips_the_step_everywhere(world_size, clipping):
    """The run goes on as if the step had never been; one rank's local NaN is enough in the compressed stage."""
    for rank, problems in enumerate(run_ranks(world_size, skip_on_a_rank, clipping)):
        assert problems == [], f"rank {rank}"


def skip_on_a_rank(rank, world_size, clipping):
    """The bad values take turns at the steps: warmup, the first compressed step, a later one."""
    kwargs = {"max_grad_norm": 0.5} if clipping == "max_grad_norm" else {}
    case = Case("skip", [{"shapes": ODD}, {"shapes": [(6,)], "non_freeze": True}], {"lr": 0.01, **kwargs}, 3, 8)
    turn = CLIPPINGS.index(clipping)
    values = [math.nan, math.inf, -math.inf]
    clip = (lambda optimizer: optimizer.clip_grad_norm_(0.5)) if clipping == "clip_grad_norm_" else (lambda _: None)
    problems = []
    for bad_step, bad in zip((2, 4, 6), values[turn:] + values[:turn], strict=True):
        problems += problems_of_a_skip(Problem(case, world_size, 0), make_optimizer, rank, bad_step, bad, clip)
    return problems


@pytest.mark.invariant(30)
def test_huge_finite_gradient_leaves_no_poison():
    """Its square is beyond float32: whether the step is taken or skipped, nothing may become NaN or stay infinite."""
    for rank, not_finite in enumerate(run_ranks(2, huge_on_a_rank)):
        assert not_finite == [], f"rank {rank}"


def huge_on_a_rank(rank, world_size):
    case = Case("huge", [{"shapes": ODD}], {"lr": 0.01}, 3, 8)
    problem = Problem(case, world_size, 0)
    optimizer, params = make_optimizer(problem)
    for t in range(1, case.steps + 1):
        set_gradients(problem, optimizer, params, rank, t)
        if t == 5 and rank == 1:
            params[0][1].grad[0, 0] = 1e25
        optimizer.step()
    return [key for key, value in everything(optimizer, params).items() if not value.isfinite().all()]


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(33)
@pytest.mark.parametrize("kind", [OnebitAdam, OnebitLamb])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_metrics_count_bytes(world_size, kind):
    numel = 40_000
    formula = bytes_of_a_compressed_step(numel, world_size, 64)
    for warmup, compressed in run_ranks(world_size, metrics_on_a_rank, numel, kind):
        assert warmup["stage"] == 0.0 and compressed["stage"] == 1.0
        assert compressed["step"] == 3.0 and compressed["skipped_steps"] == 0.0
        assert all(isinstance(value, float) for value in compressed.values())
        assert abs(compressed["bytes_sent_step"] - formula) <= 64 * world_size
        if world_size > 1:
            full = 2 * (world_size - 1) / world_size * 4 * numel
            assert compressed["compression_ratio"] == pytest.approx(full / compressed["bytes_sent_step"])
            assert compressed["compression_ratio"] > 15


def metrics_on_a_rank(rank, world_size, numel, kind):
    p = torch.nn.Parameter(torch.ones(numel))
    optimizer = kind([p], freeze_step=1, scale_block=64)
    seen = []
    for _ in range(3):
        seed = 0 if optimizer.plan.reduce_grads else rank
        p.grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        seen.append(optimizer.metrics())
    return seen[0], seen[2]


# -- what the constructor refuses -------------------------------------------------------------------------------------


BAD_OPTIONS = {
    OnebitAdam: [
        ({"freeze_step": 0}, ["freeze_step", ">= 1", "0"]),
        ({"freeze_step": -3}, ["freeze_step", ">= 1", "-3"]),
        ({"betas": (1.0, 0.999)}, ["betas[0]", "[0, 1)", "1.0"]),
        ({"betas": (0.9, -0.1)}, ["betas[1]", "[0, 1)", "-0.1"]),
        ({"betas": (0.9, math.nan)}, ["betas[1]", "[0, 1)", "nan"]),
        ({"betas": (0.9,)}, ["betas", "[0, 1)"]),
        ({"lr": -1.0}, ["lr", ">= 0", "-1.0"]),
        ({"lr": math.nan}, ["lr", ">= 0", "nan"]),
        ({"eps": -1e-8}, ["eps", ">= 0", "-1e-08"]),
        ({"weight_decay": -0.5}, ["weight_decay", ">= 0", "-0.5"]),
        ({"max_grad_norm": -2.0}, ["max_grad_norm", ">= 0", "-2.0"]),
        ({"variance_floor": -0.5}, ["variance_floor", ">= 0", "-0.5"]),
        ({"scale_block": 0}, ["scale_block", "multiple of 8", "0"]),
        ({"scale_block": 12}, ["scale_block", "multiple of 8", "12"]),
        ({"bucket_cap_mb": 0}, ["bucket_cap_mb", "> 0", "0"]),
        ({"max_update": -1.0}, ["max_update", ">= 0", "-1.0"]),
        ({"max_update": math.inf}, ["max_update", "finite", "inf"]),
        ({"max_update": "5"}, ["max_update", "number", "'5'"]),
        ({"amsgrad": True}, ["amsgrad", "False", "True"]),
        ({"communicator": "no-such-thing"}, ["communicator", "auto", "no-such-thing"]),
    ],
    OnebitLamb: [
        ({"freeze_step": 0}, ["freeze_step", ">= 1", "0"]),
        ({"min_coeff": -0.5}, ["min_coeff", ">= 0", "-0.5"]),
        ({"max_coeff": 0.1, "min_coeff": 0.2}, ["max_coeff", "0.1"]),
        ({"coeff_beta": 1.0}, ["coeff_beta", "[0, 1)", "1.0"]),
        ({"factor_min": 5.0}, ["factor_m", "5.0"]),
        ({"factor_threshold": -0.1}, ["factor_threshold", ">= 0", "-0.1"]),
        ({"max_update": 5.0}, ["max_update", "not supported", "5.0", "factor_max"]),
    ],
    ZeroOneAdam: [
        ({name: value}, [name, ">= 1", str(value)])
        for name in ("freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
        for value in (0, -3)
    ],
    Lamb: [
        ({"lr": -1.0}, ["lr", "-1.0"]),
        ({"betas": (1.0, 0.9)}, ["betas[0]", "1.0"]),
        ({"max_coeff": 0.1, "min_coeff": 0.2}, ["max_coeff", "0.1"]),
    ],
}


@pytest.mark.invariant(7)
@pytest.mark.parametrize("kind", BAD_OPTIONS)
def test_bad_option_is_named(kind):
    for kwargs, words in BAD_OPTIONS[kind]:
        with pytest.raises(TypeError if "'5'" in words else ValueError) as caught:
            kind([torch.nn.Parameter(torch.zeros(3))], **kwargs)
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.invariant(7)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_parameter_of_unsupported_dtype_is_named(dtype):
    with pytest.raises(TypeError) as caught:
        OnebitAdam([torch.nn.Parameter(torch.zeros(3, dtype=dtype))])
    assert str(dtype) in str(caught.value) and "torch.float32" in str(caught.value)


def test_mask_that_does_not_fit_is_named():
    group = {"params": [torch.nn.Parameter(torch.zeros(3, 5))], "exp_avg_mask": torch.ones(4)}
    with pytest.raises(ValueError, match=r"exp_avg_mask.*\(4,\).*\(3, 5\)"):
        OnebitAdam([group])
    with pytest.raises(TypeError, match="exp_avg_mask.*list"):
        OnebitAdam([{"params": [torch.nn.Parameter(torch.zeros(3))], "exp_avg_mask": [1, 0, 1]}])


# -- lower precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OnebitAdam, OnebitLamb, ZeroOneAdam])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_follow_float32_moments(dtype, kind):
    run_ranks(2, low_precision_on_a_rank, dtype, kind)


def low_precision_on_a_rank(rank, world_size, dtype, kind):
    schedule, steps = (ZERO_ONE, 24) if kind is ZeroOneAdam else ({"freeze_step": 3}, 8)
    case = Case("low", [{"shapes": ODD}], {"lr": 0.01, "weight_decay": 0.1, **schedule}, 3, steps)
    problem = Problem(case, world_size, 0)
    params, groups = make_params(problem)
    wide = kind(groups, **case.kwargs), params
    check_low_precision(problem, wide, lambda params: kind(params, **case.kwargs), rank, dtype)
