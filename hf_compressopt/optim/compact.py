"""The moments of one param group in little memory: what they become after the first stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.flat import Bucket, FlatLayout
from hf_compressopt.kernels import Average, LogVariance, Variance, on
from hf_compressopt.kernels.variance import NO_TOP, ZERO_CODE, decode_variance, encode_variance_, top_of_variance
from hf_compressopt.optim.functional import is_zero
from hf_compressopt.optim.moment_shards import MomentShards

#: Legal values of the option ``state``.
STATES = ("compact", "float32")
#: Its default, where an optimizer has none of its own.
STATE = "float32"


class Moments:
    """The two moments of a param group: flat float32 buffers, or a compact form that takes their place.

    A frozen variance becomes 8 bits an element. A momentum that is what the servers' last messages say becomes these
    messages. Until they are there, in the first compressed step and after a load on another number of ranks, it is
    float32.

    Attributes:
        exp_avg: [numel] float32, or [0] while messages take its place.
        exp_avg_sq: [numel] float32, or [0] while codes take its place.
        codes: [numel] uint8, the frozen variance, or [0].
        tops: [parameters] int32, see :class:`~hf_compressopt.kernels.LogVariance`.
        last: The momentum of the buckets whose messages have come, by the buckets' first elements.
        shards: This rank's part of the moments, if the ranks share them out; the buffers are [0] then.
    """

    def __init__(self, layout: FlatLayout, device: torch.device, shards: MomentShards | None = None) -> None:
        """Allocate float32 buffers of zeros, unless there are ``shards``."""
        self._layout, self.shards = layout, shards
        numel = layout.numel if shards is None else 0
        self.exp_avg = torch.zeros(numel, dtype=torch.float32, device=device)
        self.exp_avg_sq = torch.zeros(numel, dtype=torch.float32, device=device)
        self.codes = torch.zeros(0, dtype=torch.uint8, device=device)
        self.tops = torch.zeros(len(layout.numels), dtype=torch.int32, device=device)
        self.last: dict[int, Average] = {}
        self._recent: tuple[int, Tensor] | None = None  # the bucket that was decoded last: readers go on

    def to(self, device: torch.device) -> None:
        """Move everything."""
        for name in ("exp_avg", "exp_avg_sq", "codes", "tops"):
            setattr(self, name, getattr(self, name).to(device))
        self._recent = None
        if self.shards is not None:
            self.shards.to(device)
        for start, average in self.last.items():
            if average.messages is not None:
                self.last[start] = replace(average, messages=average.messages.to(device))

    # -- the variance -------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Encode the variance. The codes lie in its own memory until :meth:`settle`, so that there is no peak."""
        if self.codes.numel() or not self._layout.numel:
            return
        codes = self.exp_avg_sq.view(torch.uint8)[: self._layout.numel]
        tops = []
        for start, numel in zip(self._layout.starts, self._layout.numels, strict=True):
            tops.append(encode_variance_(self.exp_avg_sq[start : start + numel], codes[start : start + numel]))
        self.tops.copy_(torch.tensor(tops, dtype=torch.int32, device="cpu"))
        self.codes, self.exp_avg_sq = codes, self.exp_avg_sq[:0]

    def make_codes(self, tops: Sequence[int]) -> None:
        """Allocate the codes of a variance, to be filled. ``tops``: each parameter's ``top_of_variance``."""
        self.codes = torch.empty(self._layout.numel, dtype=torch.uint8, device=self.codes.device)
        self.tops.copy_(torch.tensor([top if top > NO_TOP else 0 for top in tops], dtype=torch.int32, device="cpu"))

    def variance(self, start: int, stop: int) -> Variance:
        """Return the variances of the elements [start, stop), as kernels take them."""
        if self.codes.numel():
            return LogVariance(self.codes[start:stop], self.tops)
        return self.exp_avg_sq[start:stop]

    # -- the momentum -------------------------------------------------------------------------------------------------

    def keep(self, bucket: Bucket, average: Average) -> None:
        """Take the messages of an average as the momentum of a bucket."""
        self.last[bucket.start], self._recent = average, None

    def in_float32(self, bucket: Bucket) -> Tensor:
        """Return float32 memory for the new momentum of a bucket, whose messages do not take its place any more."""
        if self.exp_avg.numel() != self._layout.numel:
            self.exp_avg = self.exp_avg.new_zeros(self._layout.numel)
        self.last.pop(bucket.start, None)
        self._recent = None
        return self.exp_avg[bucket.start : bucket.stop]

    def momentum(self, bucket: Bucket) -> Average:
        """Return the momentum of a bucket, as values or as messages."""
        return self.last.get(bucket.start) or Average.of(self.exp_avg[bucket.start : bucket.stop])

    def settle(self) -> None:
        """Free the float32 buffers whose place compact forms have taken."""
        if len(self.last) == len(self._layout.buckets):
            self.exp_avg = self.exp_avg.new_empty(0)
        if self.codes.numel():
            if self.codes.untyped_storage().nbytes() > self.codes.numel():
                self.codes = self.codes.clone()
            self.exp_avg_sq = self.exp_avg_sq.new_empty(0)

    # -- other forms --------------------------------------------------------------------------------------------------

    def room(
        self, *, codes: bool = False, last: Mapping[int, Average] | None = None, shards: MomentShards | None = None
    ) -> Moments:
        """Return moments of another form, to be filled. They share the memory of what has that form already.

        Args:
            codes: Whether the variance lies in 8 bits, else in float32.
            last: Messages that take the momentum's place, by their first elements; None for float32.
            shards: This rank's part of the moments, if the ranks share them out.
        """
        found, numel = copy(self), self._layout.numel if shards is None else 0
        found.shards = shards
        found.tops, found.last, found._recent = torch.zeros_like(self.tops), dict(last or {}), None
        if not codes:
            found.codes = self.codes.new_empty(0)
        elif not self.codes.numel():
            found.codes = self.codes.new_empty(numel)
        for name, compact in (("exp_avg", bool(last)), ("exp_avg_sq", codes)):
            if not compact and getattr(self, name).numel() != numel:
                setattr(found, name, getattr(self, name).new_zeros(numel))
        return found

    def decode(self, *, momentum: bool = True, variance: bool = True) -> None:
        """Write what lies in a compact form into float32 buffers: into those that are still there, or into new ones."""
        numel, places = self._layout.numel, [*zip(self._layout.starts, self._layout.numels, strict=True)]
        if momentum and self.last:
            if self.exp_avg.numel() != numel:
                self.exp_avg = self.exp_avg.new_zeros(numel)
            for index, (start, count) in enumerate(places):
                self.exp_avg[start : start + count] = self.exp_avg_of(index, still=not self.has_variance(index))
            self.last, self._recent = {}, None
        if variance and self.codes.numel():
            if self.exp_avg_sq.numel() != numel:
                self.exp_avg_sq = self.exp_avg_sq.new_zeros(numel)
            for index, (start, count) in enumerate(places):
                self.exp_avg_sq[start : start + count] = self.exp_avg_sq_of(index)
            self.codes = self.codes.new_empty(0)

    # -- one parameter's ----------------------------------------------------------------------------------------------

    def stored_variance(self, index: int) -> Tensor:
        """Return a parameter's second moment in the form that it has: a view of the codes or of the buffer, [n]."""
        start = self._layout.starts[index]
        whole = self.codes if self.codes.numel() else self.exp_avg_sq
        return whole[start : start + self._layout.numels[index]]

    def exp_avg_of(self, index: int, still: bool) -> Tensor:
        """Return a parameter's first moment, [n] float32: a view of the buffer, or decoded values.

        Args:
            index: The parameter.
            still: Whether it stands still, so that the momentum that messages tell counts as 0.
        """
        start, numel = self._layout.starts[index], self._layout.numels[index]
        if not self.last:
            return self.exp_avg[start : start + numel]
        out = torch.zeros(numel, dtype=torch.float32, device=self.codes.device)
        for first, average in self.last.items() if not still else ():
            low, high = max(start, first), min(start + numel, first + average.numel)
            if low < high:
                out[low - start : high - start] = self._decoded(first, average)[low - first : high - first]
        return out

    def _decoded(self, start: int, average: Average) -> Tensor:
        if self._recent is None or self._recent[0] != start:
            values = torch.empty(average.numel, dtype=torch.float32, device=self.codes.device)
            on(values).decompress_(average, values)
            self._recent = start, values
        return self._recent[1]

    def exp_avg_sq_of(self, index: int) -> Tensor:
        """Return a parameter's second moment, [n] float32: a view of the buffer, or decoded values."""
        start = self._layout.starts[index]
        stop = start + self._layout.numels[index]
        if self.codes.numel():
            return decode_variance(self.codes[start:stop], self.tops[index])
        return self.exp_avg_sq[start:stop]

    def has_variance(self, index: int, *, compact: bool = True) -> bool:
        """Return whether an element of a parameter has a variance, in the form that steps read.

        Args:
            index: The parameter.
            compact: Whether float32 values are to be encoded: a variance below 2^-126 has the code of 0.
        """
        start = self._layout.starts[index]
        stop = start + self._layout.numels[index]
        if self.codes.numel():
            return start < stop and int(self.codes[start:stop].min()) != ZERO_CODE
        values = self.exp_avg_sq[start:stop]
        return top_of_variance(values) > NO_TOP if compact else not is_zero(values)


class ParameterState(dict[str, Any]):
    """The entry of ``optimizer.state`` of one parameter, whose moments are decoded whenever they are read.

    While the moments are float32 buffers, they are views of these.
    """

    def __init__(self, read: Callable[[], dict[str, Callable[[], Any]]]) -> None:
        """Take the function that returns what reads each value."""
        super().__init__(dict.fromkeys(read()))
        self._read = read

    def follow(self) -> None:
        """Take the names of the form that the moments have now."""
        names = self._read()
        if not names.keys() <= super().keys():
            super().clear()
            super().update(dict.fromkeys(names))

    def __getitem__(self, name: str) -> Any:
        """Return a value, now."""
        readers = self._read()
        return readers[name]() if name in readers else super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names; with a method of its own, ``dict(entry)`` asks for each value."""
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default."""
        return self[name] if name in self else default

    def items(self) -> Any:
        """Return names and values."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """Return the values."""
        return [self[name] for name in self]

    def copy(self) -> dict[str, Any]:
        """Return the values that there are now."""
        return dict(self)

    def __or__(self, other: Any) -> Any:
        """Return the values that there are now, with others beside them."""
        return dict(self) | other

    def __reduce__(self) -> Any:
        """Pickle and copy the values that there are now."""
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterState:
        """Return an entry of the copied optimizer."""
        return ParameterState(deepcopy(self._read, memo))


def follow_moments(entries: Iterable[Any]) -> None:
    """Have entries of ``optimizer.state`` follow moments that have taken another form."""
    for entry in entries:
        if isinstance(entry, ParameterState):
            entry.follow()
