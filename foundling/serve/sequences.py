"""From a request to sequences for the engine: prompt, sampling, form of the answer, room for it.

What a request asks for and cannot have is refused here, before anything is generated.
"""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from foundling.config.errors import ConfigError
from foundling.generate.detokenize import check_stops
from foundling.generate.grammar import Grammar, Kind, compile_grammar
from foundling.generate.request import Request as EngineRequest
from foundling.generate.sampling import Sampling, derived_seed
from foundling.serve.answers import Answer, Choice
from foundling.serve.engine_thread import Wanted
from foundling.serve.protocol import (
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    SamplingFields,
    TokenizeRequest,
)
from foundling.serve.served_model import Opened, ServedModel
from foundling.serve.tool_calls import (
    ToolReader,
    ToolUse,
    template_message,
    tool_use,
)
from foundling.tokenizer.chat_template import ForeignTokenizer
from foundling.tokenizer.tokenizer import Tokenizer

COMPLETION_TOKENS = 16
"""Of a completion that does not say how many, as OpenAI's."""
DEFAULT_TEMPERATURE = 1.0
QUICK_TEXT = 20_000
"""Characters that are encoded on the event loop; more are on a thread."""
MOST_TEXT = 1 << 18
"""Characters that /tokenize takes, and tokens that /detokenize does."""
MOST_STOP_TEXT = 4000
"""Characters of all stop strings: each is looked for at every token."""

Found = TypeVar("Found")


async def aside(size: int, work: Callable[[], Found]) -> Found:
    """Work on so many characters: on a thread where it would hold the event loop up."""
    return await asyncio.to_thread(work) if size > QUICK_TEXT else work()


def _check_size(opened: Opened, size: int, what: str, param: str) -> None:
    """Refuse text that cannot fit, before it is encoded."""
    widest = max(1, int(opened.bundle.tokenizer.token_widths.max()))
    if size > opened.context * widest:
        raise ApiError(
            f"the {what} has {size:,} characters, which are more than {opened.context:,}"
            " tokens, the model's context; shorten it.",
            param=param,
            code="context_length_exceeded",
        )


async def _prompts(opened: Opened, request: CompletionRequest) -> list[tuple[list[int], str]]:
    """Ids of each prompt, and its text where it is echoed."""
    given, tokenizer = request.prompt, opened.bundle.tokenizer
    bos = [] if request.add_special_tokens is False else [tokenizer.bos_id]
    listed: list[Any] = [given] if isinstance(given, str) else list(given)
    if not listed:
        raise ApiError("the prompt is empty; give a text or tokens.", param="prompt")
    if isinstance(listed[0], int):
        listed = [listed]
    rows = opened.bundle.model.config.vocab_size
    for prompt in listed:
        if isinstance(prompt, str):
            _check_size(opened, len(prompt), "prompt", "prompt")
            continue
        _room(opened, prompt, None, None)
        if wrong := next((id for id in prompt if not 0 <= id < rows), None):
            raise ApiError(f"token {wrong} is none of the model's {rows:,}.", param="prompt")

    def found() -> list[tuple[list[int], str]]:
        return [
            ([*bos, *tokenizer.encode(prompt)], prompt)
            if isinstance(prompt, str)
            else (prompt, tokenizer.decode(prompt, skip_special=True) if request.echo else "")
            for prompt in listed
        ]

    return await aside(sum(map(len, listed)), found)


async def _conversation(
    opened: Opened, messages: Sequence[ChatMessage], use: ToolUse | None = None
) -> list[int]:
    if not messages:
        raise ApiError("messages is empty; give at least one.", param="messages")
    tokenizer: Any = opened.bundle.tokenizer
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    size = sum(len(message.text) for message in messages) + len(messages)
    size += sum(len(call.name) + len(call.arguments) for call in calls)
    size += len(json.dumps(use.rendered)) if use else 0
    _check_size(opened, size, "conversation", "messages")
    if len(messages) > opened.context:
        raise ApiError(
            f"there are {len(messages):,} messages, and the model's context is {opened.context:,}"
            " tokens; leave out the oldest.",
            param="messages",
            code="context_length_exceeded",
        )

    def rendered() -> list[int]:
        turns = [template_message(message) for message in messages]
        ids: list[int] = tokenizer.prompt(turns, *([use.rendered] if use else ()))
        return ids

    # A template from elsewhere may take its time.
    return await aside(
        QUICK_TEXT + 1 if isinstance(tokenizer, ForeignTokenizer) else size, rendered
    )


def _ignored_of(messages: Sequence[ChatMessage]) -> list[str]:
    """Fields of messages without effect; those that belong to another role are refused."""
    found = []
    for at, message in enumerate(messages):
        found += [f"messages.{name}" for name in message.ignored(f"messages.{at}.")]
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(message, name) is not None and message.role != role:
                name = f"messages.{at}.{name}"
                raise ApiError(f"{name} belongs to the role {role!r}; leave it out.", param=name)
    return found


async def tokens_of(opened: Opened, request: TokenizeRequest, ignored: list[str]) -> list[int]:
    """What /tokenize is asked for."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("give a prompt or messages, one of the two.", param="prompt")
    if request.messages is not None:
        ignored += _ignored_of(request.messages)
        if request.add_special_tokens is not None:
            ignored.append("add_special_tokens")
        return await _conversation(opened, request.messages)
    text, tokenizer = request.prompt or "", opened.bundle.tokenizer
    if len(text) > MOST_TEXT:
        told = f"the prompt has {len(text):,} characters; at most {MOST_TEXT:,} are taken at once."
        raise ApiError(told, param="prompt")
    bos = [] if request.add_special_tokens is False else [tokenizer.bos_id]
    return [*bos, *await aside(len(text), lambda: tokenizer.encode(text))]


def _sampling(request: SamplingFields, vocabulary: int, ignored: list[str]) -> Sampling:
    """How tokens are picked; the filters have no effect where the likeliest is always taken."""
    temperature = DEFAULT_TEMPERATURE if request.temperature is None else request.temperature
    filters = {"top_k": request.top_k, "top_p": request.top_p, "min_p": request.min_p}
    if temperature == 0:
        unused = {**filters, "seed": request.seed}
        ignored += [name for name, value in unused.items() if value is not None]
        filters = {}
    penalties = {
        name: getattr(request, name)
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
    }
    bias = {}
    for token, value in (request.logit_bias or {}).items():
        if not token.isdecimal() or not int(token[:12]) < vocabulary or len(token) > 12:
            raise ApiError(
                f"logit_bias names {token[:60]!r}, which is no token of the model's"
                f" {vocabulary:,}.",
                param="logit_bias",
            )
        bias[int(token)] = value
    seed = random.getrandbits(63) if request.seed is None else request.seed
    given = {name: v for name, v in {**filters, **penalties}.items() if v is not None}
    return Sampling(temperature=temperature, seed=seed, logit_bias=bias, **given)


def _stops(request: SamplingFields) -> tuple[str, ...]:
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    try:
        check_stops(stops)
    except ConfigError as error:
        raise ApiError(str(error), param="stop") from None
    if (size := sum(map(len, stops))) > MOST_STOP_TEXT:
        told = f"the stop strings have {size:,} characters; at most {MOST_STOP_TEXT:,} are taken."
        raise ApiError(told, param="stop")
    return stops


async def _grammar(
    opened: Opened, form: ResponseFormat | None, use: ToolUse | None
) -> Grammar | None:
    """What the answer has to look like, compiled on a thread."""
    tokenizer = opened.bundle.tokenizer
    if form is not None and form.json_schema is not None and form.type != "json_schema":
        told = f"response_format is {form.type} and has a json_schema; give one of the two."
        raise ApiError(told, param="response_format.json_schema")
    if use is not None and use.must:
        if form is not None and form.type != "text":
            told = "a tool has to be called, so the answer cannot have another form."
            raise ApiError(told, param="response_format")
        try:
            lark = use.grammar
        except RecursionError:
            raise ApiError("the tools' parameters are nested too deep.", param="tools") from None
        return await _compiled(tokenizer, "lark", lark, "tools")
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return await _compiled(tokenizer, "json", "", "response_format")
    if form.json_schema is None or form.json_schema.schema_ is None:
        told = "response_format is json_schema and has no schema; give json_schema.schema."
        raise ApiError(told, param="response_format")
    try:
        schema = json.dumps(form.json_schema.schema_)
    except (ValueError, RecursionError):
        raise ApiError("the schema cannot be read.", param="response_format") from None
    return await _compiled(tokenizer, "json_schema", schema, "response_format")


async def _compiled(tokenizer: Tokenizer, kind: Kind, text: str, param: str) -> Grammar:
    try:
        return await asyncio.to_thread(compile_grammar, tokenizer, kind, text)
    except ConfigError as error:
        told = str(error).replace("the lark", "the tools' schema")
        wrong = "one of its patterns is no regular expression, or one that looks around."
        raise ApiError(told.replace("regex parse error:.", wrong), param=param) from None


def _room(opened: Opened, prompt: Sequence[int], asked: int | None, default: int | None) -> int:
    """New tokens: as asked for, or by default what fits."""
    room = opened.context - len(prompt)
    if room < 1 or (asked is not None and asked > room):
        wants = f" and {asked:,} new ones are asked for" if asked is not None else ""
        raise ApiError(
            f"the prompt has {len(prompt):,} tokens{wants}; the model's context is"
            f" {opened.context:,}, prompt and answer together.",
            code="context_length_exceeded",
        )
    return asked if asked is not None else min(room, default or room)


def _wanted(
    request: SamplingFields,
    opened: Opened,
    prompts: Sequence[tuple[Sequence[int], int]],
    sampling: Sampling,
    **more: Any,
) -> list[Wanted]:
    """A sequence for each answer to each prompt (ids, new tokens), with randomness of its own."""
    stop_ids = frozenset() if request.ignore_eos else opened.bundle.tokenizer.stop_ids
    found, stops = list[Wanted](), _stops(request)
    for ids, tokens in prompts:
        for _ in range(request.n or 1):
            found.append(
                Wanted(
                    EngineRequest(
                        prompt=ids,
                        max_tokens=tokens,
                        sampling=replace(sampling, seed=derived_seed(sampling.seed, len(found))),
                        stop_ids=stop_ids,
                        min_tokens=request.min_tokens or 0,
                        **more,
                    ),
                    stops,
                )
            )
    return found


async def chat_answer(
    served: ServedModel, request: ChatRequest, ignored: list[str]
) -> tuple[Answer, list[Wanted], Opened]:
    """What a chat request asks of the engine, and what its answer will be made of."""
    opened = served.now
    if not served.can_chat:
        raise ApiError(
            f"{served.id} was never taught to answer: it continues texts. Ask /v1/completions.",
            param="model",
            code="model_cannot_chat",
        )
    ignored += _ignored_of(request.messages)
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs true; give both.", param="top_logprobs")
    both = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(both) > 1:
        told = "max_tokens and max_completion_tokens differ; give one."
        raise ApiError(told, param="max_tokens")
    asked = next(iter(both), None)
    if asked == 0:
        raise ApiError("max_tokens is 0 and must be above zero.", param="max_tokens")
    use = tool_use(request, opened.bundle.tokenizer, ignored)
    ids = await _conversation(opened, request.messages, use)
    vocabulary = opened.bundle.model.config.vocab_size
    sampling = _sampling(request, vocabulary, ignored)
    top = (request.top_logprobs or 0) if request.logprobs else None
    grammar = await _grammar(opened, request.response_format, use)
    tokens = _room(opened, ids, asked, None)
    wanted = _wanted(request, opened, [(ids, tokens)], sampling, logprobs=top, grammar=grammar)
    choices = [
        Choice(index, one.request.prompt, reader=ToolReader(use) if use else None)
        for index, one in enumerate(wanted)
    ]
    answer = Answer(
        model=served.id,
        texts=opened.texts,
        choices=choices,
        is_chat=True,
        top=top,
        include_usage=request.include_usage,
    )
    return answer, wanted, opened


async def completion_answer(
    served: ServedModel, request: CompletionRequest, ignored: list[str], *, most: int
) -> tuple[Answer, list[Wanted], Opened]:
    """The same for a completion, of so many prompts at most."""
    opened, given = served.now, request.prompt
    if isinstance(given, list) and len(given) > most and not isinstance(given[0], int):
        told = f"there are {len(given):,} prompts; at most {most:,} are taken."
        raise ApiError(told, param="prompt")
    prompts = await _prompts(opened, request)
    sampling = _sampling(request, opened.bundle.model.config.vocab_size, ignored)
    asked = request.max_tokens
    if asked == 0 and not request.echo:
        told = "max_tokens is 0, which is good for echo alone; ask for more, or for echo."
        raise ApiError(told, param="max_tokens")
    rooms = [
        # The prompt alone is scored by asking for one token, which is not given out.
        (ids, _room(opened, ids, asked or (None if asked is None else 1), COMPLETION_TOKENS))
        for ids, _ in prompts
    ]
    top = request.logprobs
    of_prompt = top if request.echo else None
    wanted = _wanted(
        request, opened, rooms, sampling, logprobs=top, prompt_logprobs=of_prompt, grammar=None
    )
    each = request.n or 1
    choices = [
        Choice(index, one.request.prompt, prompts[index // each][1] if request.echo else "")
        for index, one in enumerate(wanted)
    ]
    answer = Answer(
        model=served.id,
        texts=opened.texts,
        choices=choices,
        is_chat=False,
        top=top,
        prompts=len(prompts),
        echo=bool(request.echo),
        writes=asked != 0,
        include_usage=request.include_usage,
    )
    return answer, wanted, opened
