"""Messages through pipes: by key, from ranks that are early or late, and from none that has ended."""

import gc
import os
import threading
import time
from datetime import timedelta

import pytest

from hf_compressopt.collectives.node_pipes import NUMBERS, NodePipes


def opened(ranks: int, seconds: float | None = 20.0) -> list[NodePipes]:
    """The pipes of all ranks, which are of this process here."""
    pipes = [NodePipes(ranks, rank, None if seconds is None else timedelta(seconds=seconds)) for rank in range(ranks)]
    made = [own.make() for own in pipes]
    for own in pipes:
        own.open([os.getpid()] * ranks, made)
    return pipes


def message(rank: int, key: int) -> list[int]:
    return [rank, key, -1, 2**62 + rank, key * key][:NUMBERS]


def test_messages_come_by_key_whoever_is_early() -> None:
    pipes = opened(3)
    for rank, keys in enumerate(([0, 1, 2], [2, 0, 1], [1, 2, 0])):
        for key in keys:
            pipes[rank].send(key, message(rank, key))
    for rank, keys in enumerate(([2, 1, 0], [0, 1, 2], [1, 0, 2])):
        for key in keys:
            assert pipes[rank].receive(key, message(rank, key)) == [message(other, key) for other in range(3)]


@pytest.mark.parametrize("seconds", [20.0, None])
def test_more_messages_than_a_pipe_holds_wait_for_their_reader(seconds: float | None) -> None:
    first, second = opened(2, seconds)
    count = 5000

    def send() -> None:
        for key in range(count):
            first.send(key, message(0, key))

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    second.send(7, message(1, 7))
    for key in reversed(range(count)):
        assert second.receive(key, [0] * NUMBERS)[0] == message(0, key)
    thread.join()
    assert first.receive(7, message(0, 7))[1] == message(1, 7)


def test_what_a_rank_sent_before_it_ended_arrives_and_then_an_error() -> None:
    first, second = opened(2)
    first.send(3, message(0, 3))
    del first
    gc.collect()
    assert second.receive(3, message(1, 3)) == [message(0, 3), message(1, 3)]
    with pytest.raises(RuntimeError, match="rank 0 of the node has ended"):
        second.receive(4, message(1, 4))
    with pytest.raises(RuntimeError, match="rank 0 of the node has ended"):
        second.send(4, message(1, 4))


def test_a_rank_that_does_not_answer_is_an_error_in_time() -> None:
    first, _second = opened(2, 0.2)
    with pytest.raises(RuntimeError, match=r"rank 1 of the node has not answered for 0\.2 s"):
        first.receive(0, message(0, 0))
    with pytest.raises(RuntimeError, match=r"rank 1 of the node has not answered for 0\.2 s"):
        for key in range(10_000):
            first.send(key, message(0, key))


def test_nothing_stays_open() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pipes = opened(4)
    assert len(os.listdir("/proc/self/fd")) == before + 2 * 4 * 3
    del pipes
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
