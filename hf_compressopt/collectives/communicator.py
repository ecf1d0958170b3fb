"""The interface through which bytes leave a rank."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_compressopt.collectives.agreement import Agreement
from hf_compressopt.collectives.sums import sum_of_rows
from hf_compressopt.collectives.topology import Topology
from hf_compressopt.collectives.traffic import Traffic
from hf_compressopt.kernels.memory import in_memory


class Handle:
    """A collective under way. Its tensors must not be touched before :meth:`wait` has returned."""

    def __init__(self, wait: Callable[[], Any], kind: str, traffic: Traffic) -> None:
        """Wrap ``wait``, and count the time that it takes."""
        self._wait, self._kind, self._traffic = wait, kind, traffic

    def advance(self) -> None:
        """Wait for the first of two collectives, and start the second; a single collective needs no such call."""

    def wait(self) -> None:
        """Block until the collective is done (on a device with a queue: until it is enqueued before what follows)."""
        start = time.perf_counter()
        self._wait()
        self._traffic.waited(self._kind, time.perf_counter() - start)


class Communicator(Agreement):
    """A group of ranks, the collectives among them, and the decisions that they take together.

    Attributes:
        name: Name of the transport, such as ``"gloo"``.
        rank: This rank's number in the group.
        world_size: Ranks in the group.
        device: Device on which small tensors of our own must lie.
        traffic: Counts bytes and seconds.
        process_group: The torch.distributed group that it was made for; None for all ranks.
        levels: The groups of the compressed exchange in two levels; None if it is flat.
    """

    name: str
    rank: int
    world_size: int
    device: torch.device
    traffic: Traffic
    process_group: dist.ProcessGroup | None = None
    levels: Levels | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Return a copy with counters of its own; a group of processes cannot be copied, so copies share it."""
        copied = copy(self)
        memo[id(self)] = copied
        copied.traffic, copied.levels = deepcopy(self.traffic, memo), deepcopy(self.levels, memo)
        return copied

    @property
    def topology(self) -> Topology:
        """The place of this rank in the compressed exchange."""
        return Topology(self.world_size, self.rank, 1 if self.levels is None else self.levels.node.world_size)

    def part(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of some of the ranks, in ascending order and with this one. All of these call.

        Raises:
            ValueError: If the transport has no such groups.
        """
        raise ValueError(f"{type(self).__name__} cannot make a group of some of its ranks")

    def reached(self) -> Communicator:
        """Return these ranks with a device whose tensors can be sent, if that of the parameters is not one yet."""
        return self

    @abstractmethod
    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Handle:
        """Start reducing ``tensor`` over the ranks, in place. ``op`` is "sum" or "max"."""

    @abstractmethod
    def all_to_all(
        self, output: Tensor, inputs: Tensor, *, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        """Start sending the j-th part of ``inputs`` (1-D) to rank j; parts arrive in ``output`` in rank order."""

    @abstractmethod
    def all_gather(self, output: Tensor, part: Tensor) -> Handle:
        """Start gathering every rank's ``part`` [n] into ``output`` [world_size * n], in rank order.

        ``part`` may be this rank's own place in ``output``: then it need not be copied there.
        """

    def sum_parts(
        self, sizes: Sequence[int], write: Callable[[Tensor], object], like: Tensor, factor: float = 1.0
    ) -> tuple[Handle, Callable[[], Tensor]]:
        """Start summing every rank's j-th part on rank j, in rank order.

        Args:
            sizes: Elements of each part, alike on all ranks.
            write: Writes this rank's parts, one after another, into a tensor [sum(sizes)] which it is given, at once.
            like: A tensor of the parts' dtype and device.
            factor: Of the sum.

        Returns:
            The handle, and a function that returns the sum [sizes[rank]], float32 or float64, after the handle was
            waited for. It is to be called once.
        """
        values = like.new_empty(sum(sizes))
        write(values)
        own = sizes[self.rank]
        received = values.new_empty(self.world_size * own)
        splits = [own] * self.world_size
        handle = self.all_to_all(received, values, output_splits=splits, input_splits=sizes)
        sent = [values]
        del values

        def total() -> Tensor:
            sent.clear()
            return sum_of_rows(torch.split(received, splits), factor)

        return handle, total

    @abstractmethod
    def duplicate(self) -> Communicator:
        """Return the same ranks on a channel of its own, for host tensors: another thread may use it beside this one.

        All ranks call; blocking. It also works after torch.distributed has been shut down.

        Raises:
            ValueError: If the transport cannot serve two threads.
        """

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's ``tensor`` to all ranks, in place. All ranks call; blocking; not counted."""
        if self.world_size == 1 or tensor.numel() == 0:
            return
        values = in_memory("the tensor", tensor)
        with torch.no_grad():
            self._broadcast(values.view(-1).view(torch.uint8))
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values)

    @abstractmethod
    def _broadcast(self, data: Tensor) -> None:
        """Copy rank 0's ``data``, [n] uint8, to all ranks, in place, without copies of it for each."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (anything that JSON holds), in rank order. All ranks call; not counted."""
        if self.world_size == 1:
            return [value]
        with self.traffic.paused():
            return self._all_gather_json(value)

    def _all_gather_json(self, value: Any) -> list[Any]:
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=self.device)
        self.all_gather(sizes, torch.tensor([data.numel()], device=self.device)).wait()
        longest = int(sizes.max())
        padded = torch.cat([data, data.new_zeros(longest - data.numel())])
        gathered = data.new_empty(self.world_size * longest)
        self.all_gather(gathered, padded).wait()
        rows = zip(gathered.view(self.world_size, longest).cpu(), sizes.tolist(), strict=True)
        return [json.loads(bytes(row[:size].tolist())) for row, size in rows]


@dataclass(frozen=True)
class Levels:
    """The groups of this rank in the exchange in two levels.

    Attributes:
        node: The ranks of this rank's node.
        peers: The ranks of the same place on all nodes.
        dtype: Dtype of values inside the node.
    """

    node: Communicator
    peers: Communicator
    dtype: torch.dtype
