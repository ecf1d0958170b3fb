"""ZeroOptimizer against the unpartitioned optimizer, bit for bit."""

import random
from dataclasses import replace

import pytest
import torch

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
    assert [len(partition(sizes, bucket, 8, backend)) for backend in ("gloo", "nccl", "mpi")] == [40, 5, 5]
    large = partition(sizes, 5 * bucket, 8, "nccl")  # other buckets of a pass are under way meanwhile
    assert max(cut.numel for cut in large) <= 2**23


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_element_has_one_owner_and_every_cut_is_aligned(world_size: int) -> None:
    rng = random.Random(world_size)
    for _ in range(40):
        sizes = [(number, rng.choice([0, 1, 63, 64, 65, 700, 5000])) for number in range(rng.randint(0, 12))]
        bucket = rng.choice([1, 100, 3000, 10**6])
        length = slice_numel(bucket, world_size)
        assert length % (ALIGN * world_size) == 0
        seen = {number: [] for number, _ in sizes}
        for cut in partition(sizes, bucket, world_size):
            assert cut.numel <= length and cut.part_numel % ALIGN == 0 and len(cut.parts) == world_size
            used = []
            for owner, spans in enumerate(cut.parts):
                for span in spans:
                    assert span.start % ALIGN == span.offset % ALIGN == 0 and span.offset + span.numel <= cut.part_numel
                    seen[span.index] += range(span.start, span.stop)
                    used.append((owner * cut.part_numel + span.offset, span))
            assert sorted(map(str, used)) == sorted(str(row) for rows in cut.places.values() for row in rows)
            assert sum(span.numel for _, span in used) + sum(b - a for a, b in cut.gaps) == cut.numel
        for number, numel in sizes:
            assert sorted(seen[number]) == [*range(numel)]
