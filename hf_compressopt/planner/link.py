"""Measured rates of the machines that ranks run on: the link between them, and their memory.

The link is measured by the collectives that training uses, each at several sizes. A line through the times of a
collective has the rate as its slope; the latency is the rest of the time of a small message. Bytes on the wire and hops
are those of :mod:`hf_compressopt.planner.cost`, which so predicts the times that were measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch

from hf_compressopt.collectives.communicator import Communicator, Handle, Levels
from hf_compressopt.flat import FLOAT_BYTES
from hf_compressopt.planner.cost import Cluster, Step, all_to_all, ring

#: How the planner predicts each collective.
COLLECTIVES: dict[str, Callable[[Cluster, float], Step]] = {
    "all_reduce": partial(ring, passes=2),
    "all_to_all": all_to_all,
    "all_gather": partial(ring, passes=1),
}
_SIZES = tuple(4096 * 4**power for power in range(8))  # bytes of a rank's message: 4 KiB to 64 MiB
_SMALL_BYTES = 16384  # messages up to this size show the latency
_ENOUGH_SECONDS, _ENOUGH_SIZES = 0.1, 4  # no larger message after one that takes so long
_FEWEST, _MOST = 3, 9  # repetitions of a size
_BUDGET_SECONDS = 0.2  # when to stop before the most
_MEMORY_BYTES, _MEMORY_REPEATS = 1 << 27, 5
_PROBE, _REPEATS = 1 << 20, 3  # values that are exchanged to time a topology, and how often
_CLEARLY = 1.25  # a hierarchical exchange may take so many times as long as a flat one before advise names "flat"


@dataclass(frozen=True)
class Timing:
    """A collective with messages of ``nbytes``: medians of the slowest rank's seconds, and of the most CPU seconds."""

    nbytes: int
    seconds: float
    host: float


@dataclass(frozen=True)
class Link:
    """Rates of a link, as the planner takes them: bytes per second, seconds of a hop, bytes per CPU second."""

    bandwidth: float
    latency: float
    host_bandwidth: float


def fit(collective: str, nodes: int, gpus_per_node: int, timings: Sequence[Timing]) -> Link:
    """Find the rates by which the planner predicts these times."""
    predict = COLLECTIVES[collective]
    whole = Cluster(nodes, gpus_per_node, bandwidth=1.0, local_bandwidth=math.inf, latency=0.0)
    hop = Cluster(nodes, gpus_per_node, bandwidth=math.inf, local_bandwidth=math.inf, latency=1.0)
    wire = [predict(whole, timing.nbytes).seconds for timing in timings]  # of a link of one byte per second
    slope = statistics.linear_regression(wire, [timing.seconds for timing in timings]).slope
    if not 0 < slope < math.inf:
        raise ValueError(
            f"in {collective}, {timings[-1].nbytes:,} bytes took {timings[-1].seconds:.3g} s and {timings[0].nbytes:,} "
            f"bytes {timings[0].seconds:.3g} s, so the rate is unknown: try again, or give --bandwidth and --latency"
        )
    hops = predict(hop, 1.0).seconds
    pairs = zip(timings, wire, strict=True)
    rest = [(timing.seconds - slope * size) / hops for timing, size in pairs if timing.nbytes <= _SMALL_BYTES]
    last = timings[-1]
    host = predict(whole, last.nbytes).sent / last.host if last.host else math.inf
    return Link(1 / slope, max(0.0, statistics.median(rest)), host)


def middle(links: Sequence[Link]) -> Link:
    return Link(*map(statistics.median, zip(*map(astuple, links), strict=True)))


def measure(channel: Communicator, everyone: Communicator) -> dict[str, list[Timing]]:
    """Time the collectives, each at several sizes. All ranks call."""
    by_collective: dict[str, list[Timing]] = {}
    for collective in COLLECTIVES:
        timings = by_collective[collective] = []
        for size in _SIZES:
            call, nbytes = _prepared(channel, collective, size)
            timings.append(Timing(nbytes, *_median_seconds(call, everyone)))
            if len(timings) >= _ENOUGH_SIZES and timings[-1].seconds > _ENOUGH_SECONDS:
                break
    return by_collective


def measure_memory(everyone: Communicator) -> float:
    """Measure the bytes per second that a rank's copies read and write, while all ranks copy. All ranks call."""
    source = torch.zeros(_MEMORY_BYTES, dtype=torch.uint8, device=everyone.device)
    target = torch.empty_like(source)
    seconds = [_together(lambda: target.copy_(source), everyone)[0] for _ in range(_MEMORY_REPEATS + 1)]
    return 2 * _MEMORY_BYTES / min(seconds[1:])


def nodes_pay(flat: float, hierarchical: float) -> bool:
    """Return whether an exchange should be hierarchical, as topology=auto has it, by the seconds of both."""
    return hierarchical <= _CLEARLY * flat


def described(flat: float, hierarchical: float) -> str:
    """Say in words which topology is better, from the seconds of a flat exchange and of a hierarchical one."""
    times = f"{_PROBE:,} values in 4 bits took {1e3 * flat:.1f} ms flat, {1e3 * hierarchical:.1f} ms hierarchical"
    if nodes_pay(flat, hierarchical):
        return f"{times}: topology=auto, which averages inside the nodes in full precision first, suits these links"
    return f"{times}: the links inside the nodes are slow, so train with topology=flat, which compresses there too"


def exchange_seconds(communicator: Communicator, levels: Levels) -> tuple[float, float]:
    """Time a flat and a hierarchical exchange of values in 4 bits, by medians of the slowest rank. All ranks call."""
    everyone, node = communicator.reached(), levels.node.reached()
    peers = levels.peers.reached()
    device, size = everyone.device, node.world_size
    values = torch.zeros(_PROBE, dtype=levels.dtype, device=device)

    def messages(ranks: Communicator, nbytes: int) -> None:
        part = nbytes // ranks.world_size
        sent = torch.zeros(part * ranks.world_size, dtype=torch.uint8, device=device)
        received, splits = torch.empty_like(sent), [part] * ranks.world_size
        ranks.all_to_all(received, sent, output_splits=splits, input_splits=splits).wait()
        ranks.all_gather(received, sent[:part]).wait()

    def flat() -> None:
        messages(everyone, _PROBE // 2)

    def hierarchical() -> None:
        node.all_reduce(values).wait()
        messages(peers, _PROBE // 2 // size)

    rows: list[torch.Tensor] = []
    with communicator.traffic.paused():
        for _ in range(_REPEATS + 1):  # the first one sets up connections
            row = []
            for exchange in (flat, hierarchical):
                start = time.perf_counter()
                exchange()
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                row.append(time.perf_counter() - start)
            slowest = torch.tensor(row, dtype=torch.float64, device=device)
            everyone.all_reduce(slowest, op="max").wait()  # which also aligns the ranks
            rows.append(slowest.cpu())
    medians = torch.stack(rows[1:]).median(dim=0).values
    return float(medians[0]), float(medians[1])


def slowest(seconds: Sequence[float], everyone: Communicator) -> list[float]:
    """Return the largest of all ranks' values, one by one. All ranks call."""
    values = torch.tensor(seconds, dtype=torch.float64, device=everyone.device)
    everyone.all_reduce(values, op="max").wait()
    return [float(value) for value in values.tolist()]


def _prepared(channel: Communicator, collective: str, size: int) -> tuple[Callable[[], Handle], int]:
    """A collective with a message of about this size, and the bytes of the message."""
    count, device = channel.world_size, channel.device
    part = -(-size // (count * FLOAT_BYTES)) * FLOAT_BYTES  # bytes
    if collective == "all_reduce":
        floats = torch.zeros(part * count // FLOAT_BYTES, device=device)
        return lambda: channel.all_reduce(floats), part * count
    received = torch.empty(part * count, dtype=torch.uint8, device=device)
    if collective == "all_gather":
        of_rank = torch.zeros(part, dtype=torch.uint8, device=device)
        return lambda: channel.all_gather(received, of_rank), part * count
    sent, splits = torch.zeros_like(received), [part] * count
    return lambda: channel.all_to_all(received, sent, output_splits=splits, input_splits=splits), part * count


def _median_seconds(call: Callable[[], Handle], everyone: Communicator) -> tuple[float, float]:
    """The median seconds and CPU seconds of a collective, after a first call that sets up connections and memory."""
    _together(lambda: call().wait(), everyone)
    times: list[tuple[float, float]] = []
    while len(times) < _FEWEST or (len(times) < _MOST and sum(seconds for seconds, _ in times) < _BUDGET_SECONDS):
        times.append(_together(lambda: call().wait(), everyone))
    seconds, host = map(statistics.median, zip(*times, strict=True))
    return seconds, host


def _together(action: Callable[[], object], everyone: Communicator) -> tuple[float, float]:
    """The largest seconds, and CPU seconds, that a rank takes for an action; the agreement on them aligns the ranks."""
    start, host = time.perf_counter(), time.process_time()
    action()
    if everyone.device.type != "cpu":
        torch.accelerator.synchronize(everyone.device)
    seconds, used = time.perf_counter() - start, time.process_time() - host
    seconds, used = slowest([seconds, used if everyone.device.type == "cpu" else 0.0], everyone)
    return seconds, used
