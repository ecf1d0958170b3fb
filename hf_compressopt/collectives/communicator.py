"""The interface through which bytes leave a rank, the decisions that ranks take together, and counters of both."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.chunks import Topology, topology_of
from hf_compressopt.kernels.memory import flat_view, in_memory, numbers_on

_DIGEST_BITS = 20
DIGEST_BOUND = 1 << _DIGEST_BITS
#: Bits of a digest that are compared as one number: sums of its squares over thousands of ranks are exact.
_BITS_TOGETHER = {torch.float64: 20, torch.float32: 5}
_Result = TypeVar("_Result")


def digest_of(value: Any) -> int:
    """Return a number below DIGEST_BOUND that stands for a value."""
    return crc32(repr(value).encode()) % DIGEST_BOUND


class Traffic:
    """Counters of what all communicators of an optimizer send, by the volume of a bandwidth-optimal algorithm.

    ``node_bytes`` stay inside the node; ``seconds`` are those in which the host was blocked.
    """

    def __init__(self, whole: Traffic | None = None) -> None:
        """Start at zero. The counters of a group inside a node write to those of the ``whole``."""
        self.bytes: Counter[str] = Counter()
        self.node_bytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.step_bytes = self._bytes_before = 0
        self.steps = 0  # of this process, since the last restore
        self._read, self._since = (0, 1), (0, 0)  # bytes and steps: that were read last, and of local steps since then
        self._whole, self._paused = whole, False

    def inside_node(self) -> Traffic:
        """Return the counters for a communicator whose ranks are on one node."""
        return Traffic(self)

    def sent(self, kind: str, nbytes: int) -> None:
        if self._paused:
            return
        if self._whole is None:
            self.bytes[kind] += nbytes
        elif not self._whole._paused:
            self._whole.node_bytes[kind] += nbytes

    def waited(self, kind: str, seconds: float) -> None:
        if self._paused:
            return
        if self._whole is None:
            self.seconds[kind] += seconds
        else:
            self._whole.waited(kind, seconds)

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
        return sum(self.bytes.values())

    def end_step(self, *, local: bool = False) -> None:
        """Close a step: ``step_bytes`` becomes the bytes sent since the last call. ``local``: ranks may step alone."""
        total = self.total_bytes
        self.step_bytes, self._bytes_before = total - self._bytes_before, total
        self.steps += 1
        if local:
            self._since = self._since[0] + self.step_bytes, self._since[1] + 1
        else:
            self._read, self._since = (self.step_bytes, 1), (0, 0)

    def mean_bytes(self, *, peek: bool = False) -> float:
        """Return the bytes of the last step; of local steps the mean since the last call that was no ``peek``."""
        found = self._since if self._since[0] else self._read
        if self._since[0] and not peek:
            self._read, self._since = self._since, (0, 0)
        return found[0] / found[1]

    def metrics(self, full: float, sent: float, node_size: int) -> dict[str, float]:
        """Return numbers for a log; a step has ``sent`` so much, in place of ``full`` bytes on the link of a node."""
        inside = sum(self.node_bytes.values())
        here = self.total_bytes - self.bytes["before_resume"]
        return {
            **({"bytes_sent_in_node": float(inside)} if inside else {}),
            **({"node_size": float(node_size)} if node_size > 1 else {}),
            "bytes_sent_step": float(sent),
            "bytes_sent": float(self.total_bytes),
            "compression_ratio": full / (sent * node_size) if sent > 0 else 1.0,
            "bytes_on_link": float(here * node_size),
            "bytes_uncompressed": full * self.steps,
            "seconds_communication": sum(self.seconds.values()),
        }

    def restore(self, total_bytes: int) -> None:
        """Continue from a checkpoint at which ``total_bytes`` had been sent."""
        self.bytes.clear()
        self.bytes["before_resume"] = self._bytes_before = total_bytes
        self.steps = 0


def all_reduce_bytes(params: Iterable[Tensor], world_size: int) -> float:
    """Bytes that a rank sends where DDP averages the gradients of these parameters, each in its own dtype."""
    return 2 * (1 - 1 / world_size) * sum(param.nbytes for param in params)


class Handle:
    """A collective under way. Its tensors must not be touched before :meth:`wait` has returned."""

    def __init__(self, wait: Callable[[], Any], kind: str, traffic: Traffic) -> None:
        self._wait, self._kind, self._traffic = wait, kind, traffic

    def wait(self) -> None:
        """Block until the collective is done (on a device with a queue: until it is enqueued before what follows)."""
        start = time.perf_counter()
        self._wait()
        self._traffic.waited(self._kind, time.perf_counter() - start)


@dataclass(frozen=True)
class Levels:
    """The ranks of this rank's node, those of its place on all nodes, and the dtype of values inside the node."""

    node: Communicator
    peers: Communicator
    dtype: torch.dtype


class Communicator(ABC):
    """A group of ranks, the collectives among them, and the decisions that they take together. All ranks call.

    Collectives that return a :class:`Handle` start at once; all other methods block. Small tensors lie on ``device``;
    ``process_group`` is None for all ranks, ``levels`` in the flat topology.
    """

    name: str
    rank: int
    world_size: int
    device: torch.device
    traffic: Traffic
    is_taken: bool = False  # by an optimizer, which writes into it
    process_group: dist.ProcessGroup | None = None
    levels: Levels | None = None

    def follow(self, device: torch.device) -> None:
        """Follow the parameters of an optimizer to another device."""
        self.device = device

    def count_in(self, traffic: Traffic) -> None:
        """Count in these counters from now on."""
        self.traffic = traffic
        if self.levels is not None:
            self.levels.node.count_in(traffic.inside_node())
            self.levels.peers.count_in(traffic)

    def taken(self, traffic: Traffic) -> Communicator:
        """Return what an optimizer takes, to count in its own counters: this, or a copy if another one has taken it.

        Device, topology and counters of the other one stay its own.
        """
        taken = deepcopy(self) if self.is_taken else self
        taken.is_taken = True
        taken.count_in(traffic)
        return taken

    def on_nodes(self, levels: Levels) -> Communicator:
        """Return these ranks in the hierarchical topology."""
        copied = copy(self)
        copied.levels = levels
        copied.count_in(self.traffic)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Return a copy with counters of its own; a group of processes cannot be copied, so copies share it."""
        copied = copy(self)
        memo[id(self)] = copied
        copied.traffic = deepcopy(self.traffic, memo)
        copied.levels = deepcopy(self.levels, memo)
        return copied

    @property
    def topology(self) -> Topology:
        """The place of this rank in the compressed exchange."""
        return topology_of(self.world_size, self.rank, 1 if self.levels is None else self.levels.node.world_size)

    def __str__(self) -> str:
        """Return the ranks in words, for a log."""
        nodes = "" if self.levels is None else f", hierarchical on {self.topology.nodes} nodes"
        return f"{self.world_size} rank(s) over {self.name}{nodes}"

    # -- the transport ------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Handle:
        """Start reducing ``tensor`` over the ranks, in place. ``op`` is "sum" or "max"."""
        self._count_all_reduce(tensor)
        return Handle(self._all_reduce(tensor, op), "all_reduce", self.traffic)

    def all_to_all(
        self, output: Tensor, inputs: Tensor, *, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        """Start sending the j-th of the parts of ``inputs`` (1-D) to rank j; they arrive in rank order."""
        self.traffic.sent("all_to_all", (inputs.numel() - input_splits[self.rank]) * inputs.element_size())
        wait = self._all_to_all(output, inputs, list(output_splits), list(input_splits))
        return Handle(wait, "all_to_all", self.traffic)

    def all_gather(self, output: Tensor, part: Tensor) -> Handle:
        """Start gathering every rank's ``part`` [n], which may be a view of ``output`` [world_size * n]."""
        self.traffic.sent("all_gather", (self.world_size - 1) * part.nbytes)
        return Handle(self._all_gather(output, part), "all_gather", self.traffic)

    def _count_all_reduce(self, tensor: Tensor) -> None:
        self.traffic.sent("all_reduce", 2 * (self.world_size - 1) * tensor.nbytes // self.world_size)

    # what starts a collective returns a function that waits for it

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: str) -> Callable[[], Any]: ...

    @abstractmethod
    def _all_to_all(
        self, output: Tensor, inputs: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Callable[[], Any]: ...

    @abstractmethod
    def _all_gather(self, output: Tensor, part: Tensor) -> Callable[[], Any]: ...

    @abstractmethod
    def _broadcast(self, data: Tensor) -> None:
        """Copy rank 0's ``data``, [n] uint8, to all ranks, in place, without copies of it for each."""

    @abstractmethod
    def duplicate(self) -> Communicator:
        """Return the same ranks on a channel of its own, for host tensors and another thread; else a ValueError."""

    @abstractmethod
    def part(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of some ranks, ascending, which all call."""

    def reached(self) -> Communicator:
        """Return these ranks with a device whose tensors can be sent, if that of the parameters is not one yet."""
        return self

    # -- small messages, which are not counted ------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's ``tensor`` to all ranks, in place."""
        if self.world_size == 1 or tensor.numel() == 0:
            return
        values = in_memory("the tensor", tensor)
        with torch.no_grad():
            self._broadcast(flat_view(values).view(torch.uint8))
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (anything that JSON holds), in rank order."""
        if self.world_size == 1:
            return [value]
        with self.traffic.paused():
            data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
            sizes = torch.empty(self.world_size, dtype=torch.int64, device=self.device)
            self.all_gather(sizes, torch.tensor([data.numel()], device=self.device)).wait()
            longest = int(sizes.max())
            padded = torch.cat([data, data.new_zeros(longest - data.numel())])
            gathered = data.new_empty(self.world_size * longest)
            self.all_gather(gathered, padded).wait()
        rows = zip(gathered.view(self.world_size, longest).cpu(), sizes.tolist(), strict=True)
        return [json.loads(bytes(row[:size].tolist())) for row, size in rows]

    # -- decisions: all raise, or none does, and nobody waits for a rank that has stopped -----------------------------

    def require_equal(self, what: str, mine: Any) -> None:
        """Raise a ValueError on all ranks if a rank's value (anything that JSON holds) differs from rank 0's."""
        everyone = self.all_gather_object(mine)
        different = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if different:
            raise ValueError(
                f"ranks {different} differ from rank 0 in {what}: rank {different[0]} has "
                f"{everyone[different[0]]}, rank 0 {everyone[0]}"
            )

    def require_equal_rows(self, what: str, mine: Sequence[str]) -> None:
        """Raise a ValueError on all ranks, with the first row that differs, if a rank's rows differ from rank 0's."""
        digests = self.all_gather_object([len(mine), crc32("\n".join(mine).encode())])
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if not different:
            return
        everyone = self.all_gather_object(list(mine))  # by now all ranks know that they are needed
        theirs, first = everyone[different[0]], everyone[0]
        row = next(n for n in range(max(len(theirs), len(first))) if theirs[n : n + 1] != first[n : n + 1])
        found, expected = ("".join(rows[row : row + 1]) or "nothing more" for rows in (theirs, first))
        raise ValueError(
            f"ranks {different} differ from rank 0 in {what}: rank {different[0]} has {found}, rank 0 {expected}"
        )

    def raise_together(self, error: Exception | None, others: type[Exception] = RuntimeError) -> None:
        """Raise on every rank if any rank has an error: its own one, else one of type ``others`` that quotes them."""

        def fail() -> None:
            if error is not None:
                raise error

        self.gather_together(fail, others=others)

    def gather_together(
        self, action: Callable[[], _Result], undo: Callable[[], None] = lambda: None, others: type[Exception] = OSError
    ) -> list[_Result]:
        """Run ``action`` on every rank and return every rank's result (anything that JSON holds).

        If it fails on any rank, run ``undo`` and raise on all: this rank's own error, or one of type ``others``. If a
        rank is gone, nothing is undone, because the ranks cannot tell what the others know.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        outcomes = self.all_gather_object((result, None if error is None else f"{type(error).__name__}: {error}"))
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text is not None]
        if failed:
            undo()
            raise error or others(f"another rank failed, so this one stops too; {'; '.join(failed)}")
        return [result for result, _ in outcomes]

    def run_together(
        self, action: Callable[[], _Result], undo: Callable[[], None] = lambda: None, others: type[Exception] = OSError
    ) -> _Result:
        """Run :meth:`gather_together` for any kind of result, and return this rank's."""
        results: list[_Result] = []
        self.gather_together(lambda: results.append(action()), undo, others)
        return results[0]

    def sum_and_compare(
        self, values: Sequence[Tensor], digests: Sequence[int | Tensor], sketch: Tensor | None, beside: Tensor | None
    ) -> tuple[list[float], list[bool]]:
        """Sum values, [] each, over the ranks, and compare numbers below DIGEST_BOUND, in one small all-reduce.

        Returns the sums, behind them the squared norm of the mean of ``sketch`` and this rank's ``beside``, which is
        fetched with them, and for each digest whether all ranks have the same one. Digests that the host does not know
        yet, [] int64, are the last ones.
        """
        dtype = torch.float64 if sketch is None else torch.float32
        bits = _BITS_TOGETHER[dtype]
        shifts = range(0, _DIGEST_BITS, bits)
        pieces = [digest >> shift & (1 << bits) - 1 for digest in digests for shift in shifts]
        # numbers are all alike if and only if their mean square is the square of their mean
        squares = [number for piece in pieces for number in (piece, piece * piece)]
        known = [float(number) for number in squares if isinstance(number, int)]
        unknown = [number for number in squares if isinstance(number, Tensor)]
        head, *tail = (torch.stack([n.to(self.device, dtype) for n in row]) for row in (values, unknown) if row)
        parts = [head, numbers_on(self.device, known, dtype), *tail]
        message = torch.cat(parts if sketch is None else [*parts, sketch.to(self.device, dtype)])
        self.all_reduce(message).wait()
        if sketch is not None:
            count = len(values) + len(squares)
            square = message[count:].double().div(self.world_size).square().sum()
            message = torch.cat([message[:count].double(), square.view(1)])
        if beside is not None:
            message = torch.cat([message.double(), beside.to(self.device, torch.float64)])
        found = message.tolist()
        sums = [int(number) for number in found[len(values) : len(values) + len(squares)]]
        same = [self.world_size * square == total**2 for total, square in zip(sums[::2], sums[1::2], strict=True)]
        alike = [all(same[at : at + len(shifts)]) for at in range(0, len(same), len(shifts))]
        return found[: len(values)] + found[len(values) + len(squares) :], alike
