"""Where each of our parameters lies in another layout, both ways.

    hf        Llama, Qwen 2 and 3, Mistral: other names, the same tensors
    gpt2      GPT-2: q, k and v in one matrix, and every matrix the other way round
    opt       OPT: other names, and two rows before the first position
    meta      Meta's Llama, and torchtitan: rows of q and k in pairs that turn together
    ours      foundling's own names

A table of places and two functions that follow it: no tensor is looked at. A name that is on
neither side is refused, never passed through: a silently dropped tensor is a model that is not the
same function. Rejected: a converter a pair of layouts, where one direction is always less tested.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from foundling.config.errors import CheckpointError
from foundling.config.model import ModelConfig

Layout = Literal["ours", "hf", "gpt2", "opt", "meta"]

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
    "layers.#.attn.o.bias": "model.layers.#.self_attn.o_proj.bias",
    "layers.#.attn.q_norm.weight": "model.layers.#.self_attn.q_norm.weight",
    "layers.#.attn.k_norm.weight": "model.layers.#.self_attn.k_norm.weight",
    "layers.#.ffn_norm.weight": "model.layers.#.post_attention_layernorm.weight",
    "layers.#.ffn.gate.weight": "model.layers.#.mlp.gate_proj.weight",
    "layers.#.ffn.up.weight": "model.layers.#.mlp.up_proj.weight",
    "layers.#.ffn.down.weight": "model.layers.#.mlp.down_proj.weight",
    "layers.#.ffn.gate.bias": "model.layers.#.mlp.gate_proj.bias",
    "layers.#.ffn.up.bias": "model.layers.#.mlp.up_proj.bias",
    "layers.#.ffn.down.bias": "model.layers.#.mlp.down_proj.bias",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_OURS_TO_META = {
    "embed.weight": "tok_embeddings.weight",
    "layers.#.attn_norm.weight": "layers.#.attention_norm.weight",
    "layers.#.attn.q.weight": "layers.#.attention.wq.weight",
    "layers.#.attn.k.weight": "layers.#.attention.wk.weight",
    "layers.#.attn.v.weight": "layers.#.attention.wv.weight",
    "layers.#.attn.o.weight": "layers.#.attention.wo.weight",
    "layers.#.ffn_norm.weight": "layers.#.ffn_norm.weight",
    "layers.#.ffn.gate.weight": "layers.#.feed_forward.w1.weight",
    "layers.#.ffn.up.weight": "layers.#.feed_forward.w3.weight",
    "layers.#.ffn.down.weight": "layers.#.feed_forward.w2.weight",
    "norm.weight": "norm.weight",
    "head.weight": "output.weight",
}
_OURS_TO_OPT = {
    "embed": "embed_tokens",
    "positions": "embed_positions",
    "layers.#.attn_norm": "layers.#.self_attn_layer_norm",
    "layers.#.attn.q": "layers.#.self_attn.q_proj",
    "layers.#.attn.k": "layers.#.self_attn.k_proj",
    "layers.#.attn.v": "layers.#.self_attn.v_proj",
    "layers.#.attn.o": "layers.#.self_attn.out_proj",
    "layers.#.ffn_norm": "layers.#.final_layer_norm",
    "layers.#.ffn.up": "layers.#.fc1",
    "layers.#.ffn.down": "layers.#.fc2",
    "norm": "final_layer_norm",
}
_OURS_TO_GPT2 = {
    "embed": "wte",
    "positions": "wpe",
    "layers.#.attn_norm": "h.#.ln_1",
    "layers.#.attn.q": "h.#.attn.c_attn",
    "layers.#.attn.k": "h.#.attn.c_attn",
    "layers.#.attn.v": "h.#.attn.c_attn",
    "layers.#.attn.o": "h.#.attn.c_proj",
    "layers.#.ffn_norm": "h.#.ln_2",
    "layers.#.ffn.up": "h.#.mlp.c_fc",
    "layers.#.ffn.down": "h.#.mlp.c_proj",
    "norm": "ln_f",
}
_HF_TO_OURS = {theirs: ours for ours, theirs in _OURS_TO_HF.items()}
_NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_QKV = ("q", "k", "v")
_WRAPPER = re.compile(r"((model|state_dict|model_state_dict|module|app)\.)*")
"""What writers put before the names of weights."""

SIGNS: Mapping[str, Layout] = {
    "embed.weight": "ours",
    "model.embed_tokens.weight": "hf",
    "transformer.wte.weight": "gpt2",
    "wte.weight": "gpt2",
    "model.decoder.embed_tokens.weight": "opt",
    "tok_embeddings.weight": "meta",
}
"""The name of the embedding, which every layout has and each calls otherwise."""
UNUSED = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|rope\.freqs|freqs_cis)|(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
)
"""What some writers store with the parameters: tables that follow from the config."""


@dataclass(frozen=True)
class TensorPlace:
    """Where one of our tensors lies."""

    name: str
    part: int = 0
    """Which of `parts` equal parts, one after the other, of the rows; stored ones turned back."""
    parts: int = 1
    is_turned: bool = False
    """Stored with rows and columns exchanged."""
    heads: int = 0
    """Of so many heads the rows are stored in pairs that turn together; 0: as ours."""
    before: int = 0
    """Rows of zeros before ours that no token uses."""

    def stored_shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """The shape it has there."""
        shape = (ours[0] * self.parts + self.before, *ours[1:])
        return shape[::-1] if self.is_turned else shape


def places(model: ModelConfig, names: Iterable[str], layout: Layout) -> dict[str, TensorPlace]:
    """The place of each of our parameters in a layout."""
    return {name: _place(model, name, layout) for name in names}


def take(stored: Tensor, place: TensorPlace) -> Tensor:
    """Our tensor out of the stored one."""
    rows = stored.T if place.is_turned else stored
    rows = rows[place.before :].chunk(place.parts)[place.part]
    if place.heads:
        pairs = rows.reshape(place.heads, -1, 2, *rows.shape[1:])
        rows = pairs.transpose(1, 2).reshape(rows.shape)
    return rows.contiguous()


def put(ours: Sequence[Tensor], place: TensorPlace) -> Tensor:
    """The stored tensor, out of ours in the order of their parts."""
    rows = torch.cat(tuple(ours)) if len(ours) > 1 else ours[0]
    if place.heads:
        halves = rows.reshape(place.heads, 2, -1, *rows.shape[1:])
        rows = halves.transpose(1, 2).reshape(rows.shape)
    if place.before:
        rows = torch.cat((rows.new_zeros(place.before, *rows.shape[1:]), rows))
    return (rows.T if place.is_turned else rows).contiguous()


def layout_of(names: Iterable[str], where: object) -> tuple[Layout, str] | None:
    """The layout that names are in, and what stands before each of them (app.model. and such)."""
    present = set(names)
    for sign, layout in SIGNS.items():
        # The longest sign first: wte.weight is the end of transformer.wte.weight.
        found = sorted(name for name in present if name == sign or name.endswith(f".{sign}"))
        if found:
            return layout, _weights_of([name.removesuffix(sign) for name in found], where)
    return None


def _weights_of(prefixes: Sequence[str], where: object) -> str:
    """Which of several things that look like a model is the weights: an average of them (ema) or an
    optimizer's moments have the same names inside, and a shorter word before them may be theirs."""
    plain = sorted((prefix for prefix in prefixes if _WRAPPER.fullmatch(prefix)), key=len)
    if plain or len(prefixes) == 1:
        return (plain or prefixes)[0]
    named = ", ".join(prefix.rstrip(".") for prefix in sorted(prefixes))
    raise CheckpointError(
        f"{where} holds several models ({named}) and none of them is called model; save the one"
        " that is meant alone."
    )


def to_hf(name: str) -> str:
    """Hugging Face's name of our parameter."""
    return _translate(name, _OURS_TO_HF, "a parameter of ours")


def from_hf(name: str) -> str:
    """Our name of Hugging Face's parameter."""
    return _translate(name, _HF_TO_OURS, "a parameter of a Hugging Face Llama or Qwen")


def _place(model: ModelConfig, name: str, layout: Layout) -> TensorPlace:
    if layout == "ours":
        return TensorPlace(name)
    if layout == "hf":
        return TensorPlace(to_hf(name))
    if layout == "meta":
        heads = {"q": model.heads, "k": model.num_kv_heads}
        part = re.fullmatch(r"layers\.\d+\.attn\.([qk])\.weight", name)
        theirs = _translate(name, _OURS_TO_META, "a parameter of Meta's Llama")
        return TensorPlace(theirs, heads=heads[part[1]] if part else 0)
    if name == "head.weight":
        return TensorPlace("lm_head.weight")
    stem, _, kind = name.rpartition(".")
    if layout == "opt":
        theirs = _translate(stem, _OURS_TO_OPT, "a parameter of an OPT")
        return TensorPlace(f"model.decoder.{theirs}.{kind}", before=2 if stem == "positions" else 0)
    theirs = _translate(stem, _OURS_TO_GPT2, "a parameter of a GPT-2")
    is_turned = kind == "weight" and ("attn." in stem or "ffn." in stem)
    where = f"transformer.{theirs}.{kind}"
    if stem[-1] in _QKV and ".attn." in stem:
        return TensorPlace(where, _QKV.index(stem[-1]), 3, is_turned=is_turned)
    return TensorPlace(where, is_turned=is_turned)


def _translate(name: str, table: Mapping[str, str], what: str) -> str:
    layer = _NUMBER.search(name)
    pattern = _NUMBER.sub("#", name, count=1)
    if pattern not in table:
        raise CheckpointError(
            f"{name!r} is not {what}, so it has no place in the other layout; this version maps"
            " the fields of Llama, Qwen, GPT-2 and OPT only."
        )
    return table[pattern].replace("#", layer.group() if layer else "#")
