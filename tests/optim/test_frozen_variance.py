"""What a frozen variance and the scales of signs do to elements whose gradients differ from their neighbours'."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from hf_compressopt import Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam, average_gradients
from hf_compressopt.kernels import messages
from tests.support.forms import in_form
from tests.support.harness import on_ranks, same_on_all_ranks

STEPS, FREEZE = 90, 30
ZERO_ONE = {"var_freeze_step": FREEZE, "var_update_scaler": 8, "local_step_scaler": 15, "local_step_clipper": 4}


class Attention(torch.nn.Module):
    """Masked tokens, by an attention whose key bias has a true gradient of 0, and an output with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(41, 24), torch.nn.Embedding(16, 24)
        self.query, self.key, self.value = (torch.nn.Linear(24, 24) for _ in range(3))
        self.norm, self.head = torch.nn.LayerNorm(24), torch.nn.Linear(24, 40)
        self.temperature = torch.nn.Parameter(torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        x = x + functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head(self.norm(x)) * self.temperature.exp()


def train(rank: int, kind: type[torch.optim.Optimizer], options: dict, autocast: bool = False) -> tuple[float, float]:
    """The largest change of an element at any time, and the mean loss of the last steps."""
    torch.manual_seed(0)
    model = Attention()
    for linear in (model.query, model.key):
        torch.nn.init.normal_(linear.weight, std=0.02)
    torch.nn.init.normal_(model.tokens.weight, std=0.02)
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = kind(model.parameters(), **options)
    moved, losses = 0.0, []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        text = torch.randint(0, 20, (16, 8), generator=generator).repeat(1, 2) + 20 * (torch.arange(16) // 8)
        hidden = torch.rand(text.shape, generator=generator) < 0.2
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(text.masked_fill(hidden, 40))
        loss = functional.cross_entropy(logits.float()[hidden], text[hidden])
        loss.backward()
        average_gradients(optimizer if hasattr(optimizer, "plan") else list(model.parameters()))
        optimizer.step()
        changes = [(param.detach() - old).abs().max() for param, old in zip(model.parameters(), start, strict=True)]
        moved = max(moved, float(torch.stack(changes).max()))
        losses.append(float(loss.detach()))
    return moved, sum(losses[-10:]) / 10


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.full)])
@on_ranks(2)
def test_no_element_moves_far_further_than_without_compression(rank: int, world_size: int, autocast: bool) -> None:
    """A key bias's gradient is rounding noise, and those of queries and keys grow when the attention learns."""
    messages.OWN_BLOCKS = 2  # as it is in the package
    adam, lamb = {"lr": 1e-2, "weight_decay": 0.0}, {"lr": 3e-2}
    plain = {"adam": train(rank, torch.optim.AdamW, adam, autocast), "lamb": train(rank, Lamb, lamb, autocast)}
    runs = [
        (kind, plain["adam"], {**adam, **schedule, **options})
        for kind, schedule, options in (
            (OnebitAdam, {"freeze_step": FREEZE}, {}),
            (in_form(OnebitAdam, "float32"), {"freeze_step": FREEZE}, {"warmup_bits": 32}),
            (OnebitAdam, {"freeze_step": FREEZE}, {"zero_stage": 1}),
            (ZeroOneAdam, ZERO_ONE, {}),
        )
    ]
    runs.append((OnebitLamb, plain["lamb"], {**lamb, "freeze_step": FREEZE}))
    for kind, (moved, loss), options in runs:
        found = train(rank, kind, options, autocast)
        context = f"{kind.__name__}, {options}: moved and loss {found}, without compression {moved, loss}"
        assert found[0] < 20 * moved and found[1] < 1.01 * loss, context


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.full)])
@on_ranks()
def test_the_variance_follows_gradients_that_grow_and_shrink_after_the_switch(rank: int, world_size: int) -> None:
    """By AdamW's own second moments, in 4 bits and codes; a tensor that is not used keeps its variance.

    The second vector travels as signs, the first one in full.
    """
    messages.OWN_BLOCKS = 2  # as it is in the package
    sizes = (64, 128), (40, 40), (64, 128), (300,), (9000,)

    def growth(index: int, step: int) -> float:
        return (1.0, 30.0, 0.1, 5.0, 8.0, 1.0)[index] if step > 30 else 1.0

    found: dict[str, list[torch.Tensor]] = {}
    often = {"freeze_step": 30, "variance_interval": 2}
    intervals = {"var_update_scaler": 30, "local_step_scaler": 25, "local_step_clipper": 2}
    kinds = {
        "adamw": (torch.optim.AdamW, {}),
        "frozen": (OnebitAdam, {"freeze_step": 30, "variance_interval": 0}),
        "compact": (OnebitAdam, often),
        "released": (OnebitAdam, {**often, "zero_stage": 2}),
        "float32": (in_form(OnebitAdam, "float32"), often),
        "0/1": (ZeroOneAdam, {**often, **intervals, "variance_interval": 1}),
    }
    for name, (kind, options) in kinds.items():
        params = [torch.nn.Parameter(torch.zeros(size)) for size in (*sizes, (9, 32))]
        optimizer = kind(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, **options)
        for step in range(1, 151):
            generator = torch.Generator().manual_seed(10 * step + rank)
            noises = [growth(i, step) * torch.randn(p.shape, generator=generator) for i, p in enumerate(params)]
            used = list(zip(params, noises, strict=True))[: None if step <= 30 else -1]
            sum(((param * noise).sum() for param, noise in used), torch.zeros(())).backward()
            average_gradients(optimizer if hasattr(optimizer, "plan") else params)
            optimizer.step()
            optimizer.zero_grad()
        found[name] = [optimizer.state[param]["exp_avg_sq"].clone() for param in params]
        assert same_on_all_ranks(found[name]), name
    for name in ("compact", "released", "float32", "0/1"):
        for index, size in enumerate(sizes):
            means = [float(found[each][index].mean()) for each in (name, "adamw")]
            assert 0.7 < means[0] / means[1] < 1.4, f"{name}, tensor {index} of {size}: {means}"
        assert float(found[name][5].mean()) == pytest.approx(float(found["frozen"][5].mean()), rel=0.1), name
    assert float(found["frozen"][1].mean()) < 0.01 * float(found["adamw"][1].mean()), "the problem must need refreshes"


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("kind", [OnebitAdam, ZeroOneAdam])
@on_ranks(2)
def test_the_variance_stays_adamws_after_an_early_switch(
    rank: int, world_size: int, kind: type[OnebitAdam | ZeroOneAdam], corrected: bool
) -> None:
    """Gradients last as long as an interval, so that a refresh sees all that AdamW does, whose memory is far longer."""
    freeze, every = 80, 8
    params = [torch.nn.Parameter(torch.zeros(9, 128)) for _ in range(2)]
    options = {"bias_correction": corrected, "freeze_step": freeze, "variance_interval": every, "variance_floor": 0.0}
    if kind is ZeroOneAdam:
        options |= {"var_update_scaler": freeze, "local_step_clipper": 1}
    ours = in_form(kind, "float32")([params[0]], lr=1e-3, betas=(0.9, 0.999), warmup_bits=32, **options)
    adamw = torch.optim.AdamW([params[1]], lr=1e-3, betas=(0.9, 0.999))
    for step in range(1, 2 * freeze + 1):
        generator = torch.Generator().manual_seed((step - 1) // every)
        mean = (10.0 if step > freeze else 1.0) * torch.randn(params[0].shape, generator=generator)
        params[0].grad, params[1].grad = mean * (0.5 + rank), mean
        average_gradients(ours)
        for optimizer in (ours, adamw):
            optimizer.step()
        if step > freeze and step % every == 0:
            expected = adamw.state[params[1]]["exp_avg_sq"] / (1 - 0.999**step if corrected else 1.0)
            torch.testing.assert_close(ours.state[params[0]]["exp_avg_sq"], expected, rtol=1e-4, atol=0.0)


@on_ranks(2)
def test_a_refresh_averages_vectors_apart_from_matrices_that_share_their_blocks(rank: int, world_size: int) -> None:
    """A vector with gradients 1,000 times larger lies in the last block of integers, with 120 elements of a matrix."""
    params = [torch.nn.Parameter(torch.zeros(size)) for size in ((4, 128), (8,))]
    options = {"freeze_step": 60, "variance_interval": 4, "variance_floor": 1e-4, "scale_block": None}
    optimizer = OnebitAdam(params, lr=1e-3, betas=(0.9, 0.98), **options)
    for step in range(1, 201):
        generator = torch.Generator().manual_seed(10 * step + rank)
        growth = 5.0 if step > 60 else 1.0
        for param, size in zip(params, (1.0, 1000.0), strict=True):
            param.grad = growth * size * torch.randn(param.shape, generator=generator)
        average_gradients(optimizer)
        optimizer.step()
    matrix, vector = (optimizer.state[param]["exp_avg_sq"].flatten() for param in params)
    expected = 25 / world_size  # of the mean of gradients that are independent
    for name, found in (("alone", matrix[:256]), ("beside the vector", matrix[-120:]), ("vector", vector * 1e-6)):
        assert 0.6 < float(found.mean()) / expected < 1.6, f"{name}: {float(found.mean())}, expected {expected}"


@on_ranks(2)
def test_matrices_that_share_a_block_of_signs_learn_at_their_ends(rank: int, world_size: int) -> None:
    """The gradients of one are a thousand times as large as those of the other, whose begin gets their scale."""
    messages.OWN_BLOCKS = 2  # as it is in the package
    shape, block, rate = (70, 130), 4096, 2e-2
    targets = [torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number in range(2)]

    def train(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[torch.Tensor, float]:
        """The squared distances from the targets at the end, and the largest change of an element."""
        params = [torch.nn.Parameter(torch.zeros(shape)) for _ in targets]
        optimizer = kind(params, lr=rate, **options)
        moved = 0.0
        for step in range(160):
            generator = torch.Generator().manual_seed(10 * step + rank)
            for param, target, size in zip(params, targets, (1.0, 1e-3), strict=True):
                noise = 0.5 * torch.randn(shape, generator=generator)
                param.grad = size * (param.detach() - target + noise)
            average_gradients(optimizer if hasattr(optimizer, "plan") else params)
            optimizer.step()
            moved = max(moved, *(float(param.detach().abs().max()) for param in params))
        distances = [(param.detach() - target).square() for param, target in zip(params, targets, strict=True)]
        return torch.cat([distance.flatten() for distance in distances]), moved

    begin, end = 2 * block, 3 * block  # the block that both have a part of
    assert begin < targets[0].numel() < end
    _, moved_without = train(torch.optim.AdamW, weight_decay=0.0)
    for kind, options in (
        (OnebitAdam, {"freeze_step": 40}),
        (OnebitAdam, {"freeze_step": 40, "zero_stage": 1}),
        (ZeroOneAdam, {"var_freeze_step": 40}),
    ):
        distances, moved = train(kind, **options)
        beside = torch.cat([distances[:begin], distances[end:]]).mean()
        context = f"{kind.__name__}, {options}: {float(distances[begin:end].mean())}, beside {float(beside)}, {moved}"
        assert float(distances[begin:end].mean()) < 1.5 * float(beside) and moved < 1.2 * moved_without, context
