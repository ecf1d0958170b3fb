"""clip="late": the messages of the compressed stage leave during backward, and say what they would have said in step().

The oracle is clip="sketch", whose messages are made in step(), in a second model on the same data.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import OnebitAdam, attach_ddp
from hf_compressopt.kernels import Combination, Segment
from hf_compressopt.optim import overlap
from hf_compressopt.optim.group import finish
from hf_compressopt.optim.overlap import LATE_CLIP, Backward, LastNorm, OverlapSender
from tests.oracles.steps import same
from tests.support.ddp_runs import (
    CLIP,
    FREEZE,
    STEPS,
    attached,
    backward,
    end_step,
    loss_of,
    make,
    scaler_of,
    tensors_of,
)
from tests.support.harness import on_ranks, same_on_all_ranks
from tests.support.logs import log_lines
from tests.support.recording import CAP, Recording, check_overlap, events_of_backward
from tests.support.spreading import Share, spread

FIRST = FREEZE + 2  # step, counted from 1, whose messages are the first to leave early


# -- the bits of the path without overlap -----------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"form": "float32"},
    "compact": {},
    "moments in shards": {"zero_stage": 1},
    "no_sync": {"accumulate": 3},
    "every backward syncs": {"accumulate": 2, "sync": True},
    "unused": {"ddp": {"find_unused_parameters": True}, "sometimes": True},
    "bucket views": {"ddp": {"gradient_as_bucket_view": True}},
    "static graph": {"ddp": {"static_graph": True}},
    "bfloat16": {"dtype": torch.bfloat16},
    "mixed": {"mixed": True},
    "one scale": {"scale_block": None},
    "scaler": {"scaler": "told"},
    "scaler that grows": {"scaler": "found"},
}
NODES = {"node_size": 2}


@pytest.mark.parametrize(("world_size", "share"), [*spread(shared=(2, 3, 1)), (4, None)])
@on_ranks(timeout=300)
def test_without_clipping_the_bits_are_those_of_messages_in_the_step(
    rank: int, world_size: int, share: Share | None
) -> None:
    for name in share.of(VARIANTS) if share else ["nodes"]:
        options = dict(VARIANTS.get(name, NODES))
        passes = {key: options.pop(key) for key in ("accumulate", "sync") if key in options}
        sometimes, ddp, scaled = (options.pop(key, {}) for key in ("sometimes", "ddp", "scaler"))
        scalers = [scaler_of(256.0, bool(scaled), growth_interval=2) for _ in range(2)]
        runs = []
        for clip, scaler in zip(("late", "sketch"), scalers, strict=True):
            told = scaler.get_scale if scaled == "told" else None
            runs.append(attached(clip, loss_scale=told, ddp=ddp, **options))
        for step in range(1, STEPS + 1):
            for (model, _, optimizer), scaler in zip(runs, scalers, strict=True):
                backward(model, rank, step - 1, also=not sometimes or step % 2 == 1, scaler=scaler, **passes)
                if optimizer is runs[0][2]:
                    left = len(optimizer.overlap.signature)
                    assert (left > 0) == (step >= FIRST and world_size > 1), name
                end_step(optimizer, scaler)
            assert same(*(tensors_of(*run[1:]) for run in runs)), (name, step)
        (_, net, late), (_, _, other) = runs
        buckets = sum(len(state.layout.buckets) for state in late._states if state.compressed)
        assert world_size == 1 or left == buckets > 2
        twice = name in ("every backward syncs", "scaler that grows") and world_size > 1
        assert (late.traffic.total_bytes == other.traffic.total_bytes) != twice, f"{name}: messages left twice"
        assert same_on_all_ranks(net.parameters()), name


# -- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "form"), [("option", "float32"), ("option", "compact"), ("call", "float32")])
@on_ranks(2)
def test_messages_carry_the_coefficient_of_the_step_before(rank: int, world_size: int, how: str, form: str) -> None:
    """Each early step against one of the oracle from the same state, whose messages carry the coefficient by hand."""
    ddp, net, optimizer = attached("late", CLIP if how == "option" else 0.0, form=form)
    norms, true = [], []
    for step in range(STEPS):
        backward(ddp, rank, step)
        grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        early = len(optimizer.overlap.signature) > 0
        assert early == (step + 1 >= FIRST)
        if early:
            norm, max_norm, _, _ = optimizer._tensors[LATE_CLIP].tolist()
            coefficient = min(1.0, max_norm / (norm + 1e-6))
            assert coefficient < 0.9
            other, oracle = make("sketch", form=form)
            other.load_state_dict(net.state_dict())
            oracle.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            oracle._compressed = partial(with_clipped_gradients, oracle._compressed, coefficient)
            oracle._refresh_variance = partial(refresh_by_clipped_gradients, oracle._refresh_variance, coefficient)
            for p, grad in zip(other.parameters(), grads, strict=True):
                p.grad = grad
            oracle.step()
        mean = [g.clone() for g in grads if g is not None]
        for g in mean:
            torch.distributed.all_reduce(g)
        true.append(math.sqrt(sum(float((g / world_size).double().square().sum()) for g in mean)))
        if how == "call":
            norms.append(float(optimizer.clip_grad_norm_(CLIP, net.parameters())))
            pairs = zip(net.parameters(), grads, strict=True)
            scaled = any(grad is not None and not torch.equal(p.grad, grad) for p, grad in pairs)
            assert scaled != early  # what has left is only measured
        optimizer.step()
        norms[step:] = [float(optimizer._tensors[LATE_CLIP][0])]
        assert not early or same(tensors_of(net, optimizer), tensors_of(other, oracle))
        optimizer.zero_grad()
    assert norms == pytest.approx(true, rel=0.1)


def refresh_by_clipped_gradients(refresh: Any, coefficient: float, plan: Any, gradients: Any) -> None:
    refresh(plan, [[None if grad is None else grad * coefficient for grad in grads] for grads in gradients])


def with_clipped_gradients(compressed: Any, coefficient: float, step: Any) -> Any:
    """Take the compressed step of a bucket with gradients that are multiplied by a coefficient."""
    exchange = compressed(step)
    message = next(exchange)
    finish(exchange, (yield replace(message, beta=message.beta * coefficient)))


def test_a_rank_whose_gradient_grows_clips_by_its_growth() -> None:
    grad = torch.full((100,), 0.1)  # of norm 1

    def coefficients(last: LastNorm | None, scale: float, *factors: float) -> list[float]:
        backward = Backward(last, scale, 4)
        parts = [Segment(scale * f * grad, 0, 100, 0) for f in factors]
        grown = [backward.growth((0, n), [part], grad.device) for n, part in enumerate(parts)]
        found = [backward.coefficient() * (1.0 if each is None else float(each)) for each in grown]
        rows = [Combination(100, grad.device, grads=[part]) for part in parts]  # as of a refresh, which clips no less
        assert [backward.clipped(row, (0, n)).beta for n, row in enumerate(rows)] == pytest.approx(found)
        return found

    assert coefficients(None, 1.0, 1e9) == [1.0]
    usual = LastNorm(1.0, 0.5, 1.5)
    assert coefficients(usual, 8.0, 1.0, 2.0) == pytest.approx([0.5, 0.5], rel=1e-4)
    assert coefficients(usual, 8.0, 1.0, 12.0) == pytest.approx([0.5, 0.5 * 1.5 / math.sqrt(145)], rel=1e-4)
    unknown = LastNorm(1.0, 0.5, math.nan)  # before the first measurement: at most sqrt(W) larger
    assert coefficients(unknown, 1.0, 3.9, 2.0) == pytest.approx([0.5, 0.5 * 2 / math.hypot(3.9, 2)], rel=1e-4)
    assert coefficients(LastNorm(0.0, 0.5, 0.0), 1.0, 2.0) == pytest.approx([0.25], rel=1e-4)
    assert coefficients(LastNorm(3.0, math.inf, 3.0), 1.0, 20.0) == [1.0]


@pytest.mark.parametrize("at_once", [True, False])  # on a device of its own the factor is not read
@on_ranks(2)
def test_a_spike_on_one_rank(rank: int, world_size: int, at_once: bool) -> None:
    """Rank 0's loss is a thousand times as large in one step: its own coefficients fall during backward."""
    ddp, net, optimizer = attached("late", CLIP)
    found: dict[int, list[float]] = {step: [] for step in range(STEPS)}
    original = OverlapSender.message

    def record(self: OverlapSender, *of: Any) -> Any:
        z = original(self, *of)
        own, sent = (
            torch.cat([segment.part for segment in each.grads if segment.tensor is not None])
            for each in (self._message_of(self._plan, *of), z)
        )
        found[step].append(z.beta * float(sent.norm() / own.norm()))
        return z

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlapSender, "message", record)
        patch.setattr(overlap, "reads_at_once", lambda device: at_once)
        for step in range(STEPS):
            factor = 1e3 if rank == 0 and step == STEPS - 2 else 1.0
            (factor * loss_of(ddp, rank, step)).backward()
            assert not optimizer.overlap.overflow()  # all have arrived
            end_step(optimizer)
    usual, spiked = found[STEPS - 3], found[STEPS - 2]
    if rank == 0:
        assert max(spiked) < 0.1 * min(usual) and max(spiked) > 1.01 * min(spiked)  # it grows while backward goes on
    else:
        assert max(spiked) == pytest.approx(min(spiked), rel=1e-5)
    assert same_on_all_ranks(net.parameters())


# -- steps that are not taken -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_messages_whose_step_does_not_follow_are_dropped(rank: int, world_size: int) -> None:
    results = []
    for abandon in (False, True):
        ddp, net, optimizer = attached("late", CLIP)
        for step in range(STEPS):
            if abandon and not optimizer.plan.reduce_grads:  # else errors of the integers have changed
                loss_of(ddp, rank, step, part=7).backward()
                (optimizer if step % 2 else net).zero_grad()
            backward(ddp, rank, step)
            end_step(optimizer)
        results.append(tensors_of(net, optimizer))
    backward(ddp, rank, 0)
    assert optimizer.overlap.signature
    optimizer.step(grads=[p.grad for group in optimizer.param_groups for p in group["params"]])
    assert same(*results)


@pytest.mark.parametrize("zero_stage", [0, 2])
@on_ranks(2)
def test_the_norm_of_a_batch_that_is_skipped_after_clipping_clips_no_other(
    rank: int, world_size: int, zero_stage: int
) -> None:
    net, optimizer = make("late", zero_stage=zero_stage)
    model = net if zero_stage else DistributedDataParallel(net)
    if not zero_stage:
        attach_ddp(model, optimizer)
    for step in range(STEPS):
        factor = 1e4 if step in (FREEZE, STEPS - 2) else 1.0  # the first one before messages leave early
        (factor * loss_of(model, rank, step)).backward()
        norm = float(optimizer.clip_grad_norm_(1.0))
        if factor == 1:
            optimizer.step()
            assert float(optimizer._tensors[LATE_CLIP][0]) == pytest.approx(norm)
        optimizer.zero_grad()


def in_place(change: Callable[[torch.Tensor], object]) -> Callable[[list[nn.Parameter], int], object]:
    return lambda params, rank: [change(p.grad) for p in params if p.grad is not None]


#: What may happen between a backward pass and a step; True and False for zero_grad(), which sets None or not.
BETWEEN: dict[str, Any] = {
    "none": lambda params, rank: None,
    "zeros": in_place(lambda grad: grad.zero_()),
    "torch's clipping": lambda params, rank: torch.nn.utils.clip_grad_norm_(params, 1e-3),
    "one rank": lambda params, rank: None if rank else in_place(lambda grad: grad.mul_(2))(params[:1], rank),
    "others": lambda params, rank: [setattr(p, "grad", torch.full_like(p, 0.1 * (rank + 1))) for p in params],
    "freed": lambda params, rank: [setattr(p, "grad", None) for p in params],
    "zero_grad(True)": True,
    "zero_grad(False)": False,
}
SETTINGS = [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.full)], ids=["share", "rest"])
@pytest.mark.parametrize("place", range(len(SETTINGS)))
@on_ranks(2, timeout=240)
def test_messages_count_only_for_the_gradients_that_they_were_made_from(
    rank: int, world_size: int, place: int, rest: bool
) -> None:
    """Gradients changed, replaced or given up after their messages have left, against clip="sketch"."""
    views, scaled = SETTINGS[place]
    for name in Share(place, len(SETTINGS), rest).of(BETWEEN):
        act, runs = BETWEEN[name], []
        for clip in ("late", "sketch"):
            scaler = scaler_of(64.0, scaled)
            given = {"loss_scale": scaler.get_scale, "ddp": {"gradient_as_bucket_view": views}}
            runs.append((*attached(clip, **given), scaler))
        for step in range(STEPS):
            for ddp, net, optimizer, scaler in runs:
                backward(ddp, rank, step, scaler=scaler)
                if step == STEPS - 3 and name == "none":
                    with ddp.no_sync():  # what has left is not all
                        scaler.scale(loss_of(ddp, rank, step, part=3)).backward()
                elif step == STEPS - 3 and callable(act):
                    act([p for p in net.parameters() if p.requires_grad], rank)
                elif step == STEPS - 3:
                    optimizer.zero_grad(set_to_none=act)
                assert optimizer is not runs[0][2] or bool(optimizer.overlap.signature) == (step + 1 >= FIRST)
                given_any = any(p.grad is not None for p in net.parameters())  # else a scaler refuses
                end_step(optimizer, scaler if given_any else None)
            assert same(*(tensors_of(net, optimizer) for _, net, optimizer, _ in runs)), (name, step)


@on_ranks(2)
def test_clipping_by_parts_does_not_overlap(rank: int, world_size: int) -> None:
    ddp, _, optimizer = attached("late")
    for step in range(STEPS):
        backward(ddp, rank, step)
        assert bool(optimizer.overlap.signature) == (step == STEPS - 1)
        optimizer.clip_grad_norm_(CLIP, optimizer.param_groups[0]["params"] if step < STEPS - 2 else None)
        end_step(optimizer)


@on_ranks(2)
def test_gradients_that_are_changed_after_clipping_are_told_of(rank: int, world_size: int) -> None:
    ddp, net, optimizer = attached("late")
    weight = next(p for p in net.parameters() if p.dim() == 2 and p.requires_grad)
    with log_lines() as lines:
        for step in range(STEPS + 2):
            backward(ddp, rank, step)
            optimizer.clip_grad_norm_(CLIP)
            if rank and step >= STEPS:
                weight.grad.zero_()  # as of rows that are to stay
            optimizer.step()
            optimizer.zero_grad()
            told = [line for line in lines if "changed after they were clipped" in line]
            assert len(told) == (rank == 1 and step >= STEPS), told


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "scaled"), [pytest.param("float32", False, marks=pytest.mark.full), ("compact", False), ("float32", True)]
)
@on_ranks(2)
def test_a_run_resumes_bit_for_bit(rank: int, world_size: int, form: str, scaled: bool, tmp_path: Path) -> None:
    """Nobody tells the hook its scale, which the optimizer learns and saves."""
    scaler, saved = scaler_of(32.0, scaled), {}
    ddp, net, optimizer = attached("late", CLIP, form=form)
    for step in range(STEPS):
        saved[step] = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        hf_compressopt.save_state(optimizer, tmp_path / str(step))
        backward(ddp, rank, step, scaler=scaler)
        end_step(optimizer, scaler)
    whole = tensors_of(net, optimizer)
    for start, (weights, own) in saved.items():
        ddp, net, optimizer = attached("late", CLIP, form=form)
        net.load_state_dict(weights)
        if start % 2 == 0:
            optimizer.load_state_dict(own)
        else:
            hf_compressopt.load_state(optimizer, tmp_path / str(start))
        for step in range(start, STEPS):
            backward(ddp, rank, step, scaler=scaler)
            end_step(optimizer, scaler)
        # integers of the warmup stage are told the scale after a step
        assert same(whole, tensors_of(net, optimizer)) or (scaled and start < FREEZE)


# -- overlap, and where it is refused ---------------------------------------------------------------------------------


@on_ranks(2)
def test_messages_leave_before_the_last_gradient_is_there_and_are_awaited_in_the_step(
    rank: int, world_size: int
) -> None:
    def attach(ddp: DistributedDataParallel, communicator: Recording) -> Any:
        options = {"warmup_bits": 32, "clip": "late", "bucket_cap_mb": CAP, "communicator": communicator}
        optimizer = OnebitAdam(list(ddp.parameters()), freeze_step=1, **options)
        attach_ddp(ddp, optimizer)

        def step() -> None:
            communicator.events.append("backward is over")
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            communicator.events.append("step")

        return step

    events = events_of_backward(attach, steps=3)
    check_overlap(events)
    over = events.index("backward is over")
    assert events.count("message") == events.count("answer") == events[:over].count("message")
    assert events[:over].count("answer") == events.count("message") - 1
