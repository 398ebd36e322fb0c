"""Parameters, counted from the config alone, under each definition that is in use.

One model has been called 524M, 461M, 500M and 400M in one account: so every count has a name, and
all of them are printed. A test pins this arithmetic to the built model.
"""

from dataclasses import dataclass

from foundling.config.sections import ModelConfig, ParamCount


@dataclass(frozen=True, kw_only=True)
class ParamCounts:
    """The same model, counted three ways."""

    all: int
    """Every parameter once; a tied embedding counts once."""
    no_input_embedding: int
    """Without the input embedding; a tied one is kept, because it is the head."""
    matrices_and_head: int
    """What a token is multiplied with: block matrices and head, no norms, no input embedding."""

    def of(self, name: ParamCount) -> int:
        """The count that `train.param_count` names."""
        return int(getattr(self, name.replace("-", "_")))


def count_params(model: ModelConfig) -> ParamCounts:
    """Count a model that may never be built."""
    q_width = model.heads * model.head_width
    kv_width = model.num_kv_heads * model.head_width
    attention = 2 * model.dim * q_width + 2 * model.dim * kv_width
    matrices = model.layers * (attention + 3 * model.dim * model.ffn_dim)
    norms = (2 * model.layers + 1) * model.dim
    table = model.vocab_size * model.dim
    without_input = matrices + norms + table
    return ParamCounts(
        all=without_input + (0 if model.tie_embeddings else table),
        no_input_embedding=without_input,
        matrices_and_head=matrices + table,
    )


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Training FLOPs of one token: 6 N + 12 L H D T, N without the input embedding.

    Forward and backward; attention counted over the full square, as most projects report it
    (PaLM, appendix B), so that the MFU can be compared with theirs.
    """
    attention = 12 * model.layers * model.heads * model.head_width * seq_len
    return 6 * count_params(model).no_input_embedding + attention
