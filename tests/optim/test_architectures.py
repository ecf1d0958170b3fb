"""Families of models trained by every method: no element runs away, and the loss is that of the uncompressed run.

Where queries, keys and values have biases of their own the true gradient of the keys' is 0; gradients of queries and
keys grow a hundredfold when a model learns late what attention is for; rows of an embedding that are hardly ever met
have hardly any variance; a temperature is one element beside matrices.
"""

import pydoc_data.topics
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional

from hf_compressopt import GradientCompression, Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam, average_gradients
from hf_compressopt.kernels import messages
from tests.support.harness import on_ranks

STEPS, FREEZE = 160, 60
RATE, LAMB_RATE = 1e-3, 1e-2
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
Batch = dict[str, torch.Tensor]
Batches = Callable[[torch.Generator], Batch]


@cache
def text() -> torch.Tensor:
    return torch.frombuffer(bytearray("".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8).long()


def windows(generator: torch.Generator, examples: int = 8, length: int = 48) -> torch.Tensor:
    starts = torch.randint(0, len(text()) - length, (examples,), generator=generator)
    return torch.stack([text()[start : start + length] for start in starts.tolist()])


def bert() -> tuple[torch.nn.Module, Batches]:
    from transformers import BertConfig, BertForMaskedLM

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=257, intermediate_size=128, max_position_embeddings=48, **SHAPE, **dropout)

    def batch(generator: torch.Generator) -> Batch:
        tokens = windows(generator)
        hidden = torch.rand(tokens.shape, generator=generator) < 0.15
        return {"input_ids": tokens.masked_fill(hidden, 256), "labels": tokens.masked_fill(~hidden, -100)}

    return BertForMaskedLM(config), batch


def gpt() -> tuple[torch.nn.Module, Batches]:
    """A GPT-2 whose queries, keys and values have biases of their own."""
    from transformers import OPTConfig, OPTForCausalLM

    width = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    rest = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 48, "dropout": 0.0}

    def batch(generator: torch.Generator) -> Batch:
        tokens = windows(generator)
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

    return OPTForCausalLM(OPTConfig(vocab_size=256, **width, **rest)), batch


def vit() -> tuple[torch.nn.Module, Batches]:
    from transformers import ViTConfig, ViTForImageClassification

    pictures = {"image_size": 32, "patch_size": 8, "num_channels": 1, "num_labels": 16}
    model = ViTForImageClassification(ViTConfig(intermediate_size=128, **SHAPE, **pictures))
    kinds = torch.randn(16, 1, 32, 32, generator=torch.Generator().manual_seed(5))

    def batch(generator: torch.Generator) -> Batch:
        labels = torch.randint(0, 16, (16,), generator=generator)
        noise = torch.randn(16, 1, 32, 32, generator=generator)
        return {"pixel_values": 0.35 * kinds[labels] + 2 * noise, "labels": labels}

    return model, batch


class Words(torch.nn.Module):
    """The next word of three, of a language most of whose words are rare, with a temperature."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.mix = torch.nn.Embedding(words, 32), torch.nn.Linear(96, 64)
        self.norm, self.head = torch.nn.LayerNorm(64), torch.nn.Linear(64, words, bias=False)
        self.temperature = torch.nn.Parameter(torch.tensor(1.0))
        for weight in (self.words.weight, self.head.weight):
            torch.nn.init.normal_(weight, std=0.02)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(torch.relu(self.mix(self.words(input_ids).flatten(1))))
        return {"loss": functional.cross_entropy(self.head(x) * self.temperature.exp(), labels)}


def rare_words() -> tuple[torch.nn.Module, Batches]:
    words = 2048
    chances = 1 / torch.arange(1, words + 1).float() ** 1.1
    following = torch.randint(0, words, (words,), generator=torch.Generator().manual_seed(4))

    def batch(generator: torch.Generator) -> Batch:
        found = torch.multinomial(chances, 128 * 4, replacement=True, generator=generator).view(128, 4)
        known = torch.rand(128, generator=generator) < 0.8
        return {"input_ids": found[:, :3], "labels": torch.where(known, following[found[:, 0]] % 256, found[:, 3])}

    return Words(words), batch


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(width, 128), nn.Linear(128, 128), nn.Linear(128, 64)
        self.norm, self.scale = nn.LayerNorm(128), nn.Parameter(torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.mid(self.norm(torch.relu(self.up(x))) * self.scale))
        return functional.normalize(self.down(x), dim=-1)


class Towers(nn.Module):
    """Two views of a thing find each other among those of all ranks, by features that the loss gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tower(48), Tower(64)
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        features = [torch.cat(all_gather(tower)) for tower in (self.first(first), self.second(second))]
        logits = self.logit_scale.exp() * features[0] @ features[1].T
        right = torch.arange(len(logits))
        return {"loss": (functional.cross_entropy(logits, right) + functional.cross_entropy(logits.T, right)) / 2}


def clip() -> tuple[nn.Module, Batches]:
    views = [torch.randn(16, width, generator=torch.Generator().manual_seed(width)) / 4 for width in (48, 64)]

    def batch(generator: torch.Generator) -> Batch:
        things = torch.randn(32, 16, generator=generator)
        first, second = (torch.tanh(things @ view) for view in views)
        return {
            "first": first + 0.5 * torch.randn(first.shape, generator=generator),
            "second": second + 0.5 * torch.randn(second.shape, generator=generator),
        }

    return Towers(), batch


#: What compresses a method's messages, its options, and the uncompressed optimizer that it is compared with.
METHODS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], str]] = {
    "int4": (torch.optim.AdamW, {}, "AdamW"),
    "OnebitAdam": (OnebitAdam, {"freeze_step": FREEZE}, "AdamW"),
    "ZeroOneAdam": (ZeroOneAdam, {"var_freeze_step": FREEZE}, "AdamW"),
    "OnebitLamb": (OnebitLamb, {"freeze_step": FREEZE}, "Lamb"),
    "AdamW": (torch.optim.AdamW, {}, ""),
    "Lamb": (Lamb, {}, ""),
}
#: Above what share of that one's loss a method's loss is a defect: seeds differ by some per cent.
MOST = {"int4": 1.01, "OnebitAdam": 1.02, "ZeroOneAdam": 1.03, "OnebitLamb": 1.03}
FAMILIES = {"BERT": bert, "GPT": gpt, "ViT": vit, "rare words": rare_words, "CLIP": clip}


def train(rank: int, family: str, method: str, autocast: bool, seed: int = 0) -> tuple[float, float]:
    """The largest change of an element at any time, and the mean loss of the last steps on all ranks."""
    torch.manual_seed(seed)
    model, batch = FAMILIES[family]()
    kind, options, _ = METHODS[method]
    params = [param for param in model.parameters() if param.requires_grad]
    start = [param.detach().clone() for param in params]
    rate = LAMB_RATE if "Lamb" in method else RATE
    compressed = {"total_steps": STEPS, "max_grad_norm": 1.0} if options else {}
    optimizer = kind(params, lr=rate, weight_decay=0.01, **options, **compressed)
    gradients = GradientCompression(model.named_parameters(), "int4") if method == "int4" else None
    moved, losses = torch.zeros(()), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1_000_000 * seed + 1000 * step + rank)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch(generator))["loss"]
        loss.backward()
        if gradients is not None:
            gradients.average_gradients()
        else:
            average_gradients(optimizer if compressed else params)
        if not compressed:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        changes = [(param.detach() - old).abs().max() for param, old in zip(params, start, strict=True)]
        moved = torch.stack([moved, *changes]).max()
        losses.append(loss.detach())
    mean = torch.stack(losses[-40:]).mean()
    dist.all_reduce(mean)
    return float(moved), float(mean) / dist.get_world_size()


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "autocast"), [*((family, False) for family in FAMILIES), ("BERT", True)], ids=lambda value: str(value)
)
@on_ranks(2, timeout=300)
def test_every_method_trains_every_family_of_models(rank: int, world_size: int, family: str, autocast: bool) -> None:
    messages.OWN_BLOCKS = 2  # as it is in the package
    found = {method: train(rank, family, method, autocast) for method in METHODS}
    for method, (_, _, other) in METHODS.items():
        if other:
            (moved, loss), (moved_there, loss_there) = found[method], found[other]
            context = f"{family}, {method}: moved and loss {found[method]}, {other} {found[other]}"
            assert moved < 20 * moved_there, context
            assert loss < MOST[method] * loss_there, context


SEEDS = (0, 1, 2)


@pytest.mark.full
@on_ranks(2, timeout=300)
def test_the_loss_of_a_bert_ends_within_a_percent_of_adamws(rank: int, world_size: int) -> None:
    """On the average of three seeds, whose biases of queries, keys and values are parameters of their own.

    Measured, by seed: OnebitAdam +0.74, +0.25, +0.57 %, ZeroOneAdam +0.80, +0.28, +0.68 %; a fourth one +0.28, +0.31 %.
    """
    messages.OWN_BLOCKS = 2  # as it is in the package
    methods = ("AdamW", "OnebitAdam", "ZeroOneAdam")
    losses = {method: [train(rank, "BERT", method, False, seed)[1] for seed in SEEDS] for method in methods}
    for method in methods[1:]:
        shares = [loss / plain for loss, plain in zip(losses[method], losses["AdamW"], strict=True)]
        assert sum(shares) / len(SEEDS) < 1.01, (method, shares)
