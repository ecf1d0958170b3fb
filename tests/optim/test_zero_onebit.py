"""OnebitAdam under ZeRO: its memory, its state, gradients that leave and are freed in backward, and what it refuses."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hf_compressopt
from hf_compressopt import GradScaler, OnebitAdam, attach_ddp, load_state, save_state
from hf_compressopt.optim import sharded
from hf_compressopt.optim.compressed_adam import mean_variance_norm
from hf_compressopt.optim.moments import CompactMoments
from hf_compressopt.optim.overlap import LATE_CLIP
from tests.checkpoint.test_resharding import stored
from tests.oracles.cases import bucket_cap
from tests.oracles.steps import same, tensors_in
from tests.support.ddp_runs import CLIP, FREEZE, STEPS, Net, backward, end_step, loss_of, make, scaler_of, tensors_of
from tests.support.family import go_on
from tests.support.family import make as make_by_hand
from tests.support.harness import on_ranks, run_ranks, same_on_all_ranks
from tests.support.memory import MIB, peak_beyond
from tests.support.spreading import Share, spread

ZERO_1, ZERO_2 = {"zero_stage": 1}, {"zero_stage": 2}


# -- memory -----------------------------------------------------------------------------------------------------------


def bytes_per_parameter(optimizer: Any) -> float:
    """Bytes of all storages that the state of a run lies in, each counted once."""
    tensors = [*optimizer._tensors.values()]
    for state in optimizer._states:
        moments, errors, shards = state.moments, state.errors, state.moments.shards
        messages = [average.messages for average in moments.last.values()]
        tensors += [moments.exp_avg, moments.exp_avg_sq, moments.codes, moments.tops, errors.worker, errors.server]
        tensors += [*messages, *state.extra.values(), *(() if shards is None else shards.exp_avg + shards.exp_avg_sq)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / sum(p.numel() for p in optimizer.trainable_parameters)


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_bytes_of_the_state_and_of_the_peak(rank: int, world_size: int, zero_stage: int) -> None:
    """After each step, and during it: before what it has used up is freed, and while moments are gathered."""
    params = [nn.Parameter(torch.zeros(300, 200)) for _ in range(4)]
    optimizer = hf_compressopt.OnebitAdam(params, freeze_step=3, bucket_cap_mb=0.25, zero_stage=zero_stage)
    during, after = [], [bytes_per_parameter(optimizer)]

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def measure(*args: Any, **options: Any) -> Any:
            during.append(bytes_per_parameter(optimizer))
            return function(*args, **options)

        return measure

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((CompactMoments, "free_float32"), (sharded, "all_gather"), (sharded, "gather_messages")):
            patch.setattr(owner, name, watched(getattr(owner, name)))
        for step in range(6):
            go_on(rank, params, optimizer, [step])
            after.append(bytes_per_parameter(optimizer))
    errors = 1.03 * (1 + 1 / world_size)
    switch = 4 - zero_stage  # the moments go in the first compressed step, under ZeRO right after the last warmup step
    assert max(after[switch:]) <= 1 + 1 / 8 + errors + 0.01, "after the switch"
    assert max(after[:switch]) <= (8 / world_size if zero_stage else 8) + errors, "AdamW holds 8"
    # under ZeRO, of each of four buckets a message in every step, and two at the switch, which adds nothing
    assert len(during) == 3 + 5 * 4 * zero_stage and max(during) <= max(after[:switch]) + (0 if zero_stage else 0.13)


def peak_of_a_run(rank: int, world_size: int, stage: int) -> float:
    """Bytes per parameter by which a run, through the switch, raises the memory of the process; stage 0 is AdamW."""

    def run(width: int, model: nn.Module) -> None:
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(rank))
        if stage < 2:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        if stage:
            optimizer = OnebitAdam(model.parameters(), freeze_step=2, zero_stage=stage, bucket_cap_mb=2)
        if stage == 1:
            attach_ddp(model, optimizer)
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def layers(width: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))

    run(8, layers(8))  # which loads what a process loads once
    model = layers(1024)
    return 4 + peak_beyond(lambda: run(1024, model)) * MIB / (8 * 1024**2)  # the parameters are there before


@pytest.mark.full
def test_the_peak_of_a_run_is_a_third_below_adamw() -> None:
    adamw, first, second = (run_ranks(4, peak_of_a_run, stage) for stage in (0, 1, 2))
    assert max(first) <= 0.72 * min(adamw) and max(first) <= 4 + 4 + 8 / 4 + 1.03 * (1 + 1 / 4) + 1.5, (first, adamw)
    assert max(second) <= min(adamw) * 2 / 3, (second, adamw)


# -- state ------------------------------------------------------------------------------------------------------------


def everything(params: list[nn.Parameter], optimizer: OnebitAdam) -> list[torch.Tensor]:
    return tensors_in([*params, optimizer.state_dict()])


def whole_moments(rank: int, params: list[nn.Parameter], optimizer: OnebitAdam) -> list[torch.Tensor]:
    """Both moments of all parameters; all ranks call."""
    found = []
    for p in params:
        entry = optimizer.state[p]
        if "pieces" not in entry:
            found += [entry["exp_avg"].clone(), entry["exp_avg_sq"].clone()]
            continue
        for name in ("exp_avg", "exp_avg_sq"):
            whole = torch.zeros(p.numel())
            for piece in entry["pieces"]:
                whole[piece["start"] : piece["stop"]] = piece[name]
            dist.all_reduce(whole)
            found.append(whole.view(p.shape))
    return found


def save_both(rank: int, world_size: int, folder: str, stop: int, stage: int) -> list[torch.Tensor]:
    params, optimizer = make_by_hand(rank, stop, zero_stage=stage)
    save_state(optimizer, f"{folder}/zero")
    save_state(make_by_hand(rank, stop)[1], f"{folder}/plain")
    return whole_moments(rank, params, optimizer)


def load_all(rank: int, world_size: int, folder: str, stop: int, stage: int, saved_by: int) -> list[torch.Tensor]:
    zero, other = {"zero_stage": stage}, {"zero_stage": 3 - stage}
    found, ends = [], []
    for source, options in (("zero", zero), ("zero", other), ("zero", {}), ("plain", zero), ("plain", {})):
        params, optimizer = make_by_hand(rank, 0, **options)  # type: ignore[arg-type]
        load_state(optimizer, f"{folder}/{source}")
        found.append(whole_moments(rank, params, optimizer))
        errors = optimizer._states[0].errors
        crossed = (source == "zero") != bool(options) and stop < 3
        if world_size > 1 and saved_by > 1:
            assert errors.worker.any() and errors.server.any().item() != crossed
        go_on(rank, params, optimizer, range(stop, stop + 3))
        assert same_on_all_ranks(params) and all(p.isfinite().all() for p in params)
        ends.append([*params, *whole_moments(rank, params, optimizer), *errors.values()])
    adamw = torch.optim.AdamW(params)
    load_state(adamw, f"{folder}/zero")
    assert all(entry["exp_avg"].isfinite().all() for entry in adamw.state.values())
    assert same(found[0], found[1]) and same(found[0], found[2]) and same(found[3], found[4])
    assert same(ends[0], ends[1]), "both stages go on alike"
    return found[0]


@pytest.mark.invariant(22)
@pytest.mark.parametrize(
    ("stop", "stage", "saved_by"),
    [
        *((2, 1, 3), (5, 1, 2), (2, 2, 3), (5, 2, 3)),
        *(pytest.param(stop, 1, ranks, marks=pytest.mark.full) for stop, ranks in [(2, 1), (2, 2), (5, 1), (5, 3)]),
    ],
)
def test_any_number_of_ranks_loads_with_and_without_zero(saved_by: int, stage: int, stop: int, tmp_path: Path) -> None:
    saved = run_ranks(saved_by, save_both, str(tmp_path), stop, stage)
    if stop < 3:
        zero, plain = (stored(tmp_path / name).keys() for name in ("zero", "plain"))
        assert zero - {"optimizer/late_clip"} == plain
    for loaded_by in (1, 2, 4):
        for moments in run_ranks(loaded_by, load_all, str(tmp_path), stop, stage, saved_by):
            assert same(moments, saved[0])


# -- the rest ---------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_two_levels_share_out_the_moments_among_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    """Two nodes of two ranks with the same gradients take the steps of a flat exchange, but for rounding."""
    runs = []
    for options in ({}, {"topology": "two-level", "node_size": 2}):
        params, optimizer = make_by_hand(rank, 0, **ZERO_1, **options)
        go_on(rank // 2, params, optimizer, range(6))
        assert same_on_all_ranks(params)
        runs.append([*params, *whole_moments(rank, params, optimizer)])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*runs, strict=True))
    for stop in (2, 5):
        params, optimizer = make_by_hand(rank, stop, **ZERO_1, **options)
        save_state(optimizer, f"{tmp_path}/{stop}")
        for topology in (options, {}):
            loaded_params, loaded = make_by_hand(rank, 0, **ZERO_1, **topology)
            load_state(loaded, f"{tmp_path}/{stop}")
            moments = whole_moments(rank, params, optimizer)
            assert same(moments, whole_moments(rank, loaded_params, loaded))
            assert not topology or same(everything([], optimizer), everything([], loaded))
    shards, errors = (
        make_by_hand(rank, 1, **ZERO_1, **options)[1]._states[0].moments.shards,
        optimizer._states[0].errors,
    )
    numel = sum(p.numel() for p in params)
    assert sum(m.numel() for m in shards.exp_avg) <= numel // 4 + 64 and errors.worker.numel() <= 0.55 * numel + 400


@on_ranks(2)
def test_other_settings(rank: int, world_size: int) -> None:
    """16-bit parameters, a gradient scaler, a parameter that nobody uses, and the search for the freeze step."""
    torch.manual_seed(3)
    params = [nn.Parameter(torch.randn(40, 9, dtype=torch.bfloat16)), nn.Parameter(torch.randn(5))]
    unused = params[1].detach().clone()
    optimizer = OnebitAdam(
        params, lr=1e-2, freeze_step="auto", max_freeze_step=4, min_freeze_step=4, weight_decay=0.5, **ZERO_1
    )
    scaler = GradScaler("cpu", init_scale=64.0)
    twin_params = copy.deepcopy(params)
    twin = OnebitAdam(twin_params, lr=1e-2, freeze_step=4, weight_decay=0.5, **ZERO_1)
    for step in range(6):
        norm = mean_variance_norm(optimizer._states, optimizer._bias_counts, optimizer.communicator)
        expected = sum(float(v.sum()) / (1 - 0.999**step) for v in whole_moments(rank, params, optimizer)[1:2] if step)
        if step < 4:
            assert norm == pytest.approx(expected, rel=1e-5)
        start = params[0].detach().clone()
        grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(10 * rank + step)).bfloat16()
        twin_params[0].grad = grad.clone()
        twin.step()
        scaler.scale(torch.zeros(()))
        params[0].grad = grad * 64.0
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(params[0], start)
        if step < 4:  # then weight decay moves what gradients do not
            assert torch.equal(params[1], unused)
        assert torch.equal(params[0], twin_params[0])
        assert optimizer.plan_at(step + 1).reduce_grads is False
    assert optimizer.freeze_step == 4 and optimizer.metrics()["rounds"] == 6
    sent = optimizer.metrics()["compression_ratio"]
    assert sent > 1, sent


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(3)
def test_unusual_groups(rank: int, world_size: int, stage: int) -> None:
    """No elements, groups that come later, an optimizer that follows another one, copies, and another device."""
    zero: dict[str, Any] = {"zero_stage": stage}
    empty = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))]
    nothing = OnebitAdam([{"params": empty}, {"params": []}], freeze_step=2, **zero)
    others = [nn.Parameter(torch.ones(count)) for count in (2, 3, 4)]
    replaced = OnebitAdam(others, **zero)
    mixed = OnebitAdam([{"params": others[:1]}, {"params": others[1:2], "non_freeze": True}], freeze_step=2, **zero)
    mixed.add_param_group({"params": others[2:]})
    assert [state.moments.shards is None for state in mixed._states] == [False, True, False]
    for _ in range(4):
        sum(p.sum() for p in (*empty, *others)).backward()
        assert [p.grad is None for p in (*others, *empty)] == [stage == 2, False, stage == 2, stage == 2, stage == 2]
        nothing.step()
        mixed.step()
        nothing.zero_grad()
        mixed.zero_grad()
    assert stage == 1 or not replaced.sharded_overlap.holds_gradients()  # type: ignore[union-attr]
    assert all(torch.allclose(p, p.new_full((), 1 - 4e-3), atol=1e-5) for p in others)
    assert all(state.moments.shards is None for state in (*nothing._states, *mixed._states))
    copied_params, copied = copy.deepcopy((others, mixed))
    for params, optimizer in ((others, mixed), (copied_params, copied)):
        for _ in range(2):
            sum(p.sum() * (rank + 1) for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(others, copied_params)  # type: ignore[arg-type]
    (state,) = make_by_hand(rank, 2, **zero)[1]._states
    state.to(torch.device("meta"))
    assert {moment.device.type for moment in state.moments.shards.exp_avg + state.moments.shards.exp_avg_sq} == {"meta"}


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_what_no_rank_uses_in_every_second_step_keeps_its_errors(rank: int, world_size: int, stage: int) -> None:
    """Of 50 gradients each, which Adam with a large epsilon adds up; one bucket, and buckets that cut parameters."""
    for options in ({}, {"bucket_cap_mb": 0.01, "fused_warmup": True}):
        always, other = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
        given: dict[str, Any] = {"lr": 1e6, "eps": 1e6, "betas": (0.0, 0.999), "freeze_step": 1000, **options}
        optimizer = OnebitAdam([always, other], zero_stage=stage, **given)
        mean = torch.zeros(64, 64)
        for step in range(100):
            grads = [torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * r + step)) for r in range(2)]
            loss = (always * grads[rank]).sum()
            if step % 2 == 0:
                loss = loss + (other * grads[rank]).sum()
                mean += sum(grads) / world_size
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert float((other + mean).square().mean().sqrt()) < 0.4, options


@on_ranks(2)
def test_state_of_other_ranks_is_refused(rank: int, world_size: int) -> None:
    _, optimizer = make_by_hand(rank, 2, **ZERO_1)
    state_dict = optimizer.state_dict()
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, state_dict)
    for options, given in ((ZERO_1, everyone[1 - rank]), ({}, state_dict)):
        params, other = make_by_hand(rank, 2, **options)
        before = everything(params, other)
        with pytest.raises(ValueError, match=r"one rank's part of moments|was saved by rank"):
            other.load_state_dict(given)
        assert same(before, everything(params, other))


# -- the bits of zero_stage=1, in all that backward can do ------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "other graphs": {"also": lambda rank, step: (rank + step) % 2 == 0},
    "mixed": {"mixed": True, "scale_block": None},
    "bfloat16": {"dtype": torch.bfloat16},
    "scaler": {"scaler": True, "warmup_bits": 8},
    "fused": {"fused_warmup": True},
    "closure": {"closure": True},
    "checkpoints": {"checkpoints": True},
    "large parameters": {"bucket_cap_mb": 0.001},
    "one bucket": {"bucket_cap_mb": 25.0},
    "step hands over": {"late": True},
}
TWO_LEVELS = {"topology": "two-level", "node_size": 2}


class Segments(Net):
    """The same layers, each inside a backward of its own."""

    def forward(self, x: torch.Tensor, also: bool = True) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in (self.first, self.second, self.third):
            x = checkpoint(lambda h, layer=layer: torch.tanh(layer(h)), x, use_reentrant=True)
        return x


def check_bits(rank: int, name: str, given: dict[str, Any]) -> None:
    options = {**VARIANTS[name], **given}
    accumulate, also = options.pop("accumulate", 1), options.pop("also", lambda rank, step: True)
    scaled, closure, late, checkpoints = (
        options.pop(key, False) for key in ("scaler", "closure", "late", "checkpoints")
    )
    pairs = [make(**options, zero_stage=stage) for stage in (1, 2)]
    scalers = [scaler_of(256.0, scaled, growth_interval=2) for _ in pairs]
    for step in range(STEPS):
        for (net, optimizer), scaler in zip(pairs, scalers, strict=True):
            net.__class__ = Segments if checkpoints else Net

            def run(net: Any = net, optimizer: Any = optimizer, scaler: Any = scaler, step: int = step) -> Any:
                for part in range(accumulate):
                    loss = scaler.scale(loss_of(net, rank, step, part, also(rank, step)))
                    with optimizer.no_sync() if part < accumulate - 1 or late else nullcontext():
                        loss.backward()
                return loss

            if closure:
                optimizer.step(run)
                optimizer.zero_grad()
                continue
            run()
            if optimizer.zero_stage == 2 and not checkpoints:  # whose backwards are inside another one
                kept = {id(p) for g in optimizer.param_groups if g["non_freeze"] for p in g["params"]}
                assert all(p.grad is None for p in net.parameters() if id(p) not in kept) != late, name
            end_step(optimizer, scaler)
        assert same(*(tensors_of(*pair) for pair in pairs)), (name, step)
    (_, one), (net, two) = pairs
    assert two.plan.stage.number == 1, name
    assert one.traffic.total_bytes == two.traffic.total_bytes > 0, f"{name}: not a byte more"
    assert same_on_all_ranks(net.parameters()), name


@pytest.mark.invariant(1)
@pytest.mark.parametrize(("world_size", "share"), [*spread(shared=(2, 3)), (4, None)])
@on_ranks(timeout=300)
def test_without_clipping_the_bits_are_those_of_stage_1(rank: int, world_size: int, share: Share | None) -> None:
    for name in share.of(VARIANTS) if share else ["other graphs"]:
        check_bits(rank, name, {} if share else TWO_LEVELS)


# -- clipping ---------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_clipping_by_option_by_call_and_with_a_scaler(rank: int, world_size: int) -> None:
    runs, norms = [], []
    for how in ("option", "call", "scaler"):
        net, optimizer = make("sketch", CLIP if how == "option" else 0.0, **ZERO_2)
        scaler = scaler_of(64.0, how == "scaler", growth_interval=2)
        norms.append([])
        for step in range(STEPS):
            backward(net, rank, step, scaler=scaler)
            if how == "call":
                norms[-1].append(float(optimizer.clip_grad_norm_(CLIP, net.parameters())))
            elif how == "scaler":
                scaler.unscale_(optimizer)
                norms[-1].append(float(optimizer.clip_grad_norm_(CLIP)))
            end_step(optimizer, scaler)
            if how == "option":
                norms[-1].append(float(optimizer._tensors[LATE_CLIP][0]))
        runs.append([p.detach().clone() for p in net.parameters()])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] == pytest.approx(norms[2], rel=1e-4)
    assert min(norms[0]) > CLIP
    net, _ = make()
    backward(net, rank, 0)
    true = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
    dist.all_reduce(true)
    assert norms[0][0] == pytest.approx(float(true.norm()) / world_size, rel=0.02), "4 bits are all that is between"
    assert same(runs[0], runs[1]) and same_on_all_ranks(runs[0])


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0, 1])  # without refreshes, and with one in every compressed step
@pytest.mark.parametrize("matrices", [1, 2])
@on_ranks(2)
def test_gradients_of_a_bucket_are_alive_at_a_time(rank: int, world_size: int, matrices: int, interval: int) -> None:
    width, layers = 64, 16
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    groups = [{"params": [p for p in net.parameters() if (p.ndim > 1) == large]} for large in (True, False)]
    grads: list[StorageWeakRef] = []
    most = 0

    def count(param: torch.Tensor) -> None:
        nonlocal most
        assert param.grad is not None
        grads.append(StorageWeakRef(param.grad.untyped_storage()))
        most = max(most, sum(not grad.expired() for grad in grads))

    for p in net.parameters():
        if p.ndim > 1:
            p.register_post_accumulate_grad_hook(count)
    options = {"bucket_cap_mb": bucket_cap(matrices * width**2), "variance_interval": interval, **ZERO_2}
    optimizer = OnebitAdam(groups, freeze_step=2, max_grad_norm=0.1, **options)
    for step in range(4):
        grads.clear()
        net(torch.randn(2, width, generator=torch.Generator().manual_seed(10 * rank + step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < most <= matrices + 1


# -- what is thrown away, and what is refused --------------------------------------------------------------------------


def plain_like(net: nn.Module, plain: nn.Module, group: dict[str, Any]) -> list[nn.Parameter]:
    twins = dict(zip(net.parameters(), plain.parameters(), strict=True))
    return [twins[p] for p in group["params"]]


def _raise(grad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("on purpose")


@on_ranks(2)
def test_what_is_thrown_away_leaves_no_trace(rank: int, world_size: int) -> None:
    runs = []
    for abandon in (False, True):
        net, optimizer = make("sketch", CLIP, **ZERO_2)
        for step in range(STEPS):
            if abandon:
                loss_of(net, rank, step, part=7).backward()
                optimizer.zero_grad()
                handle = net.first.weight.register_hook(_raise)
                with pytest.raises(RuntimeError, match="on purpose"):
                    loss_of(net, rank, step, part=8).backward()
                handle.remove()
                optimizer.zero_grad()
            backward(net, rank, step)
            optimizer.step()
        runs.append(everything(list(net.parameters()), optimizer))
    assert same(*runs)
    twins = [make("sketch", zero_stage=stage) for stage in (1, 2)]
    for step in range(STEPS):
        for net, optimizer in twins:
            plain, _ = make("sketch")
            backward(plain, rank, step)
            loss_of(net, rank, step, part=7).backward()
            optimizer.step(grads=[p.grad for g in optimizer.param_groups for p in plain_like(net, plain, g)])
            optimizer.zero_grad()
        assert same(*([p.detach() for p in net.parameters()] for net, _ in twins))


@on_ranks(2)
def test_misuse_is_refused_on_all_ranks_together(rank: int, world_size: int) -> None:
    for switched in (False, True):
        net, optimizer = make("sketch", **ZERO_2)
        steps = iter(range(100))

        def backward(net: Any = net, steps: Any = steps) -> None:
            loss_of(net, rank, next(steps)).backward()

        for _ in range(FREEZE + 2 if switched else 0):
            backward()
            optimizer.step()
        before = everything(list(net.parameters()), optimizer)
        backward()
        with pytest.raises(RuntimeError, match="cannot clip the gradients under ZeRO"):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with pytest.raises(ValueError, match="clip all parameters of the optimizer together"):
            optimizer.clip_grad_norm_(1.0, [net.first.weight])
        backward()
        with pytest.raises(ValueError, match=r"got a gradient after its gradient had left.*no_sync"):
            optimizer.step()
        optimizer.zero_grad()
        handle = net.first.weight.register_hook(_raise)
        with pytest.raises(RuntimeError, match="on purpose"):
            backward()
        handle.remove()
        backward()
        with pytest.raises(ValueError, match=r"after a backward pass that raised"):
            optimizer.step()
        optimizer.zero_grad()
        backward()
        net.first.weight.grad = torch.ones_like(net.first.weight) if rank else None
        with pytest.raises(
            (ValueError, RuntimeError), match="had left" if rank else r"1 other rank\(s\) were given gradients"
        ):
            optimizer.step()
        optimizer.zero_grad()
        backward()
        with pytest.raises(RuntimeError, match="which have left in messages with those of the others"):
            net.first.zero_grad()
        net.zero_grad()  # as a loop does that skips a batch; the next pass is the first one of its step again
        for again in (False, True):
            backward()
            if rank:
                optimizer.zero_grad()
            with pytest.raises(RuntimeError, match=r"rank 0 takes a step after .*; rank 1 .*of them thrown away"):
                for _ in range(again):
                    backward()
                optimizer.step()
            optimizer.zero_grad()
        after = everything(list(net.parameters()), optimizer)
        assert same(before, after), "nothing is lost"
        with pytest.raises(ValueError, match="buckets of DistributedDataParallel hold them"):
            attach_ddp(DistributedDataParallel(net), optimizer)
        wrapped = DistributedDataParallel(copy.deepcopy(net))
        alone = OnebitAdam(wrapped.parameters(), **ZERO_2)
        with pytest.raises(ValueError, match=r"and so does a DistributedDataParallel around the model"):
            loss_of(wrapped, rank, 0).backward()
        alone.zero_grad()
    embedding = nn.Embedding(4, 3, sparse=True)
    sparse = OnebitAdam(embedding.parameters(), **ZERO_2)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="only dense gradients are supported"):
        sparse.step()


@on_ranks(2)
def test_a_loss_scale_that_is_not_known(rank: int, world_size: int) -> None:
    net, optimizer = make("sketch", **ZERO_2)
    scaler = scaler_of(64.0)
    for step in range(STEPS):
        if step >= FREEZE + 2:
            scaler = scaler_of(32.0)
        backward(net, rank, step, scaler=scaler)
        if step == FREEZE + 2:
            before = everything(list(net.parameters()), optimizer)
            with pytest.raises(ValueError, match=r"loss scale of 64.0, and the scaler used 32.0"):
                scaler.step(optimizer)
            after = everything(list(net.parameters()), optimizer)
            assert sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == 1  # the scale itself
            optimizer.zero_grad()
        else:
            end_step(optimizer, scaler)
    assert not optimizer.step_was_skipped


@on_ranks(3)
def test_a_process_group_of_its_own(rank: int, world_size: int) -> None:
    own, ends = dist.new_group(list(range(world_size))), []
    for stage in (1, 2):
        params = [nn.Parameter(torch.arange(1.0, 40)), nn.Parameter(torch.arange(1.0, 30))]
        groups = [{"params": params[:1]}, {"params": params[1:], "process_group": own}]
        optimizer = OnebitAdam(groups, lr=1e-2, freeze_step=2, zero_stage=stage)
        for step in range(4):
            sum((p.sin() * (rank + step)).sum() for p in params).backward()
            assert [p.grad is None for p in params] == [stage == 2, False]
            optimizer.step()
            optimizer.zero_grad()
        ends.append(params)
    assert same(*ends)


@pytest.mark.parametrize("stage", [1, 2])
def test_options(stage: int) -> None:
    optimizer = OnebitAdam([nn.Parameter(torch.zeros(3))], zero_stage=stage)
    assert (optimizer.overlap is not None) == (stage == 2) and f"zero_stage={stage}" in optimizer.describe()
