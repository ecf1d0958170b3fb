"""The state of one param group: moments, steps, error feedback, flat and in the forms that need little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_compressopt import kernels
from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.collectives.exchange import BucketErrors
from hf_compressopt.collectives.feedback import ErrorFeedback
from hf_compressopt.flat import Bucket, FlatLayout, Span
from hf_compressopt.kernels import Average, Descent, LogVariance, Segment, SignFormat, Variance, on
from hf_compressopt.kernels.adam import AdamPlan, AdamTensors
from hf_compressopt.kernels.compact import (
    LEAST_VARIANCE,
    NO_TOP,
    ZERO_CODE,
    decode_variance,
    encode_variance_,
    tops_of_variances,
)
from hf_compressopt.kernels.memory import dense_values, numbers_on, reads_at_once
from hf_compressopt.kernels.messages import travels_beside_signs, travels_in_full
from hf_compressopt.optim.math import adam_step_, correct_bias_, floor_variance_, sum_of

#: The entry of ``optimizer.state`` that holds this rank's part of a parameter's moments.
PIECES = "pieces"


class MomentShards:
    """This rank's part of both moments: spans of parameters in its chunk of each bucket, and what travels in full."""

    def __init__(
        self, layout: FlatLayout, communicator: Communicator, device: torch.device, in_full: Sequence[bool]
    ) -> None:
        self.place = place = communicator.topology
        chunks = [
            [list(_spans(bucket, *place.chunk_range(bucket.numel, rank))) for rank in range(place.world_size)]
            for bucket in layout.buckets
        ]
        self.spans = [spans[place.rank] for spans in chunks]
        self.numels_in_full = [
            [sum(span.numel for span in own if in_full[span.index]) for own in spans] for spans in chunks
        ]
        numels = [sum(span.numel for span in own) for own in self.spans]
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros(numel, dtype=torch.float32, device=device) for numel in numels] for _ in range(2)
        )

    def to(self, device: torch.device) -> None:
        self.exp_avg = [moment.to(device) for moment in self.exp_avg]
        self.exp_avg_sq = [moment.to(device) for moment in self.exp_avg_sq]

    def parts(self) -> Iterator[tuple[Span, Tensor, Tensor]]:
        """Yield each run of a parameter with its two moments, [n] float32, which are views."""
        for spans, exp_avg, exp_avg_sq in zip(self.spans, self.exp_avg, self.exp_avg_sq, strict=True):
            for span in spans:
                yield span, part_of(exp_avg, span), part_of(exp_avg_sq, span)

    def pieces(self, index: int) -> list[dict[str, Any]]:
        """Return what this rank has of a parameter's moments, as a state dict of ZeroOptimizer has it."""
        return [
            {"start": span.start, "stop": span.stop, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            for span, exp_avg, exp_avg_sq in self.parts()
            if span.index == index
        ]


def check_pieces(row: Mapping[str, Any], shards: MomentShards | None, index: int) -> None:
    """Check that the pieces of a parameter's moments in a state dict, if it has such, are those that this rank has."""
    mine = [] if shards is None else shards.pieces(index)
    saved, own = ([(piece["start"], piece["stop"]) for piece in pieces] for pieces in (row.get(PIECES, mine), mine))
    if saved != own or (PIECES in row and shards is None):
        raise ValueError(
            "the state dict has one rank's part of moments that ranks had shared out (zero_stage): load it on that "
            "rank with the same zero_stage, or use hf_compressopt.save_state and load_state, which take any"
        )


def take_pieces(mine: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> None:
    """Copy a parameter's moments from a state dict: as many pieces, whole tensors, or zeros if it has none."""
    for number, piece in enumerate(mine):
        for name in ("exp_avg", "exp_avg_sq"):
            if PIECES in row:
                piece[name].copy_(row[PIECES][number][name])
            elif name in row:
                piece[name].copy_(row[name].reshape(-1)[piece["start"] : piece["stop"]])
            else:
                piece[name].zero_()


def part_of(shard: Tensor, span: Span) -> Tensor:
    """Return the elements of a run of a parameter, a view of what a rank has of a bucket."""
    return shard[span.offset : span.offset + span.numel]


def _spans(bucket: Bucket, first: int, last: int) -> Iterator[Span]:
    """Yield the runs of parameters that lie in the elements [first, last) of a bucket."""
    for piece in bucket.pieces:
        begin = piece.offset - bucket.start
        low, high = max(begin, first), min(begin + piece.numel, last)
        if low < high:
            yield Span(piece.index, piece.start + low - begin, piece.start + high - begin, low - first)


@dataclass
class KeptAdam:
    """Operands of Adam for some parameters of a group, kept while its moments lie in the same buffers."""

    made_of: tuple[list[int], bool]
    buffers: tuple[Tensor, Tensor]
    tensors: AdamTensors  # without gradients between steps
    counted: Sequence[float] = ()  # what the counts on a device, if they lie there, stand for
    plan: AdamPlan | None = None


class Moments:
    """The two moments of a param group in flat float32 buffers."""

    shards: MomentShards | None = None  # which take the place of both, of a class that keeps compact moments

    def __init__(self, layout: FlatLayout, exp_avg: Tensor, exp_avg_sq: Tensor, *, has_variance: bool) -> None:
        self._layout, self.has_variance = layout, has_variance
        self.exp_avg, self.exp_avg_sq = exp_avg, exp_avg_sq
        self.adam: KeptAdam | None = None  # of the warmup stage

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
        return self.__dict__ | {"adam": None}

    def to(self, device: torch.device) -> None:
        self.exp_avg, self.exp_avg_sq, self.adam = self.exp_avg.to(device), self.exp_avg_sq.to(device), None
        if self.shards is not None:
            self.shards.to(device)

    # -- what a compressed step reads and writes ----------------------------------------------------------------------

    def freeze(self) -> None:
        """Give a variance that does not change any more the form that it has from now on."""

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

    def settle(self) -> None:
        """Free the float32 buffers whose place another form has taken."""

    # -- one parameter's ----------------------------------------------------------------------------------------------

    def _part(self, whole: Tensor, index: int) -> Tensor:
        """Return the elements of one parameter in a buffer of all elements."""
        start = self._layout.starts[index]
        return whole[start : start + self._layout.numels[index]]

    def exp_avg_of(self, index: int, still: bool) -> Tensor:
        """Return a parameter's first moment, [n] float32: a view of where its values lie, or decoded ones."""
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
        found = iter(self._vary(self.largest_variances().tolist() if largest is None else largest))
        return [numel > 0 and next(found) for numel in self._layout.numels]

    def _vary(self, largest: Sequence[float]) -> list[bool]:
        return [row != 0 for row in largest]

    # -- files --------------------------------------------------------------------------------------------------------

    def stored_of(self, index: int) -> dict[str, Tensor]:
        """Return a parameter's moments as files have them, flat, by their kinds; without those of ``shards``."""
        stored = {"exp_avg": self._part(self.exp_avg, index)}
        return stored | {"exp_avg_sq": self._part(self.exp_avg_sq, index)} if self.has_variance else stored

    @property
    def tops_of_codes(self) -> Tensor | None:
        """What a variance in codes needs beside them, [parameters] int32; None for one in float32."""
        return None

    @property
    def messages(self) -> list[Average]:
        """The messages that are the momentum, in the order of their buckets."""
        return []

    def room(
        self, *, codes: bool = False, last: Mapping[int, Average] | None = None, shards: MomentShards | None = None
    ) -> Moments:
        """Return moments of another form, to be filled. They share the memory of what has that form already."""
        if not (codes or last):
            return copy(self)
        compact = CompactMoments(self._layout, self.exp_avg, self.exp_avg_sq, has_variance=self.has_variance)
        return compact.room(codes=codes, last=last)

    def loaded(self, read: Moments, *, frozen: bool, world_size: int, form: SignFormat) -> Moments:
        """Return the moments that go on after a load into :meth:`room`.

        ``frozen``: the variance does not change in the coming step. The coming messages are of ``world_size`` ranks.
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
        self.codes, self.tops, self._recent = self.codes.to(device), self.tops.to(device), None
        for start, average in self.last.items():
            messages, values = (
                None if each is None else each.to(device) for each in (average.messages, average.values)
            )
            self.last[start] = replace(average, messages=messages, values=values)

    # -- the variance -------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Encode the variance. The codes lie in its own memory until :meth:`settle`, so that there is no peak."""
        if self.codes.numel() or not self._layout.numel or not self.has_variance:
            return
        codes = self.exp_avg_sq.view(torch.uint8)[: self._layout.numel]
        parts = [self._part(self.exp_avg_sq, index) for index in range(len(self._layout.numels))]
        tops = tops_of_variances(parts)
        for index in self._layout.in_order:  # codes take the place of what is encoded already
            encode_variance_(parts[index], self._part(codes, index), tops[index])
        self._take_tops(tops)
        self.codes, self.exp_avg_sq, self.adam = codes, self.exp_avg_sq[:0], None

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

    def keep(self, bucket: Bucket, average: Average) -> None:
        """Take the messages of an average as the momentum of a bucket."""
        self.last[bucket.start], self._recent = average, None

    def store(self, bucket: Bucket, average: Average, *, masked: bool, alone: bool) -> Tensor | None:
        if not masked and (average.messages is not None or (bucket.in_full and not alone)):
            self.keep(bucket, average)
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

    def exp_avg_of(self, index: int, still: bool) -> Tensor:
        start, numel = self._layout.starts[index], self._layout.numels[index]
        if not self.last:
            return super().exp_avg_of(index, still)
        out = torch.zeros(numel, dtype=torch.float32, device=self.codes.device)
        if still:
            return out
        for first, average in self.last.items():
            low, high = max(start, first), min(start + numel, first + average.numel)
            if average.values is not None and high - low == numel:
                return average.values[low - first : high - first]
            if low < high:
                out[low - start : high - start] = self._decoded(first, average)[low - first : high - first]
        return out

    def _decoded(self, start: int, average: Average) -> Tensor:
        if self._recent is None or self._recent[0] != start:
            values = torch.empty(average.numel, dtype=torch.float32, device=self.codes.device)
            on(values).decompress_(average, values)
            self._recent = start, values
        return self._recent[1]

    # -- both ---------------------------------------------------------------------------------------------------------

    def shown(self, read: Callable[[], dict[str, Callable[[], Any]]]) -> MutableMapping[str, Any]:
        return ParameterState(read)

    def settle(self) -> None:
        if len(self.last) == len(self._layout.buckets):
            self.exp_avg = self.exp_avg.new_empty(0)
        if self.codes.numel():
            if self.codes.untyped_storage().nbytes() > self.codes.numel():
                self.codes = self.codes.clone()
            self.exp_avg_sq = self.exp_avg_sq.new_empty(0)

    def decode(self, *, momentum: bool = True, variance: bool = True) -> None:
        """Write what lies in a compact form into float32 buffers: into those that are still there, or into new ones."""
        if momentum and self.last:
            self.exp_avg, varies = self._whole(self.exp_avg), self.with_variance()
            for index, has_variance in enumerate(varies):
                self._part(self.exp_avg, index).copy_(self.exp_avg_of(index, still=not has_variance))
            self.last, self._recent = {}, None
        if variance and self.codes.numel():
            self.exp_avg_sq = self._whole(self.exp_avg_sq)
            for index in range(len(self._layout.numels)):
                self._part(self.exp_avg_sq, index).copy_(self.exp_avg_sq_of(index))
            self.codes = self.codes.new_empty(0)

    # -- files --------------------------------------------------------------------------------------------------------

    def stored_of(self, index: int) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        if not self.last or self._layout.starts[index] >= self._layout.in_messages.numel:  # else messages have it
            stored["exp_avg"] = self.exp_avg_of(index, still=False)
        if self.codes.numel():
            stored["exp_avg_sq_code"] = self._part(self.codes, index)
        elif self.has_variance:
            stored["exp_avg_sq"] = self._part(self.exp_avg_sq, index)
        return stored

    @property
    def tops_of_codes(self) -> Tensor | None:
        return self.tops if self.codes.numel() else None

    @property
    def messages(self) -> list[Average]:
        return [average for _, average in sorted(self.last.items())]

    def room(
        self, *, codes: bool = False, last: Mapping[int, Average] | None = None, shards: MomentShards | None = None
    ) -> Moments:
        found, numel = copy(self), self._layout.numel if shards is None else 0
        found.shards = shards
        found.tops, found.last, found._recent = torch.zeros_like(self.tops), dict(last or {}), None
        if not codes:
            found.codes = self.codes.new_empty(0)
        elif not self.codes.numel():
            found.codes = self.codes.new_empty(numel)
        for name, compact in (("exp_avg", bool(last)), ("exp_avg_sq", codes or not self.has_variance)):
            if not compact and getattr(self, name).numel() != numel:
                setattr(found, name, getattr(self, name).new_zeros(numel))
        return found

    def loaded(self, read: Moments, *, frozen: bool, world_size: int, form: SignFormat) -> Moments:
        assert isinstance(read, CompactMoments), "room() returns moments of its own class"
        messages = [average for average in read.messages if average.values is None]
        alike = all((average.world_size, average.form) == (world_size, form) for average in messages)
        alike = alike and sorted(read.last) == [bucket.start for bucket in self._layout.buckets]
        read.decode(momentum=not (frozen and alike), variance=not frozen)
        read.settle()
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


@dataclass(frozen=True)
class ExtraState:
    """A state tensor that an algorithm has beyond its moments, by its name in ``optimizer.state``."""

    name: str
    per: str  # "element" (float32, flat), "parameter" (float32) or "group" (float64, on the CPU)
    initial: float = 0.0
    always: bool = False  # groups that are never compressed have it too
    plain: str = ""  # name of its first value in a plain Adam's state, if not ``initial``


@dataclass(frozen=True)
class GroupForm:
    """The cut of buckets, the state and its form that all param groups of an optimizer have."""

    bucket_numel: int
    scale_block: int | None
    compact: bool
    shares_moments: bool  # whether the ranks share out the moments of the warmup stage
    has_variance: bool
    extra_state: Sequence[ExtraState]


class GroupState:
    """One param group: its options and the state of its trainable parameters, allocated at once, alike on all ranks."""

    def __init__(
        self,
        number: int,
        options: dict[str, Any],
        form: GroupForm,
        communicator: Communicator,
        own_rank: int | None,
    ) -> None:
        self.options, self.number = options, number
        given = options.get("param_names", [f"group{self.number}.{i}" for i in range(len(options["params"]))])
        named = {p: name for p, name in zip(options["params"], given, strict=True) if p.requires_grad}
        self.params, self.names = list(named), list(named.values())  # a tensor given twice counts once
        self.labels = list(self.names)  # for messages; names are for checkpoints
        if "param_names" not in options:
            self.labels = [f"{name} of shape {list(p.shape)}" for p, name in named.items()]
        self.compressed = compressed = not options["non_freeze"]  # ever, and so with errors and extras
        self.in_full = [travels_in_full(p) for p in self.params]  # beside messages of integers
        beside = [compressed and travels_beside_signs(p.shape, form.scale_block) for p in self.params]
        self.layout = FlatLayout.build([p.numel() for p in self.params], form.bucket_numel, beside)
        # among all ranks, if the param group has a process group of its own, so that others may hold other parameters
        self.communicator, self.own_rank = communicator, own_rank
        device = self.params[0].device if self.params else communicator.device
        compact = form.compact and compressed
        self.form = SignFormat(form.scale_block)
        together = compressed and own_rank is None and communicator.world_size > 1
        self.shared_out = form.shares_moments and together
        shards = self.room_for_shards(device)
        kind = CompactMoments if compact or self.shared_out else Moments
        self.moments = kind.zeros(self.layout, device, shards, has_variance=form.has_variance)
        layout = self.layout.in_messages
        self.errors = ErrorFeedback(layout, communicator, device, compact=compact, used=compressed)
        self.steps = torch.zeros(len(self.params), dtype=torch.float32, device="cpu")  # that each parameter has seen
        self.still = [False] * len(self.params)  # which do not move after the warmup stage; see find_still()
        self.extras = tuple(extra for extra in form.extra_state if compressed or extra.always)
        self.own_params: list[Tensor] | None = None  # this rank's, while others stand in their place
        self._mask: tuple[Tensor, tuple[int, torch.device], Tensor] | None = None  # see _mask_here()
        self.extra, self.group_extra = dict[str, Tensor](), dict[str, Tensor]()
        for extra in self.extras:
            if extra.per == "group":
                self.group_extra[extra.name] = torch.full((1,), extra.initial, dtype=torch.float64, device="cpu")
            else:
                size = self.layout.numel if extra.per == "element" else len(self.params)
                self.extra[extra.name] = torch.full((size,), extra.initial, dtype=torch.float32, device=device)

    def form_of(self, bucket: Bucket) -> SignFormat | None:
        """Return the form of a bucket's messages; None for one that travels in full."""
        return None if bucket.in_full else self.form

    @property
    def feedback(self) -> list[BucketErrors]:
        """The errors of each bucket; what travels in full has none."""
        return self._by_bucket(self.errors)

    @property
    def new_feedback(self) -> list[BucketErrors]:
        """The errors of each bucket that a pass writes: new ones, or, where none was begun, the same."""
        return self._by_bucket(self.errors.pending or self.errors)

    def _by_bucket(self, errors: ErrorFeedback) -> list[BucketErrors]:
        nothing = torch.empty(0, dtype=torch.float32, device=self.device)
        return [
            *errors.feedback,
            *[BucketErrors((nothing,), nothing)] * (len(self.layout.buckets) - len(errors.feedback)),
        ]

    @property
    def exp_avg(self) -> Tensor:
        return self.moments.exp_avg

    @property
    def exp_avg_sq(self) -> Tensor:
        return self.moments.exp_avg_sq

    def variance(self, bucket: Bucket) -> Variance:
        return self.moments.variance(bucket.start, bucket.stop)

    def store_momentum(self, bucket: Bucket, average: Average) -> Tensor | None:
        """Make an average the momentum of a bucket: see :meth:`Moments.store`."""
        masked = self.options.get("exp_avg_mask") is not None
        return self.moments.store(bucket, average, masked=masked, alone=self.communicator.world_size == 1)

    def room_for_shards(self, device: torch.device | None = None) -> MomentShards | None:
        """Return memory for this rank's part of the moments of the warmup stage; None if every rank has all of them."""
        if not self.shared_out:
            return None
        return MomentShards(self.layout, self.communicator, device or self.device, self.in_full)

    def end_compressed_step(self) -> None:
        """Drop what a compressed step has used up."""
        self.moments.settle()
        if self.communicator.world_size == 1 and self.errors.worker.numel():
            self.errors.take(self.errors.worker.new_empty(0), self.errors.server.new_empty(0))

    @property
    def device(self) -> torch.device:
        return self.moments.exp_avg.device

    def to(self, device: torch.device) -> None:
        """Move the buffers. Views that were handed out become stale."""
        self.moments.to(device)
        self.errors.to(device)
        self.extra = {name: tensor.to(device) for name, tensor in self.extra.items()}

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Return the part of a flat buffer that belongs to one parameter, in the shape of the parameter."""
        start = self.layout.starts[index]
        return flat[start : start + self.layout.numels[index]].view(self.params[index].shape)

    def moments_of(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return both moments of one parameter, views of the flat buffers, and its count of steps."""
        return self.view(self.exp_avg, index), self.view(self.exp_avg_sq, index), self.steps[index]

    def torch_state(self, index: int) -> MutableMapping[str, Any]:
        """Return the entry of ``optimizer.state[p]``: views of the flat buffers, or what decodes compact forms."""
        return self.moments.shown(partial(self._readers, index))

    def beside_moments(self, per: str) -> dict[str, Tensor]:
        """Return the state beside the moments, by name: per "element", flat, per "parameter", or per "group"."""
        held = self.group_extra if per == "group" else self.extra
        counts = {"step": self.steps} if per == "parameter" else {}
        return counts | {extra.name: held[extra.name] for extra in self.extras if extra.per == per}

    def _readers(self, index: int) -> dict[str, Callable[[], Any]]:
        """Return what returns each value of the state of a parameter; of shared moments this rank's pieces."""
        shape, shards = self.params[index].shape, self.moments.shards
        readers: dict[str, Callable[[], Any]] = {"step": lambda: self.steps[index]}
        if shards is not None:
            return {**readers, PIECES: lambda: shards.pieces(index)}
        readers["exp_avg"] = lambda: self.moments.exp_avg_of(index, self.still[index]).view(shape)
        if self.moments.has_variance:
            readers["exp_avg_sq"] = lambda: self.moments.exp_avg_sq_of(index).view(shape)
        flat, counts = self.beside_moments("element"), self.beside_moments("parameter")
        readers |= {name: partial(self.view, values, index) for name, values in flat.items()}
        return readers | {name: partial(values.__getitem__, index) for name, values in counts.items()}

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each value of the state of a parameter, as it is if every rank has all of it."""
        shape = tuple(self.params[index].shape)
        moments = ("exp_avg", "exp_avg_sq") if self.moments.has_variance else ("exp_avg",)
        of_elements = dict.fromkeys((*moments, *self.beside_moments("element")), shape)
        return {**dict.fromkeys(self.beside_moments("parameter"), ()), **of_elements}

    def count_step(self, present: Sequence[bool] | None = None) -> None:
        """Count a step of the parameters that are ``present``, by default of all."""
        self.steps += 1 if present is None else torch.tensor(present, dtype=torch.float32, device="cpu")

    def label(self, names: Mapping[int, str]) -> None:
        """Use these names, by the parameters' ids, in messages, unless the group has names of its own."""
        if "param_names" not in self.options:
            self.labels = [names.get(id(p), label) for p, label in zip(self.params, self.labels, strict=True)]

    def let_all_move(self) -> None:
        """Let every parameter move, as in the warmup stage."""
        self.still = [False] * len(self.params)

    def find_still(self, largest: Sequence[float] | None = None) -> None:
        """Find the parameters that do not move after the warmup stage, since none of their elements has a variance."""
        varies = self.moments.with_variance(largest)
        self.still = [
            self.compressed and numel > 0 and not each for numel, each in zip(self.layout.numels, varies, strict=True)
        ]

    def take_adam_step(self, grads: Sequence[Tensor | None], *, fused: bool) -> None:
        """Take a step of Adam of the parameters that have a gradient. What else it needs is made once."""
        rows = [index for index, grad in enumerate(grads) if grad is not None]
        fused = fused and not self.options["eps_inside_sqrt"]
        kept, buffers = self.moments.adam, (self.exp_avg, self.exp_avg_sq)
        if kept is None or kept.made_of != (rows, fused) or any(map(is_not, kept.buffers, buffers)):
            params, steps = [self.params[index] for index in rows], [self.steps[index] for index in rows]
            first, second = ([self.view(buffer, index) for index in rows] for buffer in buffers)
            kept = self.moments.adam = KeptAdam((rows, fused), buffers, AdamTensors([], params, first, second, steps))
        counts = self.steps[rows].tolist() if fused and not reads_at_once(self.device) else ()
        if counts != kept.counted:  # else the counts of the plan go on
            kept.tensors.steps = [*numbers_on(self.device, counts).unbind()]
        kept.tensors.grads = [grad for grad in grads if grad is not None]
        kept.plan = adam_step_(kept.tensors, self.options, fused=fused, plan=kept.plan)
        kept.tensors.grads = []
        if counts:
            self.steps[rows] += 1
            kept.counted = [count + 1 for count in counts]

    def freeze_variance(self, first: Sequence[float], second: Sequence[float], floor: float) -> None:
        """Fold the bias corrections into the moments, and apply the variance floor, at the end of the warmup stage."""
        beta1, beta2 = self.options["betas"]
        for index, counts in enumerate(zip(first, second, strict=True)):
            exp_avg, exp_avg_sq, _ = self.moments_of(index)
            if self.options["bias_correction"]:
                correct_bias_(exp_avg, counts[0], beta1)
                correct_bias_(exp_avg_sq, counts[1], beta2)
            floor_variance_(exp_avg_sq, floor)
        self.find_still()

    def descent(self, max_update: float | None = None) -> Descent:
        """Return how the parameters follow a direction; None or 0 as ``max_update`` is no bound."""
        group = self.options
        lr, bound = float(group["lr"]), float(max_update or math.inf)
        return Descent(lr, 1 - lr * group["weight_decay"], group["eps"], group["eps_inside_sqrt"], bound)

    def masked(self, bucket: Bucket, average: Average) -> Average:
        """Return a bucket's average, times the group's mask if it has one."""
        mask: Tensor | None = self.options.get("exp_avg_mask")
        if mask is None:
            return average
        values = torch.empty(bucket.numel, dtype=torch.float32, device=self.device)
        kernels.on(values).decompress_(average, values)
        here = self._mask_here(mask)
        for piece in bucket.pieces:
            whole = here.expand(self.params[piece.index].shape).reshape(-1)
            values[piece.offset - bucket.start :][: piece.numel].mul_(whole[piece.start : piece.stop])
        return Average.of(values)

    def _mask_here(self, mask: Tensor) -> Tensor:
        """Return a mask on the device of the state: of one in host memory a copy, which the host waits for, is kept."""
        if mask.device == self.device:
            return mask.to(torch.float32)
        made_of = 0 if mask.is_inference() else mask._version, self.device
        if self._mask is None or self._mask[0] is not mask or self._mask[1] != made_of:
            self._mask = mask, made_of, mask.to(self.device, torch.float32)
        return self._mask[2]

    def gradient_segments(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> list[Segment]:
        """Return the parts of gradients (one or None per parameter) that lie in a bucket, for the kernels."""
        segments = []
        for piece in bucket.pieces:
            grad = grads[piece.index]
            tensor = None if grad is None else dense_values("the gradient", grad)
            segments.append(Segment(tensor, piece.start, piece.numel, piece.index, self.still[piece.index]))
        return segments

    def parameter_segments(self, bucket: Bucket, moving: Container[int] | None = None) -> ParameterSegments:
        """Give the parts of (unfrozen, ``moving``) parameters in a bucket, to be changed in place inside a ``with``."""
        found = ParameterSegments()
        for piece in bucket.pieces:
            index, values, param = piece.index, None, self.params[piece.index]
            if param.requires_grad and (moving is None or index in moving):
                own = param.detach()
                values = dense_values("the parameter", own)
                if values is not own:
                    found.copies.append((param, values))
            found.append(Segment(values, piece.start, piece.numel, index, self.still[index]))
        return found


class ParameterSegments(list[Segment]):
    """Parts of parameters, which are written back at the end if kernels cannot change them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> list[Segment]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for param, values in self.copies:
                param.copy_(values)


class ParamGroups(NamedTuple):
    """The param groups of one optimizer, as what acts on all of them takes them."""

    states: Sequence[GroupState]
    communicator: Communicator
    follow: Callable[[], None]


def by_communicator(states: Iterable[GroupState]) -> list[tuple[Communicator, list[GroupState]]]:
    """Return the states in order, those with the same communicator together."""
    found: dict[int, tuple[Communicator, list[GroupState]]] = {}
    for state in states:
        found.setdefault(id(state.communicator), (state.communicator, []))[1].append(state)
    return list(found.values())


def has_own_groups(states: Iterable[GroupState]) -> bool:
    """Return whether a param group has a process group of its own; alike on all ranks, as the first step checks."""
    return any(state.own_rank is not None for state in states)


def hyperparameters_of(states: Iterable[GroupState]) -> list[list[Any]]:
    """Return the hyperparameters of the param groups that all ranks hold, as JSON holds them."""
    found: list[list[Any]] = []
    for group in (state.options for state in states if state.own_rank is None):
        numbers = *(group.get(name, 0) for name in ("lr", "eps", "weight_decay")), *group["betas"]
        flags = (group.get(name) for name in ("bias_correction", "eps_inside_sqrt"))
        found.append([*map(float, numbers), *map(bool, flags)])
    return found


def trained_of(states: Iterable[GroupState]) -> list[str]:
    """Return for each param group that all ranks hold, and each parameter, "1" if it requires a gradient."""
    shared = (state for state in states if state.own_rank is None)
    return ["".join("01"[param.requires_grad] for param in state.params) for state in shared]


def mean_variance_norm(
    states: Iterable[GroupState],
    counts: Callable[[GroupState], tuple[list[float], list[float]]],
    everyone: Communicator,
) -> Tensor:
    """Return the mean over ranks of the 1-norm of the bias-corrected second moments, [] float64, alike on all ranks."""
    norm = torch.zeros((), dtype=torch.float64, device=everyone.device)
    for state in states:
        count = max(counts(state)[1], default=0.0) if state.compressed else 0.0
        if count == 0:
            continue
        correction = 1 - state.options["betas"][1] ** count if state.options["bias_correction"] else 1.0
        norm += sum_of(state.exp_avg_sq) / correction
        for part in () if state.moments.shards is None else state.moments.shards.exp_avg_sq:
            # a part of the norm, not one rank's view of it
            norm += sum_of(part) / correction * state.communicator.world_size
    norm /= everyone.world_size
    everyone.all_reduce(norm).wait()
    return norm
