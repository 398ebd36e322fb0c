"""One decoder-only transformer, by fields and never by name; plain, as if for one device."""

from foundling.model.attention import Cache
from foundling.model.grow import grow_vocabulary
from foundling.model.init import empty_model, init_weights
from foundling.model.loss import IGNORE, cross_entropy_sum
from foundling.model.transformer import Block, Transformer

__all__ = [
    "IGNORE",
    "Block",
    "Cache",
    "Transformer",
    "cross_entropy_sum",
    "empty_model",
    "grow_vocabulary",
    "init_weights",
]
