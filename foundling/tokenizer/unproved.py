"""Why a tokenizer cannot be encoded the fast way."""


class UnprovedError(Exception):
    """Equality with tokenizer.json could not be shown; the text completes "tokenizers, because"."""
