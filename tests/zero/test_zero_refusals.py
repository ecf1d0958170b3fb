"""Set-ups that ZeroOptimizer refuses, torch's own clipping beside it, and several optimizers in one process."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_compressopt
from hf_compressopt import (
    CompressOptPlugin,
    FusedAdam,
    GradientCompression,
    OnebitAdam,
    ZeroOptimizer,
    average_gradients,
)
from hf_compressopt.collectives import backward
from tests.support.harness import on_ranks
from tests.support.logs import log_lines
from tests.support.zero_runs import INT4, bits, different


def net(seed: int, layers: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(24, 24), nn.Tanh())])


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def named(name: str, base: type = torch.optim.SGD) -> Any:
    """A class with the name of one in bitsandbytes, optimi, prodigyopt, dadaptation, galore_torch or transformers."""
    return type(name, (base,), {})


# The base of all optimizers of bitsandbytes, those of 32 bits too.
Optimizer8bit = named("Optimizer8bit", torch.optim.Optimizer)


class WithBits(Optimizer8bit):  # type: ignore[misc]
    """A copy of bitsandbytes' AdamW, which Trainer's adamw_bnb_8bit makes with optim_bits=8."""

    def __init__(self, params: Any, lr: float = 1e-3, optim_bits: int = 32, percentile_clipping: int = 100) -> None:
        super().__init__(params, {"lr": lr})
        self.args = type("MockArgs", (), {})()
        self.args.optim_bits, self.args.percentile_clipping = optim_bits, percentile_clipping

    def step(self, closure: Any = None) -> None:
        raise AssertionError("it is refused before")


class Clipping(torch.optim.SGD):
    """One that clips unless it is told not to, as apex's."""

    def __init__(self, params: Any, lr: float = 1e-3, max_grad_norm: float = 1.0) -> None:
        super().__init__(params, lr=lr)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (named("AdamW8bit"), {}, "AdamW8bit cannot be partitioned: it keeps its state in blocks.*state_dtype='bf16'"),
        (WithBits, {"optim_bits": 8}, "optim_bits=8 cannot be partitioned"),
        (WithBits, {"percentile_clipping": 5}, "percentile_clipping must be 100, got 5.*use clip_grad"),
        (named("StableAdamW"), {}, "StableAdamW cannot be partitioned: its update takes statistics"),
        (named("Prodigy"), {}, "Prodigy cannot be partitioned: its update takes statistics"),
        (named("DAdaptAdam"), {}, "DAdaptAdam cannot be partitioned: its update takes statistics"),
        (named("MyGaLoreAdamW"), {}, "MyGaLoreAdamW cannot be partitioned: it needs whole matrices"),
        (Clipping, {}, "clips to max_grad_norm=1.0 by this rank's part"),
        (FusedAdam, {"max_grad_norm": 1.0, "clip_grad": 2.0}, "two spellings of one option"),
        (FusedAdam, {"max_grad_norm": -1.0}, "max_grad_norm must be >= 0"),
        (torch.optim.LBFGS, {}, "LBFGS cannot be partitioned: it needs the whole gradient"),
        (torch.optim.SparseAdam, {}, "sparse=False embeddings"),
        (torch.optim.Adafactor, {}, "Adafactor cannot be partitioned"),
        (named("Adafactor"), {}, "whole rows and columns"),
        (getattr(torch.optim, "Muon", named("Muon")), {}, "or AdamW here"),
        (OnebitAdam, {}, "error feedback needs whole buckets"),
        (ZeroOptimizer, {}, "the class that it wraps"),
        ("adamw", {}, "must be a subclass of torch.optim.Optimizer"),
        *(
            (torch.optim.AdamW, options, message)
            for options, message in (
                ({"stage": 3}, "stage must be 1 or 2, got 3"),
                ({"lr": -1.0}, "Invalid learning rate"),
                ({"bucket_cap_mb": 0.0}, "bucket_cap_mb must be > 0"),
                ({"bucket_cap_mb": 1.0, "reduce_bucket_size": 5}, "two spellings"),
                ({"reduce_bucket_size": 0}, "reduce_bucket_size must be >= 1"),
                ({"allgather_bucket_size": 1.5}, "allgather_bucket_size must be an int"),
                ({"overlap_comm": 1}, "overlap_comm must be True or False"),
                ({"communication_data_type": "int8"}, "communication_data_type must be one of"),
                ({"gradient_predivide_factor": 2.0}, "needs postscale_gradients=True"),
                ({"loss_scale": "static"}, "loss_scale must be a number"),
                ({"clip_grad": -1.0}, "clip_grad must be >= 0"),
                ({"offload_optimizer": True}, "no accelerator"),
                ({"communicator": "nccl2"}, "communicator must be one of"),
                ({"nonsense": 1}, "nonsense"),
                ({"topology": "ring"}, "topology must be one of"),
                ({"topology": "flat", "node_size": 3}, "belongs to the hierarchical topology"),
                ({"grad_compression": "int2"}, r"grad_compression must be one of .*'none'\], got 'int2'"),
                ({"param_compression": None}, "param_compression must be one of"),
                ({**INT4, "communication_data_type": "bf16"}, "communication_data_type=bf16 has no effect with grad"),
                ({**INT4, "postscale_gradients": True}, "postscale_gradients=True has no effect with grad_compression"),
                ({**INT4, "master_dtype": "bf16"}, "param_compression=int4 needs float32 masters, got master_dtype"),
            )
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(cls: Any, options: dict[str, Any], message: str) -> None:
    of_another_type = cls == "adamw" or {"allgather_bucket_size", "overlap_comm", "nonsense"} & {*options}
    with pytest.raises(TypeError if of_another_type else ValueError, match=message):
        ZeroOptimizer([nn.Parameter(torch.ones(3))], cls, **options)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.complex64, {}, "complex64 in param group"),
        (torch.float64, {"grad_compression": "int4"}, "less precise than float64, got float64 in param group"),
        (torch.float64, {"param_compression": "int8"}, "less precise than float64, got float64 in param group"),
    ],
)
def test_parameters_that_cannot_be_had_are_refused(dtype: torch.dtype, options: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    with pytest.raises(TypeError, match=f"{message} 0"):
        ZeroOptimizer([weight], torch.optim.AdamW, **options)
    optimizer = ZeroOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW, **options)
    with pytest.raises(TypeError, match=f"{message} 1"):
        optimizer.add_param_group({"params": [weight]})
    assert len(optimizer.param_groups) == 1


def test_the_base_of_bitsandbytes_is_not_refused_for_its_name() -> None:
    optimizer = ZeroOptimizer([nn.Parameter(torch.ones(3))], WithBits, lr=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


def test_the_plugin_sees_the_bits_of_a_made_optimizer() -> None:
    made = WithBits([nn.Parameter(torch.ones(3))], optim_bits=8)
    with pytest.raises(ValueError, match="optim_bits=8"):
        CompressOptPlugin(zero_stage=2).convert(made)


class Boosted(torch.optim.SGD):
    """It keeps an option under another name, as lion_pytorch's Lion does with decoupled_weight_decay."""

    def __init__(self, params: Any, lr: float, boost: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self._times = boost


def test_the_plugin_loses_no_option_of_a_made_optimizer() -> None:
    params, plugin = [nn.Parameter(torch.ones(3))], CompressOptPlugin(zero_stage=2)
    with pytest.raises(ValueError, match=r"_times is 5.0, and would be 1.0.*ZeroOptimizer\(params, Boosted, ...\)"):
        plugin.convert(Boosted(params, lr=0.5, boost=5.0))
    assert plugin.convert(Boosted(params, lr=0.5)).param_groups[0]["lr"] == 0.5


def test_frozen_parameters_may_be_of_any_dtype() -> None:
    whole = nn.Parameter(torch.arange(3), requires_grad=False)
    weight = nn.Parameter(torch.ones(3))
    optimizer = ZeroOptimizer([weight, whole], torch.optim.SGD, lr=1.0)
    weight.sum().backward()
    optimizer.step()
    assert not weight.any() and torch.equal(whole, torch.arange(3))


@on_ranks(2)
def test_max_grad_norm_of_the_wrapped_optimizer_is_the_norm_over_all_ranks(rank: int, world_size: int) -> None:
    found = []
    for clipping in ({"clip_grad": 1e-3}, {"max_grad_norm": 1e-3}, {"max_grad_norm": 0.0}):
        model = net(3)
        optimizer = ZeroOptimizer(model.parameters(), FusedAdam, lr=1e-2, reduce_bucket_size=200, **clipping)
        found.append(train(rank, model, optimizer))
    assert not list(different(found[0], found[1])) and list(different(found[0], found[2]))


@on_ranks(2)
def test_torchs_clipping_is_refused_by_name(rank: int, world_size: int) -> None:
    model, other = net(3), net(3)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    x = torch.ones(2, 24)
    model(x).sum().backward()
    other(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer.clip_grad_norm_\(max_norm\)"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="without ZeRO"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    assert float(optimizer.clip_grad_norm_(0.1)) == pytest.approx(float(norm))
    del optimizer
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)) == 0


@on_ranks(2)
def test_param_groups_keep_their_parameters(rank: int, world_size: int) -> None:
    """One that other code puts into a group would not move, and one that it takes out would."""
    model, new = net(3), nn.Parameter(torch.ones(24, 24))
    optimizer = ZeroOptimizer([{"params": [p]} for p in model.parameters()], torch.optim.SGD, lr=0.1)
    before = bits(model)
    first, last = optimizer.param_groups[0]["params"], optimizer.param_groups[-1]
    for changed in ([first[0], new], [new], []):
        if rank == 1:
            first[:] = changed
        loss_of(model, rank, 0).backward()
        with pytest.raises((ValueError, RuntimeError), match="add_param_group" if rank else r"1 other rank\(s\)"):
            optimizer.step()
        optimizer.zero_grad()
        first[:] = [model[0].weight]
    optimizer.param_groups.pop()
    loss_of(model, rank, 0).backward()
    with pytest.raises(ValueError, match="add_param_group"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups.append(last)
    assert not list(different(bits(model), before))
    train(rank, model, optimizer)
    assert list(different(bits(model), before))


def owners(kind: str, params: Any, **options: Any) -> Any:
    if kind == "zero":
        return ZeroOptimizer(params, torch.optim.SGD, lr=1.0, clip_grad=options.get("max_grad_norm", 0.0))
    return OnebitAdam(params, zero_stage=2, **options)


def test_an_optimizer_that_frees_gradients_guards_torchs_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name, value in [*vars(module).items()]:
            if callable(value) and name.startswith(("clip_", "_clip_")):
                monkeypatch.setattr(module, name, getattr(value, backward._GUARDED, value))
    model = net(3)
    optimizer = owners("zero", model.parameters())
    model(torch.ones(2, 24)).sum().backward()
    with pytest.raises(RuntimeError, match="cannot clip the gradients under ZeRO"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("kind", ["zero", "onebit"])
@on_ranks(2)
def test_a_model_in_ddp_is_refused_where_the_optimizer_averages(rank: int, world_size: int, kind: str) -> None:
    model = net(3)
    optimizer = owners(kind, model.parameters())
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"averages the gradient of .*and so does a DistributedDataParallel"):
        wrapped(torch.ones(2, 24)).sum().backward()
    del wrapped
    gc.collect()
    optimizer.zero_grad()
    other = net(3)
    names = [name for name, _ in other.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(other, names[1:])
    beside = DistributedDataParallel(other)
    rest = owners(kind, [param for name, param in other.named_parameters() if name in names[1:]])
    beside(torch.ones(2, 24)).sum().backward()
    rest.step()


# -- several optimizers in one process ---------------------------------------------------------------------------------


def train(rank: int, model: nn.Module, optimizer: Any) -> list[Tensor]:
    for step in range(3):
        loss_of(model, rank, step).backward()
        if isinstance(optimizer, Compressed):
            optimizer.compression.average_gradients()
        elif isinstance(optimizer, OnebitAdam) and optimizer.zero_stage < 2:
            average_gradients(optimizer)
        optimizer.step()
    return bits(model)


class Compressed(torch.optim.AdamW):
    """AdamW behind GradientCompression."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=1e-2)
        self.compression = GradientCompression(params, "int8")


KINDS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    **{f"Zero {n}": partial(ZeroOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-2, stage=n) for n in (1, 2)},
    **{f"OnebitAdam {n}": partial(OnebitAdam, lr=1e-2, zero_stage=n) for n in (0, 1, 2)},
    "GradientCompression": Compressed,
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "FusedAdam": partial(FusedAdam, lr=1e-2),
}
TAKERS = ["Zero 1", "Zero 2", "OnebitAdam 2"]
ORDINARY = ["AdamW", "FusedAdam"]


@pytest.mark.parametrize("first", TAKERS)
@on_ranks(2)
def test_a_living_optimizer_leaves_its_gradients_to_the_next_one(rank: int, world_size: int, first: str) -> None:
    """Make one optimizer after another of the same parameters, as in a notebook; the first one stays alive.

    If both are of a kind it is dead on rank 1: the last exception of a notebook keeps one alive where it was raised.
    """
    for kind, make in KINDS.items():
        alone = net(1)
        expected = train(rank, alone, make([*alone.parameters()]))
        model = net(1)
        params = [*model.parameters()]
        old = KINDS[first](params)
        loss_of(model, rank, 0).backward()
        old.step()
        kept = [old] if kind != first or rank == 0 else []
        del old
        gc.collect()
        model.load_state_dict(net(1).state_dict())
        with log_lines() as lines:
            new = make(params)
        assert any("takes over" in line for line in lines) == (kind not in ORDINARY and bool(kept)), (kind, lines)
        if kind in ORDINARY:
            loss_of(model, rank, 0).backward()
            with pytest.raises(RuntimeError, match=rf"{kind}.step\(\) moved 8 .*run backward again"):
                new.step()
            assert not list(different(bits(model), bits(net(1))))
        found = train(rank, model, new)
        assert not list(different(expected, found)), f"{kind} after {first}"
        for old in kept:
            with pytest.raises(RuntimeError, match="gets no gradients any more.*use the newer one"):
                old.step()


class Averaging(torch.optim.Optimizer):
    """A user's wrapper of an optimizer, which is one itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("first", TAKERS)
def test_a_wrapper_around_the_owner_may_step(first: str) -> None:
    model = net(1)
    wrapper = Averaging(KINDS[first]([*model.parameters()]))
    loss_of(model, 0, 0).backward()
    wrapper.step()
    assert list(different(bits(model), bits(net(1))))


@pytest.mark.parametrize("kind", [*KINDS, "ZeroOneAdam", "OnebitLamb"])
def test_a_dropped_optimizer_dies_at_once_and_leaves_no_hook(kind: str) -> None:
    """Not at the next collection of garbage, which the ranks have at different times."""
    make = KINDS.get(kind) or getattr(hf_compressopt, kind)
    model = net(1)
    gc.disable()
    try:
        for _ in range(3):
            optimizer = make([*model.parameters()])
            train(0, model, optimizer)
            copied = copy.deepcopy(optimizer) if kind != "GradientCompression" else None
            died = [weakref.ref(each) for each in (optimizer, copied) if each is not None]
            del optimizer, copied
            assert all(reference() is None for reference in died)
            assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{"reduce_bucket_size": 600}, {}, {"overlap_comm": False}], ids=str)
@on_ranks(2)
def test_two_optimizers_in_one_backward_do_not_mix_their_gradients(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    """Two models in one loss, whose gradients come in another order on each rank, and partly not at all."""
    alone = []
    for seed in (1, 2):
        model = net(seed)
        alone.append(train(rank, model, ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **options)))
    models = [net(1), net(2)]
    unused = nn.Parameter(torch.ones(50))  # its slices leave at the end only
    optimizers = [
        ZeroOptimizer([*model.parameters(), *([unused] if number else [])], torch.optim.SGD, lr=0.1, **options)
        for number, model in enumerate(models)
    ]
    for step in range(3):
        order = models if rank % 2 else models[::-1]  # autograd takes first what was made last
        torch.stack([loss_of(model, rank, step) for model in order]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for expected, model in zip(alone, models, strict=True):
        torch.testing.assert_close(bits(model), expected, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_generator_and_discriminator(rank: int, world_size: int) -> None:
    results = []
    for options in ({"reduce_bucket_size": 300}, {}):
        generator, discriminator = models = [net(1), net(2)]
        one, two = [ZeroOptimizer(m.parameters(), torch.optim.SGD, lr=0.1, **options) for m in models]
        for step in range(3):
            noise = torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank))
            discriminator(generator(noise).detach()).square().mean().backward()
            two.step()
            (-discriminator(generator(noise)).square().mean()).backward()
            one.step()
            two.zero_grad()
        results.append(bits(generator) + bits(discriminator))
    assert not list(different(*results))
