"""Gradients in ZeroOptimizer: graphs of all kinds, faults, overlap, memory, groups."""

import copy
import os
import pickle
import time
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from hf_compressopt import GradScaler, ZeroOptimizer
from hf_compressopt.collectives import exchange
from hf_compressopt.collectives.feedback import values_of
from hf_compressopt.flat import FLOAT_BYTES
from tests.support.family import through_a_file
from tests.support.harness import (
    _pool,
    on_ranks,
    run_ranks,
    run_ranks_expecting_error,
    run_ranks_of_which_one_dies,
    same_on_all_ranks,
)
from tests.support.logs import log_lines
from tests.support.zero_runs import (
    INT4,
    Case,
    Net,
    bits,
    different,
    fresh,
    give_averages,
    loss_of,
    run_steps,
    train_plain,
    train_zero,
)


class Stack(nn.Module):
    """Linear layers; with `shared` all of them are one, as in ALBERT."""

    def __init__(self, layers: int = 6, width: int = 32, shared: bool = False, mode: str = "none") -> None:
        super().__init__()
        torch.manual_seed(2)
        made = [nn.Linear(width, width) for _ in range(1 if shared else layers)]
        self.layers = nn.ModuleList(made)
        self.order = [made[0 if shared else i] for i in range(layers)]
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            if self.mode == "none":
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(lambda y, f=layer: torch.tanh(f(y)), x, use_reentrant=self.mode == "reentrant")
        return x


def stack_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 32, generator=generator).requires_grad_()
    return model(x).square().mean()


def train_stack(rank: int, options: dict[str, Any], passes: int = 1, **model_options: Any) -> list[Tensor]:
    model = Stack(**model_options)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **options)
    for step in range(3):
        for number in range(passes):
            stack_loss(model, rank, 10 * step + number).backward()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    return bits(model)


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.full)])
@on_ranks()
def test_both_kinds_of_checkpointing(rank: int, world_size: int) -> None:
    for shared in (False, True):
        for passes in (1, 2):
            expected = train_stack(rank, {}, passes, shared=shared)
            for mode in ("reentrant", "non-reentrant"):
                for size in (64, 10**6):
                    options = {"reduce_bucket_size": size}
                    found = train_stack(rank, options, passes, shared=shared, mode=mode)
                    if shared and mode == "reentrant":  # portions are averaged one by one
                        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
                    else:
                        assert not list(different(found, expected)), (shared, passes, mode, size)


@on_ranks(2, 4)
def test_messages_leave_while_backward_runs_and_whole_gradients_never_exist(rank: int, world_size: int) -> None:
    model, bucket = Stack(layers=16), 2 * 32 * 33
    with mock.patch.object(exchange, "TOGETHER", 1):
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, reduce_bucket_size=bucket)
    reducer = optimizer.partition.reducer
    sent: list[int] = []
    alive: list[int] = []

    def look(_: Tensor) -> None:
        sent.append(sum(g.sent for g in reducer.slices))
        held = [p.grad for p in model.parameters()] + [t for g in reducer.slices for t in (g.buffer, g.average)]
        alive.append(sum(t.numel() for t in held if t is not None) + reducer.backward.tasks.nbytes // 2 // FLOAT_BYTES)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)  # after the optimizer's own
    for step in range(2):
        sent.clear()
        stack_loss(model, rank, step).backward()
        assert all(p.grad is None for p in model.parameters())
        assert sent[0] == 0 and sent[len(sent) // 2] > 0 and sent == sorted(sent)
        optimizer.step()
    total = sum(p.numel() for p in model.parameters())
    assert max(alive) <= total / world_size + 2 * bucket < total


@pytest.mark.invariant(13)
@on_ranks(2, 3)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int, world_size: int) -> None:
    case = Case(options={"reduce_bucket_size": 300, "loss_scale": "dynamic", "initial_loss_scale": 16.0})
    model, optimizer = train_zero(rank, case)
    before, state = bits(model), optimizer.get_full_state(model.first.weight, "exp_avg")
    for bad in (float("inf"), float("nan")):
        optimizer.backward(loss_of(model, rank, 5) * (bad if rank == 1 else 1.0))
        optimizer.step()
        assert optimizer.step_was_skipped and not list(different(before, bits(model)))
        assert torch.equal(state, optimizer.get_full_state(model.first.weight, "exp_avg"))
    assert optimizer.loss_scale.value == 4.0 and optimizer.skipped_steps == 2 and optimizer.steps == case.steps
    run_steps(rank, case, model, optimizer, range(3, 4))
    assert not optimizer.step_was_skipped
    whole, _ = train_zero(rank, Case(options=case.options, steps=4))
    torch.testing.assert_close(bits(whole), bits(model), rtol=0, atol=0)


@on_ranks(2)
def test_torchs_gradient_scaler(rank: int, world_size: int) -> None:
    model, optimizer = fresh(Case())
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(4):
        bad = float("inf") if (rank, step) == (0, 3) else 1.0
        scaler.scale(loss_of(model, rank, step) * bad).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.step_was_skipped == (step == 3)
        model.zero_grad()
    assert scaler.get_scale() == 512.0
    plain, _ = train_plain(rank, Case(clip=0.1))
    assert not list(different(bits(plain), bits(model)))


def stop(grad: Tensor) -> Tensor:
    raise ArithmeticError("this rank stops")


def faulty(rank: int, world_size: int, kind: str) -> None:
    torch.manual_seed(rank if kind == "values" else 0)
    model: nn.Module = nn.Linear(32 + rank * (kind == "sizes"), 5)
    x = torch.ones(1, 32 + rank * (kind == "sizes"))
    options: dict[str, Any] = {"reduce_bucket_size": 64}
    if kind == "sparse":
        model, x = nn.Embedding(10, 4, sparse=rank == 1), torch.tensor([1, 2])
    elif kind == "raises":
        model = Stack()
        if rank == 1:
            model.layers[2].weight.register_hook(stop)
    elif kind == "messages":
        options["grad_compression" if rank else "param_compression"] = "int4"
    model.requires_grad_(kind != "unfrozen")
    params = [*model.parameters(), nn.Parameter(torch.ones(3))]
    optimizer = ZeroOptimizer(params, torch.optim.AdamW, **options)
    model.requires_grad_(kind != "unfrozen" or rank == 1)
    loss = model(x).sum()
    (loss + params[-1].sum() if kind == "unfrozen" else loss).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sparse", "sparse"),
        ("sizes", "differ"),
        ("values", "alike at the start"),
        ("messages", "rank 1 has grad_compression='int4', rank 0 grad_compression='none'"),
        ("unfrozen", "trainable parameters"),
        ("raises", ""),
    ],
)
def test_a_fault_on_one_rank_is_an_error_on_all(kind: str, message: str) -> None:
    start = time.monotonic()
    errors = run_ranks_expecting_error(2, faulty, kind, timeout=15.0)
    assert time.monotonic() - start < 14
    assert any(message in error for error in errors.values()), errors


#: What rank 1 has otherwise than rank 0, and what the error of both says.
UNLIKE = {
    "names": r"trainable parameters.* rank 1 has 1\.bias \[6\] torch.float32, rank 0 0\.bias",
    "order": r"trainable parameters.* rank 1 has 1\.weight \[6, 6\]",
    "one more": r"trainable parameters.* rank 1 has more \[3\]",
    "shape": r"trainable parameters.* rank 1 has 0\.weight \[36\] torch.float32, rank 0 0\.weight \[6, 6\]",
    "reduce_bucket_size": "rank 1 has reduce_bucket_size=8, rank 0 reduce_bucket_size=None",
    "postscale_gradients": "rank 1 has postscale_gradients=True",
    "lr": "rank 1 has param group 0 with {'lr': 0.5, .* rank 0 param group 0 with {'lr': 0.1, ",
    "weight_decay": "options or hyperparameters: rank 1 has param group 0",
    "betas": "options or hyperparameters: rank 1 has param group 0",
    "scheduler": "does each rank's scheduler see .* rank 1 has param group 0 with {'lr': 0.4,",
    "max_norm": r"rank 1 has clip_grad_norm_\(2.0\), rank 0 clip_grad_norm_\(1.0\)",
}


def unlike(rank: int, world_size: int, kind: str) -> None:
    """Parameters of one shape and equal bits, as at the start of many layers: only names tell the order."""
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with torch.no_grad():
        for p in layers.parameters():
            p.fill_(0.5)
    params = dict(layers.named_parameters())
    options: dict[str, Any] = {"lr": 0.1}
    if rank == 1:
        if kind in ("reduce_bucket_size", "postscale_gradients", "lr", "weight_decay"):
            options[kind] = {"reduce_bucket_size": 8, "postscale_gradients": True, "lr": 0.5, "weight_decay": 0.1}[kind]
        elif kind == "names":
            names = ["0.weight", "1.bias", "1.weight", "0.bias"]
            params = dict(zip(names, params.values(), strict=True))
        elif kind == "order":
            params = dict(sorted(params.items(), reverse=True))
        elif kind == "one more":
            params["more"] = nn.Parameter(torch.ones(3))
        elif kind == "shape":
            params["0.weight"] = nn.Parameter(torch.full((36,), 0.5))
    cls: Any = torch.optim.SGD
    if kind == "betas":
        cls, options["betas"] = torch.optim.AdamW, [0.9, 0.99 if rank else 0.999]  # a list, as JSON has it
    optimizer = ZeroOptimizer(params.items(), cls, **options)

    def step() -> None:
        sum(p.sum() for p in params.values()).backward()
        if kind == "max_norm":
            optimizer.clip_grad_norm_(1.0 + rank)
        optimizer.step()

    if kind == "scheduler":
        step()
        optimizer.param_groups[0]["lr"] *= 1 + 3 * rank
        with pytest.raises(ValueError, match=UNLIKE[kind]):
            step()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()  # with the gradients that are still there
        torch.testing.assert_close(params["0.bias"], torch.full((6,), 0.5 - 2 * 0.1))
    else:
        with pytest.raises(ValueError, match=UNLIKE[kind]):
            step()


@pytest.mark.parametrize("kind", UNLIKE)
def test_ranks_that_are_not_alike_all_raise(kind: str) -> None:
    run_ranks(2, unlike, kind, timeout=15.0)


@on_ranks(4)
def test_experts_of_other_sizes_on_one_rank_are_an_error_on_all(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dense = nn.Parameter(torch.ones(30, 10))
    for later in (False, True):
        expert = nn.Parameter(torch.ones((20, 10) if rank < 3 or later else (10, 20)))
        group = {"params": [expert], "process_group": pairs[rank % 2], "lr": 0.1 + rank % 2}
        optimizer = ZeroOptimizer([{"params": [dense]}, group], torch.optim.SGD, lr=0.01)
        optimizer.param_groups[1]["lr"] += (rank == 2) * later
        with pytest.raises((ValueError, RuntimeError)) as error:
            (dense.sum() + expert.sum()).backward()
            optimizer.step()
        own_pair_differs = rank % 2 == (0 if later else 1)
        assert own_pair_differs == ("differ from rank 0 in" in str(error.value).split("another rank failed")[0])
        optimizer.detach()


def dies(rank: int, world_size: int, file: str) -> None:
    model = Stack()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, reduce_bucket_size=64)
    for step in range(100):
        if rank == 1 and step == 2:
            os._exit(7)
        try:
            stack_loss(model, rank, step).backward()
            optimizer.step()
        except RuntimeError as error:
            open(file, "w").write(str(error))
            raise


def test_a_rank_that_dies_ends_the_others(tmp_path: Any) -> None:
    file = tmp_path / "error"
    run_ranks_of_which_one_dies(2, dies, str(file))
    start = time.monotonic()
    while not (file.exists() and file.read_text()) and time.monotonic() - start < 15:
        time.sleep(0.05)
    assert file.read_text()
    _pool.kill()


@on_ranks(2)
def test_a_pass_that_raised_on_all_ranks_leaves_no_trace(rank: int, world_size: int) -> None:
    model = Stack()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, reduce_bucket_size=64)
    for stop_at, drop in ((0, True), (5, True), (3, False)):
        handle = model.layers[stop_at].weight.register_hook(stop)
        with pytest.raises(ArithmeticError):
            stack_loss(model, rank, 0).backward()
        handle.remove()
        if drop:
            optimizer.zero_grad()
    optimizer.zero_grad()
    for step in range(3):
        stack_loss(model, rank, 10 * step).backward()
        optimizer.step()
    assert not list(different(bits(model), train_stack(rank, {})))


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_gradients_that_one_rank_throws_away_are_no_part_of_an_average(rank: int, world_size: int, stage: int) -> None:
    model = Stack()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=stage, lr=1e-2)
    before = bits(model)
    for again in (0, 1):
        stack_loss(model, rank, 0).backward()
        if rank:
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"rank 0 takes a step after 1 pass; rank 1 .*1 of them thrown away"):
            for _ in range(again * rank):
                stack_loss(model, rank, 0).backward()
            optimizer.step()
        optimizer.zero_grad()
    assert not list(different(bits(model), before))
    for step in range(3):
        stack_loss(model, rank, 10 * step).backward()
        optimizer.step()
    assert not list(different(bits(model), train_stack(rank, {"stage": stage})))


def errors_of(optimizer: ZeroOptimizer, param: Tensor) -> Tensor:
    number, found = optimizer.partition.find(param)[0], [torch.zeros(0)]
    for gradients in optimizer.partition.reducer.slices:
        if gradients.errors is not None:
            values = values_of(gradients.errors)
            spans = gradients.error_spans.get(number, [])
            found += [values[span.offset : span.offset + span.numel] for span in spans]
    return torch.cat(found)


class Outer(torch.optim.Optimizer):
    """A wrapper that inherits zero_grad() from torch, as timm's Lookahead does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize("options", [{}, INT4], ids=["full", "int4"])
@on_ranks(2)
def test_what_a_model_throws_away_is_no_part_of_an_average(rank: int, world_size: int, options: Any) -> None:
    """Loops clear gradients by the model's zero_grad(), as those of GANs do before each of two backward passes."""
    model, whole = Stack(), train_stack(rank, options)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **options)
    for step in range(3):
        stack_loss(model, rank, 70 + step).backward()  # of another loss, whose gradients nobody uses
        optimizer.clip_grad_norm_(0.01)
        (model, Outer(optimizer))[step % 2].zero_grad()
        stack_loss(model, rank, 10 * step).backward()
        optimizer.step()
    assert not list(different(bits(model), whole))

    first = model.layers[0]
    before, errors = list(map(optimizer.get_full_param, model.parameters())), errors_of(optimizer, first.weight)
    stack_loss(model, rank, 40).backward()
    for part in (model.layers[3], first):
        part.zero_grad()
        assert optimizer.get_full_grad(part.weight) is None
    optimizer.step()
    after = list(map(optimizer.get_full_param, model.parameters()))
    assert [torch.equal(*both) for both in zip(before, after, strict=True)] == [
        number in (0, 1, 6, 7) for number in range(12)
    ]
    torch.testing.assert_close(errors_of(optimizer, first.weight), errors)

    stack_loss(model, rank, 41).backward()
    if rank:
        first.zero_grad()
    with pytest.raises(RuntimeError, match=r"rank 0 takes a step after 1 pass; rank 1 .*1 of them thrown away"):
        optimizer.step()
    model.zero_grad()


@pytest.mark.parametrize("holds", [False, True])
@on_ranks(2)
def test_clipping_after_each_of_several_passes_is_as_without_zero(rank: int, world_size: int, holds: bool) -> None:
    """A loop that does not ask accelerator.sync_gradients before it clips. ``holds``: inside no_sync."""
    expected, model = Stack(), Stack()
    plain, params = torch.optim.SGD(expected.parameters(), lr=1.0), list(expected.parameters())
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    norms = []
    for number, scale in enumerate((30.0, 1.0, 2.0)):
        before = [p.grad for p in params]
        give_averages(stack_loss(expected, rank, number) * scale, params)
        for p, grad in zip(params, before, strict=True):
            p.grad = p.grad if grad is None else p.grad + grad
        norms.append(float(nn.utils.clip_grad_norm_(params, 0.1)))
        with optimizer.no_sync() if holds else nullcontext():
            (stack_loss(model, rank, number) * scale).backward()
        assert float(optimizer.clip_grad_norm_(0.1)) == pytest.approx(norms[-1], rel=1e-5)
    assert norms[0] > 1 and 0.1 < norms[1] < 0.2
    other, copied = copy.deepcopy((model, optimizer))
    for each in (plain, optimizer, copied):
        each.step()
    torch.testing.assert_close(bits(model), bits(expected), rtol=1e-5, atol=1e-6)
    assert not list(different(bits(model), bits(other)))


def _note(calls: list[str], what: str, *_: Any) -> None:
    calls.append(what)


def _closure(model: nn.Module, optimizer: Any, rank: int, calls: list[str], partitioned: bool) -> Tensor:
    optimizer.zero_grad()
    loss = stack_loss(model, rank, len(calls))
    if partitioned:
        loss.backward()
    else:
        give_averages(loss, [p for group in optimizer.param_groups for p in group["params"]])
    return loss


@pytest.mark.invariant(3, 10, 11, 19)
@on_ranks(2)
def test_groups_added_later_closures_schedulers_and_hooks(rank: int, world_size: int) -> None:
    results = []
    for partitioned in (False, True):
        model = Stack(layers=3)
        lr = torch.tensor(1e-2)
        first = [{"params": list(model.layers[0].parameters()), "weight_decay": 0.3}, {"params": []}]
        if partitioned:
            optimizer: Any = ZeroOptimizer(first, torch.optim.AdamW, lr=lr, reduce_bucket_size=500)
        else:
            optimizer = torch.optim.AdamW(first, lr=lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        calls: list[str] = []
        optimizer.register_step_pre_hook(partial(_note, calls, "pre"))
        optimizer.register_step_post_hook(partial(_note, calls, "post"))
        closure = partial(_closure, model, optimizer, rank, calls, partitioned)
        for step in range(4):
            if step == 2:
                for layer in model.layers[1:]:
                    optimizer.add_param_group({"params": list(layer.parameters()), "lr": 5e-3})
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (2 + step))
            assert isinstance(optimizer.step(closure), Tensor)
            scheduler.step()
        assert calls == ["pre", "post"] * 4
        results.append(bits(model))
    assert not list(different(*results))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": partial(through_a_file, weights_only=False),
}


@pytest.mark.invariant(20)
@pytest.mark.parametrize("how", COPIES)
@on_ranks(2)
def test_copies(rank: int, world_size: int, how: str) -> None:
    """A copy trains its own parameters, from where the original was, gradients included if it is a deep one."""
    for options in ({"reduce_bucket_size": 300}, INT4):
        case = Case(options=options, groups=True)
        model, optimizer = train_zero(rank, case)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        if how == "deepcopy":  # in the middle of an accumulation
            loss_of(model, rank, 3).backward()
        twin, other = COPIES[how]((model, optimizer))
        assert "ZeroOptimizer" in repr(other) and other.steps == 3
        for one in (model, twin):
            loss_of(one, rank, 9).backward()
        other.step()
        assert list(different(bits(model), bits(twin)))
        optimizer.step()
        for one, its in ((model, optimizer), (twin, other)):
            run_steps(rank, case, one, its, range(4, 6))
        assert not list(different(bits(model), bits(twin)))
    own = ZeroOptimizer(Net().parameters(), torch.optim.SGD, lr=0.1, process_group=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"process_group.*cannot be pickled: save its state_dict\(\)"):
        pickle.dumps(own)


@pytest.mark.invariant(6)
@on_ranks(2)
def test_what_is_refused_and_what_has_no_effect(rank: int, world_size: int) -> None:
    model = Stack()
    names = {"round_robin_gradients": True, "contiguous_gradients": False, "ignore_unused_parameters": False}
    with log_lines() as lines:
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, **names)
    told = [line for line in lines if "no effect here" in line]
    assert len(told) == (rank == 0) and all(f"{name}={value}" in line for line in told for name, value in names.items())
    with pytest.raises(ValueError, match="ZeroOptimizer does not support uneven inputs.*Join.*drop_last=True"):
        Join([optimizer])


@pytest.mark.invariant(17)
@on_ranks(2)
def test_parameters_of_several_dtypes(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 32).bfloat16(), nn.Linear(32, 7).double())
    for p in model.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    masters = [p.detach().double() if p.dtype == torch.float64 else p.detach().float() for p in model.parameters()]
    masters = [nn.Parameter(m.clone()) for m in masters]
    plain = torch.optim.AdamW(masters, lr=1e-2)
    twin = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = ZeroOptimizer(twin, torch.optim.AdamW, lr=1e-2, reduce_bucket_size=500)
    for step in range(3):
        grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(rank + 10 * step)).to(p) for p in twin]
        for p, grad in zip(twin, grads, strict=True):
            p.grad = grad.clone()
        for m, p, grad in zip(masters, twin, grads, strict=True):
            parts = [torch.empty_like(grad) for _ in range(world_size)]
            dist.all_gather(parts, grad * (1.0 / world_size))
            wide = [part if p.dtype == torch.float64 else part.float() for part in parts]
            m.grad = sum(wide[1:], wide[0]).to(p.dtype).to(m.dtype)
        plain.step()
        optimizer.step()
    assert not list(different([m.detach().to(p.dtype) for m, p in zip(masters, twin, strict=True)], [*twin]))


@pytest.mark.parametrize("options", [{"reduce_bucket_size": 100}, INT4], ids=str)
@on_ranks(4)
def test_groups_with_process_groups_of_their_own(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Four ranks: the dense part is averaged over all, expert e over the two ranks that hold it."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(0)
    dense, expert = nn.Parameter(torch.randn(30, 10)), nn.Parameter(torch.randn(20, 10) + rank % 2)
    groups = [{"params": [dense]}, {"params": [expert], "process_group": pairs[rank % 2], "lr": 0.1}]
    optimizer = ZeroOptimizer(groups, torch.optim.SGD, lr=0.01, **options)
    exact = 0.02 if options.get("grad_compression") else 1e-5
    start, means = [dense.detach().clone(), expert.detach().clone()], (2.5, 2.0 + rank % 2)
    for _ in range(2):
        ((rank + 1) * (dense.sum() + expert.sum())).backward()
        norm = optimizer.clip_grad_norm_(1e9)
        assert float(norm) == pytest.approx((300 * 2.5**2 + 200 * (2.0**2 + 3.0**2)) ** 0.5, rel=exact)
        optimizer.step()
    for p, before, mean, lr in zip((dense, expert), start, means, (0.01, 0.1), strict=True):
        moved = before - optimizer.get_full_param(p)
        torch.testing.assert_close(moved, torch.full_like(moved, 2 * lr * mean), rtol=exact, atol=1e-6)
    assert same_on_all_ranks([dense]) and not same_on_all_ranks([expert])
    assert "process_group" not in optimizer.state_dict()["param_groups"][1]


@on_ranks(2)
def test_a_model_parallel_group_agrees_on_norm_and_overflow(rank: int, world_size: int) -> None:
    """Two ranks hold halves of one weight and copies of another; each is alone in its data-parallel group."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    split, copied = nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(50))
    groups = [{"params": [split], "model_parallel": True}, {"params": [copied]}]
    optimizer = ZeroOptimizer(
        groups, torch.optim.SGD, lr=0.1, process_group=alone, model_parallel_group=dist.group.WORLD
    )
    (split.sum() * (rank + 1) + copied.sum() * 3).backward()
    norm = optimizer.clip_grad_norm_(1e9)
    assert float(norm) == pytest.approx((100 * 1 + 100 * 4 + 50 * 9) ** 0.5)
    optimizer.step()
    ((split.sum() + copied.sum()) * (float("nan") if rank == 0 else 1.0)).backward()
    optimizer.step()
    assert optimizer.step_was_skipped


@on_ranks(2)
def test_clipping_takes_all_parameters_of_a_model_that_unfreezes_or_has_two_optimizers(
    rank: int, world_size: int
) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    layers[1].requires_grad_(False)
    optimizer = ZeroOptimizer(layers.parameters(), torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        layers(torch.ones(2, 4)).sum().backward()
        optimizer.clip_grad_norm_(1e-3, layers.parameters())
        optimizer.step()
        optimizer.zero_grad()
        layers.requires_grad_(True)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    both = [ZeroOptimizer(layer.parameters(), torch.optim.SGD, lr=1.0) for layer in layers]
    layers(torch.ones(2, 4)).sum().backward()
    for optimizer in both:
        assert float(optimizer.clip_grad_norm_(1e-3, layers.parameters())) > 1e-3
        optimizer.step()
    assert same_on_all_ranks(list(layers.parameters()))


@pytest.mark.invariant(4)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@on_ranks(4)
def test_more_ranks_than_elements(rank: int, world_size: int) -> None:
    p, empty = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(0))
    optimizer = ZeroOptimizer([p, p, empty], torch.optim.AdamW, lr=0.1)
    (p.sum() * (rank + 1) + empty.sum()).backward()
    optimizer.step()
    plain = nn.Parameter(torch.ones(1))
    other = torch.optim.AdamW([plain], lr=0.1)
    plain.grad = torch.tensor([2.5])
    other.step()
    assert torch.equal(plain, p)
    ZeroOptimizer([{"params": []}], torch.optim.AdamW).step()
