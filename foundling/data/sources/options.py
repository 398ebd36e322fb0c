"""How files are read: which column holds the text, which rows count, what is too long."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from foundling.config.errors import ConfigError

Schema = Literal[
    "auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion", "preference"
]
SCHEMAS: tuple[Schema, ...] = (
    "auto",
    "text",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt-completion",
    "preference",
)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a user may say about rows; the defaults guess."""

    text: str = ""
    """Column of the text, or of the conversation with a schema that has one ("": guess)."""
    template: str = ""
    """Text built from columns, such as "{title}\\n\\n{body}"."""
    where: tuple[str, ...] = ()
    """Row filters, which must all hold: "score>=3", "language=en", "source!=x", "title~regex"."""
    schema: str = "auto"
    """Form of the rows: auto, text, messages, sharegpt, alpaca, prompt-completion, preference."""
    max_chars: int = 10_000_000
    """Longer rows go to quarantine."""
    normalise: Literal["none", "nfc"] = "none"
    """Unicode normal form that text is brought into."""
    stream: bool = False
    """Store nothing of a remote source; the rows are the same."""
    allow_broken_files: bool = field(default=False, repr=False)
    """Whoever reads a whole source goes on after a file that breaks off; the rows are the same, so
    it is neither in a recipe nor in what tells two pieces apart (repr)."""

    def __post_init__(self) -> None:
        if self.schema not in SCHEMAS:
            raise ConfigError(f"{self.schema!r} is no schema; use one of {', '.join(SCHEMAS)}.")
        if self.normalise not in ("none", "nfc"):
            raise ConfigError(f"normalise is {self.normalise!r}; use none or nfc.")
        if self.max_chars < 1:
            raise ConfigError(f"max_chars is {self.max_chars}; use at least 1.")
        if self.text and self.template:
            raise ConfigError("a text column and a template exclude each other; give one of them.")
        if self.template and self.schema not in ("auto", "text"):
            raise ConfigError(
                f"a template makes plain text, and the schema {self.schema} is something else;"
                " leave one out."
            )
        if self.text and self.schema in ("alpaca", "prompt-completion", "preference"):
            raise ConfigError(
                f"the schema {self.schema} has columns of its own, so a text column"
                f" ({self.text!r}) has no effect; leave one out."
            )

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults and decides the rows, for a recipe."""
        same_rows = ("stream", "allow_broken_files")
        chosen = [one for one in fields(self) if one.name not in same_rows]
        values = {one.name: (getattr(self, one.name), one.default) for one in chosen}
        return {name: value for name, (value, default) in values.items() if value != default}


DEFAULTS = ReadOptions()
"""Guess everything, keep everything."""
