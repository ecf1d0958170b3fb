"""The engine that sends gradients while backward runs: one order of messages on all ranks, whatever their graphs do."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hf_compressopt import GradientCompression, OnebitAdam, ZeroOptimizer, attach_ddp, compress_hook
from hf_compressopt.collectives import exchange
from hf_compressopt.collectives.sender import Sender
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.support.harness import on_ranks, same_on_all_ranks


class Block(nn.Module):
    """Layers of which the middle one is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(9, 17), nn.Linear(17, 17), nn.Linear(17, 3)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(h)) if whole else h)


def make_optimizers(blocks: nn.ModuleList) -> list[Any]:
    """Three kinds of senders; the one made first sends while backward runs."""
    shared: dict[str, Any] = {"zero_stage": 2, "freeze_step": 3, "warmup_bits": 8, "bucket_cap_mb": 100 * 4 / 2**20}
    return [
        OnebitAdam(blocks[0].parameters(), lr=1e-3, **shared),
        ZeroOptimizer(blocks[1].parameters(), torch.optim.AdamW, stage=2, reduce_bucket_size=150, lr=1e-3),
        OnebitAdam(blocks[2].parameters(), lr=1e-3, **shared),
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
@on_ranks()
def test_several_senders_and_graphs_of_any_order(rank: int, world_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    blocks = nn.ModuleList(Block() for _ in range(3))
    optimizers = make_optimizers(blocks)
    own = random.Random(1000 * seed + rank)
    for step in range(7):
        last = 1 + step % 2  # backward passes of the step
        for number in range(last):
            order = own.sample(range(3), 3)  # each rank's graph completes the blocks in another order
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + rank))

            def backward(order: list[int] = order, x: torch.Tensor = x) -> None:
                loss = torch.zeros(())
                for index in order:
                    whole = own.random() < 0.7
                    if index == 1 and own.random() < 0.5:
                        y = checkpoint(blocks[index], x.requires_grad_(), whole, use_reentrant=True)
                    else:
                        y = blocks[index](x, whole)
                    loss = loss * 0.9 + y.square().mean()
                loss.backward()

            if number < last - 1:
                with optimizers[0].no_sync(), optimizers[1].no_sync(), optimizers[2].no_sync():
                    backward()
            else:
                backward()
        for optimizer in optimizers:
            optimizer.step()
    assert same_on_all_ranks(blocks.parameters()) and all(p.isfinite().all() for p in blocks.parameters())


class Sending(Sender):
    """A sender that notes what it sends."""

    def __init__(self, *buckets: str) -> None:
        super().__init__()
        self.add_buckets(buckets)
        self.sent: list[int] = []

    def send(self, index: int) -> None:
        self.sent.append(index)

    def take_sent(self) -> list[int]:
        sent, self.sent = self.sent, []
        return sent


def test_buckets_are_sent_in_order_and_the_rest_at_the_end() -> None:
    sender = Sending("ab", "bc", "d")
    sender.begin_pass(None)
    for member in "dca":
        sender.arrived(member)
    assert sender.take_sent() == []  # the first bucket comes first
    sender.arrived("a")  # once more
    assert sender.take_sent() == [] and sender.awaits(0, "b")
    sender.arrived("b")
    sender.send_rest()
    assert sender.take_sent() == [0, 1, 2]
    sender.await_anew()
    sender.arrived("unknown")
    sender.arrived("b")
    sender.begin_pass(None)  # after what came first, as of an optimizer that does not send while backward runs
    assert sender.take_sent() == [] and not sender.awaits(0, "b")
    sender.send_rest()
    assert sender.take_sent() == [0, 1, 2]
    sender.begin_pass(None)  # the pass before was not finished
    assert sender.awaits(0, "b")
    sender.await_anew()
    sender.send_rest()
    assert sender.take_sent() == []  # outside a pass
    sender.send_chosen([True, False, True])
    assert sender.take_sent() == [0, 2]


@on_ranks(2)
def test_the_order_is_that_of_rank_0(rank: int, world_size: int) -> None:
    sender = Sending("a", "b", "c")
    for member in "ca" if rank == 0 else "bca":
        sender.arrived(member)
    sender.await_anew()
    sender.agree_on_order(TorchCommunicator())
    sender.add_buckets(["d"])
    sender.begin_pass(None)
    sender.send_rest()
    assert sender.sent == [2, 0, 1, 3]


class FakeSideStream:
    """What a GPU has beside the stream of backward: it tells whether work is queued there."""

    def __init__(self) -> None:
        self.is_entered, self.joins, self.kept = False, 0, list[int]()

    @contextmanager
    def entered(self) -> Iterator[None]:
        assert not self.is_entered
        self.is_entered = True
        yield
        self.is_entered = False

    def join(self) -> None:
        assert not self.is_entered
        self.joins += 1

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor.data_ptr())


@pytest.mark.parametrize("method", ["int4", "warmup", "overlap", "ZeRO-2", "int4 in ZeRO-2", "zero_stage=2"])
@on_ranks(2)
def test_backward_waits_for_no_message(rank: int, world_size: int, method: str) -> None:
    """On a GPU a message is awaited on a side stream; what it reads stays, and the step waits for what it uses."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    torch.manual_seed(1 + rank)
    model: nn.Module = net
    if method in ("int4", "warmup", "overlap"):
        model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    optimizer: Any
    frees = False
    if method == "int4":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model.register_comm_hook(GradientCompression(net.named_parameters(), "int4", bucket_cap_mb=0.02), compress_hook)
    elif method.endswith("ZeRO-2"):
        frees = True
        form = "int4" if method.startswith("int4") else "none"
        options = {"stage": 2, "grad_compression": form, "bucket_cap_mb": 0.02}
        optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, **options)
    else:
        frees = method == "zero_stage=2"
        chosen = {"overlap": {"overlap_comm": True, "freeze_step": 1}, "zero_stage=2": {"zero_stage": 2}}
        optimizer = OnebitAdam(net.parameters(), bucket_cap_mb=0.02, **{"freeze_step": 9, **chosen.get(method, {})})
        if not frees:
            attach_ddp(model, optimizer)
    side, in_backward, outside, inside = FakeSideStream(), False, list[str](), list[str]()

    def watched(name: str) -> Any:
        original = getattr(TorchCommunicator, name)

        def call(self: TorchCommunicator, *args: Any, **kwargs: Any) -> Any:
            if in_backward and args[0].numel() > 16:  # and so no message of the passes
                (inside if side.is_entered else outside).append(name)
            return original(self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "side_stream_of", lambda device: side)
        for name in ("all_to_all", "all_gather", "all_reduce"):
            patch.setattr(TorchCommunicator, name, watched(name))
        for _ in range(5):
            loss = model(torch.randn(4, 64)).square().sum()
            joined, in_backward = side.joins, True
            inside.clear()
            outside.clear()  # what the ranks compare once
            loss.backward()
            in_backward = False
            assert side.joins > joined or not inside
            optimizer.step()
            optimizer.zero_grad()
    assert inside and not outside, (inside, outside)
    assert bool(side.kept) == frees, side.kept
