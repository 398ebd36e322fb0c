"""Talking to a model: the terminal chat."""
