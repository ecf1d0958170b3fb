"""clip="late": the messages of the compressed stage leave during backward, and say what they would have said in step().

The oracle is clip="sketch", whose messages are made in step(), in a second model on the same data.
"""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import OnebitAdam, OnebitLamb, ZeroOneAdam, attach_ddp
from hf_compressopt.kernels import Segment
from hf_compressopt.optim.late import LATE_CLIP, Backward, LastNorm
from hf_compressopt.optim.state import check_tensors
from hf_compressopt.schedules import OnebitSchedule
from tests.optim.test_warmup_hook import Net, data
from tests.oracles.cases import bucket_cap
from tests.oracles.steps import same
from tests.support.harness import run_ranks
from tests.support.recording import CAP, Recording, check_overlap, events_of_backward
from tests.support.spreading import Share, spread

STEPS, FREEZE = 8, 3
CLIP = 0.01  # smaller than all norms
FIRST = FREEZE + 2  # step, counted from 1, whose messages are the first to leave early


def make(clip: str, max_grad_norm: float = 0.0, **options: Any) -> tuple[Net, OnebitAdam]:
    torch.manual_seed(0)
    net = Net().to(options.pop("dtype", torch.float32))
    biases = [p for name, p in net.named_parameters() if name.endswith("bias") and p.requires_grad]
    weights = [p for p in net.parameters() if not any(p is other for other in biases)]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    if options.pop("mixed", False):
        kept = list(net.third.parameters())[:1]
        groups[0]["params"] = [p for p in weights if p is not kept[0]]
        groups.append({"params": kept, "non_freeze": True})
    settings = {"lr": 1e-2, "weight_decay": 0.1, "scale_block": 64, "bucket_cap_mb": bucket_cap(500), **options}
    return net, OnebitAdam(groups, freeze_step=FREEZE, clip=clip, max_grad_norm=max_grad_norm, **settings)


def tensors_of(net: nn.Module, optimizer: OnebitAdam) -> list[torch.Tensor]:
    """Parameters, moments and errors."""
    found = [p.detach() for p in net.parameters()]
    for state in optimizer._states:
        found += [state.worker_error, state.server_error]
        for index in range(len(state.params)):
            found += [state.torch_state(index)[name] for name in ("exp_avg", "exp_avg_sq")]
    return [t.clone() for t in found]


# -- the bits of the path without overlap -----------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "compact": {"state": "compact"},
    "no_sync": {"accumulate": 3},
    "every backward syncs": {"accumulate": 2, "sync": True, "state": "compact"},
    "unused": {"ddp": {"find_unused_parameters": True}, "sometimes": True},
    "bucket views": {"ddp": {"gradient_as_bucket_view": True}},
    "static graph": {"ddp": {"static_graph": True}},
    "bfloat16": {"dtype": torch.bfloat16},
    "mixed": {"mixed": True},
    "one scale": {"scale_block": None},
    "scaler": {"scaler": "told"},
    "scaler that grows": {"scaler": "found", "state": "compact"},
}


def train(rank: int, name: str) -> dict[str, Any]:
    options = dict(VARIANTS[name])
    accumulate, sync = options.pop("accumulate", 1), options.pop("sync", False)
    sometimes, ddp_options, scaled = (options.pop(key, {}) for key in ("sometimes", "ddp", "scaler"))
    pairs = [make(clip, **options) for clip in ("late", "sketch")]
    scalers = [
        hf_compressopt.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=bool(scaled)) for _ in pairs
    ]
    models = []
    for (net, optimizer), scaler in zip(pairs, scalers, strict=True):
        models.append(DistributedDataParallel(net, bucket_cap_mb=0.005, **ddp_options))
        attach_ddp(models[-1], optimizer, loss_scale=scaler.get_scale if scaled == "told" else None)
    equal, left = [], []
    for step in range(STEPS):
        for ddp, (net, optimizer), scaler in zip(models, pairs, scalers, strict=True):
            for part in range(accumulate):
                x = data(rank, step, part).to(next(net.parameters()).dtype)
                also = not sometimes or step % 2 == 0
                if part == accumulate - 1 or sync:
                    scaler.scale(ddp(x, also).square().mean()).backward()
                else:
                    with ddp.no_sync():
                        scaler.scale(ddp(x, also).square().mean()).backward()
            if optimizer is pairs[0][1]:
                left.append(len(optimizer.early_messages.signature))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        equal.append(same(*(tensors_of(*pair) for pair in pairs)))
    weights = [p.detach().float().numpy() for p in pairs[0][0].parameters()]
    buckets = sum(len(state.layout.buckets) for state in pairs[0][1]._states if state.compressed)
    sent = [optimizer.traffic.total_bytes for _, optimizer in pairs]
    return {"equal": equal, "left": left, "buckets": buckets, "weights": weights, "sent": sent}


def train_all(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train(rank, name) for name in names}


@pytest.mark.parametrize(("world_size", "share"), spread(shared=(2, 3, 1)))
def test_without_clipping_the_bits_are_those_of_messages_in_the_step(world_size: int, share: Share) -> None:
    ranks = run_ranks(world_size, train_all, share.of(VARIANTS), timeout=300)
    for results in ranks:
        for name, result in results.items():
            assert result["equal"] == [True] * STEPS, name
            early = [step >= FIRST and world_size > 1 for step in range(1, STEPS + 1)]
            assert [count > 0 for count in result["left"]] == early, name
            assert world_size == 1 or result["left"][-1] == result["buckets"] > 2
            once, twice = result["sent"][1], name in ("every backward syncs", "scaler that grows")
            assert (result["sent"][0] == once) != (twice and world_size > 1), f"{name}: messages left twice"
            for mine, theirs in zip(result["weights"], ranks[0][name]["weights"], strict=True):
                assert mine.tobytes() == theirs.tobytes(), name


# -- clipping ---------------------------------------------------------------------------------------------------------


def clipped(rank: int, world_size: int, how: str, state: str) -> dict[str, Any]:
    """Each early step against one of the oracle from the same state, whose messages carry the coefficient by hand."""
    net, optimizer = make("late", CLIP if how == "option" else 0.0, state=state)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
    attach_ddp(ddp, optimizer)
    equal, norms, true, scaled = [], [], [], []
    for step in range(STEPS):
        ddp(data(rank, step)).square().mean().backward()
        grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        early = len(optimizer.early_messages.signature) > 0
        assert early == (step + 1 >= FIRST)
        if early:
            norm, max_norm, _, _ = optimizer._tensors[LATE_CLIP].tolist()
            coefficient = min(1.0, max_norm / (norm + 1e-6))
            other, oracle = make("sketch", state=state)
            other.load_state_dict(net.state_dict())
            oracle.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            prepare = oracle._prepare
            oracle._prepare = lambda *args, c=coefficient, f=prepare: replace(f(*args), beta=f(*args).beta * c)  # type: ignore
            for p, grad in zip(other.parameters(), grads, strict=True):
                p.grad = grad
            oracle.step()
        mean = [g.clone() for g in grads if g is not None]
        for g in mean:
            torch.distributed.all_reduce(g)
        true.append(math.sqrt(sum(float((g / world_size).double().square().sum()) for g in mean)))
        if how == "call":
            norms.append(float(optimizer.clip_grad_norm_(CLIP, net.parameters())))
            pairs = zip(net.parameters(), grads, strict=True)
            scaled.append(any(grad is not None and not torch.equal(p.grad, grad) for p, grad in pairs))
        optimizer.step()
        norms[step:] = [float(optimizer._tensors[LATE_CLIP][0])]
        if early:
            equal.append(same(tensors_of(net, optimizer), tensors_of(other, oracle)))
            assert coefficient < 0.9
        optimizer.zero_grad()
    return {"equal": equal, "norms": norms, "true": true, "scaled": scaled}


@pytest.mark.parametrize(("how", "state"), [("option", "float32"), ("option", "compact"), ("call", "float32")])
def test_messages_carry_the_coefficient_of_the_step_before(how: str, state: str) -> None:
    for result in run_ranks(2, clipped, how, state):
        assert result["equal"] == [True] * (STEPS - FIRST + 1)
        assert result["norms"] == pytest.approx(result["true"], rel=0.1)
        if how == "call":  # what has left is only measured
            assert result["scaled"] == [step < FIRST for step in range(1, STEPS + 1)]


def test_a_rank_whose_gradient_grows_clips_by_its_growth() -> None:
    grad = torch.full((100,), 0.1)  # of norm 1

    def coefficients(last: LastNorm | None, scale: float, *factors: float) -> list[float]:
        backward = Backward(last, scale, 4)
        return [backward.coefficient([Segment(scale * f * grad, 0, 100, 0)], grad.device) for f in factors]

    assert coefficients(None, 1.0, 1e9) == [1.0]
    usual = LastNorm(1.0, 0.5, 1.5)
    assert coefficients(usual, 8.0, 1.0, 2.0) == pytest.approx([0.5, 0.5], rel=1e-4)
    assert coefficients(usual, 8.0, 1.0, 12.0) == pytest.approx([0.5, 0.5 * 1.5 / math.sqrt(145)], rel=1e-4)
    unknown = LastNorm(1.0, 0.5, math.nan)  # before the first measurement: at most sqrt(W) larger
    assert coefficients(unknown, 1.0, 3.9, 2.0) == pytest.approx([0.5, 0.5 * 2 / math.hypot(3.9, 2)], rel=1e-4)
    assert coefficients(LastNorm(0.0, 0.5, 0.0), 1.0, 2.0) == pytest.approx([0.25], rel=1e-4)
    assert coefficients(LastNorm(3.0, math.inf, 3.0), 1.0, 20.0) == [1.0]


def spike(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 0's loss is a thousand times as large in one step: its own coefficients fall during backward."""
    net, optimizer = make("late", CLIP)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
    attach_ddp(ddp, optimizer)
    found: dict[int, list[float]] = {step: [] for step in range(STEPS)}
    original = Backward.coefficient

    def record(self: Backward, *args: Any) -> float:
        found[step].append(original(self, *args))
        return found[step][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backward, "coefficient", record)
        for step in range(STEPS):
            factor = 1e3 if rank == 0 and step == STEPS - 2 else 1.0
            (factor * ddp(data(rank, step)).square().mean()).backward()
            assert not optimizer.early_messages.not_finite  # all have arrived
            optimizer.step()
            optimizer.zero_grad()
    return {"found": found, "weights": [p.detach().numpy() for p in net.parameters()]}


def test_a_spike_on_one_rank() -> None:
    first, second = run_ranks(2, spike)
    usual, spiked = second["found"][STEPS - 3], first["found"][STEPS - 2]
    assert len(set(second["found"][STEPS - 2])) == 1 and max(spiked) < 0.1 * min(usual)
    assert len(set(spiked)) > 1  # it grows while backward goes on
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first["weights"], second["weights"], strict=True))


# -- steps that are not taken -----------------------------------------------------------------------------------------


def bad(rank: int, world_size: int, how: str) -> dict[str, Any]:
    """In the sixth of eight steps one rank's loss, or one of its gradients, is not a number."""
    net, optimizer = make("late", CLIP, state="compact" if how == "loss" else "float32")
    scaler = hf_compressopt.GradScaler("cpu", init_scale=64.0, enabled=how == "scaler")
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
    attach_ddp(ddp, optimizer, loss_scale=scaler.get_scale)
    kept, skipped = [], []
    for step in range(STEPS):
        before = tensors_of(net, optimizer), dict(optimizer._tensors)
        loss = scaler.scale(ddp(data(rank, step)).square().mean())
        wrong = rank == 1 and step == 5
        (loss * math.nan if wrong and how in ("loss", "scaler") else loss).backward()
        if wrong and how == "gradient":
            next(p for p in net.parameters() if p.grad is not None).grad[0] = math.inf
        if how == "hidden" and step == 5:  # the messages have left with NaN, and someone repairs the gradients
            optimizer.zero_grad()
            (ddp(data(rank, step)).square().mean() * (math.nan if rank else 1.0)).backward()
            for p in net.parameters():
                if p.grad is not None:
                    p.grad.nan_to_num_()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        kept.append(same(before[0], tensors_of(net, optimizer)))
        skipped.append(optimizer.step_was_skipped)
        assert not kept[-1] or torch.equal(before[1][LATE_CLIP], optimizer._tensors[LATE_CLIP])
    return {"kept": kept, "skipped": skipped, "weights": [p.detach().numpy() for p in net.parameters()]}


@pytest.mark.invariant(13)
@pytest.mark.parametrize("how", ["loss", "gradient", "scaler", "hidden"])
def test_all_ranks_skip_a_step_and_nothing_has_changed(how: str) -> None:
    ranks = run_ranks(2, bad, how)
    for result in ranks:
        assert result["kept"] == result["skipped"] == [step == 5 for step in range(STEPS)]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(result["weights"], ranks[0]["weights"], strict=True))


def dropped(rank: int, world_size: int) -> dict[str, Any]:
    """Backward passes whose step does not follow leave no trace."""
    results = []
    for abandon in (False, True):
        net, optimizer = make("late", CLIP)
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
        attach_ddp(ddp, optimizer)
        for step in range(STEPS):
            if abandon and not optimizer.plan.reduce_grads:  # else errors of the integers have changed
                ddp(data(rank, step, part=7)).square().mean().backward()
                (optimizer if step % 2 else net).zero_grad()
            ddp(data(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(tensors_of(net, optimizer))
    ddp(data(rank, 0)).square().mean().backward()
    assert optimizer.early_messages.signature
    optimizer.step(grads=[p.grad for group in optimizer.param_groups for p in group["params"]])
    return {"same": same(*results)}


def test_messages_whose_step_does_not_follow_are_dropped() -> None:
    assert all(result["same"] for result in run_ranks(2, dropped))


def zeroed(params: list[nn.Parameter], rank: int) -> None:
    for p in params:
        if p.grad is not None:
            p.grad.zero_()


def doubled_on_one_rank(params: list[nn.Parameter], rank: int) -> None:
    if rank == 0 and params[0].grad is not None:
        params[0].grad.mul_(2)


def replaced(params: list[nn.Parameter], rank: int) -> None:
    for p in params:
        p.grad = torch.full_like(p, 0.1 * (rank + 1))


#: What may happen between a backward pass and a step; True and False for zero_grad(), which sets None or not.
BETWEEN: dict[str, Any] = {
    "none": lambda params, rank: None,
    "zeros": zeroed,
    "torch's clipping": lambda params, rank: torch.nn.utils.clip_grad_norm_(params, 1e-3),
    "one rank": doubled_on_one_rank,
    "others": replaced,
    "freed": lambda params, rank: [setattr(p, "grad", None) for p in params],
    "zero_grad(True)": True,
    "zero_grad(False)": False,
}
SETTINGS = [(False, False), (True, False), (False, True)]


def changed(rank: int, world_size: int, names: list[str], views: bool, scaled: bool) -> dict[str, list[bool]]:
    """Gradients that are changed, replaced or given up after their messages have left, against clip="sketch"."""
    found: dict[str, list[bool]] = {}
    for name, act in ((name, BETWEEN[name]) for name in names):
        pairs = [make(clip) for clip in ("late", "sketch")]
        scaler = [hf_compressopt.GradScaler("cpu", init_scale=64.0, enabled=scaled) for _ in pairs]
        models = []
        for number, (net, optimizer) in enumerate(pairs):
            models.append(DistributedDataParallel(net, bucket_cap_mb=0.005, gradient_as_bucket_view=views))
            attach_ddp(models[-1], optimizer, loss_scale=scaler[number].get_scale)
        found[name] = []
        for step in range(STEPS):
            for number, (ddp, (net, optimizer)) in enumerate(zip(models, pairs, strict=True)):
                scaler[number].scale(ddp(data(rank, step)).square().mean()).backward()
                if step == STEPS - 3 and name == "none":
                    with ddp.no_sync():  # what has left is not all
                        scaler[number].scale(ddp(data(rank, step, part=3)).square().mean()).backward()
                elif step == STEPS - 3 and callable(act):
                    act([p for p in net.parameters() if p.requires_grad], rank)
                elif step == STEPS - 3:
                    optimizer.zero_grad(set_to_none=act)
                assert number or bool(optimizer.early_messages.signature) == (step + 1 >= FIRST)
                if any(p.grad is not None for p in net.parameters()):
                    scaler[number].step(optimizer)
                    scaler[number].update()
                else:  # which a scaler refuses
                    optimizer.step()
                optimizer.zero_grad()
            found[name].append(same(*(tensors_of(*pair) for pair in pairs)))
    return found


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.full)], ids=["share", "rest"])
@pytest.mark.parametrize("place", range(len(SETTINGS)))
def test_messages_count_only_for_the_gradients_that_they_were_made_from(place: int, rest: bool) -> None:
    """Each case in one setting, and in the long tests in the others."""
    names = Share(place, len(SETTINGS), rest).of(BETWEEN)
    for found in run_ranks(2, changed, names, *SETTINGS[place], timeout=240):
        assert found == {name: [True] * STEPS for name in names}


def partly(rank: int, world_size: int) -> list[bool]:
    """Gradients that are clipped by the norm of a part of them do not leave early."""
    net, optimizer = make("late")
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
    attach_ddp(ddp, optimizer)
    left = []
    for step in range(STEPS):
        ddp(data(rank, step)).square().mean().backward()
        left.append(bool(optimizer.early_messages.signature))
        chosen = optimizer.param_groups[0]["params"] if step < STEPS - 2 else None
        optimizer.clip_grad_norm_(CLIP, chosen)
        optimizer.step()
        optimizer.zero_grad()
    return left


def test_clipping_by_parts_does_not_overlap() -> None:
    assert run_ranks(2, partly) == [[False] * (STEPS - 1) + [True]] * 2


# -- checkpoints ------------------------------------------------------------------------------------------------------


def resume(rank: int, world_size: int, state: str, scaled: bool, directory: str) -> list[bool]:
    def run(net: Net, optimizer: OnebitAdam, steps: range, saved: dict[int, Any] | None = None) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
        attach_ddp(ddp, optimizer)
        for step in steps:
            if saved is not None:
                saved[step] = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
                hf_compressopt.save_state(optimizer, f"{directory}/{step}")
            scaler.scale(ddp(data(rank, step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return tensors_of(net, optimizer)

    # nobody tells the hook its scale, which the optimizer learns and saves
    scaler = hf_compressopt.GradScaler("cpu", init_scale=32.0, enabled=scaled)
    saved: dict[int, Any] = {}
    whole = run(*make("late", CLIP, state=state), range(STEPS), saved)
    equal = []
    for step, (weights, own) in saved.items():
        net, optimizer = make("late", CLIP, state=state)
        net.load_state_dict(weights)
        if step % 2 == 0:
            optimizer.load_state_dict(own)
        elif step:
            hf_compressopt.load_state(optimizer, f"{directory}/{step}")
        equal.append(same(whole, run(net, optimizer, range(step, STEPS))))
    return equal


@pytest.mark.parametrize(
    ("state", "scaled"), [pytest.param("float32", False, marks=pytest.mark.full), ("compact", False), ("float32", True)]
)
def test_a_run_resumes_bit_for_bit(state: str, scaled: bool, tmp_path: Path) -> None:
    for equal in run_ranks(2, resume, state, scaled, str(tmp_path)):
        assert all(equal[FREEZE if scaled else 0 :])  # integers of the warmup stage are told the scale after a step


@pytest.mark.parametrize("tensor", [torch.zeros(4), torch.zeros(2).double()])
def test_a_last_norm_that_no_run_has_saved_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=rf"'{LATE_CLIP}' must be float64 \[4\]"):
        check_tensors({LATE_CLIP: tensor}, OnebitSchedule(freeze_step=5))


# -- overlap, and where it is refused ---------------------------------------------------------------------------------


def record(rank: int, world_size: int) -> list[str]:
    def attach(ddp: DistributedDataParallel, communicator: Recording) -> Any:
        params = list(ddp.parameters())
        optimizer = OnebitAdam(
            params, freeze_step=1, warmup_bits=32, clip="late", bucket_cap_mb=CAP, communicator=communicator
        )
        attach_ddp(ddp, optimizer)

        def step() -> None:
            communicator.events.append("backward is over")
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            communicator.events.append("step")

        return step

    return events_of_backward(attach, steps=3)


def test_messages_leave_before_the_last_gradient_is_there_and_are_awaited_in_the_step() -> None:
    for events in run_ranks(2, record):
        check_overlap(events)
        over = events.index("backward is over")
        assert events.count("message") == events.count("answer") == events[:over].count("message")
        assert events[:over].count("answer") == events.count("message") - 1


@pytest.mark.parametrize("cls", [ZeroOneAdam, OnebitLamb])
def test_other_algorithms_refuse_it(cls: Any) -> None:
    with pytest.raises(
        ValueError, match=r"clip must be one of \['sketch', 'local'\], got 'late', which only OnebitAdam"
    ):
        cls([torch.nn.Parameter(torch.zeros(3))], clip="late")
