"""Each kind of checkpoint loads to what was saved, and into each form of the state."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.kinds import KINDS, load_in_form, observe, train, written
from tests.support.harness import run_ranks


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory)


def load_all(rank: int, world_size: int, folder: str) -> list[str]:
    """Load every kind that this number of ranks can load; what is not as the ranks that saved it held it."""
    wrong = []
    for name, kind in KINDS.items():
        if world_size not in kind.loads_on:
            continue
        params, optimizer = load_in_form(None, kind, f"{folder}/{name}")
        if kind.ranks == world_size:
            held = json.loads(Path(folder, f"{name}-{rank}.json").read_text())
            wrong += [f"{name}: {key}" for key, digest in observe([], optimizer).items() if held.get(key) != digest]
        train(rank, world_size, params, optimizer, 2)
        wrong += [f"{name}: not finite" for p in params if not p.isfinite().all()]
    return wrong


def load_compressed(rank: int, world_size: int, folder: str) -> list[str]:
    """Load the checkpoints of compressed optimizers into either form; what the compact one has changed beyond rounding.

    Moments and counts have the same bits, until the first compressed step encodes them.
    """
    wrong = []
    for name, kind in KINDS.items():
        if "scale_block" not in kind.options or world_size not in kind.loads_on:
            continue
        params, compact = load_in_form("compact", kind, f"{folder}/{name}")
        _, wide = load_in_form("float32", kind, f"{folder}/{name}")
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
@pytest.mark.parametrize("load", [load_all, load_compressed])
def test_each_kind_loads_to_what_was_saved(load: Any, ranks: int, kinds: Path) -> None:
    assert run_ranks(ranks, load, str(kinds)) == [[]] * ranks
