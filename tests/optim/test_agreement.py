"""Agreement of the ranks in a compressed step, beside its messages: one small all-reduce, errors for all."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_compressopt
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.support.harness import run_ranks, run_ranks_expecting_error
from tests.support.logs import log_lines
from tests.support.memory import MIB, peak_beyond

OPTIONS: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 2},
    "ZeroOneAdam": {"var_freeze_step": 2, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4},
    "OnebitLamb": {"freeze_step": 2},
}


def optimizer_of(name: str, params: Any, **options: Any) -> Any:
    return getattr(hf_compressopt, name)(params, **{"lr": 0.01, "scale_block": 8, **OPTIONS[name], **options})


def draw(param: nn.Parameter, optimizer: Any, rank: int, step: int) -> None:
    seed = step if optimizer.plan.reduce_grads else 100 * step + rank + 1
    param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))


class Counting(TorchCommunicator):
    """The real thing, which also counts its all-reduces."""

    calls = 0

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Any:
        self.calls += 1
        return super().all_reduce(tensor, op=op)


# -- one small all-reduce ---------------------------------------------------------------------------------------------


def small_messages(rank: int, world_size: int, way: str) -> list[int]:
    """All-reduces of each of five steps; the first two are warmup."""
    param, other = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(3))
    communicator = Counting()
    options = {"max_grad_norm": 0.5} if way == "max_grad_norm" else {}
    optimizer = optimizer_of("OnebitAdam", [param, other], communicator=communicator, **options)
    scaler = hf_compressopt.GradScaler("cpu", init_scale=4.0) if "scaler" in way else None
    counts = []
    for step in range(5):
        draw(param, optimizer, rank, step)
        draw(other, optimizer, rank, step)
        before = communicator.calls
        if scaler is not None:
            scaler.scale(torch.ones(()))
            for p in (param, other):
                p.grad = p.grad * 4  # type: ignore[operator]
            scaler.unscale_(optimizer)
        if "clip" in way:
            optimizer.clip_grad_norm_(0.5, [param] if "part" in way else None)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        counts.append(communicator.calls - before)
    assert optimizer.metrics()["step"] == 5
    return counts


@pytest.mark.parametrize("way", ["plain", "clip", "clip a part", "max_grad_norm", "scaler", "scaler and clip"])
def test_a_compressed_step_takes_one_small_all_reduce(way: str) -> None:
    for counts in run_ranks(2, small_messages, way):
        assert counts == [0, 0, 1, 1, 1], way


def overflow_with_a_scaler(rank: int, world_size: int, clips: bool) -> tuple[list[float], float, Tensor]:
    """Rank 1 overflows in the compressed stage: all ranks skip that step, and halve the scale alike."""
    param = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of("OnebitAdam", [param])
    scaler = hf_compressopt.GradScaler("cpu", init_scale=4.0)
    scales = []
    for step in range(5):
        draw(param, optimizer, rank, step)
        scaler.scale(torch.ones(()))
        param.grad = param.grad * scaler.get_scale()  # type: ignore[operator]
        if step == 3 and rank == 1:
            param.grad[0] = torch.inf
        if clips:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, optimizer.metrics()["skipped_steps"], param.detach()


@pytest.mark.parametrize("clips", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_of_all_with_a_scaler(clips: bool) -> None:
    for scales, skipped, param in (results := run_ranks(2, overflow_with_a_scaler, clips)):
        assert scales == [4.0, 4.0, 4.0, 2.0, 2.0] and skipped == 1
        assert torch.equal(param, results[0][2])


def spoil_after_clipping(rank: int, world_size: int) -> tuple[float, Tensor]:
    """A rank whose gradient becomes infinite after all have agreed goes on without it, and nobody waits."""
    param = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of("OnebitAdam", [param])
    for step in range(5):
        draw(param, optimizer, rank, step)
        optimizer.clip_grad_norm_(0.5)
        if step == 3 and rank == 1:
            param.grad[0] = torch.inf  # type: ignore[index]
        optimizer.step()
    return optimizer.metrics()["step"], param.detach()


def test_a_gradient_that_is_spoilt_after_clipping_hangs_nobody() -> None:
    (steps, first), (_, second) = run_ranks(2, spoil_after_clipping, timeout=30)
    assert steps == 5 and torch.equal(first, second) and bool(first.isfinite().all())


# -- gradients that are averaged already ------------------------------------------------------------------------------


def alike_gradients(rank: int, world_size: int, name: str, alike: bool) -> list[str]:
    with log_lines() as lines:
        param = nn.Parameter(torch.ones(40))
        optimizer = optimizer_of(name, [param])
        for step in range(6):
            draw(param, optimizer, 0 if alike else rank, step)
            optimizer.step()
    return [line for line in lines if "averaged already" in line]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_that_are_averaged_already_are_noticed_once(name: str) -> None:
    first, second = run_ranks(2, alike_gradients, name, True)
    assert len(first) == 1 and second == []
    assert all(word in first[0] for word in ("attach_ddp", "hf_compressopt.auto", "CompressOptAccelerator"))
    assert run_ranks(2, alike_gradients, name, False) == [[], []]
    assert run_ranks(1, alike_gradients, name, True) == [[]]


# -- hyperparameters that differ --------------------------------------------------------------------------------------


def different_rates(rank: int, world_size: int, name: str, at: int, value: dict[str, Any]) -> None:
    param = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of(name, [param])
    for step in range(12):
        if step == at and rank == 1:
            optimizer.param_groups[0].update(value)
        draw(param, optimizer, rank, step)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_ranks_with_different_hyperparameters_fail_together(name: str, at: int) -> None:
    values: list[dict[str, Any]] = [{"lr": 0.0}]
    values += [{"lr": 0.005}, {"betas": (0.8, 0.999)}, {"weight_decay": 0.1}] if name == "OnebitAdam" else []
    for value in values:
        errors = run_ranks_expecting_error(2, different_rates, name, at, value, timeout=30)
        for text in errors.values():
            assert text.startswith("ValueError: ranks [1] differ from rank 0 in the hyperparameters"), text


# -- parameters that differ at the switch -----------------------------------------------------------------------------


def differ_at_the_switch(rank: int, world_size: int, name: str, relative: float) -> tuple[Tensor, list[str]]:
    """Rank 1's warmup is another one by this much; an expert that only rank 1 holds is nobody else's matter."""
    own = [dist.new_group([r]) for r in range(world_size)][rank]
    param = nn.Parameter(torch.randn(7, 9, generator=torch.Generator().manual_seed(1)).t())
    expert = nn.Parameter(torch.ones(3 + rank))
    optimizer = optimizer_of(name, [{"params": [param]}, {"params": [expert], "process_group": own}])
    with log_lines() as lines:
        for step in range(6):
            draw(param, optimizer, rank, step)
            draw(expert, optimizer, rank, step)
            if step == 1 and rank == 1:
                with torch.no_grad():
                    param.mul_(1 + relative)
            optimizer.step()
    if name == "ZeroOneAdam":
        optimizer.settle_parameters()
    return param.detach(), [line for line in lines if "differ by rounding" in line]


@pytest.mark.parametrize("name", OPTIONS)
def test_rounding_differences_are_mended_at_the_switch_and_larger_ones_refused(name: str) -> None:
    (first, told), (second, nothing) = run_ranks(2, differ_at_the_switch, name, 3e-7)
    assert torch.equal(first, second) and len(told) == 1 and nothing == []
    for text in run_ranks_expecting_error(2, differ_at_the_switch, name, 1e-4).values():
        assert "differ by more than rounding at the end of the warmup stage" in text, text


# -- memory -----------------------------------------------------------------------------------------------------------

NUMEL = 12 * MIB  # one tensor of 48 MiB
MOST = 16  # MiB, a third of it: buckets under way, parts of which a wider copy is made, and what the allocator keeps


def peaks_of_first_steps(rank: int, world_size: int, name: str) -> list[float]:
    """Of the first step, the switch, and the first compressed step, on the kernels' own path in the warmup stage."""
    param = nn.Parameter(torch.ones(NUMEL))
    grad = torch.full_like(param, 0.01)
    fused = {"fused_warmup": True} if name == "OnebitAdam" else {}
    optimizer = optimizer_of(name, [param], bucket_cap_mb=1, scale_block=4096, **fused)
    param.grad = grad
    peaks = []
    for _ in range(3):
        peaks.append(peak_beyond(optimizer.step))
    return peaks


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize("name", ["OnebitAdam", pytest.param("ZeroOneAdam", marks=pytest.mark.full)])
def test_the_first_steps_and_the_switch_take_no_copy_of_a_large_tensor(name: str) -> None:
    for peaks in run_ranks(2, peaks_of_first_steps, name, timeout=120):
        assert max(peaks) <= MOST, peaks


def different_coefficients(rank: int, world_size: int) -> tuple[list[Tensor], int]:
    """Ranks whose sums are rounded otherwise have other LAMB coefficients at the switch: all take rank 0's."""
    params = [nn.Parameter(torch.randn(9, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    optimizer = optimizer_of("OnebitLamb", params)
    with log_lines() as lines:
        for step in range(6):
            for param in params:
                draw(param, optimizer, rank, step)
            if step == 2 and rank == 1:
                for param in params:
                    optimizer.state[param]["scaling_coeff"] *= 1 + 2e-7
            optimizer.step()
    return [param.detach() for param in params], sum("differ by rounding" in line for line in lines)


def test_coefficients_that_differ_by_rounding_are_mended_at_the_switch() -> None:
    (first, told), (second, _) = run_ranks(2, different_coefficients)
    assert told == 1 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def join(rank: int, world_size: int, name: str) -> None:
    from torch.distributed.algorithms import Join

    optimizer = optimizer_of(name, [nn.Parameter(torch.ones(9))])
    with Join([optimizer]):  # type: ignore[list-item]
        pass


@pytest.mark.parametrize("name", OPTIONS)
def test_uneven_inputs_are_refused(name: str) -> None:
    for text in run_ranks_expecting_error(2, join, name).values():
        assert text.startswith(f"ValueError: {name} does not support uneven inputs") and "drop_last=True" in text
