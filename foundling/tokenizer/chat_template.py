"""Chat with a model from elsewhere: its own template says how a conversation is written.

Only the prompt is foreign. What `train` makes of conversations is always our own form, so a model
that is fine-tuned here speaks ours afterwards. The template runs in jinja's sandbox within limits
of time and size. A message that spells one of the special tokens does not become one: its text is
then encoded by itself.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
LONGEST_TEXT = 8 << 20
"""Characters that a template may make, in the end or on the way."""
RENDER_S = 2.0
"""Seconds that a template may take."""


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

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The conversation so far and the opening of the assistant's turn; with `tools` that may be
        called (OpenAI's form), where the template knows any."""
        turns = [_turn(message) for message in messages]
        if not turns:
            raise DataError("a conversation has no messages; give it at least one.")
        rest = json.dumps([tools, [{**turn, "content": ""} for turn in turns]], ensure_ascii=False)
        if found := next((token for token in self._special if token in rest), None):
            raise DataError(f"a tool or its call spells the special token {found!r}; reword it.")
        said = "\0".join(turn["content"] for turn in turns)
        if not any(token in said for token in self._special):
            return self._parsed(self._rendered(turns, tools))
        return self._guarded(turns, tools)

    def _guarded(
        self, turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """With marks for the messages, which no token spells, and their texts put in after."""
        marks = {f"\x02{number}\x03": turn["content"] for number, turn in enumerate(turns)}
        marked = [{**turn, "content": mark} for turn, mark in zip(turns, marks, strict=True)]
        text = self._rendered(marked, tools)
        ids: list[int] = []
        for mark, content in marks.items():
            before, found, text = text.partition(mark)
            ids += self._parsed(before)
            ids += self.encode(content) if found else []
        return ids + self._parsed(text)

    def _rendered(self, turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            with _no_longer_than(RENDER_S):
                text = str(
                    self._compiled.render(
                        messages=list(turns),
                        add_generation_prompt=True,
                        bos_token=self.names["bos"],
                        eos_token=self.names["eos"],
                        pad_token=self.names["pad"],
                        tools=list(tools) or None,
                        documents=None,
                    )
                )
            if len(text) > LONGEST_TEXT:
                raise ValueError(f"it makes a text of {len(text):,} characters")
        except Exception as error:  # a template may raise anything, and says why
            raise DataError(
                f"the model's chat template refuses this conversation: {error}"
            ) from None
        return text

    @cached_property
    def _compiled(self) -> Any:
        try:
            from jinja2.exceptions import TemplateError
        except ImportError:
            raise DataError("a chat template needs jinja2; install it with pip.") from None

        def refuse(message: str) -> None:
            raise TemplateError(message)

        house = _sandbox()
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


def _turn(message: Message) -> dict[str, Any]:
    """A message as templates expect it: those of tools keep what belongs to their calls."""
    if not isinstance(message, Mapping) or not (
        message.get("role") == "tool" or message.get("tool_calls")
    ):
        role, content = role_and_content(message)
        return {"role": role, "content": content}
    kept = ("role", "name", "tool_calls", "tool_call_id")
    return {
        **{key: message[key] for key in kept if message.get(key)},
        "content": str(message.get("content") or ""),
    }


def _sandbox() -> Any:
    """Jinja with the switches that transformers renders with; nothing grows without end."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Limited(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**", "%"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            small = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "**" and not (small and abs(left) < 1e6 and abs(right) <= 64):
                raise ValueError(f"{operator} of large numbers")
            sizes = [len(x) if isinstance(x, str | list | tuple) else x for x in (left, right)]
            if operator == "*" and not small and sizes[0] * sizes[1] > LONGEST_TEXT:
                raise ValueError("a text or list is repeated without end")
            if operator == "%" and isinstance(left, str) and re.search(r"\d{5}|\*", left):
                raise ValueError("a text is padded without end")
            return super().call_binop(context, operator, left, right)

    return Limited(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """TimeoutError in this thread after so long: loops within loops come to no end otherwise. A
    trace asks the clock at each line of the template; signals reach the main thread alone."""
    deadline = time.monotonic() + seconds
    before = sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Callable[..., Any]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"it takes longer than {seconds:g} seconds")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
