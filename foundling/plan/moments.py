"""What each optimizer keeps, in bytes: counted from the parameters' shapes, exact.

AdamW keeps two moments as wide as the weights; in 8 bits a byte for each, and a fp32 scale for
each block of a row; Muon one momentum for the blocks' matrices and AdamW's two for the rest.
"""

from foundling.config.errors import ConfigError
from foundling.plan.work import Sizes

OPTIMIZERS = {
    "adamw": "AdamW's moments",
    "adamw8bit": "AdamW's moments in 8 bits",
    "adamw8bit-wide": "AdamW's moments in 8 bits, of the embeddings in fp32",
    "muon": "Muon's moment and AdamW's for the rest",
}
"""Whose state can be planned, and what it is in words."""


def optimizer_bytes(kind: str, sizes: Sizes, weight_bytes: int = 4) -> int:
    """State of the optimizer."""
    if kind == "adamw":
        return 2 * weight_bytes * sizes.all
    if kind in ("adamw8bit", "adamw8bit-wide"):
        covered, scales = sizes.covered, sizes.scales
        if kind.endswith("wide"):
            covered, scales = covered - sizes.embedding, scales - sizes.embedding_scales
        return 8 * (sizes.all - covered) + 2 * covered + 8 * scales
    if kind == "muon":
        return weight_bytes * (sizes.blocks + 2 * (sizes.all - sizes.blocks))
    raise ConfigError(f"--optimizer {kind} is not known; there are {', '.join(OPTIMIZERS)}.")
