"""config.json of Hugging Face's classes and our ModelConfig, both ways.

Only what is understood is read: an activation, a rope type or a switch that the model here does not
have is refused by name, because leaving it out would give another function. What their config
cannot say and does not change the function (dropout in training, initial values) travels under a
key of ours; so does, in a model with code of its own, what transformers would take for something
else. All other that decides the function is read from their keys.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foundling.checkpoint.name_map import Layout
from foundling.config.errors import CheckpointError, ConfigError
from foundling.config.model import ModelConfig, RopeScaling
from foundling.runtime.files import write_text_atomic

PLAIN_ROPE = ("default", None)
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
             "original_max_position_embeddings")  # fmt: skip
Json = Mapping[str, Any]


class Keys:
    """Their keys, each asked for by name; a value that must be another is refused."""

    def __init__(self, tree: Json, where: Path) -> None:
        self.tree, self.where = tree, where

    def need(self, name: str, kind: Callable[[Any], Any] = int) -> Any:
        """A key that must be there."""
        value = self.tree.get(name)
        if value is None:
            raise CheckpointError(f"{self.where} has no {name} in its config.json.")
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if kind is int and (not is_whole or isinstance(value, bool)):
            raise CheckpointError(f"{self.where} has {name} {value!r}, which is no whole number.")
        return kind(value)

    def get(self, name: str, default: Any) -> Any:
        """A key, or what they take where it is missing."""
        value = self.tree.get(name)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """A key that may be missing and not null: their classes would fail at it."""
        value = self.tree.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.where} has {name} {value!r}, which is no number.")
        return float(value)

    def either(self, name: str, alias: str, default: Any) -> Any:
        """A key that has a second name; stated twice it must be the same."""
        if self.tree.get(name) is not None:
            self.only(alias, self.tree[name])
        return self.get(name, self.get(alias, default))

    def every(self, name: str, expected: str) -> None:
        """A list, if it is stated, of one value only."""
        for value in self.get(name, ()):
            if value != expected:
                raise CheckpointError(
                    f"{self.where} has layers of {value!r} in its {name}, and in this model all are"
                    f" of {expected!r}."
                )

    def only(self, name: str, *allowed: Any) -> None:
        """The first of `allowed` is what they take where the key is missing."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise CheckpointError(
                f"{self.where} has {name} {value!r} in its config, and the model here knows only"
                f" {' or '.join(map(repr, allowed))}."
            )


def rope_of(keys: Keys) -> dict[str, Any]:
    """Our fields of the rotary positions, in the spelling of transformers 4 or 5."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(keys.get(name, {}), dict):
            raise CheckpointError(f"{keys.where} has {name} that are no fields with values.")
    stated = (dict(keys.get(name, {})) for name in ("rope_parameters", "rope_scaling"))
    new, old = ({n: v for n, v in one.items() if v is not None} for one in stated)
    if new.get("partial_rotary_factor") == 1:
        del new["partial_rotary_factor"]
    rope = new or old
    theta = float(rope["rope_theta"] if "rope_theta" in rope else keys.number("rope_theta", 1e4))
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in (*PLAIN_ROPE, "llama3"):
        raise CheckpointError(
            f"{keys.where} scales its rotary positions by {kind!r}, and only llama3's way is known"
            " here; another would be another function."
        )
    # Also tables by kind of layer, and rotations of a part of a head.
    if unknown := sorted((new.keys() | old.keys()) - set(ROPE_KEYS)):
        raise CheckpointError(f"{keys.where} has {unknown[0]} in its rotary positions, which is not"
                              " known here; without it they would be others.")  # fmt: skip
    both = [_spelled(one) for one in (new, old)]
    thetas = {float(one["rope_theta"]) for one in (keys.tree, new, old) if one.get("rope_theta")}
    if (new and old and both[0] != both[1]) or len(thetas) > 1:
        raise CheckpointError(f"{keys.where} states its rotary positions twice, and not alike.")
    if kind in PLAIN_ROPE:
        return {"rope_theta": theta}
    if missing := [name for name in ROPE_KEYS[3:] if name not in rope]:
        raise CheckpointError(f"{keys.where} has no {missing[0]} in its rotary positions.")
    # Beside them it goes before theirs in transformers 5, and is not looked at in 4.
    keys.only(ROPE_KEYS[-1], rope[ROPE_KEYS[-1]])
    scaling = RopeScaling(
        factor=float(rope["factor"]),
        low=float(rope["low_freq_factor"]),
        high=float(rope["high_freq_factor"]),
        original=int(rope["original_max_position_embeddings"]),
    )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _spelled(rope: Json) -> dict[str, Any]:
    """One of two statements, so that it can be compared with the other."""
    kind = rope.get("rope_type", rope.get("type"))
    left_out = ("type", "rope_type", "rope_theta")
    named = {"kind": "default" if kind in PLAIN_ROPE else kind}
    return named | {name: value for name, value in rope.items() if name not in left_out}


OUR_KEY = "foundling"
TRAINING_FIELDS = ("dropout", "init")
"""Fields of ours that do not change the function, or that theirs imply."""
SPELLED = ("kv_heads", "head_dim", "windows")
"""Fields that can say the same in two ways."""
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "foundling": "FoundlingForCausalLM",
}
LAYOUTS: Mapping[str, Layout] = {"gpt2": "gpt2", "opt": "opt", "foundling": "ours"}
"""How tensors of a family lie; the others as Llama's."""
_LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
_OPT_SIZES = {**_LLAMA_SIZES, "ffn_dim": "ffn_dim", "positions": "max_position_embeddings"}
_GPT2_SIZES = {"dim": "n_embd", "layers": "n_layer", "heads": "n_head", "ffn_dim": "n_inner"}
_GPT2_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
_GPT2_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "relu2": "relu2"}
_GELU = ("gelu_new", "gelu_pytorch_tanh")
MISTRAL_WINDOW = 4096


def family_of(model: ModelConfig) -> str:
    """The Hugging Face family that is the same function; `foundling` where none is."""
    plain = ModelConfig()
    common = ("embed_norm", "value_embeds", "residual_scales", "logit_softcap")
    if any(getattr(model, name) != getattr(plain, name) for name in common):
        return "foundling"
    if model.positions != "rotary":
        is_square = (
            model.num_kv_heads == model.heads and model.head_width * model.heads == model.dim
        )
        whole = (model.norm, model.bias, model.qk_norm, any(model.windows)) == (
            "layer", "all", False, False,
        )  # fmt: skip
        return "gpt2" if whole and is_square and model.activation != "swiglu" else "foundling"
    if (model.norm, model.activation) != ("rms", "swiglu"):
        return "foundling"
    if any(model.windows):
        is_mistral = len(_windows(model)) == 1 and model.bias == "none" and not model.qk_norm
        return "mistral" if is_mistral else "foundling"
    if model.qk_norm:
        return "qwen3" if model.bias == "none" else "foundling"
    if model.bias == "qkv":
        return "qwen2"
    # transformers 5 refuses a Llama whose width is no multiple of its heads, whatever their width.
    return "foundling" if model.dim % model.heads else "llama"


def to_hf_config(model: ModelConfig, *, positions: int, dtype: str, ids: Json) -> dict[str, Any]:
    """The config.json of a model; `ids` are its special tokens."""
    family = family_of(model)
    kept = model.model_dump(mode="json", include={*TRAINING_FIELDS, *SPELLED})
    head: dict[str, Any] = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        **ids,
        OUR_KEY: {"schema": 1, "training": kept},
    }
    if family == "foundling":
        module = "modeling_foundling"
        own = model.model_dump()
        own |= {"kv_heads": model.num_kv_heads, "head_dim": model.head_width}
        layers = range(model.layers) if model.windows else ()
        own |= {"windows": [model.window_of(layer) for layer in layers]}
        own |= {"value_layers": list(model.value_layers)}
        # By `rope_scaling` transformers means something else, and breaks.
        head[OUR_KEY]["rope"] = own.pop("rope_scaling")
        for name in ("vocab_size", "tie_embeddings", *TRAINING_FIELDS):
            del own[name]
        auto = {
            "AutoConfig": f"{module}.FoundlingConfig",
            "AutoModelForCausalLM": f"{module}.FoundlingForCausalLM",
        }
        return {**head, **own, "max_position_embeddings": positions, "auto_map": auto}
    return head | (_gpt2_keys(model) if family == "gpt2" else _llama_keys(model, family, positions))


def _gpt2_keys(model: ModelConfig) -> dict[str, Any]:
    return {
        **{theirs: getattr(model, ours) for ours, theirs in _GPT2_SIZES.items()},
        "n_positions": model.max_positions,
        "n_ctx": model.max_positions,
        "activation_function": _GPT2_ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.norm_eps,
        **dict.fromkeys(_GPT2_DROPOUTS, model.dropout),
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    }


def _llama_keys(model: ModelConfig, family: str, positions: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := model.rope_scaling).factor != 1:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original,
        }
    keys: dict[str, Any] = {
        **{theirs: getattr(model, ours) for ours, theirs in _LLAMA_SIZES.items()},
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": positions,
        # Both spellings: transformers 5 reads the first, 4 the other two.
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": None if scaling.factor == 1 else rope,
    }
    if family == "llama":
        keys |= {"attention_bias": model.bias == "all", "mlp_bias": model.bias == "all"}
    if family == "mistral":
        keys["sliding_window"] = model.window_of(0)
    if family == "qwen2":
        keys |= {"use_sliding_window": False}
    if family == "qwen3":
        keys |= {"attention_bias": False, "use_sliding_window": False}
    return keys


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a sentence."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}).") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return tree


def write_json(path: Path, tree: Json) -> None:
    """JSON in ASCII: half a character, which JSON can spell, is no text."""
    write_text_atomic(path, json.dumps(tree, indent=2) + "\n")


def from_hf_config(config: Json, where: Path) -> ModelConfig:
    """Our fields of a config.json; what the model here does not have is refused."""
    family = str(config.get("model_type"))
    if family not in CLASSES:
        raise CheckpointError(
            f"{where} is a {family}, and these can be read: {', '.join(CLASSES)}."
        )
    reader = {"gpt2": _from_gpt2, "opt": _from_opt, "foundling": _from_own}.get(family, _from_llama)
    keys = Keys(config, where)
    keys.only("is_causal", True)
    for name in ("per_layer_config", "text_config", "quantization_config"):
        keys.only(name, None)
    try:
        model = reader(keys)
        return _with_training_fields(model, config)
    except (TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise CheckpointError(f"{where} has a config that cannot be used: {error}") from None


def _from_llama(keys: Keys) -> ModelConfig:
    family = keys.tree["model_type"]
    keys.only("hidden_act", "silu")
    keys.only("rope_interleaved", False)
    keys.only("partial_rotary_factor", 1.0)
    keys.only("use_mrope", False)
    sizes = {ours: keys.need(theirs) for ours, theirs in _LLAMA_SIZES.items()}
    usual = 128 if family == "qwen3" else sizes["dim"] // sizes["heads"]
    head_dim = keys.get("head_dim", usual)
    if not head_dim:  # to us it would mean the usual width
        raise ValueError("its heads are 0 wide")
    fields_: dict[str, Any] = {
        **sizes,
        "kv_heads": keys.get("num_key_value_heads", sizes["heads"]),
        "head_dim": head_dim,
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(keys.get("tie_word_embeddings", False)),
        "bias": {"qwen2": "qkv"}.get(family, "none"),
        "qk_norm": family == "qwen3",
        **rope_of(keys),
    }
    if family == "llama":
        both = (bool(keys.get("attention_bias", False)), bool(keys.get("mlp_bias", False)))
        if both[0] != both[1]:
            raise CheckpointError(f"{keys.where} has biases in one half of a block only.")
        fields_["bias"] = "all" if both[0] else "none"
    if family.startswith("qwen"):
        keys.only("use_sliding_window", False)
        if family == "qwen3":
            keys.only("attention_bias", False)
    window = None
    if family == "mistral":
        # null is none; a config that does not say has what their class takes.
        window = keys.tree.get("sliding_window", MISTRAL_WINDOW)
        fields_ |= {"windows": (window,)} if window is not None else {}
        if not isinstance(window, int | None):
            raise CheckpointError(f"{keys.where} has a sliding_window {window!r}.")
        if window == 0:
            raise CheckpointError(
                f"{keys.where} has a sliding_window of 0, which hides everything."
            )
    # A Mistral with layers of two kinds is a Ministral to transformers 5, with windows in some
    # layers only; 4 has them in all.
    keys.every("layer_types", "full_attention" if window is None else "sliding_attention")
    return _tidy(ModelConfig(**fields_))


def _from_gpt2(keys: Keys) -> ModelConfig:
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("add_cross_attention", False)
    theirs = keys.get("activation_function", "gelu_new")
    ours = {name: act for act, name in _GPT2_ACTIVATIONS.items()} | dict.fromkeys(_GELU, "gelu")
    if theirs not in ours:
        keys.only("activation_function", *ours)
    dim = keys.either("n_embd", "hidden_size", 768)
    dropouts = {float(keys.get(name, 0.1)) for name in _GPT2_DROPOUTS}
    return ModelConfig(
        vocab_size=keys.need("vocab_size"),
        dim=dim,
        layers=keys.either("n_layer", "num_hidden_layers", 12),
        heads=keys.either("n_head", "num_attention_heads", 12),
        ffn_dim=keys.get("n_inner", 4 * dim),
        activation=ours[theirs],  # type: ignore[arg-type]
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        bias="all",
        positions=keys.either("n_positions", "max_position_embeddings", 1024),
        # One number here: what is dropped in training is the owner's choice, and 0 a safe one.
        dropout=dropouts.pop() if len(dropouts) == 1 and OUR_KEY in keys.tree else 0.0,
        tie_embeddings=bool(keys.get("tie_word_embeddings", True)),
    )


def _from_opt(keys: Keys) -> ModelConfig:
    keys.only("do_layer_norm_before", True)
    keys.only("enable_bias", True)
    keys.only("layer_norm_elementwise_affine", True)
    keys.only("_remove_final_layer_norm", False)
    keys.only("activation_function", "relu")
    sizes = {ours: keys.need(theirs) for ours, theirs in _OPT_SIZES.items()}
    keys.only("word_embed_proj_dim", sizes["dim"])
    return ModelConfig(
        **sizes,
        activation="relu",
        norm="layer",
        norm_eps=1e-5,
        bias="all",
        tie_embeddings=bool(keys.get("tie_word_embeddings", True)),
    )


def _from_own(keys: Keys) -> ModelConfig:
    names = ModelConfig.model_fields.keys() - {*TRAINING_FIELDS, "rope_scaling"}
    stated = {name: keys.tree[name] for name in names if name in keys.tree}
    own = keys.tree.get(OUR_KEY)
    rope = own.get("rope") if isinstance(own, Mapping) else None
    if not isinstance(rope, Mapping) or rope.keys() != RopeScaling.model_fields.keys():
        fields = ", ".join(RopeScaling.model_fields)
        raise ValueError(f"its key {OUR_KEY!r} has no rope with {fields}")
    stated |= {"rope_scaling": dict(rope)}
    stated["tie_embeddings"] = bool(keys.get("tie_word_embeddings", False))
    return _tidy(ModelConfig(**stated))


def _with_training_fields(model: ModelConfig, config: Json) -> ModelConfig:
    """What theirs cannot say, from our own key; a spelling only if it means the same."""
    own = config.get(OUR_KEY)
    kept = dict(own.get("training", {})) if isinstance(own, Mapping) else {}
    training = {name: kept[name] for name in TRAINING_FIELDS if name in kept}
    model = model.replace(**training)
    try:
        spelled = model.replace(**{name: kept[name] for name in SPELLED if name in kept})
    except ConfigError:
        return model
    return model if same_shape(model, spelled) else spelled


def _tidy(model: ModelConfig) -> ModelConfig:
    """0 where a field says no more than the default, and windows as short as they can be written:
    equal models then have equal configs."""
    kv = 0 if model.kv_heads == model.heads else model.kv_heads
    is_plain = model.dim % model.heads == 0 and model.head_dim == model.dim // model.heads
    head_dim = 0 if is_plain else model.head_dim
    return model.replace(kv_heads=kv, head_dim=head_dim, windows=_windows(model))


def _windows(model: ModelConfig) -> tuple[int, ...]:
    """The shortest pattern of windows that, repeated, gives each layer its own."""
    whole = tuple(map(model.window_of, range(model.layers)))
    repeats = (
        n for n in range(1, 65) if all(a == b for a, b in zip(whole[n:], whole, strict=False))
    )
    return whole[: next(repeats, len(whole))] if any(whole) else ()


def same_shape(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Names of fields in which two models are not the same function."""
    left, right = _tidy(one), _tidy(other)
    free = set(TRAINING_FIELDS)
    return [
        name
        for name in ModelConfig.model_fields
        if name not in free and getattr(left, name) != getattr(right, name)
    ]


# Which keys of a config.json the reader understands.
#
# A list of what is known, not of what is not: a key that a later transformers invents may be
# another function. With transformers installed its class is run and judges; without, the key is
# refused.


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SILENT = _names(
    """_attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
    bos_token_id dtype eos_token_id foundling id2label initializer_range is_llama_config
    label2id max_position_embeddings model_type name_or_path output_attentions
    output_hidden_states pad_token_id pretraining_tp return_dict tokenizer_class torch_dtype
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version
    use_cache vocab_size"""
)
"""Change nothing in a forward pass, or are seen in the tensors' shapes."""
_LLAMA = _names(
    """attention_bias head_dim hidden_act hidden_size intermediate_size layer_types
    max_window_layers mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
    partial_rotary_factor rms_norm_eps rope_interleaved rope_parameters rope_scaling
    rope_theta sliding_window tie_word_embeddings use_mrope use_sliding_window"""
)
_GPT2 = _names(
    """activation_function add_cross_attention attn_pdrop embd_pdrop gradient_checkpointing
    hidden_size layer_norm_epsilon n_ctx n_embd n_head n_inner n_layer n_positions
    num_attention_heads num_hidden_layers reorder_and_upcast_attn resid_pdrop
    scale_attn_by_inverse_layer_idx scale_attn_weights summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tie_word_embeddings"""
)
_OPT = _names(
    """_remove_final_layer_norm activation_dropout activation_function do_layer_norm_before dropout
    enable_bias ffn_dim hidden_size init_std layer_norm_elementwise_affine layerdrop
    num_attention_heads num_hidden_layers prefix tie_word_embeddings word_embed_proj_dim"""
)


def unknown_key(config: Mapping[str, Any]) -> str:
    """The first key that is not known; "" if there is none, or the config is of our own making."""
    family = config.get("model_type")
    if family == "foundling":
        return ""
    known = _SILENT | {"gpt2": _GPT2, "opt": _OPT}.get(str(family), _LLAMA)
    return min(config.keys() - known, default="")
