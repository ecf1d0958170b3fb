"""Ranks that are threads of one process: their collectives, their random numbers, and how they fail."""

import sys

import pytest
import torch

from tests.support.launching import REPO_ROOT

sys.path.append(str(REPO_ROOT / "scripts"))

from _convergence_ranks import InProcess, Room  # noqa: E402


def run(world_size, action):
    room = Room(world_size)
    return room.run(lambda rank: action(InProcess(room, rank)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_give_every_rank_what_the_interface_promises(world_size):
    def action(communicator):
        rank = communicator.rank
        total, largest = torch.full((3,), rank + 1.0), torch.tensor([rank, -rank])
        gathered = torch.empty(2 * world_size, dtype=torch.int64)
        handles = [communicator.all_reduce(total), communicator.all_reduce(largest, op="max")]
        handles.append(communicator.all_gather(gathered, torch.tensor([rank, 10 * rank])))
        for handle in handles:
            handle.wait()
        splits = list(range(world_size))  # rank j receives j numbers from everybody
        received = torch.empty(rank * world_size, dtype=torch.float32)
        sent = torch.full((sum(splits),), float(rank))
        communicator.all_to_all(received, sent, output_splits=[rank] * world_size, input_splits=splits).wait()
        return total, largest, gathered, received, communicator.all_gather_object({"rank": rank})

    ranks = range(world_size)
    for rank, (total, largest, gathered, received, objects) in enumerate(run(world_size, action)):
        assert total.tolist() == [sum(ranks) + world_size] * 3
        assert largest.tolist() == [world_size - 1, 0]
        assert gathered.tolist() == [number for other in ranks for number in (other, 10 * other)]
        assert received.tolist() == [float(other) for other in ranks for _ in range(rank)]
        assert objects == [{"rank": other} for other in ranks]


def test_bytes_are_those_of_the_algorithms_that_carry_the_collectives():
    def action(communicator):
        communicator.all_reduce(torch.zeros(100)).wait()
        communicator.all_gather(torch.zeros(40), torch.zeros(10)).wait()
        return dict(communicator.traffic.bytes)

    assert run(4, action) == [{"all_reduce": 2 * 3 * 400 // 4, "all_gather": 3 * 40}] * 4


def test_each_rank_has_its_own_random_numbers():
    def action(communicator):
        torch.manual_seed(communicator.rank)
        numbers = []
        for _ in range(3):
            numbers.append(float(torch.rand(())))
            communicator.all_reduce(torch.zeros(1)).wait()
        return numbers

    for rank, numbers in enumerate(run(3, action)):
        torch.manual_seed(rank)
        assert numbers == [float(torch.rand(())) for _ in range(3)]


def test_an_error_on_one_rank_ends_all():
    def action(communicator):
        if communicator.rank == 1:
            raise ValueError("rank 1 fails")
        communicator.all_reduce(torch.zeros(1)).wait()

    with pytest.raises(ValueError, match="rank 1 fails"):
        run(3, action)


def test_a_collective_that_a_rank_has_left_out_is_an_error():
    def action(communicator):
        if communicator.rank:
            communicator.all_reduce(torch.zeros(1)).wait()

    with pytest.raises(RuntimeError, match="waits for ranks that have ended"):
        run(2, action)


def test_ranks_in_different_collectives_are_an_error():
    def action(communicator):
        if communicator.rank:
            return communicator.all_reduce(torch.zeros(1)).wait()
        return communicator.all_gather(torch.zeros(2), torch.zeros(1)).wait()

    with pytest.raises(RuntimeError, match="different collectives"):
        run(2, action)
