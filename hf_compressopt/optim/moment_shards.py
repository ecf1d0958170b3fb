"""The moments of one param group, shared out among the ranks: each rank has those of the chunks that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_compressopt.collectives.communicator import Communicator
from hf_compressopt.flat import Bucket, FlatLayout, Span

#: The entry of ``optimizer.state`` that holds this rank's part of a parameter's moments.
PIECES = "pieces"


class MomentShards:
    """This rank's part of the two moments of a param group, bucket by bucket.

    Attributes:
        spans: For each bucket, the runs of parameters in this rank's chunk; their offsets count from its start.
        exp_avg: For each bucket the first moments of this rank's chunk, [n_own] float32.
        exp_avg_sq: For each bucket the second moments of this rank's chunk, [n_own] float32.
    """

    def __init__(self, layout: FlatLayout, communicator: Communicator, device: torch.device) -> None:
        ranges = [communicator.topology.own_range(bucket.numel) for bucket in layout.buckets]
        rows = list(zip(layout.buckets, ranges, strict=True))
        self.spans = [list(_spans(bucket, *own)) for bucket, own in rows]
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros(stop - start, dtype=torch.float32, device=device) for start, stop in ranges] for _ in range(2)
        )

    def to(self, device: torch.device) -> None:
        """Move everything."""
        self.exp_avg = [moment.to(device) for moment in self.exp_avg]
        self.exp_avg_sq = [moment.to(device) for moment in self.exp_avg_sq]

    def parts(self) -> Iterator[tuple[Span, Tensor, Tensor]]:
        """Yield each run of a parameter with its two moments, [n] float32, which are views."""
        for spans, exp_avg, exp_avg_sq in zip(self.spans, self.exp_avg, self.exp_avg_sq, strict=True):
            for span in spans:
                yield span, part_of(exp_avg, span), part_of(exp_avg_sq, span)

    def pieces(self, index: int) -> list[dict[str, Any]]:
        """Return what this rank has of a parameter's moments, as a state dict of ZeroOptimizer has it."""
        found = []
        for spans, *moments in zip(self.spans, self.exp_avg, self.exp_avg_sq, strict=True):
            for span in spans:
                if span.index == index:
                    exp_avg, exp_avg_sq = (part_of(moment, span) for moment in moments)
                    place = {"start": span.start, "stop": span.stop}
                    found.append({**place, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})
        return found


def check_pieces(row: Mapping[str, Any], shards: MomentShards | None, index: int) -> None:
    """Check that the pieces of a parameter's moments in a state dict, if it has such, are those that this rank has."""
    mine = [] if shards is None else shards.pieces(index)
    saved, own = ([(piece["start"], piece["stop"]) for piece in pieces] for pieces in (row.get(PIECES, mine), mine))
    if saved != own or (PIECES in row and shards is None):
        raise ValueError(
            "the state dict has one rank's part of moments that ranks had shared out (zero_stage): load it on that "
            "rank with the same zero_stage, or save and load with hf_compressopt.save_state and load_state, which take "
            "any"
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
