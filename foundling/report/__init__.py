"""Reads run directories only and shows how a model was raised. No torch."""
