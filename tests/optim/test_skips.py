"""A gradient that is not finite on one rank: all ranks skip the step, and it leaves no trace."""

import math
from typing import Any

import pytest
import torch

from tests.oracles.steps import tensors_in
from tests.support.ddp_runs import CLIP, STEPS, attached, end_step, loss_of, make, scaler_of
from tests.support.family import FAMILY
from tests.support.harness import on_ranks, same_on_all_ranks

#: The number of ranks, and options of the optimizer.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "4 bits": (3, {}),
    "one rank": (1, {}),
    "32 bits, mixed": (3, {"warmup_bits": 32, "mixed": True}),
    "8 bits, float32": (2, {"warmup_bits": 8, "state": "float32"}),
    "clipped": (2, {"max_grad_norm": CLIP}),
    "clipped locally": (2, {"max_grad_norm": CLIP, "clip": "local"}),
    "late": (2, {"clip": "late", "max_grad_norm": CLIP}),
    "late, float32": (2, {"clip": "late", "max_grad_norm": CLIP, "state": "float32"}),
    "zero_stage=1": (3, {"zero_stage": 1, "max_grad_norm": CLIP}),
    "zero_stage=2": (2, {"zero_stage": 2, "max_grad_norm": CLIP}),
    "nodes": (4, {"node_size": 2}),
    "nodes, late": (4, {"node_size": 2, "clip": "late"}),
    "lamb": (2, {"name": "OnebitLamb"}),
    # a group in full precision, by which the ranks agree in local steps too; the eighth step is a sync
    "zero-one": (2, {"name": "ZeroOneAdam", "mixed": True, **FAMILY["ZeroOneAdam"]}),
}
BAD = (1, 6)  # a step of each stage
HOW = ("nan in the loss", "inf in a gradient", "scaler", "scaler and clip_grad_norm_")


def bytes_of(net: torch.nn.Module, optimizer: Any) -> list[bytes]:
    errors = [error for state in optimizer._states for error in state.errors.values()]
    tensors = tensors_in([list(net.parameters()), optimizer.state_dict()["state"], errors])
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor.numel()]


def train(rank: int, world_size: int, options: dict[str, Any], how: str, bad_steps: tuple[int, ...]) -> list[bytes]:
    scaler = scaler_of(64.0, how.startswith("scaler"))
    if options.get("zero_stage") == 2:
        net, optimizer = make(**options)
        model: Any = net
    else:
        model, net, optimizer = attached(loss_scale=scaler.get_scale, **options)
    for step in range(STEPS):
        for bad in (True, False) if step in bad_steps else (False,):
            before = bytes_of(net, optimizer)
            loss = scaler.scale(loss_of(model, rank, step))
            last = bad and rank == world_size - 1
            (loss * math.nan if last and "gradient" not in how else loss).backward()
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
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "world_size"), [(name, ranks) for name, (ranks, _) in RUNS.items()])
@on_ranks(timeout=120)
def test_all_ranks_skip_the_step_and_go_on_as_if_it_had_not_been(
    rank: int, world_size: int, name: str, how: str
) -> None:
    options = RUNS[name][1]
    if options.get("zero_stage") != 2 or "gradient" not in how:  # which are gone by then
        bad = BAD[1:] if "gradient" in how else BAD  # in the warmup stage gradients are averaged by then
        spoilt, well = (train(rank, world_size, options, how, steps) for steps in (bad, ()))
        assert spoilt == well
