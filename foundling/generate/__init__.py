"""Tokens out of a model: key-value cache, sampling, batched engine. Used by eval, RL and serve."""

from foundling.generate.cache import KVCache
from foundling.generate.engine import Completion, Engine
from foundling.generate.sampling import Sampling, choose
from foundling.generate.text import answer_chats, continue_texts

__all__ = [
    "Completion",
    "Engine",
    "KVCache",
    "Sampling",
    "answer_chats",
    "choose",
    "continue_texts",
]
