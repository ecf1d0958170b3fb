"""Parameters that others write, move or freeze after their ZeroOptimizer was made."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_compressopt import FusedAdam, ZeroOptimizer, load_state, save_state
from tests.support.harness import on_ranks
from tests.support.zero_runs import (
    INT4,
    Case,
    Net,
    bits,
    different,
    fresh,
    give_averages,
    loss_of,
    run_steps,
    train_zero,
)


def train_images(rank: int, layout: torch.memory_format | None, after: int) -> tuple[nn.Module, ZeroOptimizer]:
    """Four steps; the model changes its memory format after some of them."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 5, 3))
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, reduce_bucket_size=100)
    for step in range(4):
        if step == after and layout is not None:
            model.to(memory_format=layout)
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer


@on_ranks(2)
def test_a_model_in_another_memory_format_trains_on(rank: int, world_size: int, tmp_path: Path) -> None:
    expected, plain = train_images(rank, None, 0)
    for after in (0, 2):
        model, optimizer = train_images(rank, torch.channels_last, after)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(bits(model), bits(expected), rtol=1e-4, atol=1e-5)
        save_state(plain, f"{tmp_path}/contiguous")  # has no copies of the weights, and needs none
        load_state(optimizer, f"{tmp_path}/contiguous")
        model.to(memory_format=torch.contiguous_format)
        model(torch.ones(1, 3, 8, 8)).sum().backward()
        before = bits(model)
        optimizer.step()
        assert all(list(different([b], [a])) for b, a in zip(before, bits(model), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_writes_through_data_are_taken_over(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Clamp as Wasserstein GANs do: the written values count, and all others keep their master's digits."""
    results = []
    for partitioned in (True, False):
        model = Net(dtype)
        params = [p for p in model.parameters() if p.requires_grad]
        masters = [nn.Parameter(p.detach().float().clone(memory_format=torch.contiguous_format)) for p in params]
        optimizer: Any = torch.optim.AdamW(masters, lr=1e-2)
        if partitioned:
            optimizer = ZeroOptimizer(params, torch.optim.AdamW, lr=1e-2, reduce_bucket_size=300)
        for step in range(4):
            loss = loss_of(model, rank, step)
            if partitioned:
                loss.backward()
            else:
                give_averages(loss, params, masters)
            optimizer.step()
            for p, master in zip(params, masters, strict=True):
                if not partitioned:
                    p.data.copy_(master.data)
                before = p.data.clone()
                p.data.clamp_(-0.05, 0.05)
                master.data.copy_(torch.where(p.data == before, master.data, p.data.float()))
        results.append(bits(model))
    assert not list(different(*results))


@pytest.mark.parametrize("options", [INT4, {"param_compression": "int8"}, {}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_values_written_before_a_save_are_those_that_come_back(
    rank: int, world_size: int, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    case = Case(options={"reduce_bucket_size": 300, **options}, dtype=dtype)
    model, optimizer = train_zero(rank, case)
    for p in model.parameters():
        p.data.mul_(0.5)
    save_state(optimizer, tmp_path)
    expected, packed = bits(model), copy.deepcopy(optimizer.state_dict())
    written = {name: value.clone() for name, value in model.state_dict().items()}
    run_steps(rank, case, model, optimizer, range(3, 5))
    for load in (lambda o: load_state(o, tmp_path), lambda o: o.load_state_dict(packed)):
        resumed, other = fresh(case)
        resumed.load_state_dict(written)
        load(other)
        assert not list(different(bits(resumed), expected))
        run_steps(rank, case, resumed, other, range(3, 5))
        assert not list(different(bits(model), bits(resumed)))


def laid_out(wide: bool) -> dict[str, torch.Tensor]:
    """Values by their layout in memory: with gaps, in another order, negated lazily, off a word, without elements."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "transposed": draw(20, 30).t(),
        "channels_last": draw(4, 3, 5, 5).contiguous(memory_format=torch.channels_last),
        "column": draw(40, 7)[:, :1],
        "columns": draw(40, 7)[:, 2:5],
        "column16": draw(40, 7, dtype=torch.bfloat16)[:, :1],
        "one": draw(2)[::2],
        "one16": draw(2, dtype=torch.bfloat16)[::2],
        **({"one64": draw(2, dtype=torch.float64)[::2]} if wide else {}),
        "every second": draw(70)[::2],
        "off a word": draw(601)[1:].view(30, 20),
        "negated": torch.complex(draw(30, 20), draw(30, 20)).conj().imag,
        "empty": draw(0, 4),
    }


def train_laid_out(rank: int, options: dict[str, Any], plain: bool, folder: Path) -> list[torch.Tensor]:
    values = laid_out(wide="grad_compression" not in options).items()
    params = {name: nn.Parameter(v.resolve_neg().clone().contiguous() if plain else v) for name, v in values}
    optimizer = ZeroOptimizer(params.items(), FusedAdam, lr=0.01, **options)
    for step in range(3):
        for number, p in enumerate(params.values()):
            seed = torch.Generator().manual_seed(100 * step + 10 * rank + number)
            grad = torch.randn(p.shape, generator=seed).to(p.dtype)
            if not plain:
                turned = (torch._neg_view(-grad), grad.mT.contiguous().mT if grad.dim() > 1 else grad)
                grad = turned[(step + number) % 2]
            if number == step:
                grad = torch.ones((1,) * p.dim(), dtype=p.dtype).expand(p.shape)
            p.grad = grad
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        save_state(optimizer, folder)
        load_state(optimizer, folder)
    return [p.detach().resolve_neg().contiguous() for p in params.values()]


@pytest.mark.parametrize("options", [{}, {**INT4, "reduce_bucket_size": 256}, {"stage": 1}], ids=str)
@on_ranks(2)
def test_layouts_in_memory_change_no_bit(rank: int, world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    found, expected = (train_laid_out(rank, options, plain, tmp_path) for plain in (False, True))
    assert not list(different(found, expected))


@on_ranks(2)
def test_replaced_weights_stay(rank: int, world_size: int) -> None:
    """Copy back an average of weights: a whole new tensor, or the memory of one vector."""
    for dtype in (torch.float32, torch.bfloat16):
        model = Net(dtype)
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)
        for write in (
            lambda p: p.data.fill_(0.25),
            lambda p: setattr(p, "data", torch.full_like(p.data, 0.5)),
            lambda p: p.data.view_as(p).copy_(torch.full_like(p.data, 0.75)),
        ):
            loss_of(model, rank, 0).backward()
            for p in model.parameters():
                write(p)
            written = bits(model)
            optimizer.step()
            assert not list(different(written, bits(model)))


@on_ranks(1, 2)
def test_values_that_change_places_are_taken_over(rank: int, world_size: int) -> None:
    """A parameter of several rows of the sums by which writes are noticed, beside elements that fill no row."""
    odd = nn.Parameter(torch.linspace(-1, 1, 3).bfloat16())  # so that the parts of the next begin within a word
    large = nn.Parameter(torch.linspace(-1, 1, 301 * 331).bfloat16().view(301, 331))
    optimizer = ZeroOptimizer([odd, large], torch.optim.SGD, lr=1e-3, communication_data_type="fp32")

    def step(factor: float) -> None:
        for p in (odd, large):
            p.grad = torch.full_like(p, factor)
        optimizer.step()

    step(1.0)
    digits = optimizer.get_full_param(large)
    assert not torch.equal(digits, large.detach().float())
    step(0.0)
    assert torch.equal(digits, optimizer.get_full_param(large))
    for write in (
        lambda t: t.__setitem__([0, 150], t[[150, 0]]),
        lambda t: t.__setitem__((slice(None), [5, 9]), t[:, [9, 5]]),
        lambda t: t.copy_(-t),
        lambda t: t.copy_(t.flip(0)),
        lambda t: t[234].__setitem__(56, 7.0),
    ):
        step(0.0)
        before = large.detach().clone()
        write(large.data)
        written = large.detach().clone()
        step(0.0)
        assert torch.equal(large.detach(), written) and not torch.equal(written, before)


@on_ranks(2)
def test_a_model_that_changes_its_dtype_keeps_masters(rank: int, world_size: int) -> None:
    """A model that becomes bfloat16 keeps float32 masters from then on, as if it had been made so."""
    results = []
    for late in (True, False):
        model = nn.Linear(40, 30)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape).bfloat16())
        if not late:
            model.bfloat16()
        optimizer = ZeroOptimizer(
            model.parameters(), torch.optim.SGD, lr=1e-3, communication_data_type="fp32", reduce_bucket_size=400
        )
        model.bfloat16()
        for step in range(20):
            model(torch.full((2, 40), 0.1 + rank + step / 8, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
        results.append([optimizer.get_full_param(p) for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=1e-3)
    assert not any(torch.equal(value, value.bfloat16().float()) for value in results[0])


@on_ranks(1)
def test_states_of_groups_on_several_devices_come_back_to_their_own(rank: int, world_size: int) -> None:
    here = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    there = nn.Parameter(torch.ones(5, dtype=torch.bfloat16, device="meta"))
    optimizer = ZeroOptimizer([{"params": [here]}, {"params": [there]}], torch.optim.SGD, lr=1.0)
    optimizer.reload_states()
    assert {part.tensor.device.type for part in optimizer.partition.parts()} == {"cpu", "meta"}


@on_ranks(2)
def test_parameters_that_are_unfrozen_later_are_trained(rank: int, world_size: int, tmp_path: Path) -> None:
    """Gradual unfreezing: the head first, then all; beside the plain optimizer on averaged gradients."""
    results = []
    for partitioned in (True, False):
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(20, 31), nn.Tanh(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 7))
        for layer in model[:3]:
            layer.requires_grad_(False)
        named: Any = list(model.named_parameters())
        optimizer: Any = (
            ZeroOptimizer(named, torch.optim.AdamW, lr=1e-2, reduce_bucket_size=300)
            if partitioned
            else torch.optim.AdamW(named, lr=1e-2)
        )
        for step in range(6):
            if step in (2, 4):
                model[4 - step].requires_grad_(True)
            trainable = [p for p in model.parameters() if p.requires_grad]
            generator = torch.Generator().manual_seed(100 * step + rank)
            first, second = (model(torch.randn(4, 20, generator=generator)).square().mean() for _ in range(2))
            if partitioned:
                first.backward()
                second.backward()
            else:
                give_averages(first + second, trainable)
            optimizer.step()
            optimizer.zero_grad()
        results.append(bits(model))
        if partitioned:
            assert [p.shape for p in optimizer.trainable_parameters] == [p.shape for p in model.parameters()]
            save_state(optimizer, tmp_path)
            again = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2)
            load_state(again, tmp_path)
            assert float(again.get_full_state("0.weight", "step")) == 2
            assert float(again.get_full_state("4.weight", "step")) == 6
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_parameters_that_are_frozen_later_stay(rank: int, world_size: int) -> None:
    model, optimizer = train_zero(rank, Case("sgd", steps=2))
    model.first.requires_grad_(False)
    before = model.first.weight.detach().clone()
    run_steps(rank, Case("sgd"), model, optimizer, range(2, 4))
    assert torch.equal(before, model.first.weight)
