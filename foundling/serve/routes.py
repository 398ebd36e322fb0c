"""The endpoints: OpenAI's, /tokenize, /health, /metrics, and what the page asks for.

A route turns a request into sequences for the engine and the pieces into an answer; what a client
may ask, and how much, is decided before (access.py), and what a field means, in protocol.py.
"""

import asyncio
import mimetypes
import traceback
from collections.abc import Sequence
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
    IGNORED_HEADER,
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
    validation_sentence,
)
from foundling.serve.sequences import DEFAULT_TEMPERATURE, chat_answer, completion_answer
from foundling.serve.served_model import ServedModel
from foundling.serve.service import Json, Service, answered
from foundling.serve.tool_calls import template_message

PAGE = Path(__file__).parent / "page"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 405, 408, 413, 429, 503)
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
        return await completed(request, http, completion_answer)

    async def completed(request: Any, http: Request, prepare: Any) -> Response:
        served = service.model(request.model)
        ignored = request.ignored()
        if request.stream_options is not None and not request.stream:
            ignored.append("stream_options")
        answer, wanted, opened = await prepare(service.limits, served, request, ignored)
        if service.logs_prompts:
            prompts = {tuple(one.request.prompt) for one in wanted}
            for prompt in prompts:
                say(f"prompt of {answer.id}: {opened.bundle.tokenizer.decode(prompt)!r}")
        stream = bool(request.stream)
        return await answered(service, http, answer, wanted, opened, stream=stream, ignored=ignored)

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Json:
        return Json(ModelList(data=[_card(m) for m in service.models.values()]).model_dump())

    @app.get("/v1/models/{id:path}", response_model=ModelCard)
    async def model(id: str) -> Json:
        return Json(_card(service.model(id)).model_dump())

    @app.post("/tokenize", response_model=Tokens)
    async def tokenize(request: TokenizeRequest) -> Json:
        opened, ignored = service.model(request.model).now, request.ignored()
        if (request.prompt is None) == (request.messages is None):
            raise ApiError("give a prompt or messages, one of the two.", param="prompt")
        tokenizer = opened.bundle.tokenizer
        if request.messages is not None:
            for message in request.messages:
                ignored += [f"messages.{name}" for name in message.ignored()]
            if request.add_special_tokens is not None:
                ignored.append("add_special_tokens")
            turns = [template_message(message) for message in request.messages]
            ids = await asyncio.to_thread(tokenizer.prompt, turns)
        else:
            assert request.prompt is not None
            bos = [] if request.add_special_tokens is False else [tokenizer.bos_id]
            ids = [*bos, *await asyncio.to_thread(tokenizer.encode, request.prompt)]
        told = Tokens(
            tokens=ids,
            token_strs=[opened.texts.name(id) for id in ids],
            count=len(ids),
            max_model_len=opened.context,
        )
        return Json(told.model_dump(), headers=_listed(ignored))

    @app.post("/detokenize", response_model=Detokenized)
    async def detokenize(request: DetokenizeRequest) -> Json:
        opened, ignored = service.model(request.model).now, request.ignored()
        tokenizer = opened.bundle.tokenizer
        wrong = [id for id in request.tokens if not 0 <= id < tokenizer.vocab_size]
        if wrong:
            told = f"token {wrong[0]} is none of the tokenizer's {tokenizer.vocab_size:,}."
            raise ApiError(told, param="tokens")
        text = await asyncio.to_thread(tokenizer.decode, request.tokens)
        return Json({"prompt": text}, headers=_listed(ignored))

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


def _listed(ignored: Sequence[str]) -> dict[str, str]:
    return {IGNORED_HEADER: ",".join(ignored)} if ignored else {}


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
                "vocabulary": served.now.bundle.model.config.vocab_size,
                "step": served.now.bundle.step,
                "temperature": DEFAULT_TEMPERATURE,
            }
            for served in service.models.values()
        ]
        return Json({"models": models, "version": __version__})

    @app.get("/page/questions")
    async def questions(model: str) -> Json:
        asked = service.model(model).questions
        listed = [
            {"question": question, "accepts": [one.value or one.answer]}
            for question, one in asked.items()
        ]
        return Json({"questions": listed})

    @app.post("/page/grade")
    async def grade(request: GradeRequest) -> Json:
        question = service.model(request.model).questions.get(request.question)
        if question is None:
            told = "that is none of the questions whose truth is known here."
            raise ApiError(told, status=404, param="question")
        return Json({"correct": question.grade(request.answer), "truth": question.answer})

    files = {
        path.relative_to(PAGE).as_posix(): path.read_bytes()
        for path in sorted(PAGE.rglob("*"))
        if path.is_file()
    }

    @app.get("/{name:path}", include_in_schema=False)
    async def page(name: str) -> Response:
        name = name or "index.html"
        if name not in files:
            raise HTTPException(404)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(files[name], media_type=kind, headers={"cache-control": "no-cache"})


def _add_errors(app: FastAPI) -> None:
    """Everything that goes wrong, in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Json:
        body = error_body(str(error), param=error.param, code=error.code)
        return Json(body, status_code=error.status, headers=error.headers)

    @app.exception_handler(UserError)
    async def mistaken(request: Request, error: UserError) -> Json:
        return Json(error_body(str(error)), status_code=400)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Json:
        message, param = validation_sentence(list(error.errors()))
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
