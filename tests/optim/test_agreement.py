"""Agreement of the ranks beside their messages: one small all-reduce, errors for all, and steps that all skip."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join

import hf_compressopt
from hf_compressopt import OnebitAdam
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from hf_compressopt.optim import gradients
from hf_compressopt.optim.agreement import DRIFT_INTERVAL
from tests.support.ddp_runs import CLIP, STEPS, attached, end_step, loss_of, scaler_of, tensors_of
from tests.support.ddp_runs import make as make_model
from tests.support.family import FAMILY, draw, go_on, make, optimizer_of
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.logs import log_lines


class Counting(TorchCommunicator):
    """The real thing, which also counts its all-reduces."""

    calls = 0

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Any:
        self.calls += 1
        return super().all_reduce(tensor, op=op)


# -- one small all-reduce ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "clip", "clip a part", "max_grad_norm", "scaler", "scaler and clip"])
@on_ranks(2)
def test_a_compressed_step_takes_one_small_all_reduce(rank: int, world_size: int, way: str) -> None:
    """Beside the two warmup steps, which take none."""
    params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(3))]
    communicator = Counting()
    options = {"max_grad_norm": 0.5} if way == "max_grad_norm" else {}
    optimizer = optimizer_of("OnebitAdam", params, communicator=communicator, **options)
    scaler = hf_compressopt.GradScaler("cpu", init_scale=4.0, enabled="scaler" in way)
    counts = []
    for step in range(5):
        draw(params, optimizer, rank, step)
        before = communicator.calls
        scaler.scale(torch.ones(()))
        for p in params:
            p.grad = p.grad * scaler.get_scale()  # type: ignore[operator]
        scaler.unscale_(optimizer)
        if "clip" in way:
            optimizer.clip_grad_norm_(0.5, params[:1] if "part" in way else None)
        scaler.step(optimizer)
        scaler.update()
        counts.append(communicator.calls - before)
    assert counts == [0, 0, 1, 1, 1] and optimizer.metrics()["step"] == 5


@on_ranks(2, timeout=30)
def test_a_gradient_that_is_spoilt_after_clipping_hangs_nobody(rank: int, world_size: int) -> None:
    param = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of("OnebitAdam", [param])
    for step in range(5):
        draw([param], optimizer, rank, step)
        optimizer.clip_grad_norm_(0.5)
        if step == 3 and rank == 1:
            param.grad[0] = torch.inf  # type: ignore[index]
        optimizer.step()
    assert optimizer.metrics()["step"] == 5 and same_on_all_ranks([param]) and bool(param.isfinite().all())


# -- gradients that are averaged already ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(("world_size", "alike"), [(2, True), (2, False), (1, True)])
@on_ranks()
def test_gradients_that_are_averaged_already_are_noticed_once(
    rank: int, world_size: int, name: str, alike: bool
) -> None:
    param = nn.Parameter(torch.ones(40))
    with log_lines() as lines:
        optimizer = optimizer_of(name, [param])
        for step in range(6):
            draw([param], optimizer, 0 if alike else rank, step)
            optimizer.step()
    said = [line for line in lines if "averaged already" in line]
    assert len(said) == (alike and world_size > 1 and rank == 0)
    for word in ("attach_ddp", "hf_compressopt.auto", "CompressOptAccelerator"):
        assert all(word in line for line in said)


@on_ranks(2)
def test_gradients_computed_in_bfloat16_are_told_apart(rank: int, world_size: int) -> None:
    """Of such values the low 16 bits are 0, and here the 20 of both ranks are the same."""
    param = nn.Parameter(torch.ones(40))
    with log_lines() as lines:
        optimizer = optimizer_of("OnebitAdam", [param])
        for _ in range(6):
            param.grad = torch.full((40,), 1.0 if optimizer.plan.reduce_grads else 1.0 + rank)
            param.grad[0] = 1.0078125
            optimizer.step()
    assert not any("averaged already" in line for line in lines)


# -- hyperparameters that differ --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("at", [0, 1, 4])
@on_ranks(2, timeout=30)
def test_ranks_with_different_hyperparameters_fail_together(rank: int, world_size: int, name: str, at: int) -> None:
    values: list[dict[str, Any]] = [{"lr": 0.0}]
    values += [{"lr": 0.005}, {"betas": (0.8, 0.999)}, {"weight_decay": 0.1}] if name == "OnebitAdam" else []
    for value in values:
        param = nn.Parameter(torch.ones(40))
        optimizer = optimizer_of(name, [param])
        with pytest.raises(ValueError, match=r"^ranks \[1\] differ from rank 0 in the hyperparameters"):
            for step in range(12):
                if step == at and rank == 1:
                    optimizer.param_groups[0].update(value)
                draw([param], optimizer, rank, step)
                optimizer.step()


@pytest.mark.parametrize("bits", [4, 32])
@on_ranks(2, timeout=30)
def test_a_learning_rate_of_one_ranks_own_is_an_error_on_all_in_the_warmup_too(
    rank: int, world_size: int, bits: int
) -> None:
    """As of a scheduler that looks at each rank's own loss: replicas would drift apart up to the switch."""
    for hooked in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(40, 40)
        optimizer = hf_compressopt.OnebitAdam(model.parameters(), lr=1e-2, freeze_step=100, warmup_bits=bits)
        forward: Any = model
        if hooked:
            forward = nn.parallel.DistributedDataParallel(model)
            hf_compressopt.attach_ddp(forward, optimizer)
        with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0 in the hyperparameters"):
            for step in range(9):
                forward(torch.randn(2, 40)).square().sum().backward()
                if not hooked:
                    hf_compressopt.average_gradients(optimizer)
                optimizer.step()
                optimizer.zero_grad()
                if step == 4 and rank == 1:
                    optimizer.param_groups[0]["lr"] = 1e-3
        assert step == 5


@on_ranks(2)
def test_a_gradient_scaler_that_decides_on_each_rank_alone_is_refused(rank: int, world_size: int) -> None:
    param = nn.Parameter(torch.ones(20))
    optimizer = hf_compressopt.OnebitAdam([param], freeze_step=1)
    for stock in (True, False):
        scaler = (torch.amp if stock else hf_compressopt).GradScaler("cpu", init_scale=4.0)
        param.grad = torch.ones(20)
        scaler.scale(torch.ones(()))
        with pytest.raises(ValueError, match="use hf_compressopt.GradScaler") if stock else nullcontext():
            scaler.step(optimizer)
    assert optimizer.metrics()["step"] == 1


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb"])
@on_ranks(2, timeout=30)
def test_a_step_that_has_failed_leaves_nothing_behind(rank: int, world_size: int, name: str) -> None:
    """Tried again with the same gradients it fails again; later gradients are looked at anew."""
    param = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of(name, [param])
    for step in range(3):  # the next one is compressed
        draw([param], optimizer, rank, step)
        optimizer.step()
    draw([param], optimizer, rank, 3)
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^ranks \[1\] differ from rank 0 in the hyperparameters"):
            optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    before = param.detach().clone()
    param.grad = torch.full((40,), float("nan") if rank else 1.0)
    optimizer.step()
    assert optimizer.step_was_skipped and torch.equal(param.detach(), before)


def refused(optimizer: Any, params: Any, rank: int, steps: int, said: str, at: Callable[[int], None]) -> int:
    """The step, counted from 0, in which all ranks raise an error that says so; ``at`` is called before each."""
    with pytest.raises((ValueError, RuntimeError), match=said):
        for step in range(steps):
            at(step)
            draw(params, optimizer, rank, step)
            optimizer.step()
    return step


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2, timeout=30)
def test_ranks_with_other_parameters_fail_together(rank: int, world_size: int, name: str) -> None:
    first, second = ("a", nn.Parameter(torch.ones(5, 8))), ("b", nn.Parameter(torch.ones(8, 5)))
    mask = torch.ones(5, 8)
    mask[0, 0] = rank
    others: list[tuple[Any, Any, str]] = [
        ([first, second], [second, first], r"rank 1 has b \[8, 5\] .*rank 0 a \[5, 8\]"),
        ([first], [("c", first[1])], r"rank 1 has c \[5, 8\] .*rank 0 a"),
        ([first[1]], [second[1]], r"rank 1 has .*\[8, 5\] .*rank 0 .*\[5, 8\]"),
        ([first[1]], [first[1], second[1]], r"rank 1 has .*\[8, 5\] .*rank 0 no further parameter"),
        *([([{"params": [first[1]], "exp_avg_mask": mask}],) * 2 + ("exp_avg_mask",)]),
    ]
    for on_first, on_second, said in others:
        params = (on_first, on_second)[rank]
        optimizer = optimizer_of(name, params)
        trained = optimizer.trainable_parameters
        assert refused(optimizer, trained, rank, 1, f"ranks differ in the names.*{said}", lambda step: None) == 0


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2, timeout=30)
def test_a_parameter_that_is_frozen_on_one_rank_is_an_error_on_all(rank: int, world_size: int, name: str) -> None:
    params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(8))]
    optimizer = optimizer_of(name, [("a", params[0]), ("b", params[1])])
    said = r"^b does not require a gradient on ranks \[1\] only"
    at = refused(optimizer, params, rank, 8, said, lambda step: params[1].requires_grad_(step < 4 or rank == 0))
    assert at == (5 if name == "ZeroOneAdam" else 4)  # the next sync


@pytest.mark.parametrize(
    ("name", "options", "when", "at"),
    [
        ("OnebitAdam", {}, 1, 2),  # the switch: no message of this package comes before it
        ("OnebitLamb", {}, 1, 2),
        ("OnebitAdam", {"zero_stage": 1}, 1, 1),
        ("OnebitAdam", {}, 4, 4),
        ("OnebitAdam", {"clip": "late"}, 4, 4),
        ("ZeroOneAdam", {}, 1, 2),
    ],
)
@on_ranks(2, timeout=30)
def test_a_param_group_that_one_rank_adds_is_an_error_on_all(
    rank: int, world_size: int, name: str, options: dict[str, Any], when: int, at: int
) -> None:
    params = [nn.Parameter(torch.ones(40))]
    optimizer = optimizer_of(name, params, **options)

    def add(step: int) -> None:
        if step == when and rank == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "non_freeze": when == 4})

    assert refused(optimizer, params, rank, 6, "the number of their param groups", add) == at


@pytest.mark.parametrize("entry", ["loop", "loop, 32 bits", "DDP", "zero_stage=2", "ZeroOptimizer"])
@on_ranks(2, timeout=30)
def test_a_param_group_that_one_rank_adds_is_noticed_in_the_next_pass(rank: int, world_size: int, entry: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 3)
    options: dict[str, Any] = {"zero_stage": 2} if entry == "zero_stage=2" else {}
    if entry == "ZeroOptimizer":
        optimizer: Any = hf_compressopt.ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        bits = 32 if "32" in entry else 4
        optimizer = hf_compressopt.OnebitAdam(model.parameters(), lr=1e-2, freeze_step=9, warmup_bits=bits, **options)
    forward: Any = model
    if entry == "DDP":
        forward = nn.parallel.DistributedDataParallel(model)
        hf_compressopt.attach_ddp(forward, optimizer)
    with pytest.raises(RuntimeError, match=r"rank 0 is in pass 1 .*; rank 1 .* of 3 parameters.*add_param_group"):
        for step in range(4):
            if step == 2 and rank == 1:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            forward(torch.randn(2, 40)).square().sum().backward()
            if "loop" in entry:
                hf_compressopt.average_gradients(optimizer)
            optimizer.step()
    assert step == 2


@on_ranks(2, timeout=30)
def test_a_parameter_that_one_rank_freezes_in_the_warmup_is_noticed_in_the_next_pass(
    rank: int, world_size: int
) -> None:
    for hooked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3))
        optimizer = hf_compressopt.OnebitAdam(model.parameters(), lr=1e-2, freeze_step=9)
        forward: Any = model
        if hooked:
            forward = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            hf_compressopt.attach_ddp(forward, optimizer)
        with pytest.raises(RuntimeError, match=r"rank 0 is in pass 1 of 4 parameters .*; rank 1 .* of 2 parameters"):
            for step in range(4):
                if step == 2 and rank == 1:
                    model[1].requires_grad_(False)
                forward(torch.randn(2, 40)).square().sum().backward()
                if not hooked:
                    hf_compressopt.average_gradients(optimizer)
                optimizer.step()
                optimizer.zero_grad()
        assert step == 2


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2, timeout=30)
def test_a_mask_that_one_rank_replaces_is_an_error_on_all(rank: int, world_size: int, name: str) -> None:
    params = [nn.Parameter(torch.ones(600))]
    mask = torch.ones(600)
    optimizer = optimizer_of(name, params)
    optimizer.param_groups[0]["exp_avg_mask"] = mask

    def change(step: int) -> None:
        if step == 5 and rank == 1:
            optimizer.param_groups[0]["exp_avg_mask"] = torch.cat([mask[:300], torch.zeros(300)])

    assert refused(optimizer, params, rank, 40, "exp_avg_mask", change) < 39


@on_ranks(2)
def test_a_param_group_that_all_ranks_add_is_compared_with_the_next_small_message(rank: int, world_size: int) -> None:
    for unlike in (0, 1):
        params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(3) + unlike * rank)]
        optimizer = optimizer_of("OnebitAdam", params[:1])
        go = partial(draw, params[:1], optimizer, rank)
        for step in range(4):
            go(step)
            optimizer.step()
        optimizer.add_param_group({"params": params[1:], "non_freeze": True})
        draw(params, optimizer, rank, 4)
        with pytest.raises(ValueError, match="a new param group alike") if unlike else nullcontext():
            optimizer.step()
        assert unlike or same_on_all_ranks(params)


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2)
def test_parameters_that_drift_apart_are_noticed(rank: int, world_size: int, name: str) -> None:
    """Such as those that code prunes on each rank by its own gradients. No step sends more."""
    params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(8))]
    communicator = Counting()
    named = [("a", params[0]), ("b", params[1])]
    optimizer = optimizer_of(name, named, communicator=communicator, variance_interval=0)  # refreshes send more
    counts = []
    for step in range(2 * DRIFT_INTERVAL):
        draw(params, optimizer, rank, step)
        before = communicator.calls
        if step == DRIFT_INTERVAL + 40 and rank == 1:
            with torch.no_grad():
                values = optimizer.state[params[1]]["anchor"] if name == "ZeroOneAdam" else params[1]
                values[3] = 0.0
        if step == 2 * DRIFT_INTERVAL - 1:
            with pytest.raises(ValueError, match=r"^step 512: .*have drifted apart: 1 of 2 differ \(b\).*AdaLoRA"):
                optimizer.step()
        else:
            optimizer.step()
            counts.append(communicator.calls - before)
    assert counts[DRIFT_INTERVAL - 1] == counts[DRIFT_INTERVAL + 3]


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2)
def test_parameters_that_drift_apart_by_rounding_are_mended(rank: int, world_size: int, name: str) -> None:
    """As on unlike devices; a transposed one too."""
    params = [nn.Parameter(torch.ones(7, 9).t()), nn.Parameter(torch.ones(8))]
    optimizer = optimizer_of(name, [("a", params[0]), ("b", params[1])])
    with log_lines() as lines:
        for step in range(DRIFT_INTERVAL):
            draw(params, optimizer, rank, step)
            if step == 40 and rank == 1:
                with torch.no_grad():
                    (optimizer.state[params[0]]["anchor"] if name == "ZeroOneAdam" else params[0]).mul_(1 + 3e-7)
            optimizer.step()
    said = "step 256: parameters of the ranks differ by rounding (unlike devices?): all take those of rank 0: a"
    assert same_on_all_ranks(params) and lines.count(said) == (rank == 0)


@pytest.mark.parametrize(("numel", "size"), [(100_000, 1e17), (40, 1e30)])
@on_ranks(2)
def test_gradients_whose_norm_is_too_large_are_clipped_or_skipped(
    rank: int, world_size: int, numel: int, size: float
) -> None:
    """Beyond 1.8e19 the square of a norm is no float32 number."""
    rows: list[tuple[str, dict[str, Any]]] = [
        *(("OnebitAdam", options) for options in ({"max_grad_norm": 1.0}, {"clip": "local"}, {"clip": "late"})),
        *(("OnebitAdam", {"zero_stage": 1}), ("OnebitAdam", {}), ("ZeroOneAdam", {}), ("OnebitLamb", {})),
    ]
    for name, options in rows:
        param = nn.Parameter(torch.ones(numel))
        optimizer, alone = optimizer_of(name, [param], **options), name == "ZeroOneAdam"  # whose ranks step alone then
        for step in range(6):
            draw([param], optimizer, rank, step)
            if step == 4:
                param.grad.mul_(size)  # type: ignore[union-attr]
            if "max_grad_norm" not in options:
                optimizer.clip_grad_norm_(1.0)
            before = param.detach().clone()
            optimizer.step()
            assert (param.detach() - before).abs().max() < 1
            assert alone or same_on_all_ranks([param])
        assert optimizer.metrics()["skipped_steps"] == (not alone and options.get("clip") != "local")


@on_ranks(2, timeout=30)
def test_ranks_that_clip_to_other_norms_fail_together(rank: int, world_size: int) -> None:
    param = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of("OnebitAdam", [param])
    for step in range(4):
        draw([param], optimizer, rank, step)
        if step == 3:
            with pytest.raises(ValueError, match=r"^ranks \[1\] differ from rank 0 in the norm to which they clip"):
                optimizer.clip_grad_norm_(1.0 + rank)
        else:
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()


@pytest.mark.parametrize("option", [("clip", "local", "sketch"), ("zero_stage", 0, 1)])
@on_ranks(2, timeout=30)
def test_ranks_with_different_options_fail_together(rank: int, world_size: int, option: tuple[Any, ...]) -> None:
    name, *values = option
    params, optimizer = make(rank, 0, **{name: values[rank]})
    with pytest.raises(ValueError, match=r"^ranks \[1\] differ from rank 0"):
        go_on(rank, params, optimizer, range(1))


# -- parameters that differ at the switch -----------------------------------------------------------------------------


def differ_at_the_switch(rank: int, world_size: int, name: str, what: str, relative: float) -> tuple[Tensor, list[str]]:
    """Rank 1's warmup is another one by this much; an expert that only rank 1 holds is nobody else's matter."""
    own = [dist.new_group([r]) for r in range(world_size)][rank]
    param = nn.Parameter(torch.randn(7, 9, generator=torch.Generator().manual_seed(1)).t())
    expert = nn.Parameter(torch.ones(3 + rank))
    optimizer = optimizer_of(name, [{"params": [param]}, {"params": [expert], "process_group": own}])
    with log_lines() as lines:
        for step in range(6):
            draw([param, expert], optimizer, rank, step)
            if rank == 1 and step == (1 if what == "param" else 2):
                with torch.no_grad():
                    {"param": param, **optimizer.state[param]}[what].mul_(1 + relative)
            optimizer.step()
    if name == "ZeroOneAdam":
        optimizer.settle_parameters()
    return param, [line for line in lines if "differ by rounding" in line]


@pytest.mark.parametrize(("name", "what"), [*((name, "param") for name in FAMILY), ("OnebitLamb", "scaling_coeff")])
@on_ranks(2)
def test_rounding_differences_are_mended_at_the_switch_and_larger_ones_refused(
    rank: int, world_size: int, name: str, what: str
) -> None:
    param, told = differ_at_the_switch(rank, world_size, name, what, 3e-7)
    assert same_on_all_ranks([param]) and len(told) == (rank == 0)
    with pytest.raises(ValueError, match="differ by more than rounding at the end of the warmup stage"):
        differ_at_the_switch(rank, world_size, name, what, 1e-4)


@pytest.mark.parametrize("name", FAMILY)
@on_ranks(2)
def test_uneven_inputs_are_refused(rank: int, world_size: int, name: str) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(9, 1))
    optimizer = optimizer_of(name, model.parameters())
    hf_compressopt.attach_ddp(model, optimizer)
    for joined in (optimizer, model):
        with pytest.raises(ValueError, match=f"^{name} does not support uneven inputs.*drop_last=True"):
            with Join([joined]):
                pass


@on_ranks(2)
def test_adalora_which_prunes_by_gradients_after_a_step_is_refused(rank: int, world_size: int) -> None:
    adapted = nn.Linear(9, 1)
    adapted.peft_config = {"default": SimpleNamespace(peft_type="ADALORA")}  # type: ignore[assignment]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(adapted))
    with pytest.raises(ValueError, match="^AdaLoRA prunes by p.grad .*int4"):
        hf_compressopt.attach_ddp(model, optimizer_of("OnebitAdam", model.parameters()))


@pytest.mark.parametrize("options", [{"warmup_bits": 32}, {"zero_stage": 1}, {"bucket_cap_mb": 1.0}])
@on_ranks(2, timeout=30)
def test_other_options_on_a_rank_are_an_error_on_all_before_the_first_message(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    for with_ddp in (True, False):
        model: nn.Module = nn.Linear(9, 1)
        if with_ddp:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = optimizer_of("OnebitAdam", model.parameters(), **(options if rank == 1 else {}))
        if isinstance(model, nn.parallel.DistributedDataParallel):
            hf_compressopt.attach_ddp(model, optimizer)
        with pytest.raises(
            ValueError, match=r"^ranks \[1\] differ from rank 0 in the optimizer, its step or its options"
        ):
            model(torch.ones(2, 9)).sum().backward()
            hf_compressopt.average_gradients(optimizer)


@pytest.mark.parametrize("clip", ["", "clip"])
@pytest.mark.parametrize("given", [False, True])
@on_ranks(2, timeout=30)
def test_a_bad_gradient_in_a_local_step_is_an_error_on_all_at_the_sync(
    rank: int, world_size: int, clip: str, given: bool
) -> None:
    param = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of("ZeroOneAdam", [("a", param)])  # steps 7 and 8 of 8: the second is a sync
    with log_lines() as lines:
        for step in range(8):
            draw([param], optimizer, rank, step)
            grads = [param.grad]
            if step == 6 and rank == 1 and given:
                grads = [torch.ones(3)]
            elif step == 6 and rank == 1:
                param.grad = torch.ones(40).to_sparse()
            if clip:
                optimizer.clip_grad_norm_(0.5)
            if step < 7:
                optimizer.step(grads=grads if given else None)
        before = param.detach().clone()
        said = "the gradient of a " if rank else "1 other rank"
        with pytest.raises((TypeError, ValueError) if rank else RuntimeError, match=said):
            optimizer.step(grads=grads if given else None)
    assert torch.equal(param, before) and optimizer.metrics()["step"] == 7
    assert sum("cannot use its gradients; it steps with its momentum" in line for line in lines) == rank


@pytest.mark.parametrize("clip", ["", "clip"])
@on_ranks(2, timeout=30)
def test_gradients_that_one_rank_drops_under_zero_are_an_error_on_all(rank: int, world_size: int, clip: str) -> None:
    """In the warmup stage, and after it."""
    for at in (1, 4):
        torch.manual_seed(0)
        model = nn.Linear(40, 3)
        optimizer = optimizer_of("OnebitAdam", model.parameters(), zero_stage=2)
        for step in range(at + 1):
            model(torch.randn(2, 40)).square().sum().backward()
            if clip and step < at:
                optimizer.clip_grad_norm_(0.5)
            if step < at:
                optimizer.step()
                optimizer.zero_grad()
        if rank == 1:
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"rank 1 takes a step after 1 pass.*1 of them thrown away by zero_grad"):
            if clip:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()


# -- a gradient that is not finite on one rank: all ranks skip the step, and it leaves no trace ------------------------

#: The number of ranks, and options of the optimizer.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "4 bits": (3, {}),
    "one rank": (1, {}),
    "32 bits, mixed": (3, {"warmup_bits": 32, "mixed": True}),
    "8 bits, float32": (2, {"warmup_bits": 8, "form": "float32"}),
    "clipped": (2, {"max_grad_norm": CLIP}),
    "clipped locally": (2, {"max_grad_norm": CLIP, "clip": "local"}),
    "late": (2, {"clip": "late", "max_grad_norm": CLIP}),
    "late, float32": (2, {"clip": "late", "max_grad_norm": CLIP, "form": "float32"}),
    "zero_stage=1": (3, {"zero_stage": 1, "max_grad_norm": CLIP}),
    "zero_stage=2": (2, {"zero_stage": 2, "max_grad_norm": CLIP}),
    "nodes": (4, {"node_size": 2}),
    "nodes, late": (4, {"node_size": 2, "clip": "late"}),
    "lamb": (2, {"name": "OnebitLamb"}),
    # a group in full precision, by which the ranks agree in local steps too; the eighth step is a sync
    "zero-one": (2, {"name": "ZeroOneAdam", "mixed": True, **FAMILY["ZeroOneAdam"]}),
}
BAD = (1, 6)  # a step of each stage
HOW = ("nan in the loss", "nan in the loss, mended", "inf in a gradient", "scaler", "scaler and clip_grad_norm_")


def can_be(name: str, how: str) -> bool:
    """Messages that have left with a NaN are known although the gradients are mended; ZeRO's are gone by then."""
    _, options = RUNS[name]
    return options.get("clip") == "late" if "mended" in how else options.get("zero_stage") != 2 or "gradient" not in how


def bytes_of(net: torch.nn.Module, optimizer: Any) -> list[bytes]:
    found = tensors_of(net, optimizer)
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in found if tensor.numel()]


def train(rank: int, world_size: int, options: dict[str, Any], how: str, bad_steps: tuple[int, ...]) -> list[bytes]:
    scaler = scaler_of(64.0, how.startswith("scaler"))
    if options.get("zero_stage") == 2:
        net, optimizer = make_model(**options)
        model: Any = net
    else:
        model, net, optimizer = attached(loss_scale=scaler.get_scale, **options)
    for step in range(STEPS):
        for bad in (True, False) if step in bad_steps else (False,):
            before = bytes_of(net, optimizer)
            loss = scaler.scale(loss_of(model, rank, step))
            last = bad and rank == world_size - 1
            (loss * math.nan if last and "gradient" not in how else loss).backward()
            for p in net.parameters() if bad and "mended" in how else ():
                if p.grad is not None:
                    p.grad.nan_to_num_()
            if last and "gradient" in how:
                next(p for p in net.parameters() if p.grad is not None).grad.view(-1)[0] = math.inf
            if "clip" in how:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(CLIP)
            scale = scaler.get_scale()
            end_step(optimizer, scaler)
            assert (bytes_of(net, optimizer) == before) == optimizer.step_was_skipped == bad, step
            assert not scaler.is_enabled() or scaler.get_scale() == (scale / 2 if bad else scale)
    assert optimizer.metrics()["skipped_steps"] == len(bad_steps) and same_on_all_ranks(net.parameters())
    return bytes_of(net, optimizer)


@pytest.mark.invariant(13, 30)
@pytest.mark.parametrize(("name", "how"), [pair for pair in product(RUNS, HOW) if can_be(*pair)])
def test_all_ranks_skip_the_step_and_go_on_as_if_it_had_not_been(name: str, how: str) -> None:
    ranks, options = RUNS[name]
    bad = BAD[1:] if "gradient" in how or "mended" in how else BAD  # in the warmup stage they are averaged by then
    spoilt, well = (run_ranks(ranks, train, options, how, steps, timeout=120) for steps in (bad, ()))
    assert spoilt == well


@on_ranks(2)
def test_gradients_are_checked_once_between_clipping_and_the_step(rank: int, world_size: int) -> None:
    """What clipping has found counts in the step, unless somebody has written to a gradient since."""
    params = [torch.nn.Parameter(torch.ones(40, 40)) for _ in range(3)]
    optimizer = OnebitAdam(params, lr=1e-3, freeze_step=1, warmup_bits=32)
    checks, messages = list[int](), list[int]()
    find_fault, agree = gradients.find_fault, TorchCommunicator.sum_and_compare

    def counted(*of: Any) -> Exception | None:
        checks.append(1)
        return find_fault(*of)

    def sent(*of: Any, **more: Any) -> Any:
        messages.append(1)
        return agree(*of, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "find_fault", counted)
        patch.setattr(TorchCommunicator, "sum_and_compare", sent)
        for step, written in enumerate((False, False, False, True)):
            for number, param in enumerate(params):
                param.grad = torch.full((40, 40), 1.0 + (rank + number) * (step > 0))
            checks.clear()
            messages.clear()
            optimizer.clip_grad_norm_(1.0)
            if written:
                params[0].grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()
            assert len(checks) == 1 + written, "one param group"
            assert len(messages) == (step > 0), "averaged gradients need none"
