"""Parameters by name and shape, from the config alone, and counted by each definition in use.

One model has been called 524M, 461M, 500M and 400M in one account: so every count has a name, and
all of them are printed. A test pins the names and shapes to the built model, for every preset.
Rejected: a formula per count, which each new field would have to be added to, in every formula.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from foundling.config.model import VALUE_GATE_WIDTH, ModelConfig
from foundling.config.optim import moment_block_size
from foundling.config.train import ParamCount

Shapes = dict[str, tuple[int, ...]]


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
    sizes = sizes_of(model)
    return ParamCounts(
        all=sizes.all,
        no_input_embedding=sizes.all
        - (0 if model.tie_embeddings else model.vocab_size * model.dim),
        no_positions=sizes.all - sizes.tables,
        matrices_and_head=sizes.blocks + sizes.head,
    )


@dataclass(frozen=True)
class ParamSizes:
    """Parameters by what happens to them."""

    blocks: int
    """In matrices of the blocks: cast, multiplied, Muon's."""
    tables: int
    """Looked up: token, position and value embeddings (a tied one counts as the head)."""
    head: int
    vectors: int
    """Norms, biases, scales."""
    largest_block: int
    embedding: int
    """Of them, those that the optimizer's table calls embeddings: tables, and a tied one."""
    covered: int
    """In matrices whose moments can be kept in 8 bits."""
    scales: int
    """Blocks that these are cut into."""
    embedding_scales: int
    """Of them, the embeddings'."""
    tensors: int

    @property
    def all(self) -> int:
        return self.blocks + self.tables + self.head + self.vectors


@lru_cache(maxsize=64)
def sizes_of(model: ModelConfig) -> ParamSizes:
    """Sort every parameter of the built model into what the plan needs to know about it."""
    shapes = parameter_shapes(model)
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    head = "embed.weight" if model.tie_embeddings else "head.weight"
    outside = [n for n in matrices if not n.startswith(("layers.", "head."))]
    by_layer: dict[str, int] = {}
    for name, (out, width) in block_matrices(model):
        layer = name.split(".")[1]
        by_layer[layer] = by_layer.get(layer, 0) + out * width
    cuts = {n: prod(s) // block for n, s in matrices.items() if (block := moment_block_size(s[1]))}
    embedding, top = sum(prod(matrices[name]) for name in outside), prod(matrices[head])
    return ParamSizes(
        blocks=sum(by_layer.values()),
        tables=embedding - (top if model.tie_embeddings else 0),
        head=top,
        vectors=sum(prod(shape) for shape in shapes.values() if len(shape) < 2),
        largest_block=max(by_layer.values(), default=0),
        embedding=embedding,
        covered=sum(prod(matrices[name]) for name in cuts),
        scales=sum(cuts.values()),
        embedding_scales=sum(cuts.get(name, 0) for name in outside),
        tensors=len(shapes),
    )


@lru_cache(maxsize=64)
def block_matrices(model: ModelConfig) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Names and shapes [out, in] of the blocks' matrices, with which activations are multiplied."""
    return tuple(
        (name.removesuffix(".weight"), (shape[0], shape[1]))
        for name, shape in parameter_shapes(model).items()
        if name.startswith("layers.") and len(shape) == 2
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
    embeddings: bool = False,
) -> int:
    """Training FLOPs of one token, forward and backward: 6 N + 12 H D x keys seen, by layer.

    (PaLM, appendix B.) N is `no_positions`, or `all` with embeddings=True. By default causality is
    not counted, as in most reports.
    """
    counts = count_params(model)
    keys = sum(keys_seen(model, layer, seq_len, causal=causal) for layer in range(model.layers))
    attention = 12 * model.heads * model.head_width * keys
    return 6 * (counts.all if embeddings else counts.no_positions) + round(attention)
