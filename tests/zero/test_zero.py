"""ZeroOptimizer against the unpartitioned optimizer, bit for bit."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from hf_compressopt.collectives.chunks import Topology
from hf_compressopt.flat import FlatLayout, Partition, joined
from hf_compressopt.zero.parts import ALIGN, partition, slice_numel
from tests.support.harness import run_ranks
from tests.support.spreading import Share, spread
from tests.support.zero_runs import OPTIMIZERS, Case, compare


@pytest.mark.invariant(1)
@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3, 4, 1)))
def test_every_optimizer_has_the_bits_of_the_unpartitioned_one(world_size: int, share: Share) -> None:
    names = share.of(OPTIMIZERS)
    cases = [Case(name, {"reduce_bucket_size": 700}) for name in names]
    for found in run_ranks(world_size, compare, cases, (1, 2)):
        assert dict(zip(names, found, strict=True)) == {name: [] for name in names}


VARIANTS = {
    "one bucket": Case(options={"bucket_cap_mb": 25.0}),
    "tiny buckets": Case(options={"reduce_bucket_size": 1, "allgather_bucket_size": 1}),
    "gather more than is reduced": Case(options={"reduce_bucket_size": 300, "allgather_bucket_size": 10**6}),
    "no overlap": Case(options={"overlap_comm": False, "reduce_bucket_size": 300}),
    "groups": Case(groups=True),
    "three passes": Case(passes=3),
    "three passes, stage 1": Case(passes=3, options={"stage": 1, "overlap_comm": False}),
    "three passes held": Case(passes=3, hold=True, options={"reduce_bucket_size": 300}),
    "three passes held, stage 1": Case(passes=3, hold=True, options={"stage": 1}),
    "gradients by hand": Case(set_grads=True),
    "clip_grad_norm_": Case(clip=0.1),
    "clip_grad": Case(clip=0.1, options={"clip_grad": 0.1, "stage": 1, "reduce_bucket_size": 300}),
    "bfloat16": Case(dtype=torch.bfloat16),
    "bfloat16, small buckets, no overlap": Case(
        dtype=torch.bfloat16, options={"reduce_bucket_size": 300, "overlap_comm": False, "stage": 1}
    ),
    "float16 with a loss scale": Case(dtype=torch.float16, options={"loss_scale": 1024.0}, clip=10.0),
    "lamb, clipped, tiny buckets": Case("lamb", clip=0.1, options={"reduce_bucket_size": 1}),
    "postscaled": Case(options={"postscale_gradients": True, "gradient_predivide_factor": 2.0}),
}


@pytest.mark.invariant(9)
@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 4)))
def test_no_option_changes_a_bit(world_size: int, share: Share) -> None:
    names = share.of(VARIANTS)
    for found in run_ranks(world_size, compare, [VARIANTS[name] for name in names]):
        assert dict(zip(names, found, strict=True)) == {name: [] for name in names}


TWO_LEVELS = [
    Case(options={"stage": 1, "reduce_bucket_size": 128, "allgather_bucket_size": 200}, groups=True),
    Case(options={"reduce_bucket_size": 600, "overlap_comm": False}, passes=2, clip=0.1),
    Case(dtype=torch.bfloat16),
    Case(dtype=torch.bfloat16, options={"stage": 1, "reduce_bucket_size": 300}, passes=2, hold=True),
]


NODES = [(2, 2), *(pytest.param(*row, marks=pytest.mark.full) for row in [(2, 3), (3, 2)])]  # nodes, and ranks on each


@pytest.mark.parametrize(("nodes", "size"), NODES)
def test_nodes_sum_inside_first_in_any_form(nodes: int, size: int) -> None:
    """The unpartitioned optimizer sums gradients inside each node by place, then node by node."""
    cases = [replace(case, options={**case.options, "node_size": size}) for case in TWO_LEVELS]
    for found in run_ranks(nodes * size, compare, cases):
        assert found == [[]] * len(cases)


def test_a_bucket_is_one_message_unless_gloo_sends_it() -> None:
    bucket = 25 * 2**18  # 25 MiB of float32
    sizes = [(0, 3 * bucket), (1, 2 * bucket)]
    ranks = Topology(8, 0)
    assert [len(partition(sizes, bucket, ranks, backend)) for backend in ("gloo", "nccl", "mpi")] == [40, 5, 5]
    large = partition(sizes, 5 * bucket, ranks, "nccl")  # other buckets of a pass are under way meanwhile
    assert max(cut.numel for cut in large) <= 2**23


@pytest.mark.parametrize(("world_size", "node_size"), [(1, 1), (2, 1), (3, 1), (8, 1), (4, 2), (6, 2), (6, 3)])
def test_every_element_has_one_owner_in_slices_and_in_buckets(world_size: int, node_size: int) -> None:
    rng = random.Random(world_size)
    places = [Topology(world_size, rank, node_size) for rank in range(world_size)]
    for _ in range(10):
        numels = [rng.choice([0, 1, 63, 64, 65, 700, 5000]) for _ in range(rng.randint(1, 12))]
        bucket = rng.choice([1, 100, 3000, 10**6])
        length = slice_numel(bucket, world_size)
        assert length % (ALIGN * world_size) == 0
        slices = partition(list(enumerate(numels)), bucket, places[0])
        for cut in slices:
            assert cut.numel <= length and cut.chunk_numel % ALIGN == 0
            assert all(span.start % ALIGN == span.offset % ALIGN == 0 for chunk in cut.chunks for span in chunk)
        buckets = FlatLayout.build(numels, max(bucket, 100)).buckets
        chunks = [each.partition(places[0].chunks) for each in buckets]
        for each, cut in zip(buckets, chunks, strict=True):
            for place, owned in zip(places, cut.owned_numels, strict=True):
                start, stop = place.own_range(each.numel)  # as messages have it
                assert (owned, cut.order[place.rank]) == (stop - start, place.own_chunk)
                assert sum(span.numel for span in cut.chunks[place.rank]) == owned  # without padding before its end
        for cuts in (slices, [joined(slices)] if slices else [], chunks):
            check_owners(cuts, numels, world_size)


def check_owners(cuts: list[Partition], numels: list[int], world_size: int) -> None:
    seen: dict[int, list[int]] = {number: [] for number in range(len(numels))}
    stretches = [range(start, stop) for cut in cuts for _, start, stop in cut.stretches]
    assert sum(map(len, stretches)) == sum(numels)
    for cut in cuts:
        assert len(cut.chunks) == world_size and cut.numel == world_size * cut.chunk_numel
        used = []
        for owner, spans in enumerate(cut.chunks):
            for span in spans:
                assert span.offset + span.numel <= cut.owned_numels[owner] <= cut.chunk_numel
                seen[span.index] += range(span.start, span.stop)
                used += [
                    (owner * cut.chunk_numel + span.offset + i, span.index, span.start + i) for i in range(span.numel)
                ]
        spans = [span for spans in cut.spans.values() for span in spans]
        assert sorted(used) == sorted((s.offset + i, s.index, s.start + i) for s in spans for i in range(s.numel))
        assert len(used) + sum(b - a for a, b in cut.gaps) == cut.numel
        begins = accumulate((numel for numel, _ in cut.gathered), initial=0)
        found = {begin: span for begin, (_, span) in zip(begins, cut.gathered, strict=False) if span is not None}
        assert found == {cut.starts[owner] + s.offset: s for owner, spans in enumerate(cut.chunks) for s in spans}
    for number, numel in enumerate(numels):
        assert sorted(seen[number]) == [*range(numel)]
