"""Several ZeroOptimizers in one process: of the same parameters, and of one backward."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_compressopt import FusedAdam, GradientCompression, OnebitAdam, ZeroOptimizer, average_gradients
from tests.support.harness import on_ranks
from tests.support.logs import log_lines
from tests.support.zero_runs import bits, different


def net(seed: int, layers: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(24, 24), nn.Tanh())])


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def train(rank: int, model: nn.Module, optimizer: Any) -> list[Tensor]:
    for step in range(3):
        loss_of(model, rank, step).backward()
        if isinstance(optimizer, Compressed):
            optimizer.compression.average_gradients()
        elif isinstance(optimizer, OnebitAdam) and optimizer.zero_stage < 2:
            average_gradients(optimizer)
        optimizer.step()
    return bits(model)


@on_ranks(2)
def test_a_second_optimizer_takes_the_place_of_the_first(rank: int, world_size: int) -> None:
    """Make the optimizer again, as in a notebook whose last exception keeps the old one alive; on rank 1 it is dead."""
    options: dict[str, Any] = {"lr": 1e-2, "reduce_bucket_size": 300}
    expected = train(rank, (model := net(1)), ZeroOptimizer(model.parameters(), torch.optim.AdamW, **options))
    model = net(1)
    with log_lines() as lines:
        kept = [ZeroOptimizer(model.parameters(), torch.optim.AdamW, **options)]
        if rank == 1:
            kept.clear()
        found = train(rank, model, ZeroOptimizer(model.parameters(), torch.optim.AdamW, **options))
    assert not list(different(expected, found))
    assert any("gets no more gradients" in line for line in lines) == (rank == 0)
    for old in kept:
        with pytest.raises(RuntimeError, match="use the newer one"):
            old.step()


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
    """Make one optimizer after another of the same parameters, as in a notebook; the first one stays alive."""
    for kind, make in KINDS.items():
        alone = net(1)
        expected = train(rank, alone, make([*alone.parameters()]))
        model = net(1)
        params = [*model.parameters()]
        old = KINDS[first](params)
        loss_of(model, rank, 0).backward()
        old.step()
        model.load_state_dict(net(1).state_dict())
        with log_lines() as lines:
            new = make(params)
        assert any("takes over" in line for line in lines) == (kind not in ORDINARY), (kind, lines)
        if kind in ORDINARY:
            loss_of(model, rank, 0).backward()
            with pytest.raises(RuntimeError, match=rf"{kind}.step\(\) moved 8 .*run backward again"):
                new.step()
            assert not list(different(bits(model), bits(net(1))))
        found = train(rank, model, new)
        assert not list(different(expected, found)), f"{kind} after {first}"
        with pytest.raises(RuntimeError, match="gets no gradients any more"):
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


@pytest.mark.parametrize("kind", TAKERS)
def test_a_dropped_optimizer_leaves_no_hook(kind: str) -> None:
    params = [*net(1).parameters()]
    for _ in range(3):
        KINDS[kind](params)
        gc.collect()
        assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params)


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
