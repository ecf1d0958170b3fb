"""Each kind of checkpoint loads to what was saved, and into each form of the state; a run goes on bit for bit."""

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_compressopt import load_state, save_state
from tests.checkpoint.kinds import KINDS, OTHER_SCHEDULES, RESUMED, load_in_form, make, observe, train, written
from tests.support.family import assign, through_a_file
from tests.support.harness import run_ranks


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory)


def load_all(rank: int, world_size: int, folder: str) -> list[str]:
    """Load every kind that this number of ranks can load, and train on; what is not as it was saved, or not finite."""
    wrong = []
    for name, kind in KINDS.items():
        if world_size not in kind.loads_on:
            continue
        params, optimizer = load_in_form(None, kind, f"{folder}/{name}")
        if kind.ranks == world_size:
            others, saved = make(kind)
            train(rank, world_size, others, saved, range(kind.steps))
            held = observe([], saved)
            wrong += [f"{name}: {key}" for key, digest in observe([], optimizer).items() if held.get(key) != digest]
        train(rank, world_size, params, optimizer, range(2))
        wrong += [f"{name}: not finite" for p in params if not p.isfinite().all()]
    return wrong


def load_compressed(rank: int, world_size: int, folder: str) -> list[str]:
    """Load what OnebitAdam saved into either form; what differs by more than the rounding of errors."""
    wrong = []
    for name, kind in KINDS.items():
        if kind.optimizer != "OnebitAdam" or world_size not in kind.loads_on:
            continue
        params, compact = load_in_form("compact", kind, f"{folder}/{name}")
        _, wide = load_in_form("float32", kind, f"{folder}/{name}")
        ours, theirs = compact.state_dict(), wide.state_dict()
        for number, entry in theirs["state"].items():
            wrong += [f"{name}: {key}" for key in entry if not torch.equal(entry[key], ours["state"][number][key])]
        for mine, whole in zip(compact._states, wide._states, strict=True):
            pairs = zip(mine.errors.values(), whole.errors.values(), strict=True)
            wrong += [f"{name}: errors" for pair in pairs if not is_rounded(*pair)]
        for source, target in ((ours, wide), (theirs, compact)):  # state dicts cross over as well
            target.load_state_dict(source)
            for number, entry in target.state_dict()["state"].items():
                given = source["state"][number]
                wrong += [f"{name}: {key}" for key in entry if not torch.equal(entry[key], given[key])]
        train(rank, world_size, params, compact, range(4))
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


def resume_all(rank: int, world_size: int, folder: str | None) -> list[str]:
    """Train each kind in one go, and with a save and a load in between, into a state that is in the way.

    While they go on, so does a deep copy. Returns whatever differs in a bit at the end.
    """
    wrong = []
    for name, kind in {**KINDS, **RESUMED}.items():
        if kind.ranks != world_size or name.startswith("imported"):
            continue
        params, optimizer = make(kind)
        train(rank, world_size, params, optimizer, range(kind.steps))
        others, other = make(kind._replace(options={**kind.options, **OTHER_SCHEDULES.get(kind.optimizer, {})}))
        other.load_state_dict(other.state_dict())  # what Accelerate does before the first step
        train(rank, world_size, others, other, range(kind.steps, kind.steps + 3))
        saves_mean = folder is not None and hasattr(optimizer, "averaged_parameters")
        with optimizer.averaged_parameters() if saves_mean else nullcontext():  # as the model's file holds them
            assign(others, params)
        runs = [(others, other)]
        if folder is None:
            state_dict = through_a_file(optimizer.state_dict())
            runs += [deepcopy((params, optimizer))] if hasattr(optimizer, "plan") else []
        else:
            save_state(optimizer, f"{folder}/{name}")
        train(rank, world_size, params, optimizer, range(kind.steps, kind.steps + 4))
        for group in other.param_groups:  # all comes back
            group |= {"lr": 0.5, "weight_decay": 0.3}
            group.pop("exp_avg_mask", None)
        if folder is None:
            other.load_state_dict(state_dict)
        else:
            load_state(other, f"{folder}/{name}")
            save_state(other, f"{folder}/{name}-again")  # right after the load
            load_state(other, f"{folder}/{name}-again")
        wrong += [f"{name}: lr" for group in other.param_groups if group["lr"] != 0.01 / max(kind.steps, 1)]
        held = observe(params, optimizer)
        for run in runs:
            train(rank, world_size, *run, range(kind.steps, kind.steps + 4))
            found = observe(*run)
            wrong += [f"{name}: {key}" for key in held if found.get(key) != held[key]]
    return wrong


@pytest.mark.invariant(21, 23, 24, 31)
@pytest.mark.parametrize(
    ("in_files", "ranks"),
    [
        *((True, ranks) for ranks in (1, 2, 3)),
        *((False, ranks) for ranks in (1, 2)),
        *(pytest.param(*row, marks=pytest.mark.full) for row in ((True, 4), (False, 3), (False, 4))),
    ],
)
def test_a_resumed_run_is_bitwise_identical_to_the_uninterrupted_one(
    in_files: bool, ranks: int, tmp_path: Path
) -> None:
    assert run_ranks(ranks, resume_all, str(tmp_path) if in_files else None, timeout=120) == [[]] * ranks
