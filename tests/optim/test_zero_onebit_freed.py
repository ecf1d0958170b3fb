"""OnebitAdam with zero_stage=2: gradients that leave and are freed while backward runs."""

import copy
import gc
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import hf_compressopt
from hf_compressopt import OnebitAdam, attach_ddp, load_state, save_state
from hf_compressopt.optim.late import LATE_CLIP
from tests.optim.test_compact_state import go_on
from tests.optim.test_compact_state import make as make_by_hand
from tests.optim.test_late_clip import CLIP, FREEZE, STEPS, make
from tests.optim.test_warmup_hook import Net, data
from tests.optim.test_zero_onebit import everything
from tests.oracles.steps import same
from tests.support.harness import run_ranks
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


def make_net(options: dict[str, Any], **more: Any) -> tuple[nn.Module, OnebitAdam]:
    checkpoints = options.pop("checkpoints", False)
    net, optimizer = make(options.pop("clip", "sketch"), **options, **more)
    if checkpoints:
        net.__class__ = Segments
    return net, optimizer


def train(rank: int, name: str, given: dict[str, Any]) -> dict[str, Any]:
    options = {**VARIANTS[name], **given}
    accumulate, also = options.pop("accumulate", 1), options.pop("also", lambda rank, step: True)
    scaled, by_closure, late = (options.pop(key, False) for key in ("scaler", "closure", "late"))
    pairs = [make_net(dict(options), zero_stage=stage) for stage in (1, 2)]
    scalers = [hf_compressopt.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled) for _ in pairs]
    equal, freed = [], []
    for step in range(STEPS):
        for (net, optimizer), scaler in zip(pairs, scalers, strict=True):
            frees = optimizer.zero_stage == 2

            def backward(net: Any = net, optimizer: Any = optimizer, scaler: Any = scaler, step: int = step) -> Any:
                for part in range(accumulate):
                    x = data(rank, step, part).to(next(net.parameters()).dtype)
                    loss = scaler.scale(net(x, also(rank, step)).square().mean())
                    with optimizer.no_sync() if part < accumulate - 1 or late else nullcontext():
                        loss.backward()
                return loss

            if by_closure:
                optimizer.step(backward)
            else:
                backward()
                if frees:
                    kept = {id(p) for g in optimizer.param_groups if g["non_freeze"] for p in g["params"]}
                    freed.append(all(p.grad is None for p in net.parameters() if id(p) not in kept))
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        first, second = (everything(list(net.parameters()), optimizer) for net, optimizer in pairs)
        equal.append(all(any(torch.equal(a, b) for b in second) for a in first))
    weights = [p.detach().float().numpy() for p in pairs[1][0].parameters()]
    sent = [optimizer.traffic.total_bytes for _, optimizer in pairs]
    alike = {"stage": pairs[1][1].plan.stage.number, "weights": weights}
    return {**alike, "equal": equal, "freed": freed, "sent": sent, "closure": by_closure, "late": late}


def train_all(rank: int, world_size: int, names: list[str], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: train(rank, name, options) for name in names}


def check_bits(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for results in ranks:
        for name, result in results.items():
            assert result["equal"] == [True] * STEPS and result["stage"] == 1, name
            if name != "checkpoints":  # each of its backwards is inside another one, whose end is not known
                assert result["freed"] == [not result["late"]] * (0 if result["closure"] else STEPS), name
            assert result["sent"][0] == result["sent"][1] > 0, f"{name}: not a byte more"
            for mine, theirs in zip(result["weights"], ranks[0][name]["weights"], strict=True):
                assert mine.tobytes() == theirs.tobytes(), name


@pytest.mark.invariant(1)
@pytest.mark.parametrize(
    ("world_size", "share"),
    [
        pytest.param(2, Share(0, 3), id="2-share"),
        pytest.param(3, Share(1, 3), id="3-share"),
        *(pytest.param(ranks, Share(0, 1), id=f"{ranks}", marks=pytest.mark.full) for ranks in (2, 3)),
    ],
)
def test_without_clipping_the_bits_are_those_of_stage_1(world_size: int, share: Share) -> None:
    check_bits(run_ranks(world_size, train_all, share.of(VARIANTS), {}, timeout=300))


def test_in_two_levels_too() -> None:
    check_bits(run_ranks(4, train_all, ["other graphs"], TWO_LEVELS, timeout=300))


# -- clipping ---------------------------------------------------------------------------------------------------------


def clipped(rank: int, world_size: int, max_norm: float) -> list[torch.Tensor]:
    """Clipping by option, by a call, and of gradients that carry a loss scale."""
    runs, norms = [], []
    for how in ("option", "call", "scaler"):
        net, optimizer = make("sketch", max_norm if how == "option" else 0.0, **ZERO)
        scaler = hf_compressopt.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=how == "scaler")
        norms.append([])
        for step in range(STEPS):
            scaler.scale(net(data(rank, step)).square().mean()).backward()
            if how == "call":
                norms[-1].append(float(optimizer.clip_grad_norm_(max_norm, net.parameters())))
            elif how == "scaler":
                scaler.unscale_(optimizer)
                norms[-1].append(float(optimizer.clip_grad_norm_(max_norm)))
            scaler.step(optimizer)
            scaler.update()
            if how == "option":
                norms[-1].append(float(optimizer._tensors[LATE_CLIP][0]))
            optimizer.zero_grad()
        runs.append([p.detach().clone() for p in net.parameters()])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] == pytest.approx(norms[2], rel=1e-4)
    assert min(norms[0]) > max_norm
    true = torch.cat([torch.zeros(0), *(p.grad.reshape(-1) for p in gradients_of(rank, 0))])
    dist.all_reduce(true)
    assert norms[0][0] == pytest.approx(float(true.norm()) / world_size, rel=0.02), "4 bits are all that is between"
    assert same(runs[0], runs[1])
    return runs[0]


def gradients_of(rank: int, step: int) -> list[nn.Parameter]:
    net, _ = make("sketch")
    net(data(rank, step)).square().mean().backward()
    return [p for p in net.parameters() if p.grad is not None]


def test_clipping_by_option_by_call_and_with_a_scaler() -> None:
    ranks = run_ranks(3, clipped, CLIP)
    assert all(same(run, ranks[0]) for run in ranks)


# -- memory -----------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 64, 16


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operators have made and that are alive, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes that are alive now."""
        self.storages = {key: row for key, row in self.storages.items() if not row[0].expired()}
        return sum(nbytes for _, nbytes in self.storages.values())


def layers(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def bytes_of_a_run(rank: int, world_size: int, bucket_cap_mb: float) -> tuple[list[float], list[float], int]:
    """Bytes per parameter at the peak of a run, and after it; most matrices' gradients in a backward; in a bucket."""
    with Alive() as alive:
        torch.manual_seed(0)
        net = layers()
        numel = sum(p.numel() for p in net.parameters())
        groups = [{"params": [p for p in net.parameters() if (p.ndim > 1) == large]} for large in (True, False)]
        grads: list[StorageWeakRef] = []
        most: list[float] = []

        def count(param: torch.Tensor) -> None:
            assert param.grad is not None
            grads.append(StorageWeakRef(param.grad.untyped_storage()))
            most[-1] = max(most[-1], sum(not grad.expired() for grad in grads if grad is not None))

        for p in net.parameters():
            if p.ndim > 1:
                p.register_post_accumulate_grad_hook(count)
        optimizer = OnebitAdam(groups, freeze_step=2, max_grad_norm=0.1, bucket_cap_mb=bucket_cap_mb, **ZERO)
        for step in range(4):
            grads.clear()
            most.append(0.0)
            net(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        after = alive.now()
    return [alive.peak / numel, after / numel], most, int(bucket_cap_mb * 2**20 / 4 / WIDTH**2)


@pytest.mark.full
@pytest.mark.parametrize("matrices", [1, 2])
def test_bytes_of_a_whole_run(matrices: int) -> None:
    """AdamW under DDP has 16 bytes per parameter: parameters, buckets that are gradients, and two moments."""
    for (peak, after), most, in_bucket in run_ranks(4, bytes_of_a_run, (matrices + 0.01) * 4 * WIDTH**2 / 2**20):
        assert in_bucket == matrices
        assert max(most) <= matrices + 1, "gradients of matrices that are alive at the same time"
        assert peak <= 16 * 2 / 3
        assert after <= 4 + 2.6, "parameters, and the state of the compressed stage"


# -- state ------------------------------------------------------------------------------------------------------------


def cross(rank: int, world_size: int, folder: str) -> None:
    """Checkpoints of stages 1 and 2 load into each other: without clipping the run goes on bit for bit."""
    for stop in (2, 5):
        for before, after in ((1, 2), (2, 1)):
            params, optimizer = make_by_hand(rank, stop, zero_stage=before)
            save_state(optimizer, f"{folder}/{stop}-{before}")
            loaded_params, loaded = make_by_hand(rank, 0, zero_stage=after)
            with torch.no_grad():
                for p, q in zip(loaded_params, params, strict=True):
                    p.copy_(q)
            load_state(loaded, f"{folder}/{stop}-{before}")
            for _ in range(2):
                pairs = zip(optimizer._states, loaded._states, strict=True)
                assert all(same(list(a.errors.values()), list(b.errors.values())) for a, b in pairs)
                assert same(params, loaded_params)  # type: ignore[arg-type]
                for pair in ((params, optimizer), (loaded_params, loaded)):
                    go_on(rank, *pair, range(stop, stop + 3))
    if world_size == 3:
        dist.barrier()


@pytest.mark.invariant(22)
def test_stages_1_and_2_load_each_other(tmp_path: Path) -> None:
    run_ranks(3, cross, str(tmp_path))


def elastic(rank: int, world_size: int, folder: str, stop: int) -> None:
    params, optimizer = make_by_hand(rank, 0, **ZERO)
    load_state(optimizer, folder)
    go_on(rank, params, optimizer, range(stop, stop + 3))
    sums = optimizer.communicator.all_gather_object([p.detach().double().sum().item() for p in params])
    assert all(row == sums[0] for row in sums) and all(p.isfinite().all() for p in params)


def save_here(rank: int, world_size: int, folder: str, stop: int) -> None:
    save_state(make_by_hand(rank, stop, **ZERO)[1], folder)


@pytest.mark.invariant(22)
@pytest.mark.parametrize("stop", [2, 5])
def test_another_number_of_ranks(stop: int, tmp_path: Path) -> None:
    run_ranks(3, save_here, str(tmp_path), stop)
    for ranks in (1, 2, 4):
        run_ranks(ranks, elastic, str(tmp_path), stop)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def bad_backward(rank: int, world_size: int, scaled: bool) -> dict[str, Any]:
    """In a step of each stage one rank's loss is not a number."""
    net, optimizer = make("sketch", CLIP, **ZERO)
    scaler = hf_compressopt.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    kept, skipped = [], []
    for step in range(STEPS):
        before = everything(list(net.parameters()), optimizer)
        loss = scaler.scale(net(data(rank, step)).square().mean())
        (loss * math.nan if rank == 1 and step in (1, 6) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = everything(list(net.parameters()), optimizer)
        kept.append(len(before) == len(after) and all(map(same_bits, before, after)))
        skipped.append(optimizer.step_was_skipped)
    return {"kept": kept, "skipped": skipped, "weights": [p.detach().clone() for p in net.parameters()]}


@pytest.mark.invariant(13)
@pytest.mark.parametrize("scaled", [False, True])
def test_all_ranks_skip_a_step_and_nothing_has_changed(scaled: bool) -> None:
    ranks = run_ranks(2, bad_backward, scaled)
    for result in ranks:
        assert result["skipped"] == [step in (1, 6) for step in range(STEPS)]
        assert scaled or result["kept"] == result["skipped"]  # a scaler's new scale is a part of the state
        assert same(result["weights"], ranks[0]["weights"])


# -- what is thrown away, and what is refused --------------------------------------------------------------------------


def thrown_away(rank: int, world_size: int) -> None:
    """zero_grad(), gradients that are given, and a backward that raises leave no trace."""
    runs = []
    for abandon in (False, True):
        net, optimizer = make("sketch", CLIP, **ZERO)
        for step in range(STEPS):
            if abandon:
                net(data(rank, step, part=7)).square().mean().backward()
                optimizer.zero_grad()
                handle = net.first.weight.register_hook(_raise)
                with pytest.raises(RuntimeError, match="on purpose"):
                    net(data(rank, step, part=8)).square().mean().backward()
                handle.remove()
                optimizer.zero_grad()
            net(data(rank, step)).square().mean().backward()
            optimizer.step()
        runs.append(everything(list(net.parameters()), optimizer))
    assert same(*runs)
    twins = [make("sketch", zero_stage=stage) for stage in (1, 2)]
    for step in range(STEPS):
        for net, optimizer in twins:
            plain, _ = make("sketch")
            plain(data(rank, step)).square().mean().backward()
            net(data(rank, step, part=7)).square().mean().backward()
            optimizer.step(grads=[p.grad for g in optimizer.param_groups for p in plain_like(net, plain, g)])
            optimizer.zero_grad()
        assert same(*([p.detach() for p in net.parameters()] for net, _ in twins))


def plain_like(net: nn.Module, plain: nn.Module, group: dict[str, Any]) -> list[nn.Parameter]:
    twins = dict(zip(net.parameters(), plain.parameters(), strict=True))
    return [twins[p] for p in group["params"]]


def _raise(grad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("on purpose")


def test_what_is_thrown_away_leaves_no_trace() -> None:
    run_ranks(2, thrown_away)


def refused(rank: int, world_size: int) -> None:
    for switched in (False, True):
        net, optimizer = make("sketch", **ZERO)
        steps = iter(range(100))

        def backward(net: Any = net, steps: Any = steps) -> None:
            net(data(rank, next(steps))).square().mean().backward()

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
            optimizer.freed.end_step()  # as if this rank alone had dropped them
            optimizer.freed._passes.done = True
            optimizer.early_messages.drop()
            optimizer.early_messages.agreed = False
        with pytest.raises(ValueError, match="what has left in backward"):
            optimizer.step()
        optimizer.zero_grad()
        after = everything(list(net.parameters()), optimizer)
        assert same(before, after), "nothing is lost"
        with pytest.raises(ValueError, match="buckets of DistributedDataParallel hold them"):
            attach_ddp(DistributedDataParallel(net), optimizer)
        wrapped = DistributedDataParallel(copy.deepcopy(net))
        alone = OnebitAdam(wrapped.parameters(), **ZERO)
        wrapped(data(rank, 0)).square().mean().backward()
        with pytest.raises(ValueError, match=r"DistributedDataParallel"):
            alone.step()
    embedding = nn.Embedding(4, 3, sparse=True)
    sparse = OnebitAdam(embedding.parameters(), **ZERO)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="only dense gradients are supported"):
        sparse.step()


def test_misuse_is_refused_on_all_ranks_together() -> None:
    run_ranks(2, refused)


def other_scale(rank: int, world_size: int) -> None:
    net, optimizer = make("sketch", **ZERO)
    scaler = hf_compressopt.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        if step >= FREEZE + 2:
            scaler = hf_compressopt.GradScaler("cpu", init_scale=32.0)
        scaler.scale(net(data(rank, step)).square().mean()).backward()
        if step == FREEZE + 2:
            before = everything(list(net.parameters()), optimizer)
            with pytest.raises(ValueError, match=r"loss scale of 64.0, and the scaler used 32.0"):
                scaler.step(optimizer)
            after = everything(list(net.parameters()), optimizer)
            assert sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == 1  # the scale itself
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    assert not optimizer.step_was_skipped


def test_a_loss_scale_that_is_not_known() -> None:
    run_ranks(2, other_scale)


def unusual(rank: int, world_size: int) -> None:
    """Groups without elements, groups that come later, an optimizer that follows another one, and copies."""
    empty = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))]
    nothing = OnebitAdam([{"params": empty}, {"params": []}], freeze_step=2, **ZERO)
    others = [nn.Parameter(torch.ones(count)) for count in (2, 3, 4)]
    replaced = OnebitAdam(others, **ZERO)
    mixed = OnebitAdam([{"params": others[:1]}, {"params": others[1:2], "non_freeze": True}], freeze_step=2, **ZERO)
    mixed.add_param_group({"params": others[2:]})
    for _ in range(4):
        sum(p.sum() for p in (*empty, *others)).backward()
        assert [p.grad is None for p in others] == [True, False, True] and all(p.grad is None for p in empty)
        nothing.step()
        mixed.step()
        mixed.zero_grad()
    assert not replaced.freed.have_left  # type: ignore[union-attr]
    assert all(torch.allclose(p, p.new_full((), 1 - 4e-3), atol=1e-5) for p in others)
    copied_params, copied = copy.deepcopy((others, mixed))
    for params, optimizer in ((others, mixed), (copied_params, copied)):
        for _ in range(2):
            sum(p.sum() * (rank + 1) for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(others, copied_params)  # type: ignore[arg-type]
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


def test_unusual_groups() -> None:
    run_ranks(3, unusual)


def test_options() -> None:
    optimizer = OnebitAdam([nn.Parameter(torch.zeros(3))], zero_stage=2)
    assert optimizer.early_messages.enabled and "zero_stage=2" in optimizer.describe()
