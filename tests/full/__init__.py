"""The full-size suite; see __main__.py."""
