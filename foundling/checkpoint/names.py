"""Our parameter names and those of Hugging Face's Llama, Qwen 2 and Qwen 3, both ways.

Pure functions on names: no tensor is looked at, because none has to change (rotary positions are in
the same half-split convention). A name that is on neither side is refused, never passed through: a
silently dropped tensor is a model that is not the same function.
"""

import re

from foundling.config.errors import CheckpointError

_OURS_TO_HF = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.#.attn_norm.weight": "model.layers.#.input_layernorm.weight",
    "layers.#.attn.q.weight": "model.layers.#.self_attn.q_proj.weight",
    "layers.#.attn.k.weight": "model.layers.#.self_attn.k_proj.weight",
    "layers.#.attn.v.weight": "model.layers.#.self_attn.v_proj.weight",
    "layers.#.attn.o.weight": "model.layers.#.self_attn.o_proj.weight",
    "layers.#.attn.q.bias": "model.layers.#.self_attn.q_proj.bias",
    "layers.#.attn.k.bias": "model.layers.#.self_attn.k_proj.bias",
    "layers.#.attn.v.bias": "model.layers.#.self_attn.v_proj.bias",
    "layers.#.attn.q_norm.weight": "model.layers.#.self_attn.q_norm.weight",
    "layers.#.attn.k_norm.weight": "model.layers.#.self_attn.k_norm.weight",
    "layers.#.ffn_norm.weight": "model.layers.#.post_attention_layernorm.weight",
    "layers.#.ffn.gate.weight": "model.layers.#.mlp.gate_proj.weight",
    "layers.#.ffn.up.weight": "model.layers.#.mlp.up_proj.weight",
    "layers.#.ffn.down.weight": "model.layers.#.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_HF_TO_OURS = {theirs: ours for ours, theirs in _OURS_TO_HF.items()}
_NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)")


def to_hf(name: str) -> str:
    """Hugging Face's name of our parameter."""
    return _translate(name, _OURS_TO_HF, "a parameter of ours")


def from_hf(name: str) -> str:
    """Our name of Hugging Face's parameter."""
    return _translate(name, _HF_TO_OURS, "a parameter of a Hugging Face Llama or Qwen")


def _translate(name: str, table: dict[str, str], what: str) -> str:
    layer = _NUMBER.search(name)
    pattern = _NUMBER.sub("#", name, count=1)
    if pattern not in table:
        raise CheckpointError(
            f"{name!r} is not {what}, so it has no place in the other layout; this version maps"
            " the fields of Llama and Qwen only."
        )
    return table[pattern].replace("#", layer.group() if layer else "#")
