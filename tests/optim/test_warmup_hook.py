"""Low-bit gradients of the warmup stage through DDP's hook: the bits of a plain loop, in all that DDP can do."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import attach_ddp, average_gradients
from tests.support.ddp_runs import attached, end_step, hook_beside_loop, make
from tests.support.harness import on_ranks, same_on_all_ranks
from tests.support.recording import CAP, Recording, check_overlap, events_of_backward
from tests.support.spreading import Share, spread

STEPS = 6
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


@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3)))
@on_ranks(timeout=240)
def test_the_hook_has_the_bits_of_the_plain_loop(rank: int, world_size: int, share: Share) -> None:
    for name in share.of(VARIANTS):
        ddp_options, run, options = VARIANTS[name]
        schedule = {} if name == "zero-one" else {"freeze_step": 4}
        options = {"warmup_bits": 4, "mixed": True, **schedule, **options}
        ddp, hooked, with_hook = attached(ddp=ddp_options, **options)
        plain, without = make(**options)
        pair = (with_hook, without)
        same = hook_beside_loop(rank, (ddp, plain), pair, lambda own=without: average_gradients(own), STEPS, **run)
        if name != "unused parameters":  # DDP leaves out what no rank has used, the loop what no rank has
            assert same == [True] * STEPS, name
            errors = ([e for state in o._states for e in (state.worker_error, state.server_error)] for o in pair)
            assert all(torch.equal(one, other) for one, other in zip(*errors, strict=True)), name
        assert same_on_all_ranks(hooked.parameters()), name


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


@on_ranks(2)
def test_each_parameter_travels_as_its_owner_says(rank: int, world_size: int) -> None:
    """One model of two optimizers, of which one is in its compressed stage, and a parameter that nobody owns."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 3))
    ddp = DistributedDataParallel(net)
    low = hf_compressopt.OnebitAdam(net[0].parameters(), warmup_bits=4)
    late = hf_compressopt.OnebitAdam(net[1].parameters(), warmup_bits=4, freeze_step=1)
    sync = attach_ddp(ddp, low, late)
    for step, expected in enumerate(([True, "exact"] * 2, [True, "exact", "local", "local"])):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * rank + step))
        recorders = [Recorder(communicator) for communicator in (low.communicator, late.communicator)]
        plain = Recorder(sync.communicator)
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
        sent = [sum(nbytes for _, nbytes in recorder.rows) for recorder in recorders]
        if step == 0:  # of the parameters that nobody owns, beside what compares the ranks
            assert [row for row in plain.rows if row[0] == "all_reduce"] == [("all_reduce", 123 * 4)]
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


@on_ranks(3)
def test_a_process_group_of_its_own(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    torch.manual_seed(0)
    net = nn.Sequential(OrderedDict(shared=nn.Linear(9, 9), expert=nn.Linear(9, 9)))
    expert = [f"expert.{name}" for name in ("weight", "bias")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, expert)
    own = {"params": list(net.expert.parameters()), "process_group": pairs[rank == 2]}
    groups = [{"params": list(net.shared.parameters())}, own]
    optimizer = hf_compressopt.OnebitAdam(groups, lr=1e-2, warmup_bits=4, freeze_step=3)
    ddp = DistributedDataParallel(net)
    attach_ddp(ddp, optimizer)
    for step in range(5):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * rank + step))
        ddp(x).square().mean().backward()
        assert not optimizer._states[1].worker_error.any() or step >= 3
        end_step(optimizer)
    assert optimizer._states[0].worker_error.any()
    assert same_on_all_ranks(net.shared.parameters())
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, torch.cat([p.detach().flatten() for p in net.expert.parameters()]))
    assert torch.equal(everyone[0], everyone[1]) and not torch.equal(everyone[0], everyone[2])


# -- overlap ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_first_message_leaves_before_the_last_gradient_is_there(rank: int, world_size: int) -> None:
    def attach(ddp: DistributedDataParallel, communicator: Recording) -> Any:
        options = {"warmup_bits": 4, "bucket_cap_mb": CAP, "communicator": communicator}
        optimizer = hf_compressopt.OnebitAdam(ddp.parameters(), **options)
        attach_ddp(ddp, optimizer)
        return optimizer.step

    check_overlap(events_of_backward(attach))
