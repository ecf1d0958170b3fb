"""Transports by name: what the process group has, what registered itself, and clear words for what is not there."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hf_compressopt import OnebitAdam, ZeroOptimizer, attach_ddp
from hf_compressopt.collectives.torch_dist import TorchCommunicator
from tests.support.harness import on_ranks

NAME = "carrier"


def make(**options: Any) -> tuple[nn.Parameter, Any]:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(77))
    return p, OnebitAdam([p], lr=1e-2, freeze_step=2, scale_block=16, **options)


def train(rank: int, world_size: int, p: nn.Parameter, optimizer: Any) -> torch.Tensor:
    for step in range(6):
        p.grad = torch.randn(77, generator=torch.Generator().manual_seed(10 * rank + step))
        if optimizer.plan.reduce_grads:
            p.grad.mul_(1 / world_size)
            dist.all_reduce(p.grad)
        optimizer.step()
    return p.detach().clone()


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_a_backend_that_registered_itself_works_by_its_name(rank: int, world_size: int) -> None:
    """A third party's backend, as torch.distributed knows it: gloo's transport behind a name of its own."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])
    group = dist.new_group(backend=NAME)
    p, optimizer = make(process_group=group, communicator=NAME)
    by_name = train(rank, world_size, p, optimizer)
    q, reference = make()
    assert torch.equal(by_name, train(rank, world_size, q, reference))
    assert optimizer.communicator.name == NAME and optimizer.metrics()["bytes_sent_step"] > 0


@on_ranks(2)
def test_spellings_are_understood_and_what_is_not_there_is_refused_with_what_is(rank: int, world_size: int) -> None:
    for name in ("gloo", "auto", "compressed"):  # DeepSpeed's
        assert make(comm_backend_name=name)[1].communicator.name == "gloo"
    for options, words in (
        ({"communicator": "nccl"}, ["'nccl'", "'auto'", "'gloo'", "'mpi'"]),
        ({"communicator": "smoke_signals"}, ["'smoke_signals'", "'auto'", "'gloo'", "'mpi'"]),
        ({"communicator": "gloo", "comm_backend_name": "gloo"}, ["two spellings"]),
        ({"communicator": "gloo", "cuda_aware": True}, ["cuda_aware must be False"]),
    ):
        with pytest.raises(ValueError) as error:
            make(**options)
        assert all(word in str(error.value) for word in words), error.value


def test_several_ranks_without_torch_distributed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2, but torch.distributed is not initialized"):
        make()
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number of at least 1, got 'abc'"):
        make()


class Recording:
    """A process group that also writes down the order of its calls, and the threads that make them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.calls, self.threads = group, [], set()
        self.alltoall_base, self._allgather_base = group.alltoall_base, group._allgather_base

        self.recv, self.send = partial(self._called, "recv"), partial(self._called, "send")

    def _called(self, name: str, *args: Any) -> dist.Work:
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)
        return getattr(self.group, name)(*args)


def exchange(rank: int, world_size: int, unit: int) -> list[str]:
    """Rank i sends 3 j units to rank j, so none to rank 0, twice with other values under way."""
    communicator = TorchCommunicator()
    communicator.process_group = recording = Recording(dist.group.WORLD)  # type: ignore[arg-type, assignment]
    splits, handles = [3 * peer * unit for peer in range(world_size)], []
    for message in range(2):
        sent = torch.arange(sum(splits)) + 10_000_000 * rank + 100 * message
        received = torch.empty(3 * rank * unit * world_size, dtype=sent.dtype)
        gathered = torch.empty(5 * unit * world_size)
        own = [3 * rank * unit] * world_size
        part = torch.full((5 * unit,), 10.0 * rank + message)
        handles.append((communicator.all_to_all(received, sent, output_splits=own, input_splits=splits), received))
        handles.append((communicator.all_gather(gathered, part), gathered))
    for message in range(2):
        (to_all, received), (gather, gathered) = handles[2 * message : 2 * message + 2]
        to_all.wait()
        gather.wait()
        first = sum(splits[:rank])
        expected = torch.arange(first, first + 3 * rank * unit) + 100 * message
        for peer, part in enumerate(received.view(world_size, -1)) if rank else ():
            assert torch.equal(part, expected + 10_000_000 * peer)
        for peer, part in enumerate(gathered.view(world_size, -1)):
            assert part.unique().tolist() == [10.0 * peer + message]
    communicator.all_gather(torch.empty(0), torch.empty(0)).wait()
    return recording.calls


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_gloo_receives_before_it_sends(rank: int, world_size: int) -> None:
    """So that messages travel in both directions at once: with gloo's own all-to-all they often take turns."""
    others = world_size - 1
    to_all = ["recv"] * others * bool(rank) + ["send"] * (others - (rank > 0))
    assert exchange(rank, world_size, 10_000) == (to_all + ["recv"] * others + ["send"] * others) * 2
    assert exchange(rank, world_size, 1) == []  # gloo's own collectives carry small messages


@on_ranks(2)
def test_a_send_does_not_occupy_the_calling_thread(rank: int, world_size: int) -> None:
    """Also: the own part of a gather may lie in its place already."""
    communicator = TorchCommunicator()
    numel = 4 << 20
    gathered = torch.empty(world_size * numel)
    own = gathered[rank * numel : (rank + 1) * numel].fill_(rank)
    communicator.process_group = recording = Recording(dist.group.WORLD)  # type: ignore[arg-type, assignment]
    communicator.all_gather(gathered, own).wait()
    sent, received = torch.full_like(gathered, rank), torch.empty_like(gathered)
    splits = [numel] * world_size
    communicator.all_to_all(received, sent, output_splits=splits, input_splits=splits).wait()
    for result in (received, gathered):
        assert result.view(world_size, numel)[:, ::1000].unique(dim=1).flatten().tolist() == [*range(world_size)]
    threads = recording.threads
    assert len(threads) == 1 and threading.main_thread().name not in threads


class LargestTensor(TorchDispatchMode):
    """The most bytes of a tensor that any operation has returned."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.nbytes = max(self.nbytes, found.nbytes)
        return found


@pytest.mark.parametrize("world_size", [1, 4])
@on_ranks()
def test_a_broadcast_needs_no_copy_for_each_rank(rank: int, world_size: int) -> None:
    communicator = TorchCommunicator()
    for ranks in (communicator, communicator.duplicate()):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            whole = torch.full((6, 50), rank == 0, dtype=dtype)
            for tensor in (whole, whole.t(), whole[:, ::2], whole[0, 0], whole[:0]):
                tensor.fill_(rank == 0)
                with LargestTensor() as largest:
                    ranks.broadcast(tensor)
                assert tensor.all() and largest.nbytes <= tensor.nbytes, (tensor.shape, largest.nbytes)
    assert not communicator.traffic.bytes


@on_ranks(2)
def test_messages_are_where_the_model_is_now(rank: int, world_size: int) -> None:
    """The optimizers were made where the model was before; "meta" stands for that device."""

    before = torch.device("meta")
    model = nn.Linear(5, 5)
    optimizer = OnebitAdam(model.parameters(), freeze_step=2)
    optimizer.communicator.device = before
    assert attach_ddp(DistributedDataParallel(model), optimizer).communicator.device.type == "cpu"

    group = dist.new_group([*range(world_size)])
    other, own = nn.Linear(5, 5), nn.Linear(5, 5)
    groups = [{"params": [*other.parameters()]}, {"params": [*own.parameters()], "process_group": group}]
    zero = ZeroOptimizer(groups, torch.optim.AdamW)
    for ranks in zero.partition.communicators():
        ranks.device = before
    own(torch.ones(1, 5)).sum().backward()
    zero.step()
    assert [ranks.device.type for ranks in zero.partition.communicators()] == ["cpu", "cpu"]


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    world = dist.distributed_c10d._get_default_group()
    world.bound_device_id = torch.device("cuda", 0)
    yield world
    dist.destroy_process_group()


def test_a_part_is_not_split_off(bound: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dist.distributed_c10d, "_get_split_source", lambda _: pytest.fail("torch splits the default group")
    )
    part = TorchCommunicator(device=torch.device("cpu")).part([0])
    assert part.world_size == 1
    assert bound.bound_device_id == torch.device("cuda", 0)
