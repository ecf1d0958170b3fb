"""Predicted bytes and seconds of one collective.

N ranks on M nodes, g on each; R the bytes per second of a node's link, L those between ranks of a node, B the bytes of
a message.

A ring passes every link once each way; an all-to-all sends all that leaves a node over its one link:
    all-reduce  2 (N-1)/N B / min(R, L)       all-gather  (N-1)/N B / min(R, L)                            (1)
    all-to-all  max(g (N-g)/N B / R, (g-1)/N B / L)                                                        (2)
    A message reaches WIRE_EFFICIENCY of these rates. It takes the latency once for each hop that waits for another
    hop, and at least its bytes over host_bandwidth if processors move them.
    Two levels: (2) and an all-gather of the node's own messages over R, and inside the node, over L, an all-to-all of
    float32 values before and an all-gather of all messages after them. ZeRO's values take the same way.
Source: the ring, Patarasuk and Yuan 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_compressopt.collectives.topology import AUTO, FLAT, TopologyOptions
from hf_compressopt.flat import FLOAT_BYTES

#: Share of a link's rate that payload reaches: TCP and Ethernet headers take 5 %, acknowledgements and gaps the rest.
WIRE_EFFICIENCY = 0.9
#: Share of the memory's bandwidth that the passes below reach, by docs/benchmarks.md (0.73 to 0.87).
MEMORY_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Cluster:
    """The machines and their links. Rates are in bytes per second; infinity costs no time.

    Attributes:
        nodes: Machines, >= 1; with one, ``bandwidth`` is not used.
        gpus_per_node: Ranks on each machine.
        bandwidth: Rate of a node's link, each way, shared by its ranks.
        local_bandwidth: Rate of each rank to the others of its node, each way.
        memory_bandwidth: Rate of a rank's memory; its share, if ranks share a processor.
        host_bandwidth: Rate at which a rank's processor moves messages while it also computes; infinity if network
            cards move them. In two levels it does not count inside a node, where ranks share memory.
        latency: Seconds of one hop between nodes.
        topology: Of compressed messages and of ZeRO: "flat", "two-level" or "auto", as in the optimizers.
    """

    nodes: int
    gpus_per_node: int
    bandwidth: float
    local_bandwidth: float = 300e9
    memory_bandwidth: float = 2e12
    host_bandwidth: float = math.inf
    latency: float = 20e-6
    topology: str = AUTO

    def __post_init__(self) -> None:
        """Check the numbers."""
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
        """The number of all ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def node_size(self) -> int:
        """Ranks of a node that send one message together: 1 if the exchange is flat."""
        return 1 if self.topology == FLAT or self.nodes == 1 else self.gpus_per_node

    def pass_seconds(self, nbytes: float) -> float:
        """Seconds that the kernels take to move this many bytes over a rank's memory."""
        return nbytes / (self.memory_bandwidth * MEMORY_EFFICIENCY)


@dataclass(frozen=True)
class Message:
    """Cost of one collective.

    Attributes:
        sent: Bytes that a rank sends.
        on_link: Bytes that leave a node over its link.
        seconds: Time from start to end, if nothing else runs.
        host: Seconds of a rank's own processor.
    """

    sent: float
    on_link: float
    seconds: float
    host: float

    def __add__(self, other: Message) -> Message:
        """Add the cost of a collective that follows this one."""
        return Message(
            self.sent + other.sent, self.on_link + other.on_link, self.seconds + other.seconds, self.host + other.host
        )

    def __mul__(self, count: float) -> Message:
        """Multiply: this many collectives in a row."""
        return Message(self.sent * count, self.on_link * count, self.seconds * count, self.host * count)


NOTHING = Message(0, 0, 0, 0)


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


def reduce_scatter(cluster: Cluster, nbytes: float) -> Message:
    """Cost of summing ``nbytes`` of gradients, each rank its part: an all-to-all, in two levels one of each level."""
    return one_phase(cluster, nbytes, nbytes)


def all_gather(cluster: Cluster, nbytes: float) -> Message:
    """Cost of giving all ranks ``nbytes`` of parameters: a ring, in two levels one of each level."""
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
    return Message(sent, on_link, hops * cluster.latency + max(wire, host), host)


def one_phase(cluster: Cluster, values: float, nbytes: float) -> Message:
    """Cost of sending each rank its part of a bucket in messages of ``nbytes`` in all; of ``values`` bytes as it is."""
    if cluster.node_size == 1:
        return all_to_all(cluster, nbytes)
    inside, between = _levels(cluster)
    return all_to_all(inside, values) + _shared(all_to_all(between, nbytes), cluster)


def two_phases(cluster: Cluster, numel: int, nbytes: Sequence[int]) -> Message:
    """Cost of the compressed all-reduce of a bucket."""
    if len(nbytes) == 1:
        return NOTHING
    gathered = len(nbytes) * nbytes[0]
    if cluster.node_size == 1:
        return all_to_all(cluster, sum(nbytes)) + ring(cluster, gathered, passes=1)
    inside, between = _levels(cluster)
    own = _shared(all_to_all(between, sum(nbytes)) + ring(between, gathered, passes=1), cluster)
    return all_to_all(inside, FLOAT_BYTES * numel) + own + ring(inside, gathered, passes=1)
