"""--optim_args clip=late: Trainer's messages leave during backward, and its log has the norms."""

from typing import Any

import pytest

from tests.support.harness import run_ranks
from tests.support.trainer_runs import Run, train


def run(rank: int, world_size: int, clip: str, arguments: dict[str, Any], overflow: bool) -> dict[str, Any]:
    from hf_compressopt.optim.late import EarlyMessages

    early: list[bool] = []
    original = EarlyMessages.end_step

    def end_step(self: EarlyMessages, *, taken: bool) -> None:
        original(self, taken=taken)
        early.append(self.seen)  # type: ignore[attr-defined]

    def left(self: EarlyMessages, gradients: Any) -> frozenset[int]:
        found = original_left(self, gradients)
        self.seen = len(found) > 0  # type: ignore[attr-defined]
        return found

    original_left = EarlyMessages.left
    EarlyMessages.end_step, EarlyMessages.left = end_step, left  # type: ignore[method-assign]
    try:
        options = {
            "optim": "onebit_adam",
            "optim_args": f"freeze_step=3,clip={clip}",
            "max_grad_norm": 0.5,
            **arguments,
        }
        result = train(rank, world_size, Run(options, overflow=(1, 5) if overflow else None, scaler=overflow))
    finally:
        EarlyMessages.end_step, EarlyMessages.left = original, original_left  # type: ignore[method-assign]
    norms = [row["grad_norm"] for row in result["history"] if "grad_norm" in row]
    losses = [row["loss"] for row in result["history"] if "loss" in row]
    skipped = [row["skipped"] for row in result["rows"]]
    return {"early": early, "alike": result["alike"], "norms": norms, "losses": losses, "skipped": skipped}


@pytest.mark.parametrize(
    ("arguments", "overflow"), [({}, False), ({"gradient_accumulation_steps": 2}, False), ({}, True)]
)
def test_trainer_overlaps_and_logs_the_norm(arguments: dict[str, Any], overflow: bool) -> None:
    ranks = run_ranks(2, run, "late", arguments, overflow, timeout=240)
    sketch = run_ranks(2, run, "sketch", arguments, overflow, timeout=240)[0]
    assert not any(sketch["early"])
    for result in ranks:
        assert result["early"][-8:] == [False] * 4 + [True] * 4
        assert all(result["alike"]) and result["norms"] == ranks[0]["norms"]
        assert result["skipped"] == [overflow and step == 5 for step in range(8)]
        assert len(result["norms"]) == 8 and all(norm > 0.5 for norm in result["norms"][:3])
        assert result["losses"] == pytest.approx(sketch["losses"], rel=0.005)
        assert result["norms"][:4] == sketch["norms"][:4]  # of the next step on parameters differ
