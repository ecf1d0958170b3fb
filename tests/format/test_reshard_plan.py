"""The plan of what a rank reads: every byte that it wants once, from wherever it lies, and nothing else."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_compressopt.format.index import DTYPES, CheckpointIndex, Piece, Shard, TensorEntry
from hf_compressopt.format.plan import Plan, StateTensor, TensorKey, plan_reads

Contents = dict[tuple[int, str], bytes]
SHARED, W = TensorKey("x", "shared"), TensorKey("x", "w")


def error_of(rank: int) -> StateTensor:
    key = TensorKey("e", group=0, rank=rank)
    return StateTensor(key, "float32", (3,), 0, 3, of_each_rank=True, is_error=True)


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
    plan = plan_reads(index, StateTensor(SHARED, entry.dtype, entry.shape, start, stop), data.draw(st.integers(1, 6)))
    expected = whole["x/shared"][start * entry.itemsize : stop * entry.itemsize]
    assert carry_out(plan, contents) == [expected]
    windows = list(plan.windows(data.draw(st.sampled_from([1, 7, 64, 1000]))))
    assert b"".join(carry_out(window, contents)[0] for window in windows) == expected
    assert sum(window.nbytes for window in windows) == plan.nbytes


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


def index_of(tensors: dict[str, TensorEntry], ranks: int = 2, **fields: Any) -> CheckpointIndex:
    return CheckpointIndex(
        **{
            "save_id": "0",
            "block_bytes": 8,
            "header": {},
            "parameters": [],
            "shards": [Shard(f"s{r}", 100) for r in range(ranks)],
            "tensors": tensors,
            **fields,
        }
    )


X = TensorEntry("float32", (3,), (Piece(0, "x", 0, 3, ("", "")),))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (StateTensor(TensorKey("y", "w"), "float32", (3,), 0, 3), "has no tensor 'y/w'"),
        (StateTensor(W, "bfloat16", (3,), 0, 3), "has 'x/w' as float32 [3], needed is bfloat16 [3]"),
        (StateTensor(W, "float32", (1, 3), 0, 3), "needed is float32 [1, 3]"),
        (StateTensor(W, "float32", (3,), 2, 4), "has 'x/w' with 3 elements, needed are 2 to 4"),
        (error_of(0), "has no tensor 'e/group0/rank0'"),
    ],
)
def test_what_is_not_there_is_named(wanted: StateTensor, said: str) -> None:
    for world_size in (2, 3):
        with pytest.raises(ValueError, match=re.escape(said)):
            plan_reads(index_of({"x/w": X}), wanted, world_size)


@pytest.mark.parametrize(
    ("ranks", "size", "world_size", "mine", "sources"),
    [
        (4, 2, 4, 2, [1]),  # the same nodes
        (4, 2, 4, 1, [0, 1]),
        (4, 1, 4, 2, [0, 1, 2, 3]),
        (4, 2, 2, 1, [0, 1]),  # as many ranks as there were nodes
        (4, 2, 8, 4, [0, 1]),
        (4, 4, 4, 2, [0]),
    ],
)
def test_worker_errors_are_of_nodes(ranks: int, size: int, world_size: int, mine: int, sources: list[int]) -> None:
    nodes = range(ranks // size)
    tensors = {
        f"e/group0/rank{node}": TensorEntry("float32", (3,), (Piece(node * size, f"e{node}", 0, 3, ("", "")),))
        for node in nodes
    }
    wanted = replace(error_of(1), node_size=mine, start=1)
    plan = plan_reads(index_of(tensors, ranks, header={"node_size": size}), wanted, world_size)
    assert [reads[0].piece.key for reads in plan.sources] == [f"e{source}" for source in sources]
    assert all((reads[0].begin, reads[0].end) == (4, 12) for reads in plan.sources)
    for bad in (0, -1, 3, 2.0, "2", True, None):
        with pytest.raises(ValueError, match="node_size must divide the 4 ranks"):
            plan_reads(index_of(tensors, ranks, header={"node_size": bad}), wanted, world_size)
    own = replace(wanted, is_error=False, node_size=1)  # of 0/1 Adam: each rank has its own, whatever the topology
    with pytest.raises(ValueError, match="has no tensor"):
        plan_reads(index_of({}, ranks, header={"node_size": size}), own, ranks)


def test_errors_that_one_rank_did_not_save_are_zero_but_not_those_of_more() -> None:
    wanted = error_of(1)
    assert plan_reads(index_of({"x/w": X}, ranks=1), wanted, 2) == Plan((), 12)
    error = TensorEntry("float32", (3,), (Piece(0, "e", 0, 3, ("", "")),))
    assert len(plan_reads(index_of({"e/group0/rank0": error}, ranks=1), wanted, 2).sources) == 1
    with pytest.raises(ValueError, match="has no tensor 'e/group0/rank1'"):
        plan_reads(index_of({"e/group0/rank0": error}, ranks=2), wanted, 3)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([(0, "a", 0, 2, 1), (0, "b", 1, 3, 1)], "overlap"),
        ([(0, "a", 0, 1, 1), (0, "b", 2, 3, 1)], "overlap, leave gaps"),
        ([(2, "a", 0, 3, 2)], "in no shard"),
        ([(0, "a", 0, 3, 1)], "1 checksums for 2 blocks"),
        ([(0, "a", 0, 2, 1)], "2 of its 3 elements"),
        ([(0, "a", 0, 2, 1), (0, "a", 2, 3, 1)], "no room"),
        ([(0, "a", 0, 10**30, 1)], "no room"),
    ],
)
def test_pieces_that_do_not_make_up_their_tensor_are_refused(pieces: list[Any], said: str) -> None:
    made = tuple(Piece(shard, key, start, stop, ("",) * sums) for shard, key, start, stop, sums in pieces)
    with pytest.raises(ValueError, match=said):
        index_of({"x": TensorEntry("float32", (3,), made)}).validate()
