"""Checkpoints of version 0.1.0 load to the bits that they loaded to then."""

import json

import pytest
import torch

from tests.checkpoint.make_fixtures import CROSSINGS, EXPECTED, FIXTURES, KINDS, load_all, load_trainers
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


def test_every_kind_is_looked_at() -> None:
    assert {name for _, name in CASES} == {*KINDS, *CROSSINGS}


def test_a_trainers_stub_and_index_load() -> None:
    stub = torch.load(FIXTURES / "trainer" / "optimizer.pt", weights_only=True)
    assert stub["compressopt"]["stub"] is True
    assert not differing(load_trainers(), WRITTEN["trainer"][0]["trainer"])
