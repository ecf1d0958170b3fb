"""OnebitAdam with zero_stage=2: gradients that leave and are freed while backward runs."""

import copy
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
from hf_compressopt import OnebitAdam, attach_ddp, load_state, save_state
from hf_compressopt.optim.late import LATE_CLIP
from tests.optim.test_zero_onebit import everything
from tests.oracles.cases import bucket_cap
from tests.oracles.steps import same
from tests.support.ddp_runs import CLIP, FREEZE, STEPS, Net, backward, end_step, loss_of, make, scaler_of
from tests.support.family import assign, go_on
from tests.support.family import make as make_by_hand
from tests.support.harness import on_ranks, same_on_all_ranks
from tests.support.spreading import Share

ZERO = {"zero_stage": 2}


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
        first, second = (everything(list(net.parameters()), optimizer) for net, optimizer in pairs)
        assert all(any(torch.equal(a, b) for b in second) for a in first), (name, step)
    (_, one), (net, two) = pairs
    assert two.plan.stage.number == 1, name
    assert one.traffic.total_bytes == two.traffic.total_bytes > 0, f"{name}: not a byte more"
    assert same_on_all_ranks(net.parameters()), name


@pytest.mark.invariant(1)
@pytest.mark.parametrize(
    ("world_size", "share"),
    [
        pytest.param(2, Share(0, 3), id="2-share"),
        pytest.param(3, Share(1, 3), id="3-share"),
        *(pytest.param(ranks, Share(0, 1), id=f"{ranks}", marks=pytest.mark.full) for ranks in (2, 3)),
    ],
)
@on_ranks(timeout=300)
def test_without_clipping_the_bits_are_those_of_stage_1(rank: int, world_size: int, share: Share) -> None:
    for name in share.of(VARIANTS):
        check_bits(rank, name, {})


@on_ranks(4, timeout=300)
def test_in_two_levels_too(rank: int, world_size: int) -> None:
    check_bits(rank, "other graphs", TWO_LEVELS)


# -- clipping ---------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_clipping_by_option_by_call_and_with_a_scaler(rank: int, world_size: int) -> None:
    runs, norms = [], []
    for how in ("option", "call", "scaler"):
        net, optimizer = make("sketch", CLIP if how == "option" else 0.0, **ZERO)
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


@pytest.mark.parametrize("matrices", [1, 2])
@on_ranks(2)
def test_gradients_of_a_bucket_are_alive_at_a_time(rank: int, world_size: int, matrices: int) -> None:
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
    optimizer = OnebitAdam(
        groups, freeze_step=2, max_grad_norm=0.1, bucket_cap_mb=bucket_cap(matrices * width**2), **ZERO
    )
    for step in range(4):
        grads.clear()
        net(torch.randn(2, width, generator=torch.Generator().manual_seed(10 * rank + step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < most <= matrices + 1


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(22)
@on_ranks(3)
def test_stages_1_and_2_load_each_other(rank: int, world_size: int, tmp_path: Path) -> None:
    for stop in (2, 5):
        for before, after in ((1, 2), (2, 1)):
            params, optimizer = make_by_hand(rank, stop, zero_stage=before)
            save_state(optimizer, f"{tmp_path}/{stop}-{before}")
            loaded_params, loaded = make_by_hand(rank, 0, zero_stage=after)
            assign(loaded_params, params)
            load_state(loaded, f"{tmp_path}/{stop}-{before}")
            for _ in range(2):
                pairs = zip(optimizer._states, loaded._states, strict=True)
                assert all(same(list(a.errors.values()), list(b.errors.values())) for a, b in pairs)
                assert same(params, loaded_params)  # type: ignore[arg-type]
                for pair in ((params, optimizer), (loaded_params, loaded)):
                    go_on(rank, *pair, range(stop, stop + 3))
    if world_size == 3:
        dist.barrier()


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
        net, optimizer = make("sketch", CLIP, **ZERO)
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
        net, optimizer = make("sketch", **ZERO)
        steps = iter(range(100))

        def backward(net: Any = net, steps: Any = steps) -> None:
            loss_of(net, rank, next(steps)).backward()

        for _ in range(FREEZE + 2 if switched else 0):
            backward()
            optimizer.step()
        before = everything(list(net.parameters()), optimizer)
        backward()
        with pytest.raises(RuntimeError, match="cannot clip the gradients under ZeRO"):
            hf_compressopt.guard_torch_clipping()
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
        if rank:
            optimizer.freed.drop()  # as if this rank alone had dropped them
            optimizer.freed._passes.done = True
            optimizer.freed.agreed = False
        with pytest.raises(ValueError, match="what has left in backward"):
            optimizer.step()
        optimizer.zero_grad()
        after = everything(list(net.parameters()), optimizer)
        assert same(before, after), "nothing is lost"
        with pytest.raises(ValueError, match="buckets of DistributedDataParallel hold them"):
            attach_ddp(DistributedDataParallel(net), optimizer)
        wrapped = DistributedDataParallel(copy.deepcopy(net))
        alone = OnebitAdam(wrapped.parameters(), **ZERO)
        loss_of(wrapped, rank, 0).backward()
        with pytest.raises(ValueError, match=r"DistributedDataParallel"):
            alone.step()
    embedding = nn.Embedding(4, 3, sparse=True)
    sparse = OnebitAdam(embedding.parameters(), **ZERO)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="only dense gradients are supported"):
        sparse.step()


@on_ranks(2)
def test_a_loss_scale_that_is_not_known(rank: int, world_size: int) -> None:
    net, optimizer = make("sketch", **ZERO)
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


def test_options() -> None:
    optimizer = OnebitAdam([nn.Parameter(torch.zeros(3))], zero_stage=2)
    assert optimizer.early_messages.enabled and "zero_stage=2" in optimizer.describe()
