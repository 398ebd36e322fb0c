"""Which config.json the formulas here understand to the last key.

A list of what is known, not of what is not: a key that a later transformers invents is then run by
transformers, and not left out. Written without our reader of configs, which it is to check.
"""

from typing import Any


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
    layer_norm_epsilon n_ctx n_embd n_head n_inner n_layer n_positions reorder_and_upcast_attn
    resid_pdrop scale_attn_by_inverse_layer_idx scale_attn_weights summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tie_word_embeddings"""
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "hidden_act": ("silu",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "relu", "relu2"),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "tie_word_embeddings": (False, True),
    "use_mrope": (False,),
}
"""Values that the formulas have; a key that is null or missing is read as their class reads it."""
_TURNS = ("rope_type", "type", "rope_theta")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def unknown_key(config: dict[str, Any]) -> str:
    """The first key that is not known, or not with this value; "" if there is none."""
    family = config.get("model_type")
    known = _SILENT | (_GPT2 if family == "gpt2" else _LLAMA)
    if strange := sorted(config.keys() - known):
        return strange[0]
    for name, allowed in _ONLY.items():
        if config.get(name) is not None and config[name] not in allowed:
            return name
    if family == "gpt2":
        return ""
    if family in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        return "use_sliding_window"
    # To transformers a Mistral that has the key at all is another model.
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention"} or (family == "mistral" and "layer_types" in config):
        return "layer_types"
    if family == "mistral" and config.get("sliding_window") == 0:
        return "sliding_window"
    return _unknown_turns(config)


def _unknown_turns(config: dict[str, Any]) -> str:
    """Rotary positions: plain ones or Llama 3's, and the same in both spellings."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        stated = {
            key: value for key, value in (config.get(name) or {}).items() if value is not None
        }
        kind = stated.get("rope_type", stated.get("type", "default"))
        wanted = _LLAMA3 if kind == "llama3" else ()
        if kind not in ("default", "llama3") or stated.keys() - {*_TURNS, *wanted}:
            return name
        if stated:
            theta = stated.get("rope_theta", config.get("rope_theta"))
            found.append((kind, theta, *(stated.get(key) for key in wanted)))
    thetas = {one[1] for one in found} | {config.get("rope_theta")}
    is_one = len(set(found)) < 2 and len(thetas - {None}) < 2
    return "" if is_one else "rope_scaling"
