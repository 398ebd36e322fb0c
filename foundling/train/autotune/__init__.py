"""Choices made by measurement: attention, loss, MLP, compile mode."""
