"""Text to tokens as the harness wants them: prompts as strings, chats among them.

The harness hands every prompt over as one string, so a rendered chat comes back as text that spells
its special tokens. Text that begins with the BOS token's text is such a chat and is read with its
special tokens; all other text is text, whatever it spells.
"""

import re
from collections.abc import Mapping, Sequence

from foundling.checkpoint import Bundle
from foundling.tokenizer import Tokenizer
from foundling.tokenizer.chat import role_and_content


class Wording:
    """One tokenizer's way with the harness's strings."""

    def __init__(self, tokenizer: Tokenizer, begins: bool) -> None:
        self.tokenizer = tokenizer
        self.begins = begins
        """Whether plain text is begun with BOS."""
        self.bos = tokenizer.names["bos"]
        ids = {tokenizer.names[role]: id for role, id in tokenizer.special_ids.items()}
        self.special_ids = {**ids, **tokenizer.extra_ids}
        """Special tokens by their text."""
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode(self, text: str, begin: bool | None = None) -> list[int]:
        """Ids of a prompt; `begin` overrides whether plain text gets a BOS."""
        if text.startswith(self.bos):
            return self._chat(text)
        ids = self.tokenizer.encode(text)
        return [self.tokenizer.bos_id, *ids] if (self.begins if begin is None else begin) else ids

    def _chat(self, text: str) -> list[int]:
        parts = self._special.split(text)
        plain = iter(self.tokenizer.encode_batch(parts[::2]))
        ids: list[int] = []
        for number, part in enumerate(parts):
            ids += [self.special_ids[part]] if number % 2 else next(plain)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """What was said, without special tokens."""
        return self.tokenizer.decode(ids, skip_special=True)

    def chat(self, messages: Sequence[Mapping[str, str]], opens: bool = True) -> str:
        """A conversation as text: the assistant's turn opened behind it, or (not `opens`) its last
        message left open to be gone on with."""
        names = self.tokenizer.names
        turns = []
        for message in messages:
            role, content = role_and_content(message)
            turns.append(names[role] + content + names["end"])
        if opens:
            turns.append(names["assistant"])
        elif turns:
            turns[-1] = turns[-1].removesuffix(names["end"])
        return self.bos + "".join(turns)


def begins_with_bos(bundle: Bundle) -> bool:
    """Whether the model expects BOS before a text: one of ours was trained so, document by
    document; of another's, its tokenizer knows."""
    return bool(bundle.meta) or bundle.tokenizer.adds_bos
