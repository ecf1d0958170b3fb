"""State of wrapped optimizers that a checkpoint cannot hold is refused at the save, and numbers keep their kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import ZeroOptimizer, load_state, save_state
from tests.support.harness import on_ranks


class Odd(torch.optim.Optimizer):
    """An optimizer whose state is made by a function of the test's."""

    def __init__(self, params: Any, lr: float = 0.1, kind: str = "") -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].update(STATES[self.kind](p))
                    p.sub_(p.grad, alpha=group["lr"])


STATES: dict[str, Any] = {
    "a scale per block": lambda p: {"absmax": torch.ones(-(-p.numel() // 256))},
    "a norm of the part": lambda p: {"norm": p.norm()},
    "a number of the part": lambda p: {"largest": float(p.max())},
    "the name of the master copy": lambda p: {"master": torch.zeros_like(p)},
    "a name with a slash": lambda p: {"exp/avg": torch.zeros_like(p)},
    "a name of our own": lambda p: {"number:seen": 1},
    "a name that is no string": lambda p: {3: torch.zeros_like(p)},
    "words": lambda p: {"mode": "fast"},
    "numbers": lambda p: {"seen": True, "unseen": False, "count": 3, "mean": 0.5, "step": torch.tensor(2.0)},
}
REFUSED = {
    "a scale per block": "'absmax'.*Odd has the shape .*use this optimizer without ZeRO",
    "a norm of the part": "norm/.*is not the same for all parts",
    "a number of the part": "largest/.*is not the same for all parts",
    "the name of the master copy": "'master'.*rename it",
    "a name with a slash": "'exp/avg'.*rename it",
    "a name of our own": "'number:seen'.*rename it",
    "a name that is no string": "state 3.*rename it",
    "words": "must be a tensor.*'fast'",
}


def stepped(kind: str) -> tuple[nn.Parameter, ZeroOptimizer]:
    weight = nn.Parameter(torch.linspace(0, 1, 3000))
    optimizer = ZeroOptimizer([("weight", weight)], Odd, kind=kind)
    weight.sum().backward()
    optimizer.step()
    return weight, optimizer


@on_ranks(2)
def test_state_that_a_checkpoint_cannot_hold_is_refused_on_all_ranks(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    for number, (kind, message) in enumerate(REFUSED.items()):
        _, optimizer = stepped(kind)
        with pytest.raises((ValueError, OSError), match=message):
            save_state(optimizer, tmp_path / str(number))
        torch.distributed.barrier()
        assert not list((tmp_path / str(number)).iterdir())


@on_ranks(2)
def test_numbers_come_back_in_their_own_kind(rank: int, world_size: int, tmp_path: Path) -> None:
    _, optimizer = stepped("numbers")
    save_state(optimizer, tmp_path)
    again = ZeroOptimizer([("weight", nn.Parameter(torch.zeros(3000)))], Odd, kind="numbers")
    load_state(again, tmp_path)
    for bucket, piece in again.partition.parts():
        state = bucket.state_of(piece)
        assert torch.equal(state.pop("step"), torch.tensor(2.0))
        assert state == {"seen": True, "unseen": False, "count": 3, "mean": 0.5}
        assert [type(state[key]) for key in ("seen", "unseen", "count", "mean")] == [bool, bool, int, float]


def test_state_in_blocks_of_a_whole_optimizer_does_not_load_into_parts(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3000))
    optimizer = Odd([("weight", weight)], kind="words")
    for kind in ("words", "a scale per block"):
        optimizer.kind = kind
        optimizer.state.clear()
        weight.sum().backward()
        optimizer.step()
        if kind == "words":
            with pytest.raises(ValueError, match=REFUSED[kind]):
                save_state(optimizer, tmp_path / "refused")
    save_state(optimizer, tmp_path)
    again = ZeroOptimizer([("weight", weight)], Odd, kind="a scale per block")
    with pytest.raises(ValueError, match="absmax/weight has shape"):
        load_state(again, tmp_path)
