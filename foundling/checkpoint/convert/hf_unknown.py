"""Which keys of a config.json the reader in hf_config.py understands.

A list of what is known, not of what is not: a key that a later transformers invents may be another
function. With transformers installed its class is run and judges; without, the key is refused.
"""

from collections.abc import Mapping
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
