"""The plan of what a rank reads: every byte that it wants once, from wherever it lies, and nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_compressopt.format.index import DTYPES, CheckpointIndex, Piece, Shard, TensorEntry
from hf_compressopt.format.plan import Plan, StateTensor, TensorKey, plan_reads

Contents = dict[tuple[int, str], bytes]


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[CheckpointIndex, Contents, dict[str, bytes]]:
    """An index, the bytes of each piece, and those of each tensor: "x/shared" is cut up, "own/rank<r>/x" is not."""
    ranks = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(["bfloat16", "float32", "float64"]))
    numel, itemsize = draw(st.integers(0, 40)), DTYPES[dtype][1]
    block_bytes = draw(st.sampled_from([1, 8, 24, 1000]))
    names = ["x/shared", *(f"own/rank{rank}/x" for rank in range(ranks))]
    whole = {name: draw(st.binary(min_size=numel * itemsize, max_size=numel * itemsize)) for name in names}
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=6)))
    edges = {name: [0, *(cuts if name == "x/shared" else []), numel] for name in names}
    tensors, contents = {}, {}
    for name in names:
        pieces = []
        for number, (start, stop) in enumerate(zip(edges[name], edges[name][1:], strict=False)):
            shard = draw(st.integers(0, ranks - 1))
            key, data = f"{name}@{number}", whole[name][start * itemsize : stop * itemsize]
            sums = ("",) * -(-len(data) // block_bytes)
            contents[shard, key] = data
            pieces.append(Piece(shard, key, start, stop, sums))
        tensors[name] = TensorEntry(dtype, (numel,), tuple(pieces))
    shards = [Shard(f"s{r}", 10**6) for r in range(ranks)]
    index = CheckpointIndex("0", block_bytes, {"world_size": ranks}, [], shards, tensors)
    index.validate()
    return index, contents, whole


def carry_out(plan: Plan, contents: Contents) -> list[bytes]:
    results = []
    for reads in plan.sources:
        out: list[int | None] = [None] * plan.nbytes
        for read in reads:
            data = contents[read.piece.shard, read.piece.key]
            assert 0 <= read.begin < read.end <= len(data)
            for place in range(read.end - read.begin):
                assert out[read.offset + place] is None, "a byte is read twice"
                out[read.offset + place] = data[read.begin + place]
        results.append(bytes(out))  # type: ignore[arg-type]  # None: a byte that was not read
    return results


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_range_of_what_is_shared_is_read_once_and_alone(data: st.DataObject) -> None:
    index, contents, whole = data.draw(checkpoints())
    entry = index.tensors["x/shared"]
    start = data.draw(st.integers(0, entry.numel))
    stop = data.draw(st.integers(start, entry.numel))
    wanted = StateTensor(TensorKey("x", "shared"), entry.dtype, entry.shape, start, stop)
    plan = plan_reads(index, wanted, data.draw(st.integers(1, 6)))
    expected = whole["x/shared"][start * entry.itemsize : stop * entry.itemsize]
    assert carry_out(plan, contents) == [expected]
    windows = list(plan.windows(data.draw(st.sampled_from([1, 7, 64, 1000]))))
    assert b"".join(carry_out(window, contents)[0] for window in windows) == expected
    assert sum(window.nbytes for window in windows) == plan.nbytes
    with pytest.raises(ValueError, match=f"{entry.numel} elements, needed are {start} to {entry.numel + 1}"):
        plan_reads(index, replace(wanted, stop=entry.numel + 1), 1)


@settings(max_examples=100, deadline=None)
@given(checkpoint=checkpoints(), world_size=st.integers(1, 6), rank=st.integers(0, 5))
def test_what_is_each_ranks_own_has_one_source_on_as_many_ranks_and_all_on_others(
    checkpoint: tuple[CheckpointIndex, Contents, dict[str, bytes]], world_size: int, rank: int
) -> None:
    index, contents, whole = checkpoint
    rank, saved_ranks = rank % world_size, len(index.shards)
    entry = index.tensors["own/rank0/x"]
    wanted = StateTensor(TensorKey("own", "x", rank=rank), entry.dtype, entry.shape, 0, entry.numel, of_each_rank=True)
    sources = [rank] if world_size == saved_ranks else list(range(saved_ranks))
    plan = plan_reads(index, wanted, world_size)
    assert carry_out(plan, contents) == [whole[f"own/rank{source}/x"] for source in sources]
