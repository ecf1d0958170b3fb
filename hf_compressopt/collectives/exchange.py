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

Consecutive small buckets are sent together (:func:`in_runs`): what a rank sends of them to another is one message. It
holds the bytes that they have apart.

The exchange of such a run, or of one bucket, is a generator, a :data:`Task`. It yields before each wait, so that a
:class:`Pipeline` can compress the next bucket while a message is on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.chunks import Topology
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.kernels import (
    MESSAGE_ALIGNMENT,
    Average,
    Combination,
    Errors,
    IntegerFormat,
    MessageFormat,
    reference,
)
from hf_compressopt.kernels.compact import like_errors, tensor_of
from hf_compressopt.kernels.memory import side_stream_of

_Result = TypeVar("_Result")
_Bucket = TypeVar("_Bucket")
#: Work on one bucket. It yields before each wait: True if nothing is sent after it, so that the wait is not urgent.
Task = Generator["bool | None", None, _Result]
_LAST = True
#: Elements up to which consecutive small buckets are sent together: their messages are too short to fill a link.
TOGETHER = 1 << 16


# -- tasks in flight --------------------------------------------------------------------------------------------------


class Pipeline:
    """Tasks in flight: while one waits for the network, later ones compute. ``limit``: the most bytes under way.

    Each new task runs to its first wait; then every earlier one goes on to its next wait, the newest first. The order
    depends on the tasks alone, so that all ranks start collectives alike. Given the ``device`` on which backward runs
    meanwhile, a GPU does the work of the tasks on a stream of its own. Then what they read must stay: :meth:`keep`.
    """

    def __init__(self, limit: int | None = None, device: torch.device | None = None) -> None:
        self.limit, self.nbytes = limit, 0
        self._side = None if device is None else side_stream_of(device)
        self._tasks: list[tuple[Task[object], int, bool]] = []  # the newest first, and whether it sends nothing more

    def room_for(self, nbytes: int) -> None:
        """Finish the oldest tasks until so many bytes more fit, or none is left."""
        while self._tasks and self.limit is not None and self.nbytes + nbytes > self.limit:
            task, done, _ = self._tasks.pop()
            for _ in task:
                pass
            self.nbytes -= done

    def add(self, task: Task[object], nbytes: int = 0) -> None:
        """Start a task with so many bytes under way, for which there is room then, and advance the others."""
        with nullcontext() if self._side is None else self._side.entered():
            self.room_for(nbytes)
            self.nbytes += nbytes
            self._tasks.insert(0, (task, nbytes, False))
            self._advance(all_of_them=False)

    def drain(self) -> None:
        """Finish all tasks; later work on a GPU waits for theirs."""
        if self._tasks:
            with nullcontext() if self._side is None else self._side.entered():
                while self._tasks:
                    self._advance(all_of_them=True)
        self.join()

    @property
    def is_empty(self) -> bool:
        return not self._tasks

    def join(self) -> None:
        """Let later work on a GPU wait for what the tasks have queued there."""
        if self._side is not None:
            self._side.join()

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep the memory of tensors that tasks read, and that others may free meanwhile."""
        if self._side is not None:
            for tensor in (each for each in tensors if each is not None):
                self._side.keep(tensor)

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
class BucketErrors:
    """The errors of one bucket on one rank; hierarchical, the worker's are those of each chunk of its shard."""

    worker: tuple[Errors, ...]
    server: Errors

    def copy_(self, other: BucketErrors) -> None:
        """Take over the errors of another object of the same form."""
        for mine, theirs in zip((*self.worker, self.server), (*other.worker, other.server), strict=True):
            tensor_of(mine).copy_(tensor_of(theirs))


# -- the compressed exchange ------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Sizes of the messages that one rank sends of a run of buckets, prepared once."""

    parts: list[tuple[int, int]]  # if hierarchical, elements and bytes of each chunk that this rank sends
    shards: list[int]  # likewise, elements that the rank at each place of a node sends
    sent: list[int]  # bytes of each bucket's messages to all servers
    to_peers: list[int]  # bytes to each server
    peers: int  # ranks that exchange a shard
    own_numel: int  # of the chunk of the first bucket whose server this rank is
    received: list[int]  # bytes of all peers' messages for the own chunk of each bucket
    own: list[tuple[int, int]]  # first and last byte of this server's message of each bucket where all are gathered
    strides: list[int]  # bytes of the longest message of each bucket, and so from one to the next
    whole: list[int]  # bytes of each bucket's messages of all servers
    # of several buckets the order of rows of 16 bytes in which messages lie server by server, those received lie bucket
    # by bucket, and those gathered
    orders: tuple[Tensor, Tensor, Tensor] | None


@cache
def _plan(numels: tuple[int, ...], form: Any, place: Topology, device: torch.device) -> _Plan:
    chunks = [form.chunk_nbytes(numel, place.world_size) for numel in numels]
    sent = [[nbytes[chunk] for chunk in place.sent_chunks] for nbytes in chunks]
    own, strides = [nbytes[place.own_chunk] for nbytes in chunks], [nbytes[0] for nbytes in chunks]
    firsts = accumulate(strides, initial=place.own_chunk * sum(strides))
    gathered = [sent, [own] * place.nodes, [strides] * place.world_size]
    (start, stop), at = place.own_range(numels[0]), range(place.node_size)
    return _Plan(
        parts=[(count, form.nbytes(count)) for count in place.sent_numels(numels[0]) if count],
        shards=[last - first for first, last in (place.shard_range(numels[0], each) for each in at)],
        sent=[sum(nbytes) for nbytes in sent],
        to_peers=[sum(nbytes) for nbytes in zip(*sent, strict=True)],
        peers=place.nodes,
        own_numel=stop - start,
        received=[nbytes * place.nodes for nbytes in own],
        own=[(first, first + nbytes) for first, nbytes in zip(firsts, own, strict=False)],
        strides=strides,
        whole=[stride * place.world_size for stride in strides],
        orders=None if len(numels) == 1 else tuple(_by_column(sizes).to(device) for sizes in gathered),  # type: ignore[arg-type]
    )


def _by_column(sizes: Sequence[Sequence[int]]) -> Tensor:
    """Return the order of rows of 16 bytes in which messages of these bytes, which lie by line, lie by column."""
    lines, columns = len(sizes), len(sizes[0])
    counts = [size // MESSAGE_ALIGNMENT for line in sizes for size in line]
    rows = torch.split(torch.arange(sum(counts), device="cpu"), counts)
    return torch.cat([rows[line * columns + column] for column in range(columns) for line in range(lines)])


def _in_order(messages: Tensor, plan: _Plan, number: int) -> Tensor:
    if plan.orders is None:
        return messages
    return messages.view(-1, MESSAGE_ALIGNMENT).index_select(0, plan.orders[number]).view(-1)


def in_runs(
    buckets: Iterable[_Bucket], numel: Callable[[_Bucket], int], ranks: Communicator
) -> Iterator[list[_Bucket]]:
    """Divide buckets, in their order, into runs that are sent together: small ones in a flat topology, others alone."""
    run, total = list[_Bucket](), 0
    for bucket in buckets:
        total += numel(bucket)
        if run and (total > TOGETHER or ranks.levels is not None):
            yield run
            run, total = [], numel(bucket)
        run.append(bucket)
    if run:
        yield run


def all_reduce(
    zs: Sequence[Combination],
    feedback: Sequence[BucketErrors],
    form: MessageFormat | None,
    ranks: Communicator,
    new: Sequence[BucketErrors] | None = None,
    *,
    keep: bool = True,
) -> Task[list[Average]]:
    """Average a run of buckets by compressed messages. All ranks call, for the same buckets in one order.

    Without a ``form`` they are averaged in float32, and there are no errors.

    What ``zs`` (of one bucket in the hierarchical topology) read is used up where the task first waits; in the
    hierarchical topology where it waits for the second time. New errors go to ``new``, or over the old ones; unless the
    task is to ``keep`` them, they are dropped, and the old ones of several ranks stay.

    Returns the compressed means, still as messages: the same bits on all ranks. A single rank gets what it wanted to
    send, plus the errors of a run on more ranks, which become zero.
    """
    new = new or feedback
    if ranks.world_size == 1:
        return [_with_old_errors(z, errors) for z, errors in zip(zs, feedback, strict=True)]
    if form is None:
        return (yield from _average_in_full(zs, ranks))
    numels, device = tuple([z.numel for z in zs]), zs[0].device
    plan = _plan(numels, form, ranks.topology, device)
    messages, use = torch.empty(sum(plan.to_peers), dtype=torch.uint8, device=device), kernels.on(device)
    if ranks.levels is None:
        for z, old, fresh, out in zip(zs, feedback, new, torch.split(messages, plan.sent), strict=True):
            use.compress_(form, z, old.worker[0], out, ranks.world_size, fresh.worker[0] if keep else None)
        del out, z  # gradients may be freed while their messages travel
    else:
        left = new[0].worker if keep else [None] * len(new[0].worker)
        yield from _compress_shard(zs[0], feedback[0].worker, left, messages, form, ranks, plan)
    del zs
    received = yield from _received(_in_order(messages, plan, 0), ranks, plan)
    del messages  # a bucket on its way holds one phase's messages
    together, received = _room(plan, device), _in_order(received, plan, 1)
    parts = torch.split(received, plan.received)
    for (start, stop), part, old, fresh in zip(plan.own, parts, feedback, new, strict=True):
        served = fresh.server if keep else like_errors(fresh.server)
        use.average_compress_(form, part, old.server, served, together[start:stop], plan.peers)
    del received, parts, part
    yield from all_gather(together, ranks, last=None)
    rows = zip(numels, torch.split(_in_order(together, plan, 2), plan.whole), plan.strides, strict=True)
    return [Average(numel, form, part, ranks.world_size, stride) for numel, part, stride in rows]


def _average_in_full(zs: Sequence[Combination], ranks: Communicator) -> Task[list[Average]]:
    numels, device = [z.numel for z in zs], zs[0].device
    together = torch.empty(sum(numels), dtype=torch.float32, device=device)
    parts = torch.split(together, numels)
    for z, part in zip(zs, parts, strict=True):
        kernels.on(device).combine_(z, part)
    del zs, z  # as in all_reduce
    together.mul_(1.0 / ranks.world_size)
    handle = ranks.all_reduce(together)
    yield None
    handle.wait()
    return [Average(numel, values=part) for numel, part in zip(numels, parts, strict=True)]


def _with_old_errors(z: Combination, feedback: BucketErrors) -> Average:
    values = torch.empty(z.numel, dtype=torch.float32, device=z.device)
    kernels.on(values).combine_(z, values)
    for error in (*feedback.worker, feedback.server):
        if error.numel():
            assert isinstance(error, Tensor)  # a single rank's
            values += error
            error.zero_()
    return Average.of(values)


def reduce_scatter(
    z: Combination,
    old: Sequence[Errors],
    new: Sequence[Errors],
    form: IntegerFormat,
    ranks: Communicator,
    factor: float = 1.0,
    *,
    last: bool | None = None,
) -> Task[Tensor]:
    """Average this rank's chunk of a bucket, times ``factor``: the first phase of :func:`all_reduce` alone.

    ``last`` is what the task yields before its last wait. Returns [n_own] float32, not finite if a value of any rank is
    not.
    """
    plan = _plan((z.numel,), form, ranks.topology, z.device)
    messages = torch.empty(sum(plan.to_peers), dtype=torch.uint8, device=z.device)
    if ranks.levels is None:
        kernels.on(messages).compress_(form, z, old[0], messages, ranks.world_size, new[0])
    else:
        yield from _compress_shard(z, old, new, messages, form, ranks, plan)
    del z
    received = yield from _received(messages, ranks, plan, last)
    mean = torch.empty(plan.own_numel, dtype=torch.float32, device=received.device)
    kernels.on(mean).mean_(form, received, mean, plan.peers, factor / plan.peers)
    return mean


def own_message(numel: int, form: MessageFormat, ranks: Communicator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for what :func:`gather_messages` gathers, uint8, and the place of this server's message in it."""
    plan = _plan((numel,), form, ranks.topology, device)
    together, ((start, stop),) = _room(plan, device), plan.own
    return together, together[start:stop]


def _room(plan: _Plan, device: torch.device) -> Tensor:
    """Return memory for the messages of all servers, with zeros behind those of this server that are shorter."""
    together = torch.empty(sum(plan.whole), dtype=torch.uint8, device=device)
    for (start, stop), stride in zip(plan.own, plan.strides, strict=True):
        if stop - start < stride:
            together[stop : start + stride].zero_()
    return together


def gather_messages(
    numel: int, together: Tensor, form: MessageFormat, ranks: Communicator, *, last: bool | None = None
) -> Task[Average]:
    """Gather what every server of a bucket has written in its :func:`own_message`: the second phase alone."""
    yield from all_gather(together, ranks, last=last)
    plan = _plan((numel,), form, ranks.topology, together.device)
    return Average(numel, form, together, ranks.world_size, plan.strides[0])


def _compress_shard(
    z: Combination,
    old: Sequence[Errors],
    new: Sequence[Errors | None],
    messages: Tensor,
    form: MessageFormat,
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
        kernels.on(out).compress_(form, Combination.of(part), before, out, 1, after)


def _received(messages: Tensor, ranks: Communicator, plan: _Plan, last: bool | None = None) -> Task[Tensor]:
    """Send each server its message, and return those of all peers for this server's chunk, in rank order."""
    if plan.peers == 1:
        return messages
    received = messages.new_empty(sum(plan.received))
    peers, each = ranks if ranks.levels is None else ranks.levels.peers, [received.numel() // plan.peers] * plan.peers
    handle = peers.all_to_all(received, messages, output_splits=each, input_splits=plan.to_peers)
    yield last
    handle.wait()
    return received


# -- the exchange of a dtype ------------------------------------------------------------------------------------------


def summed(
    values: Tensor, sizes: Sequence[int], ranks: Communicator, factor: float = 1.0, *, last: bool | None = None
) -> Task[Tensor]:
    """Sum every rank's j-th part on rank j, in rank order: [sizes[rank]] float32 or float64, times ``factor``."""
    own, count = sizes[ranks.rank], ranks.world_size
    received = values.new_empty(count * own)
    handle = ranks.all_to_all(received, values, output_splits=[own] * count, input_splits=sizes)
    yield last
    handle.wait()
    del values
    return sum_of_rows(received.view(count, own), factor)


def scatter_sums(buffer: Tensor, ranks: Communicator) -> Task[Tensor]:
    """Sum every rank's part over the ranks, in the node by place, then by node: the topology determines the bits."""
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
    return buffer if place.node_size == 1 else buffer.view(place.nodes, place.node_size, -1).transpose(0, 1).reshape(-1)


def _equal(buffer: Tensor, ranks: Communicator) -> list[int]:
    return [buffer.numel() // ranks.world_size] * ranks.world_size


def sum_of_rows(rows: Tensor, factor: float = 1.0) -> Tensor:
    """Return the sum of [count, n] in the order of the rows, times ``factor``: [n] float32, or float64 of float64."""
    if rows.dtype == torch.float64:
        total = torch.empty(rows.shape[1], dtype=torch.float64, device=rows.device)
        reference.sum_rows_(rows, total, factor)
    else:
        total = torch.empty(rows.shape[1], dtype=torch.float32, device=rows.device)
        kernels.on(rows).sum_rows_(rows, total, factor)
    return total
