"""The section `model`: the shape of the transformer."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from foundling.config.base import Section
from foundling.config.errors import ConfigError

Activation = Literal["swiglu", "relu", "relu2", "gelu"]
VALUE_GATE_WIDTH = 12
"""Channels of a block's input that decide how much of a value embedding is added."""
MOST_LAYERS = 100_000
"""Their parameters are listed one by one before anything is looked at."""
LARGEST = 2**28
"""Of every other size: the bytes of a matrix of two such sides are still a number to torch."""
Size = Annotated[int, Field(gt=0, le=LARGEST)]
OpenSize = Annotated[int, Field(ge=0, le=LARGEST)]


class ModelConfig(Section):
    """The shape of the transformer."""

    where: ClassVar[str] = "model"

    vocab_size: OpenSize = 0
    """Rows of the embedding; 0 takes the tokenizer's size when training starts."""
    dim: Size = 192
    """Width of the residual stream."""
    layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = 6
    """Number of transformer blocks."""
    heads: Size = 6
    """Query heads per block."""
    kv_heads: OpenSize = 0
    """Key and value heads per block (grouped-query attention); 0 means as many as heads."""
    head_dim: OpenSize = 0
    """Width of a head; 0 means dim / heads."""
    ffn_dim: Size = 512
    """Width of the feed-forward layer."""
    activation: Activation = "swiglu"
    """Of the feed-forward layer; swiglu has a gate matrix; relu, relu2 (squared) and gelu (by tanh,
    as in GPT-2) have none."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm, before each half of a block and before the head."""
    norm_eps: PositiveFloat = 1e-5
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
    max_positions: OpenSize = 0
    """Rows of the learned position embedding: the longest context there is."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    rope_scaling: Annotated[float, Field(ge=1)] = 1.0
    """Factor by which slow rotations are slowed for longer contexts (Llama 3.1: 8); 1 is none."""
    rope_low: PositiveFloat = 1.0
    """rope_scaling: turns within rope_original below which a rotation is slowed by the factor."""
    rope_high: float = 4.0
    """rope_scaling: turns within rope_original above which a rotation is left as it is."""
    rope_original: Size = 8192
    """rope_scaling: context that the model was first trained for."""
    window: OpenSize = 0
    """Tokens that a windowed layer looks back on, itself included; 0: every layer sees all."""
    window_pattern: str = "SSSL"
    """Which layers are windowed, repeated over the depth: S has the window, L sees all."""
    value_embeds: bool = False
    """Give every second layer (the last one among them) an embedding of its own, gated and added to
    the values."""
    residual_scales: bool = False
    """Let each layer learn how much of the stream and of the embedding it begins with."""
    logit_softcap: NonNegativeFloat = 0.0
    """Bend logits into (-c, c) by c tanh(x / c); 0 leaves them."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of embeddings, attention weights and branch outputs that training drops."""
    tie_embeddings: bool = False
    """Use the input embedding as the output head."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the embeddings' initial values; matrices use 1/sqrt(fan_in)."""
    init_head_std: NonNegativeFloat = 0.0
    """Standard deviation of the head's initial values; 0 means 1/sqrt(dim)."""
    init_outputs: Literal["scaled", "zero"] = "scaled"
    """Matrices that write into the stream begin at dim^-0.5 / sqrt(2 layers), or at zero."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse a shape that cannot be built, or a setting that the others make idle."""
        if not self.head_dim and self.dim % self.heads:
            raise ConfigError(
                f"model.dim {self.dim} does not divide into {self.heads} heads;"
                " change one of them or set model.head_dim."
            )
        if self.heads % self.num_kv_heads:
            raise ConfigError(
                f"model.heads {self.heads} is not a multiple of model.kv_heads {self.kv_heads}."
            )
        if self.positions == "learned" and not self.max_positions:
            raise ConfigError("learned positions need model.max_positions (it is 0).")
        if self.positions == "rotary" and self.head_width % 2:
            raise ConfigError(
                f"a head is {self.head_width} wide and rotary positions need it even."
            )
        if self.rope_high <= self.rope_low:
            raise ConfigError(
                f"model.rope_high must be above model.rope_low {self.rope_low:g} (it is"
                f" {self.rope_high:g})."
            )
        if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            raise ConfigError(
                f"model.window_pattern is made of S and L (it is {self.window_pattern!r})."
            )
        if self.value_embeds and self.dim < VALUE_GATE_WIDTH:
            raise ConfigError(
                f"model.value_embeds need model.dim of {VALUE_GATE_WIDTH} or more, and it is"
                f" {self.dim}."
            )
        self._check_idle()
        return self

    def _check_idle(self) -> None:
        rotary = ("rope_theta", "rope_scaling", "rope_low", "rope_high", "rope_original")
        if self.positions == "learned":
            for name in rotary:
                self.refuse_idle(name, "with learned positions", "model.positions rotary")
        else:
            self.refuse_idle("max_positions", "with rotary positions", "model.positions learned")
        if self.rope_scaling == 1:
            for name in rotary[2:]:
                self.refuse_idle(name, "while model.rope_scaling is 1", "a factor above 1")
        if not self.window:
            self.refuse_idle("window_pattern", "while model.window is 0", "model.window above 0")
        elif not any(map(self.window_of, range(self.layers))):
            self.refuse_idle(
                "window", "while no layer is an S of model.window_pattern", "a pattern"
            )
        if self.tie_embeddings:
            self.refuse_idle("init_head_std", "with tied embeddings", "model.init_std")

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
