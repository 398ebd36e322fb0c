"""Which degrees of tensor parallelism a model can be cut into: one rule for plan and training."""

from foundling.config.errors import ConfigError
from foundling.config.sections import ModelConfig


def tensor_misfit(model: ModelConfig, degree: int) -> str:
    """Why a model cannot be cut into `degree` parts, as a sentence; empty where it can.

    Heads, key-value heads and the feed-forward's width must divide; the vocabulary need not, its
    last part is filled up.
    """
    if degree == 1:
        return ""
    sizes = {
        "model.heads": model.heads,
        "model.kv_heads": model.num_kv_heads,
        "model.ffn_dim": model.ffn_dim,
    }
    for name, size in sizes.items():
        if size % degree:
            return (
                f"parallel.tensor is {degree} and {name} is {size}, which it does not divide;"
                " choose a degree that does."
            )
    lacking = {
        "model.positions learned": model.positions != "rotary",
        "model.value_embeds": model.value_embeds,
        "model.residual_scales": model.residual_scales,
        "model.dropout": model.dropout > 0,
    }
    for name in (name for name, is_set in lacking.items() if is_set):
        return f"{name} is not built for parallel.tensor {degree}; use parallel.shard instead."
    return ""


def check_tensor(model: ModelConfig, degree: int) -> None:
    """Refuse what cannot be cut into `degree` parts."""
    misfit = tensor_misfit(model, degree)
    if misfit:
        raise ConfigError(misfit)
