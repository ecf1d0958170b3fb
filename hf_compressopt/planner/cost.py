"""Predicted bytes and seconds of a step, by the formulas of docs/dev/planner.md.

Comments number them: (1) a ring, (2) an all-to-all, (3) a step of DDP, (4) one of the compressed stage, (5) one with
low-bit gradients. Sources: the ring, Patarasuk and Yuan 2009; overlap by buckets, Li et al. 2020 (arXiv 2006.15704);
b = 2 f, since a backward pass has two products for each product of the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from inspect import signature
from typing import TypeVar

from hf_compressopt.collectives.topology import AUTO, FLAT, TopologyOptions
from hf_compressopt.flat import BYTES_PER_MB, FLOAT_BYTES, bucket_numel_of
from hf_compressopt.kernels import INTEGER_BITS, IntegerFormat, SignFormat
from hf_compressopt.optim.base import CompressedOptimizer
from hf_compressopt.optim.warmup import check_warmup_bits

#: Share of a link's rate that payload reaches: TCP and Ethernet headers take 5 %, acknowledgements and gaps the rest.
WIRE_EFFICIENCY = 0.9
#: Share of the memory's bandwidth that the passes below reach, by docs/benchmarks.md (0.73 to 0.87).
MEMORY_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Cluster:
    """The machines and their links. Rates are in bytes per second; infinity costs no time."""

    nodes: int
    gpus_per_node: int
    bandwidth: float  # of a node's link, each way, shared by its ranks; not used with one node
    local_bandwidth: float = 300e9  # of each rank to the others of its node, each way
    memory_bandwidth: float = 2e12  # of a rank's memory; its share, if ranks share a processor
    host_bandwidth: float = math.inf  # of a processor that moves messages between nodes while it computes; not of cards
    latency: float = 20e-6  # seconds of one hop between nodes
    topology: str = AUTO  # "flat", "hierarchical" or "auto", of compressed messages and of ZeRO

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int >= 1, got {value!r}")
        for name in ("bandwidth", "local_bandwidth", "memory_bandwidth", "host_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0 bytes per second, got {getattr(self, name)}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency must be >= 0 seconds, got {self.latency}")
        TopologyOptions(self.topology)  # it checks it

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def node_size(self) -> int:
        """Ranks of a node that send one message together: 1 if the exchange is flat."""
        return 1 if self.topology == FLAT or self.nodes == 1 else self.gpus_per_node

    def pass_seconds(self, nbytes: float) -> float:
        """Seconds that the kernels take to move this many bytes over a rank's memory."""
        return nbytes / (self.memory_bandwidth * MEMORY_EFFICIENCY)


_Step = TypeVar("_Step", bound="Step")


@dataclass(frozen=True)
class Step:
    """A predicted step, or several: its time, bytes that a rank sends, bytes that leave a node over its link."""

    seconds: float
    sent: float
    on_link: float

    def __add__(self: _Step, other: Step) -> _Step:
        return type(self)(*(a + b for a, b in zip(astuple(self), astuple(other), strict=False)))

    def __mul__(self: _Step, count: float) -> _Step:
        return type(self)(*(value * count for value in astuple(self)))


@dataclass(frozen=True)
class Message(Step):
    """Cost of one collective, with the seconds of a processor."""

    host: float


def ring(cluster: Cluster, nbytes: float, passes: int, work: float = 0.0) -> Message:
    """Cost of an all-reduce (``passes`` 2) or all-gather (1) of ``nbytes``, (1); ``work``: see :func:`_message`."""
    count, several = cluster.ranks, cluster.nodes > 1
    sent = passes * (count - 1) / count * nbytes
    rates = [cluster.bandwidth] * several + [cluster.local_bandwidth] * (cluster.gpus_per_node > 1)
    hops = passes * ((cluster.nodes if several else count) - 1)
    wire = sent / (min(rates, default=math.inf) * WIRE_EFFICIENCY)
    return _message(cluster, sent, sent * several, wire, hops, work)


def all_to_all(cluster: Cluster, nbytes: float) -> Message:
    """Cost of an all-to-all: every rank sends each other rank its part of ``nbytes``, (2)."""
    count, local = cluster.ranks, cluster.gpus_per_node
    on_link = local * (count - local) / count * nbytes
    inside = (local - 1) / count * nbytes
    wire = max(on_link / cluster.bandwidth, inside / cluster.local_bandwidth) / WIRE_EFFICIENCY
    return _message(cluster, (count - 1) / count * nbytes, on_link, wire, int(count > 1), 0.0)


def all_gather(cluster: Cluster, nbytes: float) -> Message:
    """Cost of giving all ranks ``nbytes`` of parameters: a ring, or one inside the nodes and one between them."""
    if cluster.node_size == 1:
        return ring(cluster, nbytes, passes=1)
    inside, between = _levels(cluster)
    return _shared(ring(between, nbytes, passes=1), cluster) + ring(inside, nbytes, passes=1)


def _levels(cluster: Cluster) -> tuple[Cluster, Cluster]:
    """One node by itself, whose values no processor moves through a network, and the nodes as ranks."""
    between = replace(cluster, gpus_per_node=1, host_bandwidth=cluster.node_size * cluster.host_bandwidth)
    return replace(cluster, nodes=1, host_bandwidth=math.inf), between


def _shared(message: Message, cluster: Cluster) -> Message:
    """The cost of a node's message for one of the ranks that send it together."""
    return replace(message, sent=message.sent / cluster.node_size)


def _message(cluster: Cluster, sent: float, on_link: float, wire: float, hops: int, work: float) -> Message:
    """Cost of a message; ``work`` is the host's sums in bytes, if these are more than the bytes sent."""
    host = max(sent, work) / cluster.host_bandwidth
    return Message(hops * cluster.latency + max(wire, host), sent, on_link, host)


def one_phase(cluster: Cluster, values: float, nbytes: float) -> Message:
    """Cost of sending each rank its part of a bucket in messages of ``nbytes`` in all; of ``values`` bytes as it is."""
    if cluster.node_size == 1:
        return all_to_all(cluster, nbytes)
    inside, between = _levels(cluster)
    return all_to_all(inside, values) + _shared(all_to_all(between, nbytes), cluster)


def two_phases(cluster: Cluster, numel: int, nbytes: Sequence[int]) -> Message:
    """Cost of the compressed all-reduce of a bucket."""
    if len(nbytes) == 1:
        return Message(0, 0, 0, 0)
    gathered = len(nbytes) * nbytes[0]
    if cluster.node_size == 1:
        return all_to_all(cluster, sum(nbytes)) + ring(cluster, gathered, passes=1)
    inside, between = _levels(cluster)
    own = _shared(all_to_all(between, sum(nbytes)) + ring(between, gathered, passes=1), cluster)
    return all_to_all(inside, FLOAT_BYTES * numel) + own + ring(inside, gathered, passes=1)


# -- steps ------------------------------------------------------------------------------------------------------------

#: Share of the backward pass in forward and backward.
BACKWARD_SHARE = 2 / 3

_FIRST_DDP_BUCKET = 1 << 20  # torch's first bucket is small, so that sending starts early
#: Bytes over memory per parameter.
_FUSED_ADAM = 28  # p, m and v read and written, g read
_HALF_CASTS = 16  # DDP's hook: float32 -> 16 bits, divided; and back
_ZERO_PACKING = 24  # gradients into slices, the sum over ranks, parameters into and out of messages
_NORM = 4  # the gradient is read once before anything is written


@dataclass(frozen=True)
class Passes:
    """Bytes over memory per parameter: of every step, to make a message and the new error, to apply the average."""

    alone: float
    compress: float
    apply: float


#: g, m, error -> error; v, p, m -> p, m: of float32 state, and of the compact one, with m in messages.
ONEBIT_ADAM_FLOAT32 = Passes(_NORM, 16, 16)
ONEBIT_ADAM = Passes(_NORM, 6.25, 9.25)
#: 1-bit gradients: g, error -> error; v, p, m -> p, m.
ZERO_ONE_GRADIENT = Passes(_NORM, 12, 20)
#: Each step alone: g, m, v, p, u -> m, p, u; and p twice, to notice writes.
#: At a sync: u, error -> error; anchor, v -> anchor, p, m, u.
ZERO_ONE_LOCAL = Passes(_NORM + 40, 12, 24)
#: As 1-bit Adam; then m, v, v_fresh, p -> m, v_fresh and sums, and once more m, v, p -> p.
ONEBIT_LAMB = Passes(_NORM, 16, 40)


@dataclass(frozen=True)
class Training:
    """The model that is trained, and the seconds of its step without communication."""

    params: int  # that are trained
    compute_seconds: float  # of forward, backward and the update of AdamW
    update_seconds: float | None = None  # AdamW's share of them; None is one pass over memory, as of a fused AdamW
    itemsize: int = 4  # bytes of a parameter, and of its gradient: 4 or 2
    bucket_cap_mb: float = 25.0  # sent together: of gradients in DDP, of float32 values otherwise
    scale_block: int | None = 4096
    warmup_bits: int = signature(CompressedOptimizer).parameters["warmup_bits"].default
    #: Of ``params``, those of one dimension or in tensors below 256 elements, whose gradients travel in full precision
    #: beside messages of a compressed optimizer's 4 or 8 ``warmup_bits``.
    in_full: int = 0

    def __post_init__(self) -> None:
        if not self.params >= 1:
            raise ValueError(f"params must be >= 1, got {self.params}")
        if not 0 <= self.in_full <= self.params:
            raise ValueError(
                f"in_full must be from 0 to params={self.params}, of which it is a part, got {self.in_full}"
            )
        if not 0 < self.compute_seconds < math.inf:
            raise ValueError(f"compute_seconds must be > 0 and finite, got {self.compute_seconds}")
        if not 0 <= (self.update_seconds or 0) < self.compute_seconds:
            raise ValueError(
                f"update_seconds must be >= 0 and less than compute_seconds={self.compute_seconds}, of which it is a "
                f"part, got {self.update_seconds}"
            )
        bucket_numel_of(self.bucket_cap_mb)  # it checks it
        check_warmup_bits(self.warmup_bits, None)


def average(steps: list[tuple[float, Step]]) -> Step:
    total = sum(weight for weight, _ in steps)
    columns = zip(*(astuple(step * weight) for weight, step in steps), strict=True)
    return Step(*(sum(column) / total for column in columns))


class Model:
    """Predicts the steps of one training on one cluster."""

    def __init__(self, training: Training, cluster: Cluster) -> None:
        self.training, self.cluster = training, cluster
        given = training.update_seconds
        self.update = cluster.pass_seconds(_FUSED_ADAM * training.params) if given is None else given
        if self.update >= training.compute_seconds:
            raise ValueError(
                f"compute_seconds={training.compute_seconds} is less than the {self.update:.3g} s in which AdamW "
                f"passes once over {training.params:,} parameters at memory_bandwidth={cluster.memory_bandwidth:.3g} "
                "bytes/s: give the seconds of a whole step, or the bandwidth of this memory"
            )
        forward_backward = training.compute_seconds - self.update
        self.backward = BACKWARD_SHARE * forward_backward
        self.forward = forward_backward - self.backward

    def ddp(self, itemsize: int | None = None) -> Step:
        """A step of DDP with gradients of the parameters' dtype, or of ``itemsize`` bytes by a 16-bit hook, (3)."""
        params, own = self.training.params, self.training.itemsize
        sent_as = itemsize or own
        casts = self.cluster.pass_seconds(_HALF_CASTS * params) if sent_as < own else 0.0
        cap = self.training.bucket_cap_mb * BYTES_PER_MB
        total = params * own
        first, bucket = min(_FIRST_DDP_BUCKET, total), min(cap, total)
        shrunk = sent_as / own

        def reduce(nbytes: float) -> Message:
            # a processor adds two 16-bit values no faster than two float32 values
            work = 2 * (self.cluster.ranks - 1) / self.cluster.ranks * nbytes * FLOAT_BYTES / own
            return ring(self.cluster, nbytes * shrunk, passes=2, work=work)

        every = reduce(first) + reduce(bucket) * ((total - first) / bucket)
        seconds = self._overlapped(first / total, every, reduce(bucket)) + casts + self.update
        return Step(seconds, every.sent, every.on_link)

    def zero(self) -> Step:
        """A step of ZeRO-1 or ZeRO-2 with one micro-batch: both send the same bytes."""
        params, itemsize, count = self.training.params, self.training.itemsize, self.cluster.ranks
        total = params * itemsize
        bucket = min(self.training.bucket_cap_mb * BYTES_PER_MB / FLOAT_BYTES * itemsize, total)
        one, number = one_phase(self.cluster, bucket, bucket), total / bucket
        scatter, gather = one * number, all_gather(self.cluster, bucket) * number
        passes = self.cluster.pass_seconds((_ZERO_PACKING + self._node_passes()) * params * itemsize / FLOAT_BYTES)
        seconds = self._overlapped(bucket / total, scatter, one) + passes + self.update / count + gather.seconds
        return Step(seconds, scatter.sent + gather.sent, scatter.on_link + gather.on_link)

    def zero_low_bit(self, bits: int) -> Step:
        """A step of ZeRO-2 with messages of 4 or 8 bits both ways: as (3), with the passes of (5)."""
        params, count, grad, message = self.training.params, self.cluster.ranks, self.training.itemsize, bits / 8
        bucket = self._float_bucket()
        nbytes = sum(IntegerFormat(bits).chunk_nbytes(bucket, count))
        one, number = one_phase(self.cluster, grad * bucket, nbytes), params / bucket
        scatter, gather = one * number, all_gather(self.cluster, nbytes) * number
        # gradient -> slice; slice, 8-bit error -> message, error; all messages of a part -> mean
        make = 3 * grad + 2 + 2 * message + FLOAT_BYTES / count + self._node_passes()
        # of a part: master, parameter -> message; all messages, parameters -> parameters
        apply = 2 * FLOAT_BYTES / count + message + 2 * grad
        make, apply = (self.cluster.pass_seconds(nbytes * params) for nbytes in (make, apply))
        seconds = self._overlapped(bucket / params, scatter, one, make) + self.update / count + gather.seconds + apply
        return Step(seconds, scatter.sent + gather.sent, scatter.on_link + gather.on_link)

    def compressed(self, passes: Passes, *, early: bool = False) -> Step:
        """A step with a compressed message, (4); with ``early`` messages leave during backward, (5)."""
        params, world_size, block = self.training.params, self.cluster.ranks, self.training.scale_block
        bucket = self._float_bucket()
        one = two_phases(self.cluster, bucket, SignFormat(block).chunk_nbytes(bucket, world_size))
        messages = one * (params / bucket)
        serve = 2 + 8 / world_size  # average this rank's share of all signs; read and write its error
        make = passes.compress + self._node_passes() + serve
        if early:
            make, apply = (self.cluster.pass_seconds(nbytes * params) for nbytes in (make, passes.apply))
            seconds = self._overlapped(bucket / params, messages, one, make) + apply
        else:
            seconds = self.alone(passes).seconds + self._pipelined((make + passes.apply) * params, messages)
        return Step(seconds, messages.sent, messages.on_link)

    def low_bit(self, bits: int, *, settled: bool = True) -> Step:
        """A step of DDP with gradients in messages of 4 or 8 bits, (5)."""
        params, world_size, grad = self.training.params, self.cluster.ranks, self.training.itemsize
        bucket, message = self._float_bucket(), bits / 8
        one = two_phases(self.cluster, bucket, IntegerFormat(bits).chunk_nbytes(bucket, world_size))
        every = one * (params / bucket)
        if settled:
            # gradient, error -> message, error; messages, server error -> message, server error; message -> gradient
            make, finish = 2 * grad + 2 + 3 * message + 2 / world_size, 0.0
        else:
            # gradient, error -> message; messages, server error -> message, new server error
            make = grad + FLOAT_BYTES + 2 * message + 8 / world_size
            # gradient, error, both messages -> error, gradient; new server error -> server error
            finish = 2 * grad + 2 * FLOAT_BYTES + 2 * message + 8 / world_size
        work = self.cluster.pass_seconds((make + self._node_passes()) * params)
        seconds = self._overlapped(bucket / params, every, one, work)
        return Step(seconds + self.cluster.pass_seconds(finish * params) + self.update, every.sent, every.on_link)

    def averaged(self) -> Step:
        """A step of a compressed optimizer that averages gradients, in its warmup_bits."""
        bits = self.training.warmup_bits
        if bits in INTEGER_BITS:
            step, in_full = self.low_bit(bits, settled=False), self.training.in_full * self.training.itemsize
            return step + ring(self.cluster, in_full, passes=2) if in_full else step
        return self.ddp(min(bits // 8, self.training.itemsize))

    def shared_out(self, *, early: bool = False) -> Step:
        """A step of a compressed optimizer's warmup stage with ``zero_stage``: (4), with messages of integers."""
        params, ranks, bits = self.training.params, self.cluster.ranks, self.training.warmup_bits
        bucket, message, grad = self._float_bucket(), bits / 8, self.training.itemsize
        nbytes = IntegerFormat(bits).chunk_nbytes(bucket, ranks)
        one, number = one_phase(self.cluster, FLOAT_BYTES * bucket, sum(nbytes)), params / bucket
        scatter, gather = one * number, all_gather(self.cluster, ranks * nbytes[0]) * number
        # gradient, error -> message, error; all messages of a chunk -> mean
        make = (grad + 2 + 2 * message + FLOAT_BYTES / ranks + self._node_passes()) * params
        apply = (message + 2 * grad) * params  # message, p -> p
        seconds = self.update / ranks
        if early:
            work = self.cluster.pass_seconds(make)
            seconds += self._overlapped(bucket / params, scatter, one, work) + self._pipelined(apply, gather)
        else:
            seconds += self.forward + self.backward + self.cluster.pass_seconds(_NORM * params)
            seconds += self._pipelined(make + apply, scatter + gather)
        step = Step(seconds, scatter.sent + gather.sent, scatter.on_link + gather.on_link)
        in_full = self.training.in_full * FLOAT_BYTES  # sent at the end of the step
        return step + all_to_all(self.cluster, in_full) if in_full else step

    def alone(self, passes: Passes) -> Step:
        """A step of 0/1 Adam between syncs."""
        seconds = self.forward + self.backward + self.cluster.pass_seconds(passes.alone * self.training.params)
        return Step(seconds, 0, 0)

    def local_steps(self, interval: int) -> Step:
        """The mean step of 0/1 Adam in local intervals of this length, of which one step has a sync."""
        return average([(1, self.compressed(ZERO_ONE_LOCAL)), (interval - 1, self.alone(ZERO_ONE_LOCAL))])

    def _float_bucket(self) -> int:
        """Elements of a bucket of float32 values."""
        return min(bucket_numel_of(self.training.bucket_cap_mb), self.training.params)

    def _node_passes(self) -> float:
        """Bytes over memory per parameter if hierarchical: all values are written, those of the node read."""
        size = self.cluster.node_size
        return 0.0 if size == 1 else 2 * FLOAT_BYTES * (1 + 1 / size)

    def _pipelined(self, nbytes: float, messages: Message) -> float:
        """Seconds of passes over ``nbytes`` of memory that overlap with the messages of all buckets, as in (4)."""
        moved, number = self.cluster.pass_seconds(nbytes), self.training.params / self._float_bucket()
        wire = messages.seconds
        return max(moved + messages.host, wire) + min(moved, wire) / max(1.0, number)

    def _overlapped(self, first_share: float, messages: Message, last: Message, work: float = 0.0) -> float:
        """Seconds of forward and backward, overlapped with the messages: (3) without the update; work is (5)'s P."""
        backward = self.backward + messages.host + work
        return self.forward + max(first_share * backward + messages.seconds, backward + last.seconds)
