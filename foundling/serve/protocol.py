"""Requests and responses as pydantic models in OpenAI's shapes, and the rule on fields.

Every field of a request is one of three: it does what it says; it has no effect on the answer, or
has its default value, and is listed in the response's header `x-foundling-ignored`; or the request
is refused with 400 and the field's name. Nothing is dropped. Types are strict: "1" is no number.
Lists end at their first error and objects have few fields: of a million wrong ones pydantic would
write a million errors, and the event loop wait for them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

IGNORED_HEADER = "x-foundling-ignored"
NO_EFFECT = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
})  # fmt: skip
"""Fields of OpenAI's API that change nothing in an answer."""
NO_VALUE_IS_HARMLESS = ()
DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "prediction": NO_VALUE_IS_HARMLESS,
    "audio": NO_VALUE_IS_HARMLESS,
    "web_search_options": NO_VALUE_IS_HARMLESS,
}
"""Fields that are not supported, with the values that ask for nothing; null is one for each."""
FUNCTION_NAME = r"^[A-Za-z0-9_-]{1,64}$"
FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What is listed in a header."""
MOST_IGNORED = 64
"""Names in that header."""
MOST_LOGPROBS = 20
MOST_CHOICES = 128
MOST_MESSAGES = 8192
MOST_PARTS = 1024
"""Of a message: pieces of its content, or calls."""
MOST_TOOLS = 128
MOST_KEYS = 4096
"""Of an object whose fields are named."""

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Penalty = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class ApiError(Exception):
    """A request that is refused: a status, a sentence, and the field that it is about."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})


def _few_keys(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_KEYS:
        told = "it has {count} fields and may have {most}"
        context = {"count": len(value), "most": MOST_KEYS}
        raise PydanticCustomError("too_many_fields", told, context)
    return value


class Strict(BaseModel):
    """Part of a request, of which every field is known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    _few = model_validator(mode="before")(_few_keys)


class ForeignFields(BaseModel):
    """A request that may have fields that are not supported; `ignored` judges them."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def ignored(self, place: str = "") -> list[str]:
        """Names of fields without effect; a field that asks for something else is refused, and so
        is a name that no header could list. `place` is where this object lies in the request."""
        found = []
        for name, value in (self.model_extra or {}).items():
            if not FIELD_NAME.fullmatch(name):
                told = f"{place}{name[:64]!r} is no field's name; leave it out."
                raise ApiError(told, param=place.rstrip(".") or None)
            if not (value is None or name in NO_EFFECT or _is_default(name, value)):
                what = "is not supported" if name in DEFAULTS else "is not known"
                raise ApiError(
                    f"{place}{name} {what} (it is {shown(value)}); leave it out.",
                    param=f"{place}{name}",
                )
            found.append(name)
        return found


def _is_default(name: str, value: Any) -> bool:
    return any(type(value) is type(one) and value == one for one in DEFAULTS.get(name, ()))


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that lists fields without effect, each name once."""
    names = list(dict.fromkeys(names))
    if len(names) > MOST_IGNORED:
        told = f"{len(names):,} fields have no effect; at most {MOST_IGNORED} are taken."
        raise ApiError(told)
    return {IGNORED_HEADER: ",".join(names)} if names else {}


class StreamOptions(Strict):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(ForeignFields):
    """How tokens are picked; what both kinds of completion have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """Answers to each prompt."""
    seed: Seed | None = None
    """Same seed, same prompt, same answer; null: another each time."""
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    """0 is greedy; 1 where nothing is said."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Penalty], BeforeValidator(_few_keys)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Tokens before which the answer does not end by itself."""
    ignore_eos: bool | None = None
    """Go on to `max_tokens` whatever comes."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


Few = Field(fail_fast=True, max_length=MOST_PARTS)
Parts = Annotated[list[TextPart], Few]


class FunctionCall(Strict):
    """A function that the model called, its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(ForeignFields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    tool_calls: Annotated[list[ToolCall], Few] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionTool(Strict):
    """A function that may be called."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Strict):
    """The function that has to be called."""

    name: str


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """The form of an answer."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MOST_MESSAGES)]


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


Ids = Annotated[list[int], Field(fail_fast=True)]


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    """Begin a prompt that is text with BOS, as generation does; true where nothing is said."""


class TokenizeRequest(ForeignFields):
    """POST /tokenize: a text, or a conversation as the model would read it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(ForeignFields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids


class GradeRequest(Strict):
    """POST /page/grade: a question about the village, and what the model said."""

    model: str
    question: str
    answer: str


# Responses


class CachedTokens(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(BaseModel):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of all tokens of an answer."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatAnswer(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(BaseModel):
    """Of all tokens of a text; the first of a prompt follows nothing and has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(BaseModel):
    """The continuation of a text."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "foundling"
    max_model_len: int


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """What a text becomes."""

    tokens: list[int]
    token_strs: list[str]
    count: int
    max_model_len: int


class Detokenized(BaseModel):
    """What tokens spell."""

    prompt: str


class ErrorDetail(BaseModel):
    """Why a request is refused."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorDetail


def shown(value: Any) -> str:
    """A value in a sentence."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def validation_sentence(errors: list[Any]) -> tuple[str, str | None]:
    """The first thing that is wrong with a body, and its field."""
    if not errors:
        return "the body is not valid.", None
    # Of a union all members are told: the one that was meant came furthest.
    of_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    first = max(of_field, key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])))
    path = [str(part) for part in first["loc"] if part not in ("body", "query")]
    # Of a union pydantic also tells which member it tried: a type, which is no field.
    names = [p[:64] for p in path if p.isdecimal() or (p.isidentifier() and p == p.lower())]
    names = [name for name in names if name not in ("str", "int", "float", "bool")]
    param = ".".join(names) or None
    message = str(first["msg"]).rstrip(".")
    if first["type"] in ("json_invalid", "json_type"):
        return f"the body is not valid JSON ({message}).", None
    if first["type"] == "extra_forbidden":
        return f"{param} is not known; leave it out.", param
    if first["type"] == "missing":
        return f"{param or 'the body'} is missing; give it.", param
    if param is None:
        return f"the body is not valid: {message}; send a JSON object.", None
    return f"{param} is not valid: {message[:1].lower()}{message[1:]}.", param
