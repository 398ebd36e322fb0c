"""Tools: which models can call them, the grammar of a call, and calls read back from an answer.

A model can call tools where the chat template that it brought renders them in a form known here:
`<tool_call>{"name": ..., "arguments": ...}</tool_call>` (Hermes, Qwen) or one JSON object with
"parameters" (Llama 3). Anything else is refused with a sentence rather than rendered and never
understood. A call that has to come (`required`, or a named one) is held to its schema by a grammar.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foundling.serve.protocol import (
    ApiError,
    ChatRequest,
    FunctionCall,
    NamedTool,
    Tool,
    ToolCall,
    shown,
)
from foundling.tokenizer.chat_template import ForeignTokenizer
from foundling.tokenizer.tokenizer import Tokenizer

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords of JSON schema whose values are schemas by a name."""
DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""


@dataclass(frozen=True)
class ToolForm:
    """How a model writes a call."""

    opening: str
    """Before a call; empty where the whole answer is one."""
    closing: str
    arguments: str
    """What the arguments are called."""


HERMES = ToolForm("<tool_call>", "</tool_call>", "arguments")
LLAMA = ToolForm("", "", "parameters")


def form_of(tokenizer: Tokenizer) -> ToolForm | None:
    """The form in which this model's template writes calls; None: it knows none, or another."""
    template = tokenizer.template if isinstance(tokenizer, ForeignTokenizer) else ""
    if "tools" not in template:
        return None
    if HERMES.opening in template and HERMES.closing in template:
        return HERMES
    return LLAMA if "parameters" in template and "ipython" in template else None


@dataclass(frozen=True)
class ToolUse:
    """What a request wants of tools."""

    form: ToolForm
    tools: Sequence[Tool]
    must: bool
    """Whether a call has to come."""

    @property
    def rendered(self) -> list[dict[str, Any]]:
        """For the template."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def grammar(self) -> str:
        """Of an answer that is one call, in Lark's notation."""
        calls = []
        for number, tool in enumerate(self.tools):
            place = f"#/anyOf/{number}/properties/{self.form.arguments}"
            parameters = _moved(tool.function.parameters or {"type": "object"}, place)
            properties = {"name": {"const": tool.function.name}, self.form.arguments: parameters}
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                }
            )
        schema = json.dumps({"anyOf": calls})
        one_line = '{"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}'
        schema = f'{schema[:-1]}, "x-guidance": {one_line}}}'
        around = (f'"{self.form.opening}\\n"', f'"\\n{self.form.closing}"')
        body = f"{around[0]} call {around[1]}" if self.form.opening else "call"
        return f"start: {body}\ncall: %json {schema}\n"


def _moved(schema: Any, place: str) -> Any:
    """A schema as it reads at this place of a larger one: its references begin there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value[:2] in ("#", "#/"):
            found[key] = place + value[1:]
        elif key in NAMED:
            if not isinstance(value, dict):
                told = f"{key} of a tool's parameters is {shown(value)}; give schemas by name."
                raise ApiError(told, param="tools")
            found[key] = {name: _moved(one, place) for name, one in value.items()}
        else:
            found[key] = value if key in DATA else _moved(value, place)
    return found


def tool_use(request: ChatRequest, tokenizer: Tokenizer, ignored: list[str]) -> ToolUse | None:
    """What this request wants of tools; refused where the model cannot call any."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError("tool_choice wants a tool and there are no tools.", param="tool_choice")
        given = ("tools", "tool_choice", "parallel_tool_calls")
        ignored += [name for name in given if getattr(request, name) is not None]
        return None
    if choice == "none":
        ignored.append("tools")
        return None
    form = form_of(tokenizer)
    if form is None:
        raise ApiError(
            "this model's chat template has no tools, or writes their calls in a form that is not"
            " known here; leave tools out.",
            param="tools",
        )
    if request.parallel_tool_calls is False and choice in (None, "auto"):
        raise ApiError(
            "parallel_tool_calls false is supported with tool_choice required or a named tool;"
            " leave it out.",
            param="parallel_tool_calls",
        )
    for number, tool in enumerate(tools):
        if tool.function.strict and choice in (None, "auto"):
            name = f"tools.{number}.function.strict"
            told = f"{name} is supported with tool_choice required or a named tool; leave it out."
            raise ApiError(told, param=name)
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            told = f"tool_choice names {choice.function.name!r}, which is none of the tools."
            raise ApiError(told, param="tool_choice")
        tools = named
    return ToolUse(form, tools, must=choice not in (None, "auto"))


def template_message(message: Any) -> dict[str, Any]:
    """A message of a request as templates expect it: developers are the system, arguments a
    mapping."""
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return found


def _template_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        told = f"the arguments of the call {call.id[:60]!r} are not JSON; send them as they came."
        raise ApiError(told, param="messages") from None
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


@dataclass
class ToolReader:
    """Splits an answer, as it comes, into text and calls; blank lines around calls are neither."""

    use: ToolUse
    calls: list[ToolCall] = field(default_factory=list)
    _held: str = ""
    """What may be part of a call."""
    _blank: str = ""
    """White space that is text if more text follows."""

    def push(self, text: str) -> str:
        """The text that is certain to be none of a call."""
        self._held += text
        form, said = self.use.form, ""
        if not form.opening:
            return "" if self._held.lstrip()[:1] in ("", "{") else self._text(self._taken())
        while True:
            before, opening, rest = self._held.partition(form.opening)
            if not opening:
                kept = max(
                    (n for n in range(len(form.opening)) if before.endswith(form.opening[:n])),
                    default=0,
                )
                self._held = before[len(before) - kept :]
                return said + self._text(before[: len(before) - kept])
            said += self._text(before)
            body, closing, after = rest.partition(form.closing)
            if not closing:
                self._held = opening + rest
                return said
            if not self._read(body):
                said += self._text(opening + body + closing)
            self._held = after

    def close(self) -> str:
        """What is left at the end."""
        held, form = self._taken(), self.use.form
        if held.startswith(form.opening) and self._read(held.removeprefix(form.opening)):
            return ""
        said = self._text(held)
        return said if self.calls else said + self._blank

    def _taken(self) -> str:
        held, self._held = self._held, ""
        return held

    def _text(self, text: str) -> str:
        whole = self._blank + text
        said = whole.rstrip()
        self._blank = whole[len(said) :]
        return said

    def _read(self, body: str) -> bool:
        """Take a call, if it is one of the tools'."""
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return False
        names = {tool.function.name for tool in self.use.tools}
        if not isinstance(found, dict) or found.get("name") not in names:
            return False
        self._blank = ""
        arguments = found.get(self.use.form.arguments, {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = FunctionCall(name=found["name"], arguments=text)
        self.calls.append(ToolCall(id=f"call_{secrets.token_hex(12)}", function=function))
        return True
