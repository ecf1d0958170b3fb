"""Low-bit gradients of the warmup stage through DDP's hook: the bits of a plain loop, in all that DDP can do."""

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
from tests.support.harness import run_ranks
from tests.support.recording import CAP, Recording, check_overlap, events_of_backward
from tests.support.spreading import Share, spread

STEPS, FREEZE = 6, 4

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bucket views": ({"gradient_as_bucket_view": True}, {}),
    "static graph": ({"static_graph": True}, {}),
    "unused parameters": ({"find_unused_parameters": True}, {"sometimes": True}),
    "accumulation": ({}, {"accumulate": 3}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
    "16 bits": ({}, {"bits": 16}),
    "lamb": ({}, {"optimizer": "OnebitLamb", "bits": 8}),
    "zero-one": ({}, {"optimizer": "ZeroOneAdam", "schedule": {"var_freeze_step": 4, "var_update_scaler": 2}}),
}


class Net(nn.Module):
    """Layers of odd sizes, one of them frozen, two that share a weight, and one that is used in even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = nn.Linear(13, 37), nn.Linear(37, 37), nn.Linear(37, 37)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.third, self.sometimes = nn.Linear(37, 13), nn.Linear(37, 37)

    def forward(self, x: torch.Tensor, also: bool = True) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.tied(torch.tanh(self.second(torch.tanh(self.first(x)))))))
        return self.third(self.sometimes(h) if also else h)


def data(rank: int, step: int, part: int = 0) -> torch.Tensor:
    return torch.randn(8, 13, generator=torch.Generator().manual_seed(10_000 * part + 100 * rank + step))


def make(options: dict[str, Any]) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net().to(getattr(torch, options.get("dtype", "float32")))
    biases = [p for name, p in net.named_parameters() if name.endswith("bias") and p.requires_grad]
    kept = list(net.third.parameters())[:1]
    weights = [p for p in net.parameters() if not any(p is other for other in (*biases, *kept))]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}, {"params": kept, "non_freeze": True}]
    schedule = options.get("schedule", {"freeze_step": FREEZE})
    optimizer_class = getattr(hf_compressopt, options.get("optimizer", "OnebitAdam"))
    settings = {"lr": 1e-2, "weight_decay": 0.1, "scale_block": 64, "bucket_cap_mb": bucket_cap(500)}
    return net, optimizer_class(groups, warmup_bits=options.get("bits", 4), **schedule, **settings)


def train(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Train by the hook, and beside it without DDP; are the weights the same after each step?"""
    ddp_options, options = VARIANTS[name]
    accumulate, sometimes = options.get("accumulate", 1), options.get("sometimes", False)
    (hooked, with_hook), (plain, without) = make(options), make(options)
    ddp = DistributedDataParallel(hooked, bucket_cap_mb=0.005, **ddp_options)
    attach_ddp(ddp, with_hook)
    same = []
    for step in range(STEPS):
        also = not sometimes or step % 2 == 0
        for part in range(accumulate):
            x = data(rank, step, part).to(next(plain.parameters()).dtype)
            if part == accumulate - 1:
                ddp(x, also).square().mean().backward()
            else:
                with ddp.no_sync():
                    ddp(x, also).square().mean().backward()
            plain(x, also).square().mean().backward()
        average_gradients(without)
        for optimizer in (with_hook, without):
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(hooked.parameters(), plain.parameters(), strict=True)
        same.append(all(torch.equal(one, other) for one, other in pairs))
    own = [t.numpy().copy() for state in with_hook._states for t in (state.worker_error, state.server_error)]
    other = [t.numpy() for state in without._states for t in (state.worker_error, state.server_error)]
    return {
        "same": same,
        "errors": all(np.array_equal(one, two) for one, two in zip(own, other, strict=True)),
        "weights": [p.detach().float().numpy() for p in hooked.parameters()],
        "metrics": with_hook.metrics(),
    }


def train_all(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train(rank, world_size, name) for name in names}


@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3)))
def test_the_hook_has_the_bits_of_the_plain_loop(world_size: int, share: Share) -> None:
    ranks = run_ranks(world_size, train_all, share.of(VARIANTS), timeout=240)
    for results in ranks:
        for name, result in results.items():
            if name != "unused parameters":  # DDP leaves out what no rank has used, the loop what no rank has
                assert result["same"] == [True] * STEPS and result["errors"], name
            for mine, theirs in zip(result["weights"], ranks[0][name]["weights"], strict=True):
                assert mine.tobytes() == theirs.tobytes(), name


# -- which parameters travel how --------------------------------------------------------------------------------------


class Recorder:
    """The messages of a communicator: their kinds, and how many bytes they have."""

    def __init__(self, communicator: Any) -> None:
        self.rows: list[tuple[str, int]] = []
        for name in ("all_to_all", "all_gather", "all_reduce"):
            setattr(communicator, name, self._recording(name, getattr(communicator, name)))

    def _recording(self, name: str, original: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.rows.append((name, tensor.nbytes))
            return original(tensor, *args, **options)

        return call


def mixed(rank: int, world_size: int) -> dict[str, Any]:
    """One model of two optimizers, of which one is in its compressed stage, and a parameter that nobody owns."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 3))
    ddp = DistributedDataParallel(net)
    low = hf_compressopt.OnebitAdam(net[0].parameters(), warmup_bits=4)
    late = hf_compressopt.OnebitAdam(net[1].parameters(), warmup_bits=4, freeze_step=1)
    sync = attach_ddp(ddp, low, late)
    seen = []
    for step in range(2):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * rank + step))
        recorders = [Recorder(communicator) for communicator in (low.communicator, late.communicator)]
        plain = Recorder(sync.communicator)
        grads = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
        ddp(x).square().mean().backward()
        means = []
        for grad in grads:
            mean = grad.clone()
            dist.all_reduce(mean)
            means.append(mean / world_size)
        rows = []
        for p, local, mean in zip(net.parameters(), grads, means, strict=True):
            scale = float(mean.abs().max())
            near = float((p.grad - mean).abs().max()) < 0.2 * scale
            rows.append("local" if torch.equal(p.grad, local) else "exact" if torch.equal(p.grad, mean) else near)
        reduced = [row for row in plain.rows if row[0] == "all_reduce"]  # beside what compares the ranks
        seen.append((rows, [sum(nbytes for _, nbytes in r.rows) for r in recorders], reduced))
        for optimizer in (low, late):
            optimizer.step()
        net.zero_grad()
    return {"seen": seen}


def test_each_parameter_travels_as_its_owner_says() -> None:
    for result in run_ranks(2, mixed):
        (first, (low, late), plain), (second, (_, silent), _) = result["seen"]
        assert first == [True, "exact", True, "exact", "exact", "exact"]
        assert plain == [("all_reduce", 123 * 4)]  # of the parameters that nobody owns
        assert 0 < low == late < 1640 * 4 / 3
        assert second == [True, "exact", "local", "local", "exact", "exact"] and silent == 0


def partly(rank: int, world_size: int) -> list[Any]:
    """An optimizer of two models: neither model's rounds may send the errors of the other's parameters."""
    torch.manual_seed(0)
    one, two = nn.Linear(20, 20), nn.Linear(20, 20)
    optimizer = hf_compressopt.OnebitAdam([*one.parameters(), *two.parameters()], warmup_bits=4)
    models = [DistributedDataParallel(net) for net in (one, two)]
    for model in models:
        attach_ddp(model, optimizer)
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(rank))
    local = torch.autograd.grad(two(one(x)).sum(), [*one.parameters(), *two.parameters()])
    models[1](models[0](x)).sum().backward()
    exact = []
    for p, grad in zip([*one.parameters(), *two.parameters()], local, strict=True):
        dist.all_reduce(grad.div_(world_size))
        exact.append(torch.equal(p.grad, grad))
    return exact


def test_groups_of_several_models_travel_in_full_precision() -> None:
    assert run_ranks(2, partly) == [[True] * 4] * 2


def own_group(rank: int, world_size: int) -> list[np.ndarray]:
    """A param group with a process group of its own stays out of the rounds, as in full precision."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    torch.manual_seed(0)
    net = nn.ModuleDict({"shared": nn.Linear(9, 9), "expert": nn.Linear(9, 9)})
    expert = [f"expert.{name}" for name in ("weight", "bias")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, expert)
    groups = [
        {"params": list(net["shared"].parameters())},
        {"params": list(net["expert"].parameters()), "process_group": pairs[rank == 2]},
    ]
    optimizer = hf_compressopt.OnebitAdam(groups, lr=1e-2, warmup_bits=4, freeze_step=3)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.expert = net["shared"], net["expert"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.expert(self.shared(x))

    both = Both()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, expert)
    ddp = DistributedDataParallel(both)
    attach_ddp(ddp, optimizer)
    for step in range(5):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * rank + step))
        ddp(x).square().mean().backward()
        assert not optimizer._states[1].worker_error.any() or step >= 3
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer._states[0].worker_error.any()
    return [p.detach().numpy() for p in both.parameters()]


def test_a_process_group_of_its_own() -> None:
    first, second, third = run_ranks(3, own_group)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(first[:2], third[:2], strict=True))
    assert not np.array_equal(first[2], third[2])


# -- overlap ----------------------------------------------------------------------------------------------------------


def record(rank: int, world_size: int) -> list[str]:
    def attach(ddp: DistributedDataParallel, communicator: Recording) -> Any:
        optimizer = hf_compressopt.OnebitAdam(
            ddp.parameters(), warmup_bits=4, bucket_cap_mb=CAP, communicator=communicator
        )
        attach_ddp(ddp, optimizer)
        return optimizer.step

    return events_of_backward(attach)


def test_the_first_message_leaves_before_the_last_gradient_is_there() -> None:
    for events in run_ranks(2, record):
        check_overlap(events)
