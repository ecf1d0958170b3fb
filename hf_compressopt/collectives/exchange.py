"""The exchange of a bucket: averages by compressed messages with error feedback, and sums and gathers of a dtype.

The compressed all-reduce has two phases (1-bit Adam, arXiv 2102.02888, Algorithm 1 and Figure 3). A bucket is cut into
one chunk per rank.

1. Every rank sends chunk j of its compressed bucket to rank j, its server (all-to-all).
2. Every server averages the messages, compresses the average, and sends it to all ranks (all-gather).

Both compressions keep what they lost and add it at the next step: the worker error and the server error. New errors
may be written beside the old ones, and kept once all ranks know that the step is taken.

In the hierarchical topology, with M nodes of g ranks:

1. The ranks of a node average what they want to send, at full precision. The rank at place l of each node then has the
   node's mean of shard l, the chunks l M to l M + M - 1.
2. It takes both phases above with its peers, the ranks at place l of the other nodes.
3. The ranks of a node gather the messages of all shards, which are the chunks in their order.

So a link between nodes carries what one rank of M would send, and a rank has the worker errors of its shard only.

The exchange of one bucket is a generator, a :data:`Task`. It yields before each wait, so that a :class:`Pipeline` can
compress the next bucket while a message is on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.topology import Topology
from hf_compressopt.kernels import AnyAverage, Average, Combination, Errors, IntegerFormat, MessageFormat
from hf_compressopt.kernels.errors import like_errors, tensor_of

_Result = TypeVar("_Result")
#: Work on one bucket. It yields before each wait: True if nothing is sent after it, so that the wait is not urgent.
Task = Generator["bool | None", None, _Result]
_LAST = True
#: Elements that are summed at once per thread: a few pieces fit into a core's own cache.
_PIECE = 1 << 15


# -- tasks in flight --------------------------------------------------------------------------------------------------


class Pipeline:
    """Tasks in flight: while one waits for the network, later ones compute.

    Each new task runs to its first wait. Then every earlier task that sends more goes on to its next wait, the newest
    first. The order of all steps depends on the tasks alone, so that ranks with the same tasks start their collectives
    in the same order.

    Attributes:
        limit: The most bytes under way, as far as :meth:`room_for` is called; None for any number.
        nbytes: Bytes under way.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.nbytes = limit, 0
        self._tasks: list[tuple[Task[None], int, bool]] = []  # the newest first, and whether it sends nothing more

    def room_for(self, nbytes: int) -> None:
        """Finish the oldest tasks until so many bytes more fit, or none is left."""
        while self._tasks and self.limit is not None and self.nbytes + nbytes > self.limit:
            task, done, _ = self._tasks.pop()
            for _ in task:
                pass
            self.nbytes -= done

    def add(self, task: Task[None], nbytes: int = 0) -> None:
        """Start a task with so many bytes under way, and advance the others."""
        self.nbytes += nbytes
        self._tasks.insert(0, (task, nbytes, False))
        self._advance(all_of_them=False)

    def drain(self) -> None:
        """Finish all tasks."""
        while self._tasks:
            self._advance(all_of_them=True)

    def _advance(self, *, all_of_them: bool) -> None:
        waiting = []
        for entry in self._tasks:
            task, nbytes, at_end = entry
            if at_end and not all_of_them:
                waiting.append(entry)
                continue
            try:
                waiting.append((task, nbytes, next(task) is _LAST))
            except StopIteration:
                self.nbytes -= nbytes
        self._tasks = waiting


def run_tasks(tasks: Iterable[Task[None]]) -> None:
    """Start tasks one after another, as a :class:`Pipeline` does, and finish them all."""
    pipeline = Pipeline()
    for task in tasks:
        pipeline.add(task)
    pipeline.drain()


# -- error feedback of one bucket -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorFeedback:
    """The errors of one bucket on one rank.

    Attributes:
        worker: What this rank's messages to the servers missed: of the whole bucket, or in the hierarchical topology of
            each chunk of this rank's shard that has elements.
        server: What this server's messages missed of the average of its chunk.
    """

    worker: tuple[Errors, ...]
    server: Errors

    def like(self) -> ErrorFeedback:
        """Return memory for errors of the same form."""
        return ErrorFeedback(tuple(map(like_errors, self.worker)), like_errors(self.server))

    def copy_(self, other: ErrorFeedback) -> None:
        """Take over the errors of another object of the same form."""
        for mine, theirs in zip((*self.worker, self.server), (*other.worker, other.server), strict=True):
            tensor_of(mine).copy_(tensor_of(theirs))


# -- the compressed exchange ------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """One rank's messages of a bucket, prepared once for each size of a bucket.

    Attributes:
        is_flat: Whether the topology is flat.
        parts: Elements and bytes of each chunk that this rank sends, if it is not.
        nbytes: Bytes of the messages to all servers.
        to_peers: Those to each server.
        from_peers: Bytes of the message from each peer.
        peers: Ranks that exchange a shard.
        own_numel: Elements of the chunk whose server this rank is.
        own: The first and the last byte of this server's message where all are gathered.
        stride: Bytes of the longest message, and so from one to the next there.
        total: Bytes of all of these.
        shards: In the hierarchical topology, the elements that the rank at each place of a node sends.
    """

    is_flat: bool
    parts: list[tuple[int, int]]
    nbytes: int
    to_peers: list[int]
    from_peers: list[int]
    peers: int
    own_numel: int
    own: tuple[int, int]
    stride: int
    total: int
    shards: list[int]


def _make_plan(numel: int, form: Any, place: Topology) -> _Plan:
    nbytes = form.chunk_nbytes(numel, place.world_size)
    to_peers, (start, stop) = [nbytes[chunk] for chunk in place.sent_chunks], place.own_range(numel)
    ranges, stride = [place.shard_range(numel, at) for at in range(place.node_size)], nbytes[0]
    first, own = place.own_chunk * stride, nbytes[place.own_chunk]
    return _Plan(
        is_flat=place.node_size == 1,
        parts=[(count, form.nbytes(count)) for count in place.sent_numels(numel) if count],
        nbytes=sum(to_peers),
        to_peers=to_peers,
        from_peers=[own] * place.nodes,
        peers=place.nodes,
        own_numel=stop - start,
        own=(first, first + own),
        stride=stride,
        total=stride * place.world_size,
        shards=[last - first for first, last in ranges],
    )


_plan: Callable[[int, Any, Topology], _Plan] = cache(_make_plan)


def all_reduce(
    z: Combination,
    feedback: ErrorFeedback,
    form: MessageFormat[AnyAverage],
    ranks: Communicator,
    new: ErrorFeedback | None = None,
) -> Task[AnyAverage]:
    """Average one bucket over the ranks by compressed messages. All ranks call, for the same buckets in one order.

    What ``z`` reads is used up where the task first waits; in the hierarchical topology where it waits for the second
    time.

    Args:
        z: What this rank wants to send.
        feedback: The errors of this bucket.
        form: The form of the messages.
        ranks: The ranks.
        new: Where the new errors are written; None to overwrite the old ones.

    Returns:
        The compressed mean, still as messages: the same bits on all ranks. A single rank gets what it wanted to send,
        plus the errors of a run on more ranks, which become zero.
    """
    numel, new = z.numel, new or feedback
    if ranks.world_size == 1:
        alone: AnyAverage = _with_old_errors(z, feedback)
        return alone
    plan = _plan(numel, form, ranks.topology)
    messages = torch.empty(plan.nbytes, dtype=torch.uint8, device=z.device)
    if plan.is_flat:
        form.compress_settled_(z, feedback.worker[0], new.worker[0], messages, ranks.world_size)
    else:
        yield from _compress_shard(z, feedback.worker, new.worker, messages, form, ranks, plan)
    del z
    received = yield from _received(messages, ranks, plan)
    del messages  # a bucket on its way holds one phase's messages
    together, own = _own_message(plan, received.device)
    form.average_compress_(received, feedback.server, new.server, own, plan.peers)
    del received, own
    yield from all_gather(together, ranks, last=None)
    return form.average(numel, together, ranks.world_size, plan.stride)


def _with_old_errors(z: Combination, feedback: ErrorFeedback) -> Any:
    values = torch.empty(z.numel, dtype=torch.float32, device=z.device)
    kernels.on(values).combine_(z, values)
    for error in (*feedback.worker, feedback.server):
        if error.numel():
            assert isinstance(error, Tensor)  # a single rank's
            values += error
            error.zero_()
    return Average.of(values)


def reduce_scatter(
    z: Combination, old: Sequence[Errors], new: Sequence[Errors], form: IntegerFormat, ranks: Communicator
) -> Task[Tensor]:
    """Average this rank's chunk of a bucket: the first phase alone. All ranks call, for the same buckets in one order.

    Args:
        z: What this rank wants to send, used up as by :func:`all_reduce`.
        old: The worker errors.
        new: Where the new worker errors are written; they may be the old ones.
        form: The form of the messages.
        ranks: The ranks.

    Returns:
        [n_own] float32. It is not finite if a value of any rank is not.
    """
    plan = _plan(z.numel, form, ranks.topology)
    messages = torch.empty(plan.nbytes, dtype=torch.uint8, device=z.device)
    if plan.is_flat:
        form.compress_settled_(z, old[0], new[0], messages, ranks.world_size)
    else:
        yield from _compress_shard(z, old, new, messages, form, ranks, plan)
    del z
    received = yield from _received(messages, ranks, plan)
    mean = torch.empty(plan.own_numel, dtype=torch.float32, device=received.device)
    form.mean_(received, mean, plan.peers, 1.0 / plan.peers)
    return mean


def own_message(
    numel: int, form: MessageFormat[Any], ranks: Communicator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return memory for what :func:`gather_messages` gathers, uint8, and the place of this server's message in it."""
    return _own_message(_plan(numel, form, ranks.topology), device)


def _own_message(plan: _Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    together, (first, stop) = torch.empty(plan.total, dtype=torch.uint8, device=device), plan.own
    if stop - first < plan.stride:
        together[stop : first + plan.stride].zero_()
    return together, together[first:stop]


def gather_messages(
    numel: int, together: Tensor, form: MessageFormat[AnyAverage], ranks: Communicator
) -> Task[AnyAverage]:
    """Gather one message from every server of a bucket of ``numel`` elements: the second phase alone. All ranks call.

    ``together`` is that of :func:`own_message`, with this server's message written.
    """
    yield from all_gather(together, ranks, last=None)
    return form.average(numel, together, ranks.world_size, _plan(numel, form, ranks.topology).stride)


def _compress_shard(
    z: Combination,
    old: Sequence[Errors],
    new: Sequence[Errors],
    messages: Tensor,
    form: MessageFormat[Any],
    ranks: Communicator,
    plan: _Plan,
) -> Task[None]:
    """Average a bucket inside the node, and compress this rank's shard of the mean."""
    assert ranks.levels is not None
    node, values = ranks.levels.node, torch.empty(z.numel, dtype=torch.float32, device=z.device)
    kernels.on(values).combine_(z, values)
    mean = yield from summed(values.to(ranks.levels.dtype), plan.shards, node, 1.0 / node.world_size)
    del values
    means = torch.split(mean, [numel for numel, _ in plan.parts])
    outs = torch.split(messages, [nbytes for _, nbytes in plan.parts])
    for part, before, after, out in zip(means, old, new, outs, strict=True):
        form.compress_settled_(Combination.of(part), before, after, out, 1)


def _received(messages: Tensor, ranks: Communicator, plan: _Plan) -> Task[Tensor]:
    """Send each server its message, and return those of all peers for this server's chunk, in rank order."""
    if plan.peers == 1:
        return messages
    received = messages.new_empty(sum(plan.from_peers))
    peers = ranks if ranks.levels is None else ranks.levels.peers
    handle = peers.all_to_all(received, messages, output_splits=plan.from_peers, input_splits=plan.to_peers)
    yield None
    handle.wait()
    return received


# -- the exchange of a dtype ------------------------------------------------------------------------------------------


def summed(
    values: Tensor, sizes: Sequence[int], ranks: Communicator, factor: float = 1.0, *, last: bool | None = None
) -> Task[Tensor]:
    """Sum every rank's j-th part on rank j, in rank order.

    Returns:
        [sizes[rank]] float32 or float64, times ``factor``.
    """
    own, count = sizes[ranks.rank], ranks.world_size
    received = values.new_empty(count * own)
    handle = ranks.all_to_all(received, values, output_splits=[own] * count, input_splits=sizes)
    yield last
    handle.wait()
    del values
    return sum_of_rows(received.view(count, own).unbind(), factor)


def scatter_sums(buffer: Tensor, ranks: Communicator) -> Task[Tensor]:
    """Sum every rank's part over the ranks: inside the node by place, then by node. All ranks call.

    The bits depend on the topology alone. A part crosses the link of a node M - 1 times, not g (M - 1) times.

    Returns:
        [n] float32 or float64.
    """
    if ranks.levels is None:
        return (yield from summed(buffer, _equal(buffer, ranks), ranks, last=_LAST))
    node, peers, dtype = ranks.levels.node, ranks.levels.peers, buffer.dtype
    by_place, last = in_place_order(buffer, ranks), _LAST if peers.world_size == 1 else None
    del buffer
    sums = yield from summed(by_place, _equal(by_place, node), node, last=last)
    if peers.world_size == 1:
        return sums
    del by_place
    sums = sums.to(dtype)  # what the nodes send has the dtype of what the ranks send
    return (yield from summed(sums, _equal(sums, peers), peers, last=_LAST))


def all_gather(whole: Tensor, ranks: Communicator, *, last: bool | None = _LAST) -> Task[None]:
    """Give all ranks every part of ``whole``, one per rank by chunk; this rank's is in its place. All ranks call."""
    levels = ranks.levels
    if levels is None:
        steps = [(ranks, whole)]
    else:
        shard = whole.view(levels.node.world_size, -1)[levels.node.rank]
        steps = [(levels.peers, shard), (levels.node, whole)]
    groups = [(group, together) for group, together in steps if group.world_size > 1]
    for number, (group, together) in enumerate(groups, 1):
        count = together.numel() // group.world_size
        handle = group.all_gather(together, together[group.rank * count : (group.rank + 1) * count])
        yield last if number == len(groups) else None
        handle.wait()


def in_place_order(buffer: Tensor, ranks: Communicator) -> Tensor:
    """Return parts in rank order, [world_size * n], by place and then by node: the order of their chunks."""
    place = ranks.topology
    return buffer if place.node_size == 1 else _swapped(buffer, place.nodes, place.node_size)


def in_rank_order(gathered: Tensor, ranks: Communicator) -> Tensor:
    """Return what :func:`all_gather` has gathered, [world_size * n], in rank order."""
    place = ranks.topology
    return gathered if place.node_size == 1 else _swapped(gathered, place.node_size, place.nodes)


def _swapped(parts: Tensor, outer: int, inner: int) -> Tensor:
    return parts.view(outer, inner, -1).transpose(0, 1).reshape(-1)


def _equal(buffer: Tensor, ranks: Communicator) -> list[int]:
    return [buffer.numel() // ranks.world_size] * ranks.world_size


def sum_of_rows(rows: Sequence[Tensor], factor: float = 1.0) -> Tensor:
    """Return the sum of ``rows`` in their order, times ``factor``: [n] float64 of float64 values, else float32."""
    first = rows[0]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    total = torch.empty(first.numel(), dtype=dtype, device=first.device)
    piece = _PIECE * torch.get_num_threads() if first.device.type == "cpu" else max(1, first.numel())
    split = first.numel() > piece
    runs = zip(*(torch.split(values, piece) for values in (total, *rows)), strict=True) if split else [(total, *rows)]
    for parts in runs:
        out, head, *others = parts
        if others and head.dtype == out.dtype:
            torch.add(head, others.pop(0), out=out)
        else:
            out.copy_(head)
        for other in others:
            out += other
        if factor != 1:
            out *= factor
    return total
