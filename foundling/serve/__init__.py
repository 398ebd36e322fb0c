"""Talking to a model: the terminal chat, the server and its page."""
