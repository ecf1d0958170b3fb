"""Checkpoints of a compact state: bytes on as many ranks; on others what stays exact, and what is rounded once more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_compressopt
from tests.checkpoint.test_resharding import contents, stored
from tests.support.family import SHAPES, make
from tests.support.harness import run_ranks

NAMES = {"OnebitAdam": {}, "OnebitLamb": {}, "ZeroOneAdam": {"var_freeze_step": 3, "local_step_clipper": 1}}
STOP = 5


def made(rank: int, name: str, stop: int, **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    return make(rank, stop, name=name, **{"state": "compact", **(NAMES[name] or {"freeze_step": 3}), **options})


def held(optimizer: Any) -> list[Tensor]:
    """The tensors of a compact state, as they lie in memory."""
    found = []
    for state in optimizer._states:
        moments, errors = state.moments, state.errors
        messages = [average.messages for _, average in sorted(moments.last.items())]
        found += [moments.exp_avg, moments.exp_avg_sq, moments.codes, moments.tops, *messages, errors.worker]
        found += [errors.server, *state.extra.values(), state.steps]
    return [tensor.clone() for tensor in found]


def bytes_of_a_save(rank: int, world_size: int, folder: str) -> dict[str, list[Tensor]]:
    """Save, load, and save again: memory, files, and memory again hold the same bytes."""
    shown = {}
    for name in NAMES:
        params, optimizer = made(rank, name, STOP)
        before = shown[name] = held(optimizer)
        hf_compressopt.save_state(optimizer, f"{folder}/{name}")
        for stop in (0, 2, STOP + 2):  # into a state of either stage
            _, other = made(rank, name, stop)
            hf_compressopt.load_state(other, f"{folder}/{name}")
            other._states[0].moments.settle()
            assert all(torch.equal(a, b) for a, b in zip(before, held(other), strict=True))
        hf_compressopt.save_state(other, f"{folder}/{name}-again")
        _, optimizer = made(rank, name, 0, scale_block=16)  # which cuts messages otherwise
        hf_compressopt.load_state(optimizer, f"{folder}/{name}")
        assert not optimizer._states[0].moments.last
        hf_compressopt.save_state(optimizer, f"{folder}/{name}-decoded")
    return shown


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_files_hold_what_memory_holds(world_size: int, tmp_path: Path) -> None:
    ranks = run_ranks(world_size, bytes_of_a_save, str(tmp_path))
    for name in NAMES:
        found, again = stored(tmp_path / name), stored(tmp_path / f"{name}-again")
        assert found.keys() == again.keys() and all(torch.equal(found[key], again[key]) for key in found)
        exp_avg, exp_avg_sq, codes, tops, *messages = ranks[0][name]
        assert exp_avg_sq.numel() == 0 and torch.equal(found["exp_avg_sq_top/group0"], tops)
        parts = [found[f"exp_avg_sq_code/group0.{index}"].view(-1) for index in range(len(SHAPES))]
        assert torch.equal(torch.cat(parts), codes)
        if name == "OnebitAdam":
            assert exp_avg.numel() == 0 and not any(key.startswith("exp_avg/") for key in found)
            whole = found["exp_avg_message/group0"]
            assert torch.equal(whole, torch.cat(messages)[: whole.numel()])
        for rank in range(world_size):
            error = found[f"worker_error/group0/rank{rank}"]
            assert error.dtype == torch.uint8 and any(torch.equal(error, tensor) for tensor in ranks[rank][name])
        decoded, values = contents(tmp_path / f"{name}-decoded"), contents(tmp_path / name)
        assert decoded.keys() == values.keys() and all(torch.equal(decoded[key], values[key]) for key in values)
