"""Schedules as pure functions, fitted to a run, and freeze_step="auto": the variance decides, alike on all ranks."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_compressopt
from hf_compressopt import OnebitAdam, OnebitLamb, ZeroOneAdam, load_state, save_state
from hf_compressopt.checkpoint.compressed import FlatState
from hf_compressopt.optim.lamb import OnebitLambSchedule
from hf_compressopt.schedules import AUTO, RunSchedule, Schedule, Stage, Warmup, ZeroOneSchedule
from tests.support.harness import run_ranks
from tests.support.logs import log_lines

LENGTHS = (1, 2, 5, 20, 60, 99, 100, 101, 299, 300, 301, 400, 499, 500, 501, 999, 1000, 12_345)
SCHEDULES = (Schedule, OnebitLambSchedule, ZeroOneSchedule)


def linear(warmup: int, steps: int) -> list[float]:
    """The rates of transformers' linear schedule: 0 in the first step of a warmup, the peak in the one after it."""
    return [t / warmup if t < warmup else (steps - t) / (steps - warmup) for t in range(steps)]


RATES = {
    "constant": [1e-3] * 60,
    **{f"linear_{warmup}": linear(warmup, 60) for warmup in (0, 1, 2, 7, 25, 59)},
    "restarts": [math.cos(math.pi / 2 * (t % 10) / 10) for t in range(60)],
    "triangles": [1 - abs(t % 20 - 10) / 10 for t in range(60)],
    "one_cycle": [1 - abs(t - 18) / (18 if t < 18 else 42) for t in range(60)],
    "steps": [0.1 if t < 15 else 0.2 if t < 20 else 0.05 for t in range(60)],
    "zero": [0.0] * 60,
}


def seen_enough(rates: list[float], window: int) -> bool:
    """The rule from all rates so far: as many steps from the peak on as before it, or a window of them."""
    first = rates.index(max(rates))
    return max(rates) == 0 or first == 0 or len(rates) - first >= max(2, min(first, window))


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("window", [1, 5, 1000])
def test_the_warmup_lasts_until_the_highest_rate_and_as_long_after_it(name: str, window: int) -> None:
    warmup, rates = Warmup(), RATES[name]
    for step, rate in enumerate(rates, 1):
        warmup = warmup.after(step, rate)
        assert warmup.is_over(step, window) == seen_enough(rates[:step], window), step


def given_sets(schedule: type[Schedule]) -> Iterator[dict[str, Any]]:
    yield {}
    for options in ({"max_freeze_step": 37}, {"min_freeze_step": 5}, {"max_freeze_step": 250, "min_freeze_step": 40}):
        yield options
        yield {"freeze_step": AUTO, **options}


def test_intervals_between_syncs_are_at_most_a_quarter_of_a_per_cent_of_the_run() -> None:
    longest = {steps: ZeroOneSchedule().fitted(steps, ()).local_step_clipper for steps in (160, 400, 1000, 6400, 10**6)}
    assert longest == {160: 1, 400: 1, 1000: 2, 6400: 16, 10**6: 16}
    given = ZeroOneSchedule(local_step_clipper=32).fitted(400, ["local_step_clipper"])
    assert given.local_step_clipper == 32


@pytest.mark.parametrize("low_bit", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_given_stays_and_the_rest_fits_the_run(schedule: type[Schedule], low_bit: bool) -> None:
    for steps in LENGTHS:
        explicit = schedule(freeze_step=7)  # type: ignore[call-arg]
        kept = explicit.fitted(steps, ["freeze_step"], low_bit=low_bit)
        assert kept.freeze_step == 7 and "as given" in kept.describe(steps, ["freeze_step"])
        for given in given_sets(schedule):
            fitted = schedule(**given).fitted(steps, list(given), low_bit=low_bit)  # type: ignore[call-arg]
            options = fitted.options()
            assert all(options[name] == value for name, value in given.items())
            assert fitted.freeze_step == AUTO and schedule.of(options) == fitted
            for other in LENGTHS:  # a Trainer that learns another length of the run
                anew = fitted.fitted(other, list(given), low_bit=low_bit).fitted(steps, list(given), low_bit=low_bit)
                assert anew == fitted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", LENGTHS)
def test_a_short_run_of_low_bits_stays_in_its_warmup_stage(schedule: type[Schedule], steps: int) -> None:
    fitted = schedule().fitted(steps, (), low_bit=True)
    plans = [fitted.expected().plan(step) for step in range(1, steps + 1)]
    stays = all(plan.stage.number == 0.0 and not plan.ends_stage for plan in plans)
    assert stays == (steps < 1000) == ("takes all" in fitted.describe(steps, ()))
    if not stays:
        last = max(100, int(steps * (0.3 if schedule is OnebitLambSchedule else 0.2)))
        assert fitted.last_warmup_step == last and f"at most {last} of {steps} steps" in fitted.describe(steps, ())
    assert all(plan.update_variance for plan in plans if plan.stage in (Stage.WARMUP, Stage.VARIANCE))


@pytest.mark.parametrize(("beta2", "least"), [(0.9999, 10_000), (0.999, 1000), (0.998, 500), (0.95, 300)])
def test_a_run_is_short_by_the_memory_of_its_variance(beta2: float, least: int) -> None:
    """Fine-tunings of fewer steps ended up to 1.1 % above AdamW with a frozen variance, and 0.3 % without."""
    for cls, steps in product((OnebitAdam, OnebitLamb, ZeroOneAdam), (least - 1, least)):
        options: dict[str, Any] = {"betas": (0.9, beta2), "total_steps": steps}
        fitted, given = (cls([nn.Parameter(torch.ones(3))], **options, **more) for more in ({}, {"freeze_step": 100}))
        assert (fitted.schedule.last_warmup_step > steps) == (steps < least)
        assert given.schedule.last_warmup_step == 100


@pytest.mark.parametrize("steps", LENGTHS)
def test_a_run_in_full_precision_gives_its_warmup_stage_a_share(steps: int) -> None:
    for schedule, share in ((Schedule, 5), (OnebitLambSchedule, 5), (ZeroOneSchedule, 10)):
        fitted = schedule().fitted(steps, ())
        assert fitted.last_warmup_step == max(1 if steps < 300 else 100, steps // share)
        first = [fitted.expected().plan(step) for step in range(1, min(steps, fitted.last_warmup_step) + 1)]
        assert all(plan.update_variance and plan.reduce_grads for plan in first)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_auto_stays_in_the_warmup_stage_until_it_finds_a_step(schedule: type[Schedule]) -> None:
    auto = schedule(**{"freeze_step": AUTO, "max_freeze_step": 9, "min_freeze_step": 1})  # type: ignore[call-arg]
    assert all(auto.plan(step).stage.number == 0.0 and not auto.plan(step).ends_stage for step in (1, 9, 10, 10_000))
    found = auto.frozen_at(12)
    assert found.plan(12).ends_stage and [found.plan(step).stage.number for step in (12, 13)] == [0.0, 1.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_refreshes_are_those_of_the_run_and_not_of_the_state_it_resumes(schedule: type[Schedule]) -> None:
    older = {name: value for name, value in schedule(freeze_step=5).options().items() if name != "variance_interval"}
    for saved in (schedule.of(older), schedule(freeze_step=5, variance_interval=4)):
        run = RunSchedule(schedule(freeze_step=9, variance_interval=8), ["freeze_step"], low_bit=True)
        run.resume(saved, next_step=7)
        assert (run.schedule.freeze_step, run.schedule.variance_interval) == (5, 8)
        interval = 8 * getattr(run.schedule, "local_interval", lambda step: 1)(6)
        assert [t for t in range(1, 40) if run.schedule.plan(t).refresh_steps] == [*range(interval, 40, interval)]
        assert run.schedule.plan(interval).refresh_steps == interval


@pytest.mark.parametrize("schedule", [Schedule, ZeroOneSchedule])
def test_schedules_of_headers_are_checked(schedule: type[Schedule]) -> None:
    options = schedule().options()
    before = {name: value for name, value in options.items() if name != "min_freeze_step"}  # of an earlier version
    assert schedule.of(before) == schedule.of(options) == schedule()
    for wrong in ({**options, "more": 1}, {**before, "max_freeze_step": 0}, {"max_freeze_step": 3}, "auto", None):
        with pytest.raises(ValueError, match="schedule|max_freeze_step"):
            schedule.of(wrong)


def train(
    rank: int, name: str, rates: list[float], resume_at: Sequence[int] = (), folder: str = "", **options: Any
) -> dict[str, Any]:
    """A run by these rates, which is resumed before some steps, from files in a folder or from a state dict."""

    def make(values: torch.Tensor) -> tuple[nn.Parameter, Any]:
        p = nn.Parameter(values.clone())
        settings: dict[str, Any] = {"freeze_step": AUTO, "freeze_threshold": 1.0, "scale_block": 8, **options}
        return p, getattr(hf_compressopt, name)([p], **settings)

    p, optimizer = make(torch.ones(40))
    found: dict[str, Any] = {"variances": [], "params": []}
    with log_lines() as found["lines"]:
        for step, rate in enumerate(rates, 1):
            if step in resume_at:
                before = optimizer
                p, optimizer = make(p.detach())
                if folder:
                    save_state(before, f"{folder}/{step}")
                    load_state(optimizer, f"{folder}/{step}")
                else:
                    optimizer.load_state_dict(before.state_dict())
            optimizer.param_groups[0]["lr"] = 1e-3 * rate
            shared, local = (torch.Generator().manual_seed(seed) for seed in (step, 1000 * (rank + 1) + step))
            p.grad = (1.0 + 3.0 / step) * (torch.rand(40, generator=shared) + 0.5)  # the variance settles down
            if not optimizer.plan.reduce_grads:
                p.grad += 0.1 * torch.randn(40, generator=local)
            optimizer.step()
            correction = 1 - optimizer.param_groups[0]["betas"][1] ** step
            found["variances"].append(float(optimizer.state[p]["exp_avg_sq"].double().sum()) / correction)
            found["params"].append(p.detach().clone())
    return {**found, "freeze_step": optimizer.freeze_step, "stage": optimizer.metrics()["stage"]}


@pytest.mark.parametrize("warmup", [0, 3, 30, 60])
@pytest.mark.parametrize(
    ("name", "bound", "floor"),
    [
        *(("OnebitAdam", *row) for row in [(5, 1), (5, 20), (40, 20), (40, 60)]),
        ("OnebitLamb", 40, 20),
        ("ZeroOneAdam", 40, 20),
    ],
)
def test_auto_waits_for_the_floor_and_the_learning_rates_warmup(warmup: int, name: str, bound: int, floor: int) -> None:
    rates = linear(warmup, 130)
    options = {"max_freeze_step": bound, "min_freeze_step": floor}
    run = train(0, name, rates, **options)
    found = run["freeze_step"]
    assert found == max(bound, floor, 2 * warmup)
    why = "max_freeze_step" if found == bound else "min_freeze_step" if found == floor else "learning rate's warmup"
    (said,) = (line for line in run["lines"] if "auto: found" in line)
    assert f"found {found}" in said and why in said
    resume_at = (2, warmup, warmup + 1, warmup + 2, floor, floor + 1, found, found + 1)
    again = train(0, name, rates, resume_at, **options)
    assert again["freeze_step"] == found and torch.equal(again["params"][-1], run["params"][-1])


def test_a_freeze_step_that_is_given_is_honoured_and_an_early_one_is_said_once() -> None:
    for rates, freeze_step, reasons in (
        (linear(0, 130), 120, []),
        (linear(0, 130), 99, ["earlier than step 100"]),
        (linear(60, 130), 120, []),
        (linear(60, 130), 119, ["warmup"]),
        (linear(60, 130), 40, ["earlier than step 100", "warmup"]),
    ):
        for resume_at in ((), (freeze_step - 30, freeze_step, freeze_step + 1)):
            run = train(0, "OnebitAdam", rates, resume_at, freeze_step=freeze_step)
            said = [line for line in run["lines"] if "learnt little" in line]
            assert run["freeze_step"] == freeze_step and len(said) == bool(reasons)
            assert all(reason in line for line in said for reason in reasons)
            assert all(("warmup" in line) == ("warmup" in reasons) for line in said)
    run = train(0, "OnebitAdam", linear(0, 30), freeze_step=9, min_freeze_step=5)
    assert run["freeze_step"] == 9 and not any("learnt little" in line for line in run["lines"])


NAMES = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
WINDOW = 5  # D = 1 / (1 - 0.8)


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


def search(rank: int, world_size: int, name: str, folder: str) -> dict[str, Any]:
    """Resumed from files, if at all, in the warmup of the rate, right after it, and in the middle of the search."""
    rates = [min(1.0, step / 8) for step in range(1, 41)]
    options: dict[str, Any] = {"freeze_threshold": 0.9, "betas": (0.9, 0.8), "min_freeze_step": 1}
    return {"lrs": rates, **train(rank, name, rates, (6, 10, 13) if folder else (), folder, **options)}


@pytest.mark.parametrize("name", NAMES)
def test_the_variance_decides_alike_on_all_ranks_and_survives_a_resume(name: str, tmp_path: Path) -> None:
    plain, resumed = (run_ranks(2, search, name, folder) for folder in ("", str(tmp_path)))
    found = plain[0]["freeze_step"]
    assert 13 < found < 40 and plain[0]["stage"] == 1.0, "the search goes on after the last resume"
    for one, other in zip(plain, resumed, strict=True):
        assert one["freeze_step"] == other["freeze_step"] == found
        assert all(map(torch.equal, one["params"], other["params"]))
    if name != "ZeroOneAdam":  # there the variance learns in some steps only
        assert found == stability_says(plain[0]["variances"][:found], plain[0]["lrs"], 0.9, 40)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_fitted_anew_until_the_first_step(name: str) -> None:
    """A Trainer with auto_find_batch_size tells another length of the run with every attempt."""
    param, cls = nn.Parameter(torch.ones(5)), getattr(hf_compressopt, name)
    twice, once = (cls([p], warmup_bits=32) for p in (param, nn.Parameter(torch.ones(5))))
    for optimizer, lengths in ((twice, (400, 2000, 160)), (once, (160,))):
        for steps in lengths:
            assert optimizer.fit_schedule(steps) and not optimizer.fit_schedule(steps)
    assert FlatState(twice).header()["schedule"] == FlatState(once).header()["schedule"]
    assert twice.schedule.max_freeze_step == (16 if name == "ZeroOneAdam" else 32)
    param.grad = torch.ones(5)
    twice.step()
    assert twice.fit_schedule(1000) and twice.schedule.max_freeze_step == (100 if name == "ZeroOneAdam" else 200)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [4, 32])
def test_a_trial_run_that_is_resumed_for_longer_has_the_schedule_of_the_whole_run(
    name: str, bits: int, tmp_path: Path
) -> None:
    cls = getattr(hf_compressopt, name)

    def make(steps: int) -> Any:
        return cls([nn.Parameter(torch.ones(5))], warmup_bits=bits, betas=(0.9, 0.99), total_steps=steps)

    def step(optimizer: Any, count: int) -> None:
        for number in range(count):
            optimizer.param_groups[0]["params"][0].grad = torch.full((5,), 1.0 + number)
            optimizer.step()

    trial, whole, from_files, from_dict = make(40), make(4000), make(4000), make(4000)
    step(trial, 2)
    step(whole, 2)
    save_state(trial, tmp_path)
    load_state(from_files, tmp_path)
    from_dict.load_state_dict(trial.state_dict())
    for resumed in (from_files, from_dict):
        assert resumed.schedule == whole.schedule
        assert resumed._tensors["freeze_history"].shape == whole._tensors["freeze_history"].shape
        step(resumed, 1)
        assert resumed.metrics()["stage"] == 0 and resumed.metrics()["step"] == 3
    step(trial, 40)
    from_dict.load_state_dict(trial.state_dict())  # whose warmup stage has ended if it sends full precision
    assert (from_dict.schedule == trial.schedule) == (trial.metrics()["stage"] == 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_of_ones_own_gives_the_length_of_the_run(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """freeze_step is "auto" unless it is given; total_steps fits what is not given, as Trainer does."""
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
    fitted = given.fit_schedule(400)
    assert ("local_step_scaler=40" in fitted) == (name == "ZeroOneAdam") and given.freeze_step == 500
    assert "max_freeze_step" not in given.describe() + cls([nn.Parameter(torch.ones(5))]).describe()
    (record,) = caplog.records
    assert "freeze_step=500 is beyond the end of the run, which has 400 steps" in record.getMessage()
