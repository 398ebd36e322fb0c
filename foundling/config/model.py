"""The section `model`: the shape of the transformer."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from foundling.config.base import Section
from foundling.config.errors import ConfigError, UnusedSettingError

Norm = Literal["rms", "layer", "rms-unscaled", "layer-unscaled"]
Activation = Literal["swiglu", "relu", "relu2", "gelu"]
VALUE_GATE_WIDTH = 12
"""Channels of a block's input that decide how much of a value embedding is added."""
_MAX_LAYERS = 100_000
"""Parameters are enumerated when a config is checked."""
_MAX_SIZE = 2**28
"""Two such sides still give a byte count below 2^63."""
_Size = Annotated[int, Field(gt=0, le=_MAX_SIZE)]
_SizeOrDefault = Annotated[int, Field(ge=0, le=_MAX_SIZE)]


class RopeScaling(Section):
    """Rotary positions stretched for longer contexts, as Llama 3.1 does."""

    section_name: ClassVar[str] = "model.rope_scaling"

    factor: Annotated[float, Field(ge=1)] = 1.0
    """Slows the slow rotations (Llama 3.1: 8); 1 is none."""
    low: PositiveFloat = 1.0
    """Turns within `original` below which a rotation is slowed by the factor."""
    high: float = 4.0
    """Turns within `original` above which a rotation is left as it is."""
    original: _Size = 8192
    """Context that the model was first trained for."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high <= self.low:
            raise ConfigError(
                f"model.rope_scaling.high must be above model.rope_scaling.low {self.low:g} (it is"
                f" {self.high:g})."
            )
        if self.factor == 1:
            for name in ("low", "high", "original"):
                self.refuse_unused(name, "while model.rope_scaling.factor is 1", "one above 1")
        return self


class InitConfig(Section):
    """Initial values of the weights; matrices have a standard deviation of 1/sqrt(fan_in)."""

    section_name: ClassVar[str] = "model.init"

    std: PositiveFloat = 0.02
    """Standard deviation of the embeddings."""
    head_std: NonNegativeFloat = 0.0
    """Standard deviation of the head; 0 means 1/sqrt(dim)."""
    outputs: Literal["scaled", "zero"] = "scaled"
    """Matrices that write into the residual stream: dim^-0.5 / sqrt(2 layers), or zero."""


class ModelConfig(Section):
    """The shape of the transformer."""

    section_name: ClassVar[str] = "model"

    vocab_size: _SizeOrDefault = 0
    """Rows of the embedding; 0 takes the tokenizer's size when training starts."""
    dim: _Size = 192
    """Width of the residual stream."""
    layers: Annotated[int, Field(gt=0, le=_MAX_LAYERS)] = 6
    """Number of transformer blocks."""
    heads: _Size = 6
    """Query heads per block."""
    kv_heads: _SizeOrDefault = 0
    """Key and value heads per block (grouped-query attention); 0 means as many as heads."""
    head_dim: _SizeOrDefault = 0
    """Width of a head; 0 means dim / heads."""
    ffn_dim: _Size = 512
    """Width of the feed-forward layer."""
    activation: Activation = "swiglu"
    """Of the feed-forward layer; swiglu has a gate matrix; relu, relu2 (squared) and gelu (by tanh,
    as in GPT-2) have none."""
    norm: Norm = "rms"
    """RMSNorm or LayerNorm, before each half of a block and before the head; unscaled ones have no
    learned weight."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the norms."""
    qk_norm: bool = False
    """Norm queries and keys, head by head, before they are rotated."""
    embed_norm: bool = False
    """Norm the embedding before the first block."""
    bias: Literal["none", "qkv", "all"] = "none"
    """Which matrices of a block have a bias; all gives LayerNorm its shift too, the head never."""
    positions: Literal["rotary"] | int = "rotary"
    """How the model knows the order: queries and keys are rotated (rotary), or a learned embedding
    is added of as many rows as this number, the longest context there is."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling = RopeScaling()
    """Rotary positions stretched for longer contexts (factor, low, high, original), as Llama 3.1's
    with factor 8."""
    windows: tuple[_SizeOrDefault, ...] = ()
    """Tokens that each layer looks back on, itself included, repeated over the depth: 512,512,512,0
    gives three of four layers a window; 0 sees all."""
    value_embeds: bool = False
    """Give every second layer (the last one among them) an embedding of its own, gated and added to
    the values."""
    residual_scales: bool = False
    """Let each layer learn how much of the residual stream and of the embedding it begins with."""
    logit_softcap: NonNegativeFloat = 0.0
    """Cap logits to (-c, c) by c tanh(x / c); 0 leaves them."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of embeddings, attention weights and branch outputs that training drops."""
    tie_embeddings: bool = False
    """Use the input embedding as the output head."""
    init: InitConfig = InitConfig()
    """Initial values: std (of embeddings), head_std, outputs (scaled, or zero)."""

    @field_validator("positions", mode="before")
    @classmethod
    def _read_positions(cls, value: Any) -> Any:
        is_whole = not isinstance(value, bool) and str(value).isdigit()
        if value != "rotary" and not (is_whole and 0 < int(value) <= _MAX_SIZE):
            raise ConfigError(
                "model.positions must be rotary, or the rows of a learned embedding (at most"
                f" {_MAX_SIZE:,}), not {value!r}."
            )
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse a shape that cannot be built, or a setting that has no effect with the others."""
        if not self.head_dim and self.dim % self.heads:
            raise ConfigError(
                f"model.dim {self.dim} does not divide into {self.heads} heads;"
                " change one of them or set model.head_dim."
            )
        if self.heads % self.num_kv_heads:
            raise ConfigError(
                f"model.heads {self.heads} is not a multiple of model.kv_heads {self.kv_heads}."
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ConfigError(
                f"a head is {self.head_width} wide and rotary positions need it even."
            )
        if self.value_embeds and self.dim < VALUE_GATE_WIDTH:
            raise ConfigError(
                f"model.value_embeds need model.dim of {VALUE_GATE_WIDTH} or more, and it is"
                f" {self.dim}."
            )
        self._check_unused()
        return self

    def _check_unused(self) -> None:
        if self.positions != "rotary":
            for name in ("rope_theta", "rope_scaling"):
                self.refuse_unused(name, "with learned positions", "model.positions rotary")
        if self.windows and not any(map(self.window_of, range(self.layers))):
            self.refuse_unused("windows", "while no layer has one", "one above 0")
        if self.tie_embeddings and self.init.head_std:
            raise UnusedSettingError(
                "model.init.head_std", "with tied embeddings", "remove it or use model.init.std"
            )

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

    @property
    def max_positions(self) -> int:
        """Rows of the learned position embedding; 0 with rotary positions."""
        return self.positions if isinstance(self.positions, int) else 0

    @property
    def norm_is_rms(self) -> bool:
        """RMSNorm, and not LayerNorm."""
        return self.norm.startswith("rms")

    @property
    def norm_is_scaled(self) -> bool:
        """Whether norms have a learned weight."""
        return not self.norm.endswith("-unscaled")

    def window_of(self, layer: int) -> int:
        """Tokens that a layer looks back on, itself included; 0 means all."""
        return self.windows[layer % len(self.windows)] if self.windows else 0
