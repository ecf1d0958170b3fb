"""The two moments of a param group: flat float32 buffers, the forms that need little memory, and parts of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import PIECES, Bucket, FlatLayout, Span
from hf_compressopt.format.plan import Kind
from hf_compressopt.kernels import Average, LogVariance, SignFormat, Variance, on
from hf_compressopt.kernels.adam import AdamPlan, AdamTensors
from hf_compressopt.kernels.compact import (
    LEAST_VARIANCE,
    NO_TOP,
    ZERO_CODE,
    decode_variance,
    encode_variance_,
    tops_of_variances,
)
from hf_compressopt.kernels.memory import numbers_on, reads_at_once
from hf_compressopt.optim.math import adam_step_

#: The names of the two moments, in ``optimizer.state`` and in files.
MOMENTS = ("exp_avg", "exp_avg_sq")


class MomentShards:
    """This rank's part of both moments: spans of parameters in its chunk of each bucket, and what travels in full."""

    def __init__(
        self, layout: FlatLayout, communicator: Communicator, device: torch.device, in_full: Sequence[bool]
    ) -> None:
        self.topology = topology = communicator.topology
        self.partitions = [bucket.partition(topology.chunks) for bucket in layout.buckets]
        self.spans = [partition.chunks[topology.rank] for partition in self.partitions]
        self.numels_in_full = [
            [sum(span.numel for span in chunk if in_full[span.index]) for chunk in partition.chunks]
            for partition in self.partitions
        ]
        numels = [partition.owned_numels[topology.rank] for partition in self.partitions]
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros(numel, dtype=torch.float32, device=device) for numel in numels] for _ in range(2)
        )

    def to(self, device: torch.device) -> None:
        self.exp_avg = [moment.to(device) for moment in self.exp_avg]
        self.exp_avg_sq = [moment.to(device) for moment in self.exp_avg_sq]

    def take_exp_avg(self, number: int) -> Tensor:
        """Return what this rank has of the first moment of a bucket, and let go of it."""
        taken = self.exp_avg[number]
        self.exp_avg[number] = taken.new_empty(0)
        return taken

    def take_exp_avg_sq(self, number: int) -> Tensor:
        """Return what this rank has of the second moment of a bucket, and let go of it."""
        taken = self.exp_avg_sq[number]
        self.exp_avg_sq[number] = taken.new_empty(0)
        return taken

    def parts(self) -> Iterator[tuple[Span, Tensor, Tensor]]:
        """Yield each run of a parameter with its two moments, [n] float32, which are views."""
        for spans, exp_avg, exp_avg_sq in zip(self.spans, self.exp_avg, self.exp_avg_sq, strict=True):
            for span in spans:
                yield span, part_of(exp_avg, span), part_of(exp_avg_sq, span)

    def pieces(self, index: int) -> list[dict[str, Any]]:
        """Return this rank's pieces of a parameter's moments, as state dicts have them."""
        return [
            span.piece({"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})
            for span, exp_avg, exp_avg_sq in self.parts()
            if span.index == index
        ]


def check_pieces(row: Mapping[str, Any], shards: MomentShards | None, index: int) -> None:
    """Check that the pieces of a parameter's moments in a state dict, if it has such, are those that this rank has."""
    if PIECES not in row:
        return
    pieces = [] if shards is None else shards.pieces(index)
    saved_ranges = [(piece["start"], piece["stop"]) for piece in row[PIECES]]
    if shards is None or saved_ranges != [(piece["start"], piece["stop"]) for piece in pieces]:
        raise ValueError(
            "the state dict has one rank's part of moments that ranks had shared out (zero_stage): load it on that "
            "rank with the same zero_stage, or use hf_compressopt.save_state and load_state, which take any"
        )


def take_pieces(pieces: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> None:
    """Copy a parameter's moments from a state dict: as many pieces, whole tensors, or zeros if it has none."""
    for number, piece in enumerate(pieces):
        for name in MOMENTS:
            if PIECES in row:
                piece[name].copy_(row[PIECES][number][name])
            elif name in row:
                piece[name].copy_(row[name].reshape(-1)[piece["start"] : piece["stop"]])
            else:
                piece[name].zero_()


def part_of(shard: Tensor, span: Span) -> Tensor:
    """Return the elements of a run of a parameter, a view of what a rank has of a bucket."""
    return shard[span.offset : span.offset + span.numel]


@dataclass
class AdamOperands:
    """Operands of Adam's step of some parameters of a group, kept while the moments lie in the same buffers."""

    made_of: tuple[list[int], bool]  # the parameters, and whether native kernels take the step
    buffers: tuple[Tensor, Tensor]
    tensors: AdamTensors  # without gradients, which each step adds
    counted: Sequence[float] = ()  # what the counts on a device, if they lie there, stand for
    plan: AdamPlan | None = None

    def step_(self, grads: list[Tensor], steps: Tensor, options: dict[str, Any]) -> None:
        """Take the step by gradients of these parameters. ``steps``: the counts of all parameters, on the host."""
        rows, fused = self.made_of
        device = self.buffers[0].device
        counts = steps[rows].tolist() if fused and not reads_at_once(device) else ()
        if counts != self.counted:  # else the counts of the plan go on
            self.tensors = replace(self.tensors, steps=[*numbers_on(device, counts).unbind()])
        self.plan = adam_step_(replace(self.tensors, grads=grads), options, fused=fused, plan=self.plan)
        if counts:
            steps[rows] += 1
            self.counted = [count + 1 for count in counts]


class Moments:
    """The two moments of a param group in flat float32 buffers."""

    shards: MomentShards | None = None  # which take the place of both, of a class that keeps compact moments

    def __init__(self, layout: FlatLayout, exp_avg: Tensor, exp_avg_sq: Tensor, *, has_variance: bool) -> None:
        self._layout, self.has_variance = layout, has_variance
        self.exp_avg, self.exp_avg_sq = exp_avg, exp_avg_sq
        self._adam: AdamOperands | None = None  # of the warmup stage

    @classmethod
    def zeros(
        cls, layout: FlatLayout, device: torch.device, shards: MomentShards | None, *, has_variance: bool
    ) -> Moments:
        """Return moments before the first step; what ``shards`` replace is [0]."""
        numel = layout.numel if shards is None else 0
        exp_avg = torch.zeros(numel, dtype=torch.float32, device=device)
        exp_avg_sq = torch.zeros(numel if has_variance else 0, dtype=torch.float32, device=device)
        made = cls(layout, exp_avg, exp_avg_sq, has_variance=has_variance)
        made.shards = shards
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what a copy makes of its own buffers."""
        return self.__dict__ | {"_adam": None}

    def to(self, device: torch.device) -> None:
        self.exp_avg = self.exp_avg.to(device)
        self.exp_avg_sq = self.exp_avg_sq.to(device)
        self._adam = None
        if self.shards is not None:
            self.shards.to(device)

    def drop_shards(self) -> None:
        """Let go of this rank's part, when all ranks have the whole in another form."""
        self.shards = None

    def adam_operands(self, rows: list[int], params: Sequence[Tensor], steps: Tensor, *, fused: bool) -> AdamOperands:
        """Return the operands of Adam's step of the parameters with these numbers, which are made once."""
        made_of = (rows, fused)
        kept = self._adam
        known = kept is not None and kept.made_of == made_of
        if kept is None or not known or kept.buffers[0] is not self.exp_avg or kept.buffers[1] is not self.exp_avg_sq:
            tensors = AdamTensors(
                [],
                [params[index] for index in rows],
                [self._part(self.exp_avg, index).view(params[index].shape) for index in rows],
                [self._part(self.exp_avg_sq, index).view(params[index].shape) for index in rows],
                [steps[index] for index in rows],
            )
            kept = self._adam = AdamOperands(made_of, (self.exp_avg, self.exp_avg_sq), tensors)
        return kept

    # -- what a compressed step reads and writes ----------------------------------------------------------------------

    def freeze(self) -> None:
        """Give a variance that is frozen now the form that it has from now on."""

    def variance(self, start: int, stop: int) -> Variance:
        """Return the variances of the elements [start, stop), as kernels take them."""
        return self.exp_avg_sq[start:stop]

    def momentum(self, bucket: Bucket) -> Average:
        """Return the momentum of a bucket, as values or as messages."""
        return Average.of(self.exp_avg[bucket.start : bucket.stop])

    def store(self, bucket: Bucket, average: Average, *, masked: bool, alone: bool) -> Tensor | None:
        """Make an average the momentum of a bucket: return memory for its values, [numel] float32.

        None if the average takes the momentum's place as it came. ``masked``: it was multiplied by a mask; ``alone``:
        there is one rank.
        """
        return self.exp_avg[bucket.start : bucket.stop]

    def free_float32(self) -> None:
        """Free the float32 buffers whose place another form has taken."""

    # -- one parameter's ----------------------------------------------------------------------------------------------

    def _part(self, whole: Tensor, index: int) -> Tensor:
        """Return the elements of one parameter in a buffer of all elements."""
        start = self._layout.starts[index]
        return whole[start : start + self._layout.numels[index]]

    def exp_avg_of(self, index: int, *, without_variance: bool) -> Tensor:
        """Return a parameter's first moment, [n] float32: a view of where its values lie, or decoded ones.

        ``without_variance``: the parameter does not move, and its moment, of which messages have a sign, counts as 0.
        """
        return self._part(self.exp_avg, index)

    def exp_avg_sq_of(self, index: int) -> Tensor:
        """Return a parameter's second moment, [n] float32: a view of the buffer, or decoded values."""
        return self._part(self.exp_avg_sq, index)

    def shown(self, read: Callable[[], dict[str, Callable[[], Any]]]) -> MutableMapping[str, Any]:
        """Return the entry of ``optimizer.state`` of a parameter, from what reads its values."""
        return {name: value() for name, value in read().items()}

    # -- which parameters have a variance -----------------------------------------------------------------------------

    def largest_variances(self) -> Tensor:
        """Return the largest variance of each parameter that has elements, or its code, which is the least."""
        rows = [self._part(self.exp_avg_sq, index).max() for index, numel in enumerate(self._layout.numels) if numel]
        return torch.stack(rows) if rows else self.exp_avg_sq.new_zeros(0)

    def with_variance(self, largest: Sequence[float] | None = None) -> list[bool]:
        """Return for each parameter whether an element has a variance, in the form that steps read, in one fetch."""
        if not self.has_variance:
            return [True] * len(self._layout.numels)
        varies = iter(self._vary(self.largest_variances().tolist() if largest is None else largest))
        return [numel > 0 and next(varies) for numel in self._layout.numels]

    def _vary(self, largest: Sequence[float]) -> list[bool]:
        return [row != 0 for row in largest]

    # -- files --------------------------------------------------------------------------------------------------------

    def stored_of(self, index: int) -> dict[str, Tensor]:
        """Return a parameter's moments as files have them, flat, by their kinds; without those of ``shards``."""
        stored = {"exp_avg": self._part(self.exp_avg, index)}
        return stored | {"exp_avg_sq": self._part(self.exp_avg_sq, index)} if self.has_variance else stored

    @property
    def tops_of_codes(self) -> Tensor | None:
        """The highest points of a variance in codes, [parameters] int32; None for one in float32."""
        return None

    @property
    def messages(self) -> list[Average]:
        """The messages that are the momentum, in the order of their buckets."""
        return []

    def to_fill(
        self, *, codes: bool = False, last: Mapping[int, Average] | None = None, shards: MomentShards | None = None
    ) -> Moments:
        """Return moments of a form that a load fills. They share the memory of what has that form already."""
        if not (codes or last):
            return copy(self)
        compact = CompactMoments(self._layout, self.exp_avg, self.exp_avg_sq, has_variance=self.has_variance)
        return compact.to_fill(codes=codes, last=last)

    def loaded(self, read: Moments, *, frozen: bool, world_size: int, form: SignFormat) -> Moments:
        """Return the moments that go on after a load into what :meth:`to_fill` has returned.

        ``frozen``: the variance is frozen in the coming step. The coming messages are of ``world_size`` ranks.
        """
        if isinstance(read, CompactMoments):
            read.decode()  # into the buffers that both have
        return self


class CompactMoments(Moments):
    """Moments of which a frozen variance lies in 8 bits (LogVariance), and of which messages may be the momentum.

    Until then both are in float32. What another form replaces is [0] among the float32 buffers.
    """

    def __init__(self, layout: FlatLayout, exp_avg: Tensor, exp_avg_sq: Tensor, *, has_variance: bool) -> None:
        super().__init__(layout, exp_avg, exp_avg_sq, has_variance=has_variance)
        device = exp_avg.device
        self.codes = torch.zeros(0, dtype=torch.uint8, device=device)  # [numel] once the variance is frozen
        self.tops = torch.zeros(len(layout.numels), dtype=torch.int32, device=device)
        self.last: dict[int, Average] = {}  # messages that are the momentum, by the buckets' first elements
        self._recent: tuple[int, Tensor] | None = None  # the bucket that was decoded last: readers go on

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.codes = self.codes.to(device)
        self.tops = self.tops.to(device)
        self._recent = None
        for start, average in self.last.items():
            messages, values = (
                None if each is None else each.to(device) for each in (average.messages, average.values)
            )
            self.last[start] = replace(average, messages=messages, values=values)

    # -- the variance -------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Encode the variance. The codes lie in its memory until :meth:`free_float32`, so that there is no peak."""
        if self.codes.numel() or not self._layout.numel or not self.has_variance:
            return
        codes = self.exp_avg_sq.view(torch.uint8)[: self._layout.numel]
        parts = [self._part(self.exp_avg_sq, index) for index in range(len(self._layout.numels))]
        tops = tops_of_variances(parts)
        for index in self._layout.in_order:  # codes take the place of what is encoded already
            encode_variance_(parts[index], self._part(codes, index), tops[index])
        self._take_tops(tops)
        self.codes = codes
        self.exp_avg_sq = self.exp_avg_sq[:0]
        self._adam = None

    def make_codes(self, tops: Sequence[int]) -> None:
        """Allocate the codes of a variance, to be filled. ``tops``: each parameter's, as ``tops_of_variances``."""
        self.codes = torch.empty(self._layout.numel, dtype=torch.uint8, device=self.codes.device)
        self._take_tops(tops)

    def _take_tops(self, tops: Sequence[int]) -> None:
        points = [top if top > NO_TOP else 0 for top in tops]
        self.tops.copy_(numbers_on(self.tops.device, points, torch.int32))

    def variance(self, start: int, stop: int) -> Variance:
        if self.codes.numel():
            return LogVariance(self.codes[start:stop], self.tops)
        return super().variance(start, stop)

    def exp_avg_sq_of(self, index: int) -> Tensor:
        if self.codes.numel():
            return decode_variance(self._part(self.codes, index), self.tops[index])
        return super().exp_avg_sq_of(index)

    def largest_variances(self) -> Tensor:
        if not self.codes.numel():
            return super().largest_variances()
        return torch.stack([self._part(self.codes, i).min() for i, numel in enumerate(self._layout.numels) if numel])

    def _vary(self, largest: Sequence[float]) -> list[bool]:
        if self.codes.numel():
            return [code != ZERO_CODE for code in largest]
        return [row >= LEAST_VARIANCE for row in largest]

    # -- the momentum -------------------------------------------------------------------------------------------------

    def store_message(self, bucket: Bucket, average: Average) -> None:
        """Take the messages of an average as the momentum of a bucket."""
        self.last[bucket.start] = average
        self._recent = None

    def store(self, bucket: Bucket, average: Average, *, masked: bool, alone: bool) -> Tensor | None:
        if not masked and (average.messages is not None or (bucket.in_full and not alone)):
            self.store_message(bucket, average)
            return None
        self.exp_avg = self._whole(self.exp_avg)
        self.last.pop(bucket.start, None)
        self._recent = None
        return self.exp_avg[bucket.start : bucket.stop]

    def _whole(self, moment: Tensor) -> Tensor:
        """Return a buffer of all elements: this one, or zeros."""
        numel = self._layout.numel
        return moment if moment.numel() == numel else moment.new_zeros(numel)

    def momentum(self, bucket: Bucket) -> Average:
        return self.last.get(bucket.start) or super().momentum(bucket)

    def exp_avg_of(self, index: int, *, without_variance: bool) -> Tensor:
        if not self.last:
            return super().exp_avg_of(index, without_variance=without_variance)
        start, numel = self._layout.starts[index], self._layout.numels[index]
        values = torch.zeros(numel, dtype=torch.float32, device=self.codes.device)
        if without_variance:
            return values
        for first, average in self.last.items():
            low, high = max(start, first), min(start + numel, first + average.numel)
            if average.values is not None and high - low == numel:
                return average.values[low - first : high - first]
            if low < high:
                values[low - start : high - start] = self._decoded(first, average)[low - first : high - first]
        return values

    def _decoded(self, start: int, average: Average) -> Tensor:
        if self._recent is None or self._recent[0] != start:
            values = torch.empty(average.numel, dtype=torch.float32, device=self.codes.device)
            on(values).decompress_(average, values)
            self._recent = start, values
        return self._recent[1]

    # -- both ---------------------------------------------------------------------------------------------------------

    def shown(self, read: Callable[[], dict[str, Callable[[], Any]]]) -> MutableMapping[str, Any]:
        return ParameterState(read)

    def free_float32(self) -> None:
        if len(self.last) == len(self._layout.buckets):
            self.exp_avg = self.exp_avg.new_empty(0)
        if self.codes.numel():
            if self.codes.untyped_storage().nbytes() > self.codes.numel():
                self.codes = self.codes.clone()
            self.exp_avg_sq = self.exp_avg_sq.new_empty(0)

    def decode(self, *, momentum: bool = True, variance: bool = True) -> None:
        """Write what lies in a compact form into float32 buffers: into those that are still there, or into new ones."""
        if momentum and self.last:
            self.exp_avg = self._whole(self.exp_avg)
            for index, varies in enumerate(self.with_variance()):
                self._part(self.exp_avg, index).copy_(self.exp_avg_of(index, without_variance=not varies))
            self.last = {}
            self._recent = None
        if variance and self.codes.numel():
            self.exp_avg_sq = self._whole(self.exp_avg_sq)
            for index in range(len(self._layout.numels)):
                self._part(self.exp_avg_sq, index).copy_(self.exp_avg_sq_of(index))
            self.codes = self.codes.new_empty(0)

    # -- files --------------------------------------------------------------------------------------------------------

    def stored_of(self, index: int) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        if not self.last or self._layout.starts[index] >= self._layout.in_messages.numel:  # else messages have it
            stored["exp_avg"] = self.exp_avg_of(index, without_variance=False)
        if self.codes.numel():
            stored[Kind.CODE] = self._part(self.codes, index)
        elif self.has_variance:
            stored["exp_avg_sq"] = self._part(self.exp_avg_sq, index)
        return stored

    @property
    def tops_of_codes(self) -> Tensor | None:
        return self.tops if self.codes.numel() else None

    @property
    def messages(self) -> list[Average]:
        return [average for _, average in sorted(self.last.items())]

    def to_fill(
        self, *, codes: bool = False, last: Mapping[int, Average] | None = None, shards: MomentShards | None = None
    ) -> Moments:
        moments = copy(self)
        moments.shards = shards
        moments.tops = torch.zeros_like(self.tops)
        moments.last = dict(last or {})
        moments._recent = None
        numel = self._layout.numel if shards is None else 0
        if not codes:
            moments.codes = self.codes.new_empty(0)
        elif not self.codes.numel():
            moments.codes = self.codes.new_empty(numel)
        if not last and self.exp_avg.numel() != numel:
            moments.exp_avg = self.exp_avg.new_zeros(numel)
        if self.has_variance and not codes and self.exp_avg_sq.numel() != numel:
            moments.exp_avg_sq = self.exp_avg_sq.new_zeros(numel)
        return moments

    def loaded(self, read: Moments, *, frozen: bool, world_size: int, form: SignFormat) -> Moments:
        assert isinstance(read, CompactMoments), "to_fill() returns moments of its own class"
        messages = [average for average in read.messages if average.values is None]
        alike = all((average.world_size, average.form) == (world_size, form) for average in messages)
        alike = alike and sorted(read.last) == [bucket.start for bucket in self._layout.buckets]
        read.decode(momentum=not (frozen and alike), variance=not frozen)
        read.free_float32()
        return read


class ParameterState(MutableMapping[str, Any]):
    """The entry of ``optimizer.state`` of one parameter, whose moments are decoded whenever they are read."""

    def __init__(self, read: Callable[[], dict[str, Callable[[], Any]]]) -> None:
        self._read, self._added = read, dict[str, Any]()  # by others, under names of their own

    def __getitem__(self, name: str) -> Any:
        readers = self._read()
        return readers[name]() if name in readers else self._added[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._added[name] = value

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __contains__(self, name: object) -> bool:
        return name in self._read() or name in self._added  # without decoding

    def __iter__(self) -> Iterator[str]:
        return iter({**self._read(), **self._added})

    def __len__(self) -> int:
        return len({**self._read(), **self._added})

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __reduce__(self) -> Any:
        """Pickle and copy the values that there are now."""
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterState:
        return ParameterState(deepcopy(self._read, memo))
