"""Parameters by name and shape, from the config alone, and counted by each definition in use.

One model has been called 524M, 461M, 500M and 400M in one account: so every count has a name, and
all of them are printed. A test pins the names and shapes to the built model, for every preset.
Rejected: a formula per count, which each new field would have to be added to, in every formula.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from foundling.config.model import VALUE_GATE_WIDTH, ModelConfig
from foundling.config.train import ParamCount

Shapes = dict[str, tuple[int, ...]]
_LOOKUP = re.compile(r"embed\.weight|positions\.weight|value_embeds\.\d+\.weight")


@dataclass(frozen=True, kw_only=True)
class ParamCounts:
    """The same model, counted four ways."""

    all: int
    """Every parameter once; a tied embedding counts once."""
    no_input_embedding: int
    """Without the input embedding; a tied one is kept, because it is the head."""
    no_positions: int
    """Without learned positions and value embeddings too: without every table that is only looked
    up, so what is left costs FLOPs."""
    matrices_and_head: int
    """What a token is multiplied with: block matrices and head, no norms, biases or scalars."""

    def of(self, name: ParamCount) -> int:
        """The count that `train.param_count` names."""
        return int(getattr(self, name.replace("-", "_")))


def count_params(model: ModelConfig) -> ParamCounts:
    """Count a model that may never be built."""
    sizes = {name: prod(shape) for name, shape in parameter_shapes(model).items()}
    tables = {name: size for name, size in sizes.items() if _LOOKUP.fullmatch(name)}
    embedding = tables.pop("embed.weight")
    without_input = sum(sizes.values()) - (0 if model.tie_embeddings else embedding)
    is_product = re.compile(r"head\.weight|layers\.\d+\.(attn|ffn)\.[a-z_]+(?<!_norm)\.weight")
    matrices = sum(size for name, size in sizes.items() if is_product.fullmatch(name))
    return ParamCounts(
        all=sum(sizes.values()),
        no_input_embedding=without_input,
        no_positions=without_input - sum(tables.values()),
        matrices_and_head=matrices + (embedding if model.tie_embeddings else 0),
    )


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Every parameter of the built model by name, in its order."""
    shapes: Shapes = {"embed.weight": (model.vocab_size, model.dim)}
    if model.max_positions:
        shapes["positions.weight"] = (model.max_positions, model.dim)
    if model.embed_norm:
        shapes |= _norm(model, "embed_norm", model.dim)
    kv_width = model.num_kv_heads * model.head_width
    for layer in model.value_layers:
        shapes[f"value_embeds.{layer}.weight"] = (model.vocab_size, kv_width)
    for layer in range(model.layers):
        shapes |= {f"layers.{layer}.{name}": s for name, s in _block(model, layer).items()}
    shapes |= _norm(model, "norm", model.dim)
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab_size, model.dim)
    return shapes


def _block(model: ModelConfig, layer: int) -> Shapes:
    q_width, kv_width = model.heads * model.head_width, model.num_kv_heads * model.head_width
    shapes: Shapes = {"mix": (2,)} if model.residual_scales else {}
    shapes |= _norm(model, "attn_norm", model.dim)
    for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        shapes |= _linear(f"attn.{name}", width, model.dim, bias=model.bias != "none")
    shapes |= _linear("attn.o", model.dim, q_width, bias=model.bias == "all")
    if model.qk_norm:
        shapes |= _norm(model, "attn.q_norm", model.head_width)
        shapes |= _norm(model, "attn.k_norm", model.head_width)
    if layer in model.value_layers:
        shapes["attn.value_gate.weight"] = (model.num_kv_heads, VALUE_GATE_WIDTH)
    shapes |= _norm(model, "ffn_norm", model.dim)
    for name in ("gate", "up") if model.activation == "swiglu" else ("up",):
        shapes |= _linear(f"ffn.{name}", model.ffn_dim, model.dim, bias=model.bias == "all")
    shapes |= _linear("ffn.down", model.dim, model.ffn_dim, bias=model.bias == "all")
    return shapes


def _linear(name: str, out: int, width: int, *, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, width)}
    return shapes | {f"{name}.bias": (out,)} if bias else shapes


def _norm(model: ModelConfig, name: str, width: int) -> Shapes:
    if not model.norm_is_scaled:
        return {}
    shapes: Shapes = {f"{name}.weight": (width,)}
    shifted = not model.norm_is_rms and model.bias == "all"
    return shapes | {f"{name}.bias": (width,)} if shifted else shapes


def head_std(model: ModelConfig) -> float:
    """Standard deviation of the fresh head.

    The final norm leaves a mean square of one, so fresh logits are normal with variance
    s^2 = dim * head_std^2 and the first loss is ln(V) + s^2 / 2; a softcap far above s leaves that.
    """
    if model.tie_embeddings:
        return model.init.std
    return model.init.head_std or float(model.dim**-0.5)


def keys_seen(model: ModelConfig, layer: int, seq_len: int, *, causal: bool) -> float:
    """Keys that a query of this layer is multiplied with, on average over a row.

    Not causal: the full square, or the window, as most projects report it. Causal: position t has
    t + 1 keys, at most the window.
    """
    window = min(model.window_of(layer) or seq_len, seq_len)
    if not causal:
        return window
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


@lru_cache(maxsize=256)
def flops_per_token(
    model: ModelConfig,
    seq_len: int,
    *,
    causal: bool = False,
    windows: bool = True,
    embeddings: bool = False,
) -> int:
    """Training FLOPs of one token, forward and backward: 6 N + 12 H D x keys seen, by layer.

    (PaLM, appendix B.) N is `no_positions`, or `all` with embeddings=True; without windows every
    layer counts the whole row. By default causality is not counted, as in most reports.
    """
    counts = count_params(model)
    layers = range(model.layers)
    if windows:
        keys = sum(keys_seen(model, layer, seq_len, causal=causal) for layer in layers)
    else:
        keys = model.layers * ((seq_len + 1) / 2 if causal else seq_len)
    attention = 12 * model.heads * model.head_width * keys
    return 6 * (counts.all if embeddings else counts.no_positions) + round(attention)
