"""The transformer: embedding, blocks, norm, head. Llama 3 by its fields.

Written as if for one device and one precision: sharding, compilation and autocast are applied from
outside. Blocks are called one by one with everything they need as arguments, so that each can be
compiled, recomputed or sharded by itself.

Shapes: B batch, T time, C width, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundling.config import ConfigError, ModelConfig
from foundling.model.attention import Attention, Cache, document_mask
from foundling.model.loss import cross_entropy_sum
from foundling.model.rope import Rope, Rotation


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(
        self, x: Tensor, rotation: Rotation, mask: Tensor | None, cache: Cache | None = None
    ) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rotation, mask, cache)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """Tokens to logits, to a summed loss, or one decode step further."""

    max_positions: int | None = None
    """Longest context that the model has positions for; rotary ones have no end."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ConfigError(
                f"model.vocab_size is {config.vocab_size}, and a model is built with the"
                " tokenizer's size filled in; give the size or a tokenizer."
            )
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.rope = Rope(config.head_width, config.rope_theta)

    @property
    def head_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, [V, C]."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        return F.linear(self.hidden(tokens, documents), self.head_weight)

    def loss(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(summed cross-entropy, number of counted targets); IGNORE is not counted."""
        hidden = self.hidden(tokens, documents)
        return cross_entropy_sum(hidden.flatten(0, 1), self.head_weight, targets.flatten())

    def decode(self, tokens: Tensor, cache: Cache, counts: Sequence[int] | None = None) -> Tensor:
        """Logits [B, V] after the last real one of tokens [B, T], which go into the cache.

        `counts[r]` tokens of row r are real and the rest is padding on the right; all by default.
        A count of 0 leaves the row as it was, and its logits mean nothing.
        """
        hidden = self.hidden(tokens, cache=cache)
        if counts is None:
            counts = [tokens.shape[1]] * len(tokens)
        cache.advance(counts)
        last = torch.tensor(counts, device=tokens.device).sub(1).clamp(min=0)
        rows = torch.arange(len(tokens), device=tokens.device)
        return F.linear(hidden[rows, last], self.head_weight)

    def hidden(
        self, tokens: Tensor, documents: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Normed hidden states [B, T, C] before the head."""
        x = self.embed(tokens)
        width = tokens.shape[1]
        if cache is None:
            rotation = self.rope.upto(width, tokens.device, x.dtype)
            mask = None if documents is None else document_mask(documents)
        else:
            rotation = self.rope.at(cache.positions(width), cache.reach(width), x.dtype)
            mask = cache.mask(width)
        for layer in self.layers:
            x = layer(x, rotation, mask, cache)
        out: Tensor = self.norm(x)
        return out
