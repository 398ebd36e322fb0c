"""A foundling model for transformers, in one file that needs nothing else.

Every field of the model is in config.json; names of tensors are those of foundling's checkpoints.
It holds what none of transformers' own classes has in one: norms of queries and keys without
weights, squared ReLU, embeddings added to the values, learned scales of the residual stream,
windows by layer, capped logits. Written to be read: eager attention with one explicit mask.

Shapes: B batch, T new tokens, S tokens in all, H heads, K key and value heads, D head width.
"""

# Checked by running it, not by mypy: it must work with every release of transformers.
# mypy: ignore-errors

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

VALUE_GATE_WIDTH = 12
DEFAULTS = {
    "vocab_size": 32,
    "dim": 32,
    "layers": 1,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 32,
    "ffn_dim": 64,
    "activation": "swiglu",
    "norm": "rms",
    "norm_eps": 1e-5,
    "qk_norm": False,
    "embed_norm": False,
    "bias": "none",
    "positions": "rotary",
    "rope_theta": 10000.0,
    "windows": (),
    "value_embeds": False,
    "value_layers": (),
    "residual_scales": False,
    "logit_softcap": 0.0,
    "max_position_embeddings": 2048,
}
ROPE_DEFAULTS = {"factor": 1.0, "low": 1.0, "high": 4.0, "original": 8192}


class FoundlingConfig(PretrainedConfig):
    """The fields of a foundling model."""

    model_type = "foundling"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "ffn_dim",
    }

    def __init__(self, foundling=None, **fields):
        for name, default in DEFAULTS.items():
            setattr(self, name, fields.pop(name, default))
        # transformers means a table by rope_scaling: our factor is kept out of its sight.
        self.foundling = foundling or {}
        super().__init__(**fields)


class FoundlingRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, dim: int, eps: float, scaled: bool) -> None:
        super().__init__()
        self.shape, self.eps = (dim,), eps
        self.weight = nn.Parameter(torch.ones(dim)) if scaled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.shape, weight, self.eps)


class FoundlingLayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    def __init__(self, dim: int, eps: float, scaled: bool, shifted: bool) -> None:
        super().__init__()
        self.shape, self.eps = (dim,), eps
        self.weight = nn.Parameter(torch.ones(dim)) if scaled else None
        self.bias = nn.Parameter(torch.zeros(dim)) if scaled and shifted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def make_norm(config: FoundlingConfig, dim: int) -> nn.Module:
    """The config's norm over the last `dim` numbers."""
    scaled = not config.norm.endswith("-unscaled")
    if config.norm.startswith("rms"):
        return FoundlingRMSNorm(dim, config.norm_eps, scaled)
    return FoundlingLayerNorm(dim, config.norm_eps, scaled, config.bias == "all")


def frequencies(config: FoundlingConfig) -> torch.Tensor:
    """Radians per position of each pair of coordinates [D / 2]."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
    plain = config.rope_theta ** (-pairs / config.head_dim)
    rope = {**ROPE_DEFAULTS, **config.foundling.get("rope", {})}
    factor, low, high = rope["factor"], rope["low"], rope["high"]
    if factor == 1:
        return plain
    turns = rope["original"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / factor)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn x [B, T, heads, D] by angles [B, T, 1, D / 2]; i turns with i + D / 2."""
    cos, sin = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
    first, second = x.to(torch.float32).chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


class FoundlingAttention(nn.Module):
    """Grouped-query attention with what a layer may have besides."""

    def __init__(self, config: FoundlingConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.groups = config.heads // config.kv_heads
        wide, narrow = config.heads * self.head_dim, config.kv_heads * self.head_dim
        biased = config.bias != "none"
        self.q = nn.Linear(config.dim, wide, bias=biased)
        self.k = nn.Linear(config.dim, narrow, bias=biased)
        self.v = nn.Linear(config.dim, narrow, bias=biased)
        self.o = nn.Linear(wide, config.dim, bias=config.bias == "all")
        self.q_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.value_gate = None
        if layer in config.value_layers:
            self.value_gate = nn.Linear(VALUE_GATE_WIDTH, config.kv_heads, bias=False)

    def forward(self, x, angles, mask, cache, values):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if self.value_gate is not None:
            gate = 2 * torch.sigmoid(self.value_gate(x[..., :VALUE_GATE_WIDTH]))
            v = v + gate[..., None] * values.view(shape)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        scores = (q @ k.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = scores.to(torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)
        mixed = scores.softmax(-1).to(v.dtype) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class FoundlingFeedForward(nn.Module):
    """SwiGLU, or one bent product without a gate."""

    def __init__(self, config: FoundlingConfig) -> None:
        super().__init__()
        biased, self.activation = config.bias == "all", config.activation
        gated = self.activation == "swiglu"
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=biased) if gated else None
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=biased)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=biased)

    def forward(self, x):
        up = self.up(x)
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * up)
        if self.activation == "gelu":
            return self.down(F.gelu(up, approximate="tanh"))
        bent = F.relu(up)
        return self.down(bent * bent if self.activation == "relu2" else bent)


class FoundlingBlock(nn.Module):
    """Attention and feed-forward, each normed and added to the stream."""

    def __init__(self, config: FoundlingConfig, layer: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0])) if config.residual_scales else None
        self.attn_norm = make_norm(config, config.dim)
        self.attn = FoundlingAttention(config, layer)
        self.ffn_norm = make_norm(config, config.dim)
        self.ffn = FoundlingFeedForward(config)

    def forward(self, x, angles, mask, cache, start, values):
        if self.mix is not None:
            x = self.mix[0] * x + self.mix[1] * start
        x = x + self.attn(self.attn_norm(x), angles, mask, cache, values)
        return x + self.ffn(self.ffn_norm(x))


class FoundlingForCausalLM(PreTrainedModel, GenerationMixin):
    """Tokens to logits, with transformers' cache and generation."""

    config_class = FoundlingConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_cache_class = True
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.positions = None
        if config.positions != "rotary":
            self.positions = nn.Embedding(config.positions, config.dim)
        self.embed_norm = make_norm(config, config.dim) if config.embed_norm else None
        width = config.kv_heads * config.head_dim
        self.value_embeds = nn.ModuleDict(
            {str(layer): nn.Embedding(config.vocab_size, width) for layer in config.value_layers}
        )
        self.layers = nn.ModuleList(FoundlingBlock(config, layer) for layer in range(config.layers))
        self.norm = make_norm(config, config.dim)
        self.head = None
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        """Weights come from the files; fresh ones are foundling's business."""

    def get_input_embeddings(self):
        """The embedding of tokens."""
        return self.embed

    def set_input_embeddings(self, value):
        """Replace the embedding of tokens."""
        self.embed = value

    def get_output_embeddings(self):
        """The head, where it is not the embedding."""
        return self.head

    def set_output_embeddings(self, value):
        """Replace the head."""
        self.head = value

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **_unused,
    ):
        """Logits, the loss if labels are given, and the cache."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        batch, width = input_ids.shape
        places = torch.arange(past, past + width, device=input_ids.device)
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -width:]
        if position_ids is None:
            position_ids = places.expand(batch, -1)
        x = self.embed(input_ids)
        if self.positions is not None:
            x = x + self.positions(position_ids)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        start, angles = x, self._angles(position_ids)
        for index, layer in enumerate(self.layers):
            values = None
            if str(index) in self.value_embeds:
                values = self.value_embeds[str(index)](input_ids)
            mask = self._mask(places, past + width, index, attention_mask)
            x = layer(x, angles, mask, past_key_values, start, values)
        logits = self._logits(self.norm(x[:, -logits_to_keep:] if logits_to_keep else x))
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)
        cache = past_key_values if use_cache else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _logits(self, hidden):
        is_tied = self.head is None
        logits = F.linear(hidden, self.embed.weight) if is_tied else self.head(hidden)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits.float() / cap) if cap else logits

    def _angles(self, position_ids):
        """[B, T, 1, D / 2], exact at long contexts."""
        if self.positions is not None:
            return None
        turns = frequencies(self.config).to(position_ids.device)
        return position_ids[..., None, None].to(torch.float64) * turns

    def _mask(self, places, reach, layer, attention_mask):
        """True where a token may look, [B or 1, 1, T, S]; padding sees itself."""
        keys = torch.arange(reach, device=places.device)
        distance = places[:, None] - keys
        seen = distance >= 0
        window = self.config.windows[layer] if self.config.windows else 0
        if window:
            seen = seen & (distance < window)
        seen = seen[None, None]
        if attention_mask is not None:
            real = attention_mask[:, None, None, :reach].bool()
            seen = (seen & real) | (distance == 0)
        return seen
