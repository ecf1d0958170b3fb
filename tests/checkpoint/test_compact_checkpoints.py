"""Checkpoints of a compact state on other numbers of ranks: what stays exact, and what is rounded once more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_compressopt
from tests.checkpoint.test_resharding import contents
from tests.optim.test_compact_state import SHAPES, go_on, make
from tests.support.harness import run_ranks

NAMES = {"OnebitAdam": {}, "OnebitLamb": {}, "ZeroOneAdam": {"var_freeze_step": 3, "local_step_clipper": 1}}
STOP = 5


def made(rank: int, name: str, stop: int, state: str = "compact") -> tuple[list[torch.nn.Parameter], Any]:
    options = NAMES[name] or {"freeze_step": 3}
    return make(rank, stop, name=name, state=state, **options)


def shown(params: list[torch.nn.Parameter], optimizer: Any) -> list[Tensor]:
    return [optimizer.state[p][key].clone() for p in params for key in ("exp_avg", "exp_avg_sq")]


def save(rank: int, world_size: int, folder: str) -> dict[str, list[Tensor]]:
    found = {}
    for name in NAMES:
        params, optimizer = made(rank, name, STOP)
        hf_compressopt.save_state(optimizer, f"{folder}/{name}")
        found[name] = shown(params, optimizer)
    return found


def load(rank: int, world_size: int, folder: str) -> dict[str, tuple[list[Tensor], tuple[Tensor, Tensor], bool]]:
    found = {}
    for name in NAMES:
        params, optimizer = made(rank, name, 0)
        hf_compressopt.load_state(optimizer, f"{folder}/{name}")
        before = shown(params, optimizer)
        errors = optimizer._states[0].errors.values()
        go_on(rank, params, optimizer, range(STOP, STOP + 3))
        alike = optimizer.communicator.all_gather_object([p.double().sum().item() for p in params])
        found[name] = before, errors, all(sums == alike[0] for sums in alike)
    return found


@pytest.mark.parametrize("saved_by", [2, 3])
def test_any_number_of_ranks_loads(saved_by: int, tmp_path: Path) -> None:
    saved = run_ranks(saved_by, save, str(tmp_path))
    for loaded_by in (1, 2, 3, 4):
        check_loaded(saved_by, saved, loaded_by, run_ranks(loaded_by, load, str(tmp_path)), tmp_path)


def check_loaded(saved_by: int, saved: list[Any], loaded_by: int, loaded: list[Any], tmp_path: Path) -> None:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    for name in NAMES:
        workers = [contents(tmp_path / name)[f"worker_error/group0/rank{rank}"] for rank in range(saved_by)]
        mean = torch.stack(workers).double().mean(0)
        assert mean.any()
        for rank in range(loaded_by):
            before, (worker, server), alike = loaded[rank][name]
            assert alike, "the ranks have drifted apart"
            assert all(torch.equal(a, b) for a, b in zip(before, saved[0][name], strict=True))
            assert worker.numel() == numel and (server.numel() == numel) == (loaded_by == 1)
            if loaded_by == saved_by:
                assert torch.equal(worker, workers[rank])
            else:  # within half a step of a block
                assert (worker - mean).abs().max() <= mean.abs().max() / 253
