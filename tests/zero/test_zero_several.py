"""Several ZeroOptimizers in one process: of the same parameters, and of one backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_compressopt import ZeroOptimizer
from tests.support.harness import run_ranks
from tests.support.logs import log_lines
from tests.support.zero_runs import bits, different


def net(seed: int, layers: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(24, 24), nn.Tanh())])


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def train(rank: int, model: nn.Module, optimizer: ZeroOptimizer) -> list[Tensor]:
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.step()
    return bits(model)


def made_again(rank: int, world_size: int) -> None:
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
    assert any("get no more gradients" in line for line in lines) == (rank == 0)
    for old in kept:
        with pytest.raises(RuntimeError, match="use the newer one"):
            old.step()


def test_a_second_optimizer_takes_the_place_of_the_first() -> None:
    run_ranks(2, made_again)


def shared_graph(rank: int, world_size: int, options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("options", [{"reduce_bucket_size": 600}, {}, {"overlap_comm": False}], ids=str)
def test_two_optimizers_in_one_backward_do_not_mix_their_gradients(options: dict[str, Any]) -> None:
    run_ranks(2, shared_graph, options)


def adversaries(rank: int, world_size: int) -> None:
    """Generator and discriminator, as GANs train them: one after another, with a graph through both."""
    models = [net(1), net(2)]
    optimizers = [ZeroOptimizer(m.parameters(), torch.optim.SGD, lr=0.1, reduce_bucket_size=300) for m in models]
    twins = [net(1), net(2)]
    others = [ZeroOptimizer(m.parameters(), torch.optim.SGD, lr=0.1) for m in twins]
    for made, (generator, discriminator) in ((optimizers, models), (others, twins)):
        for step in range(3):
            noise = torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank))
            discriminator(generator(noise).detach()).square().mean().backward()
            made[1].step()
            (-discriminator(generator(noise)).square().mean()).backward()
            made[0].step()
            made[1].zero_grad()
    for model, twin in zip(models, twins, strict=True):
        assert not list(different(bits(model), bits(twin)))


def test_generator_and_discriminator() -> None:
    run_ranks(2, adversaries)
