"""--optim_args clip=late: Trainer's messages leave during backward, and its log has the norms."""

from typing import Any

import pytest

from hf_compressopt.optim.late import EarlyMessages
from tests.support.harness import run_ranks
from tests.support.trainer_runs import Run, logged, losses, train


def run(rank: int, world_size: int, clip: str, arguments: dict[str, Any], overflow: bool) -> dict[str, Any]:
    early: list[bool] = []
    end_step, left = EarlyMessages.end_step, EarlyMessages.left

    def watched_end(self: EarlyMessages, *, taken: bool) -> None:
        end_step(self, taken=taken)
        early.append(self.seen)  # type: ignore[attr-defined]

    def watched_left(self: EarlyMessages, gradients: Any) -> frozenset[int]:
        found = left(self, gradients)
        self.seen = len(found) > 0  # type: ignore[attr-defined]
        return found

    options = {"optim": "onebit_adam", "optim_args": f"freeze_step=3,clip={clip}", "max_grad_norm": 0.5, **arguments}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyMessages, "end_step", watched_end)
        patch.setattr(EarlyMessages, "left", watched_left)
        result = train(rank, world_size, Run(options, overflow=(1, 5) if overflow else None, scaler=overflow))
    skipped = [row["skipped"] for row in result["rows"]]
    return {**result, "early": early, "norms": logged(result, "grad_norm"), "skipped": skipped}


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
        assert losses(result) == pytest.approx(losses(sketch), rel=0.005)
        assert result["norms"][:4] == sketch["norms"][:4]  # of the next step on parameters differ
