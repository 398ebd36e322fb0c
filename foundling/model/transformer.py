"""The transformer: embedding, blocks, norm, head. Llama, Qwen, GPT and the depth recipe are values
of its fields; what a model does not have is None and costs a comparison.

Written as if for one device and one precision: sharding, compilation and autocast are applied from
outside. Blocks are called one by one with everything they need as arguments, so that each can be
compiled, recomputed or sharded by itself.

Shapes: B batch, T time, C width, V vocabulary.
"""

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
from foundling.model.loss import Kind, cap, cross_entropy_sum
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
        x = self.mixed(x, start)
        x = x + self._drop(self.attn(self.attn_norm(x), rotation, mask, cache, values))
        return self.feed(x)

    def mixed(self, x: Tensor, start: Tensor | None) -> Tensor:
        """The residual stream as this layer begins with it."""
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

    def use_kernels(self, kernel: Kernel, masked: Kernel, *, fused_mlp: bool = False) -> None:
        """Attend with `kernel`, and with `masked` where documents or windows need a mask; with
        `fused_mlp`, squared ReLUs are made by their products while training."""
        self.masked_kernel = masked
        for module in self.modules():
            if isinstance(module, Attention):
                module.kernel, module.masked_kernel = kernel, masked
            if isinstance(module, FeedForward):
                module.is_fused = fused_mlp and module.activation == "relu2"

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

    def states_at(self, tokens: Tensor, at: Tensor, cache: Cache) -> Tensor:
        """Normed hidden states [N, C] at the places `at` [N] of a step's tokens [1, T]."""
        return self.hidden(tokens, cache=cache).flatten(0, 1)[at]

    def next_logits(self, states: Tensor) -> Tensor:
        """Logits [N, V] in fp32 of normed hidden states [N, C]: `logits` as a call of its own,
        which gathers the head where it is sharded."""
        return self.logits(states).float()

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
        values: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """From the embedding to the normed hidden states; value embeddings [B, T, K x D] by layer,
        where they are there already."""
        start = x if self.config.residual_scales else None
        valued = self.config.value_layers
        for index, layer in enumerate(self.layers):
            value = None
            if index in valued:
                value = self._value(index, tokens) if values is None else values[index]
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
        reach = width if cache is None else cache.reach
        if reach > self.config.max_positions:
            raise ConfigError(
                f"the text is {reach} tokens long and the model has {self.config.max_positions}"
                " positions; shorten it, or train with more model.positions."
            )
        if cache is not None:
            return cache.positions()
        places = torch.arange(width, device=tokens.device)
        return places if documents is None else places - document_starts(documents)

    def _rotation(self, tokens: Tensor, dtype: torch.dtype, cache: Cache | None) -> Rotation | None:
        if self.rope is None:
            return None
        if cache is None:
            return self.rope.upto(tokens.shape[1], tokens.device, dtype)
        return self.rope.at(cache.positions(), cache.reach, dtype)

    def _masks(
        self, tokens: Tensor, documents: Tensor | None, cache: Cache | None
    ) -> dict[int, Any]:
        """The mask of each window that some layer has (0: none)."""
        width = tokens.shape[1]
        windows = {self.config.window_of(layer) for layer in range(self.config.layers)}
        if cache is not None:  # which looks after windows itself
            return dict.fromkeys(windows)
        specs = {window: MaskSpec(documents, window) for window in windows}
        kernel = without_gradients(self.masked_kernel, tokens.device)
        return {
            window: None if spec.is_plain else kernel.mask(spec, width, tokens.device)
            for window, spec in specs.items()
        }
