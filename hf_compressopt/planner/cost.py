"""Predicted bytes and seconds of a step, by the formulas of docs/dev/planner.md.

Comments number them: (1) a ring, (2) an all-to-all, (3) a step of DDP, (4) one of the compressed stage, (5) one with
low-bit gradients. Sources: the ring, Patarasuk and Yuan 2009; overlap by buckets, Li et al. 2020 (arXiv 2006.15704);
b = 2 f, since a backward pass has two products for each product of the forward pass.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from inspect import signature

from hf_compressopt.collectives.topology import AUTO, FLAT
from hf_compressopt.flat import BYTES_PER_MB, FLOAT_BYTES, bucket_numel_of
from hf_compressopt.kernels import INTEGER_BITS, IntegerFormat, SignFormat
from hf_compressopt.optim.base import CompressedOptimizer

#: Share of a link's rate that payload reaches: TCP and Ethernet headers take 5 %, acknowledgements and gaps the rest.
WIRE_EFFICIENCY = 0.9
#: Share of the memory's bandwidth that the passes below reach, by docs/benchmarks.md (0.73 to 0.87).
MEMORY_EFFICIENCY = 0.8
#: Share of the backward pass in forward and backward.
BACKWARD_SHARE = 2 / 3

_DEFAULTS = signature(CompressedOptimizer).parameters
_FIRST_DDP_BUCKET = 1 << 20  # torch's first bucket is small, so that sending starts early
#: Bytes over memory per parameter.
_FUSED_ADAM = 28  # p, m and v read and written, g read
_HALF_CASTS = 16  # DDP's hook: float32 -> 16 bits, divided; and back
#: Bits of a 16-bit parameter that ZeRO sends as its change: 0.2 to 3 at the rates of fine-tuning, up to 9 at 1e-3.
EXACT_BITS = 2.0
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


# -- the machines and the training -------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Training:
    """The model that is trained, and the seconds of its step without communication."""

    params: int  # that are trained
    compute_seconds: float  # of forward and backward of all micro-batches, and the update of AdamW
    update_seconds: float | None = None  # AdamW's share of them; None is one pass over memory, as of a fused AdamW
    itemsize: int = 4  # bytes of a parameter, and of its gradient: 4 or 2
    bucket_cap_mb: float = 25.0  # sent together: of gradients in DDP, of float32 values otherwise
    ddp_bucket_cap_mb: float | None = None  # of DDP, whose buckets grad_compression has too; None is bucket_cap_mb
    scale_block: int | None = _DEFAULTS["scale_block"].default
    warmup_bits: int = _DEFAULTS["warmup_bits"].default
    in_full: int = 0  # of ``params``, those that travel in full precision beside messages of integers
    beside_signs: int = 0  # those beside messages of signs
    accumulation: int = 1  # micro-batches of a step; messages hide behind the last one's backward pass, but ZeRO-2's


# -- collectives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Cost of a step, of several, or of a message."""

    seconds: float
    sent: float  # bytes by a rank
    on_link: float  # bytes that leave a node over its link
    host: float = 0.0  # seconds of a processor that moves the bytes

    def __add__(self, other: Step) -> Step:
        return Step(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, count: float) -> Step:
        return Step(*(value * count for value in astuple(self)))


def average(steps: list[tuple[float, Step]]) -> Step:
    """The mean of steps with these weights."""
    total = sum(weight for weight, _ in steps)
    return sum((step * (weight / total) for weight, step in steps), Step(0.0, 0.0, 0.0))


def ring(cluster: Cluster, nbytes: float, passes: int, work: float = 0.0) -> Step:
    """Cost of an all-reduce (``passes`` 2) or all-gather (1) of ``nbytes``, (1); ``work``: see :func:`_message`."""
    count, several = cluster.ranks, cluster.nodes > 1
    sent = passes * (count - 1) / count * nbytes
    rates = [cluster.bandwidth] * several + [cluster.local_bandwidth] * (cluster.gpus_per_node > 1)
    hops = passes * ((cluster.nodes if several else count) - 1)
    wire = sent / (min(rates, default=math.inf) * WIRE_EFFICIENCY)
    return _message(cluster, sent, sent * several, wire, hops, work)


def all_to_all(cluster: Cluster, nbytes: float) -> Step:
    """Cost of an all-to-all: every rank sends each other rank its part of ``nbytes``, (2)."""
    count, local = cluster.ranks, cluster.gpus_per_node
    on_link = local * (count - local) / count * nbytes
    inside = (local - 1) / count * nbytes
    wire = max(on_link / cluster.bandwidth, inside / cluster.local_bandwidth) / WIRE_EFFICIENCY
    return _message(cluster, (count - 1) / count * nbytes, on_link, wire, int(count > 1), 0.0)


def _message(cluster: Cluster, sent: float, on_link: float, wire: float, hops: int, work: float) -> Step:
    """Cost of a message; ``work`` is the host's sums in bytes, if these are more than the bytes sent."""
    host = max(sent, work) / cluster.host_bandwidth
    return Step(hops * cluster.latency + max(wire, host), sent, on_link, host)


def scatter(cluster: Cluster, values: float, nbytes: float) -> Step:
    """Cost of sending each rank its part of a bucket in messages of ``nbytes`` in all; of ``values`` bytes as it is."""
    if cluster.node_size == 1:
        return all_to_all(cluster, nbytes)
    inside, between = _levels(cluster)
    return all_to_all(inside, values) + _shared(all_to_all(between, nbytes), cluster)


def all_gather(cluster: Cluster, nbytes: float) -> Step:
    """Cost of giving all ranks the ``nbytes`` of all: a ring, or one inside the nodes and one between them."""
    if cluster.node_size == 1:
        return ring(cluster, nbytes, passes=1)
    inside, between = _levels(cluster)
    return _shared(ring(between, nbytes, passes=1), cluster) + ring(inside, nbytes, passes=1)


def _levels(cluster: Cluster) -> tuple[Cluster, Cluster]:
    """One node by itself, whose values no processor moves through a network, and the nodes as ranks."""
    between = replace(cluster, gpus_per_node=1, host_bandwidth=cluster.node_size * cluster.host_bandwidth)
    return replace(cluster, nodes=1, host_bandwidth=math.inf), between


def _shared(message: Step, cluster: Cluster) -> Step:
    """The cost of a node's message for one of the ranks that send it together."""
    return replace(message, sent=message.sent / cluster.node_size)


# -- steps ------------------------------------------------------------------------------------------------------------


class Model:
    """Predicts the steps of one training on one cluster."""

    def __init__(self, training: Training, cluster: Cluster) -> None:
        self.training, self.cluster = training, cluster
        explicit = training.update_seconds
        self.update = self._over_memory(_FUSED_ADAM) if explicit is None else explicit
        if not 0 <= (explicit or 0) < training.compute_seconds:
            raise ValueError(
                f"update_seconds must be >= 0 and less than compute_seconds={training.compute_seconds}, of which it is "
                f"a part, got {explicit}"
            )
        if self.update >= training.compute_seconds:
            raise ValueError(
                f"compute_seconds={training.compute_seconds} is less than the {self.update:.3g} s in which AdamW "
                f"passes once over {training.params:,} parameters at memory_bandwidth={cluster.memory_bandwidth:.3g} "
                "bytes/s: give the seconds of a whole step, or the bandwidth of this memory"
            )
        forward_backward = training.compute_seconds - self.update
        self.earlier = forward_backward * (1 - 1 / training.accumulation)  # micro-batches that send nothing
        self.backward = BACKWARD_SHARE * (forward_backward - self.earlier)
        self.forward = forward_backward - self.backward  # until the backward pass that sends
        self.bucket = min(bucket_numel_of(training.bucket_cap_mb), training.params)  # elements, of float32 values
        self.buckets = training.params / self.bucket
        size = cluster.node_size  # if hierarchical, all values are written, those of the node read: bytes per parameter
        self._node_passes = 0.0 if size == 1 else 2 * FLOAT_BYTES * (1 + 1 / size)

    @cached_property
    def _in_ddp(self) -> Model:
        """The same training in DDP's buckets."""
        size = self.training.ddp_bucket_cap_mb
        if size is None:
            return self
        return Model(replace(self.training, bucket_cap_mb=size, ddp_bucket_cap_mb=None), self.cluster)

    def ddp(self, itemsize: int | None = None) -> Step:
        """A step of DDP with gradients of the parameters' dtype, or of ``itemsize`` bytes by a 16-bit hook, (3)."""
        ranks, of_parameter = self.cluster.ranks, self.training.itemsize
        sent_as = itemsize or of_parameter
        total = self.training.params * of_parameter
        first, bucket = min(_FIRST_DDP_BUCKET, total), min(self._in_ddp.training.bucket_cap_mb * BYTES_PER_MB, total)

        def reduce(nbytes: float) -> Step:
            # a processor adds two 16-bit values no faster than two float32 values
            work = 2 * (ranks - 1) / ranks * nbytes * FLOAT_BYTES / of_parameter
            return ring(self.cluster, nbytes * sent_as / of_parameter, passes=2, work=work)

        last = reduce(bucket)
        every = reduce(first) + last * ((total - first) / bucket)
        casts = self._over_memory(_HALF_CASTS) if sent_as < of_parameter else 0.0
        return replace(every, seconds=self._overlapped(every, last, first_share=first / total) + casts + self.update)

    def zero(self, stage: int = 1) -> Step:
        """A step of ZeRO. Stage 1 sends gradients once a step, stage 2 those of every micro-batch."""
        nbytes = self.bucket * self.training.itemsize
        packing = (_ZERO_PACKING + self._node_passes) * self.training.itemsize / FLOAT_BYTES
        then, changes = self._parameters()
        return self._partitioned(stage, scatter(self.cluster, nbytes, nbytes), then, 0.0, packing + changes)

    def _parameters(self) -> tuple[Step, float]:
        """Cost of giving all ranks a bucket's parameters, and bytes over memory per parameter for their changes."""
        if self.training.itemsize == FLOAT_BYTES:
            return all_gather(self.cluster, self.bucket * FLOAT_BYTES), 0.0
        # of a part, twice: parameter, master -> message; of all: parameter -> digest, parameter -> parameter
        passes = 2 * (2 + FLOAT_BYTES) / self.cluster.ranks + 2 + 4
        return all_gather(self.cluster, self.bucket * EXACT_BITS / 8), passes

    def zero_low_bit(self, bits: int, stage: int = 1) -> Step:
        """A step of ZeRO with gradients, and parameters of 32 bits, in 4 or 8 bits: as (3), with the passes of (5)."""
        ranks, grad = self.cluster.ranks, self.training.itemsize
        message = bits / 8
        # gradient -> slice; slice, 8-bit error -> message, error; all messages of a part -> mean
        make = 3 * grad + 2 + 2 * message + FLOAT_BYTES / ranks + self._node_passes
        # of a part: master, parameter -> message; all messages, parameters -> parameters
        apply = 2 * FLOAT_BYTES / ranks + message + 2 * grad
        first, then = self._phases(IntegerFormat(bits), grad)
        if grad < FLOAT_BYTES:
            then, apply = self._parameters()
        step = self._partitioned(stage, first, then, make, apply)
        in_full = self.training.in_full * grad  # at the end of the step, with parameters of 16 bits as their changes
        if in_full and grad == FLOAT_BYTES:
            return step + all_to_all(self.cluster, in_full) + ring(self.cluster, in_full, passes=1)
        return step + all_to_all(self.cluster, in_full) if in_full else step

    def compressed(self, passes: Passes, *, during_backward: bool = False) -> Step:
        """A step with a compressed message, (4), or one that is sent during backward, (5)."""
        first, then = self._phases(SignFormat(self.training.scale_block))
        bucket = first + then
        messages = bucket * self.buckets
        serve = 2 + 8 / self.cluster.ranks  # average this rank's share of all signs; read and write its error
        make = passes.compress + self._node_passes + serve
        if during_backward:
            seconds = self._overlapped(messages, bucket, make) + self._over_memory(passes.apply)
        else:
            seconds = self.alone(passes).seconds + self._pipelined(make + passes.apply, messages)
        step, beside = replace(messages, seconds=seconds), self.training.beside_signs * FLOAT_BYTES
        return step + ring(self.cluster, beside, passes=2) if beside else step

    def refresh(self) -> Step:
        """The part of a step that a refresh of the variance adds: gradients averaged in warmup_bits, as in (4)."""
        ranks, bits = self.cluster.ranks, self.training.warmup_bits
        # codes, message -> codes, and once before to see the largest: arithmetic that takes a CPU as long as 40 bytes
        learn = 40
        if bits not in INTEGER_BITS:
            messages = ring(self.cluster, self.training.params * FLOAT_BYTES, passes=2)
            return replace(messages, seconds=messages.seconds + self._over_memory(self.training.itemsize + learn))
        message = bits / 8
        first, then = self._phases(IntegerFormat(bits))
        messages = (first + then) * self.buckets
        # gradient -> message; messages of a chunk -> message
        make = self.training.itemsize + 2 * message + 2 * message / ranks + self._node_passes
        step = replace(messages, seconds=self._pipelined(make + 2 * message + learn, messages))
        beside = self.training.in_full * FLOAT_BYTES
        return step + ring(self.cluster, beside, passes=2) if beside else step

    def refreshed(self, step: Step, interval: int) -> Step:
        """The mean step where one of ``interval`` steps also refreshes the variance; 0 is none."""
        return average([(interval - 1, step), (1, step + self.refresh())]) if interval else step

    def low_bit(self, bits: int, *, deferred: bool = False) -> Step:
        """A step of DDP with gradients in messages of 4 or 8 bits, (5).

        ``deferred`` is that of a compressed optimizer, in buckets of its own: errors wait for the end of backward.
        """
        if not deferred and self._in_ddp is not self:
            return self._in_ddp.low_bit(bits)
        ranks, grad = self.cluster.ranks, self.training.itemsize
        message = bits / 8
        first, then = self._phases(IntegerFormat(bits))
        bucket = first + then
        messages = bucket * self.buckets
        # gradient, error -> message, error; messages, server error -> message, server error; message -> gradient
        make, finish = 2 * grad + 2 + 3 * message + 2 / ranks, 0.0
        if deferred:
            # gradient, error -> message; messages, server error -> message, new server error
            make = grad + FLOAT_BYTES + 2 * message + 8 / ranks
            # gradient, error, both messages -> error, gradient; new server error -> server error
            finish = 2 * grad + 2 * FLOAT_BYTES + 2 * message + 8 / ranks
        overlapped = self._overlapped(messages, bucket, make + self._node_passes)
        step = replace(messages, seconds=overlapped + self._over_memory(finish) + self.update)
        in_full = self.training.in_full * self.training.itemsize
        return step + ring(self.cluster, in_full, passes=2) if in_full else step

    def averaged(self) -> Step:
        """A step of a compressed optimizer that averages gradients, in its warmup_bits."""
        bits = self.training.warmup_bits
        if bits not in INTEGER_BITS:
            return self.ddp(min(bits // 8, self.training.itemsize))
        return self.low_bit(bits, deferred=True)

    def shared_out(self, *, during_backward: bool = False) -> Step:
        """A step of a compressed optimizer's warmup stage with ``zero_stage``: (4), with messages of integers."""
        ranks, grad = self.cluster.ranks, self.training.itemsize
        message = self.training.warmup_bits / 8
        first, then = self._phases(IntegerFormat(self.training.warmup_bits))
        scattered, gathered = first * self.buckets, then * self.buckets
        # gradient, error -> message, error; all messages of a chunk -> mean
        make = grad + 2 + 2 * message + FLOAT_BYTES / ranks + self._node_passes
        apply = message + 2 * grad  # message, p -> p
        messages = scattered + gathered
        if during_backward:
            seconds = self._overlapped(scattered, first, make) + self._pipelined(apply, gathered)
        else:
            seconds = self.forward + self.backward + self._over_memory(_NORM) + self._pipelined(make + apply, messages)
        step = replace(messages, seconds=seconds + self.update / ranks)
        in_full = self.training.in_full * FLOAT_BYTES  # sent at the end of the step
        return step + all_to_all(self.cluster, in_full) if in_full else step

    def alone(self, passes: Passes) -> Step:
        """A step of 0/1 Adam between syncs."""
        return Step(self.forward + self.backward + self._over_memory(passes.alone), 0.0, 0.0)

    def local_steps(self, interval: int) -> Step:
        """The mean step of 0/1 Adam in local intervals of this length, of which one step has a sync."""
        return average([(1, self.compressed(ZERO_ONE_LOCAL)), (interval - 1, self.alone(ZERO_ONE_LOCAL))])

    def _phases(self, form: IntegerFormat | SignFormat, itemsize: int = FLOAT_BYTES) -> tuple[Step, Step]:
        """Cost of the two phases of a bucket's exchange: messages to the servers, and theirs to all ranks.

        Inside a node values of ``itemsize`` bytes are sent.
        """
        nbytes = form.chunk_nbytes(self.bucket, self.cluster.ranks)
        first = scatter(self.cluster, itemsize * self.bucket, sum(nbytes))
        return first, all_gather(self.cluster, len(nbytes) * nbytes[0])

    def _over_memory(self, nbytes: float) -> float:
        """Seconds of passes over ``nbytes`` of memory per parameter."""
        return self.cluster.pass_seconds(nbytes * self.training.params)

    def _partitioned(self, stage: int, first: Step, then: Step, make: float, apply: float) -> Step:
        """A step of ZeRO from the two phases of a bucket's exchange, and bytes over memory per parameter."""
        scattered, gathered = first * self.buckets, then * self.buckets
        seconds = self._overlapped(scattered, first, make)
        if stage == 2:  # each micro-batch sends, behind a backward pass of its own
            seconds = (seconds - self.earlier) * self.training.accumulation
            scattered = scattered * self.training.accumulation
        seconds += gathered.seconds + self._over_memory(apply) + self.update / self.cluster.ranks
        return replace(scattered + gathered, seconds=seconds)

    def _pipelined(self, nbytes: float, messages: Step) -> float:
        """Seconds of passes over memory, bytes per parameter, that overlap with all buckets' messages, as in (4)."""
        moved, wire = self._over_memory(nbytes), messages.seconds
        return max(moved + messages.host, wire) + min(moved, wire) / self.buckets

    def _overlapped(self, messages: Step, last: Step, make: float = 0.0, first_share: float | None = None) -> float:
        """Seconds of forward and backward, overlapped with the messages of all buckets: (3) without the update.

        ``make`` is (5)'s P in bytes per parameter; ``first_share`` of backward makes the first bucket ready.
        """
        share = 1 / self.buckets if first_share is None else first_share
        backward = self.backward + messages.host + self._over_memory(make)
        return self.forward + max(share * backward + messages.seconds, backward + last.seconds)
