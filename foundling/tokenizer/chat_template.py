"""Chat with a model from elsewhere: its own template says how a conversation is written.

Only the prompt is foreign. What `train` makes of conversations is always our own form, so a model
that is fine-tuned here speaks ours afterwards. The template runs in jinja's sandbox. A message that
spells one of the special tokens does not become one: its text is then encoded by itself.
"""

import json
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from foundling.config.errors import DataError
from foundling.tokenizer.chat import CHAT_TEMPLATE, Message, role_and_content
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.tokenizer.vocabulary_files import CONFIG_FILE, read_files

TEMPLATE_FILE = "chat_template.jinja"


def find_template(folder: Path) -> str | None:
    """The chat template that lies beside a tokenizer, if it is not our own."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            stated: Any = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{file} is not valid UTF-8 text.") from None
    elif (folder / CONFIG_FILE).is_file():
        try:
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{folder / CONFIG_FILE} cannot be read as JSON ({error}).") from None
        stated = config.get("chat_template") if isinstance(config, dict) else None
    else:
        return None
    if isinstance(stated, list):  # several, by name
        whole = [item for item in stated if isinstance(item, dict)]
        named = {str(item.get("name")): item.get("template") for item in whole}
        stated = named.get("default")
    return stated if isinstance(stated, str) and stated != CHAT_TEMPLATE else None


class ForeignTokenizer(Tokenizer):
    """A tokenizer whose chat prompts are written by a template of its own."""

    template = ""

    @classmethod
    def open(cls, folder: Path, stops: Collection[int] = ()) -> Tokenizer:
        """The tokenizer of a folder; a plain one where no foreign template lies there."""
        template = find_template(folder)
        if template is None:
            return Tokenizer.load(folder)
        found = cls(*read_files(folder))
        found.template = template
        found.stop_ids = found.stop_ids | frozenset(stops)
        return found

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The conversation so far and the opening of the assistant's turn."""
        turns = [role_and_content(message) for message in messages]
        if not turns:
            raise DataError("a conversation has no messages; give it at least one.")
        spelled = [content for _, content in turns if any(t in content for t in self._special)]
        if not spelled:
            return self._parsed(self._rendered(turns))
        return self._guarded(turns)

    def _guarded(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """With marks for the messages, which no token spells, and their texts put in after."""
        marks = {f"\x02{number}\x03": content for number, (_, content) in enumerate(turns)}
        text = self._rendered([(turns[n][0], mark) for n, mark in enumerate(marks)])
        ids: list[int] = []
        for mark, content in marks.items():
            before, found, text = text.partition(mark)
            ids += self._parsed(before)
            ids += self.encode(content) if found else []
        return ids + self._parsed(text)

    def _rendered(self, turns: Sequence[tuple[str, str]]) -> str:
        try:
            return str(
                self._compiled.render(
                    messages=[{"role": role, "content": content} for role, content in turns],
                    add_generation_prompt=True,
                    bos_token=self.names["bos"],
                    eos_token=self.names["eos"],
                    pad_token=self.names["pad"],
                    tools=None,
                    documents=None,
                )
            )
        except Exception as error:  # a template may raise anything, and says why
            raise DataError(
                f"the model's chat template refuses this conversation: {error}"
            ) from None

    @cached_property
    def _compiled(self) -> Any:
        try:
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise DataError("a chat template needs jinja2; install it with pip.") from None

        def refuse(message: str) -> None:
            raise TemplateError(message)

        # The switches that transformers renders with.
        house = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        house.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        house.globals["raise_exception"] = refuse
        house.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return house.from_string(self.template)
        except TemplateError as error:
            raise DataError(f"the model's chat template cannot be read: {error}.") from None

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(t.content for t in self._engine.get_added_tokens_decoder().values())

    @cached_property
    def _reader(self) -> tokenizers.Tokenizer:
        """The engine that takes special tokens in a text for what they spell."""
        engine = tokenizers.Tokenizer.from_str(self._engine.to_str())
        engine.encode_special_tokens = False
        return engine

    def _parsed(self, text: str) -> list[int]:
        try:
            return list(self._reader.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # of a library that knows no other kind
            raise DataError(f"the model's chat template makes no text: {error}.") from None
