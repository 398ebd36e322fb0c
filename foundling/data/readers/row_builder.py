"""From a record of a file to a Row: text or a conversation, in any of the common chat schemas."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foundling.config.errors import ConfigError
from foundling.data.readers.columns import ColumnMapping, Filter, lookup
from foundling.data.readers.source import FILTERED, REJECTED, ReadOptions, Row, shortened

# Conversations out of the common schemas: every one becomes turns of system, user and assistant.
#
# What the model is to say is the assistant's, calls of tools included; what it is told, results of
# tools included, is the user's. Of a preference pair only the chosen answer is ever read: nothing
# in this file looks at a rejected one, except to count it.

_MEANS = {
    "system": ("system", "developer"),
    "user": (
        *("user", "human", "prompter", "observation", "tool", "tool_response", "function"),
        *("function_response", "function-response", "ipython"),
    ),
    "assistant": (
        *("assistant", "gpt", "chatgpt", "model", "bot", "bing", "bard"),
        *("function_call", "function-call", "tool_call"),
    ),
}
ROLES = {name: role for role, names in _MEANS.items() for name in names}
"""What each schema calls a role, and what it is here."""
_TOLD = ("conversations", "conversation", "prompt", "question", "query", "instruction", "messages")
_LISTS = ("conversations", "conversation", "messages")
_MARKED = re.compile(r"\n\n(Human|Assistant): ?")
_LABELS = ("label", "kto_tag")

Turns = list[dict[str, Any]]
"""Each with a role and a content, and the weight 0 where it is not to be learned."""


class Unfit(Exception):  # noqa: N818 - a verdict on a row, not an error of the program
    """Why a row is no conversation, in a few words."""


def conversation(layout: ColumnMapping, row: Mapping[str, Any]) -> Turns:
    """The turns of a row, with the system's part and the tools first."""
    first, *rest = layout.columns
    if layout.schema == "preference":
        turns = _preferred(row, row.get(first))
    elif layout.schema == "alpaca":
        turns = [*_history(row), *_prompt_turns(row, first), *_answer(row.get(rest[0]), rest[0])]
    elif layout.schema == "prompt-completion":
        turns = [*_prompt_turns(row, first), *_answer(row.get(rest[0]), rest[0])]
    else:
        turns = _turns(_in_turn(_value(row, first)), first)
    return _with_system(row, turns)


def unwanted(layout: ColumnMapping, row: Mapping[str, Any]) -> bool:
    """Whether the row has an answer that must not be learnt."""
    if layout.schema == "preference":
        return row.get(layout.columns[1]) is not None
    return is_rejected(row)


def is_rejected(row: Mapping[str, Any]) -> bool:
    """Whether a label says that the answer of this row is a bad one."""
    labels = [row.get(name) for name in _LABELS]
    return any(
        label is False or (isinstance(label, str) and label.lower() == "false") for label in labels
    )


def _value(row: Mapping[str, Any], column: str) -> Any:
    value = lookup(row, column)
    # Tables without lists (CSV) hold a conversation as JSON.
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise Unfit(f"`{column}` is no list of messages") from None
    return value


def _in_turn(value: Any) -> Any:
    """A list of bare texts is what the two said in turn, the user first (as in LIMA)."""
    if not isinstance(value, list) or not value or not all(isinstance(said, str) for said in value):
        return value
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": said} for n, said in enumerate(value)]


def _turns(value: Any, column: str) -> Turns:
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise Unfit(f"`{column}` is no list of messages")
    turns = [_turn(message) for message in value]
    return [turn for turn in turns if turn["role"] != "system" or turn["content"].strip()]


def _turn(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise Unfit(f"a message is {type(message).__name__}")
    # A table has both names as soon as one row has: the one that says nothing is empty.
    name = message.get("role") or message.get("from")
    if not isinstance(name, str):
        raise Unfit("a message has no role")
    role = ROLES.get(name.lower())
    if role is None:
        raise Unfit(f"a message has the role {name[:40]!r}")
    content = message.get("content")
    content = message.get("value") if content is None else content
    calls = message.get("tool_calls") or message.get("function_call")
    text = _joined(content, role) if content or not calls else ""
    if calls:  # after what is said, as the model would write them
        text += ("\n" if text else "") + _dumped(calls)
    return {"role": role, "content": text, **_weight(message, role)}


def _weight(message: Mapping[str, Any], role: str) -> dict[str, int]:
    """The weight 0 of an assistant's message; 1 is the rule, and nothing else can be kept."""
    weight = message.get("weight")
    if role != "assistant" or weight is None or weight == 1:
        return {}
    if isinstance(weight, int | float) and weight == 0:
        return {"weight": 0}
    raise Unfit(f"a message has the weight {str(weight)[:40]}, neither 0 nor 1")


def _joined(content: Any, role: str) -> str:
    """The text of a message that may come in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise Unfit(f"a message of {role} has no text")
    found = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise Unfit(f"a message of {role} has a part that is no text")
    return "".join(texts)


def _answer(value: Any, column: str) -> Turns:
    """The assistant's part: text, one message, or messages."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if value is None:
        raise Unfit(f"no `{column}`")
    return _turns(value, column)


def _prompt_turns(row: Mapping[str, Any], column: str) -> Turns:
    """What comes before the answer: text with its input, or messages."""
    value = row.get(column)
    if column in _LISTS or not isinstance(value, str | None):
        return _turns(_value(row, column), column)
    inputs = (row.get("input"), row.get("context")) if column == "instruction" else ()
    if any(text is not None and not isinstance(text, str) for text in inputs):
        raise Unfit("`input` is no text")
    text = "\n\n".join(text for text in (value, *inputs) if text and text.strip())
    if not text:
        raise Unfit(f"no `{column}`")
    return [{"role": "user", "content": text}]


def _history(row: Mapping[str, Any]) -> Turns:
    """Earlier exchanges: pairs of what was asked and what was answered."""
    turns: Turns = []
    pairs = _value(row, "history") or []
    if not isinstance(pairs, list):
        raise Unfit("`history` is no list of pairs")
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise Unfit("`history` is no list of pairs")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": _joined(text, role)})
    return turns


def _preferred(row: Mapping[str, Any], chosen: Any) -> Turns:
    """The chosen side: a whole conversation, or an answer to what another column holds."""
    if isinstance(chosen, str) and _MARKED.match(chosen):
        return _marked(chosen)
    answer = _answer(chosen, "chosen")
    if answer and answer[0]["role"] != "assistant":
        return answer
    column = next((name for name in _TOLD if row.get(name)), None)
    if column is None:
        raise Unfit("a chosen answer, and nothing that it answers")
    before = _history(row) if column == "instruction" else []
    return [*before, *_prompt_turns(row, column), *answer]


def _marked(text: str) -> Turns:
    """Turns written into one text: Human: ... Assistant: ..."""
    parts = _MARKED.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": said.strip()}
        for name, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def _with_system(row: Mapping[str, Any], turns: Turns) -> Turns:
    """Put the columns `system` and `tools` where the model reads them: before everything else."""
    system = row.get("system") or row.get("system_prompt") or ""
    if not isinstance(system, str):
        raise Unfit("`system` is no text")
    tools = row.get("tools") or ""
    if not isinstance(tools, str):
        tools = _dumped(tools)
    own = turns[0]["content"] if turns and turns[0]["role"] == "system" else ""
    # The same instructions in a column and in the turns are one and the same.
    parts = [own if own.strip() else system]
    parts += [f"Tools:\n{tools}"] if tools.strip() not in ("", "[]") else []
    text = "\n\n".join(part for part in parts if part.strip())
    rest = turns[1:] if own else turns
    return [{"role": "system", "content": text}, *rest] if text else rest


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        raise Unfit("tools that cannot be written as JSON") from None


# From what a file holds to a Row: well-typed text or turns, or a problem with its reason.
#
# No value may raise here: one that cannot be used becomes a row with a problem, which
# quarantine notes with its place.

NOT_UTF8 = "not UTF-8"
TOO_LONG = "over the limit"
NO_TEXT = "neither text nor messages"

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class Bad(NamedTuple):
    """What stands where a row should be."""

    reason: str
    sample: str | None = None


def template_fields(template: str) -> tuple[str, ...]:
    """The columns that a template names."""
    fields: list[str] = []
    for match in _FIELD.finditer(template):
        if match[1]:
            fields.append(match[1])
        elif match[0] not in ("{{", "}}"):
            raise ConfigError(
                f"the template {template!r} is not understood at {match[0]!r}; write columns as"
                " {name} and a brace of the text twice."
            )
    if template and not fields:
        raise ConfigError(f"the template {template!r} names no column; write one as {{name}}.")
    return tuple(fields)


class RowBuilder:
    """Makes rows of one file."""

    def __init__(
        self,
        *,
        source: str,
        file: str,
        layout: ColumnMapping,
        options: ReadOptions,
        tally: Counter[str],
    ) -> None:
        self.source = source
        self.file = file
        self.layout = layout
        self.tally = tally
        self.max_chars = options.max_chars
        self.fields = template_fields(options.template)
        self.nfc = options.normalise == "nfc"
        # A shell hands over \n as two characters.
        self.template = options.template.replace("\\n", "\n").replace("\\t", "\t")

    def bad(
        self, reason: str, place: int, sample: str | None = None, lost: int | None = None
    ) -> Row:
        """A row that only quarantine will see."""
        where = f"{self.file}:{place}"
        return Row(text=sample, source=self.source, where=where, problem=reason, lost=lost)

    def text(self, text: Any, place: int) -> Row:
        """A document."""
        if not isinstance(text, str):
            if not isinstance(text, bytes):
                reason = "no text" if text is None else f"text is {type(text).__name__}"
                return self.bad(reason, place, None if text is None else shortened(text))
            try:
                text = text.decode()
            except UnicodeDecodeError:
                return self.bad(NOT_UTF8, place, text[:200].decode("utf-8", "backslashreplace"))
        if len(text) > self.max_chars:
            return self.bad(f"{TOO_LONG} of {self.max_chars} characters", place, text[:200])
        if self.nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return Row(text=text, source=self.source, where=f"{self.file}:{place}")

    def record(self, value: object, place: int, filters: tuple[Filter, ...] = ()) -> Row | None:
        """Whatever a file held in one place; None where it is left out on purpose."""
        if isinstance(value, Bad):
            return self.bad(value.reason, place, value.sample)
        if isinstance(value, dict):
            if not all(filter.accepts(value) for filter in filters):
                self.tally[FILTERED] += 1
                return None
            if self.layout.kind == "chat":
                return self._chat(value, place)
            if self.template:
                return self._filled(value, place)
            if self.layout.columns:
                return self.text(lookup(value, self.layout.columns[0]), place)
        elif isinstance(value, str) and self.layout.kind == "text" and not self.template:
            return self.text(value, place)
        return self.bad(NO_TEXT, place, shortened(value))

    def _filled(self, row: Mapping[str, Any], place: int) -> Row:
        """The template with the row's values in it."""
        missing: list[str] = []

        def put(match: re.Match[str]) -> str:
            if not match[1]:
                return match[0][0]
            value = lookup(row, match[1])
            if value is None or isinstance(value, list | dict | bytes):
                missing.append(match[1])
                return ""
            return value if isinstance(value, str) else str(value)

        text = _FIELD.sub(put, self.template)
        if missing:
            return self.bad(f"nothing to write for `{missing[0]}`", place, shortened(row))
        return self.text(text, place)

    def _chat(self, row: Mapping[str, Any], place: int) -> Row | None:
        """A conversation; only the chosen side of a pair, and nothing that a label rejects."""
        if unwanted(self.layout, row):
            self.tally[REJECTED] += 1
        if self.layout.schema != "preference" and is_rejected(row):
            return None
        try:
            turns = conversation(self.layout, row)
        except Unfit as verdict:
            return self.bad(str(verdict), place, shortened(row))
        if sum(len(turn["content"]) for turn in turns) > self.max_chars:
            return self.bad(f"{TOO_LONG} of {self.max_chars} characters", place, shortened(row))
        return Row(
            messages=self._normal(turns),
            source=self.source,
            where=f"{self.file}:{place}",
            kind="chat",
        )

    def _normal(self, turns: Turns) -> Turns:
        if self.nfc:
            for turn in turns:
                turn["content"] = unicodedata.normalize("NFC", turn["content"])
        return turns
