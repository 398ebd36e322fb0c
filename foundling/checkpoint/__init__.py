"""Checkpoints: {name: tensor} and JSON, whole or not there; and bundles, ready to use.

What brings DCP with it is imported when it is asked for: that takes a second, and most verbs only
look.
"""
