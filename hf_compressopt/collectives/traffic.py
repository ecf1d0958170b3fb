"""Counters of a rank's traffic: bytes sent and seconds waited, by kind of message."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Traffic:
    """Counters that every communicator of an optimizer writes to.

    Bytes are what this rank sends to other ranks, by the volume of the collective's bandwidth-optimal algorithm
    (headers of lower layers excluded). Seconds are host seconds in which the caller was blocked by the collective: on
    a device whose queue is asynchronous to the host they are a lower bound.

    Attributes:
        bytes: Bytes sent, by kind; in two levels those that stay inside the node are not among them.
        node_bytes: Bytes sent inside the node by exchanges in two levels, by kind.
        seconds: Seconds waited, by kind.
        step_bytes: Bytes sent in the last step, inside the node not counted.
        round_bytes: Bytes of the last step, or of the last sync of local steps.
        round_steps: 1, or the steps of that interval.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self.bytes: Counter[str] = Counter()
        self.node_bytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.step_bytes = self.round_bytes = self.round_steps = 0
        self._steps_since = 0
        self._bytes_before = 0
        self._paused = False

    def sent(self, kind: str, nbytes: int) -> None:
        """Count ``nbytes`` bytes sent by a collective of this kind."""
        if not self._paused:
            self.bytes[kind] += nbytes

    def sent_inside(self, kind: str, nbytes: int) -> None:
        """Count ``nbytes`` bytes sent to ranks of the same node."""
        if not self._paused:
            self.node_bytes[kind] += nbytes

    def inside_node(self) -> NodeTraffic:
        """Return the counters for a communicator whose ranks are on one node."""
        return NodeTraffic(self)

    def waited(self, kind: str, seconds: float) -> None:
        """Count host seconds spent in a collective of this kind."""
        if not self._paused:
            self.seconds[kind] += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is counted: messages of checkpoints and checks are no part of the training's traffic."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def total_bytes(self) -> int:
        """Bytes sent so far."""
        return sum(self.bytes.values())

    @property
    def total_seconds(self) -> float:
        """Host seconds spent in collectives so far."""
        return sum(self.seconds.values())

    def end_step(self, *, local: bool = False) -> None:
        """Close a step: ``step_bytes`` becomes the bytes sent since the last call. ``local``: ranks may step alone."""
        self.step_bytes = self.total_bytes - self._bytes_before
        self._bytes_before = self.total_bytes
        self._steps_since += 1
        if self.step_bytes or not local:
            steps = self._steps_since if local else 1
            self.round_bytes, self.round_steps, self._steps_since = self.step_bytes, steps, 0

    def restore(self, total_bytes: int) -> None:
        """Continue from a checkpoint at which ``total_bytes`` had been sent."""
        self.bytes.clear()
        self.bytes["before_resume"] = total_bytes
        self._bytes_before = total_bytes


class NodeTraffic(Traffic):
    """The counters of a group of ranks on one node: they write to those of all ranks, as another level."""

    def __init__(self, whole: Traffic) -> None:
        """Write to ``whole``."""
        super().__init__()
        self._whole = whole

    def sent(self, kind: str, nbytes: int) -> None:
        """See the base class: bytes inside the node."""
        if not self._paused:
            self._whole.sent_inside(kind, nbytes)

    def waited(self, kind: str, seconds: float) -> None:
        """See the base class: seconds are those of all levels."""
        if not self._paused:
            self._whole.waited(kind, seconds)
