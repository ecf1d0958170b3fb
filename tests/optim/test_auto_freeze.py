"""freeze_step="auto": the variance decides, alike on all ranks, and a resume goes on as if nothing had been."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt.checkpoint.compressed import FlatState
from tests.support.harness import run_ranks

NAMES = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
STEPS, WINDOW = 40, 5  # D = 1 / (1 - 0.8)


def make(name: str, **options: Any) -> tuple[nn.Parameter, Any]:
    import hf_compressopt

    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40))
    settings: dict[str, Any] = {"freeze_step": "auto", "betas": (0.9, 0.8), "lr": 1e-3, "scale_block": 8}
    settings |= {"min_freeze_step": 1, **options}
    return p, getattr(hf_compressopt, name)([p], **settings)


def stability_says(variances: list[float], lrs: list[float], threshold: float, bound: int) -> int:
    """The rule, from the norms of the corrected variance after every step."""
    for step in range(1, bound):
        since = step - lrs.index(max(lrs[:step]))  # steps at the full rate
        if step <= WINDOW or since < max(2, min(step - since, WINDOW)):
            continue
        now, before = variances[step - 1], variances[step - 1 - WINDOW]
        if min(now / before, before / now) >= threshold:
            return step
    return bound


def run(rank: int, world_size: int, name: str, options: dict[str, Any], directory: str) -> dict[str, Any]:
    from hf_compressopt import load_state, save_state

    p, optimizer = make(name, **options)
    results: dict[str, Any] = {"variances": [], "lrs": [], "params": []}
    for step in range(1, STEPS + 1):
        if step in (6, 10, 13) and directory:  # in the warmup, right after it, and in the middle of the search
            save_state(optimizer, f"{directory}/{step}")
            values = p.detach().clone()
            p, optimizer = make(name, **options)
            load_state(optimizer, f"{directory}/{step}")
            with torch.no_grad():
                p.copy_(values)
        lr = 1e-3 * min(1.0, step / 8)
        optimizer.param_groups[0]["lr"] = lr
        shared = torch.Generator().manual_seed(step)
        local = torch.Generator().manual_seed(1000 * (rank + 1) + step)
        scale = 1.0 + 3.0 / step  # the variance settles down
        p.grad = scale * (torch.rand(40, generator=shared) + 0.5)
        if not optimizer.plan.reduce_grads:
            p.grad += 0.1 * torch.randn(40, generator=local)
        optimizer.step()
        state = optimizer.state[p]
        results["variances"].append(float(state["exp_avg_sq"].double().sum()) / (1 - 0.8**step))
        results["lrs"].append(lr)
        results["params"].append(p.detach().clone())
    return {**results, "freeze_step": optimizer.freeze_step, "stage": optimizer.metrics()["stage"]}


@pytest.mark.parametrize("name", NAMES)
def test_the_variance_decides_alike_on_all_ranks_and_survives_a_resume(name: str, tmp_path: Path) -> None:
    options = {"freeze_threshold": 0.9}
    plain = run_ranks(2, run, name, options, "")
    resumed = run_ranks(2, run, name, options, str(tmp_path))
    found = plain[0]["freeze_step"]
    assert WINDOW + 8 <= found < STEPS and plain[0]["stage"] == 1.0
    assert found > 13, "the search was over before the resume"
    for result in (*plain, *resumed):
        assert result["freeze_step"] == found
    assert all(
        torch.equal(a, b)
        for rank in (0, 1)
        for a, b in zip(plain[rank]["params"], resumed[rank]["params"], strict=True)
    )
    if name != "ZeroOneAdam":  # there the variance learns in some steps only
        assert found == stability_says(plain[0]["variances"][:found], plain[0]["lrs"], 0.9, STEPS)


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_holds(name: str) -> None:
    """It yields to the learning rate's warmup, which lasts until step 8, and a window of 5 steps at the full rate."""
    for bound, found in ((15, 15), (9, 12)):
        result = run_ranks(2, run, name, {"max_freeze_step": bound, "freeze_threshold": 1.0}, "")[0]
        assert result["freeze_step"] == found and result["stage"] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_fitted_anew_until_the_first_step(name: str) -> None:
    """A Trainer with auto_find_batch_size tells another length of the run with every attempt."""
    import hf_compressopt

    param, cls = nn.Parameter(torch.ones(5)), getattr(hf_compressopt, name)
    twice, once = (cls([p], warmup_bits=32) for p in (param, nn.Parameter(torch.ones(5))))
    for optimizer, lengths in ((twice, (400, 2000, 160)), (once, (160,))):
        assert optimizer.schedule_is_open
        for steps in lengths:
            assert optimizer.fit_schedule(steps) and not optimizer.fit_schedule(steps)
        assert not optimizer.schedule_is_open
    assert FlatState(twice).header()["schedule"] == FlatState(once).header()["schedule"]
    assert twice.schedule.max_freeze_step == (16 if name == "ZeroOneAdam" else 32)
    param.grad = torch.ones(5)
    twice.step()
    assert not twice.fit_schedule(1000)


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_of_ones_own_gives_the_length_of_the_run(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """freeze_step is "auto" unless it is given; total_steps fits what is not given, as Trainer does."""
    import hf_compressopt

    cls = getattr(hf_compressopt, name)

    def of(**options: Any) -> dict[str, Any]:
        return dict(cls([nn.Parameter(torch.ones(5))], warmup_bits=32, **options).schedule.options())

    assert of()["freeze_step"] == "auto" and of()["max_freeze_step"] == 100_000
    share = 200 if name == "ZeroOneAdam" else 400
    assert of(total_steps=2000)["max_freeze_step"] == share
    assert of(total_steps=2000, max_freeze_step=77)["max_freeze_step"] == 77
    assert of(total_steps=2000, freeze_step=50)["freeze_step"] == 50 and not caplog.records
    if name == "ZeroOneAdam":
        assert of(var_freeze_step=50) == of(freeze_step=50)
        assert of(total_steps=2000)["local_step_scaler"] == 200
        assert of(total_steps=2000, local_step_scaler=7)["local_step_scaler"] == 7
    given = cls([nn.Parameter(torch.ones(5))], freeze_step=500)
    assert not given.schedule_is_open and given.fit_schedule(400) == "" and given.freeze_step == 500
    (record,) = caplog.records
    assert "freeze_step=500 is beyond the end of the run, which has 400 steps" in record.getMessage()


def test_the_log_names_the_bound_that_held(caplog: pytest.LogCaptureFixture) -> None:
    import hf_compressopt

    caplog.set_level("INFO", logger="hf_compressopt")
    for bounds, found in (((4, 1), "max_freeze_step"), ((2, 6), "min_freeze_step")):
        p = nn.Parameter(torch.ones(5))
        optimizer = hf_compressopt.OnebitAdam([p], max_freeze_step=bounds[0], min_freeze_step=bounds[1])
        assert "max_freeze_step" not in optimizer.describe()
        for _ in range(8):
            p.grad = torch.ones(5)
            optimizer.step()
        said = [record.getMessage() for record in caplog.records if "auto: found" in record.getMessage()]
        assert said[-1] == f"freeze_step=auto: found {max(bounds)} (its bound, {found})"
