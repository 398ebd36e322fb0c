"""The transformer: embedding, blocks, norm, head. Llama, Qwen, GPT and the depth recipe are values
of its fields; what a model does not have is None and costs a comparison.

Written as if for one device and one precision: sharding, compilation and autocast are applied from
outside. Blocks are called one by one with everything they need as arguments, so that each can be
compiled, recomputed or sharded by itself.

Shapes: B batch, T time, C width, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.model.attention import Attention, Cache, document_starts
from foundling.model.kernels.attention_backends import TORCH, Kernel, MaskSpec, without_gradients
from foundling.model.layers import Embedding, Rope, Rotation, make_norm
from foundling.model.loss import SCORE_LOGITS, Kind, cap, chunks, cross_entropy_sum
from foundling.model.mlp import FeedForward


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0])) if config.residual_scales else None
        self.attn_norm = make_norm(config, config.dim)
        self.attn = Attention(config, layer)
        self.ffn_norm = make_norm(config, config.dim)
        self.ffn = FeedForward(config)
        self.dropout = config.dropout

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Any,
        cache: Cache | None = None,
        start: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """One layer further; `start` [B, T, C] is what the first layer began with and `values`
        [B, T, K x D] this layer's value embedding, where the config has them."""
        x = self._mixed(x, start)
        x = x + self._drop(self.attn(self.attn_norm(x), rotation, mask, cache, values))
        return self.feed(x)

    def fill(
        self,
        x: Tensor,
        rotation: Rotation | None,
        cache: Cache,
        start: Tensor | None,
        values: Tensor | None,
    ) -> None:
        """Only what later positions see, into the cache."""
        x = self.attn_norm(self._mixed(x, start))
        cache.extend(self.attn.layer, *self.attn.keys_and_values(x, rotation, values))

    def _mixed(self, x: Tensor, start: Tensor | None) -> Tensor:
        if self.mix is None or start is None:
            return x
        return self.mix[0] * x + self.mix[1] * start

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward half, which recompute can make again by itself."""
        out: Tensor = x + self._drop(self.ffn(self.ffn_norm(x)))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Transformer(nn.Module):
    """Tokens to logits, to a summed loss, or one decode step further."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ConfigError(
                f"model.vocab_size is {config.vocab_size}, and a model is built with the"
                " tokenizer's size filled in; give the size or a tokenizer."
            )
        self.config = config
        self.max_positions: int | None = config.max_positions or None
        """Longest context that the model has positions for; rotary ones have no end."""
        self.masked_kernel: Kernel = TORCH
        self.is_compiled = False
        self.has_graphs = False
        """Whether blocks are launched as CUDA graphs, whose memory the next launch overwrites."""
        self.is_one_graph = False
        """Whether all blocks are one graph, which lookups with kernels of their own would tear."""
        self.z_loss = 0.0
        """Weight of the squared log-sum of the logits in the training loss."""
        self.head_float8: Kind | None = None
        """How the training loss's logits are made of float8 numbers, where they are."""
        self.embed = Embedding(config.vocab_size, config.dim)
        self.rope: Rope | None = None
        self.positions: nn.Embedding | None = None
        if config.positions == "rotary":
            self.rope = Rope(config)
        else:
            self.positions = nn.Embedding(config.max_positions, config.dim)
        self.embed_norm = make_norm(config, config.dim) if config.embed_norm else None
        kv_width = config.num_kv_heads * config.head_width
        self.value_embeds = nn.ModuleDict(
            {str(layer): Embedding(config.vocab_size, kv_width) for layer in config.value_layers}
        )
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = make_norm(config, config.dim)
        self.head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def use_kernels(self, kernel: Kernel, masked: Kernel, *, fused_feed: bool = False) -> None:
        """Attend with `kernel`, and with `masked` where documents or windows need a mask; with
        `fused_feed`, squared ReLUs are made by their products while training."""
        self.masked_kernel = masked
        for module in self.modules():
            if isinstance(module, Attention):
                module.kernel, module.masked_kernel = kernel, masked
            if isinstance(module, FeedForward):
                module.is_fused = fused_feed and module.activation == "relu2"

    @property
    def head_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, [V, C]."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        return self.logits(self.hidden(tokens, documents))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of normed hidden states [..., C]."""
        out = F.linear(hidden, self.head_weight)
        if not self.config.logit_softcap:
            return out
        # In the loss's precision: rounded to bfloat16 first, the bend would be a staircase.
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        return cap(wide, self.config.logit_softcap)

    def loss(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(summed cross-entropy, number of counted targets); IGNORE is not counted."""
        hidden = self.hidden(tokens, documents)
        return cross_entropy_sum(
            hidden.flatten(0, 1),
            self.head_weight,
            targets.flatten(),
            self.config.logit_softcap,
            self.z_loss if torch.is_grad_enabled() else 0.0,
            self.head_float8,
        )

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
        return self.logits(hidden[rows, last])

    def states_at(self, tokens: Tensor, at: Tensor, cache: Cache | None = None) -> Tensor:
        """Normed hidden states [N, C] at the places `at` [N] of tokens [B, T] laid end to end."""
        return self.hidden(tokens, cache=cache).flatten(0, 1)[at]

    def judge(
        self, states: Tensor, targets: Tensor, *, best: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """(loss of each target [N], and where asked for the likeliest token [N]) after normed
        hidden states [N, C]. Logits are made in chunks: few places of a long prompt are worth a row
        of the vocabulary."""
        losses = [states.new_zeros(0, dtype=torch.float32)]
        likeliest = [targets[:0]]
        for rows in chunks(states, self.head_weight, SCORE_LOGITS):
            logits = self.logits(states[rows]).float()
            losses.append(F.cross_entropy(logits, targets[rows], reduction="none"))
            if best:
                likeliest.append(logits.argmax(-1))
        return torch.cat(losses), torch.cat(likeliest) if best else None

    def fill(self, tokens: Tensor, cache: Cache) -> None:
        """Put tokens [B, T] into a cache and judge none: the last block's queries and feed-forward
        are nobody's business. For a model that this process has whole."""
        with self._stance(cache):
            x = self._embedded(tokens, None, cache)
            rotation = self._rotation(tokens, x.dtype, cache)
            masks = self._masks(tokens, None, cache)
            self.run_blocks(x, tokens, rotation, masks, cache, last=False)

    def hidden(
        self, tokens: Tensor, documents: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Normed hidden states [B, T, C] before the head."""
        with self._stance(cache):
            x = self._embedded(tokens, documents, cache)
            rotation = self._rotation(tokens, x.dtype, cache)
            masks = self._masks(tokens, documents, cache)
            values = None
            if self.is_one_graph:
                values = {layer: self._value(layer, tokens) for layer in self.config.value_layers}
            return self.run_blocks(x, tokens, rotation, masks, cache, values=values)

    def _stance(self, cache: Cache | None) -> AbstractContextManager[Any]:
        """A graph is compiled for training's rows; other calls come in too many shapes for that."""
        if self.is_compiled and (cache is not None or not torch.is_grad_enabled()):
            return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
        return nullcontext()

    def run_blocks(
        self,
        x: Tensor,
        tokens: Tensor,
        rotation: Rotation | None,
        masks: dict[int, Any],
        cache: Cache | None = None,
        *,
        last: bool = True,
        values: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """From the embedding to the normed hidden states; without the `last` block's, where only
        the cache is wanted. Value embeddings [B, T, K x D] by layer, where they are there already.
        """
        start = x if self.config.residual_scales else None
        valued = self.config.value_layers
        for index, layer in enumerate(self.layers):
            value = None
            if index in valued:
                value = self._value(index, tokens) if values is None else values[index]
            is_end = index == self.config.layers - 1
            if is_end and not last and cache is not None and isinstance(layer, Block):
                layer.fill(x, rotation, cache, start, value)
                return x
            mask = masks[self.config.window_of(index)]
            x = layer(x, rotation, mask, cache, start, value)
        out: Tensor = self.norm(x)
        return out

    def _value(self, layer: int, tokens: Tensor) -> Tensor:
        rows: Tensor = self.value_embeds[str(layer)](tokens)
        return rows

    def _embedded(self, tokens: Tensor, documents: Tensor | None, cache: Cache | None) -> Tensor:
        """What the first block begins with, [B, T, C]."""
        x: Tensor = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(self._places(tokens, documents, cache))
        if torch.is_autocast_enabled(x.device.type):
            # The stream runs in the products' precision: half the bytes of every norm and sum.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        return x if self.embed_norm is None else self.embed_norm(x)

    def _places(self, tokens: Tensor, documents: Tensor | None, cache: Cache | None) -> Tensor:
        """Positions [T] or [B, T] of the tokens; each document counts from 0, as if it were alone
        (rotary positions are relative and need no such care)."""
        width = tokens.shape[1]
        reach = width if cache is None else cache.reach(width)
        if reach > self.config.max_positions:
            raise ConfigError(
                f"the text is {reach} tokens long and the model has {self.config.max_positions}"
                " positions; shorten it, or train with a larger model.max_positions."
            )
        if cache is not None:
            return cache.positions(width)
        places = torch.arange(width, device=tokens.device)
        return places if documents is None else places - document_starts(documents)

    def _rotation(self, tokens: Tensor, dtype: torch.dtype, cache: Cache | None) -> Rotation | None:
        if self.rope is None:
            return None
        width = tokens.shape[1]
        if cache is None:
            return self.rope.upto(width, tokens.device, dtype)
        return self.rope.at(cache.positions(width), cache.reach(width), dtype)

    def _masks(
        self, tokens: Tensor, documents: Tensor | None, cache: Cache | None
    ) -> dict[int, Any]:
        """The mask of each window that some layer has (0: none)."""
        width = tokens.shape[1]
        windows = {self.config.window_of(layer) for layer in range(self.config.layers)}
        if cache is not None:
            return {window: cache.mask(width, window) for window in windows}
        specs = {window: MaskSpec(documents, window) for window in windows}
        kernel = without_gradients(self.masked_kernel, tokens.device)
        return {
            window: None if spec.is_plain else kernel.mask(spec, width, tokens.device)
            for window, spec in specs.items()
        }
