"""Raise a language model from nothing."""
