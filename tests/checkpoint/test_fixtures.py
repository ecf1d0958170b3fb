"""Checkpoints of version 0.1.0 load to the bits that they loaded to then."""

import json

import pytest
import torch

from tests.checkpoint.make_fixtures import (
    CROSSINGS,
    EXPECTED,
    FIXTURES,
    KINDS,
    load_all,
    load_in_form,
    load_trainers,
    train,
)
from tests.support.harness import run_ranks

WRITTEN = json.loads(EXPECTED.read_text())
CASES = [(ranks, name) for ranks in (1, 2) for name in WRITTEN[str(ranks)][0]]


@pytest.fixture(scope="module")
def loaded() -> dict[int, list[dict[str, dict[str, str]]]]:
    return {ranks: run_ranks(ranks, load_all) for ranks in (1, 2)}


def differing(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The names of what differs; a later version may hold more than the one that wrote the fixture."""
    return [name for name, digest in expected.items() if found.get(name) != digest]


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_a_checkpoint_of_each_kind_loads_to_the_same_bits(ranks: int, name: str, loaded: dict[int, list[dict]]) -> None:
    for rank in range(ranks):
        assert not differing(loaded[ranks][rank][name], WRITTEN[str(ranks)][rank][name])


def load_compressed(rank: int, world_size: int) -> list[str]:
    """Load the checkpoints of compressed optimizers into either form; what the compact one has changed beyond rounding.

    Moments and counts have the same bits, until the first compressed step encodes them.
    """
    wrong = []
    for name, kind in KINDS.items():
        if "scale_block" not in kind.options or world_size not in kind.loads_on:
            continue
        params, compact = load_in_form("compact", name, kind)
        _, wide = load_in_form("float32", name, kind)
        ours, theirs = compact.state_dict(), wide.state_dict()
        for number, entry in theirs["state"].items():
            wrong += [f"{name}: {key}" for key in entry if not torch.equal(entry[key], ours["state"][number][key])]
        for mine, whole in zip(compact._states, wide._states, strict=True):
            pairs = zip(mine.errors.values(), whole.errors.values(), strict=True)
            wrong += [f"{name}: errors" for pair in pairs if not is_rounded(*pair)]
        train(rank, world_size, params, compact, 4)
        wrong += [f"{name}: not finite" for p in params if not p.isfinite().all()]
    return wrong


def is_rounded(mine: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether errors in 8 bits are within half of their scale, of which 126 are less than the largest error."""
    if not whole.numel():
        return not mine.numel()
    return bool((mine - whole).abs().max() <= whole.abs().max() / (2 * 126))


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_loads_into_either_form_of_the_state(ranks: int) -> None:
    assert run_ranks(ranks, load_compressed) == [[]] * ranks


def test_a_compact_checkpoint_loads_to_the_bits_of_the_same_state_in_float32() -> None:
    for ranks in ("1", "2"):
        for found in WRITTEN[ranks]:
            assert found["onebit_adam_compact_2"] == found["onebit_adam_decoded_2"]


def test_every_kind_is_looked_at() -> None:
    assert {name for _, name in CASES} == {*KINDS, *CROSSINGS}


def test_a_trainers_stub_and_index_load() -> None:
    stub = torch.load(FIXTURES / "trainer" / "optimizer.pt", weights_only=True)
    assert stub["compressopt"]["stub"] is True
    assert not differing(load_trainers(), WRITTEN["trainer"][0]["trainer"])
