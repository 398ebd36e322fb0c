"""The form of a conversation: the special tokens, the template, and what a message is.

    <|bos|><|system|>text<|end|><|user|>text<|end|><|assistant|>text<|end|>...

Every turn is opened by its role and closed by <|end|>, and both are single tokens that no text can
spell, so a user's message cannot open a turn of its own. Rejected: markers in plain text ("User:"),
which text can forge and a tokenizer merges with what follows; and <|eos|> as the end of a turn,
which leaves a model unable to tell "my turn is over" from "the document is over".

Rendering is defined twice on purpose: ids and mask by Tokenizer.render (tokenizer.py), and as text
by CHAT_TEMPLATE here, for readers of the Hugging Face layout. A test holds the two equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from foundling.config.errors import DataError

SPECIALS: Mapping[str, str] = {
    "bos": "<|bos|>",
    "eos": "<|eos|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "system": "<|system|>",
    "end": "<|end|>",
    "pad": "<|pad|>",
}
"""What each special token is for, and its text; ids are given in this order."""

ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Jinja, as tokenizer_config.json carries it."""


class HasRole(Protocol):
    """Anything with a role and a content, such as Hamlet's messages."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


Message = Mapping[str, Any] | HasRole
"""A role and a content; an assistant's message whose `weight` is 0 is read and not learned."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens; `mask` is True on what the assistant must produce."""

    ids: list[int]
    mask: list[bool]


def is_learned(message: Message) -> bool:
    """Whether the model is to say it: an assistant's message, unless its weight is 0."""
    if isinstance(message, Mapping):
        return message.get("role") == "assistant" and message.get("weight") != 0
    return message.role == "assistant" and getattr(message, "weight", None) != 0


def role_and_content(message: Message) -> tuple[str, str]:
    """Take a message apart, whatever carries it."""
    if isinstance(message, Mapping):
        role, content = message.get("role"), message.get("content")
    else:
        role, content = getattr(message, "role", None), getattr(message, "content", None)
    if role not in ROLES:
        raise DataError(f"a message has the role {role!r}; use one of {', '.join(ROLES)}.")
    if not isinstance(content, str):
        raise DataError(f"a message of {role!r} has the content {content!r}; it must be text.")
    return role, content
