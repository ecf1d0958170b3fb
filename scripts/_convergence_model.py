"""The models of compare_convergence.py: GPT-2, and a smaller decoder of a few operators."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and with a residual connection, no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Args and returns: [examples, tokens, width]."""
        examples, tokens, width = x.shape
        parts = self.attend(self.before_attention(x)).view(examples, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [examples, heads, tokens, width of a head]
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(examples, tokens, width))
        return x + self.narrow(functional.gelu(self.widen(self.before_feed(x))))


class SmallDecoder(nn.Module):
    """A causal language model that takes few operators, for many runs on a slow machine."""

    def __init__(self, vocabulary: int, tokens: int, width: int, heads: int, layers: int, *, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of the tokens that have a label; both arguments [examples, tokens]."""
        x = functional.dropout(self.words(input_ids) + self.places.weight, 0.1, self.training)
        logits = self.head(self.norm(self.blocks(x)))[:, :-1]
        return functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
