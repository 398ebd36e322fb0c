"""Requests and responses as pydantic models in OpenAI's shapes, and the rule on fields.

Every field of a request is one of three: it does what it says; it has no effect on the answer, or
has its default value, and is listed in the response's header `x-foundling-ignored`; or the request
is refused with 400 and the field's name. Nothing is dropped. Types are strict: "1" is no number.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

IGNORED_HEADER = "x-foundling-ignored"
NO_EFFECT = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
})  # fmt: skip
"""Fields of OpenAI's API that change nothing in an answer."""
DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
}
"""Fields that are not supported, with the values that ask for nothing; null is one for each."""
FUNCTION_NAME = r"^[A-Za-z0-9_-]{1,64}$"
MOST_LOGPROBS = 20
MOST_CHOICES = 128

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


class Strict(BaseModel):
    """Part of a request, of which every field is known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ForeignFields(BaseModel):
    """A request that may have fields that are not supported; `ignored` judges them."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def ignored(self) -> list[str]:
        """Names of fields without effect; a field that asks for something else is refused."""
        found = []
        for name, value in (self.model_extra or {}).items():
            harmless = value is None or name in NO_EFFECT or value in DEFAULTS.get(name, ())
            if not harmless:
                told = shown(value)
                what = "is not supported" if name in DEFAULTS else "is not known"
                raise ApiError(
                    f"{name[:100]} {what} (it is {told}); leave it out.", param=name[:100]
                )
            found.append(name)
        return found


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
    stop: str | list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    """0 is greedy; 1 where nothing is said."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Penalty] | None = None
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
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
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


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    """Begin a prompt that is text with BOS, as generation does; true where nothing is said."""


class TokenizeRequest(ForeignFields):
    """POST /tokenize: a text, or a conversation as the model would read it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(ForeignFields):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


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
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    # Of a union pydantic also tells which member it tried: a type, which is no field.
    names = [p for p in path if p.isdecimal() or (p.isidentifier() and p == p.lower())]
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
