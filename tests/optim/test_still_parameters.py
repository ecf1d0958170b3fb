"""Parameters at the ends of the range: variances that their 8 bits hold as 0, and gradients beside far larger ones."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hf_compressopt
from hf_compressopt.kernels import messages
from tests.support.forms import in_form
from tests.support.harness import run_ranks
from tests.support.logs import log_lines

NAMES = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
MAGNITUDES = (0.0, 1e-45, 1e-38, 1e-30, 1e-23, 1e-20, 1e-19, 1e-12, 1e-3, 1.0, 1e6, 1e15, 1e18)
SHAPES = [(3,), (24, 5), (40,), (1,), (0, 2)]


def draw(seed: int, world_size: int) -> tuple[str, dict[str, Any], Any]:
    """An optimizer, its options, and the magnitude of each tensor's gradients in the warmup and after it."""
    rng = np.random.default_rng(seed)
    name = str(rng.choice(NAMES))
    options: dict[str, Any] = {
        "freeze_step": int(rng.integers(1, 4)),
        "lr": float(rng.choice([1e-3, 0.1])),
        "eps": float(rng.choice([1e-30, 1e-8])),
        "betas": (0.9, float(rng.choice([0.9, 0.999]))),
        "variance_floor": float(rng.choice([0.0, 0.01])),
        "warmup_bits": int(rng.choice([4, 8, 32])),
        "scale_block": 16,
        "bucket_cap_mb": float(rng.choice([0.0002, 25.0])),
    }
    if name == "ZeroOneAdam":
        options |= {"var_update_scaler": int(rng.integers(1, 4)), "local_step_scaler": 2, "local_step_clipper": 2}
    if name == "OnebitAdam" and world_size > 1 and rng.random() < 0.3:
        options |= {"zero_stage": 1, "warmup_bits": 4}
    return name, options, rng.choice(MAGNITUDES, size=(2, len(SHAPES)))


def give(params: list[nn.Parameter], magnitudes: Any, seed: int, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    for param, magnitude in zip(params, magnitudes, strict=True):
        drawn = torch.randn(param.shape, generator=generator)
        param.grad = None if magnitude == 0.0 and step % 2 else drawn * magnitude


def step_of(optimizer: Any) -> None:
    if optimizer.plan.reduce_grads:
        hf_compressopt.average_gradients(optimizer)
    optimizer.step()


def bits(params: list[nn.Parameter], optimizer: Any) -> list[bytes]:
    state = [value for p in params for value in dict(optimizer.state[p]).values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().contiguous().numpy().tobytes() for tensor in (*params, *state)]


def resume_everywhere(rank: int, world_size: int, seeds: range, directory: str) -> tuple[Counter[str], list[str]]:
    """Short runs with a save after every step, whose next step a resumed optimizer takes beside them."""
    counts: Counter[str] = Counter()
    different = []
    for seed in seeds:
        name, options, magnitudes = draw(seed, world_size)
        torch.manual_seed(seed)
        params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        optimizer = getattr(hf_compressopt, name)(params, **options)
        for step in range(1, options["freeze_step"] + 4):
            others = [nn.Parameter(param.detach().clone()) for param in params]
            resumed = getattr(hf_compressopt, name)(others, **options)
            if step > 1 and seed % 4:
                resumed.load_state_dict(optimizer.state_dict())
            elif step > 1:
                path = f"{directory}/{seed}-{step}"
                hf_compressopt.save_state(optimizer, path)
                hf_compressopt.load_state(resumed, path)
                if rank == 0:
                    shutil.rmtree(path, ignore_errors=True)
            for each, mine in ((params, optimizer), (others, resumed)):
                give(each, magnitudes[int(step > options["freeze_step"])], seed, step, rank)
                step_of(mine)
            if bits(params, optimizer) != bits(others, resumed):
                different.append(f"seed {seed}, step {step}: {name}, {options}")
                break
        counts["runs"] += 1
        counts["with still parameters"] += any(any(state.without_variance) for state in optimizer._states)
    return counts, different


LONG = [(1, range(1000, 2700)), (2, range(5000, 5250)), (3, range(6000, 6050))]


@pytest.mark.invariant(10)
@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [(1, range(60)), (2, range(60, 80)), *(pytest.param(*row, marks=pytest.mark.full) for row in LONG)],
)
def test_a_resume_is_bitwise_with_gradients_of_any_size(world_size: int, seeds: range, tmp_path: Path) -> None:
    for counts, different in run_ranks(world_size, resume_everywhere, seeds, str(tmp_path), timeout=1500):
        assert not different, different[:3]
        assert counts["runs"] == len(seeds) and counts["with still parameters"] > len(seeds) // 4, counts


def lamb_of_which_a_half_stops(rank: int, world_size: int, how: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    groups = [{"params": list(layer.parameters())} for layer in model]
    optimizer = hf_compressopt.OnebitLamb(groups, lr=1e-3, freeze_step=220, betas=(0.6, 0.999), warmup_bits=32)
    for step in range(224):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 32)).square().mean().backward()
        for param in model[0].parameters():
            if how == "without gradients" and step > 2:
                param.grad.zero_()
            elif how == "frozen":
                param.requires_grad_(step < 221)
        step_of(optimizer)
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("how", ["without gradients", "frozen"])
def test_lamb_goes_on_where_a_tensor_has_stopped(how: str) -> None:
    """Its momentum is no more than rounding when the scales of messages are made, or a whole group is frozen."""
    first, second = run_ranks(2, lamb_of_which_a_half_stops, how)
    assert all(bool(param.isfinite().all()) for param in first)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", NAMES)
def test_a_variance_that_8_bits_hold_as_0_is_none(name: str) -> None:
    """1e-20 squared is no normal float32 number: the running process must not divide by its square root either."""
    for form, moves in (("compact", False), ("float32", True)):
        params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))]
        optimizer = in_form(getattr(hf_compressopt, name), form)(params, freeze_step=2, eps=1e-30, lr=1.0)
        for step in range(5):
            for param, size in zip(params, (1.0, 1e-20), strict=True):
                param.grad = torch.full((8,), size * (1 + step))
            optimizer.step()
            if step == 1:
                before = [param.detach().clone() for param in params]
        assert not torch.equal(params[0], before[0])
        assert torch.equal(params[1], before[1]) is not moves, form


def train_beside_larger(rank: int, world_size: int, name: str, options: dict[str, Any], ratio: float) -> dict[str, Any]:
    """A norm's 32 values, and a score head, lie beside matrices whose gradients are far larger."""
    messages.OWN_BLOCKS = 2  # as it is in the package: small tensors travel in full
    torch.manual_seed(0)
    shapes = {"first": (40, 8), "norm": (32,), "unused": (9,), "head": (1, 32), "last": (30, 9)}
    model = nn.ParameterDict({key: nn.Parameter(torch.ones(shape)) for key, shape in shapes.items()})
    optimizer = getattr(hf_compressopt, name)(list(model.parameters()), lr=1e-3, freeze_step=6, **options)
    optimizer.label_parameters(model.named_parameters())
    switch: dict[str, Any] = {}
    with log_lines() as lines:
        for step in range(12):
            generator = torch.Generator().manual_seed(100 * step + rank)
            common = torch.Generator().manual_seed(step)
            loss = torch.zeros(())
            for key, param in model.items():
                noise = torch.randn(param.shape, generator=generator) + torch.randn(param.shape, generator=common)
                size = {"norm": ratio, "head": ratio, "unused": 0.0}.get(key, 1.0)
                loss = loss + (size * (noise + 1.0) * param).sum()
            loss.backward()
            step_of(optimizer)
            optimizer.zero_grad()
            if step == 5:
                switch = {key: param.detach().numpy().copy() for key, param in model.items()}
    ends = {key: param.detach().numpy() for key, param in model.items()}
    variances = {key: optimizer.state[model[key]]["exp_avg_sq"].numpy().copy() for key in ("norm", "head")}
    return {"switch": switch, "ends": ends, "variances": variances, "lines": lines}


@pytest.mark.parametrize(
    ("name", "options", "world_size"),
    [
        ("OnebitAdam", {}, 2),
        ("OnebitAdam", {"warmup_bits": 8}, 3),
        ("OnebitAdam", {"overlap_comm": True}, 2),
        ("OnebitAdam", {"topology": "hierarchical", "node_size": 2}, 4),
        ("OnebitAdam", {"zero_stage": 1}, 3),
        ("OnebitAdam", {"zero_stage": 2}, 2),
        ("OnebitAdam", {"zero_stage": 2, "topology": "hierarchical", "node_size": 2}, 4),
        ("OnebitLamb", {}, 2),
        ("ZeroOneAdam", {"var_update_scaler": 100}, 2),
    ],
)
def test_small_tensors_train_beside_gradients_10_000_times_larger(
    name: str, options: dict[str, Any], world_size: int
) -> None:
    """They train as with warmup_bits=32, but that zero_stage sends their changes in 4 bits."""
    plain = {key: value for key, value in options.items() if key != "zero_stage"}
    expected = run_ranks(world_size, train_beside_larger, name, {**plain, "warmup_bits": 32}, 1e-4)[0]
    results = run_ranks(world_size, train_beside_larger, name, {"warmup_bits": 4, **options}, 1e-4)
    for result in results:
        for key in ("norm", "head"):
            moved, by_32_bits = 1.0 - result["switch"][key], 1.0 - expected["switch"][key]
            assert abs(by_32_bits).max() > 1e-3
            tolerance = 1e-3 if "zero_stage" in options else 1e-6
            np.testing.assert_allclose(moved, by_32_bits, rtol=0, atol=tolerance)
            np.testing.assert_allclose(result["variances"][key], expected["variances"][key], rtol=0.1)
            assert abs(result["ends"][key] - result["switch"][key]).max() > 0
            assert result["ends"][key].tobytes() == results[0]["ends"][key].tobytes() or name == "ZeroOneAdam"
    (said,) = (line for line in results[0]["lines"] if "no variance" in line)
    assert "1 parameter tensor(s)" in said and "unused" in said
