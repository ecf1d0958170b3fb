"""The phases of the exchange of one bucket, in either topology: from what a rank wants to send to the average.

Flat: every rank sends chunk j of its messages to rank j, its server, which averages the chunk; all gather the averages.

In two levels, with M nodes of g ranks:

1. The ranks of a node average what they want to send, at full precision. The rank at place l of each node then has the
   node's mean of shard l, the chunks l M to l M + M - 1.
2. It takes both phases above with its peers, the ranks at place l of the other nodes.
3. The ranks of a node gather the messages of all shards, which are the chunks in their order.

So a link between nodes carries what one rank of M would send, and a rank has the worker errors of its shard only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator, Levels
from hf_compressopt.collectives.topology import Topology
from hf_compressopt.kernels import AnyAverage, Combination, Errors, MessageFormat

_Result = TypeVar("_Result")
#: Work on one bucket: it yields before each wait, and returns a result.
Task = Generator[None, None, _Result]


@dataclass(frozen=True)
class ShardErrors:
    """The worker errors of a shard, of the exchange in two levels.

    Attributes:
        chunks: The errors of each of its chunks, some of which may have no elements.
    """

    chunks: tuple[Errors, ...]

    def numel(self) -> int:
        """Return the number of elements."""
        return sum(error.numel() for error in self.chunks)

    def sent(self) -> list[Errors]:
        """Return the errors of the chunks that have elements, in their order: of those a rank sends something."""
        return [error for error in self.chunks if error.numel()]


#: Worker errors: of a whole bucket, or in two levels of this rank's shard.
WorkerErrors = Errors | ShardErrors


@dataclass(frozen=True)
class Part:
    """Consecutive chunks of a bucket that one call compresses: all of them, or one of a shard.

    Attributes:
        z: What is to be sent.
        error: Its worker error.
        chunks: The number of chunks.
        nbytes: Bytes of their messages.
    """

    z: Combination
    error: Errors
    chunks: int
    nbytes: int


def parts_to_send(
    z: Combination, worker_error: WorkerErrors, form: MessageFormat[AnyAverage], communicator: Communicator
) -> Task[tuple[Part, ...]]:
    """Return what this rank sends to its peers; in two levels that is the node's mean of its shard."""
    if not isinstance(worker_error, ShardErrors):
        chunks = communicator.world_size
        return (Part(z, worker_error, chunks, sum(form.chunk_nbytes(z.numel, chunks))),)
    assert communicator.levels is not None
    mean = yield from _mean_in_node(z, communicator.topology, communicator.levels)
    values = torch.split(mean, communicator.topology.sent_numels(z.numel))
    rows = zip(values, worker_error.chunks, strict=True)
    return tuple(Part(Combination.of(x), e, 1, form.nbytes(x.numel())) for x, e in rows if x.numel())


def messages_of(
    parts: Sequence[Part], compress_: Callable[[Combination, Errors, Tensor, int], None], device: torch.device
) -> Tensor:
    """Compress parts, and return their messages, one after another, uint8."""
    messages = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=device)
    for part, out in with_messages(parts, messages):
        compress_(part.z, part.error, out, part.chunks)
    return messages


def with_messages(parts: Sequence[Part], messages: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Iterate over parts and the places of their messages, one after another in ``messages``."""
    return zip(parts, torch.split(messages, [part.nbytes for part in parts]), strict=True)


def _mean_in_node(z: Combination, topology: Topology, levels: Levels) -> Task[Tensor]:
    """Return the mean of this rank's shard over the ranks of its node, summed in their order. [shard] float32."""
    shards = [topology.shard_range(z.numel, place) for place in range(topology.node_size)]

    def write(values: Tensor) -> None:
        full = values if values.dtype == torch.float32 else torch.empty(z.numel, dtype=torch.float32, device=z.device)
        kernels.on(full).combine_(z, full)
        if full is not values:
            values.copy_(full)

    sizes, like = [stop - start for start, stop in shards], torch.empty(0, dtype=levels.dtype, device=z.device)
    handle, mean = levels.node.sum_parts(sizes, write, like, 1.0 / topology.node_size)
    yield
    handle.wait()
    return mean()


def averaged(
    numel: int,
    form: MessageFormat[AnyAverage],
    to_servers: Tensor,
    serve: Callable[[Tensor, Tensor], None],
    communicator: Communicator,
) -> Task[AnyAverage]:
    """Exchange a bucket's messages with the peers, gather those of the other shards, and return the average.

    Args:
        numel: Elements of the bucket.
        form: The form of the messages.
        to_servers: uint8, this rank's messages, one after another.
        serve: Averages the messages of all peers, uint8, into one.
        communicator: The ranks.
    """
    received = yield from received_by_server(numel, form, to_servers, communicator)
    own = form.chunk_nbytes(numel, communicator.world_size)[communicator.topology.own_chunk]
    message = torch.empty(own, dtype=torch.uint8, device=received.device)
    serve(received, message)
    del to_servers, received  # a bucket on its way holds one phase's messages
    return (yield from from_servers(numel, form, message, communicator))


def received_by_server(
    numel: int, form: MessageFormat[AnyAverage], to_servers: Tensor, communicator: Communicator
) -> Task[Tensor]:
    """Send each server its message, and return those of all peers for this server's chunk, in rank order.

    Arguments are those of :func:`averaged`.
    """
    topology = communicator.topology
    peers = communicator if communicator.levels is None else communicator.levels.peers
    if peers.world_size == 1:
        return to_servers
    nbytes = form.chunk_nbytes(numel, communicator.world_size)
    sent = [nbytes[chunk] for chunk in topology.sent_chunks]
    received = to_servers.new_empty(peers.world_size * nbytes[topology.own_chunk])
    splits = [nbytes[topology.own_chunk]] * peers.world_size
    handle = peers.all_to_all(received, to_servers, output_splits=splits, input_splits=sent)
    yield
    handle.wait()
    return received


def from_servers(
    numel: int, form: MessageFormat[AnyAverage], message: Tensor, communicator: Communicator
) -> Task[AnyAverage]:
    """Return what all servers send of a bucket.

    Args:
        numel: Elements of the bucket.
        form: The form of the messages.
        message: uint8, this server's.
        communicator: The ranks.
    """
    stride = form.chunk_nbytes(numel, communicator.world_size)[0]
    if message.numel() < stride:
        message = torch.cat([message, message.new_zeros(stride - message.numel())])
    messages = yield from gathered(message, communicator)
    return form.average(numel, messages, communicator.world_size, stride)


def gathered(message: Tensor, communicator: Communicator) -> Task[Tensor]:
    """Return the messages of all chunks, one after another, from every rank's message of the chunk that it serves.

    Args:
        message: [n] uint8, of the same length on all ranks.
        communicator: The ranks.
    """
    levels = communicator.levels
    for ranks in (communicator,) if levels is None else (levels.peers, levels.node):
        message = yield from _all_gathered(message, ranks)
    return message


def _all_gathered(message: Tensor, ranks: Communicator) -> Task[Tensor]:
    if ranks.world_size == 1:
        return message
    together = message.new_empty(ranks.world_size * message.numel())
    handle = ranks.all_gather(together, message)
    yield
    handle.wait()
    return together
