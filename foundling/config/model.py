"""The section `model`: the shape of the transformer."""

from dataclasses import dataclass
from typing import Literal

from foundling.config.base import _is_set, _no_effect, _require
from foundling.config.errors import ConfigError

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


WHOLE = ("dim", "layers", "heads", "ffn_dim", "rope_original",
         "vocab_size", "kv_heads", "head_dim", "max_positions", "window")  # fmt: skip
MOST_LAYERS = 100_000
LARGEST = 2**28


def check_model(model: "ModelConfig") -> None:
    """Refuse a shape that cannot be built, or a setting that the others make idle."""
    _check_model_ranges(model)
    if not model.head_dim and model.dim % model.heads:
        raise ConfigError(
            f"model.dim {model.dim} does not divide into {model.heads} heads;"
            " change one of them or set model.head_dim."
        )
    if model.heads % model.num_kv_heads:
        raise ConfigError(
            f"model.heads {model.heads} is not a multiple of model.kv_heads {model.kv_heads}."
        )
    if model.positions == "learned":
        _require(model.max_positions > 0, "learned positions need model.max_positions", 0)
    elif model.head_width % 2:
        raise ConfigError(f"a head is {model.head_width} wide and rotary positions need it even.")
    _check_model_no_effect(model)


def _check_model_ranges(model: "ModelConfig") -> None:
    for name in WHOLE:
        value = getattr(model, name)
        _require(isinstance(value, int), f"model.{name} is a whole number", value)
    for name in ("dim", "layers", "heads", "ffn_dim", "rope_original"):
        _require(getattr(model, name) > 0, f"model.{name} must be positive", getattr(model, name))
    _require(model.layers <= MOST_LAYERS, f"model.layers is at most {MOST_LAYERS:,}", model.layers)
    for name in WHOLE:
        size = getattr(model, name)
        _require(size <= LARGEST, f"model.{name} is at most {LARGEST:,}", f"{size:,}")
    for name in ("vocab_size", "kv_heads", "head_dim", "max_positions", "window", "init_head_std"):
        _require(
            getattr(model, name) >= 0, f"model.{name} cannot be negative", getattr(model, name)
        )
    for name in ("norm_eps", "rope_theta", "init_std", "rope_low"):
        _require(getattr(model, name) > 0, f"model.{name} must be positive", getattr(model, name))
    _require(model.rope_scaling >= 1, "model.rope_scaling is 1 or more", model.rope_scaling)
    _require(
        model.rope_high > model.rope_low,
        f"model.rope_high must be above model.rope_low {model.rope_low:g}",
        model.rope_high,
    )
    _require(
        model.logit_softcap >= 0, "model.logit_softcap cannot be negative", model.logit_softcap
    )
    _require(0 <= model.dropout < 1, "model.dropout is a share below 1", model.dropout)
    _require(
        bool(model.window_pattern) and set(model.window_pattern) <= {"S", "L"},
        "model.window_pattern is made of S and L",
        repr(model.window_pattern),
    )
    if model.value_embeds and model.dim < VALUE_GATE_WIDTH:
        raise ConfigError(
            f"model.value_embeds need model.dim of {VALUE_GATE_WIDTH} or more, and it is"
            f" {model.dim}."
        )


def _check_model_no_effect(model: "ModelConfig") -> None:
    rotary = ("rope_theta", "rope_scaling", "rope_low", "rope_high", "rope_original")
    if model.positions == "learned":
        for name in rotary:
            if _is_set(model, name):
                _no_effect(f"model.{name}", "with learned positions", "model.positions rotary")
    elif model.max_positions:
        _no_effect("model.max_positions", "with rotary positions", "model.positions learned")
    for name in rotary[2:]:
        if _is_set(model, name) and model.rope_scaling == 1:
            _no_effect(f"model.{name}", "while model.rope_scaling is 1", "a factor above 1")
    if _is_set(model, "window_pattern") and not model.window:
        _no_effect("model.window_pattern", "while model.window is 0", "model.window above 0")
    if model.window and not any(map(model.window_of, range(model.layers))):
        _no_effect("model.window", "while no layer is an S of model.window_pattern", "a pattern")
    if model.init_head_std and model.tie_embeddings:
        _no_effect("model.init_head_std", "with tied embeddings", "model.init_std")
