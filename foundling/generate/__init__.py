"""Tokens out of a model: key-value cache, sampling, batched engine. Used by eval, RL and serve."""
