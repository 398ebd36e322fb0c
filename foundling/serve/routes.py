"""The endpoints: OpenAI's, /tokenize, /health, /metrics, and what the page asks for.

A route turns a request into sequences for the engine and the pieces into an answer; what a client
may ask, and how much, is decided before (access.py), and what a field means, in protocol.py.
"""

import asyncio
import mimetypes
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from foundling.config.errors import UserError
from foundling.runtime.console import say
from foundling.runtime.versions import __version__
from foundling.serve.access import error_body
from foundling.serve.metrics import CONTENT_TYPE, exposition
from foundling.serve.protocol import (
    ApiError,
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    ErrorResponse,
    GradeRequest,
    ModelCard,
    ModelList,
    TextCompletion,
    TokenizeRequest,
    Tokens,
    ignored_header,
    validation_sentence,
)
from foundling.serve.sequences import (
    MOST_TEXT,
    aside,
    chat_answer,
    completion_answer,
    tokens_of,
)
from foundling.serve.served_model import ServedModel
from foundling.serve.service import Json, Service, answered

PAGE = Path(__file__).parent / "page"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse}
    for status in (400, 401, 403, 404, 405, 408, 413, 429, 431, 503)
}


def build_app(service: Service) -> FastAPI:
    """The application, with all its routes."""
    app = FastAPI(
        title="foundling", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS
    )

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat(request: ChatRequest, http: Request) -> Response:
        return await completed(request, http, chat_answer)

    @app.post("/v1/completions", response_model=TextCompletion)
    async def complete(request: CompletionRequest, http: Request) -> Response:
        prepare = partial(completion_answer, most=service.limits.sequences)
        return await completed(request, http, prepare)

    async def completed(request: Any, http: Request, prepare: Any) -> Response:
        served = service.model(request.model)
        ignored = request.ignored()
        if request.stream_options is not None and not request.stream:
            ignored.append("stream_options")
        if request.stream_options and request.stream_options.include_obfuscation is not None:
            name = "stream_options.include_obfuscation"
            if request.stream_options.include_obfuscation:
                raise ApiError(f"{name} is not supported; leave it out.", param=name)
            ignored.append(name)
        answer, wanted, opened = await prepare(served, request, ignored)
        headers = ignored_header(ignored)
        if service.logs_prompts:
            prompts = {tuple(one.request.prompt) for one in wanted}
            for prompt in prompts:
                say(f"prompt of {answer.id}: {opened.bundle.tokenizer.decode(prompt)!r}")
        stream = bool(request.stream)
        return await answered(service, http, answer, wanted, served, stream=stream, headers=headers)

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Json:
        return Json(ModelList(data=[_card(m) for m in service.models.values()]).model_dump())

    @app.get("/v1/models/{id:path}", response_model=ModelCard)
    async def model(id: str) -> Json:
        return Json(_card(service.model(id)).model_dump())

    @app.post("/tokenize", response_model=Tokens)
    async def tokenize(request: TokenizeRequest) -> Json:
        opened, ignored = service.model(request.model).now, request.ignored()
        ids = await tokens_of(opened, request, ignored)

        def told() -> dict[str, Any]:
            names = [opened.texts.name(id) for id in ids]
            return {
                "tokens": ids,
                "token_strs": names,
                "count": len(ids),
                "max_model_len": opened.context,
            }

        headers = ignored_header(ignored)
        return await aside(len(ids), lambda: Json(told(), headers=headers))

    @app.post("/detokenize", response_model=Detokenized)
    async def detokenize(request: DetokenizeRequest) -> Json:
        opened, ignored = service.model(request.model).now, request.ignored()
        tokenizer = opened.bundle.tokenizer
        if len(request.tokens) > MOST_TEXT:
            told = f"there are {len(request.tokens):,} tokens; at most {MOST_TEXT:,} are taken."
            raise ApiError(told, param="tokens")
        wrong = [id for id in request.tokens if not 0 <= id < tokenizer.vocab_size]
        if wrong:
            told = f"token {wrong[0]} is none of the tokenizer's {tokenizer.vocab_size:,}."
            raise ApiError(told, param="tokens")
        text = await asyncio.to_thread(tokenizer.decode, request.tokens)
        return Json({"prompt": text}, headers=ignored_header(ignored))

    @app.get("/health")
    async def health() -> Json:
        return Json({"status": "ok", "models": list(service.models)})

    @app.get("/metrics")
    async def metrics() -> Response:
        told = {id: (m.metrics, m.now.thread.gauges()) for id, m in service.models.items()}
        return Response(exposition(told, service.statuses), media_type=CONTENT_TYPE)

    _add_page(app, service)
    _add_errors(app)
    return app


def _card(served: ServedModel) -> ModelCard:
    return ModelCard(id=served.id, created=served.created, max_model_len=served.now.context)


def _add_page(app: FastAPI, service: Service) -> None:
    """The page's own questions, and its files, which are read once: no request names a file."""

    @app.get("/page/info")
    async def info() -> Json:
        models = [
            {
                "id": served.id,
                "can_chat": served.can_chat,
                "context": served.now.context,
                "is_hamlet": bool(served.questions),
            }
            for served in service.models.values()
        ]
        return Json({"models": models, "version": __version__})

    @app.get("/page/questions")
    async def questions(model: str) -> Json:
        return Json({"questions": [{"question": one} for one in service.model(model).questions]})

    @app.post("/page/grade")
    async def grade(request: GradeRequest) -> Json:
        question = service.model(request.model).questions.get(request.question)
        if question is None:
            told = "that is none of the questions whose truth is known here."
            raise ApiError(told, status=404, param="question")
        return Json({"correct": question.grade(request.answer), "truth": question.answer})

    for path in sorted(PAGE.rglob("*")):
        if path.is_file():
            name = path.relative_to(PAGE).as_posix()
            file = _file(name, path.read_bytes())
            app.get(f"/{name}", include_in_schema=False)(file)
            if name == "index.html":
                app.get("/", include_in_schema=False)(file)


def _file(name: str, body: bytes) -> Callable[[], Awaitable[Response]]:
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"

    async def file() -> Response:
        return Response(body, media_type=kind, headers={"cache-control": "no-cache"})

    return file


def _add_errors(app: FastAPI) -> None:
    """Everything that goes wrong, in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Json:
        kind = "server_error" if error.status >= 500 else ""
        body = error_body(str(error), param=error.param, code=error.code, kind=kind)
        return Json(body, status_code=error.status, headers=error.headers)

    @app.exception_handler(UserError)
    async def mistaken(request: Request, error: UserError) -> Json:
        return Json(error_body(str(error)), status_code=400)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Json:
        errors = list(error.errors())
        message, param = validation_sentence(errors)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if errors and errors[0]["loc"] == ("body",) and kind != "application/json":
            message = "the header does not say that the body is JSON; send content-type:"
            message += " application/json."
        return Json(error_body(message, param=param), status_code=400)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Json:
        path = f"{request.method} {request.url.path[:100]}"
        told = {
            404: f"{path} does not exist here; see docs/serve.md.",
            405: f"{path} is not how it is asked; use another method.",
            400: "the body is not valid JSON; send UTF-8 without errors.",
        }
        message = told.get(error.status_code, f"{error.detail}.")
        headers = dict(error.headers or {})
        return Json(error_body(message), status_code=error.status_code, headers=headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Json:
        traceback.print_exception(error)
        told = "the server failed on this request; its log says how."
        return Json(error_body(told, kind="server_error"), status_code=500)
