"""The section `model`: the shape of the transformer."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["swiglu", "relu", "relu2", "gelu"]
VALUE_GATE_WIDTH = 12
"""Channels of a block's input that decide how much of a value embedding is added."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the transformer."""

    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's size when training starts."""
    dim: int = 192
    """Width of the residual stream."""
    layers: int = 6
    """Number of transformer blocks."""
    heads: int = 6
    """Query heads per block."""
    kv_heads: int = 0
    """Key and value heads per block (grouped-query attention); 0 means as many as heads."""
    head_dim: int = 0
    """Width of a head; 0 means dim / heads."""
    ffn_dim: int = 512
    """Width of the feed-forward layer."""
    activation: Activation = "swiglu"
    """Of the feed-forward layer; swiglu has a gate matrix; relu, relu2 (squared) and gelu (by tanh,
    as in GPT-2) have none."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm, before each half of a block and before the head."""
    norm_eps: float = 1e-5
    """Epsilon of the norms."""
    norm_weight: bool = True
    """Whether norms have a learned scale."""
    qk_norm: bool = False
    """Norm queries and keys, head by head, before they are turned."""
    embed_norm: bool = False
    """Norm the embedding before the first block."""
    bias: Literal["none", "qkv", "all"] = "none"
    """Which matrices of a block have a bias; all gives LayerNorm its shift too, the head never."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How the model knows the order: queries and keys are turned, or an embedding is added."""
    max_positions: int = 0
    """Rows of the learned position embedding: the longest context there is."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    rope_scaling: float = 1.0
    """Factor by which slow rotations are slowed for longer contexts (Llama 3.1: 8); 1 is none."""
    rope_low: float = 1.0
    """rope_scaling: turns within rope_original below which a rotation is slowed by the factor."""
    rope_high: float = 4.0
    """rope_scaling: turns within rope_original above which a rotation is left as it is."""
    rope_original: int = 8192
    """rope_scaling: context that the model was first trained for."""
    window: int = 0
    """Tokens that a windowed layer looks back on, itself included; 0: every layer sees all."""
    window_pattern: str = "SSSL"
    """Which layers are windowed, repeated over the depth: S has the window, L sees all."""
    value_embeds: bool = False
    """Give every second layer (the last one among them) an embedding of its own, gated and added to
    the values."""
    residual_scales: bool = False
    """Let each layer learn how much of the stream and of the embedding it begins with."""
    logit_softcap: float = 0.0
    """Bend logits into (-c, c) by c tanh(x / c); 0 leaves them."""
    dropout: float = 0.0
    """Share of embeddings, attention weights and branch outputs that training drops."""
    tie_embeddings: bool = False
    """Use the input embedding as the output head."""
    init_std: float = 0.02
    """Standard deviation of the embeddings' initial values; matrices use 1/sqrt(fan_in)."""
    init_head_std: float = 0.0
    """Standard deviation of the head's initial values; 0 means 1/sqrt(dim)."""
    init_outputs: Literal["scaled", "zero"] = "scaled"
    """Matrices that write into the stream begin at dim^-0.5 / sqrt(2 layers), or at zero."""

    def __post_init__(self) -> None:
        from foundling.config.checks import check_model

        check_model(self)

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of a head, with the default filled in."""
        return self.head_dim or self.dim // self.heads

    @property
    def value_layers(self) -> tuple[int, ...]:
        """Layers that have a value embedding."""
        return tuple(range((self.layers - 1) % 2, self.layers, 2)) if self.value_embeds else ()

    def window_of(self, layer: int) -> int:
        """Tokens that a layer looks back on, itself included; 0 means all."""
        is_short = self.window_pattern[layer % len(self.window_pattern)] == "S"
        return self.window if is_short else 0
