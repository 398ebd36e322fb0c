"""Talking to a model: the terminal chat."""

from foundling.serve.terminal import chat

__all__ = ["chat"]
