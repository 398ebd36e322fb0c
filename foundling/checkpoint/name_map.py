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
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from foundling.config.errors import CheckpointError
from foundling.config.model import ModelConfig

Layout = Literal["ours", "hf", "gpt2", "opt", "meta"]

_NAMES: Mapping[Layout, Mapping[str, str]] = {
    "hf": {
        "embed": "model.embed_tokens",
        "layers.#.attn_norm": "model.layers.#.input_layernorm",
        "layers.#.attn.q": "model.layers.#.self_attn.q_proj",
        "layers.#.attn.k": "model.layers.#.self_attn.k_proj",
        "layers.#.attn.v": "model.layers.#.self_attn.v_proj",
        "layers.#.attn.o": "model.layers.#.self_attn.o_proj",
        "layers.#.attn.q_norm": "model.layers.#.self_attn.q_norm",
        "layers.#.attn.k_norm": "model.layers.#.self_attn.k_norm",
        "layers.#.ffn_norm": "model.layers.#.post_attention_layernorm",
        "layers.#.ffn.gate": "model.layers.#.mlp.gate_proj",
        "layers.#.ffn.up": "model.layers.#.mlp.up_proj",
        "layers.#.ffn.down": "model.layers.#.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
    "meta": {
        "embed": "tok_embeddings",
        "layers.#.attn_norm": "layers.#.attention_norm",
        "layers.#.attn.q": "layers.#.attention.wq",
        "layers.#.attn.k": "layers.#.attention.wk",
        "layers.#.attn.v": "layers.#.attention.wv",
        "layers.#.attn.o": "layers.#.attention.wo",
        "layers.#.ffn_norm": "layers.#.ffn_norm",
        "layers.#.ffn.gate": "layers.#.feed_forward.w1",
        "layers.#.ffn.up": "layers.#.feed_forward.w3",
        "layers.#.ffn.down": "layers.#.feed_forward.w2",
        "norm": "norm",
        "head": "output",
    },
    "opt": {
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "layers.#.attn_norm": "model.decoder.layers.#.self_attn_layer_norm",
        "layers.#.attn.q": "model.decoder.layers.#.self_attn.q_proj",
        "layers.#.attn.k": "model.decoder.layers.#.self_attn.k_proj",
        "layers.#.attn.v": "model.decoder.layers.#.self_attn.v_proj",
        "layers.#.attn.o": "model.decoder.layers.#.self_attn.out_proj",
        "layers.#.ffn_norm": "model.decoder.layers.#.final_layer_norm",
        "layers.#.ffn.up": "model.decoder.layers.#.fc1",
        "layers.#.ffn.down": "model.decoder.layers.#.fc2",
        "norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    },
    "gpt2": {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.#.attn_norm": "transformer.h.#.ln_1",
        "layers.#.attn.q": "transformer.h.#.attn.c_attn",
        "layers.#.attn.k": "transformer.h.#.attn.c_attn",
        "layers.#.attn.v": "transformer.h.#.attn.c_attn",
        "layers.#.attn.o": "transformer.h.#.attn.c_proj",
        "layers.#.ffn_norm": "transformer.h.#.ln_2",
        "layers.#.ffn.up": "transformer.h.#.mlp.c_fc",
        "layers.#.ffn.down": "transformer.h.#.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
}
"""Our names in another layout; # is the number of a layer."""
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


def translated(name: str, layout: Layout) -> str:
    """The name of our parameter in another layout."""
    stem, _, kind = name.rpartition(".")
    layer = _NUMBER.search(stem)
    theirs = _NAMES[layout].get(_NUMBER.sub("#", stem, count=1))
    if theirs is None:
        raise CheckpointError(
            f"{name!r} has no place in the layout of {layout}; this version maps the fields of"
            " Llama, Qwen, GPT-2 and OPT only."
        )
    return f"{theirs.replace('#', layer.group() if layer else '#')}.{kind}"


def _place(model: ModelConfig, name: str, layout: Layout) -> TensorPlace:
    if layout == "ours":
        return TensorPlace(name)
    place = TensorPlace(translated(name, layout))
    stem, _, kind = name.rpartition(".")
    part = stem[-1] if ".attn." in stem else ""
    if layout == "meta":
        heads = {"q": model.heads, "k": model.num_kv_heads}
        return replace(place, heads=heads.get(part, 0))
    if layout == "opt":
        return replace(place, before=2 if stem == "positions" else 0)
    if layout == "gpt2":
        is_turned = kind == "weight" and ("attn." in stem or "ffn." in stem)
        if part in _QKV:
            place = replace(place, part=_QKV.index(part), parts=3)
        return replace(place, is_turned=is_turned)
    return place
